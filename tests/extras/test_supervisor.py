"""A dead engine or driver is reported, and the processes and files of the run are removed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from extras.supervisor import process_monitor
from extras.supervisor.process_monitor import ProcessMonitor
from kit.run import isolation
from tests.helpers.recipes import CLEAN_ENV, ROOT

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
    try:
        process_monitor.remove_leftovers(started_at)
        remaining = {path.name for path in folder.iterdir()}
        kept = {own_block.name, unrelated.name}
        assert not {dead, *leftover_names} & remaining and kept <= remaining
        assert "sem." + lock._semlock.name.removeprefix("/") in remaining
        (folder / "psm_older").touch()
        process_monitor.remove_leftovers(time.time() + 5)
        assert (folder / "psm_older").exists()  # it is older than the run
    finally:
        (folder / "psm_older").unlink(missing_ok=True)
        unrelated.unlink(missing_ok=True)
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
        monitor = stack.enter_context(ProcessMonitor(tmp_path, problems.append))
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


DRIVER = """
import os, subprocess, sys
from pathlib import Path
from extras.supervisor.process_monitor import ProcessMonitor
from kit.run import isolation
from tests.helpers.recipes import CLEAN_ENV, ROOT

monitor = ProcessMonitor(Path("."), print)
with isolation.use_own_tmpdir() as folder, monitor:
    monitor.register_folder(folder)
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    if not os.fork():  # it has the driver's end of the pipe
        os.execv("/bin/sleep", ["sleep", "60"])
    print(folder, worker.pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("victim", ["driver", "nobody"])
def test_the_death_of_the_driver_is_reported_and_everything_is_cleaned_up(tmp_path, victim):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env=CLEAN_ENV | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    folder, worker = driver.stdout.readline().split()
    assert Path(folder).is_dir()
    if victim == "nobody":
        driver.stdin.write("end\n")
    else:
        driver.kill()
    _, errors = driver.communicate()  # the reaper has the same stderr, so this waits for both
    if victim == "nobody":
        assert errors == ""
    else:
        assert errors.startswith(f"error: the driver (pid {driver.pid}) died, so the run ended. ")
        assert errors.count("\n") == 1
    assert not psutil.pid_exists(int(worker))
    assert not Path(folder).exists()
    assert driver.returncode == {"driver": -signal.SIGKILL, "nobody": 0}[victim]
