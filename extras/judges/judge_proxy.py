"""The judge proxy: an HTTP server between Gym's model servers and the judges.

    verifier -> Gym's model server -> judge proxy -> endpoint, vLLM of this run, or the policy

Gym's own client has no timeout. If a judge returns 429 or 503, it retries without end, twice a
second. It turns a prompt that is too long into an empty reply. So the proxy sends each request
itself (`query_judge`), with a timeout, a number of attempts and a limit of concurrent requests. It
also counts tokens, and keeps the judge's key in this process. If a judge fails, the proxy returns
422, which Gym does not retry. The verifier then marks its reward as invalid (`judge_failsafe` of
nemo_gym). The log of the run has the first failure of each reason.

metrics.jsonl counts failures as `judge/<name>/failed/<reason>`. The reasons are: connect, timeout,
http_<status>, bad_answer (not a completion), empty (no text, as in a refusal).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from env import Json
from extras.judges.judge_processes import model_server_spec, vllm_process_spec
from extras.judges.judge_settings import Judge
from kit.errors import QuotingError
from kit.verify import network
from kit.verify.process_specs import PYTHON
from kit.verify.server_process import ProcessSpec

RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504, 520, 529}
ROUTES = ("chat/completions", "responses")
# Fields of a reply's message that verifiers read. Reasoning and token ids are removed.
MESSAGE_FIELDS = ("role", "content", "refusal", "tool_calls")
FIRST_RETRY_DELAY_S = 0.5  # doubled for each further retry
MAX_REQUEST_BYTES = 2**28
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")  # reached without the environment's proxy
MAX_QUOTE = 200  # characters of a judge's reply in an error
logger = logging.getLogger(__name__)


class JudgeError(QuotingError):
    """A judge did not reply.

    reason: as in the module's docstring. is_retryable: whether another attempt may succeed.
    retry_after_s: how long the judge asks to wait (header Retry-After), or 0.
    """

    def __init__(
        self, reason: str, message: str, is_retryable: bool = False, retry_after_s: float = 0.0
    ):
        super().__init__(message)
        self.reason = reason
        self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s


# --- request a reply -----------------------------------------------------------------------------


async def query_judge(
    judge: Judge, http: aiohttp.ClientSession, route: str, body: Json, counts: Counter[str]
) -> Json:
    """Send a chat completion or Responses request to a judge, with retries, and return its reply.

    An error with a Retry-After header does not count as an attempt. Adds the number of retries to
    `counts`. Raises JudgeError: the last one, if the time ends.
    """
    request = {**body, **judge.settings.parameters, "model": judge.model, "stream": False}
    deadline = time.monotonic() + judge.timeout_s
    error = JudgeError("timeout", f"no reply within {judge.timeout_s:g} s")
    delay_s = FIRST_RETRY_DELAY_S
    attempts = 0
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await send_request(judge, http, route, request)
        except TimeoutError:
            raise error from None
        except JudgeError as failure:
            error = failure
        attempts += not error.retry_after_s
        pause_s = error.retry_after_s or delay_s
        is_late = time.monotonic() + pause_s > deadline
        if not error.is_retryable or attempts >= judge.settings.attempts or is_late:
            raise error
        counts["retries"] += 1
        await asyncio.sleep(pause_s)
        delay_s *= 2


async def send_request(
    judge: Judge, http: aiohttp.ClientSession, route: str, request: Json
) -> Json:
    """Send one request. Raises JudgeError."""
    headers = {"Authorization": f"Bearer {judge.key}"} if judge.key else {}
    try:
        # A redirect would send the row to another host, which would then give the verdict.
        async with http.post(
            f"{judge.url}/{route}", json=request, headers=headers, allow_redirects=False
        ) as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        message = f"{type(error).__name__}: {judge.redact(str(error))[:MAX_QUOTE]}"
        raise JudgeError("connect", message, is_retryable=True) from None
    status = response.status
    # A key that is cut would not be found.
    quote = judge.redact(body.decode(errors="replace"))[:MAX_QUOTE]
    if status != 200:
        wait = response.headers.get("Retry-After", "")
        raise JudgeError(
            f"http_{status}",
            f"HTTP {status}: {quote}",
            is_retryable=status in RETRYABLE_STATUS,
            retry_after_s=float(wait) if wait.isdecimal() else 0.0,
        )
    try:
        return parse_completion(json.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        message = f"HTTP 200 without a completion: {quote!r}"
        raise JudgeError("bad_answer", message, is_retryable=True) from None


def parse_completion(completion: Json) -> Json:
    """Return a reply with only those message fields that verifiers read.

    Raises JudgeError if it has no text. Raises KeyError, TypeError or AttributeError if it is
    neither a chat completion nor a Responses object.
    """
    texts = []
    if "choices" in completion:
        for choice in completion["choices"]:
            message = choice["message"]
            texts.append(message.get("content"))
            choice["message"] = {key: message[key] for key in message if key in MESSAGE_FIELDS}
            choice.pop("logprobs", None)
    else:
        for item in completion["output"]:
            if item.get("type") == "message":
                texts += [part.get("text") for part in item["content"]]
    if not "".join(text or "" for text in texts).strip():
        raise JudgeError(
            "empty",
            "the reply has no text: the judge refused, or used all its tokens before it wrote "
            "text. If so, raise parameters.max_tokens",
        )
    return completion


def count_tokens(completion: Json) -> Counter[str]:
    """Return the tokens of the prompt and of the reply, as the judge reports them."""
    usage = completion.get("usage") or {}
    # The second name is that of the Responses API.
    return Counter(
        prompt_tokens=usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or usage.get("output_tokens") or 0,
    )


# --- the server ----------------------------------------------------------------------------------


class JudgeProxy:
    """The HTTP server that Gym's model servers use to reach `judges`. It runs in a thread.

    Use it as `with JudgeProxy(judges) as proxy`.
    """

    def __init__(self, judges: Mapping[str, Judge]):
        self.judges = judges
        self.key = secrets.token_hex(16)  # Gym's model servers send it
        self.port = network.find_free_port()
        self._counts: Counter[str] = Counter()  # by metric
        self._counts_lock = threading.Lock()
        self._logged: set[tuple[str, str]] = set()  # (judge, reason)
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._started: Future[asyncio.AbstractEventLoop] = Future()

    def __enter__(self) -> JudgeProxy:
        self._thread.start()
        self._started.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.result().call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, as judge/<name>/<metric>."""
        with self._counts_lock:
            metrics = {name: float(count) for name, count in self._counts.items()}
            self._counts.clear()
        return metrics

    def process_specs(self, log_dir: Path, python: str | None = None) -> list[ProcessSpec]:
        """Return the processes that serve the judges: Gym's model servers, and vLLM servers.

        python: interpreter with nemo-gym; by default that of `make gym`.
        """
        specs = []
        for judge in self.judges.values():
            if judge.settings.start:
                specs.append(vllm_process_spec(judge))
            url = f"http://{network.HOST}:{self.port}/{judge.name}/v1"
            specs.append(model_server_spec(judge, url, self.key, python or PYTHON))
        for spec in specs:
            spec.log = str(log_dir / f"gym_{spec.name}.log")
        return specs

    async def _serve(self) -> None:
        """Serve until `__exit__`."""
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/{name}/v1/{route:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        async with contextlib.AsyncExitStack() as stack:
            for name, judge in self.judges.items():
                # no limits here: query_judge has a timeout, and the slots limit requests
                session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                    trust_env=urlsplit(judge.url).hostname not in LOCAL_HOSTS,
                )
                self._sessions[name] = await stack.enter_async_context(session)
                self._slots[name] = asyncio.Semaphore(judge.settings.concurrency)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            try:
                await web.TCPSite(runner, network.HOST, self.port).start()
            except OSError as error:  # the port is taken
                self._started.set_exception(error)
                return
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

    async def _handle(self, request: web.Request) -> web.Response:
        """Respond to one request of a model server."""
        name = request.match_info["name"]
        route = request.match_info["route"]
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized
        if name not in self.judges or route not in ROUTES:
            raise web.HTTPNotFound
        async with self._slots[name]:
            return await self._forward(self.judges[name], route, await request.json())

    async def _forward(self, judge: Judge, route: str, body: Json) -> web.Response:
        """Return the judge's reply, or status 422 with a JSON error if the judge fails.

        Gym's model server does not retry a 422.
        """
        counts: Counter[str] = Counter(asked=1)
        try:
            reply = await query_judge(judge, self._sessions[judge.name], route, body, counts)
            counts += count_tokens(reply)
            return web.json_response(reply)
        except JudgeError as error:
            counts[f"failed/{error.reason}"] += 1
            message = f"judge {judge.name} ({judge.url}): {error.reason}: {error}"
            # Gym may turn an error with the words `context length` into an empty reply.
            message = message.replace("context length", "context")
            if (judge.name, error.reason) not in self._logged:
                self._logged.add((judge.name, error.reason))
                logger.warning("%s. No reward is used that depends on it.", message)
            return web.json_response({"error": {"message": message}}, status=422)
        finally:
            with self._counts_lock:
                for key, count in counts.items():
                    self._counts[f"judge/{judge.name}/{key}"] += count
