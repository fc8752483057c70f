"""A model's chat template: prompts, answers and what stands between two answers, as token ids.

All text that the policy reads becomes tokens here: the prompts of rows, first and later
observations, the requests of agents (openai_server.py) and the chats of `sft`.

    encode_prompt        messages and tools -> the ids before the first response
    encode_continuation  messages of the environment -> the ids between two responses
    encode_answer        a message of the assistant -> the ids that a policy would have sampled

Sampled tokens are never rendered again. A continuation is therefore rendered after another, short
conversation, and is what the template writes after that conversation's answer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import env
from env import TEMPLATE_HINT
from gym_client import GymError
from kit.data.processor import TextProcessor
from kit.rollout import harmony, thoughts
from kit.rollout.control_tokens import encode_marked_text, find_control_tokens, mark_tokens

SYSTEM = "a system message"  # the parts of a conversation that a template may lack
TOOLS = "tools"
CALLS = "a call in an earlier message"
OUTPUTS = "outputs of tools"
PARALLEL = "outputs of two calls in one response"
TURNS = "a user message after a response"
QUESTION = "A question."
ANSWER = "quintetanswer"  # a text that no template changes; its end is the end of the answer
ARGUMENT = {"text": ANSWER}
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, by template

Message = dict[str, Any]  # of OpenAI's chat format


class RenderError(ValueError):
    """A chat template that does not render these messages. The message says why."""


class Forms(NamedTuple):
    """How a template takes a message of the assistant."""

    text_as_parts: bool  # content as a list of parts instead of text
    arguments_as_text: bool  # of a tool call: JSON text instead of an object
    thought_key: str  # the key of its reasoning; "": in the content, in think tags


@dataclass
class ChatTemplate:
    """The chat template of a model, with the arguments of the recipe."""

    processor: TextProcessor  # of kit.data.processor, or the one of a model that reads images
    stop_ids: set[int]  # ids that end a response
    arguments: Mapping[str, Any] = field(default_factory=dict)  # data.apply_chat_template_kwargs
    failures: Mapping[str, str] = field(default_factory=dict)  # of template_trial: {part: why}

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.processor.tokenizer

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens of the template and their ids."""
        return find_control_tokens(self.tokenizer)

    @functools.cached_property
    def markers(self) -> thoughts.Markers:
        """The texts around a thought."""
        return thoughts.find_markers(self.tokenizer)

    @functools.cached_property
    def is_harmony(self) -> bool:
        """Whether responses have the format of gpt-oss."""
        return harmony.is_harmony(self.tokenizer)

    def split_thought(self, prompt_ids: Sequence[int], ids: list[int]) -> thoughts.SplitResponse:
        """Split a response, without its stop token, after its thought."""
        is_open = thoughts.opens_thought(
            self.tokenizer, prompt_ids, self.markers, self.control_tokens
        )
        return thoughts.split_thought(self.tokenizer, ids, self.markers, is_open)

    # --- rendering ---

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation to text. Raises RenderError."""
        adapted = [self.adapt(message) for message in messages]
        return self.apply(adapted, tools, add_generation_prompt)

    def apply(
        self, messages: Sequence[Message], tools: Sequence[Message], add_generation_prompt: bool
    ) -> str:
        """Render messages in the template's own form. Raises RenderError."""
        try:
            text = self.tokenizer.apply_chat_template(
                self.processor.template_messages(list(messages)),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.arguments,
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise RenderError(str(error) or repr(error)) from error
        return str(text)

    @functools.cached_property
    def forms(self) -> Forms:
        """Find how the template takes text, arguments of calls and reasoning."""
        if self.takes_text_as_parts():
            return Forms(True, arguments_as_text=False, thought_key="")
        key = next((key for key in THOUGHT_KEYS if self.shows_thought(key)), "")
        return Forms(False, self.takes_arguments_as_text(), key)

    def takes_text_as_parts(self) -> bool:
        """Return whether text reaches the model only as a part of a list, as in vision models."""
        is_shown = []
        for content in (ANSWER, [{"type": "text", "text": ANSWER}]):
            try:
                text = self.apply([{"role": "user", "content": content}], (), False)
            except RenderError:
                text = ""
            is_shown.append(ANSWER in text)
        return is_shown == [False, True]

    def shows_thought(self, key: str) -> bool:
        """Return whether the template shows this key of the last answer, with or without a call."""
        answer = {"role": "assistant", "content": QUESTION, key: ANSWER}
        calls = [make_call("a", {})]
        for message in (answer, {**answer, "content": "", "tool_calls": calls}):
            with contextlib.suppress(RenderError):
                if ANSWER in self.apply(
                    [{"role": "user", "content": QUESTION}, message], (), False
                ):
                    return True
        return False

    def takes_arguments_as_text(self) -> bool:
        """Return whether only arguments as JSON text are rendered as JSON."""
        return not self.shows_arguments(ARGUMENT) and self.shows_arguments(json.dumps(ARGUMENT))

    def shows_arguments(self, arguments: Any) -> bool:
        """Return whether the template renders a call with these arguments, unchanged."""
        answer = {"role": "assistant", "content": "", "tool_calls": [make_call("a", arguments)]}
        try:
            text = self.apply([{"role": "user", "content": QUESTION}, answer], (), False)
        except RenderError:
            return False
        is_python = f"'{ANSWER}'" in text  # a dict as Python prints it
        is_encoded_twice = f'\\"{ANSWER}\\"' in text
        return ANSWER in text and not is_python and not is_encoded_twice

    def adapt(self, message: Message) -> Message:
        """Return a message in the form that the template takes."""
        if self.forms.text_as_parts and isinstance(message.get("content"), str):
            return {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("role") != "assistant":
            return message
        adapted = dict(message)
        thought = adapted.pop("reasoning_content", None)
        if thought and self.forms.thought_key:
            adapted[self.forms.thought_key] = thought
        elif thought:
            adapted["content"] = f"<think>{thought}</think>{adapted.get('content') or ''}"
        if adapted.get("tool_calls") and self.forms.arguments_as_text:
            adapted["tool_calls"] = [with_text_arguments(call) for call in adapted["tool_calls"]]
        return adapted

    # --- prompts ---

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), row_id: str = ""
    ) -> list[int]:
        """Encode the messages and tools of a prompt.

        Control tokens in outputs of tools stay text. In other messages they are encoded as control
        tokens, since the author of the row is trusted. Raises env.DataError, GymError('template').
        """
        is_needed = {
            SYSTEM: any(message["role"] == "system" for message in messages),
            TOOLS: bool(tools),
            CALLS: any(message.get("tool_calls") for message in messages),
        }
        for part in self.failures:
            if is_needed.get(part):
                place = f"{row_id}: " if row_id else ""
                raise env.DataError(f"{place}{self.describe_failure(part)}")
        mark = uuid.uuid4().hex
        outputs = [message for message in messages if message["role"] == "tool"]
        marked = mark_tokens(outputs, self.control_tokens, mark) if outputs else []
        if marked != outputs:
            remaining = iter(marked)
            messages = [next(remaining) if m["role"] == "tool" else m for m in messages]
            return self.encode_marked(messages, tools, mark, row_id)
        adapted = [self.adapt(message) for message in messages]
        return env.encode_messages(
            adapted, tools, self.tokenizer, row_id, self.processor, self.arguments
        )

    def encode_first_prompt(
        self, messages: Sequence[Message], observation: str, tools: Sequence[Message], row_id: str
    ) -> list[int]:
        """Encode a row's messages, then the environment's first observation as a user message.

        Control tokens in the observation stay text. In the row's messages they are encoded as
        control tokens, since the author of the row is trusted. Raises env.DataError,
        GymError('template').
        """
        mark = uuid.uuid4().hex
        marked = mark_tokens(observation, self.control_tokens, mark)
        messages = [*messages, {"role": "user", "content": marked}]
        if marked == observation:
            return self.encode_prompt(messages, tools, row_id)
        return self.encode_marked(messages, tools, mark, row_id)

    def encode_marked(
        self, messages: Sequence[Message], tools: Sequence[Message], mark: str, row_id: str
    ) -> list[int]:
        """Encode a prompt some of whose texts have `mark` in control tokens."""
        if self.processor.reads_images:
            problem = f"{row_id}: text of the environment contains control tokens"
            raise GymError("template", f"{problem}. Models that read images do not support it.")
        try:
            text = self.render(messages, tools, add_generation_prompt=True)
        except RenderError as error:
            problem = f"the chat template does not take what the environment returned: {error}"
            raise GymError("template", problem) from error
        return encode_marked_text(text, self.control_tokens, mark, self.tokenizer)

    def describe_failure(self, part: str) -> str:
        """Describe a part that the template lacks, with what to set."""
        return (
            f"the chat template fails for {part}: {self.failures[part]}. To use it, "
            f"{TEMPLATE_HINT}."
        )

    # --- between two answers ---

    def encode_continuation(
        self, messages: Sequence[Message], last_id: int, is_trusted: bool = False
    ) -> list[int]:
        """Encode `messages` to the ids that stand between two responses of the policy.

        These ids follow the last token of the first response. They have the rest of its turn, such
        as a line feed, then `messages`, then the opening of the next response's turn.
        messages: of the environment, with role tool or user. Control tokens in them stay text, so
        that no server can write a turn of another role, unless `is_trusted` is set. last_id: the
        last token of the first response. Raises GymError('template').
        """
        placeholders = set(self.processor.placeholder_ids())
        tokens = {text: i for text, i in self.control_tokens.items() if i not in placeholders}
        mark = uuid.uuid4().hex
        marked = list(messages) if is_trusted else mark_tokens(list(messages), tokens, mark)
        try:
            text = self.render_continuation(marked, last_id)
        except RenderError as error:
            problem = f"the chat template does not take what the environment returned: {error}"
            raise GymError("template", f"{problem}. To use it, {TEMPLATE_HINT}.") from error
        # Some tokenizers drop or add a space after a token, so the last one is encoded, too.
        last = self.tokenizer.convert_ids_to_tokens(last_id) if last_id in self.stop_ids else ""
        ids = encode_marked_text(last + text, tokens, mark, self.tokenizer)
        if last and ids[0] == last_id:
            ids = ids[1:]
        elif last:
            ids = encode_marked_text(text, tokens, mark, self.tokenizer)
        if placeholders & set(ids):
            problem = "the environment's text contains a token that stands for an image"
            raise GymError("template", f"{problem}. Remove it from the server's answer.")
        return ids

    def render_continuation(self, messages: Sequence[Message], last_id: int) -> str:
        """Return what the template writes between an answer that ends with `last_id` and the next.

        The template renders a short conversation without and with `messages`. Both texts have the
        conversation's answer, and then the end of its turn. Raises RenderError.
        """
        return self.continue_conversation(self.make_conversation(messages), messages, last_id)

    def continue_conversation(
        self, conversation: Sequence[Message], messages: Sequence[Message], last_id: int
    ) -> str:
        """Return what the template writes for `messages` after a conversation.

        conversation: its last message has the first and only ANSWER. Raises RenderError.
        """
        closed = text_after(self.render(conversation), ANSWER)
        after = self.render([*conversation, *messages], add_generation_prompt=True)
        rest = text_after(after, ANSWER)
        ending = self.cut_before_stop(closed)
        if not rest.startswith(ending):
            raise RenderError("it changes the answer before them")
        return self.drop_turn_end(rest[len(ending) :], last_id)

    def make_conversation(self, messages: Sequence[Message]) -> list[Message]:
        """Make a short conversation that `messages` can follow. It has the calls they answer."""
        calls = []
        for message in messages:
            if message["role"] == "tool":
                function: Message = {"name": message.get("name", ""), "arguments": {}}
                call = {"id": message["tool_call_id"], "type": "function", "function": function}
                calls.append(call)
        question = {"role": "user", "content": QUESTION}
        if not calls:
            return [question, {"role": "assistant", "content": ANSWER}]
        shown = self.count_shown_calls(len(calls))
        if not shown:
            return [question, {"role": "assistant", "content": ANSWER, "tool_calls": calls}]
        calls[-1]["function"]["arguments"] = ARGUMENT
        return [question, {"role": "assistant", "content": "", "tool_calls": calls[-shown:]}]

    def count_shown_calls(self, count: int) -> int:
        """Count how many of `count` calls in one message the template shows: all, one or none."""
        if count > 1 and self.shows_two_calls:
            return count
        return int(self.shows_one_call)

    @functools.cached_property
    def shows_one_call(self) -> bool:
        """Whether the template shows a call in a message of the assistant."""
        return self.shows_calls(1)

    @functools.cached_property
    def shows_two_calls(self) -> bool:
        """Whether the template shows two calls in one message of the assistant."""
        return self.shows_calls(2)

    def shows_calls(self, count: int) -> bool:
        """Return whether the template shows each of `count` calls in one message."""
        marks = [f"{ANSWER}{letter}" for letter in "ab"[:count]]
        calls = [make_call(mark[-1], {"text": mark}) for mark in marks]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text = self.render([{"role": "user", "content": QUESTION}, answer])
        except RenderError:
            return False
        return all(mark in text for mark in marks)

    def cut_before_stop(self, text: str) -> str:
        """Return the text before its first stop token. Without one, before an output's opening."""
        place = self.find_stop(text)
        if place.start < len(text):
            return text[: place.start]
        for token in self.output_openings:
            if text.endswith(token):
                return text.removesuffix(token)
        return text

    @functools.cached_property
    def output_openings(self) -> list[str]:
        """The control tokens between two outputs that end no message: they open an output."""
        outputs = [make_output(letter, f"{ANSWER}{letter}") for letter in "ab"]
        try:
            conversation = self.make_conversation(outputs)
            text = text_after(self.render([*conversation, *outputs]), f"{ANSWER}a")
        except RenderError:
            return []
        between = text.partition(f"{ANSWER}b")[0]
        return [t for t in self.control_tokens if t in between and t not in self.message_ends]

    def find_stop(self, text: str) -> Place:
        """Find the first stop token in a text; its end if there is none."""
        places = []
        for stop in self.stop_texts:
            start = text.find(stop)
            if start >= 0:
                places.append(Place(start, start + len(stop)))
        return min(places, default=Place(len(text), len(text)))

    @functools.cached_property
    def stop_texts(self) -> list[str]:
        """The texts of the stop tokens."""
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
        return [text for text in texts if text]

    def drop_turn_end(self, text: str, last_id: int) -> str:
        """Drop the token at the start of `text` that a sampled stop token stands for.

        A template may end a turn with another token than the one that was sampled: with another
        stop token, or as in gpt-oss with one that only ends turns of the past. Some templates end
        no turn. The policy then samples the token that opens the next one.
        """
        if last_id not in self.stop_ids:
            return text
        last = self.tokenizer.convert_ids_to_tokens(last_id)
        for token in (last, *self.message_ends):
            if token and text.startswith(token):
                return text[len(token) :]
        return text

    @functools.cached_property
    def message_ends(self) -> list[str]:
        """The control tokens that the template writes directly after a message."""
        text = self.render([{"role": "user", "content": ANSWER}])
        rest = text_after(text, ANSWER).lstrip()
        tokens = sorted(self.control_tokens, key=len, reverse=True)
        return [token for token in tokens if rest.startswith(token)][:1]

    # --- answers ---

    def encode_answer(self, answer: Message, previous_role: str = "user") -> list[int]:
        """Encode a message of the assistant as the ids that a policy would have sampled.

        They end with a stop token, if the template has one. previous_role: user or tool, of the
        message before. The answer is rendered after a short conversation, so that it is the same
        after any other. Raises RenderError.
        """
        before: list[Message] = [{"role": "user", "content": QUESTION}]
        if previous_role == "tool":
            call = {"role": "assistant", "content": "", "tool_calls": [make_call("q", ARGUMENT)]}
            before += [call, make_output("q", QUESTION)]
        opened = self.render(before, add_generation_prompt=True)
        text = self.cut_opening(self.render([*before, answer]), opened)
        stop = self.find_last_stop(text)
        text = text[: stop.end] if stop.end else text + self.find_opening_stop(answer)
        # Some tokenizers add a space to the first word of a text, so more text is encoded.
        opening = self.cut_to_last_token(opened)
        opening_ids = self.tokenizer.encode(opening, add_special_tokens=False)
        ids: list[int] = self.tokenizer.encode(opening + text, add_special_tokens=False)
        if ids[: len(opening_ids)] == opening_ids:
            return ids[len(opening_ids) :]
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def cut_to_last_token(self, text: str) -> str:
        """Return the text from its last control token on, or "" if it has none."""
        starts = [text.rfind(token) for token in self.control_tokens]
        start = max(starts, default=-1)
        return text[start:] if start >= 0 else ""

    def cut_opening(self, closed: str, opened: str) -> str:
        """Return what a conversation adds to its generation prompt. Raises RenderError.

        The generation prompt may have a thought that the template does not write for past answers:
        an opened one, followed by other white space, or an empty one.
        """
        start, end = self.markers
        base, has_thought, thought = opened.rpartition(start)
        is_open = has_thought and not thought.strip()
        is_empty = has_thought and thought.strip() == end
        if closed.startswith(opened):
            return closed[len(opened) :]
        if is_open and closed.startswith(base + start):
            return closed[len(base + start) :]
        if is_empty and closed.startswith(base):
            return closed[len(base) :]
        raise RenderError("it changes the text before an answer")

    def find_last_stop(self, text: str) -> Place:
        """Find the last stop token in a text, or Place(0, 0)."""
        places = []
        for stop in self.stop_texts:
            start = text.rfind(stop)
            if start >= 0:
                places.append(Place(start, start + len(stop)))
        return max(places, default=Place(0, 0))

    def find_opening_stop(self, answer: Message) -> str:
        """Find the stop token that opens the next turn, for templates that end no turn, or ""."""
        messages: list[Message] = [{"role": "user", "content": QUESTION}]
        if answer.get("tool_calls"):
            messages = [make_output("a", QUESTION)]
        no_stop = -1
        rest = self.render_continuation(messages, no_stop)
        return next((stop for stop in self.stop_texts if rest.startswith(stop)), "")


def make_call(letter: str, arguments: Any) -> Message:
    """Make a call of `look_up`, whose id is nine times this letter."""
    function = {"name": "look_up", "arguments": arguments}
    return {"id": letter * 9, "type": "function", "function": function}


def make_output(letter: str, text: str) -> Message:
    """Make the output of a call of `look_up`, whose id is nine times this letter."""
    return {"role": "tool", "tool_call_id": letter * 9, "name": "look_up", "content": text}


def with_text_arguments(call: Message) -> Message:
    """Return a tool call with its arguments as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


class Place(NamedTuple):
    """The place of a token in a text."""

    start: int
    end: int


def text_after(text: str, part: str) -> str:
    """Return the text after the first occurrence of `part`. Raises RenderError."""
    _, separator, rest = text.partition(part)
    if not separator:
        raise RenderError("it does not show the answer of the assistant")
    return rest
