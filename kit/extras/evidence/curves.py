"""Read the held-out scores of runs: one table [runs, rows] for each evaluation."""

from __future__ import annotations

import functools
import glob
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from env import Json
from kit.config.recipe_text import read_saved
from kit.data.json_lines import read_metrics
from kit.data.metrics import ALL_TOKENS, name_test_set
from kit.data.rollout_files import read_records
from kit.errors import ConfigError
from kit.extras.evidence.intervals import Scores
from kit.runs import checkpoints


def is_right(reward: float) -> float:
    """Return 1 for a reward of at least 1, else 0."""
    return float(reward >= 1)


SCORES: Mapping[str, Callable[[float], float]] = {  # of the reward of a verified response
    "acc": is_right,
    "reward": float,
}
CONFIGS = ("config.yaml", "evaluate.yaml")  # of a training run, of the command `evaluate`
MODEL_PATH = "actor_rollout_ref.model.path"
ADAPTER_PATH = "actor_rollout_ref.model.lora_adapter_path"
SAVE = "timing_s/save_checkpoint"
MIN_SPENT = 0.75  # of a common budget that each run must have spent at its evaluation


class Evaluation(NamedTuple):
    """An evaluation of a run, with what the run had spent before it.

    steps: optimizer steps of the loop. tokens: of all training episodes, prompts included, also of
    those that failed or were filtered. seconds: of all steps, without start, evaluation, checkpoint
    and report. Both are NaN for the export of another folder. path: its rollouts file.
    """

    steps: int
    tokens: float
    seconds: float
    path: Path


class RunCurve(NamedTuple):
    """The evaluations of a run, in the order of their steps."""

    folder: Path
    evaluations: list[Evaluation]

    @property
    def by_step(self) -> dict[int, Evaluation]:
        """The evaluations by step. Of two at one step, the one in the run's own rollouts counts."""
        return {one.steps: one for one in self.evaluations}


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Return the run folders that patterns such as 'runs/a*' match. Raises ConfigError."""
    folders: list[Path] = []
    for pattern in patterns:
        paths = [Path(name) for name in sorted(glob.glob(str(Path(pattern).expanduser())))]
        found = [path for path in paths if any((path / name).is_file() for name in CONFIGS)]
        if not found:
            raise ConfigError(f"{pattern} matches no run. Name folders such as 'runs/math-*'.")
        folders += found
    return list(dict.fromkeys(folders))


def read_curve(folder: Path) -> RunCurve:
    """Read the evaluations of a run. Raises ConfigError if it has none."""
    evaluations: list[Evaluation] = []
    tokens = seconds = 0.0
    spent = {0: (0.0, 0.0)}
    for line in read_metrics(folder / "metrics.jsonl"):
        if "rollout/episodes" in line:  # NaN for a run before this metric existed
            tokens += line.get(ALL_TOKENS, math.nan)
        seconds += max(0.0, line.get("timing_s/step", 0.0) - line.get(SAVE, 0.0))
        spent[line["step"]] = (tokens, seconds)
    for path in sorted((folder / "rollouts").glob("val_*.jsonl")):
        number = path.stem.removeprefix("val_")
        if number.isdigit() and int(number) in spent:
            evaluations.append(Evaluation(int(number), *spent[int(number)], path))
    path = folder / "evaluation.jsonl"
    step = read_scored_step(folder, path) if path.is_file() else None
    if step is not None:
        evaluations.append(Evaluation(step, *spent.get(step, (math.nan, math.nan)), path))
    if not evaluations:
        raise ConfigError(
            f"{folder} has no evaluation of its own weights. Set env.val_files and "
            "trainer.test_freq, or run `evaluate` on its export."
        )
    return RunCurve(folder, sorted(evaluations))


def read_scored_step(folder: Path, path: Path) -> int | None:
    """Return the step of the weights that the command `evaluate` scored, 0 for a bare model.

    None if the folder has a training run, and the weights are neither its start nor its export.
    Raises ConfigError if the weights have been replaced since.
    """
    settings = read_settings(path)
    model = str(settings.get(MODEL_PATH) or "nowhere")
    adapter = settings.get(ADAPTER_PATH)
    weights = Path(adapter).parent if adapter else Path(model)  # of an export
    config = read_yaml(folder / "config.yaml")
    if config:
        section = (config.get("actor_rollout_ref") or {}).get("model") or {}
        if (model, adapter) == (section.get("path"), section.get("lora_adapter_path")):
            return 0
        if weights.resolve() != (folder / "export").resolve():
            return None
    key = ADAPTER_PATH if adapter else MODEL_PATH
    scored_at = settings.get(checkpoints.WEIGHTS_TIME.format(key))
    step = checkpoints.read_exported_step(weights)
    if step and scored_at and scored_at != checkpoints.read_weights_time(Path(adapter or model)):
        raise ConfigError(
            f"{path} has scores of weights that {weights} had at {scored_at}, and it has others "
            "now. Remove this file, and run `evaluate` again if you need its scores."
        )
    return step or 0


def read_settings(path: Path) -> Json:
    """Return the settings of an evaluation, as `evaluate` wrote them; {} if it wrote none."""
    settings_path = path.with_suffix(".settings.json")
    try:
        return orjson.loads(settings_path.read_bytes()) if settings_path.is_file() else {}
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{settings_path} is no JSON: {error}. Name another run.") from None


def read_yaml(path: Path) -> Json:
    """Return the recipe of a run, {} if there is none."""
    return read_saved(path) if path.is_file() else {}


def read_seed(folder: Path) -> object:
    """Return data.seed of a run, or of the run whose export was scored. None: not known."""
    config = read_yaml(folder / "config.yaml")
    if not config:
        model = Path(read_settings(folder / "evaluation.jsonl").get(MODEL_PATH) or "nowhere")
        if checkpoints.read_exported_step(model) is not None:
            config = read_yaml(model.parent / "config.yaml")
    data = config.get("data")
    return data.get("seed") if isinstance(data, dict) else None


Rewards = dict[str, list[float]]  # {hash of a row: the rewards of its verified responses}


@functools.cache
def read_rewards(path: Path) -> Mapping[str, Rewards]:
    """Return the rewards of an evaluation by test set, as the metrics of a run name them."""
    by_set: dict[str, Rewards] = {}
    for _, record in read_records(path):
        episode = record["_episode"]
        rewards = by_set.setdefault(name_test_set(record, episode.get("server", "")), {})
        values = rewards.setdefault(hash_row(record), [])
        if episode.get("status") == "ok" and record.get("reward") is not None:
            values.append(float(record["reward"]))
    return by_set


def list_test_sets(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the test sets that all evaluations have. Raises ConfigError if there is none."""
    found = [set(read_rewards(evaluation.path)) for evaluation in evaluations]
    shared = sorted(found[0].intersection(*found))
    if not shared:
        names = sorted(set().union(*found))
        raise ConfigError(
            f"The runs have no test set in common, only {', '.join(names)}. Set the same "
            "env.val_files in both recipes."
        )
    return shared


def hash_row(record: Json) -> str:
    """Return what identifies a held-out row in any run: its prompt, and its place.

    Rows with the same prompt may have other answers, so the number is needed.
    """
    parts = [record.get("responses_create_params"), record.get("_ng_task_index")]
    return hashlib.sha1(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def pick_evaluations(
    curves: Sequence[RunCurve], budget: str
) -> tuple[float, list[Evaluation]] | None:
    """Return a common budget, and an evaluation of each run at it.

    budget: steps: the last step at which all runs have an evaluation. tokens, seconds: what the
    cheapest run had spent at its last evaluation; each run has its last evaluation within it. None
    if a run had spent much less, or it is not known. Raises ConfigError if no step is common.
    """
    if budget == "steps":
        return pick_step(curves)
    last = [getattr(curve.evaluations[-1], budget) for curve in curves]
    common: float = min(last)
    if common == 0 or any(map(math.isnan, last)):
        return None
    picked = []
    for curve in curves:
        spent = [one for one in curve.evaluations if getattr(one, budget) <= common]
        if not spent or getattr(spent[-1], budget) < MIN_SPENT * common:
            return None
        picked.append(spent[-1])
    return common, picked


def pick_step(curves: Sequence[RunCurve]) -> tuple[float, list[Evaluation]]:
    """Return the last step at which all runs have an evaluation. Raises ConfigError."""
    by_step = [curve.by_step for curve in curves]
    common = max(set(by_step[0]).intersection(*by_step), default=0)
    is_trained = all(max(steps) > 0 for steps in by_step)
    if any(common not in steps for steps in by_step) or (is_trained and common == 0):
        found = "; ".join(
            f"{curve.folder}: {', '.join(map(str, steps))}"
            for curve, steps in zip(curves, by_step, strict=True)
        )
        raise ConfigError(
            f"The runs have no evaluation after the same step: {found}. Set the same "
            "trainer.test_freq, or score exports of the same step with `evaluate`."
        )
    return common, [steps[common] for steps in by_step]


class Table(NamedTuple):
    """Mean scores [runs, rows] of the rows that each run verified. total: rows of any run."""

    scores: Scores
    total: int


def tabulate(
    evaluations: Sequence[Evaluation], test_set: str, score: Callable[[float], float]
) -> Table:
    """Make the table of a test set of some evaluations, one for each run.

    Raises ConfigError if the evaluations share fewer than two rows.
    """
    tables = [read_rewards(evaluation.path)[test_set] for evaluation in evaluations]
    total = len(set().union(*tables))
    in_all = set(tables[0]).intersection(*tables)
    shared = [row for row in tables[0] if row in in_all and all(table[row] for table in tables)]
    if len(shared) < 2:
        folders = sorted({str(evaluation.path.parent.parent) for evaluation in evaluations})
        cause = (
            "Set the same env.val_files in both recipes. Rows of a function must not depend on "
            "data.seed."
        )
        if len(in_all) > 1:
            cause = "In the others, some run has no verified response: repeat its evaluation."
        raise ConfigError(
            f"{', '.join(folders)} share {len(in_all)} rows of {test_set}, {len(shared)} of them "
            f"with a reward in each run, and a comparison needs two. {cause}"
        )
    means = [[np.mean([score(one) for one in table[row]]) for row in shared] for table in tables]
    return Table(np.array(means, dtype=np.float64), total)
