"""Tests online DPO, SPPO, SPIN and distillation of templates/ against their papers.

tests/helpers/cases.py explains the tolerances and "Departs:".
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from kit.errors import UserFunctionError
from templates.advantages import distill, pairs, preference, spin
from templates.losses import dpo, sppo
from tests.helpers.cases import (
    EXACT,
    MODES,
    SEEDS,
    assert_close,
    assert_same,
    make_actor_config,
    random_tokens,
)

ONE_PART = (slice(0, 8),)
TWO_PARTS = (slice(0, 3), slice(3, 8))


def compute_in_parts(loss, d, advantages, mode, parts, weights=None):
    """Compute (loss, gradient by x), summed over the micro-batches `parts` as in verl's engine.

    weights: of rollout correction.
    """
    config = make_actor_config()
    x = torch.tensor(d.x, requires_grad=True)
    totals = {
        "dp_size": 1,
        "batch_num_tokens": len(d.tokens),
        "global_batch_size": int(d.mask.any(axis=1).sum()),
    }
    config.global_batch_info.update(totals)
    old = torch.tensor(d.old)
    mask = torch.tensor(d.mask)
    losses = []
    for part in parts:
        part_weights = None if weights is None else weights[part]
        result, _ = loss(
            old[part], x[part], advantages[part], mask[part], mode, config, part_weights
        )
        losses.append(result)
    sum(losses).backward()
    return sum(losses).item(), x.grad.numpy()


@pytest.mark.parametrize("seed", SEEDS)
def test_sppo_fits_the_log_ratio_of_a_response_to_its_win_rate(seed):
    """Wu et al., arXiv:2405.00675, Algorithm 1, as a mean over responses.

    (log pi(y)/pi_t(y) - eta (P(y > pi_t) - 1/2))^2, where P is the mean over the K responses to the
    prompt. Departs: the larger reward wins, and eta = 1.
    """
    d = random_tokens(seed)
    rng = np.random.default_rng(seed)
    groups = np.array(list("ababbbcd"))  # d is padding
    rewards = rng.choice([0.0, 0.25, 1.0], 8)
    loss = 0.0
    gradient = np.zeros(d.x.shape)
    responses = sum(d.mask.any(axis=1))
    for i in range(7):
        others = rewards[groups == groups[i]]
        wins = (others < rewards[i]) + 0.5 * (others == rewards[i])
        error = d.log_r[i][d.mask[i]].sum() - 1.0 * (np.mean(wins) - 0.5)
        loss += error**2 / responses
        gradient[i] = 2 * error / responses * d.mask[i]
    token_rewards = torch.zeros(d.x.shape, dtype=torch.float64)
    token_rewards[:, -1] = torch.tensor(rewards)
    advantages, _ = preference(token_rewards, torch.tensor(d.mask), groups)
    result = compute_in_parts(sppo, d, advantages, MODES[3], TWO_PARTS)
    assert_same(result, loss, gradient)
    with pytest.raises(UserFunctionError, match="seq-mean-token-mean"):
        compute_in_parts(sppo, d, advantages, MODES[0], ONE_PART)


@pytest.mark.parametrize(("loss", "mode"), [(dpo, MODES[2]), (sppo, MODES[3])])
def test_a_loss_is_scaled_by_the_weights_of_rollout_correction(loss, mode):
    """The loss of dpo is a sum over tokens, so its weights may differ within a response."""
    d = random_tokens(0, per_response=loss is sppo)
    advantages = torch.tensor(d.a)
    weights = torch.tensor(d.w)
    _, plain = compute_in_parts(loss, d, advantages, mode, ONE_PART)
    _, weighted = compute_in_parts(loss, d, advantages, mode, ONE_PART, weights)
    assert np.abs(plain[d.mask]).min() > 0
    assert_close(weighted, plain * d.w, **EXACT)


def test_the_gradient_of_online_dpo_is_that_of_the_dpo_loss():
    """Rafailov et al., arXiv:2305.18290, eq. 7, by autograd: the mean over pairs.

    Groups b and c have no pair, because their responses have equal rewards.
    """
    d = random_tokens(0, on_policy=True)
    d.mask[-1, 0] = True
    ref = torch.tensor(np.random.default_rng(0).normal(-1, 0.5, d.x.shape))
    mask = torch.tensor(d.mask)
    x = torch.tensor(d.x, requires_grad=True)
    ratio = ((x - ref) * mask).sum(dim=1)
    margins = torch.stack([ratio[0] - ratio[1], ratio[7] - ratio[6]])
    (-logsigmoid(0.1 * margins).mean()).backward()
    rewards = torch.zeros(d.x.shape, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([1, 0, 0.5, 0.5, 0.5, 0.5, 0, 1])
    advantages, _ = pairs(rewards, mask, list("aabbccdd"), torch.tensor(d.old), ref)
    # the two responses of a pair may be in different micro-batches
    _, gradient = compute_in_parts(dpo, d, advantages, MODES[2], (slice(0, 1), slice(1, 8)))
    assert_close(gradient, x.grad.numpy(), **EXACT)
    with pytest.raises(UserFunctionError, match="seq-mean-token-sum"):
        compute_in_parts(dpo, d, advantages, MODES[0], ONE_PART)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_of_spin_is_that_of_its_loss(seed):
    """Chen et al., arXiv:2401.01335, eq. 4.7, by autograd.

    log(1 + exp(-lambda [log p(y)/p_t(y) - log p(y')/p_t(y')])). Group a has three responses of the
    policy, b one, c none, and d none from the row: the last two have no gradient.
    """
    d = random_tokens(seed, on_policy=True)
    index = list("aaaabbcd")
    d.mask[-1, 0] = True
    from_row = [1, 4, 6]
    ref = torch.tensor(np.random.default_rng(seed).normal(-1, 0.5, d.x.shape))
    mask = torch.tensor(d.mask)
    x = torch.tensor(d.x, requires_grad=True)
    ratio = ((x - ref) * mask).sum(dim=1)
    pairs = {1: [0, 2, 3], 4: [5]}
    losses = []
    for y, others in pairs.items():
        losses += [-logsigmoid(0.1 * (ratio[y] - ratio[i])) / len(others) for i in others]
    (sum(losses) / len(pairs)).backward()
    turn = torch.where(mask, 0, -1)
    turn[from_row] = -1
    advantages, _ = spin(mask, turn, index, torch.tensor(d.old), ref)
    # the two responses of a pair are in different micro-batches
    _, gradient = compute_in_parts(dpo, d, advantages, MODES[2], TWO_PARTS)
    assert_close(gradient, x.grad.numpy(), **EXACT)


def test_distillation_follows_the_reverse_kl():
    """Agarwal et al., arXiv:2306.13649, section 3 with lambda = 1 and KL(student || teacher).

    The expectation over a vocabulary of 5 is exact. Minus the mean advantage is the KL divergence,
    and the gradients are equal. Observed tokens have no advantage.
    """
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=5), requires_grad=True)
    q = torch.tensor(rng.normal(size=5)).log_softmax(0)
    p = logits.log_softmax(0)
    kl = (p.exp() * (p - q)).sum()
    advantages, _ = distill(p.detach()[None], q[None], torch.ones(1, 5, dtype=torch.int64))
    a = advantages[0]  # [5], of each token of the vocabulary
    assert_close(-(p.exp() * a).sum().item(), kl.item(), **EXACT)
    loss = -(p.exp().detach() * a * p).sum()
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    assert_close(gradient.numpy(), kl_gradient.numpy(), **EXACT)
    advantages, _ = distill(p.detach()[None], q[None], torch.tensor([[1, 1, 0, 1, 0]]))
    assert advantages[0, [2, 4]].tolist() == [0, 0]
