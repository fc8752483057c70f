"""Anthropic's API: /v1/messages.

Convenience: Claude Code and the anthropic package speak this API only.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator

import env
from gym_client import Json, find_nested
from kit.data.fields import NOT_SUPPORTED, Fields, list_objects
from kit.engine.endpoint.requests import Request, RequestError, read_request
from kit.engine.endpoint.tree import Call

FIELDS = Fields(
    "",
    "model messages system tools tool_choice max_tokens stop_sequences stream thread",
    dict.fromkeys(("output_format", "mcp_servers", "container"), NOT_SUPPORTED + "Remove it."),
)
ENDED = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"}
BILLING = "x-anthropic-billing-header:"  # of Claude Code; it has a hash that changes
# Blocks without a text for the policy, or whose text is read as a call or an output.
SKIPPED = ("thinking", "redacted_thinking", "tool_reference", "tool_use", "tool_result")
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
ERRORS |= {404: "not_found_error", 413: "request_too_large"}


def read(body: Json) -> Request:
    """Read the body of a request. Raises RequestError."""
    if find_nested(body, "output_config", "format"):
        raise RequestError("The policy's text is not constrained. Remove it.", "output_config")
    system = read_text(body.get("system"))
    items = [{"role": "system", "content": system}] if system else []
    for message in list_objects(body.get("messages")):
        items += read_message(message)
    tools = [read_tool(tool) for tool in list_objects(body.get("tools"))]
    return read_request({**body, "tools": tools}, FIELDS, items, "messages")


def read_text(content: object) -> str:
    """Return the text of a content: a text, or blocks of text. Raises RequestError."""
    texts = [content] if isinstance(content, str) else []
    for block in list_objects(content):
        if block.get("type") == "text":
            texts.append(str(block.get("text")))
        elif block.get("type") not in SKIPPED:
            problem = f"blocks of type {block.get('type')} are not supported here. Remove it."
            raise RequestError(problem, "messages")
    kept = [each.partition("\n")[2] if each.startswith(BILLING) else each for each in texts]
    return "\n".join(filter(None, kept))


def read_message(message: Json) -> Iterator[Json]:
    """Yield a message as messages of a chat: the outputs of tools, then the rest."""
    blocks = list_objects(message.get("content"))
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for block in results:
        text = read_text(block.get("content"))
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
    text = read_text(message.get("content"))
    if text or calls or not results:
        yield {"role": message.get("role"), "content": text, "tool_calls": calls}


def read_tool(tool: Json) -> Json:
    """Return a tool in the Responses format."""
    if tool.get("type") not in (None, "custom"):
        return tool  # hosted
    kept: Json = {key: tool[key] for key in ("name", "description") if key in tool}
    return {**kept, "type": "function", "parameters": tool.get("input_schema")}


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
        key = {"tool_use": "input"}.get(block["type"], block["type"])
        blank: object = ""
        delta = {"type": f"{key}_delta", key: block[key]}
        if key == "input":
            blank = {}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block[key])}
        start = {"type": "content_block_start", "content_block": {**block, key: blank}}
        events.append({**start, "index": index})
        events.append({"type": "content_block_delta", "delta": delta, "index": index})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": ended, "usage": reply["usage"]})
    events.append({"type": "message_stop"})
    for event in events:
        yield str(event["type"]), event


def write_error(error: RequestError) -> Json:
    """Write an error."""
    kind = ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
