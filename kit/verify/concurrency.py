"""Adaptive limits of concurrent calls to Gym servers, for `gym.concurrency: auto`.

A limit grows while more concurrent calls do not slow each other down. Each path of a server
(/verify, /seed_session, a tool) has a separate limit:

1. It starts at the number of cores, but at most START_LIMIT.
2. Latencies are collected in rounds of at least MIN_ROUND calls. A call counts only if all slots
   are in use when it ends.
3. The baseline is the lowest median so far. If the median of a round is below twice the baseline,
   the limit grows by half, up to MAX_LIMIT. Otherwise it is halved.
4. If the next round is still slow, concurrency was not the cause: the tasks take longer now. The
   median of that round becomes the baseline.

/run is an exception: its latency is that of a whole episode. Its limit is always MAX_LIMIT. If
several processes call the same servers, each gets an equal share of all limits.

Protects: rewards, because an overloaded server answers 0 for responses that it did not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Literal

from gym_client import Limit

MAX_LIMIT = 256  # calls
START_LIMIT = 16
MIN_ROUND = 32
SLOWDOWN = 2.0  # a round is slow from this multiple of the baseline
STILL_SLOW = 0.75  # still slow: the median is above this share of the last slow median


class ConcurrencyLimit:
    """The limit of concurrent calls to one path of one server."""

    def __init__(self, limit: int, max_limit: int = MAX_LIMIT):
        self.limit = limit
        self.max_limit = max_limit
        self.slots = limit  # free and used slots; adjusted to `limit` when calls end
        self._free = asyncio.Semaphore(limit)
        self._latencies: list[float] = []  # of this round, in seconds
        self._round_began = 0.0  # by the clock of the event loop
        self._baseline_s = math.inf
        self._slow_median_s = math.inf  # of the last round, if it was slow

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot, and hold it during one call."""
        await self._free.acquire()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            yield
        finally:
            if began >= self._round_began and self._free.locked():
                self.record_latency(clock() - began, clock())
            self.slots -= 1
            while self.slots < self.limit:
                self.slots += 1
                self._free.release()

    def record_latency(self, seconds: float, now: float) -> None:
        """Add the latency of a call; at the end of a round, adapt the limit.

        now: by the clock of the event loop, in seconds.
        """
        self._latencies.append(seconds)
        if len(self._latencies) < max(MIN_ROUND, 2 * self.limit):
            return
        median_s = statistics.median(self._latencies)
        self._latencies = []
        self._round_began = now
        if median_s > STILL_SLOW * self._slow_median_s:
            self._baseline_s = median_s
        is_fast = median_s < SLOWDOWN * self._baseline_s
        self._baseline_s = min(median_s, self._baseline_s)
        if is_fast:
            self._slow_median_s = math.inf
            self.limit = min(self.max_limit, self.limit + (self.limit + 1) // 2)
        else:
            self._slow_median_s = median_s
            self.limit = max(1, self.limit // 2)


class ConcurrencyLimits:
    """The adaptive limits of all servers. gym_client calls it with (server, path) to get a slot.

    share: the number of processes that share the limits.
    """

    def __init__(self, share: int = 1) -> None:
        self.limits: dict[tuple[str, str], ConcurrencyLimit] = {}
        self.start_limit = max(1, min(START_LIMIT, os.cpu_count() or 1) // share)
        self.max_limit = max(1, MAX_LIMIT // share)

    def __call__(self, server: str, path: str) -> AbstractAsyncContextManager[None]:
        if (server, path) not in self.limits:
            start = self.max_limit if path == "/run" else self.start_limit
            self.limits[server, path] = ConcurrencyLimit(start, self.max_limit)
        return self.limits[server, path].slot()

    def metrics(self) -> dict[str, float]:
        """Return verify/concurrency/<server>: the present limit of concurrent calls of /verify."""
        return {
            f"verify/concurrency/{server}": each.limit
            for (server, path), each in self.limits.items()
            if path == "/verify"
        }

    def resolve(self, limits: Mapping[str, int | Literal["auto"]]) -> Mapping[str, Limit]:
        """Return the value of gym.concurrency for gym_client.Gym: `auto` becomes this object."""
        return {"default": self} | {
            server: self if limit == "auto" else limit for server, limit in limits.items()
        }
