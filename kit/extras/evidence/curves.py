"""Read the held-out scores of runs: one table [runs, rows] for each evaluation."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from env import Json
from kit.data.json_lines import read_metrics
from kit.data.rollout_files import read_records
from kit.errors import ConfigError
from kit.extras.evidence.intervals import Scores

SCORES: Mapping[str, Callable[[Json], float]] = {  # of a record whose episode did not fail
    "acc": lambda record: float(record["reward"] >= 1),
    "reward": lambda record: float(record["reward"]),
}


class Evaluation(NamedTuple):
    """An evaluation of a run, with what the run had spent before it.

    steps: optimizer steps of the loop. tokens: of all training episodes, prompts included. seconds:
    of all steps, without start, evaluation and report. path: its rollouts file.
    """

    steps: int
    tokens: float
    seconds: float
    path: Path


class RunCurve(NamedTuple):
    """The evaluations of a run, in the order of their steps. That of `evaluate` has step 0."""

    folder: Path
    evaluations: list[Evaluation]


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """Return the run folders that patterns such as 'runs/a*' match. Raises ConfigError."""
    folders: list[Path] = []
    for pattern in patterns:
        paths = [Path(name) for name in sorted(glob.glob(str(Path(pattern).expanduser())))]
        found = [path for path in paths if (path / "config.yaml").is_file()]
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
        tokens += line.get("perf/total_num_tokens") or 0.0
        seconds += line.get("timing_s/step") or 0.0
        spent[line["step"]] = (tokens, seconds)
    for path in sorted((folder / "rollouts").glob("val_*.jsonl")):
        number = path.stem.removeprefix("val_")
        if number.isdigit() and int(number) in spent:
            evaluations.append(Evaluation(int(number), *spent[int(number)], path))
    if (folder / "evaluation.jsonl").is_file():
        evaluations.append(Evaluation(0, 0.0, 0.0, folder / "evaluation.jsonl"))
    if not evaluations:
        raise ConfigError(
            f"{folder} has no evaluation. Set env.val_files and trainer.test_freq, or run "
            "`evaluate` on its export."
        )
    return RunCurve(folder, sorted(evaluations))


def read_scores(path: Path, score: Callable[[Json], float]) -> dict[str, list[float]]:
    """Return the scores of an evaluation: {hash of a row: a score for each verified response}."""
    scores: dict[str, list[float]] = {}
    for _, record in read_records(path):
        values = scores.setdefault(hash_row(record), [])
        if record["_episode"].get("status") == "ok" and record.get("reward") is not None:
            values.append(score(record))
    return scores


def hash_row(record: Json) -> str:
    """Return what identifies a held-out row in any run: its prompt, and its place.

    Rows with the same prompt may have other answers, so the number is needed.
    """
    parts = [record.get("responses_create_params"), record.get("_ng_task_index")]
    return hashlib.sha1(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def pick_evaluations(curves: Sequence[RunCurve], budget: str) -> tuple[float, list[Evaluation]]:
    """Return a common budget, and the last evaluation of each run within it.

    budget: steps, tokens or seconds. It is the most that all runs have spent at an evaluation.
    """
    common = min(getattr(curve.evaluations[-1], budget) for curve in curves)
    picked = []
    for curve in curves:
        paid = [e for e in curve.evaluations if getattr(e, budget) <= common]
        picked.append(paid[-1] if paid else curve.evaluations[0])
    return common, picked


def tabulate(
    evaluations: Sequence[Evaluation], score: Callable[[Json], float]
) -> tuple[Scores, list[str]]:
    """Return [runs, rows] mean scores of the rows that every evaluation verified, and the rows.

    Raises ConfigError if the evaluations share fewer than two rows.
    """
    tables = [read_scores(evaluation.path, score) for evaluation in evaluations]
    shared = [row for row in tables[0] if all(table.get(row) for table in tables)]
    if len(shared) < 2:
        folders = sorted({str(evaluation.path.parent.parent) for evaluation in evaluations})
        raise ConfigError(
            f"{', '.join(folders)} share {len(shared)} held-out rows, and a comparison needs two. "
            "Set the same env.val_files in both recipes."
        )
    means = [[float(np.mean(table[row])) for row in shared] for table in tables]
    return np.array(means), shared
