"""Tests that a run's coroutines work in a thread with or without a running event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.errors import Stop
from kit.runs.console import Display
from kit.runs.event_loops import make_runner
from kit.runs.stages import Stages

# A process that the kernel ends together with the thread that started it.
DIES_WITH_PARENT = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def call_in_loop(function: Callable[[], Any]) -> Any:
    async def cell() -> Any:
        return function()

    return asyncio.run(cell())


def call_in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_coroutines_run_one_after_the_other_in_a_notebook() -> None:
    async def echo(text: bytes) -> bytes:
        if "process" not in state:
            state["process"] = await asyncio.create_subprocess_exec(
                sys.executable, "-c", DIES_WITH_PARENT,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
        state["process"].stdin.write(text)
        return await state["process"].stdout.readline()

    async def fail() -> None:
        raise ZeroDivisionError("of the work")

    async def stop_process() -> int:
        state["process"].stdin.close()
        return await state["process"].wait()

    def use() -> list[Any]:
        with make_runner() as runner:
            results: list[Any] = [runner.run(echo(b"one\n")), runner.run(echo(b"two\n"))]
            with pytest.raises(ZeroDivisionError, match="of the work"):
                runner.run(fail())
            assert not runner.get_loop().is_running()  # it runs only during `run`
            results.append(runner.run(stop_process()))
        return results

    state: dict[str, Any] = {}
    assert call_in_loop(use) == [b"one\n", b"two\n", 0]


def test_a_stop_in_a_notebook_cancels_the_work(tmp_path: Path) -> None:
    """After it, the loop can still run what saves and closes."""
    ended = []

    async def episode(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    async def play() -> None:
        tasks.append(asyncio.create_task(episode(2)))  # no one waits for it
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
        await asyncio.gather(episode(0), episode(1))

    def use() -> str:
        stages = Stages(60, tmp_path, Display("train", 1, 0))
        stages.install_handlers()
        try:
            with make_runner() as stages.loop:
                runner = stages.loop
                with pytest.raises(Stop) as stop, stages.stage("gen"):
                    runner.run(play())
                assert (stop.value.status, stop.value.save) == (130, True)
                assert sorted(ended) == [0, 1]
                text = runner.run(asyncio.sleep(0.01, "saved"))
                stages.begin_shutdown()
                return text
        finally:
            stages.restore_handlers()

    tasks: list[asyncio.Task] = []
    assert call_in_loop(use) == "saved"
    assert sorted(ended) == [0, 1, 2]


def test_a_run_in_a_thread_changes_no_signal(tmp_path: Path) -> None:
    """SIGALRM would end the process, because Python handles signals in its main thread only."""

    def use() -> float:
        stages = Stages(60, tmp_path, Display("train", 1, 0))
        stages.install_handlers()
        with make_runner() as stages.loop:
            with stages.stage("gen"):
                stages.record_progress()
                assert stages.loop.run(asyncio.sleep(0.01, "done")) == "done"
                stages.report_lost("the raylet is gone")
                alarm = signal.getitimer(signal.ITIMER_REAL)[0]
            with pytest.raises(Stop, match="stage ref: the raylet is gone"), stages.stage("ref"):
                raise AssertionError("the stage has begun")
            stages.begin_shutdown()
        stages.restore_handlers()
        return alarm

    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(signum) for signum in signums]
    assert call_in_thread(use) == 0.0
    assert [signal.getsignal(signum) for signum in signums] == before
