"""Tests of the rewards, filters, samplers, tasks and verifiers in templates/."""

from __future__ import annotations

import ast
import math
import re
import runpy
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import yaml

import env
import training
from kit.data.episode import TurnSpan
from kit.errors import UserFunctionError
from kit.recipe.keys import merge_nested
from kit.recipe.load import read_source
from templates import filters, samplers
from templates.program import Program
from templates.reward import compute_score
from templates.rewards import components, lower_partial, overlong, weighted
from templates.task import Guess, rows
from tests.helpers.models import END
from tests.helpers.recipes import CPU, ROOT, make_partial
from tests.helpers.workers import make_batch, make_episode


def episode(reward=1.0, length=3, group="g", **fields):
    fields.setdefault("ended", "stop")
    return make_episode([1], list(range(length)), turns=[], reward=reward, group=group, **fields)


# --- rewards -------------------------------------------------------------------------------------


def test_overlong_is_dapos_equation():
    def compute_penalty(length, longest, cache):
        """DAPO, arXiv:2503.14476, equation 13."""
        if length <= longest - cache:
            return 0.0
        if length <= longest:
            return (longest - cache - length) / cache
        return -1.0

    for length in (1, 80, 81, 90, 99, 100):
        reward = overlong(episode(reward=1.0, length=length), limit=100, buffer=0.2)
        assert reward == pytest.approx(1.0 + compute_penalty(length, 100, 20))


def test_only_partial_rewards_are_lowered():
    rewards = [lower_partial(episode(reward=r), weight=0.5) for r in (0, 0.92, 1, 2)]
    assert rewards == [0, 0.46, 1, 2]


def test_rewards_combine_components():
    e = episode(reward=0.5, ended="length", reward_components={"reward_model": 2.0})
    assert weighted(e, {"reward_model": 0.2}) == pytest.approx(0.9)
    with pytest.raises(UserFunctionError, match="no reward component other"):
        weighted(e, {"other": 1.0})
    assert components(e) == 0.5
    for reason in ("stop", "length", "turns", "terminated", "truncated"):
        e = episode(reward=0.5, ended=reason)
        components(e)
        assert e.reward_components["finished"] == (reason == "stop")


# --- filters -------------------------------------------------------------------------------------


def make_groups(*rewards):
    """Make episodes with the rewards of each group."""
    episodes = []
    for index, group_rewards in enumerate(rewards):
        for reward in group_rewards:
            episodes.append(episode(reward=reward, group=str(index)))
    return episodes


def test_zero_variance_groups_are_dropped():
    episodes = make_groups([1, 1, 1], [0, 0], [0, 1], [0.5, 0.2])
    assert [e.group_id for e in filters.drop_uniform(episodes)] == ["2", "2", "3", "3"]
    assert [e.group_id for e in filters.drop_uniform(episodes, metric="acc")] == ["2", "2"]
    episodes[0].reward_components = {"style": 1.0}
    for e in episodes[1:]:
        e.reward_components = {"style": 0.0}
    assert [e.group_id for e in filters.drop_uniform(episodes, metric="style")] == ["0"] * 3


def test_masked_episodes_count_for_the_baseline_and_have_no_loss():
    episodes = make_groups([1.0, 0.0, 0.0])
    episodes[0].ended = "length"
    kept = filters.mask_ended(episodes, ["length"])
    assert episodes[0].response_mask == [1, 1, 1]  # the filter masks a copy
    batch = make_batch(kept)
    assert batch.batch["response_mask"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    keys = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    recipe = make_partial({"algorithm": {"adv_estimator": "grpo", **keys}})
    training.compute_advantages(batch, recipe)
    advantages = batch.batch["advantages"]
    expected = (0 - 1 / 3) / (math.sqrt(1 / 3) + 1e-6)
    assert advantages[1, 0] == pytest.approx(expected) and not advantages[0].any()


def test_with_answer_adds_the_answer_of_the_row_to_each_group(workspace):
    episodes = make_groups([0.0, 1.0], [0.0, 0.5])
    for e, text in zip(episodes, ["7", "7", "7 7 7", "7 7 7"], strict=True):
        e.row = {"answer": text, "n": 1}
        e.prompt_ids = [5, int(e.group_id)]
        e.turns = [TurnSpan(0, 3, 1)]
    settings = {"field": "answer", "model": str(workspace / "tied"), "limit": 4}
    extended = filters.with_answer(episodes, **settings)
    sampled = [extended[i] for i in (0, 1, 3, 4)]
    assert [e.group_id for e in extended] == ["0", "0", "0", "1", "1"] and sampled == episodes
    answer = extended[2]
    # it ends with a stop token, like a sampled response
    assert (
        answer.response == "7" and answer.response_ids[-1] == END and len(answer.response_ids) == 2
    )
    assert answer.prompt_ids == episodes[0].prompt_ids
    assert answer.reward == 1.0 and answer.turns == []
    b = make_batch(extended).batch
    assert b["turn"].amax(dim=1).tolist() == [0, 0, -1, 0, 0]
    assert b["response_mask"][2].tolist() == [1, 1, 0]
    assert len(filters.with_answer(episodes, **{**settings, "limit": 1})) == 4
    with pytest.raises(UserFunctionError, match="row r has no text field=n"):
        filters.with_answer(episodes, **{**settings, "field": "n"})


def test_an_answer_keeps_the_reward_components_and_baselines_of_its_batch(workspace):
    episodes = make_groups([0.0, 1.0], [0.0, 0.5])
    for e in episodes:
        e.row = {"answer": "7"}
        e.reward_components = {"style": 0.5}
        e.baseline = 0.25
    answered = filters.with_answer(episodes, "answer", str(workspace / "tied"), 4)
    batch = make_batch(answered)
    components = batch.non_tensor_batch["reward_components"]
    assert [parts["style"] for parts in components] == [0.5, 0.5, 1.0] * 2
    assert batch.batch["reward_baselines"].tolist() == [0.25] * 6


# --- samplers ------------------------------------------------------------------------------------


def task(i, file="a", weight=None):
    return env.Task(f"{file}:{i}", {}, "s", [], [1], file=file, weight=weight)


def test_a_curriculum_prefers_rows_that_are_solved_half_of_the_time():
    tasks = [task(i) for i in range(3)]
    rates = {"a:0": 0.0, "a:1": 0.5, "a:2": 1.0}
    drawn = Counter()
    for batch_number in range(4000):
        drawn.update(t.row_id for t in samplers.by_pass_rate(tasks, 1, batch_number, 7, rates))
    frequencies = np.array([drawn[t.row_id] for t in tasks]) / 4000
    expected = np.array([0.05, 0.30, 0.05]) / 0.40
    assert np.abs(frequencies - expected).max() < 0.03
    batch = samplers.by_pass_rate(tasks, 2, 5, 7, rates)
    again = samplers.by_pass_rate(tasks, 2, 5, 7, rates)
    assert batch == again and len({t.row_id for t in batch}) == 2


# --- tasks and verifiers -------------------------------------------------------------------------


def test_the_verifier_template_passes_its_test(tmp_path, monkeypatch):
    """The test in templates/verifier/ starts the server as a run does."""
    monkeypatch.chdir(ROOT)
    runpy.run_path("templates/verifier/test_app.py")["test_the_verifier"](tmp_path)


@pytest.mark.parametrize("top", [1, 3, 50])
def test_bisection_finds_every_number(top):
    for number in range(1, top + 1):
        game = Guess()
        low = 1
        high = top
        rewards = []
        done = False
        assert game.reset({"number": number, "top": top}) == f"Guess a number from 1 to {top}."
        while not done:
            middle = (low + high) // 2
            observation, reward, done = game.step(f"I say {middle}.")
            if observation == "Higher.":
                low = middle + 1
            else:
                high = middle - 1
            rewards.append(reward)
        assert rewards[-1] == sum(rewards) == 1.0 and observation is None


def test_the_task_gets_harder_after_solved_batches_and_is_deterministic():
    solved = {1: {0: 1.0, 1: 0.5}}
    unsolved = {1: {0: 0.5, 1: 0.5}}
    tops = [
        rows(2, 1, 7, rates, highest=4)[0]["top"]
        for rates in ({}, unsolved, solved, {**solved, 2: {0: 1.0}})
    ]
    assert tops == [3, 3, 4, 4]
    assert rows(2, 5, 7, {}) == rows(2, 5, 7, {}) != rows(3, 5, 7, {})
    assert {r["number"] for r in rows(1, 100, 7, {})} == {1, 2, 3}


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so 18 + 24 = 42", "18 + 24 = 42", 1.0),
        ("\\boxed{41}", "42", 0.1),
        ("it is -4", "4", 0.0),
    ],
)
def test_the_score_depends_on_the_last_number(response, truth, score):
    result = compute_score("sums", response, truth, {}, form=0.1)
    is_right = score == 1.0
    is_boxed = "boxed" in response
    assert result["score"] == score and result["right"] == is_right and result["boxed"] == is_boxed


@pytest.mark.parametrize(
    "path", sorted((ROOT / "templates").rglob("*.py")), ids=lambda path: path.name
)
def test_each_docstring_shows_a_valid_recipe_line(path):
    """The line is YAML with existing keys, and names existing functions or folders."""
    if path.name.startswith("test_"):
        return
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    (line,) = re.findall(r"^    (\w.*)$", docstring, re.MULTILINE)
    merge_nested(read_source([str(CPU)], []).values, yaml.safe_load(line))
    references = re.findall(r"(templates/[\w./]+)(?::(\w+))?", line)
    assert references and all(ROOT / file in (path, path.parent) for file, _ in references)
    names = [name for _, name in references if name]
    assert all(re.search(rf"^(async def|def|class) {name}\b", text, re.M) for name in names)


# --- environments --------------------------------------------------------------------------------

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"observation": json.loads(line), "reward": 0.5, "done": False}), flush=True)
"""


def test_a_program_plays_an_episode():
    environment = Program()
    assert environment.reset({"command": [sys.executable, "-c", ECHO]}) is None
    assert environment.step("two\nlines") == ("two\nlines", 0.5, False)
    environment.close()
    assert environment.program.returncode is not None


GAME = """
from templates.gymnasium_game import Blackjack
game = Blackjack()
print(game.reset({"seed": 1}) == Blackjack().reset({"seed": 1}), game.step("fold"))
print(game.step("Stick")[1:])
"""


def test_the_adapter_of_gymnasium_plays_a_game():
    """Gymnasium is in the environment of NeMo Gym."""
    command = [ROOT / ".venv-gym" / "bin" / "python", "-c", GAME]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    first, second = printed.splitlines()
    assert first == "True ('Write hit or stick.', 0.0, False)"
    assert second in ("(-1.0, True)", "(0.0, True)", "(1.0, True)")
