"""Tests of the warning about a growing difference between rollout engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.drift import METRIC, DriftWatch, find_drift


def make_recipe(**rollout) -> Any:
    """The sections of a recipe that decide whether the warning is on."""
    return SimpleNamespace(rollout=rollout, kit=SimpleNamespace(one_step_off=0))


def watch(folder: Path, values, recipe=None, first_step: int = 1) -> tuple[list[str], list[int]]:
    """Log the differences as steps of a run -> (the warnings, the steps in which they came)."""
    lines: list[str] = []
    steps: list[int] = []
    drift = DriftWatch(recipe or make_recipe(), folder, lines.append)
    with (folder / "metrics.jsonl").open("a") as out:
        for step, value in enumerate(values, first_step):
            before = len(lines)
            out.write(json.dumps({"step": step, METRIC: value}) + "\n")
            out.flush()
            drift.record(step, {METRIC: value})
            steps += [step] * (len(lines) - before)
    return lines, steps


@given(
    level=st.floats(1e-8, 0.03),
    noise=st.lists(st.floats(0.5, 1.5), min_size=1, max_size=200),
)
def test_noise_at_one_level_never_warns(level, noise):
    assert find_drift([level * factor for factor in noise]) is None


@pytest.mark.parametrize(
    ("values", "is_drift"),
    [
        ([0.002] * 8 + [0.09] * 2, False),  # two steps
        ([0.002] * 5 + [0.007] * 5, True),
        ([1e-6] * 5 + [1e-3] * 5, False),  # float32: still less than bf16 rounds
        ([0.02] * 10 + [0.001] * 10, False),  # it falls
        ([float("nan")] * 5 + [0.002] * 5 + [0.02] * 5, True),
        ([0.002] * 4 + [0.05] * 5, False),  # too few steps
    ],
)
def test_only_a_lasting_growth_is_a_drift(values, is_drift):
    assert (find_drift(values) is not None) is is_drift


def test_a_resumed_run_compares_with_the_steps_before(tmp_path):
    """The resumed run repeats the last two steps, whose old values do not count."""
    assert watch(tmp_path, [0.002] * 8 + [0.5] * 2) == ([], [])
    lines, steps = watch(tmp_path, [0.002] * 2 + [0.03] * 10, first_step=9)
    assert len(lines) == 1 and steps == [13]


def test_there_is_no_warning_if_the_engine_samples_from_other_probabilities(tmp_path):
    recipe = make_recipe(repetition_penalty=1.1)
    assert watch(tmp_path, [0.002] * 5 + [0.05] * 20, recipe) == ([], [])
