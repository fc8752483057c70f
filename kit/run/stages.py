"""The stages of a run: time them, and stop the run in order.

A run stops for a stage timeout, Ctrl-C and SIGTERM, or a lost process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from kit.data.episode import Episode
from kit.engine.interfaces import EventLoop
from kit.errors import RunError, Stop
from kit.run import log_files, processes
from kit.run.console import Display, say
from kit.run.event_loops import get_running_loop

if TYPE_CHECKING:
    from signal import _HANDLER  # what signal.signal sets and returns


PEER_LOSS_S = 30  # seconds until Ray notices that a node is lost
SHUTDOWN_TIMEOUT_S = 60  # seconds for the processes to end, before they are killed
BLOCKED_LOOP_S = 5  # seconds for a stopped event loop to return
SAME_SIGNAL_S = 1.0  # a second signal within this time is a copy of the first
# stages that finish before the run stops, since half an update is useless
UNINTERRUPTIBLE = ("update_critic", "update_actor", "update_weights", "save_checkpoint")
OUTER_STAGE = "step"  # contains the other stages; it is only timed
RESUME_HINT = "Rerun the same command to resume from the last checkpoint"
EXPORT_HINT = "Rerun the same command to export the model"


class Monitor(Protocol):
    """Watches the processes of a run (an optional feature)."""

    def register_folder(self, folder: str) -> None:
        """Delete a folder when the run ends."""

    def stop_watching(self) -> None:
        """Report no process from now on."""

    def kill_all(self) -> None:
        """Kill all processes of the run."""


class Stages:
    """Times the stages of a run, and stops the run if one hangs, a signal comes or a process dies.

    All of these stop the run by a signal, so a run needs the main thread of Python.

    timeout_s: trainer.stage_timeout_s. logs: the folder of the processes' logs.
    """

    def __init__(self, timeout_s: float, logs: Path, display: Display):
        self.timeout_s = timeout_s
        self.logs = logs
        self.display = display
        self.started_at = time.monotonic()
        self.has_episode = False  # whether an episode has ended
        self.open_episodes = 0  # of the current batch
        self.timing: dict[str, float] = {}  # seconds by stage, of the current step
        self.current_stage = ""
        self.failed_stage = ""
        self.last_progress_at = time.monotonic()  # of the current stage
        self.stop_signal = 0  # the signal that requested a stop
        self.stop_signal_at = 0.0
        self.lost_process = ""  # a message about it
        self.is_closing = False  # between begin_shutdown and end_shutdown
        self.is_export_pending = False  # the steps are done, and the export is still to come
        self.ending: Stop | None = None  # the exception that ends the run
        self.loop_stop: asyncio.Handle | None = None  # a call that stops this thread's event loop
        self.loop_stop_at = 0.0  # time of that call
        self.notebook_loop = get_running_loop()  # a notebook calls all of this inside its loop
        self.monitor: Monitor | None = None
        self.loop: EventLoop | None = None
        self.previous_handlers: dict[int, _HANDLER] = {}  # by signal

    # --- signals ---

    def install_handlers(self) -> None:
        """Handle SIGINT, SIGTERM and SIGALRM.

        Call it again after ray.init, which installs a SIGTERM handler of Ray.
        """
        handlers: dict[signal.Signals, _HANDLER] = {
            signal.SIGINT: self.handle_stop_signal,
            signal.SIGTERM: self.handle_stop_signal,
            signal.SIGALRM: self.handle_alarm,
        }
        for signum, handler in handlers.items():
            previous = signal.getsignal(signum)
            # A shell starts a command in the background (&) with SIGINT ignored: keep that.
            if signum == signal.SIGALRM or previous is not signal.SIG_IGN:
                signal.signal(signum, handler)
            self.previous_handlers.setdefault(signum, previous)

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers: a notebook continues after the run."""
        signal.alarm(0)
        for signum, handler in self.previous_handlers.items():
            signal.signal(signum, handler)

    def handle_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Handle Ctrl-C or SIGTERM: the first saves and exits, the second exits immediately."""
        if self.stop_signal:
            # A wrapper may forward a signal that the terminal sends to the whole group.
            if time.monotonic() < self.stop_signal_at + SAME_SIGNAL_S:
                return
            exit_now(128 + signum, self.monitor)
        self.stop_signal_at = time.monotonic()
        self.stop_signal = signum
        name = signal.Signals(signum).name
        repeat = "Press Ctrl-C" if signum == signal.SIGINT else f"Send {name}"
        say(f"{name}: saving and exiting. {repeat} again to exit immediately.")
        if self.current_stage and self.current_stage not in UNINTERRUPTIBLE:
            self.stop_if_requested()

    def stop_if_requested(self) -> None:
        """Stop the run if a stop signal has arrived."""
        if self.stop_signal:
            self.stop(Stop("interrupted", 128 + self.stop_signal, save=True))

    def handle_alarm(self, *_: object) -> None:
        """Handle SIGALRM: a timeout has passed, or `report_lost` was called."""
        if self.is_closing:
            self._exit_after_timeout()
        if not self.current_stage:
            return  # the next stage checks `lost_process`
        if self.loop_stop:
            self._raise_in_blocked_loop()
            return
        message = f"stage {self.current_stage}: {self.lost_process}. {RESUME_HINT}."
        if not self.lost_process:
            message = (
                f"Stage '{self.current_stage}' made no progress for {self.timeout_s:g} s "
                "(trainer.stage_timeout_s). Raise it if the stage is just slow. "
                f"{log_files.read_newest_log_tail(self.logs)}."
            )
        self.stop(Stop(f'{message} See docs/troubleshooting.md, "Ray".'))

    def _raise_in_blocked_loop(self) -> None:
        """Raise Stop if a call inside the event loop does not return, so the loop cannot stop."""
        if self.ending and time.monotonic() > self.loop_stop_at + BLOCKED_LOOP_S - 1:
            signal.alarm(BLOCKED_LOOP_S)  # again, in case something catches this exception
            raise self.ending

    # --- stopping ---

    def stop(self, ending: Stop) -> None:
        """Raise `ending`, or stop this thread's event loop; then `stage` raises it.

        Only the first call has an effect, since the first reason is the cause.

        Raising inside a loop is not safe. The exception of a signal handler may replace a callback
        that the loop has already taken from its queue. The task that waits for this callback could
        then neither end nor be cancelled.
        """
        if self.loop_stop:
            return
        self.ending = ending
        loop = get_running_loop()
        if loop is None or loop is self.notebook_loop:
            raise self.ending
        self.loop_stop_at = time.monotonic()
        self.loop_stop = loop.call_soon_threadsafe(loop.stop)
        signal.alarm(BLOCKED_LOOP_S)

    def _exit_after_timeout(self) -> None:
        """Print the error that ended the run, which nothing else will print, and exit."""
        error = sys.exc_info()[1]
        cause = f"{str(error).rstrip('.')}; " if error else ""
        message = f"{cause}the run's processes did not end in {SHUTDOWN_TIMEOUT_S} s and are killed"
        if self.is_export_pending and not error:
            message += f"; {EXPORT_HINT}"
        print(f"error: {message}", file=sys.stderr)
        if isinstance(error, Stop):
            status = error.status
        else:
            status = int(bool(error or self.is_export_pending))
        exit_now(status, self.monitor)

    def report_lost(self, message: str) -> None:
        """Stop the run for a lost process. Can be called from any thread."""
        self.lost_process = message
        if self.current_stage:
            os.kill(os.getpid(), signal.SIGALRM)

    def record_progress(self) -> None:
        """Restart the timeout of the current stage (trainer.stage_timeout_s)."""
        self.last_progress_at = time.monotonic()
        if self.current_stage and not self.loop_stop:
            signal.alarm(max(1, round(self.timeout_s)))
            # Another thread may call this, while the main thread stops the loop.
            if self.loop_stop:
                signal.alarm(BLOCKED_LOOP_S)

    # --- shutdown ---

    def begin_shutdown(self) -> None:
        """Prepare to stop the run's processes within SHUTDOWN_TIMEOUT_S. Cancel all tasks."""
        self.current_stage = ""
        self.is_closing = True
        signal.alarm(SHUTDOWN_TIMEOUT_S)
        if self.monitor:
            self.monitor.stop_watching()
        runner = self.loop
        self.loop = None
        if not runner:
            return
        if isinstance(runner, asyncio.Runner):
            cancel_tasks_of_stopped_loop(runner.get_loop())
        else:  # its loop is in another thread, which signals do not stop
            runner.run(cancel_tasks())

    def end_shutdown(self) -> None:
        """End the shutdown: the processes have ended, and timeouts now apply to the export."""
        self.is_closing = False
        self.is_export_pending = False
        self.monitor = None

    # --- stages ---

    def begin_step(self, step: int) -> None:
        """Clear the timings for a new step. Raises Stop if a stop signal has arrived."""
        self.stop_if_requested()
        self.timing.clear()
        self.display.set_progress(step - 1)

    def timings(self) -> dict[str, float]:
        """Seconds of the step's stages, as metrics."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.timing.items()}

    def count_episodes(self, total: int) -> Callable[[int, Episode], None]:
        """Return a callback for ended episodes. It shows how many of `total` have ended."""
        ended = itertools.count(1)
        self.open_episodes = total

        def on_done(_index: int, _episode: Episode) -> None:
            done = next(ended)
            self.open_episodes = total - done
            self.record_progress()
            if not self.has_episode:
                self.has_episode = True
                self.timing["first_episode"] = time.monotonic() - self.started_at
            self.display.show_episodes(done, total)

        return on_done

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, show it, and raise Stop if it hangs or the run must stop."""
        begin = time.perf_counter()
        outer = self.current_stage
        try:
            if name != OUTER_STAGE:
                self._begin_stage(name)
            yield
            if self.loop_stop and self.ending:  # the work ended before the event loop stopped
                raise self.ending
        except KeyboardInterrupt as error:
            raise (self.ending or error) from None
        except Exception as error:
            self._convert_error(name, error)
            raise
        finally:
            if name != OUTER_STAGE:
                signal.alarm(0)
                self.current_stage = outer
            if self.loop_stop:
                self.loop_stop.cancel()
                self.loop_stop = None
            self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begin

    def _begin_stage(self, name: str) -> None:
        """Make a stage the current one, and start its timeout. Raises Stop if the run must stop."""
        self.current_stage = name
        if self.lost_process:
            self.handle_alarm()
        if name not in UNINTERRUPTIBLE:
            self.stop_if_requested()
        self.display.show_stage(name)
        self.record_progress()

    def _convert_error(self, name: str, error: Exception) -> None:
        """Raise Stop or RunError instead of a stage's error, or return to keep the error."""
        if self.loop_stop and self.ending:
            if not (isinstance(error, RuntimeError) and "Event loop stopped" in str(error)):
                say(f"stage {name} failed while the run was stopping: {error!r:.300}")
            raise self.ending from error
        if name != OUTER_STAGE:
            self.failed_stage = name
        if not is_ray_error(error):
            return
        if isinstance(getattr(error, "cause", None), RunError):  # a worker's own message
            raise RunError(str(error.cause)) from error  # type: ignore[attr-defined]
        cause = log_files.find_root_cause(error, self.logs)
        # Other processes report a lost connection first. Wait until the monitor finds the dead one.
        if re.search("(closed|reset) by peer|NCCL", cause):
            time.sleep(PEER_LOSS_S)
        raise RunError(
            f"stage {name}: {cause}. Fix the cause. {RESUME_HINT}. See docs/troubleshooting.md."
        ) from error

    @contextlib.contextmanager
    def save_on_stop(self, save: Callable[[], Path | None]) -> Iterator[None]:
        """Save before a stop or an error leaves the block, if the workers hold complete weights.

        save: saves, and returns the path of the last checkpoint; None if there is none.
        """
        try:
            yield
            self.stop_if_requested()
        except (Stop, Exception) as error:
            if self._can_save(error):
                checkpoint = save()
                say(f"Last checkpoint: {checkpoint or 'none, no step was completed'}")
            raise

    def _can_save(self, error: BaseException) -> bool:
        """Return whether the weights are complete after this error.

        They are if a Gym server is lost or a reward raises an exception. They are not in the
        middle of an update, or if a worker is lost.
        """
        if isinstance(error, Stop):
            return error.save
        return self.failed_stage not in UNINTERRUPTIBLE and not is_ray_error(error.__cause__)


def exit_now(status: int, monitor: Monitor | None) -> None:
    """Exit immediately: kill all descendants, trackers included, and remove their files."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the monitor would report that they died
    if monitor:
        monitor.kill_all()
    else:
        processes.kill_processes({}, (), timeout_s=2.0)
    os._exit(status)


def is_ray_error(error: BaseException | None) -> bool:
    """Return whether an exception's class is defined by Ray."""
    return type(error).__module__.split(".")[0] == "ray"


async def cancel_tasks() -> None:
    """Cancel the episodes that a stop interrupted. Else they would continue during shutdown."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def cancel_tasks_of_stopped_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks that a stop may have left in the event loop of this thread."""
    # If the loop was stopped in its last round, the callback that stops it is still queued: run it.
    loop.call_soon(loop.stop)
    with contextlib.suppress(KeyboardInterrupt):
        loop.run_forever()
    cancelling = loop.create_task(cancel_tasks())
    # asyncio raises a task's KeyboardInterrupt once more for each task that waits for it.
    while not cancelling.done():
        with contextlib.suppress(KeyboardInterrupt):
            loop.run_until_complete(cancelling)
