"""verl's training engine Megatron (`model_engine: megatron`): checks of the recipe.

No line of this file has run with Megatron (docs/backends.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kit.recipe.keys import ACTOR, MODEL
from kit.recipe.parallel_sizes import check_heads
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


class Megatron(RecipeCheck):
    """Training by Megatron."""

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Yield a message for each option that does not work with Megatron."""
        actor = settings.actor
        megatron = actor.megatron or {}
        unsupported = {
            f"{ACTOR}.strategy={actor.strategy}": actor.strategy != "megatron",
            f"{MODEL}.lora_rank": settings.model.lora_rank,  # verl ignores it
            "reward.reward_model": settings.reward.reward_model.enable,  # its head is not loaded
            f"{ACTOR}.megatron.router_replay.mode": megatron["router_replay"]["mode"] != "disabled",
            f"{ACTOR}.megatron.dynamic_context_parallel": megatron["dynamic_context_parallel"],
            f"{ACTOR}.megatron.use_dist_checkpointing": megatron["use_dist_checkpointing"],
            f"{ACTOR}.optim.betas": list(actor.optim.betas) != [0.9, 0.999],  # verl ignores them
        }
        for option, is_set in unsupported.items():
            if is_set:
                yield f"{option} does not work with model_engine=megatron. Remove it."

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """Check that GPUs divide the attention heads, and that the critic has the actor's sizes."""
        sizes = {section: list_sizes(recipe, section) for section in (ACTOR, "critic")}
        if recipe.has_critic and sizes[ACTOR] != sizes["critic"]:
            yield "critic.megatron needs the actor's parallel sizes. Set them to the same values."
        key = f"{ACTOR}.megatron.{SIZES[0]}"
        yield from check_heads(key, recipe.get(key), recipe.world_size(), "policy", hf_config)


def list_sizes(recipe: Recipe, section: str) -> list[int]:
    """List the parallel sizes of the actor or the critic."""
    return [recipe.get(f"{section}.megatron.{name}") for name in SIZES]
