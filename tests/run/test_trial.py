"""Tests of the trial: custom functions are called on synthetic episodes before a run starts."""

from __future__ import annotations

import json
import sys

import pytest

import training
from kit.errors import UserFunctionError
from kit.recipe.user_functions import ADVANTAGE
from kit.run import trial
from tests.helpers.recipes import load


@pytest.fixture(scope="module")
def tiny(workspace):
    return load(workspace)


@pytest.fixture
def make_inputs(tiny):
    """A function that loads the tiny recipe with {key: value} changes -> (recipe, data)."""

    def make(changes):
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in changes.items()}
        arguments = [f"{key}={text}" for key, text in texts.items()]
        return tiny.recipe.change(*arguments), tiny.inputs

    return make


FUNCTIONS = """
seen = []

def reward(episode):
    seen.append(episode)
    parts = episode.reward_components
    if "accuracy" not in parts:
        raise ValueError("this verifier gives an accuracy")
    return parts["accuracy"] + parts.get("style") + 0.0 * episode.timings["verify"]

def merged(episode):
    return sum(len(name) for name in {**episode.verify_result, "more": 1})

def wrong_row(episode):
    return episode.row["questoin"]

def everything(episodes):
    seen.append(episodes)
    return [e for e in episodes if e.response and e.transcript and e.question is not None]

def asks_all(token_level_rewards, token_level_scores, response_mask, turn, index, values,
             old_log_probs, ref_log_prob, rollout_log_probs, rollout_is_weights,
             sum_pi_squared, reward_baselines, gamma, lam, config):
    assert index.shape == reward_baselines.shape == (len(values),) and len(set(index)) == 2
    assert turn.shape == values.shape == sum_pi_squared.shape == ref_log_prob.shape
    assert gamma * lam <= 1
    assert ((turn >= 0) == response_mask.bool()).all() and not response_mask.is_floating_point()
    assert rollout_is_weights is None and config.adv_estimator.endswith("asks_all")
    return values, values

def open_handed(token_level_rewards, **others):
    assert set(others) > {"values", "index", "config"}
    return token_level_rewards, token_level_rewards
"""


def test_synthetic_episodes_are_like_those_of_a_run(workspace, make_inputs, tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    changes = {"env.reward": "looks.py:reward", "env.filters": ["looks.py:everything"]}
    recipe, data = make_inputs({**changes, ADVANTAGE: "looks.py:asks_all"})
    trial.check_functions(recipe, data)
    rewarded, episodes = sys.modules[recipe.functions.filters[0].__module__].seen
    assert rewarded.row == data.train[1].row and rewarded.reward == 1.0
    assert (
        len(episodes) == 8
        and len({e.group_id for e in episodes}) == 2
        and len({e.reward for e in episodes[:4]}) == 4
    )
    assert {e.ended for e in episodes} == {"stop", "length"}
    assert episodes[0].prompt_ids == data.train[0].prompt_ids
    assert data.tokenizer.decode(episodes[0].response_ids) and all(
        len(e.turns) == 1 for e in episodes
    )
    training.build_batch(episodes, 0, 1.0)  # raises an error for incomplete episodes
    trial.check_functions(*make_inputs({ADVANTAGE: "looks.py:open_handed"}))
    trial.check_functions(*make_inputs({"env.reward": "looks.py:merged"}))
    with pytest.raises(UserFunctionError, match="KeyError: 'questoin'"):
        trial.check_functions(*make_inputs({"env.reward": "looks.py:wrong_row"}))

    recipe, data, _ = load(
        workspace, "env.filters=[looks.py:everything]", f"env.train_files=[{workspace}/tools.jsonl]"
    )
    trial.check_functions(recipe, data)
    episodes = sys.modules[recipe.functions.filters[0].__module__].seen[-1]
    assert all(
        len(e.turns) == 2 and 0 in e.response_mask and "=> " in e.transcript for e in episodes
    )
    training.build_batch(episodes, 0, 1.0)
