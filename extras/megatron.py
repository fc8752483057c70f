"""verl's training engine Megatron (`model_engine: megatron`): checks and sizes.

No line of this file has run with Megatron (docs/backends.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from kit.config.load import ACTOR, MODEL
from kit.config.parallel_sizes import check_heads
from kit.config.recipe import Parallelism, Recipe
from kit.features import Feature

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MOE_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
ALL_SIZES = (*SIZES, *MOE_SIZES)
DEFAULT_BETAS = [0.9, 0.999]


class Megatron(Feature):
    """Training by Megatron."""

    layout_keys = (
        *[f"{ACTOR}.megatron.{name}" for name in ALL_SIZES],
        *[f"critic.megatron.{name}" for name in ALL_SIZES],
    )
    skips_nonfinite_steps = False

    def __init__(self, config: DictConfig, command: str):
        super().__init__(config, command)
        self.sizes = parallel_sizes(config, ACTOR)
        model = math.prod(self.sizes[name] for name in SIZES)
        self.parallelism = Parallelism(model, self.sizes["context_parallel_size"])
        parts = [f"{name} {size}" for name, size in self.sizes.items() if size > 1]
        self.layout = f"megatron ({', '.join(parts) or 'each with the whole model'})"

    def check_workers(self, recipe: Recipe) -> Iterator[str]:
        """Megatron fits the rest of the recipe."""
        for section in [ACTOR, "critic"] if recipe.has_critic else [ACTOR]:
            strategy = recipe.get(f"{section}.strategy")
            if strategy != "megatron":
                yield f"{section}.strategy={strategy} must be megatron, as model_engine. Change it."
        if recipe.model.lora_rank:
            yield (
                f"{MODEL}.lora_rank with model_engine=megatron: verl reads it with FSDP only. "
                "Remove one of the two."
            )
        if recipe.verl.reward.reward_model.enable:
            yield (
                "reward.reward_model with model_engine=megatron: its head may not be loaded. Use "
                "env.reward instead."
            )
        replay = recipe.actor.megatron.router_replay.mode
        if replay != "disabled":
            yield (
                f"{ACTOR}.megatron.router_replay.mode={replay}: batches of this trainer hold no "
                "expert routing to replay. Remove it."
            )
        if recipe.has_critic:
            critic_sizes = parallel_sizes(recipe.verl, "critic")
            if self.sizes != critic_sizes:
                yield (
                    f"critic.megatron has {critic_sizes}, the actor {self.sizes}, and one process "
                    "has both. Set them to the same values."
                )
        yield from check_unsupported_options(recipe.actor)

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """The GPUs divide the model's attention heads."""
        name = "tensor_model_parallel_size"
        key = f"{ACTOR}.megatron.{name}"
        yield from check_heads(key, self.sizes[name], recipe.world_size(), "policy", hf_config)

    def checkpoint_files(self, contents: Sequence[str], ranks: int) -> list[str]:
        """Return the files that the ranks write into an actor's or a critic's folder."""
        names = ["ckpt_contents.json"]
        if "model" in contents:
            names.append("model/huggingface/config.json")
        if "optimizer" in contents:
            names.append("optimizer/dist_ckpt/.metadata")
        return names

    def resume_notes(self, checkpoint: Path) -> list[str]:
        """Warn of what the loading of a checkpoint runs."""
        return [
            f"Megatron reads {checkpoint} by pickle, which runs code in it. Resume only from your "
            "checkpoints."
        ]


def parallel_sizes(config: DictConfig, section: str) -> dict[str, int]:
    """GPUs for each kind of parallelism, of the actor or the critic."""
    settings = OmegaConf.select(config, f"{section}.megatron")
    return {name: int(settings[name] or 1) for name in ALL_SIZES}


def check_unsupported_options(actor: DictConfig) -> Iterator[str]:
    """Options of Megatron that this trainer cannot use are off."""
    for name in ("dynamic_context_parallel", "use_dist_checkpointing"):
        if actor.megatron[name]:
            yield f"{ACTOR}.megatron.{name} is not supported. Remove it."
    if list(actor.optim.betas) != DEFAULT_BETAS:
        yield (
            f"{ACTOR}.optim.betas is not read by Megatron. Set "
            f"{ACTOR}.optim.override_optimizer_config instead."
        )
