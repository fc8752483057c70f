"""What ends a run that hangs, has lost a process or was asked to stop: stages, deadlines, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kit.errors import RunError, Stop
from kit.extras.supervisor import process_monitor

PEER_S = 30  # seconds until Ray knows of a node that it is lost
END_S = 60  # seconds for the processes to end in, before they are killed
BLOCKED_S = 5  # seconds for an event loop to stop in
WHOLE = (
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
)  # stages that are not left half done
AGAIN = "The same command goes on from the last checkpoint"


class Guard:
    """A run's stages. `say` prints a line, `show` the stage under way; `timing` holds their seconds, of this step."""

    def __init__(
        self,
        config: DictConfig,
        logs: Path,
        say: Callable[[str], None],
        show: Callable[[str], None],
    ):
        self.config, self.logs, self.say, self.show = config, logs, say, show
        self.timing: dict[str, float] = {}
        self.current, self.failed, self.ends = (
            "",
            "",
            False,
        )  # the stage; that in which an error was; all is closing
        self.begun = time.monotonic()  # when the stage under way did, or last got on
        self.asked, self.asked_at, self.lost = (
            0,
            0.0,
            "",
        )  # the signal that asked to stop, when; what was lost
        self.ending: Stop | None = None
        self.stopping: asyncio.Handle | None = (
            None  # the call that stops the event loop of this thread
        )
        self.stopped_at = 0.0  # when it was made
        self.notebook_loop = running_loop()  # in which a notebook calls all of this
        self.owed = ""  # what is to be done once the processes have ended
        self.watch: process_monitor.Watch | None = None
        self.loop: Any = None  # asyncio.Runner, or kit.extras.one_step_off.Loop
        self.before: dict[int, Any] = {}  # whose signals these are: signal -> handler

    def listen(self) -> None:
        """Take the signals by which a run is stopped; again after ray.init, which takes SIGTERM for a crash."""
        handlers = {
            signal.SIGINT: self.asked_to_stop,
            signal.SIGTERM: self.asked_to_stop,
            signal.SIGALRM: self.alarmed,
        }
        for signum, handler in handlers.items():
            present = signal.getsignal(signum)
            # a shell gives a command in the background (&) an ignored SIGINT, which must stay so
            if signum == signal.SIGALRM or present is not signal.SIG_IGN:
                signal.signal(signum, handler)
            self.before.setdefault(signum, present)

    def give_back(self) -> None:
        """The signals are whose they were: a notebook goes on after the run."""
        signal.alarm(0)
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def asked_to_stop(self, signum: int, _frame: Any) -> None:
        """Ctrl-C or SIGTERM: once, to save what is done and end in order; twice, to end at once."""
        if self.asked and time.monotonic() < self.asked_at + 1.0:
            return  # once, from a wrapper that passes it on and a terminal that sends it to the whole group
        if self.asked:
            process_monitor.end_now(128 + signum, self.watch)
        self.asked, self.asked_at = signum, time.monotonic()
        self.say(
            f"{signal.Signals(signum).name}: the run saves what is done and ends; once more ends it at once"
        )
        if self.current and self.current not in WHOLE:
            self.stop_asked()

    def stop(self, why: str, status: int = 1, save: bool = False) -> None:
        """Raise Stop, or stop the event loop that runs in this thread; `stage` then raises Stop.

        An exception that a signal handler raises inside an event loop may take the place of a callback
        that the loop has already taken from its queue. The task that waits for this callback could
        then never end, and could not be cancelled either.
        """
        if self.stopping:
            return  # the first reason is the cause
        self.ending = Stop(why, status, save)
        loop = running_loop()
        if loop is None or loop is self.notebook_loop:
            raise self.ending
        self.stopping, self.stopped_at = loop.call_soon_threadsafe(loop.stop), time.monotonic()
        signal.alarm(BLOCKED_S)

    def stop_asked(self) -> None:
        """End a run that was asked to stop, between two updates, as `stop` does."""
        self.stop("interrupted", 128 + self.asked, save=True)

    def alarmed(self, *_: Any) -> None:
        """A deadline has passed, or the watch has lost a process."""
        if self.ends:  # and does not come to it: what ended the run is told here, since it will not be told again
            error = sys.exc_info()[1]
            lost = f"; {self.owed}" * bool(self.owed and not error)
            print(
                f"error: {error or 'the processes of the run'} (they did not end in {END_S} s){lost}",
                file=sys.stderr,
            )
            status = error.status if isinstance(error, Stop) else int(bool(error or self.owed))
            process_monitor.end_now(status, self.watch)
        if not self.current:
            return  # between two stages; the next one sees what is lost
        if self.stopping and self.ending:
            if (
                time.monotonic() > self.stopped_at + BLOCKED_S - 1
            ):  # a call inside the event loop does not return
                signal.alarm(BLOCKED_S)  # again, in case this exception is swallowed
                raise self.ending
            return
        where = f"stage {self.current}"
        if lost := self.lost:
            # without Ray's GCS the workers still answer, for the minute until Ray ends the driver
            save = "gcs_server" in lost and self.current not in WHOLE
            self.lost = "" if save else lost
            self.stop(f"{where}: {lost}. {AGAIN}", save=save)
            return
        seconds, last = self.config.trainer.stage_timeout_s, process_monitor.latest_words(self.logs)
        self.stop(
            f"{where} got nowhere in {seconds:g} s (trainer.stage_timeout_s); raise it if that is only slow; {last}"
        )

    def progress(self) -> None:
        """A stage that makes progress does not hang: its deadline (trainer.stage_timeout_s) starts again."""
        self.begun = time.monotonic()
        if self.current and not self.stopping:
            signal.alarm(max(1, round(self.config.trainer.stage_timeout_s)))
            if (
                self.stopping
            ):  # since it was looked at: this may be the thread of kit/extras/one_step_off.py
                signal.alarm(BLOCKED_S)

    def lose(self, what: str) -> None:
        """Called by the watch, in its thread: wake the loop, whatever it waits for."""
        self.lost = what
        if self.current:
            os.kill(os.getpid(), signal.SIGALRM)

    def end(self) -> None:
        """The processes are about to be stopped, and have END_S for it."""
        self.current, self.ends = "", True
        signal.alarm(END_S)
        if self.watch:
            self.watch.rest()
        runner, self.loop = self.loop, None
        if (
            runner and (loop := runner.get_loop()).is_running()
        ):  # in a thread of its own, which no signal stops
            runner.run(drop_tasks())
        elif runner:
            # a loop that was stopped in the round in which its work ended still has the callback that stops it
            loop.call_soon(loop.stop)
            with contextlib.suppress(KeyboardInterrupt):
                loop.run_forever()
            dropped = loop.create_task(drop_tasks())
            while (
                not dropped.done()
            ):  # who waits for a task that the stop ended has asyncio raise it once more
                with contextlib.suppress(KeyboardInterrupt):
                    loop.run_until_complete(dropped)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage into `timing` (seconds), show it, and end the run if it hangs or was asked to stop."""
        begin, inner, outer = time.perf_counter(), name != "step", self.current
        try:
            if inner:
                self.current = name
                if self.lost:
                    self.alarmed()
                if self.asked and name not in WHOLE:
                    self.stop_asked()
                self.show(name)
                self.progress()
            yield
            if self.stopping and self.ending:  # the work was done before the event loop stopped
                raise self.ending
        except KeyboardInterrupt as error:
            raise (self.ending or error) from None
        except Exception as error:
            if self.stopping and self.ending:
                if not (isinstance(error, RuntimeError) and "Event loop stopped" in str(error)):
                    self.say(f"{name} failed while it was stopped: {error!r:.300}")
                raise self.ending from error
            self.failed = name if inner else self.failed
            if type(error).__module__.split(".")[0] != "ray":
                raise
            cause = process_monitor.root_cause(error, self.logs)
            if re.search(
                "(closed|reset) by peer|NCCL", cause
            ):  # so says who lives on: the watch finds who died
                time.sleep(PEER_S)
            raise RunError(f"stage {name}: {cause}. {AGAIN}, once that is mended") from error
        finally:
            if inner:
                signal.alarm(0)
                self.current = outer
            if self.stopping:
                self.stopping.cancel()
                self.stopping = None
            self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begin

    @contextlib.contextmanager
    def saving(self, save: Callable[[], Path | None]) -> Iterator[None]:
        """Around the loop: a run that was asked to stop, or fails while the weights are whole, saves before it ends."""
        try:
            yield
            if self.asked:
                self.stop_asked()
        except (Stop, Exception) as error:
            # true of a Gym server that is gone or a reward that raises; not of half an update, or a worker that is lost
            whole = (
                self.failed not in WHOLE and type(error.__cause__).__module__.split(".")[0] != "ray"
            )
            wanted = error.save if isinstance(error, Stop) else whole
            if wanted:
                self.say(f"the last checkpoint is {save() or 'none: no step was done'}")
            raise


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def drop_tasks() -> None:
    """Cancel the episodes that a stop left half done, else they would wake up while all is closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
