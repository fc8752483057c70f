"""Run a verifier process in a bubblewrap sandbox.

bubblewrap (https://github.com/containers/bubblewrap) restricts the view of a process: no network,
no other processes, no capabilities, and of the file system only packages, the kit and the Python
files of the verifier, read-only. Rows, recordings and keys are not there.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kit.recipe.keys import ROOT

NAMES = ("bwrap",)  # of env.verifier_pool.sandbox
TRIAL_TIMEOUT_S = 20.0
OPTIONS = (
    *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL"),
    *("--proc", "/proc"),
    *("--dev", "/dev"),
    *("--tmpfs", "/tmp"),
)
# Folders and files of a system that programs need: libraries, the dynamic linker and its cache.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib*", "/etc/ld.so*", "/etc/alternatives")
VARIABLES = (*("--setenv", "TMPDIR", "/tmp"), *("--setenv", "KIT_SANDBOX", "1"))


@functools.cache
def find_problem() -> str:
    """Return the reason why bubblewrap cannot be used on this machine, empty if it can."""
    command = sandbox_command(["true"], [])
    try:
        trial = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (
            f"bubblewrap does not start ({error}). Install it (Debian and Ubuntu: apt-get install "
            "bubblewrap)"
        )
    if trial.returncode == 0:
        return ""
    message = trial.stderr.strip()[-200:]
    return (
        f"bubblewrap does not start ({message}). Allow unprivileged user namespaces on this machine"
    )


def sandbox_command(command: Sequence[str], readable: Sequence[Path]) -> list[str]:
    """Return the command line that runs `command` in a sandbox.

    readable: further files and folders that the command must read.
    """
    mounts: list[str] = []
    for name in sorted(itertools.chain(*map(glob.glob, SYSTEM))):
        if Path(name).is_symlink():
            mounts += ["--symlink", os.readlink(name), name]
        else:
            mounts += ["--ro-bind", name, name]
    code = [ROOT / "kit", ROOT / "extras", *ROOT.glob("*.py")]
    own = [Path(sys.prefix), Path(sys.base_prefix), *code]
    for path in (*own, *readable):
        for name in {str(path.absolute()), str(path.resolve())}:
            mounts += ["--ro-bind-try", name, name]
    return ["bwrap", *OPTIONS, *mounts, "--remount-ro", "/", *VARIABLES, "--", *command]
