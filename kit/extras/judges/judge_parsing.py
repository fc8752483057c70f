"""What a model that judges has said, and what becomes of a verdict for which it failed: none, and the reason.

Gym's verifiers ask their judge (a model server of Gym's) in the middle of /verify. Where it fails, half of them raise
and half answer 200 with reward 0 (nemo-gym 0.4.0); where its text holds no verdict, nearly all answer reward 0, and
some 1. So the kit looks at each call of a judge, inside the verifier's own process, where it is known for which
/verify it was made: `watch` is called by kit/gym/servers.py before the server's app.py runs. A judge that answered no
200, nothing, or no text in which VERDICTS finds one, makes of the verdict what Gym's own judge_failsafe (0.5.0) does:
200, `_ng_failure_class: judge_failed`, and no reward. A verifier that asks the same again and is answered has one.
Where the verifier itself says beside the reward that it found no verdict (`disowned`), it is none, too.

Of the standard library alone: the Gym environment runs this file.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import Any

_LABELS = (
    r"\[\[[^\[\]]+\]\]"  # [[A=B]], [[SAFE]]; of most, labels that their YAML can name otherwise
)
_GRADE = r"(\A|\n)\s*[ABCD]\s*\Z"  # their parsers find an A in "As an AI ..." too
_BOXED = r"\\boxed\{\s*(0|0?\.5|1)(\.0*)?\s*\}(?!(.|\n)*\\boxed\{)"
# What a judge's text must hold, by the server that asks, as its app.py reads it; flags: IGNORECASE.
VERDICTS = {
    "aalcr": r"\A\s*(?-i:(IN)?CORRECT)\s*\Z",
    "abstention": f"(?-i:{_GRADE})",
    "arena_judge": r"\[\[[AB<>=]+\]\]",
    "browsecomp_advanced_harness": r"correct:\s*(yes|no)\b",
    "equivalence_llm_judge": rf"{_LABELS}|\b(IN)?CORRECT\b",
    "finance_sec_search": r"\[\[[012]\]\]",
    "frontierscience_judge": r"Judgement:\s*(YES|NO)|score\W+\d",
    "gdpval": r'"(criteria_scores|(overall_|total_|average_|final_)?score)"\s*:|FINAL_SCORE\[\s*[\d.]+\s*\]',
    "imo_proofbench_judge": r"Judgement\W*:\W*(yes|no)|\\boxed\s*\{\s*(in)?correct\s*\}|<points>\s*\d+\s*out of 7",
    "inverse_if": r'"result"\s*:\s*"(PASS|FAIL)"|(PASS|FAIL)[^\n]*(\n[^\n]*){0,4}\Z',
    "jailbreak_detection": rf"{_LABELS}|Response harm:\s*(un)?harmful",
    "labbench2_vlm": _LABELS,
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
    "ugphysics_judge": r"\b(TRUE|FALSE)\b",
    "xstest": "",  # by what it says alone
    "verifif": r'\[\[(YES|NO)\]\]|"verdict"\s*:\s*"(YES|NO)"|\b(YES|NO)\s*\Z|"(status|definition)"\s*:',
}
# What a verifier says beside the reward where it found no verdict.
TELLS = {"invalid_judge_response": True, "invalid_gen_base": True, "no_judge_score": 1.0}
EVALUATIONS = (
    "judge_evaluation",
    "quality_judge_evaluation",
    "judge_evaluations",
)  # each with a verdict_label
UNREADABLE = r"Error parsing LLM Judge|Validation error|No \[\[YES\]\]/\[\[NO\]\]|LLM (validator|judge) error|Judge returned"
SETTLED = (
    "/verify",
    "/step",
)  # routes whose answer is a reward; a tool is answered 429, which ends its episode
ASKED = "responses_api_models"
App = Callable[..., Awaitable[None]]
_failures: ContextVar[dict[str, str] | None] = ContextVar(
    "failures", default=None
)  # of this request: asked -> why


def asked_models(config: dict[str, Any]) -> dict[str, str]:
    """{key: name} of the models that a resources server asks, by its settings; none where these switch it off."""
    if any(
        config.get(key) is False for key in ("should_use_judge", "use_judge", "enable_llm_judge")
    ):
        return {}
    named = {
        key: value["name"]
        for key, value in config.items()
        if isinstance(value, dict) and _is_model(value)
    }
    if config.get("judge_server_name"):  # verifif
        named["judge_server_name"] = config["judge_server_name"]
    return named


def _is_model(value: dict[str, Any]) -> bool:
    return value.get("type") == ASKED and isinstance(value.get("name"), str)


def texts(body: Any) -> list[str]:
    """The texts of a chat completion or of a Responses object. Raises KeyError, TypeError, ... for what is neither."""
    if "choices" in body:
        return ["" + (choice["message"].get("content") or "") for choice in body["choices"]]
    parts = [
        part for item in body["output"] if item.get("type") == "message" for part in item["content"]
    ]
    return ["".join(part.get("text") or "" for part in parts)]


def fault(status: int, said: bytes, verdict: str = "") -> str:
    """Why a judge's answer is none, or "". verdict: what its text must hold, as in VERDICTS; "": anything."""
    text = said.decode(errors="replace")
    if status != 200:
        told = re.search(
            r"judge \S+ \(.*?(?=\\*[\"']\}|\Z)", text, re.DOTALL
        )  # of kit/extras/judges/judge_proxy.py, in Gym's words
        return told[0][:600] if told else f"HTTP {status}: {text[:300]}"
    try:
        answers = texts(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"its answer is no completion: {text[:200]!r}"
    spoken = [
        re.sub(r"<think(ing)?>.*?</think(ing)?>", "", answer, flags=re.DOTALL).strip()
        for answer in answers
    ]
    if not any(spoken):
        return "its answer is empty"
    if verdict and not any(re.search(verdict, answer, re.IGNORECASE) for answer in spoken):
        return f"no verdict in its answer: {spoken[0][-200:]!r}"
    return ""


def disowned(said: Any) -> str:
    """Where in its answer (JSON) a verifier says that its judge gave no verdict, or ""."""
    if not isinstance(said, dict):
        return ""
    told = [f"{key}: {said[key]}" for key, value in TELLS.items() if said.get(key) == value]
    entries = [
        (key, said[key] if isinstance(said[key], list) else [said[key]])
        for key in EVALUATIONS
        if key in said
    ]
    labels = [
        (key, each.get("verdict_label", ""))
        for key, list_ in entries
        for each in list_
        if isinstance(each, dict)
    ]
    labels += list((said.get("verifier_labels") or {}).items())  # jailbreak_detection, by policy
    told += [
        f"{key}: {label}"
        for key, label in labels
        if label in (None, "judge_error", "judge_parsing_error")
    ]
    if (
        said.get("judge_output") is not None and said.get("verdict", "") is None
    ):  # frontierscience_judge
        told.append("verdict: None")
    messages = [
        each.get("message")
        for each in said.get("validation_results") or []
        if isinstance(each, dict)
    ]
    told += [text[:200] for text in map(str, messages) if re.match(UNREADABLE, text)]  # verifif
    return "; ".join(told)


def note(sent: Any, why: str) -> None:
    """A model was asked `sent`: why it failed, or "" where it did not. The same question is one question."""
    failures = _failures.get()
    if failures is None:  # outside of a request
        return
    if hasattr(sent, "model_dump"):
        sent = sent.model_dump(exclude_unset=True)
    key = repr(
        [sent.get(name) for name in ("input", "messages")] if isinstance(sent, dict) else sent
    )
    failures.pop(key, None)
    if why:
        failures[key] = why


def watched(app: App, models: str) -> App:
    """The server's ASGI app, whose answers are withheld where one of the models failed that it asked for them."""

    async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await app(scope, receive, send)
        failures: dict[str, str] = {}
        _failures.set(failures)
        held: list[dict[str, Any]] = []

        async def hold(message: dict[str, Any]) -> None:
            held.append(message)

        await app(scope, receive, hold)
        if scope["path"] in SETTLED and not failures:
            with contextlib.suppress(ValueError):
                body = json.loads(b"".join(message.get("body", b"") for message in held))
                if why := disowned(body):
                    failures[why] = f"model {models}: no verdict by the verifier's own word ({why})"
        for message in withheld(held, failures, scope["path"]) if failures else held:
            await send(message)

    return asgi


def withheld(
    held: list[dict[str, Any]], failures: dict[str, str], path: str
) -> list[dict[str, Any]]:
    """Instead of an answer: that there is none, with its cookies."""
    told = {
        "_ng_failure_class": "judge_failed",
        "_ng_failure_judge_error": "; ".join(failures.values())[:2000],
    }
    body = json.dumps({"reward": None, **told}).encode()
    kept = [
        (k, v)
        for k, v in held[0]["headers"]
        if k.lower() not in (b"content-length", b"content-type")
    ]
    kept += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    status = 200 if path in SETTLED else 429
    return [
        {"type": "http.response.start", "status": status, "headers": kept},
        {"type": "http.response.body", "body": body},
    ]


def watch(models: Collection[str], places: Collection[str], verdict: str) -> None:
    """Look at what this process asks of models from now on. models: those that its settings name.

    By whichever way: Gym's ServerClient, its OpenAI client, or openai's own (httpx), to one of `places` (host:port).
    verdict: as for `fault`.
    """
    import httpx
    from nemo_gym import openai_utils, server_utils

    client, direct, send = (
        server_utils.ServerClient.request,
        openai_utils.request,
        httpx.AsyncClient.send,
    )

    async def looked_at(name: str, sent: Any, call: Awaitable[Any], read: str) -> Any:
        try:
            answer = await call
            said = await getattr(
                answer, read
            )()  # kept by the answer, so that the server reads it, too
        except BaseException as error:  # the server's own patience with a judge, too, which cancels
            note(sent, f"model {name}: {type(error).__name__}: {error}")
            raise
        status = getattr(answer, "status", None) or answer.status_code
        why = fault(status, said, verdict)
        note(sent, f"model {name}: {why}" if why else "")
        return answer

    async def by_name(self: Any, server_name: str, url_path: str, method: str, **rest: Any) -> Any:
        if (
            server_name in self.global_config_dict
            and ASKED not in self.global_config_dict[server_name]
        ):
            return await client(
                self, server_name, url_path, method, **rest
            )  # another resources server
        if isinstance(
            sent := rest.get("json"), dict
        ):  # without nulls (proof_judge), over which vllm_model 0.4.0 falls
            rest["json"] = {key: value for key, value in sent.items() if value is not None}
        return await looked_at(
            server_name, sent, client(self, server_name, url_path, method, **rest), "read"
        )

    async def by_url(method: str, url: str, _internal: bool = False, **rest: Any) -> Any:
        call = direct(method, url, _internal, **rest)
        return await looked_at(url, dict(rest.get("json") or {}), call, "read")

    async def by_httpx(self: Any, request: Any, **rest: Any) -> Any:
        call = send(self, request, **rest)
        if f"{request.url.host}:{request.url.port}" not in places:
            return await call
        return await looked_at(
            str(request.url), json.loads(request.content or b"{}"), call, "aread"
        )

    server_utils.ServerClient.request = by_name
    openai_utils.request = by_url
    httpx.AsyncClient.send = by_httpx  # type: ignore[method-assign]
    run = server_utils.uvicorn.run

    def run_watched(app: Any, **settings: Any) -> None:
        if isinstance(app, str):
            sys.exit(
                "num_workers over 1: each would ask its judge unseen; leave it at 1 in start.config"
            )
        run(watched(app, ", ".join(sorted(models))), **settings)

    server_utils.uvicorn.run = run_watched
