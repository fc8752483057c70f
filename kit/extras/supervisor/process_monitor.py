"""Watch a run's processes: report one that dies or stops, and kill the rest when the run ends.

A thread checks every 2 s. If it finds a problem, it stops the run with the process's name, its
state and the tail of its log. Without it, verl waits forever for an engine that died during a
weight sync, and for a process that is stopped.

If Ray is a cluster that the run joined, node_monitor.py lists the processes on its nodes. If the
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
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
NODE_MONITOR_CLASS = "NodeMonitor"  # an actor of node_monitor.py, which the run can lose
# files of dead processes, by the names that Python, torch, NCCL and verl choose
SHARED_MEMORY_NAME = re.compile(
    r"(psm_\w+|sem\.mp-\w+|torch_\d+_\d+_\d+|nccl-\w{6}|verl_weights_\w+)$"
)
SOCKET_NAME = re.compile(r"rl-colocate-zmq-[\w-]+\.sock$")
ProcessKey = tuple[str, int]  # node and pid
logger = logging.getLogger(__name__)


class ProcessInfo(NamedTuple):
    """A process at one check."""

    node: str  # the node's address; empty: this machine
    pid: int
    title: str
    status: str  # psutil's

    @property
    def key(self) -> ProcessKey:
        return self.node, self.pid


class RemoteProcesses(NamedTuple):
    """The latest answers of all nodes."""

    processes: list[ProcessInfo]
    repeated_nodes: set[str]  # addresses of the nodes without an answer since the last check


# Ray's records of a job's actors by id -> processes on its nodes
ListRemote = Callable[[Mapping[str, Any]], RemoteProcesses]


class ProcessTable:
    """The processes of this machine, or those of the other nodes, from one check to the next."""

    def __init__(self) -> None:
        self.running: dict[ProcessKey, ProcessInfo] = {}  # at the last check
        self.engine_processes: dict[ProcessKey, ProcessInfo] = {}
        # of each engine: consecutive checks without it
        self.missing_count: dict[ProcessKey, int] = {}
        self.stopped_since: dict[ProcessKey, float] = {}

    def update(
        self, processes: Iterable[ProcessInfo], repeated_nodes: Collection[str] = ()
    ) -> None:
        """Record a check: all processes that exist now.

        repeated_nodes: nodes whose processes are those of an earlier check. They do not count
        again.
        """
        previous = self.running
        self.running = {
            process.key: process
            for process in processes
            if process.status != psutil.STATUS_ZOMBIE and RUN_TITLE.search(process.title)
        }
        for key, process in self.running.items():
            if process.status == psutil.STATUS_STOPPED:
                self.stopped_since.setdefault(key, time.monotonic())
            else:
                self.stopped_since.pop(key, None)
            # A fork has its parent's title for a moment, so count an engine only when seen twice.
            is_same = key in previous and previous[key].title == process.title
            is_same = is_same and process.node not in repeated_nodes
            if is_same and ENGINE_TITLE.search(process.title):
                self.engine_processes[key] = process
        for key, engine in self.engine_processes.items():
            if engine.node in repeated_nodes:
                continue
            is_missing = key not in self.running
            self.missing_count[key] = self.missing_count.get(key, 0) + 1 if is_missing else 0

    def find_stopped(self) -> ProcessInfo | None:
        """Return a process that has been stopped for too long."""
        for key, since in self.stopped_since.items():
            if key in self.running and time.monotonic() - since > MAX_STOPPED_S:
                return self.running[key]
        return None

    def find_dead_engine(self) -> ProcessInfo | None:
        """Return an engine that has been missing for too long. For Ray's GCS, that is one check."""
        for key, engine in self.engine_processes.items():
            limit = 1 if engine.title.endswith("gcs_server") else MAX_MISSING_CHECKS
            if self.missing_count[key] == limit:
                return engine
        return None


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
        self.local = ProcessTable()
        self.remote = ProcessTable()
        self.list_remote: ListRemote | None = None  # set if the run joined a cluster
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
        problem = self._find_problem(self.local, self.list_local())
        if problem:
            return problem  # do not ask Ray: without its GCS it does not answer
        actors = self.list_actors()
        if self.list_remote:
            try:
                problem = self._find_problem(self.remote, *self.list_remote(actors))
            except TimeoutError as error:
                return str(error)
        return problem or self._find_dead_actor(actors)

    def _find_problem(
        self,
        table: ProcessTable,
        processes: Iterable[ProcessInfo],
        repeated_nodes: Collection[str] = (),
    ) -> str:
        """Record a check in the table. Return a message about a stopped or dead process."""
        table.update(processes, repeated_nodes)
        stopped = table.find_stopped()
        if stopped:
            return (
                f"{describe_process(stopped)} is stopped (SIGSTOP?). {self._read_log(*stopped.key)}"
            )
        dead = table.find_dead_engine()
        if dead:
            return f"{describe_process(dead)} died. {self._read_log(*dead.key)}"
        return ""

    def _find_dead_actor(self, actors: Mapping[str, Mapping[str, Any]]) -> str:
        """Return a message about a Ray actor that died unexpectedly. actors: Ray's records."""
        for actor in actors.values():
            if actor["State"] == "ALIVE":
                self.live_actors.add(actor["ActorID"])
                continue
            if actor["State"] != "DEAD" or actor["ActorID"] not in self.live_actors:
                continue
            reason = describe_death(actor["DeathCause"])
            if reason and actor["ActorClassName"] != NODE_MONITOR_CLASS:
                node = actor["Address"]["IPAddress"] if self.list_remote else ""
                place = f" on {node}" if node else ""
                worker = f"the worker {actor['ActorClassName']} (pid {actor['Pid']}{place})"
                return f"{worker} died: {reason}. {self._read_log(node, actor['Pid'])}"
        return ""

    def list_local(self) -> list[ProcessInfo]:
        """Return the driver's descendants. Remember each one and its parent."""
        processes = []
        for pid, process in list_descendants(self.excluded).items():
            with contextlib.suppress(psutil.Error, OSError):  # the process has just ended
                title = (process.cmdline() or [""])[0]
                self._remember(process, title)
                processes.append(ProcessInfo("", pid, title, process.status()))
        return processes

    def _remember(self, process: psutil.Process, title: str) -> None:
        """Save a new descendant and its parent. If the parent ends, the child gets another one."""
        if self.descendants.get(process.pid) != process:
            self.descendants[process.pid] = process
            self.parents[process.pid] = process.ppid()
        elif title.startswith(("VLLM::", "sglang::")):
            # An engine writes to the log of the worker that started it. If the engine is a fork
            # (kit/cpu/fork_server.py), that worker is not its parent.
            log = WORKER_LOG.search(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log:
                self.parents[process.pid] = int(log[1])

    def list_actors(self) -> dict[str, Any]:
        """Return Ray's records of this job's actors, by id."""
        import ray

        if not ray.is_initialized():
            return {}
        job = ray.get_runtime_context().get_job_id()
        return dict(ray._private.state.actors(job_id=ray.JobID.from_hex(job)))

    def _read_log(self, node: str, pid: int) -> str:
        """Return the tail of a process's log, or where the log is."""
        if node:
            return f"Its log is on {node}, in Ray's session folder"
        return log_files.read_log_tail(self.logs, pid, self.parents)


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


def describe_process(process: ProcessInfo) -> str:
    """Return a readable name of a process, with its pid and node.

    `ray::Class.method` is the worker Class, `VLLM::EngineCore` is vLLM's engine.
    """
    engine = "vLLM's " if process.title.startswith("VLLM") else "SGLang's "
    name = re.sub(r"^ray::(\w+).*", r"the worker \1", process.title)
    name = re.sub("^(VLLM|sglang)::", engine, name)
    place = f" on {process.node}" if process.node else ""
    return f"{name.rpartition('/')[2]} (pid {process.pid}{place})"


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
