"""The constructed responses: which apply to a row, and what they contain."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.probe import truths
from lab.probe.answers import make_near_misses, read_number, rewrite_answer
from lab.probe.responses import LEAK, RIGHT, WRONG, Case, make_probes


def kinds(case, expects):
    return {probe.kind for probe in make_probes(case) if probe.expects == expects}


def texts(case, kind):
    (probe,) = [probe for probe in make_probes(case) if probe.kind == kind]
    return probe.texts


def test_without_a_truth_only_responses_that_need_none_are_made():
    case = Case("Add 3 and 4.")
    assert kinds(case, WRONG) == {
        "empty",
        "white space",
        "the prompt",
        "orders to a judge",
        "all numbers of the prompt",
    }
    assert not kinds(case, LEAK) and not kinds(case, RIGHT)


def test_a_list_of_candidates_has_the_truth_at_both_ends():
    case = Case("?", "B", "\\boxed{{{}}}", {"A": "x", "B": "y", "C": "z"})
    first, last = texts(case, "every candidate, one by one")
    assert first == "\\boxed{B}\n\\boxed{A}\n\\boxed{C}"
    assert last == "\\boxed{A}\n\\boxed{C}\n\\boxed{B}"
    assert texts(case, "another answer") == ("\\boxed{A}",)


def test_another_answer_is_not_the_truth_in_another_form():
    assert not Case("?", "Paris", others=["paris.", " PARIS"]).wrong
    assert Case("?", "1/2", others=["1/20"]).wrong == "1/20"
    assert Case("?", "-5", others=["5"]).wrong == "5"


def test_a_response_that_is_the_truth_is_not_wrong():
    case = Case("say {}", "{}", "{}", others=["x"])
    assert all("{}" not in probe.texts for probe in make_probes(case) if probe.expects != RIGHT)
    assert "the prompt" not in kinds(Case("7", "7"), WRONG)


def test_reasoning_is_not_right_if_the_prompt_wants_only_the_answer():
    for prompt in ("What is 3 + 4?", "Write it in the form m/n.", "Reason, then put it in <a>."):
        assert "reasoning before it" in kinds(Case(prompt, "7"), RIGHT), prompt
    for prompt in (
        "Write only the number.",
        "Answer yes or no.",
        "Do not show your work.",
    ):
        assert "reasoning before it" not in kinds(Case(prompt, "7"), RIGHT), prompt
    tags = "Put your reasoning in <think> </think> and the answer in <answer> </answer>."
    assert "reasoning before it" not in kinds(Case(tags, "7", truths.list_forms(tags)[0]), RIGHT)


def test_truths_are_found_where_gym_and_verl_have_them():
    assert truths.list_truths({"reward_model": {"ground_truth": "72"}}) == ["72"]
    assert truths.list_truths({"verifier_metadata": {"ideal": "CCO"}}) == ["CCO"]
    assert truths.list_truths({"reward_model": {"ground_truth": {"target": ["Goethe"]}}})[0] == (
        "Goethe"
    )
    assert truths.list_truths({"expected_answer": '["a", "b"]'})[:2] == ["a, b", "a"]
    assert truths.list_truths({"answer": "They sell 9.\n#### 9"})[0] == "9"
    assert truths.list_truths({"answer": True}) == ["True", "true"]
    assert truths.list_truths({"question": "?"}) == []


def test_choices_are_read_in_the_forms_of_data_sets():
    lettered = {"A": "Paris", "B": "Rome"}
    assert truths.read_choices({"options": [{"A": "Paris"}, {"B": "Rome"}]}) == lettered
    assert truths.read_choices({"options": lettered}) == lettered


# --- rewrites of an answer ------------------------------------------------------------------------


@given(st.integers(-(10**7), 10**7), st.integers(1, 100))
def test_a_rewritten_number_has_the_same_value(numerator, denominator):
    value = Fraction(numerator, denominator)
    for kind, text in rewrite_answer(str(value), "", {}).items():
        if "dollar" not in kind and "LaTeX" not in kind:
            assert read_number(text) == value, (kind, text)


@pytest.mark.parametrize(
    ("truth", "rewrites"),
    [
        ("1000", {"with a thousands separator": "1,000", "in dollar signs": "$1000$"}),
        ("12,345", {"without thousands separators": "12345", "in dollar signs": "$12,345$"}),
        ("Paris", {"lower case": "paris"}),
        ("CCO", {}),  # a formula
        ("B", {"in parentheses": "(B)", "with the text of the choice": "B. two"}),
    ],
)
def test_each_kind_of_rewrite(truth, rewrites):
    assert rewrite_answer(truth, "", {"A": "one", "B": "two"}) == rewrites


def test_fractions_and_decimals_are_rewritten():
    found = rewrite_answer("-3/4", "", {})
    assert found["as a LaTeX fraction"] == "-\\frac{3}{4}"
    assert found["as a decimal number"] == "-0.75"
    assert rewrite_answer("-0.75", "", {})["as a fraction"] == "-3/4"


def test_the_prompt_decides_which_forms_are_right():
    answer = rewrite_answer("58", "Solve 2*x = 116 for x.", {})
    assert answer["as an equation"] == "x = 58" and answer["with a zero after the point"] == "58.0"
    assert rewrite_answer("{1, 2}", "Which set?", {}) == {"items in another order": "{2, 1}"}
    misses = make_near_misses("[1, 2, 3]", "Sort the numbers.", [])
    assert misses["items in another order"] == "[2, 3, 1]" and misses["an item less"] == "[1, 2]"
