"""Advantages: how much better an answer, a turn or a token was than expected. A recipe names one:

    algorithm: {adv_estimator: templates/advantages.py:turn_grpo}

Copy one into a file of your own, change it, name that. It is called with what its parameters are named after
(user_functions.py has the list) and returns (advantages, returns), both [B, R]: B episodes, R response tokens.
turn [B, R] says which of the policy's turns a token is of, from 0; -1 is observed, or padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import verl.utils.torch_functional as verl_F
from torch import Tensor
from verl.trainer.ppo.core_algos import kl_penalty

BETA = 0.1  # of online DPO, and SPIN's lambda


def by_turn(values: Tensor, turn: Tensor) -> Tensor:
    """Sum [B, R] values over each turn -> [B, K], K the most turns of an episode; what is observed goes to the turn
    before it."""
    K = int(turn.max()) + 1
    owner = torch.cummax(turn, dim=1).values.clamp(min=0)  # [B, R]
    return torch.zeros(len(values), K, dtype=values.dtype).scatter_add(1, owner, values)  # [B, K]


def turn_grpo(
    token_level_rewards: Tensor, response_mask: Tensor, turn: Tensor, index: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """GRPO per step (Shao et al. 2024, arXiv:2402.03300, section 4.1.3, process supervision): the rewards of all turns
    of a group are normalised together, and a turn's advantage is the sum of its own and all later ones.

    Rewards per turn come from servers of the step kind; a server that only verifies pays the last turn.
    """
    rewards = by_turn(token_level_rewards, turn)  # [B, K]
    exists = torch.arange(rewards.shape[1]) <= turn.amax(dim=1, keepdim=True)  # [B, K]
    normal = torch.zeros_like(rewards)
    for name in dict.fromkeys(index):
        mine = exists & torch.tensor([i == name for i in index])[:, None]  # [B, K]
        some = rewards[mine]
        if len(some) > 1:  # one turn has nothing to be compared with
            normal[mine] = (some - some.mean()) / (some.std() + 1e-6)
    to_go = normal.flip(1).cumsum(dim=1).flip(1)  # [B, K]
    advantages = to_go.gather(1, turn.clamp(min=0)) * response_mask  # [B, R]
    return advantages, advantages


def turn_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """GAE with a turn as one action (Schulman et al. 2016, arXiv:1506.02438, equation 16): gamma and lam count turns.

    The state of a turn is what stands before its first token, so its value is the critic's there. All tokens of a turn
    share its advantage, whitened over the batch as verl does for its own GAE, and its return.
    """
    first = (turn >= 0) & (
        turn != torch.nn.functional.pad(turn, (1, 0), value=-1)[:, :-1]
    )  # [B, R]
    V, rewards = by_turn(values * first, turn), by_turn(token_level_rewards, turn)  # [B, K]
    exists = torch.arange(V.shape[1]) <= turn.amax(dim=1, keepdim=True)  # [B, K]
    next_value = next_advantage = torch.zeros(len(V))  # [B]
    steps = []
    for k in reversed(range(V.shape[1])):
        delta = rewards[:, k] + gamma * next_value - V[:, k]  # [B]
        advantage = (delta + gamma * lam * next_advantage) * exists[:, k]
        next_value, next_advantage = V[:, k] * exists[:, k], advantage
        steps.append(advantage)
    advantages = torch.stack(steps[::-1], dim=1)  # [B, K]
    spread, returns = (
        x.gather(1, turn.clamp(min=0)) for x in (advantages, advantages + V)
    )  # [B, R]
    return verl_F.masked_whiten(spread, response_mask) * response_mask, returns * response_mask


def pairs(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[str],
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
) -> tuple[Tensor, Tensor]:
    """Online DPO (Guo et al. 2024, arXiv:2402.04792) on the best answer of each group against its worst; the first of
    equals; none where all are worth the same. For the loss templates/losses.py:dpo.

    DPO's loss for a chosen answer w and a rejected one l (Rafailov et al. 2023, arXiv:2305.18290, equation 7) is
    -log sigmoid(m), m = BETA * [log pi(w)/ref(w) - log pi(l)/ref(l)], whose gradient is

        -BETA * sigmoid(-m) * [grad log pi(w) - grad log pi(l)]

    So the weight BETA * sigmoid(-m), with its sign, is an advantage, and -advantage * log pi, summed over an answer's
    tokens, has this gradient. A pair may then fall into different micro-batches, or onto different GPUs. Scaled by
    B / pairs, so that the mean over B answers is the mean over pairs. Exact for one optimiser step per batch, as in the
    paper; m is that of the sampler's weights.
    """
    rewards = token_level_rewards.sum(dim=1)  # [B]
    log_ratio = ((old_log_probs - ref_log_prob) * response_mask).sum(dim=1)  # [B]
    weights = torch.zeros(len(rewards))  # [B]
    for group in dict.fromkeys(index):
        members = [i for i, name in enumerate(index) if name == group]
        best, worst = max(members, key=lambda i: rewards[i]), min(members, key=lambda i: rewards[i])
        if rewards[best] > rewards[worst]:
            weight = BETA * torch.sigmoid(-BETA * (log_ratio[best] - log_ratio[worst]))
            weights[best], weights[worst] = weight, -weight
    found = int((weights > 0).sum())
    advantages = weights[:, None] * response_mask * (len(rewards) / max(found, 1))  # [B, R]
    return advantages, advantages


def spin(
    response_mask: Tensor,
    turn: Tensor,
    index: Sequence[str],
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
) -> tuple[Tensor, Tensor]:
    """SPIN (Chen et al. 2024, arXiv:2401.01335, equation 4.7): a row's own answer y against what the policy says, y'.
    The former come from templates/filters.py:with_answer, in no turn of the policy. For the loss
    templates/losses.py:dpo.

    The logistic loss log(1 + exp(-m)), m = BETA * [log pi(y)/ref(y) - log pi(y')/ref(y')], is DPO's, and becomes
    advantages as in `pairs`; the mean over all answers y' of a group, then over the groups. Groups without y, or
    without y', teach nothing.

    An iteration of the paper is a run: ref is the model that it starts from, and the next run starts from its export.
    Departs: y' is sampled from the present policy, where the paper has those of ref, sampled before the iteration.
    """
    log_ratio = ((old_log_probs - ref_log_prob) * response_mask).sum(dim=1)  # [B]
    own = turn.amax(dim=1) < 0  # [B]
    weights, found = torch.zeros(len(own), dtype=log_ratio.dtype), 0  # [B]
    for group in dict.fromkeys(index):
        mine = torch.tensor([name == group for name in index])  # [B]
        y, sampled = mine & own, mine & ~own
        if y.any() and sampled.any():
            weight = (
                BETA * torch.sigmoid(-BETA * (log_ratio[y] - log_ratio[sampled])) / sampled.sum()
            )  # [n]
            weights[y], weights[sampled], found = weight.sum(), -weight, found + 1
    advantages = weights[:, None] * response_mask * (len(own) / max(found, 1))  # [B, R]
    return advantages, advantages


def preference(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """SPPO's target (Wu et al. 2024, arXiv:2405.00675, Algorithm 1): P(y > pi) - 1/2, the fraction of its group that an
    answer y beats, itself included, less 1/2. For the loss templates/losses.py:sppo.

    Departs: no preference model is asked. The larger reward wins, and of equals each wins half of the time.
    """
    rewards, group = (
        token_level_rewards.sum(dim=1),
        np.unique(np.asarray(index), return_inverse=True)[1],
    )  # [B]
    same = torch.from_numpy(group[:, None] == group)  # [B, B]
    beats = torch.sign(rewards[:, None] - rewards) / 2 * same  # [B, B]: P(i > j) - 1/2
    advantages = (beats.sum(dim=1) / same.sum(dim=1))[:, None] * response_mask  # [B, R]
    return advantages, advantages


def distill(
    old_log_probs: Tensor, ref_log_prob: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """On-policy distillation (Lu 2025, thinkingmachines.ai/blog/on-policy-distillation): over the policy's own answers,
    a token's advantage is -(log pi - log teacher), by verl's kl_penalty; later tokens do not count (discount 0). Its
    mean over tokens, critic/advantages/mean, is minus an estimate of the reverse KL, in nats a token.

    GKD (Agarwal et al. 2023, arXiv:2306.13649, section 3) with lambda = 1 and reverse KL. Departs: estimated from the
    sampled token, where GKD sums over the vocabulary; by the policy gradient, where GKD differentiates that sum. At a
    temperature other than 1 both models' log-probs are at it.
    """
    advantages = -kl_penalty(old_log_probs, ref_log_prob, "k1") * response_mask  # type: ignore[arg-type]  # [B, R]
    return advantages, advantages
