"""Tests of the hooks in conftest.py, and of the settings of `make mutate`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.recipes import CLEAN_ENV, ROOT

# Tests that a nested pytest runs.
INNER_TESTS = """
import signal, time
import pytest

def test_skipped():
    pytest.skip("no such program here")

@pytest.mark.skipif(True, reason="needs root: it acts as another user")
def test_skipped_by_design():
    pass

@pytest.mark.xfail
def test_expected_to_fail():
    assert False

def test_interrupted_by_ctrl_c():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

@pytest.mark.timeout(2)
def test_hangs():
    signal.alarm(100)  # as a stage of a run does
    time.sleep(60)
"""


def run_tests(folder: Path, *arguments: str, **variables: str) -> str:
    """Run pytest on INNER_TESTS -> its output.

    SIGINT is ignored, as in a background process of a shell.
    """
    (folder / "test_inner.py").write_text(INNER_TESTS)
    inherited = {name: value for name, value in CLEAN_ENV.items() if name != "CI"}
    paths = [str(ROOT), *sys.path]
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-rA",
    ]
    command += [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        str(folder),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=folder, env=inherited | variables, capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize("is_ci", [True, False])
def test_a_skipped_test_fails_in_ci_unless_its_reason_is_allowed(
    tmp_path: Path, is_ci: bool
) -> None:
    variables = {"CI": "true"} if is_ci else {}
    output = run_tests(tmp_path, "-k", "not test_hangs", **variables)
    expected = "1 failed, 1 passed, 1 skipped" if is_ci else "1 passed, 2 skipped"
    assert f"{expected}, 1 deselected, 1 xfailed" in output, output
    message = "test_skipped was skipped, which CI does not allow: no such program here"
    assert (message in output) == is_ci


def test_a_test_that_hangs_ends_with_its_traceback(tmp_path: Path) -> None:
    output = run_tests(tmp_path, "-k", "test_hangs")
    assert "Timeout" in output and "time.sleep(60)" in output, output


def test_every_bug_of_mutate_yaml_can_be_planted_and_its_tests_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`make mutate` takes about an hour, and stops at a bug whose line has changed."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from mutants import plant

    settings = yaml.safe_load((ROOT / "benchmarks" / "mutate.yaml").read_text())
    assert settings["planted"]
    for bug in settings["planted"]:
        source = (ROOT / bug["file"]).read_text()
        assert plant(bug["file"], source, bug).source != source, bug
    for name, entry in settings["files"].items():
        assert (ROOT / name).is_file()
        assert all((ROOT / "tests" / test).is_file() for test in entry["tests"]), name
