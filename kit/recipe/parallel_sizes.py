"""GPUs that share rows, weights or a model: their number divides the machine and the model.

verl, vLLM and torch refuse other numbers too, but in their processes, minutes after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from kit.recipe import resources
from kit.recipe.load import ACTOR, FSDP, MODEL, REF, ROLLOUT
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
FSDP_SECTIONS = {  # {the actor, or a role of trainer.resource_pools: the section of its engine}
    "actor": f"{ACTOR}.fsdp_config",
    "ref": f"{REF}.fsdp_config",
    "critic": "critic.fsdp",
    "reward_model": "critic.fsdp",
}


def check_rollout_gpus(config: DictConfig) -> Iterator[str]:
    """The GPUs divide into whole rollout replicas."""
    rollout = config.actor_rollout_ref.rollout
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    actor_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    # verl's actor has the same requirement if the replicas have separate GPUs
    for count in sorted({resources.rollout_gpus(config), actor_gpus}):
        if count % replica:
            yield (
                f"{count} GPUs must be a multiple of {ROLLOUT}.tensor_model_parallel_size * "
                f"data_parallel_size = {replica}. Lower these, or raise trainer.n_gpus_per_node."
            )


def check_training_gpus(config: DictConfig, split: int) -> Iterator[str]:
    """Each role's GPUs divide into groups that share rows, and into groups that share weights.

    split: GPUs that work on the same rows.
    """
    problems = []
    for role, section in FSDP_SECTIONS.items():
        world = resources.gpus_per_node(config, role) * config.trainer.nnodes
        if world % split:
            key = f"{ACTOR}.{config.model_engine}" if config.model_engine != FSDP else ULYSSES
            problems.append(f"{world} GPUs must be a multiple of {key}={split}. Lower it.")
        size = OmegaConf.select(config, f"{section}.fsdp_size") or world  # Megatron has no such key
        if world % size and size < world:  # verl takes a larger one as all GPUs
            problems.append(
                f"{world} GPUs must be a multiple of {section}.fsdp_size={size}. Change it, or set "
                "-1 for all GPUs."
            )
    yield from dict.fromkeys(problems)


def check_models(recipe: Recipe, models: Mapping[str, PretrainedConfig]) -> Iterator[str]:
    """The GPUs that share a model divide its attention heads.

    models: {name: configuration} of the policy and of the other models that the recipe names.
    """
    if recipe.trains and recipe.verl.model_engine == FSDP:
        sequence = recipe.get(ULYSSES)
        if sequence > 1 and not recipe.model.use_remove_padding:
            yield f"{ULYSSES}={sequence} needs {MODEL}.use_remove_padding=true. Set that too."
        for name, model in models.items():
            yield from check_heads(ULYSSES, sequence, recipe.world_size(), name, model)
    if recipe.has_episodes and recipe.rollout.name != "hf":
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        yield from check_heads(
            key, recipe.get(key), recipe.rollout_gpus, "policy", models["policy"]
        )


def check_heads(
    key: str, gpus: int, world: int, name: str, model: PretrainedConfig
) -> Iterator[str]:
    """`gpus` of `world` GPUs can share the attention heads of a model equally. name: of it."""
    if not can_share(model, gpus):
        config = model.get_text_config()
        heads = f"{config.num_attention_heads} attention heads"
        keys = getattr(config, "num_key_value_heads", None)
        heads += f" ({keys} key-value heads)" if keys else ""
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        fitting = ", ".join(str(n) for n in divisors if can_share(model, n))
        yield (
            f"{key}={gpus}: {gpus} GPUs cannot share the {heads} of the {name} equally. Use one "
            f"of: {fitting}."
        )


def can_share(model: PretrainedConfig, gpus: int) -> bool:
    """Whether `gpus` GPUs get as many heads each. Several may have a copy of a key-value head."""
    config = model.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(keys, int):  # a model of another kind
        return True
    return heads % gpus == 0 and (keys % gpus == 0 or gpus % keys == 0)
