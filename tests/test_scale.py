"""More than one rank, replica and node on this machine: `make soak` (docs/cluster.md)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from conftest import GIVEN, command, metrics_of, run, tiny
from live_runs import UNEQUAL, LiveRun

from kit.gym.network import find_free_port
from training import balance_rows

pytestmark = pytest.mark.soak
RAY = Path(sys.executable).with_name("ray")
PPO = ["--config", "ppo"]
TWO_STEPS = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4"]
REFERENCE = ["actor_rollout_ref.actor.use_kl_loss=true"]
# verl's means over a rank's micro-batches, of whatever size each is
BY_PART = ("actor/pg_clipfrac", "actor/ppo_kl", "critic/vpred_mean")


@pytest.fixture(scope="module")
def recorded(workspace) -> Path:
    """The episodes of one step."""
    changes = [
        "trainer.experiment_name=recorded",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    ]
    done = run(command(workspace, *tiny(workspace, *changes)), workspace)
    assert done.returncode == 0, done.stderr[-3000:]
    return workspace / "runs/recorded/rollouts/step_1.jsonl"


def replayed(workspace: Path, recorded: Path, name: str, *changes: str) -> dict[str, float]:
    """What an update with a critic and a reference, of two optimiser steps, tells of those
    episodes.
    """
    asked = [
        *PPO,
        "--replay",
        str(recorded),
        f"trainer.experiment_name={name}",
        *TWO_STEPS,
        *REFERENCE,
        *changes,
    ]
    asked += [f"critic.model.path={workspace / 'scored'}"]  # whose head is given, not drawn
    done = run(command(workspace, *asked, *tiny(workspace)), workspace)
    assert done.returncode == 0, done.stderr[-3000:]
    told = metrics_of(workspace / "runs" / f"{name}_replay_1")[-1]
    return {key: value for key, value in told.items() if not key.startswith(UNEQUAL)}


def same_but_for_rounding(one: dict[str, float], two: dict[str, float]) -> None:
    assert one.keys() == two.keys()
    assert len(one) > 40 and one["actor/grad_norm"] > 0 and one["critic/vf_loss"] > 0
    close = {
        key: pytest.approx(one[key], rel=0.05 if key in BY_PART else 1e-4, abs=1e-6) for key in one
    }
    apart = {key: (one[key], two[key]) for key in one if two[key] != close[key]}
    assert not apart


@pytest.fixture(scope="module")
def of_one(workspace, recorded) -> dict[str, float]:
    return replayed(workspace, recorded, "one")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_learn_what_one_does(workspace, recorded, of_one, ranks):
    same_but_for_rounding(
        of_one, replayed(workspace, recorded, f"of{ranks}", f"trainer.n_gpus_per_node={ranks}")
    )
    episodes = [
        json.loads(line)["response"]["output"] for line in recorded.read_text().splitlines()
    ]
    ids = ("prompt_token_ids", "generation_token_ids")
    lengths = [sum(len(item[key]) for item in output for key in ids) for output in episodes]
    order = balance_rows(lengths, 1, ranks)
    filling = len(order) - len(lengths)
    parts = np.array(lengths)[order].reshape(ranks, -1)
    tokens = parts.sum(axis=1)
    assert not filling and tokens.max() <= 1.1 * tokens.min()


def run_ten_steps(workspace: Path, name: str, *changes: str, overlays: Sequence[str] = ()) -> Path:
    """The folder of a run of ten steps, whose weights reach the sampler: its log-probs are the
    trainer's.
    """
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
    assert all(m["actor/grad_norm"] > 0 for m in steps)
    return workspace / "runs" / name


def test_two_replicas_of_two_ranks(workspace):
    run_ten_steps(workspace, "two_replicas", "trainer.n_gpus_per_node=2")


def test_an_engine_of_two_parts(workspace):
    two = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    run_ten_steps(workspace, "tensor_parallel", *two)


def test_servers_on_gpus_of_their_own(workspace):
    """Two of them beside one rank, weights over gloo, episodes driven by two processes; then a step
    ahead.
    """
    key, overlays = "actor_rollout_ref.rollout", ["--config", "separate"]
    own = [
        f"{key}.checkpoint_engine.backend=gloo",
        f"{key}.n_gpus_per_node=2",
        f"{key}.agent.num_workers=2",
    ]
    folder = run_ten_steps(workspace, "separate", *own, overlays=overlays)
    ahead = ["trainer.experiment_name=separate", "trainer.total_training_steps=13", *own]
    asked = command(workspace, *overlays, "--config", "ahead", *tiny(workspace, *ahead))
    done = run(asked, workspace, timeout=600)
    assert done.returncode == 0 and "resume      from" in done.stdout, (
        done.stderr[-3000:] + done.stdout[-2000:]
    )
    steps = [m for m in metrics_of(folder) if "actor/grad_norm" in m][10:]
    assert [m["rollout/staleness/max"] for m in steps] == [0, 1, 1] and all(
        not m["rollout/failed_frac"] for m in steps
    )


# --- nodes ---------------------------------------------------------------------------------------


class Cluster:
    """Two nodes of Ray, started by `ray start` as in docs/cluster.md; each has one logical GPU."""

    def __init__(self) -> None:
        own, port = ray.util.get_node_ip_address(), find_free_port("127.0.0.1")
        self.address = f"{own}:{port}"
        self.nodes = [self.start("--head", f"--port={port}", "--include-dashboard=false")]
        self.nodes += [self.join()]

    def join(self, unshared: Path | None = None) -> subprocess.Popen:
        """The second node, which waits for the first. unshared: a folder that differs there."""
        host, port = self.address.split(":")
        while socket.socket().connect_ex((host, int(port))):
            time.sleep(0.5)
        mount = (
            ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs none {unshared} && exec "$@"', "sh"]
            if unshared
            else []
        )
        return self.start(f"--address={self.address}", "--node-ip-address=127.0.0.2", before=mount)

    def start(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen:
        words = [*before, str(RAY), "start", "--num-cpus=8", "--num-gpus=1", "--block", *arguments]
        return subprocess.Popen(words, env=GIVEN, start_new_session=True)

    def end(self) -> None:
        for node in reversed(self.nodes):
            self.leave(node)

    def leave(self, node: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGTERM)
        node.wait(60)


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    monkeypatch.setitem(GIVEN, "RAY_AUTH_MODE", "token")
    monkeypatch.setitem(GIVEN, "RAY_AUTH_TOKEN", uuid.uuid4().hex * 2)
    running = Cluster()
    try:
        yield running
    finally:
        running.end()


def on(cluster: Cluster) -> list[str]:
    """What a recipe needs to run there, with its Gym server at a third address."""
    changes = ["trainer.nnodes=2", f"ray_kwargs.ray_init.address={cluster.address}"]
    return [*changes, "gym.servers.reasoning_gym.start.host=127.0.0.3"]


def test_two_nodes(workspace, recorded, of_one, cluster):
    same_but_for_rounding(of_one, replayed(workspace, recorded, "nodes", *on(cluster)))
    same_but_for_rounding(of_one, replayed(workspace, recorded, "beside"))  # with a Ray of its own
    long = [*on(cluster), "trainer.total_training_steps=500", "trainer.save_freq=2"]
    with LiveRun(workspace, "nodes", *long) as run:
        run.until_step(3)
        theirs = psutil.Process(cluster.nodes[1].pid).children(recursive=True)
        workers = [p for p in theirs if "ray::ActorRolloutRefWorker" in " ".join(p.cmdline())]
        workers[0].suspend()
        run.end(1, patience=120.0)
        assert f"(pid {workers[0].pid} on 127.0.0.2) is stopped" in run.output
    with LiveRun(workspace, "nodes", *long) as run:
        run.until_step(6)
        os.killpg(cluster.nodes[1].pid, signal.SIGKILL)
        run.end(1, patience=120.0)
        assert re.search(
            r"error: stage \w+: the worker \w+ \(pid \d+ on 127\.0\.0\.2\) died: .*node", run.output
        )
    assert {
        path.name
        for path in (workspace / "runs/nodes/checkpoints/global_step_2/actor").glob("model_*")
    } == {f"model_world_size_2_rank_{rank}.pt" for rank in range(2)}
    cluster.nodes[1] = cluster.join()
    learned = [*on(cluster), "trainer.total_training_steps=40"]
    with LiveRun(workspace, "nodes", *learned) as run:
        run.end(0, patience=300.0)
        assert "resume      from" in run.output
    steps = metrics_of(workspace / "runs/nodes")
    held_out = [m[key] for m in steps if (key := "val-core/reasoning_gym/reward/mean@1") in m]
    assert held_out[-1] > held_out[0]
    (unshared := workspace / "runs/unshared/checkpoints").mkdir(parents=True)
    cluster.leave(cluster.nodes[1])
    cluster.nodes[1] = cluster.join(unshared)
    with LiveRun(workspace, "unshared", *on(cluster), "trainer.save_freq=1") as run:
        run.end(1, patience=300.0)
        assert (
            "step 1 could not be written: 3 shards of 2 ranks are not there, as on a file system"
            in run.output
        )
