"""NeMo Gym over HTTP: sessions, tools, environments that step, agents, verdicts, discovery.

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

The error model. A verdict either holds a reward that the verifier meant, or there is no verdict:
every failure raises `GymError`, whose `reason` is one short word that ends up in the metrics as
`rollout/failed/<reason>` and never in the loss:

    connect       nothing listened, or the connection broke
    timeout       no answer within the deadline (never repeated: the deadline is the caller's patience)
    http_<code>   any status but 200; 408, 429, 502, 503, 504 say "not now", 500 is a crash of the verifier,
                  which may be the policy's own text, other 4xx are for good
    bad_answer    200, but not a JSON object with a finite numeric reward
    masked        200, but the verifier itself disowns the reward (`mask_sample`, `failure_kind`,
                  `_ng_failure_class`: a judge that was down)
    session_lost  the server answered out of another session than the one it had opened

What is repeated. Gym's sessions live in the server's memory behind a signed cookie, so a shared cookie
jar would merge episodes, and a session cannot be taken up again after a failure. A call is therefore
repeated (connect, session_lost and "not now" up to `attempts` times, 500 once, with backoff and jitter)
only as a whole new session: new cookies, /seed_session, /verify. Once a tool was called or a step made there
is nothing to go back to, and the first failure is the episode's. A tool's own refusal (4xx but 408 and 429,
and 500) is no failure: its text goes to the model, as Gym's agents do it.
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
RESERVED = {"seed_session", "verify", "reset", "step", "close", "aggregate_metrics", "run", "mcp"}  # never tools
log = logging.getLogger(__name__)
T = TypeVar("T")


class GymError(Exception):
    """A call that produced no verdict. `reason` is its short name, `retry` whether to try again."""

    def __init__(self, reason: str, message: str, retry: bool = False):
        super().__init__(message)
        self.reason, self.retry = reason, retry


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


# --- what a policy said, as OpenAI Responses items ------------------------------------------------


def message(text: str) -> dict[str, Any]:
    """An assistant message. `annotations` and the id look idle, but Gym's schema answers 422 without them."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "completed", "content": content}


def reasoning(text: str) -> dict[str, Any]:
    """What the policy thought before it answered."""
    return {"id": _id("rs"), "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call; `arguments` is JSON text, as the policy wrote it."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def function_call_output(call_id: str, output: str) -> dict[str, Any]:
    """What the tool answered."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def response(output: Sequence[Mapping[str, Any]], model: str = "policy") -> dict[str, Any]:
    """Items, in the order in which they came, as the Response object that /verify and /step demand."""
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def message_response(text: str) -> dict[str, Any]:
    """One assistant message as a Response."""
    return response([message(text)])


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


# --- verdicts ------------------------------------------------------------------------------------


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
    reward = _number(body.get("reward"), "reward")
    components = {name: _number(value, name) for name, value in parts.items()}
    echoed = {"responses_create_params", "response", "reward", "reward_components", *(row or {})}
    details = {key: value for key, value in body.items() if key not in echoed}
    return Verdict(reward, components, latency_s, details)


def _number(value: Any, name: str) -> float:
    # bool is an int to Python, and json reads NaN and Infinity: neither is a reward
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise GymError("bad_answer", f"the server answered {name}={str(value)[:200]!r}, not a finite number")
    return float(value)


# --- servers and sessions ------------------------------------------------------------------------


class Gym:
    """The Gym servers of a run, by name. Use as `async with Gym(urls) as gym`.

    urls: {name: "http://host:port"}. timeout_s: seconds for each HTTP call, from its first byte to the
    last. concurrency: calls in flight per server (int, or {name: int, "default": int}); verifiers that fork
    per answer (math_with_judge) time out, and then answer reward 0, when overloaded. attempts: tries per
    verdict, where repeating is safe.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        timeout_s: float = 60.0,
        concurrency: int | Mapping[str, int] = 8,
        attempts: int = 3,
    ):
        self.urls = {name: url.rstrip("/") for name, url in urls.items()}
        self.timeout_s, self.attempts = timeout_s, attempts
        limits = {"default": concurrency} if isinstance(concurrency, int) else {"default": 8, **concurrency}
        self._limit = {name: limits.get(name, limits["default"]) for name in self.urls}

    async def __aenter__(self) -> Gym:
        # One pool for all episodes, without cookies: each session brings its own. The semaphores are the limit,
        # so the pool has none; it drops idle connections well before Gym's servers do (30 s).
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=5.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._slots = {name: asyncio.Semaphore(limit) for name, limit in self._limit.items()}
        self._routes: dict[str, asyncio.Task[frozenset[str]]] = {}
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._http.close()

    async def routes(self, server: str) -> frozenset[str]:
        """The paths that `server` takes POSTs on, read once from its /openapi.json. Raises GymError."""
        if server not in self.urls:
            raise GymError("no_server", f"no Gym server named {server!r}; configured: {', '.join(self.urls) or 'none'}")
        asked = self._routes.get(server)
        if asked is None or (asked.done() and asked.exception()):
            asked = self._routes[server] = asyncio.create_task(self._read_routes(server))
        return asked.result() if asked.done() else await asyncio.shield(asked)

    async def _read_routes(self, server: str) -> frozenset[str]:
        async def read() -> frozenset[str]:
            described = await _Caller(self, server).call("GET", "/openapi.json")
            paths = described.get("paths") if isinstance(described, dict) else None
            if not isinstance(paths, dict):
                raise GymError("bad_answer", f"{self.urls[server]}/openapi.json describes no routes")
            return frozenset(path for path, methods in paths.items() if "post" in methods)

        return await _repeat(read, self.attempts)

    async def kind(self, server: str) -> str:
        """`verify`, `step` or `agent`, by the routes of `server`. Raises GymError."""
        routes = await self.routes(server)
        if "/run" in routes:
            return "agent"
        if {"/reset", "/step"} <= routes and "/verify" not in routes:
            return "step"
        return "verify"

    @contextlib.asynccontextmanager
    async def session(self, server: str, row: Mapping[str, Any]) -> AsyncIterator[Session]:
        """An open session for one episode of `row` on `server` (/seed_session, or /reset). Raises GymError."""
        session = Session(self, server, row, await self.routes(server), await self.kind(server))
        await session.open()
        try:
            yield session
        finally:
            await session.close()

    async def run(self, server: str, row: Mapping[str, Any], timeout_s: float) -> tuple[Verdict, dict[str, Any]]:
        """POST /run: Gym's agent plays the whole episode. Returns (verdict, the Response with all its items).

        timeout_s: for the whole episode. Repeated, as a new episode, where the connection broke or the agent said
        "not now". Raises GymError.
        """

        async def run_once() -> tuple[Verdict, dict[str, Any]]:
            start = time.perf_counter()
            body = await _Caller(self, server).call("POST", "/run", row, timeout_s)
            verdict = parse_verdict(body, time.perf_counter() - start, row)
            response = body.get("response")
            if not isinstance(response, dict) or not isinstance(response.get("output"), list):
                raise GymError("bad_answer", f"{self.urls[server]}/run answered without response.output")
            return verdict, response

        return await _repeat(run_once, self.attempts, once_500=False)

    async def aggregate(self, server: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The server's own metrics over verified records (/aggregate_metrics), or None where it has none.

        records: verify answers with `_ng_task_index` and `_ng_rollout_index`. Raises GymError.
        """
        if "/aggregate_metrics" not in await self.routes(server):
            return None
        body = {"verify_responses": list(records)}
        answer = await _repeat(lambda: _Caller(self, server).call("POST", "/aggregate_metrics", body), self.attempts)
        return answer if isinstance(answer, dict) else None


class _Caller:
    """HTTP to one server with cookies of its own, over the shared pool."""

    def __init__(self, gym: Gym, server: str):
        self.gym, self.server, self.url = gym, server, gym.urls[server]
        self.cookies: dict[str, str] = {}

    async def call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The JSON of a 200 answer. Raises GymError for anything else."""
        status, text = await self.ask(method, path, body, timeout_s)
        if status != 200:
            raise self.refused(path, status, text)
        try:
            return json.loads(text)
        except ValueError:
            shown = text[:200].decode(errors="replace")
            raise GymError("bad_answer", f"{self.url}{path}: HTTP 200 whose body is not JSON: {shown}") from None

    def refused(self, path: str, status: int, text: bytes) -> GymError:
        """A status that is no answer, as an error; cut short, since a 422 of Gym's echoes the request (megabytes)."""
        shown = text[:300].decode(errors="replace")
        return GymError(f"http_{status}", f"{self.url}{path}: HTTP {status}: {shown}", retry=status in NOT_NOW)

    async def ask(self, method: str, path: str, body: Any, timeout_s: float | None) -> tuple[int, bytes]:
        """(status, body) of one request. Raises GymError('timeout' | 'connect' | 'session_lost')."""
        gym, url = self.gym, self.url + path
        seconds = timeout_s or gym.timeout_s
        headers = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())} if self.cookies else {}
        async with gym._slots[self.server]:
            try:
                # The deadline covers the whole call: a read timeout alone would let a server trickle for ever.
                async with asyncio.timeout(seconds):
                    async with gym._http.request(method, url, json=body, headers=headers) as answer:
                        text = await answer.read()
            except TimeoutError:
                raise GymError("timeout", f"{url}: no answer within {seconds:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise GymError("connect", f"{url}: {type(error).__name__}: {error}", retry=True) from error
        for header in answer.headers.getall("Set-Cookie", ()):
            name, _, value = header.partition(";")[0].strip().partition("=")
            if _other_session(self.cookies.get(name, value), value):
                raise GymError("session_lost", f"{url} answered out of another session than this episode's", retry=True)
            self.cookies[name] = value
        return answer.status, text


def _other_session(before: str, now: str) -> bool:
    """Whether two cookies of Gym's are of different sessions: the server did not know ours, and opened its own."""
    return before.partition(".")[0] != now.partition(".")[0] and _session_id(before) != _session_id(now)


def _session_id(cookie: str) -> str | None:
    """Starlette writes a session as base64 of JSON, timestamp, signature; Gym's JSON holds a session_id."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(base64.b64decode(cookie.partition(".")[0]))["session_id"])
    return None  # not one of Gym's


async def _repeat(call: Callable[[], Awaitable[T]], attempts: int, once_500: bool = True) -> T:
    """`call`, again while its GymError allows it, with exponential backoff and full jitter.

    Seven lines of our own: tenacity's bookkeeping was a quarter of the client's time per verdict.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await call()
        except GymError as error:
            if attempt == attempts or not (error.retry or (error.reason == "http_500" and once_500)):
                raise
            once_500 = once_500 and error.reason != "http_500"
        await asyncio.sleep(random.uniform(0.0, min(5.0, 0.2 * 2**attempt)))
    raise AssertionError("attempts must be at least 1")


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
        self.tools = {name for name in offered if name and name not in RESERVED}
        # Rows also offer tools that no route answers: there the call itself is the answer (xlam_fc).
        self.executable = routed(self.tools, routes)
        self._open_now = self._touched = False  # the server knows the session; a tool has changed it
        self._info: Mapping[str, Any] = {}

    async def open(self) -> None:
        """POST /seed_session, or /reset, with the whole row and no cookies, repeated while that is safe."""
        await _repeat(self._open_once, self.gym.attempts)

    async def _open_once(self) -> None:
        self._http = _Caller(self.gym, self.server)
        if self.kind == "step":
            body = await self._http.call("POST", "/reset", self.row)
            if not isinstance(body, dict) or not isinstance(body.get("observation"), str | None):
                raise GymError("bad_answer", f"{self._http.url}/reset answered {str(body)[:200]}")
            self.observation, self._info = body.get("observation"), body.get("info") or {}
        else:
            await self._http.call("POST", "/seed_session", self.row)
        self._open_now = True

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
        self._touched = True
        path = "/" + urllib.parse.quote(name, safe="")
        status, text = await self._http.ask("POST", path, body, None)
        if status in NOT_NOW:
            raise self._http.refused(path, status, text)
        return text.decode(errors="replace")

    async def verify(self, response: Mapping[str, Any]) -> Verdict:
        """POST /verify with the row and `response` (see `response`). Raises GymError."""

        async def verify_once() -> Verdict:
            if not self._open_now:  # the session may have died with the call that failed
                await self._open_once()
            self._open_now = False
            start = time.perf_counter()
            body = await self._http.call("POST", "/verify", {**self.row, "response": response})
            self._open_now = True
            return parse_verdict(body, time.perf_counter() - start, self.row)

        return await _repeat(verify_once, 1 if self._touched else self.gym.attempts)

    async def step(self, response: Mapping[str, Any]) -> Turn:
        """POST /step with the row and `response`, what the policy said in this turn only. Raises GymError."""
        body = {**self.row, "response": response}
        attempts = 1
        if self._info.get("supports_step_idempotency"):  # the server knows a repeated step by its id
            body["_ng_step_request_id"], attempts = uuid.uuid4().hex, self.gym.attempts
        answer = await _repeat(lambda: self._http.call("POST", "/step", body), attempts, once_500=False)
        if not isinstance(answer, dict) or not isinstance(answer.get("observation"), str | None):
            raise GymError("bad_answer", f"{self._http.url}/step answered {str(answer)[:200]}")
        ended = {name: answer.get(name, False) for name in ("terminated", "truncated")}
        if not all(isinstance(flag, bool) for flag in ended.values()):
            raise GymError("bad_answer", f"{self._http.url}/step answered {ended}")
        outputs = (answer.get("info") or {}).get("tool_outputs") or []
        if not all(isinstance(output, dict) and {"call_id", "output"} <= output.keys() for output in outputs):
            raise GymError("bad_answer", f"{self._http.url}/step answered tool_outputs={str(outputs)[:200]}")
        reward = _number(answer.get("reward"), "reward")
        return Turn(answer.get("observation"), reward, tool_outputs=outputs, **ended)

    async def close(self) -> None:
        """POST /close where the server asks for it; others forget a session by themselves, or never."""
        if self._info.get("supports_explicit_close"):
            try:
                await self._http.call("POST", "/close", {})
            except GymError as error:  # the verdict stands; the server keeps a session too many
                log.warning("%s", error)


# --- discovery -----------------------------------------------------------------------------------


def discover(head: str, timeout_s: float = 10.0) -> tuple[dict[str, str], dict[str, str]]:
    """Ask a Gym head server who is there: ({resources server: url}, {agent: its resources server}).

    head: "http://host:11000". Raises GymError. Needs pyyaml: the head answers YAML inside a JSON string.
    """
    import yaml

    async def read() -> Any:
        async with Gym({"head": head}, timeout_s) as gym:
            return await _Caller(gym, "head").call("GET", "/global_config_dict_yaml")

    text = asyncio.run(read())
    try:
        config = yaml.safe_load(text)
        blocks = {name: block for name, block in config.items() if isinstance(block, dict)}
    except (yaml.YAMLError, AttributeError) as error:
        raise GymError("bad_answer", f"{head}/global_config_dict_yaml is no YAML mapping: {error}") from None
    servers, agents = {}, {}
    for name, block in blocks.items():
        for server in (block.get("resources_servers") or {}).values():
            if not server.get("port"):
                continue  # configured, but not started
            host = server.get("host") or "127.0.0.1"
            if host in ("0.0.0.0", "127.0.0.1", "localhost"):  # as the head sees itself; we may sit elsewhere
                host = urllib.parse.urlsplit(head).hostname
            servers[name] = f"http://{host}:{server['port']}"
        for agent in (block.get("responses_api_agents") or {}).values():
            if reference := (agent.get("resources_server") or {}).get("name"):
                agents[name] = reference
    return servers, agents
