"""The command `sweep`: runs of one recipe over seeds and variants, one after the other.

python algorithm.py sweep --config math_cpu --config cpu --seeds 3 --vary actor.optim.lr=1e-5,3e-5

The name of a run has its variant and its seed: NAME/lr=1e-5-seed1. If the command is repeated, it
continues: a run that is finished is skipped, and one that stopped resumes from its checkpoint. At
the end, each variant is compared with the first one.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kit.config.keys import ROOT
from kit.errors import ConfigError
from kit.extras.evidence import compare
from kit.extras.evidence.curves import find_runs
from kit.runs.cli import plan
from kit.runs.console import say

SHORT = {  # sections that --vary may leave out
    "actor": "actor_rollout_ref.actor",
    "rollout": "actor_rollout_ref.rollout",
    "model": "actor_rollout_ref.model",
    "ref": "actor_rollout_ref.ref",
}
DONE = "finished.txt"  # in the sweep's folder: the names of its finished runs


class SweepRun(NamedTuple):
    """A run of a sweep. arguments: key=value of its variant and seed."""

    variant: str
    seed: int
    name: str
    arguments: tuple[str, ...]


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the sweep cannot start, or if runs failed."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py sweep",
        description="Run a recipe with several seeds and variants, and compare the variants.",
    )
    parser.add_argument("--config", action="append", required=True, help="as of `train`")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant (default: 3)")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="values to compare; several --vary give all combinations",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="list the runs; start nothing")
    parser.add_argument("words", nargs="*", metavar="key=value", help="for all runs")
    args = parser.parse_intermixed_args(arguments)
    folder = run_sweep(args)
    if not args.dry_run:
        compare_variants(folder, list_variants(args.vary))


def run_sweep(args: argparse.Namespace) -> Path:
    """Check all variants, then run what is missing -> the folder of the runs.

    Raises ConfigError if a variant is invalid or a run failed.
    """
    if args.seeds < 1 or args.jobs < 1:
        raise ConfigError("--seeds and --jobs are numbers from 1. Change them.")
    variants = list_variants(args.vary)
    recipes = [plan(args.config, [*args.words, *changes]).recipe for _, changes in variants]
    name = recipes[0].trainer.experiment_name
    folder = Path("runs") / name
    runs = list(list_runs(name, variants, args.seeds))
    done = read_done(folder)
    left = [run for run in runs if run.name not in done]
    say(f"{len(runs)} runs in {folder}, {len(runs) - len(left)} of them finished")
    for run in left:
        say(f"    {run.name}: {' '.join(run.arguments)}")
    if args.dry_run:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        statuses = pool.map(lambda run: start(run, args, folder / DONE), left)
        failed = [run.name for run, status in zip(left, statuses, strict=True) if status]
    if failed:
        raise ConfigError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. Read the log of each "
            f"in {folder}, then repeat the command to continue."
        )
    return folder


def list_variants(vary: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, its key=value) of each combination of --vary. Raises ConfigError."""
    choices: list[list[tuple[str, str]]] = []
    for text in vary:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--vary {text} is not KEY=A,B. Give a key and its values.")
        section, dot, rest = key.partition(".")
        full = f"{SHORT.get(section, section)}{dot}{rest}"
        short = key.rpartition(".")[2]
        choices.append([(f"{short}={value}", f"{full}={value}") for value in values.split(",")])
    variants = []
    for combination in itertools.product(*choices):
        name = "-".join(part for part, _ in combination).replace("/", "_") or "base"
        variants.append((name, [change for _, change in combination]))
    return variants


def list_runs(
    name: str, variants: Sequence[tuple[str, list[str]]], seeds: int
) -> Iterator[SweepRun]:
    """The runs of a sweep: all variants of the first seed, then of the next."""
    for seed in range(1, seeds + 1):
        for variant, changes in variants:
            run_name = f"{name}/{variant}-seed{seed}"
            arguments = [*changes, f"data.seed={seed}", f"trainer.experiment_name={run_name}"]
            yield SweepRun(variant, seed, run_name, tuple(arguments))


def start(run: SweepRun, args: argparse.Namespace, done: Path) -> int:
    """Run one run to its end -> its exit status. Its output is in NAME.log next to its folder."""
    command = [sys.executable, str(ROOT / "algorithm.py"), "--quiet"]
    for config in args.config:
        command += ["--config", config]
    log = Path("runs") / f"{run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with log.open("ab") as out:
        status = subprocess.run(
            [*command, *args.words, *run.arguments], stdout=out, stderr=subprocess.STDOUT
        ).returncode
    if status and b"Nothing is left to train" in log.read_bytes().splitlines()[-1]:
        status = 0
    if status == 0:
        with done.open("a") as out:
            out.write(f"{run.name}\n")
    minutes = (time.monotonic() - begin) / 60
    say(f"{run.name}: {'finished' if status == 0 else f'status {status}'} after {minutes:.1f} min")
    return status


def read_done(folder: Path) -> list[str]:
    """The names of the finished runs of a sweep."""
    path = folder / DONE
    return path.read_text().split() if path.is_file() else []


def compare_variants(folder: Path, variants: Sequence[tuple[str, list[str]]]) -> None:
    """Print the comparison of each variant with the first one."""
    (first, _), *others = variants
    for name, _ in others:
        say(f"\nA = {name}, B = {first}")
        comparisons = compare.compare_runs(
            find_runs([f"{folder}/{name}-seed*"]), find_runs([f"{folder}/{first}-seed*"])
        )
        for line in compare.describe(comparisons):
            say(line)
