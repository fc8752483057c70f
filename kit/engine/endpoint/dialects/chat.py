"""OpenAI's chat API: /v1/chat/completions, with Gym's fields for token ids.

Protects: a thought, which is in `reasoning_content` and not in the answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import env
from gym_client import Json
from kit.data.fields import REQUEST
from kit.engine.endpoint import requests
from kit.engine.endpoint.requests import Request, RequestError
from kit.engine.endpoint.tree import Call

ENDED = {"stop": "stop", "stop_string": "stop", "calls": "tool_calls", "length": "length"}
write_error = requests.write_openai_error


def read(body: Json) -> Request:
    """Read the body of a request. Raises RequestError."""
    # Gym's model server sets both fields, and reads the log-probs of the message.
    if body.get("logprobs") and not body.get("return_tokens_as_token_ids"):
        raise RequestError("logprobs are not sent. Remove it.", "logprobs")
    request = requests.read_request(body, REQUEST, body.get("messages"), "messages")
    try:
        arguments = env.read_object(body, env.TEMPLATE_ARGUMENTS, requests.WHERE)
    except env.DataError as error:
        raise RequestError(str(error), env.TEMPLATE_ARGUMENTS) from error
    effort = requests.read_field(body, "reasoning_effort", str)
    arguments = {"reasoning_effort": effort, **arguments}
    request.template_arguments = {k: v for k, v in arguments.items() if v is not None}
    request.for_training = body.get("for_training") is not False
    return request


def write(body: Json, request: Request, call: Call) -> Json:
    """Write a chat completion."""
    response = call.response
    calls = []
    for each in response.calls:
        function = {"name": each["name"], "arguments": each["arguments"]}
        calls.append({"id": each["call_id"], "type": "function", "function": function})
    message = {"role": "assistant", "content": response.text, "tool_calls": calls}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    choice = {
        "index": 0,
        "finish_reason": ENDED[call.ended],
        "logprobs": None,
        "message": message | call.token_fields,
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or "policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": call.prompt_length,
            "completion_tokens": len(call.sampled_ids),
            "total_tokens": call.prompt_length + len(call.sampled_ids),
        },
    }


def make_events(body: Json, reply: Json) -> Iterator[tuple[str, Json]]:
    """Yield the chunks of a stream: the role and token ids, then the thought, the text, the calls.

    Each has its own chunk, since a client may skip the calls in a chunk that has text.
    """
    choice = reply["choices"][0]
    first = dict(choice["message"])
    first["tool_calls"] = [{"index": i, **call} for i, call in enumerate(first["tool_calls"])]
    names = ("reasoning_content", "content", "tool_calls")
    parts = [{name: first.pop(name)} for name in names if name in first]
    shared = {**reply, "object": "chat.completion.chunk", "usage": None}
    for delta in (first, *parts):
        reason = choice["finish_reason"] if delta is parts[-1] else None
        part = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        yield "", {**shared, "choices": [part]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**shared, "choices": [], "usage": reply["usage"]}
