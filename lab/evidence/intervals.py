"""Intervals and tests for scores of training runs: seeds and held-out rows are both samples.

A score is a mean over the rows of a test set and over the runs of a variant. Two runs with other
seeds differ, and so would two test sets. An interval over rows alone is too short by the seeds, and
one over the means of the seeds alone would need many seeds. So the variance of a difference is the
sum of two parts, as in an analysis of variance with two crossed random effects (Searle et al. 1992,
chapter 5): one from the means of the seeds, one from the means of the rows. The degrees of freedom
are Satterthwaite's (1946). tests/lab/evidence/test_intervals.py checks by simulation that
intervals of 0.95 cover 0.93 to 0.97 at 3, 5 and 10 seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kit.data.metrics import compute_wilson_interval

Scores = NDArray[np.float64]  # [runs, rows]: the mean score of a run on a row
LEVEL = 0.95
POWER = 0.8  # for needed_seeds
MAX_SEEDS = 1000
ROUNDING = 1e-9  # of sums of scores, relative


Parts = list[tuple[float, float]]  # (variance, degrees of freedom) of each source of an estimate


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The difference of the mean scores of two variants.

    interval, p_value: None if a variant has one run. Then nothing can be said about other seeds.
    If all scores are between 0 and 1, the intervals are between -1 and 1. p_value is None, too, if
    no score varies.
    over_rows: the interval of these very runs on other rows of the same kind.
    seed_variance: of a run's score by its seed. row_variance: of the difference by its rows.
    """

    interval: Interval | None
    p_value: float | None
    over_rows: Interval
    seed_variance: float
    row_variance: float
    rows: int


def split_variance(scores: Scores) -> tuple[float, float]:
    """Return the variance of the mean of [runs, rows] scores by runs, and that of single scores.

    The latter is in the variance of runs and of rows. Needs two runs and two rows.
    """
    runs, rows = scores.shape
    by_run = scores.mean(axis=1)
    residuals = scores - by_run[:, None] - scores.mean(axis=0)[None, :] + scores.mean()
    mean_square = float((residuals**2).sum()) / ((runs - 1) * (rows - 1))
    return compute_variance(by_run) / runs, mean_square / (runs * rows)


def compute_t(parts: Parts) -> tuple[float, float, float]:
    """Return the standard error, its degrees of freedom, and the quantile of the t interval."""
    variance = sum(part for part, _ in parts)
    squares = sum(part**2 / df for part, df in parts)
    df = variance**2 / squares if squares > 0 else math.inf
    return math.sqrt(variance), df, float(stats.t.ppf((1 + LEVEL) / 2, df))


def compute_interval(estimate: float, parts: Parts, are_fractions: bool) -> Interval:
    """Compute the t interval of a difference. That of fractions is between -1 and 1."""
    error, _, quantile = compute_t(parts)
    limit = 1.0 if are_fractions else math.inf
    low = max(estimate - error * quantile, -limit)
    return Interval(estimate, low, min(estimate + error * quantile, limit))


def compare_scores(some: Scores, others: Scores) -> Difference:
    """Compare two variants on the same rows: some minus others.

    some, others: [runs, rows], with the same rows in the same order, at least two.
    """
    rows = some.shape[1]
    estimate = float(some.mean() - others.mean())
    by_row = some.mean(axis=0) - others.mean(axis=0)
    row_variance = compute_variance(by_row) / rows
    are_fractions = is_fraction(some) and is_fraction(others)
    over_rows = compute_interval(estimate, [(row_variance, rows - 1)], are_fractions)
    if are_fractions and row_variance == 0:
        over_rows = widen(estimate, rows)
    if min(len(some), len(others)) < 2:
        return Difference(None, None, over_rows, 0.0, row_variance, rows)
    some_seeds, some_residual = split_variance(some)
    other_seeds, other_residual = split_variance(others)
    pure_row_variance = max(row_variance - some_residual - other_residual, 0.0)
    if some_seeds + other_seeds + pure_row_variance <= ROUNDING * row_variance:
        pure_row_variance = row_variance  # too few scores to split it
    if some_seeds + other_seeds + pure_row_variance == 0:
        return Difference(over_rows, None, over_rows, 0.0, 0.0, rows)
    parts = [
        (some_seeds, len(some) - 1),
        (other_seeds, len(others) - 1),
        (pure_row_variance, rows - 1),
    ]
    error, df, _ = compute_t(parts)
    return Difference(
        interval=compute_interval(estimate, parts, are_fractions),
        p_value=float(2 * stats.t.sf(abs(estimate) / error, df)),
        over_rows=over_rows,
        seed_variance=(len(some) * some_seeds + len(others) * other_seeds) / 2,
        row_variance=pure_row_variance,
        rows=rows,
    )


def widen(estimate: float, rows: int) -> Interval:
    """Return the interval of a difference that is equal on all rows: on others, it may not be.

    Its margin is Wilson's upper limit (1927) of the share of rows that differ, of which there was
    none.
    """
    _, margin = compute_wilson_interval(0.0, 0.0, rows, float(stats.norm.ppf((1 + LEVEL) / 2)))
    return Interval(estimate, max(estimate - margin, -1.0), min(estimate + margin, 1.0))


def compute_variance(values: NDArray[np.float64], ddof: int = 1) -> float:
    """Compute the variance, 0 if it comes from rounding alone."""
    variance = float(values.var(ddof=ddof))
    rounding = 1e-10 * max(1.0, float(np.abs(values).max()))
    return variance if math.sqrt(variance) > rounding else 0.0


def is_fraction(scores: Scores) -> bool:
    """Return whether all scores are between 0 and 1, as those of most verifiers are."""
    return bool(scores.min() >= 0 and scores.max() <= 1)


def find_needed_seeds(difference: Difference) -> int | None:
    """Return the seeds of each variant that find such a difference with a chance of POWER.

    More seeds do not change the part of the rows. None if MAX_SEEDS are not enough.
    """
    seeds = np.arange(2, MAX_SEEDS + 1)
    of_seeds = 2 * difference.seed_variance / seeds
    variance = of_seeds + difference.row_variance
    estimate = abs(difference.over_rows.estimate)
    if variance[0] == 0:
        return 2 if estimate else None
    parts = of_seeds**2 / (2 * (seeds - 1)) + difference.row_variance**2 / (difference.rows - 1)
    df = variance**2 / parts
    critical = stats.t.ppf((1 + LEVEL) / 2, df)
    chances = stats.nct.sf(critical, df, estimate / np.sqrt(variance))
    enough = np.flatnonzero(chances >= POWER)
    return int(seeds[enough[0]]) if len(enough) else None


def compute_mean_interval(scores: Scores) -> Interval:
    """Return the interval of the mean of [runs, rows] scores, over the rows, and over the runs.

    If all scores are between 0 and 1, so is the interval: it is Wilson's (1927), with the number of
    rows that has the same variance. So it has a width even where all scores are equal.
    """
    runs, rows = scores.shape
    estimate = float(scores.mean())
    row_variance = compute_variance(scores.mean(axis=0), ddof=0) / rows
    parts = [(row_variance, math.inf)]
    if runs > 1 and rows > 1:
        seeds, residual = split_variance(scores)
        parts = [(seeds, runs - 1), (max(row_variance - residual, 0.0), rows - 1)]
    error, _, quantile = compute_t(parts)
    if not is_fraction(scores):
        return Interval(estimate, estimate - error * quantile, estimate + error * quantile)
    return Interval(estimate, *compute_wilson_interval(estimate, error**2, rows, quantile))
