"""The policy endpoint: an OpenAI-compatible server for Gym agents, which run the turns themselves.

    Gym's agent (/run) -> Gym's model server (vllm_model) -> POST /v1/chat/completions here -> vLLM

Each response has its token ids and log-probs. In the next request, Gym returns them with the
assistant's message. The next prompt starts with exactly these ids, so that no sampled token is
encoded again.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiohttp import web

import env
from gym_client import GymError, find_callable_tools
from kit.rollout.chat import ParsedResponse, encode_observation, parse_response
from kit.rollout.sampler import SampledResponse, SamplerContext, sample

MAX_BODY_BYTES = 2**28  # a request has all token ids of its conversation


class Reply(NamedTuple):
    """An HTTP response: its status and its JSON."""

    status: int
    body: dict[str, Any]


def error_reply(status: int, message: str) -> Reply:
    return Reply(status, {"error": {"message": message}})


def has_images(messages: list[dict[str, Any]]) -> bool:
    """Return whether a message of a chat request has an image."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(p.get("type") == "image_url" for p in content):
            return True
    return False


def build_prompt_ids(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], context: SamplerContext
) -> list[int]:
    """Return the prompt ids of a chat request.

    The last message with token ids has its prompt's ids too, so it covers all messages before it.
    Only the messages after it are encoded. Raises GymError, env.DataError.
    """
    if has_images(messages):
        raise env.UnsupportedRowError(
            "images that an agent shows are not supported. Remove such rows."
        )
    sampled = [i for i, message in enumerate(messages) if message.get("generation_token_ids")]
    if not sampled:
        return env.encode_messages(messages, tools, context.tokenizer, processor=context.processor)
    last = messages[sampled[-1]]
    calls = last.get("tool_calls") or []
    names = {call["id"]: call["function"]["name"] for call in calls}
    observations = [
        {"name": names.get(message.get("tool_call_id"), ""), **message}
        for message in messages[sampled[-1] + 1 :]
    ]
    new_ids = encode_observation(observations, context.processor, context.stop_ids)
    return [*last["prompt_token_ids"], *last["generation_token_ids"], *new_ids]


def refuse_other_calls(response: ParsedResponse, tools: list[dict[str, Any]]) -> ParsedResponse:
    """Turn calls of tools that the request does not offer into text of the response.

    Gym's agents post each call to the route of that name, without a check. A call of `seed_session`
    would start the session again, with an answer that the policy wrote. Agents do not URL-quote the
    name either, so `verify?x` would reach /verify.
    """
    functions = [tool.get("function") or {} for tool in tools]
    names = find_callable_tools(function.get("name") for function in functions)
    offered = {name for name in names if not set(name) & set("?#")}
    calls: list[dict[str, Any]] = []
    texts = [response.text]
    for call in response.calls:
        if call["name"] in offered:
            calls.append(call)
        else:
            texts.append(json.dumps({"name": call["name"], "arguments": call["arguments"]}))
    return ParsedResponse(response.reasoning, "\n".join(texts), calls)


async def complete_chat(body: dict[str, Any], context: SamplerContext) -> Reply:
    """Answer a POST to /v1/chat/completions.

    The sampling parameters are those of the run, not of the request, so that tokens are on-policy.
    """
    tools = body.get("tools") or []
    max_length = context.max_prompt_length + context.max_response_length
    try:
        prompt_ids = build_prompt_ids(body["messages"], tools, context)
        room = max_length - len(prompt_ids)
        if room <= 0:  # "context length" shows Gym's model server that the episode is too long
            problem = f"the maximum context length is {max_length}, the prompt {len(prompt_ids)}"
            return error_reply(400, problem)
        request_id = uuid.uuid4().hex
        sampled = await sample(context, context.endpoint_sampling, request_id, prompt_ids, room)
        response = await parse_response(context, sampled.ids, tools)
    except (GymError, env.DataError) as error:
        return error_reply(422, str(error))  # not 5xx, for which Gym repeats the request
    response = refuse_other_calls(response, tools)
    if sampled.ids[-1] not in context.stop_ids:
        finish_reason = "length"
    elif response.calls:
        finish_reason = "tool_calls"
    else:
        finish_reason = "stop"
    return Reply(200, make_completion(prompt_ids, sampled, response, finish_reason))


def make_completion(
    prompt_ids: list[int], sampled: SampledResponse, response: ParsedResponse, finish_reason: str
) -> dict[str, Any]:
    """Return a chat completion of OpenAI's API, with Gym's fields for token ids and log-probs."""
    content = response.text
    if response.reasoning:
        content = f"<think>{response.reasoning}</think>{content}"
    tool_calls = []
    for call in response.calls:
        function = {"name": call["name"], "arguments": call["arguments"]}
        tool_calls.append({"id": call["call_id"], "type": "function", "function": function})
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": tool_calls,
        "prompt_token_ids": prompt_ids,
        "generation_token_ids": sampled.ids,
        "generation_log_probs": sampled.log_probs,
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(sampled.ids),
            "total_tokens": len(prompt_ids) + len(sampled.ids),
        },
    }


@contextlib.asynccontextmanager
async def serve(context: SamplerContext, host: str, port: int, api_key: str) -> AsyncIterator[None]:
    """Serve POST /v1/chat/completions on host:port to clients with `api_key`."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == f"Bearer {api_key}":
            reply = await complete_chat(await request.json(), context)
        else:
            problem = "wrong or missing API key. Use the key in POLICY_API_KEY of the run."
            reply = error_reply(401, problem)
        return web.json_response(reply.body, status=reply.status)

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
