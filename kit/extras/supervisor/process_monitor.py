"""The processes of a run: found dead or stopped while it works, and none left when it ends.

A thread looks every few seconds. What it finds ends the run with the name of the process, how it is, and the last
lines of its log: verl waits for ever for an engine that died in a weight sync, and for a process that is stopped.
On a cluster that somebody else started, kit/extras/supervisor/node_monitor.py looks for it.
Where the driver itself is killed, or Ray ends it because its raylet was, reaper.py has the last word.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kit.runs import private

LOOK_S = 2.0  # seconds between two looks
GONE = (
    3  # looks: an engine that fails by itself has its cause told by vLLM meanwhile, which says more
)
STOPPED_S = 15.0  # a process that was stopped (SIGSTOP, a debugger) for so long does not come back by itself
SHARED = Path("/dev/shm")
OUT = re.compile(r"-(\d+)\.out$")  # a log of Ray's, with its process
Place = tuple[str, int]  # node and pid
logger = logging.getLogger(__name__)


class Seen(NamedTuple):
    """A process."""

    node: str  # its address, empty for this machine
    pid: int
    title: str
    status: str  # psutil's


Elsewhere = Callable[
    [Mapping[str, Any]], Iterable[Seen]
]  # Ray's records of a job's actors -> processes on its nodes


class Watch:
    """Use as `with Watch(logs, checkpoints, fail)` around ray.init and ray.shutdown, and `rest()` before the latter.

    fail(message) is called once, from the thread, when a process of Ray's or vLLM's is lost. Gym servers are not looked
    at: they may be away for a while (gym.outage_budget_s). checkpoints: the run's folder of them.
    """

    def __init__(self, logs: Path, checkpoints: Path, fail: Callable[[str], None]):
        self.logs, self.checkpoints, self.fail = logs, checkpoints, fail
        self.began = time.time()  # wall clock, as files have it
        self.others: set[int] = set()  # a tracker's, which end after the run
        self.usual = os.environ.get("TMPDIR")
        self.temporary = ""  # for the sockets, locks and caches of every process; other nodes lack it, and take /tmp
        self.seen: dict[
            int, psutil.Process
        ] = {}  # every descendant so far; those that lost their parent too
        self.parents: dict[int, int] = {}  # of each, since the dead have none
        self.elsewhere: Elsewhere | None = None  # on a cluster that is not the run's own
        self.met: set[tuple[str, int, str]] = set()  # node, pid and title at the last look
        self.engines: dict[
            Place, str
        ] = {}  # vLLM's processes, which Ray does not know, and its own GCS
        self.gone: dict[Place, int] = {}  # of the engines: looks in a row without it
        self.actors: set[str] = set()  # the ids of this job's of Ray's that were alive
        self.stopped: dict[Place, float] = {}  # since when
        self.resting = threading.Event()
        self.folders: list[str] = []  # of the run alone
        self.thread = threading.Thread(target=self._work, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        me, keeper = os.pidfd_open(os.getpid()), str(Path(__file__).with_name("reaper.py"))
        command = [sys.executable, "-P", keeper, str(me), str(os.getpid()), str(self.checkpoints)]
        self.keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[me], start_new_session=True
        )
        os.close(me)
        self.others = set(descendants(()))
        private.check_temporary_folder()
        self.temporary = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="kit-")
        self.tell_keeper(folder=self.temporary)
        self.thread.start()
        return self

    def tell_keeper(self, **what: str | int) -> None:
        """What there is of the run, by the words of kit/extras/supervisor/reaper.py."""
        self.folders += [str(what["folder"])] if "folder" in what else []
        assert self.keeper.stdin
        with contextlib.suppress(BrokenPipeError):  # it was killed, which is no reason to end a run
            os.write(self.keeper.stdin.fileno(), json.dumps(what).encode() + b"\n")

    def rest(self) -> None:
        """From now on processes may end: the run does."""
        self.resting.set()
        self.thread.join(30.0)
        for process in self.seen.values():  # one that is stopped would not hear that it is to end
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()

    def __exit__(self, *_: Any) -> None:
        self.rest()
        self.clean(self.others, patience=5.0)
        self.keeper.communicate(b"end")
        os.environ.pop("TMPDIR")
        os.environ |= {"TMPDIR": self.usual} if self.usual else {}

    def clean(self, spared: Collection[int], patience: float) -> None:
        """Kill what is left of the run's processes, and remove what they leave."""
        kill(self.seen, spared, patience)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        sweep(self.began)

    def _work(self) -> None:
        while not self.resting.wait(LOOK_S):
            try:
                if (problem := self.look()) and not self.resting.is_set():
                    return self.fail(problem)
            except Exception:  # Ray's register may not answer for a moment; the run must not lose its watch over it
                logger.exception(
                    "the watch could not look at the run's processes; see %s if it goes on so",
                    self.logs,
                )

    def look(self) -> str:
        """What is wrong; empty if nothing."""
        if problem := self._judge(
            [*self._here()], here=True
        ):  # without its GCS Ray does not answer
            return problem
        actors = self._actors()
        try:
            problem = self._judge([*self.elsewhere(actors)], here=False) if self.elsewhere else ""
        except TimeoutError as silent:
            return str(silent)
        return problem or self._dead_actor(actors)

    def _judge(self, seen: Sequence[Seen], here: bool) -> str:
        """What is wrong with processes, or with those that are no longer `seen`; empty if nothing."""
        alive = set()
        for node, pid, title, status in seen:
            if status == psutil.STATUS_ZOMBIE or not re.search(
                "^(ray|VLLM|sglang)::|raylet$|gcs_server$", title
            ):
                continue
            alive.add(place := (node, pid))
            if re.search("^(VLLM|sglang)::|gcs_server$", title) and (*place, title) in self.met:
                self.engines[place] = (
                    title  # at second sight: a fork has its parent's title for a moment
                )
            if status != psutil.STATUS_STOPPED:
                self.stopped.pop(place, None)
            elif time.monotonic() - self.stopped.setdefault(place, time.monotonic()) > STOPPED_S:
                return f"{name_of(title, pid, node)} is stopped (SIGSTOP?); {self._last_words(pid, node)}"
        self.met = {one for one in self.met if (one[0] == "") != here} | {one[:3] for one in seen}
        for (node, pid), title in self.engines.items():
            if (node == "") != here:
                continue
            self.gone[node, pid] = 0 if (node, pid) in alive else self.gone.get((node, pid), 0) + 1
            if self.gone[node, pid] == (1 if title.endswith("gcs_server") else GONE):
                return f"{name_of(title, pid, node)} died; {self._last_words(pid, node)}"
        return ""

    def _here(self) -> Iterator[Seen]:
        """The driver's own descendants."""
        for pid, process in descendants(self.others).items():
            with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
                title = (process.cmdline() or [""])[0]
                if self.seen.get(pid) != process:
                    self.seen[pid], self.parents[pid] = (
                        process,
                        process.ppid(),
                    )  # now: an orphan gets another
                elif title.startswith(("VLLM::", "sglang::")) and (
                    log := OUT.search(os.readlink(f"/proc/{pid}/fd/1"))
                ):
                    self.parents[pid] = int(
                        log[1]
                    )  # whose log it writes; a fork's parent is another (kit/cpu/fork_server.py)
                yield Seen("", pid, title, process.status())

    def _actors(self) -> dict[str, Any]:
        """Ray's records of this job's, by id."""
        import ray

        if not ray.is_initialized():
            return {}
        job = ray.get_runtime_context().get_job_id()
        return dict(ray._private.state.actors(job_id=ray.JobID.from_hex(job)))

    def _dead_actor(self, actors: Mapping[str, Mapping[str, Any]]) -> str:
        for actor in actors.values():
            known, name, pid = (
                actor["ActorID"] in self.actors,
                actor["ActorClassName"],
                actor["Pid"],
            )
            if actor["State"] == "ALIVE":
                self.actors.add(actor["ActorID"])
            elif (
                name != "Lookout"
                and known
                and actor["State"] == "DEAD"
                and (why := why_it_died(actor["DeathCause"]))
            ):
                node = actor["Address"]["IPAddress"] if self.elsewhere else ""
                where = f"{name} (pid {pid}{f' on {node}' if node else ''})"
                return f"the worker {where} died: {why}; {self._last_words(pid, node)}"
        return ""

    def _last_words(self, pid: int, node: str) -> str:
        if node:
            return f"its log is on {node}, in Ray's session folder there"
        return last_words(self.logs, pid, self.parents)


def worker_logs(logs: Path) -> list[Path]:
    """The logs of Ray's workers, the one that was written last first."""
    return sorted(logs.glob("ray/worker-*"), key=lambda path: path.stat().st_mtime, reverse=True)


def last_words(logs: Path, pid: int, parents: Mapping[int, int]) -> str:
    """The end of the log of a process, or of the nearest of its `parents` (child -> parent) that has one."""
    while pid:
        for path in sorted(
            logs.glob(f"ray/worker-*-{pid}.*"), key=lambda p: p.stat().st_size, reverse=True
        ):
            if words := end_of(path):
                return words
        pid = parents.get(pid, 0)
    return f"see the logs in {logs}"


def latest_words(logs: Path) -> str:
    """The end of the log that was written last."""
    return next(
        (words for path in worker_logs(logs) if (words := end_of(path))), f"see the logs in {logs}"
    )


def end_of(log: Path) -> str:
    """The last lines of a log and where it is; empty if nothing is in it."""
    lines = log.read_text(errors="replace").strip().splitlines()[-3:]
    return f"the last lines of {log}: {' | '.join(lines)}" if lines else ""


def root_cause(error: BaseException, logs: Path) -> str:
    """One line for an error of Ray's: which worker died, or what went wrong in it, and where its log is.

    vLLM's engine writes its cause to its log, and says only 'see above', or nothing where it was killed.
    """
    text, kinds = str(error), r"(?:\w+\.)*\w*(?:Error|Exception|OutOfMemory\w*)"
    where = f"the workers' logs are in {logs}"
    if died := re.search(r"class_name: (\w+).*?pid: (\d+)", text, re.DOTALL):
        why = re.search(r"The actor is dead because (.+?\.)\s", text + " ", re.DOTALL)
        because = f" because {' '.join(why[1].split()).rstrip('.')}" if why else ""
        return f"the worker {died[1]} (pid {died[2]}) died{because}; {last_words(logs, int(died[2]), {})}"
    if engine := re.search(
        "(EngineDeadError|method failed: cancelled)|Engine core initialization failed", text
    ):
        what = "vLLM's engine died" if engine[1] else "vLLM did not start"
        for path in worker_logs(logs):
            causes = re.findall(
                rf"({kinds}: .+|\w+ proc \S+ died.*)", path.read_text(errors="replace")
            )
            causes = [
                c
                for c in causes
                if not re.search("Engine ?[Cc]ore|WorkerProc|stack trace|cancelled", c)
            ]
            if causes:
                return f"{what}: {causes[0].rstrip('.')}; {where}"
        return (
            f"{what}, and does not say why, as when it is killed (SIGKILL, out of memory); {where}"
        )
    found = re.findall(rf"^\W*({kinds}: .+)$", text, re.MULTILINE)
    return f"{found[-1] if found else ' '.join(text.split()) or repr(error)}; {where}"


def why_it_died(cause: Any) -> str:
    """Ray's words on the death of an actor (its ActorDeathCause, a protobuf); empty where it was meant to end."""
    kind, died = cause.WhichOneof("context"), cause.actor_died_error_context
    text = str(getattr(cause, kind)) if kind else ""
    if kind == "actor_died_error_context":
        text = (
            died.error_message
            if died.Reason.Name(died.reason) in ("WORKER_DIED", "NODE_DIED")
            else ""
        )
    return " ".join(text.split())[:300]


def name_of(title: str, pid: int, node: str = "") -> str:
    """A process by its title: `ray::Class.method` is the worker Class, `VLLM::EngineCore` vLLM's engine."""
    engine = "vLLM's " if title.startswith("VLLM") else "SGLang's "
    name = re.sub("^(VLLM|sglang)::", engine, re.sub(r"^ray::(\w+).*", r"the worker \1", title))
    return f"{name.rpartition('/')[2]} (pid {pid}{f' on {node}' if node else ''})"


def sweep(began: float) -> None:
    """Unlink what processes that were killed left in /dev/shm, and the sockets of verl's weight sync in /tmp.

    Only what is ours, came after `began` (seconds since the epoch), is called as Python, torch, NCCL and verl call
    theirs, and no living process has open: another run's stays.
    """
    shared = r"(psm_\w+|sem\.mp-\w+|torch_\d+_\d+_\d+|nccl-\w{6}|verl_weights_\w+)$"
    sockets = r"rl-colocate-zmq-[\w-]+\.sock$"
    found = [path for path in SHARED.iterdir() if re.match(shared, path.name)]
    found += [path for path in Path("/tmp").iterdir() if re.match(sockets, path.name)]
    left = []
    for path in found:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_ctime >= began - 1:
                left.append(path)
    used = in_use() if left else set()
    for path in left:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if (
                path.lstat().st_ino not in used and probe.connect_ex(str(path)) != 0
            ):  # no socket, or nobody answers
                path.unlink()


def in_use() -> set[int]:
    """The inodes in /dev/shm that some process has mapped or open. By inode, since glibc maps a semaphore under another
    name than the one that it then gets."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
            links = [
                link.path
                for link in os.scandir(process / "fd")
                if os.readlink(link.path).startswith("/dev/shm/")
            ]
            found |= {os.stat(link).st_ino for link in links}
    return found


def descendants(spared: Collection[int]) -> dict[int, psutil.Process]:
    """Every process that this one has started and its own have, by pid, but `spared`."""
    return {p.pid: p for p in psutil.Process().children(recursive=True) if p.pid not in spared}


def kill(known: Mapping[int, psutil.Process], spared: Collection[int], patience: float) -> None:
    """Kill every descendant but `spared`, and the `known` that lost their parent; wait `patience` seconds at most."""
    found = dict(known)
    while new := descendants({*found, *spared}):
        for process in new.values():
            with contextlib.suppress(psutil.Error):
                process.suspend()  # so that it starts no other while the list is read
        found |= new
    for process in found.values():
        with contextlib.suppress(psutil.Error):  # gone, or another process has its pid by now
            process.kill()
    psutil.wait_procs(found.values(), timeout=patience)


def end_now(status: int, watch: Watch | None) -> None:
    """Leave at once: kill every descendant, trackers too, without a word to anybody, and remove what they leave."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # by which the watch would tell that they died
    if watch:
        watch.resting.set()
        watch.keeper.communicate(b"end")
        watch.clean((), patience=2.0)
    else:
        kill({}, (), patience=2.0)
    os._exit(status)
