"""The history of an agent's conversation: which of its tokens the policy has sampled.

An agent sends the whole conversation with each request. Earlier responses have the token ids of
their prompt and of the response, which it got with them. These ids become the beginning of the next
prompt, so that no sampled token is encoded again. This holds only if the agent shows the policy
what it has seen and written. So the ids are checked against the messages:

    the first prompt     is the encoding of the messages before the first response
    each later prompt    is the one before, its response, and the encoding of the messages between
    each response        has the text and the calls that are parsed from its ids

If one of them differs, the agent has rewritten the history. Then the messages are encoded as a new
conversation, as by any other server. So the policy sees what the agent shows it. The prompt does
not begin with the earlier tokens, and the episode fails as not_contiguous.

The check needs nothing but the request, so several endpoints can serve one episode. A cache of
checked histories keeps the time of a long episode linear.

Protects: training, from token ids that do not belong to the text that the policy saw.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import env
from gym_client import GymError, find_callable_tools
from kit.chat.parsed_response import ParsedResponse, write_call
from kit.chat.responses import parse_response
from kit.chat.template import ChatTemplate, Message
from kit.chat.thoughts import THINK, split_text
from kit.data import fields
from kit.engine.openai_requests import CONTEXT_CODE, WHERE, ChatRequest, RequestError
from kit.engine.openai_requests import Message as ChatMessage
from kit.engine.sampling import MAX_CHARS_PER_TOKEN, RolloutContext

MAX_CHECKED = 2**16  # histories in the cache, of some 100 bytes

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """The prompt of a request."""

    ids: list[int]
    first_length: int  # of the first prompt of the conversation, in tokens
    turn_count: int  # responses of the policy in `ids`
    is_rewritten: bool  # whether the history differs from the one that the policy has seen


# --- what the policy has written -----------------------------------------------------------------


async def parse_offered(
    context: RolloutContext, ids: list[int], tools: list[Message], prompt_ids: Sequence[int]
) -> ParsedResponse:
    """Parse a response. Calls of tools that the request does not offer become text.

    Gym's agents post each call to the route of that name, without a check. A call of `seed_session`
    would start the session again, with an answer that the policy wrote. Agents do not URL-quote the
    name either, so `verify?x` would reach /verify. Raises GymError('tool_parser').
    """
    response = await parse_response(context.template, ids, tools, prompt_ids)
    names = find_callable_tools(tool["function"]["name"] for tool in tools)
    offered = {name for name in names if not set(name) & set("?#")}
    calls: list[dict[str, Any]] = []
    texts = [response.text]
    for call in response.calls:
        if call["name"] in offered:
            calls.append(call)
        else:
            texts.append(write_call(call))
    return response._replace(text="\n".join(texts), calls=calls)


class Contents(NamedTuple):
    """The contents of a response, in a form that does not depend on how an agent passes them."""

    thoughts: set[str]
    text: str
    functions: list[Message]  # name and arguments of each call


def read_contents(items: Sequence[Message]) -> Contents:
    """Read the contents of one response, and move the thoughts out of its text."""
    answer: Message = next(iter(env.render_items(items, WHERE)), {"content": ""})
    split = split_text(answer["content"], THINK)  # as Gym's converter writes them
    thoughts = {each.strip() for each in (answer.get("reasoning_content", ""), *split.thoughts)}
    functions = [call["function"] for call in answer.get("tool_calls", [])]
    return Contents(thoughts - {""}, (split.answer + split.open_thought).strip(), functions)


def has_contents(answer: ChatMessage, response: ParsedResponse) -> bool:
    """Return whether a message has the contents of a response. It may lack the thought.

    Gym's converter and other clients change the form: null or "" without text, the thought in think
    tags or in another field, the white space of the arguments, the ids of the calls.
    """
    shown = read_contents([answer.item])
    written = read_contents(response.items)
    is_same = shown.text == written.text and shown.functions == written.functions
    return is_same and shown.thoughts <= written.thoughts


# --- prompts -------------------------------------------------------------------------------------


class Conversation:
    """The messages of a request, with the template and the tools that render them."""

    def __init__(self, request: ChatRequest, template: ChatTemplate):
        self.messages = request.messages
        self.tools = request.tools
        self.template = template  # with the arguments of the request
        # the places of the responses that have token ids
        self.turns = [place for place, each in enumerate(request.messages) if each.is_sampled]

    def encode_prompt(self, end: int | None = None) -> list[int]:
        """Encode the messages before `end` as those of a row. Raises env.DataError."""
        return self.template.encode_prompt(render(self.messages[:end]), self.tools, WHERE)

    def extend(self, turn: int, end: int | None = None) -> list[int]:
        """Return the ids up to the end of a turn, then the encoding of the messages before `end`.

        turn: the place of a response. Text of the messages cannot open a turn of another role.
        Raises env.DataError, GymError('template').
        """
        rendered = render(self.messages[turn:end])
        between = [message for message in rendered if message["role"] != "assistant"]
        ids = self.messages[turn].token_ids
        return ids + self.template.encode_continuation(between, ids[-1])

    def digest_turns(self) -> list[bytes]:
        """Return a digest for each turn, of the tools, the arguments and all messages up to it."""
        setup = [self.tools, dict(self.template.arguments)]
        state = hashlib.sha256(json.dumps(setup).encode())
        digests = []
        for message in self.messages:
            state.update(json.dumps(message.item).encode())
            if message.is_sampled:
                for ids in (message.prompt_token_ids or [], message.generation_token_ids or []):
                    state.update(f" {len(ids)} ".encode() + array("i", ids).tobytes())
                digests.append(state.copy().digest())
        return digests


class Histories:
    """Builds the prompts of an endpoint, and remembers which histories it has checked."""

    def __init__(self, context: RolloutContext):
        self.context = context
        self.rewritten_count = 0
        self._unused: set[str] = set()  # fields of requests that the log has named
        self._checked: set[bytes] = set()  # digests

    def warn_of_unused(self, body: Message) -> None:
        """Log each field of a request that is not used, once. body: of a valid request."""
        names = fields.list_unused(fields.walk(fields.REQUEST, body, body["messages"]))
        new = names - self._unused
        self._unused |= new
        if new:
            known = ", ".join(sorted(new))
            logger.warning("agents send what is known, and not used here: %s", known)

    async def build_prompt(self, request: ChatRequest) -> Prompt:
        """Build the prompt of a request. Raises RequestError, before the work for a long one."""
        characters = sum(len(str(message.item)) for message in request.messages)
        limit = self.context.max_length
        if characters > MAX_CHARS_PER_TOKEN * limit:
            problem = f"{characters} characters are over {limit} tokens"
            raise RequestError(
                f"The conversation exceeds the context length: {problem}.", "messages", CONTEXT_CODE
            )
        param = env.TEMPLATE_ARGUMENTS
        try:
            template = self.context.template.with_arguments(request.template_arguments, param)
            param = "messages"
            return await self._build_prompt(Conversation(request, template))
        except (env.DataError, GymError) as error:
            raise RequestError(str(error), param) from error

    async def _build_prompt(self, conversation: Conversation) -> Prompt:
        turns = conversation.turns
        last = conversation.messages[-1]
        if last.role == "assistant" and not last.is_sampled:  # the policy continues this text
            env.check_end(render([last]), WHERE)
        if turns and await self.is_unchanged(conversation):
            first_length = len(conversation.messages[turns[0]].prompt_token_ids or [])
            ids = conversation.extend(turns[-1])
            return Prompt(ids, first_length, len(turns), is_rewritten=False)
        if turns:
            self.count_rewritten()
        ids = conversation.encode_prompt()
        return Prompt(ids, len(ids), turn_count=0, is_rewritten=bool(turns))

    # --- the check ---

    async def is_unchanged(self, conversation: Conversation) -> bool:
        """Return whether the token ids of all turns belong to these messages."""
        turns = conversation.turns
        later = conversation.messages[turns[0] :]
        if sum(message.role == "assistant" for message in later) > len(turns):
            return False  # the agent has written some of them
        digests = conversation.digest_turns()
        checked = [number for number, digest in enumerate(digests) if digest in self._checked]
        for number in range(checked[-1] + 1 if checked else 0, len(turns)):
            if not await self.is_consistent(conversation, number):
                return False
        self.remember(digests[-1])
        return True

    async def is_consistent(self, conversation: Conversation, number: int) -> bool:
        """Return whether a turn follows the one before, and has the contents of its ids."""
        turn = conversation.turns[number]
        answer = conversation.messages[turn]
        try:
            if number:
                prompt_ids = conversation.extend(conversation.turns[number - 1], turn)
            else:
                prompt_ids = conversation.encode_prompt(turn)
            if answer.prompt_token_ids != prompt_ids:
                return False
            ids = answer.generation_token_ids or []
            for tools in (conversation.tools, []):  # without tools, as by tool_choice: none
                response = await parse_offered(self.context, ids, tools, prompt_ids)
                if has_contents(answer, response):
                    return True
        except (env.DataError, GymError):  # no prompt or response of this endpoint
            pass
        return False

    def remember(self, digest: bytes) -> None:
        """Add a checked history. If there are too many, all are checked once more."""
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked.add(digest)

    def count_rewritten(self) -> None:
        """Count a rewritten history, and log the first one."""
        self.rewritten_count += 1
        if self.rewritten_count == 1:
            logger.warning(
                "an agent has rewritten the history of its conversation, so its episode fails as "
                "not_contiguous. Later cases are counted only as failed episodes. Turn off the "
                'agent\'s compaction. See docs/environments.md, "Agents that rewrite the history".'
            )


def render(messages: Sequence[ChatMessage]) -> list[Message]:
    """Render messages as those of a row. Raises env.DataError."""
    rendered = env.render_items([message.item for message in messages], WHERE)
    if env.list_images(rendered, WHERE):
        raise env.DataError(f"{WHERE}: only text is supported, no images. Remove them.")
    return rendered
