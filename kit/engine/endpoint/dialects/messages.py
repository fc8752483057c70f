"""Anthropic's API: /v1/messages.

Convenience: Claude Code and the anthropic package speak this API only.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator

import env
from gym_client import Json
from kit.data.fields import NOT_SUPPORTED, Fields, list_objects
from kit.engine.endpoint.requests import (
    Failure,
    Request,
    RequestError,
    check_fields,
    read_choice,
    read_items,
    read_limit,
    read_stop,
    read_tools,
)
from kit.engine.endpoint.tree import Call

FIELDS = Fields(
    "",
    "model messages system tools tool_choice max_tokens stop_sequences stream thread",
    dict.fromkeys(("output_format", "mcp_servers", "container"), NOT_SUPPORTED + "Remove it."),
)
ENDED = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"}
BILLING = "x-anthropic-billing-header:"  # of Claude Code; it has a hash that changes
SKIPPED = ("thinking", "redacted_thinking", "tool_reference")
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
ERRORS |= {404: "not_found_error", 413: "request_too_large"}


def read(body: Json) -> Request:
    """Read the body of a request. Raises RequestError."""
    unused = check_fields(FIELDS, {**body, "tools": None}, None)
    form = (body.get("output_config") or {}).get("format")
    if form:
        raise RequestError("The policy's text is not constrained. Remove it.", "output_config")
    items = []
    system = read_text(body.get("system"), "system")
    if system:
        items.append({"role": "system", "content": system})
    for message in list_objects(body.get("messages")):
        items += read_message(message)
    given = [read_tool(tool) for tool in list_objects(body.get("tools"))]
    tools, _, ignored = read_tools(given)
    return Request(
        read_items(items, "messages"),
        tools,
        choice=read_choice(body),
        stop=read_stop(body, "stop_sequences"),
        max_tokens=read_limit(body, "max_tokens"),
        unused=unused | ignored,
    )


def read_text(content: object, param: str) -> str:
    """Return the text of a content: a text, or blocks of text. Raises RequestError."""
    texts = [content] if isinstance(content, str) else []
    for block in list_objects(content):
        if block.get("type") == "text":
            texts.append(str(block.get("text")))
        elif block.get("type") not in SKIPPED:
            problem = f"blocks of type {block.get('type')} are not supported here. Remove it."
            raise RequestError(problem, param)
    kept = [each.partition("\n")[2] if each.startswith(BILLING) else each for each in texts]
    return "\n".join(filter(None, kept))


def read_message(message: Json) -> Iterator[Json]:
    """Yield a message as messages of a chat: the outputs of tools, then the rest."""
    content = message.get("content")
    blocks = list_objects(content)
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for block in results:
        text = read_text(block.get("content"), "messages")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
    others = [each for each in blocks if each.get("type") not in ("tool_result", "tool_use")]
    text = read_text(others if isinstance(content, list) else content, "messages")
    if text or calls or not results:
        yield {"role": message.get("role"), "content": text, "tool_calls": calls}


def read_tool(tool: Json) -> Json:
    """Return a tool in the Responses format."""
    if tool.get("type") not in (None, "custom"):
        return tool  # hosted
    kept: Json = {key: tool[key] for key in ("name", "description") if key in tool}
    return {**kept, "type": "function", "parameters": tool.get("input_schema")}


def resume(body: Json, stored: dict[str, Json]) -> Json:
    """Return the body with the thread that it continues."""
    thread = body.get("thread")
    if not isinstance(thread, dict) or thread.get("type") != "continue":
        return body
    earlier = stored.get(str(thread.get("previous_message_id")))
    if not earlier:
        raise RequestError("the thread is not known. Send the whole conversation.", "thread")
    messages = earlier["messages"] + list_objects(body.get("messages"))
    return {**earlier, **body, "messages": messages}


def store(body: Json, reply: Json) -> Json | None:
    """Return the request with the reply, if it is a thread."""
    if not body.get("thread"):
        return None
    answer = {"role": "assistant", "content": reply["content"]}
    return {**body, "messages": [*body["messages"], answer]}


def write(body: Json, request: Request, call: Call) -> Json:
    """Write a message."""
    response = call.response
    content: list[Json] = []
    if response.reasoning:
        content.append({"type": "thinking", "thinking": response.reasoning, "signature": ""})
    if response.text or not response.calls:
        content.append({"type": "text", "text": response.text})
    for each in response.calls:
        arguments: object = None
        with contextlib.suppress(ValueError, RecursionError):
            arguments = env.load_json(each["arguments"])
        given = arguments if isinstance(arguments, dict) else {"input": each["arguments"]}
        block = {"type": "tool_use", "id": each["call_id"], "name": each["name"], "input": given}
        content.append(block)
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or "policy",
        "content": content,
        "stop_reason": ENDED.get(call.ended, "stop_sequence"),
        "stop_sequence": call.stop_string,
        "usage": {"input_tokens": call.prompt_length, "output_tokens": len(call.sampled_ids)},
    }


def make_events(body: Json, reply: Json) -> Iterator[tuple[str, Json]]:
    """Yield the events of a stream, each block as one delta."""
    ended = {key: reply[key] for key in ("stop_reason", "stop_sequence")}
    started = {**reply, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[Json] = [{"type": "message_start", "message": started}]
    for index, block in enumerate(reply["content"]):
        if block["type"] == "tool_use":
            blank: Json = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            key = str(block["type"])
            blank = {key: ""}
            delta = {"type": f"{key}_delta", key: block[key]}
        start = {"type": "content_block_start", "content_block": {**block, **blank}}
        events.append({**start, "index": index})
        events.append({"type": "content_block_delta", "delta": delta, "index": index})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": ended, "usage": reply["usage"]})
    events.append({"type": "message_stop"})
    for event in events:
        yield str(event["type"]), event


def write_error(failure: Failure) -> Json:
    """Write an error."""
    kind = ERRORS.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
