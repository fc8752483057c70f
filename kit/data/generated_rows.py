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

Protects: a resumed run, from rows that a function generates in another way the second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import env
from env import DataError, Task
from kit.data.tasks import TaskLoader, make_unique
from kit.data.verl_rows import parse_row
from kit.errors import ConfigError, UserFunctionError
from kit.recipe import user_functions
from kit.recipe.entries import Entry


@dataclass(frozen=True)
class FunctionRows:
    """The rows of a function of env.train_files or env.val_files."""

    entry: Entry
    generate: Callable[[int, int, int, dict[int, dict[int, float]]], list[object]]
    loader: TaskLoader
    seed: int
    key: str = "env.train_files"

    def batch(self, number: int, size: int, pass_rates: Mapping[str, float]) -> list[Task]:
        """Generate the tasks of a batch. Raises UserFunctionError, DataError.

        pass_rates: by row id, of any rows.
        """
        file = self.entry.file
        rows = self.generate(number, size, self.seed, select_pass_rates(file, pass_rates))
        parsed = []
        for k, row in enumerate(rows):
            row_id = f"{file}#{number}.{k}"
            parsed.append((row_id, parse_row(row, row_id, self.loader.prompt_key)))
        loaded = self.loader.make_tasks(parsed, self.entry, Counter())
        if loaded.dropped:
            raise DataError(
                f"{self.key}: {loaded.dropped[0]} would be dropped, by data.max_prompt_length="
                f"{self.loader.max_prompt_length} or env.only_servers. Change these, or the "
                "function."
            )
        return loaded.tasks


def load_functions(
    entries: Iterable[Entry], key: str, loader: TaskLoader, seed: int
) -> list[FunctionRows]:
    """Load the functions among the entries of `key`. Raises UserFunctionError."""
    functions: list[FunctionRows] = []
    used: set[str] = set()
    for entry in entries:
        if entry.function:
            generate = user_functions.load_function(entry.function, key)
            named = entry._replace(file=make_unique(entry.file, used))
            functions.append(FunctionRows(named, generate, loader, seed, key))
    return functions


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


@dataclass
class RowSource:
    """The rows to train on, batch by batch: those of files, and those of functions.

    The rows of files are used once an epoch, or a sampler picks each batch. If there are functions,
    each file and function gets its share of a batch by its weight.
    """

    tasks: list[Task]  # of files
    sampler: Callable[..., list[Task]] | None  # env.sampler: (tasks, size, batch, seed, pass_rates)
    seed: int
    shuffle: bool = True  # data.shuffle, without a sampler
    functions: Sequence[FunctionRows] = ()

    def batch(
        self, number: int, size: int, start: int, pass_rates: Mapping[str, float]
    ) -> list[Task]:
        """Return the tasks of a batch: those of files, then those of each function.

        number: 1, 2, ... start: the rows of all earlier batches, which may have had another size.
        pass_rates: {row id: pass rate}. The result depends on the arguments alone, so a resumed run
        gets the same batches. Raises UserFunctionError, DataError.
        """
        quotas = self.compute_quotas(size, start)
        tasks: list[Task] = []
        of_files = size - sum(quotas.values())
        if of_files and self.sampler:
            tasks += self.sampler(self.tasks, of_files, number, self.seed, pass_rates)
        elif of_files:
            file_start = start - sum(self.compute_quotas(start).values())
            tasks += env.take_batch(self.tasks, of_files, file_start, self.seed, self.shuffle)
        for rows in self.functions:
            if quotas[rows.entry.file]:
                tasks += rows.batch(number, quotas[rows.entry.file], pass_rates)
        return tasks

    def file_share(self) -> float:
        """Return the share of the rows that come from files. Raises DataError."""
        if not self.functions:
            return 1.0
        if not self.tasks:
            return 0.0
        weights = {name: weight or 0.0 for name, weight in self.read_weights().items()}
        functions = sum(weights[rows.entry.file] for rows in self.functions)
        return 1 - functions / sum(weights.values())

    def compute_quotas(self, size: int, start: int = 0) -> dict[str, int]:
        """Compute how many rows of a batch each function gives. Raises DataError."""
        names = [rows.entry.file for rows in self.functions]
        if len(names) < 2 and not self.tasks:
            return dict.fromkeys(names, size)
        quotas = env.split_rows(self.read_weights(), size, start) if names else {}
        return {name: quotas[name] for name in names}

    def read_weights(self) -> dict[str, float | None]:
        """Return the weight of each function and file. Raises DataError."""
        weights = {rows.entry.file: rows.entry.weight for rows in self.functions}
        weights |= {task.file: task.weight for task in self.tasks}
        if len(weights) > 1 and not any(weights.values()):
            raise DataError(
                f"{next(iter(weights))}: a function next to other rows needs a share of each "
                "batch. Give each function and file a weight."
            )
        return weights

    def generate_first(self, size: int) -> list[Task]:
        """Generate the functions' rows of batch 1, twice, to check that they are the same.

        Raises ConfigError, UserFunctionError, DataError.
        """
        if self.sampler and self.functions and not self.tasks:
            raise ConfigError(
                "env.sampler picks rows of files, but env.train_files has functions only. "
                "Remove env.sampler."
            )
        quotas = self.compute_quotas(size)
        first: list[Task] = []
        for rows in self.functions:
            count = max(1, quotas[rows.entry.file])
            tasks = rows.batch(1, count, {})
            for one, other in zip(tasks, rows.batch(1, count, {}), strict=True):
                if one.row != other.row:
                    raise UserFunctionError(
                        f"{one.row_id} is not deterministic: it changed on a second call, so a run "
                        "could not resume. Use only batch and seed for randomness. See "
                        'docs/guides/curriculum.md, "3. Make a run that can be resumed".'
                    )
            first += tasks
        return first


def generate_once(
    entries: Iterable[Entry], key: str, loader: TaskLoader, seed: int, limit: int | None
) -> list[Task]:
    """Generate the rows of all functions of `key` for a command without batches.

    seed: data.seed. limit: the number of rows. Raises ConfigError, UserFunctionError, DataError.
    """
    tasks: list[Task] = []
    for rows in load_functions(entries, key, loader, seed):
        if not limit:
            limit_key = "env.max_rows" if key == "env.train_files" else "env.val_max_rows"
            raise ConfigError(
                f"{key}={rows.entry.file} generates any number of rows. Set {limit_key}."
            )
        tasks += rows.batch(0, limit, {})
    return tasks
