"""The judge proxy: an HTTP server between Gym's model servers and the judges.

    verifier -> Gym's model server -> judge proxy -> endpoint, vLLM of this run, or the policy

Gym's own client has no timeout. If a judge returns 429 or 503, it retries without end, twice a
second. It turns a prompt that is too long into an empty reply. So the proxy sends each request
itself (`query_judge`), with a timeout, a number of attempts and a limit of concurrent requests. It
also counts tokens, and keeps the judge's key in this process. If a judge fails, the proxy returns
422, which Gym does not retry. The verifier then marks its reward as invalid (`judge_failsafe` of
nemo_gym). The log of the run has the first failure of each reason.

metrics.jsonl counts failures as `judge/<name>/failed/<reason>`. The reasons are: connect, timeout,
http_<status>, bad_answer (not a completion), empty (no text), refused (by a content filter).
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from extras.judges.judge_processes import model_server_spec, vllm_process_spec
from extras.judges.judge_settings import Judge
from kit.errors import QuotingError
from kit.gym import network
from kit.gym.process_specs import PYTHON
from kit.gym.server_process import ProcessSpec

RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504, 520, 529}
ROUTES = ("chat/completions", "responses")
# Fields of a reply's message that verifiers read. Reasoning and token ids are removed.
MESSAGE_FIELDS = ("role", "content", "refusal", "tool_calls")
FIRST_RETRY_DELAY_S = 0.5  # doubled for each further retry
MAX_REQUEST_BYTES = 2**28
MAX_QUOTE = 200  # characters or bytes of a judge's reply in an error
logger = logging.getLogger(__name__)


class JudgeError(QuotingError):
    """A judge did not reply.

    reason: as in the module's docstring. is_retryable: whether another attempt may succeed.
    retry_after_s: how long the judge asks to wait (header Retry-After), or 0.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        is_retryable: bool = False,
        retry_after_s: float = 0.0,
    ):
        super().__init__(message)
        self.reason = reason
        self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s


# --- request a reply -----------------------------------------------------------------------------


async def query_judge(
    judge: Judge,
    http: aiohttp.ClientSession,
    route: str,
    body: Mapping[str, Any],
    counts: Counter[str],
) -> dict[str, Any]:
    """Send a chat completion or Responses request to a judge, with retries, and return its reply.

    An error with a Retry-After header does not count as an attempt, but the wait must end before
    the timeout. Adds the number of retries to `counts`. Raises JudgeError.
    """
    request = {**body, **judge.parameters, "model": judge.model, "stream": False}
    deadline = time.monotonic() + judge.timeout_s
    delay_s = FIRST_RETRY_DELAY_S
    attempts = 0
    while True:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await _send_request(judge, http, route, request)
        except TimeoutError:
            raise JudgeError("timeout", f"no reply within {judge.timeout_s:g} s") from None
        except JudgeError as error:
            if not error.retry_after_s:
                attempts += 1
            if not error.is_retryable or attempts >= judge.attempts:
                raise
            wait_s = max(error.retry_after_s, delay_s)
            if time.monotonic() + wait_s >= deadline:
                message = (
                    f"{error}; a retry after {wait_s:g} s would exceed the timeout of "
                    f"{judge.timeout_s:g} s (timeout_s)"
                )
                raise JudgeError(error.reason, message) from None
        counts["retries"] += 1
        await asyncio.sleep(wait_s)
        if attempts:
            delay_s *= 2


async def _send_request(
    judge: Judge, http: aiohttp.ClientSession, route: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Send one request. Raises JudgeError."""
    url = f"{judge.url}/{route}"
    try:
        # A redirect would send the row to another host, which would then give the verdict.
        async with http.post(
            url, json=request, headers=judge.headers, allow_redirects=False
        ) as response:
            body = await _read_body(response)
    except (aiohttp.ClientError, OSError) as error:
        message = f"{type(error).__name__}: {judge.redact(str(error))[:MAX_QUOTE]}"
        raise JudgeError("connect", message, is_retryable=True) from None
    status = response.status
    if 300 <= status < 400:
        target = judge.redact(response.headers.get("Location", ""))[:MAX_QUOTE]
        raise JudgeError(
            f"http_{status}",
            f"HTTP {status} redirects to {target!r}, and redirects are not followed. "
            "If you trust that address, set it as base_url",
        )
    if status != 200:
        raise JudgeError(
            f"http_{status}",
            f"HTTP {status}: {_quote(judge, body)}",
            is_retryable=status in RETRYABLE_STATUS,
            retry_after_s=_parse_retry_after(response.headers.get("Retry-After", "")),
        )
    return _parse_completion(body, judge)


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of a response. Raises JudgeError if it exceeds network.MAX_BODY_BYTES."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > network.MAX_BODY_BYTES:
            message = f"the reply is longer than {network.MAX_BODY_BYTES:,} bytes"
            raise JudgeError("bad_answer", message)
    return bytes(body)


def _quote(judge: Judge, body: bytes) -> str:
    """Return the start of a response's body, without the judge's key."""
    return judge.redact(body.decode(errors="replace"))[:MAX_QUOTE]  # a cut key would not match


def _parse_retry_after(header: str) -> float:
    """Return the wait of a Retry-After header in seconds, or 0 if it is neither number nor date."""
    try:
        return max(0.0, float(header))
    except ValueError:
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0


def _parse_completion(body: bytes, judge: Judge) -> dict[str, Any]:
    """Return the JSON of a reply, with only those message fields that verifiers read.

    Raises JudgeError if it is not a completion or has no text.
    """
    try:
        completion = json.loads(body)
        texts = extract_texts(completion)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        message = f"HTTP 200 without a completion: {_quote(judge, body)!r}"
        raise JudgeError("bad_answer", message, is_retryable=True) from None
    choices = completion.get("choices") or []
    for choice in choices:
        message = choice["message"]
        choice["message"] = {key: message[key] for key in message if key in MESSAGE_FIELDS}
        choice.pop("logprobs", None)
    if not any(text.strip() for text in texts):
        _raise_for_empty_reply(completion, choices)
    return dict(completion)


def extract_texts(body: Any) -> list[str]:
    """Return the texts of a chat completion, or the text of a Responses object.

    Raises KeyError, TypeError or AttributeError if `body` is neither.
    """
    if "choices" in body:
        contents = [choice["message"].get("content") or "" for choice in body["choices"]]
        return ["" + content for content in contents]  # raises TypeError if it is not a string
    parts: list[dict[str, Any]] = []
    for item in body["output"]:
        if item.get("type") == "message":
            parts.extend(item["content"])
    return ["".join(part.get("text") or "" for part in parts)]


def _raise_for_empty_reply(completion: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """Raise the JudgeError for a completion without text."""
    finish_reasons = {str(choice.get("finish_reason")) for choice in choices}
    is_refused = any(choice["message"].get("refusal") for choice in choices)
    if is_refused or "content_filter" in finish_reasons:
        raise JudgeError("refused", "the judge refused to reply")
    if "length" in finish_reasons or completion.get("status") == "incomplete":
        raise JudgeError(
            "empty",
            "the reply is empty, because the judge used all its tokens before it wrote text. "
            "Raise parameters.max_tokens",
        )
    raise JudgeError("empty", "the reply is empty")


def _count_tokens(completion: Mapping[str, Any]) -> Counter[str]:
    """Return the tokens of the prompt and of the reply, as the judge reports them."""
    usage = completion.get("usage")
    counts: Counter[str] = Counter()
    if not isinstance(usage, dict):
        return counts
    # The second name is that of the Responses API.
    for key, other_key in (
        ("prompt_tokens", "input_tokens"),
        ("completion_tokens", "output_tokens"),
    ):
        tokens = usage.get(key) or usage.get(other_key)
        if isinstance(tokens, int):
            counts[key] = tokens
    return counts


# --- the server ----------------------------------------------------------------------------------


class JudgeProxy:
    """The HTTP server that Gym's model servers use to reach `judges`. It runs in a thread.

    Use it as `with JudgeProxy(judges) as proxy`. Without judges it starts nothing.
    """

    def __init__(self, judges: Mapping[str, Judge]):
        self.judges = judges
        self.key = secrets.token_hex(16)  # Gym's model servers send it
        self.port = network.find_free_port()
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in judges}
        self._counts_lock = threading.Lock()
        self._logged: dict[str, set[str]] = {name: set() for name in judges}  # reasons
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._has_started = threading.Event()
        self._start_error: BaseException | None = None

    def __enter__(self) -> JudgeProxy:
        if self.judges:
            self._thread.start()
            self._has_started.wait()
            if self._start_error:
                raise self._start_error
        return self

    def __exit__(self, *_: Any) -> None:
        if self.judges:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, as judge/<name>/<metric>.

        The metrics: asked (number of requests), prompt_tokens, completion_tokens, retries and
        failed/<reason>.
        """
        metrics = {}
        with self._counts_lock:
            for name, counts in self._counts.items():
                for key, count in counts.items():
                    metrics[f"judge/{name}/{key}"] = float(count)
                counts.clear()
        return metrics

    def process_specs(self, log_dir: Path, python: str | None = None) -> list[ProcessSpec]:
        """Return the processes that serve the judges: Gym's model servers, and vLLM servers.

        python: interpreter with nemo-gym; by default that of `make gym`.
        """
        specs = []
        for judge in self.judges.values():
            if judge.start:
                specs.append(vllm_process_spec(judge))
            url = f"http://{network.HOST}:{self.port}/{judge.name}/v1"
            specs.append(model_server_spec(judge, url, self.key, python or PYTHON))
        for spec in specs:
            spec.log = str(log_dir / f"gym_{spec.name}.log")
        return specs

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        """Serve until `__exit__`."""
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            async with self._listen():
                self._has_started.set()
                await self._stop.wait()
        except BaseException as error:
            self._start_error = error
            self._has_started.set()

    @contextlib.asynccontextmanager
    async def _listen(self) -> AsyncGenerator[None, None]:
        """Open a client session for each judge, and listen on the port, until exit."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/{name}/v1/{route:.*}", self._handle)
        async with contextlib.AsyncExitStack() as stack:
            for name, judge in self.judges.items():
                # no limits here: query_judge has a timeout, and the slots limit requests
                session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                    trust_env=not judge.is_local,
                )
                self._sessions[name] = await stack.enter_async_context(session)
                self._slots[name] = asyncio.Semaphore(judge.concurrency)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, network.HOST, self.port).start()
            yield

    async def _handle(self, request: web.Request) -> web.Response:
        """Respond to one request of a model server."""
        name = request.match_info["name"]
        route = request.match_info["route"]
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong or missing key"}}, status=401)
        if name not in self.judges or route not in ROUTES:
            message = f"no such route: {request.path}"
            return web.json_response({"error": {"message": message}}, status=404)
        async with self._slots[name]:
            return await self._forward(self.judges[name], route, await request.json())

    async def _forward(self, judge: Judge, route: str, body: Any) -> web.Response:
        """Return the judge's reply, or status 422 with a JSON error if the judge fails.

        Gym's model server does not retry a 422.
        """
        counts: Counter[str] = Counter(asked=1)
        try:
            reply = await query_judge(judge, self._sessions[judge.name], route, body, counts)
            counts += _count_tokens(reply)
            return web.json_response(reply)
        except JudgeError as error:
            counts[f"failed/{error.reason}"] += 1
            message = f"judge {judge.name} ({judge.url}): {error.reason}: {error}"
            # Gym may turn an error with the words `context length` into an empty reply.
            message = message.replace("context length", "context")
            if error.reason not in self._logged[judge.name]:
                self._logged[judge.name].add(error.reason)
                logger.warning("%s. No reward is used that depends on it.", message)
            return web.json_response({"error": {"message": message}}, status=422)
        finally:
            with self._counts_lock:
                self._counts[judge.name] += counts
