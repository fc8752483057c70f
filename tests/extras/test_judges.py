"""Judges: checks before a run, the proxy and its failures, and Gym's own servers with a judge.

A failed judge never gives a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time

import httpx
import pytest

from extras.judges import Judges, ServerJudges
from extras.judges.judge_processes import reserve_gpus, vllm_process_spec
from extras.judges.judge_proxy import JudgeProxy
from extras.judges.judge_settings import build_judges, find_problems
from gym_client import Gym, GymError, message_response
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.recipe.settings import Settings, make_settings
from kit.verify import servers as gym_servers
from kit.verify.masks import find_mask
from tests.helpers.http import JUDGE_CONFIG, StubJudge, completion
from tests.helpers.models import ACTIONS, make_model
from tests.helpers.recipes import GYM_PYTHON, ROOT

GOOD = (200, completion("[[A=B]]"))


@pytest.fixture(autouse=True)
def judge_key(monkeypatch):
    """The key of the judges, in the environment."""
    monkeypatch.setenv("JUDGE_KEY", "right-key")


def make_judge(url, **settings):
    """Return {judge_model: the judge at `url`}. It has the key `right-key`."""
    spec = {"base_url": url, "model": "stub", "api_key_env": "JUDGE_KEY", **settings}
    return build_judges({"judge_model": spec}, 60.0)


# --- checks before the start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "set base_url and model, or start"),
        ({"base_url": "https://x/v1", "model": "m", "start": {"model": "a/b"}}, "or start"),
        ({"base_url": "x/v1", "model": "m"}, "base_url: "),
        ({"base_url": "https://x/v1", "model": "m", "api_key": "sk-1"}, "api_key: "),
        ({"base_url": "https://x/v1", "model": "m", "api_key_env": "NO"}, "NO is not set"),
        ({"base_url": "https://x/v1", "model": "m", "timeout_s": 60}, "below gym.timeout_s=60"),
        ({"start": {"model": "./none"}}, "start.model: "),
    ],
    ids=str,
)
def test_an_invalid_value_of_a_judge_is_one_error_that_names_its_key(spec, problem):
    (message,) = find_problems({"judge_model": spec}, 60.0)
    assert message.startswith("gym.judges.judge_model")
    assert problem in message and "sk-1" not in message


def check_judges(settings: Settings) -> list[str]:
    """Return the problems that the features of judges find in a recipe."""
    features = (ServerJudges(settings), Judges(settings))
    return [problem for feature in features for problem in feature.check_settings(settings)]


@pytest.mark.parametrize(
    ("start", "judges", "problems"),
    [
        ({}, {}, ["the model judge_model"]),
        ({}, {"judge_model": "policy"}, []),
        ({}, {"modle": "policy"}, ["the model judge_model", r"gym\.judges\.modle: no server"]),
        ({"config": {"should_use_judge": False}}, {}, []),
    ],
    ids=["missing", "set", "misspelled", "off"],
)
def test_the_judges_of_a_server_are_checked_before_it_starts(start, judges, problems):
    servers = {"physics_judge": {"start": {"python": str(GYM_PYTHON), **start}}}
    sections = {"servers": servers, "judges": judges}
    overrides = [f"gym.{key}={json.dumps(value)}" for key, value in sections.items()]
    errors = check_judges(make_settings(read_source([], overrides), "train"))
    assert len(errors) == len(problems), errors
    for problem, error in zip(problems, errors, strict=True):
        assert re.search(problem, error), errors


def test_the_gpus_of_a_judge_are_hidden_from_the_run(monkeypatch):
    spec = {
        "judge_model": {"start": {"model": "a/b", "gpus": [2, 3], "args": {"max_model_len": 64}}}
    }
    without_gpus = {"j": {"start": {"model": "a/b"}}}
    assert len(list(find_problems(without_gpus, 60.0, "cuda"))) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    judge = build_judges(spec, 60.0)["judge_model"]
    reserve_gpus({"judge_model": judge})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    process = vllm_process_spec(judge)
    assert process.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    arguments = {"--tensor-parallel-size", "2", "--max-model-len", "64"}
    assert arguments <= set(process.command)


def test_a_key_is_neither_written_nor_given_to_servers(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    spec = {"base_url": "https://x/v1", "model": "m", "api_key_env": "JUDGE_KEY"}
    built = build_judges({"judge_model": spec}, 60.0)
    assert built["judge_model"].key == "sk-very-secret"
    assert "sk-very-secret" not in repr(built)
    (process,) = JudgeProxy(built).process_specs(tmp_path)
    assert "sk-very-secret" not in repr(process)
    recipe = build(read_source([], [f"gym.judges={{judge_model: {json.dumps(spec)}}}"]))
    assert recipe.gym.judges["judge_model"]["api_key_env"] == "JUDGE_KEY"
    assert "sk-very-secret" not in str(recipe.redacted())


# --- the proxy -----------------------------------------------------------------------------------


def send(url, path="chat/completions", bearer=None, **settings):
    """Send one request through a proxy to the judge at `url`.

    Return (status, JSON of the response, metrics, seconds).
    """
    with JudgeProxy(make_judge(url, **{"timeout_s": 2.0, **settings})) as proxy:
        proxy_url = f"http://127.0.0.1:{proxy.port}/judge_model/v1/{path}"
        began = time.monotonic()
        response = httpx.post(
            proxy_url,
            json={"messages": [], "temperature": 1},
            headers={"Authorization": f"Bearer {bearer or proxy.key}"},
            timeout=30.0,
        )
        seconds = time.monotonic() - began
        reply = response.json() if response.status_code in (200, 422) else {}
        return response.status_code, reply, proxy.metrics(), seconds


@pytest.mark.parametrize(
    ("script", "requests"),
    [
        ([GOOD], 1),
        ([(500, {}), GOOD], 2),
        ([(429, {}, [("Retry-After", "1")])] * 4 + [GOOD], 5),  # more than `attempts`
        ([(200, b"<html>"), GOOD], 2),
    ],
    ids=["first request", "500", "429 with Retry-After", "html"],
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


@pytest.mark.parametrize(
    ("script", "reason", "requests"),
    [
        ([(401, {"error": "wrong key: right-key"})], "http_401", 1),
        ([(400, {"error": {"message": "maximum context length is 10"}})], "http_400", 1),
        ([(500, b"'}{\"")], "http_500", 2),
        ([(429, {}, [("Retry-After", "60")])], "http_429", 1),  # after the timeout
        ([(200, b"<html>")], "bad_answer", 2),
        ([(200, {"choices": [{"message": {"content": 7}}]})], "bad_answer", 2),
        ([(200, {"output": [], "status": "incomplete"})], "empty", 1),
        ([(200, completion(" \n"))], "empty", 1),
        ([(200, completion(None, refusal="I would rather not."))], "empty", 1),
        ([(200, None)], "timeout", 1),
    ],
    ids=str,
)
def test_a_failed_judge_is_an_error_with_its_name_and_without_its_key(script, reason, requests):
    judge = StubJudge(*script)
    began = time.monotonic()
    status, response, metrics, _ = send(judge.url, attempts=2)
    message = response["error"]["message"]
    assert status == 422
    assert f"judge judge_model ({judge.url}): {reason}" in message
    assert len(judge.log) == requests
    assert metrics[f"judge/judge_model/failed/{reason}"] == 1
    assert time.monotonic() < began + 5.0
    assert judge.log[0][1] == "Bearer right-key"
    assert "right-key" not in message
    assert "context length" not in message


def test_a_redirect_is_a_failure_and_the_other_host_gets_no_request():
    other = StubJudge(GOOD)
    judge = StubJudge((307, {}, [("Location", f"{other.url}/chat/completions")]))
    status, response, _, _ = send(judge.url)
    assert status == 422
    assert other.log == []
    assert len(judge.log) == 1
    assert "http_307" in response["error"]["message"]


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
        url = f"http://127.0.0.1:{port}/judge_model/v1/chat/completions"
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30.0) as http:
            return await asyncio.gather(*[http.post(url, json={"messages": []}) for _ in range(12)])

    # Twelve requests take 2.4 s in two slots. The timeout of 1.5 s starts with the slot.
    with JudgeProxy(make_judge(judge.url, concurrency=2, timeout_s=1.5)) as proxy:
        responses = asyncio.run(send_many(proxy.port, proxy.key))
    assert {response.status_code for response in responses} == {200}
    assert max(most) == 2


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


# --- Gym's servers -------------------------------------------------------------------------------

SITE_PACKAGES = next(ROOT.glob(".venv-gym/lib/python3*/site-packages"))
# {server: (the `start` of its entry, a response of the policy that the judge decides)}
SERVERS = {
    "abstention": ({"config": JUDGE_CONFIG}, "Paris"),
    "math_with_judge": (
        {"config": {**JUDGE_CONFIG, "should_use_judge": True}},
        "The answer is \\boxed{-1}",
    ),
    # It catches the error of its judge, and reports it in a field.
    "longmemeval": ({"config": {**JUDGE_CONFIG, "judge_max_retries": 0}}, "Paris"),
}
# each of these servers finds its verdict in this text
CORRECT = "yes [[COMPLIED]] [[A=B]] [Correct]\nA"


def read_row(name):
    server = SERVERS[name][0].get("server", name)
    folder = SITE_PACKAGES / "resources_servers" / server / "data"
    return json.loads((folder / "example.jsonl").read_text().splitlines()[0])


def verify(urls, name, timeout_s=20.0):
    """Verify the response in SERVERS with a server's first example row."""

    async def run_session():
        settings = {"timeout_s": timeout_s, "attempts": 1, "find_mask": find_mask}
        async with Gym({name: urls[name]}, **settings) as gym:
            async with gym.session(name, read_row(name)) as session:
                return await session.verify(message_response(SERVERS[name][1]))

    return asyncio.run(run_session())


@contextlib.contextmanager
def run_servers(built, folder, names):
    """Start servers and a proxy to the judge, and yield (URLs, proxy)."""
    servers = {name: {"start": {"python": str(GYM_PYTHON), **SERVERS[name][0]}} for name in names}
    with JudgeProxy(built) as proxy:
        specs = proxy.process_specs(folder, str(GYM_PYTHON))
        with gym_servers.running_servers(servers, folder, other_specs=specs) as urls:
            yield urls, proxy


@pytest.fixture(scope="module")
def servers_with_judge(tmp_path_factory):
    """(judge, URLs, proxy): servers of Gym with one judge."""
    stub = StubJudge((200, completion(CORRECT)))
    folder = tmp_path_factory.mktemp("judged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", "right-key")
        built = make_judge(stub.url, timeout_s=3.0, attempts=2)
    with run_servers(built, folder, SERVERS) as (urls, proxy):
        yield stub, urls, proxy
        for log in folder.iterdir():
            assert "right-key" not in log.read_text(), log


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_verifies_with_its_judge(servers_with_judge, name):
    judge, urls, proxy = servers_with_judge
    judge.script = [(200, completion(CORRECT))]
    metrics_before = proxy.metrics()
    assert verify(urls, name).reward == 1.0, metrics_before
    assert proxy.metrics()["judge/judge_model/prompt_tokens"] >= 5


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((200, completion("")), "empty"),
        ((401, {"error": "right-key"}), "http_401"),
        ((500, {}), "http_500"),
        ((200, None), "timeout"),
    ],
    ids=["empty", "401", "500", "never"],
)
def test_a_failed_judge_never_gives_a_reward(servers_with_judge, name, reply, reason):
    judge, urls, proxy = servers_with_judge
    judge.script = [reply]
    proxy.metrics()
    with pytest.raises(GymError, match="marks its reward as invalid by") as caught:
        verify(urls, name)
    assert caught.value.reason == "masked"
    assert "right-key" not in str(caught.value)
    assert proxy.metrics()[f"judge/judge_model/failed/{reason}"] >= 1


@pytest.mark.soak  # over a minute; tests/test_stack.py has the policy as a judge
def test_a_model_in_vllm_can_be_a_judge(tmp_path, monkeypatch):
    """vLLM serves a model with random weights to three servers. It can sample only two verdicts."""
    from transformers import AutoTokenizer

    verdicts = {"right": CORRECT, "wrong": "[[A!=B]] [Incorrect]\nB"}
    for name, text in verdicts.items():  # each is one token of the tokenizer
        monkeypatch.setitem(ACTIONS, name, text)
    folder = make_model(tmp_path / "judge", tied=True)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 16384}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(list(verdicts.values()))
    spec = {
        "start": {"model": str(folder), "args": {"max_model_len": 16384, "max_num_seqs": 4}},
        "parameters": {"allowed_token_ids": ids, "max_tokens": 1, "temperature": 1.0},
    }
    built = build_judges({"judge_model": spec}, 60.0, cpu_dtype="float32")
    names = ["abstention", "physics_judge", "math_with_judge"]
    with run_servers(built, tmp_path / "logs", names) as (urls, proxy):
        rewards = []
        for name in urls:
            rewards += [verify(urls, name, 60.0).reward for _ in range(4)]
        metrics = proxy.metrics()
    assert set(rewards) <= {0.0, 1.0}
    assert metrics["judge/judge_model/completion_tokens"] >= 12
    assert not [name for name in metrics if "failed" in name]
