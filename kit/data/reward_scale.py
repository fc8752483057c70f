"""The scale of rewards: whether a reward is full, and whether rewards are equal.

A verifier may pay 0 and 1, -1 and 0, or up to 100, and 0.7 + 0.2 + 0.1 is 0.9999999999999999. So
no other module compares a reward with a number. The scale of a verifier is what it pays for the
ground truth and for a wrong answer in the same form, before the run (kit/run/verifier_trial.py).
Each episode has it, also in the rollouts files.

Protects: rewards, from comparisons with a fixed number and from rounding errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

TOLERANCE = 1e-6  # of the spread of a verifier's rewards: rounding errors are smaller
LEAST_TOLERANCE = 1e-12  # the same for rewards near 0, such as 0.1 + 0.2 - 0.3
DOUBLE = float(np.finfo(np.float64).eps)


class RewardScale(NamedTuple):
    """What a verifier pays for a wrong answer, and for a right one."""

    nothing: float = 0.0
    full: float = 1.0

    @property
    def tells_apart(self) -> bool:
        """Return whether a right answer earns more than a wrong one."""
        return self.full > self.nothing and not are_equal(self)

    @property
    def spread(self) -> float:
        """Return the difference between a right and a wrong answer."""
        return self.full - self.nothing

    def is_full(self, reward: float) -> bool:
        """Return whether a reward is the full one, or more."""
        return reward >= self.full - TOLERANCE * self.spread - DOUBLE * abs(self.full)

    def share(self, reward: float) -> float:
        """Return the share of the full reward: 0 for a wrong answer, below 0 for a penalty."""
        return (reward - self.nothing) / self.spread


UNKNOWN = RewardScale()  # of a verifier that was not tried, or that pays nothing for the truth
Scales = dict[tuple[str, str], RewardScale]  # by verifier and data_source


def find_scale(scales: Scales, server: str, source: object) -> RewardScale:
    """Return the scale of a row's verifier. If its data_source was not tried, another one's."""
    same_server = [scale for (name, _), scale in scales.items() if name == server]
    return scales.get((server, str(source)), same_server[0] if same_server else UNKNOWN)


def are_equal(rewards: ArrayLike, spread: float = 1.0) -> bool:
    """Return whether rewards differ at most by rounding errors. spread: of their scale."""
    values = np.asarray(rewards)
    precision = np.finfo(values.dtype).eps if values.dtype.kind == "f" else DOUBLE
    tolerance = compute_tolerance(np.abs(values).max(), spread, float(precision))
    return bool(np.ptp(values) <= tolerance)


def compute_tolerance(size: float, spread: float = 1.0, precision: float = DOUBLE) -> float:
    """Return the largest difference of two rewards that is a rounding error.

    It is relative to the spread of their scale, or to the rewards if these are smaller. Of rewards
    such as 123456.01 and 123456.02, only the precision of their type counts.

    size: of the rewards, or of the parts whose sums they are.
    """
    return TOLERANCE * min(spread, size) + LEAST_TOLERANCE * spread + precision * size
