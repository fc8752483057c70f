"""Tests the formats of row files: as pandas, datasets and pyarrow write them, and in folders."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile

import pandas
import pyarrow
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars
from pyarrow import feather

import env
from extras import sft
from kit.data.row_files import find_files, parse_object, read_raw_rows
from kit.data.verl_rows import read_rows
from lab import convert

disable_progress_bars()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n} + 1, ü\n?"}], "tools": [TOOL], "answer": f"0{n}"}
    for n in range(3)
]
CELLS = [{**row, "prompt": json.dumps(row["prompt"]), "tools": json.dumps([TOOL])} for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_zip(path, content) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.jsonl", content)


def write_stream(path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)


def write_zstd(path, content) -> None:
    with pyarrow.output_stream(str(path), compression="zstd") as out:
        out.write(content)


WRITERS = {  # {file name: a function that writes ROWS there}
    "rows.ndjson": lambda path: path.write_bytes(LINES),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "rows.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "rows.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "rows.JSONL.ZIP": lambda path: write_zip(path, LINES),
    "rows.jsonl.zst": lambda path: write_zstd(path, LINES),
    "rows.json": lambda path: pandas.DataFrame(ROWS).to_json(path, orient="records"),
    "rows.json.bz2": lambda path: pandas.DataFrame(ROWS).to_json(path, orient="records"),
    "lines.json": lambda path: Dataset.from_list(ROWS).to_json(path),
    "rows.csv": lambda path: pandas.DataFrame(CELLS).to_csv(path, index=False),
    "rows.csv.xz": lambda path: pandas.DataFrame(CELLS).to_csv(path, index=False),
    "rows.tsv": lambda path: pandas.DataFrame(CELLS).to_csv(path, index=False, sep="\t"),
    "rows.parquet": lambda path: Dataset.from_list(ROWS).to_parquet(path),
    "rows.feather": lambda path: feather.write_feather(pyarrow.Table.from_pylist(ROWS), str(path)),
    "rows.arrow": write_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert find_files(str(tmp_path)) == find_files(f"file://{path}") == [str(path)]
    read = [row for _, row in read_rows(str(path))]
    assert [row["answer"] for row in read] == ["00", "01", "02"]
    prompts = [env.render_row(row, "x:1") for row in read]
    assert prompts == [(row["prompt"], [TOOL]) for row in ROWS]
    table = tmp_path / "out"
    assert list(convert.read_mapped_rows(str(path), None, None, "train")) == read
    assert not table.exists()


def test_a_data_set_that_was_saved_is_read_without_its_cache(tmp_path):
    table = Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    DatasetDict(train=table, test=table).save_to_disk(tmp_path / "both")
    write_stream(tmp_path / "saved" / "cache-1a.arrow")
    lines = []
    files = find_files(str(tmp_path / "saved"), lines.append)
    read = [row for file in files for _, row in read_rows(file)]
    assert [row["answer"] for row in read] == ["00", "01", "02"]
    assert lines == [f"{tmp_path}/saved: 2 files of rows, without cache-1a.arrow"]
    assert len(find_files(str(tmp_path / "both" / "train"))) == 1
    with pytest.raises(env.DataError, match=r"no file of rows .* It has test, train\. Name"):
        find_files(str(tmp_path / "both"))


def test_the_files_of_a_folder_that_are_left_out_are_named(tmp_path):
    for name in ("a.jsonl", "b.csv", "README.md", "c.txt", ".hidden", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    lines = []
    assert len(find_files(str(tmp_path), lines.append)) == 2
    assert lines == [f"{tmp_path}: 2 files of rows, without README.md, c.txt"]


@pytest.mark.parametrize("scheme", ["hf", "s3", "https", "gs", "hdfs"])
def test_an_address_is_refused_unchanged_with_the_way_to_download_it(scheme):
    address = f"{scheme}://datasets/owner/name/train.parquet"
    with pytest.raises(env.DataError) as raised:
        find_files(address)
    assert str(raised.value).startswith(f"{address}: rows are read from local files. Download it")


@pytest.mark.parametrize("number", ["1e400", "-1e999", "Infinity", "NaN"])
def test_a_number_that_no_float_holds_is_null_at_each_level(number):
    text = f'{{"x": {number}, "y": [1.5, {{"z": {number}}}]}}'
    assert parse_object(text, "x:1") == {"x": None, "y": [1.5, {"z": None}]}
    row = {"prompt": "2?", "extra_info": text}
    assert next(iter([parse_object(row["extra_info"], "x:1")]))["x"] is None


def test_a_file_that_is_not_what_its_suffix_says_names_the_formats(tmp_path):
    for name in ("rows.parquet", "rows.arrow", "rows.jsonl.zst", "rows.zip"):
        (tmp_path / name).write_bytes(b"\xff\xfe no rows")
        with pytest.raises(env.DataError, match=rf"{name}: cannot be read .*\.csv, .*\.zst"):
            list(read_raw_rows(tmp_path / name))


def test_an_archive_of_two_files_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl.zip"
    write_zip(path, LINES)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more.jsonl", LINES)
    with pytest.raises(env.DataError, match="the archive must have one file; unpack it"):
        list(read_raw_rows(path))


def test_a_csv_of_chats_is_read(tmp_path):
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "chats.csv"
    pandas.DataFrame({"messages": [json.dumps(chat)], "id": ["007"]}).to_csv(path, index=False)
    ((_, row),) = sft.read_conversations(str(path))
    assert row == {"messages": chat, "id": "007"}
