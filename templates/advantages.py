"""Advantages: how much better a response, a turn or a token is than expected.

    algorithm: {adv_estimator: templates/advantages.py:turn_grpo}

To use your own: copy a function to your file, change it, and name it in the recipe. Choose its
parameters by name from AdvantageInputs in kit/recipe/user_functions.py. It returns (advantages,
returns), both [B, R].

Shapes: B episodes, R response tokens, K turns. turn [B, R] is the number of the policy's turn that
a token is in, from 0. It is -1 for observed tokens and padding. index [B] names the group of each
episode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import verl.utils.torch_functional as verl_F
from torch import Tensor
from verl.trainer.ppo.core_algos import kl_penalty

BETA = 0.1  # of online DPO; lambda of SPIN
ROUNDING = 3e-7  # relative error of a sum of float32 rewards


# --- turns ----------------------------------------------------------------------------------------


def turn_grpo(
    token_level_rewards: Tensor, response_mask: Tensor, turn: Tensor, index: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """GRPO with a reward per step (Shao et al. 2024, arXiv:2402.03300, section 4.1.3).

    The paper calls it process supervision. The rewards of all turns of a group are normalized
    together. The advantage of a turn is the sum of the normalized rewards from this turn to the
    last.

    Rewards per turn come from Gym servers of the kind `step`. With a server that only verifies, the
    last turn has the reward of the episode.
    """
    rewards = sum_by_turn(token_level_rewards, turn)  # [B, K]
    is_turn = find_turns(turn)  # [B, K]
    normalized = torch.zeros_like(rewards)  # [B, K]
    for group in dict.fromkeys(index):
        in_group = is_turn & find_members(index, group)[:, None]  # [B, K]
        group_rewards = rewards[in_group]
        # one turn, or turns with equal rewards, have nothing to be compared with
        if differ(group_rewards):
            centered = group_rewards - group_rewards.mean()
            normalized[in_group] = centered / (group_rewards.std() + 1e-6)
    sums = normalized.flip(1).cumsum(dim=1).flip(1)  # [B, K]: from each turn to the last
    advantages = spread_over_tokens(sums, turn) * response_mask  # [B, R]
    return advantages, advantages


def turn_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """GAE with a turn as one action (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    gamma and lam count turns. The state of a turn is everything before its first token, so its
    value is the critic's value there. All tokens of a turn have its advantage and its return.
    Advantages are whitened over the batch, as verl does for its own GAE.
    """
    previous_turn = torch.nn.functional.pad(turn, (1, 0), value=-1)[:, :-1]  # [B, R]
    is_first_token = (turn >= 0) & (turn != previous_turn)  # [B, R]
    turn_values = sum_by_turn(values * is_first_token, turn)  # [B, K]
    rewards = sum_by_turn(token_level_rewards, turn)  # [B, K]
    is_turn = find_turns(turn)  # [B, K]

    next_value = torch.zeros(len(turn_values))  # [B]
    next_advantage = torch.zeros(len(turn_values))  # [B]
    reversed_advantages = []
    for k in reversed(range(turn_values.shape[1])):
        delta = rewards[:, k] + gamma * next_value - turn_values[:, k]  # [B]
        advantage = (delta + gamma * lam * next_advantage) * is_turn[:, k]  # [B]
        reversed_advantages.append(advantage)
        next_value = turn_values[:, k] * is_turn[:, k]
        next_advantage = advantage
    turn_advantages = torch.stack(reversed_advantages[::-1], dim=1)  # [B, K]

    advantages = spread_over_tokens(turn_advantages, turn)  # [B, R]
    returns = spread_over_tokens(turn_advantages + turn_values, turn)  # [B, R]
    whitened = verl_F.masked_whiten(advantages, response_mask)
    return whitened * response_mask, returns * response_mask


def differ(rewards: Tensor) -> bool:
    """Return whether there are two rewards or more, which differ by more than rounding errors."""
    if len(rewards) < 2:
        return False
    return bool(rewards.max() - rewards.min() > ROUNDING * rewards.abs().max())


def sum_by_turn(values: Tensor, turn: Tensor) -> Tensor:
    """Sum values [B, R] over each turn: [B, K]. Observed tokens count for the turn before them.

    K is the largest number of turns in the batch.
    """
    K = int(turn.max()) + 1
    owner = torch.cummax(turn, dim=1).values.clamp(min=0)  # [B, R]
    return torch.zeros(len(values), K, dtype=values.dtype).scatter_add(1, owner, values)  # [B, K]


def find_turns(turn: Tensor) -> Tensor:
    """Find which of the K turns each episode has: bool [B, K]."""
    K = int(turn.max()) + 1
    return torch.arange(K) <= turn.amax(dim=1, keepdim=True)  # [B, K]


def find_members(index: Sequence[str], group: str) -> Tensor:
    """Find the episodes of a group: bool [B]."""
    return torch.tensor([name == group for name in index])


def spread_over_tokens(turn_values: Tensor, turn: Tensor) -> Tensor:
    """Give each token [B, R] the value of its turn [B, K]. The caller masks other tokens."""
    return turn_values.gather(1, turn.clamp(min=0))


# --- preferences ----------------------------------------------------------------------------------


def pairs(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[str],
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
) -> tuple[Tensor, Tensor]:
    """Online DPO (Guo et al. 2024, arXiv:2402.04792) on the best and the worst response of a group.

    If several responses are the best or the worst, the first one counts. If all responses of a
    group have the same reward, it has no pair. Use it with the loss templates/losses.py:dpo.

    DPO's loss for a chosen response w and a rejected one l (Rafailov et al. 2023,
    arXiv:2305.18290, equation 7) is -log sigmoid(m), with
    m = BETA * [log pi(w)/ref(w) - log pi(l)/ref(l)]. Its gradient is

        -BETA * sigmoid(-m) * [grad log pi(w) - grad log pi(l)]

    So the advantage is BETA * sigmoid(-m) for w, and minus that for l. The sum of
    -advantage * log pi over the tokens of both has this gradient. The responses of a pair may
    then be in different micro-batches, or on different GPUs. The factor B / pairs turns the mean
    over B responses into the mean over pairs. m uses the weights that sampled the batch. So this
    is exact for one optimizer step per batch, as in the paper.
    """
    rewards = token_level_rewards.sum(dim=1)  # [B]
    sizes = token_level_rewards.abs().sum(dim=1)  # [B]
    log_ratios = ((old_log_probs - ref_log_prob) * response_mask).sum(dim=1)  # [B]
    weights = torch.zeros(len(rewards))  # [B]
    for group in dict.fromkeys(index):
        members = [i for i, name in enumerate(index) if name == group]
        best = max(members, key=lambda i: rewards[i])
        worst = min(members, key=lambda i: rewards[i])
        if rewards[best] - rewards[worst] > ROUNDING * sizes[members].max():
            margin = BETA * (log_ratios[best] - log_ratios[worst])
            weight = BETA * torch.sigmoid(-margin)
            weights[best] = weight
            weights[worst] = -weight
    pair_count = int((weights > 0).sum())
    advantages = weights[:, None] * response_mask * (len(rewards) / max(pair_count, 1))  # [B, R]
    return advantages, advantages


def spin(
    response_mask: Tensor,
    turn: Tensor,
    index: Sequence[str],
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
) -> tuple[Tensor, Tensor]:
    """SPIN (Chen et al. 2024, arXiv:2401.01335, equation 4.7): the row's answer y against samples.

    templates/filters.py:with_answer adds y as an episode without turns. Use it with the loss
    templates/losses.py:dpo.

    The logistic loss log(1 + exp(-m)), with m = BETA * [log pi(y)/ref(y) - log pi(y')/ref(y')] for
    a sample y', is DPO's loss. It becomes advantages as in `pairs`. The mean is over all samples of
    a group, then over the groups. A group without y, or without samples, has no advantage.

    An iteration of the paper is a run. ref is the model that the run starts from. The next run
    starts from the export of this one. Departure from the paper: the samples are of the current
    policy. In the paper, ref generates them before the iteration.
    """
    log_ratios = ((old_log_probs - ref_log_prob) * response_mask).sum(dim=1)  # [B]
    is_answer = turn.amax(dim=1) < 0  # [B]
    weights = torch.zeros(len(is_answer), dtype=log_ratios.dtype)  # [B]
    group_count = 0
    for group in dict.fromkeys(index):
        members = find_members(index, group)  # [B]
        answer = members & is_answer  # [B]
        samples = members & ~is_answer  # [B]
        if answer.any() and samples.any():
            margins = BETA * (log_ratios[answer] - log_ratios[samples])  # [samples]
            sample_weights = BETA * torch.sigmoid(-margins) / samples.sum()  # [samples]
            weights[answer] = sample_weights.sum()
            weights[samples] = -sample_weights
            group_count += 1
    advantages = weights[:, None] * response_mask * (len(weights) / max(group_count, 1))  # [B, R]
    return advantages, advantages


def preference(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """SPPO's target P(y > pi) - 1/2 (Wu et al. 2024, arXiv:2405.00675, Algorithm 1).

    P(y > pi) is the fraction of wins of a response y against each response of its group. The group
    includes y itself. Use it with the loss templates/losses.py:sppo.

    Departure from the paper: there is no preference model. The larger reward wins. If two rewards
    are equal, each has half a win.
    """
    rewards = token_level_rewards.sum(dim=1)  # [B]
    _, group_numbers = np.unique(np.asarray(index), return_inverse=True)  # [B]
    in_same_group = torch.from_numpy(group_numbers[:, None] == group_numbers)  # [B, B]
    differences = rewards[:, None] - rewards  # [B, B]
    sizes = token_level_rewards.abs().sum(dim=1)  # [B]
    errors = ROUNDING * torch.maximum(sizes[:, None], sizes)  # [B, B]
    is_compared = in_same_group & (differences.abs() > errors)  # [B, B]
    wins = torch.sign(differences) / 2 * is_compared  # [B, B]: P(i > j) - 1/2
    targets = wins.sum(dim=1) / in_same_group.sum(dim=1)  # [B]
    advantages = targets[:, None] * response_mask  # [B, R]
    return advantages, advantages


# --- distillation ---------------------------------------------------------------------------------


def distill(
    old_log_probs: Tensor, ref_log_prob: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """On-policy distillation (Lu 2025, thinkingmachines.ai/blog/on-policy-distillation).

    The advantage of a token is -(log pi - log teacher), by verl's kl_penalty. Later tokens do not
    count (discount 0). The mean over tokens, critic/advantages/mean, is minus an estimate of the
    reverse KL in nats per token.

    This is GKD (Agarwal et al. 2023, arXiv:2306.13649, section 3) with lambda = 1 and reverse KL.
    Departures from the paper: the KL is estimated from the sampled token, and trained by the policy
    gradient. GKD sums over the vocabulary, and differentiates that sum. At a temperature other than
    1, the log-probs of both models are at that temperature.
    """
    kl = kl_penalty(old_log_probs, ref_log_prob, "k1")  # type: ignore[arg-type]  # [B, R]
    advantages = -kl * response_mask  # [B, R]
    return advantages, advantages
