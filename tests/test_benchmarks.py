"""Tests that the scripts in benchmarks/ can be imported, and that `make mutate` can plant its bugs.

The scripts run for minutes or need a GPU. A change of the code that they use is noticed here.
"""

from __future__ import annotations

import importlib
import os
from unittest import mock

import yaml

from tests.helpers.recipes import ROOT

FOLDER = ROOT / "benchmarks"
OTHER_ENVIRONMENT = {"trl_grpo"}  # benchmarks/peers.py runs it in .venv-trl


def test_each_script_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {path.stem for path in FOLDER.glob("*.py")} - OTHER_ENVIRONMENT
    with mock.patch.dict(os.environ):  # some scripts set variables
        for name in names:
            assert importlib.import_module(name).__file__ == str(FOLDER / f"{name}.py")


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
