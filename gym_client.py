"""NeMo Gym over HTTP: sessions, verdicts, and the servers that the kit starts itself.

Lift this file alone into another project; it needs only httpx, httpx-aiohttp and tenacity:

    import asyncio, json
    from gym_client import Gym, message_response

    async def main():
        row = json.loads(open("rows.jsonl").readline())        # one Gym row, verbatim
        async with Gym({"mcqa": "http://127.0.0.1:8001"}) as gym:
            async with gym.session("mcqa", row) as session:    # POST /seed_session, its own cookies
                verdict = await session.verify(message_response("The answer is \\\\boxed{B}"))
        print(verdict.reward)

    asyncio.run(main())

The error model. A verdict either holds a reward that the verifier meant, or there is no verdict:
every failure raises `GymError`, whose `reason` is one short word that ends up in the metrics as
`rollout/failed/<reason>` and never in the loss:

    connect      nothing listened, or the connection broke (retried with a fresh session)
    timeout      no answer within the deadline (not retried: the deadline is the caller's patience)
    http_<code>  any status but 200; 408, 429, 502, 503, 504 are retried, 500 once (Gym answers 500
                 for a crash of the verifier, which may be the policy's own text), other 4xx never
    bad_answer   200, but not a JSON object with a finite numeric reward
    masked       200, but the verifier itself disowns the reward (`mask_sample`, `failure_kind`,
                 `_ng_failure_class`: a judge that was down)

A failed call is repeated only as a whole session: new cookie jar, `/seed_session`, `/verify`. Gym's
sessions live in the server's memory behind a signed cookie, so a shared jar would merge episodes.

Command line: `python gym_client.py NAME [--port 8001] [--python .venv-gym/bin/python]` starts one
resources server of the installed nemo-gym package and serves until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

RETRIED_STATUS = {408, 429, 502, 503, 504}  # the server says: not now
START_DEADLINE_S = 90.0  # a Gym server imports for 3 to 30 s before it answers


class GymError(Exception):
    """A call that produced no verdict. `reason` is its short name, `retry` whether to try again."""

    def __init__(self, reason: str, message: str, retry: bool = False):
        super().__init__(message)
        self.reason, self.retry = reason, retry


class GymStartError(RuntimeError):
    """A Gym server that is not there, or did not start; the message says what to do."""


@dataclass(frozen=True)
class Verdict:
    """What a verifier said: `reward` is finite; `components` are named parts of it, where it gives them."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    latency_s: float = 0.0  # of the call that succeeded


def message_response(text: str, model: str = "policy") -> dict[str, Any]:
    """One assistant message as the OpenAI Responses object that `/verify` demands.

    `annotations` and the ids look idle but are required by Gym's schema (422 without them).
    """
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def parse_verdict(body: Any, latency_s: float = 0.0) -> Verdict:
    """The JSON body of a 200 answer of `/verify` -> Verdict. Raises GymError('bad_answer' | 'masked')."""
    if not isinstance(body, dict):
        raise GymError("bad_answer", f"verify answered {type(body).__name__}, not a JSON object: {str(body)[:200]}")
    for key in ("_ng_failure_class", "failure_kind", "mask_sample"):
        if body.get(key):
            why = body.get("failure_reason") or body.get("_ng_failure_judge_error") or body[key]
            raise GymError("masked", f"the verifier disowns its reward ({key}={body[key]!r}): {str(why)[:300]}")
    parts = body.get("reward_components") or {}
    if not isinstance(parts, dict):
        raise GymError("bad_answer", f"verify answered reward_components={str(parts)[:200]}, not a JSON object")
    for name, value in {"reward": body.get("reward"), **parts}.items():
        # bool is an int to Python, and json reads NaN and Infinity: neither is a reward
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise GymError("bad_answer", f"verify answered {name}={value!r}, not a finite number")
    return Verdict(float(body["reward"]), {name: float(value) for name, value in parts.items()}, latency_s)


class Gym:
    """The resources servers of a run, by name. Use as `async with Gym(urls) as gym`.

    urls: {name: "http://host:port"}. timeout_s: seconds for each HTTP call, from its first byte to the
    last. concurrency: calls in flight per server (int, or {name: int}); verifiers that fork per answer
    (math_with_judge) time out, and then answer reward 0, when overloaded. attempts: tries per verdict.
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
        self._limit = {n: concurrency if isinstance(concurrency, int) else concurrency[n] for n in self.urls}

    async def __aenter__(self) -> Gym:
        # One pool for all episodes; the semaphores are the limit, so the pool itself has none.
        self._transport = AiohttpTransport(limits=httpx.Limits(max_connections=None, keepalive_expiry=5.0))
        self._slots = {name: asyncio.Semaphore(limit) for name, limit in self._limit.items()}
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._transport.aclose()

    @contextlib.asynccontextmanager
    async def session(self, server: str, row: Mapping[str, Any]) -> AsyncIterator[Session]:
        """A seeded session for one episode of `row` on `server`. Raises GymError."""
        session = Session(self, server, row)
        await session.seed()
        yield session


class Session:
    """One episode's conversation with one resources server: a cookie jar over the shared pool."""

    def __init__(self, gym: Gym, server: str, row: Mapping[str, Any]):
        if server not in gym.urls:
            raise GymError("no_server", f"no Gym server named {server!r}; configured: {', '.join(gym.urls) or 'none'}")
        self.gym, self.server, self.row = gym, server, row
        self._stale = True  # no session that the server is known to remember

    async def seed(self) -> None:
        """POST /seed_session with the whole row, on a new cookie jar, repeated while that is safe."""
        await self._repeat(self._seed_once)

    async def verify(self, response: Mapping[str, Any]) -> Verdict:
        """POST /verify with the row and `response` (an OpenAI Responses object). Raises GymError."""

        async def verify_once() -> Verdict:
            if self._stale:  # the session may have died with the call that failed
                await self._seed_once()
            self._stale = True
            start = time.perf_counter()
            body = await self._post("/verify", {**self.row, "response": response})
            self._stale = False
            return parse_verdict(body, time.perf_counter() - start)

        return await self._repeat(verify_once)

    async def _seed_once(self) -> None:
        # trust_env off: a proxy has no business between the loop and its verifiers. The client is not
        # closed: that would close the pool that all sessions share.
        self._http = httpx.AsyncClient(
            transport=self.gym._transport, base_url=self.gym.urls[self.server], timeout=None, trust_env=False
        )
        await self._post("/seed_session", dict(self.row))
        self._stale = False

    async def _repeat(self, call: Any) -> Any:
        once_500 = True

        def again(error: BaseException) -> bool:
            nonlocal once_500
            if not isinstance(error, GymError):
                return False
            if error.reason == "http_500" and once_500:
                once_500 = False
                return True
            return error.retry

        retrying = AsyncRetrying(
            retry=retry_if_exception(again),
            stop=stop_after_attempt(self.gym.attempts),
            wait=wait_random_exponential(multiplier=0.2, max=5.0),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                result = await call()
        return result

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        gym, url = self.gym, self.gym.urls[self.server] + path
        async with gym._slots[self.server]:
            try:
                # The deadline covers the whole call: a read timeout alone would let a server trickle for ever.
                async with asyncio.timeout(gym.timeout_s):
                    answer = await self._http.post(path, json=body)
            except TimeoutError:
                raise GymError("timeout", f"{url}: no answer within {gym.timeout_s:g} s") from None
            except (httpx.TransportError, OSError) as error:
                raise GymError("connect", f"{url}: {type(error).__name__}: {error}", retry=True) from error
        if answer.status_code != 200:
            text = answer.text[:300]  # Gym echoes the request in a 422, which can be megabytes
            code = answer.status_code
            raise GymError(f"http_{code}", f"{url}: HTTP {code}: {text}", retry=code in RETRIED_STATUS)
        try:
            return answer.json()
        except ValueError:
            raise GymError("bad_answer", f"{url}: HTTP 200 whose body is not JSON: {answer.text[:200]}") from None


# --- servers that the kit starts -----------------------------------------------------------------

# Runs inside the Gym environment. It reads the server's own YAML from the nemo-gym package, so that a
# recipe names only what it changes, and hands it over as `ng_run` does: two environment variables.
_SERVE = """
import ctypes, json, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the kit, whatever its exit
parent, name, impl, host, port, changes = int(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]), json.loads(sys.argv[6])
if os.getppid() != parent:
    sys.exit("the process that asked for this server is gone")
import pathlib, yaml, nemo_gym
root = pathlib.Path(nemo_gym.__file__).parent.parent / "resources_servers"
folder = root / impl
if not (folder / "app.py").is_file():
    have = sorted(p.parent.name for p in root.glob("*/app.py"))
    sys.exit(f"nemo-gym has no resources server {impl!r}; it has: {', '.join(have)}")
block, own = {}, folder / "configs" / f"{impl}.yaml"
if own.is_file():
    for entry in yaml.safe_load(own.read_text()).values():
        block = (entry.get("resources_servers") or {}).get(impl) or block
block = {"entrypoint": "app.py", "domain": "other", **block, **changes, "host": host, "port": port}
config = {"head_server": {"host": host, "port": port}, "dry_run": False, name: {"resources_servers": {impl: block}}}
os.environ["NEMO_GYM_CONFIG_DICT"], os.environ["NEMO_GYM_CONFIG_PATH"] = yaml.safe_dump(config), name
import nemo_gym.server_utils
nemo_gym.server_utils.initialize_ray = lambda: None  # a Ray cluster of 6 processes, which most servers never use
os.chdir(folder)
sys.path.insert(0, str(folder))
runpy.run_path(str(folder / "app.py"), run_name="__main__")
"""


def port_in_use(host: str, port: int) -> bool:
    """True when something listens on host:port."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((host, port)) == 0


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def check_server(name: str, spec: Mapping[str, Any]) -> None:
    """What can be known of a server without starting it: its url answers, or its start can work.

    spec: {url: ...} or {start: {...}} as for `running_servers`. Raises GymStartError.
    """
    if spec.get("url"):
        return wait_ready(name, str(spec["url"]).rstrip("/"))
    start = spec.get("start") or {}
    python, host, port = interpreter(start), start.get("host") or "127.0.0.1", start.get("port")
    if not python.exists():
        raise GymStartError(f"gym.servers.{name}: no interpreter at {python}; `make gym` makes that environment")
    if port and port_in_use(host, port):
        raise GymStartError(f"gym.servers.{name}: port {port} on {host} is in use; set another one, or give its url")


def interpreter(start: Mapping[str, Any]) -> Path:
    """The Python that has nemo-gym installed; never this one, which it would break."""
    return Path(start.get("python") or ".venv-gym/bin/python")


def start_server(name: str, start: Mapping[str, Any], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a nemo-gym resources server in its own environment; does not wait for it.

    start: python (an interpreter that has nemo-gym), server (folder under resources_servers; default:
    name), host (default 127.0.0.1), port (default: a free one), config (changes to the server's YAML).
    Returns (process, url). Raises GymStartError.
    """
    check_server(name, {"start": start})
    host = start.get("host") or "127.0.0.1"
    port = start.get("port") or free_port(host)
    changes = json.dumps(start.get("config") or {})
    command = [str(interpreter(start).absolute()), "-c", _SERVE, str(os.getpid()), name, start.get("server") or name]
    # The server's environment is its own: nothing of this interpreter's, and no tracker that phones home.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, host, str(port), changes],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # Ctrl-C reaches the kit, which then stops the server in its own order
        )
    return process, f"http://{host}:{port}"


def wait_ready(name: str, url: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
    """Wait until `url` answers GET /openapi.json. Raises GymStartError with the next thing to do.

    A server that the kit started has START_DEADLINE_S; one that it did not start must be there (5 s).
    """
    deadline = time.monotonic() + (START_DEADLINE_S if process else 5.0)
    why = "no answer"
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/openapi.json", timeout=5.0, trust_env=False)
            if answer.status_code == 200 and isinstance(answer.json().get("paths"), dict):
                return
            why = f"HTTP {answer.status_code} from /openapi.json"
        except (httpx.HTTPError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        if process and process.poll() is not None:
            why = f"it exited with status {process.returncode}"
            break
        time.sleep(0.2)
    if process:
        tail = log.read_text(errors="replace").strip().splitlines()[-5:] if log else []
        raise GymStartError(f"gym server {name} did not start: {why}; log {log}: " + " | ".join(tail))
    port = url.rsplit(":", 1)[-1]
    raise GymStartError(
        f"gym.servers.{name}.url: {url} does not answer ({why}); "
        f"start it with `python gym_client.py {name} --port {port}`, or let the kit start it (gym.servers.{name}.start)"
    )


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and after 5 s SIGKILL, to the server and whatever it forked."""
    for sig, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


@contextlib.contextmanager
def running_servers(
    servers: Mapping[str, Mapping[str, Any]], log_dir: Path, meanwhile: Callable[[], Any] = lambda: None
) -> Iterator[dict[str, str]]:
    """{name: {url: ...} or {start: ...}} -> {name: url}, all answering; those started stop at exit.

    The servers start side by side, and beside what `meanwhile` does. Raises GymStartError.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    urls: dict[str, str] = {}
    try:
        for name, spec in servers.items():
            if spec.get("url"):
                urls[name] = str(spec["url"]).rstrip("/")
                wait_ready(name, urls[name])
            else:
                started[name], urls[name] = start_server(name, spec.get("start") or {}, log_dir / f"gym_{name}.log")
        meanwhile()
        for name, process in started.items():
            wait_ready(name, urls[name], process, log_dir / f"gym_{name}.log")
        yield urls
    finally:
        for process in started.values():
            stop_server(process)


def main() -> None:
    """Serve one resources server in the foreground until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Start one resources server of the installed nemo-gym package.")
    parser.add_argument("name", help="folder under resources_servers, for example reasoning_gym")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--python", default=".venv-gym/bin/python", help="interpreter that has nemo-gym")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        spec = {args.name: {"start": {"python": args.python, "port": args.port}}}
        with running_servers(spec, Path("runs/gym")) as urls:
            print(f"{args.name} serves on {urls[args.name]}; Ctrl-C stops it", flush=True)
            signal.pause()
    except GymStartError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
