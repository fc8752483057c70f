"""Tests how rows in verl's forms are read: text or chats, images, agent loops, tools, JSON text."""

from __future__ import annotations

import json
import re

import pandas
import pytest
from datasets import Dataset, Features, Image, List, Value

import env
from kit.data.verl_rows import TASK_ID, parse_row, read_rows
from tests.helpers.models import COLORS, data_url, png
from tests.helpers.recipes import load, row, write_rows

RED = png(COLORS["r"])
BLUE = png(COLORS["b"])


def make_row(prompt="2?", **fields) -> dict:
    return {"prompt": prompt, "data_source": "x", **fields}


def read_input(verl_row) -> object:
    """The input of the Gym row of a row of verl."""
    return parse_row(verl_row, "x:1")["responses_create_params"]["input"]


def ask(content) -> list[dict]:
    return [{"role": "user", "content": content}]


# --- text and chats -------------------------------------------------------------------------------


def test_rows_of_verl_and_gym_train_together(workspace, tmp_path):
    rows = [make_row(ask(f"{i} + 1?"), reward_model={"ground_truth": i}) for i in range(8)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    both = f"env.train_files=[{tmp_path / 'train.parquet'}, {workspace / 'train.jsonl'}]"
    data = load(workspace, both, "data.max_prompt_length=64").inputs
    first = data.train[0]
    others = {key: value for key, value in rows[0].items() if key != "prompt"}
    assert first.row == {"responses_create_params": {"input": rows[0]["prompt"]}, **others}
    assert len(data.train) == 16 and first.row_id.endswith("train.parquet:1")
    assert data.tokenizer.decode(first.prompt_ids).startswith("0 <unk> 1?")
    other_key = write_rows(tmp_path / "asked.jsonl", [{"asked": f"say {i}"} for i in range(8)])
    data = load(workspace, f"env.train_files=[{other_key}]", "data.prompt_key=asked").inputs
    assert data.train[7].messages == ask("say 7")
    reason = r"it has asked, but neither .* nor verl's `prompt` \(data\.prompt_key\)"
    with pytest.raises(env.DataError, match=rf"asked\.jsonl:1: {reason}"):
        load(workspace, f"env.train_files=[{other_key}]")


@pytest.mark.parametrize(
    ("invalid_row", "message"),
    [
        (make_row(None), "`prompt` is null. It must be text or chat messages."),
        (make_row(extra_info={"gym_row": json.dumps(row("other"))}), "`prompt` differs from that"),
        (7, "the row is a int"),
    ],
)
def test_an_invalid_row_is_an_error_with_its_line(invalid_row, message):
    with pytest.raises(env.DataError, match=f"^{re.escape(f'x:1: {message}')}"):
        parse_row(invalid_row, "x:1")


# --- materialized tasks, as Gym 0.7 collates them -------------------------------------------------


TASK = {"taskset": "puzzles:train", "task_id": "7"}


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "task_data"])
def test_a_materialized_task_becomes_its_row_with_the_identifiers_of_the_task(is_nested):
    gym_row = row("2?", answer="2", task_id="own")
    prompt = {"responses_create_params": gym_row["responses_create_params"]}
    fields = {key: value for key, value in gym_row.items() if key not in prompt}
    task_input = {**prompt, "task_data": fields} if is_nested else gym_row
    parsed = parse_row({"task_id": TASK, "task_input": task_input}, "x:1")
    assert parsed == {**gym_row, TASK_ID: TASK}
    with pytest.raises(env.DataError, match=r"^x:1: task_input must be an object"):
        parse_row({"task_id": TASK, "task_input": "2?"}, "x:1")


# --- images ---------------------------------------------------------------------------------------


def text_part(text: str) -> dict:
    return {"type": "input_text", "text": text}


def image_part(url: str) -> dict:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


@pytest.mark.parametrize(
    ("image", "url"),
    [
        ({"bytes": RED, "path": "red.png"}, data_url(RED)),
        ({"bytes": None, "path": "red.png"}, "red.png"),
        ({"image": "file:///tmp/red.png", "max_pixels": None}, "file:///tmp/red.png"),
        ("red.png", "red.png"),
    ],
)
def test_an_image_of_verl_is_shown_at_its_place(image, url):
    parsed = parse_row(make_row(ask("<image>Which color?"), images=[image], answer="red"), "x:1")
    assert parsed == {
        "responses_create_params": {"input": ask([image_part(url), text_part("Which color?")])},
        "data_source": "x",
        "answer": "red",
    }
    assert env.render_row(parsed, "x:1")[0][0]["content"][0] == {"type": "image", "image": url}


def test_a_text_prompt_may_have_images_or_be_about_them():
    expected = ask([text_part("See "), image_part("1"), text_part(" or "), image_part("2")])
    assert read_input(make_row("See <image> or <image>", images=["1", "2"])) == expected
    for images in (None, []):
        assert read_input(make_row("An <image>?", images=images)) == "An <image>?"


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("2?", ["1"], "1 images, but the prompt has <image> 0 times"),
        ("<image>", [{"path": None}], "an image has neither bytes nor a path"),
        ("<image>", [{"image": "1", "max_pixels": 9}], "`max_pixels` of an image is not supp"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_an_error(prompt, images, message):
    with pytest.raises(env.DataError) as raised:
        parse_row(make_row(prompt, images=images), "x:1")
    assert str(raised.value).startswith(f"x:1: {message}")


def test_a_table_of_datasets_with_images_is_read(tmp_path):
    from lab import convert

    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": Value("string")}),
            "images": List(Image()),
            "data_source": Value("string"),
        }
    )
    pictures = [{"bytes": RED, "path": "r.png"}, {"bytes": BLUE, "path": None}]
    table = [make_row(ask("<image>or<image>"), images=pictures), make_row(ask("No"), images=[])]
    Dataset.from_list(table, features=features).to_parquet(tmp_path / "images.parquet")
    first, second = (row for _, row in read_rows(str(tmp_path / "images.parquet")))
    parts = [image_part(data_url(RED)), text_part("or"), image_part(data_url(BLUE))]
    assert first["responses_create_params"]["input"] == ask(parts)
    assert second["responses_create_params"]["input"] == ask("No")
    with pytest.raises(env.UnsupportedRowError, match="without tools and images"):
        convert.to_verl(first, "x:1")


# --- agent loops and tools ------------------------------------------------------------------------


CREATE = {"calc_reward": {"create_kwargs": {"ground_truth": "4"}}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"agent_name": "tool_agent", "extra_info": {"index": 1}}, "agent_name=tool_agent"),
        ({"extra_info": {"tools_kwargs": CREATE}}, "extra_info.tools_kwargs"),
    ],
)
def test_a_row_of_verls_tool_agent_is_refused_with_the_way_to_do_it(fields, reason):
    message = f"x:1: {reason}: verl's agent loops and their tools do not run here. Remove this"
    with pytest.raises(env.UnsupportedRowError, match=f"^{re.escape(message)}"):
        parse_row(make_row(**fields), "x:1")


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_name": "single_turn_agent", "extra_info": {"tools_kwargs": CREATE}},
        {"extra_info": {"need_tools_kwargs": False, "tools_kwargs": {"calc_reward": None}}},
    ],
    ids=str,
)
def test_a_row_of_a_single_turn_loads_unchanged(fields):
    from lab import convert

    verl_row = make_row(**fields)
    gym_row = parse_row(verl_row, "x:1")
    assert gym_row == {"responses_create_params": {"input": "2?"}, "data_source": "x", **fields}
    assert convert.to_verl(gym_row, "x:1") == verl_row


# --- JSON text ------------------------------------------------------------------------------------


MESSAGES = [{"role": "system", "content": "Be short."}, *ask("It's 2 + 2?")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f" \n{json.dumps(MESSAGES, indent=1)}\n", MESSAGES),
        ('[{"content": "x"}]', '[{"content": "x"}]'),
        ('{"role": "user", "content": "2?"}', '{"role": "user", "content": "2?"}'),
    ],
)
def test_a_text_is_messages_only_if_it_is_a_json_list_of_them(prompt, expected):
    assert read_input(make_row(prompt)) == expected


def test_messages_in_pythons_notation_are_refused():
    with pytest.raises(env.DataError, match=r"^x:1: `prompt` has messages in Python's notation"):
        parse_row(make_row(str(MESSAGES)), "x:1")


@pytest.mark.parametrize("key", ["reward_model", "responses_create_params"])
def test_an_object_of_a_row_may_be_json_text(key):
    verl_row = make_row(reward_model={"ground_truth": "4"}, extra_info={"index": 1})
    gym_row = {
        "responses_create_params": {"input": "2?"},
        "agent_ref": {"name": "math"},
        "metadata": '{"a": 1}',  # a verifier's field stays text
    }
    whole = verl_row if key in verl_row else gym_row
    assert parse_row(whole | {key: json.dumps(whole[key])}, "x:1") == parse_row(whole, "x:1")
    with pytest.raises(env.DataError, match=f"^x:1: {key}: not JSON"):
        parse_row(whole | {key: "{oops"}, "x:1")
