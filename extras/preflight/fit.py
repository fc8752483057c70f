"""Find the stages of a recipe that do not fit into a GPU, and a recipe that does.

The sizes are estimates (memory.py). A suggestion is built and estimated again before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from extras.preflight import gpus, memory
from extras.preflight.memory import GIB, KEYS, PAGE, Device
from kit.recipe.keys import ACTOR, ROLLOUT
from kit.recipe.recipe import Recipe, build

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A recipe is refused if a stage needs more than this times the GPU's memory. Below it, the error of
# the estimate may be larger than the shortage.
REFUSED_FROM = 1.15
OVERRIDE = "To start in spite of this estimate, set trainer.allow_memory_over_estimate=true."
ROOM = 0.9  # A suggestion takes at most this part of the GPU, since the sizes are estimates.
TOKENS = {
    "update": f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
}
TOKEN_STEP = 1024  # tokens per micro-batch: suggested values are multiples of it
FRACTION_STEP = 20  # and those of gpu_memory_utilization are multiples of 1/20
MACHINES = ("gpu_24gb", "gpu_16gb")  # of configs/machines


def find_excess(recipe: Recipe, text_config: PretrainedConfig) -> Iterator[str]:
    """Yield a problem for each stage that needs far more memory than this node's smallest GPU has.

    If this node has no GPU, or a CPU trains, the size is less certain, and there is a warning only.
    """
    is_allowed = recipe.trainer.allow_memory_over_estimate or recipe.trainer.device == "cpu"
    if not is_allowed and not memory.find_device(recipe).note:
        for problem in find_large_stages(recipe, text_config, REFUSED_FROM):
            yield f"{problem} {OVERRIDE}"


def find_large_stages(
    recipe: Recipe, text_config: PretrainedConfig, factor: float = 1.0
) -> Iterator[str]:
    """Yield each stage that needs more than `factor` times the device's memory, and what fits."""
    if memory.find_obstacle(recipe, text_config):
        return
    device = memory.find_device(recipe)
    stages = memory.estimate_stages(recipe, text_config, device.size)
    needs = {stage: sum(parts.values()) for stage, parts in stages.items()}
    large = [stage for stage, needed in needs.items() if needed > factor * device.size]
    advice = advise(recipe, text_config, device) if large else ""
    for stage in large:
        fix = advice or f"Lower {KEYS[stage]}, or raise trainer.n_gpus_per_node."
        yield f"{stage} needs {needs[stage] / GIB:.1f} GiB, {device}. {fix} {PAGE}"


def fits(recipe: Recipe, text_config: PretrainedConfig, device_bytes: int) -> bool:
    """Return whether all stages leave some room, and the KV cache holds an episode."""
    stages = memory.estimate_stages(recipe, text_config, device_bytes)
    largest = max(sum(parts.values()) for parts in stages.values())
    return largest <= ROOM * device_bytes and has_cache(recipe, text_config, device_bytes)


def has_cache(recipe: Recipe, text_config: PretrainedConfig, device_bytes: int) -> bool:
    """Return whether the KV cache has room for an episode of full length, if one is sampled."""
    if not recipe.has_episodes:
        return True
    engine = memory.estimate_rollout_engine(recipe, text_config, device_bytes)
    needed = memory.cache_bytes_per_token(recipe, text_config) * recipe.max_episode_length
    return engine["KV cache"] >= needed


# --- what fits -----------------------------------------------------------------------------------


def advise(recipe: Recipe, text_config: PretrainedConfig, device: Device) -> str:
    """Return how to make a recipe fit: with the values to set, or with recipes to add.

    Empty if no change of these is enough, or a CPU trains.
    """
    if recipe.trainer.device == "cpu":
        return ""
    for changed, text in list_changes(recipe, text_config, device):
        if fits(changed, text_config, device.size):
            return text
    return "No recipe of configs/machines makes it fit: use a smaller model, or more GPU memory."


def list_changes(
    recipe: Recipe, text_config: PretrainedConfig, device: Device
) -> Iterator[tuple[Recipe, str]]:
    """Yield changed recipes with the text that tells the change, the smallest change first."""
    is_small = gpus.name_machine(device.size / GIB) in MACHINES
    if not is_small:
        yield from change_values(recipe, text_config, device)
    yield from add_files(recipe)
    if is_small:
        yield from change_values(recipe, text_config, device)
    if recipe.trains and not recipe.model.lora_rank:
        yield from add_files(recipe, "lora")


def add_files(recipe: Recipe, *before: str) -> Iterator[tuple[Recipe, str]]:
    """Yield the recipe with each recipe of MACHINES. before: recipes to add, too."""
    count = recipe.trainer.n_gpus_per_node
    suffix = f" trainer.n_gpus_per_node={count}" if count > 1 else ""
    for name in MACHINES:
        if name in recipe.source.files:
            continue
        files = (*before, name)
        source = recipe.source.add_files(*files)
        if suffix:
            source = source.override([suffix.strip()])
        changed = build(source, recipe.command, recipe.facts, recipe.functions)
        options = " ".join(f"--config {file}" for file in files)
        yield changed, f"Add {options}{suffix}."


def change_values(
    recipe: Recipe, text_config: PretrainedConfig, device: Device
) -> Iterator[tuple[Recipe, str]]:
    """Yield the recipe with fewer tokens per micro-batch, and less memory for the rollout engine.

    The values are the largest that fit by the estimate. Nothing if there are none.
    """
    limit = ROOM * device.size
    values = []
    for stage, parts in memory.estimate_stages(recipe, text_config, device.size).items():
        excess = sum(parts.values()) - limit
        if excess <= 0:
            continue
        if stage == "generate":
            fraction = recipe.rollout.gpu_memory_utilization - excess / device.size
            fraction = int(fraction * FRACTION_STEP) / FRACTION_STEP
            if fraction <= 0:
                return
            values.append(f"{ROLLOUT}.gpu_memory_utilization={fraction}")
        else:
            tokens = recipe.get(TOKENS[stage])
            per_token = (parts["activations"] + parts.get("logits", 0.0)) / tokens
            count = int((tokens - excess / per_token) / TOKEN_STEP) * TOKEN_STEP
            episode = math.ceil(recipe.max_episode_length / recipe.engine.sequence_gpus)
            values.append(f"{TOKENS[stage]}={max(count, episode)}")
    yield recipe.change(*values), f"Set {' '.join(values)}."
