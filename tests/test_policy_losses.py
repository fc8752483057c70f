"""Tests verl's losses and their gradients against their papers.

A reference implements the paper's equation as a loop over tokens. x is the log-prob of a token,
`old` that of the old policy, and a the advantage. See tests/helpers/cases.py for the tolerances
and for "Departs:".
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from tests.helpers.cases import (
    EXACT,
    MODES,
    SEEDS,
    assert_close,
    assert_same,
    compute_loss_and_gradient,
    make_actor_config,
    random_tokens,
    weigh_tokens,
)

# --- references ----------------------------------------------------------------------------------
# The references return (loss, derivative by x) of a token.


def ppo(x, old, a, low=0.2, high=0.28, c=math.inf):
    """Schulman et al., arXiv:1707.06347, eq. 7, with DAPO's two bounds and dual-clip PPO's minimum.

    Bounds: arXiv:2503.14476, section 3.1. Minimum c A if A < 0: Ye et al., arXiv:1912.09729.
    """
    r = math.exp(x - old)
    objective = min(r * a, np.clip(r, 1 - low, 1 + high) * a)
    objective = max(objective, c * a) if a < 0 else objective
    return -objective, -r * a if objective == r * a else 0.0


def sapo(x, old, a):
    r = math.exp(x - old)
    tau = 1.0 if a > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * p * a, -4 * p * (1 - p) * r * a


def dro(x, old, a):
    return -a * x + 0.15 * (x - old) ** 2, -a + 0.3 * (x - old)


def by_token(loss):
    """Make a reference from the loss of a token. It returns {token: (loss, derivative)}."""

    def reference(d):
        return {at: loss(d.x[at], d.old[at], d.a[at]) for at in d.tokens}

    return reference


def with_stopped_weight(weight):
    """Make the loss - sg(weight(pi, pi_old, A)) A log pi, where sg stops the gradient."""

    def loss(x, old, a):
        factor = -weight(math.exp(x), math.exp(old), a) * a
        return factor * x, factor

    return by_token(loss)


def weight_one(pi, mu, a):
    return 1.0


def clip_ratio(pi, mu, a):
    return np.clip(pi / mu, 0.8, 1.28)


def dppo(divergence):
    def weight(pi, mu, a):
        is_near = divergence(mu, pi) <= (0.28 if a > 0 else 0.2)
        is_moving_back = (pi > mu) != (a > 0)
        return min(pi / mu, 3.0) * (is_near or is_moving_back)

    return with_stopped_weight(weight)


def total_variation(mu, pi):
    return abs(mu - pi)


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def by_response(loss):
    """Make a reference from loss(log-ratios of the response, log-ratio of the token, A)."""

    def reference(d):
        results = {}
        for at in d.tokens:
            log_ratios = [d.log_r[other] for other in d.tokens if other[0] == at[0]]
            results[at] = loss(log_ratios, d.log_r[at], d.a[at])
        return results

    return reference


def gspo(log_ratios, _, a):
    return ppo(np.mean(log_ratios), 0.0, a)


def gmpo(log_ratios, log_r, a):
    clipped = [min(v, 0.28) if a > 0 else max(v, -0.2) for v in log_ratios]
    value = -a * math.prod(math.exp(v) for v in clipped) ** (1 / len(clipped))
    return value, value * (log_r <= 0.28 if a > 0 else log_r >= -0.2)


def compute_covariances(d):
    mean_a = np.mean([d.a[at] for at in d.tokens])
    mean_x = np.mean([d.x[at] for at in d.tokens])
    return {at: (d.a[at] - mean_a) * (d.x[at] - mean_x) for at in d.tokens}


def clip_cov(d):
    covariance = compute_covariances(d)
    results = by_token(ppo)(d)
    for at, (_, slope) in results.items():
        if 1 < covariance[at] < 5 and slope:
            results[at] = (0.0, 0.0)
    return results


def ratio_times_advantage(x, old, a):
    value = -math.exp(x - old) * a
    return value, value


def kl_cov(d, fraction=0.2, beta=0.1):
    ranked = sorted(d.tokens, key=compute_covariances(d).get)
    results = by_token(ratio_times_advantage)(d)
    for at in ranked[-max(1, int(fraction * len(ranked))) :]:
        value, slope = results[at]
        penalty = beta * abs(d.log_r[at])
        results[at] = (value + penalty, slope + beta * math.copysign(1, d.log_r[at]))
    return results


LOSSES = {
    "vanilla": by_token(functools.partial(ppo, c=3.0)),
    "bypass_mode": by_token(functools.partial(ppo, c=3.0)),  # verl's default for it is ppo_clip
    # Qi et al., arXiv:2602.04879: truncated r A, cut where the policy leaves the trust region. The
    # gradient is the paper's, the value that of sg(r) A log pi. Departs: truncated at clip_ratio_c,
    # whose default is dual-clip's 3.
    "dppo_tv": dppo(total_variation),
    "dppo_kl": dppo(binary_kl),
    # Gao et al., arXiv:2511.20347: (4 / tau) sigmoid(tau (r - 1)) A, whose derivative by r is
    # 4 p (1 - p) A.
    "sapo": by_token(sapo),
    # Chu et al., arXiv:2504.02546: A log pi.
    "gpg": with_stopped_weight(weight_one),
    # Richemond et al., arXiv:2405.19107, DRO-V's gradient of the policy. Departs: its quadratic
    # term is around the old policy, not the reference, and of tokens, not responses. beta = 0.3.
    "dro": by_token(dro),
    # MiniMax, arXiv:2506.13585, eq. 4 and 5: sg(clip(r)) A log pi. Departs: the lower bound is on
    # by default.
    "cispo": with_stopped_weight(clip_ratio),
    # Cui et al., arXiv:2505.22617: PPO, no gradient on (here all) tokens whose covariance is in
    # (1, 5); r A and a KL penalty on the tokens of largest covariance. Departs: Clip-Cov's tokens
    # also lose their loss, and are not drawn from those that PPO clips; KL-Cov's KL is |log r|,
    # which on-policy has no gradient.
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    # Zheng et al., arXiv:2507.18071, eq. 5 and 7: PPO's loss of s = (pi / pi_old)^(1 / length) of
    # the response, so that the derivative by x_t is s A / length. verl has eq. 14's
    # sg(s) pi / sg(pi), so A may be a token's.
    "gspo": by_response(gspo),
    # Zhao et al., arXiv:2507.20673: A times the geometric mean of ratios, each clipped on the side
    # to which A pushes it. Departs: bounds of log-ratios are clip_ratio_*, 0.2 by default; the
    # paper has 0.4.
    "geo_mean": by_response(gmpo),
}


def test_every_loss_of_verl_has_a_reference():
    registered = {name for name in core_algos.POLICY_LOSS_REGISTRY if ".py:" not in name}
    assert set(LOSSES) == registered  # other tests also register custom losses


# --- losses and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_equal_those_of_the_paper(name, seed):
    """Odd seeds have weights of rollout correction.

    Departs: bypass_mode ignores these weights. sapo and geo_mean ignore the mode. The mean of
    geo_mean is over all rows, also padding. gspo is that of the paper with seq-mean-token-mean.
    """
    d = random_tokens(seed, per_response=name == "geo_mean")
    mode = MODES[seed % 5]
    fixed_mode = "seq-mean-token-mean" if name in ("sapo", "geo_mean") else None
    weights = weigh_tokens(d.mask, fixed_mode or mode)
    if seed % 2 and name != "bypass_mode":
        weights *= d.w
    if name == "geo_mean":
        weights *= 7 / 8
    loss = 0.0
    gradient = np.zeros(d.x.shape)
    for at, (value, slope) in LOSSES[name](d).items():
        loss += weights[at] * value
        gradient[at] = weights[at] * slope
    result = compute_loss_and_gradient(name, d, mode, weights=d.w if seed % 2 else None)
    assert_same(result, loss, gradient)


@pytest.mark.parametrize("seed", SEEDS)
def test_bypass_reinforce_is_truncated_importance_sampling(seed):
    """Ionides 2008, Truncated Importance Sampling: - sg(w) A log pi.

    w = min(pi / mu, 2) of a token or a response.
    """
    d = random_tokens(seed)
    level = ["token", "sequence"][seed % 2]
    loss = 0.0
    gradient = np.zeros(d.x.shape)
    weights = weigh_tokens(d.mask, "token-mean")
    for i, t in d.tokens:
        span = [(i, t)] if level == "token" else [at for at in d.tokens if at[0] == i]
        weight = min(math.exp(sum(d.log_r[at] for at in span)), 2.0)
        gradient[i, t] = -weights[i, t] * weight * d.a[i, t]
        loss += gradient[i, t] * d.x[i, t]
    correction = {"loss_type": "reinforce", "rollout_is": level}
    config = make_actor_config({"rollout_correction": correction})
    assert_same(compute_loss_and_gradient("bypass_mode", d, config=config), loss, gradient)


# --- clipping ------------------------------------------------------------------------------------


def compute_token_weights(name, ratios, a, **changes):
    """Return the weight of each token of a response: its gradient divided by -A / length."""
    x = np.full((1, len(ratios)), -3.0)
    a = np.full(x.shape, a)
    d = SimpleNamespace(x=x, old=x - np.log(ratios), a=a, mask=np.full(x.shape, True))
    _, gradient = compute_loss_and_gradient(name, d, config=make_actor_config(**changes))
    return pytest.approx(-gradient[0] / a[0] * x.size)


def test_clip_higher_allows_larger_increases_than_decreases():
    """DAPO, arXiv:2503.14476, section 3.1.

    Departs: clip_ratio is not read, because both bounds have defaults.
    """
    assert compute_token_weights("vanilla", [1.25, 1.29, 0.79], 1.0) == [1.25, 0, 0.79]
    assert compute_token_weights("vanilla", [1.25, 1.29, 0.79], -1.0) == [1.25, 1.29, 0]
    assert compute_token_weights("vanilla", [1.25], 1.0, clip_ratio_high=0.2) == [0]
    assert compute_token_weights("vanilla", [1.25], 1.0, clip_ratio=0.01) == [1.25]


def test_dppo_truncates_at_dual_clips_default_of_3():
    """Departs: the paper has a large value, and verl's code has 20 as its default.

    But clip_ratio_c always has a value, so this default is never used.
    """
    assert compute_token_weights("dppo_tv", [5.0], -1.0) == [3.0]
    assert compute_token_weights("dppo_tv", [5.0], -1.0, clip_ratio_c=20.0) == [5.0]


# --- aggregation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_of_examples_random_tokens_and_micro_batches(mode):
    """verl's engine passes the totals, sums the micro-batches, and averages over 2 ranks."""
    results = [7 / 4, 7, 7 / 2, (4 + 1) / 2, 7 / 2 / 4]
    expected = dict(zip(MODES, results, strict=True))[mode]
    losses = torch.tensor([[4.0, 9, 9, 9], [1.0, 1, 1, 9]])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]])
    assert core_algos.agg_loss(losses, mask, mode) == expected
    d = random_tokens(0)
    losses = torch.tensor(d.x)
    mask = torch.tensor(d.mask)
    totals = {
        "batch_num_tokens": len(d.tokens),
        "global_batch_size": 7,
        "loss_scale_factor": 5,
        "dp_size": 2,
    }
    parts = [core_algos.agg_loss(losses[i::3], mask[i::3], mode, **totals).item() for i in range(3)]
    assert_close(sum(parts) / 2, (d.x * weigh_tokens(d.mask, mode, 5)).sum(), **EXACT)
    whole = core_algos.agg_loss(losses, mask, mode).item()
    assert_close(whole, (d.x * weigh_tokens(d.mask, mode)).sum(), **EXACT)


def test_dr_grpos_norm_and_geo_mean_depend_on_the_split_into_micro_batches():
    """Departs: without loss_scale_factor, Dr. GRPO's mode divides by the width of the tensor.

    This is the length of the longest response of a micro-batch. geo_mean ignores the totals, so
    the gradient of each of 2 micro-batches is twice as large.
    """
    mode = "seq-mean-token-sum-norm"
    short = torch.ones(2, 4)
    wide = torch.nn.functional.pad(torch.ones(2, 4), (0, 4))
    loss_of_short = core_algos.agg_loss(short, short, mode)
    assert core_algos.agg_loss(wide, wide, mode) == loss_of_short / 2
    assert core_algos.agg_loss(wide, wide, mode, loss_scale_factor=4) == loss_of_short
    d = random_tokens(0, per_response=True)
    half = SimpleNamespace(x=d.x[:4], old=d.old[:4], a=d.a[:4], mask=d.mask[:4])
    _, gradient = compute_loss_and_gradient("geo_mean", d)
    _, gradient_of_half = compute_loss_and_gradient("geo_mean", half)
    assert_close(gradient_of_half, 2 * gradient[:4], **EXACT)


# --- the critic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_is_half_the_larger_of_two_squares(seed):
    """arXiv:1707.06347, eq. 9.

    Departs: halved, and clipped around the old value (see arXiv:2005.12729, section 3).
    """
    d = random_tokens(seed)
    mode = MODES[seed % 5]
    loss = 0.0
    gradient = np.zeros(d.x.shape)
    weights = weigh_tokens(d.mask, mode)
    for at in d.tokens:
        error = d.x[at] - d.a[at]
        clipped = np.clip(d.x[at], d.old[at] - 0.5, d.old[at] + 0.5) - d.a[at]
        loss += weights[at] * max(error**2, clipped**2) / 2
        gradient[at] = weights[at] * error * (error**2 >= clipped**2)
    v, old, returns, mask = (torch.tensor(x) for x in (d.x, d.old, d.a, d.mask))
    v.requires_grad_()
    value_loss, _ = core_algos.compute_value_loss(v, returns, old, mask, 0.5, mode)
    value_loss.backward()
    assert_same((value_loss.item(), v.grad.numpy()), loss, gradient)
