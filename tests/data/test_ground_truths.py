"""The ground truth of a row is found in many places, and expected answers are read in it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data import ground_truths
from kit.data.ground_truths import find_ground_truth, is_empty

MISSING = [None, math.nan, "", " \n\t", {}, {"target": None}]
PROOF = "Suppose that the number five is even. Then half of it is whole, which it is not."

# --- find ----------------------------------------------------------------------------------------

ROW_PLACES = ["ground_truth", "expected_answer", "answer", "final_answer", "solution"]
PLACES = ["reward_model.ground_truth", *ROW_PLACES, *(f"extra_info.{key}" for key in ROW_PLACES)]


def make_row(values):
    """Make a row from {place: value}."""
    row = {"prompt": "2 + 3?", "extra_info": {"index": 1}, "reward_model": {"style": "rule"}}
    for place, value in values.items():
        outer, _, key = place.rpartition(".")
        fields = row[outer] if outer else row
        fields[key] = value
    return row


@given(
    values=st.dictionaries(st.sampled_from(PLACES), st.sampled_from([*MISSING, "4", 5, ["6"], []]))
)
def test_the_first_place_with_a_value_has_the_ground_truth(values):
    ordered = [values[place] for place in PLACES if place in values]
    usable = [value for value in ordered if value in ("4", 5, ["6"], [])]
    found = find_ground_truth(make_row(values))
    expected = [*usable, *ordered, None][0]
    assert found is expected


def test_missing_values_are_empty_and_others_are_not():
    assert find_ground_truth({"reward_model": None, "extra_info": "5"}) is None
    assert all(is_empty(value) for value in MISSING)
    others = (0, 0.0, False, "0", "nan", [0], {"a": 0}, [], [None])
    assert not any(is_empty(value) for value in others)


# --- what is read --------------------------------------------------------------------------------

GSM8K = "She has 48/2 = <<48/2=24>>24 clips.\nIn total 48+24 = <<48+24=72>>72.\n#### 72"
MATH = "We have $x = \\boxed{4}$ at first, so the answer is $\\boxed{\\frac{1}{2}}$."


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        (" 5 ", ["5"]),
        (5, ["5"]),
        (5.0, ["5"]),
        (-0.5, ["-0.5"]),
        (1e-7, ["0.0000001"]),
        (["4", 5, 6.5], ["4", "5", "6.5"]),
        ('["4", "\\\\frac{1}{2}"]', ["4", "\\frac{1}{2}"]),
        ("[4, 5]", ["[4, 5]"]),  # an interval
        (GSM8K, ["72"]),
        ("#### -1,234.5", ["-1234.5"]),
        ("#### 1,234,567", ["1234567"]),
        ("#### 1,2", ["1,2"]),
        ("#### (1, 2)", ["(1, 2)"]),
        (MATH, ["\\frac{1}{2}"]),
        ("so \\boxed {\\frac{1}{2}}.", ["\\frac{1}{2}"]),
        ("\\boxed{None}", ["None"]),
        ([GSM8K, MATH], ["72", "\\frac{1}{2}"]),
        (PROOF, [PROOF]),
    ],
)
def test_expected_answers_are_read_as_texts(truth, expected):
    assert ground_truths.read_expected_answers(truth) == expected


def test_a_word_that_stands_for_no_answer_in_many_rows_is_found():
    rows = [{"answer": str(n)} for n in range(20)] + [{"answer": "unsolved"}, {"answer": "yes"}] * 3
    assert ground_truths.find_marks(rows) == {"unsolved": 3}
    assert ground_truths.find_marks([{"answer": "Paris"}] * 20) == {}
    frequent = [{"answer": str(n % 20)} for n in range(160)] + [{"answer": "left"}] * 7
    assert ground_truths.find_marks(frequent) == {}  # as frequent as other answers
    lists = [{"answer": [str(n), {"n": n}]} for n in range(20)] + [{"answer": " unsolved"}] * 3
    assert ground_truths.find_marks(lists) == {"unsolved": 3}
