"""The process monitor names a process that died or is stopped, and removes what dead ones left."""

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
from types import SimpleNamespace

import psutil

from kit.extras.supervisor import node_monitor, process_monitor
from kit.extras.supervisor.process_monitor import ProcessInfo, ProcessMonitor, ProcessTable
from kit.runs import isolation


def test_rays_reason_for_an_actors_death_is_read():
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


def test_an_engine_is_dead_after_three_checks_and_the_gcs_after_one():
    engine = ProcessInfo("", 7, "VLLM::EngineCore", psutil.STATUS_SLEEPING)
    gcs = ProcessInfo("", 8, "/ray/gcs_server", psutil.STATUS_SLEEPING)
    table = ProcessTable()
    table.update([engine])
    table.update([])
    assert not table.engine_processes  # seen once: it may be a fork with its parent's title
    table.update([engine, gcs])
    table.update([engine, gcs])
    table.update([gcs._replace(status=psutil.STATUS_ZOMBIE)])
    assert table.find_dead_engine() == gcs
    table.update([])
    assert table.find_dead_engine() is None
    table.update([])
    assert table.find_dead_engine() == engine


def test_an_answer_of_a_node_counts_once(monkeypatch):
    """A slow node may answer less often than the monitor checks."""
    address = {"NodeID": "n", "IPAddress": "10.0.0.7"}
    actors = {"a": {"State": "ALIVE", "Pid": 1, "Address": address}}
    engine = ProcessInfo("10.0.0.7", 7, "VLLM::EngineCore", psutil.STATUS_SLEEPING)
    nodes = node_monitor.NodeMonitors()
    table = ProcessTable()
    answers = [[engine], [engine], [], [], []]  # one of them for every second check
    remote = SimpleNamespace(remote=lambda *_: answers.pop(0) if answers else [])
    monkeypatch.setattr(nodes, "_get_actor", lambda _: SimpleNamespace(list_processes=remote))
    monkeypatch.setattr(node_monitor.ray, "get", lambda answer: answer)
    found = []
    for check in range(12):
        is_ready = [1] if check % 2 else []
        monkeypatch.setattr(node_monitor.ray, "wait", lambda *_, ready=is_ready, **__: (ready, []))
        table.update(*nodes.list_processes(actors))
        found.append(table.find_dead_engine())
    # check 0 sends the first request; 1 and 3 read the engine's answers; 5, 7 and 9 miss it
    assert found[:9] == [None] * 9 and found[9] == engine


def test_a_process_that_runs_again_is_not_stopped(monkeypatch):
    monkeypatch.setattr(process_monitor, "MAX_STOPPED_S", 0.0)
    stopped = ProcessInfo("", 7, "ray::Actor.work", psutil.STATUS_STOPPED)
    table = ProcessTable()
    table.update([stopped, stopped._replace(pid=8, title="python")])
    time.sleep(0.01)
    assert table.find_stopped() == stopped
    table.update([stopped._replace(status=psutil.STATUS_RUNNING)])
    assert table.find_stopped() is None


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
    # Its resource tracker outlives it for a moment and may remove the block. These it misses.
    names = {"psm_left_by_a_test", "torch_1_2_0", "nccl-aB3dEf"}
    for name in names:
        (folder / name).touch()
    mine = shared_memory.SharedMemory(create=True, size=9)
    # a semaphore, which a child opens by its name
    lock = multiprocessing.get_context("spawn").Lock()
    other = folder / "not_of_a_run"
    other.touch()
    held = folder / f"torch_{os.getpid()}_7_1"  # of another run of the same user
    holder = held.open("w")
    stranger = folder / "nccl-xY3dEf"
    stranger.touch()
    if os.getuid() == 0:
        os.chown(stranger, 65534, 65534)
    not_shared = Path("/tmp/torch_1_2_0")
    not_shared.touch()
    try:
        process_monitor.remove_leftovers(started_at)
        left = {path.name for path in folder.iterdir()}
        assert not {dead, *names} & left and {mine.name, other.name, held.name} <= left
        assert not_shared.exists() and (stranger.exists() or os.getuid() != 0)
        assert "sem." + lock._semlock.name.removeprefix("/") in left
        (folder / "psm_older").touch()
        process_monitor.remove_leftovers(time.time() + 5)
        assert (folder / "psm_older").exists()  # older than the run, so it belongs to another run
    finally:
        (folder / "psm_older").unlink(missing_ok=True)
        for path in (other, held, stranger, not_shared):
            path.unlink(missing_ok=True)
        holder.close()
        mine.close()
        mine.unlink()


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
        while not (problem := monitor.check()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert problem.startswith(
            f"vLLM's EngineCore (pid {engine.pid}) is stopped (SIGSTOP?). Last lines of "
        )
        assert problem.endswith("two | the cause | the end")
        # vLLM's processes have no log: they write to their parent's
        log.rename(log.with_stem(f"worker-abc-01000000-{os.getpid()}"))
        engine.kill()
        engine.wait()
        assert monitor.check() == monitor.check() == ""  # vLLM may report the cause itself
        problem = monitor.check()
        assert problem.startswith(f"vLLM's EngineCore (pid {engine.pid}) died. ")
        assert problem.endswith("the cause | the end")
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        assert temporary.is_dir() and os.environ["TMPDIR"] == str(temporary)
    assert not psutil.pid_exists(orphan.pid) or orphan.poll() is not None
    assert not temporary.exists() and os.environ.get("TMPDIR") != str(temporary)


def test_a_node_that_does_not_answer_is_named(monkeypatch, tmp_path):
    address = {"NodeID": "n", "IPAddress": "10.0.0.7"}
    actors = {
        "a": {"ActorID": "a", "ActorClassName": "A", "State": "ALIVE", "Pid": 1, "Address": address}
    }
    monkeypatch.setattr(node_monitor.ray, "wait", lambda *_, **__: ([], []))
    monitor = ProcessMonitor(tmp_path, tmp_path, print)
    nodes = node_monitor.NodeMonitors()
    monitor.list_remote = nodes.list_processes
    monkeypatch.setattr(monitor, "list_actors", lambda: actors)
    nodes.requests["n"] = node_monitor.Request("an answer", time.monotonic() - 89)
    assert monitor.check() == ""
    nodes.requests["n"] = node_monitor.Request("an answer", time.monotonic() - 91)
    assert monitor.check() == (
        "the node 10.0.0.7 has not answered for 90 s: it hangs, or its network is down"
    )


def test_a_dead_worker_is_named_and_one_that_never_lived_or_was_meant_to_end_is_not(tmp_path):
    from ray.core.generated import common_pb2

    lost = common_pb2.ActorDeathCause()
    lost.oom_context.error_message = "95% used"
    alive = {"ActorID": "a", "ActorClassName": "Actor", "State": "ALIVE", "Pid": 7}
    alive["Address"] = {"IPAddress": "10.0.0.7"}
    dead = alive | {"State": "DEAD", "DeathCause": lost}
    monitor = ProcessMonitor(tmp_path, tmp_path, print)
    assert monitor._find_dead_actor({"a": dead}) == ""
    assert monitor._find_dead_actor({"a": alive}) == ""
    meant = dead | {"DeathCause": common_pb2.ActorDeathCause()}
    assert monitor._find_dead_actor({"a": meant}) == ""
    own = dead | {"ActorClassName": node_monitor.NodeMonitor.__name__}
    assert monitor._find_dead_actor({"a": own}) == ""
    problem = monitor._find_dead_actor({"a": dead})
    assert problem.startswith("the worker Actor (pid 7) died: ") and "95% used" in problem
    assert problem.endswith(f"See the logs in {tmp_path}")
