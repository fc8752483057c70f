"""A field that carries meaning is used, refused or named, in each kind of row and request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from kit.data import fields
from kit.data.tasks import TaskLoader
from kit.data.verl_rows import parse_row
from kit.engine.endpoint.dialects import chat
from kit.recipe.entries import Entry
from tests.data.test_tasks import Letters
from tests.helpers.recipes import write_rows
from tests.helpers.rollouts import ask_endpoint, chatml_tokenizer, context_of, one_turn_each

SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
USER = {"role": "user", "content": "1 + 1?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = [
    {"role": "system", "content": "Add."},
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]


def gym(**params) -> dict:
    return {"responses_create_params": {"input": [USER], **params}}


# --- refused and named ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (gym(tool_choice="required"), "tool_choice='required' is not supported. The policy"),
        (
            {"prompt": [{**USER, "function_call": {"name": "add"}}]},
            "messages.function_call={'name': 'add'} is not supported. OpenAI has replaced it.",
        ),
        ({"prompt": "2?", "video": ["v.mp4"]}, "verl's video are not supported"),
    ],
)
def test_a_field_that_would_change_the_prompt_is_refused(row, message):
    with pytest.raises(env.UnsupportedRowError, match=r"^x:1: ") as raised:
        parse_row(row, "x:1")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        (gym(temperature=0.2, top_p=0.9, max_output_tokens=9), ["temperature", "top_p", "max_out"]),
        (gym(metadata={"extra_body": '{"top_k": 3}', "k": "v"}), ["metadata.extra_body"]),
        ({"prompt": "2?", "completion": "2", "chosen": "2", "x": 1}, ["chosen", "completion"]),
        (gym(tools=[{**TOOL, "function": {"name": "a", "return": 1}}]), ["tools.return"]),
        ({"prompt": "2?", "solution": "x", "id": 7, "messages": None, "images": "[]"}, []),
    ],
)
def test_a_field_that_is_not_used_is_named_once_for_a_file(tmp_path, capsys, row, unused):
    from lab import convert

    path = write_rows(tmp_path / "rows.jsonl", [{**row, "n": n} for n in range(3)])
    lines = []
    TaskLoader(Letters(), {"s": "s"}, 999, report=lines.append).load_files([Entry(str(path))])
    assert convert.check(str(path))
    printed = capsys.readouterr().out
    lines = [line for line in lines if "not used here" in line]
    assert len(lines) == (1 if unused else 0) and all(line in printed for line in lines)
    for name in unused:
        assert name in lines[0] and lines[0].count("(3 rows)") == len(unused)


def test_the_fields_of_a_request_that_are_not_used_are_logged_once(caplog):
    tokenizer = chatml_tokenizer()
    context = context_of(one_turn_each(["a", "b"], tokenizer), tokenizer)
    body = {"messages": [{**USER, "cache_control": 1}], "temperature": 0.1, "seed": None}
    for _ in range(2):
        assert ask_endpoint(body, context).status == 200
    (record,) = caplog.records
    assert record.getMessage().endswith("not used here: messages.cache_control, temperature")


def test_a_row_of_images_or_without_an_answer_is_no_chat_of_sft():
    from extras import sft

    chat = {"messages": [USER, {"role": "assistant", "content": "2"}]}
    with pytest.raises(env.UnsupportedRowError, match=r"^x:1: verl's images are not supported"):
        sft.tokenize({**chat, "images": ["a.png"]}, None, "x:1")
    row = {**chat, "system": "s", "enable_thinking": False, "prompt": "2?", "tools": [TOOL]}
    names = fields.list_unused(fields.walk(fields.CHAT_ROW, row, row["messages"]))
    assert names == {"system", "enable_thinking", "prompt"}


# --- one form at each entrance --------------------------------------------------------------------


def test_the_tools_of_a_row_of_trl_reach_the_model_and_the_server():
    """The property below has the forms of the same tools."""
    row = parse_row({"prompt": [USER], "tools": [TOOL], "answer": "2"}, "x:1")
    assert row["responses_create_params"]["tools"] == [FLAT_TOOL] and "tools" not in row
    for tools in (None, [], "", "null", "[]"):
        row = parse_row({"prompt": [USER], "tools": tools}, "x:1")
        assert env.render_row(row, "x:1") == ([USER], [])
    with pytest.raises(env.DataError, match=r"^x:1: tools must be a list of JSON objects\.$"):
        env.render_row(parse_row({"prompt": [USER], "tools": "[{'type': 'f'}]"}, "x:1"), "x:1")
    assert env.render_row(gym(tools=[FLAT_TOOL], tool_choice="none"), "x:1") == ([USER], [])


@st.composite
def texts_of(draw, value):
    """A value in which some lists and objects are JSON text instead, as in a table."""
    if isinstance(value, dict) and value != SCHEMA:
        value = {key: draw(texts_of(item)) for key, item in value.items()}
    elif isinstance(value, list):
        value = [draw(texts_of(item)) for item in value]
    is_text = isinstance(value, dict | list) and draw(st.booleans())
    return json.dumps(value) if is_text else value


@SETTINGS
@given(st.data())
def test_json_text_is_read_as_the_value_at_each_entrance(data):
    """Property: of tools, calls, parameters, arguments, messages, and objects of a row."""
    tools = data.draw(texts_of([TOOL]))
    calls = data.draw(texts_of([CALL]))
    messages = [{**message} for message in CHAT]
    messages[2]["tool_calls"] = calls
    shown = data.draw(st.sampled_from([messages, json.dumps(messages)]))
    expected = (env.render_items(CHAT, "x:1"), [TOOL])
    for row in (
        {"responses_create_params": {"input": shown, "tools": tools}},
        {"responses_create_params": json.dumps({"input": shown, "tools": tools})},
        {"prompt": shown, "tools": tools, "reward_model": '{"ground_truth": "2"}'},
    ):
        assert env.render_row(parse_row(row, "x:1"), "x:1") == expected
        if "prompt" not in row:
            assert env.render_row(row, "x:1") == expected
    request = chat.read({"messages": messages, "tools": tools})
    assert (request.messages, request.tools) == expected


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_the_switches_of_a_row_are_read_where_gym_and_trl_write_them(arguments):
    for row in (
        {"prompt": "2?", "chat_template_kwargs": arguments},
        {**gym(), "chat_template_kwargs": arguments},
        gym(metadata={"chat_template_kwargs": arguments}),
        gym(metadata=json.dumps({"chat_template_kwargs": arguments})),
    ):
        parsed = parse_row(row, "x:1")
        assert env.read_template_arguments(parsed, "x:1") == {"enable_thinking": False}
    effort = gym(reasoning={"effort": "low", "summary": None})
    assert env.read_template_arguments(effort, "x:1") == {"reasoning_effort": "low"}
    for bad in ("yes", ["a"], 3):
        with pytest.raises(env.DataError, match="chat_template_kwargs must be an object"):
            env.read_template_arguments(gym(metadata={"chat_template_kwargs": bad}), "x:1")
