"""The report of a run: report.html, and the command `show`. Hooks of kit/extras/__init__.py."""

from __future__ import annotations

from pathlib import Path


def write_report(folder: Path) -> None:
    """Write report.html of a run's folder."""
    from kit.extras.report import report_page  # takes a second

    report_page.write_page([folder], folder / "report.html")
