"""Patches of verl's TrainingWorker, which trains the actor and the critic with FSDP.

`monkey_patch_training_worker` is called in each process that trains (kit/engine/verl_patches.py).

Protects: the learning rate after a resume, and LoRA's reference, which keeps its first weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from kit.recipe.schedule import POSITION, compute_learning_rate

if TYPE_CHECKING:
    from verl.workers.engine_workers import TrainingWorker

    Reset = Callable[[TrainingWorker], None]
    TrainBatch = Callable[[TrainingWorker, TensorDict], TensorDict | None]


@functools.cache
def monkey_patch_training_worker() -> None:
    """Replace methods of verl's TrainingWorker, once in a process."""
    from verl.workers import engine_workers

    from kit.engine.head_in_blocks import monkey_patch_fused_head
    from kit.engine.packing_trial import monkey_patch_engine

    monkey_patch_engine()
    monkey_patch_fused_head()
    worker: Any = engine_workers.TrainingWorker
    worker.reset = make_reset(worker.reset)
    worker.train_batch = make_train_batch(worker.train_batch)
    monkey_patch_trl()


def monkey_patch_trl() -> None:
    """Let verl 0.9.1 load models where TRL is installed, for example for reward functions.

    It would import a class from TRL that 1.x does not have, to patch it. No model here is of that
    class.
    """
    from verl.models.transformers import monkey_patch

    monkey_patch.is_trl_available = lambda: False  # type: ignore[assignment]


def make_reset(verl_reset: Reset) -> Reset:
    """Make a `reset` that keeps the adapter from which the run starts."""

    @functools.wraps(verl_reset)
    def reset(self: TrainingWorker) -> None:
        verl_reset(self)
        if getattr(self.model_config, "lora_adapter_path", None) and self.model_config.lora_rank:
            fix_initial_adapter(self)

    return reset


def make_train_batch(verl_train_batch: TrainBatch) -> TrainBatch:
    """Make a `train_batch` that trains with the rate of the training step, and reports it.

    verl 0.9.1 reports the rate of the next step (https://github.com/verl-project/verl/issues/3674).
    After a resume, its first step has the rate that the checkpoint's recipe gave.
    """

    @functools.wraps(verl_train_batch)
    def train_batch(self: TrainingWorker, data: TensorDict) -> TensorDict | None:
        from verl.utils import tensordict_utils as tu

        rate = set_learning_rate(self, data)
        output: TensorDict | None = verl_train_batch(self, data)
        if rate is None or output is None:  # another engine, or a rank that returns nothing
            return output
        metrics = tu.get(output, "metrics")
        if "lr" in metrics:  # only after the last mini-batch
            tu.assign_non_tensor_data(output, "metrics", {**metrics, "lr": rate})
        return output

    return train_batch


def set_learning_rate(worker: TrainingWorker, data: TensorDict) -> float | None:
    """Set the rate of the optimizer and return it; None for other training engines than FSDP.

    A batch without a position gets that of verl's scheduler, which counts updates.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPOptimizerConfig

    optim = worker.optimizer_config
    if not isinstance(optim, FSDPOptimizerConfig):
        return None
    engine: Any = worker.engine  # FSDPEngine
    position = tu.get(data, POSITION, engine.lr_scheduler.last_epoch)
    rate = compute_learning_rate(optim, int(position))
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    return rate


# --- LoRA: the policy that the run starts from ---------------------------------------------------


def fix_initial_adapter(worker: TrainingWorker) -> None:
    """Let the reference keep the adapter that the run starts from (model.lora_adapter_path).

    verl turns the adapter off for the reference, which would then be the model below it. This is
    called before a checkpoint is loaded. So the reference is the same after a resume.
    """
    from peft.tuners.lora import LoraLayer

    engine: Any = worker.engine  # FSDPEngine
    module = engine.module
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.lora_dropout:  # the rollout engine has no dropout either
                layer.lora_dropout[name] = torch.nn.Identity()
    initial = copy_trainable(module)
    engine.disable_adapter = functools.partial(use_weights, module, initial)


@contextlib.contextmanager
def use_weights(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Compute with other values of the trained weights: with those of `copy_trainable`."""
    current = copy_trainable(module)
    write_trainable(module, weights)
    try:
        yield
    finally:
        write_trainable(module, current)


def copy_trainable(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the values of the weights that are trained: of this rank's shards, to the CPU."""
    return {name: shard.to("cpu", copy=True) for name, shard in list_trainable(module)}


def write_trainable(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Write values from `copy_trainable` to the weights that are trained."""
    for name, shard in list_trainable(module):
        shard.copy_(weights[name])


def list_trainable(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name, this rank's shard) of the weights that are trained."""
    reshard(module)
    trainable = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            value = parameter.detach()
            local = value.to_local() if isinstance(value, DTensor) else value
            trainable.append((name, local))
    return trainable


def reshard(module: torch.nn.Module) -> None:
    """Make FSDP drop weights that it has gathered, which may be kept after a forward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
        elif isinstance(part, FullyShardedDataParallel):
            handle = part._handle
            if not handle or not handle.uses_sharded_strategy:
                continue
            if hasattr(handle.flat_param, "_full_param_padded"):  # after the first forward pass
                handle.reshard(free_unsharded_flat_param=True)
