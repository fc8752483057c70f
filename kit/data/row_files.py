"""Read rows from files: JSON lines, a JSON list (.json), CSV, Parquet or Arrow.

FORMATS has the suffixes, and COMPRESSIONS those that may follow the ones of text. A folder of
Hugging Face's `save_to_disk` has Arrow files.

JSON cannot hold every value of Python and Arrow. Such values become these, so that a number never
becomes another number:

- NaN, Infinity and -Infinity are null. This is also true of JSON text that contains them.
- A Decimal is text with all of its digits, such as "1.10".
- Dates and times are ISO 8601 text. A UUID is text.
- Bytes are text if they are UTF-8, otherwise base64.

Protects: rows, from values that a format or a reader would change without an error.
"""

from __future__ import annotations

import base64
import csv
import glob
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from uuid import UUID

import fsspec

import env
from env import DataError, Json

if TYPE_CHECKING:
    from pyarrow import RecordBatch

PARQUET_FORMATS = (".parquet", ".pq")
ARROW_FORMATS = (*PARQUET_FORMATS, ".arrow", ".feather")
SEPARATORS = {".csv": ",", ".tsv": "\t"}  # between the cells of a line
FORMATS = (".jsonl", ".json", ".ndjson", *SEPARATORS, *ARROW_FORMATS)
COMPRESSIONS = (".gz", ".bz2", ".xz")
KNOWN = f"{', '.join(FORMATS)}; text may be compressed: {', '.join(COMPRESSIONS)}"
FORM_OF_ROWS = "Write one JSON object in each line, or a list of them in a .json file."
# what Hugging Face's datasets writes next to rows
METADATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
MAX_CELL_CHARS = 2**31 - 1
BATCH_ROWS = 32  # a row with images may have several MB
FIRST_REPORT_S = 5.0  # a file that loads faster is loaded silently
REPORT_S = 30.0
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape of one, which is no UTF-8 if alone
Item = TypeVar("Item")


# --- files ----------------------------------------------------------------------------------------


def ignore(_line: str) -> None:
    """Print nothing."""


def find_files(path: str, report: Callable[[str], None] = ignore) -> list[str]:
    """Find the files of a path, in sorted order: a file, the files of a folder, or a pattern.

    A pattern is that of Python's glob: `data/*.jsonl`, or `data/**/*.parquet` for subfolders, too.
    A path that is neither is returned, so that reading it fails. report: prints which files of a
    folder are left out. Raises DataError if a folder or a pattern has no files.

    >>> find_files("no_such_file.jsonl")
    ['no_such_file.jsonl']
    """
    if "://" in path:
        raise DataError(
            f"{path}: rows are read from local files. Download it, and name the file: for example "
            "`hf download OWNER/NAME --repo-type dataset --local-dir data`, `aws s3 cp` or `curl`."
        )
    expanded = str(Path(path).expanduser())
    is_pattern = glob.has_magic(expanded) and not Path(expanded).exists()
    files: set[str] = set()
    for match in glob.glob(expanded, recursive=True) if is_pattern else [expanded]:
        if not Path(match).is_dir():
            files.add(match)
        elif not is_pattern or find_format(match):
            files.update(list_folder(Path(match), report))
    if not files:
        raise DataError(f"{path}: no file matches this pattern. Correct it.")
    return sorted(files)


def list_folder(folder: Path, report: Callable[[str], None] = ignore) -> list[str]:
    """List the row files of a folder, in sorted order. Raises DataError if it has none.

    Spark and Dask write a folder such as `train.parquet/`, whose files are listed, too. They use
    names that begin with `.` or `_` for other files. report: prints the names that are left out.
    """
    files: list[str] = []
    others: list[str] = []
    has_cache = (folder / "state.json").is_file()  # written by save_to_disk
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")) or path.name in METADATA:
            continue
        if not find_format(path.name) or (has_cache and path.name.startswith("cache-")):
            others.append(path.name)
        else:
            files += list_folder(path, report) if path.is_dir() else [str(path)]
    if not files:
        found = f" It has {', '.join(others)}." if others else ""
        raise DataError(
            f"{folder}: the folder has no file of rows ({KNOWN}).{found} Name the files or a "
            f"folder, or use a pattern such as {folder}/**/*.jsonl for its subfolders."
        )
    if others:
        report(f"{folder}: {len(files)} files of rows, without {', '.join(others)}")
    return files


def find_format(name: str) -> str:
    """Find the suffix in FORMATS of a file's name, without that of a compression, or "".

    >>> find_format("Table.CSV.gz"), find_format("rows.parquet.gz"), find_format("rows.txt")
    ('.csv', '', '')
    """
    path = Path(name.lower())
    if path.suffix not in COMPRESSIONS:
        return path.suffix if path.suffix in FORMATS else ""
    suffix = Path(path.stem).suffix
    return suffix if suffix in FORMATS and suffix not in ARROW_FORMATS else ""


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


def read_raw_rows(path: str | Path, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (`name:line`, JSON text or a dict) for each row of a file. Skips blank lines.

    name: the path if it is empty. A bad line does not end the reading, since it is not parsed here.
    Raises DataError.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: no such file. Check the path. `python env.py --help` lists the commands that "
            "write rows."
        )
    try:
        is_arrow = find_format(path.name) in ARROW_FORMATS
        rows = read_table(path) if is_arrow else read_text(path)
        for number, raw in enumerate(rows, 1):
            if not isinstance(raw, str) or raw.strip():  # null is not a blank line
                yield f"{name or path}:{number}", raw
    except Exception as error:  # from the disk, a compression or Arrow
        raise DataError(
            f"{path}: cannot be read ({error}). Correct the file or its suffix: {KNOWN}."
        ) from None


# --- text -----------------------------------------------------------------------------------------


def read_text(path: Path) -> Iterator[object]:
    """Yield the rows of a text file: of CSV, of a .json file with one list, or its lines.

    Raises OSError and ValueError.
    """
    kind = find_format(path.name)
    with open_text(path, newline="" if kind in SEPARATORS else None) as file:
        if kind in SEPARATORS:
            yield from read_cells(file, SEPARATORS[kind])
            return
        is_list = kind == ".json" and file.read(4096).lstrip().startswith("[")
    with open_text(path) as file:
        yield from json.load(file) if is_list else file


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a file of UTF-8 text, maybe compressed, with or without a byte order mark.

    newline: as of `open`. Raises OSError and ValueError.
    """
    options = {"compression": "infer", "encoding": "utf-8-sig", "newline": newline}
    file: TextIO = fsspec.open(str(path), "rt", **options).open()
    return file


def read_cells(file: TextIO, separator: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV or TSV file, with each cell as text. Skips blank lines.

    Raises OSError and ValueError.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    reader = csv.DictReader(file, delimiter=separator, strict=True)
    for row in reader:
        if len(row) != len(reader.fieldnames or ()) or None in row.values():
            raise ValueError(f"line {reader.line_num}: it has other cells than line 1")
        yield row


# --- rows -----------------------------------------------------------------------------------------


def parse_object(raw: object, row_id: str) -> Json:
    """Parse JSON text, or convert a dict, to a dict of plain values. Raises DataError.

    The result can be written as JSON and as UTF-8. The start of this file has the values that other
    values become.
    """
    try:
        text = raw if isinstance(raw, str) else json.dumps(raw, default=to_plain_value)
        row = env.load_json(text)
        if HALF_PAIR.search(text):
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{row_id}: not JSON ({error}). {FORM_OF_ROWS}") from None
    if not isinstance(row, dict):
        raise DataError(f"{row_id}: the row is a {type(row).__name__}. {FORM_OF_ROWS}")
    return row


def to_plain_value(value: Any) -> object:  # of any library
    """Convert a value of Python, NumPy, pandas or Arrow to one that json can write.

    The start of this file has the rules. Raises TypeError.
    """
    import pandas

    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if hasattr(value, "tolist") and "64[" not in str(value.dtype):  # of NumPy, pandas or torch
        return value.tolist()
    if pandas.isna(value):
        return None
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} cannot be JSON: {value!r:.80}")


# --- Parquet and Arrow ----------------------------------------------------------------------------


def read_table(path: Path) -> Iterator[dict[str, object]]:
    """Yield each row of a table of Parquet or Arrow. Raises ValueError and Arrow's errors."""
    import pyarrow  # takes a second, which JSON lines need not wait for
    from pyarrow import feather, ipc, parquet

    if find_format(path.name) in PARQUET_FORMATS:
        file = parquet.ParquetFile(path)
        schema = file.schema_arrow
        # Arrow cannot join the dictionaries of two groups if a struct or list has them
        groups = (file.iter_batches(BATCH_ROWS, [group]) for group in range(file.num_row_groups))
        batches: Iterable[RecordBatch] = itertools.chain.from_iterable(groups)
    else:
        try:
            table = feather.read_table(path, memory_map=True)
        except pyarrow.ArrowInvalid:  # a stream, as Hugging Face's datasets writes
            table = ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
        schema = table.schema
        batches = table.to_batches(BATCH_ROWS)
    json_columns = [column.name for column in schema if isinstance(column.type, pyarrow.JsonType)]
    for column in schema:
        if "arrow.json" in str(column.type) and column.name not in json_columns:
            raise ValueError(f"{column.name} has the type JSON inside it. Write JSON lines instead")
    for batch in batches:
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            values = {name: json.loads(row[name]) for name in json_columns if row[name] is not None}
            yield row | values
