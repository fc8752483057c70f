"""Advantages: how much better an answer, a turn or a token was than expected. A recipe names one:

    algorithm: {adv_estimator: templates/advantages.py:turn_grpo}

Copy one into a file of your own, change it, name that. It is called with what its parameters are named after
(kit/plugins.py has the list) and returns (advantages, returns), both [B, R]: B episodes, R response tokens.
turn [B, R] says which of the policy's turns a token is of, from 0; -1 is observed, or padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import verl.utils.torch_functional as verl_F
from torch import Tensor

BETA = 0.1  # of online DPO


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
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, turn: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE with a turn as one action (Schulman et al. 2016, arXiv:1506.02438, equation 16): gamma and lam count turns.

    The state of a turn is what stands before its first token, so its value is the critic's there. All tokens of a turn
    share its advantage, whitened over the batch as verl does for its own GAE, and its return.
    """
    first = (turn >= 0) & (turn != torch.nn.functional.pad(turn, (1, 0), value=-1)[:, :-1])  # [B, R]
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
    spread, returns = (x.gather(1, turn.clamp(min=0)) for x in (advantages, advantages + V))  # [B, R]
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
