"""The processes of Python verifiers: a failed call fails one episode, and the pool recovers."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import time

import psutil
import pytest

from gym_client import GymError
from kit.chat.parsed_response import ParsedResponse
from kit.verify.python_verifiers import pool
from tests.helpers.recipes import ROOT
from tests.helpers.verifiers import (
    EXAMPLE_SOURCE,
    ROW,
    enter_hostile_folder,
    find_remaining_processes,
    list_rewards,
    make_router,
    play,
    run_session,
)
from tests.verify.python_verifiers.example_verifiers import CALCULATOR


@pytest.fixture
def build_router(tmp_path, monkeypatch):
    """A function that makes a router: build_router("my.py:compute_score", timeout_s=1.0)."""
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    monkeypatch.chdir(tmp_path)
    return functools.partial(make_router, tmp_path)


@pytest.mark.parametrize(
    ("text", "reason", "problem"),
    [
        ("raise", "raised", "my.py:LINE: ValueError: no such answer"),
        ("sys.exit", "raised", "SystemExit: 0"),
        ("os._exit", "died", "ended with status 0"),
        ("memory", "memory", "raise env.verifier_pool.memory_gb"),
        ("loop", "timeout", "verifier_run_action_0.log"),
    ],
)
def test_a_call_that_fails_has_a_reason_and_the_pool_recovers(
    build_router, tmp_path, text, reason, problem
):
    began = time.monotonic()
    router = build_router("my.py:run_action", timeout_s=1.0)
    before, error, after = play(router, "fine", text, "fine")
    assert (before.reward, error.reason, after.reward) == (1.0, reason, 1.0)
    assert time.monotonic() - began < 10
    line = EXAMPLE_SOURCE.splitlines().index('    raise ValueError("no such answer")') + 1
    assert problem.replace("LINE", str(line)) in str(error)
    assert "\n" not in str(error)
    if reason == "timeout":  # the log shows where the function was
        assert "in run_action" in (tmp_path / "verifier_run_action_0.log").read_text()


def test_waiting_for_a_process_does_not_count_for_the_timeout(build_router, tmp_path):
    source = "import time\ndef score(**_):\n    time.sleep(0.4)\n    return 1\n"
    (tmp_path / "slow.py").write_text(source)
    router = build_router("slow.py:score", timeout_s=1.0)

    async def run_five_sessions():
        async with router:  # one process takes 2 s for the five calls of 0.4 s
            return await asyncio.gather(*(run_session(router, "x") for _ in range(5)))

    assert [results[0].reward for results in asyncio.run(run_five_sessions())] == [1.0] * 5


def test_a_cancelled_call_ends_its_process(build_router):
    async def cancel_and_call_again():
        async with build_router("my.py:run_action", timeout_s=60.0) as router:
            await router.kind("run_action")
            call = asyncio.create_task(run_session(router, "loop"))
            await asyncio.sleep(0.3)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return await run_session(router, "fine")

    assert list_rewards(asyncio.run(cancel_and_call_again())) == [1.0]


# --- environments --------------------------------------------------------------------------------


def test_an_environment_stays_in_its_process_and_is_closed_at_the_end(build_router):
    """It holds a running program, so it could not be in another process."""

    async def play_two():
        async with build_router("my.py:Calculator") as router:
            results = await asyncio.gather(*(run_session(router, "1", n) for n in ("2", "3")))
            is_running = router.pools["Calculator"].workers[0].is_running()
            return results, find_remaining_processes(*CALCULATOR), is_running

    results, remaining, is_running = asyncio.run(play_two())
    assert [[turn.observation for turn in game] for game in results] == [["1", "3"], ["1", "4"]]
    assert (remaining, is_running) == ([], True)


@pytest.mark.parametrize(("text", "reason"), [("loop", "timeout"), ("os._exit", "died")])
def test_a_step_that_hangs_or_kills_the_process_costs_other_episodes_only_a_retry(
    build_router, text, reason
):
    async def play_two():
        async with build_router("my.py:Calculator", timeout_s=2.0) as router:
            async with router.session("Calculator", ROW) as other:
                results = await run_session(router, "1", text)
                results += [await try_step(other, "1"), *await run_session(router, "5")]
            return results

    first, error, lost, again = asyncio.run(play_two())
    assert (first.observation, error.reason, error.session_lost) == ("1", reason, False)
    assert (lost.reason, lost.session_lost, again.observation) == ("session_lost", True, "5")
    assert find_remaining_processes(*CALCULATOR) == []


async def try_step(session, text):
    """Return the result of a step, or its error."""
    try:
        return await session.step({}, ParsedResponse.of_text(text))
    except GymError as error:
        return error


DRIVER = """
import asyncio, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from kit.verify.python_verifiers.pool import Worker
from kit.verify.python_verifiers.settings import VerifierSpec
from tests.helpers.verifiers import make_recipe

async def main():
    spec = VerifierSpec("run_action", "my.py:run_action", "env.verifier", {path!r})
    worker = Worker(spec, make_recipe("my.py:run_action", timeout_s=60.0), Path("log"))
    await worker.start()
    print(worker.process.pid, flush=True)
    row = dict.fromkeys(("data_source", "ground_truth", "extra_info"))
    await worker.call("score", {{**row, "solution_str": "loop"}})

asyncio.run(main())
"""


def test_no_process_outlives_a_driver_that_is_killed(build_router, tmp_path):
    """This holds for a busy process too, which does not read from its pipe."""
    code = DRIVER.format(root=str(ROOT), path=str(tmp_path / "my.py"))
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(driver.stdout.readline()))
    time.sleep(0.3)
    assert worker.is_running() and driver.poll() is None
    driver.kill()
    driver.communicate()
    psutil.wait_procs([worker], timeout=5)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_long_log_is_emptied(build_router, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "MAX_LOG_BYTES", 1000)
    source = "def score(**_):\n    print('x' * 2000)\n    return 1\n"
    (tmp_path / "loud.py").write_text(source)
    assert list_rewards(play(build_router("loud.py:score"), "x", "y")) == [1.0, 1.0]
    assert (tmp_path / "verifier_score_0.log").stat().st_size < 3000


# --- functions that misuse their process ---------------------------------------------------------


@pytest.fixture
def build_hostile(tmp_path, monkeypatch):
    """A function that makes a router: build_hostile("my.py:answer_in_advance")."""
    enter_hostile_folder(tmp_path, monkeypatch)
    return functools.partial(make_router, tmp_path, timeout_s=60.0, memory_gb=2.0)


def test_an_answer_that_claims_to_be_long_is_not_read(build_hostile):
    before = psutil.Process().memory_info().rss
    (error,) = play(build_hostile("my.py:announce_long_answer"), "x")
    assert isinstance(error, GymError) and error.reason == "bad_answer"
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_an_answer_in_advance_counts_for_no_request(build_hostile):
    results = play(build_hostile("my.py:answer_in_advance"), "x", "y")
    assert list_rewards(results) == ["bad_answer", "bad_answer"]


def test_no_child_writes_an_answer_and_a_timeout_ends_it(build_hostile):
    """The child is in another session, and the function never answers."""
    results = play(build_hostile("my.py:leave_children", timeout_s=1.5), "x")
    assert list_rewards(results) == ["timeout"]
    assert find_remaining_processes("sleep", "1000.25") == []


def test_a_verifier_sees_few_variables_and_those_that_the_recipe_names(build_hostile, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:0123456789@host")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    for names_in_recipe in ([], ["OPENAI_API_KEY"]):
        (result,) = play(build_hostile("my.py:show_environment", env=names_in_recipe), "x")
        names = set(result.details["names"].split())
        assert "PATH" in names and "DATABASE_URL" not in names
        assert ("OPENAI_API_KEY" in names) == bool(names_in_recipe)
