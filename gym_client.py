"""NeMo Gym over HTTP: sessions, tools, environments that step, agents, verdicts, outages.

Lift this file alone into another project; it needs only aiohttp:

    import asyncio, json
    from gym_client import Gym, message_response

    async def main():
        row = json.loads(open("rows.jsonl").readline())        # one Gym row, verbatim
        async with Gym({"mcqa": "http://127.0.0.1:8001"}) as gym:
            async with gym.session("mcqa", row) as session:    # POST /seed_session, its own cookies
                verdict = await session.verify(message_response("The answer is \\\\boxed{B}"))
        print(verdict.reward)

    asyncio.run(main())

Three kinds of server, told apart by the routes they publish (`Gym.kind`):

    verify   /seed_session, tools as routes of their own, /verify: `Session.call_tool`, `Session.verify`
    step     /reset, /step, /close, as Gymnasium has them: `Session.observation`, `Session.step`
    agent    /run: Gym's own agent talks to the model and comes back with the verdict: `Gym.run`

The error model. A verdict holds a reward that the verifier meant. Every failure raises `GymError`, whose `reason`
is one short word that ends up in the metrics as `rollout/failed/<reason>` and never in the loss:

    connect       nothing listened, or the connection broke
    timeout       no answer within the deadline (never repeated: the deadline is the caller's patience)
    http_<code>   any status but 200; 408, 429, 502, 503, 504 say "not now", 500 is a crash of the verifier,
                  which may be the policy's own text, other 4xx are for good
    bad_answer    200, but not a JSON object with a finite numeric reward
    too_large     an answer of more than MAX_ANSWER_BYTES, which is not read to its end
    masked        200, but the reward is disowned (`mask_sample`, `failure_kind`, `_ng_failure_class`: no judge, say)
    session_lost  the server answered out of another session than the one it had opened, or was away since
    server_down   `ServerDownError`: this one should end the run, as all others end an episode

What is repeated. Gym's sessions live in the server's memory behind a signed cookie, so a shared cookie jar would
merge episodes, and a session cannot be taken up again after a failure. A call is therefore repeated (connect,
session_lost and "not now" up to `attempts` times, 500 once, with backoff and jitter) only as a whole new session:
new cookies, /seed_session, /verify. Once a tool was called or a step made there is nothing to go back to, and the
first failure is the episode's. A tool's own refusal (4xx but 408 and 429, and 500) is no failure: its text goes to
the model, as Gym's agents do it.

A server that goes away. connect, timeout, 502, 503 and 504 are no answers; every other status is one. The first call
without an answer begins an outage of its server (a timeout: as of the call's begin), the next answer to anybody ends
it. While it lasts, what may be repeated is repeated beyond `attempts`, at most 5 s apart: a server that is back
within `outage_budget_s` costs time, not episodes. Past that every call without an answer raises `ServerDownError`; only
after a timeout is the server first asked for /openapi.json, as one slow verifier is no outage. An outage in which
nobody asked for QUIET_S may be over: the next failure begins another.

A session dies with its server. Where a tool call, a step, or a verify after tool calls fails by that, the GymError
is `lost`: the episode is over, but a new one of the same row may succeed. A server that is back may take the old
cookie, begin at nothing and pay for less than was done. So once nothing listened, or `Gym.restarted` was called, no
older session goes on: it is lost, or where no tool has touched it, opened anew.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import random
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

NOT_NOW = {408, 429, 502, 503, 504}  # statuses by which a server says: try again
AWAY = {502, 503, 504}  # those that come from in front of a server that is not there
MAX_ANSWER_BYTES = 64 * 2**20
QUIET_S = 15.0  # well over the pauses between tries
RESERVED = {"seed_session", "verify", "reset", "step", "close", "aggregate_metrics", "run", "mcp"}  # never tools
T = TypeVar("T")


class GymError(Exception):
    """A call that produced no verdict. `reason` is its short name, `retry` whether to try again, `lost` whether the
    server went away under the episode's session, so that a new episode may succeed."""

    def __init__(self, reason: str, message: str, retry: bool = False, lost: bool = False):
        super().__init__(message)
        self.reason, self.retry, self.lost = reason, retry, lost


class ServerDownError(GymError):
    """A server that gave no answer for longer than the outage budget: the run should end, not one episode."""


@dataclass(frozen=True)
class Verdict:
    """What a verifier said: `reward` is finite; `components` are named parts of it, where it gives them."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    latency_s: float = 0.0  # of the call that succeeded
    details: dict[str, Any] = field(default_factory=dict)  # whatever else it says (extracted_answer, ...)


@dataclass(frozen=True)
class Turn:
    """What a step made of the world. `observation` is the next user message, or None."""

    observation: str | None
    reward: float
    terminated: bool  # the task ended
    truncated: bool  # the environment gave up on it (its own time limit)
    tool_outputs: list[dict[str, str]] = field(default_factory=list)  # [{call_id, output}]


# --- what a policy said, as OpenAI Responses items; what a verifier said --------------------------


def message(text: str) -> dict[str, Any]:
    """An assistant message. `annotations` and the id look idle, but Gym's schema answers 422 without them."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def reasoning(text: str) -> dict[str, Any]:
    """What the policy thought before it answered."""
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call; `arguments` is JSON text, as the policy wrote it."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def function_call_output(call_id: str, output: str) -> dict[str, Any]:
    """What the tool answered."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def response(output: Sequence[Mapping[str, Any]], model: str = "policy") -> dict[str, Any]:
    """Items, in the order in which they came, as the Response object that /verify and /step demand."""
    head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": time.time(), "model": model}
    return {**head, "output": list(output), "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def message_response(text: str) -> dict[str, Any]:
    """One assistant message as a Response."""
    return response([message(text)])


def parse_verdict(body: Any, latency_s: float = 0.0, row: Mapping[str, Any] | None = None) -> Verdict:
    """The JSON body of a 200 answer of /verify or /run -> Verdict. Raises GymError('bad_answer' | 'masked').

    Verifiers echo the request (tens of kB); `details` is what they add to `row`.
    """
    if not isinstance(body, dict):
        raise GymError("bad_answer", f"verify answered {type(body).__name__}, not a JSON object: {str(body)[:200]}")
    for key in ("_ng_failure_class", "failure_kind", "mask_sample"):
        if body.get(key):
            why = body.get("failure_reason") or body.get("_ng_failure_judge_error") or body[key]
            raise GymError("masked", f"the verifier disowns its reward ({key}={body[key]!r}): {str(why)[:300]}")
    parts = body.get("reward_components") or {}
    if not isinstance(parts, dict):
        raise GymError("bad_answer", f"verify answered reward_components={str(parts)[:200]}, not a JSON object")
    components = {name: _number(value, name) for name, value in parts.items()}
    echoed = {"responses_create_params", "response", "reward", "reward_components", *(row or {})}
    details = {key: value for key, value in body.items() if key not in echoed}
    return Verdict(_number(body.get("reward"), "reward"), components, latency_s, details)


def _number(value: Any, name: str) -> float:
    # bool is an int to Python, and json reads NaN and Infinity: neither is a reward
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise GymError("bad_answer", f"the server answered {name}={str(value)[:200]!r}, not a finite number")
    return float(value)


# --- servers and sessions ------------------------------------------------------------------------


class Gym:
    """The Gym servers of a run, by name. Use as `async with Gym(urls) as gym`.

    urls: {name: "http://host:port"}. timeout_s: seconds for each HTTP call, from its first byte to the last.
    concurrency: calls in flight per server (int, or {name: int, "default": int}); verifiers that fork per answer
    (math_with_judge) time out, and then answer reward 0, when overloaded. attempts: tries per verdict, where
    repeating is safe. outage_budget_s: seconds for which a server may give no answer before it counts as down.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        timeout_s: float = 60.0,
        concurrency: int | Mapping[str, int] = 8,
        attempts: int = 3,
        outage_budget_s: float = 90.0,
    ):
        self.urls = {name: url.rstrip("/") for name, url in urls.items()}
        self.timeout_s, self.attempts, self.outage_budget_s = timeout_s, attempts, outage_budget_s
        self._watches = {name: _Watch() for name in self.urls}
        limits = {"default": concurrency} if isinstance(concurrency, int) else {"default": 8, **concurrency}
        self._slots = {name: asyncio.Semaphore(limits.get(name, limits["default"])) for name in self.urls}
        self._routes: dict[str, asyncio.Task[frozenset[str]]] = {}

    async def __aenter__(self) -> Gym:
        # One pool for all episodes, without cookies: each session brings its own. The semaphores are the limit,
        # so the pool has none; it drops idle connections well before Gym's servers do (30 s).
        pool, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=5.0), aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(connector=pool, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._http.close()

    def restarted(self, server: str) -> None:
        """Say that `server` was started again: what it remembered of open sessions is gone. From any thread."""
        if server in self._watches:
            self._watches[server].gone = time.monotonic()

    async def routes(self, server: str) -> frozenset[str]:
        """The paths that `server` takes POSTs on, read once from its /openapi.json. Raises GymError."""
        if server not in self.urls:
            raise GymError("no_server", f"no Gym server named {server!r}; configured: {', '.join(self.urls) or 'none'}")
        asked = self._routes.get(server)
        if asked is None or (asked.done() and asked.exception()):
            asked = self._routes[server] = asyncio.create_task(self._read_routes(server))
        return asked.result() if asked.done() else await asyncio.shield(asked)

    async def _read_routes(self, server: str) -> frozenset[str]:
        ask = _Caller(self, server).call
        described = await self._repeat(server, lambda: ask("GET", "/openapi.json"))
        try:
            return frozenset(path for path, methods in described["paths"].items() if "post" in methods)
        except (TypeError, KeyError, AttributeError):
            raise GymError("bad_answer", f"{self.urls[server]}/openapi.json describes no routes") from None

    async def kind(self, server: str) -> str:
        """`verify`, `step` or `agent`, by the routes of `server`. Raises GymError."""
        routes = await self.routes(server)
        steps = {"/reset", "/step"} <= routes and "/verify" not in routes
        return "agent" if "/run" in routes else "step" if steps else "verify"

    @contextlib.asynccontextmanager
    async def session(self, server: str, row: Mapping[str, Any]) -> AsyncIterator[Session]:
        """An open session for one episode of `row` on `server` (/seed_session, or /reset). Raises GymError."""
        session = Session(self, server, row, await self.routes(server), await self.kind(server))
        await self._repeat(server, session.open)
        try:
            yield session
        finally:
            await session.close()

    async def run(self, server: str, row: Mapping[str, Any], timeout_s: float) -> tuple[Verdict, dict[str, Any]]:
        """POST /run: Gym's agent plays the whole episode, in `timeout_s` seconds. Repeated, as a new one, after connect
        and "not now". Returns (verdict, the Response with all its items). Raises GymError."""

        async def run_once() -> tuple[Verdict, dict[str, Any]]:
            began = time.monotonic()
            body = await _Caller(self, server).call("POST", "/run", row, timeout_s)
            verdict = parse_verdict(body, time.monotonic() - began, row)
            if self._watches[server].gone > began:  # its resources server knows of nothing that was done before
                raise GymError("session_lost", f"{self.urls[server]} was started again under /run", False, True)
            if not isinstance(response := body.get("response"), dict) or not isinstance(response.get("output"), list):
                raise GymError("bad_answer", f"{self.urls[server]}/run answered without response.output")
            return verdict, response

        return await self._repeat(server, run_once, once_500=False)

    async def aggregate(self, server: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The server's own metrics (/aggregate_metrics) over `records`, verify answers with `_ng_task_index` and
        `_ng_rollout_index`; None where it has none. Raises GymError."""
        if "/aggregate_metrics" not in await self.routes(server):
            return None
        ask, body = _Caller(self, server).call, {"verify_responses": list(records)}
        answer = await self._repeat(server, lambda: ask("POST", "/aggregate_metrics", body))
        return answer if isinstance(answer, dict) else None

    async def _repeat(self, server: str, call: Callable[[], Awaitable[T]], once_500: bool = True) -> T:
        """`call`, again while its GymError allows it, with exponential backoff and full jitter.

        A try during which the server answered nobody counts only if it is the first: the rest is the outage's. One
        that it answered in part always counts, since what kills a server whenever it is back must come to an end.
        """
        tried, pause = 0, 0.4
        while True:
            began = time.monotonic()
            try:
                return await call()
            except GymError as error:
                away = self._watches[server].answered < began
                tried += not (tried and away)
                again = error.retry or (error.reason == "http_500" and once_500)
                if not again or (tried >= self.attempts and not away):
                    raise
                once_500 = once_500 and error.reason != "http_500"
            await asyncio.sleep(random.uniform(0.0, pause))
            pause = min(5.0, 2 * pause)


class _Watch:
    """What all calls to one server have seen of it. Times are those of time.monotonic(), in seconds."""

    answered = failed = -math.inf  # last
    since, calls = -math.inf, 0  # begin of the last outage, and how many calls failed in it
    gone = -math.inf  # when nothing listened last, or it was started again


class _Caller:
    """HTTP to one server with cookies of its own, over the shared pool."""

    def __init__(self, gym: Gym, server: str):
        self.gym, self.server, self.url, self.watch = gym, server, gym.urls[server], gym._watches[server]
        self.cookies: dict[str, str] = {}
        self.touched = False  # by a tool or a step, so that no new session can stand in for this one

    async def call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The JSON of a 200 answer. Raises GymError for anything else."""
        status, text = await self.ask(method, path, body, timeout_s)
        if status != 200:
            raise self.refused(path, status, text)
        try:
            return json.loads(text)
        except ValueError:
            raise GymError("bad_answer", f"{self.url}{path}: HTTP 200 whose body is not JSON: {text[:200]!r}") from None

    def refused(self, path: str, status: int, text: bytes) -> GymError:
        """A status that is no answer, as an error; cut short, since a 422 of Gym's echoes the request (megabytes)."""
        said = f"{self.url}{path}: HTTP {status}: {text[:300].decode(errors='replace')}"
        return GymError(f"http_{status}", said, status in NOT_NOW, self.touched and status in AWAY)

    async def ask(self, method: str, path: str, body: Any, timeout_s: float | None) -> tuple[int, bytes]:
        """(status, body) of one request. Raises GymError for all but statuses that are an answer, of this session."""
        http, url, seconds, failure = self.gym._http, self.url + path, timeout_s or self.gym.timeout_s, None
        headers = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())} if self.cookies else {}
        async with self.gym._slots[self.server]:
            began = time.monotonic()
            if not self.cookies:
                self.opened = began
            elif self.opened < self.watch.gone:
                raise GymError(
                    "session_lost", f"{url} was away since this session began", not self.touched, self.touched
                )
            try:
                # The deadline covers the whole call: a read timeout alone would let a server trickle for ever.
                async with asyncio.timeout(seconds), http.request(method, url, json=body, headers=headers) as answer:
                    if answer.status not in AWAY:
                        self.watch.answered = time.monotonic()
                    text = await _read(answer)
                if answer.status in NOT_NOW:
                    failure = self.refused(path, answer.status, text)
            except TimeoutError:
                failure = GymError("timeout", f"{url}: no answer within {seconds:g} s")
            except (aiohttp.ClientError, OSError) as error:
                failure = GymError("connect", f"{url}: {type(error).__name__}: {error}", True, self.touched)
                if isinstance(error, aiohttp.ClientConnectorError):
                    self.watch.gone = time.monotonic()
        if failure:
            raise failure if self.watch.answered >= began else await self._silence(failure, began)
        for header in answer.headers.getall("Set-Cookie", ()):
            name, _, value = header.partition(";")[0].strip().partition("=")
            if _session_id(self.cookies.get(name, value)) != _session_id(value):
                raise GymError("session_lost", f"{url} answered out of another session", not self.touched, self.touched)
            self.cookies[name] = value
        return answer.status, text

    async def _silence(self, error: GymError, began: float) -> GymError:
        """A call failed since whose begin nobody was answered: `error`, or past the outage budget ServerDownError."""
        watch, gym, now = self.watch, self.gym, time.monotonic()
        begin = began if error.reason == "timeout" else now  # of the silence: until it broke, a call was in work
        if watch.answered > watch.since or begin > watch.failed + QUIET_S:  # not the outage that is known
            watch.since, watch.calls = begin, 0
        watch.failed, watch.calls, silent_s = now, watch.calls + 1, now - watch.since
        if error.reason == "timeout" and silent_s > gym.outage_budget_s:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(gym.timeout_s), gym._http.get(f"{self.url}/openapi.json") as answer:
                    if answer.status not in AWAY:
                        watch.answered = time.monotonic()
        if silent_s <= gym.outage_budget_s or watch.answered >= began:
            return error
        said = f"gym server {self.server} ({self.url}) gave no answer for {silent_s:.0f} s, while {watch.calls} calls"
        todo = f"see its log, start it again and resume the run; it had {gym.outage_budget_s:g} s (gym.outage_budget_s)"
        return ServerDownError("server_down", f"{said} failed, the last with {error}; {todo}")


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises GymError('too_large') before it fills the memory."""
    text = bytearray()
    async for chunk in answer.content.iter_any():
        text += chunk
        if max(len(text), answer.content_length or 0) > MAX_ANSWER_BYTES:
            raise GymError("too_large", f"{answer.url}: an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def _session_id(cookie: str) -> str | None:
    """Starlette writes a session as base64 of JSON, timestamp, signature; Gym's JSON holds a session_id."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(base64.b64decode(cookie.partition(".")[0]))["session_id"])
    return None  # not one of Gym's


def _is_tool(name: Any) -> bool:
    """Whether a tool's name, which is data, makes a path of its own: not RESERVED, nor what leads to another route
    (dots, a slash however written, a newline at the end, which Starlette's routes overlook)."""
    unsafe = not isinstance(name, str) or not name.isprintable() or set(name) & set("/\\%")
    return not unsafe and name not in RESERVED | {"", ".", ".."}


def routed(tools: Iterable[str], routes: Collection[str]) -> set[str]:
    """The tools that a server answers: by a route of that name, or one that takes any (`/{tool_name}`)."""
    catch_all = any(route.startswith("/{") and route.count("/") == 1 for route in routes)
    return {name for name in tools if catch_all or f"/{name}" in routes}


class Session:
    """One episode's conversation with one server. `Gym.session` makes it, opens it and closes it."""

    def __init__(self, gym: Gym, server: str, row: Mapping[str, Any], routes: frozenset[str], kind: str):
        self.gym, self.server, self.row, self.kind = gym, server, row, kind
        self.observation: str | None = None  # what a step server says first
        offered = [tool.get("name") for tool in row["responses_create_params"].get("tools") or []]
        self.tools = {name for name in offered if _is_tool(name)}
        # Rows also offer tools that no route answers: there the call itself is the answer (xlam_fc).
        self.executable = routed(self.tools, routes)
        self._open_now = False  # the server knows the session
        self._info: Mapping[str, Any] = {}

    async def open(self) -> None:
        """POST /seed_session, or /reset, with the whole row and no cookies. Raises GymError."""
        self._http = _Caller(self.gym, self.server)
        if self.kind == "step":
            body = await self._http.call("POST", "/reset", self.row)
            if not isinstance(body, dict) or not isinstance(body.get("observation"), str | None):
                raise GymError("bad_answer", f"{self._http.url}/reset answered {str(body)[:200]}")
            self.observation, self._info = body.get("observation"), body.get("info") or {}
        else:
            await self._http.call("POST", "/seed_session", self.row)
        self._open_now, self._http.touched = True, self.kind == "step"

    async def call_tool(self, name: str, arguments: str) -> str:
        """What tool `name` answers to `arguments` (JSON text, as the policy wrote it): text for the model.

        A call that the policy got wrong (no such tool, arguments that are no JSON, a 4xx or 500 of the tool) is
        answered with that. Raises GymError where the server, not the policy, is at fault.
        """
        if name not in self.tools:
            return json.dumps({"error": f"Unknown tool: {name}"})
        try:
            body = json.loads(arguments)
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        self._http.touched = True
        _, text = await self._http.ask("POST", "/" + urllib.parse.quote(name, safe=""), body, None)
        return text.decode(errors="replace")

    async def verify(self, response: Mapping[str, Any]) -> Verdict:
        """POST /verify with the row and `response` (see `response`). Raises GymError."""

        async def verify_once() -> Verdict:
            if not self._open_now:  # the session may have died with the call that failed
                await self.open()
            self._open_now = False
            start = time.perf_counter()
            body = await self._http.call("POST", "/verify", {**self.row, "response": response})
            self._open_now = True
            return parse_verdict(body, time.perf_counter() - start, self.row)

        if self._http.touched:
            return await verify_once()
        return await self.gym._repeat(self.server, verify_once)

    async def step(self, response: Mapping[str, Any]) -> Turn:
        """POST /step with the row and `response`, what the policy said in this turn only. Raises GymError."""
        body, ask = {**self.row, "response": response}, self._http.call
        if self._info.get("supports_step_idempotency"):  # the server knows a repeated step by its id
            body["_ng_step_request_id"] = uuid.uuid4().hex
            answer = await self.gym._repeat(self.server, lambda: ask("POST", "/step", body), once_500=False)
        else:
            answer = await ask("POST", "/step", body)
        told = answer if isinstance(answer, dict) else {}
        ended = {name: told.get(name, False) for name in ("terminated", "truncated")}
        outputs, observation = (told.get("info") or {}).get("tool_outputs") or [], told.get("observation")
        fits = isinstance(observation, str | None) and all(isinstance(flag, bool) for flag in ended.values())
        if not fits or not all(isinstance(o, dict) and {"call_id", "output"} <= o.keys() for o in outputs):
            raise GymError("bad_answer", f"{self._http.url}/step answered {str(answer)[:300]}")
        return Turn(observation, _number(told.get("reward"), "reward"), tool_outputs=outputs, **ended)

    async def close(self) -> None:
        """POST /close where the server asks for it; others forget a session by themselves, or never."""
        if self._info.get("supports_explicit_close"):
            try:
                await self._http.call("POST", "/close", {})
            except GymError as error:  # the verdict stands; the server keeps a session too many
                logging.getLogger(__name__).warning("%s", error)
