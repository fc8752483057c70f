"""The processor of text models: the steps before and after the tokenizer.

An optional feature (kit/optional.py) has the processor of models that read images.

Convenience: models that read images need no other code path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from env import Json, Task, TaskImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from verl import DataProto

    from kit.recipe.settings import Settings


@dataclass
class TextProcessor:
    """The processor of a text model. It has only a tokenizer, so the methods do nothing."""

    tokenizer: PreTrainedTokenizerBase
    reads_images = False

    def placeholder_ids(self) -> Sequence[int]:
        """Return the ids that stand for an image, which no policy may sample."""
        return ()

    def read_images(self, messages: Sequence[Json], row_id: str) -> Sequence[TaskImage]:
        """Read the images of a row's chat messages, and count their tokens. Raises DataError."""
        return ()

    def expand(self, ids: list[int], images: Sequence[TaskImage], row_id: str) -> list[int]:
        """Return a prompt as the trainer sees it: an id for each token of an image."""
        return ids

    def engine_inputs(self, ids: list[int], task: Task) -> tuple[list[int], Json]:
        """Return a prompt as the rollout engine takes it: (ids, further arguments)."""
        return ids, {}

    def sampling_params(self) -> Json:
        """Return the sampling parameters that the model needs."""
        return {}

    def derive(self, settings: Settings, tasks: Sequence[Task]) -> Mapping[str, object]:
        """Return {dotted key: value} that follow from the rows' images. Raises ConfigError."""
        return {}

    def add_images(self, batch: DataProto, images: Sequence[Sequence[str]]) -> None:
        """Add the inputs of images to a batch. images: the addresses in each row of the batch."""

    def mask_placeholders(self, workers: object) -> None:
        """Make the models of training.Workers give placeholders no probability."""
