"""Estimate before a run whether it fits this machine's memory and disk. Find missing packages.

Hooks of kit/extras/__init__.py. `make math` runs the shell scripts of this folder before and while
it installs .venv-gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from kit.config.recipe import Recipe
from kit.extras.preflight import attention, memory, node
from kit.rollout.inputs import RunInputs


def check_workers(config: DictConfig, command: str) -> Iterator[str]:
    """A driver that is too old, and all that needs flash-attn if it is missing."""
    yield from node.check_driver(config)
    yield from attention.check(config, command)


def set_sizes(config: DictConfig, hf_config: Any, command: str) -> None:
    """Choose an attention that is installed."""
    attention.choose(config, hf_config, command)


def check_model(recipe: Recipe, hf_config: Any) -> Iterator[str]:
    """Each stage that needs far more memory than a GPU has, and a model that needs flash-attn."""
    yield from attention.check_model(recipe.verl, hf_config, recipe.command)
    yield from memory.find_excess(recipe, hf_config.get_text_config())


def warnings(recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
    """Everything that will not fit, or is missing on this node."""
    yield from memory.find_shortages(recipe, inputs.model)
    yield from node.find_problems(recipe, inputs.model)


def dry_run_lines(recipe: Recipe, inputs: RunInputs) -> list[str]:
    """The attention if it is not verl's, and the estimated memory of each stage."""
    return [
        *attention.describe(recipe.verl, recipe.command),
        *memory.describe(recipe, inputs.model),
    ]
