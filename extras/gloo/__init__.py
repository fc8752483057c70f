"""Send weights to separate rollout engines by gloo (rollout.checkpoint_engine.backend: gloo)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.features import Feature

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PretrainedConfig


class Gloo(Feature):
    """verl's checkpoint engine of this folder."""

    def set_sizes(self, config: DictConfig, hf_config: PretrainedConfig) -> None:
        """Make verl import the engine in every process."""
        engine = config.actor_rollout_ref.rollout.checkpoint_engine
        engine.custom_backend_module = f"{__name__}.engine"
