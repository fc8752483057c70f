"""Measure gradients of parts of a batch with verl's own update, without an optimizer step.

`measuring` replaces the optimizer step of each worker by a measurement. So a part of the batch goes
through the same path as in an update: verl's dispatch, micro-batches, the recipe's loss, backward.
The divisor of the loss stays that of the whole batch, so that the gradients of the parts add up to
the batch's gradient. Each rank reads its shard of the gradient, and the ranks add their sums.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

import training
from kit.data.training_rows import count_episodes
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from verl import DataProto

NAME = "actor"  # of the worker group
RECORDER = "_gradient_recorder"  # attribute of a worker while it measures


class Gradient(NamedTuple):
    """A gradient g, and G, the gradient of the whole batch."""

    norm: float  # |g|
    dot: float  # <g, G>; NaN before G is known

    @property
    def is_finite(self) -> bool:
        """Return whether no number of the gradient is NaN or infinite."""
        return math.isfinite(self.norm)

    def cosine(self, batch_norm: float) -> float | None:
        """Return the cosine with G, None if one of them is 0."""
        if not self.norm or not batch_norm:
            return None
        return max(-1.0, min(1.0, self.dot / (self.norm * batch_norm)))

    def share(self, batch_norm: float) -> float:
        """Return <g, G> / |G|^2. The shares of all parts have the sum 1; a part may oppose G."""
        return self.dot / batch_norm**2 if batch_norm else 0.0


# --- in the driver -------------------------------------------------------------------------------


class GradientMeter:
    """Measures gradients of rows of a batch. The first measurement should be of all rows."""

    def __init__(self, actor: training.WorkerGroup, batch: DataProto, recipe: Recipe):
        self.actor = actor
        self.batch = batch
        self.recipe = recipe

    def measure(self, rows: Sequence[int]) -> Gradient:
        """Measure the gradient of some rows. The first finite one becomes G."""
        part = self.batch.select_idxs(torch.tensor(rows))
        if not part.batch["response_mask"].any():
            return Gradient(0.0, 0.0)
        settings = self.recipe.actor
        is_on_policy = self.recipe.is_on_policy
        data = training.make_update_data(
            part,
            self.recipe.data_parallel_size(),
            1,
            settings,
            global_batch_size=count_episodes(self.batch),
            epochs=1,
            calculate_entropy=bool(training.is_entropy_in_loss(settings) or is_on_policy),
            compute_loss=True,
            distillation_use_topk=False,
            distillation_only=False,
        )
        training.wait_for_output(self.actor.update_actor(data))
        return call_workers(self.actor, take_last)


@contextlib.contextmanager
def measuring(
    actor: training.WorkerGroup, batch: DataProto, recipe: Recipe
) -> Iterator[GradientMeter]:
    """Yield a meter. Until the end of the block, the actor's updates change no weight."""
    tokens = float(batch.batch["response_mask"].sum())
    call_workers(actor, install, tokens)
    try:
        yield GradientMeter(actor, batch, recipe)
    finally:
        call_workers(actor, uninstall)


def call_workers(actor: training.WorkerGroup, function: Any, *arguments: float) -> Any:
    """Call function(worker, ...) in each worker, and return the result of the first."""
    calls = [worker.__ray_call__.remote(function, *arguments) for worker in actor.workers]
    return ray.get(calls)[0]


# --- in the workers ------------------------------------------------------------------------------


class Recorder:
    """Measures the gradient in place of the optimizer step. Holds a copy of the first one."""

    def __init__(self, engine: Any, device: str):  # an engine of verl
        self.engine = engine
        self.device = device
        self.batch: list[Tensor] = []  # G, this rank's shards
        self.last = Gradient(math.nan, math.nan)

    def step(self) -> float:
        """Measure the gradient, and return its norm. Replaces optimizer_step."""
        shards = self.list_shards()
        self.last = self.compare(shards)
        if not self.batch and self.last.is_finite:
            self.batch = [shard.clone() for shard in shards]
            self.last = self.compare(shards)
        return self.last.norm

    def list_shards(self) -> list[Tensor]:
        """List this rank's part of the gradient. It counts once over all ranks.

        If several ranks hold the same part, each has its share of the sums.
        """
        shards = []
        for parameter in self.engine.module.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            copies = 1
            if isinstance(gradient, DTensor):
                for size, placement in zip(
                    gradient.device_mesh.shape, gradient.placements, strict=True
                ):
                    copies *= size if placement.is_replicate() else 1
                gradient = gradient.to_local()
            shards.append(gradient.detach().float() / math.sqrt(copies))
        return shards

    def compare(self, shards: Sequence[Tensor]) -> Gradient:
        """Measure a gradient, with a sum over the ranks."""
        squares = sum(float(shard.double().square().sum()) for shard in shards)
        dot = 0.0 if self.batch else math.nan
        if self.batch and shards:  # none, if no token of the rows is trained on
            pairs = zip(shards, self.batch, strict=True)
            dot = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
        totals = torch.tensor([squares, dot], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(totals)
        return Gradient(math.sqrt(float(totals[0])), float(totals[1]))


def find_trainer(worker: Any) -> Any:
    """Find verl's TrainingWorker of the actor in a worker process."""
    role = getattr(worker, "worker_dict", {NAME: worker})[NAME]
    return role.actor


def install(worker: Any, tokens: float) -> None:
    """Replace the optimizer step, and fix the divisor of the loss. tokens: of the whole batch."""
    trainer = find_trainer(worker)
    recorder = Recorder(trainer.engine, trainer.device_name)
    recorder.loss = trainer.loss_fn  # type: ignore[attr-defined]
    trainer.loss_fn = functools.partial(divide_by_batch, trainer.loss_fn, tokens)
    trainer.engine.optimizer_step = recorder.step
    setattr(trainer, RECORDER, recorder)


def uninstall(worker: Any) -> None:
    """Undo `install`."""
    trainer = find_trainer(worker)
    trainer.loss_fn = getattr(trainer, RECORDER).loss
    del trainer.engine.optimizer_step  # the attribute of the object; the class has the method
    delattr(trainer, RECORDER)


def take_last(worker: Any) -> Gradient:
    """Return the last measurement."""
    last: Gradient = getattr(find_trainer(worker), RECORDER).last
    return last


def divide_by_batch(
    loss: training.Loss,
    tokens: float,
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,  # as training.Loss
) -> training.LossResult:
    """Compute the loss with the token count of the whole batch as the divisor of its means."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, batch_num_tokens=tokens)
    return loss(model_output=model_output, data=data, dp_group=dp_group)
