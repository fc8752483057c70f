"""Rows in, prompts out: shapes, refusals with file and line, order, generators."""

import argparse
import json

import pytest
from conftest import row, write_rows

import env


def messages_of(**params):
    return env.render({"responses_create_params": params}, "x.jsonl:1")[0]


def test_input_shapes():
    assert messages_of(input="hi") == [{"role": "user", "content": "hi"}]
    assert messages_of(input="hi", instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(input=[{"role": "developer", "content": "x"}])[0]["role"] == "system"
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of(input=[{"type": "message", "role": "user", "content": parts}])[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"input": []}, "input is empty"),
        ({"input": 3}, "input is empty or neither"),
        ({}, "input is empty"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"role": "user", "content": None}]}, "content is NoneType"),
        ({"input": "hi", "tools": [{"name": "f"}]}, "offers tools"),
    ],
)
def test_refusals_name_the_row(params, named):
    with pytest.raises(env.DataError, match=r"x\.jsonl:1: .*" + named):
        messages_of(**params)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"responses_create_params": {}}\n{oops\n', r"rows\.jsonl:2: not JSON"),
        ('{"responses_create_params": {}, "x": NaN}\n', r"rows\.jsonl:1: not JSON \(NaN"),
        ("[1]\n", r"rows\.jsonl:1: a row is a JSON object"),
        ('\n\n{"question": "x"}\n', r"rows\.jsonl:3: no responses_create_params"),
    ],
)
def test_malformed_lines_name_file_and_line(tmp_path, text, named):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(env.DataError, match=named):
        list(env.read_rows(tmp_path / "rows.jsonl"))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(env.DataError, match=r"nowhere\.jsonl: no such file"):
        list(env.read_rows(tmp_path / "nowhere.jsonl"))


def test_the_server_of_a_row():
    both = ["mcqa", "reasoning_gym"]
    assert env.server_of(row(agent_ref={"name": "mcqa"}), both, "x:1") == "mcqa"
    assert env.server_of(row(agent_ref={"name": "reasoning_gym_simple_agent"}), both, "x:1") == "reasoning_gym"
    assert env.server_of(row(), ["mcqa"], "x:1") == "mcqa"
    with pytest.raises(env.DataError, match="x:1: agent_ref None matches none"):
        env.server_of(row(), both, "x:1")
    with pytest.raises(env.DataError, match="'other'"):
        env.server_of(row(agent_ref={"name": "other"}), ["mcqa"], "x:1")


def test_long_prompts_are_dropped_counted_and_listed(tmp_path, workspace):
    from transformers import AutoTokenizer

    path = write_rows(tmp_path / "rows.jsonl", [row("short"), row("x" * 40), row("also short")])
    tokenizer = AutoTokenizer.from_pretrained(workspace / "tied")
    tasks, dropped = env.load_tasks([str(path)], tokenizer, ["reasoning_gym"], max_prompt_length=20)
    assert [t.row_id for t in tasks] == [f"{path}:1", f"{path}:3"]
    assert dropped == [f"{path}:2 (41 tokens)"]  # 40 characters and the template's space
    assert tasks[0].row == row("short")  # verbatim
    assert tokenizer.decode(tasks[0].prompt_ids) == "short "


def test_batches_cover_an_epoch_once_and_depend_on_nothing_else():
    tasks = list(range(10))
    epoch = [env.batch(tasks, 3, step, seed=1) for step in (1, 2, 3)]
    assert len({t for b in epoch for t in b}) == 9
    assert env.batch(tasks, 3, 2, seed=1) == epoch[1]
    assert env.batch(tasks, 3, 4, seed=1) != epoch[0]  # the next epoch has another order
    assert env.batch(tasks, 3, 1, seed=2) != epoch[0]
    assert env.batch(tasks, 3, 2, seed=1, shuffle=False) == [3, 4, 5]


def arguments(**changes):
    return argparse.Namespace(**{"seed": 0, "low": 2, "high": 29, "validation": 128, "source": None} | changes)


def test_arithmetic_holds_out_pairs_in_either_order():
    splits = {name: list(rows) for name, rows in env.arithmetic(arguments()).items()}

    def pairs(rows):
        found = [r["question"].removeprefix("Complete the equation: ").removesuffix(" =").split(" + ") for r in rows]
        assert [r["answer"] for r in rows] == [f"{a} + {b} = {int(a) + int(b)}" for a, b in found]
        return {tuple(sorted(map(int, pair))) for pair in found}

    train, held_out = pairs(splits["train"]), pairs(splits["validation"])
    assert len(held_out) == 128 and not train & held_out and len(train | held_out) == 28 * 29 // 2
    again = {name: list(rows) for name, rows in env.arithmetic(arguments()).items()}
    assert again == splits
    assert list(env.arithmetic(arguments(seed=1))["validation"]) != splits["validation"]
    with pytest.raises(env.DataError, match="held out"):
        env.arithmetic(arguments(high=5))


def test_gsm8k_rows(tmp_path):
    entry = {"question": "How many?", "answer": "He has <<3*400=1200>>1,200.\n#### 1,200"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(entry) + "\n")
    rows = list(env.gsm8k(arguments(source=str(tmp_path)))["train"])
    assert rows[0]["expected_answer"] == "1200" and rows[0]["question"] == "How many?"
    assert rows[0]["agent_ref"]["name"] == "math_with_judge_simple_agent"
    with pytest.raises(env.DataError, match=r"test\.jsonl: no such file"):
        (tmp_path / "test.jsonl").unlink()
        list(env.gsm8k(arguments(source=str(tmp_path)))["validation"])
