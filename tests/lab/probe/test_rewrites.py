"""Rewrites of an answer keep its value, and are made only where a person would accept them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.probe.answers import read_number, rewrite_answer

SAME_NUMBER = {
    "with a thousands separator",
    "without thousands separators",
    "as a fraction",
    "as a decimal number",
}


def rewrites(truth, prompt="", **choices):
    return rewrite_answer(truth, prompt, choices)


@given(st.integers(-(10**7), 10**7), st.integers(1, 100))
def test_a_rewritten_number_has_the_same_value(numerator, denominator):
    value = Fraction(numerator, denominator)
    truth = str(value)
    for kind, text in rewrites(truth).items():
        if kind in SAME_NUMBER:
            assert read_number(text) == value, (truth, kind, text)


@pytest.mark.parametrize(
    ("truth", "kind", "text"),
    [
        ("1000", "with a thousands separator", "1,000"),
        ("12,345", "without thousands separators", "12345"),
        ("0.5", "as a fraction", "1/2"),
        ("1/2", "as a decimal number", "0.5"),
        ("-0.75", "as a fraction", "-3/4"),
        ("-3/4", "as a LaTeX fraction", "-\\frac{3}{4}"),
        ("Paris", "lower case", "paris"),
        ("[1, 2]", "other spaces in a list", "[1,2]"),
    ],
)
def test_each_kind_of_rewrite(truth, kind, text):
    assert rewrites(truth)[kind] == text


def test_units_percentages_and_equations_need_a_prompt_that_asks_for_them():
    assert rewrites("7", "How many apples are left?")["with its unit"] == "7 apples"
    for question in ("Compute 3 + 4.", "How many are left?", "How many did he eat?"):
        assert "with its unit" not in rewrites("7", question)
    assert rewrites("0.25", "What is the probability?")["as a percentage"] == "25%"
    assert "as a percentage" not in rewrites("0.25", "What is the length?")
    assert rewrites("58", "Solve 2x = 116 for x.")["as an equation"] == "x = 58"


def test_the_case_of_a_formula_or_of_code_is_not_changed():
    for truth in ("CCO", "xY", "node_1", "McDonald"):
        assert "lower case" not in rewrites(truth), truth


def test_a_choice_may_be_in_parentheses_or_with_its_text():
    found = rewrites("B", "", A="one", B="two")
    assert found == {"in parentheses": "(B)", "with the text of the choice": "B. two"}
