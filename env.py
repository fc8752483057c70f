"""Tasks: NeMo Gym rows in, prompts out. This is the file to edit first; it knows no torch and no verl.

A Gym row is one JSON object: `responses_create_params` (what the model is asked, in OpenAI Responses form) and what its
verifier wants to see again (`answer`, ...). The kit sends the row back to the server verbatim; here the prompt is made:

    read_rows(file)  -> rows, by file and line     -> render(row) -> chat messages and tools -> encode(...) -> token ids
                     -> load_tasks(...) does all this, and keeps what fits -> batch(tasks, step, ...) for each step

To add a task, write a function that makes rows (see `arithmetic` below), give it a line in `GENERATORS`, and run

    python env.py arithmetic --out data/                              # the demo's generated sums
    python env.py counter --out data/                                 # numbers to add with a tool
    python env.py gsm8k [--source DIR] --out data/                    # GSM8K from the hub, or its original JSONL
    python env.py examples --server mcqa --out data/                  # what nemo-gym ships for a server
    python env.py from-verl FILES --out data/                         # verl's rows as Gym's; to-verl: the other way
    python env.py from --data trivia.csv --map my_map.py:row --out data/        # of any table, or of the hub
    python env.py check data/*.jsonl                                  # which rows load, which not, and why
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np


class DataError(ValueError):
    """A row or file that cannot be used; the message names the file and the line."""


class Refused(DataError):  # noqa: N818  a verdict on the row, no fault in it
    """A Gym row that is in order, but that this kit cannot ask; the message says why."""


class Weighted(Protocol):
    """What `batch` looks at: a row's file, and that file's share of every batch."""

    @property
    def file(self) -> str: ...
    @property
    def weight(self) -> float | None: ...


T = TypeVar("T", bound=Weighted)
OTHER_TEMPLATE = "set actor_rollout_ref.model.custom_chat_template"
MOST = 2**26  # characters of a row; more is no row, and is not read to its end


@dataclass(frozen=True)
class Task:
    """One row, ready to be answered. `prompt_ids` are what the policy sees: [P] token ids."""

    row_id: str  # file:line, the name of this row in logs, metrics and rollouts
    row: dict[str, Any]  # verbatim: what the Gym server gets back
    server: str  # key of gym.servers that seeds and verifies it
    messages: list[dict[str, Any]]  # the prompt as chat messages; []: the environment writes it
    prompt_ids: list[int]  # [] when messages is
    tools: list[dict[str, Any]] = field(default_factory=list)  # in chat form
    file: str = ""  # the file it came from
    weight: float | None = None  # that file's share of every batch


# --- reading -------------------------------------------------------------------------------------
def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, row) of a file as `raw_rows` reads it. Raises DataError."""
    return ((where, parse_row(raw, where)) for where, raw in raw_rows(path))


def raw_rows(path: str | Path, *columns: str) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, JSON text or a dict), so that one bad row need not end the reading, of a .jsonl, .json (also
    one list), .gz or .parquet file, blank lines skipped. Parquet has rows as JSON in a column of strings, or a column
    for each key, where it has one of `columns`. Raises DataError."""
    path = Path(path)
    if not path.is_file():
        name, _, split = path.stem.rpartition("_") if path.suffix == ".jsonl" else ("", "", "")
        task = (
            f"examples --server {name}"
            if name and split == "examples"
            else name
            if name in GENERATORS
            else ""
        )
        todo = (
            f"run `python env.py {task} --out {path.parent}`" if task else "give one that is there"
        )
        raise DataError(f"{path}: no such file; {todo}")
    try:
        for number, raw in enumerate(_raws_of(path, columns), 1):
            if not isinstance(raw, str) or raw.strip():  # null is no blank line, and no row either
                yield f"{path}:{number}", raw
    except Exception as error:  # of the disk, of gzip, of Arrow
        raise DataError(
            f"{path}: cannot be read ({error}); it must be JSON (UTF-8), .gz or parquet"
        ) from None


def _raws_of(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    if path.suffix != ".parquet":
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            if (
                path.suffix == ".json"
                and file.read(4096).lstrip().startswith("[")
                and path.stat().st_size < 16 * MOST
            ):
                yield from json.loads(path.read_text(encoding="utf-8"))
                return
            file.seek(0)
            while line := file.readline(MOST):
                if len(line) == MOST:
                    raise ValueError(f"a line of over {MOST >> 20} million characters")
                yield line
        return
    yield from _parquet_rows(path, columns)


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a parquet file: its columns `columns` as a dict, or its one column of JSON text.

    A value that is stored once may stand in each of a million rows. So strings stay in their dictionaries (Arrow's
    read_dictionary), and rows become Python objects a few at a time (`_parts`). Raises ValueError, Arrow's errors.
    """
    from pyarrow import parquet, types

    metadata = parquet.read_metadata(path)
    _check_sizes(metadata)
    leaves = [metadata.schema.column(i) for i in range(len(metadata.schema))]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    with parquet.ParquetFile(
        path, metadata=metadata, read_dictionary=texts, buffer_size=2**20
    ) as file:
        schema = file.schema_arrow
        kinds = {
            f.name: f.type.value_type if types.is_dictionary(f.type) else f.type for f in schema
        }
        strings = [
            name
            for name, kind in kinds.items()
            if types.is_string(kind) or types.is_large_string(kind)
        ]
        one = [name for name in strings if name == "row" or len(strings) == 1]
        whole = {*columns} & {*schema.names}
        if not whole and not one:
            needed = ", ".join([*columns, "a string column `row`"])
            raise ValueError(f"it needs {needed}, or just one of strings; it has {schema.names}")
        for group in range(file.num_row_groups):  # each has other dictionaries
            for batch in file.iter_batches(256, [group], None if whole else one):
                for part in _parts(batch):
                    yield from part.to_pylist() if whole else part.column(0).to_pylist()


def _check_sizes(metadata: Any) -> None:
    """Raises ValueError for a parquet file with a column that takes too much memory even in Arrow's form. metadata:
    pyarrow's FileMetaData, as the file gives it."""
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for index in range(group.num_columns):
            chunk, rows = group.column(index), group.num_rows
            width = max(
                metadata.schema.column(index).length, 8
            )  # bytes of a value that is not text
            if chunk.total_uncompressed_size > max(16 * MOST, rows << 16):
                size = f"{chunk.total_uncompressed_size / 2**20:.1f} MiB in {rows} rows"
            elif chunk.num_values * width > 4 * MOST:
                size = f"{chunk.num_values} values of {width} bytes in {rows} rows"
            else:
                continue
            raise ValueError(
                f"{chunk.path_in_schema}: {size}: leave such rows out, or make its row groups smaller"
            )


def _parts(batch: Any) -> Iterator[Any]:
    """Parts of an Arrow batch that are at most MOST bytes each as Python objects. Raises ValueError for a row of
    more."""
    size = sum(_size_of(column) for column in batch.columns)
    if size <= MOST:
        yield batch
    elif batch.num_rows == 1:
        raise ValueError(
            f"a row of {size / 2**20:.1f} MiB, over {MOST >> 20} MiB: leave such rows out"
        )
    else:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))


def _size_of(values: Any) -> int:
    """About how many bytes an Arrow array takes as Python objects, 64 a value and its text; what a dictionary holds
    counts as often as it is referred to."""
    from pyarrow import compute, types

    count, kind = 64 * len(values), values.type
    if count > MOST:
        return count
    if types.is_dictionary(kind):
        lengths = compute.binary_length(values.dictionary)
        return count + (compute.sum(lengths.take(values.indices)).as_py() or 0)
    if types.is_struct(kind):
        return count + sum(_size_of(part) for part in values.flatten())
    if types.is_nested(kind):  # lists and maps
        return count + _size_of(values.flatten())
    return count + values.nbytes


def plain(value: Any) -> Any:
    """What NumPy, pandas and Arrow put into rows -> plain values, for json. Raises TypeError."""
    if call := getattr(value, "tolist", None) or getattr(value, "isoformat", None):
        return call()
    raise TypeError(f"a {type(value).__name__} in it is no JSON")


def parse_json(raw: Any, where: str) -> dict[str, Any]:
    """JSON text, or a dict -> an object of plain values, which can be written as JSON and UTF-8. Raises DataError."""
    try:
        text = raw if isinstance(raw, str) else json.dumps(raw, default=plain, allow_nan=False)
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); a line must be one JSON object") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be a JSON object, this is a {type(row).__name__}")
    level: list[Any] = [row]
    for _ in range(
        64
    ):  # levels: far more than rows have, and no more than all that reads and writes them can take
        level = [
            i
            for v in level
            if isinstance(v, dict | list)
            for i in (v.values() if isinstance(v, dict) else v)
        ]
    if level or len(text) > MOST:
        raise DataError(
            f"{where}: nested over 64 deep, or over {MOST >> 20} MB; leave such rows out"
        )
    return row


def parse_row(raw: Any, where: str) -> dict[str, Any]:
    """JSON text, or a dict -> a Gym row. Raises DataError."""
    row = parse_json(raw, where)
    if not isinstance(row.get("responses_create_params"), dict):
        raise DataError(
            f"{where}: no responses_create_params, so this is not a Gym row; add them (chats go to `sft`)"
        )
    return row


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write JSONL, under another name until it is whole -> how many rows. Raises OSError, and what `rows` raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as out:
            count = sum(bool(out.write(json.dumps(row, ensure_ascii=False) + "\n")) for row in rows)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


# --- rendering, as NeMo Gym's own converter does it for its model servers ------------------------
def render(row: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A Gym row -> (chat messages, tools) as `tokenizer.apply_chat_template` takes them. `input` is text, items, or
    empty where the environment writes the prompt; `instructions` and the system messages that follow become one.
    Raises Refused for what this kit cannot ask, DataError for what is malformed.

    >>> render({"responses_create_params": {"input": "2 + 2?", "instructions": "Be brief."}}, "x:1")[0]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """
    params = {key: value for key, value in row["responses_create_params"].items() if value}
    items, instructions, metadata = (
        params.get("input", []),
        params.get("instructions", ""),
        params.get("metadata", {}),
    )
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not (
        isinstance(items, list) and isinstance(instructions, str) and isinstance(metadata, dict)
    ):
        raise DataError(
            f"{where}: input must be text or a list, instructions text, metadata an object"
        )
    for key in metadata:
        if (
            key.startswith("audio") and metadata[key]
        ):  # Gym hands sound to its model servers in metadata
            raise Refused(
                f"{where}: metadata.{key}: the kit trains text models only; leave such rows out"
            )
    messages = render_items(items, where)
    if instructions:
        leading = [instructions]
        while messages and messages[0]["role"] == "system":  # many templates allow one, at the top
            leading.append(messages.pop(0)["content"])
        messages.insert(0, {"role": "system", "content": "\n\n".join(leading)})
    return messages, render_tools(params.get("tools", []), where)


def render_items(items: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Responses items -> chat messages. What the assistant says in a row is one message: reasoning (in think tags) and
    text, then its function calls. Raises Refused or DataError."""
    held = {
        "message": "content",
        "reasoning": "summary",
        "function_call": "",
        "function_call_output": "output",
    }
    messages: list[dict[str, Any]] = []
    functions: dict[str, dict[str, str]] = {}  # call_id -> the function called
    for item in items:
        if not isinstance(item, dict):
            raise DataError(
                f"{where}: an input item must be a JSON object, this is a {type(item).__name__}"
            )
        role, kind = item.get("role"), str(item.get("type") or "message")
        if kind not in held:
            raise Refused(
                f"{where}: input item {kind}: the kit takes messages, reasoning and function calls"
            )
        content = item.get(held[kind])
        if kind == "message" and role == "user" and isinstance(content, list):
            parts = [_part(part, where) for part in content]
            seen = any(part["type"] == "image" for part in parts)
            messages.append(
                {
                    "role": "user",
                    "content": parts if seen else "".join(part["text"] for part in parts),
                }
            )
            continue
        texts = _texts(content, where)
        if kind == "function_call_output":
            call_id = _string(item, "call_id", where)
            answer = {"role": "tool", "tool_call_id": call_id, "content": "".join(texts)}
            messages.append(answer | functions.get(call_id, {}))
        elif kind == "message" and role in (
            "user",
            "system",
            "developer",
        ):  # no template knows OpenAI's developer
            messages.append(
                {"role": "user" if role == "user" else "system", "content": "".join(texts)}
            )
        elif kind == "message" and role != "assistant":
            raise DataError(
                f"{where}: a message of role {role!r}; use user, system, developer or assistant"
            )
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if kind == "function_call":
                call_id, name, arguments = (
                    _string(item, key, where) for key in ("call_id", "name", "arguments")
                )
                call: dict[str, Any] = {"name": name, "arguments": arguments}
                with contextlib.suppress(
                    ValueError, RecursionError
                ):  # chat templates expect an object
                    value = json.loads(arguments)
                    call["arguments"] = value if isinstance(value, dict) else arguments
                messages[-1].setdefault("tool_calls", []).append(
                    {"id": call_id, "type": "function", "function": call}
                )
                functions[call_id] = {"name": name}
            else:
                texts = (
                    [f"<think>{text}</think>" for text in texts if text]
                    if kind == "reasoning"
                    else texts
                )
                messages[-1]["content"] += "".join(texts)
    return [
        m for m in messages if m["role"] != "assistant" or m["content"] or "tool_calls" in m
    ]  # as Gym: none empty


def render_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Responses tools, or chat ones -> chat tools, without `strict`. Raises Refused or DataError."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools must be a list of JSON objects")
    rendered = []
    for tool in tools:
        if tool.get("type") != "function":
            raise Refused(
                f"{where}: tool of type {tool.get('type')!r}: the kit takes functions only"
            )
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        _string(function, "name", where)
        kept = {
            key: function[key]
            for key in ("name", "description", "parameters")
            if function.get(key) is not None
        }
        rendered.append({"type": "function", "function": kept})
    return rendered


def _texts(content: Any, where: str) -> list[str]:
    """Text, a list of parts, or null -> its texts. Raises Refused for images and the like, DataError."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and part.get("type") for part in content
    ):
        raise DataError(f"{where}: content must be text, or a list of parts with a type")
    others = {str(part["type"]) for part in content} - {
        "input_text",
        "output_text",
        "text",
        "summary_text",
    }
    if others:
        raise Refused(
            f"{where}: {', '.join(sorted(others))}: the kit trains text models only; leave such rows out"
        )
    return [_string(part, "text", where) for part in content]


def _part(part: Any, where: str) -> dict[str, str]:
    """A part of what a user says -> a chat part. Raises Refused, DataError."""
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"type": "image", "image": _string(part, "image_url", where)}
    return {"type": "text", "text": "".join(_texts([part], where))}


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(item.get(key), str):
        raise DataError(
            f"{where}: `{key}` of a {item.get('type', 'function')} must be text: {item.get(key)!r}"
        )
    return str(item[key])


def encode(
    messages: Sequence[Any], tools: Sequence[Any], tokenizer: Any, where: str = ""
) -> list[int]:
    """Chat messages and tools -> [P] token ids. Raises DataError when the chat template refuses or hides them."""
    at, options = (
        f"{where}: the chat template".removeprefix(": "),
        {"add_generation_prompt": True, "return_dict": True},
    )
    if vision := getattr(
        tokenizer, "vision", None
    ):  # kit.extras.images.Vision, of a model that sees
        messages = vision.messages(messages)
    elif any(
        "image" in p for m in messages if isinstance(m.get("content"), list) for p in m["content"]
    ):
        raise Refused(
            f"{where}: input_image: the model sees none; leave such rows out, or take one with a processor"
        )
    try:
        ids = list(
            tokenizer.apply_chat_template(messages, tools=tools or None, **options)["input_ids"]
        )
        # [] for none: a template made for tools may loop over them unasked
        blind = tools and ids == list(
            tokenizer.apply_chat_template(messages, tools=[], **options)["input_ids"]
        )
    except Exception as error:  # a template is a program, which no row was made for
        raise DataError(
            f"{at} does not take these messages: {error}; change them, or {OTHER_TEMPLATE}"
        ) from error
    if blind:
        raise DataError(f"{at} does not show tools to the model; {OTHER_TEMPLATE}")
    return vision.expand(ids, messages, where) if vision else ids


# --- a run's files -> tasks -> batches -----------------------------------------------------------
def server_of(
    row: dict[str, Any], servers: Any, where: str, name: str = "", strict: bool = True
) -> str:
    """The server of a row: `name` if given; else by agent_ref; else the only one there is. servers: {alias: server}, or
    just servers; agent_ref is one of these, or begins with a server and "_". Raises DataError; if not `strict`: ""."""
    aliases = servers if isinstance(servers, Mapping) else {server: server for server in servers}
    known, reference = sorted(set(aliases.values())), row.get("agent_ref") or {}
    agent = name or (reference.get("name") if isinstance(reference, dict) else reference)
    if agent is None and len(known) == 1:
        return known[0]
    begun = [server for server in known if str(agent).startswith(f"{server}_") and not name]
    if str(agent) in aliases or begun:
        return aliases.get(str(agent)) or max(begun, key=len)
    if not strict:
        return ""
    wanted = f"{'server' if name else 'agent_ref'} {agent!r}"
    wanted += f" matches none of gym.servers ({', '.join(known) or 'empty'})"
    raise DataError(
        f"{where}: {wanted}; name it there, give the file a server, or leave such rows out by env.only_servers"
    )


def load_tasks(
    files: Sequence[Any],
    tokenizer: Any,
    servers: Any,
    max_prompt_length: int,
    only: Any = None,
    read: Any = read_rows,
) -> tuple[list[Task], list[str]]:
    """Read, route, render and tokenise the rows of `files`: paths, or {path, weight: the file's share of every batch,
    server: of all its rows}, by `read`. servers: as for `server_of`. only: those to take. Returns (tasks, dropped):
    `dropped` names rows of over `max_prompt_length` tokens, and counts those of other servers. Raises DataError."""
    tasks, dropped = [], []
    for entry in files:
        given: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        path, weight, name, left_out = (
            given.get("path"),
            given.get("weight"),
            given.get("server") or "",
            0,
        )
        known = path and given.keys() <= {"path", "weight", "server"}
        if not known or not (
            weight is None or (isinstance(weight, int | float) and 0 < weight < float("inf"))
        ):
            raise DataError(
                f"{given}: a file must be a path or {{path, weight: more than 0, server}}, no other key"
            )
        for where, row in read(str(path)):
            server = server_of(row, servers, where, name, strict=only is None)
            if only is not None and server not in only:
                left_out += 1
                continue
            messages, tools = render(row, where)
            ids = encode(messages, tools, tokenizer, where) if messages else []
            if len(ids) > max_prompt_length:
                dropped.append(f"{where} ({len(ids)} tokens)")
            else:
                tasks.append(Task(where, row, server, messages, ids, tools, str(path), weight))
        dropped += [f"{path}: {left_out} rows of other servers"] if left_out else []
    return tasks, dropped


def batch(tasks: Sequence[T], size: int, step: int, seed: int, shuffle: bool = True) -> list[T]:
    """The `size` tasks of training step `step` (1, 2, ...), read off an endless stream of epochs.

    Each epoch has its own order, and a batch may begin in one and end in the next. With weights, every file is such a
    stream and gives every batch its quota. Of its arguments alone: a resumed run reads on. Raises DataError.

    >>> rows = [Task(f"{f}{i}", {}, "", [], [], file=f, weight=w) for f, w in (("a", 3), ("b", 1)) for i in (1, 2)]
    >>> [[task.row_id for task in batch(rows, 4, step, seed=0, shuffle=False)] for step in (1, 2)]
    [['a1', 'a2', 'a1', 'b1'], ['a2', 'a1', 'a2', 'b2']]
    """
    if not tasks:
        raise DataError("no rows to take a batch from; give env.train_files that hold some")
    streams = [(list(tasks), size)]
    if any(task.weight for task in tasks):
        streams = [
            ([t for t in tasks if t.file == file], quota)
            for file, quota in quotas(tasks, size).items()
        ]
    picked: list[T] = []
    for index, (rows, quota) in enumerate(streams):
        count, start, stop = (
            len(rows),
            (step - 1) * quota,
            step * quota,
        )  # of this batch, in the stream
        for epoch in range(start // count, (stop - 1) // count + 1):
            order = (
                np.random.default_rng([seed, epoch, index]).permutation(count)
                if shuffle
                else range(count)
            )
            picked += [rows[i] for i in order[max(start - epoch * count, 0) : stop - epoch * count]]
    return picked


def quotas(tasks: Sequence[Weighted], size: int) -> dict[str, int]:
    """file -> its rows in a batch of `size`, by weight and largest remainder. Raises DataError."""
    weights = {task.file: task.weight or 0.0 for task in tasks}  # in order of appearance
    shares = {file: size * weight / sum(weights.values()) for file, weight in weights.items()}
    counts = {file: int(share) for file, share in shares.items()}
    for file in sorted(shares, key=lambda file: counts[file] - shares[file])[
        : size - sum(counts.values())
    ]:
        counts[file] += 1
    for file, weight in weights.items():
        if counts[file] == 0:
            more = (
                "raise it" if weight else "beside files with a weight none counts as 0: give it one"
            )
            raise DataError(
                f"{file}: weight={weight:g} comes to no row in a batch of {size}; {more}"
            )
    return counts


# --- generators: a function that makes rows, and its line in GENERATORS ---------------------------
def _row(server: str, prompt: str, system: str = "", **verifier_fields: Any) -> dict[str, Any]:
    """A one-question Gym row for `server`, with the fields that its verifier asks for."""
    messages = [{"role": "system", "content": system}] if system else []
    params = {"input": [*messages, {"role": "user", "content": prompt}]}
    agent = {"type": "responses_api_agents", "name": f"{server}_simple_agent"}
    return {"responses_create_params": params, **verifier_fields, "agent_ref": agent}


def arithmetic(args: argparse.Namespace) -> dict[str, Iterable[dict[str, Any]]]:
    """Sums `a + b` for Gym's reasoning_gym server, which pays 1 for the equation and nothing else, and len(equation) /
    len(answer) for an answer that contains it. No pair of numbers is in both splits, in either order."""
    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(args.low, args.high + 1) for b in range(a, args.high + 1)]
    rng.shuffle(pairs)
    if args.validation >= len(pairs):
        raise DataError(
            f"{len(pairs)} pairs, {args.validation} held out; lower --validation, or raise --high"
        )

    def row(a: int, b: int) -> dict[str, Any]:
        question, answer = f"Complete the equation: {a} + {b} =", f"{a} + {b} = {a + b}"
        fields = {
            "question": question,
            "answer": answer,
            "metadata": {"source_dataset": "chain_sum"},
        }
        return _row("reasoning_gym", question, system="You are a calculator.", **fields)

    held_out, rest = pairs[: args.validation], pairs[args.validation :]
    train = sorted({(x, y) for a, b in rest for x, y in ((a, b), (b, a))})
    rng.shuffle(train)
    return {"train": [row(a, b) for a, b in train], "validation": [row(a, b) for a, b in held_out]}


def gsm8k(args: argparse.Namespace) -> dict[str, Iterable[dict[str, Any]]]:
    """GSM8K (Cobbe et al. 2021, arXiv:2110.14168) for Gym's math_with_judge server, from the hub (openai/gsm8k) or from
    --source. The reference answer is what follows `####`, without thousands commas."""

    def row(entry: dict[str, str]) -> dict[str, Any]:
        question, answer = (
            entry["question"],
            entry["answer"].rsplit("####", 1)[1].strip().replace(",", ""),
        )
        prompt = f"{question} Let's think step by step and put the final answer within \\boxed{{}}."
        return _row("math_with_judge", prompt, question=question, expected_answer=answer)

    def entries(split: str) -> Iterable[Any]:
        if args.source:
            return (json.loads(text) for _, text in raw_rows(Path(args.source) / f"{split}.jsonl"))
        try:
            import datasets
            import huggingface_hub

            if (
                not huggingface_hub.constants.HF_HUB_OFFLINE
            ):  # once: load_dataset would ask for half a minute
                huggingface_hub.HfApi().dataset_info("openai/gsm8k", timeout=5)
            return datasets.load_dataset("openai/gsm8k", "main", split=split)
        except Exception as error:  # of the network, the hub, the disk
            raise DataError(
                f"openai/gsm8k: {error!r:.200}; give --source, a folder with its JSONL files"
            ) from None

    return {"train": map(row, entries("train")), "validation": map(row, entries("test"))}


def counter(args: argparse.Namespace) -> dict[str, Iterable[dict[str, Any]]]:
    """Numbers to add with a tool, for Gym's example_session_state_mgmt server, which counts in a session and pays 1 if
    the counter stands where it should in the end: for one call with the right number."""
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    about = "Add a number to the counter."
    tool = {
        "type": "function",
        "name": "increment_counter",
        "description": about,
        "parameters": schema,
        "strict": True,
    }
    shown = [  # before the question: a small model copies what it sees
        {"role": "user", "content": "Add 7 to the counter."},
        {
            "type": "function_call",
            "call_id": "call_7",
            "name": "increment_counter",
            "arguments": '{"count": 7}',
        },
        {"type": "function_call_output", "call_id": "call_7", "output": '{"success":true}'},
        {"role": "assistant", "content": "Done."},
    ]

    def row(number: int) -> dict[str, Any]:
        asked = f"Add {number} to the counter."
        made = _row("example_session_state_mgmt", asked, expected_count=number, initial_count=0)
        made["responses_create_params"]["input"][:0] = shown
        made["responses_create_params"]["tools"] = [tool]
        return made

    numbers = [number for number in range(1, 100) if number != 7]
    random.Random(args.seed).shuffle(numbers)
    return {
        "train": [row(number) for number in numbers[16:]],
        "validation": [row(number) for number in numbers[:16]],
    }


MORE = ("examples", "check", "from", "from-verl", "to-verl")  # commands of kit/extras/convert.py
GENERATORS = {  # name: function(args) -> {split: rows}
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "counter": counter,
}


def main() -> None:
    """Write <out>/<name>_<split>.jsonl of a generator. What is in MORE runs beside this file, and is not imported."""
    if {*sys.argv[1:2]} & {*MORE}:
        runpy.run_module("kit.extras.convert", run_name="__main__")
        return
    parser = argparse.ArgumentParser(description="Write a task's rows in NeMo Gym's format.")
    parser.add_argument("name", choices=[*GENERATORS, *MORE])
    parser.add_argument("--out", default="data", help="folder to write to (default: data)")
    parser.add_argument(
        "--seed", type=int, default=0, help="arithmetic: which pairs are held out, and the order"
    )
    parser.add_argument(
        "--low", type=int, default=2, help="arithmetic: smallest number (default: 2)"
    )
    parser.add_argument(
        "--high", type=int, default=29, help="arithmetic: largest number (default: 29)"
    )
    parser.add_argument(
        "--validation", type=int, default=128, help="arithmetic: pairs held out (default: 128)"
    )
    parser.add_argument(
        "--source", help="gsm8k: folder with the original train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    try:
        for split, rows in GENERATORS[args.name](args).items():
            path = Path(args.out) / f"{args.name}_{split}.jsonl"
            print(f"{path}: {write_rows(path, rows)} rows")
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
