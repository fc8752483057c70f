"""Intervals and tests of `compare`, by simulation: coverage, false positives, power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kit.data.metrics import HIGH, LOW, compute_score_interval
from lab.evidence import intervals

ROWS = 128
SIMULATIONS = 2000


def simulate(rng, seeds, effect, seed_sd, rows=ROWS):
    """Make scores [seeds, rows] of two variants, whose odds depend on row and seed."""
    row = rng.normal(0, 1.5, rows)
    by_row = rng.normal(0, 0.3, rows)  # the effect differs from row to row
    tables = []
    for shift in (effect + by_row / 2, -by_row / 2):
        logits = row + shift + rng.normal(0, seed_sd, (seeds, 1))
        tables.append(rng.binomial(1, 1 / (1 + np.exp(-logits))).astype(float))
    return tables


def true_difference(effect, seed_sd):
    """Return the difference in the mean over all rows and seeds."""
    points = np.random.default_rng(1).normal(0, 1, (3, 1_000_000))
    some = 1.5 * points[0] + effect + 0.15 * points[1] + seed_sd * points[2]
    others = 1.5 * points[0] - 0.15 * points[1] + seed_sd * points[2]
    return float((1 / (1 + np.exp(-some)) - 1 / (1 + np.exp(-others))).mean())


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("seed_sd", [0.02, 1.0])
def test_an_interval_covers_the_difference_as_often_as_it_says(seeds, seed_sd, effect=0.6):
    rng = np.random.default_rng(0)
    truth = true_difference(effect, seed_sd)
    covered = 0
    for _ in range(SIMULATIONS):
        interval = intervals.compare_scores(*simulate(rng, seeds, effect, seed_sd)).interval
        covered += interval.low <= truth <= interval.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


@pytest.mark.parametrize(("rows", "shift"), [(10, 0.0), (64, 0.0), (ROWS, -5.0)])
def test_an_interval_covers_the_difference_with_few_rows_and_few_right_answers(rows, shift):
    """shift: of the log-odds; -5 gives 2% of right answers."""
    rng = np.random.default_rng(7)
    truth = 0.0  # no effect
    covered = 0
    for _ in range(SIMULATIONS):
        row = rng.normal(shift, 1.5, rows)
        tables = []
        for _ in range(2):
            logits = row + rng.normal(0, 0.15, rows) + rng.normal(0, 0.3, (3, 1))
            tables.append(rng.binomial(1, 1 / (1 + np.exp(-logits))).astype(float))
        interval = intervals.compare_scores(*tables).interval
        covered += interval.low <= truth <= interval.high
    assert 0.94 <= covered / SIMULATIONS <= 0.99


def test_two_small_tables_without_an_effect_are_never_certainly_different():
    """With few rows, all the variance can seem to come from single scores."""
    some = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1]])
    others = np.array([[1.0, 1, 1, 0], [1, 1, 0, 1]])
    difference = intervals.compare_scores(some, others)
    assert difference.p_value > 0.1
    assert difference.interval.low < 0 < difference.interval.high
    # here, rounding leaves 1e-18 of the variance
    some = np.array([[0.0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    others = np.array([[0.0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]])
    assert intervals.compare_scores(some, others).p_value > 0.01
    rng = np.random.default_rng(6)
    found = 0
    for _ in range(SIMULATIONS):
        p_value = intervals.compare_scores(*simulate(rng, 2, 0.0, 0.0, rows=10)).p_value
        assert p_value is None or p_value > 1e-12
        found += p_value is not None and p_value < 0.05
    assert found / SIMULATIONS <= 0.05


def test_an_interval_is_scipys_where_only_seeds_or_only_rows_differ():
    rng = np.random.default_rng(0)
    by_seed = rng.normal(0, 1, (2, 4, 1)) + np.zeros((2, 4, 9))
    interval = intervals.compare_scores(by_seed[0], by_seed[1]).interval
    welch = stats.ttest_ind(by_seed[0, :, 0], by_seed[1, :, 0], equal_var=False)
    assert (interval.low, interval.high) == pytest.approx(tuple(welch.confidence_interval(0.95)))
    by_row = rng.normal(0, 1, (2, 1, 50)) + np.zeros((2, 3, 50))
    difference = intervals.compare_scores(by_row[0], by_row[1])
    interval = difference.interval
    paired = stats.ttest_rel(by_row[0, 0], by_row[1, 0])
    assert (interval.low, interval.high) == pytest.approx(tuple(paired.confidence_interval(0.95)))
    assert difference.p_value == pytest.approx(paired.pvalue)


def test_the_needed_seeds_find_the_effect_in_four_of_five_cases():
    rng = np.random.default_rng(3)
    row_variance = 0.25 * 2 / ROWS * 0.1
    seeds = needed_seeds(0.1, 0.08**2, row_variance)
    found = 0
    for _ in range(SIMULATIONS):
        row = rng.normal(0, math.sqrt(row_variance * ROWS), ROWS)
        some = 0.1 + rng.normal(0, 0.08, (seeds, 1)) + row
        others = rng.normal(0, 0.08, (seeds, 1)) + np.zeros(ROWS)
        found += intervals.compare_scores(some, others).p_value < 0.05
    assert 0.77 <= found / SIMULATIONS <= 0.9
    assert needed_seeds(0.001, 1.0, 1.0) is None
    assert needed_seeds(0.1, 0.0, 0.0) == 2


def needed_seeds(estimate: float, seed_variance: float, row_variance: float) -> int | None:
    over_rows = intervals.Interval(estimate, 0, 0)
    difference = intervals.Difference(None, None, over_rows, seed_variance, row_variance, ROWS)
    return intervals.find_needed_seeds(difference)


@pytest.mark.parametrize(("right", "rows"), [(0, 20), (3, 20)])
def test_the_interval_of_an_accuracy_is_wilsons(right, rows):
    """One run, one response for each row: the usual interval of a proportion."""
    scores = np.array([[1.0] * right + [0.0] * (rows - right)])
    interval = intervals.compute_mean_interval(scores)
    low, high = stats.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert 0 <= interval.low < interval.high <= 1


@pytest.mark.parametrize("mean", [0.05, 0.5])
def test_the_interval_of_a_mean_covers_it(mean):
    """Four responses for each row, whose chances differ from row to row."""
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(SIMULATIONS):
        chances = rng.beta(2 * mean, 2 * (1 - mean), ROWS)
        scores = rng.binomial(4, chances)[None, :] / 4
        interval = intervals.compute_mean_interval(scores)
        covered += interval.low <= mean <= interval.high
    assert 0.93 <= covered / SIMULATIONS <= 0.97


def test_the_interval_of_one_run_is_that_of_its_metrics():
    """`compare` and the console show the same interval of a run."""
    rng = np.random.default_rng(5)
    right = rng.binomial(1, rng.beta(1, 1, (50, 1)), (50, 4)).astype(float)
    interval = intervals.compute_mean_interval(right.mean(axis=1)[None, :])
    ends = compute_score_interval(right.tolist())
    assert (ends[LOW], ends[HIGH]) == pytest.approx((interval.low, interval.high))


def test_a_difference_of_fractions_is_between_minus_1_and_1():
    # Two seeds that differ this much have a t distribution with one degree of freedom.
    some = np.array([[0.0] * 8, [1.0] * 8])
    others = np.full((2, 8), 0.5)
    clipped = intervals.compare_scores(some, others)
    free = intervals.compare_scores(2 * some, 2 * others)
    assert (clipped.interval.low, clipped.interval.high) == (-1, 1)
    assert free.interval.high > 2
    assert clipped.p_value == pytest.approx(free.p_value)


@pytest.mark.parametrize("value", [0.1, 1.0])
def test_equal_scores_have_an_interval_with_a_width(value):
    """0.1 is no binary fraction, so its sums differ from it by rounding."""
    scores = np.full((3, 100), value)
    interval = intervals.compute_mean_interval(scores)
    assert interval.low < value + 1e-9 and interval.high - interval.low > 0.03
    found = compute_score_interval([[value] for _ in range(100)])
    assert found[HIGH] - found[LOW] > 0.03


def test_scores_that_never_vary_have_an_interval_and_no_p_value():
    difference = intervals.compare_scores(np.full((2, 100), 0.9), np.full((2, 100), 0.1))
    assert difference.p_value is None and difference.interval.estimate == pytest.approx(0.8)
    assert 0.6 < difference.interval.low < 0.8 < difference.interval.high < 0.9
    assert intervals.find_needed_seeds(difference) == 2
