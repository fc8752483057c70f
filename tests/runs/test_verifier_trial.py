"""Before a run starts, each verifier is tried, and the rows without a ground truth are counted."""

from __future__ import annotations

from pathlib import Path

import datasets
import pandas
import pytest

from env import Task
from kit.data.reward_scale import RewardScale, Scales
from kit.data.verl_rows import read_rows
from kit.errors import UserFunctionError
from kit.gym.python_verifiers.settings import read_verifiers
from kit.runs import verifier_trial
from tests.helpers.recipes import ROOT
from tests.helpers.verifiers import EXAMPLE_SOURCE, make_recipe

MATH = "extras/math_answers.py:verify_math"
TEMPLATE = "templates/reward.py:compute_score"


def try_rows(verifier, rows, *responses):
    """Try a verifier for {row id: row}, and return the lines for the summary."""
    recipe = make_recipe(verifier)
    specs = read_verifiers(recipe.verl).specs
    (name,) = specs
    tasks = [Task(row_id, row, name, [], []) for row_id, row in rows.items()]
    return verifier_trial.try_verifiers(specs, tasks, recipe, None, *responses)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("verifier", [MATH, TEMPLATE, "verl"])
def test_an_error_has_no_advice_about_other_rows(verifier):
    """Whether the missing ground truth is the cause is not known: a verifier may need none."""
    source = {"data_source": "openai/gsm8k"}
    with pytest.raises(UserFunctionError) as error:
        try_rows(verifier, {"a.jsonl:1": source, "a.jsonl:2": {**source, "answer": "5"}})
    assert str(error.value).startswith(f"env.verifier={verifier} failed")
    trial = "(tried on row a.jsonl:1 with the response 'So the answer is 7.')"
    assert str(error.value).endswith(trial)


def test_a_response_of_the_user_is_tried_on_the_first_row(tmp_path):
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    rows = {"a:1": {"answer": "7"}, "a:2": {}}
    (line, *_) = try_rows(f"{tmp_path}/my.py:count_sevens", rows, "7 and 7")
    assert line == "tried on row a:1: reward 2 for '7 and 7', 1 for the ground truth '7'"


@pytest.mark.parametrize("verifier", [MATH, TEMPLATE, "verl"])
def test_other_rows_without_a_ground_truth_are_counted_in_the_summary(verifier):
    rows = {"a:1": {"answer": "5", "data_source": "openai/gsm8k"}}
    rows["b:7"] = {"data_source": "openai/gsm8k"}
    *_, line = try_rows(verifier, rows)
    assert line.startswith("1 of 2 rows have no ground truth (b:7). If the verifier needs one")
    assert len(try_rows(verifier, {"a:1": rows["a:1"]})) == 1


def test_a_verifier_that_reads_no_ground_truth_needs_none(tmp_path):
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    (line,) = try_rows(f"{tmp_path}/my.py:count_sevens", {"a:1": {}, "a:2": {"answer": None}})
    assert line == (
        "tried on row a:1: reward 1 for 'So the answer is 7.'. The row has no ground truth that "
        "can be tried as a response."
    )
    (line,) = try_rows(f"{tmp_path}/my.py:Sevens", {"a:1": {"answer": "7"}, "a:2": {}})
    assert line == "tried on row a:1: reward 1 for 'So the answer is 7.'"


def test_a_part_of_many_data_sources_is_tried(tmp_path):
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    rows = {f"a:{n}": {"data_source": f"source {n}"} for n in range(25)}
    lines = try_rows(f"{tmp_path}/my.py:Sevens", rows)
    assert len(lines) == 21 and lines[20] == "5 more data sources are not tried."


GSM8K = {"question": "How many?", "answer": "She has 48 - 7 = 41.\n#### 41"}


@pytest.mark.parametrize(
    ("verifier", "row", "earning"),
    [
        (TEMPLATE, GSM8K, "41"),
        (MATH, GSM8K, "\\boxed{41}"),
        (MATH, {"solution": "$\\boxed{\\frac12}$"}, "\\boxed{\\frac12}"),
        (MATH, {"final_answer": ["3", 4]}, "\\boxed{3}"),
        ("verl", {**GSM8K, "data_source": "openai/gsm8k"}, "#### 41"),
        ("verl", {"answer": 41, "data_source": "HuggingFaceH4/MATH-500"}, "\\boxed{41}"),
    ],
)
def test_the_expected_answer_is_tried_in_the_usual_formats(verifier, row, earning):
    (line,) = try_rows(verifier, {"a:1": row})
    expected = f"reward 0 for 'So the answer is 7.', 1 for the ground truth {earning!r}"
    assert line == f"tried on row a:1: {expected}"


def test_an_expected_answer_that_earns_nothing_is_a_warning():
    (line,) = try_rows("verl", {"a:1": {"answer": "1,000", "data_source": "openai/gsm8k"}})
    assert line.endswith(
        "0 for the ground truth '1,000'. The ground truth earns nothing. Does the "
        "verifier require another format?"
    )


PARTS = """
import re

def parts(data_source, solution_str, ground_truth, extra_info):
    answer = solution_str.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    form = re.fullmatch(r"<TAG>.*</TAG>\\s*<answer>.*</answer>", solution_str, re.DOTALL)
    return float(ground_truth in (answer, solution_str)) + float(bool(form))
"""


@pytest.mark.parametrize("tag", ["think", "reasoning"])
def test_a_reward_for_the_form_alone_is_not_full(tmp_path, tag):
    """Accuracy and a format may each pay 1, so a wrong answer in the format earns 1."""
    (tmp_path / "my.py").write_text(PARTS.replace("TAG", tag))
    prompt = [{"role": "user", "content": f"Use <{tag}> </{tag}> and <answer> </answer>."}]
    recipe = make_recipe({"function": f"{tmp_path}/my.py:parts", "raw_text": True})
    specs = read_verifiers(recipe.verl).specs
    (name,) = specs
    scales: Scales = {}
    task = Task("a:1", {"answer": "5"}, name, prompt, [])
    (line,) = verifier_trial.try_verifiers(specs, [task], recipe, scales)
    assert list(scales.values()) == [RewardScale(1, 2)]
    assert line.endswith("A reward of 2 counts as right (acc, pass@k)")


def test_a_verifier_that_pays_the_form_alone_is_named(tmp_path):
    """A wrong answer is sent in the same form, although the reward is the usual one."""
    (tmp_path / "my.py").write_text(
        "def tags(solution_str, **row): return float('</answer>' in solution_str)"
    )
    (line,) = try_rows(f"{tmp_path}/my.py:tags", {"a:1": {"answer": "5"}})
    assert "1 for the ground truth '<answer>5</answer>'. The ground truth earns no more" in line


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"data_source": None},
        {"data_source": " "},
        {"data_source": 5},
        {"data_source": ["openai/gsm8k"]},
    ],
)
def test_a_row_without_a_data_source_is_an_error_that_shows_its_value(fields):
    value = fields.get("data_source")
    with pytest.raises(UserFunctionError) as error:
        try_rows("verl", {"a:1": {"answer": "5", **fields}})
    assert str(error.value).startswith(
        f"env.verifier=verl failed: ValueError: the row has data_source={value!r}, by which verl "
        "chooses the scorer. Set it in the row"
    )


def test_an_unknown_data_source_is_an_error_with_another_verifier():
    with pytest.raises(
        UserFunctionError, match=r"not implemented for data_source='mine'\. Name an"
    ):
        try_rows("verl", {"a:1": {"answer": "5", "data_source": "mine"}})


# --- rows of real files --------------------------------------------------------------------------

TABLE = [
    {"prompt": "2 + 3?", "answer": "5", "solution": "2 + 3 = \\boxed{5}"},
    {"prompt": "2 + 4?", "answer": None, "solution": "2 + 4 = \\boxed{6}"},
    {"prompt": "2 + 5?", "answer": None, "solution": None},
]


def write_table(path: Path) -> None:
    """Write TABLE as the library of the file's name does."""
    frame = pandas.DataFrame(TABLE)
    match path.name:
        case "pandas.parquet":
            frame.to_parquet(path)
        case "pandas.jsonl":
            frame.to_json(path, orient="records", lines=True)
        case "datasets.parquet":
            datasets.Dataset.from_list(TABLE).to_parquet(path)
        case "datasets.jsonl":
            datasets.Dataset.from_list(TABLE).to_json(path)


@pytest.mark.parametrize(
    "name", ["pandas.parquet", "pandas.jsonl", "datasets.parquet", "datasets.jsonl"]
)
def test_cells_without_a_value_are_found_in_real_files(tmp_path, name):
    write_table(tmp_path / name)
    rows = dict(read_rows(str(tmp_path / name), "prompt"))
    first, line = try_rows(MATH, rows)
    assert first.endswith("1 for the ground truth '\\\\boxed{5}'")
    (missing,) = list(rows)[2:]
    assert line.startswith(f"1 of 3 rows have no ground truth ({missing}).")


def test_a_component_that_gdpo_needs_and_the_verifier_does_not_return_is_an_error(tmp_path):
    (tmp_path / "parts.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'right': 1.0}\n"
    )
    recipe = make_recipe(f"{tmp_path}/parts.py:score")
    specs = read_verifiers(recipe.verl).specs
    tasks = [Task("a:1", {"answer": "5"}, next(iter(specs)), [], [])]

    def try_with(*changes):
        changed = recipe.change("algorithm.adv_estimator=gdpo", *changes)
        return verifier_trial.try_verifiers(specs, tasks, changed)

    both = "algorithm.gdpo_reward_keys=[right, format]"
    assert try_with("algorithm.gdpo_reward_keys=[right]")
    assert try_with(
        both, "env.reward={function: templates/rewards.py:weighted, weights: {format: 1}}"
    )
    with pytest.raises(
        UserFunctionError, match=r"gdpo_reward_keys has format, .* components .*right"
    ):
        try_with(both)
