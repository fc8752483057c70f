"""What lab/ adds to a run: its report, and the card of its export.

A run imports this file before its recipe is checked, so each method imports what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kit.recipe.recipe import Recipe
from kit.run.features import RunOutput


class Report(RunOutput):
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


class RunCard(RunOutput):
    """README.md in the export of a run, in the form of Hugging Face's model cards."""

    def write_export(self, recipe: Recipe, folder: Path) -> None:
        """Write the card. folder: of the run."""
        from lab import run_card

        run_card.write_card(recipe, folder)
