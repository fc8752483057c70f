"""The command `price`: what a run has cost, and what it will cost to its end.

python algorithm.py price runs/A [--rate 2.5] [--steps 500]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from kit.data.json_lines import read_metrics
from kit.errors import ConfigError
from kit.extras.run_price import estimate, waste
from kit.extras.run_price.estimate import Devices, Estimate, Measured, Schedule
from kit.runs.console import say


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
    if args.rate is not None and not 0 <= args.rate < math.inf:
        raise ConfigError(f"--rate {args.rate:g} is no price. Give a number of at least 0.")
    for line in describe(args.run.expanduser(), args.rate, args.steps):
        say(line)


def describe(folder: Path, rate: float | None = None, steps: int | None = None) -> Iterator[str]:
    """Lines about a run. rate: money per device-hour. steps: of the whole run.

    Raises ConfigError.
    """
    measured = estimate.measure(folder)
    config = estimate.read_config(folder)
    if steps is not None and steps <= measured.steps:
        raise ConfigError(
            f"--steps {steps} is not after step {measured.steps}, which {folder} has reached. Give "
            "a larger number, or leave it out."
        )
    schedule = estimate.read_schedule(config, steps)
    command = "train" if is_of_train(folder) else "sft"
    devices = estimate.read_devices(config, command)
    rest = estimate.estimate_rest(measured, schedule, measured.steps)
    yield f"{folder}: step {measured.steps} of {schedule.total}, median (quartiles)"
    yield from describe_times(measured, schedule)
    yield f"so far      {describe_spent(measured, devices, rate)}"
    if rest.steps:
        yield f"to the end  {describe_rest(rest, devices, rate)}"
    if command == "train":
        yield from describe_waste(folder)
    yield (
        f"not counted {estimate.format_duration(measured.start)} to start, pauses between a stop "
        "and a resume, report, export"
    )


def is_of_train(folder: Path) -> bool:
    """Whether a run sampled episodes, which `sft` does not."""
    return any("rollout/episodes" in line for line in read_metrics(folder / "metrics.jsonl"))


def describe_times(measured: Measured, schedule: Schedule) -> Iterator[str]:
    """The times of a step, an evaluation and a checkpoint, and the tokens."""
    note = ""
    if measured.warm_up:
        note = f", without first steps of {estimate.format_duration(measured.warm_up)}"
    times = estimate.format_times(measured.step.typical)
    yield f"step        {times}, of {measured.step.size} steps{note}"
    if measured.test:
        times = estimate.format_times(measured.test.typical)
        yield f"evaluation  {times}, {say_freq(schedule.test_freq)}"
    if measured.save:
        times = estimate.format_times(measured.save.typical)
        yield f"checkpoint  {times}, {say_freq(schedule.save_freq)}"
    if measured.tokens:
        low, median, high = measured.tokens.typical
        yield (
            f"tokens      {median:,.0f} ({low:,.0f} to {high:,.0f}) a step, prompts included; "
            f"{measured.tokens_per_s:,.0f} a second"
        )


def say_freq(freq: int) -> str:
    """How often something is done."""
    return f"every {freq} steps and at the end" if freq > 0 else "at the end"


def describe_spent(measured: Measured, devices: Devices, rate: float | None) -> str:
    """The time and money of all steps, evaluations and checkpoints so far."""
    hours = measured.spent / 3600 * devices.number
    text = f"{estimate.format_duration(measured.spent)}, {hours:.3g} {devices.unit}"
    text += f" on {devices.name}"
    return text if rate is None else f"{text}, money {hours * rate:.2f}"


def describe_rest(rest: Estimate, devices: Devices, rate: float | None) -> str:
    """The time, tokens and money of the remaining steps."""
    text = estimate.format_rest(rest, devices)
    if rest.tokens:
        text += f", {rest.tokens:,.0f} tokens"
    if rate is None:
        return text
    low, middle, high = (seconds / 3600 * devices.number * rate for seconds in rest.seconds)
    return f"{text}, money {middle:.2f} ({low:.2f} to {high:.2f})"


def describe_waste(folder: Path) -> Iterator[str]:
    """The shares of the episodes from which nothing was learned."""
    found = waste.measure_waste(folder)
    if not found.all.episodes:
        yield "unused      not known: no rollouts files of steps are left (env.keep_rollouts)"
        return
    yield f"unused      share of the episodes, and of the sampled tokens, of {found.steps} steps:"
    for kind, spent in found.by_kind.items():
        episodes = spent.episodes / found.all.episodes
        tokens = spent.tokens / found.all.tokens if found.all.tokens else 0.0
        yield f"            {kind:14} {episodes:6.1%} {tokens:6.1%}"
