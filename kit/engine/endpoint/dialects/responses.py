"""OpenAI's Responses API: /v1/responses.

Convenience: most agents speak chat as well; Codex speaks this API only.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator

from gym_client import Json, find_nested
from kit.data.fields import NOT_SUPPORTED, Fields
from kit.engine.endpoint import requests
from kit.engine.endpoint.requests import NAMESPACE, Request, RequestError
from kit.engine.endpoint.tree import Call

FIELDS = Fields(
    "",
    "model input instructions tools tool_choice max_output_tokens stream previous_response_id "
    "store text",
    dict.fromkeys(
        ("background", "conversation", "prompt", "top_logprobs"),
        NOT_SUPPORTED + "Remove it.",
    ),
)
write_error = requests.write_openai_error


def read(body: Json) -> Request:
    """Read the body of a request. Raises RequestError."""
    if find_nested(body, "text", "format", "type") not in (None, "text"):
        raise RequestError("The policy's text is not constrained. Use text.", "text.format")
    items = [read_item(item) for item in requests.list_items(body.get("input"))]
    if body.get("instructions"):
        items.insert(0, {"role": "system", "content": body["instructions"]})
    return requests.read_request(body, FIELDS, items, "input")


def read_item(item: Json) -> Json:
    """Return an item with a call of a function instead of another tool."""
    kind = item.get("type")
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")})
        return {**item, "type": "function_call", "arguments": arguments}
    if kind == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    if kind == "function_call" and item.get("namespace"):
        return {**item, "name": f"{item['namespace']}{NAMESPACE}{item.get('name')}"}
    return item


def write(body: Json, request: Request, call: Call) -> Json:
    """Write a response."""
    is_incomplete = call.ended == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
        "error": None,
        "model": body.get("model") or "policy",
        "output": [write_item(item, request) for item in call.response.items],
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "previous_response_id": body.get("previous_response_id"),
        "usage": {
            "input_tokens": call.prompt_length,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(call.sampled_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": call.prompt_length + len(call.sampled_ids),
        },
    }


def write_item(item: Json, request: Request) -> Json:
    """Write an item of a response, a call in the form of its tool."""
    if item["type"] != "function_call":
        return item
    call = {**item, "id": f"fc_{uuid.uuid4().hex}", "status": "completed"}
    form = request.forms.get(item["name"])
    if form == "namespace":
        namespace, _, name = item["name"].partition(NAMESPACE)
        call |= {"namespace": namespace, "name": name}
    elif form == "custom":
        text = call.pop("arguments")
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            text = json.loads(text)["input"]
        call |= {"type": "custom_tool_call", "input": str(text)}
    return call


def make_events(body: Json, reply: Json) -> Iterator[tuple[str, Json]]:
    """Yield the events of a stream, each item as one delta."""
    started = {**reply, "status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": "response.created", "response": started}]
    events.append({"type": "response.in_progress", "response": started})
    for index, item in enumerate(reply["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        blank: Json = {"summary": []}
        deltas: list[Json] = []  # of a thought: none
        if item["type"] == "message":
            part = item["content"][0]
            text = part["text"]
            place["content_index"] = 0
            blank = {"content": []}
            deltas = [
                {"type": "response.content_part.added", "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", "delta": text, "logprobs": []},
                {"type": "response.output_text.done", "text": text, "logprobs": []},
                {"type": "response.content_part.done", "part": part},
            ]
        elif item["type"] != "reasoning":
            is_custom = item["type"] == "custom_tool_call"
            key = "input" if is_custom else "arguments"
            kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
            done = {key: item[key]} if is_custom else {key: item[key], "name": item["name"]}
            blank = {key: ""}
            deltas = [
                {"type": f"response.{kind}.delta", "delta": item[key]},
                {"type": f"response.{kind}.done", **done},
            ]
        added = {"type": "response.output_item.added", "output_index": index}
        events.append({**added, "item": {**item, **blank, "status": "in_progress"}})
        events += [{**delta, **place} for delta in deltas]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{reply['status']}", "response": reply})
    for number, event in enumerate(events):
        yield event["type"], {**event, "sequence_number": number}
