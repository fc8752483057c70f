"""Estimate before a run whether it fits this machine's memory and disk. Find missing packages.

`make math` runs the shell scripts of this folder before and while it installs .venv-gpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from extras.preflight import attention, memory, node
from kit.engine.inputs import RunInputs
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Preflight(RecipeCheck):
    """Checks of this machine."""

    def derive(self, settings: Settings, hf_config: PretrainedConfig) -> Mapping[str, object]:
        """Choose an attention that is installed."""
        return attention.choose(settings, hf_config)

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """Yield stages that need far more memory than a GPU has, and parts without flash-attn."""
        yield from attention.check_model(recipe, hf_config)
        yield from memory.find_excess(recipe, hf_config.get_text_config())

    def warnings(self, recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
        """Yield what will not fit, or is missing on this node."""
        yield from memory.find_large_stages(recipe, inputs.model)
        yield from memory.check_cache(recipe, inputs.model)
        yield from node.find_problems(recipe, inputs.model)

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> list[str]:
        """Return the attention if it is not verl's, and the estimated memory of each stage."""
        lines = attention.describe(recipe)
        return lines + memory.describe(recipe, inputs.model)
