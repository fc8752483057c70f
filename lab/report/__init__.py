"""The report of a run: report.html, and the command `show`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kit.features import Feature


class Report(Feature):
    """The page report.html."""

    def write_report(self, folder: Path) -> Iterable[str]:
        """Write report.html of a run's folder, and return lines about its first finding."""
        from lab.report import diagnosis, report_page, run_data  # takes a second

        run = run_data.RunData(folder)
        report_page.write_runs([run], folder / "report.html")
        for finding in diagnosis.find_problems(run)[:1]:
            return [f"Found: {finding.problem}", f"Next: {finding.next_step}"]
        return []
