"""Detect judge failures inside a verifier of NeMo Gym, and remove the reward that they affect.

A verifier may call a judge (one of Gym's model servers) while it handles POST /verify. If the call
fails, most verifiers of Gym 0.7 mark their response as invalid (`judge_failsafe` in nemo_gym), and
those of 0.4 raise, or return 200 with reward 0. If the judge's reply holds no verdict, most
verifiers of both versions return reward 0, and some return 1.

So this module inspects each call of a judge inside the verifier's process: only there it is clear
which /verify request a call belongs to. kit/gym calls `watch_judge_calls` before it runs the
server's app.py. A call fails if its status is not 200, or if its reply is empty or does not match
the pattern in VERDICT_PATTERNS. The response to that request is then replaced by the one that
`judge_failsafe` sends, but without a reward and with the name of the judge. If the verifier repeats
the call and gets a valid reply, the reward stays. The response is also replaced if it states that
the verifier found no verdict (`judge_failure`), unless it marks itself as invalid (`is_marked`).

The Gym environment runs this file by its path, without the kit: import only the standard library
here, and Gym's own packages inside functions.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

# `code` of the JSON error that the judge proxy (judge_proxy.py) sends.
ERROR_CODE = "judge_failed"

# Labels such as [[A=B]] or [[SAFE]]. The YAML of most servers can rename them.
_LABELS = r"\[\[[^\[\]]+\]\]"
# A letter alone on the last line. The servers' own parsers also accept the A of "As an AI".
_GRADE = r"(\A|\n)\s*[ABCD]\s*\Z"
_BOXED = r"\\boxed\{\s*(0|0?\.5|1)(\.0*)?\s*\}(?!(.|\n)*\\boxed\{)"
# For each resources server, the pattern that a judge's text must match. It follows the parser in
# the server's app.py. Flag: IGNORECASE. "": any text, because the server itself marks its response,
# fails, or says that it found no verdict (`judge_failure`). Only calls during REWARD_PATHS must
# match: a tool may ask a model for something else.
VERDICT_PATTERNS = {
    "aalcr": r"\A\s*(?-i:(IN)?CORRECT)\s*\Z",
    "abstention": f"(?-i:{_GRADE})",
    "aegis_v4_safety": "",
    "agentif": "",
    "arena": r"\[\[[AB<>=]+\]\]",
    "arena_judge": r"\[\[[AB<>=]+\]\]",
    "bbq": "",
    "browsecomp_advanced_harness": r"correct:\s*(yes|no)\b",
    "conversational_tool_use_simulation": "",
    "deepsearchqa": r'"Correctness Details"\s*:',
    "equivalence_llm_judge": rf"{_LABELS}|\b(IN)?CORRECT\b",
    "false_statement_judge": r"<points>\s*\d+\s*</points>",
    "finance_agent_v2": "",
    "finance_sec_search": r"\[\[[012]\]\]",
    "frontierscience_judge": r"Judgement:\s*(YES|NO)|score\W+\d",
    "gdp_pdf": "",
    "gdpval": (
        r'"(criteria_scores|(overall_|total_|average_|final_)?score)"\s*:'
        r"|FINAL_SCORE\[\s*[\d.]+\s*\]"
    ),
    "imo_proofbench_judge": (
        r"Judgement\W*:\W*(yes|no)|\\boxed\s*\{\s*(in)?correct\s*\}"
        r"|<points>\s*\d+\s*out of 7"
    ),
    "inverse_if": r'"result"\s*:\s*"(PASS|FAIL)"|(PASS|FAIL)[^\n]*(\n[^\n]*){0,4}\Z',
    "jailbreak_detection": rf"{_LABELS}|Response harm:\s*(un)?harmful",
    "labbench2_vlm": _LABELS,
    "longmemeval": r"\b(yes|no)\b",
    "math_with_autograder": r"(?-i:\\boxed\{(Correct|Incorrect)\})",
    "math_with_judge": r"\[\[A!?=B\]\]",
    "multichallenge": r"\[\[(YES|NO)\]\]|\b(YES|NO)\b[^\n]*\Z",
    "omniscience": f"(?-i:{_GRADE})",
    "over_refusal_detection": rf"{_LABELS}|Response (harm|refusal):",
    "physics_judge": r"\[(in)?correct\]",
    "polymath": r"\[\[A!?=B\]\]",
    "proof_judge": _BOXED,
    "proof_verification": _BOXED,
    "simpleqa": r"(?-i:(\A|\n)\s*[ABC]\s*(:[^\n]*)?\Z)",
    "tavily_search": r"(?-i:correct: (yes|no))",
    "terminus_judge": _LABELS,
    "text_to_sql": _LABELS,
    "toolsandbox": "",  # its model plays a user
    "ugphysics_judge": r"\b(TRUE|FALSE)\b",
    "widesearch": r"```json\s*\{[\s\S]*\}\s*```",
    "xstest": "",
    "verifif": (
        r'\[\[(YES|NO)\]\]|"verdict"\s*:\s*"(YES|NO)"|\b(YES|NO)\s*\Z'
        r'|"(status|definition)"\s*:'
    ),
}
# Fields of a verifier's response, and whether their value means "no verdict".
NO_VERDICT_FIELDS: dict[str, Callable[[Any], bool]] = {
    "invalid_judge_response": bool,
    "invalid_gen_base": bool,
    "no_judge_score": bool,
    "judge_error": bool,  # finance_agent_v2, longmemeval: the cause
    "n_error": bool,  # agentif: how many of its checks have no verdict
}
# Fields of a verifier's response: one evaluation or a list of them, each with `verdict_label`.
EVALUATION_FIELDS = ("judge_evaluation", "quality_judge_evaluation", "judge_evaluations")
NO_VERDICT_LABELS = (None, "judge_error", "judge_parsing_error")
# The start of a message in `validation_results` (verifif) that reports a failed judge.
JUDGE_ERROR_MESSAGE = (
    r"Error parsing LLM Judge|Validation error|No \[\[YES\]\]/\[\[NO\]\]"
    r"|LLM (validator|judge) error|Judge returned"
)
# Routes whose response holds a reward. Other routes are tools: they answer 429, which ends the
# episode.
REWARD_PATHS = ("/verify", "/step")
MODEL_SERVERS = "responses_api_models"
MAX_FAILURE_CHARS = 2000  # of all failures of one request
MAX_ERROR_CHARS = 600  # of the error of one call

App = Callable[..., Awaitable[None]]

# Failed judge calls of the current HTTP request: {key of the call: description of the failure}.
_failed_calls: ContextVar[dict[str, str] | None] = ContextVar("failed_calls", default=None)
# Whether the response to the current HTTP request holds a reward.
_decides_reward: ContextVar[bool] = ContextVar("decides_reward", default=True)


# --- replies and responses -----------------------------------------------------------------------


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


def find_reply_problem(status: int, reply: bytes, pattern: str = "") -> str:
    """Return the reason why a judge's reply is a failure, or "" if it is valid.

    pattern: regular expression that the text must match, as in VERDICT_PATTERNS; "" accepts any.
    """
    body = reply.decode(errors="replace")
    if status != 200:
        message = read_proxy_error(reply)
        return message[:MAX_ERROR_CHARS] if message else f"HTTP {status}: {body[:300]}"
    try:
        texts = extract_texts(json.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"its reply is not a completion: {body[:200]!r}"
    texts = [_remove_thinking(text) for text in texts]
    if not any(texts):
        return "its reply is empty"
    if pattern and not any(re.search(pattern, text, re.IGNORECASE) for text in texts):
        return f"no verdict in its reply: {texts[0][-200:]!r}"
    return ""


def _remove_thinking(text: str) -> str:
    return re.sub(r"<think(ing)?>.*?</think(ing)?>", "", text, flags=re.DOTALL).strip()


def read_proxy_error(reply: bytes) -> str:
    """Return the message of the judge proxy's error inside a reply of Gym's model server, or "".

    The proxy sends {"error": {"code": ERROR_CODE, "message": ...}}. Gym's model server passes it on
    as a JSON string that ends with the Python literal of these bytes (nemo_gym/server_utils.py,
    exception_handling_middleware).
    """
    try:
        body = json.loads(reply)
        if isinstance(body, str):
            literal = body.partition(" calling an inner server: ")[2]
            body = json.loads(ast.literal_eval(literal))
        error = body["error"]
        return str(error["message"]) if error["code"] == ERROR_CODE else ""
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        return ""


def is_marked(response: Any) -> bool:
    """Return whether a verifier's response marks its reward as invalid, as Gym 0.7 does."""
    if not isinstance(response, dict):
        return False
    config = response.get("instance_config")
    marks = [response, config if isinstance(config, dict) else {}]
    return bool(response.get("_ng_failure_class")) or any(m.get("mask_sample") for m in marks)


def judge_failure(response: Any) -> str:
    """Return how a verifier's response (parsed JSON) reports that it found no verdict, or "" ."""
    if not isinstance(response, dict):
        return ""
    failures = []
    for key, is_missing in NO_VERDICT_FIELDS.items():
        if is_missing(response.get(key)):
            failures.append(f"{key}: {response[key]}")
    # aegis_v4_safety: it asked the judge, but found no labels in the reply
    if response.get("resolved") is False and response.get("judge_evaluation"):
        failures.append(f"resolved: False, {response.get('failure_reason')}")
    for key, label in _find_labels(response):
        if label in NO_VERDICT_LABELS:
            failures.append(f"{key}: {label}")
    # frontierscience_judge
    if response.get("judge_output") is not None and response.get("verdict", "") is None:
        failures.append("verdict: None")
    for result in response.get("validation_results") or []:  # verifif
        message = str(result.get("message")) if isinstance(result, dict) else ""
        if re.match(JUDGE_ERROR_MESSAGE, message):
            failures.append(message[:200])
    return "; ".join(failures)


def _find_labels(response: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (field, verdict label) of each evaluation in a verifier's response."""
    for field in EVALUATION_FIELDS:
        value = response.get(field)
        for evaluation in value if isinstance(value, list) else [value]:
            if isinstance(evaluation, dict):
                yield field, evaluation.get("verdict_label", "")
    # jailbreak_detection, by policy
    yield from (response.get("verifier_labels") or {}).items()


# --- calls of judges, and the response to the request that made them -----------------------------


def record_call(request: Any, failure: str) -> None:
    """Record the outcome of a judge call: the reason why it failed, or "" if it succeeded.

    A later call with the same input replaces the outcome of an earlier one.
    """
    failed_calls = _failed_calls.get()
    if failed_calls is None:  # not inside an HTTP request
        return
    if hasattr(request, "model_dump"):
        request = request.model_dump(exclude_unset=True)
    content = request
    if isinstance(request, dict):
        content = [request.get("input"), request.get("messages")]
    key = repr(content)
    failed_calls.pop(key, None)
    if failure:
        failed_calls[key] = failure


class JudgeFailureMiddleware:
    """ASGI middleware: replace the response to a POST request if a judge failed during it.

    models: names of the judges, for the error text.
    """

    def __init__(self, app: App, models: str):
        self.app = app
        self.models = models

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        failed_calls: dict[str, str] = {}
        _failed_calls.set(failed_calls)
        _decides_reward.set(scope["path"] in REWARD_PATHS)
        messages: list[dict[str, Any]] = []

        async def collect(message: dict[str, Any]) -> None:
            messages.append(message)

        await self.app(scope, receive, collect)
        failures = list(failed_calls.values())
        if scope["path"] in REWARD_PATHS and not failures:
            failures = self._find_reported_failures(messages)
        if failures:
            messages = masked_response(messages, failures, scope["path"])
        for message in messages:
            await send(message)

    def _find_reported_failures(self, messages: list[dict[str, Any]]) -> list[str]:
        with contextlib.suppress(ValueError):
            body = json.loads(b"".join(message.get("body", b"") for message in messages))
            reason = "" if is_marked(body) else judge_failure(body)
            if reason:
                return [f"model {self.models}: the verifier reports no verdict ({reason})"]
        return []


def masked_response(
    messages: list[dict[str, Any]], failures: list[str], path: str
) -> list[dict[str, Any]]:
    """Return ASGI messages that replace `messages`: a failure without reward.

    They keep the headers of `messages`, because these set the session cookie.
    """
    failure = "; ".join(failures)[:MAX_FAILURE_CHARS]
    content = {
        "reward": None,
        "mask_sample": True,
        "failure_kind": "judge_failed",
        "failure_reason": failure,
        "_ng_failure_class": "judge_failed",
        "_ng_failure_judge_error": failure,
    }
    body = json.dumps(content).encode()
    replaced = (b"content-length", b"content-type")
    headers = [(key, value) for key, value in messages[0]["headers"] if key.lower() not in replaced]
    headers.append((b"content-type", b"application/json"))
    headers.append((b"content-length", str(len(body)).encode()))
    status = 200 if path in REWARD_PATHS else 429
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body},
    ]


# --- the clients that call judges ----------------------------------------------------------------


def watch_judge_calls(models: Collection[str], addresses: Collection[str], pattern: str) -> None:
    """Inspect each judge call of this process from now on, and replace responses if one fails.

    Patches the three clients that verifiers use: Gym's ServerClient, Gym's OpenAI client, and the
    client of the openai package (httpx). Also patches uvicorn, to add JudgeFailureMiddleware.

    models: names of the judges in the server's settings. addresses: host:port of the model servers.
    pattern: as for `find_reply_problem`.
    """
    from nemo_gym import openai_utils, server_utils

    _patch_server_client(server_utils.ServerClient, pattern)
    _patch_openai_client(openai_utils, pattern)
    _patch_httpx(addresses, pattern)
    _patch_uvicorn(server_utils.uvicorn, models)


async def _inspect_call(
    name: str, request: Any, call: Awaitable[Any], read_method: str, pattern: str
) -> Any:
    """Await a call of the model `name`, record its outcome, and return its response.

    read_method: name of the response's method that reads the body. The response caches the body, so
    the verifier can read it again.
    """
    try:
        response = await call
        reply = await getattr(response, read_method)()
    except BaseException as error:  # CancelledError too: a verifier's own timeout cancels the call
        record_call(request, f"model {name}: {type(error).__name__}: {error}")
        raise
    status = getattr(response, "status", None) or response.status_code
    problem = find_reply_problem(status, reply, pattern if _decides_reward.get() else "")
    record_call(request, f"model {name}: {problem}" if problem else "")
    return response


def _patch_server_client(client: Any, pattern: str) -> None:
    """Inspect the calls that Gym's ServerClient sends to model servers."""
    original = client.request

    async def request(self: Any, server_name: str, url_path: str, method: str, **rest: Any) -> Any:
        known_servers = self.global_config_dict
        if server_name in known_servers and MODEL_SERVERS not in known_servers[server_name]:
            # another resources server, not a model
            return await original(self, server_name, url_path, method, **rest)
        body = rest.get("json")
        if isinstance(body, dict):
            # vllm_model 0.4.0 fails on the null values that proof_judge sends
            rest["json"] = {key: value for key, value in body.items() if value is not None}
        call = original(self, server_name, url_path, method, **rest)
        return await _inspect_call(server_name, body, call, "read", pattern)

    client.request = request


def _patch_openai_client(openai_utils: Any, pattern: str) -> None:
    """Inspect the calls of Gym's OpenAI client."""
    original = openai_utils.request

    async def request(method: str, url: str, _internal: bool = False, **rest: Any) -> Any:
        body = dict(rest.get("json") or {})
        call = original(method, url, _internal, **rest)
        return await _inspect_call(url, body, call, "read", pattern)

    openai_utils.request = request


def _patch_httpx(addresses: Collection[str], pattern: str) -> None:
    """Inspect the calls that httpx, and so the openai package, sends to `addresses`."""
    import httpx

    original = httpx.AsyncClient.send

    async def send(self: Any, request: Any, **rest: Any) -> Any:
        call = original(self, request, **rest)
        if f"{request.url.host}:{request.url.port}" not in addresses:
            return await call
        body = json.loads(request.content or b"{}")
        return await _inspect_call(str(request.url), body, call, "aread", pattern)

    httpx.AsyncClient.send = send  # type: ignore[method-assign]


def _patch_uvicorn(uvicorn: ModuleType, models: Collection[str]) -> None:
    """Add JudgeFailureMiddleware to the app that uvicorn runs."""
    original = uvicorn.run
    names = ", ".join(sorted(models))

    def run(app: Any, **settings: Any) -> None:
        if isinstance(app, str):
            sys.exit(
                "`num_workers` is over 1, but judge calls can be checked in one process only. "
                "Set num_workers to 1 in `start.config`."
            )
        original(JudgeFailureMiddleware(app, names), **settings)

    uvicorn.run = run  # type: ignore[attr-defined]
