"""Importance weights: how far a policy is from the one that sampled the episodes.

Protects: a replay, from training on episodes that another policy sampled without saying so.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PolicyShift(NamedTuple):
    """The distance of a policy pi from the behavior policy mu, on episodes that mu sampled."""

    kl: float  # nats per token: the k3 estimate of KL(mu || pi), mean of pi/mu - 1 - log(pi/mu)
    log_ratio_max: float  # the largest |log(pi/mu)| of a token
    ess: float  # effective sample size of the episodes, as a fraction of them
    token_ess: float  # of the tokens, as a fraction of them


def effective_sample_size(log_weights: Tensor) -> float:
    """Return Kish's effective sample size of n weights as a fraction: (sum w)^2 / (n sum w^2).

    It is 1 if all weights are equal, and 1/n if one weight has the whole sum. log_weights: [n], in
    logarithms, since the ratio of a long response overflows. Without a finite largest weight, the
    result is 0. Source: Kish 1965, Survey Sampling, section 11.7.
    """
    logs = log_weights.double()
    if not len(logs) or not bool(logs.max().isfinite()):  # the maximum with NaN is NaN
        return 0.0
    logs = logs - logs.max()  # the result does not depend on the scale of the weights
    share = 2 * logs.logsumexp(0) - (2 * logs).logsumexp(0)
    return float(share.exp()) / len(logs)


def measure_shift(log_probs: Tensor, behavior: Tensor, is_sampled: Tensor) -> PolicyShift:
    """Measure how far `log_probs` [B, R] are from those of the policy that sampled, `behavior`.

    is_sampled: bool [B, R], the tokens that count. The weight of an episode is the product of the
    ratios of its tokens, without clipping. Episodes without such a token do not count.
    """
    log_ratio = (log_probs - behavior).double().masked_fill(~is_sampled, 0.0)  # [B, R]
    tokens = log_ratio[is_sampled]  # [tokens]
    if not len(tokens):
        return PolicyShift(0.0, 0.0, 1.0, 1.0)
    is_episode = is_sampled.any(dim=1)  # [B]
    return PolicyShift(
        kl=float((tokens.exp() - 1 - tokens).mean()),
        log_ratio_max=float(tokens.abs().max()),
        ess=effective_sample_size(log_ratio.sum(dim=1)[is_episode]),
        token_ess=effective_sample_size(tokens),
    )
