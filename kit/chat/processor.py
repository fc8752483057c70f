"""The processor of text models: the steps before and after the tokenizer.

An optional part (kit/optional.py) has the processor of models that read images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from verl import DataProto

    from env import Json, Task
    from kit.data.episode import Episode
    from kit.recipe.settings import Settings


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

    def derive(self, settings: Settings, tasks: Sequence[Task]) -> Mapping[str, object]:
        """Return {dotted key: value} that follow from the rows' images. Raises ConfigError."""
        return {}

    def add_images(self, batch: DataProto, episodes: Sequence[Episode]) -> None:
        """Add the inputs of the images to a batch."""

    def mask_placeholders(self, workers: Any) -> None:  # training.Workers: a later part of the kit
        """Make the workers' models give placeholders no probability."""
