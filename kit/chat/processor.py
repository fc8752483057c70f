"""The processor of text models: the steps before and after the tokenizer.

An optional feature (kit/features.py) has the processor of models that read images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedTokenizerBase
    from verl import DataProto

    from env import Json, Task
    from kit.data.episode import Episode


@dataclass
class TextProcessor:
    """The processor of a text model. It has only a tokenizer, so most methods do nothing."""

    tokenizer: PreTrainedTokenizerBase
    reads_images = False

    def placeholder_ids(self) -> Sequence[int]:
        """Ids that stand for an image, which no policy may sample."""
        return ()

    def template_messages(self, messages: Sequence[Json]) -> Sequence[Json]:
        """Chat messages in the form that the chat template takes."""
        return messages

    def expand(self, ids: list[int], messages: Sequence[Json], where: str) -> list[int]:
        """The ids of a prompt as the trainer sees them: a placeholder for each image feature."""
        return ids

    def engine_inputs(self, ids: list[int], task: Task) -> tuple[list[int], Json]:
        """Return a prompt as the rollout engine takes it: (ids, further arguments)."""
        return ids, {}

    def sampling_params(self) -> Json:
        """Sampling parameters that the model needs."""
        return {}

    def check(self, config: DictConfig, tasks: Sequence[Task], command: str) -> None:
        """Check that the rows' images fit the recipe. Raises ConfigError."""

    def add_images(self, batch: DataProto, episodes: Sequence[Episode]) -> None:
        """Add the inputs of the images to a batch."""

    def mask_placeholders(self, workers: Any) -> None:  # training.Workers: a later part of the kit
        """Make the workers' models give placeholders no probability."""
