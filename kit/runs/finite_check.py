"""Check batches and weights for NaN and infinity, and batches for samples from other weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
import torch

from kit.config.neutral_sampling import requires_same_probs
from kit.config.recipe import Recipe

if TYPE_CHECKING:
    from verl import DataProto

    from training import Workers

# Mean difference between the token probabilities of the rollout engine and the trainer.
# Above it, the engine samples from different weights.
MAX_PROBS_DIFF = 0.1
CHECKED_TENSORS = (  # of verl's DataProto, each [B, R]
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "token_level_scores",
    "advantages",
    "returns",
)


def find_reason_to_skip(batch: DataProto, metrics: Mapping[str, float], recipe: Recipe) -> str:
    """Return all reasons not to use a batch or its update; "" if there is none.

    metrics: they contain the gradient norms and losses.
    """
    reasons = []
    nonfinite = list_nonfinite_tensors(batch)
    if nonfinite:
        reasons.append(f"{', '.join(nonfinite)} are NaN or infinite")
    for name, value in metrics.items():
        if name.startswith(("actor/", "critic/")) and not math.isfinite(value):
            reasons.append(f"{name} is {value}")
    diff = metrics.get("training/rollout_probs_diff_mean", 0.0)
    if diff > MAX_PROBS_DIFF and requires_same_probs(recipe):
        reasons.append(
            f"the rollout engine's probabilities differ from the trainer's by {diff:.2f} on "
            "average, so it has different weights"
        )
    return "; ".join(reasons)


def list_nonfinite_tensors(batch: DataProto) -> list[str]:
    """Return "COUNT of TOTAL NAME" for each tensor with NaN or infinity where the mask is 1.

    Padding may hold anything.
    """
    mask = batch.batch["response_mask"].bool()  # [B, R]
    problems = []
    for name in CHECKED_TENSORS:
        if name not in batch.batch:
            continue
        values = batch.batch[name][mask]  # [tokens]
        count = int((~torch.isfinite(values)).sum())
        if count:
            problems.append(f"{count} of {len(values)} {name}")
    return problems


def find_nonfinite_weights(workers: Workers) -> list[str]:
    """The names of weights and optimizer states that hold NaN or infinity on any rank."""
    calls = []
    for name in ("actor", "critic"):
        group = getattr(workers, name)
        for worker in group.workers if group else ():
            calls.append(worker.__ray_call__.remote(list_nonfinite_weights, name))
    return sorted(set(itertools.chain.from_iterable(ray.get(calls))))


def list_nonfinite_weights(
    worker: Any,  # of any class of verl's workers
    name: str,
) -> list[str]:
    """The same of one worker. Runs in the worker."""
    role = getattr(worker, "worker_dict", {name: worker})[name]
    engine = getattr(role, "actor", role).engine
    # with Megatron, one module for each pipeline stage
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    tensors = []
    for module in modules:
        parameters = module.named_parameters()
        tensors += [item for item in parameters if item[1].untyped_storage().size()]
    for state in getattr(engine.optimizer, "state", {}).values():
        for key, value in state.items():
            if torch.is_tensor(value):
                tensors.append((f"the optimizer's {key}", value))
    nonfinite = []
    for key, value in tensors:
        local = value.to_local() if hasattr(value, "to_local") else value
        if not torch.isfinite(local).all():
            nonfinite.append(key)
    return nonfinite
