"""Make the tasks of a recipe: read its rows, find the server of each row, encode the prompts.

files -> read_rows (verl_rows.py) -> env.render_row -> env.encode_messages -> tasks -> batches
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import env
from env import DataError, Task
from kit.data.verl_rows import TASK_ID, read_rows


class FileEntry(NamedTuple):
    """An entry of env.train_files or env.val_files."""

    path: str
    weight: float | None = None  # the share of each batch
    server: str = ""  # the server of all rows of the file; "": the row names it


class LoadedTasks(NamedTuple):
    """The tasks of some files, and the rows that were dropped."""

    tasks: list[Task]
    dropped: list[str]  # rows whose prompt is too long, and counts of rows of other servers


def parse_entry(entry: Any) -> FileEntry:
    """Parse a path, or {path, weight, server}. Raises DataError."""
    fields: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
    if not fields.get("path") or not fields.keys() <= {*FileEntry._fields}:
        raise DataError(
            f"{fields}: an entry must be a path, or {{path, weight, server}}. Change it."
        )
    weight = fields.get("weight")
    if not is_weight(weight):
        raise DataError(f"{fields}: a weight must be a number over 0. Change it.")
    return FileEntry(str(fields["path"]), weight, str(fields.get("server") or ""))


def is_function(entry: Any) -> bool:
    """Whether an entry names a function that generates rows (kit/extras/generated_rows.py)."""
    return isinstance(entry, Mapping) and "function" in entry


def is_weight(weight: Any) -> bool:
    """Whether a value can be a weight: a positive finite number, or None."""
    return weight is None or (isinstance(weight, int | float) and 0 < weight < float("inf"))


@dataclass(frozen=True)
class TaskLoader:
    """The settings by which all rows of a recipe become tasks."""

    processor: Any  # kit.data.processor.TextProcessor, or the one for images
    aliases: Mapping[str, str]  # {alias of a Gym server, or its name: its name}
    max_prompt_length: int  # tokens; rows with a longer prompt are dropped
    only_servers: Collection[str] | None = None  # None: the rows of all servers
    custom_verifiers: Collection[str] = ()  # names that FileEntry.server may have, too
    prompt_key: str = "prompt"  # data.prompt_key, of verl's rows

    def load_files(self, entries: Sequence[Any]) -> LoadedTasks:
        """Load the tasks of all entries, in order. Raises DataError."""
        loaded = LoadedTasks([], [])
        for value in entries:
            entry = parse_entry(value)
            tasks, dropped = self.make_tasks(read_rows(entry.path, self.prompt_key), entry)
            loaded.tasks.extend(tasks)
            loaded.dropped.extend(dropped)
        return loaded

    def make_tasks(
        self, rows: Iterable[tuple[str, dict[str, Any]]], entry: FileEntry
    ) -> LoadedTasks:
        """Make tasks from (row id, Gym row). Raises DataError."""
        tasks: list[Task] = []
        dropped: list[str] = []
        skipped = 0  # rows of other servers
        for row_id, row in rows:
            server = self.find_server(row, row_id, entry.server)
            if server is None:
                skipped += 1
                continue
            messages, tools = env.render_row(row, row_id)
            ids = self.encode(messages, tools, row_id)
            if len(ids) > self.max_prompt_length:
                dropped.append(f"{row_id} ({len(ids)} tokens)")
                continue
            tasks.append(Task(row_id, row, server, messages, ids, tools, entry.path, entry.weight))
        if skipped:
            dropped.append(f"{entry.path}: {skipped} rows of other servers")
        return LoadedTasks(tasks, dropped)

    def encode(self, messages: Sequence[Any], tools: Sequence[Any], row_id: str) -> list[int]:
        """Encode a prompt. It has no ids if the environment writes it. Raises DataError."""
        if not messages:
            return []
        tokenizer = self.processor.tokenizer
        return env.encode_messages(messages, tools, tokenizer, row_id, self.processor)

    def find_server(self, row: Mapping[str, Any], row_id: str, name: str) -> str | None:
        """Find the server of a row, or None if only_servers does not have it. Raises DataError."""
        if name in self.custom_verifiers:
            server: str | None = name
        else:
            server = match_server(row, self.aliases, name)
        if self.only_servers is not None:
            return server if server in self.only_servers else None
        if server is None:
            references = {"server": name} if name else list_references(row)
            named = ", ".join(f"{key} {value!r}" for key, value in references.items())
            servers = ", ".join(sorted(set(self.aliases.values()))) or "empty"
            raise DataError(
                f"{row_id}: {named or 'agent_ref None'} matches none of gym.servers "
                f"({servers}). Add it there, set the server of the file, or skip such rows with "
                'env.only_servers. See docs/environments.md, "Which server a row uses".'
            )
        return server


def match_server(row: Mapping[str, Any], aliases: Mapping[str, str], name: str = "") -> str | None:
    """Match a row with a server: by `name` if it is set, else by the row, else the only one.

    The first reference of the row that matches decides. A reference matches if it is in `aliases`,
    or if it starts with a server's name and "_". Of two such servers, the longer name wins.
    aliases: as in TaskLoader.
    """
    if name:
        return aliases.get(name)
    servers = sorted(set(aliases.values()))
    references = list_references(row)
    if not references and len(servers) == 1:
        return servers[0]
    for reference in references.values():
        if reference in aliases:
            return aliases[reference]
        prefixes = [server for server in servers if reference.startswith(f"{server}_")]
        if prefixes:
            return max(prefixes, key=len)
    return None


def list_references(row: Mapping[str, Any]) -> dict[str, str]:
    """List {key: name} of what a row says about its server, the most reliable first.

    task_source: the server or agent whose data the row is from, in files that Gym 0.7 collates.
    agent_ref: the agent that ran the row. taskset: of a materialized task (verl_rows.py); its name
    is `environment:taskset` or one word.
    """
    agent = row.get("agent_ref") or {}
    task_id = row.get(TASK_ID) or {}
    references = {
        "task_source": row.get("task_source"),
        "agent_ref": agent.get("name") if isinstance(agent, dict) else agent,
        "taskset": str(task_id.get("taskset") or "").partition(":")[0],
    }
    return {key: str(value) for key, value in references.items() if value}


class RowSource(Protocol):
    """The rows to train on, batch by batch: FileRows, or those of kit/extras/generated_rows.py."""

    def batch(self, number: int, size: int, pass_rates: Mapping[str, float]) -> list[Task]:
        """Return the tasks of a batch. number: 1, 2, ... pass_rates: {row id: pass rate}.

        The result depends on the arguments alone, so a resumed run gets the same batches.
        """

    def count_file_rows(self, size: int) -> int:
        """Count the rows of a batch that come from files."""

    def generate_first(self, size: int) -> list[Task]:
        """Generate the rows of batch 1 that do not come from files, to check them early."""


@dataclass
class FileRows:
    """The rows of files. A sampler picks each batch."""

    tasks: list[Task]
    sampler: Callable[..., list[Task]]  # env.sampler: (tasks, size, batch, seed, pass_rates)
    seed: int

    def batch(self, number: int, size: int, pass_rates: Mapping[str, float]) -> list[Task]:
        """Return the tasks of a batch, as the sampler picks them."""
        return list(self.sampler(self.tasks, size, number, self.seed, pass_rates))

    def count_file_rows(self, size: int) -> int:
        """Count the rows of a batch that come from files: all."""
        return size

    def generate_first(self, size: int) -> list[Task]:
        """Generate nothing: all rows come from files."""
        return []
