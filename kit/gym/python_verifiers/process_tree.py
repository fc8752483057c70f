"""Kill a process together with all processes that it has started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

TREE_TIMEOUT_S = 5.0  # for the descendants of a killed process to end


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, also those in another session or process group."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # a stopped process cannot start more processes
        kill_descendants(pid, TREE_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def kill_descendants(pid: int, timeout_s: float = math.inf) -> None:
    """Kill all descendants of a process, until none is left or the time is over.

    The process must be a subreaper (PR_SET_CHILD_SUBREAPER): then the children of its dead children
    are still its descendants. Raises ProcessLookupError if there is no such process.
    """
    import psutil  # most verifiers do not need it

    try:
        root = psutil.Process(pid)
        begin = time.monotonic()
        while kill_running(root.children(recursive=True)):
            if time.monotonic() - begin > timeout_s:
                return
            time.sleep(0.005)
    except psutil.NoSuchProcess:
        raise ProcessLookupError(pid) from None


def kill_running(processes: list[psutil.Process]) -> int:
    """Kill the psutil processes that have not ended, and return their number."""
    import psutil

    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed += 1
    return killed
