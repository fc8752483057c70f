"""Run the first training steps on a machine with GPUs, and write one report about them.

    .venv-gpu/bin/python benchmarks/gpu_acceptance.py [--config math] [--again NAME] [key=value ...]

No GPU has run this script. Each slice trains a few small steps of a recipe, writes its part of the
report, and prints it. A command runs for at most nine minutes. Repeat the same command for the
slices that are left. If a slice fails, the others still run. --again repeats a slice.

Exit status:
    0    all slices ran and every check holds
    1    a check does not hold
    3    slices are left

The report is runs/acceptance/report.md. It has the seconds and the memory of each stage, and these
checks: rollout engine and trainer compute the same probabilities, vLLM frees its memory during the
update, a stopped run resumes, and two runs with full determinism are equal. With two GPUs, it also
checks separate GPUs for vLLM and tensor parallelism.

To rehearse on a CPU, add --config math_cpu --config cpu. The memory is then that of all processes.
For a machine without a network, benchmarks/gpu_carry.py collects the files that it needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from measure import ROOT, gpus, machine, run
from step import measure_limits

FOLDER = ROOT / "runs" / "acceptance"
SESSION_S = 540.0  # of one command
RESERVE_S = 20.0  # of a command, to terminate a slice that takes too long
STAGES = (  # in the order of `Trainer.step`
    "gen",
    "sleep",
    "reward_model",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "save_checkpoint",
    "update_weights",
)
MAX_DIFFERENCE = 0.02  # mean difference of the tokens' probabilities, in bfloat16
SETTINGS = [  # of every slice
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "env.val_files=[]",
    "trainer.print_samples_every=0",
]
ROLLOUT = "actor_rollout_ref.rollout"
EQUAL_METRICS = ("actor/pg_loss", "actor/grad_norm", "rollout/reward/mean", "response_length/mean")


class MemoryReading(NamedTuple):
    """The memory at a time."""

    time: float  # of time.time()
    gb: float


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
        self.readings.append(MemoryReading(time.time(), size / 1e9))

    def between(self, begin: float, end: float) -> list[float]:
        """Return the readings in GB between two times."""
        return [reading.gb for reading in self.readings if begin <= reading.time <= end]


class Slice(NamedTuple):
    """A part of this script that runs without interruption."""

    seconds: float  # on one H100; an estimate, not measured
    check: Callable[[Context], Part]
    gpus: int = 0  # how many it needs


class Context(NamedTuple):
    """The arguments of a slice."""

    recipes: list[str]
    changes: list[str]  # key=value
    gpu_count: int
    memory: MemoryLog


class Part(NamedTuple):
    """The part of the report that a slice writes."""

    lines: list[str]
    holds: dict[str, bool]  # check -> whether it holds


def train(
    name: str,
    context: Context,
    changes: Sequence[str],
    recipes: Sequence[str] = (),
    resumes: bool = False,
) -> list[dict[str, Any]]:
    """Run a recipe to its end, in runs/acceptance/NAME. Returns the metrics of each step.

    changes, recipes: in addition to those of the context. resumes: whether to start from the last
    checkpoint of the same run, if there is one.
    """
    configs: list[str] = []
    for recipe in [*context.recipes, *recipes]:
        configs += ["--config", recipe]
    settings = [*SETTINGS, *context.changes, *changes, f"trainer.experiment_name=acceptance/{name}"]
    if context.gpu_count:
        settings.append(f"trainer.n_gpus_per_node={context.gpu_count}")
    if not resumes:
        settings.append("trainer.resume_mode=disable")
    command = [sys.executable, "algorithm.py", *configs, *settings]
    run(command, FOLDER / f"{name}.log", context.memory, 0.5)
    lines = map(json.loads, (FOLDER / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "timing_s/step" in line]


def steps(count: int) -> str:
    """Return the setting for the number of steps."""
    return f"trainer.total_training_steps={count}"


class StageUse(NamedTuple):
    """The time and the memory of a stage in some steps."""

    seconds: list[float]  # of each step
    sizes_gb: list[float]  # all readings


def list_stages(lines: list[dict[str, Any]], memory: MemoryLog) -> dict[str, StageUse]:
    """Return the time and the memory of each stage that these steps have.

    lines: the metrics of the steps. A line has the time at which its step ended. So the times of
    the stages follow from their seconds, from the last stage to the first.
    """
    uses: dict[str, StageUse] = {}
    for line in lines:
        end = line["time"]
        for name in reversed(STAGES):
            if f"timing_s/{name}" in line:
                seconds = line[f"timing_s/{name}"]
                use = uses.setdefault(name, StageUse([], []))
                use.seconds.append(seconds)
                use.sizes_gb.extend(memory.between(end - seconds, end))
                end -= seconds
    return uses


def stage_table(lines: list[dict[str, Any]], memory: MemoryLog) -> list[str]:
    """Return a table with the seconds and the memory of each stage, as lines of Markdown."""
    uses = list_stages(lines, memory)
    table = ["| stage | median, s | minimum, GB | maximum, GB |", "| --- | ---: | ---: | ---: |"]
    for name in STAGES:
        if name in uses:
            sizes = uses[name].sizes_gb or [float("nan")]
            cells = f"{median(uses[name].seconds):.2f} | {min(sizes):.1f} | {max(sizes):.1f}"
            table.append(f"| {name} | {cells} |")
    rate = median(line["perf/throughput"] for line in lines)
    return [*table, "", f"{rate:.0f} tokens per second and GPU."]


def read_stage_memory(lines: list[dict[str, Any]], stage: str, memory: MemoryLog) -> list[float]:
    """Return the readings in GB during a stage of these steps."""
    return list_stages(lines, memory)[stage].sizes_gb or [float("nan")]


def check_steps(lines: list[dict[str, Any]], count: int) -> dict[str, bool]:
    """Return the checks of every training run. count: the number of steps that it should have."""
    is_finite = all(0 < line["actor/grad_norm"] < float("inf") for line in lines)
    difference = max(line["training/rollout_probs_diff_mean"] for line in lines)
    text = (
        "the mean difference between the probabilities of rollout engine and trainer is "
        f"{difference:.4f}, at most {MAX_DIFFERENCE}"
    )
    return {
        f"{count} steps have finite gradients": len(lines) == count and is_finite,
        text: difference <= MAX_DIFFERENCE,
    }


# --- the slices ----------------------------------------------------------------------------------


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
    has_flash_attention = importlib.util.find_spec("flash_attn") is not None
    result = done.stdout.strip() or "CUDA does not start"
    lines.append(f"- version of CUDA, number of devices, a dot product of eight ones: {result}")
    installed = "installed" if has_flash_attention else "not installed"
    lines.append(f"- flash-attn is {installed}")
    return Part(lines, {"CUDA starts": not done.returncode} if context.gpu_count else {})


def check_training(context: Context) -> Part:
    """Train two steps. This starts all processes, samples, updates, and syncs the weights."""
    lines = train("train", context, [steps(2), "trainer.save_freq=2"])
    second_step = lines[1:]
    holds = check_steps(lines, 2)
    if context.gpu_count:
        sampling_gb = max(read_stage_memory(second_step, "gen", context.memory))
        update_gb = min(read_stage_memory(second_step, "update_actor", context.memory))
        text = f"the update begins with {update_gb:.1f} GB, below the {sampling_gb:.1f} GB of `gen`"
        holds[text] = update_gb < sampling_gb
    return Part(stage_table(second_step, context.memory), holds)


def check_resume(context: Context) -> Part:
    """Repeat the run of `check_training` with one more step.

    If --again repeats this slice, it must also repeat `training`.
    """
    lines = train("train", context, [steps(3), "trainer.save_freq=-1"], resumes=True)
    numbers = [line["step"] for line in lines]
    holds = {"the run resumes at step 3": numbers == [1, 2, 3]}
    return Part([f"The run has the steps {numbers}."], holds)


def check_recipe(recipe: str, context: Context) -> Part:
    """Train two steps with another recipe over those of the context."""
    lines = train(recipe, context, [steps(2), "trainer.save_freq=-1"], [recipe])
    return Part(stage_table(lines[1:], context.memory), check_steps(lines, 2))


def train_deterministic(name: str, context: Context) -> Part:
    """Train two small steps with full determinism, and keep some of their metrics in a file."""
    changes = [
        steps(2),
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"{ROLLOUT}.n=2",
        "data.max_response_length=64",
        "trainer.save_freq=-1",
    ]
    lines = train(name, context, changes, ["deterministic"])
    values = [{key: line[key] for key in EQUAL_METRICS} for line in lines]
    (FOLDER / f"{name}.values.json").write_text(json.dumps(values))
    return Part([f"`{json.dumps(values)}`"], check_steps(lines, 2))


def check_second_deterministic(context: Context) -> Part:
    """Train two small steps again, and check that the metrics are those of the first run."""
    part = train_deterministic("again", context)
    texts = [(FOLDER / f"{name}.values.json").read_text() for name in ("once", "again")]
    holds = {"two runs with full determinism are equal": texts[0] == texts[1]}
    return Part(part.lines, part.holds | holds)


def check_separate(context: Context) -> Part:
    """Train two steps with one_step_off and vLLM on half of the GPUs, with weights over NCCL."""
    half = context.gpu_count // 2
    changes = [f"{ROLLOUT}.n_gpus_per_node={half}", steps(2), "trainer.save_freq=-1"]
    lines = train("separate", context._replace(gpu_count=half), changes, ["ahead", "separate"])
    return Part(stage_table(lines[1:], context.memory), check_steps(lines, 2))


def check_tensor_parallel(context: Context) -> Part:
    """Train two steps with a vLLM replica on two GPUs."""
    changes = [f"{ROLLOUT}.tensor_model_parallel_size=2", steps(2), "trainer.save_freq=-1"]
    lines = train("tensor_parallel", context, changes)
    return Part(stage_table(lines[1:], context.memory), check_steps(lines, 2))


def measure_best(context: Context) -> Part:
    """Measure raw vLLM and the bare model on the episodes of `check_training`, on one GPU.

    benchmarks/bare_model.py measures the update `shared` only on a CPU.
    """
    limits = measure_limits(FOLDER / "train", 1)
    updates = [median_seconds(limits[way]) for way in ("shared", "packed") if way in limits]
    text = (
        f"Lowest times: sampling {median_seconds(limits['gen']):.2f} s, "
        f"update {min(updates):.2f} s, copy of the weights {median(limits['copy']):.2f} s."
    )
    return Part([text], {})


def median_seconds(steps: dict[str, list[float]]) -> float:
    """Return the median over steps that were measured once. steps: {step: [seconds]}."""
    return median(seconds for [seconds] in steps.values())


SLICES = {
    "environment": Slice(20, check_environment),
    "training": Slice(300, check_training),
    "resume": Slice(240, check_resume),
    "ppo": Slice(300, lambda context: check_recipe("ppo", context)),
    "lora": Slice(240, lambda context: check_recipe("lora", context)),
    "ahead": Slice(300, lambda context: check_recipe("ahead", context)),
    "deterministic": Slice(240, lambda context: train_deterministic("once", context)),
    "deterministic again": Slice(240, check_second_deterministic),
    "separate": Slice(300, check_separate, gpus=2),
    "tensor parallel": Slice(300, check_tensor_parallel, gpus=2),
    "limits": Slice(300, measure_best),
}


# --- the report ----------------------------------------------------------------------------------


def run_slice(name: str, context: Context) -> dict[str, Any]:
    """Run a slice, and return its part of the report. If it fails, the part has the reason."""
    begin = time.monotonic()
    try:
        part = SLICES[name].check(context)
    except (Exception, SystemExit) as error:  # SystemExit: measure.run and measure_limits
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
    title = f"## {name}: {result['seconds'] / 60:.1f} minutes"
    return [title, "", *result["lines"], "", *checks, ""]


def result_path(name: str) -> Path:
    """Return the file with the result of a slice."""
    return FOLDER / f"{name.replace(' ', '_')}.json"


def read_results() -> dict[str, dict[str, Any]]:
    """Return the parts of the slices that have run, in the order of SLICES."""
    paths = {name: result_path(name) for name in SLICES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def list_left(gpu_count: int, results: dict[str, Any]) -> list[str]:
    """Return the slices that are left on a machine with so many GPUs."""
    return [name for name in SLICES if name not in results and SLICES[name].gpus <= gpu_count]


def write_report(results: dict[str, dict[str, Any]]) -> None:
    """Write report.md."""
    command = f"`python benchmarks/gpu_acceptance.py {' '.join(sys.argv[1:])}`"
    lines = ["# Acceptance", "", command, ""]
    for name, result in results.items():
        lines += describe(name, result)
    (FOLDER / "report.md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", action="append", default=None, help="a recipe, by default math; repeatable"
    )
    parser.add_argument(
        "--again", action="append", default=[], help="repeat this slice, or all; repeatable"
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="settings of every slice")
    args = parser.parse_args()
    end = time.monotonic() + SESSION_S
    if "all" in args.again:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in args.again:
        result_path(name).unlink(missing_ok=True)
    gpu_count = len(gpus())
    for name in list_left(gpu_count, read_results()):
        if end - time.monotonic() < SLICES[name].seconds:
            break
        memory = MemoryLog(deadline=end - RESERVE_S)
        context = Context(args.config or ["math"], args.changes, gpu_count, memory)
        result = run_slice(name, context)
        result_path(name).write_text(json.dumps(result, indent=1))
        print("\n".join(describe(name, result)), flush=True)
    results = read_results()
    write_report(results)
    names = list_left(gpu_count, results)
    if names:
        print(f"Left: {', '.join(names)}. Repeat the same command.")
        sys.exit(3)
    sys.exit(not all(all(result["holds"].values()) for result in results.values()))


if __name__ == "__main__":
    main()
