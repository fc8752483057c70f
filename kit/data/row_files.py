"""Read rows from files: JSON lines (also as .gz), a JSON list (.json), or parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import env
from env import DataError

MAX_ROW_CHARS = 2**26  # a longer line is no row, and is not read to its end
MAX_NESTING = 64  # levels: rows have far fewer, and JSON readers and writers can handle these


def read_raw_rows(path: str | Path, *columns: str) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, JSON text or a dict) for each row of a file. Skips blank lines.

    A bad row does not end the reading, since the text is not parsed here. If a parquet file has one
    of `columns`, each of its columns is a key of the row. Otherwise one string column must hold the
    rows as JSON. Raises DataError.
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


def read_json(path: Path) -> Iterator[Any]:
    """Yield the lines of a file, or the items of a .json file that holds one list."""
    if path.suffix == ".json" and is_json_list(path):
        yield from json.loads(path.read_text(encoding="utf-8"))
        return
    with open_text(path) as file:
        while line := file.readline(MAX_ROW_CHARS):
            if len(line) == MAX_ROW_CHARS:
                raise ValueError(f"a line of over {MAX_ROW_CHARS >> 20} million characters")
            yield line


def open_text(path: Path) -> TextIO:
    """Open a file or a .gz file of UTF-8 text."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def is_json_list(path: Path) -> bool:
    """Whether a file begins with `[` and is small enough to be read as a whole."""
    with path.open(encoding="utf-8") as file:
        begins_list = file.read(4096).lstrip().startswith("[")
    return begins_list and path.stat().st_size < 16 * MAX_ROW_CHARS


def parse_object(raw: Any, row_id: str) -> dict[str, Any]:
    """Parse JSON text, or convert a dict, to a dict of plain values. Raises DataError.

    The result can be written as JSON and as UTF-8.
    """
    try:
        text = raw
        if not isinstance(raw, str):
            text = json.dumps(raw, default=to_plain_value, allow_nan=False)
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
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
    return row


def to_plain_value(value: Any) -> Any:
    """Convert a value of NumPy, pandas or Arrow to one that json can write. Raises TypeError."""
    convert = getattr(value, "tolist", None) or getattr(value, "isoformat", None)
    if convert is None:
        raise TypeError(f"a {type(value).__name__} in it cannot be JSON")
    return convert()


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether a value has lists or dicts in more than `levels` levels."""
    level = [value]
    for _ in range(levels):
        level = list(chain.from_iterable(list_children(item) for item in level))
    return bool(level)


def list_children(value: Any) -> Iterable[Any]:
    """List the values in a list or dict. Other values have none."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


# --- parquet --------------------------------------------------------------------------------------


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield each row of a parquet file: as a dict, or as JSON text from its only string column.

    Parquet may store a value once for a million rows. As Python objects, each row has a copy. So
    strings stay in Arrow's dictionaries (read_dictionary), and only a few rows at a time become
    Python objects (`split_batch`). Raises ValueError and Arrow's errors.
    """
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    check_column_sizes(metadata)
    leaves = [metadata.schema.column(i) for i in range(len(metadata.schema))]
    strings = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    with parquet.ParquetFile(
        path, metadata=metadata, read_dictionary=strings, buffer_size=2**20
    ) as file:
        json_column = find_json_column(file.schema_arrow, columns)
        selected = [json_column] if json_column else None
        for group in range(file.num_row_groups):  # each has its own dictionaries
            batches = file.iter_batches(256, [group], selected)
            for part in chain.from_iterable(map(split_batch, batches)):
                yield from part.column(0).to_pylist() if json_column else part.to_pylist()


def find_json_column(schema: Any, columns: Sequence[str]) -> str:
    """Find the column that holds rows as JSON, or "" if each column is a key of the row.

    schema: pyarrow's Schema. Raises ValueError if the file has neither form.
    """
    if {*columns} & {*schema.names}:
        return ""
    strings = [field.name for field in schema if is_string(field.type)]
    if "row" in strings:
        return "row"
    if len(strings) == 1:
        return strings[0]
    needed = ", ".join([*columns, "a string column `row`"])
    raise ValueError(f"it needs {needed}, or exactly one string column; it has {schema.names}")


def is_string(kind: Any) -> bool:
    """Whether an Arrow type is text, directly or in a dictionary."""
    from pyarrow import types

    value_kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(value_kind) or types.is_large_string(value_kind)


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
    from pyarrow import compute, types

    size = 64 * len(values)
    kind = values.type
    if size > MAX_ROW_CHARS:
        return size
    if types.is_dictionary(kind):
        lengths = compute.binary_length(values.dictionary)
        return size + (compute.sum(lengths.take(values.indices)).as_py() or 0)
    if types.is_struct(kind):
        return size + sum(estimate_size(field) for field in values.flatten())
    if types.is_nested(kind):  # lists and maps
        return size + estimate_size(values.flatten())
    return size + values.nbytes
