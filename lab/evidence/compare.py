"""The command `compare`: is the difference between two sets of runs real?

python algorithm.py compare 'runs/a*' --with 'runs/b*' [--json FILE] [--report FILE.html]

The runs are compared on the held-out rows that all of them evaluated, at equal steps, at equal
tokens and at equal seconds. intervals.py has the statistics.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kit.errors import ConfigError
from kit.run import files
from kit.run.console import count_nouns, say
from lab.evidence import intervals
from lab.evidence.curves import (
    SCORES,
    Evaluation,
    drop_cut_runs,
    find_runs,
    index_by_step,
    list_test_sets,
    pick_evaluations,
    pick_step,
    read_scoring,
    read_seed,
    tabulate,
)
from lab.report import report_page
from lab.run_folder import RunFolder

BUDGETS = ("steps", "tokens", "seconds")
ONE_RUN = (
    "One of the sets has one run. Another seed could give another result, so there is no interval "
    "over seeds and no p-value. Run more seeds with `python algorithm.py sweep`."
)


@dataclasses.dataclass(frozen=True)
class Comparison:
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
    needed_seeds: int | None


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
    sets = {"A": find_runs(args.runs), "B": find_runs(args.others)}
    comparisons = compare_runs(*sets.values())
    lines = [*warn(sets), *describe(comparisons)]
    for line in lines:
        say(line)
    if args.json:
        values = [dataclasses.asdict(one) for one in comparisons]
        with files.explain_write_errors(args.json):
            args.json.write_text(json.dumps(values, indent=1) + "\n")
    if args.report:
        write_report(args.report, sets, lines)


def compare_runs(some: Sequence[RunFolder], others: Sequence[RunFolder]) -> list[Comparison]:
    """Compare two sets of runs at equal steps, tokens and seconds. Raises ConfigError.

    A budget is left out if it picks the evaluations of an earlier one, or if some run has none near
    it.
    """
    resolved = {run.path.resolve() for run in some}
    both = [run.path for run in others if run.path.resolve() in resolved]
    if both:
        raise ConfigError(f"{both[0]} is in both sets. Name each run once.")
    whole = [drop_cut_runs(runs) for runs in (some, others)]
    comparisons = compare_sets(whole[0], whole[1], BUDGETS)
    if sum(map(len, whole)) < len(some) + len(others):
        with contextlib.suppress(ConfigError):  # a cut run may have no evaluation that others have
            comparisons += compare_sets(some, others, BUDGETS[:1])
    return comparisons


def compare_sets(
    some: Sequence[RunFolder], others: Sequence[RunFolder], budgets: Sequence[str]
) -> list[Comparison]:
    """Compare two sets of runs at equal budgets. Raises ConfigError."""
    comparisons = []
    seen: list[list[Evaluation]] = []
    for budget in budgets:
        found = pick_evaluations([*some, *others], budget)
        if found and found[1] not in seen:
            amount, picked = found
            seen.append(picked)
            comparisons += [
                compare_at(budget, amount, test_set, score, picked, len(some))
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
) -> Comparison:
    """Compare the first `count` evaluations with the others."""
    table, all_rows = tabulate(picked, test_set, score)
    difference = intervals.compare_scores(table[:count], table[count:])
    return Comparison(
        budget,
        amount,
        test_set,
        score,
        steps=([one.steps for one in picked[:count]], [one.steps for one in picked[count:]]),
        rows=table.shape[1],
        all_rows=all_rows,
        means=(
            intervals.compute_mean_interval(table[:count]),
            intervals.compute_mean_interval(table[count:]),
        ),
        difference=difference,
        needed_seeds=intervals.find_needed_seeds(difference),
    )


def warn(sets: Mapping[str, Sequence[RunFolder]]) -> list[str]:
    """Return a line for each reason to read a comparison with care. sets: {name: runs}."""
    lines = []
    for name, runs in sets.items():
        seeds = [seed for seed in map(read_seed, runs) if seed is not None]
        if len(set(seeds)) < len(seeds):
            number = count_nouns(len(set(seeds)), "value")
            lines.append(
                f"{len(seeds)} runs of {name} have {number} of data.seed. Runs of one seed are "
                "alike, so the intervals may be too short."
            )
    everything = list(itertools.chain.from_iterable(sets.values()))
    latest = max(run.evaluations[-1].steps for run in everything)
    scoring = read_scoring(everything[0], everything[0].evaluations[-1])
    by_content: dict[bytes, Path] = {}  # {evaluation: its first run}
    changes: dict[str, list[str]] = {}  # {what decides a score and differs from the first: runs}
    for run in everything:
        last = run.evaluations[-1]
        if last.steps < latest:
            lines.append(
                f"{run.path} ends at step {last.steps}, others at {latest}. Look at the steps "
                "below."
            )
        copied = by_content.setdefault(last.path.read_bytes(), run.path)
        if copied != run.path:
            lines.append(f"{run.path} is a copy of {copied}: these runs are one run.")
        for text in read_scoring(run, last).list_changes(scoring).values():
            changes.setdefault(text, []).append(str(run.path))
    for text, names in changes.items():
        lines.append(
            f"{', '.join(names)}: not scored as {everything[0].path}: {text}. That may be the "
            "difference."
        )
    return [f"WARNING     {line}" for line in lines]


# --- text -----------------------------------------------------------------------------------------


def describe(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the lines that the command prints."""
    first = comparisons[0]
    counts = count_runs(first)
    rows = {one.test_set: describe_rows(one.rows, one.all_rows) for one in comparisons}
    shown = "; ".join(f"{name}: {text}" for name, text in rows.items())
    sources = "rows only" if max(counts) == 1 else "seeds and rows"
    if 1 in counts and max(counts) > 1:
        sources += ", of the single run over rows only"
    lines = [
        f"A: {count_nouns(counts[0], 'run')}, B: {count_nouns(counts[1], 'run')}, "
        f"{shown if len(rows) > 1 else rows[first.test_set]}. "
        f"Brackets: {intervals.LEVEL:.0%} intervals over {sources}."
    ]
    for _, group in itertools.groupby(comparisons, key=lambda one: (one.budget, one.amount)):
        scores = list(group)
        lines.append(describe_budget(scores[0], counts))
        for one in scores:
            name = f"{one.test_set} {one.score}" if len(rows) > 1 else one.score
            lines += describe_score(one, name)
    return lines if first.difference.interval else [*lines, ONE_RUN]


def count_runs(one: Comparison) -> tuple[int, int]:
    """Return the numbers of runs of both sets."""
    return len(one.steps[0]), len(one.steps[1])


def describe_rows(shared: int, total: int) -> str:
    """Say how many rows are compared."""
    lost = "" if shared == total else f" of {total}, which all runs have verified"
    return f"{shared} held-out rows{lost}"


def describe_budget(one: Comparison, usual: tuple[int, int]) -> str:
    """Return the line about a budget. usual: the numbers of runs of the first comparison."""
    if one.budget == "steps":
        counts = count_runs(one)
        runs = "" if counts == usual else f", {counts[0]} and {counts[1]} runs"
        return f"At equal steps ({one.amount:.0f}){runs}:"
    steps = [", ".join(map(str, sorted(set(steps)))) for steps in one.steps]
    text = f"At equal {one.budget} ({one.amount:,.0f}), the last evaluations within them:"
    return f"{text} A after step {steps[0]}, B after step {steps[1]}:"


def describe_score(one: Comparison, name: str) -> list[str]:
    """Return the lines about one score at one budget."""
    a, b = map(format_interval, one.means)
    lines = [f"    {name:7}A {a}   B {b}"]
    difference = one.difference
    if difference.interval is None:
        text = format_interval(difference.over_rows, "+")
        return [*lines, f"           A - B {text}, over rows only"]
    text = f"           A - B {format_interval(difference.interval, '+')}"
    lines.append(text + ("" if difference.p_value is None else f", p = {difference.p_value:.2g}"))
    seeds = "More seeds would not show so small a difference on these rows"
    if one.needed_seeds is not None:
        seeds = f"A difference of this size takes {one.needed_seeds} seeds each"
    deviation = f"standard deviation by seed {math.sqrt(difference.seed_variance):.2g}"
    return [*lines, f"           {seeds} (power {intervals.POWER:.0%}; {deviation})"]


def describe_runs(runs: Sequence[RunFolder]) -> list[str]:
    """Return a line for each score of a set of runs at its last common step, and their gain."""
    whole = drop_cut_runs(runs)
    step, picked = pick_step(whole)
    first = [run.evaluations[0] for run in whole]
    starts = [one for one in first if step and one.steps == 0]
    lines = []
    for test_set, score in itertools.product(list_test_sets([*picked, *starts]), SCORES):
        table, total = tabulate(picked, test_set, score)
        text = format_interval(intervals.compute_mean_interval(table))
        counts = count_nouns(len(table), "run") + (", so over rows only" if len(table) == 1 else "")
        rows = describe_rows(table.shape[1], total)
        lines.append(f"{test_set} {score} at step {step:.0f}: {text}, {counts}, {rows}")
        if len(starts) == len(picked):
            one = compare_at("steps", step, test_set, score, [*picked, *starts], len(picked))
            gain = format_interval(one.difference.interval or one.difference.over_rows, "+")
            lines.append(f"    {gain} since step 0, from {format_interval(one.means[1])}")
    return lines


def format_interval(interval: intervals.Interval, sign: str = "") -> str:
    """Format an estimate with its interval. sign: + to show it for positive numbers, too."""
    low, high = (f"{value:{sign}.3f}" for value in (interval.low, interval.high))
    return f"{interval.estimate:{sign}.3f} [{low}, {high}]"


# --- curves of variants ---------------------------------------------------------------------------


def compute_band(
    name: str, runs: Sequence[RunFolder], test_set: str, score: str
) -> dict[str, object]:
    """Compute the mean score of a variant, with its interval, at each step that all runs have."""
    by_step = [index_by_step(run) for run in runs]
    steps = sorted(set(by_step[0]).intersection(*by_step[1:]))
    tables = [tabulate([one[step] for one in by_step], test_set, score).scores for step in steps]
    bands = [intervals.compute_mean_interval(table) for table in tables]
    return {
        "name": name,
        "x": steps,
        "y": [band.estimate for band in bands],
        "low": [band.low for band in bands],
        "high": [band.high for band in bands],
    }


def write_report(
    path: Path, variants: Mapping[str, Sequence[RunFolder]], lines: Sequence[str]
) -> None:
    """Write the report page of all runs, with the comparison. Raises ConfigError, RunError.

    variants: {name: its runs}. lines: of the comparison.
    """
    everything = list(itertools.chain.from_iterable(variants.values()))
    evaluations = list(itertools.chain.from_iterable(run.evaluations for run in everything))
    charts = []
    for test_set, score in itertools.product(list_test_sets(evaluations), SCORES):
        bands = [compute_band(name, runs, test_set, score) for name, runs in variants.items()]
        title = f"Held-out {score} of {test_set}, mean and interval"
        charts.append({"title": title, "bands": bands})
    report_page.write_page(everything, path, {"lines": list(lines), "charts": charts})
    say(f"The report is {path}")
