"""A loss of one's own: online DPO (Guo et al. 2024, arXiv:2402.04792), on pairs out of each group.

    python algorithm.py --config configs/math_cpu.yaml --config configs/online_dpo.yaml --config configs/cpu.yaml

DPO's loss for a chosen answer w and a rejected one l (Rafailov et al. 2023, arXiv:2305.18290, equation 7) is
-log sigmoid(m), m = BETA * [log pi(w)/ref(w) - log pi(l)/ref(l)], whose gradient is

    -BETA * sigmoid(-m) * [grad log pi(w) - grad log pi(l)]

So the weight BETA * sigmoid(-m), with its sign, is an advantage (`pairs`), and the loss that has this gradient is
-advantage * log pi, summed over an answer's tokens (`dpo`). A pair may then fall into different micro-batches, or onto
different GPUs. Exact for one optimiser step per batch, as in the paper; m is that of the sampler's weights.
"""

import torch
from verl.trainer.ppo.core_algos import agg_loss

BETA = 0.1


def pairs(token_level_rewards, response_mask, index, old_log_probs, ref_log_prob):
    """The best answer of each group against its worst; the first of equals; none where all are worth the same.

    All tensors [B, R], index [B]. Scaled by B / pairs, so that the mean over B answers is the mean over pairs.
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


def dpo(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """Mean over answers of -advantage * log pi, summed over tokens; needs loss_agg_mode=seq-mean-token-sum."""
    if loss_agg_mode != "seq-mean-token-sum":
        raise ValueError(
            f"online DPO sums over an answer's tokens: loss_agg_mode=seq-mean-token-sum, not {loss_agg_mode}"
        )
    losses = -advantages * log_prob
    if rollout_is_weights is not None:  # algorithm.rollout_correction
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
