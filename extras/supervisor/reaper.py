"""Watchdog process: if the driver dies without cleaning up, report that and clean up.

It kills the run's other processes and removes their temporary files. A driver may be killed by a
user, by Ray, or by the kernel when memory is low.

    python -P extras/supervisor/reaper.py DRIVER_PID

process_monitor.py starts it and writes to its stdin: each line is a TMPDIR that only processes of
this run use. The last text, `end`, means that the run has cleaned up itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extras.supervisor.process_monitor import remove_leftovers
from kit.run.processes import kill_processes

STDIN = 0
POLL_S = 0.5
KILL_TIMEOUT_S = 10.0


def read_until_end(driver_pid: int) -> str:
    """Return what the driver has written, once it is dead or has closed its end."""
    text = b""
    while True:
        if select.select([STDIN], [], [], POLL_S)[0]:
            part = os.read(STDIN, 65536)
            text += part
            if not part:
                return text.decode()
        elif os.getppid() != driver_pid:  # a forked process may still have the driver's end
            return text.decode()


def clean_up(folders: Collection[str], started_at: float) -> None:
    """Kill the run's remaining processes, and remove the files that they left."""
    while processes := list_processes(folders):
        kill_processes(processes, (), KILL_TIMEOUT_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    remove_leftovers(started_at)


def list_processes(folders: Collection[str]) -> dict[int, psutil.Process]:
    """Return by pid the other processes whose TMPDIR is one of the run's folders."""
    processes = {}
    for process in psutil.process_iter():
        if process.pid == os.getpid():  # it has inherited the driver's TMPDIR
            continue
        with contextlib.suppress(psutil.Error):
            is_of_run = process.environ().get("TMPDIR") in folders
            if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                processes[process.pid] = process
    return processes


def main() -> None:
    """Wait for the end of the driver. If it has not cleaned up, report that and clean up."""
    started_at = time.time()
    driver_pid = int(sys.argv[1])
    *folders, last = read_until_end(driver_pid).split("\n")
    if last == "end":
        return
    clean_up(folders, started_at)
    print(
        f"error: the driver (pid {driver_pid}) died, so the run ended. Rerun the same command to "
        'resume from its last checkpoint. See docs/troubleshooting.md, "Resume".',
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
