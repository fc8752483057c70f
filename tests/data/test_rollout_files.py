"""Tests how episodes are written, read and replayed."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest

import env
import gym_client
from kit.data import rollout_files
from kit.data.episode import (
    TOKEN_FIELDS,
    Branch,
    Episode,
    PolicyVersion,
    TurnSpan,
    append_tokens,
)
from kit.data.reward_scale import RewardScale
from kit.errors import ConfigError
from tests.helpers.recipes import row


def episode(group_id="3/0", **changes) -> Episode:
    """Make an episode of two turns with an observation between them, and 32-bit log-probs."""
    output = [
        gym_client.make_message("one"),
        gym_client.function_call_output("c", "seen"),
        gym_client.make_message("two"),
    ]
    fields = {
        "response_ids": [5, 6, 7, 8],
        "response_mask": [1, 1, 0, 1],
        "log_probs": [
            float(np.float32(-1 / 3)),
            float(np.float32(-1e-7)),
            0.0,
            float(np.float32(-20.123457)),
        ],
        "turns": [TurnSpan(0, 2, 1), TurnSpan(3, 4, 3)],
        "output": output,
        "ended": "stop",
        "reward": 0.1 + 0.2,
        "error": "not a line\u2028break in JSONL",
        "turn_rewards": [0.1, 0.2],
        "policy_versions": [PolicyVersion(2, 4), PolicyVersion(1, None)],
        "reward_components": {"a": 1.5},
        "verify_result": {"extracted": "7"},
        "row": row(),
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        "observation": "Count.",
    }
    return Episode("rows.jsonl:1", group_id, "reasoning_gym", [1, 2, 3], **{**fields, **changes})


def task(row_id: str) -> env.Task:
    return env.Task(
        row_id, row(), "reasoning_gym", [{"role": "user", "content": "say 7"}], [1, 2, 3]
    )


def write_and_load(path, *episodes) -> list[list[Episode]]:
    """Write episodes to a file, and load the batches of a replay from it."""
    with path.open("wb") as out:
        for k, e in enumerate(episodes):
            rollout_files.write_record(out, rollout_files.to_record(e, 0, k))
    return rollout_files.load_replay(path, [task("rows.jsonl:1")])


def test_an_episode_that_is_written_and_read_is_the_same_bit_for_bit(tmp_path):
    one = episode()
    ((again,),) = write_and_load(tmp_path / "step_1.jsonl", one)
    assert again == one
    failed = episode(
        status="timeout",
        error="no answer",
        reward=None,
        response_ids=[],
        response_mask=[],
        log_probs=[],
        failure={"failure_reason": "down"},
    )
    failed = dataclasses.replace(failed, turns=[], output=[], turn_rewards=[], prompt_ids=[])
    ((again,),) = write_and_load(tmp_path / "step_1.jsonl", failed)
    assert again == failed and (again.status, again.reward) == ("timeout", None)
    for odd in (
        {"verify_result": {"said": "half a pair \ud800"}, "error": "\udfff"},
        {"verify_result": {"n": 2**70}},
    ):
        one = episode(**odd)
        ((again,),) = write_and_load(tmp_path / "step_1.jsonl", one)
        assert again == one
    damaged = episode(log_probs=[-math.inf, math.nan, 0.0, -1.0])
    ((again,),) = write_and_load(tmp_path / "step_1.jsonl", damaged)
    assert str(again) == str(damaged)


def test_the_fast_writer_takes_all_fields_of_an_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_files, "shortest_floats", None)  # the slow one needs it
    one = episode(scale=RewardScale(0.1, 0.9))
    ((again,),) = write_and_load(tmp_path / "step_1.jsonl", one)
    assert again == one


def test_the_branches_of_an_episode_are_written_and_read(tmp_path):
    """A branch begins within the main row. Its log-probs may be damaged, too."""
    branch = Branch([1, 2, 3, 5, 6, 9])
    append_tokens(branch, [10, 11], [-0.5, math.inf], [PolicyVersion(2, 4)])
    branch.turns = [TurnSpan(0, 2, 1)]
    branch.output = [gym_client.make_message("aside")]
    one = episode(branches=[branch, dataclasses.replace(branch, log_probs=[-1.0, -2.0])])
    ((again,),) = write_and_load(tmp_path / "step_1.jsonl", one)
    assert again == one and again.branches[0].log_probs[1] == math.inf


def test_an_image_in_a_row_is_written_as_its_hash():
    """Other parts are written unchanged, and the row itself is not modified."""
    url = "data:image/png;base64,AAAA"
    shown, *others = parts = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "what?"},
        {"type": "input_image", "image_url": "https://x/a.png"},
    ]
    image_row = {**row(), "responses_create_params": {"input": [{"content": parts}]}}
    written = rollout_files.replace_images_by_hash(image_row)
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    replaced = {**shown, "image_url": f"sha256 {digest}"}
    assert written["responses_create_params"]["input"] == [{"content": [replaced, *others]}]
    assert shown["image_url"] == url
    assert rollout_files.replace_images_by_hash(row()) == row()


def test_32_bit_log_probs_are_written_with_few_digits_and_read_bit_for_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 2_000, dtype=np.uint32).view(np.float32)
    sampled = [float(p) for p in bits if np.isfinite(p)]
    count = len(sampled)
    one = episode(
        response_ids=[7] * count,
        response_mask=[1] * count,
        turns=[TurnSpan(0, count, 1)],
        log_probs=sampled,
    )
    ((again,),) = write_and_load(tmp_path / "step_1.jsonl", one)
    assert again.log_probs == sampled
    (_, record), *_ = rollout_files.read_records(tmp_path / "step_1.jsonl")
    item = next(item for item in record["response"]["output"] if TOKEN_FIELDS[2] in item)
    # numpy prints as few digits as 32 bits need
    assert item[TOKEN_FIELDS[2]] == [float(str(np.float32(p))) for p in sampled]


def test_a_record_has_the_format_of_gym_and_begins_with_a_summary():
    record = rollout_files.to_record(episode(), 3, 5)
    assert next(iter(record)) == "_episode" and list(record["_episode"])[:3] == [
        "prompt",
        "answer",
        "reward",
    ]
    assert record["response"]["tools"] == episode().tools
    assert record["_episode"]["prompt"] == "say 7\nCount."
    assert record["_episode"]["prompt_tokens"] == 3
    assert record["_episode"]["response_tokens"] == 4
    assert (record["extracted"], record["question"]) == ("7", "say 7")
    assert (record["_ng_task_index"], record["_ng_rollout_index"]) == (3, 5)
    first, seen, second = record["response"]["output"]
    assert first["prompt_token_ids"] == [1, 2, 3] and first["generation_token_ids"] == [5, 6]
    assert first["generation_log_probs"][0] == -0.33333334  # the digits of a 32-bit number
    assert "generation_token_ids" not in seen and second["generation_token_ids"] == [8]
    assert second["prompt_token_ids"] == [1, 2, 3, 5, 6, 7]


def test_a_record_has_the_failure_and_the_components_that_a_server_reports():
    fields_of_the_row = {"reward_components": "x", "_episode": "x", "reward": 9.0}
    task_row = {**row("say 7"), **fields_of_the_row}
    failed = Episode("r", "0/0", "s", [5], row=task_row, failure={"stage": "agent"})
    record = rollout_files.to_record(failed, 0, 0)
    assert next(iter(record)) == "_episode"
    assert record["_episode"]["failure"] == {"stage": "agent"}
    assert record["reward_components"] == {} and record["reward"] is None
    plain = rollout_files.to_record(Episode("r", "0/0", "s", [5], row=row("say 7")), 0, 0)
    assert "failure" not in plain["_episode"] and "reward_components" not in plain


def test_generated_rows_and_repeated_rows_have_their_own_indices():
    tasks = [SimpleNamespace(row_id=name) for name in ("a", "b")]
    before = [Episode(name, "0/0", "s", [5], row={}) for name in ("b", "new")]
    episodes = [Episode(name, "1/0", "s", [5], row={}) for name in ("b", "new", "a", "newer")]
    rollout_files.assign_record_indices(episodes, tasks, before)
    assert [tuple(e.record_index) for e in episodes] == [(1, 1), (3, 1), (0, 0), (7, 0)]


def test_the_batches_of_a_refilled_step_stay_separate(tmp_path):
    batches = write_and_load(
        tmp_path / "step_1.jsonl", episode("3/0"), episode("3/1"), episode("4/0")
    )
    assert [[e.group_id for e in batch] for batch in batches] == [["3/0", "3/1"], ["4/0"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"step_1.jsonl:1 is no episode of a rollouts file \(JSONDecodeError"),
        (
            '{"_episode": {"row_id": "other.jsonl:9"}, "response": {"output": []}}',
            "step_1.jsonl:1: env.train_files have no row other.jsonl:9",
        ),
        ('{"_episode": {"row_id": "r", "row": {"a": 1}}, "response": {"output": []}}', "KeyError"),
        ("", "holds no episode"),
    ],
)
def test_a_line_that_is_no_episode_is_an_error_with_its_number(tmp_path, line, message):
    path = tmp_path / "step_1.jsonl"
    path.write_text(f"{line}\n" if line else "")
    with pytest.raises(ConfigError, match=message):
        rollout_files.load_replay(path, [task("rows.jsonl:1")])
