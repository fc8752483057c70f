"""Estimate the time to the end of a run from the steps that it has done.

A step's time is that of the stages in it, without a checkpoint. Checkpoints and evaluations have
their own times and frequencies. The first step after each start compiles and fills caches, so it
does not count if it is slower than the median of the others. All other steps count, skipped ones
too. A single step is shown as the median, with quartiles. The estimate is the mean step times the
steps left, because a few slow steps count, too. Its range is twice the standard error: of the steps
left, which vary, and of the mean, which was measured on a few. If steps get slower or faster, the
range ends at their last pace.

Not counted: the start, pauses between a stop and a resume, the report, the export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit.config import resources
from kit.config.keys import flatten, is_used, matches_any
from kit.config.redaction import redacted
from kit.data.json_lines import read_metrics
from kit.data.metrics import ALL_TOKENS
from kit.errors import ConfigError
from kit.runs.console import count_nouns

MIN_STEPS = 3
QUARTILES = (25, 50, 75)
STEP = "timing_s/step"
UPDATE = "timing_s/update_actor"  # `sft` has this and no STEP
SAVE = "timing_s/save_checkpoint"
TEST = "timing_s/testing"
START = "timing_s/start"
# Patterns of keys that decide nothing about the work of a step, an evaluation or a checkpoint, and
# keys that match but do. Recipes with other values of any other key do other work.
IDLE_KEYS = (
    "actor_rollout_ref.rollout.prometheus.*",
    "algorithm.gamma",
    "algorithm.lam",
    "env.keep_rollouts",
    "gym.policy_endpoint.*",
    "ray_kwargs.**",
    "trainer.*",
    "**.clip_ratio_*",
    "**.*_coef*",
    "**.optim.**",
    "**.seed",
    "**.temperature",
)
NOT_IDLE = (
    "trainer.critic_warmup",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.one_step_off",
)


class Range(NamedTuple):
    """A value with a lower and an upper limit."""

    low: float
    middle: float
    high: float


class Sample(NamedTuple):
    """Measured values of one kind, in order. typical: their median, with the quartiles."""

    typical: Range
    mean: float
    variance: float
    size: int
    last: float  # the line through the values at the last one


class Sum(NamedTuple):
    """The expected sum of values that are not measured yet, with its variance."""

    mean: float = 0.0
    variance: float = 0.0
    at_last_pace: float = 0.0

    def plus(self, sample: Sample, count: int) -> Sum:
        """Add `count` more values like those of a sample."""
        variance = sample.variance * (count + count**2 / sample.size)
        return Sum(
            self.mean + count * sample.mean,
            self.variance + variance,
            self.at_last_pace + count * sample.last,
        )

    def to_range(self) -> Range:
        """Return the sum with twice its standard error, or as far as the last pace leads.

        No part of it is negative.
        """
        margin = 2 * self.variance**0.5
        low = min(self.mean - margin, self.at_last_pace)
        return Range(max(0.0, low), self.mean, max(self.mean + margin, self.at_last_pace))


class Schedule(NamedTuple):
    """The length of a run, and how often it evaluates and saves."""

    total: int
    test_freq: int
    save_freq: int
    evaluates: bool  # whether it has held-out rows
    evaluates_first: bool  # also before the first step

    def count_due(self, freq: int, done: int) -> int:
        """Count the steps after `done` at which something of this frequency is due."""
        steps = range(done + 1, self.total + 1)
        return sum(step == self.total or (freq > 0 and step % freq == 0) for step in steps)


class Devices(NamedTuple):
    """The devices of a run, in words and number."""

    number: int
    unit: str  # of an hour of one of them
    name: str


class Measured(NamedTuple):
    """The times of a run, in seconds.

    steps: done. step: without warm-up. warm_up: seconds of these steps. test, save: None if there
    was none. tokens: of all episodes of a step, prompts included; None if not measured. spent: of
    all steps, evaluations and checkpoints. start: of all starts.
    """

    steps: int
    warm_up: float
    step: Sample
    test: Sample | None
    save: Sample | None
    tokens: Sample | None
    tokens_per_s: float
    spent: float
    start: float


class Estimate(NamedTuple):
    """What remains of a run. missing: kinds of work that are due, and were not measured yet."""

    steps: int
    evaluations: int
    checkpoints: int
    seconds: Range
    tokens: float | None
    missing: tuple[str, ...]


# --- measure -------------------------------------------------------------------------------------


def is_step(line: Mapping[str, float]) -> bool:
    """Whether a line of metrics.jsonl is of a training step."""
    return STEP in line or UPDATE in line


def measure(folder: Path) -> Measured:
    """Measure the steps of a run. Raises ConfigError if they are too few."""
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        raise ConfigError(f"{folder} is no run: it has no metrics.jsonl. Name a folder of runs/.")
    return measure_lines(lines, str(folder))


def measure_lines(lines: Sequence[Json], name: str) -> Measured:
    """Measure the steps of lines of metrics.jsonl. Raises ConfigError if they are too few."""
    seconds: list[float] = []
    firsts: list[int] = []  # the places of the first steps after a start
    saves: list[float] = []
    tests: dict[int, float] = {}  # a step may have two lines with the time of its evaluation
    is_first = True
    for line in lines:
        is_first = is_first or START in line
        if line.get(TEST):
            tests[line["step"]] = line[TEST]
        if is_step(line):
            if is_first:
                firsts.append(len(seconds))
            is_first = False
            seconds.append(measure_step(line))
            saves += [line[SAVE]] if line.get(SAVE) else []
    if len(seconds) < MIN_STEPS:
        raise ConfigError(
            f"{name} has {len(seconds)} training steps, and an estimate needs {MIN_STEPS}. Let it "
            "train longer, or name another run."
        )
    warm = find_warm_steps(seconds, firsts)
    tokens = list(filter(None, map(read_tokens, lines)))
    trained = sum(measure_step(line) for line in lines if is_step(line) and read_tokens(line))
    return Measured(
        steps=int(lines[-1]["step"]),
        warm_up=sum(seconds) - sum(warm),
        step=describe_sample(warm),
        test=describe_sample(list(tests.values())) if tests else None,
        save=describe_sample(saves) if saves else None,
        tokens=describe_sample(tokens) if tokens else None,
        tokens_per_s=sum(tokens) / trained if trained else 0.0,
        spent=sum(seconds) + sum(tests.values()) + sum(saves),
        start=sum(line[START] for line in lines if line.get(START)),
    )


def read_tokens(line: Json) -> float | None:
    """Return the tokens of a step, prompts included, None if it has none.

    They are those of all episodes; in earlier runs and in `sft`, of those that were trained on.
    """
    return line.get(ALL_TOKENS) or line.get("perf/total_num_tokens")


def measure_step(line: Json) -> float:
    """Return the seconds of a step without its checkpoint."""
    if STEP in line:
        return float(line[STEP] or 0.0) - float(line.get(SAVE) or 0.0)
    return float(line[UPDATE] or 0.0)


def find_warm_steps(seconds: Sequence[float], firsts: Sequence[int]) -> list[float]:
    """Return the times of all steps but the first ones that are slower than the others."""
    others = [value for place, value in enumerate(seconds) if place not in firsts]
    if not others:
        return list(seconds)
    usual = float(np.median(others))
    return [value for place, value in enumerate(seconds) if place not in firsts or value <= usual]


def describe_sample(values: Sequence[float]) -> Sample:
    """Return what the estimate needs of at least one value."""
    typical = Range(*map(float, np.percentile(values, QUARTILES)))
    variance = float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
    mean = float(np.mean(values))
    last = mean
    if len(values) >= MIN_STEPS:
        last = float(np.polyval(np.polyfit(range(len(values)), values, 1), len(values) - 1))
    return Sample(typical, mean, variance, len(values), last)


# --- estimate ------------------------------------------------------------------------------------


def read_config(folder: Path) -> DictConfig:
    """Read the recipe of a run. Raises ConfigError if it is no run."""
    path = folder / "config.yaml"
    try:
        text = path.read_text().replace("${", "\\${")  # from a folder of others: not resolved
        return cast(DictConfig, OmegaConf.create(text))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError):
        raise ConfigError(
            f"{folder} is no training run: it has no readable config.yaml. Name a folder of runs/."
        ) from None


def read_schedule(config: DictConfig, total: int | None = None) -> Schedule:
    """Read the schedule of a recipe. total: steps, instead of those of the recipe."""
    trainer = config.trainer
    return Schedule(
        total=total or int(trainer.total_training_steps),
        test_freq=int(trainer.test_freq),
        save_freq=int(trainer.save_freq),
        evaluates=bool(config.env.val_files),
        evaluates_first=bool(trainer.get("val_before_train", True)),
    )


def read_devices(config: DictConfig, command: str) -> Devices:
    """Return what a run occupies: GPUs, or the cores of this machine for a run on CPUs."""
    if config.trainer.device == "cpu":
        count = resources.cores() * int(config.trainer.nnodes)
        return Devices(count, "CPU hours", f"{count} cores")
    count = resources.all_gpus(config, command)
    return Devices(count, "device-hours", f"{count} GPUs")


def estimate_rest(measured: Measured, schedule: Schedule, done: int) -> Estimate:
    """Estimate the steps after `done`, with the evaluations and checkpoints that are due."""
    steps = max(0, schedule.total - done)
    evaluations = schedule.count_due(schedule.test_freq, done) if schedule.evaluates else 0
    if done == 0 and schedule.evaluates and schedule.evaluates_first:
        evaluations += 1
    checkpoints = schedule.count_due(schedule.save_freq, done)
    seconds = Sum().plus(measured.step, steps)
    missing = []
    for name, count, time in (
        ("evaluation", evaluations, measured.test),
        ("checkpoint", checkpoints, measured.save),
    ):
        if time:
            seconds = seconds.plus(time, count)
        elif count:
            missing.append(count_nouns(count, name))
    tokens = steps * measured.tokens.mean if measured.tokens else None
    return Estimate(steps, evaluations, checkpoints, seconds.to_range(), tokens, tuple(missing))


# --- lines of a run ------------------------------------------------------------------------------


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


def format_times(times: Range) -> str:
    """Return a time with its limits."""
    low, middle, high = map(format_duration, times)
    return f"{middle} ({low} to {high})"


def format_rest(rest: Estimate, devices: Devices) -> str:
    """Return the time and the device-hours of what remains."""
    hours = rest.seconds.middle / 3600 * devices.number
    text = f"{format_times(rest.seconds)}, {hours:.3g} {devices.unit} on {devices.name}"
    if rest.missing:
        text += f", plus {' and '.join(rest.missing)}, not measured yet"
    return text


def describe_running(folder: Path, config: DictConfig, command: str, total: int) -> list[str]:
    """Return a line about the rest of a run that trains now, none after its last step, `total`."""
    measured = measure(folder)
    rest = estimate_rest(measured, read_schedule(config, total), measured.steps)
    if not rest.steps:
        return []
    end = measured.steps + rest.steps
    return [f"price       to step {end}: {format_rest(rest, read_devices(config, command))}"]


def describe_earlier(config: DictConfig, command: str, runs: Path) -> list[str]:
    """Return the estimate of a whole run from an earlier one, none if no run did the same work."""
    found = find_earlier(config, runs)
    if not found:
        return []
    folder, measured = found
    rest = estimate_rest(measured, read_schedule(config), 0)
    text = format_rest(rest, read_devices(config, command))
    return [f"price       {text}, by {measured.step.size} steps of {folder}, without the start"]


def find_earlier(config: DictConfig, runs: Path) -> tuple[Path, Measured] | None:
    """Find the newest run that did the same work in each step; the folder's own run comes first."""
    own = Path(str(config.trainer.experiment_name))
    work = list_work(config)
    found = [*runs.glob("*/metrics.jsonl"), *runs.glob("*/*/metrics.jsonl")]  # also of a sweep

    def rank(folder: Path) -> tuple[bool, float]:
        """The own folder first, then the newest."""
        written_at = (folder / "metrics.jsonl").stat().st_mtime
        return (folder.relative_to(runs) != own, -written_at)

    for folder in sorted((path.parent for path in found), key=rank):
        try:
            if list_work(read_config(folder)) == work:
                return folder, measure(folder)
        except (ConfigError, OmegaConfBaseException, KeyError, TypeError):
            continue  # a folder of another kind, an old run, or one of two steps
    return None


def list_work(config: DictConfig) -> Json:
    """Return {key: value} of the keys that decide the work, as a run saves them."""
    return {
        key: value
        for key, value in flatten(redacted(config)).items()
        if is_used(key) and (key in NOT_IDLE or not matches_any(key, IDLE_KEYS))
    }
