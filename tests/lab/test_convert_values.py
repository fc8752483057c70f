"""Tests that no command of env.py changes a value: CSV cells are text, and JSON stays as it is."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from datetime import date
from decimal import Decimal

import pyarrow
import pytest
from datasets import Dataset, disable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import env
from kit.data.row_files import SEPARATORS
from kit.data.verl_rows import read_rows
from lab import convert
from tests.helpers.recipes import write_rows

disable_progress_bars()
HYPOTHESIS_SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)
MAP = "def keep(entry):\n    return {'prompt': 'Hi', 'entry': entry}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a map function that keeps the whole entry."""
    folder = tmp_path_factory.mktemp("values")
    (folder / "my_map.py").write_text(MAP)
    return folder


def convert_table(path, monkeypatch, capsys) -> list[dict]:
    """Run `env.py from` on a table in its folder -> the entries in the rows that it wrote."""
    monkeypatch.chdir(path.parent)
    arguments = ["from", "--data", path.name, "--map", "my_map.py:keep", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["env.py", *arguments])
    convert.main()
    capsys.readouterr()
    return [row["entry"] for _, row in read_rows(f"out/{path.stem}.jsonl")]


def read_entries(path) -> list:
    return [entry for _, entry in convert.read_table(str(path), None, "train")]


# --- CSV and TSV ----------------------------------------------------------------------------------


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=6)


@HYPOTHESIS_SETTINGS
@given(st.data(), st.sampled_from([".csv", ".tsv"]), st.booleans())
def test_any_table_is_read_as_it_was_written(tmp_path_factory, data, suffix, has_quotes):
    names = data.draw(st.lists(TEXTS, min_size=1, max_size=3, unique=True))
    rows = data.draw(st.lists(st.lists(TEXTS, min_size=len(names), max_size=len(names))))
    text = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if has_quotes else csv.QUOTE_MINIMAL
    writer = csv.writer(text, delimiter=SEPARATORS[suffix], quoting=quoting)
    writer.writerows([names, *rows])
    path = tmp_path_factory.getbasetemp() / f"table{suffix}"
    path.write_bytes(text.getvalue().encode())
    assert read_entries(path) == [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a,b\n1,2\n\n3\n", "(line 4: it has other cells"),
        (b"a,b\n1,2,3\n", "(line 2: it has other cells"),
        (b"a,a\n1,2\n", "(line 2: it has other cells"),
        (b'a,b\n1,"2\n', "(line 2: unexpected end of data)"),
        ("a,b\n1,2\n".encode("utf-16"), "('utf-8' codec can't decode byte 0xff"),
        (b"a,b\n1,\xe4\n", "('utf-8' codec can't decode byte 0xe4"),
    ],
)
def test_a_malformed_table_is_one_error(tmp_path, text, message):
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(env.DataError) as raised:
        read_entries(tmp_path / "t.csv")
    assert str(raised.value).startswith(f"{tmp_path}/t.csv: cannot be read {message}")


def test_a_long_cell_and_blank_lines_are_read(tmp_path):
    (tmp_path / "t.csv").write_text(f"a,b\n\n{'x' * 300_000},\n\n")
    assert read_entries(tmp_path / "t.csv") == [{"a": "x" * 300_000, "b": ""}]


@pytest.mark.parametrize("name", ["t.csv.gz", "t.TSV.GZ", "t.jsonl.gz", "t.json.gz"])
def test_a_compressed_table_is_read(tmp_path, name):
    text = {"csv": "a,b\n1,2\n", "tsv": "a\tb\n1\t2\n", "jsonl": '{"a": "1", "b": "2"}'}
    text["json"] = f"[{text['jsonl']}]"
    (tmp_path / name).write_bytes(gzip.compress(text[name.lower().split(".")[1]].encode()))
    assert read_entries(tmp_path / name) == [{"a": "1", "b": "2"}]


# --- JSON and Parquet -----------------------------------------------------------------------------


VALUES = {
    "big": 123456789012345678901234567890,
    "one": 1,
    "float": 1.0,
    "small": 1e-300,
    "true": True,
    "date": "2026-01-02T03:04:05",
    "digits": "007",
    "text": "\u2028 ü \x00 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    "nested": [[1, "1", 1.0, None], {"a": {}, "b": []}],
    "null": None,
}


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_a_json_table_keeps_each_value_and_no_row_gets_keys(folder, monkeypatch, capsys, name):
    """Arrow would make one type of a column, read dates, and fill missing keys with null."""
    rows = [VALUES, {"one": 1.5, "date": "no date"}, {"nested": "text", "big": 2}, {}]
    text = json.dumps(rows) if name == "t.json" else "".join(f"{json.dumps(r)}\n" for r in rows)
    (folder / name).write_text(text)
    entries = convert_table(folder / name, monkeypatch, capsys)
    assert json.dumps(entries) == json.dumps(rows)


def test_a_parquet_table_gives_the_map_function_exact_values(tmp_path):
    table = pyarrow.table(
        {
            "decimal": [Decimal("1.10")],
            "day": [date(2026, 1, 2)],
            "raw": [b"\xff"],
            "big": pyarrow.array([2**63], pyarrow.uint64()),
            "float": [1.0],
            "tags": pyarrow.array([[("a", 1)]], pyarrow.map_("string", "int8")),
            "struct": [{"a": None, "b": [1, None]}],
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    (entry,) = read_entries(tmp_path / "t.parquet")
    expected = {
        "decimal": Decimal("1.10"),
        "day": date(2026, 1, 2),
        "raw": b"\xff",
        "big": 2**63,
        "float": 1.0,
        "tags": {"a": 1},
        "struct": {"a": None, "b": [1, None]},
    }
    assert repr(entry) == repr(expected)


def test_the_commands_convert_a_table_of_gym_rows_to_verls_and_back(tmp_path, monkeypatch, capsys):
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{n}?"}]},
            "answer": n,
            "agent_ref": {"name": "math_simple_agent"},
        }
        for n in (2**62, 0)
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "gym.parquet")
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["to-verl", "gym.parquet", "--out", "verl"],
        ["from-verl", "verl", "--out", "back"],  # a folder
        ["check", "verl/*.parquet", "back"],
    ):
        monkeypatch.setattr(sys, "argv", ["env.py", *arguments])
        if arguments[0] == "check":
            with pytest.raises(SystemExit, match="0"):
                convert.main()
        else:
            convert.main()
    assert [row for _, row in read_rows("back/gym.jsonl")] == rows
    output = capsys.readouterr().out
    assert "verl/gym.parquet: 2 rows load" in output and "back/gym.jsonl: 2 rows load" in output


@pytest.mark.parametrize("command", ["check", "to-verl", "from-verl"])
def test_a_pattern_without_files_is_one_error_of_a_command(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["env.py", command, "none/*.jsonl"])
    with pytest.raises(SystemExit) as raised:
        convert.main()
    assert raised.value.code == "error: none/*.jsonl: no file matches this pattern. Correct it."


def test_examples_that_differ_in_the_type_of_a_number_are_both_kept(tmp_path, monkeypatch):
    data = tmp_path / "mcqa" / "data"
    data.mkdir(parents=True)
    row = {"responses_create_params": {"input": "2?"}, "agent_ref": {"name": "mcqa"}}
    write_rows(data / "example.jsonl", [row | {"answer": 1}, row | {"answer": 1}])
    write_rows(data / "example2.jsonl", [row | {"answer": 1.0}, row | {"answer": 1}])
    monkeypatch.setattr(convert, "find_servers", lambda python: tmp_path)
    answers = [example["answer"] for example in convert.read_examples("mcqa", "python")]
    assert repr(answers) == "[1, 1, 1.0]"


def test_a_long_conversion_reports_its_rows_on_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kit.data.row_files.FIRST_REPORT_S", -1.0)
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "2?", "data_source": "x"}] * 3)
    assert convert.check(str(path))
    captured = capsys.readouterr()
    assert captured.err == f"{path}: 1 rows loaded in 0 s\n"
    assert captured.out == f"{path}: 3 rows load, 0 refused\n"
