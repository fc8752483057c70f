"""Containment of programs that the policy writes: a bubblewrap sandbox, and the end of a process with its children.

bubblewrap (https://github.com/containers/bubblewrap) gives a process its own view of the machine: no network, a
read-only file system, an empty home and /tmp, only its own processes, no capabilities.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from kit.config.user_functions import ROOT
from kit.extras.python_verifiers.verifier_process import kill_descendants

TRY_S = 20.0  # seconds for a trial run of bubblewrap
TREE_S = 5.0  # seconds for a process and its children to be gone
INSTALL = "install it (Debian and Ubuntu: apt-get install bubblewrap)"


@functools.cache
def why_unavailable() -> str:
    """Return the reason why bubblewrap cannot be used here; empty if it can."""
    if not shutil.which("bwrap"):
        return f"bubblewrap is not installed; {INSTALL}"
    try:
        tried = subprocess.run(wrap(["true"], []), capture_output=True, text=True, timeout=TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start: {error}"
    if tried.returncode:
        why = tried.stderr.strip()[-200:]
        return (
            f"bubblewrap does not start ({why}); allow unprivileged user namespaces on this machine"
        )
    return ""


def wrap(command: Sequence[str], readable: Sequence[Path]) -> list[str]:
    """Return the command line that runs `command` in a sandbox.

    readable: folders below the home or /tmp that the command must read. Everything else there is hidden.
    """
    options = [
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    options += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    sockets = Path(
        tempfile.gettempdir()
    ).resolve()  # of vLLM and Ray, which a read-only mount does not close
    hidden = {Path("/tmp"), Path("/var/tmp"), Path("/run"), Path.home(), Path("/root"), sockets} - {
        Path("/")
    }
    for folder in (folder for folder in sorted(hidden) if folder.is_dir()):
        options += ["--tmpfs", str(folder)]
    python = [Path(prefix) for prefix in dict.fromkeys((sys.prefix, sys.base_prefix))]
    for folder in dict.fromkeys(
        path.resolve() for path in (*python, ROOT, *readable) if path.is_dir()
    ):
        options += ["--ro-bind", str(folder), str(folder)]
    return ["bwrap", *options, "--setenv", "TMPDIR", "/tmp", "--", *command]


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, also those with a session of their own.

    The process is stopped first, so that it starts no more.
    """
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        kill_descendants(pid, TREE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
