"""The hooks of conftest.py, and the bugs that `make mutate` plants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import GIVEN, ROOT

TESTS = """
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
    """Return the output of pytest on TESTS with SIGINT ignored, as in a shell's background."""
    (folder / "test_inner.py").write_text(TESTS)
    kept = {name: value for name, value in GIVEN.items() if name != "CI"}
    paths = [str(ROOT), str(ROOT / "tests"), *sys.path]
    variables |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rA"]
    command += [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        str(folder),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=folder, env=kept | variables, capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize("is_ci", [True, False])
def test_what_is_skipped_has_failed_in_ci_unless_by_design(tmp_path: Path, is_ci: bool) -> None:
    output = run_tests(tmp_path, "-k", "not test_hangs", **{"CI": "true"} if is_ci else {})
    expected = "1 failed, 1 passed, 1 skipped" if is_ci else "1 passed, 2 skipped"
    assert f"{expected}, 1 deselected, 1 xfailed" in output, output
    assert (
        "test_skipped was skipped, which CI does not allow: no such program here" in output
    ) == is_ci


def test_a_test_that_hangs_ends_and_says_where(tmp_path: Path) -> None:
    output = run_tests(tmp_path, "-k", "test_hangs")
    assert "Timeout" in output and "time.sleep(60)" in output, output


def test_every_bug_of_mutate_yaml_can_be_planted_and_its_files_have_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`make mutate` takes most of an hour, and would stop at a bug whose line has changed."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from mutants import plant

    settings = yaml.safe_load((ROOT / "benchmarks" / "mutate.yaml").read_text())
    assert settings["planted"]
    for bug in settings["planted"]:
        source = (ROOT / bug["file"]).read_text()
        assert plant(bug["file"], source, bug).source != source, bug
    for name, of in settings["files"].items():
        assert (ROOT / name).is_file()
        assert all((ROOT / "tests" / test).is_file() for test in of["tests"]), name
