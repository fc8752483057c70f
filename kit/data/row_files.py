"""Read rows from files: JSON lines (also as .gz), a JSON list (.json), or Parquet.

JSON cannot hold every value of Python and Arrow. Such values become these, so that a number never
becomes another number:

- NaN, Infinity and -Infinity are null. This is also true of JSON text that contains them.
- A Decimal is text with all of its digits, such as "1.10".
- Dates, times and durations are ISO 8601 text. A UUID is text.
- Bytes are text if they are UTF-8, otherwise base64.
"""

from __future__ import annotations

import base64
import glob
import gzip
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from uuid import UUID

import env
from env import DataError, Json

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch
    from pyarrow.parquet import ParquetFile

PARQUET_SUFFIXES = (".parquet", ".pq")
# of the files of a folder, in lower or upper case
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", *PARQUET_SUFFIXES)
BATCH_ROWS = 32  # a row with images may have several MB
GYM_COLUMNS = ("responses_create_params", "task_input")  # a Parquet table of Gym rows has one
FIRST_REPORT_S = 5.0  # a file that loads faster is loaded silently
REPORT_S = 30.0
BOM = "\ufeff"  # some editors and pandas (utf-8-sig) write it at the start of a file
Item = TypeVar("Item")


# --- files ----------------------------------------------------------------------------------------


def find_files(path: str) -> list[str]:
    """Find the files of a path, in sorted order: a file, the files of a folder, or a pattern.

    A pattern is that of Python's glob: `data/*.jsonl`, or `data/**/*.parquet` for subfolders, too.
    A path that is neither is returned, so that reading it fails. Raises DataError if a folder or a
    pattern has no files.

    >>> find_files("no_such_file.jsonl")
    ['no_such_file.jsonl']
    """
    expanded = str(Path(path).expanduser())
    if Path(expanded).is_dir():
        return list_folder(expanded)
    if Path(expanded).is_file() or not glob.has_magic(expanded):
        return [expanded]
    files: set[str] = set()
    for match in glob.glob(expanded, recursive=True):
        if not Path(match).is_dir():
            files.add(match)
        elif has_row_suffix(match):
            files.update(list_folder(match))
    if not files:
        raise DataError(f"{path}: no file matches this pattern. Correct it.")
    return sorted(files)


def list_folder(folder: str) -> list[str]:
    """List the row files of a folder, in sorted order. Raises DataError if it has none.

    Spark and Dask write a folder such as `train.parquet/`, whose files are listed, too. They use
    names that begin with `.` or `_` for other files, which are not listed.
    """
    files: list[str] = []
    for path in sorted(Path(folder).iterdir()):
        if has_row_suffix(path.name) and not path.name.startswith((".", "_")):
            files += list_folder(str(path)) if path.is_dir() else [str(path)]
    if not files:
        raise DataError(
            f"{folder}: the folder has no file of rows ({', '.join(SUFFIXES)}). Name the files, or "
            f"use a pattern such as {folder}/**/*.jsonl for its subfolders."
        )
    return files


def has_row_suffix(name: str) -> bool:
    """Whether a file name, or that of a folder of Spark or Dask, ends in one of SUFFIXES."""
    return name.lower().endswith(SUFFIXES)


def report_progress(
    items: Iterable[Item], name: str, report: Callable[[str], None]
) -> Iterator[Item]:
    """Yield the items, and report their number now and then if they take more than seconds."""
    start = time.monotonic()
    due = start + FIRST_REPORT_S
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now > due:
            report(f"{name}: {count:,} rows loaded in {now - start:.0f} s")
            due = now + REPORT_S


def read_raw_rows(path: str | Path, *columns: str, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (`name:line`, JSON text or a dict) for each row of a file. Skips blank lines.

    name: the path if it is empty. A bad line does not end the reading, since it is not parsed here.
    If a Parquet file has one of `columns` or GYM_COLUMNS, each of its columns is a key of the row.
    Otherwise one string column must hold the rows as JSON. Raises DataError.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check the path{suggest_command(path)}.")
    is_parquet = path.name.lower().endswith(PARQUET_SUFFIXES)
    try:
        rows = read_parquet(path, columns) if is_parquet else read_json(path)
        for number, raw in enumerate(rows, 1):
            if not isinstance(raw, str) or raw.strip():  # null is not a blank line
                yield f"{name or path}:{number}", raw
    except Exception as error:  # from the disk, gzip or Arrow
        raise DataError(
            f"{path}: cannot be read ({error}). Correct the file, which must be JSON (UTF-8), .gz "
            "or Parquet."
        ) from None


def suggest_command(path: Path) -> str:
    """Suggest the command that writes a file of this name, if there is one."""
    name, _, split = path.stem.rpartition("_")
    arguments = ""
    if path.suffix == ".jsonl" and name and split == "examples":
        arguments = f"examples --server {name}"
    elif path.suffix == ".jsonl" and name in env.GENERATORS:
        arguments = name
    if not arguments:
        return ""
    return f", or run `python env.py {arguments} --out {path.parent}`"


# --- JSON -----------------------------------------------------------------------------------------


def read_json(path: Path) -> Iterator[object]:
    """Yield the lines of a file, or the items of a .json file that holds one list.

    Raises OSError and ValueError.
    """
    with open_text(path) as file:
        is_list = file.read(4096).lstrip().startswith("[")
        file.seek(0)
        if is_list and path.name.lower().endswith((".json", ".json.gz")):
            yield from json.load(file)
            return
        for line in file:
            yield line.removeprefix(BOM)  # a file that was appended to another may have one


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a file or a .gz file of UTF-8 text, with or without a byte order mark.

    newline: as of `open`.
    """
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def parse_object(raw: object, row_id: str) -> Json:
    """Parse JSON text, or convert a dict, to a dict of plain values. Raises DataError.

    The result can be written as JSON and as UTF-8. The start of this file has the values that other
    values become.
    """
    try:
        text = raw if isinstance(raw, str) else json.dumps(raw, default=to_plain_value)
        row = json.loads(text, parse_constant=to_null)
        # its escapes may be no UTF-8, and its numbers out of range
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise DataError(f"{row_id}: not JSON ({error}). Fix: {describe_row(raw)}") from None
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise DataError(f"{row_id}: the row is a {kind}, not an object. Fix: {describe_row(raw)}")
    return row


def describe_row(raw: object) -> str:
    """Describe what an invalid row should be."""
    text = raw.strip() if isinstance(raw, str) else ""
    if text.startswith("["):
        return "A list of rows needs the suffix .json."
    if text == "{":
        return "Write each object in one line, or a list of objects in a .json file."
    return "A row must be one JSON object."


def to_null(_constant: str) -> None:
    """Convert NaN, Infinity and -Infinity to null."""


def to_plain_value(value: object) -> object:
    """Convert a value of Python, NumPy, pandas or Arrow to one that json can write.

    The start of this file has the rules. Raises TypeError.
    """
    import numpy
    import pandas

    if isinstance(value, bytes | bytearray):
        return decode_bytes(value)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "mM":
        return list(value)  # its tolist() has integers
    if isinstance(value, numpy.datetime64):
        value = pandas.Timestamp(value)
    if isinstance(value, numpy.timedelta64 | timedelta):
        value = pandas.Timedelta(value)
    if value is pandas.NaT or value is pandas.NA:
        return None
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else None
    if isinstance(value, UUID):
        return str(value)
    convert = getattr(value, "tolist", None) or getattr(value, "isoformat", None)
    if convert is None:
        raise TypeError(f"a {type(value).__name__} cannot be JSON: {value!r:.80}")
    return convert()


def decode_bytes(value: bytes | bytearray) -> str:
    """Decode bytes as UTF-8, or as base64 if they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


# --- Parquet --------------------------------------------------------------------------------------


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[object]:
    """Yield each row of a Parquet file: as a dict, or as JSON text from its only string column.

    The structs of a column have the same keys in Arrow, which fills those that a row lacks with
    null. Prompts lose these nulls, since a chat template would show them. Other columns keep them,
    since a verifier may need the key. Raises ValueError and Arrow's errors.
    """
    with open_parquet(path) as file:
        json_column = find_json_column(file, columns)
        if not json_column:
            yield from read_dicts(file, {*columns, *GYM_COLUMNS, "tools"})
            return
        for batch in read_batches(file, [json_column]):
            yield from batch.column(0).to_pylist()


def read_entries(path: Path) -> Iterator[Json]:
    """Yield the rows of a Parquet table as they are. Raises Arrow's errors."""
    with open_parquet(path) as file:
        yield from read_dicts(file)


def open_parquet(path: Path) -> ParquetFile:
    """Open a Parquet file as pyarrow's ParquetFile. Raises Arrow's errors."""
    from pyarrow import parquet  # takes a second, which JSON lines need not wait for

    return parquet.ParquetFile(path)


def read_batches(file: ParquetFile, columns: Sequence[str] | None = None) -> Iterator[RecordBatch]:
    """Yield the rows of a Parquet file in Arrow batches, none with rows of two row groups.

    Arrow cannot join the dictionaries of two groups if a struct or list has them.
    """
    for group in range(file.num_row_groups):
        yield from file.iter_batches(BATCH_ROWS, [group], columns)


def read_dicts(file: ParquetFile, prompts: Collection[str] = ()) -> Iterator[Json]:
    """Yield the rows of a Parquet file as dicts. prompts: columns that lose their nulls."""
    kinds = {field.name: field.type for field in file.schema_arrow if has_json(field.type)}
    for batch in read_batches(file):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            for name, kind in kinds.items():
                row[name] = parse_json_values(row[name], kind)
            for name in row.keys() & prompts:
                row[name] = drop_nulls(row[name], name)
            yield row


def drop_nulls(value: object, column: str) -> object:
    """Remove the null keys of a prompt. A task_input also has a verifier's fields, which stay."""
    if isinstance(value, dict) and column == "task_input":
        return {
            key: env.drop_nulls(item) if key == "responses_create_params" else item
            for key, item in value.items()
        }
    return env.drop_nulls(value)


def has_json(kind: DataType) -> bool:
    """Whether an Arrow type is Parquet's type JSON, or has it inside."""
    from pyarrow import JsonType

    if isinstance(kind, JsonType):
        return True
    return any(has_json(kind.field(i).type) for i in range(kind.num_fields))


def parse_json_values(value: Any, kind: DataType) -> object:  # any value in a table
    """Parse the texts in a value that have Parquet's type JSON. kind: the Arrow type of the value.

    DuckDB and datasets write this type where the rows of a table differ in form. Raises ValueError.
    """
    from pyarrow import JsonType, types

    if value is None:
        return None
    if isinstance(kind, JsonType):
        return json.loads(value)
    if types.is_struct(kind):
        kinds = {field.name: field.type for field in kind}
        return {key: parse_json_values(item, kinds[key]) for key, item in value.items()}
    if types.is_map(kind):
        return {key: parse_json_values(item, kind.item_type) for key, item in value.items()}
    if types.is_nested(kind):
        return [parse_json_values(item, kind.value_type) for item in value]
    return value


def find_json_column(file: ParquetFile, columns: Sequence[str]) -> str:
    """Find the column that holds rows as JSON, or "" if each column is a key of the row.

    file: pyarrow's ParquetFile. Raises ValueError if it has neither form.
    """
    schema = file.schema_arrow
    if {*columns, *GYM_COLUMNS} & {*schema.names}:
        return ""
    strings = [field.name for field in schema if is_string(field.type)]
    if "row" in strings:
        return "row"
    if len(strings) == 1 and begins_object(file, strings[0]):
        return strings[0]
    needed = ", ".join([*columns, GYM_COLUMNS[0], "a string column `row`"])
    raise ValueError(
        f"it needs {needed}, or exactly one string column, with JSON objects; it has {schema.names}"
    )


def begins_object(file: ParquetFile, column: str) -> bool:
    """Whether the first text of a column is a JSON object."""
    for batch in read_batches(file, [column]):
        for text in batch.column(0).to_pylist():
            if text is not None:
                return bool(text.lstrip().startswith("{"))
    return False


def is_string(kind: DataType) -> bool:
    """Whether an Arrow type is text: directly, in a dictionary, or of Parquet's type JSON."""
    from pyarrow import JsonType, types

    if isinstance(kind, JsonType):
        return True
    value_kind = kind.value_type if types.is_dictionary(kind) else kind
    is_kind = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_text(value_kind) for is_text in is_kind)
