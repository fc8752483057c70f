"""The requests of agents: the part of OpenAI's chat API that the policy endpoint supports.

A request that is malformed, or that needs more, is refused with a `RequestError`, which names the
field. kit/data/fields.py has the table of fields. The sampling parameters (`temperature`, `top_p`,
`seed` and others) are not used, since the run sets them: tokens must be on-policy.
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
from kit.data import fields

WHERE = "the request"  # instead of a row's name, in errors of env.py
CONTEXT_CODE = "context_length_exceeded"


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
        if kind not in env.TEXT_TYPES:
            raise PydanticCustomError("unsupported", "only text is supported, no images or files")
        return kind


def read_content(content: object) -> object:
    """Turn text into a list of one part, and null into an empty list."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def read_arguments(arguments: object) -> object:
    """Turn the arguments of a call into JSON text. null and an empty text are no arguments."""
    if not arguments:
        return "{}"
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


ReadJson = BeforeValidator(env.read_json)
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
    content: Content = []
    name: str | None = None

    def to_item(self) -> Json:
        """Return the message as env.render_items takes it."""
        item = {"role": "tool", "tool_call_id": self.tool_call_id, "name": self.name}
        return {**item, "content": join_parts(self.content)}


class Function(Shape):
    """The function of a tool call."""

    name: str
    arguments: Annotated[str, BeforeValidator(read_arguments)] = "{}"


class Call(Shape):
    """A tool call of an earlier response."""

    id: Text
    type: Literal["function"] = "function"
    function: Annotated[Function, ReadJson]


class Answer(Shape):
    """An earlier response. It has its token ids if the endpoint sampled it (Gym's fields)."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Annotated[Call, ReadJson]] | None, ReadJson] = None
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

    @property
    def thoughts(self) -> list[str | None]:
        """The thought of the message, under each of its names."""
        return [getattr(self, key) for key in env.THOUGHT_KEYS]

    def to_item(self) -> Json:
        """Return the message as env.render_items takes it."""
        return {
            "role": "assistant",
            "content": join_parts(self.content),
            "reasoning_content": next(filter(None, self.thoughts), None),  # Gym sends two
            "tool_calls": [call.model_dump() for call in self.tool_calls or []],
        }


class ToolFunction(Shape):
    """The function of a tool."""

    name: Text
    description: str | None = None
    parameters: Annotated[Json | None, ReadJson] = None


class Tool(Shape):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: Annotated[ToolFunction, ReadJson]


class StreamOptions(Shape):
    """The options of a streamed response."""

    include_usage: bool | None = None


AnyMessage = TextMessage | ToolMessage | Answer


class ChatRequest(Shape):
    """The body of a POST to /v1/chat/completions."""

    messages: list[Annotated[AnyMessage, Field(discriminator="role")]] = Field(min_length=1)
    tools: Annotated[list[Annotated[Tool, ReadJson]] | None, ReadJson] = None
    tool_choice: object = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: Annotated[Json | None, ReadJson] = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # The kit's field. A judge that is the policy sends false: its requests are no episode, so only
    # the length of the engine's context limits them.
    for_training: bool | None = None

    @property
    def chat_tools(self) -> list[Json]:
        """The tools of the prompt, in the form of a row's tools."""
        tools = [tool.model_dump() for tool in self.tools or []]
        return env.render_tools(sanitize_json(tools), WHERE)

    @property
    def template_arguments(self) -> Json:
        """The arguments that the request gives to the chat template."""
        arguments = {"reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})}
        return {key: value for key, value in arguments.items() if value is not None}

    def check_end(self) -> None:
        """Check that a response can follow the last message. Raises RequestError.

        The policy continues a text of the assistant that it did not write.
        """
        last = self.messages[-1]
        continues = isinstance(last, Answer) and not last.is_sampled
        if isinstance(last, Answer) and continues and (last.tool_calls or not last.content):
            name = f"messages[{len(self.messages) - 1}]"
            raise RequestError(f"{name} has no text, and no output of its call. Add one.", name)
        expected = {"add_generation_prompt": not continues, "continue_final_message": continues}
        for name, value in expected.items():
            if getattr(self, name) not in (None, value):
                problem = f"{name}={not value} does not fit the last message. Remove it."
                raise RequestError(problem, name)

    @property
    def max_length(self) -> int | None:
        """The limit of the response, in tokens."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)


def read_request(body: object) -> ChatRequest:
    """Read the JSON of a request. Raises RequestError."""
    if not isinstance(body, dict):
        shown = fields.shorten(body)
        raise RequestError(f"the body must be a JSON object, not {shown}. Correct it.")
    refused = fields.find_refused([(fields.REQUEST, body)])
    if refused:
        raise RequestError(refused[1], refused[0])
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
        role = fields.shorten(error["input"]["role"])
        expected = "system, developer, user, assistant or tool"
        return RequestError(f"{param} is {role}, which is no role. Use {expected}.", param)
    message = error["msg"][0].lower() + error["msg"][1:]
    problem = f"{param}={fields.shorten(error['input'])} is invalid: {message}. Correct it."
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
