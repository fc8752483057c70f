"""List a run's processes on the nodes of a cluster that the run joined.

There they are not descendants of the driver, so process_monitor.py cannot see them. A small Ray
actor on each node lists them. If it does not answer, the node hangs or is cut off.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kit.extras.supervisor.process_monitor import ProcessInfo, RemoteProcesses

ANSWER_TIMEOUT_S = 90.0


class NodeMonitor:
    """An actor on one node."""

    def list_processes(self, address: str, pids: Sequence[int]) -> list[ProcessInfo]:
        """Return these processes and all their descendants, without those that have ended."""
        processes: list[psutil.Process] = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(pid)
                processes += [root, *root.children(recursive=True)]
        infos = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                title = (process.cmdline() or [""])[0]
                infos.append(ProcessInfo(address, process.pid, title, process.status()))
        return infos


class Request(NamedTuple):
    """A call of a NodeMonitor that has not been answered."""

    answer: Any  # a Ray ObjectRef
    sent_at: float


class Node(NamedTuple):
    """A node with actors of the job."""

    node_id: str
    address: str


class NodeMonitors:
    """A NodeMonitor on each node that has actors of the job."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}  # NodeMonitor by node id
        self.requests: dict[str, Request] = {}  # the last one, by node id
        self.answers: dict[str, list[ProcessInfo]] = {}  # the latest one, by node id

    def list_processes(self, actors: Mapping[str, Mapping[str, Any]]) -> RemoteProcesses:
        """Return each node's latest answer, without waiting for a new one.

        actors: Ray's records of the job's actors. Raises TimeoutError with the address of a node
        that has not answered for ANSWER_TIMEOUT_S.
        """
        pids: dict[Node, list[int]] = {}
        for actor in actors.values():
            if actor["State"] == "ALIVE":
                node = Node(actor["Address"]["NodeID"], actor["Address"]["IPAddress"])
                pids.setdefault(node, []).append(actor["Pid"])
        processes: list[ProcessInfo] = []
        repeated: set[str] = set()
        for node, node_pids in pids.items():
            if not self._update(node, node_pids):
                repeated.add(node.address)
            processes += self.answers.get(node.node_id, ())
        return RemoteProcesses(processes, repeated)

    def _update(self, node: Node, pids: Sequence[int]) -> bool:
        """Read a node's answer if it has come, and send the next request -> whether it has come."""
        request = self.requests.get(node.node_id)
        if request and not ray.wait([request.answer], timeout=0)[0]:
            if time.monotonic() > request.sent_at + ANSWER_TIMEOUT_S:
                raise TimeoutError(
                    f"the node {node.address} has not answered for {ANSWER_TIMEOUT_S:g} s: it "
                    "hangs, or its network is down"
                )
            return False
        is_new = request is not None
        try:
            self.answers[node.node_id] = ray.get(request.answer) if request else []
        except ray.exceptions.RayError:
            # The monitor died. Start another one. If its node died too, Ray reports that.
            self.actors.pop(node.node_id)
            is_new = False
        answer = self._get_actor(node.node_id).list_processes.remote(node.address, pids)
        self.requests[node.node_id] = Request(answer, time.monotonic())
        return is_new

    def _get_actor(self, node_id: str) -> Any:
        """Return the node's NodeMonitor. Start it if there is none."""
        if node_id not in self.actors:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = ray.remote(NodeMonitor).options(num_cpus=0, scheduling_strategy=strategy)
            self.actors[node_id] = options.remote()
        return self.actors[node_id]
