"""The reader of a run folder: the recipe, metrics, scores, episodes and advantages of a run.

Each part is read when it is first used, and once. It also works in a notebook:

    from lab.run_folder import RunFolder
    RunFolder(Path("runs/math_cpu")).steps["rollout/reward/mean"].plot()
"""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.lib.npyio import NpzFile

from env import Json, drop_nulls
from kit.data.episode import SAMPLED_IDS
from kit.data.fingerprint import Fingerprint, hash_contents, hash_json, hash_problem
from kit.data.ground_truths import find_ground_truth, is_empty
from kit.data.json_lines import read_steps
from kit.data.metrics import ALL_TOKENS, FAILED_AS_0, HIGH, LOW, name_test_set
from kit.data.rollout_files import read_records, read_scale
from kit.errors import ConfigError
from kit.recipe.recipe_text import read_saved
from kit.run import checkpoints, identity

# Limits on the rollout files that are read. 64 MiB takes 3 s. The last step and the last
# evaluation are always read, whatever their size.
MAX_ROLLOUT_BYTES = 64 * 2**20
MAX_ARRAY_BYTES = 2**28  # of an .npz file, unpacked
MAX_EPISODES = 20_000  # of all files; at most a quarter of them from one file
NO_STEP = -1  # the step of episodes whose file name has no step number
CONFIGS = ("config.yaml", "evaluate.yaml", "rollout.yaml")  # of train and sft, evaluate, rollout
MODEL_PATH = "actor_rollout_ref.model.path"
ADAPTER_PATH = "actor_rollout_ref.model.lora_adapter_path"
STEP = "timing_s/step"
SAVE = "timing_s/save_checkpoint"

# {name_record of a problem: acc and reward of its verified responses}
Scores = dict[str, list[dict[str, float]]]


class SavedEpisode(NamedTuple):
    """One line of a rollout file.

    file: the name of the file without its suffix. step: its number, or NO_STEP.
    """

    file: str
    step: int
    record: Json


class EpisodeRow(NamedTuple):
    """One row of `RunFolder.episodes`.

    record_index: task index and rollout index, the key of `RunFolder.read_advantages`.
    reward: the verifier's; NaN if the episode failed. is_right: whether it is the full one.
    seconds: the sum of all timings.
    """

    file: str
    step: int
    record_index: tuple[int, int]
    row_id: str
    group: str
    server: str
    prompt: str
    response: str
    reward: float
    is_right: bool
    reward_components: dict[str, float]
    status: str
    ended: str
    tokens: int
    turns: int
    tool_calls: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a run, with what the run had spent before it.

    steps: optimizer steps of the loop. tokens: of all training episodes, prompts included, also of
    those that failed or were filtered. seconds: of all steps, without start, evaluation, checkpoint
    and report. Both are NaN if they are not known. path: its rollouts file.
    """

    steps: int
    tokens: float
    seconds: float
    path: Path

    @cached_property
    def scores(self) -> Mapping[str, Scores]:
        """Return the scores by test set, which the metrics of a run name in the same way."""
        by_set: dict[str, Scores] = {}
        for _, record in read_records(self.path):
            episode = record["_episode"]
            scores = by_set.setdefault(name_test_set(record, episode.get("server", "")), {})
            values = scores.setdefault(name_record(record), [])
            reward = record.get("reward") if episode.get("status") == "ok" else None
            if isinstance(reward, int | float) and math.isfinite(reward):
                is_right = read_scale(episode).is_full(float(reward))
                values.append({"acc": float(is_right), "reward": float(reward)})
        return by_set


class RunFolder:
    """What a run has written so far. Raises ConfigError if `path` is not a run directory.

    unreadable: a message for each file that could not be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name
        self.unreadable: list[str] = []
        self.skipped_files = 0
        if not is_run(path):
            raise ConfigError(
                f"{path} is not a run directory: it has no config.yaml. Pass a directory of runs/."
            )

    # --- recipe and metrics ---

    @cached_property
    def recipe(self) -> Json:
        """Return the recipe as plain data: nothing in it is resolved. Raises ConfigError."""
        paths = [self.path / name for name in CONFIGS]
        return read_saved(next(path for path in paths if path.is_file()))

    def get_setting(self, key: str) -> Any:  # a value of YAML
        """Return the value of a dotted key of the recipe; None if the recipe does not have it."""
        node: Any = self.recipe
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Return the recipe of a training run under its present names, and its digests."""
        return identity.read_run(self.path)

    @cached_property
    def metrics(self) -> dict[int, Json]:
        """Return the lines of metrics.jsonl that count: {step: {metric: value}}."""
        return read_steps(self.path / "metrics.jsonl")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Return a row per step: a column per metric (docs/reference.md), and `time` in seconds.

        NaN if a step does not have the metric, or has another value than a number.
        """
        frame = pd.DataFrame(list(self.metrics.values()), index=list(self.metrics))
        frame = frame.drop(columns=["step", "command"], errors="ignore")
        return frame.apply(pd.to_numeric, errors="coerce").astype(float)

    @cached_property
    def sampled_steps(self) -> pd.DataFrame:
        """Return the rows of `steps` that sampled episodes for training."""
        return self.steps[self.get_metric("rollout/episodes").notna()]

    def get_metric(self, name: str) -> pd.Series:
        """Return a metric over all steps; all NaN if no step has it."""
        missing = pd.Series(np.nan, self.steps.index, name=name)
        return self.steps.get(name, missing)

    # --- evaluations ---

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations of the run's weights by step: of two at one step, the later.

        Raises ConfigError if scored weights have been replaced since.
        """
        sampled = self.get_metric("rollout/episodes").notna()
        tokens = self.get_metric(ALL_TOKENS).where(sampled, 0.0)  # NaN in runs before this metric
        seconds = self.get_metric(STEP).fillna(0.0) - self.get_metric(SAVE).fillna(0.0)
        totals = zip(tokens.cumsum(skipna=False), seconds.clip(lower=0).cumsum(), strict=True)
        spent: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
        spent |= zip(self.metrics, totals, strict=True)
        found = []
        path = self.path / "evaluation.jsonl"
        scored = self.read_scored_step() if path.is_file() else None
        if scored is not None:
            found.append(Evaluation(scored, *spent.get(scored, (math.nan, math.nan)), path))
        for step, file in self.list_rollout_files("val").items():
            if step in spent:
                found.append(Evaluation(step, *spent[step], file))
        return sorted(found, key=lambda one: one.steps)

    @cached_property
    def scored(self) -> Fingerprint:
        """Return the settings of the command `evaluate` in this folder; empty if it wrote none."""
        return identity.read_fingerprint(self.path / "evaluation.settings.json")

    def read_scored_step(self) -> int | None:
        """Return the step of the weights that the command `evaluate` scored, 0 for a bare model.

        None if the folder has a training run, and the weights are neither its start nor its export.
        Raises ConfigError if the weights have been replaced since.
        """
        values = self.fingerprint.values
        model = str(self.scored.values.get(MODEL_PATH) or "nowhere")
        adapter = self.scored.values.get(ADAPTER_PATH)
        weights = Path(adapter).parent if adapter else Path(model)  # of an export
        if values:
            if (model, adapter) == (values.get(MODEL_PATH), values.get(ADAPTER_PATH)):
                return 0
            if weights.resolve() != (self.path / "export").resolve():
                return None
        key = ADAPTER_PATH if adapter else MODEL_PATH
        step = checkpoints.read_exported_step(weights)
        digest = self.scored.contents.get(key)
        if step and digest and digest != hash_contents(adapter or model, key):
            raise ConfigError(
                f"{self.path}/evaluation.jsonl has scores of weights that {weights} no longer has. "
                "Remove this file, and run `evaluate` again if you need its scores."
            )
        return step or 0

    # --- episodes ---

    def list_rollout_files(self, kind: str) -> dict[int, Path]:
        """Return rollouts/<kind>_N.jsonl by N, in order. kind: step or val.

        Leaves out files that are more than one step after the last metrics: a resumed run has
        replaced those steps. A run may have ended during the step after the last metrics.
        """
        last_step = max(self.metrics, default=0) + 1
        paths = {}
        for path in (self.path / "rollouts").glob(f"{kind}_*.jsonl"):
            number = path.stem.removeprefix(f"{kind}_")
            if number.isdigit() and int(number) <= last_step:
                paths[int(number)] = path
        return dict(sorted(paths.items()))

    @cached_property
    def records(self) -> list[SavedEpisode]:
        """Return the episodes by step. `skipped_files` counts the files that are over the limits.

        The last step, the last evaluation and the first evaluation are read first, then the others,
        the latest first.
        """
        steps = list(self.list_rollout_files("step").values())[::-1]
        evaluations = list(self.list_rollout_files("val").values())[::-1]
        others = [self.path / f"{name}.jsonl" for name in ("evaluation", "rollouts")]
        paths = [*steps[:1], *evaluations[:1], *(path for path in others if path.is_file())]
        paths = list(dict.fromkeys([*paths, *evaluations[-1:], *evaluations, *steps]))
        episodes: list[SavedEpisode] = []
        size = 0
        for number, path in enumerate(paths):
            size += path.stat().st_size
            is_too_much = size > MAX_ROLLOUT_BYTES and number > 1
            if is_too_much or len(episodes) >= MAX_EPISODES:
                self.skipped_files = len(paths) - number
                break
            episodes += self.read_rollout_file(path)
        return sorted(episodes[:MAX_EPISODES], key=lambda episode: episode.step)

    def read_rollout_file(self, path: Path) -> Iterator[SavedEpisode]:
        """Yield the episodes of a file. One of another format counts as unreadable."""
        suffix = path.stem.rpartition("_")[2]
        step = int(suffix) if suffix.isdigit() else NO_STEP
        try:
            for _, record in itertools.islice(read_records(path), MAX_EPISODES // 4):
                yield SavedEpisode(path.stem, step, record)
        except ConfigError as error:
            self.unreadable.append(str(error).partition(". ")[0])

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """Return a row per episode of `records`, in their order, with the columns of EpisodeRow.

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
            with open_arrays(path) as file:
                ends = np.cumsum(file["lengths"])
                values = np.split(file["values"], ends[:-1])
                indices = [tuple(index) for index in file["record_index"].tolist()]
                return dict(zip(indices, values, strict=True))
        except (OSError, ValueError, zipfile.BadZipFile) as error:  # a kill left it incomplete
            self.unreadable.append(f"{path.name}: {error!r:.80}")
            return {}


def open_arrays(path: Path) -> NpzFile:
    """Open an .npz file. Raises ValueError if it would unpack to more than MAX_ARRAY_BYTES."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MAX_ARRAY_BYTES:
        raise ValueError(f"{path}: its arrays have {size:,} bytes, over {MAX_ARRAY_BYTES:,}")
    return cast(NpzFile, np.load(path))


def is_run(folder: Path) -> bool:
    """Return whether a folder has the recipe of a run."""
    return any((folder / name).is_file() for name in CONFIGS)


def is_accuracy(name: str) -> bool:
    """Return whether a metric is mean@n of acc, without failed episodes that count as 0."""
    return "/acc/mean@" in name and not name.endswith((FAILED_AS_0, LOW, HIGH))


def name_record(record: Json) -> str:
    """Return what identifies the problem of a record in any run: its prompt and its truth.

    Copies of a problem share it, since their scores depend on each other. Without a truth, all
    fields of the row count. If the environment writes the prompt, copies may get others, so the
    place of the row counts.
    """
    has_prompt = bool((record.get("responses_create_params") or {}).get("input"))
    if has_prompt and not is_empty(find_ground_truth(record)):
        return hash_problem(record)
    place = None if has_prompt else record.get("_ng_task_index")
    return hash_json(drop_nulls([record["_episode"].get("content"), place]))


def make_row(saved: SavedEpisode) -> EpisodeRow:
    """Convert a record to its row of `RunFolder.episodes`."""
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
        prompt=replace_surrogates(episode["prompt"]),
        response=replace_surrogates(episode["answer"]),
        reward=np.nan if reward is None else reward,
        is_right=reward is not None and read_scale(episode).is_full(reward),
        reward_components=record.get("reward_components") or {},
        status=episode["status"],
        ended=episode["ended"],
        tokens=episode["response_tokens"],
        turns=sum(bool(item.get(SAMPLED_IDS)) for item in output),
        tool_calls=sum(item.get("type") == "function_call" for item in output),
        seconds=sum(episode["timings"].values()),
    )


def replace_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair by "?": pandas accepts only valid UTF-8."""
    return text.encode(errors="replace").decode()
