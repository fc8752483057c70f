"""Episodes in worker processes (rollout.agent.num_workers), over the session's vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import ray

import env
import inference
from extras.rollout_workers.workers import RolloutWorkers, split_limits
from kit.engine.sampling import (
    Sampling,
    build_sampling_params,
    make_rollout_context,
    repeat_per_group,
)
from kit.errors import RunError
from kit.verify.network import find_free_port
from tests.helpers.recipes import load
from tests.helpers.stack import SESSION

TWO_WORKERS = [
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.rollout.full_determinism=true",
]


class BothServers(NamedTuple):
    """The servers of one recipe without and with two rollout workers. Each request has a seed."""

    without_workers: inference.Servers
    with_workers: inference.Servers
    tasks: list[env.Task]
    sampling: Sampling


@pytest.fixture(scope="module")
def both(stack) -> Iterator[BothServers]:
    """BothServers over the session's vLLM. The server `gone` does not run."""
    name = "trainer.experiment_name=rollout_workers"
    changes = [*TWO_WORKERS, "gym.outage_budget_s=5", name]
    recipe, inputs, _ = load(stack.workspace, *SESSION, *changes)
    session = stack.servers
    context = make_rollout_context(recipe, session.context.client, inputs, 60.0)
    urls = session.gym.gym.urls | {"gone": f"http://127.0.0.1:{find_free_port('127.0.0.1')}"}
    workers = RolloutWorkers(recipe, context, urls, inputs, stack.workspace, ())
    arguments = (recipe, session.manager, None, context, session.gym, session.loop)
    without_workers = inference.Servers(*arguments)
    with_workers = inference.Servers(*arguments, workers)
    sampling = build_sampling_params(recipe, is_validation=False)
    yield BothServers(without_workers, with_workers, inputs.train, sampling)
    for worker in workers.workers:
        ray.kill(worker)


def test_tokens_are_the_same_with_and_without_workers(both):
    done = []
    requests = repeat_per_group(both.tasks[:5], 4, "1")
    expected = both.without_workers.rollout(requests, both.sampling)
    actual = both.with_workers.rollout(requests, both.sampling, lambda *pair: done.append(pair))
    assert {e.status for e in expected} == {"ok"}
    assert len({tuple(e.response_ids) for e in expected}) > 5
    for a, b in zip(expected, actual, strict=True):
        assert (a.row_id, a.group_id) == (b.row_id, b.group_id)
        assert (a.response_ids, a.reward) == (b.response_ids, b.reward)
        assert b.policy_versions == a.policy_versions
    assert sorted(index for index, _ in done) == list(range(20))
    assert all(actual[index] is episode for index, episode in done)
    # each of the two workers has a limit of at least one call
    metrics = both.with_workers.workers.metrics()
    assert metrics["verify/concurrency/reasoning_gym"] >= 2
    # The tokens may differ: vLLM on a CPU ignores seeds if a batch also has greedy responses.
    greedy = both.with_workers.rollout(requests, both.sampling, baselines=True)
    assert {e.status for e in greedy} == {"ok"} and all(e.baseline is not None for e in greedy)


def test_an_error_of_a_worker_that_ends_the_run_keeps_its_type(both):
    """Ray would wrap the error in a RayTaskError."""
    tasks = [dataclasses.replace(task, server="gone") for task in both.tasks[:2]]
    with pytest.raises(RunError, match="gone"):
        both.with_workers.rollout(repeat_per_group(tasks, 2, "1"), both.sampling)
    both.with_workers.workers.set_policy_version(1000)
    with pytest.raises(RunError, match="samples from the weights of step"):
        both.with_workers.rollout(repeat_per_group(both.tasks[:2], 2, "1"), both.sampling)


def test_workers_share_the_limits_of_the_recipe(workspace):
    changes = ["gym.concurrency={a: 10, b: auto, default: 3}", "env.verifier_pool.processes=3"]
    limit = "actor_rollout_ref.rollout.max_num_seqs=6"
    recipe = load(workspace, *changes, limit).recipe
    part = split_limits(recipe, 4)
    assert part.gym.concurrency == {"a": 3, "b": "auto", "default": 1}
    assert (part.env.verifier_pool.processes, part.rollout.max_num_seqs) == (1, 2)
    assert recipe.gym.concurrency["a"] == 10
    assert split_limits(recipe, 1).resolved == recipe.resolved
    recipe = load(workspace, "gym.concurrency=8").recipe
    assert split_limits(recipe, 4).gym.concurrency == {"default": 2}
