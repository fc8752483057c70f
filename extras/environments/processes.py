"""Start the program of an environment. kill_process of the pools ends it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from gym_client import GymError
from kit.recipe.keys import ROOT
from kit.verify import servers

LINE_BYTES = 16 * 2**20  # of the longest line that a program writes
# The kernel ends the program with the run, also if that is killed.
WRAPPER = (
    f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from kit.verify.server_process import exit_with_parent; "
    "exit_with_parent(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)


async def start(
    command: Sequence[str], folder: Path, variables: Sequence[str], log: Path
) -> Process:
    """Start a program in a folder, where relative paths begin. Raises GymError.

    Its stderr goes to the log. variables: names of environment variables that it sees, besides the
    public ones.
    """
    program = shutil.which(command[0])
    if program is None:
        raise GymError("died", f"the command {command[0]} is not found")
    words = [str(Path(program).absolute()), *command[1:]]
    wrapped = [sys.executable, "-P", "-c", WRAPPER, str(os.getpid()), *words]
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *wrapped,
            cwd=folder,
            env=servers.list_public_variables(variables),
            stdin=PIPE,
            stdout=PIPE,
            stderr=file,
            limit=LINE_BYTES,
            start_new_session=True,
        )


def describe_log(log: Path) -> str:
    """Return the path and the last line of a log, for messages. Its folder may be temporary."""
    lines = log.read_text(errors="replace").strip().splitlines()[-1:]
    return (
        f"Read its log, {log}, which ends with: {lines[0]:.200}" if lines else "Its log is empty."
    )
