"""A small process that outlives the driver: where that ends without a word, it says who died, and clears up.

    python -P kit/extras/supervisor/reaper.py FD PID CHECKPOINTS
                       a pidfd of the driver, its pid, and where its run saves

process_monitor.py starts it first, and tells it in lines of JSON: {"folder": ...}, which is TMPDIR to processes of the
run and of no other; {"name": ..., "pid": ...} of what takes the driver along when it dies, as Ray's raylet does; and
`end`, when the run has cleared up after itself. A driver may also be killed, by whoever can, or by the kernel for
memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from kit.extras.supervisor import process_monitor

PATIENCE_S = 10.0  # for what is killed to be gone


def keep(driver: int, pid: int, checkpoints: Path) -> None:
    """Wait for the end of the driver, a pidfd."""
    began, text = time.time(), b""
    folders, died = list[str](), list[str]()  # in this order
    names = {driver: f"the driver (pid {pid})"}
    look = select.poll()
    for fd in (0, driver):
        look.register(fd, select.POLLIN)
    while names[driver] not in died:
        ready = {fd for fd, _ in look.poll()}
        if 0 in ready and not (new := os.read(0, 65536)):
            look.unregister(0)
        elif 0 in ready:
            *lines, text = (text + new).split(b"\n")
            if text == b"end":
                return
            for line in map(json.loads, lines):
                if "folder" in line:
                    folders.append(line["folder"])
                    continue
                name = f"{line['name']} (pid {line['pid']})"
                try:
                    fd = os.pidfd_open(line["pid"])
                except ProcessLookupError:  # already
                    died.append(name)
                else:
                    names[fd] = name
                    look.register(fd, select.POLLIN)
        for fd in ready - {0}:
            look.unregister(fd)
            died.append(
                names[driver if is_exiting(pid) else fd]
            )  # the kernel ends Ray's while the driver exits
    clear(folders, began)
    saved, pointer = "nothing was saved", checkpoints / "latest_checkpointed_iteration.txt"
    if pointer.is_file():
        step = pointer.read_text().strip()
        saved = f"the last checkpoint is {checkpoints}/global_step_{step}, from which the same command goes on"
    print(f"error: {died[0]} died, and the run with it; {saved}", file=sys.stderr)


def is_exiting(pid: int) -> bool:
    """Whether a process is gone, or on its way (PF_EXITING)."""
    with contextlib.suppress(OSError):
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & 4)
    return True


def clear(folders: Sequence[str], began: float) -> None:
    """End what is left of the run, and remove what it leaves."""
    while found := of_run(folders):
        process_monitor.kill(found, (), PATIENCE_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    process_monitor.sweep(began)


def of_run(folders: Sequence[str]) -> dict[int, psutil.Process]:
    """The processes with one of the folders for their TMPDIR, by pid."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("TMPDIR") in folders
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found[process.pid] = process
    return found


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
