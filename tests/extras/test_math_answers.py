"""The math verifier gives the rewards of Gym's math_with_judge server. Its calls have a timeout."""

from __future__ import annotations

import asyncio

import pytest

from extras import math_answers
from gym_client import Gym, GymError, message_response
from kit.verify.servers import running_servers
from tests.helpers import math_samples
from tests.helpers.recipes import GYM_PYTHON, ROOT
from tests.helpers.verifiers import list_rewards, make_router, play

VERIFIER = "extras/math_answers.py:verify_math"
# Variants of the verifier: one interrupts math-verify after 0.5 s, one loses its process.
CHANGED_VERIFIERS = """
import os
from extras import math_answers

verify_math = math_answers.verify_math


def verify_with_short_limit(**arguments):
    math_answers.TIME_LIMIT_S = 0.5
    return verify_math(**arguments)


def lose_process(**arguments):
    if "lose" in arguments["solution_str"]:
        os.kill(math_answers.math_process.process.pid, 9)
    return verify_math(**arguments)
"""
RIGHT = "So it is $2 \\times 9 = 18$. \\boxed{18}"
WRONG = "\\boxed{19}"
SLOW = "\\boxed{9^{9^{9}}}"  # math-verify interrupts itself after 5 s
# The first four are an error of Gym's server, the others earn nothing there.
GROUND_TRUTHS = {
    "null": None,
    "object": {"value": "18"},
    "number": 18,
    "list": ["17", "18"],
    "blank": " ",
    "GSM8K": "2 * 9 = 18\n#### 18",
    "JSON": '["17", "18"]',
}
READABLE = ("number", "list", "GSM8K", "JSON")
ROW = {"expected_answer": "18", "responses_create_params": {}}


@pytest.fixture
def build_changed_router(tmp_path, monkeypatch):
    """Return a function that makes a router for a function of CHANGED_VERIFIERS."""
    (tmp_path / "my.py").write_text(CHANGED_VERIFIERS)
    monkeypatch.chdir(tmp_path)

    def build_router(name, **pool):
        return make_router(tmp_path, f"my.py:{name}", **pool)

    return build_router


async def verify_rows_with_gym(url, expected_answers):
    """Return the reward of RIGHT, or the reason of the failure, for rows of Gym's server."""
    outcomes = []
    async with Gym({"math_with_judge": url}) as gym:
        for expected in expected_answers:
            params = {"input": [{"role": "user", "content": "How many?"}]}
            row = {"responses_create_params": params, "question": "?", "expected_answer": expected}
            async with gym.session("math_with_judge", row) as session:
                try:
                    outcomes.append((await session.verify(message_response(RIGHT))).reward)
                except GymError as error:
                    outcomes.append(error.reason)
    return outcomes


@pytest.mark.soak
def test_rewards_are_those_of_gyms_server(tmp_path, monkeypatch):
    """For some ground truths that Gym's server does not read, the kit differs as it documents."""
    monkeypatch.chdir(ROOT)
    samples = math_samples.make_samples()
    config = {"should_use_judge": False, "library_verifier_timeout_seconds": 30}
    start = {"python": str(GYM_PYTHON), "config": config}

    async def verify_with_kit():
        async with make_router(tmp_path, VERIFIER, processes=2) as router:
            return await math_samples.verify_with_kit(router, samples)

    with running_servers({"math_with_judge": {"start": start}}, tmp_path) as urls:
        url = urls["math_with_judge"]
        gym_rewards = asyncio.run(math_samples.verify_with_gym(url, samples, concurrency=2))
        gym_outcomes = asyncio.run(verify_rows_with_gym(url, GROUND_TRUTHS.values()))
    kit_rewards = asyncio.run(verify_with_kit())
    pairs = zip(samples, zip(kit_rewards, gym_rewards, strict=True), strict=True)
    assert [(sample, rewards) for sample, rewards in pairs if len(set(rewards)) > 1] == []
    assert set(kit_rewards) == {0.0, 1.0}
    assert gym_outcomes == ["http_422"] * 4 + [0.0] * 3
    for name, expected in GROUND_TRUTHS.items():
        if name in READABLE:
            assert math_answers.verify_math("", RIGHT, expected, {})["score"] == 1.0
        else:
            with pytest.raises(ValueError, match=r"the expected answer .* cannot be read"):
                math_answers.verify_math("", RIGHT, expected, {})


def test_an_answer_that_takes_too_long_earns_nothing_and_delays_no_other(build_changed_router):
    router = build_changed_router("verify_with_short_limit")
    results = play(router, RIGHT, SLOW, RIGHT, WRONG, row=ROW)
    assert list_rewards(results) == [1.0, 0.0, 1.0, 0.0]
    interrupted = [result.components["interrupted"] for result in results]
    assert interrupted == [0.0, 1.0, 0.0, 0.0]


def test_a_lost_process_is_a_failure_and_is_replaced(build_changed_router):
    router = build_changed_router("lose_process")
    results = play(router, RIGHT, "lose " + RIGHT, RIGHT, row=ROW)
    assert list_rewards(results) == [1.0, "raised", 1.0]
    assert "math-verify's process ended with status -9" in str(results[1])
