"""Tests of custom functions: how a recipe names them, and how mistakes in them are reported.

A mistake is found in a trial before the run starts. The error has the key and the function.
"""

from __future__ import annotations

import json
import re

import pytest

from kit.data.episode import Episode
from kit.data.selection import select_trainable
from kit.errors import RunError, UserFunctionError
from kit.recipe import user_functions
from kit.recipe.keys import TEACHER
from kit.recipe.recipe import Recipe
from kit.recipe.user_functions import ADVANTAGE, LOSS_MODE
from kit.run import trial
from tests.helpers.recipes import ROOT, load

GOOD = """
import torch

def shorter(episode, per_token=0.001):
    return episode.reward - per_token * len(episode.response_ids)

def flat(token_level_rewards, response_mask):
    return response_mask.float(), response_mask.float()

def greedy_baseline(token_level_rewards, response_mask, answer_key):
    return response_mask, response_mask

def loss(old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config, rollout_is_weights=None):
    return (advantages * log_prob).sum(), {}

def first(tasks, size, batch, seed, pass_rates):
    return tasks[:size]

def none(episodes):
    return []
"""


def episode(reward=1.0, length=3, group="g"):
    response = list(range(length))
    return Episode(
        "r", group, "s", [1], response, [1] * length, [-1.0] * length, reward=reward, ended="stop"
    )


@pytest.fixture(scope="module")
def tiny_recipe(workspace):
    return load(workspace)


@pytest.fixture
def make_recipe(tiny_recipe):
    """A function that makes the tiny recipe with {key: value} changes."""

    def make(changes) -> Recipe:
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in changes.items()}
        arguments = [f"{key}={text}" for key, text in texts.items()]
        return tiny_recipe.recipe.change(*arguments)

    return make


# --- naming a function in a recipe ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("env.reward", "nowhere.py:f", "env.reward=nowhere.py:f: no file nowhere.py"),
        ("env.reward", "verdict", "env.reward=verdict is not a function"),
        ("env.reward", "good.py:longer", "has no function longer"),
        ("env.reward", {"function": "good.py:shorter", "per_word": 1}, "per_word"),
        ("env.filters", ["good.py:first"], "cannot be called with (episodes)"),
        ("env.reward", "broken.py:f", "broken.py:2: ModuleNotFoundError"),
        (ADVANTAGE, "good.py:greedy_baseline", "'answer_key'"),
        (LOSS_MODE, "good.py:flat", "cannot be called with (old_log_prob, log_prob"),
    ],
)
def test_an_invalid_function_is_an_error_before_anything_starts(
    make_recipe, tmp_path, monkeypatch, key, value, message
):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "broken.py").write_text("\nimport not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserFunctionError, match=re.escape(message)):
        make_recipe({key: value})


def test_custom_functions_are_called_with_their_settings(workspace, tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    recipe, inputs, _ = load(
        workspace,
        "env.reward={function: good.py:shorter, per_token: 0.5}",
        "env.filters=[good.py:none, templates/filters.py:drop_uniform]",
        "env.sampler=good.py:first",
        "algorithm.adv_estimator=good.py:flat",
        f"{LOSS_MODE}=good.py:loss",
    )
    reward, filters, sampler = recipe.functions
    assert reward(episode(length=3)) == 1.0 - 1.5
    assert [f([]) for f in filters] == [[], []] and filters[0]([episode()]) == []
    # these are the names in the metrics rollout/filtered/<name>
    assert [f.__name__ for f in filters] == ["none", "drop_uniform"]
    assert sampler(inputs.train, 2, 1, 0, {}) == inputs.train[:2]
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    for _ in range(2):  # a second registration is not an error
        user_functions.register_in_verl(recipe.algorithm.adv_estimator, recipe.get(LOSS_MODE))
    trial.check_functions(recipe, inputs)
    assert get_adv_estimator_fn("good.py:flat").__name__ == "flat"
    assert get_policy_loss_fn("good.py:loss").__name__ == "loss"
    assert not recipe.has_critic and not recipe.compares_group


def test_verls_filter_groups_comes_after_the_filters_of_the_recipe(
    make_recipe, tmp_path, monkeypatch
):
    """Two responses are right, and a truncated one is wrong.

    The group is uniform only after the truncated response was dropped.
    """
    (tmp_path / "templates").mkdir()
    # an empty user file with the path of the kit's template
    (tmp_path / "templates" / "filters.py").write_text("")
    monkeypatch.chdir(tmp_path)
    drop = {"function": f"{ROOT}/templates/filters.py:drop_ended", "reasons": ["length"]}
    episodes = [episode(1.0), episode(1.0), episode(0.0)]
    episodes[2].ended = "length"
    for is_enabled, kept in ((True, []), (False, episodes[:2])):
        refill = {"enable": is_enabled, "metric": "reward"}
        changes = {"env.filters": [drop], "algorithm.filter_groups": refill}
        filters = make_recipe(changes).functions.filters
        assert [f.__name__ for f in filters][1:] == ["drop_uniform"] * is_enabled
        assert select_trainable(episodes, 2, filters)[0] == kept


def test_the_recipe_decides_which_models_are_needed(make_recipe):
    teacher = {TEACHER: "models/t"}
    assert make_recipe(teacher).teacher == ""
    assert make_recipe({**teacher, "distillation.enabled": True}).teacher == "models/t"
    assert not make_recipe({}).has_reference
    for changes in (
        {"actor_rollout_ref.actor.use_kl_loss": True},
        {"algorithm.use_kl_in_reward": True},
        {ADVANTAGE: "templates/advantages.py:distill"},
    ):
        assert make_recipe(changes).has_reference


# --- mistakes in functions -----------------------------------------------------------------------

FUNCTIONS_WITH_MISTAKES = """
import torch
from kit.errors import RunError

def reward_of_truth(episode):
    return episode.reward > 0.5

def reward_of_nan(episode):
    return float("nan")

def raises(episode):
    return 1 / 0

def ends(episode):
    raise RunError("no judge at http://x; start it")

def forgets(episodes):
    [e for e in episodes]

def few(tasks, size, batch, seed, pass_rates):
    return tasks[: size - 1]

def per_answer(token_level_rewards, response_mask):
    advantages = token_level_rewards.sum(dim=1)
    return advantages, advantages

def per_token(old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config, rollout_is_weights=None):
    return -advantages * log_prob, {}

def in_place(old_log_prob, log_prob, advantages, response_mask,
    loss_agg_mode, config, rollout_is_weights=None):
    ratio = torch.exp(log_prob - old_log_prob)
    loss = (ratio * advantages).sum()
    ratio.zero_()
    return loss, {}
"""
MISTAKES = [  # (key, function, a part of the message)
    ("env.reward", "reward_of_truth", "returned True"),
    ("env.reward", "reward_of_nan", "returned nan"),
    ("env.reward", "raises", "bad.py:12: ZeroDivisionError: division by zero"),
    ("env.filters", "forgets", "returned None. Return a list of some of the episodes"),
    ("env.sampler", "few", "Return a list of 8 (its argument `size`) of the tasks"),
    (ADVANTAGE, "per_answer", "returned (torch.float32 of shape [4]"),
    (LOSS_MODE, "per_token", "returned (torch.float32 of shape [4, 5]"),
    (LOSS_MODE, "in_place", "its loss has no gradient"),
]


@pytest.fixture
def bad_file(tmp_path, monkeypatch):
    """A file bad.py in the working directory, whose functions have mistakes."""
    (tmp_path / "bad.py").write_text(FUNCTIONS_WITH_MISTAKES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("key", "function", "message"), MISTAKES, ids=[function for _, function, _ in MISTAKES]
)
def test_a_mistake_is_an_error_with_key_and_function_before_anything_starts(
    make_recipe, tiny_recipe, bad_file, key, function, message
):
    name = f"bad.py:{function}"
    recipe = make_recipe({key: [name] if key == "env.filters" else name})
    with pytest.raises(UserFunctionError, match=re.escape(message)) as caught:
        trial.check_functions(recipe, tiny_recipe.inputs)
    assert f"{key}=bad.py:{function}" in str(caught.value)
    assert "Nothing was started" in str(caught.value)


def test_a_mistake_during_a_run_is_reported_in_the_same_way(bad_file):
    with pytest.raises(UserFunctionError, match=r"^env\.reward=bad\.py:raises failed"):
        user_functions.load_function("bad.py:raises", "env.reward")(episode())
    # exceptions of the kit are passed on unchanged
    with pytest.raises(RunError, match=r"^no judge at http://x; start it$"):
        user_functions.load_function("bad.py:ends", "env.reward")(episode())
