"""Tests forms of verl's rows beyond a text prompt: images, agent loops, tools, JSON text."""

from __future__ import annotations

import base64
import csv
import json
import re

import pandas
import pytest
from datasets import Dataset, Features, Image, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from kit.data.verl_rows import parse_row, read_rows
from lab import convert
from tests.helpers.models import COLORS, data_url, png
from tests.helpers.recipes import write_rows

HYPOTHESIS_SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)
RED = png(COLORS["r"])
BLUE = png(COLORS["b"])


def make_row(prompt="2?", **fields) -> dict:
    return {"prompt": prompt, "data_source": "x", **fields}


def read_input(row) -> object:
    """The input of the Gym row of a row of verl."""
    return parse_row(row, "x:1")["responses_create_params"]["input"]


def text_part(text: str) -> dict:
    return {"type": "input_text", "text": text}


def image_part(url: str) -> dict:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "url"),
    [
        ({"bytes": RED, "path": None}, data_url(RED)),
        ({"bytes": RED, "path": "red.png"}, data_url(RED)),
        ({"bytes": base64.b64encode(RED).decode()}, data_url(RED)),  # in JSON lines
        ({"bytes": None, "path": "red.png"}, "red.png"),
        ({"path": "/tmp/red.png"}, "/tmp/red.png"),
        ({"image": data_url(RED)}, data_url(RED)),
        ({"image": "file:///tmp/red.png", "max_pixels": None}, "file:///tmp/red.png"),
        ({"url": "https://x.org/red.png"}, "https://x.org/red.png"),
        ("red.png", "red.png"),
        (data_url(RED), data_url(RED)),
    ],
)
def test_an_image_of_verl_is_shown_at_its_place(image, url):
    chat = [{"role": "user", "content": "<image>Which color?"}]
    expected = [{"role": "user", "content": [image_part(url), text_part("Which color?")]}]
    row = parse_row(make_row(chat, images=[image], answer="red"), "x:1")
    assert row == {
        "responses_create_params": {"input": expected},
        "data_source": "x",
        "answer": "red",
    }
    assert env.render_row(row, "x:1")[0][0]["content"][0] == {"type": "image", "image": url}


def test_images_are_placed_in_order_over_all_messages():
    chat = [
        {"role": "user", "content": "First <image>, then <image>."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "text", "text": "A list stays."}]},
        {"role": "user", "content": "<image>"},
    ]
    messages = read_input(make_row(chat, images=["1", "2", "3"]))
    first = [
        text_part("First "),
        image_part("1"),
        text_part(", then "),
        image_part("2"),
        text_part("."),
    ]
    assert [message["content"] for message in messages] == [
        first,
        "Yes.",
        [{"type": "text", "text": "A list stays."}],
        [image_part("3")],
    ]
    assert read_input(make_row("See <image>", images=["1"])) == [
        {"role": "user", "content": [text_part("See "), image_part("1")]}
    ]


def test_a_text_about_images_stays_text_without_images():
    for images in (None, []):
        row = make_row("What is <image> in HTML?", images=images)
        assert read_input(row) == "What is <image> in HTML?"
        assert convert.to_verl(parse_row(row, "x:1"), "x:1") == row


def test_images_in_the_parts_of_a_message_get_one_form():
    parts = [
        {"type": "image", "image": "1", "text": None},
        {"type": "image_url", "image_url": {"url": "2", "detail": "auto"}},
        {"type": "text", "text": "Which?", "image": None},
    ]
    ((message),) = read_input(make_row([{"role": "user", "content": parts}]))
    assert message["content"][:2] == [image_part("1"), image_part("2")]
    texts = env.render_row(parse_row(make_row([message]), "x:1"), "x:1")[0][0]["content"]
    assert texts[2] == {"type": "text", "text": "Which?"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": ["1"]}, "1 images, but the prompt has <image> 0 times. Write <image> once"),
        ({"prompt": "<image>", "images": ["1", "2"]}, "2 images, but the prompt has <image> 1 "),
        ({"prompt": "<image><image>", "images": ["1"]}, "1 images, but the prompt has <image> 2 "),
        ({"prompt": "<image>", "images": {"bytes": "x"}}, "images must be a list"),
        ({"prompt": "<image>", "images": [7]}, "an image must be text or an object, not 7"),
        ({"prompt": "<image>", "images": [{"path": None}]}, "an image has neither bytes nor a"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "an image must be text",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "an image has neither"),
        (
            {"prompt": "<image>", "images": [{"url": "1", "detail": "high"}]},
            "`detail` of an image is not supported. Resize the image instead.",
        ),
        (
            {"prompt": "<image>", "images": [{"image": "1", "max_pixels": 9}]},
            "`max_pixels` of an image is not supported. Resize the image instead.",
        ),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_an_error(fields, message):
    with pytest.raises(env.DataError) as raised:
        parse_row(make_row(**fields), "x:1")
    assert str(raised.value).startswith(f"x:1: {message}")


def test_a_table_of_datasets_with_images_is_read(tmp_path):
    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": Value("string")}),
            "images": List(Image()),
            "data_source": Value("string"),
        }
    )
    chat = [{"role": "user", "content": "<image>or<image>?"}]
    pictures = [{"bytes": RED, "path": "r.png"}, {"bytes": BLUE, "path": None}]
    table = [make_row(chat, images=pictures), make_row([{"role": "user", "content": "No"}])]
    table[1]["images"] = []
    Dataset.from_list(table, features=features).to_parquet(tmp_path / "images.parquet")
    first, second = (row for _, row in read_rows(str(tmp_path / "images.parquet")))
    content = first["responses_create_params"]["input"][0]["content"]
    assert content == [
        image_part(data_url(RED)),
        text_part("or"),
        image_part(data_url(BLUE)),
        text_part("?"),
    ]
    assert second["responses_create_params"]["input"] == table[1]["prompt"]
    with pytest.raises(env.UnsupportedRowError, match="without tools and images"):
        convert.to_verl(first, "x:1")


CONTENTS = st.lists(st.sampled_from(["<image>", "a", "<image", "image>", " ", "\n"]), max_size=6)


@HYPOTHESIS_SETTINGS
@given(st.lists(CONTENTS.map("".join), min_size=1, max_size=3))
def test_images_are_at_the_places_of_their_marks(contents):
    chat = [{"role": "user", "content": content} for content in contents]
    count = sum(content.count("<image>") for content in contents)
    row = make_row(chat)
    if count:
        row["images"] = [{"image": f"{number}.png"} for number in range(count)]
    shown = ""
    for message in read_input(row):
        parts = message["content"]
        for part in [text_part(parts)] if isinstance(parts, str) else parts:
            shown += part["text"] if "text" in part else f"<{part['image_url']}>"
    names = iter([f"<{number}.png>" for number in range(count)])
    assert shown == re.sub("<image>", lambda _: next(names), "".join(contents))


# --- agent loops and tools ------------------------------------------------------------------------


CREATE = {"calc_reward": {"create_kwargs": {"ground_truth": "4"}}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"agent_name": "tool_agent"}, "agent_name=tool_agent"),
        ({"agent_name": "react_agent", "extra_info": {"index": 1}}, "agent_name=react_agent"),
        ({"extra_info": {"tools_kwargs": CREATE}}, "extra_info.tools_kwargs"),
        ({"extra_info": {"need_tools_kwargs": True}}, "extra_info.need_tools_kwargs"),
        (
            {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "2?"}}},
            "extra_info.interaction_kwargs",
        ),
    ],
)
def test_a_row_of_verls_tool_agent_is_refused_with_the_way_to_do_it(
    tmp_path, capsys, fields, reason
):
    with pytest.raises(env.UnsupportedRowError) as raised:
        parse_row(make_row(**fields), "x:1")
    assert str(raised.value) == (
        f"x:1: {reason}: verl's agent loops and their tools do not run here. Remove this field to "
        'sample one turn, or write a Gym server. See docs/guides/tools.md, "1. Write the server".'
    )
    path = tmp_path / "tools.parquet"
    pandas.DataFrame([make_row(**fields), make_row(**fields)]).to_parquet(path)
    assert convert.check(str(path))
    output = capsys.readouterr().out
    assert output.startswith(f"{path}: 0 rows load, 2 refused\n    2 x {reason}: verl's agent")


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_name": "single_turn_agent"},
        {"agent_name": "single_turn_agent", "extra_info": {"tools_kwargs": CREATE}},
        {"agent_name": None},
        {"extra_info": {"need_tools_kwargs": False, "tools_kwargs": {}}},
        {"extra_info": {"tools_kwargs": {"calc_reward": None}}},  # as Parquet pads it
        {"extra_info": None},
        {"extra_info": "text"},
    ],
    ids=str,
)
def test_a_row_of_a_single_turn_loads_unchanged(fields):
    row = make_row(**fields)
    gym_row = parse_row(row, "x:1")
    assert gym_row == {"responses_create_params": {"input": "2?"}, "data_source": "x", **fields}
    assert convert.to_verl(gym_row, "x:1") == row


def test_a_chat_with_tool_calls_is_a_prompt():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    chat = [
        {"role": "user", "content": "Add 2."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": "And 3."},
    ]
    row = make_row(chat)
    gym_row = parse_row(row, "x:1")
    assert gym_row["responses_create_params"]["input"] == chat
    assert convert.to_verl(gym_row, "x:1") == row
    messages, _ = env.render_row(gym_row, "x:1")
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}


# --- JSON text ------------------------------------------------------------------------------------


MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "It's 2 + 2?"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (json.dumps(MESSAGES), MESSAGES),
        (f" \n{json.dumps(MESSAGES, indent=1)}\n", MESSAGES),
        ("[]", "[]"),
        ("[1, 2]", "[1, 2]"),
        ('[{"role": "assistant", "tool_calls": []}]', [{"role": "assistant", "tool_calls": []}]),
        ('[{"content": "x"}]', '[{"content": "x"}]'),
        ('{"role": "user", "content": "2?"}', '{"role": "user", "content": "2?"}'),
        ('Answer: [{"role": "user", "content": "x"}]',) * 2,
        ('[{"role": "user", "content": "x"}] Answer.',) * 2,
        ("[[[", "[[["),
    ],
)
def test_a_text_is_messages_only_if_it_is_a_json_list_of_them(prompt, expected):
    assert read_input(make_row(prompt)) == expected


def test_messages_in_a_csv_file_are_read_or_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [make_row(json.dumps(MESSAGES))])
    assert [r["responses_create_params"]["input"] for _, r in read_rows(str(path))] == [MESSAGES]
    pandas.DataFrame({"prompt": [MESSAGES], "n": 1}).to_csv(tmp_path / "rows.csv", index=False)
    with (tmp_path / "rows.csv").open(newline="") as file:
        (entry,) = csv.DictReader(file)
    with pytest.raises(env.DataError, match=r"^x:1: `prompt` has messages in Python's notation"):
        parse_row(entry, "x:1")


@pytest.mark.parametrize("key", ["reward_model", "extra_info"])
def test_an_object_of_a_row_of_verl_may_be_json_text(key):
    fields = {"reward_model": {"ground_truth": "4"}, "extra_info": {"index": 1}}
    row = make_row(**fields)
    assert parse_row(row | {key: json.dumps(row[key])}, "x:1") == parse_row(row, "x:1")
    assert parse_row(row | {key: "text"}, "x:1")[key] == "text"
    with pytest.raises(env.DataError, match=f"^x:1: {key}: not JSON"):
        parse_row(row | {key: "{oops"}, "x:1")


@pytest.mark.parametrize("key", ["responses_create_params", "agent_ref"])
def test_an_object_of_a_gym_row_may_be_json_text(key):
    row = {
        "responses_create_params": {"input": "2?"},
        "agent_ref": {"name": "math"},
        "metadata": '{"a": 1}',  # a verifier's field stays text
    }
    assert parse_row(row | {key: json.dumps(row[key])}, "x:1") == row
    with pytest.raises(env.DataError, match=f"^x:1: {key}: not JSON"):
        parse_row(row | {key: "{oops"}, "x:1")
    with pytest.raises(env.DataError, match="it has no object responses_create_params"):
        parse_row(row | {"responses_create_params": "[1]"}, "x:1")
