"""An event loop for the coroutines of a run, also in a notebook, whose thread is busy with a loop.

asyncio.Runner works in every thread, but not while another event loop runs in it. A notebook and
`asyncio.run` keep one running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from kit.engine.interfaces import EventLoop

SIGNAL_CHECK_S = 0.5
CANCEL_TIMEOUT_S = 5.0  # for interrupted work to end
T = TypeVar("T")


class ThreadRunner:
    """The methods of asyncio.Runner, with the event loop in another thread.

    That thread lasts until the end of the block, since the kernel may end a process together with
    the thread that started it. As in asyncio.Runner, the loop runs only during `run`.
    """

    def __enter__(self) -> ThreadRunner:
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.thread = ThreadPoolExecutor(1, "event-loop")
        self._wait_for_thread()  # starts it: a signal must not interrupt that during `run`
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.submit(self.runner.close).result()
        self.thread.shutdown()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.runner.get_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it. If a signal ends the wait, cancel the coroutine."""
        loop = self.get_loop()
        tasks: list[asyncio.Task[T]] = []

        def run_in_thread() -> T:
            tasks.append(loop.create_task(work))
            return loop.run_until_complete(tasks[0])

        def cancel() -> None:
            for task in tasks:
                task.cancel()  # no effect if it has ended

        try:
            future = self.thread.submit(run_in_thread)
            # If the kernel gives a signal to the other thread, it does not end a wait of this one.
            while not wait([future], SIGNAL_CHECK_S).done:
                pass
            return future.result()
        except BaseException:
            loop.call_soon_threadsafe(cancel)
            with contextlib.suppress(TimeoutError):
                self._wait_for_thread(CANCEL_TIMEOUT_S)
            raise

    def _wait_for_thread(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has done all earlier work. Raises TimeoutError."""
        self.thread.submit(bool).result(timeout_s)


def make_runner() -> EventLoop:
    """Return a runner that works in this thread."""
    if get_running_loop():
        return ThreadRunner()
    return asyncio.Runner(loop_factory=asyncio.new_event_loop)


def get_running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
