"""The report of a run: report.html, and the command `show`."""

from __future__ import annotations

from pathlib import Path

from kit.features import Feature


class Report(Feature):
    """The page report.html."""

    def write_report(self, folder: Path) -> None:
        """Write report.html of a run's folder."""
        from kit.extras.report import report_page  # takes a second

        report_page.write_page([folder], folder / "report.html")
