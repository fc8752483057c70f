"""The price of a run: time, tokens and device-hours to its end.

The command `price` reads a run. A dry run prints the estimate of an earlier run of the same recipe,
and a training run prints one after its third step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kit.config.recipe import Recipe
from kit.features import Feature
from kit.rollout.inputs import RunInputs

if TYPE_CHECKING:
    from kit.runs.launch import Launch
    from kit.runs.run import Run


class Price(Feature):
    """Estimates of the time that a run takes."""

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return the estimate of an earlier run in runs/ with the same work in a step."""
        from kit.extras.run_price import estimate

        return estimate.describe_earlier(recipe.verl, self.command, Path("runs"))

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Print an estimate after the third step."""
        launch.run.log.readers.append(StepCounter(launch.run).record)


class StepCounter:
    """Counts the steps of a run since its start, and prints an estimate after the third."""

    def __init__(self, run: Run):
        self.run = run
        self.count = 0

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a line of metrics.jsonl, which is written already."""
        from kit.extras.run_price import estimate
        from kit.runs.console import say

        if not estimate.is_step(metrics):
            return
        self.count += 1
        if self.count == estimate.MIN_STEPS:
            run = self.run
            recipe = run.recipe
            for line in estimate.describe_running(
                run.folder, recipe.verl, recipe.command, run.last
            ):
                say(line)
