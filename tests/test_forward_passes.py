"""Tests the log-probs, values and learned rewards from doubles of verl's worker groups."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu

import training
from kit.config.recipe import Recipe
from kit.data.episode import TurnSpan
from tests.helpers.workers import (
    RecordingGroup,
    changed,
    compute_outputs,
    is_close,
    make_batch,
    make_episode,
    rows_of,
    seven_episodes,
    two_rank_recipe,
)


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return two_rank_recipe(workspace)


def test_log_probs_come_back_in_the_order_of_the_batch(recipe):
    episodes = seven_episodes()
    actor = RecordingGroup()
    results = training.compute_log_probs(actor, make_batch(episodes), recipe)
    assert results.keys() == {"log_probs", "entropy"}
    assert is_close(results["log_probs"], compute_outputs(episodes, -0.01))
    assert is_close(results["entropy"], compute_outputs(episodes, 0.02))
    [(method, data)] = actor.calls
    assert method == "compute_log_prob" and len(data) == 8  # two ranks get four rows each
    assert rows_of(data).count([10, 11, 12, 13]) == 2  # padding repeats the first row
    assert tu.get(data, "calculate_entropy") is True and tu.get(data, "compute_loss") is False
    assert tu.get(data, "calculate_sum_pi_squared") is False
    assert tu.get(data, "temperature") == 0.7


def test_the_sum_of_squared_probabilities_is_computed_if_the_advantage_needs_it(recipe):
    other = changed(recipe, "algorithm.adv_estimator=optimal_token_baseline")
    episodes = seven_episodes()
    actor = RecordingGroup()
    batch = make_batch(episodes)
    training.add_old_log_probs(actor, batch, other)
    assert tu.get(actor.data, "calculate_sum_pi_squared") is True
    assert is_close(batch.batch["sum_pi_squared"], compute_outputs(episodes, 0.04))
    batch = make_batch(episodes)
    training.add_old_log_probs(actor, batch, recipe)
    assert "sum_pi_squared" not in batch.batch


def test_sampled_tokens_keep_the_log_probs_of_the_rollout_engine():
    """Observed tokens and rows without a turn get those of the trainer. Turns start at 0."""
    turns = [TurnSpan(0, 1, 1), TurnSpan(2, 3, 3)]
    with_observed = make_episode([5], [7, 8, 9], [1, 0, 1], turns)
    batch = make_batch([with_observed, make_episode([5], [7, 8, 9], turns=[])])
    log_probs = torch.tensor([[-1.5, -1.75, -1.0], [-2.0, -2.25, -2.5]])
    entropy = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, 5.0]])
    metrics = training.set_old_log_probs(batch, log_probs, entropy, sum_pi_squared=entropy)
    assert is_close(batch.batch["rollout_log_probs"], [[-0.5, -1.75, -0.5], [-2.0, -2.25, -2.5]])
    assert torch.equal(batch.batch["old_log_probs"], log_probs)
    assert torch.equal(batch.batch["sum_pi_squared"], entropy)
    assert metrics["actor/entropy"] == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    differences = np.exp(-0.5) - np.exp([-1.5, -1.0])
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(differences[0], rel=1e-5)
    mean = differences.sum() / 5
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(mean, rel=1e-5)


def test_the_old_log_probs_and_the_entropy_come_from_the_workers(recipe):
    episodes = seven_episodes()
    actor = RecordingGroup()
    batch = make_batch(episodes)
    metrics = training.add_old_log_probs(actor, batch, recipe)
    assert is_close(batch.batch["old_log_probs"], compute_outputs(episodes, -0.01))
    entropies = compute_outputs(episodes, 0.02)
    del entropies[3]  # its mask is 0
    assert metrics["actor/entropy"] == pytest.approx(sum(map(sum, entropies)) / 13)


@pytest.mark.parametrize(
    ("lora_rank", "is_separate", "method", "adapter"),
    [
        (0, False, "compute_ref_log_prob", None),
        (1, False, "compute_log_prob", True),
        (8, True, "compute_ref_log_prob", None),  # a teacher
    ],
)
def test_the_reference_is_the_teacher_the_frozen_model_or_the_actor_without_its_adapter(
    recipe, lora_rank, is_separate, method, adapter
):
    changes = [f"actor_rollout_ref.model.lora_rank={lora_rank}", "trainer.resource_pools.ref=1"]
    recipe = changed(recipe, *changes)
    episodes = seven_episodes()
    actor = RecordingGroup()
    ref = RecordingGroup()
    workers = training.Workers(actor, None, None, ref if is_separate else None)
    log_probs = training.compute_ref_log_probs(workers, make_batch(episodes), recipe)
    is_adapter_off = lora_rank and not is_separate
    assert is_close(log_probs, compute_outputs(episodes, -0.01 if is_adapter_off else -0.1))
    called, unused = (ref, actor) if is_separate else (actor, ref)
    assert [name for name, _ in called.calls] == [method] and not unused.calls
    assert len(called.data) == (7 if is_separate else 8)  # one separate rank, or the actor's two
    assert tu.get(called.data, "no_lora_adapter") is adapter
    assert tu.get(called.data, "calculate_entropy") is False


def test_a_value_belongs_to_the_state_before_its_token(recipe):
    episodes = seven_episodes()
    critic = RecordingGroup()
    recipe = changed(recipe, "trainer.resource_pools.critic=3")
    values = training.compute_values(critic, make_batch(episodes), recipe)
    assert is_close(values, compute_outputs(episodes, 0.03))
    [(method, data)] = critic.calls
    assert method == "infer_batch" and len(data) == 9  # three ranks


def test_a_learned_reward_is_the_heads_output_at_the_last_token(recipe):
    """Each episode gets its own reward, in whatever order the ranks have the rows."""
    episodes = seven_episodes()
    model = RecordingGroup()
    recipe = changed(recipe, "trainer.resource_pools.reward_model=3")
    inputs = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=3))
    training.add_reward_model_scores(model, episodes, inputs, recipe)
    for e in episodes:
        assert e.reward_components == {"reward_model": pytest.approx(0.03 * e.response_ids[-1])}
        assert e.reward == 1.0  # only env.reward may change the reward
    [(method, data)] = model.calls
    assert method == "infer_batch" and len(data) == 9 and tu.get(data, "temperature") == 1.0
    ids = torch.cat([data["prompts"], data["responses"]], dim=1)
    assert set(ids.flatten().tolist()) & {0, 1, 2, 3} == {3}  # the tokenizer's pad id
