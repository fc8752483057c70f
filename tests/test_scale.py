"""Runs with several ranks, replicas and nodes on one machine; `make soak` starts them.

See docs/cluster.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray

from kit.verify.network import find_free_port
from tests.helpers.recipes import CLEAN_ENV, command, metrics_of, run, tiny
from tests.helpers.runs import UNEQUAL, LiveRun

pytestmark = pytest.mark.soak
RAY = Path(sys.executable).with_name("ray")
PPO = ["--config", "ppo"]
TWO_STEPS = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4"]
REFERENCE = ["actor_rollout_ref.actor.use_kl_loss=true"]
# Metrics that verl averages over micro-batches without regard to their size.
UNWEIGHTED_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "critic/vpred_mean")


@pytest.fixture(scope="module")
def recorded(workspace) -> Path:
    """Return the file with the episodes of one step."""
    changes = [
        "trainer.experiment_name=recorded",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    ]
    done = run(command(workspace, *tiny(workspace, *changes)), workspace)
    assert done.returncode == 0, done.stderr[-3000:]
    return workspace / "runs/recorded/rollouts/step_1.jsonl"


def replay(workspace: Path, recorded: Path, name: str, *changes: str) -> dict[str, float]:
    """Replay the recorded episodes with a critic and a reference. Return metrics of the update.

    The update has two optimizer steps.
    """
    arguments = [
        *PPO,
        "--replay",
        str(recorded),
        f"trainer.experiment_name={name}",
        *TWO_STEPS,
        *REFERENCE,
        *changes,
    ]
    # this model has a value head, so the head is not random
    arguments += [f"critic.model.path={workspace / 'scored'}"]
    done = run(command(workspace, *arguments, *tiny(workspace)), workspace)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = metrics_of(workspace / "runs" / f"{name}_replay_1")[-1]
    return {key: value for key, value in metrics.items() if not key.startswith(UNEQUAL)}


def assert_equal_up_to_rounding(one: dict[str, float], two: dict[str, float]) -> None:
    assert one.keys() == two.keys()
    assert len(one) > 40 and one["actor/grad_norm"] > 0 and one["critic/vf_loss"] > 0
    different = {}
    for key in one:
        tolerance = 0.05 if key in UNWEIGHTED_METRICS else 1e-4
        if two[key] != pytest.approx(one[key], rel=tolerance, abs=1e-6):
            different[key] = (one[key], two[key])
    assert not different


@pytest.fixture(scope="module")
def one_rank_metrics(workspace, recorded) -> dict[str, float]:
    """Return the metrics of the update on one rank."""
    return replay(workspace, recorded, "one")


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_update_on_several_ranks_equals_that_on_one(
    workspace, recorded, one_rank_metrics, ranks
):
    change = f"trainer.n_gpus_per_node={ranks}"
    assert_equal_up_to_rounding(one_rank_metrics, replay(workspace, recorded, f"of{ranks}", change))


def run_ten_steps(workspace: Path, name: str, *changes: str, overlays: Sequence[str] = ()) -> Path:
    """Run ten steps, in which vLLM and the trainer agree, and return the run's folder."""
    changes = (
        f"trainer.experiment_name={name}",
        "trainer.total_training_steps=10",
        "trainer.save_freq=5",
        *changes,
    )
    done = run(command(workspace, *overlays, *tiny(workspace, *changes)), workspace, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    steps = [m for m in metrics_of(workspace / "runs" / name) if "actor/grad_norm" in m]
    assert len(steps) == 10 and all(m["training/rollout_probs_diff_max"] < 1e-3 for m in steps)
    assert all(m["training/weights_proved"] == 1 for m in steps)
    assert all(m["actor/grad_norm"] > 0 for m in steps)
    return workspace / "runs" / name


def test_two_ranks_with_two_replicas(workspace):
    run_ten_steps(workspace, "two_replicas", "trainer.n_gpus_per_node=2")


def test_tensor_parallel_size_two(workspace):
    two = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    run_ten_steps(workspace, "tensor_parallel", *two)


def test_servers_on_separate_gpus(workspace):
    """One rank and two servers. Weights are sent over gloo, and two processes run the episodes.

    Then the run resumes with trainer.one_step_off.
    """
    key = "actor_rollout_ref.rollout"
    overlays = ["--config", "separate"]
    separate = [
        f"{key}.checkpoint_engine.backend=gloo",
        f"{key}.n_gpus_per_node=2",
        f"{key}.agent.num_workers=2",
    ]
    folder = run_ten_steps(workspace, "separate", *separate, overlays=overlays)
    changes = ["trainer.experiment_name=separate", "trainer.total_training_steps=13", *separate]
    arguments = command(workspace, *overlays, "--config", "ahead", *tiny(workspace, *changes))
    done = run(arguments, workspace, timeout=600)
    assert done.returncode == 0 and "resume      from" in done.stdout, (
        done.stderr[-3000:] + done.stdout[-2000:]
    )
    steps = [m for m in metrics_of(folder) if "actor/grad_norm" in m][10:]
    assert [m["rollout/staleness/max"] for m in steps] == [0, 1, 1] and all(
        not m["rollout/failed_frac"] for m in steps
    )


# --- nodes ---------------------------------------------------------------------------------------


class Cluster:
    """Two Ray nodes with one logical GPU each, started by `ray start` as in docs/cluster.md."""

    def __init__(self) -> None:
        host = ray.util.get_node_ip_address()
        port = find_free_port("127.0.0.1")
        self.address = f"{host}:{port}"
        self.nodes = [self.start("--head", f"--port={port}", "--include-dashboard=false")]
        self.nodes += [self.join()]

    def join(self) -> subprocess.Popen:
        """Wait for the first node, and start the second one."""
        host, port = self.address.split(":")
        while socket.socket().connect_ex((host, int(port))):
            time.sleep(0.5)
        return self.start(f"--address={self.address}", "--node-ip-address=127.0.0.2")

    def start(self, *arguments: str) -> subprocess.Popen:
        words = [str(RAY), "start", "--num-cpus=8", "--num-gpus=1", "--block", *arguments]
        return subprocess.Popen(words, env=CLEAN_ENV, start_new_session=True)

    def end(self) -> None:
        for node in reversed(self.nodes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
            node.wait(60)


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    monkeypatch.setitem(CLEAN_ENV, "RAY_AUTH_MODE", "token")
    monkeypatch.setitem(CLEAN_ENV, "RAY_AUTH_TOKEN", uuid.uuid4().hex * 2)
    running = Cluster()
    try:
        yield running
    finally:
        running.end()


def cluster_changes(cluster: Cluster) -> list[str]:
    """Return the settings of a run on the cluster, with its Gym server at a third address."""
    changes = ["trainer.nnodes=2", f"ray_kwargs.ray_init.address={cluster.address}"]
    return [*changes, "gym.servers.reasoning_gym.start.host=127.0.0.3"]


def test_two_nodes(workspace, recorded, one_rank_metrics, cluster):
    """An update on two nodes equals that on one. If a node dies, the run ends and can resume."""
    on_cluster = replay(workspace, recorded, "nodes", *cluster_changes(cluster))
    assert_equal_up_to_rounding(one_rank_metrics, on_cluster)
    long = [*cluster_changes(cluster), "trainer.total_training_steps=500", "trainer.save_freq=2"]
    with LiveRun(workspace, "nodes", *long) as run:
        run.until_step(6)
        os.killpg(cluster.nodes[1].pid, signal.SIGKILL)
        run.end(1, patience=120.0)
        assert "error: stage " in run.output
    actor = workspace / "runs/nodes/checkpoints/global_step_2/actor"
    shards = {path.name for path in actor.glob("model_*")}
    assert shards == {f"model_world_size_2_rank_{rank}.pt" for rank in range(2)}
    cluster.nodes[1] = cluster.join()
    shorter = [*cluster_changes(cluster), "trainer.total_training_steps=40"]
    with LiveRun(workspace, "nodes", *shorter) as run:
        run.end(0, patience=300.0)
        assert "resume      from" in run.output
