"""GPUs that share rows, weights or a model: their number divides the machine and the model.

verl, vLLM and torch refuse other numbers too, but in their processes, minutes after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from kit.config import resources
from kit.config.load import ACTOR, FSDP, MODEL, REF, ROLLOUT
from kit.config.model_files import expert_count
from kit.config.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
FSDP_SECTIONS = {  # {the actor, or a role of trainer.resource_pools: the section of its engine}
    "actor": f"{ACTOR}.fsdp_config",
    "ref": f"{REF}.fsdp_config",
    "critic": "critic.fsdp",
    "reward_model": "critic.fsdp",
}
# What GPUs share of a model: {field of its configuration: its name}. vLLM also divides the widths.
HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
WIDTHS = {
    "vocab_size": "tokens of the vocabulary",  # raised to a multiple of 64
    "intermediate_size": "MLP channels",
    "moe_intermediate_size": "channels of an expert",
}


def check_rollout_gpus(config: DictConfig) -> Iterator[str]:
    """The GPUs divide into whole replicas, and no replica has a part of its last node."""
    rollout = config.actor_rollout_ref.rollout
    tensor = rollout.tensor_model_parallel_size
    data = rollout.data_parallel_size
    replica = tensor * data
    sizes = f"{ROLLOUT}.tensor_model_parallel_size * data_parallel_size = {replica}"
    # verl's actor has the same requirement if the replicas have separate GPUs
    actor_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    counts = sorted({resources.rollout_gpus(config), actor_gpus})
    uneven = [count for count in counts if count % replica]
    for count in uneven:
        yield (
            f"{count} GPUs must be a multiple of {sizes}. Lower these, or raise "
            "trainer.n_gpus_per_node."
        )
    node = rollout.n_gpus_per_node
    fills_nodes = replica % node == 0 and (data == 1 or node % tensor == 0)
    if node % replica and not fills_nodes and not uneven:
        yield f"{sizes} must divide the {node} GPUs of a node, or fill whole nodes. Lower these."


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
    """The GPUs that share a model divide its attention heads, and with vLLM its widths.

    models: {name: configuration} of the policy and of the other models that the recipe names.
    """
    rollout = recipe.rollout
    if recipe.trains and recipe.verl.model_engine == FSDP:
        sequence = recipe.get(ULYSSES)
        if sequence > 1 and not recipe.model.use_remove_padding:
            yield f"{ULYSSES}={sequence} needs {MODEL}.use_remove_padding=true. Set that too."
        for name, model in models.items():
            yield from check_shares(ULYSSES, sequence, recipe.world_size(), name, model, HEADS)
    if recipe.has_episodes and rollout.name != "hf":
        splits_experts = rollout.expert_parallel_size == 1  # else each GPU has whole ones
        parts = HEADS | WIDTHS if rollout.name == "vllm" and splits_experts else HEADS
        key = f"{ROLLOUT}.tensor_model_parallel_size"
        gpus = recipe.get(key)
        yield from check_shares(key, gpus, recipe.rollout_gpus, "policy", models["policy"], parts)
        if not splits_experts and not expert_count(models["policy"].get_text_config()):
            yield f"{ROLLOUT}.expert_parallel_size: the policy has no experts. Remove it."


def check_shares(
    key: str, gpus: int, world: int, name: str, model: PretrainedConfig, parts: Mapping[str, str]
) -> Iterator[str]:
    """`gpus` of `world` GPUs can share each of `parts` of a model equally. name: of the model."""
    found = list_indivisible(model, gpus, parts)
    if found:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        fitting = [n for n in divisors if not list_indivisible(model, n, parts)]
        yield (
            f"{key}={gpus}: {gpus} GPUs cannot share the {' and the '.join(found)} of the {name} "
            f"equally. Use one of: {', '.join(map(str, fitting))}."
        )


def list_indivisible(model: PretrainedConfig, gpus: int, parts: Mapping[str, str]) -> list[str]:
    """List the parts of a model that `gpus` GPUs cannot share equally.

    Several GPUs may have a copy of one key-value head.
    """
    found = []
    for field, noun in parts.items():
        count = getattr(model.get_text_config(), field, None)
        if not count or not isinstance(count, int):  # a model of another kind
            continue
        if field == "vocab_size":
            count = -(-count // 64) * 64
        is_copied = field == "num_key_value_heads" and gpus % count == 0
        if count % gpus and not is_copied:
            found.append(f"{count} {noun}")
    return found
