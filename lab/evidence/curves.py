"""Read the held-out scores of runs: one table [runs, rows] for each evaluation."""

from __future__ import annotations

import functools
import glob
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from env import Json, drop_nulls
from kit.data.fingerprint import Fingerprint, hash_contents, hash_json
from kit.data.ground_truths import find_ground_truth, is_empty
from kit.data.json_lines import read_steps
from kit.data.metrics import ALL_TOKENS, name_test_set
from kit.data.rollout_files import read_records, read_scale
from kit.errors import ConfigError
from kit.runs import checkpoints, identity
from kit.runs.console import say
from lab.evidence.intervals import Scores

SCORES = ("acc", "reward")  # of a verified response: whether its reward is the full one, and it
CONFIGS = ("config.yaml", "evaluate.yaml")  # of a training run, of the command `evaluate`
MODEL_PATH = "actor_rollout_ref.model.path"
ADAPTER_PATH = "actor_rollout_ref.model.lora_adapter_path"
VAL = "actor_rollout_ref.rollout.val_kwargs"
STEP = "timing_s/step"
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
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(folder.resolve(), folder)  # a link is no other run
    return list(unique.values())


def read_curve(folder: Path) -> RunCurve:
    """Read the evaluations of a run. Raises ConfigError if it has none."""
    evaluations: list[Evaluation] = []
    tokens = seconds = 0.0
    spent = {0: (0.0, 0.0)}
    for step, line in read_steps(folder / "metrics.jsonl").items():
        metrics = (ALL_TOKENS, STEP, SAVE)
        nulls = [name for name in metrics if not isinstance(line.get(name, 0.0), int | float)]
        if nulls:
            say(f"WARNING     {folder}: {', '.join(nulls)} of step {step} is not known")
            line |= dict.fromkeys(nulls, math.nan)
        if "rollout/episodes" in line:  # NaN for a run before this metric existed
            tokens += line.get(ALL_TOKENS, math.nan)
        seconds += np.maximum(0.0, line.get(STEP, 0.0) - line.get(SAVE, 0.0))  # NaN stays
        spent[step] = (tokens, seconds)
    for path in sorted((folder / "rollouts").glob("val_*.jsonl")):
        number = path.stem.removeprefix("val_")
        if number.isdigit() and int(number) in spent:
            evaluations.append(Evaluation(int(number), *spent[int(number)], path))
    path = folder / "evaluation.jsonl"
    scored = read_scored_step(folder, path) if path.is_file() else None
    if scored is not None:
        evaluations.append(Evaluation(scored, *spent.get(scored, (math.nan, math.nan)), path))
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
    model = str(settings.values.get(MODEL_PATH) or "nowhere")
    adapter = settings.values.get(ADAPTER_PATH)
    weights = Path(adapter).parent if adapter else Path(model)  # of an export
    values = identity.read_run(folder).values
    if values:
        if (model, adapter) == (values.get(MODEL_PATH), values.get(ADAPTER_PATH)):
            return 0
        if weights.resolve() != (folder / "export").resolve():
            return None
    key = ADAPTER_PATH if adapter else MODEL_PATH
    step = checkpoints.read_exported_step(weights)
    scored = settings.contents.get(key)
    if step and scored and scored != hash_contents(adapter or model, key):
        raise ConfigError(
            f"{path} has scores of weights that {weights} no longer has. Remove this file, and run "
            "`evaluate` again if you need its scores."
        )
    return step or 0


def read_settings(path: Path) -> Fingerprint:
    """Return the settings of an evaluation, as `evaluate` wrote them; empty if it wrote none."""
    return identity.read_fingerprint(path.with_suffix(".settings.json"))


def read_seed(folder: Path) -> object:
    """Return data.seed of a run, or of the run whose export was scored. None: not known."""
    values = identity.read_run(folder).values
    if not values:
        settings = read_settings(folder / "evaluation.jsonl")
        model = Path(settings.values.get(MODEL_PATH) or "nowhere")
        if checkpoints.read_exported_step(model) is not None:
            values = identity.read_run(model.parent).values
    return values.get("data.seed")


# {name_record of a problem: SCORES of its verified responses}
Rewards = dict[str, list[dict[str, float]]]


@functools.cache
def read_rewards(path: Path) -> Mapping[str, Rewards]:
    """Return the rewards of an evaluation by test set, as the metrics of a run name them."""
    by_set: dict[str, Rewards] = {}
    unusable = 0
    for _, record in read_records(path):
        episode = record["_episode"]
        rewards = by_set.setdefault(name_test_set(record, episode.get("server", "")), {})
        values = rewards.setdefault(name_record(record), [])
        reward = record.get("reward") if episode.get("status") == "ok" else None
        if isinstance(reward, int | float) and math.isfinite(reward):
            is_right = read_scale(episode).is_full(float(reward))
            values.append({"acc": float(is_right), "reward": float(reward)})
        elif reward is not None:
            unusable += 1
    if unusable:
        say(f"WARNING     {path}: {unusable} rewards are no finite numbers, and do not count")
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


def name_record(record: Json) -> str:
    """Return what identifies the problem of a record in any run: its prompt and its truth.

    Copies of a problem share it, since their scores depend on each other. Without a truth, all
    fields of the row count.
    """
    prompt = record.get("responses_create_params") or {}
    truth = find_ground_truth(record)
    parts = [prompt, truth]
    if is_empty(truth):
        parts.append(record["_episode"].get("content"))
    if not prompt.get("input"):  # the environment writes it, so copies may get others
        parts.append(record.get("_ng_task_index"))
    return hash_json(drop_nulls(parts))


def read_scoring(evaluation: Evaluation) -> Fingerprint:
    """Return what decides the scores of an evaluation, besides the weights and the rows."""
    is_command = evaluation.path.name == "evaluation.jsonl"
    folder = evaluation.path.parent if is_command else evaluation.path.parent.parent
    run = identity.read_run(folder, "evaluate" if is_command else "config")
    is_greedy = run.values.get(f"{VAL}.do_sample") is False

    def decides(key: str) -> bool:
        is_unused = is_greedy and key.endswith((".temperature", ".top_p", ".top_k"))
        return identity.decides_score(key) and not is_unused

    return run.select(decides)


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


def drop_cut_runs(curves: Sequence[RunCurve]) -> list[RunCurve]:
    """Return the runs of a set without those that ended before most of them."""
    last = [curve.evaluations[-1].steps for curve in curves]
    usual = sorted(last, reverse=True)[len(last) // 2]
    return [curve for curve, step in zip(curves, last, strict=True) if step >= usual]


class Table(NamedTuple):
    """Mean scores [runs, rows] of the rows that each run verified. total: rows of any run.

    A row and its copies are one.
    """

    scores: Scores
    total: int


def tabulate(evaluations: Sequence[Evaluation], test_set: str, score: str) -> Table:
    """Make the table of a test set of some evaluations, one for each run. score: one of SCORES.

    Raises ConfigError if the evaluations share fewer than two rows.
    """
    tables = [read_rewards(evaluation.path)[test_set] for evaluation in evaluations]
    total = len(set().union(*tables))
    in_all = set(tables[0]).intersection(*tables)
    shared = [row for row in tables[0] if row in in_all and all(table[row] for table in tables)]
    if len(shared) < 2:
        folders = sorted({str(evaluation.path.parent.parent) for evaluation in evaluations})
        raise ConfigError(
            f"{', '.join(folders)} share {len(shared)} rows of {test_set} with a reward in each "
            "run, and a comparison needs two. Set the same env.val_files in both recipes, or "
            "repeat an evaluation whose episodes failed."
        )
    means = [[np.mean([one[score] for one in table[row]]) for row in shared] for table in tables]
    return Table(np.array(means, dtype=np.float64), total)
