"""The policy endpoint: an OpenAI-compatible server for Gym agents, which run the turns themselves.

    Gym's agent (/run) -> Gym's model server (vllm_model) -> POST /v1/chat/completions here -> vLLM

    openai_requests.py   which requests are supported
    openai_history.py    the prompt of a request, and whether it continues what was sampled before
    this file            the limits of an episode, the response, its stream, and the HTTP server

Each response has its token ids and log-probs. In the next request, Gym returns them with the
assistant's message. The next prompt starts with exactly these ids, so that no sampled token is
encoded again.

Protects: sampled tokens, since an agent's text is never encoded as what the policy wrote.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from gym_client import GymError, Json
from kit.chat.parsed_response import ParsedResponse
from kit.data.episode import LOG_PROBS, PROMPT_IDS, SAMPLED_IDS, TOKEN_FIELDS
from kit.engine.openai_history import Histories, Prompt, parse_offered
from kit.engine.openai_requests import CONTEXT_CODE, ChatRequest, RequestError, read_request
from kit.engine.sampling import RolloutContext, SampledResponse, sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BODY_BYTES = 2**28
# A request has the text of its conversation, and the ids up to each of its turns.
BYTES_PER_TOKEN = 30
MAX_TURNS = 100  # if the recipe has no limit
MAX_OBJECTS = 10**5  # objects and lists of a request
MODEL = "policy"  # the name of the model; requests may use any other, too
# Gym's model server takes a 400 with one of these for a conversation that is too long, and the
# episode ends as `length`. So no other error may have them.
OVERFLOW_WORDS = ("context length", "max_tokens")

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Reply(NamedTuple):
    """An HTTP response: its status and its JSON."""

    status: int
    body: Json


# --- errors --------------------------------------------------------------------------------------


def error_reply(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
) -> Reply:
    """Return an error in the form of OpenAI's API. kind: OpenAI's type of the error."""
    if code != CONTEXT_CODE and param != "max_tokens":
        for words in OVERFLOW_WORDS:
            message = message.replace(words, words.replace(" ", "-").replace("_", "-"))
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Reply(status, {"error": error})


# --- one request ---------------------------------------------------------------------------------


async def complete_chat(
    body: Any,  # any JSON
    context: RolloutContext,
    histories: Histories | None = None,
) -> Reply:
    """Answer a POST to /v1/chat/completions.

    histories: of this endpoint, so that an earlier check of the conversation counts. No error has a
    status for which Gym repeats the request (404, 408, 429, 5xx), since a repetition would sample
    again.
    """
    try:
        histories = histories or Histories(context)
        request = read_request(body)
        histories.warn_of_unused(body)
        prompt = await histories.build_prompt(request)
        room = find_room(prompt, request, context)
        samples = context.samples
        assert samples, "the policy endpoint is in the driver, whose context has a store"
        sampled = await sample(context, samples.sampling, uuid.uuid4().hex, prompt.ids, room)
        tools = [] if request.tool_choice == "none" else request.tools
        response = await parse_offered(context, sampled.ids, tools, prompt.ids)
        if request.for_training is not False:
            samples.add(prompt.ids, sampled)
    except RequestError as error:
        return error_reply(400, str(error), error.param, error.code)
    except RecursionError:
        return error_reply(400, "the JSON of the request has too many levels. Remove some.")
    except GymError as error:
        return error_reply(422, str(error), code=error.reason, kind="server_error")
    return Reply(200, make_completion(request, prompt, sampled, response, context))


def find_room(prompt: Prompt, request: ChatRequest, context: RolloutContext) -> int:
    """Return how many tokens the response may have. Raises RequestError if there are none.

    The limits are those of an episode whose turns the kit runs: of the first prompt, of all tokens
    after it, and of the turns. An episode with a rewritten history fails anyway. For it and for a
    judge's request, only the engine's context is a limit.
    """
    length = len(prompt.ids)
    max_prompt = context.max_prompt_length
    max_response = context.max_response_length
    if prompt.is_rewritten or request.for_training is False:
        room = max_prompt + max_response - length
        problem = f"{length} tokens, data.max_prompt_length + max_response_length = {length + room}"
    elif prompt.first_length > max_prompt:
        room = 0
        problem = f"a prompt of {length} tokens, data.max_prompt_length={max_prompt}"
    else:
        room = max_response - (length - prompt.first_length)
        problem = f"{max_response - room} tokens after the first prompt"
        problem += f", data.max_response_length={max_response}"
    if context.max_turns and prompt.turn_count >= context.max_turns:
        room = 0
        problem = f"{prompt.turn_count} turns, max_assistant_turns={context.max_turns}"
    if room <= 0:
        problem = f"The conversation exceeds the context length: {problem}."
        raise RequestError(problem, "messages", CONTEXT_CODE)
    return min(room, request.max_length or room)


def make_completion(
    request: ChatRequest,
    prompt: Prompt,
    sampled: SampledResponse,
    response: ParsedResponse,
    context: RolloutContext,
) -> Json:
    """Return a chat completion of OpenAI's API, with Gym's fields for token ids and log-probs."""
    if sampled.ids[-1] not in context.stop_ids:
        finish_reason = "length"
    elif response.calls:
        finish_reason = "tool_calls"
    else:
        finish_reason = "stop"
    log_probs = None
    # Gym's model server sets both fields, but reads the log-probs of the message.
    if request.logprobs and not request.return_tokens_as_token_ids:
        log_probs = {"content": list_log_probs(sampled, context.tokenizer), "refusal": None}
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "logprobs": log_probs,
        "message": make_message(prompt, sampled, response),
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": len(sampled.ids),
            "total_tokens": len(prompt.ids) + len(sampled.ids),
        },
    }


def make_message(prompt: Prompt, sampled: SampledResponse, response: ParsedResponse) -> Json:
    """Return the assistant's message.

    The thought is in `reasoning_content`, as vLLM's server has it. So an agent or a verifier does
    not take it for the answer. If the thought is not closed, the content is empty.
    """
    tool_calls = []
    for call in response.calls:
        function = {"name": call["name"], "arguments": call["arguments"]}
        tool_calls.append({"id": call["call_id"], "type": "function", "function": function})
    message = {"role": "assistant", "content": response.text, "tool_calls": tool_calls}
    if response.reasoning:
        message["reasoning_content"] = response.reasoning
    token_fields = {
        PROMPT_IDS: prompt.ids,
        SAMPLED_IDS: sampled.ids,
        LOG_PROBS: sampled.log_probs,
    }
    return message | token_fields


def list_log_probs(sampled: SampledResponse, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """Return the log-probs of a response in the form of OpenAI's API."""
    entries = []
    for token_id, log_prob in zip(sampled.ids, sampled.log_probs, strict=True):
        token = str(tokenizer.decode([token_id]))
        entry = {"token": token, "logprob": log_prob, "bytes": list(token.encode())}
        entries.append({**entry, "top_logprobs": []})
    return entries


# --- streams -------------------------------------------------------------------------------------


def make_chunks(completion: Json, include_usage: bool) -> Iterator[Json]:
    """Yield the chunks of a stream that has the contents of a completion.

    The first chunk has the token ids.
    """
    choice = completion["choices"][0]
    message = choice["message"]
    deltas = [{key: message[key] for key in ("role", *TOKEN_FIELDS)}]
    deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    for index, call in enumerate(message["tool_calls"]):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    deltas.append({})
    shared = {**completion, "object": "chat.completion.chunk"}
    usage = shared.pop("usage")
    if include_usage:
        shared["usage"] = None
    for number, delta in enumerate(deltas):
        is_last = number == len(deltas) - 1
        part = {
            "index": 0,
            "delta": delta,
            "logprobs": choice["logprobs"] if number == 0 else None,
            "finish_reason": choice["finish_reason"] if is_last else None,
        }
        yield {**shared, "choices": [part]}
    if include_usage:
        yield {**shared, "choices": [], "usage": usage}


async def send_stream(
    request: web.Request, completion: Json, include_usage: bool
) -> web.StreamResponse:
    """Send a completion as server-sent events. The response has been sampled completely."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    with contextlib.suppress(ConnectionError):  # the client may leave
        await stream.prepare(request)
        for chunk in make_chunks(completion, include_usage):
            await stream.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
    return stream


# --- the server ----------------------------------------------------------------------------------


class Endpoint:
    """The routes of the policy endpoint."""

    def __init__(self, context: RolloutContext, api_key: str):
        self.context = context
        self.api_key = api_key
        self.histories = Histories(context)

    def make_app(self) -> web.Application:
        """Make the aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.handle_errors])
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_get("/v1/models", self.models)
        return app

    @web.middleware
    async def handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and turn errors into JSON in the form of OpenAI's API."""
        if request.headers.get("Authorization") != f"Bearer {self.api_key}":
            problem = "wrong or missing API key. Use the key in POLICY_API_KEY of the run."
            return to_response(error_reply(401, problem, code="invalid_api_key"))
        try:
            return await handler(request)
        except web.HTTPException as error:  # no such route, or a body that is too long
            problem = f"{request.method} {request.path}: {error.reason}"
            reply = error_reply(error.status, problem)
        except Exception as error:
            logger.exception("the policy endpoint cannot answer a request")
            reply = error_reply(500, f"{error!r:.300}", kind="server_error")
        return to_response(reply)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of an agent."""
        try:
            body = self.parse_body(await request.read())
        except (ValueError, RecursionError, web.RequestPayloadError) as error:
            return to_response(error_reply(400, f"the body is not JSON: {error}. Correct it."))
        reply = await complete_chat(body, self.context, self.histories)
        if reply.status != 200 or not body.get("stream"):
            return to_response(reply)
        options = body.get("stream_options") or {}
        return await send_stream(request, reply.body, bool(options.get("include_usage")))

    def parse_body(self, body: bytes) -> Json:
        """Return the JSON of a request. Raises ValueError before it parses a long one."""
        turns = self.context.max_turns or MAX_TURNS
        limit = 2**20 + BYTES_PER_TOKEN * self.context.max_length * turns
        if len(body) > limit or body.count(b"{") + body.count(b"[") > MAX_OBJECTS:
            raise ValueError(f"over {limit} bytes or {MAX_OBJECTS} objects and lists")
        return json.loads(body)

    async def models(self, request: web.Request) -> web.Response:
        """List the one model."""
        model = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "quintet"}
        return to_response(Reply(200, {"object": "list", "data": [model]}))


def to_response(reply: Reply) -> web.Response:
    """Return a reply as an HTTP response."""
    return web.json_response(reply.body, status=reply.status)


@contextlib.asynccontextmanager
async def serve(context: RolloutContext, host: str, port: int, api_key: str) -> AsyncIterator[None]:
    """Serve the policy endpoint on host:port to clients with `api_key`."""
    runner = web.AppRunner(Endpoint(context, api_key).make_app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
