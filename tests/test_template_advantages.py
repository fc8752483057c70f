"""Tests the advantages of turns of templates/ against plain Python."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kit.data.episode import TurnSpan
from templates.advantages import sum_by_turn, turn_gae, turn_grpo
from tests.helpers.cases import pad
from tests.helpers.workers import make_batch, make_episode


class Conversation(NamedTuple):
    """A conversation token by token. Each list has one entry per response token."""

    mask: list[int]
    rewards: list[float]
    values: list[float]


def make_conversations(seed=0, count=12):
    """Make random conversations, and return them with their group ids, of three groups.

    The reward of a turn is at its last token.
    """
    rng = random.Random(seed)
    conversations = []
    for _ in range(count):
        mask = []
        rewards = []
        for turn in range(rng.randint(1, 4)):
            sampled = rng.randint(1, 4)
            observed = rng.randint(1, 3) if turn else 0
            mask += [0] * observed + [1] * sampled
            rewards += [0.0] * (len(mask) - len(rewards) - 1) + [round(rng.random(), 2)]
        tail = rng.randint(0, 2)  # observed tokens at the end
        mask += [0] * tail
        rewards += [0.0] * tail
        values = [rng.gauss(0, 1) for _ in mask]
        conversations.append(Conversation(mask, rewards, values))
    return conversations, [str(i % 3) for i in range(count)]


def pad_rows(rows):
    """Make a tensor [B, R] of lists of numbers, with zeros on the right."""
    return torch.tensor(pad(rows))


def find_turns(mask):
    """Find (first, end) of each run of ones."""
    turns = []
    start = None
    for t, m in enumerate([*mask, 0]):
        if m and start is None:
            start = t
        if not m and start is not None:
            turns.append((start, t))
            start = None
    return turns


def make_turn_tensor(conversations):
    """Return the turn of each token, [B, R]; -1 for observed tokens and padding."""
    width = max(len(c.mask) for c in conversations)
    turn = torch.full((len(conversations), width), -1)
    for i, conversation in enumerate(conversations):
        for k, (begin, end) in enumerate(find_turns(conversation.mask)):
            turn[i, begin:end] = k
    return turn


def test_turn_grpo_is_the_formula_of_the_paper():
    conversations, index = make_conversations()
    turn = make_turn_tensor(conversations)
    mask = pad_rows([c.mask for c in conversations])
    rewards = pad_rows([c.rewards for c in conversations])
    advantages, returns = turn_grpo(rewards, mask, turn, index)
    assert torch.equal(advantages, returns)
    # If a filter or rollout_rs masks tokens, the turns and all other advantages stay the same.
    masked = mask.clone()
    masked[0] = 0
    masked[1, 0] = 0
    assert torch.equal(turn_grpo(rewards, masked, turn, index)[0], advantages * masked)
    single = conversations[:1]
    rows = (pad_rows([single[0].rewards]), pad_rows([single[0].mask]))
    assert torch.isfinite(turn_grpo(*rows, make_turn_tensor(single), ["a"])[0]).all()
    turn_rewards = []
    for c in conversations:
        turn_rewards.append([sum(c.rewards[begin:end]) for begin, end in find_turns(c.mask)])
    for i, conversation in enumerate(conversations):
        group = []
        for other_rewards, name in zip(turn_rewards, index, strict=True):
            if name == index[i]:
                group += other_rewards
        std = np.std(group, ddof=1) + 1e-6
        normalized = [(r - np.mean(group)) / std for r in turn_rewards[i]]
        expected = np.zeros(advantages.shape[1])
        for k, (begin, end) in enumerate(find_turns(conversation.mask)):
            expected[begin:end] = sum(normalized[k:])
        np.testing.assert_allclose(advantages[i], expected, atol=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.7, 0.0)])
def test_turn_gae_is_the_formula_of_the_paper(gamma, lam):
    conversations, _ = make_conversations(seed=1)
    mask = pad_rows([c.mask for c in conversations])
    rewards = pad_rows([c.rewards for c in conversations])
    values = pad_rows([c.values for c in conversations])
    turn = make_turn_tensor(conversations)
    advantages, returns = turn_gae(rewards, values, mask, turn, gamma, lam)
    raw = np.zeros(mask.shape)
    expected_returns = np.zeros(mask.shape)
    for i, conversation in enumerate(conversations):
        spans = find_turns(conversation.mask)
        V = [conversation.values[begin] for begin, _ in spans] + [0.0]
        r = [sum(conversation.rewards[begin:end]) for begin, end in spans]
        delta = [r[j] + gamma * V[j + 1] - V[j] for j in range(len(spans))]
        for k, (begin, end) in enumerate(spans):
            # equation 16: the sum of (gamma lam)^n delta_{k+n}
            advantage = sum((gamma * lam) ** n * d for n, d in enumerate(delta[k:]))
            raw[i, begin:end] = advantage
            expected_returns[i, begin:end] = advantage + V[k]
    live = raw[mask.numpy() > 0]
    expected = (raw - live.mean()) / math.sqrt(live.var(ddof=1) + 1e-8) * mask.numpy()
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(returns, expected_returns, atol=1e-9)


def test_values_of_observed_tokens_count_for_the_turn_before():
    """[B, R] is [2, 6]. Tokens before the first turn count for the first turn."""
    turn = torch.tensor([[0, 0, -1, 1, -1, -1], [-1, 0, 1, 2, -1, -1]])
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]])
    assert sum_by_turn(values, turn).tolist() == [[7.0, 56.0, 0.0], [3.0, 4.0, 56.0]]


def test_a_reward_at_an_observed_token_counts_for_the_turn_before():
    """The rest of the reward is at the last token, which is an observed one here."""
    turns = [TurnSpan(0, 2, 1), TurnSpan(3, 4, 3)]
    mask = [1, 1, 0, 1, 0, 0]
    batch = make_batch([make_episode([1], [2] * 6, mask, turns, r) for r in (1.0, 0.0)]).batch
    advantages, _ = turn_grpo(
        batch["token_level_scores"], batch["response_mask"], batch["turn"], ["a", "a"]
    )
    # the rewards of the four turns are 0, 1, 0, 0; their mean is 0.25 and their std 0.5
    one = (1.0 - 0.25) / (0.5 + 1e-6)
    zero = -0.25 / (0.5 + 1e-6)
    first, second = advantages.tolist()
    assert first == pytest.approx([zero + one, zero + one, 0, one, 0, 0])
    assert second == pytest.approx([2 * zero, 2 * zero, 0, zero, 0, 0])
