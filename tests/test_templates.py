"""The rewards, filters, samplers, tasks and verifiers of templates/."""

from __future__ import annotations

import ast
import functools
import math
import re
import runpy
from collections import Counter

import numpy as np
import pytest
import yaml
from conftest import CPU, ROOT
from omegaconf import OmegaConf
from tiny_models import END

import env
import training
from kit.config.load import load_config
from kit.data.episode import Episode, TurnSpan
from kit.data.metrics import update_pass_rates
from kit.data.selection import select_trainable, take_groups
from kit.errors import UserFunctionError
from templates import filters, samplers
from templates.reward import compute_score
from templates.rewards import components, overlong, weighted
from templates.task import Guess, rows


def episode(reward=1.0, length=3, group="g", ended="stop", **fields):
    response = list(range(length))
    return Episode(
        "r",
        group,
        "s",
        [1],
        response,
        [1] * length,
        [-1.0] * length,
        reward=reward,
        ended=ended,
        **fields,
    )


# --- rewards -------------------------------------------------------------------------------------


def test_overlong_is_dapos_equation():
    def by_the_paper(length, longest, cache):  # equation 13
        if length <= longest - cache:
            return 0.0
        return (longest - cache - length) / cache if length <= longest else -1.0

    for length in (1, 80, 81, 90, 99, 100):
        given = overlong(episode(reward=1.0, length=length), limit=100, buffer=0.2)
        assert given == pytest.approx(1.0 + by_the_paper(length, 100, 20))


def test_rewards_combine_components():
    e = episode(reward=0.5, ended="length", reward_components={"reward_model": 2.0})
    assert weighted(e, {"reward_model": 0.2}) == pytest.approx(0.9)
    with pytest.raises(
        UserFunctionError,
        match=r"no reward component other\. Use one of its components: reward_model",
    ):
        weighted(e, {"other": 1.0})
    assert components(e) == 0.5
    for reason in ("stop", "length", "turns", "terminated", "truncated"):
        e = episode(reward=0.5, ended=reason)
        components(e)
        assert e.reward_components["finished"] == (reason == "stop")
    e = episode(reward=0.5, ended="length", reward_components={"reward_model": 2.0})
    components(e)
    assert e.reward_components == {"reward_model": 2.0, "verifier": 0.5, "finished": 0.0}


# --- filters -------------------------------------------------------------------------------------


def groups(*rewards, **fields):
    return [
        episode(reward=r, group=str(g), **fields) for g, some in enumerate(rewards) for r in some
    ]


def test_zero_variance_groups_are_dropped():
    made = groups([1, 1, 1], [0, 0], [0, 1], [0.5, 0.2])
    assert [e.group_id for e in filters.drop_uniform(made)] == ["2", "2", "3", "3"]
    assert [e.group_id for e in filters.drop_uniform(made, metric="acc")] == ["2", "2"]
    made[0].reward_components = {"style": 1.0}
    for e in made[1:]:
        e.reward_components = {"style": 0.0}
    assert [e.group_id for e in filters.drop_uniform(made, metric="style")] == ["0"] * 3


def test_filters_apply_in_order_and_leave_no_group_of_one():
    made = groups([1, 0, 0], [1, 1, 0])
    made[0].ended = made[5].ended = "length"
    drop = lambda some: filters.drop_ended(some, ["length"])  # noqa: E731
    # The first filter leaves two wrong responses of group 0 and two right ones of group 1.
    assert select_trainable(made, 2, [drop, filters.drop_uniform])[0] == []
    assert select_trainable(made, 2, [filters.drop_uniform, drop])[0] == [
        made[1],
        made[2],
        made[3],
        made[4],
    ]
    made[1].ended = "length"
    assert select_trainable(made, 2, [drop])[0] == made[3:5]  # group 0 has only one left
    assert (
        len(select_trainable(made, 1, [drop])[0]) == 3
    )  # for estimators that do not compare responses


def test_masked_episodes_count_for_the_baseline_and_have_no_loss():
    made = groups([1.0, 0.0, 0.0])
    made[0].ended = "length"
    kept, _ = select_trainable(made, 2, [lambda some: filters.mask_ended(some, ["length"])])
    assert made[0].response_mask == [1, 1, 1]  # a copy was masked
    batch = training.build_batch(kept, 0, 1.0)
    assert batch.batch["response_mask"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    keys = {"gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    settings = OmegaConf.create({"algorithm": {"adv_estimator": "grpo", **keys}})
    training.compute_advantages(batch, settings)
    advantages = batch.batch["advantages"]
    assert (
        advantages[1, 0] == pytest.approx((0 - 1 / 3) / (math.sqrt(1 / 3) + 1e-6))
        and not advantages[0].any()
    )
    for e in made:
        e.ended = "length"
    assert (
        select_trainable(made, 2, [lambda some: filters.mask_ended(some, ["length"])])[0] == []
    )  # nothing to train on


def test_with_answer_adds_the_answer_of_the_row_to_each_group(workspace):
    made = groups([0.0, 1.0], [0.0, 0.5])
    for e, text in zip(made, ["7", "7", "7 7 7", "7 7 7"], strict=True):
        e.row, e.prompt_ids, e.turns = (
            {"answer": text, "n": 1},
            [5, int(e.group_id)],
            [TurnSpan(0, 3, 1)],
        )
    given = {"field": "answer", "model": str(workspace / "tied"), "limit": 4}
    found = filters.with_answer(made, **given)
    assert [e.group_id for e in found] == ["0", "0", "0", "1", "1"] and [
        found[i] for i in (0, 1, 3, 4)
    ] == made
    own = found[2]
    assert (
        own.response == "7" and own.response_ids[-1] == END and len(own.response_ids) == 2
    )  # with a stop token, as if sampled
    assert own.prompt_ids == made[0].prompt_ids and own.reward == 1.0 and own.turns == []
    b = training.build_batch(found, 0, 1.0).batch
    assert b["turn"].amax(dim=1).tolist() == [0, 0, -1, 0, 0] and b["response_mask"][
        2
    ].tolist() == [1, 1, 0]
    kept, _ = select_trainable(made, 2, [functools.partial(filters.with_answer, **given)])
    assert [e.response_ids for e in kept] == [e.response_ids for e in found]
    by_limit = [
        len(filters.with_answer(made, **{**given, "limit": limit})) for limit in (1, 2, 3, 5, 6)
    ]
    assert by_limit == [4, 5, 5, 5, 6]  # "7" and EOS are 2 tokens, "7 7 7" and EOS 6
    with pytest.raises(
        UserFunctionError, match=r"row r has no text field=n\. Use one of its texts: answer"
    ):
        filters.with_answer(made, **{**given, "field": "n"})


def test_an_answer_keeps_the_reward_components_and_baselines_of_its_batch(workspace):
    made = groups([0.0, 1.0], [0.0, 0.5])
    for e in made:
        e.row = {"answer": "7"}
        e.reward_components = {"style": 0.5}
        e.baseline = 0.25
    answered = filters.with_answer(made, "answer", str(workspace / "tied"), 4)
    batch = training.build_batch(answered, 0, 1.0)
    assert batch.non_tensor_batch["style"].tolist() == [0.5, 0.5, 1.0] * 2
    assert batch.batch["reward_baselines"].tolist() == [0.25] * 6


def test_first_groups():
    made = groups([1, 0], [1, 0], [1, 0])
    assert take_groups(made, 2) == made[:4]


# --- samplers ------------------------------------------------------------------------------------


def task(i, file="a", weight=None):
    return env.Task(f"{file}:{i}", {}, "s", [], [1], file=file, weight=weight)


def test_a_curriculum_prefers_rows_that_are_solved_half_of_the_time():
    tasks = [task(i) for i in range(3)]
    rates = {"a:0": 0.0, "a:1": 0.5, "a:2": 1.0}
    drawn = Counter(
        t.row_id for b in range(4000) for t in samplers.by_pass_rate(tasks, 1, b, 7, rates)
    )
    wanted = np.array([0.05, 0.30, 0.05]) / 0.40
    assert np.abs(np.array([drawn[t.row_id] for t in tasks]) / 4000 - wanted).max() < 0.03
    batch = samplers.by_pass_rate(tasks, 2, 5, 7, rates)
    assert (
        batch == samplers.by_pass_rate(tasks, 2, 5, 7, rates)
        and len({t.row_id for t in batch}) == 2
    )
    mixed = [task(i, "a", 1.0) for i in range(2)] + [task(i, "b", 3.0) for i in range(2)]
    assert Counter(t.file for t in samplers.by_pass_rate(mixed, 8, 1, 7, {})) == {"a": 2, "b": 6}


def test_pass_rates_are_a_moving_average():
    made = [episode(reward=r) for r in (1.0, 0.0, 0.5, 1.0)] + [
        episode(reward=None, status="timeout")
    ]
    rates = update_pass_rates(made, {})
    assert rates == {"r": 0.5}
    assert update_pass_rates([episode(reward=1.0)], rates) == {"r": 0.75}


# --- tasks and verifiers -------------------------------------------------------------------------


def test_the_server_to_copy_passes_its_own_test(tmp_path, monkeypatch):
    """The test in the folder starts the server as a run does."""
    monkeypatch.chdir(ROOT)
    assert len((ROOT / "templates" / "verifier" / "app.py").read_text().splitlines()) <= 60
    runpy.run_path("templates/verifier/test_app.py")["test_the_verifier"](tmp_path)


def test_held_out_things_are_not_in_training_rows():
    made = runpy.run_path(str(ROOT / "templates" / "verifier" / "rows.py"))["rows"]
    asked = [
        {
            r["responses_create_params"]["input"][-1]["content"]
            for r in made(1, 200, 0, {}, held_out)
        }
        for held_out in (False, True)
    ]
    assert [len(some) for some in asked] == [12, 4] and not asked[0] & asked[1]
    assert made(1, 3, 0, {}) == made(1, 3, 0, {}) != made(2, 3, 0, {})


@pytest.mark.parametrize("top", [1, 2, 3, 50, 99])
def test_bisection_finds_every_number(top):
    for number in range(1, top + 1):
        game, low, high, paid, done = Guess(), 1, top, [], False
        assert game.reset({"number": number, "top": top}) == f"Guess a number from 1 to {top}."
        while not done:
            middle = (low + high) // 2
            said, reward, done = game.step(f"I say {middle}.")
            low, high = (middle + 1, high) if said == "Higher." else (low, middle - 1)
            paid.append(reward)
        assert paid[-1] == sum(paid) == 1.0 and said is None


def test_a_text_without_a_number_costs_a_turn():
    game = Guess()
    game.reset({"number": 1, "top": 3})
    assert [game.step(text) for text in ("no \u0663", "9" * 50)] == [
        ("Say a number.", 0.0, False),
        ("Lower.", 0.0, True),
    ]


def test_the_task_grows_with_solved_batches_and_depends_on_its_arguments_alone():
    solved, not_yet = {1: {0: 1.0, 1: 0.5}}, {1: {0: 0.5, 1: 0.5}}
    tops = [
        rows(2, 1, 7, rates, highest=4)[0]["top"]
        for rates in ({}, not_yet, solved, {**solved, 2: {0: 1.0}})
    ]
    assert tops == [3, 3, 4, 4]
    assert rows(2, 5, 7, {}) == rows(2, 5, 7, {}) != rows(3, 5, 7, {})
    assert {r["number"] for r in rows(1, 100, 7, {})} == {1, 2, 3}


@pytest.mark.parametrize(
    ("said", "true", "score"),
    [
        ("so 18 + 24 = 42", "18 + 24 = 42", 1.0),
        ("#### 1,042.0", 1042, 1.0),
        ("42, or 41", "42", 0.0),
        ("\\boxed{41}", "42", 0.1),
        ("it is -4", "4", 0.0),
        ("", "42", 0.0),
    ],
)
def test_the_score_is_of_the_last_number(said, true, score):
    given = compute_score("sums", said, true, {}, form=0.1)
    assert (
        given["score"] == score
        and given["right"] == (score == 1.0)
        and given["boxed"] == ("boxed" in said)
    )


def test_a_row_without_a_ground_truth_raises():
    with pytest.raises(ValueError, match="the row is at fault"):
        compute_score("sums", "42", "forty-two", {})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "templates").rglob("*.py")), ids=lambda path: path.name
)
def test_each_docstring_shows_a_valid_recipe_line(path):
    """The line is YAML with existing keys, and names existing functions or folders."""
    if path.name.startswith("test_"):
        return
    (shown,) = re.findall(
        r"^    (\w.*)$", ast.get_docstring(ast.parse(path.read_text())), re.MULTILINE
    )
    OmegaConf.merge(load_config([str(CPU)], [])[0], yaml.safe_load(shown))
    named = re.findall(r"(templates/[\w./]+)(?::(\w+))?", shown)
    assert named and all(ROOT / file in (path, path.parent) for file, _ in named)
    text = path.read_text()
    assert all(
        re.search(rf"^(def|class) {name}\b", text, re.MULTILINE) for _, name in named if name
    )
