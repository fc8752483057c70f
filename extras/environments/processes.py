"""The program of an environment that the run starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from gym_client import GymError
from kit.recipe.keys import ROOT
from kit.verify.python_verifiers.process import kill_tree

# The kernel ends the program with the run, also if that is killed.
WRAPPER = (
    f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from kit.verify.server_process import exit_with_parent; "
    "exit_with_parent(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)


def wrap(command: Sequence[str], folder: Path) -> list[str]:
    """Return a command that runs a program in `folder` until the run ends. Raises GymError.

    The words that name a file of the folder of the run, and none of `folder`, become absolute.
    """
    program = shutil.which(command[0])
    if program is None:
        raise GymError("died", f"the command {command[0]} is not found")
    words = [str(Path(program).absolute())]
    for word in command[1:]:
        is_outside = os.path.exists(word) and not (folder / word).exists()
        words.append(os.path.abspath(word) if is_outside else word)
    return [sys.executable, "-P", "-c", WRAPPER, str(os.getpid()), *words]


def kill_programs(folder: Path) -> None:
    """Kill the processes that run in a folder, with all that they started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ends, or belongs to another user
            if process.cwd() == str(folder):
                kill_tree(process.pid)


def describe_log(log: Path) -> str:
    """Return the path and the last line of a log, for messages. Its folder may be temporary."""
    lines = log.read_text(errors="replace").strip().splitlines()[-1:]
    return (
        f"Read its log, {log}, which ends with: {lines[0]:.200}" if lines else "Its log is empty."
    )
