"""The report of a run: report.html, and the command `show`."""
