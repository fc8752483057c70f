"""Quintet on a machine with GPUs, for the first time: does all hold there that holds on a CPU?
Minutes, one report.

    python benchmarks/gpu_acceptance.py [--config math] [--steps 4] [key=value ...]

Trains `--steps` steps of a recipe, saving halfway; trains on from there; trains two steps twice
with full determinism. Reads every GPU's memory twice a second during this. Writes
runs/acceptance/report.md: seconds and memory of each stage, and what holds: the run ends well, vLLM
gives its memory back and takes it again (rollout.free_cache_engine), sampler and trainer agree
after every sync, a resumed run continues, two runs are one. Exit status 1 if one does not. With one
GPU also what sampling, update and a copy of the weights take at best, by raw vLLM and the bare
model.

On a CPU, to rehearse: --config math_cpu --config cpu, where memory is that of all processes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from statistics import median
from typing import Any

import psutil
from measure import ROOT, gpus, machine, run
from step import measure_limits

FOLDER = ROOT / "runs" / "acceptance"
ORDER = (
    "gen",
    "sleep",
    "reward_model",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
)
ORDER += ("save_checkpoint", "update_weights")  # as `Trainer.step` has them
APART = 0.02  # mean of |probability of the sampler - of the trainer|, in bf16


class Looks:
    """(time, GB taken) of the fullest GPU, or without one of all processes."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def __call__(self, processes: list[psutil.Process]) -> None:
        used = [int(line) * 2**20 for line in gpus("memory.used")]
        taken = max(used) if used else sum(process.memory_info().rss for process in processes)
        self.seen.append((time.time(), taken / 1e9))

    def between(self, begin: float, end: float) -> list[float]:
        return [taken for when, taken in self.seen if begin <= when <= end]


def train(name: str, looks: Looks, recipes: list[str], changes: list[str]) -> list[dict[str, Any]]:
    """A run to its end -> the lines of its metrics.jsonl that are of steps."""
    configs = [word for recipe in recipes for word in ("--config", recipe)]
    settings = [f"trainer.experiment_name=acceptance/{name}", "env.val_files=[]", *changes]
    run([sys.executable, "algorithm.py", *configs, *settings], FOLDER / f"{name}.log", looks, 0.5)
    lines = map(json.loads, (FOLDER / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "timing_s/step" in line]


def stages(steps: list[dict[str, Any]], looks: Looks) -> list[tuple[str, float, float, float]]:
    """(name, median seconds, least and most GB) of each stage; where it lay is counted back from
    the step's line.
    """
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for line in steps:
        end = line["time"]
        for name in reversed([name for name in ORDER if f"timing_s/{name}" in line]):
            seconds = line[f"timing_s/{name}"]
            found.setdefault(name, []).append((seconds, looks.between(end - seconds, end)))
            end -= seconds
    rows = []
    for name in ORDER:
        if name in found:
            taken = [gb for _, some in found[name] for gb in some] or [float("nan")]
            rows.append(
                (name, median(seconds for seconds, _ in found[name]), min(taken), max(taken))
            )
    return rows


def limits() -> dict[str, float]:
    """Seconds of these stages at best, of the median step; none if that was not measured."""
    try:
        found = measure_limits(FOLDER / "train", 1)
    except SystemExit as why:  # the rest is worth its report
        print(f"no limits: {why}", file=sys.stderr)
        return {}
    ways = [
        median(s for [s] in found[way].values()) for way in ("shared", "packed") if way in found
    ]
    sampling = median(seconds for [seconds] in found["gen"].values())
    return {"gen": sampling, "update_actor": min(ways), "update_weights": median(found["copy"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="append", default=None)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    recipes, about, begin = args.config or ["math"], machine(), time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    looks, half = Looks(), args.steps // 2
    count = "trainer.total_training_steps={}".format
    first = train(
        "train", looks, recipes, [count(args.steps), f"trainer.save_freq={half}", *args.changes]
    )
    on = train("train", looks, recipes, [count(args.steps + 1), *args.changes])[args.steps :]
    small = [
        count(2),
        *args.changes,
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    small += ["actor_rollout_ref.rollout.n=2", "data.max_response_length=32"]
    small += ["actor_rollout_ref.rollout.max_num_seqs=64"] * bool(about["gpus"])
    same = [train(name, looks, [*recipes, "deterministic"], small) for name in ("once", "again")]
    rows, best = stages(first[1:], looks), limits() if len(about["gpus"]) < 2 else {}
    by_name = {name: (seconds, low, high) for name, seconds, low, high in rows}
    apart = max(line["training/rollout_probs_diff_mean"] for line in [*first, *on])
    equal = ("actor/pg_loss", "actor/grad_norm", "rollout/reward/mean", "response_length/mean")
    update, sampling = by_name["update_actor"], by_name["gen"]
    held = {
        f"{args.steps} steps, whose gradients are finite": all(
            line["actor/grad_norm"] > 0 for line in first
        ),
        f"sampler and trainer agree: {apart:.4f} apart in the mean, of {APART}": apart < APART,
        f"the same command resumes at step  {args.steps + 1}": [line["step"] for line in on]
        == [args.steps + 1],
        "two deterministic runs are one": [[line[k] for k in equal] for line in same[0]]
        == [[line[k] for k in equal] for line in same[1]],
    }
    if about["gpus"]:
        freed = (
            f"an update begins with less memory in use ({update[1]:.1f} GB) than sampling "
            f"({sampling[2]:.1f} GB)"
        )
        held[freed] = update[1] < sampling[2]
    lines = [
        "# Acceptance",
        "",
        f"`python benchmarks/gpu_acceptance.py {' '.join(sys.argv[1:])}`",
        "",
    ]
    lines += [
        f"{about['date']}: {', '.join(about['gpus']) or about['cpu']}; "
        + json.dumps(about["versions"]),
        "",
    ]
    lines += [
        "| stage | median, s | at best, s | least, GB | most, GB |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, seconds, low, high in rows:
        limit = f"{best[name]:.2f}" if name in best else ""
        lines.append(f"| {name} | {seconds:.2f} | {limit} | {low:.1f} | {high:.1f} |")
    rate = median(line["perf/throughput"] for line in first[1:])
    lines += [
        "",
        f"{rate:.0f} tokens a second and GPU; {(time.monotonic() - begin) / 60:.1f} minutes in "
        f"all.",
        "",
    ]
    lines += [f"- {'holds' if good else 'DOES NOT HOLD'}: {what}" for what, good in held.items()]
    (FOLDER / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()
