"""What makes a batch, or the update that was made of it, worthless."""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import DictConfig

APART = 0.1  # mean distance of the sampler's probabilities from the trainer's, over which it samples from other weights


def damage(batch: Any, metrics: dict[str, float], config: DictConfig) -> str:
    """All that makes a batch (verl's DataProto) or its update worthless; empty if nothing does.

    Looked at where the mask is 1: padding may hold anything. A gradient is known by its norm in verl's metrics.
    """
    mask, found = batch.batch["response_mask"].bool(), []  # [B, R]
    names = (
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_prob",
        "values",
        "token_level_scores",
        "advantages",
    )
    for name in (*names, "returns"):
        if name in batch.batch:
            live = batch.batch[name][mask]  # [tokens]
            if bad := int((~torch.isfinite(live)).sum()):
                found.append(f"{bad} of {len(live)} {name}")
    said = [f"{', '.join(found)} are NaN or infinite"] if found else []
    for name, value in metrics.items():
        if name.startswith(("actor/", "critic/")) and not math.isfinite(value):
            said.append(f"{name} is {value}")
    rollout, apart = (
        config.actor_rollout_ref.rollout,
        metrics.get("training/rollout_probs_diff_mean", 0.0),
    )
    same = rollout.top_p == 1 and rollout.top_k <= 0  # else the two are of other sets of tokens
    if (
        apart > APART and same and not config.trainer.one_step_off
    ):  # whose sampler is meant to be behind
        said.append(
            f"the sampler's probabilities are {apart:.2f} from the trainer's in the mean, so its weights are others"
        )
    return "; ".join(said)
