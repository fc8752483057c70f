"""Tests how files in verl's format are read as Gym rows."""

from __future__ import annotations

import json
import re

import pandas
import pyarrow
import pytest
from pyarrow import parquet

import env
from kit.data import verl_rows
from tests.helpers.recipes import load, row, write_rows


def gsm8k(i: int, **changes) -> dict:
    """Make a row as verl's examples/data_preprocess/gsm8k.py does."""
    fields = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i} + 1? Let's think step by step."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {
            "split": "train",
            "index": i,
            "answer": f"So #### {i + 1}",
            "question": f"{i} + 1?",
        },
    }
    return fields | changes


def make_gym_row(i: int) -> dict:
    """The Gym row of gsm8k(i)."""
    verl_row = gsm8k(i)
    return {"responses_create_params": {"input": verl_row.pop("prompt")}, **verl_row}


def read_inputs(path) -> list:
    """The input of each row of a file."""
    rows = [r for _, r in verl_rows.read_rows(str(path))]
    return [r["responses_create_params"]["input"] for r in rows]


def test_verl_files_are_read_whichever_library_wrote_them(tmp_path):
    rows = [gsm8k(i) for i in range(3)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "pandas.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "arrow.parquet")
    write_rows(tmp_path / "lines.jsonl", rows)
    (tmp_path / "list.json").write_text("\n" + json.dumps(rows, indent=1))
    write_rows(tmp_path / "lines.json", rows)
    for name in ("pandas.parquet", "arrow.parquet", "lines.jsonl", "list.json", "lines.json"):
        path = tmp_path / name
        expected = [(f"{path}:{i + 1}", make_gym_row(i)) for i in range(3)]
        assert list(verl_rows.read_rows(str(path))) == expected, name
    mixed = write_rows(tmp_path / "mixed.jsonl", [gsm8k(0), row(), gsm8k(1, prompt="as text")])
    gym_input = row()["responses_create_params"]["input"]
    assert read_inputs(mixed) == [gsm8k(0)["prompt"], gym_input, "as text"]
    other_key = write_rows(tmp_path / "asked.jsonl", [{"asked": "2?", "prompt": 7}])
    assert [r for _, r in verl_rows.read_rows(str(other_key), "asked")] == [
        {"responses_create_params": {"input": "2?"}, "prompt": 7}
    ]


@pytest.mark.parametrize(
    ("invalid_row", "message"),
    [
        (gsm8k(0, prompt=None), "x:1: `prompt` is null. It must be text or chat messages."),
        (gsm8k(0, prompt=[]), r"x:1: `prompt` is \[\]"),
        (gsm8k(0, prompt=7), "x:1: `prompt` is 7"),
        (
            {"question": "2?", "answer": "2"},
            "x:1: it has question, answer, but neither Gym's .* nor verl's `prompt` .* See docs/",
        ),
        (gsm8k(0, videos=["x.mp4"]), "x:1: verl's videos are not supported"),
        (gsm8k(0, audios=["x.wav"]), "x:1: verl's audios are not supported"),
        (gsm8k(0, other={1, 2}), "x:1: not JSON .a set cannot be JSON: {1, 2}.. Write"),
        (
            gsm8k(0, extra_info={"gym_row": json.dumps(row("other"))}),
            "x:1: `prompt` differs from that of extra_info.gym_row",
        ),
        (gsm8k(0, extra_info={"gym_row": "{}"}), "x:1: it has no object responses_create_params"),
        (7, "x:1: the row is a int. Write"),
    ],
)
def test_an_invalid_row_is_an_error_with_its_line(invalid_row, message):
    with pytest.raises(env.DataError, match=f"^{message}"):
        verl_rows.parse_row(invalid_row, "x:1")


TASK = {"taskset": "puzzles:train", "task_id": "7"}


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "task_data"])
def test_a_materialized_task_becomes_its_row_with_the_identifiers_of_the_task(tmp_path, is_nested):
    gym_row = row("2?", answer="2", task_id="own")
    prompt = {"responses_create_params": gym_row["responses_create_params"]}
    fields = {key: value for key, value in gym_row.items() if key not in prompt}
    task_input = {**prompt, "task_data": fields} if is_nested else gym_row
    path = write_rows(tmp_path / "tasks.jsonl", [{"task_id": TASK, "task_input": task_input}])
    assert list(verl_rows.read_rows(str(path))) == [
        (f"{path}:1", {**gym_row, verl_rows.TASK_ID: TASK})
    ]


@pytest.mark.parametrize(
    ("task_input", "problem"),
    [
        ("2?", "task_input must be an object"),
        ({**row(), "task_data": "x"}, "and so must its task_data"),
        ({"task_data": {"answer": "2"}}, "neither Gym's responses_create_params"),
    ],
)
def test_an_invalid_materialized_task_is_an_error_with_its_line(tmp_path, task_input, problem):
    path = write_rows(tmp_path / "tasks.jsonl", [{"task_id": TASK, "task_input": task_input}])
    with pytest.raises(env.DataError, match=rf"tasks\.jsonl:1: .*{problem}"):
        list(verl_rows.read_rows(str(path)))


def test_a_task_with_an_identifier_that_is_no_object_is_an_error():
    message = r"^x:1: it has task_id, task_input, but neither Gym's responses_create_params nor"
    with pytest.raises(env.DataError, match=message):
        verl_rows.parse_row({"task_id": "7", "task_input": row()}, "x:1")


def test_a_table_of_another_form_is_an_error(tmp_path):
    other = tmp_path / "other.parquet"
    pandas.DataFrame({"question": ["2?"], "answer": ["2"]}).to_parquet(other)
    message = re.escape(f"{other}:1: it has question, answer, but neither Gym's")
    with pytest.raises(env.DataError, match=message):
        list(verl_rows.read_rows(str(other)))


def test_rows_of_verl_and_gym_train_together(workspace, tmp_path):
    pandas.DataFrame([gsm8k(i) for i in range(8)]).to_parquet(tmp_path / "train.parquet")
    both = f"env.train_files=[{tmp_path / 'train.parquet'}, {workspace / 'train.jsonl'}]"
    _, data = load(workspace, both, "data.max_prompt_length=64")
    first = data.train[0]
    assert (
        len(data.train) == 16
        and first.row == make_gym_row(0)
        and first.row_id.endswith("train.parquet:1")
    )
    assert data.tokenizer.decode(data.train[0].prompt_ids).startswith("0 <unk> 1?")
    other_key = write_rows(tmp_path / "asked.jsonl", [{"asked": f"say {i}"} for i in range(8)])
    _, data = load(workspace, f"env.train_files=[{other_key}]", "data.prompt_key=asked")
    assert data.train[7].messages == [{"role": "user", "content": "say 7"}]
    reason = r"it has asked, but neither .* nor verl's `prompt` \(data\.prompt_key\)"
    with pytest.raises(env.DataError, match=rf"asked\.jsonl:1: {reason}"):
        load(workspace, f"env.train_files=[{other_key}]")


def test_a_row_with_the_prompt_key_and_no_gym_field_is_a_verl_row():
    both = {"responses_create_params": {"input": "gym"}, "prompt": "verl", "asked": "other"}
    assert verl_rows.parse_row(both, "x:1")["responses_create_params"] == {"input": "gym"}
    assert verl_rows.parse_row({"prompt": "verl", "asked": "other"}, "x:1", "asked") == {
        "responses_create_params": {"input": "other"},
        "prompt": "verl",
    }
