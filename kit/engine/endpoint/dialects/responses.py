"""OpenAI's Responses API: /v1/responses.

Convenience: most agents speak chat as well; Codex speaks this API only.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator

from gym_client import Json
from kit.data.fields import NOT_SUPPORTED, Fields
from kit.engine.endpoint.requests import (
    NAMESPACE,
    Request,
    RequestError,
    check_fields,
    read_choice,
    read_items,
    read_limit,
    read_tools,
    write_openai_error,
)
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
write_error = write_openai_error


def read(body: Json) -> Request:
    """Read the body of a request. Raises RequestError."""
    unused = check_fields(FIELDS, body, body.get("input"))
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type", "text") != "text":
        raise RequestError("The policy's text is not constrained. Use text.", "text.format")
    items = [read_item(item) for item in list_items(body.get("input"))]
    if body.get("instructions"):
        items.insert(0, {"role": "system", "content": body["instructions"]})
    tools, forms, ignored = read_tools(body.get("tools"))
    return Request(
        read_items(items, "input"),
        tools,
        choice=read_choice(body),
        max_tokens=read_limit(body, "max_output_tokens"),
        forms=forms,
        unused=unused | ignored,
    )


def list_items(given: object) -> list[Json]:
    """Return an input as a list of items. Raises RequestError."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError("input must be a text or a list of objects. Correct it.", "input")
    return items


def read_item(item: Json) -> Json:
    """Return an item with a call of a function instead of another tool."""
    kind = str(item.get("type") or "message")
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")})
        return {**item, "type": "function_call", "arguments": arguments}
    if kind == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    if kind == "function_call" and item.get("namespace"):
        return {**item, "name": f"{item['namespace']}{NAMESPACE}{item.get('name')}"}
    return item


def resume(body: Json, stored: dict[str, Json]) -> Json:
    """Return the body with the items of the conversation that it continues."""
    earlier = body.get("previous_response_id")
    if not earlier:
        return body
    if not isinstance(earlier, str) or earlier not in stored:
        problem = "previous_response_id is not known. Send the whole conversation."
        raise RequestError(problem, "previous_response_id")
    return {**body, "input": stored[earlier]["input"] + list_items(body.get("input"))}


def store(body: Json, reply: Json) -> Json | None:
    """Return the conversation with the reply."""
    if body.get("store") is False:
        return None
    return {"input": list_items(body.get("input")) + reply["output"]}


def write(body: Json, request: Request, call: Call) -> Json:
    """Write a response."""
    is_incomplete = call.ended == "length"
    items = [write_item(item, request) for item in call.response.items]
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_incomplete else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
        "error": None,
        "model": body.get("model") or "policy",
        "output": items,
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
        blank: Json
        deltas: list[Json]
        opened = {"output_index": index, "type": "response.output_item.added"}
        if item["type"] == "message":
            part = item["content"][0]
            place["content_index"] = 0
            deltas = [
                {"type": "response.content_part.added", "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", "part": part},
            ]
            blank = {"content": []}
        elif item["type"] == "reasoning":
            deltas = []
            blank = {"summary": []}
        else:
            is_custom = item["type"] == "custom_tool_call"
            key = "input" if is_custom else "arguments"
            kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
            name = {} if is_custom else {"name": item["name"]}
            deltas = [
                {"type": f"response.{kind}.delta", "delta": item[key]},
                {"type": f"response.{kind}.done", key: item[key], **name},
            ]
            blank = {key: ""}
        events.append({**opened, "item": {**item, **blank, "status": "in_progress"}})
        events += [{**delta, **place} for delta in deltas]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{reply['status']}", "response": reply})
    for number, event in enumerate(events):
        yield event["type"], {**event, "sequence_number": number}
