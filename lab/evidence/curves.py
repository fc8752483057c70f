"""Pick the evaluations of runs that are compared, and make a table [runs, rows] of their scores."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kit.data.fingerprint import Fingerprint
from kit.errors import ConfigError
from kit.run import checkpoints, identity
from lab.evidence.intervals import Scores
from lab.run_folder import MODEL_PATH, Evaluation, RunFolder, is_run

SCORES = ("acc", "reward")  # of a verified response: whether its reward is the full one, and it
MIN_SPENT = 0.75  # of a common budget that each run must have spent at its evaluation


def find_runs(patterns: Sequence[str]) -> list[RunFolder]:
    """Return the runs that patterns such as 'runs/a*' match. Raises ConfigError.

    Each of them has an evaluation.
    """
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        names = sorted(glob.glob(str(Path(pattern).expanduser())))
        found = [Path(name) for name in names if is_run(Path(name))]
        if not found:
            raise ConfigError(f"{pattern} matches no run. Name folders such as 'runs/math-*'.")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)  # a link is no other run
    return [open_evaluated(folder) for folder in folders.values()]


def open_evaluated(folder: Path) -> RunFolder:
    """Return the run in a folder. Raises ConfigError if it has no evaluation."""
    run = RunFolder(folder)
    if not run.evaluations:
        raise ConfigError(
            f"{folder} has no held-out scores of the model that it trained, so there is nothing to "
            "compare. Set env.val_files and trainer.test_freq, or run `evaluate` on its export."
        )
    return run


def index_by_step(run: RunFolder) -> dict[int, Evaluation]:
    """Return the evaluations of a run by step."""
    return {one.steps: one for one in run.evaluations}


def read_seed(run: RunFolder) -> object:
    """Return data.seed of a run, or of the run whose export was scored. None: not known."""
    values = run.fingerprint.values
    model = Path(run.scored.values.get(MODEL_PATH) or "nowhere")
    if not values and checkpoints.read_exported_step(model) is not None:
        values = identity.read_run(model.parent).values
    return values.get("data.seed")


def read_scoring(run: RunFolder, evaluation: Evaluation) -> Fingerprint:
    """Return what decides the scores of an evaluation, besides the weights and the rows."""
    is_command = evaluation.path.name == "evaluation.jsonl"
    recipe = identity.read_run(run.path, "evaluate") if is_command else run.fingerprint
    return recipe.select(identity.decides_score)


def list_test_sets(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the test sets that all evaluations have. Raises ConfigError if there is none."""
    found = [set(evaluation.scores) for evaluation in evaluations]
    shared = sorted(found[0].intersection(*found))
    if not shared:
        names = sorted(set().union(*found))
        raise ConfigError(
            f"The runs have no test set in common, only {', '.join(names)}. Set the same "
            "env.val_files in both recipes."
        )
    return shared


def pick_evaluations(
    runs: Sequence[RunFolder], budget: str
) -> tuple[float, list[Evaluation]] | None:
    """Return a common budget, and an evaluation of each run at it.

    budget: steps: the last step at which all runs have an evaluation. tokens, seconds: what the
    cheapest run had spent at its last evaluation; each run has its last evaluation within it. None
    if a run had spent much less, or it is not known. Raises ConfigError if no step is common.
    """
    if budget == "steps":
        return pick_step(runs)
    last = [getattr(run.evaluations[-1], budget) for run in runs]
    common: float = min(last)
    if common == 0 or any(map(math.isnan, last)):
        return None
    picked = []
    for run in runs:
        spent = [one for one in run.evaluations if getattr(one, budget) <= common]
        if not spent or getattr(spent[-1], budget) < MIN_SPENT * common:
            return None
        picked.append(spent[-1])
    return common, picked


def pick_step(runs: Sequence[RunFolder]) -> tuple[float, list[Evaluation]]:
    """Return the last step at which all runs have an evaluation. Raises ConfigError."""
    by_step = [index_by_step(run) for run in runs]
    common = max(set(by_step[0]).intersection(*by_step), default=0)
    is_trained = all(max(steps) > 0 for steps in by_step)
    if any(common not in steps for steps in by_step) or (is_trained and common == 0):
        found = "; ".join(
            f"{run.path}: {', '.join(map(str, steps))}"
            for run, steps in zip(runs, by_step, strict=True)
        )
        raise ConfigError(
            f"The runs have no evaluation after the same step: {found}. Set the same "
            "trainer.test_freq, or score exports of the same step with `evaluate`."
        )
    return common, [steps[common] for steps in by_step]


def drop_cut_runs(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Return the runs of a set without those that ended before most of them."""
    last = [run.evaluations[-1].steps for run in runs]
    usual = sorted(last, reverse=True)[len(last) // 2]
    return [run for run, step in zip(runs, last, strict=True) if step >= usual]


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
    tables = [evaluation.scores[test_set] for evaluation in evaluations]
    total = len(set().union(*tables))
    shared = [row for row in tables[0] if all(table.get(row) for table in tables)]
    if len(shared) < 2:
        paths = sorted({str(evaluation.path) for evaluation in evaluations})
        raise ConfigError(
            f"{', '.join(paths)} share {len(shared)} rows of {test_set} with a reward in each "
            "run, and a comparison needs two. Set the same env.val_files in both recipes, or "
            "repeat an evaluation whose episodes failed."
        )
    means = [[np.mean([one[score] for one in table[row]]) for row in shared] for table in tables]
    return Table(np.array(means, dtype=np.float64), total)
