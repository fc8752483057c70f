# my_functions.py
import torch
from verl.trainer.ppo.core_algos import agg_loss


def brief(episode, free=16, per_token=0.01):
    """env.reward: a right response loses `per_token` for each token after the first `free`."""
    if episode.reward <= 0:
        return episode.reward
    extra_tokens = max(len(episode.response_ids) - free, 0)
    return episode.reward - per_token * extra_tokens


def learnable(episodes, low=0.05, high=0.95):
    """env.filters: keep groups whose mean reward is neither near 0 nor near 1."""
    groups = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    kept = []
    for group in groups.values():
        mean = sum(episode.reward for episode in group) / len(group)
        if low <= mean <= high:
            kept += group
    return kept


def ranks(token_level_rewards, response_mask, index):
    """algorithm.adv_estimator: -1 for the worst response of a group, 1 for the best."""
    scores = token_level_rewards.sum(dim=1)  # [B]
    same_group = torch.tensor(index[:, None] == index)  # [B, B]
    comparison = torch.sign(scores[:, None] - scores)  # [B, B]: 1 if the row beats the column
    wins_minus_losses = (same_group * comparison).sum(dim=1)  # [B]
    others = (same_group.sum(dim=1) - 1).clamp(min=1)  # [B]
    advantages = (wins_minus_losses / others)[:, None] * response_mask  # [B, R]
    return advantages, advantages


def quadratic(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode,
    config,
    rollout_is_weights=None,
):
    """loss_mode: the policy gradient with a quadratic penalty instead of PPO's clipping."""
    log_ratio = log_prob - old_log_prob  # [B, R]
    losses = -advantages * torch.exp(log_ratio) + 0.05 * log_ratio.square()  # [B, R]
    if rollout_is_weights is not None:  # of algorithm.rollout_correction
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
