"""Make the tasks of a recipe: read its rows, find the server of each row, encode the prompts.

files -> read_rows (verl_rows.py) -> env.render_row -> ChatTemplate.encode_prompt -> tasks

Protects: rewards, from a row that goes to another server, and shares, from rows that are dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import env
from env import DataError, Json, Task
from kit.chat.template import ChatTemplate
from kit.data import fields
from kit.data.fingerprint import digest_row, name_row
from kit.data.row_files import find_files, ignore, report_progress
from kit.data.verl_rows import TASK_ID, read_rows

if TYPE_CHECKING:
    from kit.recipe.entries import Entry


class LongRow(NamedTuple):
    """A row that was dropped, because its prompt is too long. tokens: of the prompt."""

    row_id: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.row_id} ({self.tokens} tokens)"


class LoadedTasks(NamedTuple):
    """The tasks of some files, and the rows that were dropped."""

    tasks: list[Task]
    dropped: list[LongRow | str]  # also counts of rows of other servers


def find_entry_files(
    entries: Iterable[Entry], report: Callable[[str], None] = ignore
) -> Iterator[tuple[Entry, dict[str, str]]]:
    """Yield each entry that names files, and these files: {name in row ids: path}.

    Two entries may name the same file, each with its weight and server, so the names of entries and
    files are made unique. report: of find_files. Raises DataError.
    """
    entry_names: set[str] = set()
    file_names: set[str] = set()
    for entry in entries:
        if not entry.function:
            found = find_files(entry.file, report)
            files = {make_unique(str(Path(file)), file_names): file for file in found}
            yield entry._replace(file=make_unique(entry.file, entry_names)), files


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


@dataclass(frozen=True)
class TaskLoader:
    """The settings by which all rows of a recipe become tasks."""

    template: ChatTemplate
    aliases: Mapping[str, str]  # {alias of a Gym server, or its name: its name}
    max_prompt_length: int  # tokens; rows with a longer prompt are dropped
    only_servers: Collection[str] | None = None  # None: the rows of all servers
    custom_verifiers: Collection[str] = ()  # names that Entry.server may have, too
    prompt_key: str = "prompt"  # data.prompt_key, of verl's rows
    tools: list[Json] = field(default_factory=list)  # of rows that have none, in a chat's format
    report: Callable[[str], None] = ignore  # prints a line
    reported: set[tuple[str, str]] = field(default_factory=set)  # (entry, field that is not used)

    def load_files(self, entries: Iterable[Entry]) -> LoadedTasks:
        """Load the rows of files, in order, and report long waits. Raises DataError."""
        loaded = LoadedTasks([], [])
        copies: Counter[str] = Counter()
        for entry, files in find_entry_files(entries, self.report):
            readers = [read_rows(path, self.prompt_key, name) for name, path in files.items()]
            rows = report_progress(chain.from_iterable(readers), entry.file, self.report)
            tasks, dropped = self.make_tasks(rows, entry, copies)
            repeated = len(tasks) - len({id(task.messages) for task in tasks})
            if repeated:
                self.report(
                    f"{entry.file}: {repeated:,} of {len(tasks):,} rows have the prompt and the "
                    "answer of an earlier row, and each copy counts. To use each row once, remove "
                    "the copies from the file."
                )
            loaded.tasks.extend(tasks)
            loaded.dropped.extend(dropped)
        return loaded

    def make_tasks(
        self, rows: Iterable[tuple[str, Json]], entry: Entry, copies: Counter[str]
    ) -> LoadedTasks:
        """Make tasks from (row id, Gym row). copies: of the rows before them. Raises DataError.

        A copy of an earlier problem shares its prompt, so that it takes little time. Rows in other
        folders share nothing, since relative paths of images begin there.
        """
        tasks: list[Task] = []
        dropped: list[LongRow | str] = []
        skipped = 0  # rows of other servers
        unused: Counter[str] = Counter()  # {field that is not used here: number of rows}
        first: dict[tuple[str, str], Task] = {}  # {folder and digest: the first task of a problem}
        for row_id, row in rows:
            server = self.find_server(row, row_id, entry.server)
            if server is None:
                skipped += 1
                continue
            digests = digest_row(row)
            key = name_row(digests.problem, copies)
            place = (row_id.rpartition("/")[0], digests.problem)
            task = first.get(place) or self.make_task(row, row_id, entry)
            task = replace(task, row_id=row_id, row=row, server=server, key=key, digest=digests.row)
            unused.update(fields.list_unused(fields.walk_row(row)))
            if task.template_arguments:
                unused.update(self.template.list_unused(task.template_arguments))
            if len(task.prompt_ids) > self.max_prompt_length:
                dropped.append(LongRow(row_id, len(task.prompt_ids)))
            else:
                first.setdefault(place, task)
                tasks.append(task)
        if skipped:
            dropped.append(f"{entry.file}: {skipped} rows of other servers")
        self.report_unused(unused, entry.file)
        return LoadedTasks(tasks, dropped)

    def report_unused(self, counts: Mapping[str, int], name: str) -> None:
        """Report the fields of an entry that are not used, each once. counts: of their rows."""
        new = {key: count for key, count in counts.items() if (name, key) not in self.reported}
        self.reported.update((name, key) for key in new)
        if new:
            self.report(fields.describe_unused(new, name))

    def make_task(self, row: Json, row_id: str, entry: Entry) -> Task:
        """Make a task, without its server. It has no ids if the environment writes the prompt.

        Raises DataError.
        """
        messages, tools = env.render_row(row, row_id)
        tools = tools or self.tools
        env.check_end(messages, row_id)
        arguments = env.read_template_arguments(row, row_id)
        template = self.template.with_arguments(arguments, row_id) if arguments else self.template
        images = template.processor.read_images(messages, row_id)
        ids = template.encode_prompt(messages, tools, row_id, images=images) if messages else []
        return Task(
            row_id,
            row,
            "",
            messages,
            ids,
            tools,
            entry.file,
            entry.weight,
            template_arguments=arguments,
            images=images,
        )

    def find_server(self, row: Json, row_id: str, name: str) -> str | None:
        """Find the server of a row, or None if only_servers does not have it. Raises DataError."""
        is_custom = name in self.custom_verifiers
        server = name if is_custom else match_server(row, self.aliases, name)
        if self.only_servers is not None:
            return server if server in self.only_servers else None
        if server is None:
            references = {"server": name} if name else list_references(row)
            named = ", ".join(f"{key} {value!r}" for key, value in references.items())
            servers = ", ".join(sorted(set(self.aliases.values()))) or "none"
            raise DataError(
                f"{row_id}: the row names {named or 'no server'}, and the recipe has these Gym "
                f"servers: {servers}. {describe_missing_server(list(references.values()))} "
                'See docs/environments.md, "Which server a row uses".'
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


def describe_missing_server(references: Sequence[str]) -> str:
    """Return what to do about a row of another server. references: to it, the best first."""
    if not references:
        return "Set `server:` of its file in env.train_files."
    name = re.sub(r"(_simple)?_agent$", "", references[0])  # Gym's agents have their server's name
    return f"Add 'gym.servers.{name}={{start: {{}}}}'."


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
