"""Judges: a model that verifiers ask and that fails, in whatever way, makes no reward; what it costs is counted."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import re
import subprocess
import threading
import time
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from conftest import ACTIONS, GYM_PYTHON, ROOT, make_model

from gym_client import Gym, GymError, message_response
from kit.config.load import load_config, public
from kit.errors import ConfigError
from kit.extras import gym_environments
from kit.extras.judges import judge_parsing, judge_proxy
from kit.gym import servers as gym_servers
from kit.gym.servers import GymStartError
from kit.runs import preparation

SITE = next(ROOT.glob(".venv-gym/lib/python3*/site-packages"))
NONSENSE = "Lorem ipsum dolor sit amet."
SAID = {  # a verdict of each server's judge, as its app.py reads it
    "aalcr": "INCORRECT",
    "abstention": "The grade is\nC",
    "arena_judge": "Mine: [[B>>A]]",
    "browsecomp_advanced_harness": "reasoning: ...\ncorrect: no",
    "equivalence_llm_judge": "[[A!=B]]",
    "finance_sec_search": "[[1]]",
    "frontierscience_judge": "Judgement: NO",
    "gdpval": '{"criteria_scores": [{"score": 1}], "overall_score": 0.5}',
    "imo_proofbench_judge": "**Judgement**: No",
    "inverse_if": '```json\n{"result": "FAIL", "explanation": "no"}\n```',
    "jailbreak_detection": "[[UNSAFE]]",
    "labbench2_vlm": "[[A=B]]",
    "math_with_autograder": "\\boxed{Incorrect}",
    "math_with_judge": "They differ: [[A!=B]]",
    "multichallenge": "On the whole, no: [[NO]]",
    "omniscience": "D",
    "over_refusal_detection": "[[REFUSED]]",
    "physics_judge": "[Incorrect]",
    "polymath": "[[A=B]]",
    "proof_judge": "Score: \\boxed{0.5}",
    "proof_verification": "\\boxed{0}",
    "simpleqa": "A: CORRECT",
    "tavily_search": "correct: yes",
    "terminus_judge": "Final verdict: [[A=B]]",
    "text_to_sql": "[[A!=B]]",
    "ugphysics_judge": "## Equivalence Judgement\nFALSE",
    "verifif": '{"verdict": "NO", "reasoning": "It does not."}',
}


def completion(text, **message):
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text, **message},
    }
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "stub"}
    return {**head, "choices": [choice], "usage": usage}


class Judge:
    """An OpenAI-compatible address that answers from a script [(status, body or bytes or None, headers)], the last one
    for ever; None: never; a function makes the body of the request. `log` has (route, headers, body) of each."""

    def __init__(self, *script):
        self.script, self.log = list(script), []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, body, headers=()):
                if body is None:
                    return time.sleep(5.0)
                body = body(judge.log[-1][2]) if callable(body) else body
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in [("content-length", str(len(data))), *headers]:
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def do_GET(self):
                known = self.headers.get("authorization") in (None, "Bearer right-key")
                self.answer(200, {"data": [{"id": "stub"}]}) if known else self.answer(
                    401, {"error": "who?"}
                )

            def do_POST(self):
                sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
                judge.log.append((self.path, self.headers.get("authorization"), sent))
                self.answer(*(judge.script.pop(0) if len(judge.script) > 1 else judge.script[0]))

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}/v1"


def through(judge, path="chat/completions", bearer=None, **settings):
    """(status, answer, metrics, seconds) of one request through the proxy."""
    with judge_proxy.Proxy(
        {
            "judge_model": judge_proxy.Judge(
                "judge_model", judge, "stub", **{"timeout_s": 2.0, **settings}
            )
        }
    ) as proxy:
        url, began = f"http://127.0.0.1:{proxy.port}/judge_model/v1/{path}", time.monotonic()
        headers = {"Authorization": f"Bearer {bearer or proxy.key}"}
        answer = httpx.post(
            url, json={"messages": [], "temperature": 1}, headers=headers, timeout=30.0
        )
        return answer.status_code, answer.json(), proxy.metrics(), time.monotonic() - began


GOOD = (200, completion("[[A=B]]"))


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ([GOOD], 1),
        ([(500, {}), GOOD], 2),
        ([(503, {}), (502, {}), GOOD], 3),
        ([(429, {}, [("Retry-After", "1")])] * 4 + [GOOD], 5),  # waited for, beyond `attempts`
        ([(200, b"<html>"), GOOD], 2),
    ],
    ids=["at once", "500", "503 502", "429 with Retry-After", "html"],
)
def test_a_judge_that_comes_round_is_asked_again_within_its_deadline(script, asked):
    judge = Judge(*script)
    status, answer, metrics, seconds = through(
        judge.url, parameters={"temperature": 0}, timeout_s=10.0
    )
    assert status == 200 and answer["choices"][0]["message"]["content"] == "[[A=B]]"
    assert (
        len(judge.log) == asked
        and judge.log[-1][2]["temperature"] == 0
        and judge.log[-1][2]["model"] == "stub"
    )
    told = {"asked": 1, "prompt_tokens": 5, "completion_tokens": 2} | (
        {"retries": asked - 1} if asked > 1 else {}
    )
    assert metrics == {f"judge/judge_model/{name}": value for name, value in told.items()}
    assert seconds > (4.0 if asked == 5 else 0.0)


@pytest.mark.parametrize(
    ("script", "reason", "asked"),
    [
        ([(401, {"error": "wrong key: right-key"})], "http_401", 1),
        ([(404, {"error": {"message": "no model stub"}})], "http_404", 1),
        ([(400, {"error": {"message": "maximum context length is 10"}})], "http_400", 1),
        ([(500, b"'}{\"")], "http_500", 2),
        ([(429, {}, [("Retry-After", "60")])], "http_429", 1),  # beyond the deadline: told at once
        ([(200, b"<html>")], "bad_answer", 2),
        ([(200, [])], "bad_answer", 2),
        ([(200, {"choices": [{"message": {"content": 7}}]})], "bad_answer", 2),
        ([(200, completion(" \n"))], "empty", 1),
        ([(200, completion(None, refusal="I would rather not."))], "refused", 1),
        ([(200, None)], "timeout", 1),
    ],
    ids=str,
)
def test_a_judge_that_fails_is_a_failure_with_its_name_and_never_its_key(script, reason, asked):
    judge, began = Judge(*script), time.monotonic()
    status, answer, metrics, _ = through(judge.url, key="right-key", key_name="THE_KEY", attempts=2)
    told = answer["error"]["message"]
    assert (
        status == 422
        and f"judge judge_model ({judge.url}): {reason}" in told
        and len(judge.log) == asked
    )
    assert metrics[f"judge/judge_model/failed/{reason}"] == 1 and time.monotonic() < began + 5.0
    assert (
        judge.log[0][1] == "Bearer right-key"
        and "right-key" not in told
        and "context length" not in told
    )
    wrapped = f"Hit an exception in VLLMModel calling an inner server: {json.dumps(answer).encode()!r}"  # as Gym says
    assert judge_parsing.fault(500, json.dumps(wrapped).encode()) == told.partition("\n")[0][:600]


def test_a_judge_that_is_down_is_a_failure_too():
    status, answer, metrics, _ = through("http://127.0.0.1:9/v1", attempts=2)
    assert (
        status == 422
        and "connect: " in answer["error"]["message"]
        and metrics["judge/judge_model/retries"] == 1
    )


def test_the_proxy_is_for_the_runs_own_servers():
    judge = Judge(GOOD)
    assert (
        through(judge.url, bearer="stolen")[0] == 401
        and through(judge.url, "models")[0] == 404
        and not judge.log
    )


def test_no_more_requests_at_once_than_concurrency():
    at_once, most, lock = 0, [0], threading.Lock()

    class Counting(list):
        def __getitem__(self, index):
            nonlocal at_once
            with lock:
                at_once += 1
                most[0] = max(most[0], at_once)
            time.sleep(0.4)
            with lock:
                at_once -= 1
            return GOOD

    judge = Judge(GOOD)
    judge.script = Counting([GOOD])

    async def many(port, key):
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=30.0
        ) as http:
            url = f"http://127.0.0.1:{port}/j/v1/chat/completions"
            return await asyncio.gather(*[http.post(url, json={"messages": []}) for _ in range(12)])

    # twelve share two places for 2.4 s, and the deadline of 1.5 s counts from a place on
    with judge_proxy.Proxy(
        {"j": judge_proxy.Judge("j", judge.url, "stub", concurrency=2, timeout_s=1.5)}
    ) as proxy:
        answers = asyncio.run(many(proxy.port, proxy.key))
    assert {answer.status_code for answer in answers} == {200} and most[0] == 2


# --- what is asked again, and what is kept -------------------------------------------------------


@pytest.mark.parametrize("status", sorted(judge_proxy.NOT_NOW))
def test_a_status_that_may_pass_is_asked_again(status):
    judge = Judge((status, {}), GOOD)
    assert through(judge.url, timeout_s=10.0)[0] == 200 and len(judge.log) == 2


@pytest.mark.parametrize("status", [201, 301, 307, 400, 403, 405, 413, 422, 501])
def test_a_status_that_will_not_pass_is_not_asked_again(status):
    judge = Judge((status, {}), GOOD)
    code, answer, metrics, _ = through(judge.url, timeout_s=10.0)
    assert code == 422 and len(judge.log) == 1 and f"http_{status}" in answer["error"]["message"]
    assert metrics[f"judge/judge_model/failed/http_{status}"] == 1


def test_a_judge_that_redirects_is_a_failure_and_nobody_else_is_asked():
    other = Judge(GOOD)
    judge = Judge((307, {}, [("Location", f"{other.url}/chat/completions")]))
    status, answer, _, _ = through(judge.url, key="right-key", key_name="THE_KEY")
    assert status == 422 and other.log == [] and len(judge.log) == 1
    told = answer["error"]["message"]
    assert (
        f"HTTP 307 redirects to {other.url}/chat/completions, which is not followed; set that base_url"
        in told
    )


def test_an_answer_that_does_not_end_is_a_failure_and_not_asked_again(monkeypatch):
    monkeypatch.setattr(gym_servers, "MOST_BYTES", 100)
    judge = Judge((200, completion("[[A=B]]" * 100)))
    status, answer, _, _ = through(judge.url, timeout_s=10.0)
    assert (
        status == 422
        and "bad_answer: an answer longer than 100 bytes" in answer["error"]["message"]
    )
    assert len(judge.log) == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("-3", 0.0),
        ("in an hour", 0.0),
        ("", 0.0),
        ("nan", 0.0),
        (lambda: email.utils.formatdate(time.time() + 30, usegmt=True), 30.0),
        (lambda: email.utils.formatdate(time.time() - 30, usegmt=True), 0.0),
        (
            lambda: email.utils.format_datetime(
                datetime.now(timezone(timedelta(hours=5))) + timedelta(seconds=30)
            ),
            30.0,
        ),
    ],
    ids=[
        "seconds",
        "negative",
        "words",
        "none",
        "nan",
        "a date to come",
        "a date that was",
        "another time zone",
    ],
)
def test_retry_after_is_seconds_or_a_date(header, seconds):
    header = header() if callable(header) else header
    assert (
        judge_proxy._wait_s(header) == pytest.approx(seconds, abs=2.0)
        and judge_proxy._wait_s(header) >= 0.0
    )


def test_a_judge_that_names_a_date_is_waited_for():
    judge = Judge(
        (429, {}, [("Retry-After", email.utils.formatdate(time.time() + 3, usegmt=True))]), GOOD
    )
    status, _, _, seconds = through(judge.url, timeout_s=10.0, attempts=1)
    assert status == 200 and 1.5 < seconds < 5.0


def test_pauses_between_tries_grow():
    judge = Judge((500, {}), (500, {}), (500, {}), GOOD)
    assert through(judge.url, timeout_s=10.0, attempts=4)[3] > 7 * judge_proxy.PAUSE_S


def test_the_metrics_of_a_step_are_of_that_step():
    judge = Judge((200, completion("[[A=B]]")))
    judged = {
        name: judge_proxy.Judge(name, judge.url, "stub", timeout_s=5.0) for name in ("one", "two")
    }
    with judge_proxy.Proxy(judged) as proxy:

        def ask(name):
            headers = {"Authorization": f"Bearer {proxy.key}"}
            url = f"http://127.0.0.1:{proxy.port}/{name}/v1/chat/completions"
            assert httpx.post(url, json={"messages": []}, headers=headers).status_code == 200
            return proxy.metrics()

        of_one = {
            "judge/one/asked": 1.0,
            "judge/one/prompt_tokens": 5.0,
            "judge/one/completion_tokens": 2.0,
        }
        assert ask("one") == of_one and proxy.metrics() == {}
        assert ask("two") == {key.replace("one", "two"): value for key, value in of_one.items()}
        assert ask("one") == of_one


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"choices": [{"finish_reason": "content_filter", "message": {"content": ""}}]}, "refused"),
        ({"choices": [{"finish_reason": "length", "message": {"content": None}}]}, "empty"),
        ({"output": [], "status": "incomplete"}, "empty"),
        ({"choices": []}, "empty"),
        ({"choices": [{"finish_reason": "stop", "message": {}}]}, "empty"),
        ({"choices": [{"finish_reason": "stop"}]}, "bad_answer"),
        ({}, "bad_answer"),
        (None, "bad_answer"),
        ({"output": [{"type": "message", "content": [{"text": 7}]}]}, "bad_answer"),
    ],
    ids=str,
)
def test_an_answer_that_says_nothing_is_none(body, reason):
    with pytest.raises(judge_proxy.JudgeError) as caught:
        judge_proxy._completion(
            json.dumps(body).encode(), judge_proxy.Judge("j", "http://x/v1", "m")
        )
    assert caught.value.reason == reason and caught.value.retry == (reason == "bad_answer")
    no_room = "length" in str(body) or "incomplete" in str(body)
    assert ("raise parameters.max_tokens" in str(caught.value)) == no_room


def test_a_verifier_gets_the_judges_text_and_none_of_its_thoughts():
    message = {"reasoning_content": "[[A!=B]]", "tool_calls": [], "refusal": None, "token_ids": [1]}
    body = completion("[[A=B]]", **message)
    body["choices"][0]["logprobs"] = {"content": []}
    judge = Judge((200, body))
    _, answer, _, _ = through(judge.url)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "[[A=B]]",
        "tool_calls": [],
        "refusal": None,
    }
    assert "logprobs" not in choice and judge.log[0][2]["stream"] is False


def test_responses_are_counted_and_passed_on():
    output = [{"type": "message", "content": [{"type": "output_text", "text": "[[A=B]]"}]}]
    judge = Judge((200, {"output": output, "usage": {"input_tokens": 7, "output_tokens": 3}}))
    status, answer, metrics, _ = through(judge.url, "responses")
    assert status == 200 and answer["output"] == output and judge.log[0][0] == "/v1/responses"
    assert (
        metrics["judge/judge_model/prompt_tokens"] == 7
        and metrics["judge/judge_model/completion_tokens"] == 3
    )


# --- what a judge's text must hold ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, completion("[[A=B]]"), ""),
        (
            200,
            {"choices": [{"message": {"content": None}}, {"message": {"content": "[[A=B]]"}}]},
            "",
        ),
        (200, completion("<think>[[A=B]]</think>"), "its answer is empty"),
        (200, completion("<thinking>x</thinking> no"), "no verdict in its answer: 'no'"),
        (200, completion(""), "its answer is empty"),
        (200, completion(None), "its answer is empty"),
        (200, {"choices": []}, "its answer is empty"),
        (200, {"output": []}, "its answer is empty"),
        (200, {"error": "x"}, "its answer is no completion"),
        (200, [], "its answer is no completion"),
        (200, "text", "its answer is no completion"),
        (201, completion("[[A=B]]"), "HTTP 201"),
        (204, completion("[[A=B]]"), "HTTP 204"),
        (400, completion("[[A=B]]"), "HTTP 400"),
        (500, completion("[[A=B]]"), "HTTP 500"),
    ],
    ids=str,
)
def test_only_a_text_with_a_verdict_is_an_answer(status, body, told):
    why = judge_parsing.fault(
        status, json.dumps(body).encode(), judge_parsing.VERDICTS["math_with_judge"]
    )
    assert told in why and bool(told) == bool(why)


@pytest.mark.parametrize("key", ["should_use_judge", "use_judge", "enable_llm_judge"])
def test_a_server_whose_settings_switch_its_judge_off_asks_none(key):
    named = {"judge_model_server": {"type": "responses_api_models", "name": "j"}}
    assert judge_parsing.asked_models({**named, key: False}) == {}
    for on in (True, None, 0, "no"):  # as Gym reads it: only what it declares false is off
        assert judge_parsing.asked_models({**named, key: on}) == {"judge_model_server": "j"}


def test_the_models_that_a_server_asks_are_those_that_its_settings_name():
    settings = {
        "one": {"type": "responses_api_models", "name": "j"},
        "two": {"type": "responses_api_models", "name": "k"},
        "other": {"type": "resources_servers", "name": "x"},
        "unnamed": {"type": "responses_api_models"},
        "judge_server_name": "v",
    }
    assert judge_parsing.asked_models(settings) == {
        "one": "j",
        "two": "k",
        "judge_server_name": "v",
    }


def test_every_verdict_is_of_a_server_that_is_there():
    assert SAID.keys() == {name for name, verdict in judge_parsing.VERDICTS.items() if verdict}
    assert not [
        name
        for name in judge_parsing.VERDICTS
        if not (SITE / "resources_servers" / name / "app.py").is_file()
    ]


@pytest.mark.parametrize("name", SAID)
def test_a_text_without_a_verdict_is_none(name):
    answer = lambda text: json.dumps(completion(text)).encode()  # noqa: E731
    assert judge_parsing.fault(200, answer(SAID[name]), judge_parsing.VERDICTS[name]) == ""
    for text in (
        NONSENSE,
        "As an AI I Cannot Be Asked.",
        f"<think>{SAID[name]}</think> {NONSENSE}",
    ):
        assert "no verdict" in judge_parsing.fault(
            200, answer(text), judge_parsing.VERDICTS[name]
        ), text
    responses = {
        "output": [{"type": "message", "content": [{"type": "output_text", "text": SAID[name]}]}]
    }
    assert (
        judge_parsing.fault(200, json.dumps(responses).encode(), judge_parsing.VERDICTS[name]) == ""
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"reward": 0.0, "invalid_judge_response": True},
            "invalid_judge_response: True",
        ),  # aalcr, gdpval
        ({"reward": 0.0, "invalid_gen_base": True}, "invalid_gen_base"),  # arena_judge
        ({"reward": 0.0, "no_judge_score": 1.0}, "no_judge_score"),  # imo_proofbench_judge
        (
            {"reward": 0.0, "verdict": None, "judge_output": "hm"},
            "verdict: None",
        ),  # frontierscience_judge
        ({"reward": 0.0, "judge_evaluation": {"verdict_label": None}}, "judge_evaluation: None"),
        (
            {"reward": 0.0, "judge_evaluations": [{"verdict_label": "judge_parsing_error"}]},
            "judge_parsing_error",
        ),
        (
            {"reward": 0.0, "verifier_labels": {"safety_check": None}},
            "safety_check: None",
        ),  # jailbreak_detection
        (
            {
                "reward": 0.0,
                "validation_results": [{"message": "Error parsing LLM Judge response: x"}],
            },
            "Error parsing",
        ),
        (
            {
                "reward": 0.0,
                "invalid_judge_response": False,
                "no_judge_score": 0.0,
                "verdict": "NO",
            },
            "",
        ),
        (
            {"reward": 1.0, "judge_evaluations": [{"verdict_label": "[[A=B]]"}, {"response": {}}]},
            "",
        ),
        (
            {
                "reward": 0.0,
                "judge_evaluation": None,
                "judge_evaluations": None,
                "validation_results": None,
            },
            "",
        ),
        ([], ""),
    ],
    ids=str,
)
def test_a_verifier_that_says_that_it_found_no_verdict_has_none(said, told):
    assert told in judge_parsing.disowned(said) and bool(told) == bool(judge_parsing.disowned(said))


def test_a_failure_is_of_the_request_for_which_the_judge_was_asked():
    """Two verdicts at once, of which one's judge fails; a third, whose judge is asked again and answers."""
    both = asyncio.Event()

    async def app(scope, receive, send):
        why = {"bad": "no", "good": "", "again": "no", "other": "no"}[
            scope["query_string"].decode()
        ]
        await asyncio.gather(
            *[asyncio.create_task(asked(why))]
        )  # in a task of its own, as verifiers do
        if scope["query_string"] == b"again":
            judge_parsing.note({"messages": [1], "temperature": 0.5}, "")
        if scope["query_string"] == b"other":  # another question, which is answered
            judge_parsing.note({"messages": [2], "temperature": 0}, "")
            judge_parsing.note({"input": [1]}, "")
        body = json.dumps({"reward": 0.0}).encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"set-cookie", b"a=b")]}
        )
        await send({"type": "http.response.body", "body": body})

    async def asked(why):
        both.set()
        await asyncio.sleep(0.01)
        judge_parsing.note({"messages": [1], "temperature": 0}, why)

    async def call(query, path="/verify", method="POST"):
        sent = []
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}

        async def send(message):
            sent.append(message)

        await judge_parsing.watched(app, "j")(scope, None, send)
        headers = dict(sent[0]["headers"])
        assert headers[b"set-cookie"] == b"a=b"
        assert int(headers.get(b"content-length", len(sent[1]["body"]))) == len(sent[1]["body"])
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def run():
        found = await asyncio.gather(call("bad"), call("good"), call("again"), call("bad", "/look"))
        step, other, page = (
            await call("bad", "/step"),
            await call("other"),
            await call("bad", method="GET"),
        )
        assert step == other == found[0] and page == found[1]
        return found

    bad, good, again, tool = asyncio.run(run())
    assert bad == (
        200,
        {"reward": None, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "no"},
    )
    assert good == again == (200, {"reward": 0.0}) and tool[0] == 429


@pytest.mark.parametrize("path", ["/verify", "/step", "/look"])
def test_a_verdict_that_its_verifier_disowns_is_withheld(path):
    said = {"reward": 0.0, "invalid_judge_response": True}

    async def app(scope, receive, send):
        judge_parsing.note(SimpleNamespace(model_dump=lambda **_: {"input": "x"}), "no")
        judge_parsing.note({"input": "x"}, "")  # the same question, answered
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (json.dumps(said)[:5], json.dumps(said)[5:]):
            await send({"type": "http.response.body", "body": part.encode(), "more_body": True})

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path}
    asyncio.run(judge_parsing.watched(app, "judge_model")(scope, None, send))
    body = json.loads(b"".join(message.get("body", b"") for message in sent))
    if path == "/look":
        assert body == said and sent[0]["status"] == 200
    else:
        assert body["reward"] is None and body["_ng_failure_class"] == "judge_failed"
        why = "model judge_model: no verdict by the verifier's own word (invalid_judge_response: True)"
        assert body["_ng_failure_judge_error"] == why
    judge_parsing.note({"input": "x"}, "outside of a request, which nobody asks about")


WATCHING = """
import asyncio, importlib.util, json, sys
import httpx
from nemo_gym import openai_utils, server_utils

spec = importlib.util.spec_from_file_location("kit_verdicts", sys.argv[1])
verdicts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verdicts)
BAD = b'{"choices": [{"message": {"content": "nonsense"}}]}'


class Answer:
    status = 200

    async def read(self):
        return BAD


sent = []


async def request(self, server_name, url_path, method, **rest):
    sent.append(rest)
    if server_name == "slow":
        await asyncio.sleep(60)
    return Answer()


async def by_url(method, url, _internal=False, **rest):
    return Answer()


async def by_httpx(self, request, **rest):
    return httpx.Response(200, content=BAD, request=request)


server_utils.ServerClient.request, openai_utils.request, httpx.AsyncClient.send = request, by_url, by_httpx
ran = []
server_utils.uvicorn.run = lambda app, **settings: ran.append(app)
verdicts.watch(["judge", "slow"], ["127.0.0.1:7"], "VERDICT")


class Client:
    global_config_dict = {name: {"responses_api_models": {}} for name in ("judge", "slow")}
    global_config_dict["other"] = {"resources_servers": {}}


async def named(name):
    client = server_utils.ServerClient.request
    await asyncio.wait_for(client(Client(), name, "/v1/responses", "POST", json={"input": name, "top_p": None}), 1.0)


async def direct():
    await openai_utils.request("POST", "http://127.0.0.1:7/v1/responses", json={"input": "x"})


async def over_httpx(port):
    async with httpx.AsyncClient() as http:
        await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": []})


async def failures(call):
    found = {}
    verdicts._failures.set(found)
    try:
        await call
    except TimeoutError:
        pass
    return list(found.values())


async def main():
    calls = {"judge": named("judge"), "other": named("other"), "slow": named("slow"), "direct": direct()}
    calls |= {"place": over_httpx(7), "elsewhere": over_httpx(8)}
    return {name: await failures(call) for name, call in calls.items()}


found = asyncio.run(main())
server_utils.uvicorn.run("module:app", workers=2) if "workers" in sys.argv else server_utils.uvicorn.run(print)
print(json.dumps({"found": found, "sent": sent, "wrapped": ran[0] is not print}))
"""


def test_every_way_of_asking_a_judge_is_looked_at_and_nothing_else(tmp_path):
    """In Gym's own interpreter, around its clients; the judge's answer, over which they disagree, has no verdict."""
    (tmp_path / "watching.py").write_text(WATCHING)
    command = [
        GYM_PYTHON,
        tmp_path / "watching.py",
        ROOT / "kit" / "extras" / "judges" / "judge_parsing.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    told, found = "no verdict in its answer: 'nonsense'", answer["found"]
    assert found["judge"] == [f"model judge: {told}"]
    assert found["direct"] == [f"model http://127.0.0.1:7/v1/responses: {told}"]
    assert found["place"] == [f"model http://127.0.0.1:7/v1/chat/completions: {told}"]
    assert found["other"] == found["elsewhere"] == []
    assert len(found["slow"]) == 1 and found["slow"][0].startswith("model slow: CancelledError")
    by_name = {rest["json"]["input"]: rest["json"] for rest in answer["sent"]}
    assert by_name["judge"] == {"input": "judge"}  # without nulls
    assert by_name["other"] == {"input": "other", "top_p": None} and answer["wrapped"]
    done = subprocess.run([*command, "workers"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "each would ask its judge unseen" in done.stderr


# --- Gym's own servers ---------------------------------------------------------------------------

SAME = {"judge_model_server": {"type": "responses_api_models", "name": "judge_model"}}
ASKING = {  # the server: its start, and an answer that it asks its judge about
    "abstention": ({"config": SAME}, "Paris"),
    "physics_judge": ({"config": SAME}, "The answer is \\boxed{-1}"),
    "math_with_judge": (
        {"config": {**SAME, "should_use_judge": True}},
        "The answer is \\boxed{-1}",
    ),
    "arena_judge": (
        {"config": SAME, "install": True},
        "Paris",
    ),  # which needs scikit-learn; RIGHT is a draw: 0
}
RIGHT = "[[A=B]] [Correct]\nA"


def first_row(name):
    folder = SITE / "resources_servers" / name / "data"
    return json.loads((folder / "example.jsonl").read_text().splitlines()[0])


def verdict_of(urls, name, timeout_s=20.0):
    async def ask():
        async with Gym({name: urls[name]}, timeout_s=timeout_s, attempts=1) as gym:
            async with gym.session(name, first_row(name)) as session:
                return await session.verify(message_response(ASKING[name][1]))

    return asyncio.run(ask())


@contextlib.contextmanager
def asking(judge, folder, names):
    starts = {name: {"start": {"python": str(GYM_PYTHON), **ASKING[name][0]}} for name in names}
    with judge_proxy.Proxy({"judge_model": judge}) as proxy:
        with gym_servers.running_servers(starts, folder, models=proxy.blocks()) as urls:
            yield urls, proxy


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """(judge, urls, proxy): four of Gym's judge servers and what they ask."""
    judge, folder = Judge((200, completion(RIGHT))), tmp_path_factory.mktemp("judged")
    asked = judge_proxy.Judge(
        "judge_model", judge.url, "stub", "right-key", "THE_KEY", timeout_s=3.0, attempts=2
    )
    with asking(asked, folder, ASKING) as (urls, proxy):
        yield judge, urls, proxy
        assert not [
            path for path in folder.iterdir() if "right-key" in path.read_text()
        ]  # in no log


@pytest.mark.parametrize("name", ASKING)
def test_a_judge_server_of_gyms_verifies(judged, name):
    judge, urls, proxy = judged
    judge.script, proxy_before = [(200, completion(RIGHT))], proxy.metrics()
    assert verdict_of(urls, name).reward == float(name != "arena_judge"), proxy_before
    assert proxy.metrics()["judge/judge_model/prompt_tokens"] >= 5


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, completion(NONSENSE)), "no verdict in its answer: .*Lorem"),
        ((200, completion("[[A>B]] or [[B>A]]")), "no verdict"),  # arena_judge says so itself
        ((200, b"<html>"), "bad_answer"),
        ((401, {"error": "right-key"}), "http_401"),
        ((404, {"error": {"message": "no model stub"}}), "http_404"),
        ((429, {}, [("Retry-After", "60")]), "http_429"),
        ((500, {}), "http_500"),
        ((200, None), "timeout"),
    ],
    ids=["nonsense", "both", "html", "401", "wrong model", "429", "500", "never"],
)
def test_a_judge_that_fails_is_never_a_reward(judged, name, answer, why):
    judge, urls, _ = judged
    judge.script = [answer]
    with pytest.raises(GymError, match=rf"judge_model.*{why}") as caught:
        verdict_of(urls, name)
    assert caught.value.reason == "masked" and "right-key" not in str(caught.value)


@pytest.mark.soak  # over a minute; tests/test_stack.py has the policy as a judge
def test_a_real_model_judges(tmp_path, monkeypatch):
    """vLLM serves a model of random weights, which may say one of two verdicts; three servers ask it."""
    from transformers import AutoTokenizer

    says = {"right": RIGHT, "wrong": "[[A!=B]] [Incorrect]\nB"}
    for name, text in says.items():  # tokens of their own
        monkeypatch.setitem(ACTIONS, name, text)
    folder = make_model(tmp_path / "judge", tied=True)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 16384}
    (folder / "config.json").write_text(json.dumps(config))
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list(says.values()))
    spec = {"start": {"model": str(folder), "args": {"max_model_len": 16384, "max_num_seqs": 4}}}
    spec["parameters"] = {"allowed_token_ids": ids, "max_tokens": 1, "temperature": 1.0}
    assert list(judge_proxy.problems({"judge_model": spec}, 60.0)) == []
    judge = judge_proxy.judges({"judge_model": spec}, 60.0, cpu_dtype="float32")["judge_model"]
    with asking(judge, tmp_path / "logs", ["abstention", "physics_judge", "math_with_judge"]) as (
        urls,
        proxy,
    ):
        rewards = [verdict_of(urls, name, 60.0).reward for name in urls for _ in range(4)]
        metrics = proxy.metrics()
    assert set(rewards) <= {0.0, 1.0} and metrics["judge/judge_model/completion_tokens"] >= 12
    assert not [name for name in metrics if "failed" in name]


# --- what a recipe says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, "takes base_url: .* or start"),
        ({"base_url": "https://x/v1", "start": {"model": "."}}, "takes base_url: .* or start"),
        ("me", "or is the word policy"),
        ({"base_url": "x/v1", "model": "m"}, "base_url is 'x/v1'"),
        ({"base_url": "https://x/v1"}, "model is not set"),
        (
            {"base_url": "https://x/v1", "model": "m", "api_key": "sk-1"},
            "a key stands in no recipe",
        ),
        (
            {"base_url": "https://x/v1", "model": "m", "api_key_env": "NO_SUCH"},
            "the environment variable NO_SUCH is",
        ),
        ({"base_url": "https://x/v1", "model": "m", "timeout": 3}, "unknown key 'timeout'"),
        (
            {"base_url": "https://x/v1", "model": "m", "timeout_s": 60},
            "no less than gym.timeout_s=60",
        ),
        ({"base_url": "https://x/v1", "model": "m", "attempts": 0}, "a number over 0"),
        (
            {"base_url": "https://x/v1", "model": "m", "server": "local_vllm_model"},
            "none of vllm_model",
        ),
        ({"start": {"model": "models/none"}}, "no model folder"),
        ({"start": {"model": "a/b", "gpu": 1}}, "unknown key 'gpu'"),
        ({"start": {"model": "a/b", "gpus": 1}}, "gpus takes a list"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_judge_is_told_by_its_key(spec, told):
    (problem,) = judge_proxy.problems({"judge_model": spec}, 60.0)
    assert re.search(rf"gym\.judges\.judge_model.*{told}", problem) and "sk-1" not in problem


def test_a_judge_on_a_gpu_has_one_of_its_own(monkeypatch):
    spec = {
        "judge_model": {"start": {"model": "a/b", "gpus": [2, 3], "args": {"max_model_len": 64}}}
    }
    assert "gpus is not set" in next(
        judge_proxy.problems({"j": {"start": {"model": "a/b"}}}, 60.0, "cuda")
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    judges = judge_proxy.judges(spec, 60.0)
    with judge_proxy.gpus_taken(spec):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    block = judge_proxy.vllm_block(judges["judge_model"])
    assert block["env"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert {"--tensor-parallel-size", "2", "--max-model-len", "64"} <= set(block["command"])
    with (
        pytest.raises(ConfigError, match="names 9, of 0, 1, 2, 3"),
        judge_proxy.gpus_taken({"j": {"start": {"gpus": [9]}}}),
    ):
        pass


def test_an_address_is_asked_for_its_model_before_anything_starts():
    judge = Judge((404, {"error": {"message": "The model stab does not exist."}}))
    judge_proxy.reach(judge_proxy.Judge("j", judge.url, "stub"))
    for changes, told in (
        (
            {"model": "stab"},
            r"gym\.judges\.j\.model=stab: .*404: .*nearest of its 1 models are stub",
        ),
        (
            {"key": "wrong", "key_name": "THE_KEY"},
            r"gym\.judges\.j: .*401.* \(the key in THE_KEY\)",
        ),
        (
            {"url": "http://127.0.0.1:9/v1"},
            r"gym\.judges\.j\.base_url: http://127.0.0.1:9/v1 does not answer",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            judge_proxy.reach(
                judge_proxy.Judge(**{"name": "j", "url": judge.url, "model": "stub", **changes})
            )


def test_a_key_is_in_nothing_that_is_written_or_handed_on(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    spec = {"base_url": "https://x/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    judges = judge_proxy.judges({"judge_model": spec}, 60.0)
    assert judges["judge_model"].key == "sk-very-secret" and "sk-very-secret" not in repr(judges)
    assert "sk-very-secret" not in repr(list(judge_proxy.Proxy(judges).blocks())) + "".join(
        judge_proxy.told(judges)
    )
    config, _ = load_config([], [f"gym.judges={{judge_model: {json.dumps(spec)}}}"])
    (block,), seen = judge_proxy.Proxy(judges).blocks(), {}
    monkeypatch.setattr(gym_servers, "Popen", lambda command, env, **_: seen.update(env))
    gym_servers.start_server({**block, "log": str(tmp_path / "log"), "python": "python"}, [block])
    assert "JUDGE_KEY" not in seen and "sk-very-secret" not in repr(seen)
    assert config.gym.judges.judge_model.api_key_env == "JUDGE_KEY" and "sk-very-secret" not in str(
        public(config)
    )


@pytest.mark.parametrize(
    ("name", "start", "known", "told"),
    [
        (
            "physics_judge",
            {},
            [],
            r"asks the model judge_model \(judge_model_server\); set gym\.judges\.judge_model",
        ),
        ("physics_judge", {"config": {"should_use_judge": False}}, [], ""),
        ("physics_judge", {}, ["judge_model"], ""),
        (
            "multichallenge",
            {"agent": "simple_agent"},
            [],
            "",
        ),  # asks policy_model, which an agent's run has
        (
            "genrm_compare",
            {},
            ["genrm_model"],
            r"cannot tell them apart; gym\.unchecked_judges=\[genrm_compare\]",
        ),
        ("xstest", {}, ["allenai_wildguard_model_server"], ""),
        ("reasoning_gym", {}, [], ""),
    ],
)
def test_what_a_server_asks_is_known_before_it_starts(name, start, known, told):
    start = {"python": str(GYM_PYTHON), **start}
    context = pytest.raises(GymStartError, match=told) if told else contextlib.nullcontext()
    with context:
        gym_servers.check_asked(name, start, known)
    gym_servers.check_asked(name, start, ["judge_model", "policy_model", *known], [name])


@pytest.mark.parametrize("port", [70000, 0.5, "x", -1])
def test_a_port_that_is_none_is_told(port):
    with pytest.raises(
        GymStartError, match=r"gym\.servers\.mcqa\.start\.port is .*; it takes a number up to 65535"
    ):
        gym_servers.check_server("mcqa", {"start": {"python": str(GYM_PYTHON), "port": port}})


# --- environments of their own -------------------------------------------------------------------


def test_an_install_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    python = tmp_path / ".venv-gym" / "bin" / "python"
    for folder in ("bin", "lib"):
        (tmp_path / ".venv-gym").mkdir(exist_ok=True)
        (tmp_path / ".venv-gym" / folder).symlink_to(ROOT / ".venv-gym" / folder)
    real, calls = subprocess.run, []

    def run(command, **settings):
        calls.append(command[1:3])
        if command[1:3] == ["pip", "install"] and "--no-deps" not in command:
            return subprocess.CompletedProcess(
                command, 1, "", "No solution found\nbecause of a reason"
            )
        return (
            real(command, **settings)
            if command[1] == "venv"
            else subprocess.CompletedProcess(command, 0, "", "")
        )

    monkeypatch.setattr(gym_environments.subprocess, "run", run)
    with pytest.raises(
        GymStartError,
        match=r"gym\.servers\.x\.start\.install: no environment for asr_with_pc: .*because of a reason",
    ):
        gym_servers.interpreter(
            "x", {"python": str(python), "server": "asr_with_pc", "install": True}
        )
    assert calls[-1] == ["pip", "install"] and not list((tmp_path / ".venv-gym-servers").iterdir())
    with pytest.raises(
        gym_environments.InstallError, match=r"no such resources server; nearest are .*mcqa"
    ):
        gym_environments.install("mcqaa", str(python))


def test_what_pypi_has_by_the_name_of_a_git_repository_is_not_installed():
    listed = gym_environments.requirements(SITE / "resources_servers" / "code_fim")
    assert any(line.startswith("human-eval-infilling@ git+https://") for line in listed)
    assert not [line for line in listed if "nemo-gym" in line]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('{git = "https://x/a.git"}', "my-pkg[fast]@ git+https://x/a.git"),
        ('{git = "https://x/a.git", rev = "0123abc"}', "my-pkg[fast]@ git+https://x/a.git@0123abc"),
        ('{git = "https://x/a.git", tag = "v1"}', "my-pkg[fast]@ git+https://x/a.git@v1"),
        (
            '{git = "https://x/a.git", branch = "b", subdirectory = "c"}',
            "my-pkg[fast]@ git+https://x/a.git@b#subdirectory=c",
        ),
        ('{url = "https://x/a.whl"}', "my-pkg[fast]@ https://x/a.whl"),
        ('{index = "theirs"}', "index': 'theirs'}, which is not taken"),
        ('{git = "https://x/a.git", rev = "1", branch = "b"}', "which is not taken"),
        ('[{git = "https://x/a.git", marker = "x"}]', "which is not taken"),
    ],
    ids=str,
)
def test_a_package_comes_from_the_place_and_the_revision_that_its_server_names(
    source, line, tmp_path
):
    dependencies = (
        'dependencies = ["nemo-gym[dev]", "My_Pkg[fast]>=1", "other==2; python_version > \'3\'"]'
    )
    sources = f'[tool.uv.sources]\nmy-pkg = {source}\nnemo-gym = {{path = "../.."}}'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{dependencies}\n{sources}\n")
    if "not taken" in line:
        with pytest.raises(gym_environments.InstallError, match=re.escape(line)):
            gym_environments.requirements(tmp_path)
    else:
        mine, other = gym_environments.requirements(tmp_path)
        assert mine.lower().replace("_", "-") == line and other == "other==2; python_version > '3'"


@pytest.mark.parametrize(
    ("gym", "told"),
    [
        (
            {"judges": {"judge_modle": "policy"}},
            ["asks the model judge_model", r"models\.judge_modle: no server .* they"],
        ),
        (
            {"judges": {"judge_model": "policy"}, "unchecked_judges": ["physics"]},
            [r"gym\.unchecked_judges: physics is none of gym\.servers"],
        ),
        ({"judges": {"judge_model": "policy"}}, []),
        (
            {
                "judges": {
                    "judge_model": {"base_url": "https://x/v1", "model": "m", "api_key_env": "NO"}
                }
            },
            ["variable NO is"],
        ),
    ],
    ids=str,
)
def test_a_recipe_with_judges_is_checked_before_anything_starts(gym, told):
    start = {"physics_judge": {"start": {"python": str(GYM_PYTHON)}}}
    config, _ = load_config(
        [], [f"gym.{key}={json.dumps(value)}" for key, value in ({"servers": start} | gym).items()]
    )
    errors = [str(error) for error in preparation.check_servers(config)]
    assert len(errors) == len(told) and all(
        re.search(*pair) for pair in zip(told, errors, strict=True)
    ), errors
