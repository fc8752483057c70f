"""Warn if the difference between rollout engine and trainer grows over the steps of a run.

Both compute the probabilities of the same tokens with the same weights. So the difference is noise
of rounding, which stays at one level. If it grows, some weights no longer reach the engine, or the
two compute differently what training changes. That is visible long before a step is skipped for it
(MAX_PROBS_DIFF in finite_check.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kit.config.neutral_sampling import requires_same_probs
from kit.config.recipe import Recipe
from kit.data.json_lines import read_metrics

METRIC = "training/rollout_probs_diff_mean"
WINDOW = 5  # steps: medians of so many do not follow single steps
# Noise of +-50% changes a median by less than a factor of 3.
FACTOR = 3.0
# Smaller differences are rounding in bf16: 0.002 on GPUs. It depends on how certain the policy is.
FLOOR = 0.005


class Drift(NamedTuple):
    """Medians of the difference over the first and the last WINDOW steps."""

    first: float
    last: float


def find_drift(values: Sequence[float]) -> Drift | None:
    """Return how far the difference grew, if it grew clearly. values: one for each step."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * WINDOW:
        return None
    drift = Drift(median(finite[:WINDOW]), median(finite[-WINDOW:]))
    return drift if drift.last > max(FACTOR * drift.first, FLOOR) else None


class DriftWatch:
    """Reads the metrics of each step of a run, and warns once. say: prints a line."""

    def __init__(self, recipe: Recipe, folder: Path, say: Callable[[str], None]):
        self.is_active = requires_same_probs(recipe)
        self.metrics_file = folder / "metrics.jsonl"
        self.say = say
        self.values: dict[int, float] = {}  # {step: difference}

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read the metrics of a step. A resumed run continues with those of the steps before."""
        if not self.is_active or METRIC not in metrics:
            return
        if not self.values:
            for line in read_metrics(self.metrics_file):
                if line.get(METRIC) is not None:
                    self.values[line["step"]] = line[METRIC]
        self.values[step] = metrics[METRIC]
        drift = find_drift([self.values[number] for number in sorted(self.values)])
        if drift:
            self.is_active = False
            self.say(
                f"WARNING     {METRIC} grew from {drift.first:.2g} to {drift.last:.2g} (median of "
                f"{WINDOW} steps): rollout engine and trainer compute ever more different numbers. "
                'See docs/guides/diagnosis.md, "7. Rollout engine against trainer".'
            )
