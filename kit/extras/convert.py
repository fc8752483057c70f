"""Files of rows, made of others: the commands of env.py that need more than env.py.

    python env.py check FILES [--prompt-key prompt]                   which rows load, which not, and why
    python env.py to-verl FILES --out DIR                             Gym's rows as verl's, <DIR>/<name>.parquet
    python env.py from-verl FILES --out DIR                           verl's as Gym's, <DIR>/<name>.jsonl
    python env.py from --data FILE-or-hub-name --map my_map.py:row --out DIR [--subset main] [--split train]
    python env.py examples --server mcqa --out DIR                    what nemo-gym ships for a server

to-verl writes parquet where that holds the rows as they are, and else <name>_verl.jsonl, which verl reads as well:
Arrow gives each row the keys of all others, and no column two types. from-verl after to-verl, and the other way, gives
what was there.

`--map` names function(entry) -> a row, Gym's or verl's, of one entry of a table: CSV, JSON, parquet, or a data set of
the hub, read by Hugging Face's datasets, a part at a time. Nothing is written unless all of a file is in order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import env
from env import DataError, Refused
from kit import later
from kit.data import verl_rows
from kit.errors import PluginError

plugins = later("kit.config.user_functions")

TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def check(path: str, prompt_key: str = "prompt") -> bool:
    """Print which rows of a file load, which are refused, and why. False if there are errors beside these."""
    loaded, refused, errors = 0, dict[str, list[str]](), list[str]()
    try:
        for where, raw in env.raw_rows(path, prompt_key):
            try:
                env.render(verl_rows.parse(raw, where, prompt_key), where)
                loaded += 1
            except Refused as error:
                refused.setdefault(str(error).removeprefix(f"{where}: "), []).append(where)
            except Exception as error:  # whatever it is, the rows after it are wanted too
                errors.append(str(error) if isinstance(error, DataError) else f"{where}: {error!r}")
    except DataError as error:
        errors.append(str(error))
    print(f"{path}: {loaded} rows load, {sum(map(len, refused.values()))} refused")
    report = [f"{len(some)} x {reason} (first {some[0]})" for reason, some in refused.items()]
    print(
        "".join(f"    {line}\n" for line in report + [f"error: {error}" for error in errors]),
        end="",
    )
    return not errors


def examples(server: str, python: str) -> Iterator[dict[str, Any]]:
    """The example rows that nemo-gym ships for a server, agent_ref added where there is none. Raises DataError."""
    code = "import pathlib, nemo_gym; print(pathlib.Path(nemo_gym.__file__).parent.parent / 'resources_servers')"
    try:
        found = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(
            f"--python {python} is no interpreter with nemo_gym: {error}; `make gym` makes one"
        ) from None
    folder = Path(found.strip()) / server / "data"
    files = [file for file in sorted(folder.glob("*example*.jsonl")) if "rollouts" not in file.name]
    if not files:
        have = sorted(
            {file.parts[-3] for file in folder.parent.parent.glob("*/data/example*.jsonl")}
        )
        raise DataError(f"{folder}: no example*.jsonl; choose --server of {', '.join(have)}")
    agent = {"agent_ref": {"type": "responses_api_agents", "name": f"{server}_simple_agent"}}
    seen: list[dict[str, Any]] = []
    for file in files:  # some rows ship twice, in two files
        seen += [
            row for _, row in env.read_rows(file) if row not in seen
        ]  # within one file, all are kept
    return (row if row.get("agent_ref") else row | agent for row in seen)


# --- verl's files --------------------------------------------------------------------------------


def targets(files: Sequence[str], out: str, suffix: str) -> list[Path]:
    """Where each file's rows go. Raises DataError where one would be written over, or over another."""
    names = [
        Path(file).name.removesuffix(".gz").rpartition(".")[0] or Path(file).name for file in files
    ]
    found = [Path(out) / f"{name}{suffix}" for name in names]
    for file, target in zip(files, found, strict=True):
        if target.exists() and Path(file).exists() and target.samefile(file):
            raise DataError(f"{target}: would be written over itself; give another --out")
        if found.count(target) > 1:
            raise DataError(
                f"{target}: more than one of the files would go there; give one at a time, and --out"
            )
    return found


def gym_rows(file: str, prompt_key: str) -> Iterator[dict[str, Any]]:
    """The rows of a file of verl's as Gym's, each such as can be asked. Raises DataError, Refused."""
    for where, row in verl_rows.read(file, prompt_key):
        env.render(row, where)
        yield row


def write_verl(path: Path, made: list[dict[str, Any]], prompt_key: str) -> Path:
    """Write verl's rows as parquet where that gives them back as they are, else as JSONL. Returns what was written."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.part.parquet")
    try:
        columns = {
            key: [row.get(key) for row in made]
            for key in dict.fromkeys(key for row in made for key in row)
        }
        parquet.write_table(pyarrow.table(columns), part, row_group_size=1000)
        back = [env.parse_json(raw, where) for where, raw in env.raw_rows(part, prompt_key)]
        if same(back, made):
            part.replace(path)
            return path
    except (
        pyarrow.ArrowException,
        OverflowError,
        DataError,
    ):  # no column has two types, no struct is empty, ...
        pass
    finally:
        part.unlink(missing_ok=True)
    path = path.with_name(f"{path.stem}_verl.jsonl")
    env.write_rows(path, made)
    return path


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether rows are equal as JSON, which has 1, 1.0 and true apart."""
    return len(some) == len(others) and all(
        json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
        for a, b in zip(some, others, strict=True)
    )


# --- any table -----------------------------------------------------------------------------------


def entries(data: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    """Yield (`data:row`, entry) of a file, or of a data set of the hub. Raises DataError."""
    path = Path(data)
    kind = TABLES.get(path.suffix)
    if not path.is_file() and (kind or data.startswith((".", "/", "~")) or data.count("/") > 1):
        raise DataError(
            f"{data}: no such file; give one that is there, or a name of the hub (owner/name)"
        )
    if path.is_file() and not kind:
        raise DataError(f"{data}: a table of another kind; give one of {', '.join(TABLES)}")
    number = 0
    try:
        import datasets
        import huggingface_hub

        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        if path.is_file():
            separator = {"sep": "\t"} if path.suffix == ".tsv" else {}
            table = datasets.load_dataset(
                kind, data_files=data, split="train", streaming=True, **separator
            )
        else:
            if not offline:  # once: load_dataset would ask for half a minute
                huggingface_hub.HfApi().dataset_info(data, timeout=5)
            table = datasets.load_dataset(data, subset, split=split, streaming=not offline)
        for number, entry in enumerate(table, 1):
            yield f"{data}:{number}", entry
    except Exception as error:  # of the network, the hub, the disk, a parser
        why = " ".join(str(error).split())[:200] or repr(error)
        if path.is_file():
            raise DataError(
                f"{data}: cannot be read after row {number} ({why}); mend it, or give another"
            ) from None
        way_out = (
            "where the hub cannot be reached, give --data a file of it that was fetched elsewhere"
        )
        raise DataError(
            f"{data}: no file here, and not to be had of the hub ({why}); {way_out}"
        ) from None


def mapped(data: str, function: str, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """The rows that a function of one's own makes of a table's entries. Raises DataError, Refused, PluginError."""
    call = plugins.load(function, "--map")
    for where, entry in entries(data, subset, split):
        try:
            row = verl_rows.parse(call(entry), where)
        except PluginError as error:
            raise PluginError(f"{where}: {error}") from error
        env.render(row, where)
        yield row


# --- the command ---------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The commands' options."""
    top = argparse.ArgumentParser(prog="env.py", description="Files of rows, made of others.")
    commands = top.add_subparsers(dest="name", required=True)
    for name, told in (
        ("check", "which rows load, which not, and why"),
        ("to-verl", "Gym's rows as verl's"),
        ("from-verl", "verl's rows as Gym's"),
        ("from", "rows of any table, by a function"),
        ("examples", "what nemo-gym ships for a server"),
    ):
        command = commands.add_parser(name, help=told, description=told)
        if name in ("check", "to-verl", "from-verl"):
            command.add_argument("files", nargs="+", metavar="FILE")
            command.add_argument(
                "--prompt-key", default="prompt", help="where verl's rows have it (default: prompt)"
            )
        if name != "check":
            command.add_argument("--out", default="data", help="folder to write to (default: data)")
        if name == "from":
            command.add_argument(
                "--data", required=True, help=f"a file ({', '.join(TABLES)}), or a name of the hub"
            )
            command.add_argument("--map", required=True, help="path.py:function(entry) -> a row")
            command.add_argument(
                "--subset", help="of a data set of the hub that has some, e.g. main"
            )
            command.add_argument(
                "--split", default="train", help="of a data set of the hub (default: train)"
            )
        if name == "examples":
            command.add_argument(
                "--server", required=True, help="a resources server of Gym's, e.g. mcqa"
            )
            command.add_argument(
                "--python", default=".venv-gym/bin/python", help="interpreter that has nemo-gym"
            )
    return top


def write(args: argparse.Namespace) -> Iterator[tuple[Path, int]]:
    """Do what a command asks for: yield each file that was written, and its rows. Raises DataError, PluginError,
    OSError."""
    if args.name == "examples":
        path = Path(args.out) / f"{args.server}_examples.jsonl"
        yield path, env.write_rows(path, examples(args.server, args.python))
    elif args.name == "from":
        (path,) = targets([args.data], args.out, ".jsonl")
        path = (
            path
            if Path(args.data).is_file()
            else path.with_name(f"{Path(args.data).name}_{args.split}.jsonl")
        )
        yield path, env.write_rows(path, mapped(args.data, args.map, args.subset, args.split))
    elif args.name == "from-verl":
        for file, path in zip(args.files, targets(args.files, args.out, ".jsonl"), strict=True):
            yield path, env.write_rows(path, gym_rows(file, args.prompt_key))
    else:
        for file, path in zip(args.files, targets(args.files, args.out, ".parquet"), strict=True):
            made = [
                verl_rows.to_verl(row, where, args.prompt_key)
                for where, row in verl_rows.read(file, args.prompt_key)
            ]
            yield write_verl(path, made, args.prompt_key), len(made)


def main() -> None:
    """A command of env.py; exit status 0, 1 for what is wrong with files or rows, 2 for the command line."""
    args = parser().parse_args()
    if args.name == "check":
        fine = [check(file, args.prompt_key) for file in args.files]
        sys.exit(0 if all(fine) else 1)
    try:
        for path, count in write(args):
            print(
                f"{path}: {count} rows"
                + ", which no parquet would give back as they are" * ("_verl." in path.name)
            )
    except (DataError, PluginError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
