"""Load a run directory into pandas: its steps, its episodes, and the advantages of each token.

The report and the command `show` use it. It also works in a notebook:

    from lab.report.run_data import RunData
    RunData(Path("runs/math_cpu")).steps["rollout/reward/mean"].plot()
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from kit.config.recipe_text import read_saved
from kit.config.redaction import without_settings
from kit.data.episode import SAMPLED_IDS
from kit.data.json_lines import read_metrics, read_objects
from kit.data.metrics import FAILED_AS_0, HIGH, LOW, name_test_set
from kit.data.rollout_files import read_records, read_scale
from kit.errors import ConfigError
from kit.runs import files

# Limits on the rollout files that are read. 64 MiB takes 3 s. The last step and the last
# evaluation are always read, whatever their size.
MAX_ROLLOUT_BYTES = 64 * 2**20
MAX_EPISODES = 20_000  # of all files; at most a quarter of them from one file
NO_STEP = -1  # the step of episodes whose file name has no step number


def is_accuracy(name: str) -> bool:
    """Whether a metric is mean@n of acc, without the failed episodes that count as 0."""
    return "/acc/mean@" in name and not name.endswith((FAILED_AS_0, LOW, HIGH))


class SavedEpisode(NamedTuple):
    """One line of a rollout file.

    file: the name of the file without its suffix. step: its number, or NO_STEP.
    """

    file: str
    step: int
    record: dict[str, Any]


class EpisodeRow(NamedTuple):
    """One row of `RunData.episodes`.

    record_index: task index and rollout index, the key of `RunData.read_advantages`.
    reward: the verifier's; NaN if the episode failed. is_right: whether it is the full one.
    seconds: the sum of all timings.
    """

    file: str
    step: int
    record_index: tuple[int, int]
    row_id: str
    group: str
    server: str
    test_set: str
    prompt: str
    response: str
    reward: float
    is_right: bool
    reward_components: dict[str, float]
    status: str
    error: str
    ended: str
    prompt_tokens: int
    tokens: int
    turns: int
    tool_calls: int
    seconds: float


class RunData:
    """The data that a run has written so far. Raises ConfigError if `path` is not a run directory.

    If the rollout files exceed MAX_ROLLOUT_BYTES or MAX_EPISODES, the most useful ones are read:
    the last step, the last evaluation and the first evaluation. The other files follow in the order
    of `spread_evenly`. `skipped_files` counts the files that are not read.

    config: the recipe. config_text: the same as YAML text, without settings of servers.
    unreadable: a message for each file that could not be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name
        self.config: dict[str, Any] = read_saved(find_config(path))
        try:
            self.config_text = yaml.safe_dump(without_settings(self.config), sort_keys=False)
        except RecursionError:
            raise ConfigError(f"{path}: the recipe is too deep. Name another run.") from None
        self.unreadable: list[str] = []
        self.skipped_files = 0

    def get_setting(self, key: str) -> Any:
        """Return the value of a dotted key of the recipe; None if the recipe does not have it."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per step, one column per metric (docs/reference.md), and `time` in seconds.

        NaN if a step does not have the metric, or has another value than a number.
        """
        lines = read_metrics(self.path / "metrics.jsonl")
        frame = pd.DataFrame(lines or [{"step": 0}]).drop(columns="command", errors="ignore")
        numbers = frame.apply(pd.to_numeric, errors="coerce")
        return numbers.groupby("step").last().astype(float)

    @cached_property
    def sampled_steps(self) -> pd.DataFrame:
        """The rows of `steps` that sampled episodes for training."""
        return self.steps[self.get_metric("rollout/episodes").notna()]

    def get_metric(self, name: str) -> pd.Series:
        """Return a metric over all steps; all NaN if no step has it."""
        missing = pd.Series(np.nan, self.steps.index, name=name)
        return self.steps.get(name, missing)

    @cached_property
    def records(self) -> list[SavedEpisode]:
        """The episodes that were read, ordered by step."""
        episodes: list[SavedEpisode] = []
        paths = self._rollout_files_by_priority()
        size = 0
        for number, path in enumerate(paths):
            size += path.stat().st_size
            is_too_much = size > MAX_ROLLOUT_BYTES and number > 1
            if is_too_much or len(episodes) >= MAX_EPISODES:
                self.skipped_files = len(paths) - number
                break
            episodes += self._read_rollout_file(path)
        if not any((self.path / "rollouts").glob("*")):
            episodes += self._read_failures()
        episodes = episodes[:MAX_EPISODES]
        return sorted(episodes, key=lambda episode: episode.step)

    def _read_rollout_file(self, path: Path) -> Iterator[SavedEpisode]:
        suffix = path.stem.rpartition("_")[2]
        step = int(suffix) if suffix.isdigit() else NO_STEP
        try:
            for _, record in itertools.islice(read_records(path), MAX_EPISODES // 4):
                yield SavedEpisode(path.stem, step, record)
        except ConfigError as error:  # of another format
            self.unreadable.append(str(error).partition(". ")[0])

    def _read_failures(self) -> Iterator[SavedEpisode]:
        """Read failures.jsonl: `rollout` and `evaluate` write failed episodes only there."""
        for episode in read_objects(self.path / "failures.jsonl"):
            file = episode.pop("rollout")
            record = {"_episode": episode, "response": {"output": []}}
            yield SavedEpisode(file, NO_STEP, record)

    def _rollout_files_by_priority(self) -> list[Path]:
        steps = self._numbered_rollout_files("step")
        evaluations = self._numbered_rollout_files("val")
        others = [self.path / f"{name}.jsonl" for name in ("evaluation", "rollouts")]
        paths = [*steps[-1:], *evaluations[-1:]]
        paths += [path for path in others if path.is_file()]
        paths += evaluations[:1]
        paths += spread_evenly(evaluations)
        paths += spread_evenly(steps)
        return list(dict.fromkeys(paths))

    def _numbered_rollout_files(self, kind: str) -> list[Path]:
        """List rollouts/<kind>_N.jsonl in the order of N.

        Leaves out files that are more than one step after the last metrics: a resumed run has
        replaced those steps. A run may have ended during the step after the last metrics.
        """
        last_step = int(self.steps.index.max()) + 1
        paths = {}
        for path in (self.path / "rollouts").glob(f"{kind}_*.jsonl"):
            number = path.stem.removeprefix(f"{kind}_")
            if number.isdigit() and int(number) <= last_step:
                paths[int(number)] = path
        return [paths[number] for number in sorted(paths)]

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """One row per episode of `records`, in the same order, with the columns of EpisodeRow.

        `best` and `worst` are the ranks by reward in the episode's file; NaN without a reward.
        """
        rows = [make_row(episode) for episode in self.records]
        frame = pd.DataFrame(rows, columns=EpisodeRow._fields)
        rewards = frame.groupby("file")["reward"]
        frame["best"] = rewards.rank(ascending=False, method="first")
        frame["worst"] = rewards.rank(method="first")
        return frame

    def read_advantages(self, step: int) -> dict[tuple[int, int], np.ndarray]:
        """Read the advantages of a step: {(task index, rollout index): array}; empty if not saved.

        An array has one value per sampled token, or a single value that holds for all of them.
        """
        path = self.path / "advantages" / f"step_{step}.npz"
        if not path.is_file():
            return {}
        try:
            with files.open_arrays(path) as file:
                ends = np.cumsum(file["lengths"])
                values = np.split(file["values"], ends[:-1])
                indices = [tuple(index) for index in file["record_index"].tolist()]
                return dict(zip(indices, values, strict=True))
        except (OSError, ValueError, zipfile.BadZipFile) as error:  # a kill left it incomplete
            self.unreadable.append(f"{path.name}: {error!r:.80}")
            return {}


def find_config(folder: Path) -> Path:
    """Return the file with the recipe of a run directory. Raises ConfigError if there is none."""
    for name in ("config.yaml", "evaluate.yaml", "rollout.yaml"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{folder} is not a run directory: it has no config.yaml. Pass a directory of runs/."
    )


def make_row(saved: SavedEpisode) -> EpisodeRow:
    """Convert a record to its row of `RunData.episodes`."""
    record = saved.record
    episode = record["_episode"]
    output = record["response"]["output"]
    reward = episode["reward"]
    return EpisodeRow(
        file=saved.file,
        step=saved.step,
        record_index=(record.get("_ng_task_index", -1), record.get("_ng_rollout_index", -1)),
        row_id=episode["row_id"],
        group=episode["group_id"],
        server=episode["server"],
        test_set=name_test_set(record, episode["server"]),
        prompt=replace_surrogates(episode["prompt"]),
        response=replace_surrogates(episode["answer"]),
        reward=np.nan if reward is None else reward,
        is_right=reward is not None and read_scale(episode).is_full(reward),
        reward_components=record.get("reward_components") or {},
        status=episode["status"],
        error=replace_surrogates(episode["error"]),
        ended=episode["ended"],
        prompt_tokens=episode["prompt_tokens"],
        tokens=episode["response_tokens"],
        turns=sum(bool(item.get(SAMPLED_IDS)) for item in output),
        tool_calls=sum(item.get("type") == "function_call" for item in output),
        seconds=sum(episode["timings"].values()),
    )


def replace_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair by "?": pandas accepts only valid UTF-8."""
    return text.encode(errors="replace").decode()


def spread_evenly(files: Sequence[Path]) -> Iterator[Path]:
    """Yield all files, in an order in which the first k are spread evenly over the run.

    The first pass yields files that are far apart. Each later pass halves the distance, until it is
    one file. A file may be yielded more than once.
    """
    stride = 1
    while stride < len(files):
        stride *= 2
    while stride:
        yield from files[::stride]
        stride //= 2


def get_sampled_ids(record: dict[str, Any]) -> list[int]:
    """Return the token ids that the policy sampled in an episode, of all turns."""
    ids: list[int] = []
    for item in record["response"]["output"]:
        ids += item.get(SAMPLED_IDS) or []
    return ids
