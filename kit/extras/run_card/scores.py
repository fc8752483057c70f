"""The held-out scores of a run for its card, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from env import Json
from kit.data.json_lines import read_metrics
from kit.data.metrics import name_test_set, read_interval, read_test_set
from kit.data.rollout_files import read_records

MAX_EVALUATIONS = 12  # rows of the table for each test set


class Score(NamedTuple):
    """A score of an evaluation, such as acc/mean@4.

    interval: {LOW, HIGH} of the same evaluation; None if it has none. rows: that were verified.
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
        counts = count_rows(path) if path.is_file() else {}
        for metric, value in evaluations[step].items():
            if metric.startswith("val-core/") and "/mean@" in metric and value is not None:
                scores.append(make_score(step, metric, evaluations[step], counts))
    return sorted(scores, key=lambda score: (score.test_set, score.step))


def make_score(
    step: int, metric: str, values: Mapping[str, float], counts: Mapping[str, int]
) -> Score:
    """Make a score of a metric. values: all metrics of the evaluation. counts: of its rows."""
    test_set = read_test_set(metric)
    name = "/".join(metric.rsplit("/", 2)[1:])
    interval = read_interval(metric, values)
    return Score(step, test_set, name, values[metric], counts.get(test_set, 0), interval)


def count_rows(path: Path) -> dict[str, int]:
    """Return {test set: the number of rows with a verified response} of an evaluation."""
    rows: dict[str, set[int]] = {}
    for _, record in read_records(path):
        episode = record["_episode"]
        if episode.get("status") == "ok" and record.get("reward") is not None:
            test_set = name_test_set(record, episode.get("server", ""))
            rows.setdefault(test_set, set()).add(int(record["_ng_task_index"]))
    return {test_set: len(found) for test_set, found in rows.items()}


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
