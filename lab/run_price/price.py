"""The command `price`: what a run has cost, and what it will cost to its end.

python algorithm.py price runs/A [--rate 2.5] [--steps 500]

The estimate is the mean step times the steps left, plus the evaluations and checkpoints that are
due. The first step after each start compiles and fills caches, so it is not in the mean. Not
counted: the start, pauses between a stop and a resume, the report, the export.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit.config import resources
from kit.config.keys import flatten, is_used, matches_any
from kit.config.recipe_text import read_saved
from kit.config.redaction import redacted
from kit.data.json_lines import read_steps
from kit.data.metrics import ALL_TOKENS, ZERO_VARIANCE, mean
from kit.errors import ConfigError
from kit.runs import identity
from kit.runs.console import count_nouns, say

MIN_STEPS = 3
STEP = "timing_s/step"
UPDATE = "timing_s/update_actor"  # `sft` has this and no STEP
SAVE = "timing_s/save_checkpoint"
TEST = "timing_s/testing"
START = "timing_s/start"  # in the line before the first step
# Keys that decide nothing about the work of a step: recipes that differ in others do other work
IDLE_KEYS = (
    *(f"trainer.{key}" for key in ("*_freq", "*name", "logger", "total_*", "default_local_dir")),
    "ray_kwargs.**",
    "**.optim.**",
    "**.seed",
)


class Costs(NamedTuple):
    """The times of a run in seconds, each a mean; None if there was none.

    counted: steps in the mean. step: without its checkpoint. tokens: of all episodes of a step,
    prompts included. spent: on all steps, evaluations and checkpoints so far.
    """

    done: int
    counted: int
    step: float
    test: float | None
    save: float | None
    tokens: float | None
    spent: float


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
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"--steps {args.steps} is no number of steps. Give 1 or more.")
    for line in describe(args.run.expanduser(), args.rate, args.steps):
        say(line)


def describe(folder: Path, rate: float | None = None, steps: int | None = None) -> Iterator[str]:
    """Lines about a run. rate: money per device-hour. steps: of the whole run.

    Raises ConfigError.
    """
    try:
        yield from describe_run(folder, rate, steps)
    except (OmegaConfBaseException, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{folder} has a recipe or metrics of another form ({error!r:.100}). Name another run."
        ) from None


def describe_run(folder: Path, rate: float | None, steps: int | None) -> Iterator[str]:
    """As `describe`. Raises other errors, too, if a value has another form."""
    lines = read_steps(folder / "metrics.jsonl")
    costs = measure(lines, folder)
    config = read_config(folder)
    total = steps or int(config.trainer.total_training_steps)
    waste = describe_waste(lines, int(config.actor_rollout_ref.rollout.n))
    command = "train" if waste else "sft"
    yield f"{folder}: step {costs.done} of {total}"
    yield f"step        {format_duration(costs.step)}, the mean of {costs.counted}"
    for name, seconds in (("evaluation", costs.test), ("checkpoint", costs.save)):
        if seconds:
            yield f"{name}  {format_duration(seconds)}"
    if costs.tokens:
        yield f"tokens      {costs.tokens:,.0f} a step, prompts included"
    yield f"so far      {describe_cost(costs.spent, config, command, rate)}"
    if total > costs.done:
        yield f"to the end  {describe_rest(costs, config, command, total, rate)}"
    yield from waste


# --- what was measured ---------------------------------------------------------------------------


def is_step(metrics: Mapping[str, object]) -> bool:
    """Whether a line of metrics.jsonl has the time of a training step."""
    seconds = metrics.get(STEP, metrics.get(UPDATE))
    return isinstance(seconds, int | float) and math.isfinite(seconds)


def measure(lines: Mapping[int, Json], folder: Path) -> Costs:
    """Measure the steps of a run, {step: its metrics}. Raises ConfigError if they are too few."""
    seconds = {step: measure_step(line) for step, line in lines.items() if is_step(line)}
    if len(seconds) < MIN_STEPS:
        raise ConfigError(
            f"{folder} has {len(seconds)} training steps, and an estimate needs {MIN_STEPS}. Let "
            "it train longer, or name another run of runs/."
        )
    # Each start is in the line of the step before
    warm = [time for step, time in seconds.items() if START not in lines.get(step - 1, {})]
    saves, tests, tokens = (
        [line[name] for line in lines.values() if line.get(name)]
        for name in (SAVE, TEST, ALL_TOKENS)
    )
    return Costs(
        done=max(seconds),
        counted=len(warm or seconds),
        step=mean(warm or seconds.values()),
        test=mean(tests) if tests else None,
        save=mean(saves) if saves else None,
        tokens=mean(tokens) if tokens else None,
        spent=sum(seconds.values()) + sum(tests) + sum(saves),
    )


def measure_step(line: Json) -> float:
    """Return the seconds of a step without its checkpoint."""
    if STEP in line:
        return float(line[STEP]) - float(line.get(SAVE) or 0.0)
    return float(line[UPDATE])


def read_config(folder: Path) -> DictConfig:
    """Read the recipe of a run. Raises ConfigError if it is no run."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no training run: it has no config.yaml. Name another run.")
    return cast(DictConfig, OmegaConf.create(escape(read_saved(path))))


def escape(value: Any) -> Any:  # of a recipe
    """Return a value whose ${...} are never resolved."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def describe_waste(lines: Mapping[int, Json], n: int) -> list[str]:
    """Return a line about episodes that taught nothing, none for `sft`. n: episodes of a group."""
    sampled = [line for line in lines.values() if line.get("rollout/episodes")]
    if not sampled:
        return []
    episodes = sum(line["rollout/episodes"] for line in sampled)
    failed = sum(
        (line.get("rollout/failed_frac") or 0) * line["rollout/episodes"] for line in sampled
    )
    filtered = episodes - failed - sum(line.get("rollout/kept") or 0 for line in sampled)
    equal = sum(line.get(ZERO_VARIANCE) or 0 for line in sampled) * n
    shares = [f"{count / episodes:.1%}" for count in (failed, filtered, equal)]
    return [
        f"unused      of the episodes, {shares[0]} failed, {shares[1]} were filtered, and "
        f"{shares[2]} had a group with equal rewards"
    ]


# --- the estimate --------------------------------------------------------------------------------


def describe_rest(
    costs: Costs, config: DictConfig, command: str, total: int, rate: float | None = None
) -> str:
    """Return the cost of the steps from costs.done to `total`."""
    done = costs.done
    trainer = config.trainer
    tests = count_due(trainer.test_freq, done, total) if config.env.val_files else 0
    tests += bool(done == 0 and tests and trainer.get("val_before_train", True))
    saves = count_due(trainer.save_freq, done, total)
    seconds = (total - done) * costs.step + tests * (costs.test or 0) + saves * (costs.save or 0)
    text = describe_cost(seconds, config, command, rate)
    for name, count, time in (("evaluation", tests, costs.test), ("checkpoint", saves, costs.save)):
        if count and time is None:
            text += f", plus {count_nouns(count, name)}, not measured yet"
    return text


def count_due(freq: int, done: int, total: int) -> int:
    """Count the steps after `done` at which something of this frequency is due."""
    steps = range(done + 1, total + 1)
    return sum(step == total or (freq > 0 and step % freq == 0) for step in steps)


def describe_cost(seconds: float, config: DictConfig, command: str, rate: float | None) -> str:
    """Return a time with its device-hours and money. On CPUs, the devices are cores."""
    if config.trainer.device == "cpu":
        count = resources.cores() * int(config.trainer.nnodes)
        hours = f"CPU hours on {count} cores"
    else:
        count = resources.all_gpus(config, command)
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


def describe_running(folder: Path, config: DictConfig, command: str, total: int) -> str:
    """Return the line about the rest of a run that trains now."""
    costs = measure(read_steps(folder / "metrics.jsonl"), folder)
    return f"price       to step {total}: {describe_rest(costs, config, command, total)}"


def describe_earlier(config: DictConfig, command: str, runs: Path) -> Iterator[str]:
    """Yield the estimate of a whole run from the newest one that did the same work, if any."""
    work = list_work(flatten(redacted(config)))
    total = int(config.trainer.total_training_steps)
    for path in sorted(runs.glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime):
        with contextlib.suppress(ConfigError):  # it is no recipe, or has two steps
            if list_work(identity.read_recipe(path)) == work:
                lines = read_steps(path.with_name("metrics.jsonl"))
                costs = measure(lines, path.parent)._replace(done=0)
                rest = describe_rest(costs, config, command, total)
                yield f"price       {rest}, as {path.parent}"
                return


def list_work(values: Json) -> Json:
    """Return {key: value} of the keys that decide the work of a step."""
    return {key: v for key, v in values.items() if is_used(key) and not matches_any(key, IDLE_KEYS)}
