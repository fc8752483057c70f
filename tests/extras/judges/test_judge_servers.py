"""Gym's own servers with judges: a judge gives rewards, and a failed judge never does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import pytest

from extras.judges import find_missing_judges, list_models
from extras.judges.judge_proxy import JudgeProxy
from extras.judges.judge_settings import Judge, build_judges, find_problems
from gym_client import Gym, GymError, message_response
from kit.gym import servers as gym_servers
from tests.helpers.http import JUDGE_CONFIG, StubJudge, completion
from tests.helpers.models import ACTIONS, make_model
from tests.helpers.recipes import GYM_PYTHON, ROOT

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
        async with Gym({name: urls[name]}, timeout_s=timeout_s, attempts=1) as gym:
            async with gym.session(name, read_row(name)) as session:
                return await session.verify(message_response(SERVERS[name][1]))

    return asyncio.run(run_session())


@contextlib.contextmanager
def run_servers(judge, folder, names):
    """Start servers and a proxy to `judge`, and yield (URLs, proxy)."""
    servers = {name: {"start": {"python": str(GYM_PYTHON), **SERVERS[name][0]}} for name in names}
    with JudgeProxy({"judge_model": judge}) as proxy:
        specs = proxy.process_specs(folder, str(GYM_PYTHON))
        with gym_servers.running_servers(servers, folder, other_specs=specs) as urls:
            yield urls, proxy


@pytest.fixture(scope="module")
def servers_with_judge(tmp_path_factory):
    """(judge, URLs, proxy): servers of Gym with one judge."""
    stub = StubJudge((200, completion(CORRECT)))
    folder = tmp_path_factory.mktemp("judged")
    judge = Judge(
        "judge_model", stub.url, "stub", "right-key", "THE_KEY", timeout_s=3.0, attempts=2
    )
    with run_servers(judge, folder, SERVERS) as (urls, proxy):
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
        ((200, b"<html>"), "bad_answer"),
        ((200, completion("")), "empty"),
        ((401, {"error": "right-key"}), "http_401"),
        ((429, {}, [("Retry-After", "60")]), "http_429"),
        ((500, {}), "http_500"),
        ((200, None), "timeout"),
    ],
    ids=["html", "empty", "401", "429", "500", "never"],
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
    assert list(find_problems({"judge_model": spec}, 60.0)) == []
    judge = build_judges({"judge_model": spec}, 60.0, cpu_dtype="float32")["judge_model"]
    names = ["abstention", "physics_judge", "math_with_judge"]
    with run_servers(judge, tmp_path / "logs", names) as (urls, proxy):
        rewards = []
        for name in urls:
            rewards += [verify(urls, name, 60.0).reward for _ in range(4)]
        metrics = proxy.metrics()
    assert set(rewards) <= {0.0, 1.0}
    assert metrics["judge/judge_model/completion_tokens"] >= 12
    assert not [name for name in metrics if "failed" in name]


# --- checks before the start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start", "judges", "problem"),
    [
        (
            "physics_judge",
            {},
            [],
            r"the model judge_model \(judge_model_server\)\. Set gym\.judges\.judge_model",
        ),
        ("physics_judge", {"config": {"should_use_judge": False}}, [], ""),
        ("physics_judge", {}, ["judge_model"], ""),
        # uses policy_model, which a run with an agent has
        ("multichallenge", {"agent": "simple_agent"}, [], ""),
        ("genrm_compare", {}, ["genrm_model"], ""),
        ("xstest", {}, ["allenai_wildguard_model_server"], ""),
        ("reasoning_gym", {}, [], ""),
    ],
)
def test_the_judges_of_a_server_are_checked_before_it_starts(name, start, judges, problem):
    start = {"python": str(GYM_PYTHON), **start}
    models = list_models(name, start)
    messages = list(find_missing_judges(name, start, models, dict.fromkeys(judges)))
    assert [bool(re.search(problem, message)) for message in messages] == [True] * bool(problem)
