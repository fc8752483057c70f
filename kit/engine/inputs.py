"""All that a run needs besides its configuration. kit/run/prepare.py loads it.

Convenience: one typed object in place of a dozen arguments.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import env
from env import Json
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.data.generated_rows import RowSource
from kit.data.reward_scale import Scales
from kit.data.tasks import LongRow
from kit.verify.python_verifiers.settings import PythonVerifiers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Row = TypeVar("Row")  # env.Task, or an example for supervised training


class Trial(NamedTuple):
    """A verifier's trial before the run. result: "" if there is only a warning."""

    result: str
    warning: str = ""


@dataclasses.dataclass
class RunInputs(Generic[Row]):
    """All that a run needs besides its configuration: tasks and the model's files."""

    train: list[Row]
    validation: list[Row]
    dropped: list[LongRow | str]  # rows over data.max_prompt_length, and counts of other rows
    tokenizer: PreTrainedTokenizerBase
    processor: TextProcessor  # or the one of a model that reads images
    template: ChatTemplate
    stop_ids: set[int]  # ids that end a response
    source: RowSource  # the tasks of each batch
    model: PretrainedConfig  # of its text part
    verifiers: PythonVerifiers
    tools: list[Json] = dataclasses.field(default_factory=list)  # of rows that have none
    generated: list[env.Task] = dataclasses.field(default_factory=list)  # from functions, batch 1
    trials: list[Trial] = dataclasses.field(default_factory=list)  # of verifiers
    scales: Scales = dataclasses.field(default_factory=dict)
    per_epoch: float = math.inf  # prompts for each row of files to be used once; inf without files

    @property
    def tasks(self) -> list[Row | env.Task]:
        """Return every task that is known before the run."""
        return [*self.train, *self.generated, *self.validation]
