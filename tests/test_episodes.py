"""Episodes written down and read again: what a replay is made of."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from conftest import row

import env
import episodes
import gym_client
import inference
from config import ConfigError
from episodes import Episode
from gym_client import GymError


def episode(group_id="3/0", **changes) -> Episode:
    """Two turns with an observation between them; log-probs of 32 bits, as the sampler's are."""
    said = [gym_client.message("one"), gym_client.function_call_output("c", "seen"), gym_client.message("two")]
    fields = {
        "response_ids": [5, 6, 7, 8],
        "response_mask": [1, 1, 0, 1],
        "log_probs": [float(np.float32(-1 / 3)), float(np.float32(-1e-7)), 0.0, float(np.float32(-20.123457))],
        "turns": [(0, 2, 1), (3, 4, 3)],
        "output": said,
        "ended": "stop",
        "reward": 0.1 + 0.2,
        "turn_rewards": [0.1, 0.2],
        "reward_components": {"a": 1.5},
        "verdict": {"extracted": "7"},
        "row": row(),
    }
    return Episode("rows.jsonl:1", group_id, "reasoning_gym", [1, 2, 3], **{**fields, **changes})


def task(row_id: str) -> env.Task:
    return env.Task(row_id, row(), "reasoning_gym", [{"role": "user", "content": "say 7"}], [1, 2, 3])


def written(path, *given) -> list[list[Episode]]:
    path.write_text("".join(json.dumps(episodes.as_record(e, "say 7")) + "\n" for e in given))
    return episodes.load_replay(path, [task("rows.jsonl:1")])


def test_what_is_written_is_read_to_the_last_bit(tmp_path):
    one = episode()
    ((again,),) = written(tmp_path / "step_1.jsonl", one)
    assert again == one
    failed = episode(status="timeout", error="no answer", reward=None, response_ids=[], response_mask=[], log_probs=[])
    failed = dataclasses.replace(failed, turns=[], output=[], turn_rewards=[])
    ((again,),) = written(tmp_path / "step_1.jsonl", failed)
    assert (again.status, again.reward, again.response_ids) == ("timeout", None, [])
    record = episodes.as_record(one, "how many?")
    assert list(record)[:3] == ["prompt", "response", "turns"] and record["turns"] == 2 and record["prompt_tokens"] == 3
    assert record["tokens"]["log_probs"][0] == -0.33333334  # no longer than 32 bits


def test_the_batches_of_a_refilled_step_stay_apart(tmp_path):
    batches = written(tmp_path / "step_1.jsonl", episode("3/0"), episode("3/1"), episode("4/0"))
    assert [[e.group_id for e in batch] for batch in batches] == [["3/0", "3/1"], ["4/0"]]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", r"step_1.jsonl:1: no episode of rollouts/step_<N>.jsonl \(JSONDecodeError"),
        ('{"row_id": "rows.jsonl:1"}', r"step_1.jsonl:1: no episode of .*KeyError\('tokens'\)"),
        (
            '{"row_id": "other.jsonl:9"}',
            "step_1.jsonl:1: env.train_files have no row other.jsonl:9; give the same recipe",
        ),
        ("", "holds no episode"),
    ],
)
def test_what_is_no_rollouts_file_is_said(tmp_path, line, why):
    path = tmp_path / "step_1.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=why):
        episodes.load_replay(path, [task("rows.jsonl:1")])
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: no such file"):
        episodes.load_replay(tmp_path / "nowhere.jsonl", [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"response_mask": [1, 1, 0]}, "lists differ in length: 4 ids, 3 of mask, 4 log-probs"),
        ({"log_probs": [0.0] * 5}, "lists differ in length: 4 ids, 4 of mask, 5 log-probs"),
        ({"response_ids": [], "response_mask": [], "log_probs": [], "turns": []}, "lists differ in length: 0 ids"),
        ({"response_mask": [1, 1, 1, 1]}, "3 sampled tokens, 4 in the mask"),
    ],
)
def test_ids_that_do_not_belong_together_are_found_and_named(changes, why):
    inference.check_ids(episode())
    with pytest.raises(GymError, match=why) as caught:
        inference.check_ids(episode(**changes))
    assert caught.value.reason == "bad_ids"
