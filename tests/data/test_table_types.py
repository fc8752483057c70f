"""Tests how tables of other libraries, encodings and types become rows."""

from __future__ import annotations

import gzip
import json
from datetime import datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import numpy as np
import pandas
import pyarrow
import pytest
from datasets import Dataset, disable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import env
from kit.data import row_files
from kit.data.row_files import parse_object, read_raw_rows
from kit.data.verl_rows import read_rows
from tests.helpers.recipes import write_rows

disable_progress_bars()
HYPOTHESIS_SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)


def make_tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "name": name, "parameters": parameters}


def make_gym_rows() -> list[dict]:
    """Rows whose messages and tools have different keys, so that Arrow pads them with null."""
    question = {"role": "user", "content": "Add 2 and 3."}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "5"}
    agent = {"type": "responses_api_agents", "name": "math_simple_agent"}
    first = {"input": [question], "tools": [make_tool("add", a={"type": "integer"})]}
    second = {
        "input": [{"role": "system", "content": "Use tools."}, question, call, output],
        "tools": [make_tool("look_up", city={"type": "string", "enum": ["Rome", "Bonn"]})],
        "temperature": 0.5,
    }
    return [
        {"responses_create_params": first, "answer": "5", "agent_ref": agent},
        {"responses_create_params": second, "answer": "Bonn", "agent_ref": agent},
    ]


def write_table(rows, path, writer):
    if writer == "pandas":
        pandas.DataFrame(rows).to_parquet(path)
    elif writer == "datasets":
        Dataset.from_list(rows).to_parquet(path)
    elif writer == "datasets with JSON":
        Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
    elif writer == "arrow":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    else:  # JSON text in each column that is no text
        columns: dict[str, list[str]] = {}
        for key in rows[0]:
            values = [row[key] for row in rows]
            columns[key] = [v if isinstance(v, str) else json.dumps(v) for v in values]
        parquet.write_table(pyarrow.table(columns), path)


# --- Gym rows as tables ---------------------------------------------------------------------------


WRITERS = ["pandas", "datasets", "datasets with JSON", "arrow", "JSON text"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_table_of_gym_rows_has_the_rows_of_json_lines(tmp_path, writer):
    rows = make_gym_rows()
    path = tmp_path / "gym.parquet"
    write_table(rows, path, writer)
    read = list(read_rows(str(path)))
    assert [row_id for row_id, _ in read] == [f"{path}:1", f"{path}:2"]
    assert [row for _, row in read] == rows
    expected = [env.render_row(row, "x:1") for row in rows]
    assert [env.render_row(row, "x:1") for _, row in read] == expected


@pytest.mark.parametrize("writer", WRITERS)
def test_a_table_of_materialized_tasks_has_their_rows(tmp_path, writer):
    rows = make_gym_rows()
    ids = [{"taskset": "math:train", "task_id": str(n)} for n in range(2)]
    tasks = [{"task_id": ids[n], "task_input": row} for n, row in enumerate(rows)]
    write_table(tasks, tmp_path / "tasks.parquet", writer)
    write_rows(tmp_path / "tasks.jsonl", tasks)
    read = [row for _, row in read_rows(str(tmp_path / "tasks.parquet"))]
    assert read == [row for _, row in read_rows(str(tmp_path / "tasks.jsonl"))]
    assert [row["_ng_task_id"] for row in read] == ids


def test_the_fields_of_a_verifier_keep_the_nulls_of_a_table(tmp_path):
    """They are no prompt, and a verifier may need each key, as verl's reward functions do."""
    rows = make_gym_rows()
    rows[0]["metadata"] = {"words": 3}
    rows[1]["metadata"] = {"letters": 4}
    tasks = [{"task_id": {"task_id": str(n)}, "task_input": row} for n, row in enumerate(rows)]
    for name, table in (("rows", rows), ("tasks", tasks)):
        write_table(table, tmp_path / f"{name}.parquet", "arrow")
        read = [row["metadata"] for _, row in read_rows(str(tmp_path / f"{name}.parquet"))]
        assert read == [{"words": 3, "letters": None}, {"words": None, "letters": 4}]


def test_a_table_may_have_gym_rows_and_rows_of_verl(tmp_path):
    missing = {"prompt": None, "data_source": None}  # from_list takes the keys of the first row
    rows = [make_gym_rows()[0] | missing, {"prompt": "2?", "data_source": "x"}]
    write_table(rows, tmp_path / "both.parquet", "datasets")
    gym_row, verl_row = (row for _, row in read_rows(str(tmp_path / "both.parquet")))
    assert gym_row["responses_create_params"] == rows[0]["responses_create_params"]
    assert verl_row["responses_create_params"] == {"input": "2?"}
    assert (gym_row["data_source"], verl_row["data_source"]) == (None, "x")


def test_nulls_in_the_arguments_of_a_call_do_not_reach_the_prompt(tmp_path):
    def make_chat(**arguments):
        function = {"name": "f", "arguments": arguments}
        call = {"type": "function", "id": "c", "function": function}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [{"role": "user", "content": "Hi"}, answer]

    rows = [{"prompt": make_chat(city="Rome")}, {"prompt": make_chat(count=2)}]
    write_table(rows, tmp_path / "calls.parquet", "arrow")
    for number, (_, row) in enumerate(read_rows(str(tmp_path / "calls.parquet"))):
        (call,) = row["responses_create_params"]["input"][1]["tool_calls"]
        expected = rows[number]["prompt"][1]["tool_calls"][0]
        assert call == expected


def test_texts_of_parquets_type_json_are_values(tmp_path):
    """DuckDB and datasets write this type if rows differ in form."""
    contents = ['"Say \\"hi\\"."', '[{"type": "input_text", "text": "Hi"}]']
    content = pyarrow.array(contents).cast(pyarrow.json_())
    messages = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user", "user"]), content], ["role", "content"]
    )
    inputs = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2], pyarrow.int32()), messages)
    params = pyarrow.StructArray.from_arrays([inputs], ["input"])
    others = pyarrow.array(["1.0", None]).cast(pyarrow.json_())
    path = tmp_path / "json.parquet"
    parquet.write_table(pyarrow.table({"responses_create_params": params, "other": others}), path)
    rows = [row for _, row in read_rows(str(path))]
    prompts = [row["responses_create_params"]["input"][0]["content"] for row in rows]
    assert prompts == [json.loads(text) for text in contents]
    assert [repr(row["other"]) for row in rows] == ["1.0", "None"]

    lines = pyarrow.array([json.dumps(row) for row in make_gym_rows()]).cast(pyarrow.json_())
    parquet.write_table(pyarrow.table({"row": lines}), path)
    assert [row for _, row in read_rows(str(path))] == make_gym_rows()


# --- values that JSON does not have ---------------------------------------------------------------


IDENTIFIER = UUID("43d30c5d-737f-4001-99d6-76f54950aa7e")
VALUES = [  # (value, its Arrow type or None, the value in the row)
    (float("nan"), None, None),
    (float("inf"), pyarrow.float32(), None),
    (Decimal("1.10"), None, "1.10"),
    (timedelta(seconds=90.5), None, "P0DT0H1M30.5S"),
    (datetime(2026, 1, 2, 3, 4, 5, 6), None, "2026-01-02T03:04:05.000006"),
    (datetime(2026, 1, 2), pyarrow.timestamp("ns", "Europe/Rome"), "2026-01-02T01:00:00+01:00"),
    (time(10, 30), None, "10:30:00"),
    (IDENTIFIER, pyarrow.uuid(), str(IDENTIFIER)),
    ("text: ü".encode(), None, "text: ü"),
    (b"\x89PNG\xff", None, "iVBOR/8="),
    (2**63, pyarrow.uint64(), 2**63),
    ([("a", 1), ("b", 2)], pyarrow.map_(pyarrow.string(), pyarrow.int64()), {"a": 1, "b": 2}),
    ([(7, ["x"])], pyarrow.map_(pyarrow.int8(), pyarrow.list_(pyarrow.string())), {"7": ["x"]}),
    ({"a": [{"b": Decimal("0.50")}]}, None, {"a": [{"b": "0.50"}]}),
    ("word", pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "word"),
    ([["x"], None], pyarrow.large_list(pyarrow.list_view(pyarrow.string())), [["x"], None]),
    (None, pyarrow.null(), None),
]


@pytest.mark.parametrize(("value", "kind", "expected"), VALUES, ids=[str(v[:2]) for v in VALUES])
def test_a_column_of_any_type_loads_in_each_row_group(tmp_path, value, kind, expected):
    column = pyarrow.array([value, None, value], kind)
    table = pyarrow.table({"prompt": ["1", "2", "3"], "other": column, "answer": ["a", "b", "c"]})
    parquet.write_table(table, tmp_path / "types.parquet", row_group_size=2)
    rows = [row for _, row in read_rows(str(tmp_path / "types.parquet"))]
    assert [row["other"] for row in rows] == [expected, None, expected]
    assert [row["answer"] for row in rows] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32("nan"), None),
        (np.int64(3), 3),
        (np.array([1.5, np.inf]), [1.5, None]),
        (pandas.Timedelta(1, "ns"), "P0DT0H0M0.000000001S"),
        (pandas.NaT, None),
        (np.datetime64("2026-01-02"), "2026-01-02T00:00:00"),
        (np.datetime64("NaT"), None),
        (np.array([5], "m8[s]"), ["P0DT0H0M5S"]),
        (pandas.Series([1, 2]), [1, 2]),
        (Decimal("NaN"), None),
        (bytearray(b"ab"), "ab"),
        ((1, 2), [1, 2]),
    ],
    ids=str,
)
def test_a_value_of_a_function_becomes_that_of_json(value, expected):
    row = parse_object({"x": [value], "n": 2**80}, "x:1")
    assert row == {"x": [expected], "n": 2**80}


def test_numbers_of_json_text_that_json_does_not_have_are_null(tmp_path):
    text = '{"prompt": "2?", "x": [NaN, Infinity, -Infinity, 1.0, 1, 123456789012345678901234]}\n'
    (tmp_path / "rows.jsonl").write_text(text)
    ((_, row),) = read_rows(str(tmp_path / "rows.jsonl"))
    assert json.dumps(row["x"]) == "[null, null, null, 1.0, 1, 123456789012345678901234]"


def test_a_map_with_a_repeated_key_is_an_error(tmp_path):
    tags = pyarrow.array([[("k", 1), ("k", 2)]], pyarrow.map_("string", "int8"))
    parquet.write_table(pyarrow.table({"prompt": ["a"], "tags": tags}), tmp_path / "map.parquet")
    with pytest.raises(env.DataError, match=r"map\.parquet: cannot be read .*key was 'k'.*Correct"):
        list(read_rows(tmp_path / "map.parquet"))


JSON_KEYS = st.text(st.characters(codec="utf-8"), max_size=3)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | JSON_KEYS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(JSON_KEYS, values, max_size=3),
)


def replace_nonfinite(value):
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    return [replace_nonfinite(item) for item in value] if isinstance(value, list) else value


@HYPOTHESIS_SETTINGS
@given(st.dictionaries(JSON_KEYS, JSON_VALUES, max_size=4))
def test_any_json_is_read_without_changes(row):
    expected = json.dumps(replace_nonfinite(row))
    assert json.dumps(parse_object(json.dumps(row), "x:1")) == expected
    assert json.dumps(parse_object(row, "x:1")) == expected


# --- text -----------------------------------------------------------------------------------------


ROWS = [{"prompt": "one: ü\u2028", "n": 1}, {"prompt": "two", "n": [1.0]}]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\r\n" for row in ROWS)
TEXTS = {
    "rows.jsonl": LINES,
    "rows.json": json.dumps(ROWS, indent=1, ensure_ascii=False),
    "lines.json": LINES,
    "rows.jsonl.gz": LINES,
    "rows.json.gz": f"\n {json.dumps(ROWS)} \n",
}


def write_text(path, text, encoding):
    raw = text.encode(encoding)
    path.write_bytes(gzip.compress(raw) if path.suffix.lower() == ".gz" else raw)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_byte_order_mark_is_skipped_and_utf_16_is_refused(tmp_path, name, encoding):
    path = tmp_path / name
    write_text(path, TEXTS[name], encoding)
    if encoding.startswith("utf-8"):
        assert [parse_object(raw, "x:1") for _, raw in read_raw_rows(path)] == ROWS
        return
    with pytest.raises(env.DataError) as raised:
        list(read_raw_rows(path))
    assert str(raised.value).startswith(f"{path}: cannot be read ('utf-8' codec can't decode byte")
    assert "). Correct the file or its suffix: .jsonl, .json, " in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "a.json",
            '[{"prompt": "a"} {"prompt": "b"}]',
            "Expecting ',' delimiter: line 1 column 18",
        ),
        ("a.json", '[{"prompt": "a"}', "Expecting ',' delimiter"),
        ("a.json", '[{"prompt": "a"}] x', "Extra data"),
        ("a.json", '[{"prompt": }]', "Expecting value"),
        ("a.csv", "prompt,answer\na,1\n\nb\n", "line 4: it has other cells than line 1"),
        (
            "a.csv",
            "prompt,prompt\na,1\n",
            "line 2: it has other cells than line 1, whose names must differ",
        ),
        ("a.csv", 'prompt,answer\na,1\n"b"x,2\n', "line 3: ',' expected after '\"'"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_reason(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    with pytest.raises(env.DataError) as raised:
        list(read_rows(str(tmp_path / name)))
    assert str(raised.value).startswith(f"{tmp_path}/{name}: cannot be read ({reason}")
    assert "). Correct the file or its suffix: .jsonl, .json, " in str(raised.value)


@pytest.mark.parametrize("name", ["rows.pq", "rows.PARQUET", "ROWS.JSON", "rows.JSONL.GZ"])
def test_a_suffix_may_be_short_or_in_upper_case(tmp_path, name):
    path = tmp_path / name
    if name.endswith((".pq", ".PARQUET")):
        write_table(ROWS[:1], path, "arrow")
    else:
        write_text(path, json.dumps(ROWS[:1]) if name == "ROWS.JSON" else LINES, "utf-8")
    assert row_files.find_files(str(tmp_path)) == [str(path)]
    assert parse_object(next(read_raw_rows(path))[1], "x:1") == ROWS[0]
