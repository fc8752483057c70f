"""The command `sweep`: run a recipe with several seeds and variants, then compare the variants.

python algorithm.py sweep --config math_cpu --config cpu --seeds 3 --vary actor.optim.lr=1e-5,3e-5

The name of a run has its variant and its seed, as in runs/math_cpu/lr=1e-5-seed1. If you repeat the
command, it skips the runs that are finished. A run that was stopped resumes from its checkpoint.
A run of another recipe is refused.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kit.config import resources
from kit.config.keys import ROOT
from kit.errors import ConfigError
from kit.extras.evidence import compare
from kit.runs import checkpoints, cli, identity
from kit.runs.console import say

SHORT = {  # sections that --vary may leave out, as the documentation does
    "actor": "actor_rollout_ref.actor",
    "rollout": "actor_rollout_ref.rollout",
    "model": "actor_rollout_ref.model",
    "ref": "actor_rollout_ref.ref",
}
ALGORITHM = ROOT / "algorithm.py"
CHANGES_SHOWN = 3
TRACKERS = ("WANDB_RUN_ID", "SWANLAB_RUN_ID", "TENSORBOARD_DIR", "VERL_FILE_LOGGER_PATH")
SEED_KEYS = ("data.seed", "actor_rollout_ref.rollout.seed")


class Variant(NamedTuple):
    """A combination of the values of --vary. configs: recipes that it adds."""

    name: str
    configs: tuple[str, ...]
    changes: tuple[str, ...]  # key=value


class SweepRun(NamedTuple):
    """A run of a sweep, which is called in a folder.

    configs, words: of its command line. planned: its variant, with other seeds and another name.
    """

    name: str
    variant: str
    planned: cli.Plan
    configs: tuple[str, ...]
    words: tuple[str, ...]
    folder: Path

    @property
    def command(self) -> list[str]:
        """The command line."""
        options = itertools.chain.from_iterable(("--config", file) for file in self.configs)
        return [sys.executable, str(ALGORITHM), "--quiet", *options, *self.words]


class Ended(NamedTuple):
    """How a run ended."""

    status: int  # 0: finished
    minutes: float


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the sweep cannot start, or if runs failed."""
    args = parse_arguments(arguments)
    variants = list_variants(args.vary)
    plans = check_variants(args, variants)
    name = plans[0].recipe.trainer.experiment_name
    runs = list(list_runs(name, args, variants, plans))
    for run in runs:
        check_run(run)
    left = [run for run in runs if not is_finished(run)]
    say(f"{len(runs)} runs in runs/{name}, {len(runs) - len(left)} of them finished")
    for run in left:
        say(f"    {run.name}")
    if args.dry_run:
        return
    statuses = run_through_ray(left) if args.parallel else run_in_turn(left)
    failed = [run.name for run, status in zip(left, statuses, strict=True) if status]
    if failed:
        raise ConfigError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}. Read runs/<name>.log "
            "of each, then repeat the command to continue."
        )
    compare_variants(Path("runs") / name, runs)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError if --seeds is no number of seeds."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py sweep",
        description="Run a recipe with several seeds and variants, then compare the variants with "
        "the first one.",
    )
    parser.add_argument("--config", action="append", required=True, help="as for `train`")
    parser.add_argument(
        "--seeds", default="3", help="runs of each variant, or the seeds, as 4,5,6 (default: 3)"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="values to compare. config=A,B compares recipes; base stands for none. Several "
        "--vary give all combinations",
    )
    parser.add_argument(
        "--parallel", action="store_true", help="as many runs at the same time as GPUs are free"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs; start nothing")
    parser.add_argument("words", nargs="*", metavar="key=value", help="for all runs")
    args = parser.parse_intermixed_args(list(arguments))
    is_list = re.fullmatch(r"[1-9]\d*|\d+(,\d+)+", args.seeds)
    if not is_list or len(set(list_seeds(args.seeds))) < len(list_seeds(args.seeds)):
        raise ConfigError(
            f"--seeds {args.seeds} is no number of seeds, and no list of different ones such as "
            "4,5,6. Change it."
        )
    for text in (*args.words, *args.vary):
        if expand_key(text.partition("=")[0].lstrip("+")) in SEED_KEYS:
            raise ConfigError(f"{text}: a sweep sets this key for each run. Use --seeds.")
    return args


def list_seeds(text: str) -> list[int]:
    """Return the seeds that --seeds names: 1 to a number, or a list."""
    numbers = [int(number) for number in text.split(",")]
    return numbers if len(numbers) > 1 else list(range(1, numbers[0] + 1))


def list_variants(vary: Sequence[str]) -> list[Variant]:
    """Return each combination of the values of --vary. Raises ConfigError."""
    choices: list[list[Variant]] = []
    for text in vary:
        key, _, values = text.partition("=")
        split = split_values(values)
        if not key or not all(split) or len(set(split)) < len(split):
            raise ConfigError(
                f"--vary {text} is not KEY=A,B with different values. Give a key and its values."
            )
        choices.append([make_variant(expand_key(key), value) for value in split])
    variants = []
    for combination in itertools.product(*choices):
        name = "-".join(one.name for one in combination) or "base"
        configs = itertools.chain.from_iterable(one.configs for one in combination)
        changes = itertools.chain.from_iterable(one.changes for one in combination)
        variants.append(Variant(name, tuple(configs), tuple(changes)))
    names = [one.name for one in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"Two variants would have the folder {twice[0]}. Rename the recipes or values of "
            f"--vary: {', '.join(vary)}."
        )
    return variants


def expand_key(key: str) -> str:
    """Return the full name of a key that may begin with one of SHORT."""
    section, dot, rest = key.partition(".")
    return f"{SHORT.get(section, section)}{dot}{rest}"


def make_variant(key: str, value: str) -> Variant:
    """Return the variant with one value. Its name can be the name of a folder."""
    if key == "config":
        name = re.sub(r"\.ya?ml$", "", Path(value).name)
        return Variant(name, () if value == "base" else (value,), ())
    name = f"{key.rpartition('.')[2]}={value}"
    return Variant(re.sub(r"[^\w.=+-]+", "_", name), (), (f"{key}={value}",))


def split_values(text: str) -> list[str]:
    """Split A,B at its commas, except those in brackets, braces and quotes."""
    return re.findall(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""", text) or [""]


def check_variants(args: argparse.Namespace, variants: Sequence[Variant]) -> list[cli.Plan]:
    """Check the recipe of each variant, and return all of them. Raises EXPECTED_ERRORS."""
    plans = []
    for variant in variants:
        files = [*args.config, *variant.configs]
        words = [*args.words, *variant.changes, "trainer.resume_mode=disable"]
        try:
            planned = cli.plan(files, words, is_dry_run=True)
        except ConfigError as error:
            raise ConfigError(f"variant {variant.name}: {error}") from error
        if not planned.inputs.validation:
            raise ConfigError(
                f"variant {variant.name} has no held-out rows to compare. Set env.val_files."
            )
        plans.append(planned)
    return plans


def list_runs(
    name: str, args: argparse.Namespace, variants: Sequence[Variant], plans: Sequence[cli.Plan]
) -> Iterator[SweepRun]:
    """Yield the runs of a sweep: all variants of the first seed, then of the next.

    plans: of the variants. Each run has its own folder of checkpoints.
    """
    pairs = list(zip(variants, plans, strict=True))
    for seed, (variant, planned) in itertools.product(list_seeds(args.seeds), pairs):
        run_name = f"{name}/{variant.name}-seed{seed}"
        configs = (*args.config, *variant.configs)
        seeds = (f"{key}={seed}" for key in SEED_KEYS)
        name_word = f"trainer.experiment_name={run_name}"
        others = [*args.words, *variant.changes]
        folder = str(planned.recipe.verl.trainer._get_node("default_local_dir"))
        if "experiment_name}" not in folder:  # all runs would share it
            others.append(f"trainer.default_local_dir={folder}/{run_name}")
        words = (*others, *seeds, name_word)
        yield SweepRun(run_name, variant.name, planned, configs, words, Path.cwd())


def check_run(run: SweepRun) -> None:
    """Raise ConfigError if the folder of a run has one of another recipe, or on other rows."""
    folder = Path("runs") / run.name
    if not (folder / "config.yaml").is_file():
        return
    before = identity.read_run(folder)
    now = run.planned.fingerprint
    if not set(checkpoints.list_changes(before, now)) <= set(SEED_KEYS):
        planned = cli.plan(run.configs, run.words, is_dry_run=True)  # values may have name and seed
        now = planned.fingerprint
    changes = checkpoints.list_changes(before, now)
    texts = [text for key, text in changes.items() if key not in SEED_KEYS]
    texts += now.list_row_changes(before)
    if texts:
        shown = ", ".join(texts[:CHANGES_SHOWN])
        more = f", and {len(texts) - CHANGES_SHOWN} more" if len(texts) > CHANGES_SHOWN else ""
        raise ConfigError(
            f"{folder} is a run of another recipe: {shown}{more}. Set another "
            "trainer.experiment_name."
        )


def is_finished(run: SweepRun) -> bool:
    """Whether a run has its export."""
    return checkpoints.is_exported(run.name, run.planned.recipe.trainer.total_training_steps)


def run_in_turn(runs: Sequence[SweepRun]) -> list[int]:
    """Run one run after the other, and return their exit statuses."""
    statuses = []
    for run in runs:
        ended = start(run.command, run.name, run.folder)
        tell_end(run, ended)
        statuses.append(ended.status)
    return statuses


def tell_end(run: SweepRun, ended: Ended) -> None:
    """Print how a run has ended."""
    how = "finished" if ended.status == 0 else f"status {ended.status}"
    say(f"{run.name}: {how} after {ended.minutes:.1f} min")


def start(command: Sequence[str], name: str, folder: Path) -> Ended:
    """Run one run to its end. Its output is in runs/<name>.log.

    If the sweep is stopped, so is the run: it gets the time to save.
    """
    log = folder / "runs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # with RAY_*, the run would join the Ray of the sweep; with the others, all runs would share one
    # log of a tracker
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", *TRACKERS))}
    begin = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
        try:
            status = process.wait()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # Ctrl-C has reached the run, too
                process.terminate()
            process.wait()
            raise
    return Ended(status, (time.monotonic() - begin) / 60)


def run_through_ray(runs: Sequence[SweepRun]) -> list[int]:
    """Run as many runs at the same time as GPUs are free, and return their exit statuses.

    Ray queues them, on the cluster of ray_kwargs.ray_init.address or on this machine. A run starts
    a Ray of its node with the GPUs that it got. Raises ConfigError if a run needs several nodes, or
    more GPUs than a node has.
    """
    import ray

    if not runs:
        return []
    recipes = [run.planned.recipe for run in runs]
    nodes = max(recipe.trainer.nnodes for recipe in recipes)
    if nodes > 1:
        raise ConfigError(
            f"--parallel is for runs on one node, and trainer.nnodes={nodes}. Remove --parallel."
        )
    is_cpu = recipes[0].trainer.device == "cpu"
    gpus = 0 if is_cpu else max(resources.all_gpus(one.verl, one.command) for one in recipes)
    address = recipes[0].get("ray_kwargs.ray_init.address")
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(address=address, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    largest = max(node["Resources"].get("GPU", 0) for node in ray.nodes())
    if gpus > largest:
        ray.shutdown()
        raise ConfigError(
            f"A run takes {gpus} GPUs, and the largest node has {largest:.0f}. Lower "
            "trainer.n_gpus_per_node, or remove --parallel."
        )
    cpus = ray.cluster_resources().get("CPU", 1.0) / max(len(ray.nodes()), 1)
    task = ray.remote(start).options(
        num_gpus=gpus,
        num_cpus=cpus if is_cpu else 0,  # a run on a CPU uses all cores
        max_retries=0,
    )
    pending: dict[object, int] = {}  # {Ray's reference: the index of the run}
    try:
        for index, run in enumerate(runs):
            words = run.command
            if address:  # the run's workers start on the node that Ray has chosen
                words = [*words, "ray_kwargs.ray_init.address=null"]
            pending[task.remote(words, run.name, run.folder)] = index
        return wait_for_runs(runs, pending)
    finally:
        ray.shutdown()


def wait_for_runs(runs: Sequence[SweepRun], pending: dict[object, int]) -> list[int]:
    """Wait until all runs have ended, and print each end. A run whose worker is lost has failed."""
    import ray

    statuses = [1] * len(runs)
    while pending:
        [reference], _ = ray.wait(list(pending), num_returns=1)
        index = pending.pop(reference)
        try:
            ended = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            say(f"{runs[index].name}: not started: {error.cause!r:.200}")
        except ray.exceptions.RayError as error:
            say(f"{runs[index].name}: its worker was lost ({type(error).__name__})")
        else:
            tell_end(runs[index], ended)
            statuses[index] = ended.status
    return statuses


def compare_variants(folder: Path, runs: Sequence[SweepRun]) -> None:
    """Print the scores of the variants, and the comparison of each with the first one.

    Also write them to sweep.html in the sweep's folder. A run of the same name may have its report
    there.
    """
    folders: dict[str, list[Path]] = {}
    for run in runs:
        folders.setdefault(run.variant, []).append(Path("runs") / run.name)
    (first, baselines), *others = folders.items()
    lines: list[str] = []
    for name, some in others:
        lines += [f"A = {name}, B = {first}"]
        comparisons = compare.compare_runs(some, baselines)
        lines += [*compare.warn({name: some, first: baselines}), *compare.describe(comparisons), ""]
    if not others:
        lines = [*compare.warn({first: baselines}), *compare.describe_runs(baselines)]
    for line in lines:
        say(line)
    compare.write_report(folder / "sweep.html", folders, lines)
