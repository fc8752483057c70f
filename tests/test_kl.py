"""Tests KL penalties, as a loss and in the reward, against their papers.

tests/helpers/cases.py explains the tolerances and "Departs:".
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

import training
from tests.helpers.cases import (
    EXACT,
    assert_close,
    assert_same,
    list_sampled,
    pad,
    random_cases,
    random_tokens,
)
from tests.helpers.recipes import changed, make_partial

# Each function returns (value, derivative by x) at the log-probs x = log p and q.
# Schulman 2020, joschu.net/blog/kl-approx.html; k3: arXiv:2402.03300, eq. 4


def k1(x, q):
    return x - q, 1.0


def absolute(x, q):
    return abs(x - q), math.copysign(1, x - q)


def k2(x, q):
    return (x - q) ** 2 / 2, x - q


def k3(x, q):
    """Departs: verl clips it at 10."""
    return math.exp(q - x) - (q - x) - 1, 1 - math.exp(q - x)


def with_gradient_of_k2(estimate):
    def combined(x, q):
        return estimate(x, q)[0], x - q

    return combined


KL = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "kl": k1,
    "mse": k2,
    "low_var_kl": k3,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
    "low_var_kl+": with_gradient_of_k2(k3),
}


@pytest.mark.parametrize("kind", KL)
def test_the_kl_penalty_and_its_gradient(kind):
    d = random_tokens(0)
    x = torch.tensor(d.x, requires_grad=True)
    penalty = core_algos.kl_penalty(x, torch.tensor(d.old), kind)
    penalty.sum().backward()
    expected = np.vectorize(KL[kind])(d.x, d.old)
    assert_same((penalty.detach().numpy(), x.grad.numpy()), *expected)
    # without the clip, it would be e^5 - 6 = 142
    assert core_algos.kl_penalty(torch.tensor(-5.0), torch.tensor(0.0), "k3") == 10


@pytest.mark.parametrize(("kind", "target"), [("k1", 0.1), ("k2", 0.1), ("k2", 40.0)])
def test_kl_in_the_reward_is_subtracted_on_sampled_tokens_only(kind, target):
    """Ziegler et al., arXiv:1909.08593, section 2.2: R - beta log(pi / ref) with adaptive beta."""
    cases = random_cases(0)
    rng = np.random.default_rng(0)
    batch = training.build_batch(cases, 0, 1.0)
    expected = pad([case.rewards for case in cases])
    old, ref = rng.normal(size=(2, *expected.shape))
    batch.batch["old_log_probs"] = torch.tensor(old)
    batch.batch["ref_log_prob"] = torch.tensor(ref)
    kl_ctrl = {"type": "adaptive", "kl_coef": 0.25, "target_kl": target, "horizon": 100}
    recipe = make_partial({"algorithm": {"kl_ctrl": kl_ctrl, "kl_penalty": kind}})
    controller = training.make_kl_controller(
        recipe, 0.5
    )  # the coefficient of a checkpoint replaces kl_coef
    metrics = training.apply_kl_penalty(batch, controller, recipe)
    penalty, _ = np.vectorize(KL[kind])(old, ref)
    for i, case in enumerate(cases):
        expected[i, list_sampled(case)] -= 0.5 * penalty[i, list_sampled(case)]
    assert_close(batch.batch["token_level_rewards"].numpy(), expected, **EXACT)
    assert (batch.batch["token_level_rewards"] != batch.batch["token_level_scores"]).any()
    kl = np.mean([np.mean(penalty[i, list_sampled(case)]) for i, case in enumerate(cases)])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
    change = np.clip(kl / target - 1, -0.2, 0.2) * 10 / 100
    assert controller.value == pytest.approx(0.5 * (1 + change)) != 0.5
    assert training.make_kl_controller(recipe, 0.0).value == 0.25  # a new run starts with kl_coef
    fixed = changed(recipe, "algorithm.kl_ctrl.type=fixed")
    assert training.make_kl_controller(fixed, 0.5).value == 0.25
