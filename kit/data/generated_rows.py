"""Rows that a Python function generates, batch by batch, while a run trains.

An entry of env.train_files or env.val_files names the function:

    {function: my_tasks.py:rows, weight: 1, server: name, and its settings}

    rows(batch, size, seed, pass_rates, **settings) -> a list of `size` rows of Gym or verl

- batch: the number of the batch of prompts, 1, 2, ... of the run. It is 0 if the rows are generated
  only once, for `rollout` and env.val_files; size is then env.max_rows or env.val_max_rows.
- seed: data.seed.
- pass_rates: {earlier batch: {k: pass rate of its row k}}. A pass is a full reward.

The rows must depend on these arguments alone, so use random.Random(f"{seed} {batch}"). Then a
resumed run generates the same rows, and nothing needs to be saved. A row's id is
`my_tasks.py:rows#BATCH.K`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

import env
from env import DataError, Json, Task
from kit.config import user_functions
from kit.data.tasks import (
    FileEntry,
    FileRows,
    RowSource,
    TaskLoader,
    is_function,
    make_unique,
    read_weight,
)
from kit.data.verl_rows import parse_row
from kit.errors import ConfigError, UserFunctionError

ENTRY_KEYS = ("function", "weight", "server", "verifier")  # all other keys are settings
LIMIT_KEYS = {"env.train_files": "env.max_rows", "env.val_files": "env.val_max_rows"}


@dataclass(frozen=True)
class FunctionEntry:
    """A function of env.train_files or env.val_files, and its share of each batch."""

    file: str  # path.py:function; if entries repeat a function, with (2), (3), ... at the end
    weight: float | None
    server: str
    key: str  # env.train_files or env.val_files
    function: Callable[[int, int, int, dict[int, dict[int, float]]], list[object]]


# --- the recipe -----------------------------------------------------------------------------------


def parse_functions(entries: Sequence[str | Json], key: str) -> list[FunctionEntry]:
    """Load the functions among the entries of `key`. Raises UserFunctionError, DataError."""
    functions: list[FunctionEntry] = []
    used: set[str] = set()
    for entry in entries:
        if not is_function(entry):
            continue
        name = str(entry["function"])
        settings = {key: value for key, value in entry.items() if key not in ENTRY_KEYS}
        function = user_functions.load_function({"function": name, **settings}, key)
        server = str(entry.get("server") or "")
        file = make_unique(name, used)
        functions.append(FunctionEntry(file, read_weight(entry), server, key, function))
    return functions


# --- sources of rows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionRows:
    """The rows of one function."""

    entry: FunctionEntry
    loader: TaskLoader
    seed: int

    def batch(self, number: int, size: int, pass_rates: Mapping[str, float]) -> list[Task]:
        """Generate the tasks of a batch. Raises UserFunctionError, DataError.

        pass_rates: by row id, of any rows.
        """
        file = self.entry.file
        rows = self.entry.function(number, size, self.seed, select_pass_rates(file, pass_rates))
        parsed = []
        for k, row in enumerate(rows):
            row_id = f"{file}#{number}.{k}"
            parsed.append((row_id, parse_row(row, row_id, self.loader.prompt_key)))
        entry = FileEntry(file, self.entry.weight, self.entry.server)
        loaded = self.loader.make_tasks(parsed, entry)
        if loaded.dropped:
            raise DataError(
                f"{self.entry.key}: {loaded.dropped[0]} would be dropped, by "
                "data.max_prompt_length or env.only_servers. Change these, or the function."
            )
        return loaded.tasks


def select_pass_rates(file: str, pass_rates: Mapping[str, float]) -> dict[int, dict[int, float]]:
    """Select the pass rates of a function's rows: {batch: {k: rate}}.

    >>> select_pass_rates("t.py:f", {"t.py:f#1.0": 0.5, "t.py:f#1.1": 1.0, "a.jsonl:3": 0.0})
    {1: {0: 0.5, 1: 1.0}}
    """
    selected: dict[int, dict[int, float]] = {}
    for row_id, rate in pass_rates.items():
        name, _, number = row_id.rpartition("#")
        if name == file:
            batch, _, k = number.partition(".")
            selected.setdefault(int(batch), {})[int(k)] = rate
    return selected


@dataclass(frozen=True)
class MixedRows:
    """The rows of one or more functions, and those of files, if there are any.

    Each file and function gets its share of a batch by its weight.
    """

    files: FileRows
    functions: list[FunctionRows]

    def batch(
        self, number: int, size: int, start: int, pass_rates: Mapping[str, float]
    ) -> list[Task]:
        """Return the tasks of a batch: those of files, then those of each function."""
        quotas = self.compute_quotas(size, start)
        before = self.compute_quotas(start)
        names = {rows.entry.file for rows in self.functions}
        of_files = sum(count for name, count in quotas.items() if name not in names)
        file_start = sum(count for name, count in before.items() if name not in names)
        tasks: list[Task] = []
        if of_files:
            tasks = self.files.batch(number, of_files, file_start, pass_rates)
        for rows in self.functions:
            if quotas[rows.entry.file]:
                tasks += rows.batch(number, quotas[rows.entry.file], pass_rates)
        return tasks

    def file_share(self) -> float:
        """Return the share of the rows that come from files. Raises DataError."""
        weights = {source.file: source.weight or 0.0 for source in self.list_sources()}
        functions = sum(weights[rows.entry.file] for rows in self.functions)
        return 1 - functions / sum(weights.values()) if self.files.tasks else 0.0

    def compute_quotas(self, size: int, start: int = 0) -> dict[str, int]:
        """Compute how many rows of a batch each file and function gives. Raises DataError."""
        sources = self.list_sources()
        if len(sources) == 1:
            return {sources[0].file: size}
        return env.compute_quotas(sources, size, start)

    def list_sources(self) -> list[env.Weighted]:
        """List the functions and the rows of files, which have weights. Raises DataError."""
        entries = [rows.entry for rows in self.functions]
        sources: list[env.Weighted] = [*entries, *self.files.tasks]
        if len(sources) > 1 and not any(source.weight for source in sources):
            raise DataError(
                f"{entries[0].file}: a function next to other rows needs a share of each batch. "
                "Give each function and file a weight."
            )
        return sources

    def generate_first(self, size: int) -> list[Task]:
        """Generate the functions' rows of batch 1, twice, to check that they are the same.

        Raises UserFunctionError, DataError.
        """
        quotas = self.compute_quotas(size)
        first: list[Task] = []
        second: list[Task] = []
        for tasks in (first, second):
            for rows in self.functions:
                tasks += rows.batch(1, max(1, quotas[rows.entry.file]), {})
        for one, other in zip(first, second, strict=True):
            if one.row != other.row:
                raise UserFunctionError(
                    f"{one.row_id} is not deterministic: it changed on a second call, so a run "
                    "could not resume. Use only batch and seed for randomness. "
                    'See docs/guides/curriculum.md, "3. Make a run that can be resumed".'
                )
        return first


# --- a run or a command ---------------------------------------------------------------------------


def make_row_source(
    config: DictConfig, entries: Sequence[str | Json], files: FileRows, loader: TaskLoader
) -> RowSource:
    """Make the source of the rows to train on, from the entries of env.train_files.

    Raises ConfigError, UserFunctionError, DataError.
    """
    parsed = parse_functions(entries, "env.train_files")
    if not parsed:
        return files
    if config.env.sampler and len(parsed) == len(entries):
        raise ConfigError(
            "env.sampler picks rows of files, but env.train_files has functions only. "
            "Remove env.sampler."
        )
    seed = config.data.seed
    return MixedRows(files, [FunctionRows(entry, loader, seed) for entry in parsed])


def generate_once(
    config: DictConfig, entries: Sequence[str | Json], key: str, loader: TaskLoader
) -> list[Task]:
    """Generate the rows of all functions of `key` for a command without batches.

    Raises ConfigError, UserFunctionError, DataError.
    """
    limit = OmegaConf.select(config, LIMIT_KEYS[key])
    tasks: list[Task] = []
    for entry in parse_functions(entries, key):
        if not limit:
            raise ConfigError(
                f"{key}={entry.file} generates any number of rows. Set {LIMIT_KEYS[key]}."
            )
        tasks += FunctionRows(entry, loader, config.data.seed).batch(0, limit, {})
    return tasks
