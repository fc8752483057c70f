"""The requests of agents: the part of OpenAI's chat API that the policy endpoint supports.

A request that is malformed, or that needs more, is refused with a `RequestError`, which names the
field. kit/data/fields.py has the table of fields. The sampling parameters (`temperature`, `top_p`,
`seed` and others) are not used, since the run sets them: tokens must be on-policy. Messages and
tools are read by env.py, as those of a row are.

vLLM's ChatCompletionRequest is not used: it refuses arguments of calls that are objects, finds a
wrong content only when it is read, and takes seconds to import.

Protects: training, from a field of a request that would be ignored silently.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

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


def read_tools(tools: object) -> list[Json]:
    """Read the tools of the prompt, in the form of a row's tools. Raises env.DataError."""
    return env.render_tools(sanitize_json(tools) or [], WHERE)


ReadJson = BeforeValidator(env.read_json)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Message(BaseModel):
    """A message. A response that the endpoint sampled has its token ids, in Gym's fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    type: object = None  # of a Responses item, which is no message of a chat
    prompt_token_ids: list[TokenId] | None = None
    generation_token_ids: list[TokenId] | None = None
    generation_log_probs: object = None  # a claim

    @property
    def is_sampled(self) -> bool:
        """Return whether it is a response with the token ids of its prompt and of itself."""
        has_ids = bool(self.prompt_token_ids and self.generation_token_ids)
        return self.role == "assistant" and has_ids

    @property
    def token_ids(self) -> list[int]:
        """Return the token ids of the conversation up to the end of this response."""
        return [*(self.prompt_token_ids or []), *(self.generation_token_ids or [])]

    @functools.cached_property
    def item(self) -> Json:
        """Return the message as env.render_items takes it."""
        item: Json = sanitize_json({**(self.model_extra or {}), "role": self.role})
        return item


class ChatRequest(BaseModel):
    """The body of a POST to /v1/chat/completions. Other fields are ignored."""

    model_config = ConfigDict(strict=True)

    messages: list[Message] = Field(min_length=1)
    tools: Annotated[list[Json], BeforeValidator(read_tools)] = []
    tool_choice: object = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    chat_template_kwargs: Annotated[Json | None, ReadJson] = None
    reasoning_effort: str | None = None
    # The kit's field. A judge that is the policy sends false: its requests are no episode, so only
    # the length of the engine's context limits them.
    for_training: bool | None = None

    @property
    def template_arguments(self) -> Json:
        """Return the arguments that the request gives to the chat template."""
        arguments = {"reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})}
        return {key: value for key, value in arguments.items() if value is not None}

    @property
    def max_length(self) -> int | None:
        """Return the limit of the response, in tokens."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)


def read_request(body: object) -> ChatRequest:
    """Read the JSON of a request. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {fields.shorten(body)}.")
    refused = fields.find_refused([(fields.REQUEST, body)])
    if refused:
        raise RequestError(refused[1], refused[0])
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"]))
        raise RequestError(f"{param}: {first['msg']}. Correct it.", param) from None
