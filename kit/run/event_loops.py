"""An event loop for the coroutines of a run, also in a notebook, whose thread runs another loop.

Protects: the results of the work, from an exception of a signal handler within the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from kit.engine.interfaces import EventLoop

T = TypeVar("T")


class LoopRunner:
    """An asyncio.Runner whose work a signal handler can cancel. Its loop runs only during `run`."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.work: asyncio.Task[Any] | None = None  # while `run` waits for it

    def __enter__(self) -> LoopRunner:
        return self

    def __exit__(self, *_: object) -> None:
        with hide_running_loop():
            self.runner.close()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop."""
        return self.runner.get_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Raises asyncio.CancelledError after `cancel_work`."""

        async def run_as_task() -> T:
            self.work = asyncio.current_task()
            return await work

        try:
            with hide_running_loop():
                return self.runner.run(run_as_task())
        finally:
            self.work = None

    def cancel_work(self) -> bool:
        """Cancel the coroutine that runs, from a signal handler. Return False if none runs."""
        if not self.work or not self.work.cancel():
            return False
        self.get_loop().call_soon_threadsafe(bool)  # the loop may be waiting for an event
        return True


def make_runner() -> LoopRunner:
    """Return a runner that works in this thread."""
    return LoopRunner()


@contextlib.contextmanager
def hide_running_loop() -> Iterator[None]:
    """Let another event loop run in the block, while the one of a notebook waits for its cell."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


def cancel_all(runner: EventLoop) -> None:
    """Cancel all tasks of an event loop: the episodes that a stop has interrupted."""
    while True:
        try:
            runner.run(_cancel_tasks())
            return
        except KeyboardInterrupt:  # asyncio raises a task's Stop again for each task that awaits it
            pass


async def _cancel_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
