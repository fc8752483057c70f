"""What a run's processes are like on the nodes of a cluster that somebody else started, where they are no children of
the driver's: a small actor of Ray's on each looks, and is itself the node's heartbeat. process_monitor.py asks it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kit.extras.supervisor.process_monitor import Seen

SILENT_S = 90.0  # without an answer, a node hangs, or the network to it


class Lookout:
    """On a node."""

    def look(self, node: str, pids: Sequence[int]) -> list[Seen]:
        """Those processes, and all that they have started; nothing of one that is gone."""
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                for one in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        found.append(Seen(node, one.pid, (one.cmdline() or [""])[0], one.status()))
        return found


class Lookouts:
    """One on every node that a job's actors are on."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}  # a node's id -> its Lookout
        self.asked: dict[str, tuple[Any, float]] = {}  # a node's id -> what it was asked, and when
        self.told: dict[str, list[Seen]] = {}  # a node's id -> what it said last

    def look(self, actors: Mapping[str, Mapping[str, Any]]) -> Iterator[Seen]:
        """What each said last, which is not waited for. actors: Ray's records. Raises TimeoutError naming a node that
        says nothing for SILENT_S."""
        records = [actor for actor in actors.values() if actor["State"] == "ALIVE"]
        alive = [
            (actor["Address"]["NodeID"], actor["Address"]["IPAddress"], actor["Pid"])
            for actor in records
        ]
        for node, address in {(node, address) for node, address, _ in alive}:
            question, since = self.asked.get(node, (None, 0.0))
            if question and not ray.wait([question], timeout=0)[0]:
                if time.monotonic() > since + SILENT_S:
                    raise TimeoutError(
                        f"the node {address} has not answered for {SILENT_S:g} s: hung, or cut off"
                    )
            else:
                try:
                    self.told[node] = ray.get(question) if question else []
                except (
                    ray.exceptions.RayError
                ):  # with its node, as Ray will tell; or alone, for another
                    self.of.pop(node)
                pids = [pid for place, _, pid in alive if place == node]
                self.asked[node] = self._at(node).look.remote(address, pids), time.monotonic()
            yield from self.told.get(node, ())

    def _at(self, node: str) -> Any:
        if node not in self.of:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            self.of[node] = (
                ray.remote(Lookout).options(num_cpus=0, scheduling_strategy=place).remote()
            )
        return self.of[node]
