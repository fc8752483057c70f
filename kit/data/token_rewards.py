"""Prepare the token rewards of a batch for an advantage estimator.

Estimators have two habits that a recipe does not show. Some skip the rewards of masked tokens, and
some turn the rounding errors of equal rewards into advantages. AdamW then makes a full step of
them, however small they are. The functions here remove both causes, so that an estimator needs no
special case.

Shapes: B episodes, R response tokens. index [B] names the group of each episode.

Protects: advantages, from rewards on masked tokens and from rounding errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kit.data.reward_scale import compute_tolerance

# verl's estimators that compare the totals of a group. All except gpg depend only on differences.
COMPARES_TOTALS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
)
# These read a reward at each token: verl's other estimators that compare responses.
COMPARES_RETURNS = (
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "reinforce_plus_plus",  # with the whole batch, and only at a discount of 1
)


def carry_rewards(rewards: Tensor, mask: Tensor, turn: Tensor | None = None) -> Tensor:
    """Return [B, R] with the rewards of masked tokens at the last trained token before them.

    If there is none before them, they move to the first trained token. The total of an episode
    stays the same. The rewards of an episode without trained tokens stay where they are.

    rewards, mask [B, R]. turn [B, R], as of training.number_turns: rewards then stay in their turn,
    and those of a turn without trained tokens stay where they are.
    """
    positions = torch.arange(rewards.shape[1]).expand_as(rewards)  # [B, R]
    is_trained = mask.bool()  # [B, R]
    before = torch.where(is_trained, positions, -1).cummax(dim=1).values  # [B, R]
    first = is_trained.long().argmax(dim=1, keepdim=True)  # [B, 1]
    target = torch.where(before >= 0, before, first)  # [B, R]
    can_move = is_trained.any(dim=1, keepdim=True).expand_as(is_trained)  # [B, R]
    if turn is not None:
        owner = turn.cummax(dim=1).values  # [B, R] an observation belongs to the turn before it
        can_move = can_move & (owner.gather(1, target) == owner)
    target = torch.where(can_move, target, positions)
    return torch.zeros_like(rewards).scatter_add(1, target, rewards)


def level_equal_rewards(
    rewards: Tensor, index: Sequence[str], estimator: str, gamma: float
) -> Tensor:
    """Return [B, R] without the rewards of groups whose rewards are all equal, if this is exact.

    The mean of equal float32 numbers has a rounding error: GRPO makes an advantage of 0.056 of
    three rewards of 0.9. Without their common value, such a group has an advantage of exactly 0,
    and all other groups keep theirs.

    estimator: a name of verl. gamma: its discount. Other estimators get the rewards unchanged.
    """
    if estimator in COMPARES_TOTALS:
        # gpg counts the rewards that are not 0. The mean of ones is exact, too.
        value = 1.0 if estimator == "gpg" else 0.0
        return level_groups(rewards, index, value)
    if estimator not in COMPARES_RETURNS or not is_outcome(rewards):
        return rewards
    if estimator == "reinforce_plus_plus":
        return level_groups(rewards, [""] * len(rewards), 0.0) if gamma == 1.0 else rewards
    return level_groups(rewards, index, 0.0)


def is_outcome(rewards: Tensor) -> bool:
    """Return whether each episode has at most one token with a reward."""
    return int((rewards != 0).sum(dim=1).max()) <= 1


def level_groups(rewards: Tensor, index: Sequence[str], value: float) -> Tensor:
    """Give each episode of a group with equal totals the total `value`, or 0 if theirs is 0."""
    levelled = rewards.clone()
    totals = sum_rewards(rewards, index)  # [B]
    for members in list_groups(index):
        if len(members) < 2 or totals[members].unique().numel() > 1:
            continue
        levelled[members] = 0.0
        if value and totals[members].all():
            levelled[members, -1] = value
    return levelled


def sum_rewards(rewards: Tensor, index: Sequence[str]) -> Tensor:
    """Return the sum of the rewards of each episode, float64 [B].

    Totals of a group that differ at most by rounding errors become the same number.
    """
    totals = rewards.double().sum(dim=1)  # [B]
    sizes = rewards.double().abs().sum(dim=1)  # [B]
    for members in list_groups(index):
        size = float(sizes[members].max())
        tolerance = compute_tolerance(size, precision=torch.finfo(rewards.dtype).eps)
        ascending = members[totals[members].argsort()].tolist()
        for lower, higher in itertools.pairwise(ascending):
            if totals[higher] - totals[lower] <= tolerance:
                totals[higher] = totals[lower]
    return totals


def list_groups(index: Sequence[str]) -> list[Tensor]:
    """List the positions of each group's members."""
    members: dict[str, list[int]] = {}
    for position, group in enumerate(index):
        members.setdefault(group, []).append(position)
    return [torch.tensor(positions) for positions in members.values()]
