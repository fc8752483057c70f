"""A small process that outlives the driver: where that ends without a word, it says who died, and clears up.

    python -P kit/keeper.py PID CHECKPOINTS     the driver's pid, and where its run saves; kit/watch.py starts it first

It is told what there is in lines of JSON: {"folder": ...}, which is TMPDIR to processes of the run and of no other;
{"name": ..., "pid": ...} of what takes the driver along when it dies, as Ray's raylet does; and `end`, when the run has
cleared up after itself. A driver may also be killed, by whoever can, or by the kernel where memory is short.
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
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kit import watch

PATIENCE_S = 10.0  # for what is killed to be gone


def keep(driver: int, checkpoints: Path) -> None:
    """Wait for the driver's end."""
    began, text = time.time(), b""
    folders, died = list[str](), list[str]()  # in this order
    me = os.pidfd_open(driver)
    names = {me: f"the driver (pid {driver})"}
    look = select.poll()
    for fd in (0, me):
        look.register(fd, select.POLLIN)
    while names[me] not in died:
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
            died.append(names[me if is_exiting(driver) else fd])  # the kernel ends Ray's while the driver exits
    clear(folders, began)
    pointer = checkpoints / "latest_checkpointed_iteration.txt"
    saved = f"the last checkpoint is {checkpoints}/global_step_{pointer.read_text()}" if pointer.is_file() else ""
    saved = saved and f"; {saved}, from which the same command goes on"
    print(f"error: {died[0]} died, and the run with it{saved or '; nothing was saved'}", file=sys.stderr)


def is_exiting(pid: int) -> bool:
    """Whether a process is gone, or on its way (PF_EXITING)."""
    with contextlib.suppress(OSError):
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & 4)
    return True


def clear(folders: Sequence[str], began: float) -> None:
    """End what is left of the run, and remove what it leaves."""
    while found := of_run(folders):
        watch.kill(found, (), PATIENCE_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    watch.sweep(began)


def of_run(folders: Sequence[str]) -> dict[int, psutil.Process]:
    """The processes with one of the folders for their TMPDIR, by pid."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") in folders and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
    return found


if __name__ == "__main__":
    keep(int(sys.argv[1]), Path(sys.argv[2]))
