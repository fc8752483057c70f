"""Check row files, and make them from others: the commands of env.py that need the kit.

    python env.py check FILES [--prompt-key prompt]    # which rows load, which do not, and why
    python env.py to-verl FILES --out DIR              # Gym rows as verl's: <DIR>/<name>.parquet
    python env.py from-verl FILES --out DIR            # verl's rows as Gym rows: <DIR>/<name>.jsonl
    python env.py from --data FILE-or-hub-name --out DIR [--map my_map.py:row] \\
        [--subset main] [--split train]                # rows from any table
    python env.py examples --server mcqa --out DIR     # rows that nemo-gym ships for a server

to-verl writes parquet if a reader gets the same rows back. Parquet changes rows whose keys or types
differ: each row gets the keys of all rows, and a column has one type. For such rows, to-verl writes
<name>_verl.jsonl, which verl reads too. to-verl and from-verl undo each other.

`--map` names function(entry) -> a row of Gym or verl. Without it, each entry is a row. An entry is
one row of a file (row_files.FORMATS), or of a data set of the hub, which Hugging Face's datasets
reads in parts. No command changes a value. The cells of CSV and TSV files are text: 007 stays
"007". Values that JSON cannot hold become those of kit/data/row_files.py.

FILES are files, folders or patterns. A command writes a file only if all of its rows are valid.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import env
from env import DataError, UnsupportedRowError
from kit.config.keys import make_command
from kit.data import fields
from kit.data.ground_truths import find_ground_truth
from kit.data.row_files import (
    COMPRESSIONS,
    KNOWN,
    find_files,
    find_format,
    parse_object,
    read_raw_rows,
    report_progress,
)
from kit.data.tasks import list_references
from kit.data.verl_rows import GYM_ROW, from_verl, parse_row, read_rows, remove_images
from kit.errors import UserFunctionError

INEXACT_SUFFIX = "_verl.jsonl"  # of rows that Parquet would change
FIND_EXAMPLES = (
    "import pathlib, nemo_gym; "
    "print(pathlib.Path(nemo_gym.__file__).parent.parent / 'resources_servers')"
)


class WrittenFile(NamedTuple):
    """A file that a command wrote."""

    path: Path
    rows: int
    note: str = ""


def report(line: str) -> None:
    """Print a line of progress. Stdout has the results."""
    print(line, file=sys.stderr)


# --- check ----------------------------------------------------------------------------------------


def check(path: str, prompt_key: str = "prompt") -> bool:
    """Print which rows of a file load, and why others do not. Returns False if there are errors.

    An unsupported row is not an error.
    """
    loaded = 0
    unsupported: dict[str, list[str]] = {}  # {reason: row ids}
    unused: Counter[str] = Counter()  # {field that is not used: number of rows}
    errors: list[str] = []
    try:
        for row_id, raw in report_progress(read_raw_rows(path), path, report):
            try:
                row = parse_row(raw, row_id, prompt_key)
                env.check_end(env.render_row(row, row_id)[0], row_id)
                env.read_template_arguments(row, row_id)
                unused.update(fields.list_unused(fields.walk_row(row)))
                loaded += 1
            except UnsupportedRowError as error:
                reason = str(error).removeprefix(f"{row_id}: ")
                unsupported.setdefault(reason, []).append(row_id)
            except DataError as error:
                errors.append(str(error))
            except Exception as error:  # whatever it is, the rows after this one are checked too
                errors.append(f"{row_id}: {error!r}")
    except DataError as error:
        errors.append(str(error))
    unsupported_count = sum(len(row_ids) for row_ids in unsupported.values())
    print(f"{path}: {loaded} rows load, {unsupported_count} refused")
    for reason, row_ids in unsupported.items():
        print(f"    {len(row_ids)} x {reason} (first {row_ids[0]})")
    for text in errors:
        print(f"    error: {text}")
    if unused:
        print(f"    {fields.describe_unused(unused, path)}")
    return not errors


# --- examples -------------------------------------------------------------------------------------


def read_examples(server: str, python: str) -> Iterator[dict[str, Any]]:
    """Yield the example rows that nemo-gym ships for a server. Raises DataError.

    A row without agent_ref gets that of the server. python: an interpreter that has nemo-gym.
    """
    folder = find_servers(python) / server / "data"
    files = [file for file in sorted(folder.glob("*example*.jsonl")) if "rollouts" not in file.name]
    if not files:
        all_files = folder.parent.parent.glob("*/data/example*.jsonl")
        servers = sorted({file.parts[-3] for file in all_files})
        raise DataError(
            f"{folder}: no example*.jsonl. Set --server to one of {', '.join(servers)}."
        )
    agent_ref = {"type": "responses_api_agents", "name": f"{server}_simple_agent"}
    earlier: set[str] = set()  # some rows are in two files; within one file, all are kept
    for file in files:
        rows = [row for _, row in read_rows(str(file))]
        texts = to_json_lines(rows)
        for row, text in zip(rows, texts, strict=True):
            if text not in earlier:
                yield row if row.get("agent_ref") else row | {"agent_ref": agent_ref}
        earlier.update(texts)


def find_servers(python: str) -> Path:
    """Find the folder of nemo-gym's servers. Raises DataError."""
    command = [python, "-c", FIND_EXAMPLES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(
            f"--python {python} cannot import nemo_gym: {error}. Run `{make_command('gym')}` to "
            "install it."
        ) from None
    return Path(done.stdout.strip())


# --- Gym rows <-> verl's rows ---------------------------------------------------------------------


def to_verl(row: dict[str, Any], row_id: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """Convert a Gym row to a row of verl.

    If the Gym row came from a row of verl, this is that row. Otherwise extra_info.gym_row holds the
    Gym row. Then data_source is its server, and kit/data/ground_truths.py finds the ground truth.
    Raises DataError, and UnsupportedRowError if a row of verl cannot hold this row.
    """
    original = find_verl_row(row, row_id, prompt_key)
    if original is not None:
        return original
    messages, tools = env.render_row(row, row_id)
    check_for_verl(messages, tools, row_id)
    name = next(iter(list_references(row).values()), "gym")
    return {
        "data_source": name.removesuffix("_simple_agent"),
        prompt_key: messages,
        "reward_model": {"style": "rule", "ground_truth": format_ground_truth(row)},
        "extra_info": {GYM_ROW: json.dumps(row, ensure_ascii=False)},
    }


def find_verl_row(row: dict[str, Any], row_id: str, prompt_key: str) -> dict[str, Any] | None:
    """Return the row of verl from which `from_verl` made this Gym row, or None."""
    if "agent_ref" in row or prompt_key in row or not {"data_source", "reward_model"} & {*row}:
        return None
    others = {key: value for key, value in row.items() if key != "responses_create_params"}
    prompt, images = remove_images(row["responses_create_params"].get("input"))
    verl_row = {prompt_key: prompt, **others}
    if row["responses_create_params"].get("tools"):
        verl_row["tools"] = row["responses_create_params"]["tools"]
    if images:
        verl_row["images"] = images
    with contextlib.suppress(DataError):
        if from_verl(verl_row, row_id, prompt_key) == row:
            return verl_row
    return None


def check_for_verl(messages: Sequence[Any], tools: Sequence[Any], row_id: str) -> None:
    """Check that a row of verl can hold a prompt. Raises UnsupportedRowError."""
    reason = ""
    if tools or any(message.keys() != {"role", "content"} for message in messages):
        reason = "verl's rows have no tools"
    elif any(isinstance(message["content"], list) for message in messages):
        reason = "verl's rows have images in another form"
    elif not messages:
        reason = "its environment writes the prompt, and verl's rows need one"
    if reason:
        raise UnsupportedRowError(f"{row_id}: {reason}. Remove such rows.")


def format_ground_truth(row: dict[str, Any]) -> str:
    """Format the ground truth of a Gym row as text. It is empty if the row has none."""
    value = find_ground_truth(row)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_supported_rows(file: str, prompt_key: str) -> Iterator[dict[str, Any]]:
    """Yield the Gym rows of a file, after a check of each prompt.

    Raises DataError, UnsupportedRowError.
    """
    for row_id, row in report_progress(read_rows(file, prompt_key), file, report):
        env.render_row(row, row_id)
        yield row


def write_verl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows of verl as parquet, or as JSONL if parquet does not give the same rows back.

    Returns the path of the written file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.part.parquet")
    try:
        if is_parquet_exact(partial, rows):
            partial.replace(path)
            return path
    finally:
        partial.unlink(missing_ok=True)
    path = path.with_name(f"{path.stem}{INEXACT_SUFFIX}")
    env.write_rows(path, rows)
    return path


def is_parquet_exact(path: Path, rows: list[dict[str, Any]]) -> bool:
    """Write rows to a parquet file. Returns whether the file gives the same rows back."""
    import pyarrow
    from pyarrow import parquet

    keys: dict[str, None] = {}  # in order of appearance
    for row in rows:
        keys |= dict.fromkeys(row)
    columns = {key: [row.get(key) for row in rows] for key in keys}
    try:
        parquet.write_table(pyarrow.table(columns), path, row_group_size=1000)
        read_back = [parse_object(raw, row_id) for row_id, raw in read_raw_rows(path)]
    except (pyarrow.ArrowException, OverflowError, DataError):
        return False  # a column has two types, a struct is empty, ...
    return are_same_json(read_back, rows)


def are_same_json(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists of rows are equal as JSON, where 1, 1.0 and true differ."""
    return to_json_lines(some) == to_json_lines(others)


def to_json_lines(rows: list[Any]) -> list[str]:
    """Convert rows to JSON with sorted keys."""
    return [json.dumps(row, sort_keys=True) for row in rows]


# --- any table ------------------------------------------------------------------------------------


def read_mapped_rows(
    data: str, function: str | None, subset: str | None, split: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows that a custom function makes from the entries of a table, or the entries.

    Raises DataError, UnsupportedRowError, UserFunctionError.
    """
    from kit.config import user_functions

    make_row = user_functions.load_function(function, "--map") if function else None
    for row_id, entry in read_table(data, subset, split):
        try:
            row = parse_row(make_row(entry) if make_row else entry, row_id)
        except UserFunctionError as error:
            raise UserFunctionError(f"{row_id}: {error}") from error
        env.render_row(row, row_id)
        yield row


def read_table(data: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    """Yield (`data:row`, entry) of a file, or of a data set of the hub. Raises DataError."""
    is_path = data.startswith((".", "/", "~")) or data.count("/") > 1
    if is_path or find_format(Path(data).name) or Path(data).is_file():
        for row_id, raw in read_raw_rows(data):
            yield row_id, parse_object(raw, row_id) if isinstance(raw, str) else raw
        return
    try:
        for number, entry in enumerate(open_hub_table(data, subset, split), 1):
            yield f"{data}:{number}", entry
    except Exception as error:  # from the network, the hub or the disk
        reason = " ".join(str(error).split())[:200] or repr(error)
        raise DataError(
            f"{data}: no such file, and it cannot be loaded from the hub ({reason}). Download it "
            "on another machine, and set --data to its file."
        ) from None


def open_hub_table(name: str, subset: str | None, split: str) -> Any:
    """Open a data set of the hub, as a stream if the hub can be reached."""
    import datasets
    import huggingface_hub

    is_offline = huggingface_hub.constants.HF_HUB_OFFLINE
    if not is_offline:
        # fails after 5 s without a network; load_dataset would try for half a minute
        huggingface_hub.HfApi().dataset_info(name, timeout=5)
    return datasets.load_dataset(name, subset, split=split, streaming=not is_offline)


# --- the command ----------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the commands and their options."""
    parser = argparse.ArgumentParser(prog="env.py", description="Check and convert row files.")
    commands = parser.add_subparsers(dest="name", required=True)
    for name, description in (
        ("check", "which rows load, which do not, and why"),
        ("to-verl", "Gym rows as verl's"),
        ("from-verl", "verl's rows as Gym rows"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("files", nargs="+", metavar="FILE")
        command.add_argument(
            "--prompt-key", default="prompt", help="key of the prompt in verl's rows (prompt)"
        )
        if name != "check":
            add_out(command)

    description = "rows from any table, by a function"
    command = commands.add_parser("from", help=description, description=description)
    command.add_argument(
        "--data",
        required=True,
        type=os.path.expanduser,
        help=f"a file ({KNOWN}), or a name of the hub",
    )
    command.add_argument(
        "--map",
        type=os.path.expanduser,
        help="path.py:function(entry) -> a row (the entry itself)",
    )
    command.add_argument("--subset", help="of a data set of the hub, e.g. main")
    command.add_argument("--split", default="train", help="of a data set of the hub (train)")
    add_out(command)

    description = "rows that nemo-gym ships for a server"
    command = commands.add_parser("examples", help=description, description=description)
    command.add_argument("--server", required=True, help="a resources server of Gym, e.g. mcqa")
    command.add_argument(
        "--python",
        default=".venv-gym/bin/python",
        type=os.path.expanduser,
        help="interpreter that has nemo-gym",
    )
    add_out(command)
    return parser


def find_all_files(paths: Sequence[str]) -> list[str]:
    """Find the files of all paths, folders and patterns. Raises DataError."""
    return list(itertools.chain.from_iterable(find_files(path, report) for path in paths))


def add_out(command: argparse.ArgumentParser) -> None:
    """Add the option --out to a command."""
    command.add_argument(
        "--out",
        default="data",
        type=os.path.expanduser,
        help="folder to write to (default: data)",
    )


def choose_targets(files: Sequence[str], out: str, suffix: str) -> list[Path]:
    """Choose the file to write for each input file. Raises DataError.

    No input file is overwritten, and no two inputs have the same target.
    """
    names = [Path(file).name for file in files]
    names = [Path(name).stem if Path(name).suffix in COMPRESSIONS else name for name in names]
    stems = [name.rpartition(".")[0] or name for name in names]
    targets = [Path(out) / f"{stem}{suffix}" for stem in stems]
    inputs = [Path(file) for file in files if Path(file).exists()]
    for target in targets:
        if target.exists() and any(target.samefile(file) for file in inputs):
            raise DataError(f"{target}: the command would overwrite an input. Set another --out.")
        if targets.count(target) > 1:
            raise DataError(
                f"{target}: more than one of the files would be written there. Convert one file at "
                "a time, each with its --out."
            )
    return targets


def run_command(args: argparse.Namespace) -> Iterator[WrittenFile]:
    """Run a command, and yield each file that it writes.

    Raises DataError, UserFunctionError, OSError.
    """
    if args.name == "examples":
        path = Path(args.out) / f"{args.server}_examples.jsonl"
        examples = read_examples(args.server, args.python)
        yield WrittenFile(path, env.write_rows(path, examples))
    elif args.name == "from":
        (path,) = choose_targets([args.data], args.out, ".jsonl")
        if not Path(args.data).is_file():  # a data set of the hub
            path = path.with_name(f"{Path(args.data).name}_{args.split}.jsonl")
        rows = read_mapped_rows(args.data, args.map, args.subset, args.split)
        rows = report_progress(rows, args.data, report)
        yield WrittenFile(path, env.write_rows(path, rows))
    elif args.name == "from-verl":
        files = find_all_files(args.files)
        targets = choose_targets(files, args.out, ".jsonl")
        for file, path in zip(files, targets, strict=True):
            rows = read_supported_rows(file, args.prompt_key)
            yield WrittenFile(path, env.write_rows(path, rows))
    else:
        files = find_all_files(args.files)
        targets = choose_targets(files, args.out, ".parquet")
        choose_targets(files, args.out, INEXACT_SUFFIX)  # it depends on the rows which is written
        for file, path in zip(files, targets, strict=True):
            yield convert_to_verl(file, path, args.prompt_key)


def convert_to_verl(file: str, path: Path, prompt_key: str) -> WrittenFile:
    """Write the rows of a file as verl's."""
    gym_rows = report_progress(read_rows(file, prompt_key), file, report)
    rows = [to_verl(row, row_id, prompt_key) for row_id, row in gym_rows]
    written = write_verl(path, rows)
    note = "" if written == path else " (as JSONL, since parquet would change them)"
    return WrittenFile(written, len(rows), note)


def main() -> None:
    """Run a command of env.py.

    The exit status is 0, or 1 if a file or row is invalid, or 2 if the command line is invalid.
    """
    args = make_parser().parse_args()
    try:
        if args.name == "check":
            are_valid = [check(file, args.prompt_key) for file in find_all_files(args.files)]
            sys.exit(0 if all(are_valid) else 1)
        for file in run_command(args):
            print(f"{file.path}: {file.rows} rows{file.note}")
    except (DataError, UserFunctionError, OSError) as error:
        sys.exit(f"error: {error}")
