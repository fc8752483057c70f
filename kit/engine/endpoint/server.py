"""The HTTP server of the policy endpoint.

A request is of the episode whose key it has: as a bearer token, as `x-api-key`, or as the beginning
/s/KEY of its path. With the endpoint's own key, it is of Gym's agents or of a judge (shared.py).
Agents retry calls without saying so. If the first connection is gone, or a header counts retries,
an equal body gets the answer to the first one.

Protects: the event loop and the memory of all episodes, from the requests of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from types import MappingProxyType

from aiohttp import web

import env
from gym_client import GymError, Json, sanitize_json
from kit.data.fields import shorten
from kit.engine.endpoint.dialects import Dialect, chat, messages, responses
from kit.engine.endpoint.requests import RequestError, make_overflow, make_resumable, resume
from kit.engine.endpoint.sessions import KEY_PREFIX, AgentSession, Flight, Sessions
from kit.engine.endpoint.shared import SharedClients
from kit.engine.endpoint.tree import Tree
from kit.engine.sampling import RolloutContext

# A request has the text of its conversation. Those of Gym's agents have the ids up to each turn.
BYTES_PER_TOKEN = 30
OTHER_BYTES = 2**20  # of tools, for example
MAX_TURNS = 100  # if the recipe has no limit
MAX_OBJECTS = 10**5  # objects and lists of a request
KEEP_ALIVE_S = 10.0
MODEL = "policy"  # the name of the model; requests may use any other, too
DIALECTS: MappingProxyType[str, Dialect] = MappingProxyType(
    {"v1/chat/completions": chat, "v1/responses": responses, "v1/messages": messages}
)
COUNT = "v1/messages/count_tokens"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # in JSON: half of a character

logger = logging.getLogger(__name__)


class Endpoint:
    """The routes of the policy endpoint."""

    def __init__(self, context: RolloutContext, api_key: str, sessions: Sessions | None = None):
        self.context = context
        self.api_key = api_key
        self.sessions = sessions or Sessions()
        self.shared = SharedClients(context, self.sessions.prompts)

    def make_app(self) -> web.Application:
        """Make the aiohttp application."""
        limit = self.find_limit(self.context.max_turns or MAX_TURNS)
        app = web.Application(client_max_size=limit)
        for prefix in ("/s/{key}", ""):
            app.router.add_route("*", prefix + "/{path:.*}", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, or send its error in JSON."""
        if request.method == "HEAD":  # a client looks whether the server is there
            return web.Response()
        path = request.match_info["path"]
        dialect = messages if path == COUNT else DIALECTS.get(path, chat)
        key = find_key(request)
        client = self.shared if key == self.api_key else self.sessions.by_key.get(key)
        try:
            if not client:
                # Claude Code repeats requests after a 401, but not after a 403.
                status = 403 if key.startswith(KEY_PREFIX) else 401
                problem = "wrong or missing API key. Use the key of this episode, or POLICY_API_KEY"
                raise RequestError(f"{problem}.", code="invalid_api_key", status=status)
            if (request.method, path) == ("GET", "v1/models"):
                model = {"id": MODEL, "object": "model", "created": int(time.time())}
                data = [{**model, "owned_by": "quintet"}]
                return web.json_response({"object": "list", "data": data, "has_more": False})
            if request.method != "POST" or path not in (*DIALECTS, COUNT):
                raise RequestError(f"there is no route {request.method} /{path}.", status=404)
            return await self.answer(request, dialect, client)
        except Exception as error:
            failure = describe(error, isinstance(client, AgentSession))
            return web.json_response(dialect.write_error(failure), status=failure.status)

    async def answer(
        self, request: web.Request, dialect: Dialect, client: AgentSession | SharedClients
    ) -> web.StreamResponse:
        """Answer a request for a response of the policy, or for the length of a prompt."""
        raw = await request.read()
        if len(raw) > self.find_limit(1) and isinstance(client, AgentSession):
            raise make_overflow(f"the body has {len(raw)} bytes")
        body = parse_body(raw)
        if request.match_info["path"] == COUNT:
            call = await self.sessions.prompts.build(self.context, Tree(), dialect.read(body))
            return web.json_response({"input_tokens": call.prompt_length})
        if isinstance(client, SharedClients):
            flight = Flight(asyncio.ensure_future(complete(client, dialect, body)))
        else:
            flight = join_flight(client, dialect, body, raw, request)
        response: web.StreamResponse
        if body.get("stream"):
            is_agent = isinstance(client, AgentSession)
            response = await send_stream(request, dialect, body, flight.task, is_agent)
        else:
            response = web.json_response(await asyncio.shield(flight.task))
        flight.is_answered = request.transport is not None and not request.transport.is_closing()
        return response

    def find_limit(self, turns: int) -> int:
        """Return the limit of a body in bytes."""
        return OTHER_BYTES + BYTES_PER_TOKEN * self.context.max_length * turns


def parse_body(body: bytes) -> Json:
    """Return the JSON of a request. Raises RequestError."""
    if body.count(b"{") + body.count(b"[") > MAX_OBJECTS:  # slow to parse
        raise RequestError(f"the body has over {MAX_OBJECTS} objects and lists. Remove some.")
    try:
        parsed = env.load_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}. Correct it.") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"the body must be a JSON object, not {shorten(parsed)}.")
    return sanitize_json(parsed) if SURROGATE.search(body) else parsed


def find_key(request: web.Request) -> str:
    """Find the key of a request."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    keys = (request.match_info.get("key"), bearer, request.headers.get("x-api-key"))
    return next(filter(None, keys), "")


def describe(error: Exception, is_agent: bool) -> RequestError:
    """Describe an error of a request, with the status that ends the client's work.

    Gym repeats a request after 404, 408, 429 and 5xx, which would sample again. So a failure is a
    422 for Gym. An agent's session is over then, so it gets a 500.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return make_overflow("the body is too large")
    if isinstance(error, RecursionError):
        return RequestError("the JSON of the request has too many levels. Remove some.")
    if isinstance(error, web.RequestPayloadError):
        return RequestError(f"the body cannot be read: {error}. Correct it.")
    if isinstance(error, GymError):
        return RequestError(str(error), code=error.reason, status=500 if is_agent else 422)
    logger.error("the policy endpoint cannot answer a request", exc_info=error)
    return RequestError(f"{error!r:.300}", status=500)


# --- one request ---------------------------------------------------------------------------------


async def complete(client: AgentSession | SharedClients, dialect: Dialect, body: Json) -> Json:
    """Return the body of the reply to a request. Raises as the client's `complete`."""
    stored = client.stored if isinstance(client, AgentSession) else {}
    whole = resume(body, stored)
    request = dialect.read(whole)
    call = await client.complete(request)
    reply = dialect.write(whole, request, call)
    call.token_fields = {}  # the tree of a batch has the ids once
    resumable = make_resumable(whole, reply)
    if resumable and isinstance(client, AgentSession):
        client.store(reply["id"], resumable)
    return reply


def join_flight(
    session: AgentSession, dialect: Dialect, body: Json, raw: bytes, request: web.Request
) -> Flight:
    """Start a call of an agent, or join the one that this request repeats."""
    digest = hashlib.blake2b(request.path.encode() + raw, digest_size=16).digest()
    flight = session.flights.get(digest)
    is_counted = request.headers.get("x-stainless-retry-count", "0") != "0"
    if flight and (is_counted or flight.is_lost):
        session.retry_count += 1
    else:
        flight = Flight(asyncio.ensure_future(complete(session, dialect, body)))
        session.flights[digest] = flight
    flight.transport = request.transport
    return flight


# --- streams -------------------------------------------------------------------------------------


async def send_stream(
    request: web.Request, dialect: Dialect, body: Json, task: asyncio.Future[Json], is_agent: bool
) -> web.StreamResponse:
    """Send a reply as server-sent events when it is sampled, and comments before.

    Raises the error of the task if no comment was sent.
    """
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    with contextlib.suppress(ConnectionError):  # the client may leave
        while not (await asyncio.wait([task], timeout=KEEP_ALIVE_S))[0]:
            if not stream.prepared:
                await stream.prepare(request)
            await stream.write(b": keep-alive\n\n")
        error = task.exception()
        if isinstance(error, Exception):
            if not stream.prepared:
                raise error
            events = [("error", dialect.write_error(describe(error, is_agent)))]
        else:
            events = list(dialect.make_events(body, task.result()))
        await stream.prepare(request)
        text = "".join(write_event(name, data) for name, data in events)
        if dialect is chat and not error:
            text += "data: [DONE]\n\n"
        await stream.write(text.encode())
        await stream.write_eof()
    return stream


def write_event(name: str, data: Json) -> str:
    """Write a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n"


@contextlib.asynccontextmanager
async def serve(
    context: RolloutContext, host: str, port: int, api_key: str, sessions: Sessions | None = None
) -> AsyncIterator[None]:
    """Serve the policy endpoint on host:port to agents and to clients with `api_key`."""
    app = Endpoint(context, api_key, sessions).make_app()
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
