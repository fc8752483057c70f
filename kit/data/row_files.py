"""Read rows from files: JSON lines (also as .gz), a JSON list (.json), or Parquet.

JSON cannot hold every value of Python and Arrow. In a row such values become those that pandas'
`to_json` writes, so a number never becomes another number:

- NaN, Infinity and -Infinity are null. This is also true of JSON text that contains them.
- A Decimal is text with all of its digits, such as "1.10".
- Dates, times and durations are ISO 8601 text. A UUID is text.
- Bytes are text if they are UTF-8, otherwise base64.
"""

from __future__ import annotations

import base64
import codecs
import glob
import gzip
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeVar
from uuid import UUID

import env
from env import DataError

MAX_ROW_CHARS = 2**26  # a longer line is no row, and is not read to its end
MAX_NESTING = 64  # levels: rows have far fewer, and JSON readers and writers can handle these
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")  # of the files of a folder
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
        elif match.endswith(SUFFIXES):  # Spark and Dask write a folder of this name
            files.update(list_folder(match))
    if not files:
        raise DataError(f"{path}: no file matches this pattern. Correct it.")
    return sorted(files)


def list_folder(folder: str) -> list[str]:
    """List the row files of a folder, in sorted order. Raises DataError if it has none.

    Files that begin with `.` or `_` are not listed, as Spark and Dask write them for other uses.
    """
    files = [
        str(file)
        for file in sorted(Path(folder).iterdir())
        if file.name.endswith(SUFFIXES) and not file.name.startswith((".", "_"))
    ]
    if not files:
        raise DataError(
            f"{folder}: the folder has no file of rows ({', '.join(SUFFIXES)}). Name the files, or "
            f"use a pattern such as {folder}/**/*.jsonl for its subfolders."
        )
    return files


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


def read_raw_rows(path: str | Path, *columns: str) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, JSON text or a dict) for each row of a file. Skips blank lines.

    A bad row does not end the reading, since the text is not parsed here. If a Parquet file has one
    of `columns` or GYM_COLUMNS, each of its columns is a key of the row. Otherwise one string
    column must hold the rows as JSON. Raises DataError.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check the path{suggest_command(path)}.")
    try:
        rows = read_parquet(path, columns) if path.suffix == ".parquet" else read_json(path)
        for number, raw in enumerate(rows, 1):
            if not isinstance(raw, str) or raw.strip():  # null is not a blank line
                yield f"{path}:{number}", raw
    except Exception as error:  # from the disk, gzip or Arrow
        raise DataError(
            f"{path}: cannot be read ({error}). It must be JSON (UTF-8), .gz or parquet."
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

LIST_START = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*")
SEPARATOR = re.compile(r"[ \t\r\n]*(,[ \t\r\n]*|(?=\]))")
OTHER_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32-LE: the first


def read_json(path: Path) -> Iterator[str]:
    """Yield the lines of a file, or the items of a .json file that holds one list, as JSON text."""
    with open_text(path) as file:
        if path.name.endswith((".json", ".json.gz")) and begins_list(file):
            yield from split_list(read_whole(file))
            return
        while line := file.readline(MAX_ROW_CHARS):
            if len(line) == MAX_ROW_CHARS:
                raise ValueError(f"a line of over {MAX_ROW_CHARS >> 20} million characters")
            yield line.removeprefix(BOM)  # a file that was appended to another may have one


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a file or a .gz file of UTF-8 text, with or without a byte order mark.

    newline: as of `open`. Raises ValueError for UTF-16 and UTF-32.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as binary:
        if binary.read(4).startswith(OTHER_BOMS):
            raise ValueError("its text is UTF-16 or UTF-32, not UTF-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def begins_list(file: TextIO) -> bool:
    """Whether a text begins with `[`. The file is then at its start again."""
    has_bracket = LIST_START.match(file.read(4096)) is not None
    file.seek(0)
    return has_bracket


def read_whole(file: TextIO) -> str:
    """Read the text of a JSON list. Raises ValueError if it is too long."""
    limit = 16 * MAX_ROW_CHARS
    text = file.read(limit)
    if len(text) == limit:
        raise ValueError(f"a list of over {limit >> 20} million characters. Write JSON lines")
    return text


def split_list(text: str) -> Iterator[str]:
    """Split the text of a JSON list into the texts of its items. Raises ValueError.

    >>> list(split_list('[{"a": [1, 2]}, {"a": 1.10}]'))
    ['{"a": [1, 2]}', '{"a": 1.10}']
    """
    parse_item = json.JSONDecoder().raw_decode
    start = LIST_START.match(text)
    position = start.end() if start else 0
    while not text.startswith("]", position):
        _, end = parse_item(text, position)
        yield text[position:end]
        separator = SEPARATOR.match(text, end)
        if separator is None:
            raise ValueError(f"no comma and no end of the list at character {end}")
        position = separator.end()
    if text[position + 1 :].strip():
        raise ValueError(f"text after the end of the list at character {position}")


def parse_object(raw: Any, row_id: str) -> dict[str, Any]:
    """Parse JSON text, or convert a dict, to a dict of plain values. Raises DataError.

    The result can be written as JSON and as UTF-8. The start of this file has the values that other
    values become.
    """
    text = raw if isinstance(raw, str) else to_json(raw, row_id)
    try:
        row = json.loads(text, object_pairs_hook=to_dict, parse_constant=to_null)
    except DataError as error:
        raise DataError(f"{row_id}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{row_id}: not JSON ({error}). Each line must be one JSON object."
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{row_id}: a row must be a JSON object, this is a {type(row).__name__}.")
    if is_nested_deeper(row, MAX_NESTING) or len(text) > MAX_ROW_CHARS:
        raise DataError(
            f"{row_id}: nested over {MAX_NESTING} levels deep, or over {MAX_ROW_CHARS >> 20} MB. "
            "Remove such rows."
        )
    if text is raw:  # its escapes may be no UTF-8, and its numbers out of range
        to_json(row, row_id, allow_nan=False)
    return row


def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object. Raises DataError if a key is repeated."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"an object has the key {repeated!r} twice. Remove one of the two.")
    return result


def to_null(_constant: str) -> None:
    """Convert NaN, Infinity and -Infinity to null."""


def to_json(value: Any, row_id: str, allow_nan: bool = True) -> str:
    """Write a row as JSON. Raises DataError with the key of a value that JSON cannot hold."""
    try:
        text = json.dumps(value, default=to_plain_value, ensure_ascii=False, allow_nan=allow_nan)
        text.encode()
        return text
    except (ValueError, TypeError, RecursionError) as error:
        key = find_invalid_key(value, allow_nan)
        place = f", in `{key}`" if key else ""
        raise DataError(
            f"{row_id}: not JSON ({error}{place}). Change this value, or remove it."
        ) from None


def find_invalid_key(row: Any, allow_nan: bool) -> str:
    """Find the first key of a row whose value cannot be written as JSON, or ""."""
    for key, value in row.items() if isinstance(row, dict) else ():
        try:
            json.dumps(value, default=to_plain_value, allow_nan=allow_nan)
            json.dumps(value, default=to_plain_value, ensure_ascii=False).encode()
        except (ValueError, TypeError, RecursionError):
            return str(key)
    return ""


def to_plain_value(value: Any) -> Any:
    """Convert a value of Python, NumPy, pandas or Arrow to one that json can write.

    The start of this file has the rules. Raises TypeError.
    """
    import pandas

    if isinstance(value, bytes | bytearray):
        return decode_bytes(value)
    if value is pandas.NaT or value is pandas.NA:
        return None
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else None
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, timedelta):
        return pandas.Timedelta(value).isoformat()
    convert = getattr(value, "tolist", None) or getattr(value, "isoformat", None)
    if convert is None:
        raise TypeError(f"a {type(value).__name__} in it cannot be JSON")
    return convert()


def decode_bytes(value: bytes | bytearray) -> str:
    """Decode bytes as UTF-8, or as base64 if they are not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether a value has lists or dicts in more than `levels` levels."""
    level = [value]
    for _ in range(levels):
        level = list(chain.from_iterable(list_children(item) for item in level))
        if not level:
            return False
    return True


def list_children(value: Any) -> Iterable[Any]:
    """List the values in a list or dict. Other values have none."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# --- Parquet --------------------------------------------------------------------------------------


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
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
        for part in read_parts(file, [json_column]):
            yield from part.column(0).to_pylist()


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet table as they are. Raises ValueError and Arrow's errors."""
    with open_parquet(path) as file:
        yield from read_dicts(file)


def open_parquet(path: Path) -> Any:
    """Open a Parquet file, so that Arrow keeps its repeated strings in dictionaries.

    Parquet may store a value once for a million rows. As Python objects, each row has a copy. So
    strings stay in Arrow's dictionaries (read_dictionary), and only a few rows at a time become
    Python objects (`split_batch`). Returns pyarrow's ParquetFile. Raises ValueError.
    """
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    check_column_sizes(metadata)
    leaves = [metadata.schema.column(i) for i in range(len(metadata.schema))]
    strings = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    file = parquet.ParquetFile(path, metadata=metadata, read_dictionary=strings, buffer_size=2**20)
    names = file.schema_arrow.names
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two columns have the name {repeated[0]}. Rename one")
    return file


def read_parts(file: Any, selected: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a Parquet file in small Arrow batches. selected: names of columns."""
    for group in range(file.num_row_groups):  # each has its own dictionaries
        batches = file.iter_batches(256, [group], selected)
        yield from chain.from_iterable(map(split_batch, batches))


def read_dicts(file: Any, prompts: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as dicts. prompts: columns that lose their nulls."""
    json_columns = {field.name for field in file.schema_arrow if has_json(field.type)}
    first_row = 1
    for part in read_parts(file):
        cells: dict[str, list[Any]] = {}
        for field, column in zip(part.schema, part.columns, strict=True):
            values = to_values(column, field.name, first_row)
            if field.name in json_columns:
                values = [parse_json_values(value, field.type) for value in values]
            if field.name in prompts:
                values = [drop_nulls(value, field.name) for value in values]
            cells[field.name] = values
        for row in zip(*cells.values(), strict=True):
            yield dict(zip(cells, row, strict=True))
        first_row += part.num_rows


def to_values(column: Any, name: str, first_row: int) -> list[Any]:
    """Convert a column of an Arrow batch to Python objects. A map becomes a dict.

    first_row: the number of the batch's first row. Raises ValueError.
    """
    from pyarrow import string, types

    try:
        return list(column.to_pylist(maps_as_pydicts="strict"))
    except Exception as error:
        if types.is_temporal(column.type):  # Python has no such date, or no nanoseconds
            return list(column.cast(string()).to_pylist())
        reason = error
    for number, value in enumerate(column, first_row):
        try:
            value.as_py(maps_as_pydicts="strict")
        except Exception as error:
            raise ValueError(f"row {number}, column {name}: {error}") from None
    raise ValueError(f"column {name}: {reason}")


def drop_nulls(value: Any, column: str) -> Any:
    """Remove the null keys of a prompt. A task_input also has a verifier's fields, which stay."""
    if isinstance(value, dict) and column == "task_input":
        return {
            key: env.drop_nulls(item) if key == "responses_create_params" else item
            for key, item in value.items()
        }
    return env.drop_nulls(value)


def has_json(kind: Any) -> bool:
    """Whether an Arrow type is Parquet's type JSON, or has it inside."""
    from pyarrow import JsonType

    if isinstance(kind, JsonType):
        return True
    return any(has_json(kind.field(i).type) for i in range(kind.num_fields))


def parse_json_values(value: Any, kind: Any) -> Any:
    """Parse the texts in a value that have Parquet's type JSON. kind: the Arrow type of the value.

    DuckDB and datasets write this type where the rows of a table differ in form. Raises ValueError.
    """
    from pyarrow import JsonType, types

    if value is None:
        return None
    if isinstance(kind, JsonType):
        return json.loads(value, object_pairs_hook=to_dict)
    if types.is_struct(kind):
        kinds = {field.name: field.type for field in kind}
        return {key: parse_json_values(item, kinds[key]) for key, item in value.items()}
    if types.is_map(kind):
        return {key: parse_json_values(item, kind.item_type) for key, item in value.items()}
    if types.is_nested(kind):
        return [parse_json_values(item, kind.value_type) for item in value]
    return value


def find_json_column(file: Any, columns: Sequence[str]) -> str:
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


def begins_object(file: Any, column: str) -> bool:
    """Whether the first text of a column is a JSON object."""
    for part in read_parts(file, [column]):
        for text in part.column(0).to_pylist():
            if text is not None:
                return bool(text.lstrip().startswith("{"))
    return False


def is_string(kind: Any) -> bool:
    """Whether an Arrow type is text: directly, in a dictionary, or of Parquet's type JSON."""
    from pyarrow import JsonType, types

    if isinstance(kind, JsonType):
        return True
    value_kind = kind.value_type if types.is_dictionary(kind) else kind
    is_kind = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_text(value_kind) for is_text in is_kind)


def check_column_sizes(metadata: Any) -> None:
    """Check that no column of a parquet file takes too much memory, even in Arrow's form.

    metadata: pyarrow's FileMetaData, read before any data. Raises ValueError.
    """
    for group_index in range(metadata.num_row_groups):
        group = metadata.row_group(group_index)
        for column_index in range(group.num_columns):
            chunk = group.column(column_index)
            # bytes of a value that is not text
            width = max(metadata.schema.column(column_index).length, 8)
            size = ""
            if chunk.total_uncompressed_size > max(16 * MAX_ROW_CHARS, group.num_rows << 16):
                size = f"{chunk.total_uncompressed_size / 2**20:.1f} MiB"
            elif chunk.num_values * width > 4 * MAX_ROW_CHARS:
                size = f"{chunk.num_values} values of {width} bytes"
            if size:
                raise ValueError(
                    f"{chunk.path_in_schema}: {size} in {group.num_rows} rows. Remove large rows, "
                    "or write smaller row groups"
                )


def split_batch(batch: Any) -> Iterator[Any]:
    """Split an Arrow batch so that each part is at most MAX_ROW_CHARS bytes as Python objects.

    Raises ValueError for a row that is larger.
    """
    size = sum(estimate_size(column) for column in batch.columns)
    if size <= MAX_ROW_CHARS:
        yield batch
    elif batch.num_rows == 1:
        raise ValueError(
            f"a row of {size / 2**20:.1f} MiB, over {MAX_ROW_CHARS >> 20} MiB. Remove such rows"
        )
    else:
        half = batch.num_rows // 2
        yield from split_batch(batch.slice(0, half))
        yield from split_batch(batch.slice(half))


def estimate_size(values: Any) -> int:
    """Estimate the bytes of an Arrow array as Python objects: 64 for each value, and its text.

    A dictionary entry counts as often as it is used.
    """
    from pyarrow import BaseExtensionType, compute, types

    size = 64 * len(values)
    if isinstance(values.type, BaseExtensionType):
        values = values.storage
    kind = values.type
    if size > MAX_ROW_CHARS:
        return size
    if types.is_dictionary(kind):
        lengths = compute.binary_length(values.dictionary)
        return size + (compute.sum(lengths.take(values.indices)).as_py() or 0)
    if types.is_struct(kind):
        return size + sum(estimate_size(field) for field in values.flatten())
    if types.is_map(kind):  # Arrow flattens only lists
        first = values.offsets[0].as_py()
        last = values.offsets[-1].as_py()
        return size + estimate_size(values.values.slice(first, last - first))
    if types.is_nested(kind):
        return size + estimate_size(values.flatten())
    return size + values.nbytes
