"""Tests verl's rollout correction, its weights and its rejection, against plain Python.

Truncated importance sampling: Ionides 2008, "Truncated Importance Sampling", on the ratio of the
trainer's probability of a token to the rollout engine's; per token, or per response as the product
over its tokens. Estimates k1, k2, k3 of the KL divergence: Schulman 2020, "Approximating KL
Divergence". Observed tokens, and responses that are masked whole, take no part.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from verl import DataProto

import training
from kit.data.episode import Episode
from tests.helpers.recipes import make_partial


class Case(NamedTuple):
    """A batch, and the values of each row that it was built from."""

    batch: DataProto
    log_ratios: list[list[float]]  # log of the trainer's probability minus log of the engine's
    masks: list[list[int]]


def select(row: list[float], mask: list[int]) -> list[float]:
    """Select the numbers of a row under its mask."""
    return list(itertools.compress(row, mask))


def make_case(seed: int) -> Case:
    """Make 12 responses of various lengths. Some have observed tokens, and one is all masked."""
    rng = random.Random(seed)
    episodes = []
    for i in range(12):
        R = rng.randint(1, 9)
        mask = [int(i != 5 and not (R > 4 and t == 2)) for t in range(R)]
        log_probs = [-rng.random() for _ in range(R)]
        episodes.append(Episode("r", f"g{i // 4}", "s", [1], [2] * R, mask, log_probs, reward=1.0))
    log_ratios = [[rng.gauss(0, 0.5) for _ in e.response_ids] for e in episodes]
    batch = training.build_batch(episodes, 0, 1.0)
    b = batch.batch
    b["old_log_probs"] = torch.zeros_like(b["rollout_log_probs"])
    for i, (e, row) in enumerate(zip(episodes, log_ratios, strict=True)):
        b["old_log_probs"][i, : len(row)] = torch.tensor(e.log_probs) + torch.tensor(row)
    return Case(batch, log_ratios, [e.response_mask for e in episodes])


class Corrected(NamedTuple):
    """The result of a correction."""

    weights: torch.Tensor | None  # [B, R]
    mask: torch.Tensor  # [B, R]
    metrics: dict[str, float]


def correct(batch: DataProto, **settings: Any) -> Corrected:
    """Correct a batch as the training loop does."""
    recipe = make_partial({"algorithm": {"rollout_correction": settings}})
    metrics = training.apply_rollout_correction(batch, recipe)
    b = batch.batch
    return Corrected(b.get("rollout_is_weights"), b["response_mask"], metrics)


# --- importance weights --------------------------------------------------------------------------


def truncate_weight(weight: float, threshold: float | str) -> float:
    """Truncate a weight at 2.0. With two bounds, a weight beyond either one is 0 (IcePop)."""
    if threshold == 2.0:
        return min(weight, 2.0)
    return weight if 0.8 <= weight <= 1.5 else 0.0


def compute_expected_weights(case: Case, level: str, threshold: float | str) -> list[list[float]]:
    """Return the truncated ratio of each token or of its response, by row; 0 outside the mask."""
    weights = []
    for row, mask in zip(case.log_ratios, case.masks, strict=True):
        whole = sum(select(row, mask))
        logs = row if level == "token" else [whole] * len(row)
        bounded = [truncate_weight(math.exp(value), threshold) for value in logs]
        weights.append([live * weight for live, weight in zip(mask, bounded, strict=True)])
    return weights


def normalize(weights: list[list[float]], masks: list[list[int]], level: str) -> list[list[float]]:
    """Divide by the mean over tokens in the mask, or over responses with one weight each."""
    rows = list(zip(weights, masks, strict=True))
    if level == "token":
        live = list(itertools.chain.from_iterable(select(row, mask) for row, mask in rows))
    else:
        live = [max(row) for row, mask in rows if any(mask)]
    mean = sum(live) / len(live)
    return [[weight / mean for weight in row] for row in weights]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("threshold", [2.0, "0.8_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_truncated_ratios(level, threshold, normalized, seed):
    case = make_case(seed)
    before = case.batch.batch["response_mask"].clone()
    result = correct(
        case.batch,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalized,
    )
    assert torch.equal(result.mask, before)  # weights do not change the mask
    expected = compute_expected_weights(case, level, threshold)
    if normalized:
        expected = normalize(expected, case.masks, level)
    for i, row in enumerate(expected):
        assert result.weights[i, : len(row)].tolist() == pytest.approx(row, rel=1e-5)
        assert not result.weights[i, len(row) :].any()


# --- rejection -----------------------------------------------------------------------------------


# Estimates of the KL divergence from the log-ratio of trainer to rollout engine.
K: dict[str, Callable[[float], float]] = {
    "k1": lambda r: -r,
    "k2": lambda r: r * r / 2,
    "k3": lambda r: math.exp(r) - 1 - r,
}
OPTIONS = [f"{span}_{kind}" for span in ("token", "seq_sum", "seq_mean") for kind in K]
OPTIONS += ["seq_max_k2", "seq_max_k3"]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def is_inside(value: float, kind: str) -> bool:
    """Return whether an estimate is within the bounds of the rejection test."""
    if kind == "k1":
        return math.log(0.7) <= value <= math.log(1.4)
    return value <= 0.1


def compute_expected_mask(row: list[float], mask: list[int], span: str, kind: str) -> list[int]:
    """Return a response's mask after rejection, by token or as a whole."""
    estimates = [K[kind](r) for r in row]
    if span == "token":
        pairs = zip(estimates, mask, strict=True)
        return [int(live and is_inside(value, kind)) for value, live in pairs]
    combine: Any = {"seq_sum": sum, "seq_mean": mean, "seq_max": max}[span]
    if not any(mask):
        return mask
    is_kept = is_inside(combine(select(estimates, mask)), kind)
    return [int(live and is_kept) for live in mask]


@pytest.mark.parametrize("option", OPTIONS)
def test_tokens_or_responses_that_differ_too_much_are_rejected(option):
    case = make_case(2)
    span, kind = option.rsplit("_", 1)
    bounds = "0.7_1.4" if kind == "k1" else "0.1"
    result = correct(case.batch, rollout_rs=option, rollout_rs_threshold=bounds)
    assert result.weights is None
    rejected = 0
    for i, (row, mask) in enumerate(zip(case.log_ratios, case.masks, strict=True)):
        expected = compute_expected_mask(row, mask, span, kind)
        assert result.mask[i, : len(row)].tolist() == expected, (i, row)
        rejected += sum(mask) - sum(expected)
    total = sum(map(sum, case.masks))
    assert 0 < rejected < total  # the bounds reject some tokens and keep others
    fraction = result.metrics["rollout_corr/rollout_rs_masked_fraction"]
    assert fraction == pytest.approx(rejected / total)


# --- without a correction ------------------------------------------------------------------------


def test_without_a_correction_the_metrics_still_show_the_difference():
    case = make_case(3)
    result = correct(case.batch)
    live = []
    for row, mask in zip(case.log_ratios, case.masks, strict=True):
        live += select(row, mask)
    assert result.weights is None and "rollout_is_weights" not in case.batch.batch
    metrics = result.metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(-mean(live), rel=1e-4)
    k3 = mean([K["k3"](r) for r in live])
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3, rel=1e-4)
    squares = mean([math.exp(2 * r) for r in live])
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(squares - 1, rel=1e-4)
