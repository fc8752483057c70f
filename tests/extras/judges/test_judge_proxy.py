"""The judge proxy: retries, timeouts, failures with their reasons, limits, and metrics."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
import pytest

from extras.judges import judge_proxy
from extras.judges.judge_proxy import JudgeProxy
from extras.judges.judge_settings import Judge
from tests.helpers.http import StubJudge, completion

GOOD = (200, completion("[[A=B]]"))


def send(url, path="chat/completions", bearer=None, **settings):
    """Send one request through a proxy to the judge at `url`.

    Return (status, JSON of the response, metrics, seconds).
    """
    settings = {"timeout_s": 2.0, **settings}
    judge = Judge("judge_model", url, "stub", **settings)
    with JudgeProxy({"judge_model": judge}) as proxy:
        proxy_url = f"http://127.0.0.1:{proxy.port}/judge_model/v1/{path}"
        began = time.monotonic()
        response = httpx.post(
            proxy_url,
            json={"messages": [], "temperature": 1},
            headers={"Authorization": f"Bearer {bearer or proxy.key}"},
            timeout=30.0,
        )
        seconds = time.monotonic() - began
        return response.status_code, response.json(), proxy.metrics(), seconds


# --- retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "requests"),
    [
        ([GOOD], 1),
        ([(500, {}), GOOD], 2),
        ([(503, {}), (502, {}), GOOD], 3),
        ([(429, {}, [("Retry-After", "1")])] * 4 + [GOOD], 5),  # more than `attempts`
        ([(200, b"<html>"), GOOD], 2),
    ],
    ids=["first request", "500", "503 502", "429 with Retry-After", "html"],
)
def test_a_judge_that_recovers_before_the_timeout_gives_a_reply(script, requests):
    judge = StubJudge(*script)
    status, reply, metrics, seconds = send(judge.url, parameters={"temperature": 0}, timeout_s=10.0)
    assert status == 200
    assert reply["choices"][0]["message"]["content"] == "[[A=B]]"
    assert len(judge.log) == requests
    assert judge.log[-1][2]["temperature"] == 0
    assert judge.log[-1][2]["model"] == "stub"
    counts = {"asked": 1, "prompt_tokens": 5, "completion_tokens": 2}
    if requests > 1:
        counts["retries"] = requests - 1
    assert metrics == {f"judge/judge_model/{name}": value for name, value in counts.items()}
    assert seconds > (4.0 if requests == 5 else 0.0)


@pytest.mark.parametrize("status", [201, 400])
def test_a_permanent_status_is_not_retried(status):
    judge = StubJudge((status, {}), GOOD)
    code, response, metrics, _ = send(judge.url, timeout_s=10.0)
    assert code == 422
    assert len(judge.log) == 1
    assert f"http_{status}" in response["error"]["message"]
    assert metrics[f"judge/judge_model/failed/http_{status}"] == 1


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "reason", "requests"),
    [
        ([(401, {"error": "wrong key: right-key"})], "http_401", 1),
        ([(404, {"error": {"message": "no model stub"}})], "http_404", 1),
        ([(400, {"error": {"message": "maximum context length is 10"}})], "http_400", 1),
        ([(500, b"'}{\"")], "http_500", 2),
        ([(429, {}, [("Retry-After", "60")])], "http_429", 1),  # it waits until the timeout
        ([(200, b"<html>")], "bad_answer", 2),
        ([(200, {"choices": [{"message": {"content": 7}}]})], "bad_answer", 2),
        ([(200, completion(" \n"))], "empty", 1),
        ([(200, completion(None, refusal="I would rather not."))], "refused", 1),
        ([(200, None)], "timeout", 1),
    ],
    ids=str,
)
def test_a_failed_judge_is_an_error_with_its_name_and_without_its_key(script, reason, requests):
    judge = StubJudge(*script)
    began = time.monotonic()
    status, response, metrics, _ = send(judge.url, key="right-key", key_name="THE_KEY", attempts=2)
    message = response["error"]["message"]
    assert status == 422
    assert f"judge judge_model ({judge.url}): {reason}" in message
    assert len(judge.log) == requests
    assert metrics[f"judge/judge_model/failed/{reason}"] == 1
    assert time.monotonic() < began + 5.0
    assert judge.log[0][1] == "Bearer right-key"
    assert "right-key" not in message
    assert "context length" not in message


def test_the_log_has_the_first_failure_of_each_reason(caplog):
    caplog.set_level(logging.WARNING, judge_proxy.__name__)
    stub = StubJudge((400, {}), (401, {}), (400, {}))
    with JudgeProxy({"j": Judge("j", stub.url, "stub")}) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/j/v1/chat/completions"
        for _ in range(4):
            httpx.post(url, json={}, headers={"Authorization": f"Bearer {proxy.key}"})
    first, second = caplog.messages
    assert f"judge j ({stub.url}): http_400: HTTP 400" in first
    assert f"judge j ({stub.url}): http_401: HTTP 401" in second


def test_a_judge_that_does_not_listen_is_a_failure():
    status, response, metrics, _ = send("http://127.0.0.1:9/v1", attempts=2)
    assert status == 422
    assert "connect: " in response["error"]["message"]
    assert metrics["judge/judge_model/retries"] == 1


def test_a_redirect_is_a_failure_and_the_other_host_gets_no_request():
    other = StubJudge(GOOD)
    judge = StubJudge((307, {}, [("Location", f"{other.url}/chat/completions")]))
    status, response, _, _ = send(judge.url, key="right-key", key_name="THE_KEY")
    assert status == 422
    assert other.log == []
    assert len(judge.log) == 1
    assert "http_307" in response["error"]["message"]


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
        ([], "bad_answer"),
        ({"output": [{"type": "message", "content": [{"text": 7}]}]}, "bad_answer"),
    ],
    ids=str,
)
def test_a_reply_without_text_is_a_failure(body, reason):
    judge = StubJudge((200, body))
    status, _, metrics, _ = send(judge.url, attempts=1)
    assert status == 422
    assert metrics[f"judge/judge_model/failed/{reason}"] == 1


# --- requests and replies ------------------------------------------------------------------------


def test_the_proxy_serves_only_the_run_and_only_completions():
    judge = StubJudge(GOOD)
    assert send(judge.url, bearer="stolen")[0] == 401
    assert send(judge.url, "models")[0] == 404
    assert not judge.log


def test_concurrency_limits_the_requests_in_flight():
    in_flight = []
    most = []

    def reply(request):
        in_flight.append(request)
        most.append(len(in_flight))
        time.sleep(0.4)
        in_flight.pop()
        return completion("[[A=B]]")

    judge = StubJudge((200, reply))

    async def send_many(port, key):
        url = f"http://127.0.0.1:{port}/j/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30.0) as http:
            return await asyncio.gather(*[http.post(url, json={"messages": []}) for _ in range(12)])

    # Twelve requests take 2.4 s in two slots. The timeout of 1.5 s starts with the slot.
    settings = Judge("j", judge.url, "stub", concurrency=2, timeout_s=1.5)
    with JudgeProxy({"j": settings}) as proxy:
        responses = asyncio.run(send_many(proxy.port, proxy.key))
    assert {response.status_code for response in responses} == {200}
    assert max(most) == 2


def test_metrics_count_since_the_last_call():
    stub = StubJudge(GOOD)
    with JudgeProxy({"one": Judge("one", stub.url, "stub", timeout_s=5.0)}) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/one/v1/chat/completions"
        for _ in range(2):
            httpx.post(url, json={}, headers={"Authorization": f"Bearer {proxy.key}"})
            assert proxy.metrics()["judge/one/asked"] == 1.0
        assert proxy.metrics() == {}


def test_a_verifier_gets_the_text_of_a_judge_without_its_reasoning():
    message = {"reasoning_content": "[[A!=B]]", "tool_calls": [], "refusal": None, "token_ids": [1]}
    body = completion("[[A=B]]", **message)
    body["choices"][0]["logprobs"] = {"content": []}
    judge = StubJudge((200, body))
    _, reply, _, _ = send(judge.url)
    (choice,) = reply["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "[[A=B]]",
        "tool_calls": [],
        "refusal": None,
    }
    assert "logprobs" not in choice
    assert judge.log[0][2]["stream"] is False


def test_replies_of_the_responses_api_are_counted_and_passed_on():
    output = [{"type": "message", "content": [{"type": "output_text", "text": "[[A=B]]"}]}]
    judge = StubJudge((200, {"output": output, "usage": {"input_tokens": 7, "output_tokens": 3}}))
    status, reply, metrics, _ = send(judge.url, "responses")
    assert status == 200
    assert reply["output"] == output
    assert judge.log[0][0] == "/v1/responses"
    assert metrics["judge/judge_model/prompt_tokens"] == 7
    assert metrics["judge/judge_model/completion_tokens"] == 3
