"""What a run needs of its event loop and of the processes that run episodes.

Convenience: other event loops and processes need no other code path.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from kit.data.episode import Episode

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

    from kit.engine.sampling import EpisodeRequest, Sampling

Result = TypeVar("Result")
OnDone = Callable[[int, Episode], None]  # is called when an episode ends: (index, episode)


class EventLoop(Protocol):
    """The methods of asyncio.Runner that a run uses."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def get_loop(self) -> asyncio.AbstractEventLoop: ...

    def run(self, work: Coroutine[Any, Any, Result], /) -> Result: ...


class EpisodeWorkers(Protocol):
    """Processes that run episodes in place of the driver (inference.py)."""

    async def rollout(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_done: OnDone,
        baselines: bool = False,
    ) -> list[Episode]: ...

    def set_policy_version(self, step: int) -> None: ...

    def mark_restarted(self, server: str) -> None: ...

    def metrics(self) -> dict[str, float]: ...
