"""The price of a run: time, tokens and device-hours, so far and to its end.

python algorithm.py price runs/A [--rate 2.5] [--steps 500]

The estimate is the mean step times the steps left, with evaluations and checkpoints as often as so
far. The first step after each start compiles and fills caches, so it is not in the mean. Not
counted: the start, pauses between a stop and a resume, the report, the export.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kit.data.metrics import ALL_TOKENS, ZERO_VARIANCE
from kit.errors import ConfigError
from kit.recipe import resources
from kit.run.console import say
from lab.run_folder import SAVE, STEP, RunFolder

MIN_STEPS = 3
ROLLOUT = "actor_rollout_ref.rollout"
UPDATE = "timing_s/update_actor"  # `sft` has this and no STEP
TEST = "timing_s/testing"
START = "timing_s/start"  # in the line before the first step


class Costs(NamedTuple):
    """The times of a run in seconds.

    counted: steps in the mean. step: the mean, without its checkpoint. other: evaluations and
    checkpoints, per step. tokens: of all episodes of a step, prompts included. spent: so far.
    """

    done: int
    counted: int
    step: float
    other: float
    tokens: float
    spent: float

    def estimate(self, total: int) -> float:
        """Return the seconds from the last step to `total`."""
        return (total - self.done) * (self.step + self.other)


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the folder is no run, or has too few steps."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py price",
        description="Time, tokens and device-hours of a run, so far and to its end.",
    )
    parser.add_argument("run", type=Path, help="run folder, such as runs/math")
    parser.add_argument(
        "--rate", type=float, metavar="MONEY", help="price of an hour of one device (GPU or core)"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps of the whole run (default: of its recipe)"
    )
    args = parser.parse_args(arguments)
    for line in describe(RunFolder(args.run.expanduser()), args.rate, args.steps):
        say(line)


def describe(run: RunFolder, rate: float | None = None, steps: int | None = None) -> Iterator[str]:
    """Yield lines about a run. rate: money per device-hour. steps: of the whole run."""
    costs = measure(run)
    total = steps or run.get_setting("trainer.total_training_steps")
    yield f"{run.path}: step {costs.done} of {total}"
    yield f"step        {format_duration(costs.step)}, the mean of {costs.counted}"
    if costs.other:
        yield f"other       {format_duration(costs.other)} a step for evaluations and checkpoints"
    if costs.tokens > 0:
        yield f"tokens      {costs.tokens:,.0f} a step, prompts included"
    yield f"so far      {describe_cost(costs.spent, run, rate)}"
    if total > costs.done:
        yield f"to the end  {describe_cost(costs.estimate(total), run, rate)}"
    yield from describe_waste(run)


# --- what was measured ---------------------------------------------------------------------------


def measure(run: RunFolder) -> Costs:
    """Measure the steps of a run. Raises ConfigError if they are too few."""
    saves = run.get_metric(SAVE).fillna(0.0)
    others = saves + run.get_metric(TEST).fillna(0.0)
    seconds = run.get_metric(STEP) - saves
    seconds = seconds.fillna(run.get_metric(UPDATE)).dropna()
    if len(seconds) < MIN_STEPS:
        raise ConfigError(
            f"{run.path} has {len(seconds)} training steps, and an estimate needs {MIN_STEPS}. Let "
            "it train longer, or name another run of runs/."
        )
    # each start is in the line of the step before
    is_first = run.get_metric(START).notna().shift(fill_value=False)
    warm = seconds[~is_first[seconds.index]]
    done = int(seconds.index[-1])
    return Costs(
        done=done,
        counted=len(warm),
        step=float(warm.mean()),
        other=float(others[others.index > 0].sum()) / done,
        tokens=float(run.get_metric(ALL_TOKENS).mean()),
        spent=float(seconds.sum() + others.sum()),
    )


def describe_waste(run: RunFolder) -> list[str]:
    """Return a line about episodes that taught nothing, none for `sft`."""
    episodes = run.get_metric("rollout/episodes")
    total = episodes.sum()
    if not total:
        return []
    failed = (run.get_metric("rollout/failed_frac") * episodes).sum()
    filtered = total - failed - run.get_metric("rollout/kept").sum()
    group_size = run.get_setting(f"{ROLLOUT}.n")
    equal = run.get_metric(ZERO_VARIANCE).sum() * group_size
    return [
        f"unused      of the episodes, {failed / total:.1%} failed, {filtered / total:.1%} were "
        f"filtered, and {equal / total:.1%} had a group with equal rewards"
    ]


def describe_cost(seconds: float, run: RunFolder, rate: float | None) -> str:
    """Return a time with its device-hours and money. On CPUs, the devices are cores."""
    nodes = int(run.get_setting("trainer.nnodes"))
    if run.get_setting("trainer.device") == "cpu":
        count = resources.cores() * nodes
        hours = f"CPU hours on {count} cores"
    else:
        pools = (run.get_setting("trainer.resource_pools") or {}).values()
        per_node = run.get_setting("trainer.n_gpus_per_node")
        count = nodes * (per_node + sum(pool or 0 for pool in pools))
        separate = run.get_setting(f"{ROLLOUT}.nnodes")
        count += separate * run.get_setting(f"{ROLLOUT}.n_gpus_per_node") if separate else 0
        hours = f"device-hours on {count} GPUs"
    spent = seconds / 3600 * count
    money = "" if rate is None else f", money {spent * rate:.2f}"
    return f"{format_duration(seconds)}, {spent:.3g} {hours}{money}"


def format_duration(seconds: float) -> str:
    """Return seconds in a unit that a person would choose.

    >>> [format_duration(seconds) for seconds in (42, 754, 40_000, 400_000)]
    ['42 s', '12.6 min', '11.1 h', '4.6 days']
    """
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.3g} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:.3g} days"
