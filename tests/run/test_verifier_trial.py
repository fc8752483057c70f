"""Before a run starts, each verifier is tried, and the rows without a ground truth are counted."""

from __future__ import annotations

import pytest

from env import Task
from kit.data.reward_scale import RewardScale, Scales
from kit.errors import ConfigError
from kit.run import verifier_trial
from kit.verify.python_verifiers.settings import read_verifiers
from tests.helpers.http import ROW, VERIFY_ROUTES, ScriptedServer
from tests.helpers.recipes import ROOT, make_partial
from tests.helpers.verifiers import EXAMPLE_SOURCE, make_recipe

MATH = "extras/math_answers.py:verify_math"
TEMPLATE = "templates/reward.py:compute_score"


def try_rows(verifier, rows, *responses):
    """Try a verifier for {row id: row}, and return the lines for the summary."""
    recipe = make_recipe(verifier)
    specs = read_verifiers(recipe.env, recipe.gym.servers).specs
    (name,) = specs
    tasks = [Task(row_id, row, name, [], []) for row_id, row in rows.items()]
    return verifier_trial.check_verifiers(specs, tasks, recipe, None, *responses)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_response_of_the_user_is_tried_on_the_first_row(tmp_path):
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    rows = {"a:1": {"answer": "7"}, "a:2": {}}
    (trial, *_) = try_rows(f"{tmp_path}/my.py:count_sevens", rows, "7 and 7")
    assert trial.result == "on row a:1: reward 2 for '7 and 7', 1 for the ground truth '7'"


@pytest.mark.parametrize("verifier", [MATH, "verl"])
def test_other_rows_without_a_ground_truth_are_counted_in_the_summary(verifier):
    rows = {"a:1": {"answer": "5", "data_source": "openai/gsm8k"}}
    rows["b:7"] = {"data_source": "openai/gsm8k"}
    *_, trial = try_rows(verifier, rows)
    assert trial.warning.startswith(
        "1 of 2 rows have no ground truth (b:7). If the verifier needs one"
    )
    assert len(try_rows(verifier, {"a:1": rows["a:1"]})) == 1


GSM8K = {"question": "How many?", "answer": "She has 48 - 7 = 41.\n#### 41"}


@pytest.mark.parametrize(
    ("verifier", "row", "earning"),
    [
        (TEMPLATE, GSM8K, "41"),
        (MATH, {"solution": "$\\boxed{\\frac12}$"}, "\\boxed{\\frac12}"),
        ("verl", {**GSM8K, "data_source": "openai/gsm8k"}, "#### 41"),
    ],
)
def test_the_expected_answer_is_tried_in_the_usual_formats(verifier, row, earning):
    (trial,) = try_rows(verifier, {"a:1": row})
    expected = f"reward 0 for 'So the answer is 7.', 1 for the ground truth {earning!r}"
    assert trial == (f"on row a:1: {expected}", "")


PARTS = """
import re

def parts(data_source, solution_str, ground_truth, extra_info):
    answer = solution_str.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    form = re.fullmatch(r"<TAG>.*</TAG>\\s*<answer>.*</answer>", solution_str, re.DOTALL)
    return float(ground_truth in (answer, solution_str)) + float(bool(form))
"""


def test_a_reward_for_the_form_alone_is_not_full(tmp_path):
    """Accuracy and a format may each pay 1, so a wrong answer in the format earns 1."""
    tag = "reasoning"
    (tmp_path / "my.py").write_text(PARTS.replace("TAG", tag))
    prompt = [{"role": "user", "content": f"Use <{tag}> </{tag}> and <answer> </answer>."}]
    recipe = make_recipe({"function": f"{tmp_path}/my.py:parts", "raw_text": True})
    specs = read_verifiers(recipe.env, recipe.gym.servers).specs
    (name,) = specs
    scales: Scales = {}
    task = Task("a:1", {"answer": "5"}, name, prompt, [])
    (trial,) = verifier_trial.check_verifiers(specs, [task], recipe, scales)
    assert list(scales.values()) == [RewardScale(1, 2)]
    assert trial.result.endswith("A reward of 2 counts as right (acc, pass@k)")


def test_a_verifier_that_pays_the_form_alone_is_named(tmp_path):
    """A wrong answer is sent in the same form, although the reward is the usual one."""
    (tmp_path / "my.py").write_text(
        "def tags(solution_str, **row): return float('</answer>' in solution_str)"
    )
    (trial,) = try_rows(f"{tmp_path}/my.py:tags", {"a:1": {"answer": "5"}})
    assert trial.result.endswith("1 for the ground truth '<answer>5</answer>'")
    assert trial.warning.startswith("Row a:1: the right answer earns at most 1, no more than a ")
    assert "Tried: '5', '\\\\boxed{5}', '#### 5', ..." in trial.warning


# --- a Gym server that runs already --------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((200, {"reward": 0.5}), "reward 0.5 for 'So the answer is 7.'"),
        ((200, {"reward": 0.5, "judge_error": "x"}), "reward none (masked, or null)"),
        ((500, "KeyError"), "HTTP 500"),  # maybe because of this text
        ((422, "no such field"), "gym.servers.s cannot verify row a:1"),
    ],
)
def test_a_server_that_runs_verifies_one_row_before_the_run(answer, text):
    server = ScriptedServer(**{**VERIFY_ROUTES, "verify": [answer]})
    servers = {"s": {"url": server.url}, "later": {"start": {}}}
    recipe = make_partial({"gym": {"servers": servers}})
    tasks = [Task(f"a:{n}", {**ROW, "answer": "7"}, "s", [], []) for n in (1, 2)]
    tasks.append(Task("b:1", ROW, "later", [], []))
    if answer[0] == 422:
        with pytest.raises(ConfigError, match=text):
            verifier_trial.check_verifiers({}, tasks, recipe)
        return
    (trial,) = verifier_trial.check_verifiers({}, tasks, recipe)
    assert trial.result.startswith("on row a:1: ") and text in trial.result
