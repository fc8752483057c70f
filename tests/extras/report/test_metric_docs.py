"""metric_docs.yaml of the report describes every status. tests/conftest.py checks the metrics."""

from __future__ import annotations

import re

from kit.extras.report.metric_docs import STATUSES, Status, find_status
from tests.helpers.recipes import ROOT


def test_every_status_is_described_and_every_described_status_exists():
    paths = [*ROOT.glob("*.py"), *ROOT.glob("kit/**/*.py")]
    source = "".join(path.read_text() for path in paths if path.stem != "metric_docs")
    statuses = set(re.findall(r"""(?:GymError|ServerDownError)\(\s*"(\w+)\"""", source))
    statuses |= set(re.findall(r'\.status(?:, \S+)* = "(\w+)"', source))
    assert len(statuses) > 15
    undescribed = [name for name in statuses - {"ok"} if find_status(name) == Status("", "")]
    assert undescribed == []
    families = ("http_*", "environment_*")  # the code completes these names
    names = [name for name in STATUSES if name not in families]
    unused = [name for name in names if f'"{name}"' not in source]
    assert unused == []
