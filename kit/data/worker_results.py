"""Results that a worker process keeps until the driver takes them.

An update of verl's workers returns metrics only. verl gathers them from all ranks on each rank, and
each rank returns all of them. So tensors of every token that return as a metric grow with the
square of the number of ranks. Here each rank sends its own to the driver, once.
"""

from __future__ import annotations

import itertools
from typing import Any

import ray

kept: list[Any] = []  # of this process


def keep(result: Any) -> None:
    """Keep a result in this process."""
    kept.append(result)


def take(_worker: Any) -> list[Any]:
    """Return the results of this process, and forget them."""
    taken = list(kept)
    kept.clear()
    return taken


def fetch(group: Any) -> list[Any]:
    """Take the results of all workers of a RayWorkerGroup, in the order of their ranks."""
    calls = [worker.__ray_call__.remote(take) for worker in group.workers]
    return list(itertools.chain.from_iterable(ray.get(calls)))
