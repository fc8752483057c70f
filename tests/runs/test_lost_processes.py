"""Tests with whole runs that a lost, stopped or hanging process ends the run with a clear message.

Tests marked `soak` take long. `make soak` runs them.
"""

from __future__ import annotations

import re
import signal

import pytest

from tests.helpers.runs import LiveRun

# {case: (title of the process, signal, pattern of the last output line)}
LOST_PROCESSES = {
    "engine killed": (
        "^VLLM::EngineCore",
        signal.SIGKILL,
        r"EngineCore|vLLM's engine died and logged no cause",
    ),
    "actor killed": ("^ray::ActorRolloutRefWorker", signal.SIGKILL, "ActorRolloutRefWorker"),
    "raylet killed": (
        "raylet/raylet ",
        signal.SIGKILL,
        r"the driver \(pid \d+\) died, so the run ended\. Last",
    ),
    "driver killed": (
        r"algorithm\.py ",
        signal.SIGKILL,
        r"the driver \(pid \d+\) died, so the run ended\. Last",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", LOST_PROCESSES)
def test_a_lost_process_ends_the_run_with_its_name(workspace, case):
    """The actor has two ranks. If one is lost, the other would wait for it forever."""
    title, signum, pattern = LOST_PROCESSES[case]
    two = ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=500", "trainer.save_freq=2"]
    with LiveRun(workspace, case.replace(" ", "_").replace("'", ""), *two) as run:
        run.until_step(3)
        run.processes(title)[0].send_signal(signum)
        seconds = run.end(-signum if case == "driver killed" else 1)
        run.until(lambda: "error: " in run.output, 20.0, ended=True)  # the reaper's line
    last = run.output.splitlines()[-1]
    paths = (run.folder / "checkpoints").glob("global_*")
    saved = max(int(path.name.removeprefix("global_step_")) for path in paths)
    assert saved >= 2
    print(f"{case}: ended after {seconds:.1f} s: {last[:300]}")
    assert last.startswith("error: ") and re.search(pattern, last), run.output[-2000:]


@pytest.mark.soak
def test_a_run_ends_if_the_engine_dies_in_the_weight_sync(workspace):
    """Otherwise the sender would wait forever for the receiver, and the driver for the sender."""
    with LiveRun(workspace, "sync", "trainer.total_training_steps=500") as run:
        run.until_step(1)
        actor = run.processes("^ray::ActorRolloutRefWorker")[0]
        receiver = run.processes("^VLLM::EngineCore")[0]
        run.until(lambda: "update_actor" in actor.cmdline()[0])
        receiver.suspend()  # otherwise the sync would end before the kill
        run.until(lambda: "update_weights" in actor.cmdline()[0])
        receiver.kill()
        seconds = run.end(1)
    last = run.output.splitlines()[-1]
    print(f"ended after {seconds:.1f} s: {last[:300]}")
    assert re.search(r"error: stage update_weights: .*vLLM's (engine|EngineCore)", last), last
