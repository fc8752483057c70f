"""Losses: what an optimizer step minimizes.

    actor_rollout_ref: {actor: {policy_loss: {loss_mode: "templates/losses.py:dpo"}}}

To use your own: copy a function to your file, change it, and name it in the recipe. The workers
call it with the arguments of verl's own losses (LossInputs in kit/recipe/user_functions.py). Ray
sends them its code, pickled by value. Tensors are [B, R]: B episodes of a micro-batch, R response
tokens. Pass `config.global_batch_info` to agg_loss. Then a mean is over the whole mini-batch, on
all GPUs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.config import ActorConfig

from kit.errors import UserFunctionError

ETA = 1.0  # of SPPO


def dpo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Online DPO: the mean over responses of the sum over tokens of -advantage * log pi.

    Use it with the advantages of templates/advantages.py:pairs, which has the derivation. Then its
    gradient is that of DPO's loss (Rafailov et al. 2023, arXiv:2305.18290, equation 7). With the
    advantages of `spin` it is SPIN's. Needs loss_agg_mode=seq-mean-token-sum.
    """
    check_agg_mode("dpo", loss_agg_mode, "seq-mean-token-sum")
    losses = -advantages * log_prob  # [B, R]
    if rollout_is_weights is not None:  # of algorithm.rollout_correction
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def sppo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, Algorithm 1): the mean over responses y of

        (log pi(y)/pi_t(y) - ETA * (P(y > pi_t) - 1/2))^2

    pi_t is the policy that sampled the batch. P - 1/2 is the advantage of
    templates/advantages.py:preference. The first optimizer step of a batch is a policy gradient.
    With more steps per batch (actor.ppo_epochs), the loss is a regression. Needs
    loss_agg_mode=seq-mean-token-mean.

    Departures from the paper: an iteration is a batch, not a data set, so ETA is 1 instead of
    1,000. All responses of a group are used. The paper's experiments use the best and the worst of
    five.
    """
    check_agg_mode("sppo", loss_agg_mode, "seq-mean-token-mean")
    log_ratio = ((log_prob - old_log_prob) * response_mask).sum(dim=1)  # [B]
    token_count = response_mask.sum(dim=1).clamp(min=1)  # [B]
    target = ETA * (advantages * response_mask).sum(dim=1) / token_count  # [B]
    response_losses = (log_ratio - target).square()  # [B]
    losses = response_losses[:, None].expand_as(log_prob)  # [B, R]
    if rollout_is_weights is not None:  # of algorithm.rollout_correction
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def check_agg_mode(loss: str, mode: str, required: str) -> None:
    """Check loss_agg_mode, since these losses are defined per response.

    Raises UserFunctionError.
    """
    if mode != required:
        raise UserFunctionError(
            f"templates/losses.py:{loss} needs actor_rollout_ref.actor.loss_agg_mode={required}, "
            f"not {mode}. Change it."
        )
