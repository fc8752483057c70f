"""Make the tasks of a recipe: read its rows, find the server of each row, encode the prompts.

files -> read_rows (verl_rows.py) -> env.render_row -> env.encode_messages -> tasks -> batches
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeGuard

import env
from env import DataError, Json, Task
from kit.data import fields
from kit.data.fingerprint import name_row
from kit.data.row_files import find_files, ignore, report_progress
from kit.data.verl_rows import TASK_ID, read_rows

ENTRY_KEYS = {"path", "weight", "server"}


class FileEntry(NamedTuple):
    """An entry of env.train_files or env.val_files. Its rows are one stream."""

    name: str  # the path, folder or pattern; if earlier entries have it, with (2), (3), ... added
    weight: float | None = None  # the share of each batch
    server: str = ""  # the server of all its rows; "": the row names it
    files: Mapping[str, str] = {}  # {name of a file in row ids, unique as `name` is: its path}


class LoadedTasks(NamedTuple):
    """The tasks of some files, and the rows that were dropped."""

    tasks: list[Task]
    dropped: list[str]  # rows whose prompt is too long, and counts of rows of other servers


def parse_entries(
    entries: Sequence[str | Json], report: Callable[[str], None] = ignore
) -> list[FileEntry]:
    """Parse entries, each a path or {path, weight, server}, and find their files.

    A path is a file, a folder or a pattern (`find_files`). Two entries may name the same file, each
    with its weight and server. report: of find_files. Raises DataError.
    """
    parsed: list[FileEntry] = []
    entry_names: set[str] = set()
    file_names: set[str] = set()
    for value in entries:
        entry: Json = dict(value) if isinstance(value, Mapping) else {"path": value}
        if not entry.get("path") or not entry.keys() <= ENTRY_KEYS:
            raise DataError(
                f"{entry}: an entry must be a path, or {{path, weight, server}}. Change it."
            )
        path = str(entry["path"])
        files = {
            make_unique(str(Path(file)), file_names): file for file in find_files(path, report)
        }
        name = make_unique(path, entry_names)
        parsed.append(FileEntry(name, read_weight(entry), str(entry.get("server") or ""), files))
    return parsed


def read_weight(entry: Json) -> float | None:
    """Return the weight of an entry, a positive finite number or None. Raises DataError."""
    weight = entry.get("weight")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 < weight < float("inf")):
        raise DataError(f"{entry}: a weight must be a number over 0. Change it.")
    return weight


def make_unique(name: str, used: set[str]) -> str:
    """Return a name, with (2), (3), ... added if it is in `used`, and add it to `used`.

    >>> used = {"a.jsonl"}
    >>> [make_unique("a.jsonl", used), make_unique("a.jsonl", used), make_unique("b.jsonl", used)]
    ['a.jsonl(2)', 'a.jsonl(3)', 'b.jsonl']
    """
    unique = name
    number = 1
    while unique in used:
        number += 1
        unique = f"{name}({number})"
    used.add(unique)
    return unique


def is_function(entry: str | Json) -> TypeGuard[Json]:
    """Whether an entry names a function that generates rows (kit/data/generated_rows.py)."""
    return isinstance(entry, Mapping) and "function" in entry


class PromptEncoder(Protocol):
    """kit.rollout.chat_template.ChatTemplate, as far as rows need it."""

    def with_arguments(self, arguments: Mapping[str, object], row_id: str) -> PromptEncoder:
        """Return the template with a row's own arguments. Raises DataError."""

    def list_unused(self, arguments: Mapping[str, object]) -> set[str]:
        """List the arguments that the template does not read."""

    def encode_prompt(
        self, messages: Sequence[Json], tools: Sequence[Json], row_id: str
    ) -> list[int]:
        """Encode the messages and tools of a prompt. Raises DataError."""


@dataclass(frozen=True)
class TaskLoader:
    """The settings by which all rows of a recipe become tasks."""

    template: PromptEncoder
    aliases: Mapping[str, str]  # {alias of a Gym server, or its name: its name}
    max_prompt_length: int  # tokens; rows with a longer prompt are dropped
    only_servers: Collection[str] | None = None  # None: the rows of all servers
    custom_verifiers: Collection[str] = ()  # names that FileEntry.server may have, too
    prompt_key: str = "prompt"  # data.prompt_key, of verl's rows
    report: Callable[[str], None] = ignore  # prints a line
    reported: set[tuple[str, str]] = field(default_factory=set)  # (entry, field that is not used)

    def load_files(self, entries: Sequence[str | Json]) -> LoadedTasks:
        """Load the tasks of all entries, in order, and report long waits. Raises DataError."""
        loaded = LoadedTasks([], [])
        copies: Counter[str] = Counter()
        for entry in parse_entries(entries, self.report):
            files = [read_rows(path, self.prompt_key, name) for name, path in entry.files.items()]
            rows = itertools.chain.from_iterable(files)
            tasks, dropped = self.make_tasks(
                report_progress(rows, entry.name, self.report), entry, copies
            )
            self.report_copies(tasks, entry.name)
            loaded.tasks.extend(tasks)
            loaded.dropped.extend(dropped)
        return loaded

    def make_tasks(
        self,
        rows: Iterable[tuple[str, Json]],
        entry: FileEntry,
        copies: Counter[str] | None = None,
    ) -> LoadedTasks:
        """Make tasks from (row id, Gym row). copies: of the rows before them. Raises DataError.

        A copy of an earlier problem shares its prompt, so that it takes little time. Rows in other
        folders share nothing, since relative paths of images begin there.
        """
        copies = Counter() if copies is None else copies
        tasks: list[Task] = []
        dropped: list[str] = []
        skipped = 0  # rows of other servers
        unused: Counter[str] = Counter()  # {field that is not used here: number of rows}
        first: dict[tuple[str, str], Task] = {}  # {folder and digest: the first task of a problem}
        for row_id, row in rows:
            server = self.find_server(row, row_id, entry.server)
            if server is None:
                skipped += 1
                continue
            key = name_row(row, copies)
            place = (row_id.rpartition("/")[0], key.partition("-")[0])
            if place in first:
                task = replace(first[place], row_id=row_id, row=row, server=server, key=key)
            else:
                task = replace(self.make_task(row, row_id, server, entry), key=key)
            unused.update(fields.list_unused(fields.walk_row(row)))
            if task.template_arguments:
                unused.update(self.template.list_unused(task.template_arguments))
            if len(task.prompt_ids) > self.max_prompt_length:
                dropped.append(f"{row_id} ({len(task.prompt_ids)} tokens)")
                continue
            first.setdefault(place, task)
            tasks.append(task)
        new = {f: count for f, count in unused.items() if (entry.name, f) not in self.reported}
        self.reported.update((entry.name, f) for f in new)
        if new:
            self.report(fields.describe_unused(new, entry.name))
        if skipped:
            dropped.append(f"{entry.name}: {skipped} rows of other servers")
        return LoadedTasks(tasks, dropped)

    def report_copies(self, tasks: Sequence[Task], name: str) -> None:
        """Report how many rows of an entry repeat earlier rows, if any do."""
        copies = len(tasks) - len({id(task.messages) for task in tasks})
        if copies:
            self.report(
                f"{name}: {copies:,} of {len(tasks):,} rows have the prompt and the answer of "
                "an earlier row, and each copy counts. To use each row once, remove the copies "
                "from the file."
            )

    def make_task(self, row: Json, row_id: str, server: str, entry: FileEntry) -> Task:
        """Make a task. It has no ids if the environment writes the prompt. Raises DataError."""
        messages, tools = env.render_row(row, row_id)
        env.check_end(messages, row_id)
        arguments = env.read_template_arguments(row, row_id)
        template = self.template.with_arguments(arguments, row_id) if arguments else self.template
        ids = template.encode_prompt(messages, tools, row_id) if messages else []
        return Task(
            row_id,
            row,
            server,
            messages,
            ids,
            tools,
            entry.name,
            entry.weight,
            template_arguments=arguments,
        )

    def find_server(self, row: Json, row_id: str, name: str) -> str | None:
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


def limit_rows(tasks: Sequence[env.T], limit: int | None) -> list[env.T]:
    """Take `limit` tasks: the first rows of each entry, in proportion to its weight or its rows.

    Each entry gives at least one row, and others replace what a short one lacks. Raises DataError
    if the limit is lower than the number of entries.
    """
    entries = Counter(task.file for task in tasks)  # their rows
    if limit is not None and limit < len(entries):
        raise DataError(
            f"A limit of {limit} rows leaves none of {list(entries)[limit]}. Raise env.max_rows or "
            "env.val_max_rows, or remove the entry."
        )
    taken = Counter[str]()
    due = []  # as in env.count_rows, with the first row of each entry at the time 0
    for task in tasks:
        due.append(taken[task.file] / (task.weight or entries[task.file]))
        taken[task.file] += 1
    chosen = sorted(range(len(tasks)), key=lambda place: due[place])[:limit]
    return [tasks[place] for place in sorted(chosen)]


def match_server(row: Json, aliases: Mapping[str, str], name: str = "") -> str | None:
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


def list_references(row: Json) -> dict[str, str]:
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
    """The rows to train on, batch by batch: FileRows, or those of kit/data/generated_rows.py."""

    def batch(
        self, number: int, size: int, start: int, pass_rates: Mapping[str, float]
    ) -> list[Task]:
        """Return the tasks of a batch. number: 1, 2, ... pass_rates: {row id: pass rate}.

        start: the rows of all earlier batches, which may have had another size. The result depends
        on the arguments alone, so a resumed run gets the same batches.
        """

    def file_share(self) -> float:
        """Return the share of the rows that come from files."""

    def generate_first(self, size: int) -> list[Task]:
        """Generate the rows of batch 1 that do not come from files, to check them early."""


@dataclass
class FileRows:
    """The rows of files. Each is used once an epoch, or a sampler picks each batch."""

    tasks: list[Task]
    sampler: Callable[..., list[Task]] | None  # env.sampler: (tasks, size, batch, seed, pass_rates)
    seed: int
    shuffle: bool = True  # data.shuffle, without a sampler

    def batch(
        self, number: int, size: int, start: int, pass_rates: Mapping[str, float]
    ) -> list[Task]:
        """Return the tasks of a batch, in order or as the sampler picks them."""
        if self.sampler is None:
            return env.take_batch(self.tasks, size, start, self.seed, self.shuffle)
        return list(self.sampler(self.tasks, size, number, self.seed, pass_rates))

    def file_share(self) -> float:
        """Return the share of the rows that come from files: all."""
        return 1.0

    def generate_first(self, size: int) -> list[Task]:
        """Generate nothing: all rows come from files."""
        return []
