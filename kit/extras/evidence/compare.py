"""The command `compare`: is the difference between two sets of runs real?

python algorithm.py compare 'runs/a*' --with 'runs/b*' [--json FILE] [--report FILE.html]

The runs are compared on the held-out rows that all of them evaluated, at equal steps, at equal
tokens and at equal seconds. intervals.py has the statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kit import features
from kit.data.fingerprint import hash_file
from kit.errors import ConfigError
from kit.extras.evidence import intervals
from kit.extras.evidence.curves import (
    SCORES,
    Evaluation,
    RunCurve,
    drop_cut_runs,
    find_runs,
    list_test_sets,
    pick_evaluations,
    pick_step,
    read_curve,
    read_scoring,
    read_seed,
    tabulate,
)
from kit.runs import files
from kit.runs.console import count_nouns, say

BUDGETS = ("steps", "tokens", "seconds")
ONE_RUN = (
    "One of the sets has one run. Another seed could give another result, so there is no interval "
    "over seeds and no p-value. Run more seeds with `python algorithm.py sweep`."
)


class SignFlips(NamedTuple):
    """The p-value of the sign flips over the seeds that both sets have. smallest: it can be."""

    p_value: float
    smallest: float
    pairs: int


class Comparison(NamedTuple):
    """Two sets of runs at an equal budget, by one score of one test set.

    amount: of the budget. steps: of the picked evaluations, of the first and of the second set.
    rows: held-out rows that all runs verified. all_rows: that any run has. means: of both sets.
    """

    budget: str
    amount: float
    test_set: str
    score: str
    steps: tuple[list[int], list[int]]
    rows: int
    all_rows: int
    means: tuple[intervals.Interval, intervals.Interval]
    difference: intervals.Difference
    signs: SignFlips | None


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py compare",
        description="Compare two sets of runs, such as two recipes with several seeds each, on "
        "their held-out rows.",
    )
    parser.add_argument("runs", nargs="+", metavar="A", help="run folders, such as 'runs/a*'")
    parser.add_argument(
        "--with", nargs="+", required=True, dest="others", metavar="B", help="the other runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write a report of all these runs"
    )
    args = parser.parse_args(list(arguments))
    some = find_runs(args.runs)
    others = find_runs(args.others)
    comparisons = compare_runs(some, others)
    lines = [*warn({"A": some, "B": others}), *describe(comparisons)]
    for line in lines:
        say(line)
    if args.json:
        values = [to_json(one) for one in comparisons]
        with files.explain_write_errors(args.json):
            args.json.write_text(json.dumps(values, indent=1) + "\n")
    if args.report:
        write_report(args.report, {"A": some, "B": others}, lines)


def compare_runs(some: Sequence[Path], others: Sequence[Path]) -> list[Comparison]:
    """Compare two sets of runs at equal steps, tokens and seconds. Raises ConfigError.

    A budget is left out if it picks the evaluations of an earlier one, or if some run has none near
    it.
    """
    resolved = {folder.resolve() for folder in some}
    both = [folder for folder in others if folder.resolve() in resolved]
    if both:
        raise ConfigError(f"{both[0]} is in both sets. Name each run once.")
    curves = [[read_curve(folder) for folder in folders] for folders in (some, others)]
    whole = [drop_cut_runs(one) for one in curves]
    comparisons = compare_sets(whole[0], whole[1], BUDGETS)
    if whole != curves:
        with contextlib.suppress(ConfigError):  # a cut run may have no evaluation that others have
            comparisons += compare_sets(curves[0], curves[1], BUDGETS[:1])
    return comparisons


def compare_sets(
    some: Sequence[RunCurve], others: Sequence[RunCurve], budgets: Sequence[str]
) -> list[Comparison]:
    """Compare two sets of runs at equal budgets. Raises ConfigError."""
    pairs = pair_seeds([one.folder for one in some], [one.folder for one in others])
    comparisons = []
    seen: list[list[Evaluation]] = []
    for budget in budgets:
        found = pick_evaluations([*some, *others], budget)
        if found and found[1] not in seen:
            amount, picked = found
            seen.append(picked)
            comparisons += [
                compare_at(budget, amount, test_set, score, picked, len(some), pairs)
                for test_set, score in itertools.product(list_test_sets(picked), SCORES)
            ]
    return comparisons


def compare_at(
    budget: str,
    amount: float,
    test_set: str,
    score: str,
    picked: Sequence[Evaluation],
    count: int,
    pairs: Sequence[tuple[int, int]],
) -> Comparison:
    """Compare the first `count` evaluations with the others. pairs: of runs with the same seed."""
    table, all_rows = tabulate(picked, test_set, score)
    some = table[:count]
    others = table[count:]
    signs = None
    if len(pairs) > 1:
        by_run = table.mean(axis=1)
        differences = np.array([by_run[a] - by_run[count + b] for a, b in pairs])
        signs = SignFlips(*intervals.flip_signs(differences), len(pairs))
    return Comparison(
        budget,
        amount,
        test_set,
        score,
        steps=([one.steps for one in picked[:count]], [one.steps for one in picked[count:]]),
        rows=table.shape[1],
        all_rows=all_rows,
        means=(intervals.compute_mean_interval(some), intervals.compute_mean_interval(others)),
        difference=intervals.compare_scores(some, others),
        signs=signs,
    )


def pair_seeds(some: Sequence[Path], others: Sequence[Path]) -> list[tuple[int, int]]:
    """Return the indices of the runs of the two sets that have the same data.seed."""
    seeds = {read_seed(folder): index for index, folder in enumerate(others)}
    pairs = []
    for index, folder in enumerate(some):
        seed = read_seed(folder)
        other = seeds.pop(seed, None)
        if seed is not None and other is not None:
            pairs.append((index, other))
    return pairs


def warn(sets: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return a line for each reason to read a comparison with care. sets: {name: runs}."""
    lines = warn_of_repeated_seeds(sets)
    folders = itertools.chain.from_iterable(sets.values())
    last = {folder: read_curve(folder).evaluations[-1] for folder in folders}
    latest = max(one.steps for one in last.values())
    by_content: dict[str, Path] = {}
    for folder, one in last.items():
        if one.steps < latest:
            lines.append(
                f"WARNING     {folder} ends at step {one.steps}, others at {latest}. Look at the "
                "steps below."
            )
        first = by_content.setdefault(hash_file(one.path), folder)
        if first != folder:
            lines.append(f"WARNING     {folder} is a copy of {first}: these runs are one run.")
    return [*lines, *warn_of_other_scores([*last.values()])]


def warn_of_other_scores(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a line for each key that decides a score, and differs between the evaluations."""
    first = read_scoring(evaluations[0])
    runs: dict[str, list[str]] = {}
    for one in evaluations[1:]:
        for text in read_scoring(one).list_changes(first).values():
            runs.setdefault(text, []).append(str(one.path))
    return [
        f"WARNING     {', '.join(paths)}: not scored as {evaluations[0].path}: {text}. That may "
        "be the difference."
        for text, paths in runs.items()
    ]


def warn_of_repeated_seeds(sets: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return a line for each set in which runs have the same seed. sets: {name: runs}."""
    lines = []
    for name, folders in sets.items():
        seeds = [seed for seed in map(read_seed, folders) if seed is not None]
        if len(set(seeds)) < len(seeds):
            number = count_nouns(len(set(seeds)), "value")
            lines.append(
                f"WARNING     {len(seeds)} runs of {name} have {number} of data.seed. Runs of one "
                "seed are alike, so the intervals may be too short."
            )
    return lines


# --- text and JSON --------------------------------------------------------------------------------


def describe(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the lines that the command prints."""
    first = comparisons[0]
    counts = [len(steps) for steps in first.steps]
    rows = {one.test_set: describe_rows(one.rows, one.all_rows) for one in comparisons}
    shown = "; ".join(f"{name}: {text}" for name, text in rows.items())
    lines = [
        f"A: {count_nouns(counts[0], 'run')}, B: {count_nouns(counts[1], 'run')}, "
        f"{shown if len(rows) > 1 else rows[first.test_set]}. "
        f"Brackets: {intervals.LEVEL:.0%} intervals over {describe_sources(counts)}."
    ]
    last = None
    for one in comparisons:
        if (one.budget, one.amount) != last:
            last = (one.budget, one.amount)
            lines.append(describe_budget(one, counts))
        if len(rows) > 1 and one.score == SCORES[0]:
            lines.append(f"  {one.test_set}")
        lines += describe_score(one)
    few = {one.test_set: one for one in comparisons if 2 * one.rows < one.all_rows}
    for name, one in few.items():
        lines.append(
            f"WARNING     {name}: only {one.rows} of {one.all_rows} held-out rows are in all runs. "
            "Rows with another prompt or another truth are other rows."
        )
    missing = [budget for budget in BUDGETS if budget not in {one.budget for one in comparisons}]
    if missing:
        lines.append(
            f"At equal {' and equal '.join(missing)}, the evaluations are the same, a run has none "
            "near it (trainer.test_freq), or it is not known what a run has spent."
        )
    if first.difference.interval is None:
        lines.append(ONE_RUN)
    return lines


def describe_sources(counts: Sequence[int]) -> str:
    """Say over what the intervals of sets with these numbers of runs are."""
    if max(counts) == 1:
        return "rows only"
    return "seeds and rows" + (", of the single run over rows only" if 1 in counts else "")


def describe_rows(shared: int, total: int) -> str:
    """Say how many rows are compared."""
    lost = "" if shared == total else f" of {total}, which all runs have verified"
    return f"{shared} held-out rows{lost}"


def describe_budget(one: Comparison, usual: Sequence[int]) -> str:
    """Return the line about a budget. usual: the numbers of runs of the first comparison."""
    counts = [len(steps) for steps in one.steps]
    if one.budget == "steps" and counts != usual:
        return f"At equal steps ({one.amount:.0f}), {counts[0]} and {counts[1]} runs:"
    if one.budget == "steps":
        return f"At equal steps ({one.amount:.0f}):"
    steps = [", ".join(str(step) for step in sorted(set(steps))) for steps in one.steps]
    text = f"At equal {one.budget} ({one.amount:,.0f}), the last evaluations within them:"
    return f"{text} A after step {steps[0]}, B after step {steps[1]}:"


def describe_score(one: Comparison) -> list[str]:
    """Return the lines about one score at one budget."""
    a, b = one.means
    lines = [f"    {one.score:7}A {format_interval(a)}   B {format_interval(b)}"]
    difference = one.difference
    if difference.interval is None:
        text = format_interval(difference.over_rows, "+")
        return [*lines, f"           A - B {text}, over rows only"]
    text = f"           A - B {format_interval(difference.interval, '+')}"
    if difference.p_value is not None:
        text += f", p = {difference.p_value:.2g}"
    if one.signs:
        text += f" (sign flips of {one.signs.pairs} seeds: {one.signs.p_value:.2g}"
        text += f", not below {one.signs.smallest:.2g})"
    lines.append(text)
    seed_sd = math.sqrt(difference.seed_variance)
    needed = intervals.find_needed_seeds(difference)
    seeds = "More seeds would not show so small a difference on these rows"
    if needed is not None:
        seeds = f"A difference of this size takes {needed} seeds each"
    text = f"{seeds} (power {intervals.POWER:.0%}; standard deviation by seed {seed_sd:.2g})"
    return [*lines, f"           {text}"]


def describe_runs(folders: Sequence[Path]) -> list[str]:
    """Return a line for each score of a single set of runs, at its last common step."""
    curves = drop_cut_runs([read_curve(folder) for folder in folders])
    step, picked = pick_step(curves)
    starts = find_starts(curves) if step else []
    lines = []
    test_sets = list_test_sets(picked)
    for test_set, score in itertools.product(test_sets, SCORES):
        table, total = tabulate(picked, test_set, score)
        text = format_interval(intervals.compute_mean_interval(table))
        runs = count_nouns(len(table), "run")
        runs += ", so over rows only" if len(table) == 1 else ""
        rows = describe_rows(table.shape[1], total)
        name = f"{test_set} {score}" if len(test_sets) > 1 else score
        lines.append(f"{name} at step {step:.0f}: {text}, {runs}, {rows}")
        if starts and test_set in list_test_sets(starts):
            lines.append(f"    {describe_gain(picked, starts, test_set, score)}")
    return lines


def find_starts(curves: Sequence[RunCurve]) -> list[Evaluation]:
    """Return the evaluations before the first step, [] if a run has none."""
    by_step = [curve.by_step for curve in curves]
    return [steps[0] for steps in by_step] if all(0 in steps for steps in by_step) else []


def describe_gain(
    picked: Sequence[Evaluation], starts: Sequence[Evaluation], test_set: str, score: str
) -> str:
    """Return the difference of a set of runs from its own evaluations before the first step."""
    table = tabulate([*picked, *starts], test_set, score).scores
    after = table[: len(picked)]
    before = table[len(picked) :]
    difference = intervals.compare_scores(after, before)
    gain = format_interval(difference.interval or difference.over_rows, "+")
    return f"{gain} since step 0, from {format_interval(intervals.compute_mean_interval(before))}"


def format_interval(interval: intervals.Interval, sign: str = "") -> str:
    """Format an estimate with its interval. sign: + to show it for positive numbers, too."""
    low, high = (f"{value:{sign}.3f}" for value in (interval.low, interval.high))
    return f"{interval.estimate:{sign}.3f} [{low}, {high}]"


def to_json(one: Comparison) -> dict[str, object]:
    """Return a comparison as plain data."""
    difference = one.difference
    return {
        **one._asdict(),
        "means": [interval_to_json(mean) for mean in one.means],
        "signs": one.signs and one.signs._asdict(),
        "difference": {
            **difference._asdict(),
            "interval": difference.interval and interval_to_json(difference.interval),
            "over_rows": interval_to_json(difference.over_rows),
            "needed_seeds": intervals.find_needed_seeds(difference),
        },
    }


def interval_to_json(interval: intervals.Interval) -> dict[str, float]:
    """Return an interval without its degrees of freedom, which may be infinite."""
    return {name: value for name, value in interval._asdict().items() if name != "df"}


# --- curves of variants ---------------------------------------------------------------------------


class Band(NamedTuple):
    """The mean score of a variant's runs at each step that all of them evaluated."""

    name: str
    x: list[int]
    y: list[float]
    low: list[float]
    high: list[float]


def compute_band(name: str, curves: Sequence[RunCurve], test_set: str, score: str) -> Band:
    """Compute the curve of a variant, with intervals over its rows and, if it has some, seeds."""
    by_step = [curve.by_step for curve in curves]
    band = Band(name, [], [], [], [])
    for step in sorted(set(by_step[0]).intersection(*by_step[1:])):
        picked = [evaluations[step] for evaluations in by_step]
        table = tabulate(picked, test_set, score).scores
        interval = intervals.compute_mean_interval(table)
        band.x.append(step)
        band.y.append(interval.estimate)
        band.low.append(interval.low)
        band.high.append(interval.high)
    return band


def write_report(path: Path, variants: Mapping[str, Sequence[Path]], lines: Sequence[str]) -> None:
    """Write the report page of all runs, with the comparison. Raises ConfigError, RunError.

    variants: {name: its runs}. lines: of the comparison.
    """
    curves = {name: [read_curve(run) for run in runs] for name, runs in variants.items()}
    charts = []
    all_curves = itertools.chain.from_iterable(curves.values())
    everything = list(itertools.chain.from_iterable(one.evaluations for one in all_curves))
    for test_set, score in itertools.product(list_test_sets(everything), SCORES):
        bands = [compute_band(name, some, test_set, score) for name, some in curves.items()]
        title = f"Held-out {score} of {test_set}, mean and interval"
        charts.append({"title": title, "bands": [band._asdict() for band in bands]})
    folders = list(itertools.chain.from_iterable(variants.values()))
    features.write_comparison(path, folders, {"lines": list(lines), "charts": charts})
    say(f"The report is {path}")
