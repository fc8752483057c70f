"""Tests that a stop ends all tasks of a running event loop, even if the loop is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterator

import pytest

from kit.errors import Stop
from kit.runs.console import Display
from kit.runs.stages import Stages


class SignalAfterPop(deque):
    """The event loop's queue. It sends SIGTERM after it removes a callback and before its call."""

    is_armed = False

    def popleft(self):
        callback = super().popleft()
        if self.is_armed:
            self.is_armed = False
            os.kill(os.getpid(), signal.SIGTERM)
        return callback


@pytest.fixture
def stages(tmp_path, monkeypatch) -> Iterator[Stages]:
    """Stages with an event loop. Their `begin_shutdown` waits at most 5 s."""

    def exit_now(status, _monitor):
        raise SystemExit(f"exit_now({status})")

    monkeypatch.setattr("kit.runs.stages.SHUTDOWN_TIMEOUT_S", 5)
    monkeypatch.setattr("kit.runs.stages.exit_now", exit_now)
    new_stages = Stages(60, tmp_path, Display("train", 1, 0))
    with asyncio.Runner() as new_stages.loop:
        new_stages.install_handlers()
        yield new_stages
        new_stages.restore_handlers()


def test_a_stop_between_two_callbacks_lets_every_task_end(stages):
    runner = stages.loop
    loop = runner.get_loop()
    queue = loop._ready = SignalAfterPop(loop._ready)
    ended = []

    async def episode(number: int) -> None:
        try:
            await asyncio.sleep(0)
            queue.is_armed = True  # at the next callback, which resumes this episode or another one
            while True:
                await asyncio.sleep(0)
        finally:
            ended.append(number)

    async def play() -> None:
        await asyncio.gather(*(episode(number) for number in range(3)))

    with pytest.raises(Stop, match="interrupted") as stop, stages.stage("gen"):
        runner.run(play())
    assert (stop.value.status, stop.value.save) == (143, True)
    stages.begin_shutdown()
    assert sorted(ended) == [0, 1, 2]
    assert not asyncio.all_tasks(loop)


def test_a_loop_can_be_used_again_if_its_work_ended_with_the_stop(stages):
    runner = stages.loop

    async def work() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "done"

    async def more() -> str:
        await asyncio.sleep(0.01)
        return "more"

    with pytest.raises(Stop, match="interrupted"), stages.stage("gen"):
        assert runner.run(work()) == "done"
    with stages.stage("save_checkpoint"):
        assert runner.run(more()) == "more"


def test_a_call_that_blocks_the_event_loop_does_not_block_the_stop(stages, monkeypatch):
    monkeypatch.setattr("kit.runs.stages.BLOCKED_LOOP_S", 2)
    runner = stages.loop
    begin = time.monotonic()

    async def block() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    with pytest.raises(Stop, match="interrupted"), stages.stage("gen"):
        runner.run(block())
    assert 1 < time.monotonic() - begin < 10
    with contextlib.suppress(KeyboardInterrupt):
        stages.begin_shutdown()


def test_the_first_lost_process_is_reported(stages):
    """A second process is lost while the event loop is being stopped."""
    runner = stages.loop

    async def wait() -> None:
        stages.report_lost("the raylet is gone")
        stages.report_lost("a worker is gone")
        await asyncio.sleep(30)

    with pytest.raises(Stop, match="stage gen: the raylet is gone"), stages.stage("gen"):
        runner.run(wait())
    stages.begin_shutdown()


def test_a_stop_in_the_last_round_of_a_loop_does_not_stop_later_work(stages):
    """The work ends in the same round as the loop, so a callback stays in the queue."""
    runner = stages.loop
    loop = runner.get_loop()
    ended = []

    async def linger() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            ended.append("lingering")

    async def work() -> None:
        waiting.append(asyncio.create_task(linger()))
        future = loop.create_future()
        loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)
        loop.call_soon(future.set_result, None)
        await future

    waiting: list[asyncio.Task] = []
    with pytest.raises(Stop, match="interrupted"), stages.stage("gen"):
        runner.run(work())
    stages.begin_shutdown()
    assert ended == ["lingering"]
    assert runner.run(asyncio.sleep(0.01, "more")) == "more"


def test_a_stop_between_two_calls_is_raised_in_a_notebook(tmp_path, monkeypatch):
    """In a notebook, an event loop is always running. It is not the loop of the run."""

    async def cell() -> bool:
        stages = Stages(60, tmp_path, Display("train", 1, 0))
        stages.stop_signal = signal.SIGTERM
        with pytest.raises(Stop, match="interrupted"), stages.stage("gen"):
            raise AssertionError("the stage has begun")
        return stages.loop_stop is None

    assert asyncio.run(cell())


def test_a_failure_during_a_stop_is_printed(stages, monkeypatch):
    lines = []
    monkeypatch.setattr("kit.runs.stages.say", lines.append)

    async def fail() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("no space")

    with pytest.raises(Stop, match="interrupted") as stop, stages.stage("gen"):
        stages.loop.run(fail())
    assert isinstance(stop.value.__cause__, ValueError)
    assert lines[-1] == "stage gen failed while the run was stopping: ValueError('no space')"


def test_a_signal_after_a_loss_does_not_hide_it(stages):
    async def wait() -> None:
        stages.report_lost("the raylet is gone")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

    with pytest.raises(Stop, match="the raylet is gone") as stop, stages.stage("gen"):
        stages.loop.run(wait())
    assert not stop.value.save
    stages.begin_shutdown()


def test_a_shutdown_that_takes_too_long_says_that_the_export_is_missing(stages, capsys):
    stages.is_export_pending = True
    stages.begin_shutdown()
    with pytest.raises(SystemExit, match=r"exit_now\(1\)"):
        stages.handle_alarm()
    expected = "the run's processes did not end in 5 s and are killed"
    hint = "Rerun the same command to export the model"
    assert capsys.readouterr().err == f"error: {expected}; {hint}\n"
