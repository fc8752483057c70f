"""The real stack: FSDP actor, vLLM server and Gym server of one session, with the tiny tied model."""

from __future__ import annotations

import copy

import pytest
import torch

import algorithm
import inference
import training
from gym_client import Gym, free_port

# Bound on the mean |log-prob difference| of a sampled token: rounding, as both sides compute in float32.
AGREE = 4e-5


def sample(stack, n=4, **changes):
    params = inference.sampling_params(stack.config, validate=False) | changes
    tokenizer, stop_ids = stack.data.tokenizer, stack.data.stop_ids
    client = stack.servers.get_client()
    return stack.loop.run(inference.rollout(stack.data.train, n, client, stack.gym, tokenizer, stop_ids, params, 60.0))


def disagreement(stack, episodes) -> float:
    """Mean |trainer - sampler| log-prob of the sampled tokens."""
    batch = training.to_batch(episodes, stack.data.tokenizer.pad_token_id, 1.0)
    ours, _ = training.log_probs(stack.actor, batch, stack.config)
    mask = batch.batch["response_mask"]
    return float(((ours - batch.batch["rollout_log_probs"]).abs() * mask).sum() / mask.sum())


def with_advantages(stack, episodes):
    batch = training.to_batch(episodes, stack.data.tokenizer.pad_token_id, 1.0)
    batch.batch["old_log_probs"], _ = training.log_probs(stack.actor, batch, stack.config)
    signs = torch.tensor([1.0, -1.0]).repeat(len(episodes) // 2)[:, None]
    batch.batch["advantages"] = signs * batch.batch["response_mask"]
    return batch


def test_tokens_in_tokens_out(stack):
    episodes = sample(stack)
    assert len(episodes) == 32 and all(e.status == "ok" for e in episodes)
    assert len({e.group_id for e in episodes}) == 8
    for e in episodes:
        assert len(e.response_ids) == len(e.log_probs) == len(e.response_mask) <= 12
        assert e.truncated == (e.response_ids[-1] != 1)  # 1 is <end>, sampled and kept
        assert len(e.response_ids) == 12 or not e.truncated
        assert e.response == stack.data.tokenizer.decode(e.response_ids, skip_special_tokens=True)
        assert e.reward == (1.0 if e.response.strip() == "7" else pytest.approx(e.reward))
        assert {"generate", "verify", "verify_call"} <= set(e.timings)


def test_the_samplers_weights_are_the_trainers(stack):
    assert disagreement(stack, sample(stack)) < AGREE
    training.update_actor(stack.actor, with_advantages(stack, sample(stack)), stack.config)
    stale = disagreement(stack, sample(stack))
    assert stale > 1000 * AGREE  # without a sync the two are far apart, so this test can fail
    stack.sync.update_weights(1)
    assert disagreement(stack, sample(stack)) < AGREE


def test_an_empty_answer_is_verified_like_any_other(stack):
    episodes = sample(stack, n=2, allowed_token_ids=[1])  # <end> at once
    assert {e.response for e in episodes} == {""} and {tuple(e.response_ids) for e in episodes} == {(1,)}
    assert all(e.status == "ok" and e.reward == 0.0 and not e.truncated for e in episodes)
    batch = training.to_batch(episodes, 1, 1.0)
    assert batch.batch["response_mask"].sum() == 16
    log_probs, _ = training.log_probs(stack.actor, batch, stack.config)
    assert torch.isfinite(log_probs).all()


def test_an_answer_cut_off_is_marked(stack):
    episodes = sample(stack, n=1, allowed_token_ids=[9])  # the digit 7, for ever
    assert all(e.truncated and len(e.response_ids) == 12 for e in episodes)
    assert all(e.reward == pytest.approx(1 / 12) for e in episodes)


def test_a_dead_verifier_gives_failures_and_no_reward(stack):
    live, dead = stack.gym, {"reasoning_gym": f"http://127.0.0.1:{free_port()}"}
    stack.gym = stack.loop.run(Gym(dead, attempts=1).__aenter__())
    try:
        episodes = sample(stack, n=2)
    finally:
        stack.loop.run(stack.gym.__aexit__())
        stack.gym = live
    assert {e.status for e in episodes} == {"connect"} and {e.reward for e in episodes} == {None}
    assert inference.keep(episodes) == []
    metrics = algorithm.rollout_metrics(episodes)
    assert metrics["rollout/failed/connect"] == 16 and metrics["rollout/failed_frac"] == 1.0
    assert metrics["rollout/groups_dropped"] == 8 and "reward/reasoning_gym/mean" not in metrics
    with pytest.raises(algorithm.RunError, match=r"16 of 16 episodes failed \(16 connect\)"):
        algorithm.check_failures(episodes, 0.5)


def test_two_ranks_update_as_one(stack):
    episodes = sample(stack, n=4)[:31]  # an odd number: one rank gets a row of filling
    results = []
    for ranks in (1, 2):
        config = copy.deepcopy(stack.config)
        config.trainer.n_gpus_per_node = ranks
        actor = training.start_actor(config)
        actor.init_model()
        batch = training.to_batch(episodes, 1, 1.0)
        batch.batch["old_log_probs"], entropy = training.log_probs(actor, batch, config)
        batch.batch["advantages"] = torch.linspace(-1, 1, 31)[:, None] * batch.batch["response_mask"]
        metrics = training.update_actor(actor, batch, config)
        after, _ = training.log_probs(actor, batch, config)
        results.append((batch.batch["old_log_probs"], entropy, after, metrics))
        for worker in actor.workers:
            import ray

            ray.kill(worker)
    one, two = results
    for a, b in zip(one[:3], two[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for name in ("actor/loss", "actor/grad_norm", "actor/pg_loss"):
        assert two[3][name] == pytest.approx(one[3][name], rel=1e-4, abs=1e-6), name
