"""Tests that templates/trl.py calls reward functions as TRL's GRPOTrainer calls them.

TRL is not installed. `compute_trls_rewards` is what `_calculate_rewards` and `nansum` of TRL 1.16
do with the completions of one prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.data.verl_rows import parse_row
from kit.errors import UserFunctionError
from kit.recipe.python_files import import_file
from kit.verify.python_verifiers.calls import describe_failure
from kit.verify.python_verifiers.session import make_arguments
from templates.trl import compute_score
from tests.helpers.recipes import ROOT

FUNCTIONS = '''
import json


def brief(completions, **columns):
    """For text prompts: a completion is text."""
    return [float(len(completion) < 5) for completion in completions]


def accuracy(prompts, completions, answer, **columns):
    """For prompts with messages: a completion is a list with one message."""
    texts = [completion[0]["content"] for completion in completions]
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [text.endswith(truth) for text, truth in zip(texts, answer)]


async def length(completions, **columns):
    return [len(str(completion)) for completion in completions]


def sometimes(completions, only_if, **columns):
    return [1.0 if condition else None for condition in only_if]


def two(completions, **columns):
    return [0.0, 1.0]


def parse(completions, **columns):
    return [json.loads(text) for text in completions]  # LINE of parse
'''
TEXT = "2 + 2 ="
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def functions_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def score(functions_file, row, response, names, **trials):
    """Call the template as a run calls it for a row of a file."""
    arguments = make_arguments(parse_row(row, "rows.jsonl:1"), response, "compute_score")
    references = [f"{functions_file}:{name}" for name in names]
    return asyncio.run(compute_score(**arguments, reward_funcs=references, **trials))


def compute_trls_rewards(functions_file, row, responses, names, weights):
    """Return the rewards that TRL computes from responses to one row."""
    module = import_file(functions_file)
    count = len(responses)
    completions = list(responses)
    if isinstance(row["prompt"], list):  # trl.data_utils.is_conversational
        completions = [[{"role": "assistant", "content": text}] for text in responses]
    columns = {name: [value] * count for name, value in row.items() if name != "prompt"}
    rewards = np.full((count, len(names)), math.nan)
    for column, name in enumerate(names):
        output = getattr(module, name)(
            prompts=[row["prompt"]] * count, completions=completions, **columns
        )
        if inspect.isawaitable(output):
            output = asyncio.run(output)
        rewards[:, column] = [math.nan if reward is None else reward for reward in output]
    return np.nansum(rewards * weights, axis=1), rewards


@settings(deadline=None, max_examples=40)
@given(
    prompt=st.sampled_from([TEXT, MESSAGES]),
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=3),
    weights=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    only_if=st.booleans(),
)
def test_rewards_are_those_of_trl(functions_file, prompt, texts, weights, only_if):
    names = ["brief" if prompt is TEXT else "accuracy", "length", "sometimes"]
    row = {"prompt": prompt, "answer": "4", "only_if": only_if}
    expected, parts = compute_trls_rewards(functions_file, row, texts, names, weights)
    for index, text in enumerate(texts):
        result = score(functions_file, row, text, names, reward_weights=weights)
        assert result.pop("score") == pytest.approx(expected[index])
        assert result == {
            name: part
            for name, part in zip(names, parts[index], strict=True)
            if not math.isnan(part)
        }


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["two"], None, r"two returned \[0.0, 1.0\] for one completion"),
        (["accuracy"], None, "accuracy cannot be called with the columns .*'answer'"),
        (["sometimes"], None, "sometimes returned None: the row has no reward"),
    ],
)
def test_an_invalid_result_fails_the_episode(functions_file, names, weights, message):
    row = {"prompt": TEXT, "only_if": False}
    with pytest.raises(UserFunctionError, match=message):
        score(functions_file, row, "4", names, reward_weights=weights)


def test_an_error_has_the_line_of_the_users_file(functions_file):
    """Not that of the template, nor that of the library which raised it."""
    with pytest.raises(ValueError) as raised:
        score(functions_file, {"prompt": TEXT}, "four", ["parse"])
    number = 1 + ["LINE of parse" in text for text in FUNCTIONS.splitlines()].index(True)
    failure = describe_failure(raised.value, str(ROOT / "templates" / "trl.py"))
    assert failure["why"].startswith(f"failed at {functions_file}:{number} in parse: ")
