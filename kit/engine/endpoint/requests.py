"""Requests in one form for all dialects.

A dialect reads a body to a `Request`. Messages and tools are read by env.py, as those of a row are.
Sampling parameters (`temperature`, `seed` and others) are not used, since the run sets them: tokens
must be on-policy.

Protects: training, from a field of a request that would be ignored without a message.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import env
from gym_client import Json, find_nested
from kit.data import fields

WHERE = "the request"  # instead of a row's name, in errors of env.py
CONTEXT_CODE = "context_length_exceeded"
# Gym's model server takes a 400 with one of these for a conversation that is too long, and the
# episode ends as `length`. So no other error may have them.
OVERFLOW_WORDS = ("context length", "max_tokens")
IDS = "sampled"  # in a message: what Gym's fields claim, as a tuple of a prompt's and sampled ids
NAMESPACE = "__"  # between a tool's namespace and its name
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class RequestError(ValueError):
    """An error that answers a request. With the status 400, the request is refused.

    param: the field that is the reason. code: OpenAI's, if any.
    """

    def __init__(
        self, problem: str, param: str | None = None, code: str | None = None, status: int = 400
    ):
        super().__init__(problem)
        self.param = param
        self.code = code
        self.status = status


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


def make_overflow(problem: str) -> RequestError:
    """Make the error for a conversation that is too long, in the words that clients look for."""
    # Gym's model server takes "context length" for the end of an episode; Claude Code compacts its
    # history after "prompt is too long".
    problem = f"prompt is too long. The conversation exceeds the context length: {problem}."
    return RequestError(problem, "messages", CONTEXT_CODE)


def write_openai_error(error: RequestError) -> Json:
    """Write an error in the form of OpenAI's APIs."""
    message = str(error)
    if error.code != CONTEXT_CODE and error.param != "max_tokens":
        for words in OVERFLOW_WORDS:
            message = message.replace(words, words.replace(" ", "-").replace("_", "-"))
    kind = "server_error" if error.status in (422, 500) else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


# --- conversations that a client continues by an id ----------------------------------------------


def resume(body: Json, stored: dict[str, Json]) -> Json:
    """Return a body with the conversation before it, if it names one. Raises RequestError.

    stored: {id of a reply: its conversation}.
    """
    earlier_id = body.get("previous_response_id")
    earlier_id = earlier_id or find_nested(body, "thread", "previous_message_id")
    if not earlier_id:
        return body
    earlier = stored.get(str(earlier_id))
    if not earlier:
        problem = "previous_response_id or thread is not known. Send the whole conversation."
        raise RequestError(problem, "previous_response_id")
    key = "input" if "input" in earlier else "messages"
    return {**earlier, **body, key: earlier[key] + list_items(body.get(key))}


def make_resumable(body: Json, reply: Json) -> Json | None:
    """Return the conversation up to a reply, if the client may continue it by the reply's id."""
    if reply.get("object") == "response" and body.get("store") is not False:
        return {"input": list_items(body["input"]) + reply["output"]}
    if body.get("thread"):
        answer = {"role": "assistant", "content": reply["content"]}
        return {**body, "messages": [*body["messages"], answer]}
    return None


# --- reading -------------------------------------------------------------------------------------


def read_request(body: Json, kind: fields.Fields, items: object, param: str) -> Request:
    """Read what the dialects share. Raises RequestError.

    items: the messages, as a list of Responses items and chat messages. param: their field.
    """
    objects = list(fields.walk(kind, body, items))
    refused = fields.find_refused(objects)
    if refused:
        raise RequestError(refused[1], refused[0])
    if not isinstance(items, list) or not items:
        raise RequestError(f"{param} must be a list with an item. Add one.", param)
    try:
        messages = render_items(items)
    except env.DataError as error:
        raise RequestError(str(error), param) from error
    tools = read_tools(json.dumps(body.get("tools")))
    return Request(
        messages,
        tools.functions,
        choice=read_choice(body.get("tool_choice")),
        stop=read_stop(body),
        max_tokens=read_limit(body),
        forms=tools.forms,
        unused=fields.list_unused(objects) | tools.ignored,
    )


def read_field(body: Json, name: str, kind: type) -> Any:  # of this type, or None
    """Return a field, or None. Raises RequestError for another type."""
    value = body.get(name)
    if value is not None and type(value) is not kind:
        shown = fields.shorten(value)
        raise RequestError(f"{name}={shown} is not of the type {kind}. Correct it.", name)
    return value


def read_limit(body: Json) -> int | None:
    """Return the smallest limit of the response in tokens. Raises RequestError."""
    limits = [read_field(body, name, int) for name in LIMITS]
    given = [limit for limit in limits if limit is not None]
    if given and min(given) < 1:
        raise RequestError("max_tokens must be 1 or more. Raise it.", "max_tokens")
    return min(given, default=None)


def read_stop(body: Json) -> list[str]:
    """Return the texts that end a response. Raises RequestError."""
    stop = body.get("stop") or body.get("stop_sequences")
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("stop must be a text or a list of texts. Correct it.", "stop")
    return texts[:16]


def read_choice(choice: object) -> str:
    """Return the choice of tools: auto, none, or forced."""
    kind = choice.get("type") if isinstance(choice, dict) else choice or "auto"
    return str(kind) if kind in ("auto", "none") else "forced"


class Tools(NamedTuple):
    """The tools of a request."""

    functions: list[Json]  # in chat format
    forms: dict[str, str]  # {name: type} of those that are another type in the request
    ignored: set[str]  # types of hosted tools, which nobody here can run


@functools.lru_cache(maxsize=64)
def read_tools(text: str) -> Tools:
    """Read tools from JSON text, since the requests of agents have the same ones.

    Those of a namespace have its name before theirs. Raises RequestError.
    """
    tools = env.read_json(json.loads(text)) or []
    flat: list[object] = []
    forms: dict[str, str] = {}
    ignored: set[str] = set()
    for tool in map(env.flatten_tool, tools if isinstance(tools, list) else [tools]):
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


def list_items(given: object) -> list[Json]:
    """Return an input as a list of items. Raises RequestError."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError("input must be a text or a list of objects. Correct it.", "input")
    return items


def render_items(items: Sequence[Json]) -> list[Json]:
    """Render items to chat messages, the consecutive ones of the assistant to one.

    As `env.render_items`, but a message of the assistant keeps its place if it is empty, and the
    token ids that Gym's fields claim under the key IDS. Raises env.DataError.
    """
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
    if not all(ids is None or is_ids(ids) for ids in claims):
        raise env.DataError(f"{WHERE}: {fields.TOKEN_FIELDS[0]} must be a list of token ids.")
    if all(claims):
        message[IDS] = claims


def is_ids(value: object) -> bool:
    """Return whether a value is a list of token ids."""
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)
