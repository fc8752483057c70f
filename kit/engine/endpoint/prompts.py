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

import env
from gym_client import GymError, Json
from kit.chat.parsed_response import ParsedResponse, write_call
from kit.chat.responses import parse_response
from kit.chat.template import ChatTemplate
from kit.engine.endpoint.requests import IDS, WHERE, Request, RequestError, make_overflow
from kit.engine.endpoint.tree import Call, Chain, Tree
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


class Prompts:
    """Builds the prompts of an endpoint, and keeps the first ones."""

    def __init__(self) -> None:
        self.first: dict[bytes, asyncio.Future[array[int]]] = {}
        self.unused: set[str] = set()  # fields of requests that the log has named

    async def build(self, context: RolloutContext, tree: Tree, request: Request) -> Call:
        """Begin a call, with its prompt. Raises RequestError, before the work for a long one."""
        new_fields = request.unused - self.unused
        if new_fields:
            self.unused |= new_fields
            known = ", ".join(sorted(new_fields))
            logger.warning("agents send what is known, and not used here: %s", known)
        messages = request.messages
        characters = count_characters(messages)
        if characters > MAX_CHARS_PER_TOKEN * context.max_length:
            raise make_overflow(f"{characters} characters are over {context.max_length} tokens")
        arguments = request.template_arguments
        param = env.TEMPLATE_ARGUMENTS
        try:
            template = context.template.with_arguments(arguments, param)
            param = "messages"
            chain = Chain(messages, json.dumps([request.tools, arguments]).encode())
            parent, end = tree.find(chain, messages)
            new = messages[end:] if parent else []
            if parent:
                encode = template.encode_continuation
                ids = await run_long(count_characters(new), encode, new, parent.sampled_ids[-1])
            else:
                if messages[-1]["role"] == "assistant":  # the policy continues this text
                    env.check_end(messages[-1:], WHERE)
                ids = await self.encode_first(template, request)
        except (env.DataError, GymError) as error:
            raise RequestError(str(error), param) from error
        is_rewritten = not parent and any(IDS in message for message in messages)
        before = parent.prompt_length + len(parent.sampled_ids) if parent else 0
        return Call(
            parent,
            new_messages=new,
            prompt_ids=ids,
            prompt_length=before + len(ids),
            has_tools=bool(request.tools),
            is_rewritten=is_rewritten,
            chain=chain,
        )

    async def encode_first(self, template: ChatTemplate, request: Request) -> array[int]:
        """Encode a first prompt, once for equal ones. Raises as `encode_prompt`."""
        messages = env.render_items(request.messages, WHERE)  # without empty answers
        content = json.dumps([messages, request.tools, dict(template.arguments)])
        key = hashlib.sha256(content.encode()).digest()
        encoding = self.first.get(key)
        if not encoding or encoding.get_loop() is not asyncio.get_running_loop():
            arguments = (messages, request.tools, WHERE)
            encode = run_long(len(content), template.encode_prompt, *arguments)
            encoding = self.first[key] = asyncio.ensure_future(encode)
            if len(self.first) > MAX_FIRST:
                self.first.pop(next(iter(self.first)))
        return await asyncio.shield(encoding)


async def run_long(length: int, encode: Callable[..., list[int]], *arguments: object) -> array[int]:
    """Encode a text of some characters, in a thread if it is long."""
    if length > THREAD_CHARS:
        ids = await asyncio.to_thread(encode, *arguments)
    else:
        ids = encode(*arguments)
    return array("I", ids)


def count_characters(messages: Sequence[Json]) -> int:
    """Count the characters in the texts of messages."""
    return sum(len(message["content"]) for message in messages)


# --- responses -----------------------------------------------------------------------------------


async def respond(
    context: RolloutContext,
    sampling: Sampling,
    request_id: str,
    request: Request,
    call: Call,
    prompt: list[int],
) -> SampledResponse:
    """Sample the response of a call in its room. Raises RequestError, and as `sample`."""
    if request.stop:
        if "detokenize" not in sampling:
            raise RequestError("stop needs rollout.name=vllm. Remove it.", "stop")
        texts = {"stop": request.stop, "include_stop_str_in_output": True, "detokenize": True}
        sampling = {**sampling, **texts}
    limit = min(request.room, request.max_tokens or request.room)
    sampled = await sample(context, sampling, request_id, prompt, limit)
    response = await parse_offered(context, sampled.ids, request, prompt)
    stop = next((text for text in request.stop if text in response.raw), None)
    if sampled.ids[-1] in context.stop_ids:
        call.ended = "calls" if response.calls else "stop"
    elif stop:
        call.ended = "stop_string"
        call.stop_string = stop
        response = response._replace(text=response.text.partition(stop)[0])
    else:
        call.ended = "length"
    call.response = response
    call.sampled_ids = array("I", sampled.ids)
    call.log_probs = array("d", sampled.log_probs)
    call.policy_versions = sampled.policy_versions
    return sampled


async def parse_offered(
    context: RolloutContext, ids: list[int], request: Request, prompt_ids: Sequence[int]
) -> ParsedResponse:
    """Parse a response. Calls that the client must not get become text.

    Raises GymError('tool_parser').
    """
    response = await parse_response(context.template, ids, request.callable_tools, prompt_ids)
    names = request.callable_names
    kept = [call for call in response.calls if call["name"] in names]
    if not kept:
        return response._replace(text=response.written, calls=[])
    others = [write_call(call) for call in response.calls if call["name"] not in names]
    return response._replace(text="\n".join([response.text, *others]), calls=kept)
