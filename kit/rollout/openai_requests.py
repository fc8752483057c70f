"""The requests of agents: the part of OpenAI's chat API that the policy endpoint supports.

A request that is malformed, or that needs more, is refused with a `RequestError`, which names the
field. Fields that are not listed here are ignored. Among them are the sampling parameters
(`temperature`, `top_p`, `seed` and others), since the run sets them: tokens must be on-policy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

import env
from gym_client import Json, sanitize_json

WHERE = "the request"  # instead of a row's name, in errors of env.py
CONTEXT_CODE = "context_length_exceeded"
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_SHOWN = 60  # characters of a value in an error

# {field: (the values that are supported, why others are not)}
SUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((None, 1), "A request gets one response. Send several requests"),
    "tool_choice": ((None, "auto", "none"), "The policy decides which tools it calls. Use auto"),
    "response_format": ((None, {"type": "text"}), "The policy's text is not constrained. Use text"),
    "stop": ((None, "", []), "A response ends with a stop token of the model. Remove stop"),
    "top_logprobs": ((None, 0), "Only sampled tokens have a log-prob. Use 0"),
    "functions": ((None, []), "OpenAI has replaced it. Use tools"),
    "function_call": ((None, "auto", "none"), "OpenAI has replaced it. Use tools"),
    "add_generation_prompt": ((None, True), "Each response is a new message. Remove it"),
    "continue_final_message": ((None, False), "Each response is a new message. Remove it"),
}


class RequestError(ValueError):
    """A request that is refused. param: the field that is the reason. code: OpenAI's, if any."""

    def __init__(self, problem: str, param: str | None = None, code: str | None = None):
        super().__init__(problem)
        self.param = param
        self.code = code


# --- the shape of a request ----------------------------------------------------------------------


class Shape(BaseModel):
    """A JSON object of a request. Other fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Part(Shape):
    """A part of a message's content."""

    type: str
    text: str

    @field_validator("type")
    @classmethod
    def check_type(cls, kind: str) -> str:
        """Refuse images, audio and files."""
        if kind not in TEXT_PARTS:
            raise PydanticCustomError("unsupported", "only text is supported, no images or files")
        return kind


def read_content(content: object) -> object:
    """Turn text into a list of one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def read_arguments(arguments: object) -> object:
    """Turn the arguments of a call into JSON text."""
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


Content = Annotated[list[Part], BeforeValidator(read_content)]
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def join_parts(parts: Sequence[Part] | None) -> str:
    """Join the texts of a content."""
    return "".join(part.text for part in parts or [])


class TextMessage(Shape):
    """A message of the user, the system or the developer."""

    role: Literal["system", "developer", "user"]
    content: Content

    def to_item(self) -> Json:
        """Return the message as env.render_items takes it."""
        return {"role": self.role, "content": join_parts(self.content)}


class ToolMessage(Shape):
    """The output of a tool call."""

    role: Literal["tool"]
    tool_call_id: Text
    content: Content
    name: str | None = None

    def to_item(self) -> Json:
        """Return the message as env.render_items takes it."""
        item = {"role": "tool", "tool_call_id": self.tool_call_id, "name": self.name}
        return {**item, "content": join_parts(self.content)}


class Function(Shape):
    """The function of a tool call."""

    name: str
    arguments: Annotated[str, BeforeValidator(read_arguments)]


class Call(Shape):
    """A tool call of an earlier response."""

    id: Text
    type: Literal["function"] = "function"
    function: Function


class Answer(Shape):
    """An earlier response. It has its token ids if the endpoint sampled it (Gym's fields)."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    prompt_token_ids: list[TokenId] | None = None
    generation_token_ids: list[TokenId] | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether the message has the token ids of its prompt and of its response."""
        return bool(self.prompt_token_ids and self.generation_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the conversation up to the end of this response."""
        return [*(self.prompt_token_ids or []), *(self.generation_token_ids or [])]

    def to_item(self) -> Json:
        """Return the message as env.render_items takes it."""
        return {
            "role": "assistant",
            "content": join_parts(self.content),
            "reasoning_content": self.reasoning_content or self.reasoning,  # Gym sends both
            "tool_calls": [call.model_dump() for call in self.tool_calls or []],
        }


class ToolFunction(Shape):
    """The function of a tool."""

    name: Text
    description: str | None = None
    parameters: Json | None = None


class Tool(Shape):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(Shape):
    """The options of a streamed response."""

    include_usage: bool | None = None


AnyMessage = TextMessage | ToolMessage | Answer


class ChatRequest(Shape):
    """The body of a POST to /v1/chat/completions."""

    messages: list[Annotated[AnyMessage, Field(discriminator="role")]] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: object = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # The kit's field. A judge that is the policy sends false: its requests are no episode, so only
    # the length of the engine's context limits them.
    for_training: bool | None = None

    @property
    def chat_tools(self) -> list[Json]:
        """The tools of the prompt, in the form of a row's tools."""
        tools = [tool.model_dump() for tool in self.tools or []]
        return env.render_tools(sanitize_json(tools), WHERE)

    @property
    def max_length(self) -> int | None:
        """The limit of the response, in tokens."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)


def read_request(body: object) -> ChatRequest:
    """Read the JSON of a request. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {show(body)}. Correct it.")
    for field, (values, reason) in SUPPORTED.items():
        value = body.get(field)
        if value not in values:
            raise RequestError(f"{field}={show(value)} is not supported. {reason}.", field)
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise describe_error(error.errors(include_url=False)[0]) from None


def describe_error(error: ErrorDetails) -> RequestError:
    """Describe the first thing that is wrong with a request."""
    param = name_field(error)
    if error["type"] in ("missing", "union_tag_not_found"):
        return RequestError(f"{param} is missing. Add it.", param)
    if error["type"] == "union_tag_invalid":
        role = show(error["input"]["role"])
        expected = "system, developer, user, assistant or tool"
        return RequestError(f"{param} is {role}, which is no role. Use {expected}.", param)
    message = error["msg"][0].lower() + error["msg"][1:]
    problem = f"{param}={show(error['input'])} is invalid: {message}. Correct it."
    return RequestError(problem, param)


def name_field(error: ErrorDetails) -> str:
    """Return the name of the field with an error, such as `messages[0].content`."""
    path = list(error["loc"])
    if path[0] == "messages" and len(path) > 2:
        del path[2]  # the role, by which pydantic chose the shape of the message
    if error["type"].startswith("union_tag"):
        path.append("role")
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.removeprefix(".")


def show(value: object) -> str:
    """Return the beginning of a value, for an error."""
    text = repr(sanitize_json(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
