"""Without a ground truth that can be read, no verifier of the kit returns a reward."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extras.math_answers import verify_math
from extras.policy_programs.program_scores import score_program
from kit.verify.python_verifiers import verl_scorer

MISSING = [None, "", " \n\t", {}, {"target": None}]
NO_ANSWERS = [[], [None], ["", None]]  # an expected answer does not exist
WRONG_TYPES = [True, {"a": "5"}, {"target": ["5"]}, ["5", None], ["5", ""], [["5"]]]
MISSING_TEXTS = ["None", "nan", "null", "<NA>", " None "]
UNREADABLE_TEXTS = ["\\boxed{}", "\\boxed{5", "####", "x\n#### ", "['5', '6']", '["5', '["5", NaN]']
HEADING = "#### 1. Sum\nWe add 2 and 3.\n#### 2. Result\nIt is\n5"
PROOF = "Suppose that the number five is even. Then half of it is whole, which it is not."
RESPONSES = ["", "5", "\\boxed{5}", "\\boxed{}", "\\boxed{None}", "\\boxed{nan}", "#### 5"]
RESPONSES += ["Answer: None", "<answer></answer>", "<answer>5</answer>", "```python\nx = 1\n```"]
SEARCH_SOURCE = "searchR1_nq"
SANDBOX = "http://127.0.0.1:9/run_code"


def score_with_verl(source, truth, response):
    return verl_scorer.compute_score(source, response, truth, {})


def score_with_tests(truth, response, url=None):
    return score_program("taco", response, truth, {}, url)


def fails(score, truth, responses=RESPONSES):
    """Return whether a verifier raises for a ground truth, whatever the response is."""
    outcomes = set()
    for response in [*responses, str(truth), f"\\boxed{{{truth}}}"]:
        try:
            score(truth, response)
            outcomes.add("reward")
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, error
            outcomes.add("error")
    return outcomes == {"error"}


# --- no ground truth: no reward ------------------------------------------------------------------

UNREADABLE = [*MISSING, *NO_ANSWERS, *WRONG_TYPES, *MISSING_TEXTS, *UNREADABLE_TEXTS, HEADING]
TEXT_SOURCES = [*verl_scorer.TEXT_SOURCES, "aime2024"]


@pytest.mark.parametrize("truth", UNREADABLE, ids=repr)
def test_a_verifier_of_texts_raises_without_a_readable_ground_truth(truth):
    assert fails(lambda truth, text: verify_math("", text, truth, {}), truth)
    for source in TEXT_SOURCES:
        assert fails(lambda truth, text, source=source: score_with_verl(source, truth, text), truth)


@pytest.mark.parametrize(
    "truth", [PROOF, "}", "$", "$$", "\\(\\)", "\\text{}", ["5", "}"]], ids=repr
)
def test_an_expected_answer_that_math_verify_cannot_read_is_a_failure(truth):
    responses = ["", "\\boxed{5}"]
    assert fails(lambda truth, text: verify_math("", text, truth, {}), truth, responses)


@pytest.mark.parametrize(
    "truth", [*UNREADABLE, "5", 5, ["5"], {"target": []}, {"target": [""]}], ids=repr
)
def test_verls_search_scorer_raises_without_targets(truth):
    is_readable = truth == {"target": ["5"]} if isinstance(truth, dict) else False
    assert fails(lambda t, text: score_with_verl(SEARCH_SOURCE, t, text), truth) != is_readable


NO_TESTS = [
    {"inputs": [], "outputs": []},
    {"inputs": ["1"]},
    {"inputs": ["1"], "outputs": None},
    {"inputs": ["1", "2"], "outputs": ["1"]},
    {"inputs": "1", "outputs": "1"},
    {"assert_case": []},
    {"assert_case": "assert True"},
    {"assert_case": ["assert True"], "inputs": ["1", "2"]},
    {"fn_name": "solve"},
]


@pytest.mark.parametrize("url", [None, SANDBOX])
@pytest.mark.parametrize("truth", [*UNREADABLE, "5", 5, "[]", *NO_TESTS], ids=repr)
def test_a_scorer_of_programs_raises_without_tests(truth, url):
    assert fails(lambda tests, text: score_with_tests(tests, text, url), truth)
    if isinstance(truth, dict):
        assert fails(lambda tests, text: score_with_tests(tests, text, url), json.dumps(truth))


def test_each_data_source_of_verl_is_known():
    """verl gives the reward 0 without a ground truth, so a new source needs a check."""
    import verl.utils.reward_score as reward_score

    tree = ast.parse(Path(reward_score.__file__).read_text())
    sources = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "data_source":
            value = ast.literal_eval(node.comparators[0])
            sources |= {value} if isinstance(value, str) else set(value)
    search = {source for source in sources if source.startswith(verl_scorer.SEARCH_PREFIX)}
    assert len(search) == 7
    assert sources - search == {*verl_scorer.TEXT_SOURCES, *verl_scorer.PROGRAM_SOURCES}


# --- what is read --------------------------------------------------------------------------------


def wrap(truth, kind):
    """Write a number as another kind of ground truth."""
    return {
        "number": truth,
        "text": str(truth),
        "dollars": f"${truth}$",
        "list": ["1000003", str(truth)],
        "numbers": [1000003, truth],
        "JSON": json.dumps(["1000003", str(truth)]),
        "GSM8K": f"so\n#### {truth:,}",
        "box": f"so \\boxed{{{truth}}}",
    }[kind]


KINDS = ["number", "text", "list", "numbers", "GSM8K", "box"]
NUMBERS = st.integers(-(10**6), 10**6)


@settings(max_examples=30, deadline=None)
@given(number=NUMBERS, other=NUMBERS, kind=st.sampled_from([*KINDS, "JSON", "dollars"]))
def test_the_right_number_earns_1_and_another_one_0(number, other, kind):
    truth = wrap(number, kind)
    for value in (number, other):
        expected = float(value == number)
        assert verify_math("", f"\\boxed{{{value}}}", truth, {})["score"] == expected
        assert score_with_verl("openai/gsm8k", wrap(number, kind), f"#### {value}") == (
            expected if kind != "dollars" else 0.0
        )
        for source in ("math", "HuggingFaceH4/MATH-500"):
            score = verl_scorer.read_score(score_with_verl(source, truth, f"\\boxed{{{value}}}"))
            assert (score > 0) == (value == number) or kind == "dollars"


def test_a_target_of_verls_search_scorer_may_be_a_text_or_several():
    for target in ("Five", ["four", "Five"]):
        text = "<answer>five</answer>"
        assert score_with_verl(SEARCH_SOURCE, {"target": target}, text) == 1.0
        assert score_with_verl(SEARCH_SOURCE, {"target": target}, "<answer>six</answer>") == 0.0
