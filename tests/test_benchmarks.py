"""Tests that `make mutate` can plant its bugs, and that the tests that it names exist."""

from __future__ import annotations

import yaml

from tests.helpers.recipes import ROOT

FOLDER = ROOT / "benchmarks"


def test_each_bug_of_mutate_yaml_can_be_planted_and_its_tests_exist(monkeypatch):
    """`make mutate` takes up to 40 minutes, and stops at a bug whose line has changed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from mutants import plant

    settings = yaml.safe_load((FOLDER / "mutate.yaml").read_text())
    assert settings["planted"]
    for bug in settings["planted"]:
        source = (ROOT / bug["file"]).read_text()
        assert plant(bug["file"], source, bug).source != source, bug
    for name, entry in settings["files"].items():
        assert (ROOT / name).is_file()
        assert all((ROOT / "tests" / test).is_file() for test in entry["tests"]), name
