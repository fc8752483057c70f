"""Tests what a run needs from its machine: open files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from kit.runs import node_checks
from tests.helpers.recipes import CLEAN_ENV, ROOT

CHECK_LIMIT = """
import resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from kit.runs import node_checks
node_checks.raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (256, 256, "may open 256 files (ulimit -n), and a run needs 1024. Run `ulimit -n 1024`"),
        (64, 1024, "1024"),
        (256, HARD_LIMIT, str(min(HARD_LIMIT, node_checks.MAX_OPEN_FILES))),
    ],
)
def test_the_limit_of_open_files_is_raised_or_named(soft: int, hard: int, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK_LIMIT, str(soft), str(hard)],
        env=CLEAN_ENV | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    output = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
    assert output == expected or (not done.stdout and expected in output)
