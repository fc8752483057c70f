"""The results of functions and environments. An invalid one is a failed episode."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from decimal import Decimal

import numpy as np
import pytest
import torch

import inference
from kit.chat.parsed_response import ParsedResponse
from kit.engine.sampling import request_group
from kit.verify.python_verifiers import calls
from kit.verify.python_verifiers.calls import VerifierError
from kit.verify.python_verifiers.session import make_arguments
from tests.helpers.rollouts import chatml_tokenizer, context_of, one_turn_each, task_of
from tests.helpers.verifiers import EXAMPLE_SOURCE, list_rewards, make_router, play, run_session


@pytest.fixture
def build_router(tmp_path, monkeypatch):
    """A function that makes a router: build_router("my.py:compute_score", timeout_s=1.0)."""
    (tmp_path / "my.py").write_text(EXAMPLE_SOURCE)
    monkeypatch.chdir(tmp_path)
    return functools.partial(make_router, tmp_path)


# --- calls ---------------------------------------------------------------------------------------


def test_a_function_is_called_as_verl_calls_it(build_router):
    right, wrong = play(build_router("my.py:compute_score"), "it is 7", "it is 8")
    assert (right.reward, wrong.reward, right.components) == (1.0, 0.0, {})
    (result,) = play(build_router("my.py:score_with_details"), "x")
    assert (result.reward, result.components) == (0.5, {"acc": 1.0, "length": 1.0})
    assert result.latency_s < 1
    assert result.details == {"failed": "x", "who": "score_with_details", "odd": "{1, 2}"}
    strict = {"function": "my.py:score_with_details", "strict": True}
    assert list_rewards(play(build_router(strict), "x")) == [1.0]


@pytest.mark.parametrize(
    ("settings", "text"), [({}, "7"), ({"raw_text": True}, "<think>T</think>7")]
)
def test_a_function_reads_the_answer_unless_the_recipe_asks_for_the_raw_text(
    build_router, settings, text
):
    response = ParsedResponse("T", "7", [], "7", "<think>T</think>7")
    verifier = {"function": "my.py:score_with_details", **settings}
    (result,) = play(build_router(verifier), response)
    assert result.details["failed"] == text


def test_the_arguments_of_a_function_come_from_the_row():
    extra_info = {"index": 3, "row": "its own"}
    row = {"answer": "a", "expected_answer": "e", "extra_info": extra_info}
    arguments = make_arguments(row, "text", "name")
    assert arguments.pop("extra_info") == extra_info | {"num_turns": 2, "rollout_reward_scores": {}}
    assert arguments == {"data_source": "name", "solution_str": "text", "ground_truth": "e"}
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": ["g"]}, "extra_info": None}
    arguments = make_arguments(row, "", "name")
    assert (arguments["data_source"], arguments["ground_truth"]) == ("gsm8k", ["g"])


def test_verls_scorer_scores_the_rows_that_it_knows(build_router):
    router = build_router("verl")
    gsm8k = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}

    async def score_two_rows():
        async with router:
            results = await run_session(router, "so\n#### 72", "#### 7", row=gsm8k)
            return results + await run_session(router, "x", row={"data_source": "mine"})

    results = asyncio.run(score_two_rows())
    assert list_rewards(results) == [1.0, 0.0, "raised"]
    assert "not implemented for data_source='mine'" in str(results[-1])


def test_an_episode_whose_function_raises_has_no_reward(build_router):
    tokenizer = chatml_tokenizer()
    task = dataclasses.replace(task_of(tokenizer, tools=False), server="count_sevens")
    context = context_of(one_turn_each(["77", "?"], tokenizer), tokenizer)

    async def sample_two():
        async with build_router("my.py:count_sevens") as router:
            return await inference.rollout(request_group(task, "g", 2), {}, context, router)

    episodes = {e.response: e for e in asyncio.run(sample_two())}
    right, failed = episodes["77"], episodes["?"]
    assert (right.status, right.reward, right.reward_components) == ("ok", 2.0, {"length": 2.0})
    assert (failed.status, failed.reward, failed.reward_components) == ("raised", None, {})


def test_concurrent_environments_keep_their_states(build_router):
    """Two processes run the steps of three episodes."""
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
                async with router.session("Game", {"question": question, "answer": "7"}) as session:
                    observations.append(session.observation)
        return observations

    assert asyncio.run(read_observations()) == ["Guess.", None]


# --- values --------------------------------------------------------------------------------------


NUMBER_TYPES = [int, float, bool, Decimal, np.bool_, np.float16, np.array, torch.tensor]
NO_NUMBERS = [
    *(None, "1", [1.0], 1j, np.array([1.0]), np.array("1"), torch.tensor([1.0]), np.ma.masked),
    *(math.nan, math.inf, np.float32("nan"), torch.tensor(math.inf), Decimal("snan"), 10**400),
]


def score(value):
    """Return the answer of a function that returns `value`."""
    with asyncio.Runner() as runner:
        return calls.score(lambda: value, runner, {})


@pytest.mark.parametrize("make", NUMBER_TYPES)
def test_a_number_of_any_type_is_a_reward_and_a_metric(make):
    for number in (0, 1):
        value = make(number)
        assert score(value) == {"reward": float(number), "reward_components": {}}
        answer = score({"score": value, "part": value, "name": "x"})
        assert answer == {"reward": number, "reward_components": {"part": number}, "name": "x"}
        assert {type(answer["reward"]), type(answer["reward_components"]["part"])} == {float}
        step = calls.parse_step((None, value, False))
        assert step == {"observation": None, "reward": number, "done": False}


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_any_other_result_is_a_failure(value):
    for result in (value, {"score": value}, {"acc": 1.0}, {"score": 1.0, "part": math.nan}):
        with pytest.raises(VerifierError):
            score(result)
    assert calls.parse_step((None, value, False)) is None


def test_the_end_of_an_environment_is_a_bool_of_any_library():
    for done in (True, np.bool_(True), np.array(True), torch.tensor(True)):
        assert calls.parse_step(("x", 1, done))["done"] is True
    for done in (1, None, "True", np.array([True]), torch.tensor(1)):
        assert calls.parse_step(("x", 1, done)) is None
