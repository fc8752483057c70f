"""How a run is stopped, and what it tells of itself: without Ray, since none of that needs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from conftest import GIVEN, ROOT, load

from kit.errors import Stop
from kit.extras.supervisor import node_monitor, process_monitor
from kit.runs import preparation
from kit.runs.run_dir import Run


@pytest.fixture
def started(workspace, tmp_path, monkeypatch):
    """A run in an empty folder; the signals are given back."""
    monkeypatch.chdir(tmp_path)
    config, _ = load(workspace)
    config.trainer.stage_timeout_s = 60
    kept = {
        signum: signal.getsignal(signum)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    }
    with Run(config) as run:
        yield run
    # the signals are given back, and what trackers were told: the next run in this process has another folder
    assert (
        kept == {signum: signal.getsignal(signum) for signum in kept}
        and "TENSORBOARD_DIR" not in os.environ
    )


def test_a_stop_leaves_a_stage_at_once_but_lets_an_update_end(started):
    saved, done = [], []
    with pytest.raises(Stop) as caught, started.saving(lambda: saved.append(1)):
        with started.stage("update_actor"):
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 50  # the stage's deadline, as before
            done.append("update")
        with started.stage("update_weights"):
            done.append("sync")
        with started.stage("gen"):
            done.append("never")
    assert done == ["update", "sync"] and saved == [1]
    assert (caught.value.status, str(caught.value)) == (143, "interrupted")

    started.guard.asked = 0
    with (
        pytest.raises(Stop) as caught,
        started.saving(lambda: saved.append(2)),
        started.stage("gen"),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        done.append("never")
    assert done == ["update", "sync"] and saved == [1, 2] and caught.value.status == 130


def test_a_run_in_the_background_of_a_shell_leaves_ctrl_c_to_others(
    workspace, tmp_path, monkeypatch
):
    """Such a shell has it ignore SIGINT; SIGTERM stops it all the same."""
    monkeypatch.chdir(tmp_path)
    config, _ = load(workspace)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Run(config) as run, pytest.raises(Stop) as caught, run.stage("gen"):
            os.kill(os.getpid(), signal.SIGINT)
            assert not run.guard.asked
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.status == 143 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stop_in_a_task_that_others_wait_for_is_told_once(started):
    """asyncio raises it out of the loop again for each of them, which is when all is closed."""

    async def waits(task):
        await task

    async def served():
        stopped = asyncio.create_task(asks())
        for _ in range(3):
            stopped = asyncio.create_task(waits(stopped))
        await stopped

    async def asks():
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stop), asyncio.Runner() as loop, contextlib.ExitStack() as stack:
        started.guard.loop = loop
        stack.callback(started.guard.end)
        stack.callback(started.guard.end)
        with started.stage("start"):
            loop.run(served())


def test_a_stage_without_progress_ends_the_run(started):
    started.config.trainer.stage_timeout_s = 1
    with (
        pytest.raises(Stop, match=r"stage ref got nowhere in 1 s \(trainer.stage_timeout_s\)"),
        started.stage("ref"),
    ):
        time.sleep(20)
    one_more = started.counter(3)
    with started.stage("gen"):
        for _ in range(3):  # an episode that ends is progress
            time.sleep(0.6)
            one_more()


def test_nothing_swallows_a_stop(started):
    """Ray makes a plain KeyboardInterrupt of what a signal handler raised; event loops keep exceptions."""
    with pytest.raises(Stop, match="lost"), started.stage("gen"):
        try:
            started.guard.lost = "something is lost"
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(5)
        except Exception:
            raise AssertionError("a Stop is no Exception") from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as ray.get does


def test_what_is_asked_twice_at_once_was_asked_once(started, monkeypatch):
    """A wrapper passes a signal on that the terminal sends to the whole group."""
    ended: list[int] = []
    monkeypatch.setattr(process_monitor, "end_now", lambda status, _: ended.append(status))
    with started.stage("save_checkpoint"):  # which a stop lets end, however long it takes
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [] and signal.alarm(0) > 50
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]


def test_an_error_outside_of_an_update_saves_too(started):
    saved: list[int] = []
    with pytest.raises(ValueError), started.saving(lambda: saved.append(1)), started.stage("gen"):
        raise ValueError("of a reward")
    assert saved == [1]
    with (
        pytest.raises(ValueError),
        started.saving(lambda: saved.append(2)),
        started.stage("update_actor"),
    ):
        raise ValueError("half done")
    with pytest.raises(ValueError), started.saving(lambda: saved.append(3)):
        with started.stage("step"), started.stage("update_actor"):  # as the loop has them
            raise ValueError("half done")
    assert saved == [1]


def test_what_is_lost_between_two_stages_ends_the_next(started):
    started.guard.lose("the worker X died")
    with pytest.raises(Stop, match="stage ref: the worker X died"), started.stage("ref"):
        raise AssertionError("never")


def test_rays_word_on_a_death_is_read():
    from ray.core.generated import common_pb2

    died = common_pb2.ActorDeathCause()
    died.actor_died_error_context.error_message = "connection  error code 2"
    died.actor_died_error_context.reason = common_pb2.ActorDiedErrorContext.Reason.Value(
        "WORKER_DIED"
    )
    assert process_monitor.why_it_died(died) == "connection error code 2"
    died.actor_died_error_context.reason = common_pb2.ActorDiedErrorContext.Reason.Value("RAY_KILL")
    assert process_monitor.why_it_died(died) == ""
    memory = common_pb2.ActorDeathCause()
    memory.oom_context.error_message = "95% used"
    assert "95% used" in process_monitor.why_it_died(memory)
    assert process_monitor.why_it_died(common_pb2.ActorDeathCause()) == ""


@pytest.mark.parametrize(
    "error",
    [
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "Exception: Call to collective_rpc method failed: cancelled",  # of a worker that died in the weight sync
    ],
)
@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down",
            "died: Worker proc VllmWorker-0",
        ),
        (
            "EngineCore hit an error\ntorch.OutOfMemoryError: CUDA\n",
            "died: torch.OutOfMemoryError: ",
        ),
        (
            "EngineDeadError: EngineCore encountered an issue\nRuntimeError: cancelled\n",
            "died, and does not say why",
        ),
    ],
)
def test_a_dead_engines_own_cause_is_told(tmp_path, log, told, error):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "worker-abc-01000000-7.err").write_text(log)
    assert process_monitor.root_cause(RuntimeError(error), tmp_path).startswith(
        f"vLLM's engine {told}"
    )


def test_the_log_that_was_written_last_is_told(tmp_path):
    (tmp_path / "ray").mkdir()
    for age, (name, text) in enumerate(
        {"8.out": "", "7.out": "asleep\n", "7.err": "a\nlonger\nlog\n"}.items()
    ):
        path = tmp_path / "ray" / f"worker-abc-01000000-{name}"
        path.write_text(text)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert process_monitor.latest_words(tmp_path).endswith("7.out: asleep")


def test_what_is_trained_again_is_told_once(started):
    path = started.folder / "metrics.jsonl"
    lines = [json.dumps({"step": step, "n": n}) for n, step in enumerate((0, 1, 2, 2, 3))]
    path.write_text("\n".join(lines) + '\n{"step": 4, "cut')
    started.bar.stop()
    started.give_folder_back()
    with Run(started.config, "train", Path("checkpoints/global_step_2")):
        pass
    assert path.read_text().splitlines() == lines[:4]
    assert (started.folder / "metrics.abandoned.jsonl").read_text().splitlines() == lines[4:]
    assert (started.folder / "metrics.jsonl.cut").read_text().splitlines() == ['{"step": 4, "cut']
    with Run(started.config, "rollout"):
        assert path.read_text() != ""
    with Run(started.config):  # from the start
        pass
    assert path.read_text() == ""


def test_what_the_dead_left_is_swept_and_what_the_living_hold_stays():
    began = time.time()
    code = "import os, signal; from multiprocessing import shared_memory as s; b = s.SharedMemory(create=True, size=9)"
    code += "; print(b.name, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    dead = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    ).stdout.strip()
    # its resource tracker outlives it for a moment, and may tidy up by itself: what it misses is ours to sweep
    names = {"psm_left_by_a_test", "torch_1_2_0", "nccl-aB3dEf"}
    for name in names:
        (process_monitor.SHARED / name).touch()
    mine = shared_memory.SharedMemory(create=True, size=9)
    lock = multiprocessing.get_context(
        "spawn"
    ).Lock()  # a semaphore, which a child opens by its name
    other = process_monitor.SHARED / "not_of_a_run"
    other.touch()
    held = process_monitor.SHARED / f"torch_{os.getpid()}_7_1"  # of another run of the same user
    holder = held.open("w")
    stranger = process_monitor.SHARED / "nccl-xY3dEf"
    stranger.touch()
    if os.getuid() == 0:
        os.chown(stranger, 65534, 65534)
    not_shared = Path("/tmp/torch_1_2_0")
    not_shared.touch()
    try:
        process_monitor.sweep(began)
        left = {path.name for path in process_monitor.SHARED.iterdir()}
        assert not {dead, *names} & left and {mine.name, other.name, held.name} <= left
        assert not_shared.exists() and (stranger.exists() or os.getuid() != 0)
        assert "sem." + lock._semlock.name.removeprefix("/") in left
        (process_monitor.SHARED / "psm_older").touch()
        process_monitor.sweep(time.time() + 5)
        assert (process_monitor.SHARED / "psm_older").exists()  # from before: another run's
    finally:
        (process_monitor.SHARED / "psm_older").unlink(missing_ok=True)
        for path in (other, held, stranger, not_shared):
            path.unlink(missing_ok=True)
        holder.close()
        mine.close()
        mine.unlink()


def test_the_watch_names_who_died_and_who_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(process_monitor, "STOPPED_S", 0.2)
    problems: list[str] = []
    looker = process_monitor.Watch(tmp_path, tmp_path, problems.append)
    with looker:
        child = subprocess.Popen(
            ["VLLM::EngineCore", "-c", "import time; time.sleep(60)"], executable=sys.executable
        )
        (tmp_path / "ray").mkdir()
        log = tmp_path / "ray" / f"worker-abc-01000000-{child.pid}.err"
        log.write_text("one\ntwo\nthe cause\nthe end\n")
        assert looker.look() == looker.look() == ""
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not (told := looker.look()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert told.startswith(
            f"vLLM's EngineCore (pid {child.pid}) is stopped (SIGSTOP?); the last lines of "
        )
        assert told.endswith("two | the cause | the end")
        log.rename(
            log.with_stem(f"worker-abc-01000000-{os.getpid()}")
        )  # vLLM's have no log but their parent's
        child.kill()
        child.wait()
        assert looker.look() == looker.look() == ""  # for vLLM's own word on it
        told = looker.look()
        assert told.startswith(f"vLLM's EngineCore (pid {child.pid}) died; ") and told.endswith(
            "the cause | the end"
        )
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        temporary = Path(os.environ["TMPDIR"])
        assert temporary.is_dir() and str(temporary) == looker.temporary
    assert not psutil.pid_exists(orphan.pid) or orphan.poll() is not None
    assert not temporary.exists() and os.environ.get("TMPDIR") != str(temporary)


def test_a_silent_node_is_named(monkeypatch, tmp_path):
    address = {"NodeID": "n", "IPAddress": "10.0.0.7"}
    actors = {
        "a": {"ActorID": "a", "ActorClassName": "A", "State": "ALIVE", "Pid": 1, "Address": address}
    }
    monkeypatch.setattr(node_monitor.ray, "wait", lambda *_, **__: ([], []))
    looker = process_monitor.Watch(tmp_path, tmp_path, print)
    lookouts = node_monitor.Lookouts()
    looker.elsewhere = lookouts.look
    monkeypatch.setattr(looker, "_actors", lambda: actors)
    lookouts.asked["n"] = ("a question", time.monotonic() - 89)
    assert looker.look() == ""
    lookouts.asked["n"] = ("a question", time.monotonic() - 91)
    assert looker.look() == "the node 10.0.0.7 has not answered for 90 s: hung, or cut off"


DRIVER = """
import os, select, subprocess, sys, time
from pathlib import Path
from kit import watch

with watch.Watch(Path("."), Path("checkpoints"), print) as looker:
    sleep = ["sleep", "60"]
    worker, raylet = subprocess.Popen(sleep, start_new_session=True), subprocess.Popen(sleep)
    looker.tell_keeper(name="Ray's raylet", pid=raylet.pid)
    print(os.environ["TMPDIR"], worker.pid, raylet.pid, flush=True)
    while raylet.poll() is None:
        if select.select([sys.stdin], [], [], 0.05)[0] and sys.stdin.readline():
            raise SystemExit(0)
    time.sleep(1)  # Ray ends its driver when it has noticed; at once, a keeper without a core sees two die
    os._exit(1)
"""


@pytest.mark.parametrize("who", ["raylet", "driver", "nobody"])
def test_who_died_is_told_when_the_driver_cannot_and_all_is_cleared(tmp_path, who):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env=GIVEN | {"PYTHONPATH": str(ROOT)},
        text=True,
        **pipes,
    )
    folder, worker, raylet = driver.stdout.readline().split()
    assert Path(folder).is_dir()
    if who == "nobody":
        driver.stdin.write("end\n")
    else:
        os.kill(driver.pid if who == "driver" else int(raylet), signal.SIGKILL)
    told = driver.communicate()[1]  # till the keeper has ended too
    name = {
        "raylet": f"Ray's raylet (pid {raylet})",
        "driver": f"the driver (pid {driver.pid})",
    }.get(who)
    saved = "the last checkpoint is checkpoints/global_step_7, from which the same command goes on"
    assert told == (f"error: {name} died, and the run with it; {saved}\n" if name else "")
    assert (
        not psutil.pid_exists(int(worker))
        and not psutil.pid_exists(int(raylet))
        and not Path(folder).exists()
    )
    assert driver.returncode == {"raylet": 1, "driver": -signal.SIGKILL, "nobody": 0}[who]


def test_a_server_that_runs_code_is_said_loudly(workspace):
    config, data = load(workspace)
    assert "SANDBOX" not in preparation.summary(config, data, "train")
    config.gym.servers.reasoning_gym.start = {"server": "code_gen"}
    text = preparation.summary(config, data, "train")
    assert (
        "WARNING     reasoning_gym RUNS THE MODEL'S CODE on this machine, as you, WITHOUT A SANDBOX"
        in text
    )
