"""A checkpoint engine for verl that sends weights to separate vLLM servers by gloo.

Use it if the servers are on separate GPUs (rollout.nnodes, configs/separate.yaml). It works on
CPUs, where GPUs are logical, and on GPUs without cupy, which verl's `nccl` engine needs. Rank 0 of
the actor broadcasts to every worker of every server. Names and shapes are sent as JSON. Others on
the network may reach the socket, so data from it is never unpickled.
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

from kit.engine import stores

TIMEOUT = timedelta(minutes=30)  # torch's default


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """verl 0.9.1's interface; its docstrings say when verl calls each method.

    Tensors are sent one by one, so that bucket_size is not used.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.store: TCPStore | None = None
        self.group: Any = None
        if is_master:
            self.address = ray.util.get_node_ip_address()
            self.store = stores.create_store(self.address, wait_for_workers=False)

    def prepare(self) -> dict[str, Any]:
        """Return the address of the store where all processes meet; {} in processes without it."""
        return {"master": (self.address, self.store.port)} if self.store else {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> Any:
        """Return the arguments of init_process_group for the actor's ranks and for the servers.

        The group has rank 0 of the actor and all workers of servers. Rank -1 is not in it.
        """
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [size] * len(ranks),
                "master": [metadata[0]["master"]] * len(ranks),
            }

        actor_ranks = [0] + [-1] * (actor_wg_world_size - 1)
        return arguments(actor_ranks), arguments(list(range(1, size)))

    def init_process_group(  # type: ignore[override]
        self, rank: int, world_size: int, master: tuple[str, int]
    ) -> None:
        """Join the group at the first call; it stays for later weight syncs."""
        self.rank = rank
        if rank >= 0 and not self.group:
            store = self.store or TCPStore(*master, is_master=False)
            self.group = ProcessGroupGloo(store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Do nothing: the group stays."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Broadcast all weights, each after its name, shape and type, and an empty message last."""
        for name, tensor in weights:  # on every rank, since all ranks gather each tensor
            if self.rank == 0:
                header = (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                self._broadcast_message(json.dumps(header).encode())
                self._broadcast(tensor.detach().cpu().contiguous())
        if self.rank == 0:
            self._broadcast_message(b"")

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Yield (name, tensor) of all weights that rank 0 sends."""
        while message := self._receive_message():
            name, shape, dtype = json.loads(message)
            yield name, self._broadcast(torch.empty(shape, dtype=getattr(torch, dtype)))

    def _broadcast_message(self, message: bytes) -> None:
        """Broadcast the length of a message, and the message if it is not empty."""
        self._broadcast(torch.tensor([len(message)]))
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def _receive_message(self) -> bytes:
        """Return the message that rank 0 broadcasts."""
        length = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        if not length:
            return b""
        return bytes(self._broadcast(torch.empty(length, dtype=torch.uint8)).numpy())

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the tensor by rank 0's. Returns it."""
        self.group.broadcast(tensor.view(-1).view(torch.uint8), 0).wait()
        return tensor
