"""Send weights to separate rollout engines by gloo (rollout.checkpoint_engine.backend: gloo)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kit.recipe.keys import ROLLOUT
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Gloo(RecipeCheck):
    """verl's checkpoint engine of this folder."""

    def derive(self, settings: Settings, hf_config: PretrainedConfig) -> Mapping[str, object]:
        """Make verl import the engine in every process."""
        return {f"{ROLLOUT}.checkpoint_engine.custom_backend_module": f"{__name__}.engine"}
