"""Tests how rows are read from JSON, gzip and Parquet files. Errors name the file and the line."""

from __future__ import annotations

import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

import env
from kit.data.row_files import read_raw_rows
from kit.data.verl_rows import read_rows
from tests.helpers.recipes import row


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"responses_create_params": {}}\n{oops\n', r"rows\.jsonl:2: not JSON"),
        (
            '{"responses_create_params": {}, "x": "\\ud800"}\n',
            r"rows\.jsonl:1: not JSON .*surrogates not allowed\)",
        ),
        (
            "[1]\n",
            r"rows\.jsonl:1: the row is a list\. Write one JSON object in each line, or a list",
        ),
        ('[\n{"prompt": "x"}\n]\n', r"rows\.jsonl:1: not JSON .* a list of them in a \.json file"),
        ("7\n", r"rows\.jsonl:1: the row is a int\. Write one JSON object"),
        ('\n\n{"question": "x"}\n', r"rows\.jsonl:3: it has question, but neither Gym"),
    ],
)
def test_the_error_of_a_malformed_line_names_file_and_line(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(env.DataError, match=message):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_the_error_of_a_missing_file_names_the_commands(tmp_path):
    with pytest.raises(env.DataError, match=r"none\.jsonl: no such file\. .*python env\.py --help"):
        list(read_rows(tmp_path / "none.jsonl"))


ROWS = [row("one", metadata={"n": 1}), row("zwei: ü", other=[1, {"x": None}]), row("three")]


def test_gzip_is_read_as_plain_text(tmp_path):
    text = "".join(json.dumps(r) + "\n" for r in ROWS)
    text = text.replace("\n", "\n\n", 1)
    (tmp_path / "rows.jsonl").write_text(text)
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(text.encode()))
    row_ids = [f"{zipped}:{line}" for line in (1, 3, 4)]
    assert list(read_rows(zipped)) == list(zip(row_ids, ROWS, strict=True))
    assert [r for _, r in read_rows(tmp_path / "rows.jsonl")] == ROWS

    zipped.write_bytes(zipped.read_bytes()[:40])
    with pytest.raises(env.DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        list(read_rows(zipped))
    zipped.write_text("no gzip")
    with pytest.raises(env.DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        list(read_rows(zipped))


def test_text_that_is_not_utf8_names_the_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"x": "\xff"}\n')
    with pytest.raises(env.DataError, match=r"rows\.jsonl: cannot be read"):
        list(read_rows(tmp_path / "rows.jsonl"))


def write_parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_parquet_holds_rows_as_json(tmp_path):
    texts = [json.dumps(r) for r in ROWS]
    numbers = [1, 2, 3]
    only = write_parquet(tmp_path / "only.parquet", row=texts)
    assert list(read_rows(only)) == [(f"{only}:{n}", r) for n, r in enumerate(ROWS, 1)]
    unclear = write_parquet(tmp_path / "unclear.parquet", n=numbers, text=texts)
    with pytest.raises(env.DataError, match=r"unclear\.parquet:1: it has n, text, but neither"):
        list(read_rows(unclear))
    null = write_parquet(tmp_path / "null.parquet", row=[texts[0], None])
    with pytest.raises(env.DataError, match=r"null\.parquet:2: the row is a NoneType"):
        list(read_rows(null))
    only.write_bytes(only.read_bytes()[:100])
    with pytest.raises(env.DataError, match=r"only\.parquet: cannot be read"):
        list(read_rows(only))


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_rows_are_read_as_they_were_written(tmp_path, kind):
    """The dictionary of each row group ends in the middle, after 1,000 bytes."""
    kinds = {"string": pyarrow.string(), "large_string": pyarrow.large_string()}
    kinds["dictionary"] = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    rows = [
        {"prompt": f"say {i % 7}", "extra": {"n": i, "of": [str(i), None]}, "x": 0.5 * i}
        for i in range(600)
    ]
    rows[5] |= {"prompt": None, "extra": None, "x": None}
    extra = pyarrow.struct({"n": pyarrow.int64(), "of": pyarrow.list_(kinds[kind])})
    schema = pyarrow.schema({"prompt": kinds[kind], "extra": extra, "x": pyarrow.float64()})
    small = {
        "row_group_size": 250,
        "data_page_size": 500,
        "dictionary_pagesize_limit": 1000,
        "write_batch_size": 10,
    }
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "r.parquet", **small)
    assert [r for _, r in read_raw_rows(tmp_path / "r.parquet")] == rows
    lines = pyarrow.table({"row": pyarrow.array([json.dumps(r) for r in rows], kinds[kind])})
    parquet.write_table(lines, tmp_path / "lines.parquet")
    assert [json.loads(r) for _, r in read_raw_rows(tmp_path / "lines.parquet")] == rows
