"""What lab/ adds to a run: its report, an estimate of its time, and the card of its export.

A run imports this file before its recipe is checked, so each method imports what it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kit.config.recipe import Recipe
from kit.features import Feature

if TYPE_CHECKING:
    from kit.runs.launch import Launch


class Report(Feature):
    """The page report.html."""

    def write_report(self, folder: Path) -> Iterable[str]:
        """Write report.html of a run's folder, and return lines about its first finding."""
        from lab.report import diagnosis, report_page
        from lab.run_folder import RunFolder

        run = RunFolder(folder)
        report_page.write_page([run], folder / "report.html")
        for finding in diagnosis.find_problems(run)[:1]:
            return [f"Found: {finding.problem}", f"Next: {finding.next_step}"]
        return []


class Price(Feature):
    """An estimate of the time that a run takes."""

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Print an estimate after the third step."""
        from lab import price

        run = launch.run
        steps = itertools.count(1)

        def record(step: int, metrics: Mapping[str, float]) -> None:
            """Take a line of metrics.jsonl, which is written already."""
            if price.is_step(metrics) and next(steps) == price.MIN_STEPS and step < run.last:
                price.print_rest(run.folder, run.recipe.verl, self.command, run.last)

        run.log.readers.append(record)


class RunCard(Feature):
    """README.md in the export of a run, in the form of Hugging Face's model cards."""

    def write_export(self, recipe: Recipe, folder: Path) -> None:
        """Write the card. folder: of the run."""
        from lab import run_card

        run_card.write_card(recipe, folder)
