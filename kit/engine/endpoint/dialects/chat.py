"""OpenAI's chat API: /v1/chat/completions, with Gym's fields for token ids.

Protects: a thought, which is in `reasoning_content` and not in the answer.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import env
from gym_client import Json
from kit.data.episode import TOKEN_FIELDS
from kit.data.fields import REQUEST
from kit.engine.endpoint.requests import (
    Request,
    RequestError,
    check_fields,
    read_choice,
    read_field,
    read_items,
    read_limit,
    read_stop,
    read_tools,
    write_openai_error,
)
from kit.engine.endpoint.tree import Call

ENDED = {"stop": "stop", "stop_string": "stop", "calls": "tool_calls", "length": "length"}
write_error = write_openai_error


def read(body: Json) -> Request:
    """Read the body of a request. Raises RequestError."""
    unused = check_fields(REQUEST, body, body.get("messages"))
    # Gym's model server sets both fields, and reads the log-probs of the message.
    if body.get("logprobs") and not body.get("return_tokens_as_token_ids"):
        raise RequestError("logprobs are not sent. Remove it.", "logprobs")
    messages = read_items(body.get("messages"), "messages")
    tools, _, ignored = read_tools(body.get("tools"))
    arguments = read_field(body, "chat_template_kwargs", dict | str, {})
    try:
        arguments = env.read_object({"a": arguments}, "a", "chat_template_kwargs")
    except env.DataError as error:
        raise RequestError(str(error), "chat_template_kwargs") from error
    effort = read_field(body, "reasoning_effort", str, None)
    arguments = {"reasoning_effort": effort, **arguments}
    return Request(
        messages,
        tools,
        choice=read_choice(body),
        stop=read_stop(body, "stop"),
        max_tokens=read_limit(body, "max_tokens", "max_completion_tokens"),
        template_arguments={key: value for key, value in arguments.items() if value is not None},
        for_training=body.get("for_training") is not False,
        unused=unused | ignored,
    )


def resume(body: Json, stored: dict[str, Json]) -> Json:
    """Return the body: a chat request has the whole conversation."""
    return body


def store(body: Json, reply: Json) -> Json | None:
    """Store nothing."""
    return None


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
    """Yield the chunks of a stream with the contents of a completion.

    The first one has the token ids.
    """
    choice = reply["choices"][0]
    message = choice["message"]
    deltas = [{key: message[key] for key in ("role", *TOKEN_FIELDS) if key in message}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    for index, call in enumerate(message["tool_calls"]):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    deltas.append({})
    includes_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    shared = {**reply, "object": "chat.completion.chunk"}
    usage = shared.pop("usage")
    if includes_usage:
        shared["usage"] = None
    for number, delta in enumerate(deltas):
        is_last = number == len(deltas) - 1
        part = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": choice["finish_reason"] if is_last else None,
        }
        yield "", {**shared, "choices": [part]}
    if includes_usage:
        yield "", {**shared, "choices": [], "usage": usage}
