"""Episodes that other processes drive (rollout.agent.num_workers), over the real stack."""

from __future__ import annotations

import contextlib

import pytest
import ray
from conftest import SESSION, load

import inference
from kit.errors import RunError
from kit.extras import rollout_workers
from kit.gym.servers import free_port

TWO = [
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.rollout.full_determinism=true",
]


@contextlib.contextmanager
def playing(stack, *changes, urls=None):
    """(Servers of this process, Servers with two others), over the session's vLLM, with seeds for every request."""
    config, data = load(
        stack.workspace, *SESSION, *TWO, "trainer.experiment_name=players", *changes
    )
    was = stack.servers
    policy = inference.make_policy(config, was.policy.client, data, 60.0)
    policy.sampling = inference.sampling_params(config, False)
    others = rollout_workers.Players(
        config, policy, urls or was.gym.gym.urls, data, stack.workspace
    )
    alone = inference.Servers(config, was.manager, None, policy, was.gym, was.loop)
    try:
        yield (
            alone,
            inference.Servers(config, was.manager, None, policy, was.gym, was.loop, others),
            data,
        )
    finally:
        for actor in others.actors:
            ray.kill(actor)


def test_whoever_drives_them_the_tokens_are_the_same(stack):
    told = []
    with playing(stack) as (alone, together, data):
        requests, sampling = inference.in_groups(data.train[:5], 4, "1"), alone.policy.sampling
        one, two = (
            alone.rollout(requests, sampling),
            together.rollout(requests, sampling, lambda *who: told.append(who)),
        )
        assert {e.status for e in one} == {"ok"} and len({tuple(e.response_ids) for e in one}) > 5
        for a, b in zip(one, two, strict=True):
            assert (a.row_id, a.group_id, a.response_ids, a.reward) == (
                b.row_id,
                b.group_id,
                b.response_ids,
                b.reward,
            )
            assert b.versions == a.versions
        assert sorted(i for i, _ in told) == list(range(20)) and all(two[i] is e for i, e in told)
        assert (
            together.players.metrics()["verify/concurrency/reasoning_gym"] >= 2
        )  # of one at least, each
        # not their tokens: vLLM on a CPU leaves seeds out where a batch has greedy answers too
        greedy = together.rollout(requests, sampling, baselines=True)
        assert {e.status for e in greedy} == {"ok"} and all(e.baseline is not None for e in greedy)


def test_what_ends_a_run_ends_it_from_there_too(stack):
    """As its own error, not as one of Ray's."""
    nobody = {"reasoning_gym": f"http://127.0.0.1:{free_port('127.0.0.1')}"}
    with playing(stack, "gym.outage_budget_s=1", urls=nobody) as (_, together, data):
        with pytest.raises(RunError, match="reasoning_gym"):
            together.rollout(inference.in_groups(data.train[:2], 2, "1"), together.policy.sampling)
    with playing(stack) as (_, together, data):
        together.players.set_version(1000)
        with pytest.raises(RunError, match="samples from the weights of step"):
            together.rollout(inference.in_groups(data.train[:2], 2, "1"), together.policy.sampling)


def test_they_share_what_is_allowed_at_once(workspace):
    changes = ["gym.concurrency={a: 10, b: auto, default: 3}", "env.verifier_pool.processes=3"]
    config, _ = load(workspace, *changes, "actor_rollout_ref.rollout.max_num_seqs=6")
    part = rollout_workers.share(config, 4)
    assert part.gym.concurrency == {"a": 3, "b": "auto", "default": 1}
    assert (part.env.verifier_pool.processes, part.actor_rollout_ref.rollout.max_num_seqs) == (1, 2)
    assert config.gym.concurrency.a == 10 and rollout_workers.share(config, 1) == config
    config, _ = load(workspace, "gym.concurrency=8")
    assert rollout_workers.share(config, 4).gym.concurrency == {"default": 2}
