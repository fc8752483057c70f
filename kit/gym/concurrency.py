"""How many calls a Gym server gets at once, where `gym.concurrency` is `auto`: as many as do not slow each other down.

Each path of a server (/verify, /seed_session, a tool) has a limit of its own, which begins with the cores of this
machine, BEGIN at most (of several processes that ask, each has a share of that and of MOST). Calls that found every
place taken are looked at in rounds, of at least ROUND: where their median time is under twice that of the best round,
the limit grows by half, up to MOST; else it falls to half. If half as many then take as long, it was not their number:
the tasks take longer now, and this round is the best one. An agent's call (/run) is an episode, as long as its answers
are, and is not measured: it gets MOST.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

MOST, BEGIN, ROUND = 256, 16, 32  # calls


class Measured:
    """Places for calls of one kind to one server: `limit` of them, by the rule above."""

    def __init__(self, limit: int, most: int = MOST):
        self.limit = self.given = limit
        self.most = most
        self.free, self.round = asyncio.Semaphore(limit), list[float]()
        self.best, self.slow, self.since = (
            math.inf,
            math.inf,
            0.0,
        )  # seconds of rounds; when the present one began

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """For the time of one call, in its turn."""
        await self.free.acquire()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            yield
        finally:
            if began >= self.since and self.free.locked():
                self.look(clock() - began, clock())
            self.given -= 1
            while self.given < self.limit:
                self.given += 1
                self.free.release()

    def look(self, seconds: float, now: float) -> None:
        """A call took so long, with every place taken."""
        self.round.append(seconds)
        if len(self.round) < max(ROUND, 2 * self.limit):
            return
        took, self.round, self.since = statistics.median(self.round), [], now
        if took > 0.75 * self.slow:
            self.best = took
        fast = took < 2 * self.best
        self.best, self.slow = min(took, self.best), math.inf if fast else took
        self.limit = (
            min(self.most, self.limit + (self.limit + 1) // 2) if fast else max(1, self.limit // 2)
        )


class Places:
    """Those of all servers that are measured, as gym_client.Gym asks for them: `places(server, path)`."""

    def __init__(self, share: int = 1) -> None:
        self.of: dict[tuple[str, str], Measured] = {}
        self.begin = max(1, min(BEGIN, os.cpu_count() or 1) // share)
        self.most = max(1, MOST // share)

    def __call__(self, server: str, path: str) -> AbstractAsyncContextManager[None]:
        if (server, path) not in self.of:
            self.of[server, path] = Measured(self.most if path == "/run" else self.begin, self.most)
        return self.of[server, path].place()

    def metrics(self) -> dict[str, float]:
        """verify/concurrency/<server>: verdicts that it gets at once now."""
        return {
            f"verify/concurrency/{name}": each.limit
            for (name, path), each in self.of.items()
            if path == "/verify"
        }

    def limits(self, concurrency: Any) -> Any:
        """gym.concurrency as gym_client.Gym takes it: `auto` becomes these places."""
        named = concurrency if isinstance(concurrency, dict) else {"default": concurrency}
        return {
            name: self if limit == "auto" else limit
            for name, limit in ({"default": "auto"} | named).items()
        }
