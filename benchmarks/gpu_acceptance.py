"""The first runs on a machine with GPUs, in slices of at most nine minutes, as one report.

    .venv-gpu/bin/python benchmarks/gpu_acceptance.py [--config math] [--again NAME] [key=value ...]

Each slice trains a few small steps of a recipe, writes its part of the report, and prints it. The
same command runs the slices that are left, until nine minutes are over. Exit status 0: all slices
are done and everything holds. 1: something does not hold. 3: slices are left, so repeat the
command. A slice that fails does not end the others; --again repeats it.

The report is runs/acceptance/report.md: seconds and memory of each stage, and whether sampler and
trainer agree, vLLM gives back its memory during the update, a stopped run resumes, and two runs
with full determinism are equal. With two GPUs, also separate GPUs for vLLM and tensor parallelism.

For a rehearsal on a CPU: --config math_cpu --config cpu. Memory is then that of all processes.
What a machine without a network needs: benchmarks/gpu_carry.py.
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
from statistics import median
from typing import Any, NamedTuple

import psutil
from measure import ROOT, gpus, machine, run
from step import measure_limits

FOLDER = ROOT / "runs" / "acceptance"
SESSION_S = 540.0  # seconds of one command
RESERVE_S = 20.0  # seconds to end a slice that takes too long
ORDER = (  # of the stages, as in `Trainer.step`
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
MAX_DIFFERENCE = 0.02  # mean of |probability of the sampler - of the trainer|, in bf16
SIZES = [  # of every slice
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "env.val_files=[]",
    "trainer.print_samples_every=0",
]
ROLLOUT = "actor_rollout_ref.rollout"
EQUAL = ("actor/pg_loss", "actor/grad_norm", "rollout/reward/mean", "response_length/mean")


class Looks:
    """The memory of the fullest GPU, or without a GPU that of all processes, over time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.seen: list[tuple[float, float]] = []  # (time, GB)

    def __call__(self, processes: list[psutil.Process]) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError("the slice took too long, and was ended")
        used = [int(line) * 2**20 for line in gpus("memory.used")]
        taken = max(used) if used else sum(process.memory_info().rss for process in processes)
        self.seen.append((time.time(), taken / 1e9))

    def between(self, begin: float, end: float) -> list[float]:
        return [taken for when, taken in self.seen if begin <= when <= end]


class Slice(NamedTuple):
    """A part of the acceptance."""

    seconds: float  # that it takes on one H100, estimated
    check: Callable[[Context], Part]
    gpus: int = 0  # that it needs


class Context(NamedTuple):
    """What a slice gets."""

    recipes: list[str]
    changes: list[str]
    count: int  # GPUs
    looks: Looks


class Part(NamedTuple):
    """The part of the report that a slice writes."""

    lines: list[str]
    holds: dict[str, bool]


def train(
    name: str, context: Context, changes: Sequence[str], recipes: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run a recipe to its end -> the lines of its metrics.jsonl that are steps."""
    files = [*context.recipes, *recipes]
    configs = [word for recipe in files for word in ("--config", recipe)]
    settings = [*SIZES, *context.changes, *changes, f"trainer.experiment_name=acceptance/{name}"]
    if context.count:
        settings.append(f"trainer.n_gpus_per_node={context.count}")
    command = [sys.executable, "algorithm.py", *configs, *settings]
    run(command, FOLDER / f"{name}.log", context.looks, 0.5)
    lines = map(json.loads, (FOLDER / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "timing_s/step" in line]


def steps(count: int) -> str:
    return f"trainer.total_training_steps={count}"


def stage_table(lines: list[dict[str, Any]], looks: Looks) -> list[str]:
    """Seconds and memory of each stage. Its time is counted back from the line of its step."""
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for line in lines:
        end = line["time"]
        for name in reversed([name for name in ORDER if f"timing_s/{name}" in line]):
            seconds = line[f"timing_s/{name}"]
            found.setdefault(name, []).append((seconds, looks.between(end - seconds, end)))
            end -= seconds
    table = ["| stage | median, s | least, GB | most, GB |", "| --- | ---: | ---: | ---: |"]
    for name in ORDER:
        if name in found:
            seconds = median(seconds for seconds, _ in found[name])
            taken = [gb for _, some in found[name] for gb in some] or [float("nan")]
            table.append(f"| {name} | {seconds:.2f} | {min(taken):.1f} | {max(taken):.1f} |")
    rate = median(line["perf/throughput"] for line in lines)
    return [*table, "", f"{rate:.0f} tokens a second and GPU."]


def check_steps(lines: list[dict[str, Any]], count: int) -> dict[str, bool]:
    """Checks of every run."""
    difference = max(line["training/rollout_probs_diff_mean"] for line in lines)
    return {
        f"{count} steps have finite gradients": len(lines) == count
        and all(0 < line["actor/grad_norm"] < float("inf") for line in lines),
        f"sampler and trainer differ by {difference:.4f} in the mean, at most {MAX_DIFFERENCE}": (
            difference <= MAX_DIFFERENCE
        ),
    }


# --- the slices ----------------------------------------------------------------------------------


def check_environment(context: Context) -> Part:
    """The card, the driver, CUDA and the packages."""
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
    lines.append(f"- CUDA, devices, a product: {done.stdout.strip() or 'CUDA does not start'}")
    lines.append(f"- flash-attn is {'' if has_flash_attention else 'not '}installed")
    return Part(lines, {"CUDA starts": not done.returncode} if context.count else {})


def check_training(context: Context) -> Part:
    """Two steps: start, sampling, weight sync, sleep and wake, update."""
    lines = train("train", context, [steps(2), "trainer.save_freq=2"])
    holds = check_steps(lines, 2)
    if context.count:
        table = stage_table(lines[1:], context.looks)
        numbers = {row.split("|")[1].strip(): row.split("|") for row in table[2:] if "|" in row}
        before, during = float(numbers["gen"][4]), float(numbers["update_actor"][3])
        text = f"the update begins with {during:.1f} GB, less than sampling's {before:.1f} GB"
        holds[text] = during < before
    return Part(stage_table(lines[1:], context.looks), holds)


def check_resume(context: Context) -> Part:
    """The same command trains one step more."""
    lines = train("train", context, [steps(3), "trainer.save_freq=-1"])
    numbers = [line["step"] for line in lines]
    return Part([f"Steps {numbers}."], {"the run resumes at step 3": numbers == [1, 2, 3]})


def check_recipe(recipe: str, context: Context) -> Part:
    """Two steps of another recipe."""
    lines = train(recipe, context, [steps(2), "trainer.save_freq=-1"], [recipe])
    return Part(stage_table(lines[1:], context.looks), check_steps(lines, 2))


def train_deterministic(name: str, context: Context) -> Part:
    """Two small steps with full determinism."""
    small = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    small += [f"{ROLLOUT}.n=2", "data.max_response_length=64", "trainer.save_freq=-1"]
    lines = train(name, context, [steps(2), *small], ["deterministic"])
    values = [{key: line[key] for key in EQUAL} for line in lines]
    (FOLDER / f"{name}.values.json").write_text(json.dumps(values))
    return Part([f"`{json.dumps(values)}`"], check_steps(lines, 2))


def check_second_deterministic(context: Context) -> Part:
    """Two small steps again, which must be equal."""
    part = train_deterministic("again", context)
    texts = [(FOLDER / f"{name}.values.json").read_text() for name in ("once", "again")]
    holds = {"two runs with full determinism are equal": texts[0] == texts[1]}
    return Part(part.lines, part.holds | holds)


def check_separate(context: Context) -> Part:
    """vLLM on half of the GPUs, one step ahead, weights over NCCL."""
    half = context.count // 2
    changes = [f"{ROLLOUT}.n_gpus_per_node={half}", steps(2), "trainer.save_freq=-1"]
    narrow = context._replace(count=half)
    lines = train("separate", narrow, changes, ["ahead", "separate"])
    return Part(stage_table(lines[1:], context.looks), check_steps(lines, 2))


def check_tensor_parallel(context: Context) -> Part:
    """A vLLM replica over two GPUs."""
    changes = [f"{ROLLOUT}.tensor_model_parallel_size=2", steps(2), "trainer.save_freq=-1"]
    lines = train("tensor_parallel", context, changes)
    return Part(stage_table(lines[1:], context.looks), check_steps(lines, 2))


def measure_best(context: Context) -> Part:
    """The time of raw vLLM and of the bare model for the same episodes, on one GPU."""
    found = measure_limits(FOLDER / "train", 1)
    ways = [median(s for [s] in found[way].values()) for way in ("shared", "packed")]
    sampling = median(seconds for [seconds] in found["gen"].values())
    text = f"At best: sampling {sampling:.2f} s, update {min(ways):.2f} s, "
    return Part([f"{text}copy of the weights {median(found['copy']):.2f} s."], {})


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
    """Run a slice -> its part of the report. A failure is a part, too."""
    begin = time.monotonic()
    try:
        part = SLICES[name].check(context)
    except (Exception, SystemExit) as error:  # the other slices still run
        reason = str(error).strip()[-1500:] or repr(error)
        part = Part(["```text", reason, "```"], {f"the slice ends ({type(error).__name__})": False})
    seconds = time.monotonic() - begin
    return {"lines": part.lines, "holds": part.holds, "seconds": seconds}


def describe(name: str, result: dict[str, Any]) -> list[str]:
    """A part of the report as lines of Markdown."""
    checks = [
        f"- {'holds' if holds else 'DOES NOT HOLD'}: {check}"
        for check, holds in result["holds"].items()
    ]
    title = f"## {name}: {result['seconds'] / 60:.1f} minutes"
    return [title, "", *result["lines"], "", *checks, ""]


def read_results() -> dict[str, dict[str, Any]]:
    """The parts that are done, in the order of the slices."""
    paths = {name: FOLDER / f"{name.replace(' ', '_')}.json" for name in SLICES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def list_left(count: int, results: dict[str, Any]) -> list[str]:
    """The slices that are left on a machine with so many GPUs."""
    return [name for name in SLICES if name not in results and SLICES[name].gpus <= count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="append", default=None)
    parser.add_argument("--again", action="append", default=[], help="a slice to repeat, or all")
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    end = time.monotonic() + SESSION_S
    if "all" in args.again:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in args.again:
        (FOLDER / f"{name.replace(' ', '_')}.json").unlink(missing_ok=True)
    count = len(gpus())
    for name in list_left(count, read_results()):
        left = end - time.monotonic()
        if left < SLICES[name].seconds:
            break
        looks = Looks(time.monotonic() + left - RESERVE_S)
        result = run_slice(name, Context(args.config or ["math"], args.changes, count, looks))
        (FOLDER / f"{name.replace(' ', '_')}.json").write_text(json.dumps(result, indent=1))
        print("\n".join(describe(name, result)), flush=True)
    results = read_results()
    command = f"`python benchmarks/gpu_acceptance.py {' '.join(sys.argv[1:])}`"
    parts = [line for name, result in results.items() for line in describe(name, result)]
    (FOLDER / "report.md").write_text("\n".join(["# Acceptance", "", command, "", *parts]))
    names = list_left(count, results)
    if names:
        print(f"Left: {', '.join(names)}. Repeat the same command.")
        sys.exit(3)
    sys.exit(not all(all(result["holds"].values()) for result in results.values()))


if __name__ == "__main__":
    main()
