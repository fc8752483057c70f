"""The processor of text models: the steps before and after the tokenizer.

An optional feature (kit/features.py) has the processor of models that read images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class TextProcessor:
    """The processor of a text model. It has only a tokenizer, so most methods do nothing."""

    tokenizer: Any
    reads_images = False

    def placeholder_ids(self) -> Sequence[int]:
        """Ids that stand for an image, which no policy may sample."""
        return ()

    def template_messages(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Chat messages in the form that the chat template takes."""
        return messages

    def expand(self, ids: list[int], messages: Sequence[dict[str, Any]], where: str) -> list[int]:
        """The ids of a prompt as the trainer sees them: a placeholder for each image feature."""
        return ids

    def engine_inputs(self, ids: list[int], task: Any) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt as the rollout engine takes it: (ids, further arguments)."""
        return ids, {}

    def sampling_params(self) -> Mapping[str, Any]:
        """Sampling parameters that the model needs."""
        return {}

    def check(self, config: Any, tasks: Sequence[Any], command: str) -> None:
        """Check that the rows' images fit the recipe. Raises ConfigError."""

    def add_images(self, batch: Any, episodes: Sequence[Any]) -> None:
        """Add the inputs of the images to a batch (verl's DataProto)."""

    def mask_placeholders(self, workers: Any) -> None:
        """Make the workers' models give placeholders no probability."""
