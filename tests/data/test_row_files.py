"""Tests how row files are read: their values stay as they are, and errors name the line."""

from __future__ import annotations

import gzip
import json
import lzma
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import numpy as np
import pandas
import pyarrow
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet

import env
from kit.data.row_files import find_files, parse_object, read_raw_rows
from kit.data.verl_rows import read_rows

disable_progress_bars()
HYPOTHESIS_SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)


# --- formats --------------------------------------------------------------------------------------


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n} + 1, ü\n?"}], "tools": [TOOL], "answer": f"0{n}"}
    for n in range(3)
]
CELLS = [{**row, "prompt": json.dumps(row["prompt"]), "tools": json.dumps([TOOL])} for row in ROWS]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in ROWS).encode()


def write_stream(path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)


WRITERS = {  # {file name: a function that writes ROWS there}
    "rows.ndjson": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),  # a byte order mark
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "rows.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "rows.json": lambda path: path.write_text(f"\n {json.dumps(ROWS, indent=1)}"),
    "lines.json": lambda path: Dataset.from_list(ROWS).to_json(path),
    "rows.csv.xz": lambda path: pandas.DataFrame(CELLS).to_csv(path, index=False),
    "rows.tsv": lambda path: pandas.DataFrame(CELLS).to_csv(path, index=False, sep="\t"),
    "rows.PARQUET": lambda path: Dataset.from_list(ROWS).to_parquet(path),
    "rows.feather": lambda path: feather.write_feather(pyarrow.Table.from_pylist(ROWS), str(path)),
    "rows.arrow": write_stream,
}


LINE_FILES = [*WRITERS][:3]


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert find_files(str(tmp_path)) == [str(path)]
    read = list(read_rows(str(path)))
    places = [1, 3, 5] if path.name in LINE_FILES else [1, 2, 3]  # blank lines count
    assert [row_id for row_id, _ in read] == [f"{path}:{place}" for place in places]
    assert [row["answer"] for _, row in read] == ["00", "01", "02"]
    prompts = [env.render_row(row, "x:1") for _, row in read]
    assert prompts == [(row["prompt"], [TOOL]) for row in ROWS]


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
    assert parse_object('{"x": [1e400, -1e999]}', "x:1") == {"x": [None, None]}


def test_a_long_cell_and_blank_lines_are_read(tmp_path):
    (tmp_path / "t.csv").write_text(f'a,b\n\n{"x" * 300_000},\n\n" 007",NA\n')
    read = [entry for _, entry in read_raw_rows(tmp_path / "t.csv")]
    assert read == [{"a": "x" * 300_000, "b": ""}, {"a": " 007", "b": "NA"}]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"responses_create_params": {}}\n{oops\n', "2: not JSON"),
        ('{"responses_create_params": {}, "x": "\\ud800"}\n', "1: not JSON"),
        ('\n\n{"question": "x"}\n', "3: it has question, but neither Gym"),
    ],
)
def test_the_error_of_a_malformed_line_names_file_and_line(tmp_path, text, place):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(env.DataError, match=rf"rows\.jsonl:{place}"):
        list(read_rows(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"x": "\xff"}\n', "'utf-8' codec can't decode byte"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:40], "Compressed file ended"),
        ("a.parquet", b"no rows", ""),
        ("a.arrow", b"no rows", ""),
        ("a.json", b'[{"prompt": "a"} {"prompt": "b"}]', "Expecting ',' delimiter: line 1"),
        ("a.csv", b"a,b\n1,2\n\n3\n", "line 4: it has other cells than line 1"),
    ],
)
def test_a_malformed_file_is_an_error_with_its_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(env.DataError) as raised:
        list(read_raw_rows(str(tmp_path / name)))
    assert str(raised.value).startswith(f"{tmp_path}/{name}: cannot be read ({reason}")


def test_an_address_is_refused_with_the_way_to_download_it():
    address = "hf://datasets/owner/name/train.parquet"
    with pytest.raises(env.DataError, match=f"{address}: rows are read from local files"):
        find_files(address)


# --- folders --------------------------------------------------------------------------------------


def test_a_data_set_that_was_saved_is_read_without_its_cache(tmp_path):
    table = Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    DatasetDict(train=table, test=table).save_to_disk(tmp_path / "both")
    write_stream(tmp_path / "saved" / "cache-1a.arrow")
    (tmp_path / "saved" / "README.md").write_text("")
    lines = []
    files = find_files(str(tmp_path / "saved"), lines.append)
    read = [row for file in files for _, row in read_rows(file)]
    assert [row["answer"] for row in read] == ["00", "01", "02"]
    assert lines == [f"{tmp_path}/saved: 2 files of rows, without README.md, cache-1a.arrow"]
    with pytest.raises(env.DataError, match=r"no file of rows .* It has test, train\. Name"):
        find_files(str(tmp_path / "both"))


# --- tables of Arrow ------------------------------------------------------------------------------


def make_tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "name": name, "parameters": parameters}


def make_gym_rows() -> list[dict]:
    """Rows whose messages and tools have different keys, so that Arrow pads them with null."""
    question = {"role": "user", "content": "Add 2 and 3."}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "5"}
    first = {"input": [question], "tools": [make_tool("add", a={"type": "integer"})]}
    second = {
        "input": [{"role": "system", "content": "Use tools."}, question, call, output],
        "tools": [make_tool("look_up", city={"type": "string", "enum": ["Rome", "Bonn"]})],
        "temperature": 0.5,
    }
    agent = {"name": "math_simple_agent"}
    return [
        {"responses_create_params": params, "answer": answer, "agent_ref": agent}
        for params, answer in ((first, "5"), (second, "Bonn"))
    ]


def write_table(rows, path, writer):
    if writer == "datasets":
        Dataset.from_list(rows).to_parquet(path)
    elif writer == "arrow":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    else:  # JSON text in each column that is no text
        texts = [
            {k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in rows
        ]
        parquet.write_table(pyarrow.Table.from_pylist(texts), path)


def read_table(path) -> list[dict]:
    return [row for _, row in read_rows(str(path))]


@pytest.mark.parametrize("writer", ["datasets", "arrow", "JSON text"])
def test_a_table_of_gym_rows_has_the_rows_of_json_lines(tmp_path, writer):
    rows = make_gym_rows()
    write_table(rows, tmp_path / "gym.parquet", writer)
    assert read_table(tmp_path / "gym.parquet") == rows


def test_only_the_fields_of_a_verifier_keep_the_nulls_of_a_table(tmp_path):
    """A verifier may need each key, as verl's reward functions do."""
    rows = make_gym_rows()
    rows[0]["metadata"] = {"words": 3}
    rows[1]["metadata"] = {"letters": 4}
    write_table(rows, tmp_path / "rows.parquet", "arrow")
    read = [row["metadata"] for row in read_table(tmp_path / "rows.parquet")]
    assert read == [{"words": 3, "letters": None}, {"words": None, "letters": 4}]


def test_a_column_of_parquets_type_json_has_values_and_a_nested_one_is_refused(tmp_path):
    """DuckDB and datasets write this type if rows differ in form."""
    texts = ['"Say \\"hi\\"."', "[1.0]", None]
    column = pyarrow.array(texts).cast(pyarrow.json_())
    path = tmp_path / "json.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["1", "2", "3"], "other": column}), path)
    assert [row["other"] for row in read_table(path)] == ['Say "hi".', [1.0], None]
    nested = pyarrow.StructArray.from_arrays([column], ["other"])
    parquet.write_table(pyarrow.table({"prompt": ["1", "2", "3"], "extra": nested}), path)
    with pytest.raises(env.DataError, match="extra has the type JSON inside it"):
        read_table(path)


IDENTIFIER = UUID("43d30c5d-737f-4001-99d6-76f54950aa7e")
VALUES = [  # (value, its Arrow type or None, the value in the row)
    (Decimal("1.10"), None, "1.10"),
    (datetime(2026, 1, 2), pyarrow.timestamp("ns", "Europe/Rome"), "2026-01-02T01:00:00+01:00"),
    (IDENTIFIER, pyarrow.uuid(), str(IDENTIFIER)),
    ("text: ü".encode(), None, "text: ü"),
    (b"\x89PNG\xff", None, "iVBOR/8="),
    ([(7, ["x"])], pyarrow.map_(pyarrow.int8(), pyarrow.list_(pyarrow.string())), {"7": ["x"]}),
]


@pytest.mark.parametrize(("value", "kind", "expected"), VALUES, ids=[str(v[:2]) for v in VALUES])
def test_a_column_of_any_type_loads_in_each_row_group(tmp_path, value, kind, expected):
    column = pyarrow.array([value, None, value], kind)
    table = pyarrow.table({"prompt": ["1", "2", "3"], "other": column})
    parquet.write_table(table, tmp_path / "types.parquet", row_group_size=2)
    read = [row["other"] for row in read_table(tmp_path / "types.parquet")]
    assert read == [expected, None, expected]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.array([1.5, np.inf]), [1.5, None]),
        (Decimal("NaN"), None),
        ((1, 2), [1, 2]),
    ],
    ids=str,
)
def test_a_value_of_a_function_becomes_that_of_json(value, expected):
    assert parse_object({"x": [value], "n": 2**80}, "x:1") == {"x": [expected], "n": 2**80}
    for unknown in ({1, 2}, np.datetime64("2026-01-02", "ns")):
        with pytest.raises(env.DataError, match=r"x:1: not JSON .* cannot be JSON"):
            parse_object({"x": unknown}, "x:1")
