"""List and kill the processes that this process started.

Protects: the machine, from processes that a run leaves.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Collection, Mapping

import psutil


def list_descendants(excluded: Collection[int]) -> dict[int, psutil.Process]:
    """Return {pid: process} of all descendants of this process except the pids `excluded`."""
    children = psutil.Process().children(recursive=True)
    return {process.pid: process for process in children if process.pid not in excluded}


def kill_processes(
    orphans: Mapping[int, psutil.Process], excluded: Collection[int], timeout_s: float
) -> None:
    """Kill `orphans` and all descendants except `excluded`. Wait at most `timeout_s`.

    orphans: {pid: process} of the run, which may have lost their parent.
    """
    processes = dict(orphans)
    while descendants := list_descendants({*processes, *excluded}):
        for process in descendants.values():
            with contextlib.suppress(psutil.Error):
                process.suspend()  # so that it starts no other process in the next round
        processes |= descendants
    for process in processes.values():
        with contextlib.suppress(psutil.Error):  # it ended, or its pid is another process now
            process.kill()
    wait_until_gone(processes.values(), timeout_s)


def wait_until_gone(processes: Collection[psutil.Process], timeout_s: float) -> None:
    """Wait until the processes have ended, at most `timeout_s`.

    psutil 7.2.2 waits with `pidfd_open`. For a process that is just ending, this call may fail with
    EINVAL (giampaolo/psutil#2715) or, seen on Linux 6.18, ENOENT. psutil raises it as OSError.
    """
    end = time.monotonic() + timeout_s
    while (left := end - time.monotonic()) > 0:
        try:
            psutil.wait_procs(processes, timeout=left)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            time.sleep(0.05)
