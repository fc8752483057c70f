"""The constructed responses: which apply to a row, and what they contain."""

from __future__ import annotations

from lab.probe import truths
from lab.probe.responses import LEAK, RIGHT, WRONG, Case, make_probes


def kinds(case, expects):
    return {probe.kind for probe in make_probes(case) if probe.expects == expects}


def texts(case, kind):
    (probe,) = [probe for probe in make_probes(case) if probe.kind == kind]
    return probe.texts


def test_without_a_truth_only_responses_that_need_none_are_made():
    case = Case("Add 3 and 4.", special="<a><b>")
    assert kinds(case, WRONG) == {
        "empty",
        "white space",
        "the prompt",
        "special tokens",
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


def test_a_prompt_that_demands_a_format_makes_other_formats_wrong():
    boxed = Case("Put it in \\boxed{}.", "7", "\\boxed{{{}}}")
    assert texts(boxed, "not in the format of the prompt") == ("7", "The answer is 7.")
    assert "not in the format of the prompt" not in kinds(Case("Add.", "7"), LEAK)
    both = "Use \\boxed{} or ####."
    assert truths.find_demanded_form(both) == ""


def test_reasoning_is_not_right_if_the_prompt_wants_only_the_answer():
    for prompt in ("What is 3 + 4?", "Write it in the form m/n.", "Reason, then put it in <a>."):
        assert "reasoning before it" in kinds(Case(prompt, "7"), RIGHT), prompt
    for prompt in (
        "Write only the number.",
        "Reply with a number.",
        "Answer in one word.",
        "Answer yes or no.",
        "Do not show your work.",
        "Respond in JSON.",
        "Antworte nur mit der Zahl.",
        "只输出答案。",
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
    assert truths.list_truths({"expected_answer": '["a", "b"]'})[:2] == ["a, b", "[a, b]"]
    assert truths.list_truths({"answer": "They sell 9.\n#### 9"})[0] == "9"
    assert truths.list_truths({"answer": True}) == ["True", "true"]
    assert truths.list_truths({"question": "?"}) == []


def test_choices_are_read_in_the_forms_of_data_sets():
    lettered = {"A": "Paris", "B": "Rome"}
    assert truths.read_choices({"options": [{"A": "Paris"}, {"B": "Rome"}]}) == lettered
    assert truths.read_choices({"options": lettered}) == lettered
    columns = {"text": ["Paris", "Rome"], "label": ["A", "B"]}
    assert truths.read_choices({"choices": columns}) == lettered
