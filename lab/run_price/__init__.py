"""The price of a run: time, tokens and device-hours to its end.

The command `price` reads a run. A dry run prints the estimate of an earlier run of the same recipe,
and a training run prints one after its third step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kit.config.recipe import Recipe
from kit.features import Feature
from kit.rollout.inputs import RunInputs

if TYPE_CHECKING:
    from kit.runs.launch import Launch


class Price(Feature):
    """Estimates of the time that a run takes."""

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return the estimate of an earlier run in runs/ with the same work in a step."""
        from lab.run_price import price

        return price.describe_earlier(recipe.verl, self.command, Path("runs"))

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Print an estimate after the third step."""
        from kit.runs.console import say
        from lab.run_price import price

        run = launch.run
        steps = itertools.count(1)

        def record(step: int, metrics: Mapping[str, float]) -> None:
            """Take a line of metrics.jsonl, which is written already."""
            if price.is_step(metrics) and next(steps) == price.MIN_STEPS and step < run.last:
                say(price.describe_running(run.folder, run.recipe.verl, self.command, run.last))

        run.log.readers.append(record)
