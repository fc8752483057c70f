"""Recipes whose training steps change nothing: warm-ups that outlast the run, lost updates.

Protects: a run that would train nothing ends before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kit.errors import ConfigError
from kit.recipe.keys import ACTOR, MODEL
from kit.recipe.load import raise_all
from kit.recipe.recipe import Recipe
from kit.recipe.schedule import count_warmup_steps
from kit.recipe.training_engine import FSDP_SECTIONS

WEIGHT = 0.02  # a typical one


def check_schedule(recipe: Recipe) -> None:
    """Check that each warm-up ends before the run does. Raises ConfigError."""
    if recipe.trains:
        raise_all([ConfigError(problem) for problem in find_long_warmups(recipe)])


def find_long_warmups(recipe: Recipe) -> Iterator[str]:
    """Find warm-ups after which nothing is left to train."""
    total = recipe.last_step
    critic_warmup = recipe.trainer.critic_warmup if recipe.command == "train" else 0
    if critic_warmup >= total:
        yield (
            f"trainer.critic_warmup={critic_warmup}: in {total} steps the policy would not be "
            "trained. Lower it, or raise trainer.total_training_steps."
        )
        return
    for section in list_optimizers(recipe):
        optim = recipe.get(f"{section}.optim")
        steps = total - (critic_warmup if section == ACTOR else 0)
        warmup = count_warmup_steps(optim)
        if warmup > steps:
            yield (
                f"{section}.optim: its warm-up of {warmup} steps (lr_warmup_steps, or "
                f"lr_warmup_steps_ratio) does not end within {steps}. Shorten it, or raise "
                "trainer.total_training_steps."
            )


def warn_of_lost_updates(recipe: Recipe) -> Iterator[str]:
    """Warn of steps for a critic that is not there, and of weights too coarse for their rate.

    AdamW moves a weight by about lr. If that is less than half the distance to the next number of
    this type, the weight stays.
    """
    import torch
    from verl.utils.torch_dtypes import PrecisionType

    if not recipe.trains or not recipe.engine.is_fsdp:
        return
    warmup = recipe.trainer.critic_warmup
    if recipe.command == "train" and warmup and not recipe.has_critic:
        yield f"trainer.critic_warmup={warmup}: without a critic, these steps train nothing."
    for section, engine in list_optimizers(recipe).items():
        optim = recipe.get(f"{section}.optim")
        lr = (optim.override_optimizer_config or {}).get("lr", optim.lr)
        dtype = recipe.get(f"{engine}.model_dtype") or "fp32"
        eps = torch.finfo(PrecisionType.to_dtype(dtype)).eps
        distance = eps * 2 ** math.floor(math.log2(WEIGHT))
        model_key = MODEL if section == ACTOR else "critic.model"
        is_adapter = recipe.get(f"{model_key}.lora_rank")  # its weights begin at 0
        if 0 < lr < distance / 2 and not is_adapter:
            yield (
                f"{engine}.model_dtype={dtype}: the numbers of this type near {WEIGHT} are "
                f"{distance:.1g} apart, so most updates with lr={lr:g} are lost. Set it to fp32; "
                "mixed_precision.param_dtype decides how the model computes."
            )


def list_optimizers(recipe: Recipe) -> dict[str, str]:
    """Return {section: section of its FSDP engine} of the models that a recipe trains."""
    critic = {"critic": FSDP_SECTIONS["critic"]} if recipe.has_critic else {}
    return {ACTOR: FSDP_SECTIONS["actor"]} | critic
