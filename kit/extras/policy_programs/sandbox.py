"""Run a verifier process in a bubblewrap sandbox.

bubblewrap (https://github.com/containers/bubblewrap) restricts the view of a process: no network, a
read-only file system, an empty home directory and /tmp, no other processes, no capabilities.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kit.config.keys import ROOT

NAMES = ("bwrap",)  # of env.verifier_pool.sandbox
TRIAL_TIMEOUT_S = 20.0
OPTIONS = (
    *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL"),
    *("--ro-bind", "/", "/"),
    *("--proc", "/proc"),
    *("--dev", "/dev"),
)
VARIABLES = (*("--setenv", "TMPDIR", "/tmp"), *("--setenv", "KIT_SANDBOX", "1"))


@functools.cache
def find_problem() -> str:
    """Return the reason why bubblewrap cannot be used on this machine, empty if it can."""
    if not shutil.which("bwrap"):
        return (
            "bubblewrap is not installed. Install it "
            "(Debian and Ubuntu: apt-get install bubblewrap)"
        )
    command = sandbox_command(["true"], [])
    try:
        trial = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start: {error}. Repair its installation"
    if trial.returncode == 0:
        return ""
    message = trial.stderr.strip()[-200:]
    return (
        f"bubblewrap does not start ({message}). Allow unprivileged user namespaces on this machine"
    )


def sandbox_command(command: Sequence[str], readable_folders: Sequence[Path]) -> list[str]:
    """Return the command line that runs `command` in a sandbox.

    readable_folders: folders in the home directory or /tmp that the command must read. The sandbox
    hides everything else there.
    """
    mounts: list[str] = []
    for folder in list_hidden_folders():
        mounts += ["--tmpfs", str(folder)]
    python_folders = [Path(sys.prefix), Path(sys.base_prefix)]
    visible = [path.resolve() for path in (*python_folders, ROOT, *readable_folders)]
    for folder in dict.fromkeys(visible):
        if folder.is_dir():
            mounts += ["--ro-bind", str(folder), str(folder)]
    return ["bwrap", *OPTIONS, *mounts, *VARIABLES, "--", *command]


def list_hidden_folders() -> list[Path]:
    """Return the folders that the sandbox replaces by empty ones."""
    # They contain the sockets of vLLM and Ray. A process can connect to a socket even if its folder
    # is mounted read-only.
    temporary_folder = Path(tempfile.gettempdir()).resolve()
    folders = {Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/root")}
    folders |= {Path.home(), temporary_folder}
    folders.discard(Path("/"))
    return [folder for folder in sorted(folders) if folder.is_dir()]
