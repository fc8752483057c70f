"""Check row files, and make them from others: the commands of env.py that need the kit.

`python env.py --help` lists the commands. FILES are files, folders or patterns. A command writes a
file only if all of its rows are valid, and changes no value. to-verl and from-verl undo each other.
Parquet would change rows whose keys or types differ, so such rows are refused.

`--map` names function(entry) -> a row of Gym or verl. Without it, each entry is a row. An entry is
one row of a file (row_files.FORMATS), or of a data set of the hub. The cells of CSV and TSV files
are text: 007 stays "007". Values that JSON cannot hold become those of kit/data/row_files.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import env
from env import DataError, Json, UnsupportedRowError
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
from kit.data.verl_rows import GYM_ROW, from_verl, parse_row, read_rows
from kit.errors import UserFunctionError
from kit.recipe import user_functions
from kit.recipe.keys import make_command
from kit.verify import process_specs


def report(line: str) -> None:
    """Print a line of progress. Stdout has the results."""
    print(line, file=sys.stderr)


# --- check ----------------------------------------------------------------------------------------


def check(path: str, prompt_key: str = "prompt") -> bool:
    """Print which rows of a file load, and why others do not. Returns False if there are errors.

    An unsupported row is not an error.
    """
    loaded = 0
    refused: dict[str, list[str]] = defaultdict(list)  # {reason: row ids}
    unused: Counter[str] = Counter()  # {field that is not used: number of rows}
    errors: list[DataError] = []
    try:
        for row_id, raw in report_progress(read_raw_rows(path), path, report):
            try:
                row = parse_row(raw, row_id, prompt_key)
                env.check_end(env.render_row(row, row_id)[0], row_id)
                env.read_template_arguments(row, row_id)
                unused.update(fields.list_unused(fields.walk_row(row)))
                loaded += 1
            except UnsupportedRowError as error:
                refused[str(error).removeprefix(f"{row_id}: ")].append(row_id)
            except DataError as error:
                errors.append(error)
    except DataError as error:
        errors.append(error)
    print(f"{path}: {loaded} rows load, {sum(map(len, refused.values()))} refused")
    for reason, row_ids in refused.items():
        print(f"    {len(row_ids)} x {reason} (first {row_ids[0]})")
    for problem in errors:
        print(f"    error: {problem}")
    if unused:
        print(f"    {fields.describe_unused(unused, path)}")
    return not errors


# --- examples -------------------------------------------------------------------------------------


def read_examples(server: str, python: str) -> Iterator[Json]:
    """Yield the example rows that nemo-gym ships for a server. Raises DataError.

    A row without agent_ref gets that of the server. python: an interpreter that has nemo-gym.
    """
    package = process_specs.find_package(str(Path(python).expanduser()))
    if package is None:
        raise DataError(
            f"--python {python} has no nemo_gym. Run `{make_command('gym')}` to install it."
        )
    folder = package / "resources_servers" / server / "data"
    files = [file for file in sorted(folder.glob("*example*.jsonl")) if "rollouts" not in file.name]
    if not files:
        all_files = folder.parent.parent.glob("*/data/example*.jsonl")
        servers = sorted({file.parts[-3] for file in all_files})
        raise DataError(
            f"{folder}: no example*.jsonl. Set --server to one of {', '.join(servers)}."
        )
    agent_ref = {"type": "responses_api_agents", "name": f"{server}_simple_agent"}
    for file in files:
        for _, row in read_rows(str(file)):
            yield row if row.get("agent_ref") else row | {"agent_ref": agent_ref}


# --- Gym rows <-> verl's rows ---------------------------------------------------------------------


def to_verl(row: Json, row_id: str, prompt_key: str = "prompt") -> Json:
    """Convert a Gym row to a row of verl.

    If the Gym row came from a row of verl, this is that row. Otherwise extra_info.gym_row holds the
    Gym row. Then data_source is its server, and kit/data/ground_truths.py finds the ground truth.
    Raises DataError, and UnsupportedRowError if a row of verl cannot hold this row.
    """
    messages, tools = env.render_row(row, row_id)
    has_images = any(isinstance(message["content"], list) for message in messages)
    original = None if has_images else find_verl_row(row, row_id, prompt_key)
    if original is not None:
        return original
    is_plain = all(message.keys() == {"role", "content"} for message in messages)
    if tools or has_images or not messages or not is_plain:
        raise UnsupportedRowError(
            f"{row_id}: verl's rows have a prompt without tools and images. Remove such rows."
        )
    truth = find_ground_truth(row)
    text = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    name = next(iter(list_references(row).values()), "gym")
    return {
        "data_source": name.removesuffix("_simple_agent"),
        prompt_key: messages,
        "reward_model": {"style": "rule", "ground_truth": "" if truth is None else text},
        "extra_info": {GYM_ROW: json.dumps(row, ensure_ascii=False)},
    }


def find_verl_row(row: Json, row_id: str, prompt_key: str) -> Json | None:
    """Return the row of verl from which `from_verl` made this Gym row, or None."""
    if "agent_ref" in row or prompt_key in row or not {"data_source", "reward_model"} & {*row}:
        return None
    params = row["responses_create_params"]
    others = {key: value for key, value in row.items() if key != "responses_create_params"}
    verl_row = {prompt_key: params.get("input"), **others}
    if params.get("tools"):
        verl_row["tools"] = params["tools"]
    with contextlib.suppress(DataError):
        if from_verl(verl_row, row_id, prompt_key) == row:
            return verl_row
    return None


def check_prompts(rows: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    """Yield the Gym rows of (row id, row), after a check of each prompt. Raises DataError."""
    for row_id, row in rows:
        env.render_row(row, row_id)
        yield row


def write_verl(path: Path, rows: list[Json]) -> int:
    """Write rows of verl as Parquet. Returns their number.

    Raises DataError if the file would not give the same rows back.
    """
    import pyarrow
    from pyarrow import parquet

    keys = dict.fromkeys(itertools.chain.from_iterable(rows))  # in order of appearance
    partial = path.with_name(f"{path.stem}.part.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        table = pyarrow.table({key: [row.get(key) for row in rows] for key in keys})
        parquet.write_table(table, partial, row_group_size=1000)
        read_back = [parse_object(raw, row_id) for row_id, raw in read_raw_rows(partial)]
        if [*map(to_json, read_back)] != [*map(to_json, rows)]:
            raise ValueError("their keys or types differ")
        partial.replace(path)
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:
        raise DataError(
            f"{path}: Parquet would change these rows ({error}). Write rows of other forms to "
            "other files."
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return len(rows)


def to_json(row: Json) -> str:
    """Convert a row to JSON with sorted keys, in which 1, 1.0 and true differ."""
    return json.dumps(row, sort_keys=True)


# --- any table ------------------------------------------------------------------------------------


def read_mapped_rows(
    data: str, function: str | None, subset: str | None, split: str
) -> Iterator[Json]:
    """Yield the rows that a custom function makes from the entries of a table, or the entries.

    Raises DataError, UnsupportedRowError, UserFunctionError.
    """
    make_row = user_functions.load_function(function, "--map") if function else None
    for row_id, entry in report_progress(read_table(data, subset, split), data, report):
        try:
            row = parse_row(make_row(entry) if make_row else entry, row_id)
        except UserFunctionError as error:
            raise UserFunctionError(f"{row_id}: {error}") from error
        yield from check_prompts([(row_id, row)])


def read_table(data: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    """Yield (`data:row`, entry) of a file, or of a data set of the hub. Raises DataError."""
    is_path = data.startswith((".", "/", "~")) or data.count("/") > 1
    if is_path or find_format(Path(data).name) or Path(data).is_file():
        for row_id, raw in read_raw_rows(Path(data).expanduser()):
            yield row_id, parse_object(raw, row_id) if isinstance(raw, str) else raw
        return
    import datasets
    import huggingface_hub

    is_online = not huggingface_hub.constants.HF_HUB_OFFLINE
    try:
        if is_online:  # fails after 5 s without a network; load_dataset would try for half a minute
            huggingface_hub.HfApi().dataset_info(data, timeout=5)
        table = datasets.load_dataset(data, subset, split=split, streaming=is_online)
        for number, entry in enumerate(table, 1):
            yield f"{data}:{number}", entry
    except Exception as error:  # from the network, the hub or the disk
        reason = " ".join(str(error).split())[:200] or repr(error)
        raise DataError(
            f"{data}: no such file, and it cannot be loaded from the hub ({reason}). Download it "
            "on another machine, and set --data to its file."
        ) from None


# --- the command ----------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="env.py", description="Check and convert row files.")
    commands = parser.add_subparsers(dest="name", required=True)
    for name, description in (
        ("check", "which rows load, which do not, and why"),
        ("to-verl", "Gym rows as verl's"),
        ("from-verl", "verl's rows as Gym rows"),
        ("from", "rows from any table, by a function"),
        ("examples", "rows that nemo-gym ships for a server"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        add = command.add_argument
        if name in ("check", "to-verl", "from-verl"):
            add("files", nargs="+", metavar="FILE")
            add("--prompt-key", default="prompt", help="key of the prompt in verl's rows (prompt)")
        elif name == "from":
            add("--data", required=True, help=f"a file ({KNOWN}), or a name of the hub")
            add("--map", help="path.py:function(entry) -> a row (the entry itself)")
            add("--subset", help="of a data set of the hub, e.g. main")
            add("--split", default="train", help="of a data set of the hub (train)")
        else:
            add("--server", required=True, help="a resources server of Gym, e.g. mcqa")
            python = ".venv-gym/bin/python"
            add("--python", default=python, help="interpreter that has nemo-gym")
        if name != "check":
            add("--out", default="data", help="folder to write to (default: data)")
    return parser.parse_args()


def choose_targets(files: Sequence[str], out: str, suffix: str) -> list[Path]:
    """Choose the file to write for each input file. Raises DataError.

    No input file is overwritten, and no two inputs have the same target.
    """
    paths = [Path(file) for file in files]
    stems = [Path(p.stem).stem if p.suffix in COMPRESSIONS else p.stem for p in paths]
    targets = [Path(out).expanduser() / f"{stem}{suffix}" for stem in stems]
    inputs = {Path(file).resolve() for file in files}
    for target in targets:
        if target.resolve() in inputs or targets.count(target) > 1:
            raise DataError(
                f"{target}: the command would overwrite an input, or write two files there. Set "
                "another --out, or convert one file at a time."
            )
    return targets


def run_command(args: argparse.Namespace) -> Iterator[str]:
    """Run a command, and yield a line about each file that it writes.

    Raises DataError, UserFunctionError, OSError.
    """
    folder = Path(args.out).expanduser()
    if args.name == "examples":
        path = folder / f"{args.server}_examples.jsonl"
        yield f"{path}: {env.write_rows(path, read_examples(args.server, args.python))} rows"
    elif args.name == "from":
        path = folder / f"{Path(args.data).name}_{args.split}.jsonl"
        if Path(args.data).expanduser().is_file():
            (path,) = choose_targets([args.data], args.out, ".jsonl")
        rows = read_mapped_rows(args.data, args.map, args.subset, args.split)
        yield f"{path}: {env.write_rows(path, rows)} rows"
    else:
        files = find_all_files(args.files)
        suffix = ".parquet" if args.name == "to-verl" else ".jsonl"
        for file, path in zip(files, choose_targets(files, args.out, suffix), strict=True):
            gym_rows = report_progress(read_rows(file, args.prompt_key), file, report)
            if args.name == "to-verl":
                made = [to_verl(row, row_id, args.prompt_key) for row_id, row in gym_rows]
                count = write_verl(path, made)
            else:
                count = env.write_rows(path, check_prompts(gym_rows))
            yield f"{path}: {count} rows"


def find_all_files(paths: Sequence[str]) -> list[str]:
    """Find the files of all paths, folders and patterns. Raises DataError."""
    return list(itertools.chain.from_iterable(find_files(path, report) for path in paths))


def main() -> None:
    """Run a command of env.py.

    The exit status is 0, or 1 if a file or row is invalid, or 2 if the command line is invalid.
    """
    args = parse_arguments()
    try:
        if args.name == "check":
            are_valid = [check(file, args.prompt_key) for file in find_all_files(args.files)]
            sys.exit(0 if all(are_valid) else 1)
        for line in run_command(args):
            print(line)
    except (DataError, UserFunctionError, OSError) as error:
        sys.exit(f"error: {error}")
