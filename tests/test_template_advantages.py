"""The advantages and losses of templates/, each against plain Python or autograd."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import training
from kit.data.episode import Episode, TurnSpan
from templates.advantages import pairs, sum_by_turn, turn_gae, turn_grpo
from templates.losses import dpo, sppo


def episode(reward=1.0, length=3, group="g", ended="stop", **fields):
    response = list(range(length))
    return Episode(
        "r",
        group,
        "s",
        [1],
        response,
        [1] * length,
        [-1.0] * length,
        reward=reward,
        ended=ended,
        **fields,
    )


def played(seed=0, count=12):
    """Make random conversations of three groups: lists (mask, token rewards, values).

    The reward of a turn is at its last token.
    """
    rng, rows = random.Random(seed), []
    for _ in range(count):
        mask, rewards = [], []
        for k in range(rng.randint(1, 4)):
            said = rng.randint(1, 4)
            mask += [0] * (rng.randint(1, 3) if k else 0) + [1] * said
            rewards += [0.0] * (len(mask) - len(rewards) - 1) + [round(rng.random(), 2)]
        tail = rng.randint(0, 2)  # observed tokens at the end
        rows.append(
            (
                mask + [0] * tail,
                rewards + [0.0] * tail,
                [rng.gauss(0, 1) for _ in range(len(mask) + tail)],
            )
        )
    return rows, [str(i % 3) for i in range(count)]


def padded(rows, part):
    width = max(len(r[0]) for r in rows)
    return torch.tensor(
        [list(r[part]) + [0] * (width - len(r[0])) for r in rows], dtype=torch.float64
    )


def turns_of(mask):
    """Find (first, end) of each run of ones."""
    found, start = [], None
    for t, m in enumerate([*mask, 0]):
        if m and start is None:
            start = t
        if not m and start is not None:
            found.append((start, t))
            start = None
    return found


def turn_tensor(rows):
    turn = torch.full((len(rows), max(len(r[0]) for r in rows)), -1)
    for i, (mask, *_) in enumerate(rows):
        for k, (a, b) in enumerate(turns_of(mask)):
            turn[i, a:b] = k
    return turn


def test_turn_grpo_is_the_formula_of_the_paper():
    rows, index = played()
    turn = turn_tensor(rows)
    got, returns = turn_grpo(padded(rows, 1), padded(rows, 0), turn, index)
    assert torch.equal(got, returns)
    # A mask of a filter or of rollout_rs changes no other advantage: the turns stay the same.
    masked = padded(rows, 0)
    masked[0], masked[1, 0] = 0, 0
    assert torch.equal(turn_grpo(padded(rows, 1), masked, turn, index)[0], got * masked)
    alone, _ = turn_grpo(padded(rows[:1], 1), padded(rows[:1], 0), turn_tensor(rows[:1]), ["a"])
    assert torch.isfinite(alone).all()
    paid = [[sum(rewards[a:b]) for a, b in turns_of(mask)] for mask, rewards, _ in rows]
    for i, (mask, _, _) in enumerate(rows):
        pool = [r for p, name in zip(paid, index, strict=True) if name == index[i] for r in p]
        normal = [(r - np.mean(pool)) / (np.std(pool, ddof=1) + 1e-6) for r in paid[i]]
        wanted = np.zeros(got.shape[1])
        for k, (a, b) in enumerate(turns_of(mask)):
            wanted[a:b] = sum(normal[k:])
        np.testing.assert_allclose(got[i], wanted, atol=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.7, 0.0)])
def test_turn_gae_is_the_formula_of_the_paper(gamma, lam):
    rows, _ = played(seed=1)
    mask = padded(rows, 0)
    got, returns = turn_gae(padded(rows, 1), padded(rows, 2), mask, turn_tensor(rows), gamma, lam)
    raw, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, (m, rewards, values) in enumerate(rows):
        spans = turns_of(m)
        V = [values[a] for a, _ in spans] + [0.0]
        r = [sum(rewards[a:b]) for a, b in spans]
        for k, (a, b) in enumerate(spans):  # equation 16: the sum of (gamma lam)^l delta_{k+l}
            later = [
                (gamma * lam) ** (j - k) * (r[j] + gamma * V[j + 1] - V[j])
                for j in range(k, len(spans))
            ]
            raw[i, a:b], targets[i, a:b] = sum(later), sum(later) + V[k]
    live = raw[mask.numpy() > 0]
    wanted = (raw - live.mean()) / math.sqrt(live.var(ddof=1) + 1e-8) * mask.numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    np.testing.assert_allclose(returns, targets, atol=1e-9)


def test_turn_rewards_are_at_their_turns_and_the_rest_is_at_the_last_token():
    e = episode(
        reward=0.7, length=7, turns=[TurnSpan(0, 2, 1), TurnSpan(4, 6, 3)], turn_rewards=[0.5, 0.25]
    )
    e.response_mask = [1, 1, 0, 0, 1, 1, 0]
    scores = training.build_batch([e], 0, 1.0).batch["token_level_scores"][0]
    assert scores.tolist() == pytest.approx([0, 0.5, 0, 0, 0, 0.25, -0.05])
    assert training.build_batch([e], 0, 1.0).batch["turn"].tolist() == [[0, 0, -1, -1, 1, 1, -1]]


def test_values_of_observed_tokens_count_for_the_turn_before():
    """[B, R] is [2, 6]. Tokens before the first turn count for the first turn."""
    turn = torch.tensor([[0, 0, -1, 1, -1, -1], [-1, 0, 1, 2, -1, -1]])
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]])
    assert sum_by_turn(values, turn).tolist() == [[7.0, 56.0, 0.0], [3.0, 4.0, 56.0]]


def test_a_reward_at_an_observed_token_counts_for_the_turn_before():
    """The rest of the reward is at the last token, which is an observed one here."""
    made = [
        episode(reward=r, length=6, turns=[TurnSpan(0, 2, 1), TurnSpan(3, 4, 3)])
        for r in (1.0, 0.0)
    ]
    for e in made:
        e.response_mask = [1, 1, 0, 1, 0, 0]
    batch = training.build_batch(made, 0, 1.0).batch
    advantages, _ = turn_grpo(
        batch["token_level_scores"], batch["response_mask"], batch["turn"], ["a", "a"]
    )
    normal = (1.0 - 0.25) / (0.5 + 1e-6)  # rewards of the four turns: 0, 1, 0, 0
    others = -0.25 / (0.5 + 1e-6)
    first, second = advantages.tolist()
    assert first == pytest.approx([normal + others, normal + others, 0, normal, 0, 0])
    assert second == pytest.approx([2 * others, 2 * others, 0, others, 0, 0])


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "mode"), [(dpo, "seq-mean-token-sum"), (sppo, "seq-mean-token-mean")]
)
def test_a_loss_takes_the_weights_of_rollout_correction(loss, mode):
    """The weights differ between tokens, and between responses."""
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    config.global_batch_info.update(
        {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": 2}
    )
    old, advantages = torch.full((2, 2), -1.0), torch.tensor([[1.0, 1.0], [-0.5, -0.5]])
    mask = torch.ones(2, 2)

    def gradient(weights):
        log_prob = (old + torch.tensor([[0.25, 0.5], [0.25, -0.5]])).requires_grad_()
        loss(old, log_prob, advantages, mask, mode, config, weights)[0].backward()
        return log_prob.grad

    plain = gradient(None)
    assert plain.abs().min() > 0 and torch.equal(gradient(torch.ones(2, 2)), plain)
    by_answer = torch.tensor([[0.5, 0.5], [2.0, 2.0]])
    torch.testing.assert_close(gradient(by_answer), plain * by_answer)
    if loss is dpo:  # its loss is a sum over tokens
        by_token = torch.tensor([[0.5, 1.0], [2.0, 0.0]])
        torch.testing.assert_close(gradient(by_token), plain * by_token)


def test_the_gradient_of_online_dpo_is_that_of_the_dpo_loss():
    """Compared with autograd of the mean over pairs of -log sigmoid(beta * difference)."""
    from verl.workers.config import FSDPActorConfig

    torch.manual_seed(0)
    B, R = 8, 5
    mask = (torch.rand(B, R) < 0.8).double()
    rewards = torch.zeros(B, R, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([1, 0, 0.5, 0.5, 0.5, 0.5, 0, 1], dtype=torch.float64)
    index = ["a", "a", "b", "b", "c", "c", "d", "d"]  # b and c are ties
    log_prob = torch.randn(B, R, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(B, R, dtype=torch.float64)

    ratio = ((log_prob - ref) * mask).sum(dim=1)
    by_hand = (
        -(F.logsigmoid(0.1 * (ratio[0] - ratio[1])) + F.logsigmoid(0.1 * (ratio[7] - ratio[6]))) / 2
    )
    (wanted,) = torch.autograd.grad(by_hand, log_prob)

    advantages, _ = pairs(rewards, mask, index, log_prob.detach(), ref)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1)
    got = torch.zeros_like(wanted)
    for part in (slice(0, 3), slice(3, 8)):  # the parts of a pair may be in different micro-batches
        config.global_batch_info.update(
            {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": B}
        )
        loss, _ = dpo(
            None, log_prob[part], advantages[part], mask[part], "seq-mean-token-sum", config
        )
        got += torch.autograd.grad(loss, log_prob)[0]
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="seq-mean-token-sum"):
        dpo(None, log_prob, advantages, mask, "token-mean", config)
