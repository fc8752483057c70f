"""Estimate before a run whether it fits this machine's memory and disk. Find missing packages.

`make math` runs the shell scripts of this folder before and while it installs .venv-gpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from extras.preflight import attention, fit, machine, memory, node
from kit.engine.inputs import RunInputs
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Preflight(RecipeCheck):
    """Checks of this machine."""

    def check_start(self, settings: Settings) -> Iterator[str]:
        """Yield a problem if this machine has too few GPUs."""
        yield from machine.check_start(settings)

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Yield what this machine lacks for any run with its GPUs."""
        yield from machine.find_problems(settings)

    def derive(self, settings: Settings, hf_config: PretrainedConfig) -> Mapping[str, object]:
        """Choose an attention that is installed."""
        return attention.choose(settings, hf_config)

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """Yield stages that need far more memory than a GPU has, and parts without flash-attn."""
        yield from attention.check_model(recipe, hf_config)
        yield from fit.find_excess(recipe, hf_config.get_text_config())

    def warnings(self, recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
        """Yield what will not fit, or is missing on this node."""
        if recipe.trainer.device != "cpu":
            yield from machine.describe_differences()
        yield from fit.find_large_stages(recipe, inputs.model)
        yield from memory.check_cache(recipe, inputs.model)
        yield from node.find_problems(recipe, inputs.model)

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> list[str]:
        """Return the attention if it is not verl's, and the estimated memory of each stage."""
        lines = attention.describe(recipe)
        return lines + memory.describe(recipe, inputs.model)
