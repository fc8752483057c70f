"""The stages of a run: time them, and stop the run in order.

A run stops for a stage timeout, Ctrl-C and SIGTERM, or a lost process.

Protects: checkpoints and workers, from a stop in the middle of an update or a wait without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from kit.data.episode import Episode
from kit.engine.interfaces import EventLoop
from kit.errors import RunError, Stop
from kit.run import log_files, processes
from kit.run.console import Display, say
from kit.run.event_loops import LoopRunner, cancel_all

if TYPE_CHECKING:
    from signal import _HANDLER  # what signal.signal sets and returns


PEER_LOSS_S = 30  # seconds until Ray notices that a node is lost
SHUTDOWN_TIMEOUT_S = 60  # seconds for the processes to end, before they are killed
BLOCKED_LOOP_S = 5  # seconds for the canceled work of an event loop to end
SAME_SIGNAL_S = 1.0  # a second signal within this time is a copy of the first
# stages that finish before a signal stops the run, since half an update is useless
UNINTERRUPTIBLE = ("update_critic", "update_actor", "update_weights", "save_checkpoint")
OUTER_STAGE = "step"  # contains the other stages; it is only timed
RESUME_HINT = "Rerun the same command to resume from the last checkpoint"
EXPORT_HINT = "Rerun the same command to export the model"


class Monitor(Protocol):
    """Watches the processes of a run, and removes them and their folders (an optional feature)."""

    def register_folder(self, folder: str) -> None: ...

    def stop_watching(self) -> None: ...

    def kill_all(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class StopState:
    """Whether a run is running (all values are the defaults), stopping or closing.

    reason: the exception that ends the run; the next stage raises it if this one cannot.
    since: time.monotonic() of the reason. is_canceling: the work of the event loop was canceled,
    and has not ended yet. is_closing: the run's processes are ending.
    """

    reason: Stop | None = None
    since: float = 0.0
    is_canceling: bool = False
    is_closing: bool = False

    def ends(self, stage: str) -> bool:
        """Return whether the run must stop in this stage. A signal waits for the end of an update.

        After a loss or a timeout, the update would not end, and cannot be saved.
        """
        if self.reason is None:
            return False
        return not self.reason.save or stage not in UNINTERRUPTIBLE


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
        self.stop_state = StopState()
        self.signal_at = 0.0  # time.monotonic() of the first Ctrl-C or SIGTERM
        self.lost_process = ""  # a message about it, from any thread
        self.is_complete = False  # the last step is done; what remains is the export
        self.monitor: Monitor | None = None
        self.loop: EventLoop | None = None
        self.previous_handlers: dict[int, _HANDLER] = {}  # by signal

    # --- signals ---

    def install_handlers(self) -> None:
        """Handle SIGINT, SIGTERM and SIGALRM.

        Call it again after ray.init, which installs a SIGTERM handler of Ray.
        """
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            previous = signal.getsignal(signum)
            self.previous_handlers.setdefault(signum, previous)
            if signum == signal.SIGALRM:
                signal.signal(signum, self.handle_alarm)
            # A shell starts a command in the background (&) with SIGINT ignored: keep that.
            elif previous is not signal.SIG_IGN:
                signal.signal(signum, self.handle_stop_signal)

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers: a notebook continues after the run."""
        signal.alarm(0)
        for signum, handler in self.previous_handlers.items():
            signal.signal(signum, handler)

    def handle_stop_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Handle Ctrl-C or SIGTERM: the first saves and exits, the second exits immediately."""
        if self.signal_at:
            # A wrapper may forward a signal that the terminal sends to the whole group.
            if time.monotonic() >= self.signal_at + SAME_SIGNAL_S:
                exit_now(128 + signum, self.monitor)
            return
        self.signal_at = time.monotonic()
        name = signal.Signals(signum).name
        repeat = "Press Ctrl-C" if signum == signal.SIGINT else f"Send {name}"
        say(f"{name}: saving and exiting. {repeat} again to exit immediately.")
        self._stop(Stop("interrupted", 128 + signum, save=True))

    def handle_alarm(self, *_: object) -> None:
        """Handle SIGALRM: a timeout has passed, or `report_lost` was called."""
        state = self.stop_state
        if state.is_closing:
            self._exit_after_timeout()
        if not self.current_stage:
            return  # the next stage checks `lost_process`
        if state.is_canceling and state.reason:
            if time.monotonic() > state.since + BLOCKED_LOOP_S - 1:
                signal.alarm(BLOCKED_LOOP_S)  # again, in case something catches this exception
                raise state.reason
            return
        message = f"stage {self.current_stage}: {self.lost_process}. {RESUME_HINT}."
        if not self.lost_process:
            newest = log_files.list_worker_logs(self.logs)
            message = (
                f"Stage '{self.current_stage}' made no progress for {self.timeout_s:g} s "
                "(trainer.stage_timeout_s). Raise it if the stage is just slow. "
                f"{log_files.describe_first_tail(newest, self.logs)}."
            )
        self._stop(Stop(f'{message} See docs/troubleshooting.md, "Ray".'))

    def report_lost(self, message: str) -> None:
        """Stop the run for a lost process. Can be called from any thread."""
        self.lost_process = message
        if self.current_stage:
            os.kill(os.getpid(), signal.SIGALRM)

    # --- stopping ---

    def _stop(self, reason: Stop) -> None:
        """Stop this stage: raise `reason`, or cancel what the event loop runs. Then `stage` raises.

        If this stage must not be interrupted, the next one stops. While canceled work ends, the
        first reason stays, since it is the cause.

        Raising inside a loop is not safe. The exception of a signal handler may replace a callback
        that the loop has already taken from its queue. The task that waits for this callback could
        then neither end nor be canceled. So it is raised there only if the work blocks the loop.
        """
        state = self.stop_state
        if state.is_canceling:
            return
        state = dataclasses.replace(state, reason=reason, since=time.monotonic())
        self.stop_state = state
        if not self.current_stage or not state.ends(self.current_stage):
            return
        if not isinstance(self.loop, LoopRunner) or not self.loop.cancel_work():
            raise reason
        self.stop_state = dataclasses.replace(state, is_canceling=True)
        signal.alarm(BLOCKED_LOOP_S)

    def stop_if_requested(self) -> None:
        """Raise Stop if there is a reason to stop the run."""
        if self.stop_state.reason:
            raise self.stop_state.reason

    def record_progress(self) -> None:
        """Restart the timeout of the current stage (trainer.stage_timeout_s)."""
        self.last_progress_at = time.monotonic()
        if self.current_stage and not self.stop_state.is_canceling:
            signal.alarm(max(1, round(self.timeout_s)))

    # --- shutdown ---

    def begin_shutdown(self) -> None:
        """Prepare to stop the run's processes within SHUTDOWN_TIMEOUT_S. Cancel all tasks."""
        self.current_stage = ""
        self.stop_state = dataclasses.replace(self.stop_state, is_closing=True)
        signal.alarm(SHUTDOWN_TIMEOUT_S)
        if self.monitor:
            self.monitor.stop_watching()
        loop = self.loop
        self.loop = None
        if loop:
            cancel_all(loop)

    def end_shutdown(self) -> None:
        """End the shutdown: the processes have ended, and timeouts now apply to the export."""
        self.stop_state = dataclasses.replace(self.stop_state, is_closing=False)
        self.monitor = None

    def _exit_after_timeout(self) -> None:
        """Print the error that ended the run, which nothing else will print, and exit."""
        error = sys.exc_info()[1]
        cause = f"{str(error).rstrip('.')}; " if error else ""
        message = f"{cause}the run's processes did not end in {SHUTDOWN_TIMEOUT_S} s and are killed"
        if self.is_complete and not error:
            message += f"; {EXPORT_HINT}"
        print(f"error: {message}", file=sys.stderr)
        status = int(bool(error or self.is_complete))
        exit_now(error.status if isinstance(error, Stop) else status, self.monitor)

    # --- stages ---

    def begin_step(self, step: int) -> None:
        """Clear the timings for a new step. Raises Stop if there is a reason to stop the run."""
        self.stop_if_requested()
        self.timing.clear()
        self.display.set_progress(step - 1)

    def timings(self) -> dict[str, float]:
        """Return the seconds of the step's stages, as metrics."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.timing.items()}

    def count_episodes(self, total: int) -> Callable[[int, Episode], None]:
        """Return a callback for ended episodes. It shows how many of `total` have ended."""
        statuses = Counter[str]()  # {status: ended episodes}
        self.open_episodes = total
        self.display.show_episodes(0, 0, total)

        def on_done(_index: int, episode: Episode) -> None:
            statuses[episode.status] += 1
            done = statuses.total()
            self.open_episodes = total - done
            self.record_progress()
            if not self.has_episode:
                self.has_episode = True
                self.timing["first_episode"] = time.monotonic() - self.started_at
            self.display.show_episodes(done, done - statuses["ok"], total)

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
            if self.stop_state.is_canceling:  # the work ended before it was canceled
                self.stop_if_requested()
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            raise (self.stop_state.reason or error) from None
        except Exception as error:
            self._convert_error(name, error)
            raise
        finally:
            if name != OUTER_STAGE:
                signal.alarm(0)
                self.current_stage = outer
            self.stop_state = dataclasses.replace(self.stop_state, is_canceling=False)
            self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begin

    def _begin_stage(self, name: str) -> None:
        """Make a stage the current one, and start its timeout. Raises Stop if the run must stop."""
        self.current_stage = name
        if self.lost_process:
            self.handle_alarm()
        if self.stop_state.ends(name):
            self.stop_if_requested()
        self.display.show_stage(name)
        self.record_progress()

    def _convert_error(self, name: str, error: Exception) -> None:
        """Raise Stop or RunError instead of a stage's error, or return to keep the error."""
        if self.stop_state.is_canceling and self.stop_state.reason:
            say(f"stage {name} failed while the run was stopping: {error!r:.300}")
            raise self.stop_state.reason from error
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

        They do if a Gym server is lost or a reward raises an exception. They do not in the middle
        of an update, or if a worker is lost.

        save: saves, and returns the path of the last checkpoint; None if there is none.
        """
        try:
            yield
            self.stop_if_requested()
        except (Stop, Exception) as error:
            is_whole = self.failed_stage not in UNINTERRUPTIBLE and not is_ray_error(
                error.__cause__
            )
            if isinstance(error, Stop):
                is_whole = error.save
            if is_whole:
                checkpoint = save()
                say(f"Last checkpoint: {checkpoint or 'none, no step was completed'}")
            raise


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
