"""Rows to verl's format: which of a row's keys is the ground truth."""

from __future__ import annotations

import pytest
from conftest import row

from kit.data import verl_rows


@pytest.mark.parametrize(
    ("keys", "truth"),
    [
        ({"expected_answer": "right", "answer": "a whole solution"}, "right"),
        ({"expected_answer": None, "answer": "right"}, "right"),
        ({"answer": "right"}, "right"),
    ],
)
def test_the_expected_answer_goes_before_the_answer(keys, truth):
    gym_row = {key: value for key, value in row("2?").items() if key != "answer"} | keys
    assert verl_rows.to_verl(gym_row, "x:1")["reward_model"]["ground_truth"] == truth
