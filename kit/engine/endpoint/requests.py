"""Requests in one form for all dialects.

A dialect reads a body to a `Request`. Messages and tools are read by env.py, as those of a row are.
Sampling parameters (`temperature`, `seed` and others) are not used, since the run sets them: tokens
must be on-policy.

Protects: training, from a field of a request that would be ignored without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, NamedTuple

import env
from gym_client import Json, sanitize_json
from kit.data import fields

WHERE = "the request"  # instead of a row's name, in errors of env.py
CONTEXT_CODE = "context_length_exceeded"
# Gym's model server takes a 400 with one of these for a conversation that is too long, and the
# episode ends as `length`. So no other error may have them.
OVERFLOW_WORDS = ("context length", "max_tokens")
IDS = "sampled"  # in a message: what Gym's fields claim, as a tuple of a prompt's and sampled ids
NAMESPACE = "__"  # between a tool's namespace and its name
CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class RequestError(ValueError):
    """A request that is refused. param: the field that is the reason. code: OpenAI's, if any."""

    def __init__(self, problem: str, param: str | None = None, code: str | None = None):
        super().__init__(problem)
        self.param = param
        self.code = code


@dataclass
class Request:
    """One request for a response of the policy."""

    messages: list[Json]  # of a chat
    tools: list[Json]  # of the prompt, in chat format
    choice: str = "auto"  # of tools: auto, none, or forced
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    room: int = 0  # tokens that the response may have
    forms: dict[str, str] = field(default_factory=dict)  # {name: custom or namespace} of tools
    hidden: set[str] = field(default_factory=set)  # names of tools that must not be called
    template_arguments: Json = field(default_factory=dict)
    for_training: bool = True
    unused: set[str] = field(default_factory=set)  # fields that are known and ignored

    @property
    def callable_tools(self) -> list[Json]:
        """Return the tools that the response may call."""
        return [] if self.choice == "none" else self.tools

    @property
    def callable_names(self) -> set[str]:
        """Return the names of these tools."""
        return {tool["function"]["name"] for tool in self.callable_tools} - self.hidden


class Failure(NamedTuple):
    """An error of a request."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


def write_openai_error(failure: Failure) -> Json:
    """Write an error in the form of OpenAI's APIs."""
    status, message, param, code = failure
    if code != CONTEXT_CODE and param != "max_tokens":
        for words in OVERFLOW_WORDS:
            message = message.replace(words, words.replace(" ", "-").replace("_", "-"))
    kind = "invalid_request_error" if status in (400, 401, 403, 404, 413) else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# --- reading -------------------------------------------------------------------------------------


def check_fields(kind: fields.Fields, body: Json, messages: object) -> set[str]:
    """Return the fields of a body that are not used. Raises RequestError for a refused one."""
    refused = fields.find_refused([(kind, body)])
    if refused:
        raise RequestError(refused[1], refused[0])
    return fields.list_unused(fields.walk(kind, body, messages))


def read_field(body: Json, name: str, kind: type | UnionType, default: Any) -> Any:  # any JSON
    """Return a field, or the default if it is null. Raises RequestError for another type."""
    value = body.get(name)
    if value is None:
        return default
    is_flag = isinstance(value, bool) and kind is not bool
    if is_flag or not isinstance(value, kind):
        shown = fields.shorten(value)
        raise RequestError(f"{name}={shown} is not of the type {kind}. Correct it.", name)
    return value


def read_limit(body: Json, *names: str) -> int | None:
    """Return the smallest of some limits in tokens. Raises RequestError."""
    limits = [read_field(body, name, int, None) for name in names]
    given = [limit for limit in limits if limit is not None]
    if given and min(given) < 1:
        raise RequestError(f"{names[0]} must be 1 or more. Raise it.", names[0])
    return min(given, default=None)


def read_stop(body: Json, name: str) -> list[str]:
    """Return the texts that end a response. Raises RequestError."""
    stop = body.get(name)
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts. Correct it.", name)
    return texts[:16]


def read_choice(body: Json) -> str:
    """Return the choice of tools: auto, none, or forced."""
    choice = body.get("tool_choice")
    kind = choice.get("type", "forced") if isinstance(choice, dict) else choice
    return kind if kind in ("auto", "none") else "auto" if kind is None else "forced"


class Tools(NamedTuple):
    """The tools of a request."""

    functions: list[Json]  # in chat format
    forms: dict[str, str]  # {name: type} of those that are another type in the request
    ignored: set[str]  # types of hosted tools, which nobody here can run


def read_tools(given: object) -> Tools:
    """Read tools. Those of a namespace have its name before theirs. Raises RequestError."""
    tools = env.read_json(given) or []
    flat: list[object] = []
    forms: dict[str, str] = {}
    ignored: set[str] = set()
    for tool in map(env.flatten_tool, sanitize_json(tools if isinstance(tools, list) else [tools])):
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if not isinstance(tool, dict) or kind == "function":
            flat.append(tool)
        elif kind == "namespace":
            for each in fields.list_objects(tool.get("tools")):
                name = f"{tool.get('name')}{NAMESPACE}{each.get('name')}"
                flat.append({**each, "name": name})
                forms[name] = "namespace"
        elif kind == "custom":
            flat.append({**tool, "type": "function", "parameters": CUSTOM_SCHEMA})
            forms[str(tool.get("name"))] = "custom"
        else:
            ignored.add(f"tools.{kind}")
    try:
        return Tools(env.render_tools(flat, WHERE), forms, ignored)
    except env.DataError as error:
        raise RequestError(str(error), "tools") from error


def read_items(items: object, param: str) -> list[Json]:
    """Read Responses items and chat messages to chat messages, as `env.render_items` does.

    A message of the assistant keeps its place if it is empty, and the token ids that Gym's fields
    claim under the key IDS. Raises RequestError.
    """
    if not isinstance(items, list) or not items:
        raise RequestError(f"{param} must be a list with an item. Add one.", param)
    try:
        return render_items(sanitize_json(items))
    except env.DataError as error:
        raise RequestError(str(error), param) from error


def render_items(items: Sequence[Json]) -> list[Json]:
    """Render items to chat messages, the consecutive ones of the assistant to one."""
    messages: list[Json] = []
    open_calls: dict[str, str] = {}  # {call id: function name}
    for item in items:
        kind = env.check_item_type(item, WHERE)
        role = item.get("role") if kind == "message" else None
        if kind == "function_call_output" or role == "tool":
            messages.append(env.render_tool_output(item, open_calls, WHERE))
        elif kind == "message" and role != "assistant":
            messages.append(env.render_message(item, WHERE))
        else:
            last = messages[-1] if messages else {"role": ""}
            is_own = IDS in last or fields.TOKEN_FIELDS[1] in item  # a whole response
            if last["role"] != "assistant" or is_own:
                messages.append({"role": "assistant", "content": ""})
            add_answer(messages[-1], item, kind)
            for call in messages[-1].get("tool_calls", []):
                open_calls[call["id"]] = call["function"]["name"]
    if env.list_images(messages, WHERE):
        raise env.DataError(f"{WHERE}: only text is supported, no images. Remove them.")
    return messages


def add_answer(message: Json, item: Json, kind: str) -> None:
    """Add an item to a message of the assistant, with what it claims about token ids."""
    env.extend_assistant_message(message, item, kind, WHERE)
    claims = [item.get(name) for name in fields.TOKEN_FIELDS[:2]]
    for ids in claims:
        if ids is not None and not is_ids(ids):
            raise env.DataError(f"{WHERE}: {fields.TOKEN_FIELDS[0]} must be a list of token ids.")
    if all(claims):
        message[IDS] = claims


def is_ids(value: object) -> bool:
    """Return whether a value is a list of token ids."""
    is_list = isinstance(value, list)
    return is_list and all(type(i) is int and 0 <= i < 2**31 for i in value)  # type: ignore[attr-defined]
