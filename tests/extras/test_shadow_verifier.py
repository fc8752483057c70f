"""The shadow verifier measures episodes, and changes nothing else about them."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

import gym_client
import inference
from env import Task
from extras.shadow_verifier import ShadowVerifier, score
from kit.chat.parsed_response import ParsedResponse
from kit.data.episode import Episode, TurnSpan
from kit.data.metrics import compute_rollout_metrics, compute_validation_metrics
from kit.errors import RunError
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.verifiers import VerifierRouter
from tests.helpers.recipes import make_partial

SOURCE = """
def hackable(data_source, solution_str, ground_truth, extra_info):
    return float("7" in solution_str)

def strict(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def broken(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("the second judge is down")

class Turns:
    def reset(self, row):
        self.answer = row["answer"]

    def step(self, text):
        return "go on", 0.25 if text == self.answer else 0.0, False
"""
ROW = {"answer": "7", "responses_create_params": {"input": "say 7"}}


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Return a function that measures responses: measure("strict", "7", "77") -> the episode."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(SOURCE)

    def run(shadow, *turns):
        recipe = make_partial({"env": {"shadow_verifier": f"my.py:{shadow}"}})
        feature = ShadowVerifier(recipe)
        assert list(feature.check_settings(recipe)) == []
        pools = make_pools(recipe, feature.verifiers(), tmp_path)
        router = VerifierRouter(gym_client.Gym({}), pools)
        episode = make_episode(*turns)

        async def run_feature():
            async with router:
                await feature.after_episode(episode, router)

        asyncio.run(run_feature())
        return episode

    return run


def make_episode(*turns, reward=1.0):
    """Make an episode with these turns of the policy."""
    episode = Episode("rows.jsonl:1", "1/0", "hackable", [5], row=ROW, reward=reward)
    for text in turns:
        start = len(episode.response_ids)
        episode.output.append(gym_client.make_message(text))
        episode.response_ids += map(ord, text)
        episode.turns.append(TurnSpan(start, start + len(text), len(episode.output)))
        episode.responses.append(ParsedResponse.of_text(text))
    episode.response_mask = [1] * len(episode.response_ids)
    episode.log_probs = [-0.5] * len(episode.response_ids)
    return episode


def test_a_hacked_reward_has_a_gap(measure):
    honest = measure("strict", "7")
    hacked = measure("strict", "77777")
    assert honest.measures == {"shadow_failed": 0.0, "shadow_reward": 1.0, "shadow_gap": 0.0}
    assert hacked.measures == {"shadow_failed": 0.0, "shadow_reward": 0.0, "shadow_gap": 1.0}
    assert hacked.reward == 1.0 and hacked.status == "ok" and not hacked.reward_components
    metrics = compute_rollout_metrics([honest, hacked], [honest, hacked])
    assert metrics["rollout/reward/mean"] == 1.0
    assert metrics["rollout/shadow_reward/mean"] == metrics["rollout/shadow_gap/mean"] == 0.5
    held_out = compute_validation_metrics([honest, hacked], 1)
    assert held_out["val-aux/hackable/shadow_gap/mean"] == 0.5


def test_a_failure_of_the_shadow_verifier_leaves_the_episode_as_it_is(measure):
    episode = measure("broken", "7")
    expected = make_episode("7")
    assert episode.measures == {"shadow_failed": 1.0}
    assert (episode.reward, episode.status, episode.error) == (1.0, "ok", "")
    assert episode.response_ids == expected.response_ids
    metrics = compute_rollout_metrics([episode], [episode])
    assert metrics["rollout/shadow_failed/mean"] == 1.0 and metrics["rollout/failed_frac"] == 0.0
    assert "rollout/shadow_reward/mean" not in metrics


def test_a_class_gets_all_turns_and_a_function_the_last_one(measure):
    assert measure("Turns", "7", "8", "7").measures["shadow_reward"] == 0.5
    assert measure("strict", "8", "7").measures["shadow_reward"] == 1.0


class Session:
    """A session of a Gym server with the reward 0.25."""

    def __init__(self, kind):
        self.kind = kind

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def verify(self, body, last):
        self.body = body
        return gym_client.VerifyResult(0.25)


@pytest.mark.parametrize(("status", "calls"), [("ok", 1), ("timeout", 0)])
def test_only_verified_episodes_are_measured(monkeypatch, status, calls):
    measured = []

    async def after_episode(episode, gym):
        measured.append((episode.status, gym))

    async def run_episode(request, sampling, context, gym):
        return dataclasses.replace(make_episode("7"), status=status)

    monkeypatch.setattr(inference, "run_episode", run_episode)
    task = Task("rows.jsonl:1", ROW, "s", [], [])
    request = (task, SimpleNamespace())
    context = SimpleNamespace(after_episode=[after_episode])
    asyncio.run(inference.run_with_retries(request, {}, context, "gym"))
    assert measured == [("ok", "gym")] * calls


def test_a_gym_server_is_named_by_its_name():
    servers = {"judge": {"url": "http://x"}}
    feature = ShadowVerifier(
        make_partial({"env": {"shadow_verifier": "judge"}, "gym": {"servers": servers}})
    )
    assert (feature.name, feature.spec, feature.verifiers()) == ("judge", None, {})
    session = Session("verify")
    episode = make_episode("77")
    gym = SimpleNamespace(session=lambda name, row: session)
    asyncio.run(feature.after_episode(episode, gym))
    assert episode.measures["shadow_gap"] == 0.75 and session.body["output"] == episode.output
    game = SimpleNamespace(session=lambda name, row: Session("step"))
    with pytest.raises(RunError, match="judge plays turns"):
        asyncio.run(score(feature, make_episode("7"), game))


def test_a_bad_value_is_one_line_with_the_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = make_partial({"env": {"shadow_verifier": "judge"}})
    (problem,) = ShadowVerifier(settings).check_settings(settings)
    assert problem.startswith("env.shadow_verifier=judge is not a Python verifier. Name ")
    settings = make_partial({"env": {"shadow_verifier": "nowhere.py:f"}})
    (problem,) = ShadowVerifier(settings).check_settings(settings)
    assert "no file nowhere.py" in problem and "\n" not in problem
