"""Watchdog process: if the driver dies without cleaning up, report which process died and clean up.

It kills the run's other processes and removes their temporary files. A driver may be killed by a
user, or by the kernel when memory is low.

    python -P extras/supervisor/reaper.py DRIVER_FD DRIVER_PID CHECKPOINTS

DRIVER_FD: a pidfd of the driver. CHECKPOINTS: the run's folder of checkpoints.

process_monitor.py starts it and writes lines of JSON to its stdin:

- {"folder": PATH}: a TMPDIR that only processes of this run use.
- {"name": NAME, "pid": PID}: a process whose death also ends the driver, such as Ray's raylet.

The last message is the text `end`: the run has cleaned up itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from extras.supervisor.process_monitor import remove_leftovers
from kit.runs.processes import kill_processes

STDIN = 0
KILL_TIMEOUT_S = 10.0
PF_EXITING = 4  # a flag in /proc/PID/stat


class Reaper:
    """Waits until the driver ends, and knows which of the run's processes died first."""

    def __init__(self, driver_fd: int, driver_pid: int):
        self.started_at = time.time()
        self.driver_fd = driver_fd
        self.driver_pid = driver_pid
        self.names = {driver_fd: f"the driver (pid {driver_pid})"}  # by pidfd
        self.dead: list[str] = []  # names, the first to die first
        self.folders: list[str] = []
        self.unparsed = b""  # bytes of stdin after the last newline
        self.poll = select.poll()
        self.poll.register(STDIN, select.POLLIN)
        self.poll.register(driver_fd, select.POLLIN)

    def wait_for_driver(self) -> bool:
        """Wait until the driver has ended. Return whether it died without cleaning up."""
        while self.names[self.driver_fd] not in self.dead:
            ready = {fd for fd, _ in self.poll.poll()}
            if STDIN in ready and self._read_messages():
                return False
            for fd in ready - {STDIN}:
                self.poll.unregister(fd)
                # If the driver is exiting, it died first: the kernel then ends Ray's processes.
                cause = self.driver_fd if is_exiting(self.driver_pid) else fd
                self.dead.append(self.names[cause])
        return True

    def _read_messages(self) -> bool:
        """Read the next messages of the driver. Return whether one is the `end`."""
        data = os.read(STDIN, 65536)
        if not data:  # the driver has closed the pipe
            self.poll.unregister(STDIN)
            return False
        *lines, self.unparsed = (self.unparsed + data).split(b"\n")
        if self.unparsed == b"end":
            return True
        for line in lines:
            self._handle_message(json.loads(line))
        return False

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "folder" in message:
            self.folders.append(message["folder"])
            return
        name = f"{message['name']} (pid {message['pid']})"
        try:
            fd = os.pidfd_open(message["pid"])
        except ProcessLookupError:  # it is already dead
            self.dead.append(name)
        else:
            self.names[fd] = name
            self.poll.register(fd, select.POLLIN)

    def clean_up(self) -> None:
        """Kill the run's remaining processes, and remove the files that they left."""
        while processes := self.list_processes():
            kill_processes(processes, (), KILL_TIMEOUT_S)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        remove_leftovers(self.started_at)

    def list_processes(self) -> dict[int, psutil.Process]:
        """Return by pid the other processes whose TMPDIR is one of the run's folders."""
        processes = {}
        for process in psutil.process_iter():
            if process.pid == os.getpid():  # it has inherited the driver's TMPDIR
                continue
            with contextlib.suppress(psutil.Error):
                is_of_run = process.environ().get("TMPDIR") in self.folders
                if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                    processes[process.pid] = process
        return processes


def is_exiting(pid: int) -> bool:
    """Return whether a process is exiting (PF_EXITING) or gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return bool(int(fields[6]) & PF_EXITING)
    return True


def describe_checkpoint(checkpoints: Path) -> str:
    """Return which checkpoint is the last one, and how to resume from it."""
    pointer = checkpoints / "latest_checkpointed_iteration.txt"
    if not pointer.is_file():
        return "No checkpoint was saved"
    path = checkpoints / f"global_step_{pointer.read_text().strip()}"
    return f"Last checkpoint: {path}. Rerun the same command to resume from it"


def main() -> None:
    """Wait for the end of the driver. If it has not cleaned up, report that and clean up."""
    reaper = Reaper(driver_fd=int(sys.argv[1]), driver_pid=int(sys.argv[2]))
    if reaper.wait_for_driver():
        reaper.clean_up()
        checkpoint = describe_checkpoint(Path(sys.argv[3]))
        text = f"{reaper.dead[0]} died, so the run ended. {checkpoint}"
        print(f'error: {text}. See docs/troubleshooting.md, "Resume".', file=sys.stderr)


if __name__ == "__main__":
    main()
