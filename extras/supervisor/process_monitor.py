"""Watch a run's processes: report one that dies or stops, and kill the rest when the run ends.

A thread checks every 2 s. If it finds a problem, it stops the run with the process's name, its
state and the tail of its log. Without it, verl waits forever for an engine that died during a
weight sync, and for a process that is stopped.

On a cluster that the run joined, it knows the workers of other nodes from Ray's records. If the
driver is killed, or Ray ends it because its raylet died, reaper.py reports that and cleans up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from kit.runs import log_files
from kit.runs.processes import kill_processes, list_descendants

CHECK_INTERVAL_S = 2.0
# An engine counts as dead after this many checks without it. If it failed with an error, vLLM logs
# the cause in that time, and its message is more useful.
MAX_MISSING_CHECKS = 3
MAX_STOPPED_S = 15.0  # a process that is stopped (SIGSTOP, a debugger) for longer is reported
SHARED_MEMORY = Path("/dev/shm")
# titles of the processes that a run cannot lose: those of Ray, vLLM and SGLang
RUN_TITLE = re.compile("^(ray|VLLM|sglang)::|raylet$|gcs_server$")
# those that Ray does not report itself: the engines' processes, and Ray's own GCS
ENGINE_TITLE = re.compile("^(VLLM|sglang)::|gcs_server$")
WORKER_LOG = re.compile(r"-(\d+)\.out$")  # of a Ray worker; the number is its pid
# files of dead processes, by the names that Python, torch, NCCL and verl choose
SHARED_MEMORY_NAME = re.compile(
    r"(psm_\w+|sem\.mp-\w+|torch_\d+_\d+_\d+|nccl-\w{6}|verl_weights_\w+)$"
)
SOCKET_NAME = re.compile(r"rl-colocate-zmq-[\w-]+\.sock$")
logger = logging.getLogger(__name__)


class ProcessMonitor:
    """Use as `with ProcessMonitor(logs, checkpoints, report)` around ray.init and ray.shutdown.

    Call `stop_watching` before ray.shutdown.

    checkpoints: the run's folder of checkpoints.
    report: called once, from the thread, with a message about a lost process of Ray, vLLM or
    SGLang. Gym servers are not checked: they may be unreachable for gym.outage_budget_s.
    """

    def __init__(self, logs: Path, checkpoints: Path, report: Callable[[str], None]):
        self.logs = logs
        self.checkpoints = checkpoints
        self.report = report
        self.started_at = time.time()  # wall clock, like file times
        self.excluded: set[int] = set()  # processes of trackers, which end after the run
        # every descendant so far, orphans too
        self.descendants: dict[int, psutil.Process] = {}
        self.parents: dict[int, int] = {}  # of each descendant; unknown once it is dead
        self.titles: dict[int, str] = {}  # {pid: title} of RUN_TITLE at the last check
        self.engines: dict[int, str] = {}  # {pid: title} of ENGINE_TITLE, also of dead ones
        self.missing: Counter[int] = Counter()  # of each engine: consecutive checks without it
        self.stopped_since: dict[int, float] = {}
        self.is_on_cluster = False  # whether the run joined a Ray that has other nodes
        self.live_actors: set[str] = set()  # ids of the job's Ray actors that were once alive
        self.folders: list[str] = []  # of this run only, to delete at the end
        self.is_ending = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="process-monitor", daemon=True)

    def __enter__(self) -> ProcessMonitor:
        self.reaper = self._start_reaper()
        self.excluded = set(list_descendants(()))
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop_watching()
        self._clean_up(self.excluded, timeout_s=5.0)
        self._end_reaper()

    def _start_reaper(self) -> subprocess.Popen[bytes] | None:
        """Start reaper.py; None where the kernel has no pidfd_open, such as in gVisor."""
        try:
            driver = os.pidfd_open(os.getpid())
        except OSError as error:
            logger.warning(
                "This kernel has no pidfd_open (%s). If the driver (pid %s) is killed by SIGKILL, "
                "its other processes stay: end them yourself.",
                error,
                os.getpid(),
            )
            return None
        script = str(Path(__file__).with_name("reaper.py"))
        arguments = [str(driver), str(os.getpid()), str(self.checkpoints)]
        reaper = subprocess.Popen(
            [sys.executable, "-P", script, *arguments],
            stdin=subprocess.PIPE,
            pass_fds=[driver],
            start_new_session=True,
        )
        os.close(driver)
        return reaper

    def _end_reaper(self) -> None:
        """Tell reaper.py that the run has cleaned up itself, and wait for its end."""
        if self.reaper:
            self.reaper.communicate(b"end")

    def register_folder(self, folder: str) -> None:
        """Delete this folder when the run ends. The reaper kills processes with this TMPDIR.

        The folder must belong to this run only.
        """
        self.folders.append(folder)
        self._send_to_reaper(folder=folder)

    def register_process(self, name: str, pid: int) -> None:
        """Have the reaper report this process if its death also ends the driver."""
        self._send_to_reaper(name=name, pid=pid)

    def _send_to_reaper(self, **message: str | int) -> None:
        if not self.reaper:
            return
        assert self.reaper.stdin
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed: no reason to stop
            os.write(self.reaper.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def stop_watching(self) -> None:
        """Stop the checks, so that processes may end. Kill stopped ones, since they cannot exit."""
        self.is_ending.set()
        self.thread.join(30.0)
        for process in self.descendants.values():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()

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
            try:
                problem = self.check()
                if problem and not self.is_ending.is_set():
                    self.report(problem)
                    return
            except Exception:  # Ray may briefly not answer; the thread must continue
                logger.exception(
                    "The process monitor could not check the run's processes. If this repeats, "
                    "see %s",
                    self.logs,
                )

    def check(self) -> str:
        """Return a message about the first lost process; "" if there is none."""
        before = self.titles
        self.titles = self._list_titles()
        # A fork has its parent's title for a moment, so count an engine only when seen twice.
        engines = {pid: title for pid, title in self.titles.items() if before.get(pid) == title}
        self.engines |= {pid: name for pid, name in engines.items() if ENGINE_TITLE.search(name)}
        for pid, title in self.engines.items():
            self.missing[pid] = 0 if pid in self.titles else self.missing[pid] + 1
            limit = 1 if title.endswith("gcs_server") else MAX_MISSING_CHECKS
            if self.missing[pid] == limit:
                return self._describe(title, pid, "died")
        for pid, since in self.stopped_since.items():
            if pid in self.titles and time.monotonic() - since > MAX_STOPPED_S:
                return self._describe(self.titles[pid], pid, "is stopped (SIGSTOP?)")
        return self._find_dead_actor(list_actors())  # last: without its GCS, Ray does not answer

    def _list_titles(self) -> dict[int, str]:
        """Return {pid: title} of the run's processes, and remember all descendants."""
        titles = {}
        for pid, process in list_descendants(self.excluded).items():
            with contextlib.suppress(psutil.Error, OSError):  # the process has just ended
                title = (process.cmdline() or [""])[0]
                if self.descendants.get(pid) != process:
                    self.descendants[pid] = process
                    self.parents[pid] = process.ppid()
                status = process.status()
                if status == psutil.STATUS_STOPPED:
                    self.stopped_since.setdefault(pid, time.monotonic())
                else:
                    self.stopped_since.pop(pid, None)
                if status != psutil.STATUS_ZOMBIE and RUN_TITLE.search(title):
                    titles[pid] = title
                # An engine writes to the log of the worker that started it. If the engine is a
                # fork (kit/cpu/fork_server.py), that worker is not its parent.
                log = WORKER_LOG.search(os.readlink(f"/proc/{pid}/fd/1"))
                if log and int(log[1]) != pid:
                    self.parents[pid] = int(log[1])
        return titles

    def _describe(self, title: str, pid: int, problem: str, node: str = "") -> str:
        """Return a message about a process, with the tail of its log.

        `ray::Class.method` is the worker Class, `VLLM::EngineCore` is vLLM's engine.
        """
        name = re.sub(r"^ray::(\w+).*", r"the worker \1", title).rpartition("/")[2]
        name = name.replace("VLLM::", "vLLM's ").replace("sglang::", "SGLang's ")
        tail = log_files.read_log_tail(self.logs, pid, self.parents)
        return f"{name} (pid {pid}{node and f' on {node}'}) {problem}. {tail}"

    def _find_dead_actor(self, actors: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a message about a Ray actor that died unexpectedly. actors: Ray's records."""
        for actor in actors.values():
            if actor["State"] == "ALIVE":
                self.live_actors.add(actor["ActorID"])
            elif actor["State"] == "DEAD" and actor["ActorID"] in self.live_actors:
                reason = describe_death(actor["DeathCause"])
                if reason:
                    title = f"ray::{actor['ActorClassName']}"
                    node = actor["Address"]["IPAddress"] if self.is_on_cluster else ""
                    return self._describe(title, actor["Pid"], f"died: {reason}", node)
        return ""


def list_actors() -> dict[str, Any]:
    """Return Ray's records of this job's actors, by id."""
    import ray

    if not ray.is_initialized():
        return {}
    job = ray.get_runtime_context().get_job_id()
    return dict(ray._private.state.actors(job_id=ray.JobID.from_hex(job)))


def describe_death(cause: Any) -> str:
    """Return Ray's reason for an actor's death; "" if the actor was meant to end.

    cause: a protobuf, ActorDeathCause.
    """
    kind = cause.WhichOneof("context")
    text = str(getattr(cause, kind)) if kind else ""
    if kind == "actor_died_error_context":
        died = cause.actor_died_error_context
        was_lost = died.Reason.Name(died.reason) in ("WORKER_DIED", "NODE_DIED")
        text = died.error_message if was_lost else ""
    return " ".join(text.split())[:300]


def remove_leftovers(started_at: float) -> None:
    """Delete what killed processes left in /dev/shm, and sockets of verl's weight sync in /tmp.

    Deletes only files of this user with a name as in SHARED_MEMORY_NAME or SOCKET_NAME. They must
    be newer than `started_at` (seconds since the epoch), and no process may use them. So files of
    another run stay.
    """
    paths = [path for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY_NAME.match(path.name)]
    paths += [path for path in Path("/tmp").iterdir() if SOCKET_NAME.match(path.name)]
    leftovers = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_ctime >= started_at - 1:
                leftovers.append(path)
    used_inodes = list_used_inodes() if leftovers else set()
    for path in leftovers:
        with contextlib.suppress(OSError):
            if path.lstat().st_ino not in used_inodes and not has_listener(path):
                path.unlink()


def has_listener(path: Path) -> bool:
    """Return whether the path is a Unix socket that a process listens on."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def list_used_inodes() -> set[int]:
    """Return the inodes in /dev/shm that any process has mapped or open.

    Names would not identify them: glibc maps a semaphore before it gives it the final name.
    """
    inodes: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            maps = (process / "maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
            inodes |= _list_open_inodes(process / "fd")
    return inodes


def _list_open_inodes(descriptors: Path) -> set[int]:
    """Return the inodes in /dev/shm that a process has open. descriptors: /proc/PID/fd."""
    inodes = set()
    for link in os.listdir(descriptors):
        path = descriptors / link
        with contextlib.suppress(OSError):  # it has just been closed
            if os.readlink(path).startswith("/dev/shm/"):
                inodes.add(path.stat().st_ino)
    return inodes
