"""The process monitor reports processes that died or stopped, and removes files of dead ones."""

from __future__ import annotations

import contextlib
import errno
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
from kit.runs import isolation


def test_the_reason_that_ray_gives_for_the_death_of_an_actor_is_read():
    from ray.core.generated import common_pb2

    reasons = common_pb2.ActorDiedErrorContext.Reason
    death = common_pb2.ActorDeathCause()
    death.actor_died_error_context.error_message = "connection  error code 2"
    death.actor_died_error_context.reason = reasons.Value("WORKER_DIED")
    assert process_monitor.describe_death(death) == "connection error code 2"
    death.actor_died_error_context.reason = reasons.Value("RAY_KILL")
    assert process_monitor.describe_death(death) == ""
    memory = common_pb2.ActorDeathCause()
    memory.oom_context.error_message = "95% used"
    assert "95% used" in process_monitor.describe_death(memory)
    assert process_monitor.describe_death(common_pb2.ActorDeathCause()) == ""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A check of a monitor at which processes with these pids and titles exist."""
    monitor = ProcessMonitor(tmp_path, tmp_path, print)

    def run(**titles: str) -> str:
        found = {int(name[1:]): title for name, title in titles.items()}
        monkeypatch.setattr(monitor, "_list_titles", lambda: found)
        return monitor.check()

    return run


def test_an_engine_is_dead_after_three_checks_and_the_gcs_after_one(check):
    engine = {"p7": "VLLM::EngineCore"}
    gcs = {"p8": "/ray/gcs_server"}
    # Listed only once, it may be a fork that still has the title of its parent.
    assert check(**engine) == ""
    assert [check() for _ in range(4)] == [""] * 4
    assert check(**engine, **gcs) == check(**engine, **gcs) == ""
    assert check().startswith("gcs_server (pid 8) died. ")
    assert check() == ""
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
    of_another_user = folder / "nccl-xY3dEf"
    of_another_user.touch()
    if os.getuid() == 0:
        os.chown(of_another_user, 65534, 65534)
    in_another_folder = Path("/tmp/torch_1_2_0")
    in_another_folder.touch()
    try:
        process_monitor.remove_leftovers(started_at)
        remaining = {path.name for path in folder.iterdir()}
        kept = {own_block.name, unrelated.name, open_path.name}
        assert not {dead, *leftover_names} & remaining and kept <= remaining
        assert in_another_folder.exists() and (of_another_user.exists() or os.getuid() != 0)
        assert "sem." + lock._semlock.name.removeprefix("/") in remaining
        (folder / "psm_older").touch()
        process_monitor.remove_leftovers(time.time() + 5)
        assert (folder / "psm_older").exists()  # it is older than the run
    finally:
        (folder / "psm_older").unlink(missing_ok=True)
        for path in (unrelated, open_path, of_another_user, in_another_folder):
            path.unlink(missing_ok=True)
        open_file.close()
        own_block.close()
        own_block.unlink()


def start_engine() -> subprocess.Popen[bytes]:
    """Start a process with the title of vLLM's engine."""
    command = ["VLLM::EngineCore", "-c", "import time; time.sleep(60)"]
    return subprocess.Popen(command, executable=sys.executable)


def test_the_monitor_names_a_stopped_and_a_dead_process(tmp_path, monkeypatch):
    monkeypatch.setattr(process_monitor, "MAX_STOPPED_S", 0.2)
    problems: list[str] = []
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(isolation.use_own_tmpdir()))
        monitor = stack.enter_context(ProcessMonitor(tmp_path, tmp_path, problems.append))
        monitor.register_folder(str(temporary))
        engine = start_engine()
        (tmp_path / "ray").mkdir()
        log = tmp_path / "ray" / f"worker-abc-01000000-{engine.pid}.err"
        log.write_text("one\ntwo\nthe cause\nthe end\n")
        assert monitor.check() == monitor.check() == ""
        engine.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        problem = monitor.check()
        while not problem and time.monotonic() < deadline:
            time.sleep(0.1)
            problem = monitor.check()
        assert problem.startswith(
            f"vLLM's EngineCore (pid {engine.pid}) is stopped (SIGSTOP?). Last lines of "
        )
        assert problem.endswith("two | the cause | the end")
        engine.send_signal(signal.SIGCONT)
        while psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert monitor.check() == ""
        # vLLM's processes write to the log of their parent
        log.rename(log.with_stem(f"worker-abc-01000000-{os.getpid()}"))
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


def test_a_dead_worker_is_reported_unless_it_never_lived_or_was_stopped(tmp_path):
    from ray.core.generated import common_pb2

    out_of_memory = common_pb2.ActorDeathCause()
    out_of_memory.oom_context.error_message = "95% used"
    alive = {"ActorID": "a", "ActorClassName": "Actor", "State": "ALIVE", "Pid": 7}
    alive["Address"] = {"IPAddress": "10.0.0.7"}
    dead = alive | {"State": "DEAD", "DeathCause": out_of_memory}
    monitor = ProcessMonitor(tmp_path, tmp_path, print)
    assert monitor._find_dead_actor({"a": dead}) == ""
    assert monitor._find_dead_actor({"a": alive}) == ""
    stopped = dead | {"DeathCause": common_pb2.ActorDeathCause()}  # no cause: the run stopped it
    assert monitor._find_dead_actor({"a": stopped}) == ""
    problem = monitor._find_dead_actor({"a": dead})
    assert problem.startswith("the worker Actor (pid 7) died: ") and "95% used" in problem
    assert problem.endswith(f"See the logs in {tmp_path}")
    monitor.is_on_cluster = True
    problem = monitor._find_dead_actor({"a": dead})
    assert problem.startswith("the worker Actor (pid 7 on 10.0.0.7) died: ")


def test_a_kernel_without_pidfds_is_monitored_too(tmp_path, monkeypatch, caplog):
    """gVisor has no pidfd_open."""

    def refuse(_pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with ProcessMonitor(tmp_path, tmp_path, print) as monitor:
        monitor.register_folder(str(tmp_path / "folder"))
        monitor.register_process("raylet", os.getpid())
        assert monitor.thread.is_alive()
        monitor.stop_watching()
    assert "Function not implemented" in caplog.text
