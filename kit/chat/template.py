"""A model's chat template: prompts, answers and what stands between two answers, as token ids.

All text that the policy reads becomes tokens here: the prompts of rows, first and later
observations, the requests of agents (kit/engine/endpoint) and the chats of `sft`.

    encode_prompt        messages and tools -> the ids before the first response
    encode_continuation  messages of the environment -> the ids between two responses
    encode_answer        a message of the assistant -> the ids that a policy would have sampled

Sampled tokens are never rendered again. A continuation is therefore rendered after another, short
conversation, and is what the template writes after that conversation's answer.

Protects: sampled tokens, which stay as they are, and turns, which no text of others can open.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import env
from env import TEMPLATE_HINT, Json, TaskImage
from gym_client import GymError
from kit.chat import harmony, thoughts
from kit.chat.control_tokens import encode_marked_text, find_control_tokens, mark_tokens
from kit.chat.processor import TextProcessor
from kit.chat.tool_calls import AUTO_FORMAT
from kit.errors import find_first_difference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "a system message"  # the parts of a conversation that a template may lack
LATER_SYSTEM = "a second system message"
TOOLS = "tools"
CALLS = "a call in an earlier message"
OUTPUTS = "outputs of tools"
PARALLEL = "outputs of two calls in one response"
TURNS = "a user message after a response"
MIN_HEADER = 4  # characters; a shorter one may be a word of a question
QUESTION = "A question."
THOUGHT = "quintetthought"
ANSWER = "quintetanswer"  # a text that no template changes; its end is the end of the answer
TAIL = 4096  # tokens at the end of a prompt, in which a thought may be open
ARGUMENT = {"text": ANSWER}

# Names of OpenAI's chat format, none of which is a thought.
CHAT_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "text"}

Message = Json  # of OpenAI's chat format

ASKED: Message = {"role": "user", "content": QUESTION}
ANSWERED: Message = {"role": "assistant", "content": ANSWER}
TOOL: Message = {  # an example
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The text."}},
            "required": ["text"],
        },
    },
}


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

    processor: TextProcessor  # of kit.chat.processor, or the one of a model that reads images
    stop_ids: set[int]  # ids that end a response
    arguments: Mapping[str, object] = field(default_factory=dict)  # data.apply_chat_template_kwargs
    # how the model writes tool calls: a tool parser of vLLM, or of verl; auto: the first that fits
    tool_format: str = AUTO_FORMAT
    failures: Mapping[str, str] = field(default_factory=dict)  # of template_trial: {part: why}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self.processor.tokenizer

    @functools.cached_property
    def control_tokens(self) -> dict[str, int]:
        """Find the control tokens of the template and their ids."""
        return find_control_tokens(self.tokenizer)

    @functools.cached_property
    def own_markers(self) -> thoughts.Markers | None:
        """Find the texts around a thought, as the template shows them."""
        return find_markers(self)

    @property
    def markers(self) -> thoughts.Markers:
        """Return the texts around a thought.

        If the template shows none, a prompt may ask for think tags, which Gym's converter reads.
        """
        return self.own_markers or thoughts.THINK

    @functools.cached_property
    def is_harmony(self) -> bool:
        """Return whether responses have the format of gpt-oss."""
        return harmony.is_harmony(self.tokenizer)

    def split_thought(self, prompt_ids: Sequence[int], ids: list[int]) -> thoughts.SplitResponse:
        """Split a response, without its stop token, after its thought."""
        is_open = self.leaves_thought_open(prompt_ids)
        return thoughts.split_thought(self.tokenizer, ids, self.markers, is_open)

    def leaves_thought_open(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the beginning of the response in a prompt has a thought without its end.

        The template wrote it, or the row, as the beginning of an answer. Markers before the last
        other control token, or before the header of the response, are not in the response. If there
        is neither, the response begins at the end of the prompt.
        """
        start, end = self.markers
        others = {i for text, i in self.control_tokens.items() if text not in start + end}
        tail = list(prompt_ids[-TAIL:])
        last = (index for index in reversed(range(len(tail))) if tail[index] in others)
        first = next(last, -1) + 1
        text = str(self.tokenizer.decode(tail[first:], skip_special_tokens=False))
        header = self.response_header
        _, found, rest = text.rpartition(header) if header else ("", "", text)
        _, _, rest = rest.rpartition(end)
        has_border = bool(found) or first > 0
        is_open = start in rest if has_border else rest.rstrip().endswith(start)
        return bool(start) and is_open

    @functools.cached_property
    def response_header(self) -> str:
        """Find the text between a question and its response, without a thought."""
        header = render_prompt(self).rpartition(QUESTION)[2]
        start = self.markers.start
        return (header.partition(start)[0] if start else header).strip()

    def write_response(self, prompt_ids: Sequence[int], text: str) -> str:
        """Return a text as a policy writes it after a prompt, which may leave a thought open."""
        start, end = self.markers
        if not self.leaves_thought_open(prompt_ids):
            return text
        return text.removeprefix(start) if text.startswith(start) else f"{end}\n\n{text}"

    # --- arguments of a row or a request ---

    def with_arguments(self, arguments: Mapping[str, object], row_id: str) -> ChatTemplate:
        """Return the template with further arguments. Raises env.DataError.

        It shares what the trials of the template have found.
        """
        if not arguments:
            return self
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in {"messages", *parameters} & arguments.keys() - {"documents"}:
            raise env.DataError(
                f"{row_id}: {name} is no argument of a chat template. Remove it from "
                f"{env.TEMPLATE_ARGUMENTS}."
            )
        template = copy.copy(self)
        template.arguments = {**self.arguments, **arguments}
        return template

    def list_unused(self, arguments: Mapping[str, object]) -> set[str]:
        """List the arguments that the template does not read."""
        source = str(self.tokenizer.chat_template)
        return {f"{env.TEMPLATE_ARGUMENTS}.{name}" for name in arguments if name not in source}

    # --- rendering ---

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), **options: bool
    ) -> str:
        """Render a conversation to text. options: of transformers. Raises RenderError."""
        return self.apply([self.adapt(message) for message in messages], tools, **options)

    def apply(self, messages: Sequence[Message], tools: Sequence[Message], **options: bool) -> str:
        """Render messages in the template's own form. Raises RenderError."""
        tokenizer: Any = self.tokenizer  # the types of its method allow only messages with texts
        try:
            text = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                **options,
                **self.arguments,
            )
        except Exception as error:  # a template is a program, and may raise anything
            raise RenderError(str(error) or repr(error)) from error
        return str(text)

    @functools.cached_property
    def forms(self) -> Forms:
        """Find how the template takes text, arguments of calls and reasoning."""
        parts = make_message("user", ANSWER, as_parts=True)
        text = make_message("user", ANSWER, as_parts=False)
        # next to images, some templates drop plain text
        is_needed = self.shows(parts) and not self.shows(text)
        text_as_parts = self.processor.reads_images or is_needed
        question = make_message("user", QUESTION, text_as_parts)
        key = next((key for key in env.THOUGHT_KEYS if self.shows_thought(question, key)), "")
        as_object = self.shows_arguments(question, ARGUMENT)
        as_text = self.shows_arguments(question, json.dumps(ARGUMENT))
        return Forms(text_as_parts, as_text and not as_object, key)

    def shows(self, *messages: Message) -> bool:
        """Return whether a conversation in the template's own form shows the answer."""
        return ANSWER in self.try_apply(messages)

    def try_apply(self, messages: Sequence[Message], **options: bool) -> str:
        """Render messages in the template's own form; to "" if it does not take them."""
        try:
            return self.apply(messages, (), **options)
        except RenderError:
            return ""

    def shows_thought(self, question: Message, key: str) -> bool:
        """Return whether the template shows this key of the last answer, with or without a call."""
        answer = {**question, "role": "assistant", key: ANSWER}
        call = {**answer, "tool_calls": [make_call("a", {})]}
        return self.shows(question, answer) or self.shows(question, call)

    def shows_arguments(self, question: Message, arguments: str | Json) -> bool:
        """Return whether the template renders a call with these arguments, unchanged."""
        calls = [make_call("a", arguments)]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self.try_apply([question, answer])
        is_python = f"'{ANSWER}'" in text  # a dict as Python prints it
        is_encoded_twice = f'\\"{ANSWER}\\"' in text
        return ANSWER in text and not is_python and not is_encoded_twice

    def adapt(self, message: Message) -> Message:
        """Return a message in the form that the template takes."""
        adapted = dict(message)
        thought = adapted.pop("reasoning_content", None)
        if thought and self.forms.thought_key:
            adapted[self.forms.thought_key] = thought
        elif thought:
            start, end = self.markers
            adapted["content"] = f"{start}{thought}{end}{adapted.get('content') or ''}"
        if adapted.get("tool_calls") and self.forms.arguments_as_text:
            adapted["tool_calls"] = [with_text_arguments(call) for call in adapted["tool_calls"]]
        if self.forms.text_as_parts and isinstance(adapted.get("content"), str):
            adapted["content"] = [{"type": "text", "text": adapted["content"]}]
        return adapted

    # --- prompts ---

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        row_id: str = "",
        observation: str | None = None,
        images: Sequence[TaskImage] = (),
    ) -> list[int]:
        """Encode the messages and tools of a prompt.

        A last message of the assistant is the beginning of the response. Control tokens in texts
        stay text (`mark_texts`). observation: the environment's first one, which follows as a user
        message. images: of the messages, by `TextProcessor.read_images`. Raises env.DataError,
        GymError('template').
        """
        if not self.processor.reads_images and env.list_images(messages, row_id):
            raise env.UnsupportedRowError(
                f"{row_id}: input_image: the model reads no images. Remove it."
            )
        mark = uuid.uuid4().hex
        observed = [{"role": "user", "content": observation}] if observation else []
        plain = [*messages, *observed]
        given = [*messages, *mark_messages(observed, self.control_tokens, mark, ["user"])]
        self.check_prompt(given, tools, row_id)
        marked = self.mark_texts(given, mark)
        if marked != plain:
            ids = self.encode_marked(marked, tools, mark)
        else:
            adapted = [self.adapt(message) for message in plain]
            ids = env.encode_messages(adapted, tools, self.tokenizer, row_id, self.arguments)
        return self.processor.expand(ids, images, row_id)

    def check_prompt(
        self, messages: Sequence[Message], tools: Sequence[Message], row_id: str
    ) -> None:
        """Check that the template has all parts of a prompt. Raises env.DataError."""
        if len(messages) == 1 and self.is_rendered(messages[0]["content"]):
            raise env.DataError(
                f"{row_id}: the prompt is already in the form of a chat template, which would be "
                "applied again. Write it as messages, each with a role and a content."
            )
        for part in list_parts(messages, has_tools=bool(tools)):
            if part in self.failures:
                place = f"{row_id}: " if row_id else ""
                raise env.DataError(f"{place}{self.describe_failure(part)}")

    def is_rendered(self, text: object) -> bool:
        """Return whether the text of a prompt is itself the rendering of a conversation."""
        if not isinstance(text, str):
            return False
        header = self.response_header
        has_header = len(header) >= MIN_HEADER and header in text
        return has_header or text.lstrip().startswith(tuple(self.special_tokens))

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Find the control tokens that no text of a row means: special ones, no thought markers.

        Other control tokens, such as <think>, are also words of a question.
        """
        added = self.tokenizer.added_tokens_decoder
        placeholders = self.processor.placeholder_ids()
        tokens = self.control_tokens.items()
        special = {text: i for text, i in tokens if added[i].special and i not in placeholders}
        return {t: i for t, i in special.items() if len(t) > 1 and t not in self.markers}

    def mark_texts(self, messages: Sequence[Message], mark: str) -> list[Message]:
        """Return messages with `mark` in the control tokens of their texts.

        The policy may have caused an output of a tool, so this holds for all control tokens in it.
        """
        marked = mark_messages(messages, self.control_tokens, mark, ["tool"])
        return mark_messages(marked, self.special_tokens, mark, ["user", "system"])

    def encode_marked(
        self, messages: Sequence[Message], tools: Sequence[Message], mark: str
    ) -> list[int]:
        """Encode a prompt some of whose texts have `mark` in control tokens."""
        try:
            text = self.render(messages, tools, **env.choose_end(messages))
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
        that no server can write a turn of another role. If `is_trusted` is set, they are a row's
        messages (`mark_texts`). last_id: the last token of the first response. Raises
        GymError('template').
        """
        for part in list_parts(messages, follows_answer=True):
            if part in self.failures:
                raise GymError("template", self.describe_failure(part))
        placeholders = set(self.processor.placeholder_ids())
        tokens = {text: i for text, i in self.control_tokens.items() if i not in placeholders}
        mark = uuid.uuid4().hex
        marked = mark_messages(messages, tokens, mark, ["tool", "user", "system"])
        if is_trusted:
            marked = self.mark_texts(messages, mark)
        try:
            text = self.continue_conversation(self.make_conversation(marked), marked, last_id)
        except RenderError as error:
            problem = f"the chat template does not take what the environment returned: {error}"
            raise GymError("template", f"{problem}. To use it, {TEMPLATE_HINT}.") from error
        last = ""
        if last_id in self.stop_ids:
            last = str(self.tokenizer.convert_ids_to_tokens(last_id) or "")
        encode = functools.partial(
            encode_marked_text, tokens=tokens, mark=mark, tokenizer=self.tokenizer
        )
        ids = encode_after(last, text, encode)
        if placeholders & set(ids):
            problem = "the environment's text contains a token that stands for an image"
            raise GymError("template", f"{problem}. Remove it from the server's answer.")
        return ids

    def continue_conversation(
        self, conversation: Sequence[Message], messages: Sequence[Message], last_id: int | None
    ) -> str:
        """Return what the template writes for `messages` between two answers.

        The template renders the conversation without and with `messages`. Both texts have its
        answer, and then the end of its turn. conversation: its last message has the first and only
        ANSWER. last_id: None, or the last token of that answer. Raises RenderError.
        """
        tools = self.turn_tools if conversation[-1].get("tool_calls") else []
        closed = text_after(self.render(conversation, tools), ANSWER)
        after = self.render([*conversation, *messages], tools, add_generation_prompt=True)
        rest = text_after(after, ANSWER)
        ending = self.cut_turn_end(closed)
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
        if not calls:
            return [ASKED, ANSWERED]
        shown = len(calls) if self.max_calls > 1 else self.max_calls
        if not shown:
            return [ASKED, {**ANSWERED, "tool_calls": calls}]
        calls[-1]["function"]["arguments"] = ARGUMENT
        return [ASKED, {"role": "assistant", "content": "", "tool_calls": calls[-shown:]}]

    @functools.cached_property
    def max_calls(self) -> int:
        """Find how many calls in one message the template shows: none, one, or 2 for any number."""
        for letters in ("ab", "a"):
            marks = [f"{ANSWER}{letter}" for letter in letters]
            calls = [make_call(mark[-1], {"text": mark}) for mark in marks]
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                text = self.render([ASKED, answer], self.turn_tools)
            except RenderError:
                continue
            if all(mark in text for mark in marks):
                return len(calls)
        return 0

    @functools.cached_property
    def turn_tools(self) -> list[Message]:
        """Find the tools with which calls and outputs are rendered, if that needs any.

        Some models have another template for prompts with tools. Tools that would be written again
        after an answer are left out.
        """
        answer = {**ANSWERED, "tool_calls": [make_call("a", ARGUMENT)]}
        messages = [ASKED, answer, make_output("a", QUESTION)]
        texts = []
        for tools in ([], [TOOL]):
            try:
                texts.append(text_after(self.render(messages, tools), ANSWER))
            except RenderError:
                texts.append("")
        description = TOOL["function"]["description"]
        is_needed = texts[0] != texts[1] and texts[1] and description not in texts[1]
        return [TOOL] if is_needed else []

    def cut_turn_end(self, text: str) -> str:
        """Return what a policy samples of `text`, the template's end of an answer and its turn.

        The turn ends with a stop token, or only white space follows the answer.
        """
        stop = self.find_stop(text)
        return text.partition(stop)[0] if stop else text.rstrip()

    def find_stop(self, text: str) -> str:
        """Find the first stop token in a text; "" if there is none."""
        return min((stop for stop in self.stop_texts if stop in text), key=text.find, default="")

    @functools.cached_property
    def stop_texts(self) -> list[str]:
        """Return the texts of the stop tokens."""
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_ids))
        return [text for text in texts if text]

    def drop_turn_end(self, text: str, last_id: int | None) -> str:
        """Drop the template's end of a turn if the policy has sampled one, `last_id`.

        A template may end a turn with another token than the one that was sampled: with another
        stop token, or as in gpt-oss with one that only ends turns of the past. Some templates end
        no turn. The policy then samples the token that opens the next one.
        """
        if last_id is None or last_id not in self.stop_ids:
            return text
        last = str(self.tokenizer.convert_ids_to_tokens(last_id) or "")
        for token in (last, *self.message_ends):
            if token and text.startswith(token):
                return text[len(token) :]
        return text

    @functools.cached_property
    def message_ends(self) -> list[str]:
        """Find the control token that the template writes directly after a message, if any."""
        text = self.render([{"role": "user", "content": ANSWER}])
        rest = text_after(text, ANSWER).lstrip()
        tokens = sorted(self.control_tokens, key=len, reverse=True)
        return [token for token in tokens if rest.startswith(token)][:1]

    # --- answers ---

    def encode_answer(self, answer: Message, previous_role: str = "user") -> list[int]:
        """Encode a message of the assistant as the ids that a policy would have sampled.

        They end with a stop token. previous_role: user or tool, of the message before. The answer
        is rendered after a short conversation, so that it is the same after any other. Raises
        RenderError, also if a part of the answer is not in the template's text.
        """
        calls = answer.get("tool_calls")
        if calls and CALLS in self.failures:
            raise RenderError(self.failures[CALLS])
        before = [ASKED]
        if previous_role == "tool":
            call = {"role": "assistant", "content": "", "tool_calls": [make_call("q", ARGUMENT)]}
            before += [call, make_output("q", QUESTION)]
        tools = self.turn_tools if calls else []
        opened = self.render(before, tools, add_generation_prompt=True)
        text = self.cut_opening(self.render([*before, answer], tools), opened)
        check_is_shown(answer, text)
        example = make_output("a", QUESTION) if calls else ASKED
        turn_end = self.find_turn_end(example)
        if not text.endswith(turn_end):
            raise RenderError("it ends the turn of an answer in another way")
        text = text.removesuffix(turn_end) + self.find_sampled_stop(turn_end, example)
        return encode_after(opened, text, self.encode_text)

    def encode_text(self, text: str) -> list[int]:
        """Encode a text that has control tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def find_turn_end(self, following: Message) -> str:
        """Find what the template writes after an answer that a message like `following` follows."""
        conversation = self.make_conversation([following])
        tools = self.turn_tools if conversation[-1].get("tool_calls") else []
        closed = text_after(self.render(conversation, tools), ANSWER)
        return closed[len(self.cut_turn_end(closed)) :]

    def find_sampled_stop(self, turn_end: str, following: Message) -> str:
        """Find the stop token that a policy samples at the end of a turn.

        A template that ends no turn writes it at the beginning of the next one, or not at all.
        """
        stop = self.find_stop(turn_end)
        if stop:
            return stop
        rest = self.continue_conversation(self.make_conversation([following]), [following], None)
        opening = next((stop for stop in self.stop_texts if rest.startswith(stop)), "")
        return opening or str(self.tokenizer.eos_token or "")

    def cut_opening(self, closed: str, opened: str) -> str:
        """Return what a conversation adds to its generation prompt. Raises RenderError.

        The generation prompt may have a thought that the template does not write for past answers:
        an opened one, followed by other white space, or an empty one. An answer then begins with
        the end of the opened thought, also if the template does not write that.
        """
        start, end = self.markers
        base, has_thought, thought = opened.rpartition(start) if start else ("", "", opened)
        is_open = has_thought and not thought.strip()
        is_empty = has_thought and thought.strip() == end
        openings = [opened]
        if is_open:
            openings += [base + start, base]
        elif is_empty:
            openings.append(base)
        opening = next((text for text in openings if closed.startswith(text)), None)
        if opening is None:
            raise RenderError("it changes the text before an answer")
        rest = closed[len(opening) :]
        is_closed = end in self.cut_turn_end(rest)
        return f"{end}\n\n{rest.lstrip()}" if is_open and not is_closed else rest


def list_parts(
    messages: Sequence[Message], has_tools: bool = False, follows_answer: bool = False
) -> list[str]:
    """List the parts of a conversation that these messages need the template to have.

    follows_answer: whether an answer of the policy comes before them.
    """
    parts = [TOOLS] if has_tools else []
    previous = "assistant" if follows_answer else ""
    for message in messages:
        role = message["role"]
        if role == "system":
            parts.append(LATER_SYSTEM if previous else SYSTEM)
        elif role == "tool":
            parts += [OUTPUTS, PARALLEL] if previous == "tool" else [OUTPUTS]
        elif role == "user" and previous == "assistant":
            parts.append(TURNS)
        elif message.get("tool_calls"):
            parts.append(CALLS)
        previous = role
    return parts


def mark_messages(
    messages: Sequence[Message], tokens: Mapping[str, int], mark: str, roles: Collection[str]
) -> list[Message]:
    """Return messages with `mark` in the control tokens of those with one of `roles`."""
    marked = []
    for message in messages:
        is_marked = message["role"] in roles
        marked.append(mark_tokens(message, tokens, mark) if is_marked else message)
    return marked


def check_is_shown(answer: Message, text: str) -> None:
    """Check that a text has the content, the thought and the calls of an answer.

    Raises RenderError.
    """
    for key in ("content", "reasoning_content"):
        value = answer.get(key)
        if isinstance(value, str) and value.strip() not in text:
            raise RenderError(f"it does not show the {key} of the answer")
    names = [call["function"]["name"] for call in answer.get("tool_calls") or []]
    for name in names:
        if text.count(name) < names.count(name):
            raise RenderError(f"it does not show each call of {name}")


def encode_after(prefix: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Encode `text` as it stands after `prefix`.

    Some tokenizers add a space to the first word of a text, or drop one after a control token.
    """
    prefix_ids = encode(prefix) if prefix else []
    ids = encode(prefix + text)
    if ids[: len(prefix_ids)] == prefix_ids:
        return ids[len(prefix_ids) :]
    return encode(text)


def make_message(role: str, text: str, as_parts: bool) -> Message:
    """Make a message whose content is a text, or a list with it as its only part."""
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}


def make_call(letter: str, arguments: str | Json) -> Message:
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


def text_after(text: str, part: str) -> str:
    """Return the text after the first occurrence of `part`. Raises RenderError."""
    _, separator, rest = text.partition(part)
    if not separator:
        raise RenderError("it does not show the answer of the assistant")
    return rest


# --- the markers of a thought --------------------------------------------------------------------


def find_markers(template: ChatTemplate) -> thoughts.Markers | None:
    """Find the markers around a thought by rendering, or None if the template shows none.

    It writes the thought of an answer between them. Or it drops the text of a past answer before a
    text of its source, which is then the end marker. Or its generation prompt has more than the
    header of an answer, which is then the start marker.
    """
    return find_shown(template) or find_dropped(template) or find_opened(template)


def render_answer(template: ChatTemplate, form: Json | None = None, **fields: object) -> str:
    """Render a question and an answer, and if the template requires it, another question.

    form: fields of the answer in the template's own form.
    """
    question = template.adapt(ASKED)
    answer = template.adapt({**ANSWERED, **fields}) | (form or {})
    conversation = [question, answer]
    return template.try_apply(conversation) or template.try_apply([*conversation, question])


def render_prompt(template: ChatTemplate) -> str:
    """Render the question and the generation prompt."""
    return template.try_apply([template.adapt(ASKED)], add_generation_prompt=True)


def list_thought_forms(template: ChatTemplate) -> Iterator[Json]:
    """List the forms in which a message may have a thought: by the names in the template."""
    source = str(template.tokenizer.chat_template)
    names = dict.fromkeys([*env.THOUGHT_KEYS, *re.findall(r"""[.'"](\w+)""", source)])
    keys = [name for name in names if name not in CHAT_FIELDS]
    yield from ({key: THOUGHT} for key in keys)
    answer = {"type": "text", "text": ANSWER}
    yield from ({"content": [{"type": key, key: THOUGHT}, answer]} for key in keys)
    thought = {"type": "thoughts", "text": THOUGHT}
    yield {"content": {"blocks": [thought, answer | {"type": "response"}]}}  # of Apertus


def find_shown(template: ChatTemplate) -> thoughts.Markers | None:
    """Find the markers between which the template writes a thought."""
    call = {"content": "", "tool_calls": [make_call("a", ARGUMENT)]}
    header = render_answer(template).partition(ANSWER)[0]
    for form in list_thought_forms(template):
        before, _, after = render_answer(template, form).partition(THOUGHT)
        before_call, _, after_call = render_answer(template, form, **call).partition(THOUGHT)
        end, is_answer, _ = after.partition(ANSWER)
        if is_answer:  # an opening of the answer, which no call has, is no part of the marker
            shared = share_start(after, after_call or after)
            end = end if shared.startswith(end) else re.sub(r"[<|\[({]+\w*$", "", shared)
        else:
            before = before_call
            after = after_call.lstrip()
            end = next((each for each in template.control_tokens if after.startswith(each)), "")
        is_printed = before.endswith(("'", '"'))  # the message itself, as JSON or by Python
        start = find_start(template, before, end.strip(), header)
        if start and end.strip() and not is_printed:
            return thoughts.Markers(start, end.strip())
    return None


def find_start(template: ChatTemplate, before: str, end: str, header: str) -> str:
    """Find the start marker in the text before a thought.

    header: the text before an answer without a thought, which may have the end marker, too.
    """
    cut = header.rpartition(end)[0] if end and end in header.rpartition(QUESTION)[2] else header
    for opened in (render_prompt(template), header, cut):
        start = before[len(opened) :].strip()
        if start and before.startswith(opened):
            return start
    word = (before.split() or [""])[-1]
    if before.strip() == cut.strip():  # each answer has the marker, or none has it
        word = find_opening(template, end) or word
    tag = end.replace("/", "", 1) if re.search(r"\w", end) else end
    starts = (tag, *template.control_tokens)
    return next((start for start in starts if start != end and word.endswith(start)), word)


def find_dropped(template: ChatTemplate) -> thoughts.Markers | None:
    """Find the quoted text of the source at which past answers are cut, and its start marker.

    Or find two control tokens, if the text between them is cut out.
    """
    quoted = re.findall(r"""(?=(['"])([^{}\n]{2,64}?)\1)""", str(template.tokenizer.chat_template))
    texts = {text.replace("\\n", "\n").strip() for _, text in quoted} - {""}
    tokens = [token for token in template.control_tokens if token in texts]
    pairs = [("", end) for end in sorted(texts, key=len)]
    for start, end in (*pairs, *itertools.permutations(tokens, 2)):
        past = {"role": "assistant", "content": f"{start}{THOUGHT}{end}{ANSWER}"}
        conversation = (ASKED, past, ASKED, ANSWERED, ASKED)
        shown = template.try_apply([template.adapt(message) for message in conversation])
        if shown.count(ANSWER) == 2 and THOUGHT not in shown:
            tag = end.replace("/", "", 1) if "/" in end else ""
            return thoughts.Markers(start or find_opening(template, end) or tag, end)
    return None


def find_opened(template: ChatTemplate) -> thoughts.Markers | None:
    """Find the tag with which the generation prompt ends, if it is a tag."""
    start = find_opening(template)
    end = re.sub(r"^([^\w\s]+)", r"\1/", start)  # </think> of <think>, [/THINK] of [THINK]
    is_tag = re.fullmatch(r"[^\w\s][\w:.-]+[^\w\s]", start)
    is_known = end != start and end in str(template.tokenizer.chat_template)
    return thoughts.Markers(start, end) if is_tag or is_known else None


def find_opening(template: ChatTemplate, end: str = "") -> str:
    """Find the text of the generation prompt after the header of an answer.

    end: the end marker, before which past answers may have an empty thought.
    """
    opened = render_prompt(template)
    closed = render_answer(template).partition(ANSWER)[0]
    header = share_start(opened, closed)
    if opened[len(header) :].strip() and closed[len(header) :].strip():
        # both markers may begin with the same signs
        header = header.rstrip(" \n<|[{(")
    opening = opened[len(header) :] if closed else ""
    return (opening.partition(end)[0] if end else opening).strip()


def share_start(one: str, other: str) -> str:
    """Return the text with which both texts begin."""
    return one[: find_first_difference(one, other)]
