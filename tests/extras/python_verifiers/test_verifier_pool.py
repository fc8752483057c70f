"""The processes of Python verifiers: a call that fails costs its episode, and the pool recovers."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from verifier_helpers import EXAMPLES, make_router, play, run_session

import gym_client
from gym_client import GymError


@pytest.fixture
def router_of(tmp_path, monkeypatch):
    """Makes a router for a verifier of my.py: router_of("my.py:compute_score", timeout_s=1.0)."""
    (tmp_path / "my.py").write_text(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    return functools.partial(make_router, tmp_path)


DIED = r"my.py:bad: its process ended with"
SLOW = r"my.py:bad gave no answer within 1 s at"


@pytest.mark.parametrize(
    ("text", "reason", "message", "source"),
    [
        (
            "raise",
            "raised",
            "my.py:bad failed at FILE:LINE: ValueError: no such answer",
            "raise ValueError(",
        ),
        ("hostile", "raised", "my.py:bad failed at FILE:LINE: HostileError", "raise HostileError"),
        ("sys.exit", "raised", "my.py:bad failed at FILE:LINE: SystemExit: 0", "sys.exit(0)"),
        ("os._exit", "died", f"{DIED} exit status 0. Read its log, .*/verifier_bad_0.log", ""),
        ("crash", "died", rf"{DIED} SIGSEGV at FILE:LINE\.", "ctypes.string_at"),
        (
            "memory",
            "memory",
            r"FILE:LINE: MemoryError; a process has 1 GiB \(env.verifier_pool.memory_gb",
            "2**30))",
        ),
        ("loop", "timeout", f"{SLOW} FILE:.* env.verifier_pool.timeout_s", ""),
        ("regex", "timeout", rf"{SLOW} FILE:LINE\. ", "re.match("),
        ("child", "timeout", rf"{SLOW} FILE:LINE\. ", "subprocess.run("),
    ],
)
def test_a_call_that_fails_has_a_reason_and_the_pool_recovers(
    router_of, tmp_path, text, reason, message, source
):
    began = time.monotonic()
    others = psutil.Process().children(recursive=True)
    before, error, after = play(router_of("my.py:bad", timeout_s=1.0), "fine", text, "fine")
    assert (before.reward, after.reward) == (1.0, 1.0)
    assert time.monotonic() - began < 10
    lines = [str(n) for n, line in enumerate(EXAMPLES.splitlines(), 1) if source in line]
    pattern = message.replace("FILE", str(tmp_path / "my.py")).replace("LINE", lines[0])
    assert isinstance(error, GymError) and error.reason == reason
    assert re.search(pattern, str(error)), str(error)
    assert "\n" not in str(error)
    started = set(psutil.Process().children(recursive=True)) - set(others)
    assert not [p for p in started if "sleep" in p.name() or "worker" in str(p.cmdline())]


def test_an_async_function_that_never_yields_times_out(router_of):
    (error,) = play(router_of("my.py:never_yields", timeout_s=1.0), "x")
    head = EXAMPLES.partition("async def never_yields(")[0]
    line = len(head.splitlines()) + 1
    assert error.reason == "timeout"
    assert re.search(rf"my.py:({line + 1}|{line + 2})\b", str(error))


def test_a_process_that_ends_between_two_calls_costs_no_episode(router_of):
    async def pause():
        async with router_of("my.py:bad") as router:
            first = await run_session(router, "afterwards")
            await asyncio.sleep(0.5)
            return first + await run_session(router, "fine")

    assert [result.reward for result in asyncio.run(pause())] == [1.0, 1.0]


def test_a_crash_costs_one_episode_of_many(router_of):
    router = router_of("my.py:Game", processes=2)

    async def many():
        async with router:
            sessions = []
            for number in range(8):
                second = "crash" if number == 3 else "2"
                sessions.append(run_session(router, "1", second, "7"))
            return await asyncio.gather(*sessions)

    games = asyncio.run(many())
    assert [g[1].reason for g in games if isinstance(g[1], GymError)] == ["died"]
    steps = [g[2] for g in games if isinstance(g[2], gym_client.StepResult)]
    assert sum(step.reward == 1.0 for step in steps) >= 7


def test_waiting_for_a_process_does_not_count_for_the_timeout(router_of, tmp_path):
    source = "import time\ndef score(**_):\n    time.sleep(0.4)\n    return 1\n"
    (tmp_path / "slow.py").write_text(source)
    router = router_of("slow.py:score", timeout_s=1.0)

    async def many():
        async with router:  # 2 s in all
            return await asyncio.gather(*(run_session(router, "x") for _ in range(5)))

    assert [results[0].reward for results in asyncio.run(many())] == [1.0] * 5


def test_a_cancelled_call_ends_its_process(router_of):
    async def cancelled():
        async with router_of("my.py:bad", timeout_s=60.0) as router:
            await router.kind("bad")
            call = asyncio.create_task(run_session(router, "loop"))
            await asyncio.sleep(0.3)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return await run_session(router, "fine")

    assert asyncio.run(cancelled())[0].reward == 1.0


DRIVER = """
import asyncio, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from verifier_helpers import make_config
from kit.extras.python_verifiers.verifier_pool import Worker
from kit.extras.python_verifiers.verifier_settings import VerifierSpec

async def main():
    spec = VerifierSpec("bad", "my.py:bad", "env.verifier", {path!r})
    worker = Worker(spec, make_config("my.py:bad", timeout_s=60.0), Path("log"))
    await worker.start()
    print(worker.process.pid, flush=True)
    row = dict.fromkeys(("data_source", "ground_truth", "extra_info"))
    await worker.call("score", {{**row, "solution_str": "loop"}})

asyncio.run(main())
"""


def test_no_process_outlives_a_driver_that_is_killed(router_of, tmp_path):
    """Even a busy one, which reads no more requests."""
    tests = Path(__file__).resolve().parent
    root = tests.parents[2]
    code = DRIVER.format(root=str(root), tests=str(tests), path=str(tmp_path / "my.py"))
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(driver.stdout.readline()))
    time.sleep(0.3)
    assert worker.is_running() and driver.poll() is None
    driver.kill()
    driver.communicate()
    psutil.wait_procs([worker], timeout=5)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
