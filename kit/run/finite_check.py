"""Check batches and weights for NaN and infinity, and batches for samples from other weights.

Protects: weights and checkpoints, from updates with numbers that no step should use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch

from kit.errors import NonFiniteStep, RunError
from kit.recipe.keys import ACTOR, ROLLOUT
from kit.recipe.neutral_sampling import (
    EXACT_VALUES,
    NEUTRAL_VALUES,
    find_distortions,
    requires_same_probs,
)
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from verl import DataProto

    from training import Workers

Engine = Any  # of verl
# Mean difference between the token probabilities of the rollout engine and the trainer.
# Above it, the engine samples from different weights.
MAX_PROBS_DIFF = 0.1
# With the same weights: the Kullback-Leibler divergence of the trainer from the rollout engine, in
# nats for each token. In bfloat16 on GPUs, it was at most 0.0044 without a merged adapter, which
# step 1 has not (docs/gpu_results.md, "vLLM and the trainer").
MAX_KL = 0.05
MAX_KL_FLOAT32 = 1e-4  # if both compute in float32
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
    if not diff <= MAX_PROBS_DIFF and requires_same_probs(recipe):
        reasons.append(
            f"the rollout engine's probabilities differ from the trainer's by {diff:.2f} on "
            "average, so it has different weights"
        )
    return "; ".join(reasons)


def raise_if_engines_differ(
    batch: DataProto, log_probs: torch.Tensor, model_type: str, recipe: Recipe
) -> None:
    """Compare the rollout engine's log-probs with the trainer's, before the first update.

    log_probs: the trainer's [B, R]. Parameters that change only the engine's are not compared. The
    estimate of the divergence is never negative (Schulman 2020, "Approximating KL divergence", k3).
    Raises RunError and NonFiniteStep.
    """
    if find_distortions(recipe, NEUTRAL_VALUES | EXACT_VALUES):
        return
    is_sampled = batch.batch["turn"] >= 0  # [B, R]
    log_ratio = (log_probs - batch.batch["rollout_log_probs"])[is_sampled]  # [tokens]
    if not log_ratio.isfinite().all():
        raise NonFiniteStep("the trainer's log-probs are NaN or infinite", batch)
    divergence = float((log_ratio.exp() - 1 - log_ratio).mean())
    dtypes = {recipe.rollout.dtype, recipe.get(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")}
    limit = MAX_KL_FLOAT32 if dtypes <= {"float32", "fp32"} else MAX_KL
    if not divergence <= limit:
        other = f"{ROLLOUT}.name=vllm" if recipe.rollout.name == "hf" else "--config hf"
        raise RunError(
            "The rollout engine and the trainer have the same weights before the first update, but "
            f"their log-probs differ by {log_ratio.abs().mean():.2g} on average (a KL divergence "
            f"of {divergence:.2g}; rounding explains {limit:g}). One of them computes the model "
            f"type {model_type} wrongly, or has other weights. Try {other}. "
            'See docs/guides/diagnosis.md, "7. Rollout engine against trainer".'
        )


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
    """Return the names of weights and optimizer states with NaN or infinity, of all ranks."""
    return ask_engines(workers, list_nonfinite_weights, ("actor", "critic"))


def ask_engines(
    workers: Workers, question: Callable[[Engine, str], list[str]], names: Sequence[str]
) -> list[str]:
    """Call a function with each engine of these roles and its role, and return all answers."""

    def ask(worker: Engine, name: str) -> list[str]:  # runs in the worker, of any class of verl's
        role = getattr(worker, "worker_dict", {name: worker})[name]
        model = getattr(role, "actor", None) or getattr(role, "ref", None) or role
        return question(model.engine, name)

    calls = []
    for name in names:
        group = getattr(workers, name)
        for worker in group.workers if group else ():
            calls.append(worker.__ray_call__.remote(ask, name))
    return sorted(set(itertools.chain.from_iterable(ray.get(calls))))


def read_packing_note(engine: Engine, name: str) -> list[str]:
    """Return what the trial of the model changed, if it did (kit/engine/packing_trial.py)."""
    note = getattr(engine, "packing_note", "")
    return [f"{name} {note}"] if note else []


def list_nonfinite_weights(engine: Engine, _name: str) -> list[str]:
    """Return the names of weights and optimizer states with NaN or infinity."""
    # with Megatron, one module for each pipeline stage
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    parameters = itertools.chain.from_iterable(module.named_parameters() for module in modules)
    tensors = [item for item in parameters if item[1].untyped_storage().size()]
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
