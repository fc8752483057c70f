"""Losses: what an optimiser step minimises. A recipe names one:

    actor_rollout_ref: {actor: {policy_loss: {loss_mode: "templates/losses.py:dpo"}, loss_agg_mode: seq-mean-token-sum}}

Copy one into a file of your own, change it, name that. It is called as verl calls its own (PolicyLossFn), in the
workers, to which it travels by value. Tensors are [B, R]: B episodes of a micro-batch, R response tokens.
`config.global_batch_info` is what agg_loss needs, so that a mean is one over the whole mini-batch, on all GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss

from kit.errors import PluginError

ETA = 1.0  # of SPPO


def dpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Online DPO: the mean over answers of -advantage * log pi, summed over an answer's tokens.

    With the advantages of templates/advantages.py:pairs, which has the derivation, its gradient is that of DPO's loss
    (Rafailov et al. 2023, arXiv:2305.18290, equation 7); with those of `spin` it is SPIN's. Needs
    loss_agg_mode=seq-mean-token-sum.
    """
    if loss_agg_mode != "seq-mean-token-sum":
        why = "templates/losses.py:dpo sums over an answer's tokens; set it to seq-mean-token-sum"
        raise PluginError(f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}: {why}")
    losses = -advantages * log_prob  # [B, R]
    if rollout_is_weights is not None:  # algorithm.rollout_correction
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def sppo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, Algorithm 1): the mean over answers y of

        (log pi(y)/pi_t(y) - ETA * (P(y > pi_t) - 1/2))^2

    with P - 1/2 from templates/advantages.py:preference; pi_t is the policy that sampled the batch. In a batch's first
    optimiser step this is a policy gradient: more of them (actor.ppo_epochs) make it a regression. Needs
    loss_agg_mode=seq-mean-token-mean.

    Departs: an iteration is a batch, not a data set, so ETA is 1 where the paper's is 1,000; all answers of a group are
    learned, where its experiments take the best and the worst of five.
    """
    if loss_agg_mode != "seq-mean-token-mean":
        why = "templates/losses.py:sppo has one loss for an answer; set it to seq-mean-token-mean"
        raise PluginError(f"actor_rollout_ref.actor.loss_agg_mode={loss_agg_mode}: {why}")
    log_ratio = ((log_prob - old_log_prob) * response_mask).sum(dim=1)  # [B]
    target = (
        ETA * (advantages * response_mask).sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)
    )  # [B]
    losses = (
        (log_ratio - target).square()[:, None].expand_as(log_prob)
    )  # [B, R]: each token's is its answer's
    if rollout_is_weights is not None:  # algorithm.rollout_correction
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
