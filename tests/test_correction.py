"""The kit's correction between sampler and trainer (verl's), against plain Python: importance weights and rejection.

Truncated importance sampling: Ionides 2008, "Truncated Importance Sampling", on the ratio of the trainer's probability
of a token to the sampler's; per token, or per answer as the product over its tokens. Estimates k1, k2, k3 of the KL
divergence: Schulman 2020, "Approximating KL Divergence". Observed tokens, and answers masked whole, take no part.
"""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from conftest import RECIPE
from omegaconf import OmegaConf

import training
from kit.config.load import load_config
from kit.data.episode import Episode


def batch_of(seed):
    """(batch, log-ratios and masks as lists): 12 ragged answers, some with observed tokens, one masked whole."""
    rng, made = random.Random(seed), []
    for i in range(12):
        R = rng.randint(1, 9)
        mask = [int(i != 5 and not (R > 4 and t == 2)) for t in range(R)]
        made.append(
            Episode(
                "r",
                f"g{i // 4}",
                "s",
                [1],
                [2] * R,
                mask,
                [-rng.random() for _ in range(R)],
                reward=1.0,
            )
        )
    ratios = [
        [rng.gauss(0, 0.5) for _ in e.response_ids] for e in made
    ]  # log trainer - log sampler
    batch = training.build_batch(made, 0, 1.0)
    b = batch.batch
    b["old_log_probs"] = torch.zeros_like(b["rollout_log_probs"])
    for i, (e, row) in enumerate(zip(made, ratios, strict=True)):
        b["old_log_probs"][i, : len(row)] = torch.tensor(e.log_probs) + torch.tensor(row)
    return batch, ratios, [e.response_mask for e in made]


@functools.cache
def defaults():
    """A recipe's, which are not the dataclass's."""
    return load_config([str(RECIPE)], [])[0].algorithm.rollout_correction


def corrected(batch, **settings):
    """What the loop gets: (weights [B, R] or None, response_mask [B, R], metrics)."""
    config = OmegaConf.create(
        {"algorithm": {"rollout_correction": OmegaConf.merge(defaults(), settings)}}
    )
    metrics = training.apply_rollout_correction(batch, config)
    return batch.batch.get("rollout_is_weights"), batch.batch["response_mask"], metrics


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("threshold", [2.0, "0.8_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_truncated_ratios(level, threshold, normalized, seed):
    batch, ratios, masks = batch_of(seed)
    before = batch.batch["response_mask"].clone()
    got, mask, _ = corrected(
        batch,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalized,
    )
    assert torch.equal(mask, before)  # weights reject nothing

    def bounded(weight):
        if threshold == 2.0:
            return min(weight, 2.0)  # truncated
        return weight if 0.8 <= weight <= 1.5 else 0.0  # beyond either bound: not at all (IcePop)

    wanted = []
    for row, m in zip(ratios, masks, strict=True):
        whole = sum(r for r, live in zip(row, m, strict=True) if live)
        wanted.append(
            [
                live * bounded(math.exp(r if level == "token" else whole))
                for r, live in zip(row, m, strict=True)
            ]
        )
    if normalized:
        if level == "token":
            live = [
                w
                for row, m in zip(wanted, masks, strict=True)
                for w, x in zip(row, m, strict=True)
                if x
            ]
        else:  # one weight for each answer
            live = [max(row) for row, m in zip(wanted, masks, strict=True) if any(m)]
        mean = sum(live) / len(live)
        wanted = [[w / mean for w in row] for row in wanted]
    for i, row in enumerate(wanted):
        assert got[i, : len(row)].tolist() == pytest.approx(row, rel=1e-5)
        assert not got[i, len(row) :].any()


K = {
    "k1": lambda r: -r,
    "k2": lambda r: r * r / 2,
    "k3": lambda r: math.exp(r) - 1 - r,
}  # of trainer from sampler
OPTIONS = [
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
]
OPTIONS += ["seq_mean_k3", "seq_max_k2", "seq_max_k3"]


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_too_far_off_is_rejected(option):
    batch, ratios, masks = batch_of(2)
    span, kind = option.rsplit("_", 1)
    bounds = "0.7_1.4" if kind == "k1" else "0.1"
    weights, got, metrics = corrected(batch, rollout_rs=option, rollout_rs_threshold=bounds)
    assert weights is None
    inside = (
        (lambda x: math.log(0.7) <= x <= math.log(1.4)) if kind == "k1" else (lambda x: x <= 0.1)
    )
    combine = {"seq_sum": sum, "seq_mean": lambda xs: sum(xs) / len(xs), "seq_max": max}
    rejected = 0
    for i, (row, m) in enumerate(zip(ratios, masks, strict=True)):
        stat = [K[kind](r) for r in row]
        live = [s for s, x in zip(stat, m, strict=True) if x]
        if span == "token":
            wanted = [int(x and inside(s)) for s, x in zip(stat, m, strict=True)]
        else:
            wanted = [int(x and inside(combine[span](live))) for x in m]
        assert got[i, : len(row)].tolist() == wanted, (i, live)
        rejected += sum(m) - sum(wanted)
    total = sum(map(sum, masks))
    assert 0 < rejected < total  # the bounds tell some from others
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected / total)


def test_without_a_correction_the_spread_is_still_said():
    batch, ratios, masks = batch_of(3)
    weights, _, metrics = corrected(batch)
    live = [
        r for row, m in zip(ratios, masks, strict=True) for r, x in zip(row, m, strict=True) if x
    ]
    assert weights is None
    assert metrics["rollout_corr/kl"] == pytest.approx(-sum(live) / len(live), rel=1e-4)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(
        sum(map(K["k3"], live)) / len(live), rel=1e-4
    )
    squares = sum(math.exp(2 * r) for r in live) / len(live)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(squares - 1, rel=1e-4)


@pytest.mark.parametrize("side", ["rollout_log_probs", "old_log_probs"])
def test_a_token_on_which_they_differ_more_has_another_weight_and_it_alone(side):
    """The partner of the tests above: here the two sides do not agree, by ln 1.25 on one token."""
    (before, *_), (plain, ratios, _) = corrected(batch_of(4)[0], rollout_is="token"), batch_of(4)
    row, token = next(
        (i, t) for i, r in enumerate(ratios) for t, x in enumerate(r) if abs(x) < 0.3 and i != 5
    )
    step = math.log(1.25)
    plain.batch[side][row, token] += step
    after, _, metrics = corrected(plain, rollout_is="token")
    moved = (after / before).nan_to_num(1.0)  # 0 / 0 on what takes no part
    wanted = torch.ones_like(moved)
    wanted[row, token] = 1.25 if side == "old_log_probs" else 0.8
    torch.testing.assert_close(moved, wanted)
    assert (
        metrics["rollout_corr/kl"]
        != corrected(batch_of(4)[0], rollout_is="token")[2]["rollout_corr/kl"]
    )


def test_a_correction_of_the_recipe_reaches_the_batch_and_none_leaves_it():
    batch, *_ = batch_of(5)
    corrected(batch)
    assert "rollout_is_weights" not in batch.batch
    weights, mask, _ = corrected(
        batch, rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold="0.9_1.1"
    )
    assert (
        weights is batch.batch["rollout_is_weights"]
        and mask.sum() < batch_of(5)[0].batch["response_mask"].sum()
    )
