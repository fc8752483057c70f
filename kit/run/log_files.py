"""Read the logs of a run's worker processes: the cause of a failure, and the last lines.

`logs` is always the folder logs/ of a run. Ray's logs are in logs/ray.

Convenience: an error names its cause instead of a folder with 30 logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from kit.verify.network import read_tail

ERROR_NAME = r"(?:\w+\.)*\w*(?:Error|Exception|OutOfMemory\w*)"
ENGINE_FAILED = re.compile(
    "(EngineDeadError|method failed: cancelled)|Engine core initialization failed"
)
ENGINE_CAUSE = re.compile(rf"({ERROR_NAME}: .+|\w+ proc \S+ died.*)")
# lines that repeat that the engine failed, and do not name the cause
ENGINE_NO_CAUSE = re.compile("Engine ?[Cc]ore|WorkerProc|stack trace|cancelled")

MAX_CAUSE = 600  # characters. Ray and CUDA describe the memory of a whole machine


def list_worker_logs(logs: Path) -> list[Path]:
    """Return the logs of Ray's workers, the most recently written one first."""
    return sorted(logs.glob("ray/worker-*"), key=lambda path: path.stat().st_mtime, reverse=True)


def describe_first_tail(paths: Iterable[Path], logs: Path) -> str:
    """Return the path and the last lines of the first log that is not empty."""
    for path in paths:
        tail = read_tail(path)
        if tail:
            return f"Last lines of {path}: {tail}"
    return f"See the logs in {logs}"


def read_log_tail(logs: Path, pid: int, parents: Mapping[int, int]) -> str:
    """Return the tail of a process's log, or of the log of its nearest parent that has one.

    parents: child pid -> parent pid.
    """
    paths: list[Path] = []
    while pid:
        own = logs.glob(f"ray/worker-*-{pid}.*")
        paths += sorted(own, key=lambda path: path.stat().st_size, reverse=True)
        pid = parents.get(pid, 0)
    return describe_first_tail(paths, logs)


def find_root_cause(error: BaseException, logs: Path) -> str:
    """Return a line about an error of Ray: which worker died or failed, why, and its log."""
    text = str(error)
    worker = re.search(r"class_name: (\w+).*?pid: (\d+)", text, re.DOTALL)
    if worker:
        reason = re.search(r"The actor is dead because (.+?\.)\s", text + " ", re.DOTALL)
        because = f" because {' '.join(reason[1].split()).rstrip('.')}" if reason else ""
        tail = read_log_tail(logs, int(worker[2]), {})
        return f"the worker {worker[1]} (pid {worker[2]}) died{because}. {tail}"
    engine = ENGINE_FAILED.search(text)
    if engine:
        problem = "vLLM's engine died" if engine[1] else "vLLM did not start"
        return f"{problem}{_find_engine_cause(logs)}. Worker logs: {logs}"
    causes = re.findall(rf"^\W*({ERROR_NAME}: .+)$", text, re.MULTILINE)
    cause = causes[-1] if causes else " ".join(text.split()) or repr(error)
    return f"{cause:.{MAX_CAUSE}}. Worker logs: {logs}"


def _find_engine_cause(logs: Path) -> str:
    """Return the cause of a failure, as text that follows "vLLM's engine died".

    It is the first cause in the newest log that names one. vLLM's engine writes the cause to its
    log. Its exception says only "see above". An engine that was killed writes nothing.
    """
    for path in list_worker_logs(logs):
        for cause in ENGINE_CAUSE.findall(path.read_text(errors="replace")):
            if not ENGINE_NO_CAUSE.search(cause):
                return f": {cause.rstrip('.'):.{MAX_CAUSE}}"
    return " and logged no cause (killed by SIGKILL, or out of memory?)"
