"""Watch a run's engines: report one that dies, and kill all processes when the run ends.

A thread checks every 2 s. Ray itself reports a worker that dies. But verl waits forever for an
engine that died during a weight sync, and without its GCS, Ray reports nothing for a minute.

If the driver is killed, reaper.py reports that and cleans up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from kit.run import log_files
from kit.run.processes import kill_processes, list_descendants

CHECK_INTERVAL_S = 2.0
# An engine counts as dead after this many checks without it. If it failed with an error, vLLM logs
# the cause in that time, and its message is more useful.
MAX_MISSING_CHECKS = 3
SHARED_MEMORY = Path("/dev/shm")
# titles of the processes whose death Ray does not report: the engines', and Ray's own GCS
ENGINE_TITLE = re.compile("^(VLLM|sglang)::|gcs_server$")
# files of dead processes, by the names that Python, torch, NCCL and verl choose
SHARED_MEMORY_NAME = re.compile(
    r"(psm_\w+|sem\.mp-\w+|torch_\d+_\d+_\d+|nccl-\w{6}|verl_weights_\w+)$"
)
logger = logging.getLogger(__name__)


class ProcessMonitor:
    """Use as `with ProcessMonitor(logs, report)` around ray.init and ray.shutdown.

    Call `stop_watching` before ray.shutdown.

    report: called once, from the thread, with a message about a lost process.
    """

    def __init__(self, logs: Path, report: Callable[[str], None]):
        self.logs = logs
        self.report = report
        self.started_at = time.time()  # wall clock, like file times
        self.excluded: set[int] = set()  # processes of trackers, which end after the run
        # every descendant so far, orphans too
        self.descendants: dict[int, psutil.Process] = {}
        self.titles: dict[int, str] = {}  # {pid: title} of ENGINE_TITLE at the last check
        self.engines: dict[int, str] = {}  # the same, also of dead ones
        self.parents: dict[int, int] = {}  # of each engine
        self.missing: Counter[int] = Counter()  # of each engine: consecutive checks without it
        self.folders: list[str] = []  # of this run only, to delete at the end
        self.is_ending = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="process-monitor", daemon=True)

    def __enter__(self) -> ProcessMonitor:
        script = str(Path(__file__).with_name("reaper.py"))
        self.reaper = subprocess.Popen(
            [sys.executable, "-P", script, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.excluded = set(list_descendants(()))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_watching()
        self._clean_up(self.excluded, timeout_s=5.0)
        self._end_reaper()

    def _end_reaper(self) -> None:
        """Tell reaper.py that the run has cleaned up itself, and wait for its end."""
        self.reaper.communicate(b"end")

    def register_folder(self, folder: str) -> None:
        """Delete this folder when the run ends. The reaper kills processes with this TMPDIR.

        The folder must belong to this run only.
        """
        self.folders.append(folder)
        assert self.reaper.stdin
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed: no reason to stop
            os.write(self.reaper.stdin.fileno(), f"{folder}\n".encode())

    def stop_watching(self) -> None:
        """Stop the checks, so that processes may end."""
        self.is_ending.set()
        self.thread.join(30.0)

    def kill_all(self) -> None:
        """Kill all descendants of this process, trackers included, and remove their files."""
        self.is_ending.set()
        self._end_reaper()
        self._clean_up((), timeout_s=2.0)

    def _clean_up(self, excluded: Collection[int], timeout_s: float) -> None:
        """Kill the run's remaining processes, and remove the files that they left."""
        kill_processes(self.descendants, excluded, timeout_s)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        remove_leftovers(self.started_at)

    # --- the checks ---

    def _watch(self) -> None:
        while not self.is_ending.wait(CHECK_INTERVAL_S):
            problem = self.check()
            if problem and not self.is_ending.is_set():
                self.report(problem)
                return

    def check(self) -> str:
        """Return a message about the first dead engine; "" if there is none."""
        before = self.titles
        self.titles = self._list_titles()
        # A fork has its parent's title for a moment, so count an engine only when seen twice.
        self.engines |= {pid: name for pid, name in self.titles.items() if before.get(pid) == name}
        for pid, title in self.engines.items():
            self.missing[pid] = 0 if pid in self.titles else self.missing[pid] + 1
            if self.missing[pid] == MAX_MISSING_CHECKS:
                name = title.rpartition("/")[2].replace("VLLM::", "vLLM's ")
                tail = log_files.read_log_tail(self.logs, pid, self.parents)
                return f"{name} (pid {pid}) died. {tail}"
        return ""

    def _list_titles(self) -> dict[int, str]:
        """Return {pid: title} of the engines that live, and remember all descendants."""
        titles = {}
        processes = list_descendants(self.excluded)
        self.descendants |= processes
        for pid, process in processes.items():
            with contextlib.suppress(psutil.Error):  # the process has ended
                title = (process.cmdline() or [""])[0]
                if ENGINE_TITLE.search(title) and process.status() != psutil.STATUS_ZOMBIE:
                    titles[pid] = title
                    self.parents.setdefault(pid, process.ppid())
        return titles


def remove_leftovers(started_at: float) -> None:
    """Delete what killed processes left in /dev/shm.

    Deletes only files of this user with a name as in SHARED_MEMORY_NAME. They must be newer than
    `started_at` (seconds since the epoch), and no process may use them. So files of another run
    stay.
    """
    leftovers = []
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_new = status.st_uid == os.getuid() and status.st_ctime >= started_at - 1
            if is_new and SHARED_MEMORY_NAME.match(path.name):
                leftovers.append(path)
    used_inodes = list_used_inodes() if leftovers else set()
    for path in leftovers:
        with contextlib.suppress(OSError):
            if path.lstat().st_ino not in used_inodes:
                path.unlink()


def list_used_inodes() -> set[int]:
    """Return the inodes in /dev/shm that any process has mapped.

    Names would not identify them: glibc maps a semaphore before it gives it the final name.
    """
    inodes: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            lines = maps.read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return inodes
