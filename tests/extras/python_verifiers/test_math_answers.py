"""The math verifier gives the rewards of Gym's math_with_judge server, and its calls end in time.

benchmarks/math_verifier.py compares 1,000 answers, and measures a step of 5,120.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from conftest import GYM_PYTHON, ROOT
from verifier_helpers import make_router, play, rewards, run_session

from kit.config.python_files import import_file
from kit.gym.servers import running_servers

VERIFIER = "kit/extras/python_verifiers/math_answers.py:verify_math"
CHANGED = """
import os
from kit.extras.python_verifiers import math_answers

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
ROW = {"expected_answer": "18", "responses_create_params": {}}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Makes a router for a function of CHANGED."""
    (tmp_path / "my.py").write_text(CHANGED)
    monkeypatch.chdir(tmp_path)
    return lambda name, **pool: make_router(tmp_path, f"my.py:{name}", **pool)


def test_rewards_are_those_of_gyms_server(tmp_path, monkeypatch):
    """One answer of every second kind, and one that math-verify interrupts."""
    monkeypatch.chdir(ROOT)
    bench = import_file(ROOT / "benchmarks" / "math_verifier.py")
    samples = bench.make_samples(len(bench.FORMS) + len(bench.OTHERS) + 1, slow=1)[::2]
    start = {"python": str(GYM_PYTHON), "config": bench.GYM_CONFIG}

    async def verify_with_kit():
        async with bench.make_router(tmp_path, processes=2) as router:
            return await bench.verify_with_kit(router, samples)

    with running_servers({"math_with_judge": {"start": start}}, tmp_path) as urls:
        url = urls["math_with_judge"]
        gyms = asyncio.run(bench.verify_with_gym(url, samples, concurrency=2))
    ours = asyncio.run(verify_with_kit())
    assert bench.list_differences(samples, ours, gyms) == []
    assert set(ours) == {0.0, 1.0}


def test_delimiters_around_the_expected_answer_are_removed_and_no_answer_is_a_failure(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    router = make_router(tmp_path, VERIFIER)

    async def verify_all():
        async with router:
            results = []
            for expected in ("$18$", "\\(18\\)", " 18 ", "", "18"):
                row = {**ROW, "expected_answer": expected}
                results.append(await run_session(router, RIGHT, WRONG, row=row))
            return results

    results = asyncio.run(verify_all())
    assert [rewards(pair) for pair in results] == [
        [1.0, 0.0],
        [1.0, 0.0],
        [1.0, 0.0],
        ["raised", "raised"],
        [1.0, 0.0],
    ]
    assert "the expected answer '' cannot be read" in str(results[3][0])


def test_an_answer_that_takes_too_long_earns_nothing_and_delays_no_other(changed):
    router = changed("verify_with_short_limit")
    results = play(router, RIGHT, SLOW, RIGHT, WRONG, row=ROW)
    assert rewards(results) == [1.0, 0.0, 1.0, 0.0]
    interrupted = [result.components["interrupted"] for result in results]
    assert interrupted == [0.0, 1.0, 0.0, 0.0]


def test_a_lost_process_is_a_failure_and_is_replaced(changed):
    results = play(changed("lose_process"), RIGHT, "lose " + RIGHT, RIGHT, row=ROW)
    assert rewards(results) == [1.0, "raised", 1.0]
    assert "math-verify's process ended with status -9" in str(results[1])


def test_the_deadline_of_the_pool_ends_a_call_with_its_process(changed):
    """Without its deadline the slow answer would earn 0 after 5 s."""
    results = play(changed("verify_math", timeout_s=2.0), SLOW, RIGHT, row=ROW)
    assert rewards(results) == ["timeout", 1.0]
    left = []
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(Path.cwd()) and process.pid != os.getpid():
            left.append(process)
    assert not left
