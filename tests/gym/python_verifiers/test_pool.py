"""The processes of Python verifiers: a failed call fails one episode, and the pool recovers."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
import time

import psutil
import pytest

import gym_client
from gym_client import GymError
from tests.helpers.recipes import ROOT
from tests.helpers.verifiers import (
    EXAMPLE_SOURCE,
    enter_hostile_folder,
    find_remaining_processes,
    list_rewards,
    make_router,
    play,
    run_session,
)


@pytest.fixture
def build_router(tmp_path, monkeypatch):
    """A function that makes a router: build_router("my.py:compute_score", timeout_s=1.0)."""
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    monkeypatch.chdir(tmp_path)
    return functools.partial(make_router, tmp_path)


ERROR_MESSAGE = r"my.py:run_action failed at FILE:LINE:"
DIED_MESSAGE = r"my.py:run_action: its process ended with"
TIMEOUT_MESSAGE = r"my.py:run_action gave no answer within 1 s at"


@pytest.mark.parametrize(
    ("text", "reason", "message", "source"),
    [
        (
            "raise",
            "raised",
            f"{ERROR_MESSAGE} ValueError: no such answer",
            "raise ValueError(",
        ),
        (
            "sys.exit",
            "raised",
            f"{ERROR_MESSAGE} SystemExit: 0",
            "sys.exit(0)",
        ),
        (
            "os._exit",
            "died",
            f"{DIED_MESSAGE} exit status 0. Read its log, .*/verifier_run_action_0.log",
            "",
        ),
        ("crash", "died", rf"{DIED_MESSAGE} SIGSEGV at FILE:LINE\.", "ctypes.string_at"),
        (
            "memory",
            "memory",
            r"FILE:LINE: MemoryError; a process has 1 GiB \(env.verifier_pool.memory_gb",
            "2**30))",
        ),
        ("loop", "timeout", f"{TIMEOUT_MESSAGE} FILE:.* env.verifier_pool.timeout_s", ""),
        ("regex", "timeout", rf"{TIMEOUT_MESSAGE} FILE:LINE\. ", "re.match("),
        ("child", "timeout", rf"{TIMEOUT_MESSAGE} FILE:LINE\. ", "subprocess.run("),
    ],
)
def test_a_call_that_fails_has_a_reason_and_the_pool_recovers(
    build_router, tmp_path, text, reason, message, source
):
    began = time.monotonic()
    earlier = psutil.Process().children(recursive=True)
    before, error, after = play(
        build_router("my.py:run_action", timeout_s=1.0), "fine", text, "fine"
    )
    assert (before.reward, after.reward) == (1.0, 1.0)
    assert time.monotonic() - began < 10
    lines = [str(n) for n, line in enumerate(EXAMPLE_SOURCE.splitlines(), 1) if source in line]
    pattern = message.replace("FILE", str(tmp_path / "my.py")).replace("LINE", lines[0])
    assert isinstance(error, GymError) and error.reason == reason
    assert re.search(pattern, str(error)), str(error)
    assert "\n" not in str(error)
    started = set(psutil.Process().children(recursive=True)) - set(earlier)
    assert not [p for p in started if "sleep" in p.name() or "python_verifiers" in str(p.cmdline())]


def test_an_async_function_that_never_yields_times_out(build_router):
    (error,) = play(build_router("my.py:never_yields", timeout_s=1.0), "x")
    head = EXAMPLE_SOURCE.partition("async def never_yields(")[0]
    line = len(head.splitlines()) + 1
    assert error.reason == "timeout"
    assert re.search(rf"my.py:({line + 1}|{line + 2})\b", str(error))


def test_a_process_that_ends_between_two_calls_fails_no_episode(build_router):
    async def run_with_pause():
        async with build_router("my.py:run_action") as router:
            first = await run_session(router, "afterwards")
            await asyncio.sleep(0.5)
            return first + await run_session(router, "fine")

    assert [result.reward for result in asyncio.run(run_with_pause())] == [1.0, 1.0]


def test_a_crash_fails_one_episode_of_many(build_router):
    router = build_router("my.py:Game", processes=2)

    async def play_games():
        async with router:
            sessions = []
            for number in range(8):
                second = "crash" if number == 3 else "2"
                sessions.append(run_session(router, "1", second, "7"))
            return await asyncio.gather(*sessions)

    games = asyncio.run(play_games())
    second_turns = [game[1] for game in games]
    third_turns = [game[2] for game in games]
    assert [turn.reason for turn in second_turns if isinstance(turn, GymError)] == ["died"]
    steps = [turn for turn in third_turns if isinstance(turn, gym_client.StepResult)]
    assert sum(step.reward == 1.0 for step in steps) >= 7


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

    assert asyncio.run(cancel_and_call_again())[0].reward == 1.0


DRIVER = """
import asyncio, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from kit.gym.python_verifiers.pool import Worker
from kit.gym.python_verifiers.settings import VerifierSpec
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


# --- functions that misuse their process ---------------------------------------------------------


@pytest.fixture
def build_hostile(tmp_path, monkeypatch):
    """A function that makes a router: build_hostile("my.py:flood"). The logs are in tmp_path."""
    enter_hostile_folder(tmp_path, monkeypatch)
    return functools.partial(make_router, tmp_path, timeout_s=60.0, memory_gb=2.0)


def test_an_answer_that_claims_to_be_long_is_not_read(build_hostile):
    before = psutil.Process().memory_info().rss
    results = play(build_hostile("my.py:announce_long_answer"), "x")
    assert list_rewards(results) == ["bad_answer"] and "over the limit" in str(results[0])
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_an_answer_in_advance_counts_for_no_request(build_hostile):
    results = play(build_hostile("my.py:answer_in_advance"), "x", "y")
    assert list_rewards(results) == ["bad_answer", "bad_answer"]


def test_a_timeout_ends_children_in_another_session(build_hostile):
    results = play(build_hostile("my.py:leave_a_child", timeout_s=1.5), "x")
    assert (
        list_rewards(results) == ["timeout"] and find_remaining_processes("sleep", "1000.25") == []
    )


def test_a_verifier_sees_few_variables_and_those_that_the_recipe_names(build_hostile, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:0123456789@host")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    monkeypatch.setenv("LC_TIME", "C")
    for names_in_recipe in ([], ["OPENAI_API_KEY"]):
        (result,) = play(build_hostile("my.py:show_environment", env=names_in_recipe), "x")
        names = set(result.details["names"].split())
        assert "LC_TIME" in names and "DATABASE_URL" not in names
        assert ("OPENAI_API_KEY" in names) == bool(names_in_recipe)


def test_a_long_log_is_emptied(build_hostile, tmp_path):
    assert list_rewards(play(build_hostile("my.py:flood"), "20", "1")) == [0.5, 0.5]
    assert 0 < (tmp_path / "verifier_flood_0.log").stat().st_size < 2 * 2**20
