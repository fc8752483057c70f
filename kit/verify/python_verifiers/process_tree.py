"""Kill a process together with all processes that it has started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time

import psutil

TREE_TIMEOUT_S = 5.0  # for the descendants of a killed process to end


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, also those in another session or process group."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGSTOP)  # a stopped process cannot start more processes
        kill_descendants(pid, TREE_TIMEOUT_S)
        os.kill(pid, signal.SIGKILL)


def kill_descendants(pid: int, timeout_s: float = math.inf) -> None:
    """Kill all descendants of a process, until none is left or the time is over.

    The process must be a subreaper (PR_SET_CHILD_SUBREAPER): then the children of its dead children
    are still its descendants.
    """
    end = time.monotonic() + timeout_s
    while kill_running(psutil.Process(pid).children(recursive=True)):
        if time.monotonic() > end:
            return
        time.sleep(0.005)


def kill_running(processes: list[psutil.Process]) -> int:
    """Kill the processes that have not ended, and return their number."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed += 1
    return killed
