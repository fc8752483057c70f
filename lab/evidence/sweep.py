"""The command `sweep`: run a recipe with several seeds and variants, then compare the variants.

python algorithm.py sweep --config math_cpu --config cpu --seeds 3 --vary actor.optim.lr=1e-5,3e-5

The name of a run has its variant and its seed, as in runs/math_cpu/lr=1e-5-seed1. If you repeat the
command, it skips the runs that are finished. A run that was stopped resumes from its checkpoint.
A run of another recipe is refused.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kit.errors import ConfigError
from kit.recipe.keys import ROOT
from kit.run import checkpoints, cli, identity
from kit.run.console import say
from lab.evidence import compare, curves
from lab.run_folder import RunFolder

SHORT = ("actor", "rollout", "model", "ref")  # sections that --vary names without actor_rollout_ref
ALGORITHM = ROOT / "algorithm.py"
SEED_KEYS = ("data.seed", "actor_rollout_ref.rollout.seed")


class SweepRun(NamedTuple):
    """A run of a sweep, or a variant without a seed. configs, words: of its command line."""

    name: str
    variant: str  # a combination of the values of --vary
    configs: tuple[str, ...]
    words: tuple[str, ...]


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the sweep cannot start, or if runs failed."""
    args = parse_arguments(arguments)
    variants = list_variants(args.vary, args.config, args.words)
    words = (*variants[0].words, "trainer.resume_mode=disable")
    first = cli.plan(variants[0].configs, words, is_dry_run=True).recipe
    name = first.trainer.experiment_name
    pairs = itertools.product(args.seeds, variants)
    runs = [make_run(variant, name, seed) for seed, variant in pairs]
    left = [run for run in runs if not is_finished(run)]
    say(f"{len(runs)} runs in runs/{name}, {len(runs) - len(left)} of them finished")
    for run in left:
        say(f"    {run.name}")
    if args.dry_run:
        return
    failed = [run.name for run in left if start(run)]
    if failed:
        raise ConfigError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. Read runs/<name>.log "
            "of each, then repeat the command to continue."
        )
    compare_variants(Path("runs") / name, runs)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError if a key cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py sweep",
        description="Run a recipe with several seeds and variants, then compare the variants with "
        "the first one.",
    )
    parser.add_argument("--config", action="append", required=True, help="as for `train`")
    parser.add_argument(
        "--seeds",
        type=list_seeds,
        default="3",
        help="runs of each variant, or the seeds, as 4,5,6 (default: 3)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="values to compare. config=A,B compares recipes; base stands for none. Several "
        "--vary give all combinations",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs; start nothing")
    parser.add_argument("words", nargs="*", metavar="key=value", help="for all runs")
    args = parser.parse_intermixed_args(list(arguments))
    for text in (*args.words, *args.vary):
        if expand_key(text.partition("=")[0].lstrip("+")) in SEED_KEYS:
            raise ConfigError(f"{text}: a sweep sets this key for each run. Use --seeds.")
    return args


def list_seeds(text: str) -> list[int]:
    """Return the seeds that --seeds names: 1 to a number, or a list."""
    numbers = [int(number) for number in text.split(",")]
    return numbers if len(numbers) > 1 else list(range(1, numbers[0] + 1))


def list_variants(
    vary: Sequence[str], configs: Sequence[str], words: Sequence[str]
) -> list[SweepRun]:
    """Return each combination of the values of --vary, of runs with these configs and words.

    Raises ConfigError.
    """
    choices: list[list[tuple[str, str]]] = []
    for text in vary:
        key, _, values = text.partition("=")
        choices.append([(expand_key(key), value) for value in split_values(values)])
        if not key or not choices[-1]:
            raise ConfigError(f"--vary {text} is not KEY=A,B. Give a key and its values.")
    variants: dict[str, SweepRun] = {}
    for chosen in itertools.product(*choices):
        name = "-".join(name_value(key, value) for key, value in chosen) or "base"
        files = [value for key, value in chosen if key == "config" and value != "base"]
        changes = [f"{key}={value}" for key, value in chosen if key != "config"]
        if name in variants:
            raise ConfigError(
                f"Two variants would have the folder {name}. Rename the recipes or values of "
                f"--vary: {', '.join(vary)}."
            )
        variants[name] = SweepRun(name, name, (*configs, *files), (*words, *changes))
    return list(variants.values())


def expand_key(key: str) -> str:
    """Return the full name of a key that may begin with one of SHORT."""
    return f"actor_rollout_ref.{key}" if key.partition(".")[0] in SHORT else key


def name_value(key: str, value: str) -> str:
    """Return the part of a variant's name, and of its folder's, for a value of --vary."""
    if key == "config":
        return re.sub(r"\.ya?ml$", "", Path(value).name)
    return re.sub(r"[^\w.=+-]+", "_", f"{key.rpartition('.')[2]}={value}")


def split_values(text: str) -> list[str]:
    """Split A,B at its commas, except those in brackets, braces and quotes."""
    return re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text)


def make_run(variant: SweepRun, sweep: str, seed: int) -> SweepRun:
    """Return a run of a variant."""
    name = f"{sweep}/{variant.name}-seed{seed}"
    changes = [*(f"{key}={seed}" for key in SEED_KEYS), f"trainer.experiment_name={name}"]
    return variant._replace(name=name, words=(*variant.words, *changes))


def is_finished(run: SweepRun) -> bool:
    """Check the recipe of a run, and return whether it has its export.

    Raises ConfigError if the folder has a run of another recipe, or on other rows.
    """
    planned = cli.plan(run.configs, run.words, is_dry_run=True)
    if not planned.inputs.validation:
        raise ConfigError(f"{run.name} has no held-out rows to compare. Set env.val_files.")
    folder = Path("runs") / run.name
    before = identity.read_run(folder)
    changes = [*checkpoints.list_changes(before, planned.fingerprint).values()]
    changes += planned.fingerprint.list_row_changes(before)
    if changes and before.values:  # it has a run
        raise ConfigError(
            f"{folder} is a run of another recipe: {', '.join(changes):.300}. Set another "
            "trainer.experiment_name."
        )
    return checkpoints.is_exported(run.name, planned.recipe.last_step)


def start(run: SweepRun) -> int:
    """Run one run to its end, and return its exit status. Its output is in runs/<name>.log.

    If the sweep is stopped, so is the run: it gets the time to save.
    """
    options = itertools.chain.from_iterable(("--config", file) for file in run.configs)
    log = Path("runs") / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        command = [sys.executable, str(ALGORITHM), "--quiet", *options, *run.words]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = process.wait()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # Ctrl-C has reached the run, too
                process.terminate()
            process.wait()
            raise
    say(f"{run.name}: {'finished' if status == 0 else f'status {status}'}")
    return status


def compare_variants(folder: Path, runs: Sequence[SweepRun]) -> None:
    """Print the scores of the variants, and the comparison of each with the first one.

    Also write them to sweep.html in the sweep's folder. A run of the same name may have its report
    there.
    """
    variants: dict[str, list[RunFolder]] = {}
    for run in runs:
        evaluated = curves.open_evaluated(Path("runs") / run.name)
        variants.setdefault(run.variant, []).append(evaluated)
    (first, baselines), *others = variants.items()
    lines: list[str] = []
    for name, some in others:
        lines += [f"A = {name}, B = {first}"]
        comparisons = compare.compare_runs(some, baselines)
        lines += [*compare.warn({name: some, first: baselines}), *compare.describe(comparisons), ""]
    if not others:
        lines = [*compare.warn({first: baselines}), *compare.describe_runs(baselines)]
    for line in lines:
        say(line)
    compare.write_report(folder / "sweep.html", variants, lines)
