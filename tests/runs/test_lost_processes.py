"""Tests with whole runs that a lost, stopped or hanging process ends the run with a clear message.

Tests marked `soak` take long. `make soak` runs them.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.helpers.recipes import metrics_of
from tests.helpers.runs import LiveRun


def list_failed_fractions(run: LiveRun) -> list[float]:
    """rollout/failed_frac of each step."""
    name = "rollout/failed_frac"
    return [m[name] for m in metrics_of(run.folder) if name in m]


@pytest.mark.soak
def test_a_dead_gym_server_is_restarted_and_a_dead_engine_ends_the_run(workspace):
    with LiveRun(
        workspace, "lost", "trainer.total_training_steps=500", "trainer.save_freq=1"
    ) as run:
        run.until_step(2)
        run.signal(r"server_process\.py", signal.SIGKILL)
        last = max(run.steps())
        run.until_step(last + 3)
        assert "gym server reasoning_gym exited with status -9 and is restarted; log" in run.output
        assert max(list_failed_fractions(run)) == 0
        run.signal("^VLLM::EngineCore", signal.SIGKILL)
        seconds = run.end(1)
    print(f"ended {seconds:.1f} s after the death of vLLM's engine")
    message = run.output.splitlines()[-1]
    assert re.match(r"error: stage \w+: .*vLLM's (engine|EngineCore)", message), message
    assert "Rerun the same command to resume from the last checkpoint" in message
    assert (run.folder / "checkpoints" / f"global_step_{last + 2}").is_dir()


# {case: (title of the process, signal, pattern of the last output line)}
LOST_PROCESSES = {
    "engine killed": (
        "^VLLM::EngineCore",
        signal.SIGKILL,
        r"EngineCore|vLLM's engine died and logged no cause",
    ),
    "actor killed": ("^ray::ActorRolloutRefWorker", signal.SIGKILL, "ActorRolloutRefWorker"),
    "GCS killed": ("gcs_server ", signal.SIGKILL, r"gcs_server \(pid \d+\) died"),
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
    """The actor has two ranks. If one is lost, the other would wait for it forever.

    If the GCS is lost, the last update is saved. If the driver is lost, it is not.
    """
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
    assert saved >= 3 if case == "GCS killed" else saved >= 2
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


class HangingServer(BaseHTTPRequestHandler):
    """A Gym server whose verifier accepts connections and never answers."""

    def reply(self, body: dict) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply({"paths": {"/verify": {"post": {}}}})

    def do_POST(self):
        if self.path == "/verify":
            self.server.verifications += 1
            time.sleep(3600)
        self.reply({})

    def log_message(self, *_):
        pass


@pytest.mark.soak
def test_a_verifier_that_never_answers_ends_the_run(workspace):
    listener = ThreadingHTTPServer(("127.0.0.1", 0), HangingServer)
    listener.daemon_threads = True
    listener.verifications = 0
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    changes = [
        "gym.servers.reasoning_gym.start=null",
        "trainer.val_before_train=false",
        "gym.timeout_s=20",
        "gym.concurrency=64",
        f"gym.servers.reasoning_gym.url=http://127.0.0.1:{listener.server_port}",
    ]
    with LiveRun(workspace, "unverified", *changes) as run:
        run.until(lambda: listener.verifications)
        seconds = run.end(1)
    listener.shutdown()
    print(f"ended {seconds:.1f} s after the first call: {run.output.splitlines()[-1][:300]}")
    assert re.search(r"error: .*episodes failed \(\d+ timeout\)", run.output), run.output[-2000:]


@pytest.mark.soak
def test_a_stopped_gym_server_ends_the_run(workspace):
    with LiveRun(workspace, "asleep", "gym.timeout_s=20", "gym.concurrency=64") as run:
        run.until_step(2)
        run.signal(r"server_process\.py", signal.SIGSTOP)
        time.sleep(10)
        run.signal(r"server_process\.py", signal.SIGCONT)
        run.until_step(max(run.steps()) + 3)
        assert max(list_failed_fractions(run)) == 0
        run.signal(r"server_process\.py", signal.SIGSTOP)
        seconds = run.end(1)
    print(
        f"ended {seconds:.1f} s after SIGSTOP of the Gym server: "
        f"{run.output.splitlines()[-1][:300]}"
    )
    assert re.search(r"error: .*episodes failed \(.*timeout", run.output), run.output[-2000:]


SLEEPY_LOSS = """
import time

import ray


def loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode,
    config,
    rollout_is_weights=None,
):
    if not ray.is_initialized():  # a trial, before the workers start
        return -(advantages * log_prob).sum(), {}
    print("asleep", flush=True)
    time.sleep(600)
"""


@pytest.mark.soak
def test_a_stage_without_progress_ends_a_whole_run(workspace):
    """The loss function sleeps. All processes are alive, so only the stage timeout ends the run."""
    (workspace / "sleepy.py").write_text(SLEEPY_LOSS)
    changes = [
        "actor_rollout_ref.actor.policy_loss.loss_mode=sleepy.py:loss",
        "trainer.stage_timeout_s=100",
    ]
    with LiveRun(workspace, "stuck", *changes) as run:
        run.until(lambda: "update_actor" in run.output or bool(run.processes("update_actor")))
        seconds = run.end(1)
    print(f"ended after {seconds:.1f} s")
    timeout = r"made no progress for 100 s \(trainer.stage_timeout_s\)\. .*asleep"
    assert re.search(rf"error: Stage 'update_actor' {timeout}", run.output)
