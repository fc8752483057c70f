"""Rewards of functions and steps of environments. An invalid return value is a failed episode."""

from __future__ import annotations

import asyncio
import functools

import psutil
import pytest

from gym_client import GymError
from kit.data.episode import ParsedResponse
from kit.gym.python_verifiers.session import make_arguments
from tests.helpers.verifiers import EXAMPLE_SOURCE, make_router, play, run_session


@pytest.fixture
def build_router(tmp_path, monkeypatch):
    """A function that makes a router: build_router("my.py:compute_score", timeout_s=1.0)."""
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    monkeypatch.chdir(tmp_path)
    return functools.partial(make_router, tmp_path)


def test_a_function_is_called_as_verl_calls_it(build_router):
    right, wrong = play(build_router("my.py:compute_score"), "it is 7", "it is 8")
    assert (right.reward, wrong.reward, right.components) == (1.0, 0.0, {})
    result = play(build_router("my.py:score_with_details"), "x")[0]
    assert result.reward == 0.5
    assert result.components == {"acc": 1.0, "length": 1.0}
    assert result.latency_s < 1
    assert result.details == {"pred": "x", "who": "score_with_details", "odd": "{1, 2}"}
    assert (
        play(build_router({"function": "my.py:score_async", "strict": True}), "x")[0].reward == 1.0
    )


@pytest.mark.parametrize(
    ("settings", "text"), [({}, "7"), ({"raw_text": True}, "<think>T</think>7")]
)
def test_a_function_reads_the_answer_unless_the_recipe_asks_for_the_raw_text(
    build_router, settings, text
):
    response = ParsedResponse("T", "7", [], "7", "<think>T</think>7")
    verifier = {"function": "my.py:return_failed_key", **settings}
    (result,) = play(build_router(verifier), response)
    assert result.details["failed"] == text


def test_a_function_may_return_the_key_that_the_kit_uses_for_failures(build_router):
    for text in ("", "no"):
        (result,) = play(build_router("my.py:return_failed_key"), text)
        assert (result.reward, result.details) == (0.5, {"failed": text or None})


@pytest.mark.parametrize(
    ("fields", "ground_truth"),
    [
        ({"answer": "a"}, "a"),
        ({"answer": "a", "expected_answer": "e"}, "e"),
        ({"answer": "a", "reward_model": {"style": "rule", "ground_truth": ["g"]}}, ["g"]),
        ({}, None),
    ],
)
def test_the_ground_truth_comes_from_reward_model_or_from_the_row(fields, ground_truth):
    row = {**fields, "extra_info": {"index": 3, "row": "its own"}}
    arguments = make_arguments(row, "text", "name")
    assert arguments["ground_truth"] == ground_truth
    assert arguments["data_source"] == "name"
    assert arguments["solution_str"] == "text"
    extra_info = {"index": 3, "row": "its own", "num_turns": 2, "rollout_reward_scores": {}}
    assert arguments["extra_info"] == extra_info
    row = {"extra_info": {"num_turns": 5, "rollout_reward_scores": [1]}}
    assert make_arguments(row, "", "")["extra_info"] == {"row": row, **row["extra_info"]}
    row = {"data_source": "openai/gsm8k", "extra_info": None}
    assert make_arguments(row, "", "")["data_source"] == "openai/gsm8k"


def test_verls_scorer_needs_neither_torch_nor_ray(build_router):
    router = build_router("verl")
    gsm8k = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}

    async def score_and_measure():
        async with router:
            results = await run_session(router, "so\n#### 72", "#### 7", row=gsm8k)
            process = psutil.Process(router.pools["verl"].workers[0].process.pid)
            memory = process.memory_info().rss
            return results, memory, await run_session(router, "x", row={"data_source": "mine"})

    (right, wrong), memory, (unknown,) = asyncio.run(score_and_measure())
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert memory < 100 * 2**20
    message = "NotImplementedError: Reward function is not implemented for data_source='mine'"
    assert message in str(unknown)


def test_an_environment_travels_between_processes(build_router):
    """Three concurrent episodes keep their state, although two processes run their steps."""
    router = build_router({"function": "my.py:Game", "most": 3}, processes=2)

    async def play_three_games():
        async with router:
            sessions = [run_session(router, str(first), "3", "7") for first in (1, 2, 7)]
            return await asyncio.gather(*sessions)

    games = asyncio.run(play_three_games())
    turns = [(t.observation, t.reward, t.terminated, t.truncated) for t in games[0]]
    assert turns == [
        ("No, 1 of 3.", 0.0, False, False),
        ("No, 2 of 3.", 0.0, False, False),
        (None, 1.0, True, False),
    ]
    assert games[1] == games[0] and games[2][0].reward == 1.0


def test_an_environment_may_have_a_first_observation(build_router):
    async def read_observations():
        observations = []
        async with build_router("my.py:Game") as router:
            for question in ("say 7", "other"):
                row = {"question": question, "answer": "7"}
                async with router.session("Game", row) as session:
                    observations.append(session.observation)
        return observations

    assert asyncio.run(read_observations()) == ["Guess.", None]


def test_an_invalid_return_value_is_a_failure_whose_message_shows_it(build_router):
    texts = {  # {key of INVALID: the value in the message}
        "none": "None",
        "nan": "nan",
        "text": "'1.0'",
        "pair": "(1.0, 'reason')",
        "infinite": "inf",
        "list": "[1.0]",
        "without": "{'acc': 1.0}",
        "part": "{'acc': nan, 'score': 1.0}",
        "huge": "1000000000000000",
    }
    errors = play(build_router("my.py:return_invalid"), *texts)
    for error, value in zip(errors, texts.values(), strict=True):
        assert isinstance(error, GymError)
        assert error.reason == "bad_answer" and not error.retryable
        assert str(error).startswith(f"my.py:return_invalid returned {value}")
        assert "a finite number, or a dict" in str(error)
