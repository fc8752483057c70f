"""An OpenAI-compatible address in front of the policy, for Gym agents that own the turns.

    Gym's agent (/run) -> Gym's model server (vllm_model) -> POST /v1/chat/completions here -> vLLM, in tokens

Each answer carries its token ids and log-probs. Gym sends them back on the assistant's message with the next
request, and the next prompt starts with exactly those ids: nothing that was sampled is tokenised again.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

import env
from gym_client import GymError, callable_names
from inference import Policy, sample
from kit.rollout.chat import observed_ids, understand


def prompt_of(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], policy: Policy
) -> list[int]:
    """The prompt ids of a chat request: what the policy saw and said before, id for id, and what came since.

    The ids on the last answer's message cover all that precedes it. Raises GymError, env.DataError.
    """
    if any(
        part.get("type") == "image_url"
        for m in messages
        if isinstance(m.get("content"), list)
        for part in m["content"]
    ):
        raise env.Refused("images that an agent shows are not taken; leave such rows out")
    known = [i for i, m in enumerate(messages) if m.get("generation_token_ids")]
    if not known:
        return env.encode(messages, tools, policy.tokenizer)
    last = messages[known[-1]]
    names = {call["id"]: call["function"]["name"] for call in last.get("tool_calls") or []}
    since = [{"name": names.get(m.get("tool_call_id"), ""), **m} for m in messages[known[-1] + 1 :]]
    new = observed_ids(since, policy.tokenizer, policy.stop_ids)
    return [*last["prompt_token_ids"], *last["generation_token_ids"], *new]


def split_calls(
    calls: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(the calls of tools that the request offers, the text of all other calls).

    Gym's agents post a call to the route of its name, whatever that route does. A call of `seed_session` would begin
    the session anew, with an answer that the policy wrote. Agents do not quote a name: `verify?x` would reach /verify.
    """
    functions = [tool.get("function") or {} for tool in tools]
    names = {
        n
        for n in callable_names(function.get("name") for function in functions)
        if not set(n) & set("?#")
    }
    allowed = [call for call in calls if call["name"] in names]
    refused = [call for call in calls if call["name"] not in names]
    texts = [json.dumps({"name": call["name"], "arguments": call["arguments"]}) for call in refused]
    return allowed, texts


async def complete(body: dict[str, Any], policy: Policy) -> tuple[int, dict[str, Any]]:
    """POST /v1/chat/completions: (status, JSON). The sampling is the run's, whatever the request says: on-policy."""
    tools = body.get("tools") or []
    try:
        prompt = prompt_of(body["messages"], tools, policy)
        longest = policy.max_prompt_length + policy.max_response_length
        if (
            len(prompt) >= longest
        ):  # the words by which Gym's model server knows an episode that ran out of room
            return 400, {
                "error": {
                    "message": f"the maximum context length is {longest}, the prompt {len(prompt)}"
                }
            }
        ids, log_probs, _ = await sample(policy, uuid.uuid4().hex, prompt, longest - len(prompt))
        thought, text, found = await understand(policy, ids, tools)
    except (GymError, env.DataError) as error:  # a status that Gym does not ask again for
        return 422, {"error": {"message": str(error)}}
    calls, refused = split_calls(found, tools)
    text = "\n".join([text, *refused]) if refused else text
    called = [(c["call_id"], {"name": c["name"], "arguments": c["arguments"]}) for c in calls]
    message = {
        "role": "assistant",
        "content": f"<think>{thought}</think>{text}" if thought else text,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": function}
            for call_id, function in called
        ],
        "prompt_token_ids": prompt,
        "generation_token_ids": ids,
        "generation_log_probs": log_probs,
    }
    reason = "length" if ids[-1] not in policy.stop_ids else "tool_calls" if calls else "stop"
    return 200, {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt + ids),
        },
    }


@contextlib.asynccontextmanager
async def serve(policy: Policy, host: str, port: int, api_key: str) -> AsyncIterator[None]:
    """Answer POST /v1/chat/completions on host:port, for whoever bears `api_key`, while the loop runs."""

    async def chat(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == f"Bearer {api_key}":
            status, answer = await complete(await request.json(), policy)
        else:
            status, answer = (
                401,
                {"error": {"message": "wrong or missing API key; give the run's POLICY_API_KEY"}},
            )
        return web.json_response(answer, status=status)

    app = web.Application(
        client_max_size=2**28
    )  # bytes; a request carries all ids of its conversation
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
