"""The command `compare`: is the difference between two sets of runs real?

python algorithm.py compare 'runs/a*' --with 'runs/b*'
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from kit.errors import ConfigError
from kit.extras.evidence import intervals
from kit.extras.evidence.curves import (
    SCORES,
    Evaluation,
    find_runs,
    pick_evaluations,
    read_curve,
    tabulate,
)
from kit.runs.console import say

BUDGETS = ("steps", "tokens", "seconds")


class Comparison(NamedTuple):
    """Two sets of runs at an equal budget, by one score.

    means: (of the first set, of the second). rows: held-out rows that all runs verified.
    signs: p-value of the sign flips over seeds that both sets have, and the smallest it can be.
    """

    budget: str
    amount: float
    score: str
    runs: tuple[int, int]
    rows: int
    means: tuple[intervals.Interval, intervals.Interval]
    difference: intervals.Difference
    signs: tuple[float, float] | None


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py compare",
        description="Compare two sets of runs on their held-out rows: A minus B.",
    )
    parser.add_argument("runs", nargs="+", metavar="A", help="run folders, such as 'runs/a*'")
    parser.add_argument(
        "--with", nargs="+", required=True, dest="others", metavar="B", help="the other runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    args = parser.parse_args(arguments)
    comparisons = compare_runs(find_runs(args.runs), find_runs(args.others))
    for line in describe(comparisons):
        say(line)
    if args.json:
        args.json.write_text(json.dumps([to_json(one) for one in comparisons], indent=1) + "\n")


def compare_runs(some: Sequence[Path], others: Sequence[Path]) -> list[Comparison]:
    """Compare two sets of runs at equal steps, tokens and seconds. Raises ConfigError."""
    both = sorted(set(some) & set(others))
    if both:
        raise ConfigError(f"{both[0]} is in both sets. Name each run once.")
    curves = [read_curve(folder) for folder in some]
    other_curves = [read_curve(folder) for folder in others]
    pairs = pair_seeds(some, others)
    comparisons = []
    for budget in BUDGETS:
        amount, picked = pick_evaluations([*curves, *other_curves], budget)
        for score in SCORES:
            comparisons.append(compare_at(budget, amount, score, picked, len(curves), pairs))
    return comparisons


def compare_at(
    budget: str,
    amount: float,
    score: str,
    evaluations: Sequence[Evaluation],
    count: int,
    pairs: Sequence[tuple[int, int]],
) -> Comparison:
    """Compare the first `count` evaluations with the others. pairs: of runs with the same seed."""
    table, rows = tabulate(evaluations, SCORES[score])
    some, others = table[:count], table[count:]
    signs = None
    if len(pairs) > 1:
        differences = some.mean(axis=1)[[a for a, _ in pairs]]
        differences = differences - others.mean(axis=1)[[b for _, b in pairs]]
        signs = intervals.flip_signs(differences)
    means = (intervals.compute_mean_interval(some), intervals.compute_mean_interval(others))
    difference = intervals.compare_scores(some, others)
    runs = (len(some), len(others))
    return Comparison(budget, amount, score, runs, len(rows), means, difference, signs)


def pair_seeds(some: Sequence[Path], others: Sequence[Path]) -> list[tuple[int, int]]:
    """(index, index) of the runs of the two sets that have the same data.seed."""
    seeds = {read_seed(folder): index for index, folder in enumerate(others)}
    pairs = []
    for index, folder in enumerate(some):
        other = seeds.pop(read_seed(folder), None)
        if other is not None:
            pairs.append((index, other))
    return pairs


def read_seed(folder: Path) -> object:
    """data.seed of a run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return (config.get("data") or {}).get("seed")


def describe(comparisons: Sequence[Comparison]) -> list[str]:
    """The lines that the command prints."""
    first = comparisons[0]
    lines = [
        f"A: {first.runs[0]} runs, B: {first.runs[1]} runs, {first.rows} held-out rows. Intervals "
        f"of {intervals.LEVEL:.0%} over seeds and rows."
    ]
    for one in comparisons:
        lines += describe_one(one)
    if first.difference.interval is None:
        lines.append(
            "A set has one run. Another seed could give another result, so there is no interval "
            "over seeds and no p-value. Run more seeds: `python algorithm.py sweep`."
        )
    return lines


def describe_one(one: Comparison) -> list[str]:
    """The lines about one score at one budget."""
    amount = f"{one.amount:,.0f}"
    title = f"at {amount} {one.budget}, {one.score}:"
    a, b = one.means
    lines = [f"{title} A {show(a)}, B {show(b)}"]
    difference = one.difference
    if difference.interval is None:
        lines.append(f"    A - B {show(difference.over_rows)} over rows alone")
        return lines
    lines.append(f"    A - B {show(difference.interval)}, p = {difference.p_value:.3g}")
    if one.signs:
        p_value, smallest = one.signs
        lines.append(f"    sign flips over seeds: p = {p_value:.3g}, at least {smallest:.3g} here")
    needed = intervals.find_needed_seeds(difference)
    if needed is None:
        lines.append("    no number of seeds would show so small a difference on these rows")
    else:
        lines.append(
            f"    {needed} seeds each would show such a difference in {intervals.POWER:.0%} of the "
            f"cases; a seed changes a score by {math.sqrt(difference.seed_variance):.2g} "
            "(standard deviation)"
        )
    return lines


def show(interval: intervals.Interval) -> str:
    """An estimate with its interval."""
    return f"{interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def to_json(one: Comparison) -> dict[str, object]:
    """A comparison as plain data."""
    difference = one.difference
    return {
        **one._asdict(),
        "means": [mean._asdict() for mean in one.means],
        "difference": {
            **difference._asdict(),
            "interval": difference.interval and difference.interval._asdict(),
            "over_rows": difference.over_rows._asdict(),
            "needed_seeds": intervals.find_needed_seeds(difference),
        },
    }
