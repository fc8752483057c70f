"""The held-out scores of a run for its card, with their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from env import Json
from kit.data.json_lines import read_metrics
from kit.data.metrics import compute_score_interval, name_test_set, read_test_set
from kit.data.rollout_files import read_records

MAX_EVALUATIONS = 12  # rows of the table for each test set


class Score(NamedTuple):
    """A score of an evaluation, such as acc/mean@4.

    interval: of the mean over rows of this kind, as of compute_score_interval; None for one row.
    """

    step: int
    test_set: str
    name: str
    value: float
    rows: int
    interval: dict[str, float] | None


def read_evaluations(folder: Path) -> dict[int, Json]:
    """Return {step: the metrics of its evaluation} of a run, in order."""
    evaluations: dict[int, Json] = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        found = {name: value for name, value in line.items() if name.startswith("val")}
        if found:
            evaluations.setdefault(line["step"], {}).update(found)
    return evaluations


def pick_steps(steps: list[int]) -> list[int]:
    """Return at most MAX_EVALUATIONS of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= MAX_EVALUATIONS:
        return steps
    places = np.linspace(0, len(steps) - 1, MAX_EVALUATIONS).round().astype(int)
    return [steps[place] for place in places]


def read_scores(folder: Path) -> list[Score]:
    """Return the mean@k scores of a run's evaluations, by test set and step."""
    evaluations = read_evaluations(folder)
    scores = []
    for step in pick_steps(list(evaluations)):
        path = folder / "rollouts" / f"val_{step}.jsonl"
        tables = read_tables(path) if path.is_file() else {}
        for metric, value in evaluations[step].items():
            if metric.startswith("val-core/") and "/mean@" in metric and value is not None:
                scores.append(make_score(step, metric, value, tables))
    return sorted(scores, key=lambda score: (score.test_set, score.step))


def make_score(
    step: int, metric: str, value: float, tables: dict[tuple[str, str], list[float]]
) -> Score:
    """Make a score of a metric, with the interval of its rows."""
    test_set = read_test_set(metric)
    name = "/".join(metric.rsplit("/", 2)[1:])
    means = tables.get((test_set, name.partition("/")[0]), [])
    return Score(step, test_set, name, value, len(means), compute_interval(means))


def compute_interval(means: list[float]) -> dict[str, float] | None:
    """Return the interval of the mean of rows' mean scores, None for fewer than two rows."""
    return compute_score_interval([[mean] for mean in means]) if len(means) > 1 else None


def read_tables(path: Path) -> dict[tuple[str, str], list[float]]:
    """Return {(test set, acc or reward): the mean score of each verified row} of an evaluation."""
    by_row: dict[tuple[str, int], list[float]] = {}
    for _, record in read_records(path):
        episode = record["_episode"]
        if episode.get("status") == "ok" and record.get("reward") is not None:
            test_set = name_test_set(record, episode.get("server", ""))
            row = (test_set, int(record["_ng_task_index"]))
            by_row.setdefault(row, []).append(float(record["reward"]))
    tables: dict[tuple[str, str], list[float]] = {}
    for (test_set, _), rewards in by_row.items():
        accuracies = [reward >= 1 for reward in rewards]
        tables.setdefault((test_set, "acc"), []).append(float(np.mean(accuracies)))
        tables.setdefault((test_set, "reward"), []).append(float(np.mean(rewards)))
    return tables


class Failures(NamedTuple):
    """How many episodes a run has sampled for training, and how many of them failed, by status."""

    episodes: int
    by_status: dict[str, int]


def count_failures(folder: Path) -> Failures:
    """Count the failed episodes of a run's steps, as its metrics have them."""
    total = 0
    by_status: dict[str, int] = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        total += int(line.get("rollout/episodes") or 0)
        for name, value in line.items():
            if name.startswith("rollout/failed/"):
                status = name.removeprefix("rollout/failed/")
                by_status[status] = by_status.get(status, 0) + int(value or 0)
    return Failures(total, by_status)
