"""Rewards of functions and steps of environments. An invalid return value is a failed episode."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from http.server import ThreadingHTTPServer

import psutil
import pytest
from http_doubles import JsonHandler
from verifier_helpers import EXAMPLES, make_router, play, run_session

from gym_client import GymError
from kit.extras.python_verifiers import function_session, verifier_settings


@pytest.fixture
def router_of(tmp_path, monkeypatch):
    """Makes a router for a verifier of my.py: router_of("my.py:compute_score", timeout_s=1.0)."""
    (tmp_path / "my.py").write_text(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    return functools.partial(make_router, tmp_path)


def test_a_function_is_called_as_verl_calls_it(router_of):
    right, wrong = play(router_of("my.py:compute_score"), "it is 7", "it is 8")
    assert (right.reward, wrong.reward, right.components) == (1.0, 0.0, {})
    result = play(router_of("my.py:by_name"), "x")[0]
    assert result.reward == 0.5
    assert result.components == {"acc": 1.0, "length": 1.0}
    assert result.latency_s < 1
    assert result.details == {"pred": "x", "who": "by_name", "odd": "{1, 2}"}
    assert play(router_of({"function": "my.py:later", "strict": True}), "x")[0].reward == 1.0


def test_a_function_may_return_a_key_that_marks_failures_inside_the_kit(router_of):
    for text in ("", "no"):
        (result,) = play(router_of("my.py:with_failed"), text)
        assert (result.reward, result.details) == (0.5, {"failed": text or None})


@pytest.mark.parametrize(
    ("fields", "ground_truth"),
    [
        ({"answer": "a"}, "a"),
        ({"answer": "a", "expected_answer": "e"}, "e"),
        ({"answer": "a", "reward_model": {"style": "rule", "ground_truth": ["g"]}}, ["g"]),
        ({}, None),
    ],
)
def test_the_ground_truth_comes_from_reward_model_or_from_the_row(fields, ground_truth):
    row = {**fields, "extra_info": {"index": 3, "row": "its own"}}
    arguments = function_session.make_arguments(row, "text", "name")
    assert arguments["ground_truth"] == ground_truth
    assert arguments["data_source"] == "name"
    assert arguments["solution_str"] == "text"
    extra_info = {"index": 3, "row": "its own", "num_turns": 2, "rollout_reward_scores": {}}
    assert arguments["extra_info"] == extra_info
    row = {"data_source": "openai/gsm8k", "extra_info": None}
    assert function_session.make_arguments(row, "", "")["data_source"] == "openai/gsm8k"


def test_verls_scorer_needs_neither_torch_nor_ray(router_of):
    router = router_of("verl")
    gsm8k = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}

    async def both():
        async with router:
            results = await run_session(router, "so\n#### 72", "#### 7", row=gsm8k)
            process = psutil.Process(router.pools["verl"].workers[0].process.pid)
            memory = process.memory_info().rss
            return results, memory, await run_session(router, "x", row={"data_source": "mine"})

    (right, wrong), memory, (unknown,) = asyncio.run(both())
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert memory < 100 * 2**20
    message = "NotImplementedError: Reward function is not implemented for data_source='mine'"
    assert message in str(unknown)


RUNS = {
    "status": "Success",
    "run_result": {"status": "Finished", "stdout": "3\n", "return_code": 0},
}
FAILS = {"status": "Failed", "run_result": {"status": "Error", "stderr": "no", "return_code": 1}}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (RUNS, 0.5),
        (FAILS, 0.0),
        ({"status": "SandboxError", "message": "no disk"}, "no result for test 0: sandbox_error"),
        ("busy", "no result for test 0: .*API Request Error: 500 Server Error"),
    ],
    ids=["runs", "fails", "sandbox", "http"],
)
def test_an_outage_of_verls_sandbox_is_not_a_reward(router_of, answer, reward):
    requests = []

    class Sandbox(JsonHandler):
        def do_POST(self):  # noqa: N802  (the name that its base class calls)
            requests.append(self.read_json())
            self.answer(500 if answer == "busy" else 200, answer)

    with ThreadingHTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/run_code"
        verifier = {"function": "verl", "sandbox_fusion_url": url, "memory_limit_mb": 99}
        router = router_of(verifier)
        tests = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
        row = {"data_source": "taco", "reward_model": {"ground_truth": json.dumps(tests)}}
        result, prose = play(router, "```python\nprint(3)\n```", "no program", row=row)
        server.shutdown()
    if isinstance(reward, str):
        assert isinstance(result, GymError)
        assert re.search(f"RuntimeError: the sandbox at {url} has {reward}", str(result))
    else:
        assert result.reward == reward
    assert prose.reward == 0.0
    assert {request["stdin"] for request in requests} == {"1 2", "3 4"}
    limits = {(request["code"].strip(), request["memory_limit_MB"]) for request in requests}
    assert limits == {("print(3)", 99)}
    (pool,) = router.pools.values()
    assert not verifier_settings.runs_policy_code(pool.spec, {"taco"})
    local = verifier_settings.read_spec("verl", "")
    assert verifier_settings.runs_policy_code(local, {"taco"})


def test_an_environment_travels_between_processes(router_of):
    """Each of three interleaved episodes keeps its state, whichever of two processes has it."""
    router = router_of({"function": "my.py:Game", "most": 3}, processes=2)

    async def three():
        async with router:
            sessions = [run_session(router, str(first), "3", "7") for first in (1, 2, 7)]
            return await asyncio.gather(*sessions)

    games = asyncio.run(three())
    turns = [(t.observation, t.reward, t.terminated, t.truncated) for t in games[0]]
    assert turns == [
        ("No, 1 of 3.", 0.0, False, False),
        ("No, 2 of 3.", 0.0, False, False),
        (None, 1.0, True, False),
    ]
    assert games[1] == games[0] and games[2][0].reward == 1.0


def test_an_environment_may_have_a_first_observation(router_of):
    async def read_observations():
        observations = []
        async with router_of("my.py:Game") as router:
            for question in ("say 7", "other"):
                row = {"question": question, "answer": "7"}
                async with router.session("Game", row) as session:
                    observations.append(session.observation)
        return observations

    assert asyncio.run(read_observations()) == ["Guess.", None]


def test_an_invalid_return_value_is_a_failure_that_shows_it(router_of):
    shown = {
        "none": "None",
        "nan": "nan",
        "text": "'1.0'",
        "bool": "True",
        "infinite": "inf",
        "list": "[1.0]",
        "without": "{'acc': 1.0}",
        "part": "{'acc': nan, 'score': 1.0}",
        "huge": "1000000000000000",
    }
    errors = play(router_of("my.py:wrong"), *shown)
    for error, value in zip(errors, shown.values(), strict=True):
        assert isinstance(error, GymError)
        assert error.reason == "bad_answer" and not error.retryable
        assert str(error).startswith(f"my.py:wrong returned {value}")
        assert "a finite number, or a dict" in str(error)
