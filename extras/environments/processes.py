"""Start the program of an environment, and kill it with all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from gym_client import GymError
from kit.recipe.keys import ROOT
from kit.verify import servers
from kit.verify.python_verifiers.process import kill_tree

EXIT_TIMEOUT_S = 2.0  # for a program to end after its stdin is closed
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
    """Start a program in a folder, where relative paths begin. Its stderr goes to the log.

    Raises GymError.

    variables: the names of environment variables that it sees, besides the public ones.
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


async def stop(process: Process) -> None:
    """Close the program's stdin, and kill it if it does not end."""
    assert process.stdin
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)
    if process.returncode is None:
        kill_tree(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)
