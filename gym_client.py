"""NeMo Gym over HTTP: sessions, tools, environments that step, agents, verdicts, outages.

Lift this file alone into another project; it needs only aiohttp:

    import asyncio, json
    from gym_client import Gym, message_response

    async def main(row):                                       # a Gym row, verbatim
        async with Gym({"mcqa": "http://127.0.0.1:8001"}) as gym, gym.session("mcqa", row) as session:
            verdict = await session.verify(message_response("The answer is \\\\boxed{B}"))
        print(verdict.reward)
    asyncio.run(main(json.loads(open("rows.jsonl").readline())))

Three kinds of server, told apart by the routes they publish (`Gym.kind`):
    verify   /seed_session, tools as routes of their own, /verify: `Session.call_tool`, `Session.verify`
    step     /reset, /step, /close, as Gymnasium has them: `Session.observation`, `Session.step`
    agent    /run: Gym's own agent talks to the model and comes back with the verdict: `Gym.run`

The error model. A verdict holds a reward that the verifier meant. Every failure raises `GymError`, whose `reason`
is one short word that ends up in the metrics as `rollout/failed/<reason>` and never in the loss:
    connect       nothing listened, or the connection broke
    timeout       no answer within the deadline (never repeated: the deadline is the caller's patience)
    http_<code>   any status but 200; 3xx: a redirect, not followed; 408, 429, 502, 503, 504 say "not now", 500 is a
                  crash of the verifier, which may be the policy's own text, other 4xx are for good
    bad_answer    200, but not the JSON that was asked for: no finite reward, no text, no token ids, nested too deep
    too_large     an answer of more bytes, lists or objects than `_most_bytes` and MAX_CONTAINERS allow; not read on
    masked        200, but the reward is disowned (DISOWNED: without its judge, its sandbox)
    session_lost  the server answered out of another session than the one it had opened, or was away since
    server_down   `ServerDownError`: this one should end the run, as all others end an episode

Nothing that a policy, a row or a server says raises anything else. What comes back can be tokenised and written
(`_sound`); what goes out is UTF-8, with a "?" for half of a surrogate pair.

What is repeated. A session lives in its server's memory behind a signed cookie, and cannot be taken up again after a
failure. So a call is repeated (connect, session_lost and "not now" up to `attempts` times, 500 once, with backoff and
jitter) only as a whole new session with cookies of its own, and after a tool call or a step not at all, unless the
server knows a repeated step by its id. A tool's own refusal (other 4xx, and 500) is no failure: the model reads it.

Outages. connect, timeout, 502, 503 and 504 are no answers; every other status is one. An outage lasts from the first
call without an answer (a timeout: from its begin) to the next answer to anybody. Meanwhile what may be repeated is, at
most 5 s apart, beyond `attempts`: a server back within `outage_budget_s` costs time, not episodes. After that a call
without an answer raises `ServerDownError`; one that timed out only if /openapi.json gets none either: it may be slow.

Lost sessions. A server that is back may take the old cookie, begin at nothing and pay for less than was done. So once
nothing listened, or `Gym.restarted` was called, no older session goes on: where no tool has touched it, it is opened
anew; else the GymError is `lost`, and a new episode of the same row may succeed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import json.scanner
import logging
import math
import random
import time
import urllib.parse
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp

NOT_NOW = {408, 429, 502, 503, 504}  # statuses by which a server says: try again
AWAY = NOT_NOW - {408, 429}  # those that come from in front of a server that is not there
MAX_ANSWER_BYTES = 8 * 2**20  # of an answer, beyond the size of its request, which verifiers echo
MAX_RUN_BYTES = 64 * 2**20  # of /run, whose answer holds the token ids of every turn
MAX_DETAILS_BYTES = 64 * 2**10  # of a verdict's `details` as JSON
MAX_CONTAINERS = (
    100_000  # lists and objects in an answer: each takes 50 bytes and more, however short its text
)
MAX_FAST_VALUES = (
    300_000  # values that the parser in C reads within 0.1 s; no other thread runs meanwhile
)
ASIDE_BYTES = 64 * 2**10  # from this size on an answer is read in a thread
MAX_PARTS, MAX_DEPTH = (
    100,
    64,
)  # parts of a reward, and characters of a part's name; levels of JSON in JSON
QUIET_S = (
    15.0  # of nobody asking, after which an outage may be over; well over the pauses between tries
)
RESERVED = {
    "seed_session",
    "verify",
    "reset",
    "step",
    "close",
    "aggregate_metrics",
    "run",
    "mcp",
}  # never tools
RESERVED |= {"close_session", "end_session"}  # of later servers, and of those that hold a sandbox
DISOWNED: dict[str, Callable[[Any], bool]] = dict.fromkeys(
    ["_ng_failure_class", "failure_kind", "mask_sample"], bool
)
DISOWNED |= {
    "proof_status": lambda said: said == "error",
    "num_steps_total": lambda said: said == 0,
}
# What servers must say: a type, [that of each item], or {key: ...}, where a key with a `?` may be missing or null.
WORLD = {"observation?": str, "info?": {"tool_outputs?": [{"call_id": str, "output": str}]}}
STEP = {**WORLD, "reward": float, "terminated?": bool, "truncated?": bool}
ITEM = {
    "type": str,
    "prompt_token_ids?": [int],
    "generation_token_ids?": [int],
    "generation_log_probs?": [float],
}
ITEM_OF = {
    "function_call": {"name": str, "arguments": str},
    "function_call_output": {"output": str},
}
Json = dict[str, Any]  # an object
Played = tuple["Verdict", Json]
T = TypeVar("T")
Call = Callable[..., Awaitable[T]]
Limit = int | Callable[[str, str], contextlib.AbstractAsyncContextManager[None]]


class GymError(Exception):
    """A call that produced no verdict. `reason` is its short name, `retry` whether to try again, `lost` whether the
    server went away under the episode's session, so that a new episode may succeed."""

    def __init__(self, reason: str, message: str, retry: bool = False, lost: bool = False):
        super().__init__(printable(message))
        self.reason, self.retry, self.lost = reason, retry, lost


class ServerDownError(GymError):
    """A server that gave no answer for longer than the outage budget: the run should end, not one episode."""


@dataclass(frozen=True)
class Verdict:
    """What a verifier said. Of `details` that come to over MAX_DETAILS_BYTES, `_cut` has the first 1,000 characters."""

    reward: float  # finite
    components: dict[str, float] = field(
        default_factory=dict
    )  # named parts of it, the first MAX_PARTS
    latency_s: float = 0.0  # of the call that succeeded
    details: Json = field(default_factory=dict)  # what else it says (extracted_answer, ...)


@dataclass(frozen=True)
class Turn:
    """What a step made of the world. `observation` is the next user message, or None."""

    observation: str | None
    reward: float
    terminated: bool  # the task ended
    truncated: bool  # the environment gave up on it (its own time limit)
    tool_outputs: list[dict[str, str]] = field(default_factory=list)  # [{call_id, output}]


def printable(text: str) -> str:
    """`text` with a "?" for each character that could steer a terminal: all controls but newline and tab."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


# --- what a policy said, as OpenAI Responses items; `arguments` is JSON text -----------------------
def message(text: str) -> Json:
    """An assistant message. `annotations` and the id look idle, but Gym's schema answers 422 without them."""
    head = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
    }
    return {**head, "content": [{"type": "output_text", "text": text, "annotations": []}]}


def reasoning(text: str) -> Json:
    return {
        "id": f"rs_{uuid.uuid4().hex}",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
    }


def function_call(call_id: str, name: str, arguments: str) -> Json:
    return _sound(
        {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    )


def function_call_output(call_id: str, output: str) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def response(output: Sequence[Json], model: str = "policy") -> Json:
    """Items, in the order in which they came, as the Response object that /verify and /step demand."""
    head = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
    }
    return {
        **head,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def message_response(text: str) -> Json:
    return response([message(text)])


# --- what a server said --------------------------------------------------------------------------
def parse_verdict(body: Any, latency_s: float = 0.0, row: Json | None = None) -> Verdict:
    """The JSON of a 200 answer of /verify or /run -> Verdict. Verifiers echo the request: `details` is what they add to
    `row`, but for names that begin with `_`. Raises GymError('bad_answer' | 'masked')."""
    _check(body, {}, "/verify")
    for (
        key,
        disowns,
    ) in DISOWNED.items():  # what the last two say in math_formal_lean and in scicode
        if disowns(body.get(key)):
            why = _sound(
                body.get("failure_reason") or body.get("_ng_failure_judge_error") or body[key]
            )
            raise GymError("masked", f"/verify disowns its reward by {key}: {why!s:.300}")
    echoed = {"responses_create_params", "response", *(row or {})} - {"reward", "reward_components"}
    said = _sound(
        {
            key: value
            for key, value in body.items()
            if key not in echoed and not str(key).startswith("_")
        }
    )
    _check(said, {"reward": float, "reward_components?": {}}, "/verify")
    reward, parts = float(said.pop("reward")), (said.pop("reward_components", None) or {}).items()
    _check([part for _, part in parts], [float], "/verify[reward_components]")
    sizes = {
        key: len(_start_of_json({key: value}, MAX_DETAILS_BYTES + 1)) for key, value in said.items()
    }
    if sum(sizes.values()) > MAX_DETAILS_BYTES:
        cut = {
            key: said.pop(key)
            for key, size in sizes.items()
            if size > MAX_DETAILS_BYTES // len(sizes)
        }
        said["_cut"] = _start_of_json(cut, 1000)
    return Verdict(
        reward, {name[:MAX_PARTS]: float(p) for name, p in list(parts)[:MAX_PARTS]}, latency_s, said
    )


def _start_of_json(value: Any, most: int) -> str:
    """The first `most` characters of a value's JSON; the rest is not written."""
    parts, length = list[str](), 0
    for part in json.JSONEncoder().iterencode(value):
        parts.append(part)
        length += len(part)
        if length >= most:
            break
    return "".join(parts)[:most]


class _Decoder(json.JSONDecoder):
    """The parser in Python, a tenth as fast as the one in C: other threads run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _parse(text: bytes, at: str) -> Any:
    """The JSON of an answer, sound. Raises GymError('bad_answer' | 'too_large')."""
    containers = text.count(b"[") + text.count(b"{")
    if containers > MAX_CONTAINERS:
        why = f"an answer of {containers} lists and objects, over {MAX_CONTAINERS}; shorten the server's answer"
        raise GymError("too_large", f"{at}: {why}")
    try:
        if containers + text.count(b",") <= MAX_FAST_VALUES:
            return _sound(json.loads(text))
        return _sound(_Decoder().decode(text.decode(json.detect_encoding(text))))
    except (ValueError, RecursionError):
        raise GymError(
            "bad_answer", f"{at}: HTTP 200 whose body is not JSON: {text[:200]!r}"
        ) from None


def _most_bytes(path: str, sent: bytes | None) -> int:
    """The size up to which an answer to `sent` is read."""
    return MAX_RUN_BYTES if path == "/run" else MAX_ANSWER_BYTES + len(sent or b"")


def _redirect(location: str) -> str:
    """The error text of a redirect to `location`, which is not followed: it may lead to a stranger's host."""
    try:
        host = urllib.parse.urlsplit(location).hostname
    except ValueError:
        host = None
    target = f"host {host}" if host else f"{location[:100]!r}"
    return f"a redirect to {target}, which is not followed; set the final URL of the server"


def _sound(value: Any, depth: int = MAX_DEPTH) -> Any:
    """JSON that any tokenizer and writer takes: "?" for half of a surrogate pair, null for a number that is no finite
    float and for what is nested over MAX_DEPTH deep."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if depth and isinstance(value, dict):
        return {_sound(str(key)): _sound(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list):  # token ids first: there are many
        return [
            item if type(item) is int and 0 <= item < 2**31 else _sound(item, depth - 1)
            for item in value
        ]
    return value if isinstance(value, int | float) and abs(value) < 1e308 else None


def _check(value: Any, shape: Any, at: str) -> None:
    """Raises GymError('bad_answer') where what a server said, and `at` names, is not of that shape (as WORLD, ...)."""
    kind = type(shape) if isinstance(shape, dict | list) else shape
    if type(value) not in ((int, float) if kind is float else (kind,)):  # a bool is no number
        raise GymError("bad_answer", f"{at} is {_sound(value)!r:.300}, not of type {kind.__name__}")
    for item in value if kind is list else ():
        if type(item) is not shape[0]:
            _check(item, shape[0], at)
    for key, inner in shape.items() if kind is dict else ():
        if (name := key.rstrip("?")) == key or value.get(name) is not None:
            _check(value.get(name), inner, f"{at}[{name}]")


# --- servers and sessions ------------------------------------------------------------------------
@dataclass(eq=False)
class Gym:
    """The Gym servers of a run, by name. Use as `async with Gym(urls) as gym`."""

    urls: Mapping[str, str]  # {name: "http://host:port"}
    timeout_s: float = 60.0  # for each HTTP call, from its first byte to the last
    # verdicts in flight per server, and as many other calls; or what gives a call to (server, path) its place; or
    # {name: one of these, "default": one}. math_with_judge, overloaded, answers reward 0
    concurrency: Limit | Mapping[str, Limit] = 8
    attempts: int = 3  # per verdict, where repeating is safe
    outage_budget_s: float = 90.0  # for which a server may give no answer before it counts as down

    def __post_init__(self) -> None:
        self.urls = {name: url.rstrip("/") for name, url in self.urls.items()}
        self._watches = {name: _Watch() for name in self.urls}
        self._slots: dict[tuple[str, bool], asyncio.Semaphore] = {}
        self._routes: dict[str, asyncio.Task[frozenset[str]]] = {}

    async def __aenter__(self) -> Gym:
        # One pool for all, without cookies or limit: sessions have theirs. Gym's servers drop idle connections at 30 s.
        pool, timeout = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=5.0),
            aiohttp.ClientTimeout(total=None),
        )
        self._http = aiohttp.ClientSession(
            connector=pool, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        )
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._http.close()

    def restarted(self, server: str) -> None:
        """Say that `server` was started again: what it remembered of open sessions is gone. From any thread."""
        if server in self._watches:
            self._watches[server].gone = time.monotonic()

    def _place(self, server: str, path: str) -> contextlib.AbstractAsyncContextManager[None]:
        limits = (
            self.concurrency
            if isinstance(self.concurrency, Mapping)
            else {server: self.concurrency}
        )
        limit, kind = limits.get(server, limits.get("default", 8)), (server, path == "/verify")
        return (
            limit(server, path)
            if callable(limit)
            else self._slots.setdefault(kind, asyncio.Semaphore(limit))
        )

    async def routes(self, server: str) -> frozenset[str]:
        """The paths that `server` takes POSTs on, read once from its /openapi.json. Raises GymError."""
        if server not in self.urls:
            raise GymError(
                "no_server",
                f"no Gym server named {server!r}; configured: {', '.join(self.urls) or 'none'}",
            )
        asked = self._routes.get(server)
        if asked is None or (asked.done() and asked.exception()):
            asked = self._routes[server] = asyncio.create_task(self._read_routes(server))
        return await asyncio.shield(asked)

    async def _read_routes(self, server: str) -> frozenset[str]:
        described = await self._repeat(server, _Caller(self, server).call, "GET", "/openapi.json")
        _check(described, {"paths": {}}, f"{self.urls[server]}/openapi.json")
        paths = described["paths"].items()
        return frozenset(
            path for path, methods in paths if isinstance(methods, dict) and "post" in methods
        )

    async def kind(self, server: str) -> str:
        """`verify`, `step` or `agent`, by the routes of `server`. Raises GymError."""
        routes = await self.routes(server)
        return (
            "agent"
            if "/run" in routes
            else "verify"
            if "/verify" in routes or "/step" not in routes
            else "step"
        )

    @contextlib.asynccontextmanager
    async def session(self, server: str, row: Json) -> AsyncIterator[Session]:
        """An open session for one episode of `row` on `server` (/seed_session, or /reset). Raises GymError."""
        session = Session(self, server, row, await self.routes(server), await self.kind(server))
        await self._repeat(server, session.open)
        try:
            yield session
        finally:
            await session.close()

    async def run(
        self, server: str, row: Json, timeout_s: float, vocabulary: int | None = None
    ) -> Played:
        """POST /run: Gym's agent plays the whole episode, in `timeout_s` seconds -> (verdict, Response with all items,
        whose token ids are below `vocabulary`). Repeated, anew, after connect and "not now". Raises GymError."""
        return await self._repeat(
            server, self._run, server, row, timeout_s, vocabulary or 2**31, once_500=False
        )

    async def _run(self, server: str, row: Json, timeout_s: float, vocabulary: int) -> Played:
        began, url = time.monotonic(), f"{self.urls[server]}/run"
        read = functools.partial(_played, url=url, row=row, vocabulary=vocabulary)
        verdict, response = await _Caller(self, server).call("POST", "/run", row, timeout_s, read)
        if (
            self._watches[server].gone > began
        ):  # its resources server knows of nothing that was done before
            raise GymError(
                "session_lost", f"{url}: the server was started again meanwhile", False, True
            )
        return replace(verdict, latency_s=time.monotonic() - began), response

    async def aggregate(self, server: str, records: Sequence[Json]) -> Json | None:
        """The server's own metrics (/aggregate_metrics) over `records`, verify answers with `_ng_task_index` and
        `_ng_rollout_index`; None where it has none. Raises GymError."""
        if "/aggregate_metrics" not in await self.routes(server):
            return None
        body = {"verify_responses": list(records)}
        answer = await self._repeat(
            server, _Caller(self, server).call, "POST", "/aggregate_metrics", body
        )
        return answer if isinstance(answer, dict) else None

    async def _repeat(
        self, server: str, call: Call[T], *args: Any, once_500: bool = True, may: bool = True
    ) -> T:
        """`call(*args)`, and while its GymError and `may` allow it, again, with exponential backoff and full jitter. A
        try during which the server answered nobody counts only if it is the first: the rest is the outage's. One that
        it answered in part always counts, since what kills a server whenever it is back must come to an end."""
        tried, pause = 0, 0.4
        while True:
            began = time.monotonic()
            try:
                return await call(*args)
            except GymError as error:
                away = self._watches[server].answered < began
                tried += not (tried and away)
                again = error.retry or (error.reason == "http_500" and once_500)
                if not (may and again) or (tried >= self.attempts and not away):
                    raise
                once_500 = once_500 and error.reason != "http_500"
            await asyncio.sleep(random.uniform(0.0, pause))
            pause = min(5.0, 2 * pause)


def _played(body: Any, url: str, row: Json, vocabulary: int) -> Played:
    """The JSON of a 200 answer of /run -> (verdict, Response). Raises GymError('bad_answer' | 'masked')."""
    verdict = parse_verdict(body, row=row)
    _check(body, {"response": {"output": [ITEM]}}, url)
    for item in body["response"]["output"]:
        said = {"content": [{"text": str}]} if item.get("role") == "assistant" else {}
        _check(item, said | ITEM_OF.get(item["type"], {}), f"{url}: {item['type']}")
        ids = [0, *(item.get("prompt_token_ids") or ()), *(item.get("generation_token_ids") or ())]
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise GymError(
                "bad_answer", f"{url}: token ids from {min(ids)} to {max(ids)}, of {vocabulary}"
            )
    return verdict, body["response"]


class _Watch:
    """What all calls to one server have seen of it. Times are those of time.monotonic(), in seconds."""

    answered = failed = -math.inf  # last
    since, calls = -math.inf, 0  # begin of the last outage, and how many calls failed in it
    gone = -math.inf  # when nothing listened last, or it was started again


class _Caller:
    """HTTP to one server with cookies of its own, over the shared pool."""

    def __init__(self, gym: Gym, server: str):
        self.gym, self.server, self.url, self.watch = (
            gym,
            server,
            gym.urls[server],
            gym._watches[server],
        )
        self.cookies: dict[str, str] = {}
        self.touched = (
            False  # by a tool or a step, so that no new session can stand in for this one
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: float | None = None,
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """`read` of the JSON of a 200 answer, sound; a large one is read in a thread, while the event loop runs on.

        Raises GymError for any other status, and what `read` raises.
        """
        sent = "" if body is None else json.dumps(body, ensure_ascii=False)
        status, text = await self.ask(method, path, sent, timeout_s)
        if status != 200:
            raise self.refused(path, status, text)
        if len(text) < ASIDE_BYTES:
            return read(_parse(text, f"{self.url}{path}"))
        return await asyncio.to_thread(lambda: read(_parse(text, f"{self.url}{path}")))

    def refused(self, path: str, status: int, text: bytes) -> GymError:
        """A status that is no answer, as an error; cut short, since a 422 of Gym's echoes the request (megabytes)."""
        said = f"{self.url}{path}: HTTP {status}: {text[:300].decode(errors='replace')}"
        return GymError(f"http_{status}", said, status in NOT_NOW, self.touched and status in AWAY)

    async def ask(
        self, method: str, path: str, sent: str, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        """(status, body) of one request. Raises GymError for all but statuses that are an answer, of this session."""
        http, url, seconds, failure = (
            self.gym._http,
            self.url + path,
            timeout_s or self.gym.timeout_s,
            None,
        )
        gone = (
            not self.touched,
            self.touched,
        )  # a session that nothing has touched can be replaced, others are lost
        data, cookie = (
            sent.encode(errors="replace") or None,
            "; ".join(f"{k}={v}" for k, v in self.cookies.items()),
        )
        most = _most_bytes(path, data)
        headers = {"Content-Type": "application/json"} | ({"Cookie": cookie} if cookie else {})
        async with self.gym._place(self.server, path):
            began = time.monotonic()
            if not self.cookies:
                self.opened = began
            elif self.opened < self.watch.gone:
                raise GymError("session_lost", f"{url} was away since this session began", *gone)
            try:
                # The deadline covers the whole call: a read timeout alone would let a server trickle for ever.
                request = http.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                )
                async with asyncio.timeout(seconds), request as answer:
                    if answer.status not in AWAY:
                        self.watch.answered = time.monotonic()
                    if 300 <= answer.status < 400:
                        why = _redirect(answer.headers.get("Location", ""))
                        raise GymError(
                            f"http_{answer.status}", f"{url}: HTTP {answer.status}: {why}"
                        )
                    try:
                        await answer.content.readexactly(most + 1)
                        raise GymError(
                            "too_large", f"{url}: an answer of more than {most} bytes; shorten it"
                        )
                    except asyncio.IncompleteReadError as whole:
                        text = whole.partial
                if answer.status in NOT_NOW:
                    failure = self.refused(path, answer.status, text)
            except TimeoutError:
                failure = GymError("timeout", f"{url}: no answer within {seconds:g} s")
            except (aiohttp.ClientError, OSError) as error:
                failure = GymError(
                    "connect",
                    f"{url}: {type(error).__name__}: {str(error)!a:.300}",
                    True,
                    self.touched,
                )
                if isinstance(error, aiohttp.ClientConnectorError):
                    self.watch.gone = time.monotonic()
        if failure:
            raise failure if self.watch.answered >= began else await self._silence(failure, began)
        for header in filter(
            str.isprintable, answer.headers.getall("Set-Cookie", ())
        ):  # others cannot be sent back
            name, _, value = header.partition(";")[0].strip().partition("=")
            if _session_id(self.cookies.get(name, value)) != _session_id(value):
                raise GymError("session_lost", f"{url} answered out of another session", *gone)
            self.cookies[name] = value
        return answer.status, text

    async def _silence(self, error: GymError, began: float) -> GymError:
        """A call failed since whose begin nobody was answered: `error`, or past the outage budget ServerDownError."""
        watch, gym, now = self.watch, self.gym, time.monotonic()
        begin = (
            began if error.reason == "timeout" else now
        )  # of the silence: until it broke, a call was in work
        if (
            watch.answered > watch.since or begin > watch.failed + QUIET_S
        ):  # not the outage that is known
            watch.since, watch.calls = begin, 0
        watch.failed, watch.calls, silent_s = now, watch.calls + 1, now - watch.since
        if error.reason == "timeout" and silent_s > gym.outage_budget_s:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                request = gym._http.get(f"{self.url}/openapi.json", allow_redirects=False)
                async with asyncio.timeout(gym.timeout_s), request as answer:
                    if answer.status not in AWAY:
                        watch.answered = time.monotonic()
        if silent_s <= gym.outage_budget_s or watch.answered >= began:
            return error
        said = f"gym server {self.server} ({self.url}) gave no answer for {silent_s:.0f} s, while {watch.calls} calls"
        todo = f"see its log, start it again and resume the run; it had {gym.outage_budget_s:g} s (gym.outage_budget_s)"
        return ServerDownError("server_down", f"{said} failed, the last with {error}; {todo}")


def _session_id(cookie: str) -> str | None:
    """Starlette writes a session as base64 of JSON, timestamp, signature; Gym's JSON holds a session_id."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(base64.b64decode(cookie.partition(".")[0]))["session_id"])
    return None  # not one of Gym's


def callable_names(offered: Iterable[Any]) -> set[str]:
    """The tool names among `offered` that a policy may call: each becomes a path, and must lead to no other route.

    A name with a slash, however written, or with a newline at its end reaches another route than it names.
    """
    texts = {name for name in offered if isinstance(name, str) and name.isprintable()}
    return {name for name in texts if not set(name) & set("/\\%")} - RESERVED - {"", ".", ".."}


def routed(tools: Iterable[str], routes: Collection[str]) -> set[str]:
    """The tools that a server answers: by a route of that name, or one that takes any (`/{tool_name}`)."""
    catch_all = any(route.startswith("/{") and route.count("/") == 1 for route in routes)
    return {name for name in tools if catch_all or f"/{name}" in routes}


class Session:
    """One episode's conversation with one server. `Gym.session` makes it, opens it and closes it."""

    def __init__(self, gym: Gym, server: str, row: Json, routes: frozenset[str], kind: str):
        self.gym, self.server, self.row, self.kind, self.last_ids = (
            gym,
            server,
            row,
            kind,
            list[int](),
        )  # answered
        self.observation: str | None = None  # what a step server says first
        self.tools = callable_names(
            tool.get("name") for tool in row["responses_create_params"].get("tools") or []
        )
        self.executable = routed(
            self.tools, routes
        )  # where no route answers, the call itself is the answer (xlam_fc)
        self._open_now, self._info = (
            False,
            Json(),
        )  # whether the server knows the session; what it said of it

    async def open(self) -> None:
        """POST /seed_session, or /reset, with the whole row and no cookies. Raises GymError."""
        self._http = _Caller(self.gym, self.server)
        body = await self._http.call(
            "POST", "/reset" if self.kind == "step" else "/seed_session", self.row
        )
        if self.kind == "step":
            _check(body, WORLD, f"{self._http.url}/reset")
            self.observation, self._info = body.get("observation"), body.get("info") or {}
        self._open_now, self._http.touched = True, self.kind == "step"

    async def call_tool(self, name: str, arguments: str) -> str:
        """What tool `name` answers to `arguments` (JSON text, as the policy wrote it): text for the model, as is what
        the policy got wrong (no such tool, no JSON, a 4xx or 500). Raises GymError for what the server got wrong."""
        if name not in self.tools:
            return json.dumps({"error": f"Unknown tool: {name}"})
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        self._http.touched = True
        _, text = await self._http.ask("POST", "/" + urllib.parse.quote(name, safe=""), arguments)
        return text.decode(errors="replace")

    async def verify(self, response: Json) -> Verdict:
        """POST /verify with the row and `response` (see `response`). Raises GymError."""
        return await self.gym._repeat(
            self.server, self._verify, response, may=not self._http.touched
        )

    async def _verify(self, response: Json) -> Verdict:
        if not self._open_now:  # the session may have died with the call that failed
            await self.open()
        self._open_now, began = False, time.perf_counter()
        read = functools.partial(parse_verdict, row=self.row)
        verdict = await self._http.call(
            "POST", "/verify", {**self.row, "response": response}, read=read
        )
        self._open_now = True
        return replace(verdict, latency_s=time.perf_counter() - began)

    async def step(self, response: Json) -> Turn:
        """POST /step with the row and `response`, what the policy said in this turn only. Raises GymError."""
        known = bool(self._info.get("supports_step_idempotency"))  # a repeated step, by its id
        body = {**self.row, "response": response} | (
            {"_ng_step_request_id": uuid.uuid4().hex} if known else {}
        )
        answer = await self.gym._repeat(
            self.server, self._http.call, "POST", "/step", body, once_500=False, may=known
        )
        _check(answer, STEP, f"{self._http.url}/step")
        outputs = (answer.get("info") or {}).get("tool_outputs") or []
        terminated, truncated = bool(answer.get("terminated")), bool(answer.get("truncated"))
        return Turn(
            answer.get("observation"), float(answer["reward"]), terminated, truncated, outputs
        )

    async def close(self) -> None:
        """POST /close where the server asks for it; others forget a session by themselves, or never."""
        if self._info.get("supports_explicit_close"):
            try:
                await self._http.call("POST", "/close", {})
            except GymError as error:  # the verdict stands; the server keeps a session too many
                logging.getLogger(__name__).warning("%s", error)
