"""Tests the guarantees of docs/reliability.md about stops, resumes, replays and lost processes.

Tests marked `soak` take long. `make soak` runs them.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.recipes import metrics_of, tiny
from tests.helpers.runs import SECRET, UNEQUAL, LiveRun, assert_same_checkpoints, assert_same_steps

GENERATED_ROWS = """
import random

def rows(batch, size, seed, pass_rates):
    solved = sum(100 * rate for rates in pass_rates.values() for rate in rates.values())
    words = random.Random(f"{seed} {batch}").sample(["say", "tell me", "write"], size)
    return [make_row(f"{word} 7 {solved:.0f}") for word in words]

def make_row(text):
    fields = {"question": "", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    return {"responses_create_params": {"input": text}, **fields}
"""
PPO_FILES = ("--config", "ppo", "--config", "deterministic")
LOCAL_HOSTS = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def ppo_changes(workspace: Path) -> list[str]:
    """Settings of five PPO steps with refilled batches. A function generates 1/3 of the rows."""
    (workspace / "generated.py").write_text(GENERATED_ROWS)
    file = f"{{path: {workspace / 'train.jsonl'}, weight: 2}}"
    return [
        "trainer.total_training_steps=5",
        "trainer.save_freq=1",
        "data.train_batch_size=3",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.enable=true",
        "trainer.logger=[wandb]",
        "trainer.log_val_generations=2",
        "algorithm.filter_groups.max_num_gen_batches=3",
        "trainer.max_actor_ckpt_to_keep=4",
        "gym.servers.reasoning_gym.start.config.judge_key='${oc.env:JUDGE_API_KEY}'",
        f"env.train_files=[{file}, {{function: generated.py:rows, weight: 1}}]",
    ]


@pytest.mark.soak
def test_a_run_in_two_parts_equals_the_whole_run(workspace):
    """One run has five steps. Another run is stopped by SIGTERM and resumed.

    All results are equal bit for bit. The first two runs are concurrent and do not affect each
    other.
    """
    changes = ppo_changes(workspace)
    with LiveRun(workspace, "whole", *changes, files=PPO_FILES) as run:
        parts = run_in_two_parts(workspace, changes)
        whole = finish_whole(run)
    assert_same_steps(whole, parts, range(1, 6))
    name = "checkpoints/global_step_5"
    assert assert_same_checkpoints(whole / name, parts / name) == 7
    for folder in (whole, parts):
        assert_no_secret(folder)


@pytest.mark.soak
def test_a_replay_equals_the_steps_that_it_repeats(workspace):
    """Steps 3 and 4 are replayed. All results are equal bit for bit."""
    changes = ppo_changes(workspace)
    with LiveRun(workspace, "recorded", *changes, files=PPO_FILES) as run:
        recorded = finish_whole(run)
    replayed = replay_steps_3_and_4(workspace, changes, recorded)
    name = "checkpoints/global_step_4"
    assert assert_same_checkpoints(recorded / name, replayed / name) == 7
    metrics = metrics_of_update_4(recorded)
    again = metrics_of_update_4(replayed)
    assert metrics == {k: again[k] for k in metrics} and "actor/pg_loss" in metrics
    assert_no_secret(replayed)


def finish_whole(run: LiveRun) -> Path:
    """Wait for the end of five steps, and return the run's folder."""
    run.process.wait(timeout=300)
    run.end(0)
    assert (run.folder / "checkpoints" / "global_step_2").is_dir()
    assert not (run.folder / "checkpoints" / "global_step_1").exists()
    tables = "offline-run-*/files/media/table/val/generations_*.table.json"
    assert list((run.folder / "wandb").glob(tables))
    return run.folder


def run_in_two_parts(workspace: Path, changes: list[str]) -> Path:
    """Stop the same run with SIGTERM, and resume it with one changed key. Return its folder.

    Also assert that its ports are open only to this machine.
    """
    with LiveRun(workspace, "parts", *changes, files=PPO_FILES) as run:
        run.until_step(2)
        outside = {name for name, (host, _) in run.ports() if host not in LOCAL_HOSTS}
        run.process.send_signal(signal.SIGTERM)
        seconds = run.end(143, patience=60.0)
    assert not outside, "these processes accept connections from other machines"
    print(f"saved and ended {seconds:.1f} s after SIGTERM")
    saved = re.search(r"Last checkpoint: .*global_step_(\d)", run.output)
    assert saved and "SIGTERM: saving and exiting." in run.output
    first = tuple((run.folder / "wandb").glob("offline-run-*"))
    with LiveRun(
        workspace, "parts", *changes, "trainer.print_samples_every=7", files=PPO_FILES
    ) as run:
        run.process.wait(timeout=300)
        run.end(0)
    checkpoint = f"{run.folder.relative_to(workspace)}/checkpoints/global_step_{saved[1]}"
    assert f"resume      from {checkpoint}" in run.output
    change = "trainer.print_samples_every 10 -> 7"
    assert f"Changed since {checkpoint}: {change}" in run.output
    ids = [path.name.rpartition("-")[2] for path in (run.folder / "wandb").glob("offline-run-*")]
    assert len(first) == 1 and len(ids) == 2 and len(set(ids)) == 1
    return run.folder


def replay_steps_3_and_4(workspace: Path, changes: list[str], whole: Path) -> Path:
    """Repeat the updates of two steps, and return the folder of the replay."""
    kept = [change for change in changes if "logger" not in change]
    arguments = tiny(workspace, "trainer.experiment_name=again", *kept)
    arguments += ["--replay", str(whole / "rollouts" / "step_[34].jsonl")]
    with LiveRun(workspace, "again_replay_3_4", files=PPO_FILES, arguments=arguments) as run:
        run.process.wait(timeout=300)
        run.end(0)
    return run.folder


def metrics_of_update_4(folder: Path) -> dict:
    """Return the metrics of the update of step 4, without those that differ in every run."""
    metrics: dict = {}
    for line in metrics_of(folder):
        if line["step"] == 4:
            metrics |= line
    return {k: v for k, v in metrics.items() if not k.startswith((*UNEQUAL, "val-"))}


def assert_no_secret(folder: Path) -> None:
    """Assert that no file of a run contains an API key from an environment variable."""
    for path in folder.rglob("*"):
        target = path.resolve()  # the folder of Ray's logs is a link
        is_linked_folder = path.is_symlink() and target.is_dir()
        for file in target.rglob("*") if is_linked_folder else [path]:
            assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


@pytest.mark.soak
def test_two_concurrent_runs_do_not_affect_each_other(workspace):
    """Both learn, and their rollout engines agree with their trainers. One run is killed."""
    changes = ["trainer.total_training_steps=60", "env.val_files=[]"]
    with (
        LiveRun(workspace, "one", *changes) as one,
        LiveRun(workspace, "two", *changes, "data.seed=2") as two,
    ):
        one.until_step(40)
        two.until_step(10)
        one.process.kill()
        one.end(-signal.SIGKILL)
        two.process.wait(timeout=300)
        two.end(0)
    for run in (one, two):
        steps = [m for m in metrics_of(run.folder) if "rollout/reward/mean" in m]
        assert all(m["training/rollout_probs_diff_max"] < 1e-3 for m in steps)
        rewards = [m["rollout/reward/mean"] for m in steps]
        assert sum(rewards[:3]) / 3 + 0.1 < sum(rewards[-3:]) / 3, rewards


@pytest.mark.soak
def test_a_second_ctrl_c_ends_the_run_immediately(workspace):
    with LiveRun(workspace, "twice") as run:
        run.until(lambda: bool(run.processes("raylet")))
        run.signal(r"server_process\.py", signal.SIGSTOP)  # a normal exit waits for it
        run.process.send_signal(signal.SIGINT)
        time.sleep(2.0)  # a signal within a second counts as a copy of the first one
        run.process.send_signal(signal.SIGINT)
        seconds = run.end(130, patience=10.0)
    print(f"ended {seconds:.1f} s after the second Ctrl-C")
    assert seconds < 5.0


# --- lost processes ------------------------------------------------------------------------------

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
        r"the driver \(pid \d+\) died, so the run ended\. ",
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
        seconds = run.end(1)
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
