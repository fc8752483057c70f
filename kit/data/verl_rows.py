"""Rows of other shapes: verl's, as its own scripts write them, and those that a function makes as a run goes on.

A row of verl's (its RLHFDataset: `prompt`, `data_source`, `reward_model`, `extra_info`) becomes a Gym row whose input
is the prompt, and which has all else at its top level, as it was: a verifier finds verl's fields, and back is the same.

A function in env.train_files, `{function: my_tasks.py:rows, weight: 1, server: name, its settings}`:

    rows(batch, size, seed, pass_rates, **settings) -> a list of `size` rows, Gym's or verl's

batch: of prompts, 1, 2, ... of the run; 0 where rows are asked for once (`rollout`, env.val_files; `size` is then
env.max_rows or env.val_max_rows). seed: data.seed. pass_rates: {earlier batch: {k: pass rate of its row k}}, the
fraction of answers with a reward of 1 or more. Of its arguments alone, so draw from random.Random(f"{seed} {batch}"):
then a resumed run makes what it would have made, and nothing has to be saved. Its rows are called
`my_tasks.py:rows#BATCH.K`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import env
from env import DataError, Refused, Task
from kit.config import user_functions
from kit.errors import ConfigError, PluginError

OURS = (
    "function",
    "weight",
    "server",
    "verifier",
)  # the kit's keys beside a function; all others are its settings
GYM_ROW = "gym_row"  # in extra_info: the Gym row, as JSON, of which a row of verl's was made


# --- verl's --------------------------------------------------------------------------------------


def read(path: str, prompt_key: str = "prompt") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, Gym row) of a file of Gym's or verl's rows. prompt_key: as verl's. Raises DataError."""
    return ((where, parse(raw, where, prompt_key)) for where, raw in env.raw_rows(path, prompt_key))


def parse(raw: Any, where: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """JSON text or a dict, Gym's or verl's -> a Gym row. Raises DataError, Refused."""
    row = env.parse_json(raw, where)
    if prompt_key in row and "responses_create_params" not in row:
        return from_verl(row, where, prompt_key)
    if "responses_create_params" not in row:
        needed = (
            f"neither Gym's responses_create_params nor verl's `{prompt_key}` (data.prompt_key)"
        )
        raise DataError(
            f"{where}: {needed}; it has {', '.join(row) or 'nothing'} (chats go to `sft`)"
        )
    return env.parse_row(row, where)


def from_verl(row: dict[str, Any], where: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """verl's row -> a Gym row; the Gym row again where `to_verl` made it of one. Raises DataError, Refused.

    >>> from_verl({"data_source": "openai/gsm8k", "prompt": "2 + 2?", "reward_model": {"ground_truth": "4"}}, "x:1")[
    ...     "responses_create_params"
    ... ]
    {'input': '2 + 2?'}
    """
    prompt, rest = row[prompt_key], {key: value for key, value in row.items() if key != prompt_key}
    if not prompt or not isinstance(prompt, str | list):
        told = "null" if prompt is None else f"{prompt!r:.40}"
        raise DataError(f"{where}: `{prompt_key}` is {told}; it must be text, or chat messages")
    for key in ("images", "videos", "audios"):
        if rest.get(key):
            raise Refused(f"{where}: {key}: the kit trains text models only; leave such rows out")
    if any(isinstance(said, dict) and said.get("tool_calls") for said in prompt):
        raise Refused(
            f"{where}: tool_calls in `{prompt_key}`; write them as function_call items of a Gym row"
        )
    extra = rest.get("extra_info")
    if not isinstance(extra, dict) or not isinstance(extra.get(GYM_ROW), str):
        return {"responses_create_params": {"input": prompt}, **rest}
    made = env.parse_row(extra[GYM_ROW], where)
    if prompt != env.render(made, where)[0]:
        raise DataError(
            f"{where}: `{prompt_key}` is not that of extra_info.{GYM_ROW}; take {GYM_ROW} out to use it"
        )
    return made


def to_verl(row: dict[str, Any], where: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """A Gym row -> verl's: that of which it came, or one made for it, which carries it in extra_info.gym_row.

    A row made so has its server as data_source, and expected_answer or answer as the ground truth. Raises DataError,
    Refused for what verl's rows cannot hold.
    """
    rest = {key: value for key, value in row.items() if key != "responses_create_params"}
    if (
        "agent_ref" not in row
        and prompt_key not in row
        and {"data_source", "reward_model"} & {*row}
    ):
        verls = {prompt_key: row["responses_create_params"].get("input"), **rest}
        with contextlib.suppress(DataError):
            if from_verl(verls, where, prompt_key) == row:
                return verls
    messages, tools = env.render(row, where)
    if tools or any(said.keys() != {"role", "content"} for said in messages):
        raise Refused(f"{where}: tools, which verl's rows do not hold; leave such rows out")
    if any(isinstance(said["content"], list) for said in messages):
        raise Refused(f"{where}: images, which verl's rows hold otherwise; leave such rows out")
    if not messages:
        raise Refused(
            f"{where}: its environment writes the prompt, which verl has not; leave such rows out"
        )
    agent = row.get("agent_ref") or {}
    source = str((agent.get("name") if isinstance(agent, dict) else agent) or "gym").removesuffix(
        "_simple_agent"
    )
    truth = next(
        (row[key] for key in ("expected_answer", "answer") if row.get(key) is not None), ""
    )
    truth = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    made = {
        "data_source": source,
        prompt_key: messages,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }
    return made | {"extra_info": {GYM_ROW: json.dumps(row, ensure_ascii=False)}}


# --- made on the fly -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A function of env.train_files or val_files, and its share of every batch; an env.Weighted."""

    file: str  # its rows' name: path.py:function, with (2), (3), ... where the recipe has it again
    weight: float | None
    server: str
    key: str  # of the recipe
    function: Callable[[int, int, int, Mapping[int, Any]], list[Any]]


def split(entries: Sequence[Any], key: str) -> tuple[list[Any], list[Made]]:
    """What env.train_files or val_files name -> (files, functions). Raises PluginError, DataError."""
    files = [entry for entry in entries if not (isinstance(entry, Mapping) and "function" in entry)]
    made: list[Made] = []
    for entry in (entry for entry in entries if isinstance(entry, Mapping) and "function" in entry):
        weight, server = entry.get("weight"), str(entry.get("server") or "")
        if not (weight is None or (isinstance(weight, int | float) and 0 < weight < float("inf"))):
            raise DataError(f"{key}: {dict(entry)}: a weight must be more than 0")
        settings = {name: value for name, value in entry.items() if name not in OURS}
        function = user_functions.load({"function": entry["function"], **settings}, key)
        again = sum(m.file.partition("(")[0] == entry["function"] for m in made)
        name = f"{entry['function']}({again + 1})" if again else str(entry["function"])
        made.append(Made(name, weight, server, key, function))
    return files, made


def make(
    made: Made,
    batch: int,
    size: int,
    seed: int,
    pass_rates: Mapping[str, float],
    load: Callable[..., Any],
    key: str,
) -> list[Task]:
    """The function's rows of a batch, as tasks. pass_rates: by row id, of whatever rows. load: env.load_tasks, but for
    the files and `read`. key: verl's prompt_key. Raises PluginError, DataError."""
    rows = made.function(batch, size, seed, history(made.file, pass_rates))
    first: dict[int, int] = {}
    for k, row in enumerate(rows):
        if first.setdefault(id(row), k) != k:
            why = f"rows {first[id(row)]} and {k} of batch {batch} are one and the same object; make a new one for each"
            raise PluginError(f"{made.key}={made.file}: {why}")
    places = [f"{made.file}#{batch}.{k}" for k in range(size)]
    parsed = [(where, parse(row, where, key)) for where, row in zip(places, rows, strict=True)]
    entry = {"path": made.file, "weight": made.weight, "server": made.server}
    tasks, dropped = load([entry], read=lambda _: parsed)
    if dropped:
        long = "over data.max_prompt_length; make shorter prompts, or raise that"
        why = (
            long
            if dropped[0].endswith("tokens)")
            else "env.only_servers leaves them out; name their server there"
        )
        raise DataError(f"{made.key}: {dropped[0]}: {why}")
    return list(tasks)


def history(file: str, pass_rates: Mapping[str, float]) -> dict[int, dict[int, float]]:
    """Pass rates by row id -> those of a function's rows, {batch: {k: rate}}.

    >>> history("t.py:rows", {"t.py:rows#1.0": 0.5, "t.py:rows#1.1": 1.0, "a.jsonl:3": 0.0})
    {1: {0: 0.5, 1: 1.0}}
    """
    found: dict[int, dict[int, float]] = {}
    for row_id, rate in pass_rates.items():
        name, _, place = row_id.rpartition("#")
        if name == file:
            batch, _, k = place.partition(".")
            found.setdefault(int(batch), {})[int(k)] = rate
    return found


def shares(made: Sequence[Made], tasks: Sequence[Task], size: int) -> dict[str, int]:
    """name -> its rows in a batch, of functions and files. Raises DataError."""
    if len(made) == 1 and not tasks:
        return {made[0].file: size}
    sources: list[env.Weighted] = [*made, *tasks]
    if not any(source.weight for source in sources):
        way_out = "a function has no share of a batch beside other rows; give each function and file a weight"
        raise DataError(f"{made[0].file}: {way_out}")
    return env.quotas(sources, size)


def draw(
    tasks: list[Task],
    size: int,
    batch: int,
    seed: int,
    pass_rates: Mapping[str, float],
    *,
    made: Sequence[Made],
    sampler: Callable[..., list[Task]],
    tasks_of: Callable[..., list[Task]],
) -> list[Task]:
    """env.sampler where there are functions, too: of `tasks` what `sampler` picks, then what each of `made` makes.
    tasks_of: `make`, but for its last arguments. Raises as `make` and `shares`."""
    counts = shares(made, tasks, size)
    ours = sum(counts[source.file] for source in made)
    picked = list(sampler(tasks, size - ours, batch, seed, pass_rates)) if size > ours else []
    for source in made:
        picked += tasks_of(source, batch, counts[source.file], seed, pass_rates)
    return picked


def once(
    made: Sequence[Made],
    rows: int | None,
    limit: str,
    seed: int,
    tasks_of: Callable[..., list[Task]],
) -> list[Task]:
    """Rows of functions where no batches are: `rows` of each. limit: the key that says how many. Raises ConfigError."""
    if made and not rows:
        raise ConfigError(
            f"{made[0].key}={made[0].file} makes rows without end; set {limit}, how many to take"
        )
    return [task for source in made for task in tasks_of(source, 0, rows, seed, {})]


def first(
    made: Sequence[Made], counts: Mapping[str, int], seed: int, tasks_of: Callable[..., list[Task]]
) -> list[Task]:
    """What the functions make for batch 1, twice the same. Raises PluginError, also where it is not."""
    batch, again = (
        [t for m in made for t in tasks_of(m, 1, counts[m.file], seed, {})] for _ in range(2)
    )
    for a, b in zip(batch, again, strict=True):
        if a.row != b.row:
            why = "is another when it is made again, so that no run could resume; draw from its batch and seed alone"
            raise PluginError(f"{a.row_id} {why}")
    return batch
