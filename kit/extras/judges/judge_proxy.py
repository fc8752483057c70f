"""gym.judges: the models that Gym's verifiers ask by name (judges), and what stands between the two.

    verifier  ->  Gym's model server (vllm_model, ...)  ->  the proxy here  ->  an OpenAI-compatible address, a vLLM
                                                                               that the kit serves, or the policy

Gym's own client has no deadline, asks again at 2 Hz for ever where a judge says 429 or 503, and makes of a prompt that
is too long an empty answer. So each judge is asked through `ask`: with a deadline, tries, a limit of its own, and its
key, which stays in this process. Tokens are counted where they are paid. What is no answer becomes 422, which Gym
passes on; kit/extras/judges/judge_parsing.py, inside the verifier, withholds the verdict that it was for.

Reasons of failures, in metrics.jsonl as `judge/<name>/failed/<reason>`: connect, timeout, http_<code>, bad_answer (no
completion), empty, refused (its content filter).
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import email.utils
import json
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kit.errors import ConfigError
from kit.extras.judges import judge_parsing
from kit.gym import servers as gym_servers

KINDS = ("base_url", "start")
KEYS = {
    "model",
    "api_key_env",
    "parameters",
    "timeout_s",
    "attempts",
    "concurrency",
    "server",
    "config",
}
START_KEYS = {"model", "gpus", "args", "deadline_s"}
SERVERS = (
    "vllm_model",
    "openai_model",
    "inference_provider",
    "genrm_model",
)  # of Gym's, which ask an address
NOT_NOW = {408, 409, 425, 429, 500, 502, 503, 504, 520, 529}
ROUTES = ("chat/completions", "responses")
KEPT = ("role", "content", "refusal", "tool_calls")  # of a message: no reasoning, no token ids
LIST_S = 20.0  # seconds for the list of an address's models
PAUSE_S = 0.5  # before the second try; doubled for each one more
SHARE = 0.8  # of gym.timeout_s, that a judge has where gym.judges does not say


@dataclass
class Judge:
    """A model that verifiers ask by `name`."""

    name: str
    url: str  # of its API: ".../v1"
    model: str  # as that API calls it
    key: str = field(default="", repr=False)
    key_name: str = ""  # of the environment variable that holds it
    parameters: dict[str, Any] = field(
        default_factory=dict
    )  # over what a verifier asks for: temperature, ...
    timeout_s: float = 48.0  # for one answer, all tries and pauses, but for the wait for a place
    attempts: int = 3
    concurrency: int = 64  # requests at once
    server: str = "vllm_model"  # of Gym's, under responses_api_models
    config: dict[str, Any] = field(default_factory=dict)  # changes to its settings
    start: dict[str, Any] | None = None  # a vLLM of the kit's: {model, gpus, args, deadline_s}

    @property
    def is_here(self) -> bool:
        """Whether its address is on this machine: the proxy of the environment is not for that."""
        return any(host in self.url for host in ("//127.0.0.1", "//localhost"))

    def clean(self, text: str) -> str:
        """Without the key: a provider may quote it."""
        return text.replace(self.key, f"${self.key_name}") if self.key else text


class JudgeError(Exception):
    """A judge that did not answer. `reason` as in the header; `pause_s`: what it asks to wait, `retry`: at all."""

    def __init__(self, reason: str, message: str, retry: bool = False, pause_s: float = 0.0):
        super().__init__(message)
        self.reason, self.retry, self.pause_s = reason, retry, pause_s


# --- what a recipe says --------------------------------------------------------------------------


def problems(specs: Mapping[str, Any], timeout_s: float, device: str = "cpu") -> Iterator[str]:
    """What is wrong with gym.judges, without asking anybody. timeout_s: gym.timeout_s."""
    for name, spec in specs.items():
        where = f"gym.judges.{name}"
        if not gym_servers.NAME.fullmatch(str(name)):
            yield f"{where}: {name!r} is no name; take letters, digits, _, - and ., but no . at its begin"
        if spec == "policy":
            continue
        kinds = [key for key in KINDS if isinstance(spec, Mapping) and spec.get(key)]
        if len(kinds) != 1:
            yield f"{where} takes base_url: https://.../v1 and model, or start: {{model}}, or is the word policy"
            continue
        if "api_key" in spec:
            yield f"{where}.api_key: a key stands in no recipe; name its environment variable: api_key_env: NAME"
        elif unknown := spec.keys() - KEYS - {kinds[0]}:
            yield f"{where}: unknown key {min(unknown)!r}; it takes {', '.join(sorted(KEYS | {kinds[0]}))}"
        if kinds == ["base_url"]:
            yield from _address_problems(where, spec)
        else:
            yield from _start_problems(where, spec, device)
        for key, kind in ("timeout_s", float), ("attempts", int), ("concurrency", int):
            value = spec.get(key)
            if value is not None and (type(value) not in (int, kind) or value <= 0):
                yield f"{where}.{key} is {value!r}; it takes a number over 0"
            elif key == "timeout_s" and (value or 0) >= timeout_s:
                yield f"{where}.timeout_s={value} is no less than gym.timeout_s={timeout_s:g}, which ends the verdict"
        if (spec.get("server") or SERVERS[0]) not in SERVERS:
            yield f"{where}.server: {spec['server']!r} is none of {', '.join(SERVERS)}; a vLLM is served by start"
        for key in "parameters", "config":
            if not isinstance(spec.get(key) or {}, Mapping):
                yield f"{where}.{key} is {spec[key]!r}; it takes keys and values"


def _address_problems(where: str, spec: Mapping[str, Any]) -> Iterator[str]:
    if not str(spec["base_url"]).startswith(("http://", "https://")):
        yield f"{where}.base_url is {spec['base_url']!r}; it takes an address like https://host/v1"
    if not spec.get("model"):
        yield f"{where}.model is not set; it takes the name by which {spec['base_url']} knows the model"
    variable = spec.get("api_key_env")
    if variable and not os.environ.get(str(variable)):
        yield f"{where}.api_key_env: the environment variable {variable} is not set; it must hold the key"


def _start_problems(where: str, spec: Mapping[str, Any], device: str) -> Iterator[str]:
    start = spec["start"] if isinstance(spec["start"], Mapping) else {}
    if unknown := start.keys() - START_KEYS:
        yield f"{where}.start: unknown key {min(unknown)!r}; it takes {', '.join(sorted(START_KEYS))}"
    model = str(start.get("model") or "")
    if not model or (
        model.startswith((".", "/", "~", "models/")) and not Path(model).expanduser().is_dir()
    ):
        yield f"{where}.start.model={model or 'null'}: no model folder; give one that is there, or a name of the hub"
    if device != "cpu" and not start.get("gpus"):
        yield f"{where}.start.gpus is not set: a judge needs GPUs of its own, as [7], counted as nvidia-smi counts them"
    if not isinstance(start.get("gpus") or [], list) or not isinstance(
        start.get("args") or {}, Mapping
    ):
        yield f"{where}.start: gpus takes a list of numbers, args the options of `vllm serve`, {{max_model_len: 8192}}"


def judges(
    specs: Mapping[str, Any],
    timeout_s: float,
    policy: Mapping[str, str] | None = None,
    cpu_dtype: str = "",
) -> dict[str, Judge]:
    """gym.judges, which `problems` found to be in order -> {name: Judge}.

    timeout_s: gym.timeout_s. policy: {base_url, api_key, model} of the run's own. cpu_dtype: in which a vLLM of the
    kit's computes on a CPU; "": it has GPUs.
    """
    made = {}
    for name, spec in specs.items():
        given = (
            {}
            if spec == "policy"
            else {k: v for k, v in spec.items() if k != "base_url" and v is not None}
        )
        given = {"timeout_s": SHARE * timeout_s, **given}
        variable = given.pop("api_key_env", None)
        places: dict[str, Any]
        if spec == "policy":
            address = policy or {"base_url": "", "api_key": "", "model": "policy"}
            places = {
                "url": address["base_url"],
                "key": address["api_key"],
                "model": address["model"],
            }
            places["key_name"] = "POLICY_API_KEY"
        elif given.get("start"):
            port, start = gym_servers.free_port(), dict(given["start"])
            cpu = (
                {"dtype": cpu_dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**30}
                if cpu_dtype
                else {}
            )
            start["args"] = cpu | dict(start.get("args") or {})
            places = {
                "url": f"http://{gym_servers.HOST}:{port}/v1",
                "model": name,
                "key": secrets.token_hex(16),
            }
            given |= {"start": start}
        else:
            places = {"url": str(spec["base_url"]).rstrip("/")}
            places |= {"key": os.environ[variable], "key_name": variable} if variable else {}
        made[name] = Judge(name, **{**given, **places})
    return made


def reach(judge: Judge) -> None:
    """Ask an address for its models. Raises ConfigError where it is down, refuses the key, or has no such model.

    An address that lists no models, or not all of them, is asked for one short answer, which costs some tokens.
    """
    where, headers = (
        f"gym.judges.{judge.name}",
        {"Authorization": f"Bearer {judge.key}"} if judge.key else {},
    )
    request: dict[str, Any] = {"headers": headers, "use_proxy": not judge.is_here}
    try:
        answer = gym_servers.fetch(f"{judge.url}/models", deadline_s=LIST_S, **request)
        known = [m["id"] for m in answer.json()["data"]] if answer.status_code == 200 else []
    except (ValueError, TypeError, KeyError):
        known = []
    except gym_servers.FetchError as error:
        said = f"{judge.url} does not answer ({error})"
        raise ConfigError(f"{where}.base_url: {said}; start it, or correct the address") from None
    if judge.model in known:
        return
    if answer.status_code not in (401, 403):
        url, messages = f"{judge.url}/chat/completions", [{"role": "user", "content": "Say yes."}]
        request["json"] = {"model": judge.model, "messages": messages, **judge.parameters}
        try:
            answer = gym_servers.fetch(url, "POST", judge.timeout_s, **request)
        except gym_servers.FetchError as error:
            raise ConfigError(
                f"{where}.base_url: {judge.url} does not answer ({error}); start it again"
            ) from None
    said = f"{judge.url} answers HTTP {answer.status_code}: {judge.clean(answer.text[:200])}"
    if answer.status_code in (401, 403):
        key = (
            f"the key in {judge.key_name}"
            if judge.key
            else "without a key; name its variable in api_key_env"
        )
        raise ConfigError(f"{where}: {said} ({key})")
    if answer.status_code in (400, 404, 422):
        near = difflib.get_close_matches(judge.model, known, 4, 0.0)
        hint = (
            f"; nearest of its {len(known)} models are {', '.join(near)}"
            if near
            else "; give one that it has"
        )
        raise ConfigError(f"{where}.model={judge.model}: {said}{hint}")


# --- asking --------------------------------------------------------------------------------------


def _completion(text: bytes, judge: Judge) -> dict[str, Any]:
    """The JSON of a 200 answer, with what verifiers read of it. Raises JudgeError for what holds no text."""
    try:
        body = json.loads(text)
        said = judge_parsing.texts(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        cut = judge.clean(text[:200].decode(errors="replace"))
        raise JudgeError(
            "bad_answer", f"HTTP 200 that is no completion: {cut!r}", retry=True
        ) from None
    choices = body.get("choices") or []
    for choice in choices:
        choice["message"] = {k: v for k, v in choice["message"].items() if k in KEPT}
        choice.pop("logprobs", None)
    if not any(answer.strip() for answer in said):
        ends = {str(choice.get("finish_reason")) for choice in choices}
        if "content_filter" in ends or any(choice["message"].get("refusal") for choice in choices):
            raise JudgeError("refused", "it refuses to answer")
        no_room = "length" in ends or body.get("status") == "incomplete"
        hint = (
            ": its tokens went before it wrote any; raise parameters.max_tokens" if no_room else ""
        )
        raise JudgeError("empty", f"an empty answer{hint}")
    return dict(body)


def _wait_s(header: str) -> float:
    """Retry-After, in seconds from now; 0 for what is neither a number nor a date."""
    try:
        return max(0.0, float(header))
    except ValueError:
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body of a judge's answer. Raises JudgeError for one longer than gym_servers.MOST_BYTES."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > gym_servers.MOST_BYTES:
            raise JudgeError(
                "bad_answer", f"an answer longer than {gym_servers.MOST_BYTES:,} bytes"
            )
    return bytes(body)


async def _try(
    judge: Judge, http: aiohttp.ClientSession, route: str, body: dict[str, Any]
) -> dict[str, Any]:
    """One request. Raises JudgeError."""
    headers = {"Authorization": f"Bearer {judge.key}"} if judge.key else {}
    try:
        # a redirect would give the row, and the judge's word, to another host
        async with http.post(
            f"{judge.url}/{route}", json=body, headers=headers, allow_redirects=False
        ) as answer:
            text = await _read(answer)
    except (aiohttp.ClientError, OSError) as error:
        raise JudgeError(
            "connect", f"{type(error).__name__}: {judge.clean(str(error))[:200]}", retry=True
        ) from None
    if 300 <= answer.status < 400:
        target = judge.clean(answer.headers.get("Location", "")[:200])
        said = f"HTTP {answer.status} redirects to {target!r}, which is not followed; set that base_url if you trust it"
        raise JudgeError(f"http_{answer.status}", said)
    if answer.status != 200:
        said = f"HTTP {answer.status}: {judge.clean(text[:200].decode(errors='replace'))}"
        wait = _wait_s(answer.headers.get("Retry-After", ""))
        raise JudgeError(f"http_{answer.status}", said, answer.status in NOT_NOW, wait)
    return _completion(text, judge)


async def ask(
    judge: Judge,
    http: aiohttp.ClientSession,
    route: str,
    body: Mapping[str, Any],
    count: Counter[str],
) -> Any:
    """The judge's answer to a chat completion or a Responses request, tried again as far as tries and deadline go.

    A judge that says when to come back (Retry-After) is waited for, whatever the tries; not past the deadline. `count`
    is told of retries. Raises JudgeError.
    """
    sent = {**body, **judge.parameters, "model": judge.model, "stream": False}
    deadline, tried, pause = time.monotonic() + judge.timeout_s, 0, PAUSE_S
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _try(judge, http, route, sent)
        except TimeoutError:
            raise JudgeError("timeout", f"no answer within {judge.timeout_s:g} s") from None
        except JudgeError as error:
            tried += not error.pause_s
            wait = max(error.pause_s, pause if tried else PAUSE_S)
            if not error.retry or tried >= judge.attempts:
                raise
            if time.monotonic() + wait >= deadline:
                more = (
                    f"{error}; again in {wait:g} s would be past {judge.timeout_s:g} s (timeout_s)"
                )
                raise JudgeError(error.reason, more) from None
        count["retries"] += 1
        await asyncio.sleep(wait)
        pause *= 2 if tried else 1


class Proxy:
    """The address at which Gym's model servers ask `judges`, in a thread of its own. Use as `with Proxy(judges)`."""

    def __init__(self, judges: Mapping[str, Judge]):
        self.judges, self.key, self.port = judges, secrets.token_hex(16), gym_servers.free_port()
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in judges}
        self._lock, self._ready = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._failed: BaseException | None = None

    def __enter__(self) -> Proxy:
        if self.judges:
            self._thread.start()
            self._ready.wait()
            if self._failed:
                raise self._failed
        return self

    def __exit__(self, *_: Any) -> None:
        if self.judges:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """judge/<name>/asked, prompt_tokens, completion_tokens, retries, failed/<reason>: since the last call."""
        with self._lock:
            found = {
                f"judge/{name}/{k}": float(v)
                for name, count in self.counts.items()
                for k, v in count.items()
            }
            for count in self.counts.values():
                count.clear()
        return found

    def blocks(self) -> Iterator[dict[str, Any]]:
        """The processes behind gym.judges, for gym_servers.running_servers: Gym's model servers, and vLLM."""
        for judge in self.judges.values():
            prefix = "openai_" if judge.server == "openai_model" else ""
            address = f"http://{gym_servers.HOST}:{self.port}/{judge.name}/v1"
            says = {"base_url": address, "api_key": self.key, "model": judge.model}
            settings: dict[str, Any] = {f"{prefix}{key}": value for key, value in says.items()}
            if judge.server in ("vllm_model", "genrm_model"):
                settings |= {"return_token_id_information": False, "uses_reasoning_parser": False}
            if judge.start:
                yield vllm_block(judge)
            hidden = [judge.key_name] if judge.key_name else []
            yield {
                "name": judge.name,
                "impl": judge.server,
                "changes": settings | judge.config,
                "hidden": hidden,
            }

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._listening():
                self._ready.set()
                await self._end.wait()
        except BaseException as error:
            self._failed = error
            self._ready.set()

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        timeout, limit = (
            aiohttp.ClientTimeout(total=None),
            {n: asyncio.Semaphore(j.concurrency) for n, j in self.judges.items()},
        )
        async with contextlib.AsyncExitStack() as stack:
            clients = {}
            for name, judge in self.judges.items():
                pool = aiohttp.TCPConnector(limit=0)
                session = aiohttp.ClientSession(
                    connector=pool, timeout=timeout, trust_env=not judge.is_here
                )
                clients[name] = await stack.enter_async_context(session)

            async def answer(request: web.Request) -> web.Response:
                name, route = request.match_info["name"], request.match_info["route"]
                if request.headers.get("Authorization") != f"Bearer {self.key}":
                    return web.json_response(
                        {"error": {"message": "wrong or missing key"}}, status=401
                    )
                if name not in self.judges or route not in ROUTES:
                    return web.json_response(
                        {"error": {"message": f"no such route: {request.path}"}}, status=404
                    )
                async with limit[name]:
                    status, body = await self._answer(
                        self.judges[name], clients[name], route, await request.json()
                    )
                return web.json_response(body, status=status)

            app = web.Application(client_max_size=2**28)  # bytes
            app.router.add_post("/{name}/v1/{route:.*}", answer)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, gym_servers.HOST, self.port).start()
            yield

    async def _answer(
        self, judge: Judge, http: aiohttp.ClientSession, route: str, body: Any
    ) -> tuple[int, Any]:
        """(status, JSON) for Gym's model server. A failure is 422: Gym asks no second time, and calls it no answer."""
        count: Counter[str] = Counter(asked=1)
        try:
            said = await ask(judge, http, route, body, count)
            used = said.get("usage")
            for ours, theirs in (
                ("prompt_tokens", "input_tokens"),
                ("completion_tokens", "output_tokens"),
            ):
                tokens = (used.get(ours) or used.get(theirs)) if isinstance(used, dict) else 0
                count[ours] += tokens if isinstance(tokens, int) else 0
            return 200, said
        except JudgeError as error:
            count[f"failed/{error.reason}"] += 1
            # a 400 or the words `context length` would become an empty answer; quotes would end the message (verdicts)
            told = f"judge {judge.name} ({judge.url}): {error.reason}: {error}".replace(
                "context length", "context"
            )
            return 422, {
                "error": {
                    "message": told.replace('"', "")
                    .replace("'", "")
                    .replace("\\", "")
                    .replace("}", "")
                }
            }
        finally:
            with self._lock:
                self.counts[judge.name] += count


# --- a vLLM of the kit's -------------------------------------------------------------------------


def vllm_block(judge: Judge) -> dict[str, Any]:
    """The process that serves judge.start.model, watched and stopped like a Gym server; its port is in judge.url."""
    start = judge.start or {}
    port, args = int(judge.url.rpartition(":")[2].removesuffix("/v1")), dict(start["args"])
    devices = start.get("gpus") or []
    if devices:
        args = {"tensor_parallel_size": len(devices), **args}
    model = Path(start["model"]).expanduser()
    options = [
        str(model.resolve()) if model.is_dir() else str(start["model"]),
        "--served-model-name",
        judge.model,
    ]
    guards = {"allowed_origins": "[]", "middleware": "kit.rollout.vllm_routes.JudgeRoutes"}
    for key, value in {"host": gym_servers.HOST, "port": port, **guards, **args}.items():
        flag = f"--{key.replace('_', '-')}"
        options += (
            []
            if value is False or value is None
            else [flag]
            if value is True
            else [flag, str(value)]
        )
    env = {
        "VLLM_API_KEY": judge.key,
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }  # for the middleware
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    return {
        "name": f"{judge.name}_vllm",
        "kind": "vllm",
        "command": [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            *options,
        ],
        "env": env,
        "shown": ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"],  # its model may be one of the hub's
        "port": port,
        "deadline_s": float(start.get("deadline_s") or 600.0),
    }


@contextlib.contextmanager
def gpus_taken(specs: Mapping[str, Any]) -> Iterator[None]:
    """While it runs, this process and what it starts see no GPU of a judge's. Raises ConfigError for one not there."""
    wanted = {
        str(gpu)
        for s in specs.values()
        if s != "policy"
        for gpu in (s.get("start") or {}).get("gpus") or []
    }
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted:
        import torch

        seen = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
        if missing := wanted - set(seen):
            raise ConfigError(
                f"gym.judges: start.gpus names {', '.join(sorted(missing))}, of {', '.join(seen) or 'none'}"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for gpu in seen if gpu not in wanted)
    try:
        yield
    finally:
        if wanted:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            os.environ.update({"CUDA_VISIBLE_DEVICES": before} if before else {})


def told(made: Mapping[str, Judge]) -> Iterator[str]:
    """A line for each judge, for the dry run."""
    for judge in made.values():
        kind = (
            f"vLLM of {judge.start['model']}"
            if judge.start
            else f"{judge.model} at {judge.url or 'this run'}"
        )
        key = f", key in {judge.key_name}" if judge.key_name and judge.url else ""
        limits = f"{judge.timeout_s:g} s, {judge.attempts} tries, {judge.concurrency} at once"
        yield f"judge       {judge.name}: {kind}{key}; {limits}"
