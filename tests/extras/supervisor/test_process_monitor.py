"""The process monitor reports processes that died or stopped, and removes files of dead ones."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from extras.supervisor import process_monitor
from extras.supervisor.process_monitor import ProcessMonitor
from kit.runs import isolation


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A check of a monitor at which processes with these pids and titles exist."""
    monitor = ProcessMonitor(tmp_path, tmp_path, print)

    def run(**titles: str) -> str:
        found = {int(name[1:]): title for name, title in titles.items()}
        monkeypatch.setattr(monitor, "_list_titles", lambda: found)
        return monitor.check()

    return run


def test_an_engine_is_dead_after_three_checks(check):
    engine = {"p7": "VLLM::EngineCore"}
    # Listed only once, it may be a fork that still has the title of its parent.
    assert check(**engine) == ""
    assert [check() for _ in range(4)] == [""] * 4
    assert check(**engine) == check(**engine) == ""
    assert check() == check() == ""
    assert check().startswith("vLLM's EngineCore (pid 7) died. ")


LEAVE_SHARED_MEMORY = """
import os, signal
from multiprocessing import shared_memory

block = shared_memory.SharedMemory(create=True, size=9)
print(block.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_dead_processes_are_removed_and_those_in_use_stay():
    started_at = time.time()
    folder = process_monitor.SHARED_MEMORY
    dead = subprocess.run(
        [sys.executable, "-c", LEAVE_SHARED_MEMORY], capture_output=True, text=True
    ).stdout.strip()
    # The resource tracker of that process may still remove the block. It does not know these files.
    leftover_names = {"psm_left_by_a_test", "torch_1_2_0", "nccl-aB3dEf"}
    for name in leftover_names:
        (folder / name).touch()
    own_block = shared_memory.SharedMemory(create=True, size=9)
    # a child process opens this semaphore by its name
    lock = multiprocessing.get_context("spawn").Lock()
    unrelated = folder / "not_of_a_run"
    unrelated.touch()
    open_path = folder / f"torch_{os.getpid()}_7_1"  # as a file of another run of the same user
    open_file = open_path.open("w")
    try:
        process_monitor.remove_leftovers(started_at)
        remaining = {path.name for path in folder.iterdir()}
        kept = {own_block.name, unrelated.name, open_path.name}
        assert not {dead, *leftover_names} & remaining and kept <= remaining
        assert "sem." + lock._semlock.name.removeprefix("/") in remaining
        (folder / "psm_older").touch()
        process_monitor.remove_leftovers(time.time() + 5)
        assert (folder / "psm_older").exists()  # it is older than the run
    finally:
        (folder / "psm_older").unlink(missing_ok=True)
        for path in (unrelated, open_path):
            path.unlink(missing_ok=True)
        open_file.close()
        own_block.close()
        own_block.unlink()


def start_engine() -> subprocess.Popen[bytes]:
    """Start a process with the title of vLLM's engine."""
    command = ["VLLM::EngineCore", "-c", "import time; time.sleep(60)"]
    return subprocess.Popen(command, executable=sys.executable)


def test_the_monitor_names_a_dead_engine_and_ends_its_processes(tmp_path):
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(isolation.use_own_tmpdir()))
        monitor = stack.enter_context(ProcessMonitor(tmp_path, tmp_path, problems.append))
        monitor.register_folder(str(temporary))
        engine = start_engine()
        (tmp_path / "ray").mkdir()
        # vLLM's processes write to the log of their parent
        log = tmp_path / "ray" / f"worker-abc-01000000-{os.getpid()}.err"
        log.write_text("one\ntwo\nthe cause\nthe end\n")
        assert monitor.check() == monitor.check() == ""
        engine.kill()
        engine.wait()
        assert monitor.check() == monitor.check() == ""  # it waits, since vLLM may report the cause
        problem = monitor.check()
        assert problem.startswith(f"vLLM's EngineCore (pid {engine.pid}) died. ")
        assert problem.endswith("the cause | the end")
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        assert temporary.is_dir() and os.environ["TMPDIR"] == str(temporary)
    assert not psutil.pid_exists(orphan.pid) or orphan.poll() is not None
    assert not temporary.exists() and os.environ.get("TMPDIR") != str(temporary)
