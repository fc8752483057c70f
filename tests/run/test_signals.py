"""Tests how signals, timeouts and lost processes stop a run, also in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.data.episode import Episode
from kit.errors import Stop
from kit.run.console import Display
from kit.run.event_loops import make_runner
from kit.run.run import Run
from kit.run.stages import Stages
from tests.helpers.recipes import load


@pytest.fixture
def run(workspace, tmp_path, monkeypatch):
    """Yield a run in an empty folder. Assert that it restores signal handlers and variables."""
    monkeypatch.chdir(tmp_path)
    recipe = load(workspace, "trainer.stage_timeout_s=60").recipe
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    handlers = {signum: signal.getsignal(signum) for signum in signums}
    with Run(recipe) as new_run:
        yield new_run
    assert handlers == {signum: signal.getsignal(signum) for signum in signums}
    assert "TENSORBOARD_DIR" not in os.environ  # a later run of this process has another folder


def test_a_signal_interrupts_sampling_but_lets_an_update_finish(run):
    saved = []
    done = []
    with pytest.raises(Stop) as caught, run.stages.save_on_stop(lambda: saved.append(1)):
        with run.stage("update_actor"):
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 50  # the stage's timeout, unchanged
            done.append("update")
        with run.stage("update_weights"):
            done.append("sync")
        with run.stage("gen"):
            done.append("never")
    assert done == ["update", "sync"] and saved == [1]
    assert (caught.value.status, str(caught.value)) == (143, "interrupted")


def test_a_stage_without_progress_ends_the_run(run):
    run.stages.timeout_s = 1
    on_done = run.stages.count_episodes(3)
    with run.stage("gen"):
        for _ in range(3):  # an episode that ends is progress
            time.sleep(0.6)
            on_done(0, Episode("a:1", "0/0", "s", []))
    with pytest.raises(Stop, match="Stage 'ref' made no progress for 1 s"), run.stage("ref"):
        time.sleep(20)


def test_nothing_catches_a_stop(run):
    """Ray turns the exception of a signal handler into a new KeyboardInterrupt."""
    with pytest.raises(Stop, match="lost"), run.stage("gen"):
        try:
            run.stages.lost_process = "something is lost"
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(5)
        except Exception:
            raise AssertionError("a Stop is not an Exception") from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as ray.get does


def test_a_copy_of_a_signal_within_a_second_is_ignored(run, monkeypatch):
    """A wrapper may forward a signal that the terminal sends to the whole group."""
    exits: list[int] = []
    monkeypatch.setattr("kit.run.stages.exit_now", lambda status, _: exits.append(status))
    with run.stage("save_checkpoint"):  # a stop waits for the end of this stage
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert exits == [] and signal.alarm(0) > 50
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
    assert exits == [130]


def test_an_error_outside_an_update_saves_a_checkpoint(run):
    """An error inside an update does not, because the update is incomplete."""
    saved: list[int] = []
    with (
        pytest.raises(ValueError),
        run.stages.save_on_stop(lambda: saved.append(1)),
        run.stage("gen"),
    ):
        raise ValueError("of a reward")
    assert saved == [1]
    with pytest.raises(ValueError), run.stages.save_on_stop(lambda: saved.append(2)):
        with run.stage("step"), run.stage("update_actor"):  # as in the training loop
            raise ValueError("half done")
    assert saved == [1]


# --- in an event loop ----------------------------------------------------------------------------


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
    """Yield stages with an event loop. Their `begin_shutdown` waits at most 5 s."""

    def exit_now(status, _monitor):
        raise SystemExit(f"exit_now({status})")

    monkeypatch.setattr("kit.run.stages.SHUTDOWN_TIMEOUT_S", 5)
    monkeypatch.setattr("kit.run.stages.exit_now", exit_now)
    new_stages = Stages(60, tmp_path, Display("train", 1, 0))
    with make_runner() as new_stages.loop:
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


def test_a_call_that_blocks_the_event_loop_does_not_block_the_stop(stages, monkeypatch):
    monkeypatch.setattr("kit.run.stages.BLOCKED_LOOP_S", 2)
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


def test_a_stop_in_the_last_round_of_the_work_does_not_stop_later_work(stages):
    """The work ends in the round in which it is canceled."""
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


# --- a notebook ----------------------------------------------------------------------------------


def test_a_stop_in_a_notebook_cancels_the_work(tmp_path: Path) -> None:
    """After it, the loop can still run what saves and closes, and then the notebook's can."""
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

    async def cell() -> str:
        result = use()
        return result + await asyncio.sleep(0.01, " and more")  # the notebook's loop continues

    tasks: list[asyncio.Task] = []
    assert asyncio.run(cell()) == "saved and more"
    assert sorted(ended) == [0, 1, 2]
