"""The weights of a run whose vLLM servers are on GPUs of their own (rollout.nnodes), over gloo: one more of verl's
checkpoint engines, for CPUs, and for GPUs without the cupy that verl's own `nccl` wants (configs/separate.yaml).

Rank 0 of the actor broadcasts to every part of every server. Names and shapes go as JSON: what comes over a socket that
others on the network may reach is never unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from kit.rollout import stores


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """verl 0.9.1's interface, whose docstrings say when each method is called. Nothing here is as large as a bucket."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.store: TCPStore | None = None
        self.group: Any = None
        if is_master:
            self.address = ray.util.get_node_ip_address()
            self.store = stores.listen_on(self.address, wait_for_workers=False)

    def prepare(self) -> dict[str, Any]:
        """Where all meet, of the one who knows."""
        return {"master": (self.address, self.store.port)} if self.store else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> Any:
        """Rank 0 of the actor and all of the servers; the other ranks of the actor have no part in it."""
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [size] * len(ranks),
                "master": [metadata[0]["master"]] * len(ranks),
            }

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments([*range(1, size)])

    def init_process_group(self, rank: int, world_size: int, master: tuple[str, int]) -> None:  # type: ignore[override]
        self.rank = rank
        if rank >= 0 and not self.group:
            store = self.store or TCPStore(*master, is_master=False)
            self.group = ProcessGroupGloo(
                store, rank, world_size, timedelta(minutes=30)
            )  # torch's own

    def finalize(self) -> None:
        """The group stays for the next time."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        for name, tensor in weights:  # to gather one takes every rank
            if self.rank == 0:
                told = name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                self._announce(json.dumps(told).encode())
                self._broadcast(tensor.detach().cpu().contiguous())
        if self.rank == 0:
            self._announce(b"")

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        while told := self._announced():
            name, shape, dtype = json.loads(told)
            yield name, self._broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))

    def _announce(self, text: bytes) -> None:
        self._broadcast(torch.tensor([len(text)]))
        if text:
            self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def _announced(self) -> bytes:
        length = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        return (
            bytes(self._broadcast(torch.empty(length, dtype=torch.uint8)).numpy())
            if length
            else b""
        )

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of rank 0, in the place of every other rank's."""
        self.group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
        return tensor
