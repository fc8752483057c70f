"""Tests verl's advantages and custom ones against their papers (training.compute_advantages).

A reference implements the paper's equation as loops over episodes and tokens. See
tests/helpers/cases.py for the tolerances and for "Departs:".
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from verl.trainer.ppo import core_algos

from tests.helpers.cases import (
    EXACT,
    SEEDS,
    SINGLE,
    assert_close,
    compute_advantages,
    list_sampled,
    make_case,
    make_group,
    pad,
    random_cases,
)

WEIGHTS = {"right": 1.0, "format": 0.5}
GDPO = {"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": list(WEIGHTS.values())}

# --- references ----------------------------------------------------------------------------------


def total_reward(case) -> float:
    return sum(case.rewards)


def apply_to_responses(scalar, cases, value=total_reward) -> list[np.ndarray]:
    """Return the value scalar(reward, others, case, peers) on each sampled token of each case.

    reward: value(case). others: the rewards of its peers, the other cases of the group.
    """
    rows = []
    for case in cases:
        peers = [x for x in cases if x.group_id == case.group_id and x is not case]
        result = scalar(value(case), [value(x) for x in peers], case, peers)
        rows.append(result * np.array(case.response_mask))
    return rows


def by_response(scalar) -> Callable[[Any], Any]:
    """Return a reference with one formula for the advantage of a whole response."""
    return functools.partial(apply_to_responses, scalar)


def whiten(rows, cases) -> list[np.ndarray]:
    """Normalize to zero mean and unit variance (+ 1e-8) over all sampled tokens of the batch."""
    values = []
    for row, case in zip(rows, cases, strict=True):
        values += [row[t] for t in list_sampled(case)]
    mean = np.mean(values)
    scale = math.sqrt(np.var(values, ddof=1) + 1e-8)
    pairs = zip(rows, cases, strict=True)
    return [(row - mean) / scale * case.response_mask for row, case in pairs]


def compute_returns(case, gamma=1.0) -> np.ndarray:
    """Return the discounted sum of rewards from each sampled token on.

    Observed tokens are not time steps.
    """
    value = 0.0
    returns = np.zeros(len(case.rewards))
    for t in reversed(list_sampled(case)):
        value = case.rewards[t] + gamma * value
        returns[t] = value
    return returns


def normalize(reward, others, *_):
    rewards = [reward, *others]
    return (reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)


def center(reward, others, *_):
    return reward - np.mean([reward, *others])


def pass_at_k(reward, others, *_):
    lead = max(reward, *others) - max(others)
    return lead / (np.std([reward, *others], ddof=1) + 1e-6)


def leave_one_out(reward, others, *_):
    return reward - np.mean(others)


def length_weighted(reward, others, case, peers):
    lengths = [len(list_sampled(x)) for x in (case, *peers)]
    return reward - np.average([reward, *others], weights=lengths)


def gpg(cases):
    alpha = len(cases) / sum(total_reward(case) != 0 for case in cases)
    return [alpha * row for row in apply_to_responses(center, cases)]


def gdpo(cases):
    total = [np.zeros(len(case.rewards)) for case in cases]
    for name, weight in WEIGHTS.items():

        def component(case, name=name):
            return case.reward_components[name]

        rows = apply_to_responses(normalize, cases, component)
        total = [old + weight * row for old, row in zip(total, rows, strict=True)]
    return whiten(total, cases)


def whitened_returns(cases):
    return whiten([compute_returns(case) for case in cases], cases)


def whitened_rewards(cases):
    return whiten(apply_to_responses(center, cases), cases)


def minus_greedy(cases):
    return [(compute_returns(case) - case.greedy) * case.response_mask for case in cases]


def weight_until(case, k) -> float:
    """W_t of the k-th sampled token."""
    positions = list_sampled(case)[: k + 1]
    return sum(1 - 2 * case.pi[j] + case.squares[j] for j in positions)


def has_equal_outcomes(group) -> bool:
    """Return whether only the last tokens have rewards, and those are equal."""
    is_outcome = not any(any(case.rewards[:-1]) for case in group)
    return is_outcome and len({case.reward for case in group}) == 1


def token_baseline(cases):
    rows = [np.zeros(len(case.rewards)) for case in cases]
    for row, case in zip(rows, cases, strict=True):
        group = [x for x in cases if x.group_id == case.group_id]
        if has_equal_outcomes(group):
            continue
        for k, t in enumerate(list_sampled(case)):
            alive = [x for x in group if len(list_sampled(x)) > k]
            weights = [weight_until(x, k) for x in alive]
            returns = [compute_returns(x)[list_sampled(x)[k]] for x in alive]
            baseline = np.dot(returns, weights) / (sum(weights) + 1e-8)
            row[t] = compute_returns(case)[t] - (baseline if len(alive) > 1 else 0.0)
    return rows


class Reference(NamedTuple):
    """The advantages of a paper, cases -> rows, and the tolerance."""

    compute: Callable[[Any], Any]
    tolerance: dict[str, float]


ESTIMATORS = {
    # Shao et al., arXiv:2402.03300, section 4.1.2: (r_i - mean(r)) / std(r). Departs: std + 1e-6.
    "grpo": Reference(by_response(normalize), EXACT),
    "grpo_vectorized": Reference(by_response(normalize), SINGLE),
    # Liu et al., arXiv:2601.05242: GRPO of each component, weighted sum, normalized over the batch.
    # Departs: over tokens, not responses, so long ones weigh more.
    "gdpo": Reference(gdpo, SINGLE),
    # Tang et al., arXiv:2503.19595, leave-one-out pass@k: max(r) - max of the others. Departs: over
    # the std + 1e-6.
    "grpo_passk": Reference(by_response(pass_at_k), EXACT),
    # Ahmadian et al., arXiv:2402.14740, the RLOO estimator: r_i - mean of the others.
    "rloo": Reference(by_response(leave_one_out), EXACT),
    "rloo_vectorized": Reference(by_response(leave_one_out), EXACT),
    # Hao et al., arXiv:2505.23585: r_i - sum(l r) / sum(l), l a response's length, here its sampled
    # tokens.
    "opo": Reference(by_response(length_weighted), EXACT),
    # Chu et al., arXiv:2504.02546: alpha (r_i - mean(r)) / F_norm, F_norm = 1, alpha = B / (B - M).
    # Departs: M is the paper's number of responses in groups of equal rewards; verl's B - M counts
    # rewards that are not 0.
    "gpg": Reference(gpg, SINGLE),
    # Hu et al., arXiv:2501.03262: the return from token t on, normalized over the batch; with
    # baseline, the response's reward - its group's mean. Departs: the latter's normalization is
    # over tokens, not responses.
    "reinforce_plus_plus": Reference(whitened_returns, SINGLE),
    "reinforce_plus_plus_baseline": Reference(whitened_rewards, SINGLE),
    # Li et al., arXiv:2310.10505, Algorithm 1: the return from token t on - the reward of the
    # greedy response.
    "remax": Reference(minus_greedy, EXACT),
    # Li et al., arXiv:2602.07078: b_t = sum(G_t W_t) / sum(W_t), W_t = sum over j <= t of
    # 1 - 2 pi_j + sum pi^2, over those of the group that have a t-th token. Departs: + 1e-8, and
    # b_t = 0 if one is alone (it would be the baseline of itself), unless all rewards are equal.
    "optimal_token_baseline": Reference(token_baseline, EXACT),
    "tir_optimal_token_baseline": Reference(token_baseline, EXACT),
}


def test_every_estimator_of_verl_has_a_reference():
    assert {*ESTIMATORS, "gae"} == {e.value for e in core_algos.AdvantageEstimator}


# --- estimators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_advantage_equals_that_of_its_paper(name, seed):
    reference = ESTIMATORS[name]
    cases = random_cases(seed, has_gaps=name != "optimal_token_baseline")
    advantages, _ = compute_advantages(cases, name, **GDPO)
    assert_close(advantages, pad(reference.compute(cases)), **reference.tolerance)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_the_sum_of_discounted_td_errors(seed):
    """Schulman et al., arXiv:1506.02438, eq. 16. Observed tokens are not time steps.

    Departs: advantages are whitened over the batch's tokens, after the returns are computed.
    """
    cases = random_cases(seed)
    gamma, lam = [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)][seed % 3]
    raw = [np.zeros(len(case.rewards)) for case in cases]
    returns = [np.zeros(len(case.rewards)) for case in cases]
    for case, row, row_returns in zip(cases, raw, returns, strict=True):
        positions = list_sampled(case)
        v = [*(case.values[t] for t in positions), 0.0]  # nothing comes after the end
        delta = [case.rewards[t] + gamma * v[k + 1] - v[k] for k, t in enumerate(positions)]
        for k, t in enumerate(positions):
            row[t] = sum((gamma * lam) ** n * d for n, d in enumerate(delta[k:]))
        row_returns[positions] = row[positions] + v[:-1]
    result, result_returns = compute_advantages(cases, "gae", gamma=gamma, lam=lam)
    assert_close(result, pad(whiten(raw, cases)), **SINGLE)
    assert_close(result_returns, pad(returns), **EXACT)


def test_grpo_without_the_std_is_dr_grpo():
    """Liu et al., arXiv:2503.20783, section 3.2."""
    cases = random_cases(0)
    advantages, _ = compute_advantages(cases, "grpo", norm_adv_by_std_in_grpo=False)
    assert_close(advantages, pad(apply_to_responses(center, cases)), **EXACT)


@pytest.mark.parametrize("name", ["grpo_vectorized", "gdpo"])
def test_norm_adv_by_std_in_grpo_false_is_ignored_by_vectorized_grpo_and_gdpo(name):
    """Departs: compute_advantage passes the key to `grpo` only. These two always divide."""
    cases = random_cases(0)
    divided, _ = compute_advantages(cases, name, norm_adv_by_std_in_grpo=True, **GDPO)
    not_divided, _ = compute_advantages(cases, name, norm_adv_by_std_in_grpo=False, **GDPO)
    np.testing.assert_array_equal(divided, not_divided)


def test_gdpo_ignores_reward_shaping_and_kl_in_the_reward():
    """Departs: env.reward and the KL term change token_level_rewards, which gdpo does not read."""
    cases = random_cases(0)
    before, _ = compute_advantages(cases, "gdpo", **GDPO)
    for i, case in enumerate(cases):
        case.rewards = [r - 3.0 * i for r in case.rewards]
    after, _ = compute_advantages(cases, "gdpo", **GDPO)
    np.testing.assert_array_equal(before, after)


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in ESTIMATORS if name not in ("remax", "reinforce_plus_plus")]
)
def test_a_group_of_one_gets_its_raw_reward(name):
    """It has no other response to compare with, so select_trainable drops such groups.

    If the batch is whitened, the group also changes all others. Departs: rloo_vectorized gives 0,
    and rloo gives the reward. grpo_passk raises an error.
    """
    cases = [*make_group(0.0, 0.0), make_case("h", 1.0)]
    if name == "grpo_passk":
        with pytest.raises(ValueError, match="at least 2"):
            compute_advantages(cases, name)
        return
    white = np.array([-1, -1, 2]) / 3**0.5
    special = {
        "rloo_vectorized": [0, 0, 0],
        "gpg": [0, 0, 3],
        "gdpo": white,
        "reinforce_plus_plus_baseline": white,
    }
    advantages, _ = compute_advantages(cases, name, **GDPO)
    assert_close(advantages[:, 0], special.get(name, [0, 0, 1]), **SINGLE)


def insert_observed(case, at: int, count: int):
    """Copy a case, with `count` observed tokens inserted before position `at`."""
    values = {"response_ids": 2, "log_probs": 0.0, "response_mask": 0, "rewards": 0.0}
    values |= {"values": 9.0, "pi": 0.7, "squares": 0.6}
    longer = copy.copy(case)
    for name, value in values.items():
        by_token = list(getattr(case, name))
        setattr(longer, name, by_token[:at] + [value] * count + by_token[at:])
    return longer


@pytest.mark.parametrize("name", [*ESTIMATORS, "gae"])
def test_observed_tokens_change_no_sampled_tokens_advantage(name):
    """Departs: optimal_token_baseline compares responses at equal positions, observed included."""
    plain = random_cases(1, has_gaps=False)
    gapped = []
    for i, case in enumerate(plain):
        gapped.append(insert_observed(case, 1 + i % (len(case.rewards) - 1), 1 + i % 3))
    before, _ = compute_advantages(plain, name, **GDPO)
    after, _ = compute_advantages(gapped, name, **GDPO)
    kept = pad([after[i, list_sampled(case)] for i, case in enumerate(gapped)])
    is_same = np.allclose(kept, before, rtol=1e-6, atol=1e-6)
    assert is_same == (name != "optimal_token_baseline")
