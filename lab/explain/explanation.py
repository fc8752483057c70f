"""Measure a step: which groups it came from, how noisy it is, and which episode broke it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from env import Json
from kit.data.episode import Episode

NAMES = {"behavior": "recorded log-probs", "log_probs": "log-probs"}


class Gradient(NamedTuple):
    """A gradient g, and G, the gradient of the whole batch."""

    norm: float  # |g|
    dot: float  # <g, G>; NaN before G is known

    @property
    def is_finite(self) -> bool:
        """Whether no number of the gradient is NaN or infinite."""
        return math.isfinite(self.norm)

    def cosine(self, batch_norm: float) -> float | None:
        """Return the cosine with G, None if one of them is 0."""
        if not self.norm or not batch_norm:
            return None
        return max(-1.0, min(1.0, self.dot / (self.norm * batch_norm)))

    def share(self, batch_norm: float) -> float:
        """Return <g, G> / |G|^2. The shares of all parts have the sum 1; a part may oppose G."""
        return self.dot / batch_norm**2 if batch_norm else 0.0


@dataclasses.dataclass
class Explanation:
    """What a step did: the content of explain_<N>.json. reason: why it cannot be used, if so."""

    step: int
    checkpoint: str  # the weights that the step started from
    reason: str = ""
    gradient_norm: float = math.nan
    signal_to_noise: float | None = None
    importance: Json = dataclasses.field(default_factory=dict)
    groups: list[Json] = dataclasses.field(default_factory=list)
    blame: list[Json] = dataclasses.field(default_factory=list)


# --- the gradient --------------------------------------------------------------------------------


def measure_signal(norms: Sequence[float], batch_norm: float) -> float | None:
    """Return |G| / the standard error of G, the sum of n group gradients g_i; None if unknown.

    n g_i is an estimate of G from one group. With S = sum |n g_i - G|^2 / (n - 1), the trace of
    their covariance, the standard error of G is sqrt(S / n). Source: McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1.
    """
    n = len(norms)
    if n < 2:
        return None
    squares = math.fsum(norm**2 for norm in norms)
    trace = (n**2 * squares - n * batch_norm**2) / (n - 1)
    return batch_norm / math.sqrt(trace / n) if trace > 0 else None


# --- episodes ------------------------------------------------------------------------------------


def list_bad_numbers(row: int, episode: Episode, tensors: Mapping[str, Tensor]) -> list[str]:
    """List what is NaN or infinite in an episode, besides the advantages: these are its group's.

    tensors: mask, and those of NAMES.
    """
    reasons = []
    reward = episode.trained_reward
    if reward is None or not math.isfinite(reward):
        reasons.append(f"its reward is {reward}")
    mask = tensors["mask"][row].bool()
    for key in NAMES:
        count = int((~tensors[key][row][mask].isfinite()).sum())
        if count:
            reasons.append(f"{count} of its {NAMES[key]} are NaN or infinite")
    return reasons
