"""Tests the effective sample size and the distance of two policies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.data.importance import effective_sample_size, measure_shift

LOGS = st.lists(st.floats(-30, 30), min_size=1, max_size=20)


@given(LOGS, st.floats(-1e4, 1e4))
def test_the_effective_sample_size_is_kishs_and_has_no_scale(logs, offset):
    weights = [math.exp(log) for log in logs]
    expected = sum(weights) ** 2 / sum(w**2 for w in weights) / len(weights)
    shifted = torch.tensor([log + offset for log in logs], dtype=torch.float64)
    assert effective_sample_size(shifted) == pytest.approx(expected, rel=1e-6)
    assert 1 / len(logs) - 1e-9 <= expected <= 1 + 1e-9


def test_the_effective_sample_size_at_its_limits():
    assert effective_sample_size(torch.zeros(5)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1e5, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.tensor([0.0, math.nan])) == 0.0
    assert effective_sample_size(torch.tensor([])) == 0.0
    assert effective_sample_size(torch.tensor([math.inf, 0.0])) == 0.0
    assert effective_sample_size(torch.tensor([-math.inf] * 2)) == 0.0
    assert effective_sample_size(torch.tensor([-math.inf, 0.0])) == pytest.approx(0.5)


def test_the_shift_counts_sampled_tokens_only():
    behavior = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0], [-5.0, -5.0, -5.0]])
    present = torch.tensor([[-0.5, -2.0, 0.0], [-1.0, -1.5, -1.0], [0.0, 0.0, 0.0]])
    is_sampled = torch.tensor([[True, True, False], [True, True, True], [False] * 3])
    shift = measure_shift(present, behavior, is_sampled)
    ratios = [0.5, 0.0, 0.0, -0.5, 0.0]
    assert shift.kl == pytest.approx(sum(math.exp(r) - 1 - r for r in ratios) / 5)
    assert shift.log_ratio_max == 0.5
    weights = [math.exp(0.5), math.exp(-0.5)]
    assert shift.ess == pytest.approx(sum(weights) ** 2 / sum(w**2 for w in weights) / 2)
    assert shift.token_ess == pytest.approx(
        sum(math.exp(r) for r in ratios) ** 2 / sum(math.exp(2 * r) for r in ratios) / 5
    )
