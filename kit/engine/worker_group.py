"""The methods of a group of verl's workers that the kit calls.

Convenience: verl adds these methods to a RayWorkerGroup at run time, so it has no types for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl.protocol import DataProtoFuture

WorkerOutput: TypeAlias = "TensorDict | DataProtoFuture"


class WorkerGroup(Protocol):
    """One model of the trainer, in one process per GPU. Each call runs in all processes."""

    workers: Sequence[Any]  # handles of Ray actors
    world_size: int

    def init_model(self) -> object: ...

    def reset(self) -> object: ...

    def set_loss_fn(self, loss_fn: Callable[..., object]) -> object: ...

    def compute_log_prob(self, data: TensorDict) -> WorkerOutput: ...

    def compute_ref_log_prob(self, data: TensorDict) -> WorkerOutput: ...

    def infer_batch(self, data: TensorDict) -> WorkerOutput: ...

    def update_actor(self, data: TensorDict) -> WorkerOutput: ...

    def train_mini_batch(self, data: TensorDict) -> WorkerOutput: ...

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None, global_step: int, max_ckpt_to_keep: int | None
    ) -> object: ...

    def load_checkpoint(self, local_path: str) -> object: ...
