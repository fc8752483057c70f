"""Tests that too few GPUs or CPUs in a cluster are an error before any worker starts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kit.runs import launch
from tests.helpers.recipes import load

SEPARATE = "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"
NEEDS_GPUS = (
    r"Config needs {} GPUs \(trainer\.n_gpus_per_node \* nnodes, and separate pools\), Ray has {}\."
)


@pytest.mark.parametrize(
    ("gpus", "cpus", "pool", "has_servers", "command", "expected"),
    [
        (1.0, 64.0, "null", False, "train", NEEDS_GPUS.format(2, 1)),
        (2.0, 1.0, "null", False, "train", r"Ray has 1 CPUs, .* 2 GPUs takes one\..*num_cpus=2"),
        (2.0, 2.0, "null", False, "train", "$"),
        (2.0, 2.0, "1", False, "train", NEEDS_GPUS.format(3, 2)),
        (3.0, 4.0, "null", True, "train", NEEDS_GPUS.format(4, 3)),
        (4.0, 4.0, "null", True, "train", r"Ray has 4 CPUs, .* 4 GPUs takes one, two .*num_cpus=6"),
        (4.0, 6.0, "null", True, "train", "$"),
        (2.0, 4.0, "1", True, "evaluate", "$"),
        (2.0, 2.0, "1", True, "sft", "$"),
    ],
)
def test_missing_resources_are_an_error(
    workspace, gpus, cpus, pool, has_servers, command, expected
):
    """Actor, critic and reward model share a process on each of two GPUs."""
    changes = [
        "algorithm.adv_estimator=gae",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={workspace / 'scored'}",
        "trainer.n_gpus_per_node=2",
        f"trainer.resource_pools.critic={pool}",
    ]
    overlays = ["separate"] if has_servers else []
    if has_servers:
        changes.append(SEPARATE)
    recipe = replace(load(workspace, *changes, overlays=overlays).recipe, command=command)
    problem = launch.find_missing_resources(recipe, {"GPU": gpus, "CPU": cpus})
    assert re.match(expected, problem), problem
