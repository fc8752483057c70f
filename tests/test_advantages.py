"""Tests how training.py turns rewards into advantages, with the recipe's settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

import training
from kit.config.recipe import Recipe
from kit.data.selection import select_trainable
from tests.helpers.recipes import ALGORITHM
from tests.helpers.workers import (
    CORRECTION,
    changed,
    is_close,
    make_batch,
    make_episode,
    make_update_batch,
    seven_episodes,
    two_rank_recipe,
)

KL_CTRL = "algorithm.kl_ctrl"


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return two_rank_recipe(workspace)


# --- KL penalty and rollout correction -----------------------------------------------------------


def test_only_the_adaptive_kl_coefficient_is_taken_from_a_checkpoint(recipe):
    changes = [f"{KL_CTRL}.type=adaptive", f"{KL_CTRL}.horizon=100", f"{KL_CTRL}.kl_coef=0.2"]
    recipe = changed(recipe, *changes)
    assert training.make_kl_controller(recipe, 0.5).value == 0.5
    assert training.make_kl_controller(recipe, 0.0).value == 0.2
    fixed = changed(recipe, f"{KL_CTRL}.type=fixed")
    assert training.make_kl_controller(fixed, 0.5).value == 0.2


def test_the_kl_penalty_is_subtracted_from_the_rewards(recipe):
    """With kl_penalty=abs, a negative difference is also a penalty. The controller then adapts."""
    changes = [f"{KL_CTRL}.type=adaptive", f"{KL_CTRL}.horizon=100", f"{KL_CTRL}.target_kl=0.1"]
    recipe = changed(recipe, *changes, "algorithm.kl_penalty=abs")
    batch = make_batch([make_episode([5], [7, 8]), make_episode([5], [7], reward=0.5)])
    batch.batch["old_log_probs"] = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]])
    batch.batch["ref_log_prob"] = torch.tensor([[-1.5, -1.0], [-1.25, 9.0]])
    controller = training.make_kl_controller(recipe, 0.4)
    metrics = training.apply_kl_penalty(batch, controller, recipe)
    rewards = batch.batch["token_level_rewards"]
    assert is_close(rewards, [[-0.4 * 0.5, 1.0 - 0.4 * 1.0], [0.5 - 0.4 * 0.25, 0.0]])
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.4
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.75 + 0.25) / 2)
    assert controller.value == pytest.approx(0.4 * (1 + 0.2 * 2 / 100))


def test_a_rollout_correction_weights_and_rejects_tokens(recipe):
    batch = make_batch([make_episode([5], [7, 8]), make_episode([5], [7, 8])])
    batch.batch["old_log_probs"] = torch.tensor([[-0.2, -0.5], [-0.5, -3.0]])
    mask = batch.batch["response_mask"].clone()
    recipe = changed(recipe, f"{CORRECTION}.rollout_is=token")
    metrics = training.apply_rollout_correction(batch, recipe)
    weights = np.exp([[0.3, 0.0], [0.0, -2.5]])
    assert is_close(batch.batch["rollout_is_weights"], weights)
    assert any(name.startswith("rollout_corr/") for name in metrics)
    assert torch.equal(batch.batch["response_mask"], mask)
    rejection = [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2'"]
    training.apply_rollout_correction(batch, changed(recipe, *rejection))
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 0]]


# --- advantages ----------------------------------------------------------------------------------


def compute_batch(recipe, *changes, groups="aabb", rewards=(1.0, 0.0, 0.5, 0.25)) -> Any:
    """A batch of responses with two tokens, with its advantages."""
    pairs = zip(groups, rewards, strict=True)
    episodes = [make_episode([5], [7, 8], reward=reward, group=group) for group, reward in pairs]
    batch = make_batch(episodes)
    batch.batch["token_level_rewards"] = 2 * batch.batch["token_level_scores"]
    batch.batch["values"] = torch.tensor([[0.1, 0.4]] * len(episodes))
    training.compute_advantages(batch, changed(recipe, *changes))
    return batch.batch


def test_gae_discounts_by_gamma_and_averages_by_lambda(recipe):
    changes = ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.5"]
    batch = compute_batch(recipe, *changes)
    expected = []
    for reward in (2.0, 0.0, 1.0, 0.5):
        last = reward - 0.4
        first = 0.9 * 0.4 - 0.1 + 0.9 * 0.5 * last
        expected.append([first + 0.1, last + 0.4])
    assert is_close(batch["returns"], expected)


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_compares_the_responses_of_a_group(recipe, by_std):
    batch = compute_batch(recipe, f"algorithm.norm_adv_by_std_in_grpo={str(by_std).lower()}")
    centered = np.array([1.0, -1.0, 0.25, -0.25])
    std = np.array([2**0.5, 2**0.5, 0.125**0.5, 0.125**0.5])
    expected = centered / (std + 1e-6) if by_std else centered
    assert is_close(batch["advantages"], np.repeat(expected[:, None], 2, axis=1))


def test_other_estimators_of_verl_use_the_recipes_gamma(recipe):
    changes = ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"]
    batch = compute_batch(recipe, *changes)
    assert is_close(batch["returns"], [[0.9 * r, r] for r in (2.0, 0.0, 1.0, 0.5)])


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_custom_estimator_gets_the_arguments_that_it_names(recipe, monkeypatch, has_weights):
    arguments = {}

    def estimator(token_level_rewards, index, gamma, lam, config, rollout_is_weights, values):
        arguments.update(locals())
        return token_level_rewards + 1, token_level_rewards + 2

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "mine.py:f", estimator)
    changes = ["algorithm.adv_estimator=mine.py:f", "algorithm.gamma=0.9", "algorithm.lam=0.5"]
    recipe = changed(recipe, *changes)
    batch = make_batch([make_episode([5], [7], group="a"), make_episode([5], [7], group="b")])
    batch.batch["token_level_rewards"] = torch.tensor([[0.25], [0.5]])
    batch.batch["values"] = torch.tensor([[0.1], [0.2]])
    if has_weights:
        batch.batch["rollout_is_weights"] = torch.tensor([[3.0], [4.0]])
    training.compute_advantages(batch, recipe)
    assert arguments["gamma"] == 0.9 and arguments["lam"] == 0.5
    assert list(arguments["index"]) == ["a", "b"]
    assert arguments["config"] == recipe.algorithm
    assert is_close(arguments["values"], [[0.1], [0.2]])
    if has_weights:
        assert is_close(arguments["rollout_is_weights"], [[3.0], [4.0]])
    else:
        assert arguments["rollout_is_weights"] is None
    assert is_close(batch.batch["advantages"], [[1.25], [1.5]])
    assert is_close(batch.batch["returns"], [[2.25], [2.5]])


def test_failures_and_groups_of_one_are_dropped():
    ok = [make_episode([1], [1], group=group) for group in "aab"]
    failed = [make_episode([1], [1], reward=None, group=g, status="timeout") for g in "abc"]
    kept, _ = select_trainable([ok[0], failed[0], ok[1], ok[2], *failed[1:]])
    assert kept == ok[:2]
    assert select_trainable(failed) == ([], {})


def test_failed_episodes_do_not_change_the_advantages_of_the_others():
    recipe = OmegaConf.create({"algorithm": ALGORITHM})

    def compute(episodes):
        batch = training.build_batch(select_trainable(episodes)[0], 0, 1.0)
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        training.compute_advantages(batch, recipe)
        return batch.batch["advantages"][:, 0].tolist()

    good = [make_episode([1], [1], reward=r, group="a") for r in (0.0, 1.0, 1.0)]
    alone = make_episode([1], [1], reward=1.0, group="b")
    failed = [make_episode([1], [1], reward=None, group=g, status="http_500") for g in "aab"]
    with_failures = compute([good[0], failed[0], good[1], alone, good[2], *failed[1:]])
    assert with_failures == compute(good) == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


# --- metrics -------------------------------------------------------------------------------------


def test_throughput_is_per_gpu_and_the_critics_metrics_are_included(recipe):
    batch = make_update_batch(seven_episodes())
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.batch["returns"] = batch.batch["advantages"]
    timing = {"step": 2.0, "gen": 1.0}
    metrics = training.compute_step_metrics(batch, timing, recipe)
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in seven_episodes())
    assert metrics["perf/total_num_tokens"] == tokens and metrics["perf/time_per_step"] == 2.0
    assert metrics["perf/throughput"] == pytest.approx(tokens / (2.0 * 2))  # two GPUs
    rollout = "actor_rollout_ref.rollout"
    separate = changed(recipe, f"{rollout}.nnodes=3", f"{rollout}.n_gpus_per_node=2")
    metrics = training.compute_step_metrics(batch, timing, separate)
    assert metrics["perf/throughput"] == pytest.approx(tokens / (2.0 * 8))  # two, and six for vLLM
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(1000 / 15)
    assert metrics["timing_s/gen"] == 1.0
    assert "critic/rewards/mean" in metrics and "critic/values/mean" not in metrics
    batch.batch["values"] = torch.full_like(batch.batch["advantages"], 0.5)
    assert training.compute_step_metrics(batch, timing, recipe)["critic/values/mean"] == 0.5
