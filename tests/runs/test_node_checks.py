"""Tests what a run needs from its machine: open files."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.recipes import CLEAN_ENV, ROOT

RAISE_LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
from kit.runs import node_checks
node_checks.raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_limit_of_open_files_is_raised() -> None:
    environment = CLEAN_ENV | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RAISE_LIMIT]
    assert subprocess.check_output(command, env=environment, text=True) == "1024\n"
