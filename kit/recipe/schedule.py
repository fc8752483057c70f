"""The learning rate of each training step: verl's schedules, computed from the step's number.

Protects: a resumed run has the learning rates of its recipe.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.workers.config import FSDPOptimizerConfig

    from kit.recipe.schema import Optimizer

    Optim = FSDPOptimizerConfig | Optimizer  # the latter: the section `optim` of a recipe

POSITION = "schedule_position"  # in a batch's meta_info: training steps before this one


def compute_learning_rate(optim: Optim, position: int) -> float:
    """Return the rate of all optimizer steps of one training step.

    position: the number of training steps before this one. The schedule depends on nothing else.
    So a resumed run has the rates of its recipe, also if the recipe has another number of steps
    than before.
    """
    override = optim.override_optimizer_config or {}
    return float(override.get("lr", optim.lr)) * compute_factor(optim, position)


def compute_factor(optim: Optim, position: int) -> float:
    """Return the rate of a training step as a fraction of `optim.lr`.

    Warm-up over W steps: 1/W, 2/W, ..., 1. verl 0.9.1 starts with 0/W, which wastes a step. After
    the warm-up, the values are those of verl's get_constant_schedule_with_warmup and
    get_cosine_schedule_with_warmup.
    """
    warmup = count_warmup_steps(optim)
    if position < warmup:
        return (position + 1) / warmup
    if (optim.warmup_style or optim.lr_scheduler_type) == "constant":
        return 1.0
    if not optim.zero_indexed_step:
        position += 1
    progress = (position - warmup) / max(1, optim.total_training_steps - warmup)
    lowest = optim.min_lr_ratio or 0.0
    cosine = math.cos(2 * math.pi * optim.num_cycles * progress)
    return float(max(lowest, (1 + lowest + (1 - lowest) * cosine) / 2))


def count_warmup_steps(optim: Optim) -> int:
    """Return the number of warm-up steps: lr_warmup_steps, or by lr_warmup_steps_ratio."""
    steps = optim.lr_warmup_steps or 0
    if steps > 0:
        return int(steps)
    return int(optim.lr_warmup_steps_ratio * optim.total_training_steps)
