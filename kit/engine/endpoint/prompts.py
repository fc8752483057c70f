"""The prompt of a call, and the response that the policy samples for it.

Protects: sampled tokens: a prompt that continues a call begins with that call's stored ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import env
from gym_client import GymError, Json
from kit.chat.parsed_response import ParsedResponse, write_call
from kit.chat.responses import parse_response
from kit.chat.template import ChatTemplate
from kit.data.episode import TOKEN_FIELDS
from kit.engine.endpoint.requests import (
    CONTEXT_CODE,
    IDS,
    WHERE,
    Ended,
    Reply,
    Request,
    RequestError,
    render_items,
)
from kit.engine.endpoint.tree import Chain, Node, Tree
from kit.engine.sampling import (
    MAX_CHARS_PER_TOKEN,
    RolloutContext,
    SampledResponse,
    Sampling,
    sample,
)

MAX_FIRST = 64  # encoded first prompts to keep: the episodes of a group have the same one
THREAD_CHARS = 20_000  # longer texts are encoded in a thread

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """The prompt of a request."""

    ids: list[int]
    parent: Node | None  # the call that it continues
    new_messages: list[Json]  # after that call; of a root: none
    chain: Chain
    is_rewritten: bool  # whether a message of the assistant is in no place where it was sampled

    @property
    def start(self) -> int:
        """Return the number of ids of the call that it continues."""
        return self.parent.end if self.parent else 0

    @property
    def root_length(self) -> int:
        """Return the number of ids of the first prompt."""
        return self.parent.root_length if self.parent else len(self.ids)

    @property
    def turn(self) -> int:
        """Return the number of calls before this one."""
        return self.parent.turn + 1 if self.parent else 0


class Prompts:
    """Builds the prompts of an endpoint, and keeps the first ones."""

    def __init__(self) -> None:
        self.first: dict[bytes, asyncio.Future[list[int]]] = {}
        self.unused: set[str] = set()  # fields of requests that the log has named

    def warn_of_unused(self, names: set[str]) -> None:
        """Log each field of a request that is not used, once."""
        new = names - self.unused
        self.unused |= new
        if new:
            known = ", ".join(sorted(new))
            logger.warning("agents send what is known, and not used here: %s", known)

    async def build(self, context: RolloutContext, tree: Tree, request: Request) -> Prompt:
        """Build the prompt of a request. Raises RequestError, before the work for a long one."""
        self.warn_of_unused(request.unused)
        messages = request.messages
        check_characters(messages, context)
        arguments = request.template_arguments
        param = env.TEMPLATE_ARGUMENTS
        try:
            template = context.template.with_arguments(arguments, param)
            param = "messages"
            setup = json.dumps([request.tools, arguments]).encode()
            chain = Chain(messages, setup)
            parent, end = tree.find(chain, messages)
            if parent:
                return await self.extend(template, parent, messages[end:], chain)
            if messages[-1]["role"] == "assistant":  # the policy continues this text
                env.check_end(messages[-1:], WHERE)
            ids = await self.encode_first(template, request)
        except (env.DataError, GymError) as error:
            raise RequestError(str(error), param) from error
        has_claims = any(IDS in message for message in messages)
        return Prompt(ids, None, [], chain, is_rewritten=has_claims)

    async def extend(
        self, template: ChatTemplate, parent: Node, messages: list[Json], chain: Chain
    ) -> Prompt:
        """Build a prompt of a call's ids and new messages. Raises GymError('template')."""
        text = json.dumps(messages)
        last_id = parent.sampled_ids[-1]
        new_ids = await run_long(text, template.encode_continuation, messages, last_id)
        return Prompt(parent.ids + new_ids, parent, messages, chain, is_rewritten=False)

    async def encode_first(self, template: ChatTemplate, request: Request) -> list[int]:
        """Encode a first prompt, once for equal ones. Raises as `encode_prompt`."""
        messages = env.render_items(request.messages, WHERE)  # without empty answers
        content = json.dumps([messages, request.tools, dict(template.arguments)])
        key = hashlib.sha256(content.encode()).digest()
        encoding = self.first.get(key)
        if not encoding or encoding.get_loop() is not asyncio.get_running_loop():
            encode = run_long(content, template.encode_prompt, messages, request.tools, WHERE)
            encoding = self.first[key] = asyncio.ensure_future(encode)
            if len(self.first) > MAX_FIRST:
                self.first.pop(next(iter(self.first)))
        return await asyncio.shield(encoding)


async def run_long(text: str, encode: Callable[..., list[int]], *arguments: object) -> list[int]:
    """Call a function of a text, in a thread if the text is long."""
    if len(text) > THREAD_CHARS:
        return await asyncio.to_thread(encode, *arguments)
    return encode(*arguments)


def count_characters(messages: Sequence[Json]) -> int:
    """Count the characters of messages."""
    return sum(len(str(message)) for message in messages)


def check_characters(messages: Sequence[Json], context: RolloutContext) -> None:
    """Check that a conversation is not certainly too long. Raises RequestError."""
    characters = count_characters(messages)
    if characters > MAX_CHARS_PER_TOKEN * context.max_length:
        raise make_overflow(f"{characters} characters are over {context.max_length} tokens")


def make_overflow(problem: str) -> RequestError:
    """Make the error for a conversation that is too long, in the words that clients look for."""
    # Gym's model server takes "context length" for the end of an episode; Claude Code compacts its
    # history after "prompt is too long".
    problem = f"prompt is too long. The conversation exceeds the context length: {problem}."
    return RequestError(problem, "messages", CONTEXT_CODE)


# --- responses -----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What the policy has sampled for a prompt."""

    sampled: SampledResponse
    response: ParsedResponse  # up to a stop string
    ended: Ended
    stop_string: str | None

    def add_to(self, tree: Tree, request: Request, prompt: Prompt) -> Node:
        """Add the call to a tree."""
        message = render_items(self.response.items)[-1]
        if tree.has_claims:
            message[IDS] = [prompt.ids, self.sampled.ids]
        node = Node(
            parent=prompt.parent,
            new_messages=prompt.new_messages,
            prompt_ids=array("I", prompt.ids[prompt.start :]),
            sampled_ids=array("I", self.sampled.ids),
            log_probs=array("d", self.sampled.log_probs),
            policy_versions=self.sampled.policy_versions,
            response=self.response,
            ended=self.ended,
            number=len(tree.nodes),
            start=prompt.start,
            root_length=prompt.root_length,
            turn=prompt.turn,
            has_tools=bool(request.tools),
        )
        tree.add(node, prompt.chain.add(message))
        return node

    def to_reply(self, prompt: Prompt) -> Reply:
        """Return the reply to the client."""
        lengths = (len(prompt.ids), len(self.sampled.ids))
        return Reply(self.response, self.ended, *lengths, stop_string=self.stop_string)


async def respond(
    context: RolloutContext,
    sampling: Sampling,
    request_id: str,
    request: Request,
    prompt: Prompt,
    room: int,
) -> Answer:
    """Sample the response to a request. Raises RequestError, and as `sample`."""
    if request.stop:
        if "detokenize" not in sampling:
            raise RequestError("stop needs rollout.name=vllm. Remove it.", "stop")
        texts = {"stop": request.stop, "include_stop_str_in_output": True, "detokenize": True}
        sampling = {**sampling, **texts}
    limit = min(room, request.max_tokens or room)
    sampled = await sample(context, sampling, request_id, prompt.ids, limit)
    response = await parse_offered(context, sampled.ids, request, prompt.ids)
    if sampled.ids[-1] in context.stop_ids:
        return Answer(sampled, response, "calls" if response.calls else "stop", None)
    stop = next((text for text in request.stop if text in response.raw), None)
    if stop is None:
        return Answer(sampled, response, "length", None)
    cut = response._replace(text=response.text.partition(stop)[0])
    return Answer(sampled, cut, "stop_string", stop)


async def parse_offered(
    context: RolloutContext, ids: list[int], request: Request, prompt_ids: Sequence[int]
) -> ParsedResponse:
    """Parse a response. Calls that the client must not get become text.

    Raises GymError('tool_parser').
    """
    response = await parse_response(context.template, ids, request.callable_tools, prompt_ids)
    names = request.callable_names
    calls: list[Json] = []
    texts = [response.text]
    for call in response.calls:
        if call["name"] in names:
            calls.append(call)
        else:
            texts.append(write_call(call))
    return response._replace(text="\n".join(texts), calls=calls)


def make_token_fields(prompt: Prompt, sampled: SampledResponse) -> Json:
    """Return Gym's fields for the token ids and log-probs of a response."""
    return dict(zip(TOKEN_FIELDS, (prompt.ids, sampled.ids, sampled.log_probs), strict=True))
