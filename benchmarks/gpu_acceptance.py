"""Run the first training steps on a machine with GPUs, check them, and write one report.

    .venv-gpu/bin/python benchmarks/gpu_acceptance.py [--config math] [--only SLICE,SLICE]
        [--budget SECONDS] [--dry-run] [key=value ...]

Each slice trains a few small steps of the recipe. The rows are made up, and the reward is a hash of
the response, so a slice needs no Gym server and no data, and the rewards of a group differ. The
model is that of the recipe. It does not become better.

A slice that fails does not stop the others. Without --only, a command runs the slices that have no
result yet. With --only, it runs these again. With --budget, a slice runs only if it probably ends
in time, else it is left for the next command.

--dry-run checks the recipe of each slice, and keeps the estimates of memory for the report. It also
works on a machine without a GPU.

Exit status:
    0    each slice ran, and every check holds
    1    a check does not hold, or a recipe is not valid
    3    slices are left

The report is runs/acceptance/report.md. docs/gpu_results.md describes the checks. For the lowest
possible times of the same batch, run `benchmarks/step.py --run runs/acceptance/training`.

To rehearse on a CPU, add --config math_cpu --config cpu. The memory is then that of all processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from measure import ROOT, gpus, machine, read_metrics, run

FOLDER = ROOT / "runs" / "acceptance"
STOP_S = 90.0  # of the budget: after SIGTERM, a run may save a checkpoint and end its processes
STAGES = {  # in the order of `Trainer.step` -> the line of the dry run that estimates its memory
    "gen": "generate",
    "sleep": "",
    "reward_model": "",
    "old_log_prob": "log-probs",
    "ref": "",
    "values": "",
    "adv": "",
    "update_critic": "critic",
    "update_actor": "update",
    "save_checkpoint": "",
    "update_weights": "sync",
}
MIN_CORRELATION = 0.98  # of the probabilities in the rollout engine and the trainer
MAX_DIFFERENCE = 0.02  # mean difference of these probabilities, in bfloat16
MAX_KL_SHARE = 0.25  # KL(rollout engine, trainer) / KL(trainer, initial policy)
EQUAL_METRICS = ("actor/pg_loss", "actor/grad_norm", "rollout/reward/mean", "response_length/mean")
TOPICS = ("a river", "seven stones", "the market", "a green window", "copper", "the north wind")
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
SETTINGS = [  # of every slice
    "env.val_files=[]",
    f"env.verifier={ROOT}/benchmarks/hash_verifier.py:score",
    "env.verifier_pool.processes=2",
    "data.train_batch_size=32",
    "data.max_prompt_length=128",
    "data.max_response_length=128",
    f"{ROLLOUT}.n=8",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.optim.lr=3e-5",  # moves the policy far enough to see in the engine's probabilities
    "trainer.save_freq=-1",  # only the last step
    "trainer.test_freq=-1",
    "trainer.print_samples_every=0",
]
SMALL = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=2")


class MemoryReading(NamedTuple):
    """The memory at a time."""

    time: float  # of time.time()
    gib: float


class MemoryLog:
    """The memory of the fullest GPU over time. Without a GPU, that of all processes.

    deadline: of time.monotonic(). A reading after it raises TimeoutError, which ends the slice.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.readings: list[MemoryReading] = []

    def __call__(self, processes: list[psutil.Process]) -> None:
        """Read the memory now. processes: those of the run."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("the slice took too long and was terminated")
        used = [int(line) * 2**20 for line in gpus("memory.used")]
        size = max(used) if used else sum(process.memory_info().rss for process in processes)
        self.readings.append(MemoryReading(time.time(), size / 2**30))

    def between(self, begin: float, end: float) -> list[float]:
        """Return the readings in GiB between two times."""
        return [reading.gib for reading in self.readings if begin <= reading.time <= end]


class Context(NamedTuple):
    """What the slices of a command share."""

    recipes: list[str]
    changes: list[str]  # key=value
    gpu_count: int
    deadline: float  # of time.monotonic()


class Training(NamedTuple):
    """A finished training run of a slice."""

    lines: list[dict[str, Any]]  # the metrics of each step
    memory: MemoryLog
    folder: Path


class Plan(NamedTuple):
    """A training run, in addition to the recipes of the command line and SETTINGS."""

    recipes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()  # key=value
    steps: int = 2
    resumes: str = ""  # the slice whose run it resumes
    pools: int = 1  # the GPUs are divided among so many pools: trainer, vLLM


class Part(NamedTuple):
    """The part of the report that a slice writes."""

    lines: list[str]
    holds: dict[str, bool]  # check -> whether it holds


Check = Callable[[Training], dict[str, bool]]


class Slice(NamedTuple):
    """A part of this script that runs without interruption."""

    seconds: float  # on one H100 with a cold start
    plan: Plan | None = None
    checks: tuple[Check, ...] = ()  # of the training run, in addition to check_steps
    measure: Callable[[Context], Part] | None = None  # instead of a training run
    gpus: int = 0  # how many it needs
    flash_attention: bool = False  # whether it needs flash-attn


# --- training runs --------------------------------------------------------------------------------


def write_rows(path: Path) -> None:
    """Write the rows of all slices. No row has a right answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(256):
            topic = TOPICS[number % len(TOPICS)]
            text = f"Tell a short story about {topic}. Begin with the number {number}."
            messages = [{"role": "user", "content": text}]
            row = {"responses_create_params": {"input": messages}, "answer": str(number)}
            file.write(json.dumps(row) + "\n")


def build_command(name: str, context: Context) -> list[str]:
    """Return the command of a slice's training run, which is in runs/acceptance/NAME."""
    plan = SLICES[name].plan
    assert plan, f"{name} trains nothing"
    command = [sys.executable, "algorithm.py"]
    for recipe in [*context.recipes, *plan.recipes]:
        command += ["--config", recipe]
    command += [f"env.train_files=[{FOLDER}/rows.jsonl]", *SETTINGS]
    if context.gpu_count:
        command.append(f"trainer.n_gpus_per_node={context.gpu_count // plan.pools}")
    command += [
        f"trainer.experiment_name=acceptance/{plan.resumes or name}",
        f"trainer.total_training_steps={plan.steps}",
        f"trainer.resume_mode={'auto' if plan.resumes else 'disable'}",
    ]
    return [*command, *plan.changes, *context.changes]


def train(name: str, context: Context) -> Training:
    """Run the training run of a slice to its end."""
    command = build_command(name, context)
    memory = MemoryLog(context.deadline)
    every = 0.1 if context.gpu_count else 2.0  # seconds; without a GPU, a reading takes longer
    run(command, FOLDER / f"{name}.log", memory, every)
    plan = SLICES[name].plan
    folder = FOLDER / ((plan and plan.resumes) or name)
    lines = read_metrics(folder / "metrics.jsonl")
    return Training([line for line in lines if "timing_s/step" in line], memory, folder)


class StageUse(NamedTuple):
    """The time and the memory of a stage in a step."""

    seconds: float
    sizes: list[float]  # GiB


def list_stages(line: dict[str, Any], memory: MemoryLog) -> dict[str, StageUse]:
    """Return the time and the memory of each stage of a step, in their order.

    line: the metrics of the step. It has the time at which the step ended. So the times of the
    stages follow from their seconds, from the last stage to the first.
    """
    uses: dict[str, StageUse] = {}
    end = line["time"]
    for name in reversed(STAGES):
        seconds = line.get(f"timing_s/{name}")
        if seconds is not None:
            uses[name] = StageUse(seconds, memory.between(end - seconds, end))
            end -= seconds
    return dict(reversed(uses.items()))


def read_estimates(name: str) -> dict[str, str]:
    """Return {line of the dry run: GiB} of a slice. Empty if `--dry-run` was not used before."""
    path = FOLDER / f"{name}.dry_run.log"
    text = path.read_text() if path.is_file() else ""
    return dict(re.findall(r"^  ([a-z-]+) +([0-9.]+): ", text, re.MULTILINE))


def stage_table(training: Training, estimates: dict[str, str]) -> list[str]:
    """Return a table of the stages of the last step, as lines of Markdown."""
    last_line = training.lines[-1]
    table = ["| stage | s | lowest, GiB | highest, GiB | estimate, GiB |"]
    table.append("| --- | ---: | ---: | ---: | ---: |")
    for name, use in list_stages(last_line, training.memory).items():
        span = f"{min(use.sizes):.1f} | {max(use.sizes):.1f}" if use.sizes else "|"
        estimate = estimates.get(STAGES[name], "")
        table.append(f"| {name} | {use.seconds:.2f} | {span} | {estimate} |")
    table.append(f"| step | {last_line['timing_s/step']:.2f} | | | |")
    return [*table, "", f"{last_line['perf/throughput']:.0f} tokens per second and GPU."]


# --- checks of a training run --------------------------------------------------------------------


def check_steps(training: Training, count: int) -> dict[str, bool]:
    """Check what holds for every run. count: the number of steps that it should have."""
    lines = training.lines
    spread = [line["critic/advantages/max"] - line["critic/advantages/min"] for line in lines]
    is_finite = all(0 < line["actor/grad_norm"] < float("inf") for line in lines)
    return {
        f"{count} steps have gradients that are finite and not 0": len(lines) == count
        and is_finite,
        "the advantages of each step differ": all(value > 0 for value in spread),
        "no episode failed": all(line["rollout/failed_frac"] == 0 for line in lines),
    }


def check_agreement(training: Training) -> dict[str, bool]:
    """Check that rollout engine and trainer compute the same probabilities."""
    lines = training.lines
    correlation = min(line["training/rollout_actor_probs_pearson_corr"] for line in lines)
    difference = max(line["training/rollout_probs_diff_mean"] for line in lines)
    text = (
        "rollout engine and trainer give the sampled tokens the same probabilities: correlation "
        f"{correlation:.4f} of at least {MIN_CORRELATION}, mean difference {difference:.4f} of at "
        f"most {MAX_DIFFERENCE}"
    )
    return {text: correlation >= MIN_CORRELATION and difference <= MAX_DIFFERENCE}


def check_sync(training: Training) -> dict[str, bool]:
    """Check that the engine follows the trainer.

    An engine without the new weights would be as far from the trainer as the initial policy is.
    """
    last_line = training.lines[-1]
    engine = last_line["rollout_corr/k3_kl"]
    initial = last_line["actor/kl_loss"]
    text = (
        f"new weights reach the rollout engine: at step {last_line['step']}, its KL to the trainer "
        f"is {engine:.5f}, and the initial policy's is {initial:.5f} (at most {MAX_KL_SHARE} of it)"
    )
    return {text: engine <= MAX_KL_SHARE * initial}


def check_sleep(training: Training) -> dict[str, bool]:
    """Check that vLLM frees memory for the update, if readings of both stages exist."""
    uses = list_stages(training.lines[-1], training.memory)
    sampling = uses["gen"].sizes
    update = uses["update_actor"].sizes
    if not gpus() or not sampling or not update:
        return {}
    text = f"the update begins with {min(update):.1f} GiB, sampling had up to {max(sampling):.1f}"
    return {text: min(update) < max(sampling)}


def check_files(training: Training) -> dict[str, bool]:
    """Check that the run wrote a checkpoint and an export."""
    checkpoint = training.folder / "checkpoints" / f"global_step_{len(training.lines)}"
    export = training.folder / "export" / "config.json"
    return {"a checkpoint and an export exist": checkpoint.is_dir() and export.is_file()}


def check_resume(training: Training) -> dict[str, bool]:
    """Check that the run resumed with the trained weights."""
    numbers = [line["step"] for line in training.lines]
    before, after = (line["actor/kl_loss"] for line in training.lines[-2:])
    text = f"the trained weights are loaded: KL to the initial policy {before:.5f}, {after:.5f}"
    return {f"the run has the steps {numbers}": numbers == [1, 2, 3], text: after > before / 3}


def check_ahead(training: Training) -> dict[str, bool]:
    """Check that batches are sampled with weights that are one step old."""
    staleness = [line["rollout/staleness/max"] for line in training.lines]
    return {f"weights that sampled are up to one step old: {staleness}": max(staleness) == 1}


def check_equal(training: Training) -> dict[str, bool]:
    """Check that this run has the metrics of the slice `deterministic`."""
    lines = read_metrics(FOLDER / "deterministic" / "metrics.jsonl")
    first = [line for line in lines if "timing_s/step" in line]
    runs = [
        [[line[key] for key in EQUAL_METRICS] for line in part] for part in (first, training.lines)
    ]
    return {f"two runs with full determinism are equal: {runs[0]}": runs[0] == runs[1]}


# --- slices without a training run ---------------------------------------------------------------


def check_environment(context: Context) -> Part:
    """Report the GPUs, the driver, CUDA and the packages, and check that CUDA starts."""
    about = machine()
    lines = [f"{about['date']}: {', '.join(about['gpus']) or about['cpu']}", ""]
    lines.append(f"- {json.dumps(about['versions'])}")
    for value in ("driver_version", "memory.total"):
        lines.append(f"- {value}: {', '.join(gpus(value)) or 'no GPU'}")
    code = (
        "import torch; torch.cuda.init(); x = torch.ones(8, device='cuda') @ torch.ones(8, "
        "device='cuda'); print(torch.version.cuda, torch.cuda.device_count(), x.item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    result = done.stdout.strip() or "CUDA does not start"
    lines.append(f"- version of CUDA, number of devices, a dot product of eight ones: {result}")
    installed = "installed" if has_flash_attention() else "not installed"
    lines.append(f"- flash-attn is {installed}")
    return Part(lines, {"CUDA starts": not done.returncode} if context.gpu_count else {})


def has_flash_attention() -> bool:
    """Return whether flash-attn is installed."""
    return importlib.util.find_spec("flash_attn") is not None


DETERMINISTIC = Plan(("deterministic",), SMALL)
SYNCED = (check_agreement, check_sync)
SLICES = {
    "environment": Slice(20, measure=check_environment),
    "training": Slice(200, Plan(), (*SYNCED, check_sleep, check_files)),
    "resume": Slice(140, Plan(steps=3, resumes="training"), (*SYNCED, check_resume)),
    "ppo": Slice(240, Plan(("ppo",)), SYNCED),
    "lora": Slice(200, Plan(("lora",), (f"{ACTOR}.optim.lr=3e-4",)), SYNCED),
    "ahead": Slice(200, Plan(("ahead",), steps=3), (check_ahead,)),
    # The backward pass of torch's kernels is not deterministic.
    "deterministic": Slice(200, DETERMINISTIC, (check_agreement,), flash_attention=True),
    "deterministic_again": Slice(
        160, DETERMINISTIC, (check_agreement, check_equal), flash_attention=True
    ),
    "separate": Slice(240, Plan(("ahead", "separate"), steps=3, pools=2), (check_ahead,), gpus=2),
    "tensor_parallel": Slice(
        240, Plan(changes=(f"{ROLLOUT}.tensor_model_parallel_size=2",)), SYNCED, gpus=2
    ),
}


# --- the report ----------------------------------------------------------------------------------


def run_training(name: str, context: Context) -> Part:
    """Train, and check the run. Only `training` keeps its weights, for the slice `resume`."""
    piece = SLICES[name]
    assert piece.plan, f"{name} trains nothing"
    folder = FOLDER / (piece.plan.resumes or name)
    try:
        training = train(name, context)
        holds = check_steps(training, piece.plan.steps)
        for check in piece.checks:
            holds |= check(training)
    finally:
        for weights in ("checkpoints", "export") if name != "training" else ():
            shutil.rmtree(folder / weights, ignore_errors=True)
    return Part(stage_table(training, read_estimates(name)), holds)


def run_slice(name: str, context: Context) -> dict[str, Any]:
    """Run a slice, and return its part of the report. If it fails, the part has the reason."""
    begin = time.monotonic()
    measure = SLICES[name].measure
    try:
        part = measure(context) if measure else run_training(name, context)
    except (Exception, SystemExit) as error:  # SystemExit: measure.run
        reason = str(error).strip()[-1500:] or repr(error)
        check = f"the slice runs to its end ({type(error).__name__})"
        part = Part(["```text", reason, "```"], {check: False})
    seconds = time.monotonic() - begin
    return {"lines": part.lines, "holds": part.holds, "seconds": seconds}


def describe(name: str, result: dict[str, Any]) -> list[str]:
    """Return a part of the report as lines of Markdown."""
    checks = [
        f"- {'holds' if holds else 'DOES NOT HOLD'}: {check}"
        for check, holds in result["holds"].items()
    ]
    return [f"## {name}: {result['seconds']:.0f} s", "", *result["lines"], "", *checks, ""]


def read_results() -> dict[str, dict[str, Any]]:
    """Return the parts of the slices that have run, in the order of SLICES."""
    paths = {name: FOLDER / f"{name}.json" for name in SLICES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def find_obstacle(name: str, gpu_count: int) -> str:
    """Return why a slice cannot run on this machine, or an empty text."""
    if SLICES[name].gpus > gpu_count:
        return f"it needs {SLICES[name].gpus} GPUs"
    if SLICES[name].flash_attention and gpu_count and not has_flash_attention():
        return "it needs flash-attn"
    return ""


def write_report(results: dict[str, dict[str, Any]], left: dict[str, str]) -> None:
    """Write report.md. left: {slice: why it did not run}."""
    command = f"`python benchmarks/gpu_acceptance.py {' '.join(sys.argv[1:])}`"
    lines = ["# Acceptance", "", command, ""]
    for name, result in results.items():
        lines += describe(name, result)
    lines += [f"- not run: {name} ({reason})" for name, reason in left.items()]
    (FOLDER / "report.md").write_text("\n".join(lines) + "\n")


def run_all(names: list[str], context: Context) -> int:
    """Run these slices if they fit into the time, and write the report. Returns the exit status."""
    left: dict[str, str] = {}
    is_late = False
    for name in names:
        seconds_left = context.deadline - time.monotonic()
        left[name] = find_obstacle(name, context.gpu_count)
        if not left[name] and seconds_left < SLICES[name].seconds:
            left[name] = f"it takes {SLICES[name].seconds:.0f} s, and {seconds_left:.0f} s are left"
            is_late = True
        if left[name]:
            print(f"{name}: not run, because {left[name]}", flush=True)
            continue
        del left[name]
        result = run_slice(name, context)
        (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1))
        print("\n".join(describe(name, result)), flush=True)
    results = read_results()
    write_report(results, left)
    print(f"The report is {FOLDER / 'report.md'}.")
    if not all(all(result["holds"].values()) for result in results.values()):
        return 1
    return 3 if is_late else 0


def dry_run(names: list[str], context: Context) -> int:
    """Check the recipes of these slices. Returns the exit status."""
    failed = []
    for name in names:
        reason = find_obstacle(name, context.gpu_count)
        if reason or not SLICES[name].plan:
            continue
        command = [*build_command(name, context), "--dry-run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        output = done.stdout + done.stderr
        (FOLDER / f"{name}.dry_run.log").write_text(output)
        warnings = [line for line in output.splitlines() if line.startswith("WARNING")]
        if done.returncode:
            failed.append(name)
            warnings = output.splitlines()[-10:]
        estimates = read_estimates(name)
        state = "NOT VALID" if done.returncode else "valid"
        print(f"{name}: {state}; GiB {estimates}", *warnings, sep="\n  ", flush=True)
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", action="append", default=None, help="a recipe, by default math; repeatable"
    )
    parser.add_argument("--only", default="", help="run these slices again, separated by commas")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds that this command may take"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the recipes, start nothing")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="settings of every slice")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget - STOP_S
    unknown = {name for name in args.only.split(",") if name} - SLICES.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(SLICES)}")
    write_rows(FOLDER / "rows.jsonl")
    done = () if args.dry_run else read_results()
    chosen = args.only.split(",") if args.only else [name for name in SLICES if name not in done]
    context = Context(args.config or ["math"], args.changes, len(gpus()), deadline)
    sys.exit(dry_run(chosen, context) if args.dry_run else run_all(chosen, context))


if __name__ == "__main__":
    main()
