"""List and kill the processes that this process started."""

from __future__ import annotations

import contextlib
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
    psutil.wait_procs(processes.values(), timeout=timeout_s)
