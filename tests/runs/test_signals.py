"""Tests how signals, timeouts and lost processes stop a run. No test here needs Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kit.errors import Stop
from kit.runs.run import Run
from tests.helpers.recipes import CLEAN_ENV, ROOT, load


@pytest.fixture
def run(workspace, tmp_path, monkeypatch):
    """A run in an empty folder. Also asserts that signal handlers and variables are restored."""
    monkeypatch.chdir(tmp_path)
    recipe, _ = load(workspace, "trainer.stage_timeout_s=60")
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

    run.stages.stop_signal = 0
    with (
        pytest.raises(Stop) as caught,
        run.stages.save_on_stop(lambda: saved.append(2)),
        run.stage("gen"),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        done.append("never")
    assert done == ["update", "sync"] and saved == [1, 2] and caught.value.status == 130


def test_the_console_explains_the_first_signal(run, capsys):
    with run.stage("save_checkpoint"):
        os.kill(os.getpid(), signal.SIGINT)
    text = capsys.readouterr().out.replace("\n", " ")
    assert "SIGINT: saving and exiting. Press Ctrl-C again to exit immediately." in text


def test_a_run_in_the_background_of_a_shell_ignores_sigint(workspace, tmp_path, monkeypatch):
    """The shell starts it with SIGINT ignored. SIGTERM still stops it."""
    monkeypatch.chdir(tmp_path)
    recipe, _ = load(workspace)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Run(recipe) as run, pytest.raises(Stop) as caught, run.stage("gen"):
            os.kill(os.getpid(), signal.SIGINT)
            assert not run.stages.stop_signal
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.status == 143 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stop_is_raised_once_if_several_tasks_wait_for_the_stopped_one(run):
    """During shutdown, asyncio raises it from the loop again for each waiting task."""

    async def wait_for(task):
        await task

    async def serve():
        stopped = asyncio.create_task(request())
        for _ in range(3):
            stopped = asyncio.create_task(wait_for(stopped))
        await stopped

    async def request():
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stop), asyncio.Runner() as loop, contextlib.ExitStack() as stack:
        run.stages.loop = loop
        stack.callback(run.stages.begin_shutdown)
        stack.callback(run.stages.begin_shutdown)
        with run.stage("start"):
            loop.run(serve())


def test_a_stage_without_progress_ends_the_run(run):
    run.stages.timeout_s = 1
    message = (
        r"Stage 'ref' made no progress for 1 s \(trainer.stage_timeout_s\). "
        'Raise it if the stage is just slow. .*See docs/troubleshooting.md, "Ray"'
    )
    with pytest.raises(Stop, match=message), run.stage("ref"):
        time.sleep(20)
    on_done = run.stages.count_episodes(3)
    with run.stage("gen"):
        for _ in range(3):  # an episode that ends is progress
            time.sleep(0.6)
            on_done(0, None)


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
    monkeypatch.setattr("kit.runs.stages.exit_now", lambda status, _: exits.append(status))
    with run.stage("save_checkpoint"):  # a stop waits for the end of this stage
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert exits == [] and signal.alarm(0) > 50
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
    assert exits == [130]


EXIT_NOW = """
import subprocess
from kit.runs import stages

print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
stages.exit_now(130, monitor=None)
"""


def test_an_immediate_exit_without_a_monitor_kills_all_descendants(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", EXIT_NOW],
        cwd=tmp_path,
        env=CLEAN_ENV | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 130, process.stderr
    assert not psutil.pid_exists(int(process.stdout))


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
    with (
        pytest.raises(ValueError),
        run.stages.save_on_stop(lambda: saved.append(2)),
        run.stage("update_actor"),
    ):
        raise ValueError("half done")
    with pytest.raises(ValueError), run.stages.save_on_stop(lambda: saved.append(3)):
        with run.stage("step"), run.stage("update_actor"):  # as in the training loop
            raise ValueError("half done")
    assert saved == [1]


def test_a_process_that_is_lost_between_two_stages_ends_the_next(run):
    run.stages.report_lost("the worker X died")
    with pytest.raises(Stop, match="stage ref: the worker X died"), run.stage("ref"):
        raise AssertionError("never")
