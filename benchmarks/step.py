"""Measure the stages of a step of the demo, and the shortest possible time of each (its limit).

    python benchmarks/step.py [--steps 5] [--rounds 3] [--run runs/NAME] [key=value ...]

A step has 8 prompts with 8 responses of SmolLM2-135M. The command starts `algorithm.py` as a user
does, and measures the memory of its processes. After the run, separate processes do the same work
without Quintet: raw vLLM (benchmarks/raw_vllm.py), then the bare model and a copy of its weights
(benchmarks/bare_model.py). They repeat each step `--rounds` times.

The first step is a warm-up, and it is left out. The command prints tables. Its last line is JSON.
With --run, it trains nothing and measures only the limits of a finished run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from measure import ROOT, Memory, demo, last_json, machine, read_metrics, stages

# the stages that have a limit; `else` is the rest of a step
PARTS = ("gen", "update_actor", "update_weights")


def measure_limits(folder: Path, rounds: int) -> dict[str, Any]:
    """Run raw_vllm.py and bare_model.py on a finished run. Return their merged JSON output."""
    limits: dict[str, Any] = {}
    for script in ("raw_vllm.py", "bare_model.py"):
        command = [
            sys.executable,
            f"benchmarks/{script}",
            str(folder.resolve()),
            "--rounds",
            str(rounds),
        ]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{script} ended with status {done.returncode}")
        limits |= last_json(done.stdout)
    return limits


def compute_limits(step: int, measured: dict[str, Any]) -> dict[str, float]:
    """Return the limits of a step's parts in seconds, from the result of measure_limits.

    bare_model.py has two layouts of the update, `shared` and `packed`. The faster one is the limit.
    """
    seconds = {name: median(measured[name][f"step_{step}"]) for name in ("gen", "shared", "packed")}
    return {
        "gen": seconds["gen"],
        "update_actor": min(seconds["shared"], seconds["packed"]),
        "update_weights": median(measured["copy"]),
        "shared": seconds["shared"],
        "packed": seconds["packed"],
    }


def list_names(rows: Iterable[dict[str, float]]) -> list[str]:
    """Return the keys of all rows, without duplicates."""
    return list(dict.fromkeys(itertools.chain.from_iterable(rows)))


def compute_medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each key over the rows. A missing value counts as 0."""
    names = list_names(rows)
    return {name: round(median(row.get(name, 0.0) for row in rows), 3) for name in names}


def report(rows: list[dict[str, Any]], measured: dict[str, Any]) -> dict[str, Any]:
    """Print the steps, and the stages with their limits. Return the numbers of the warm steps.

    rows: the lines of metrics.jsonl. measured: the result of measure_limits.
    """
    steps = {row["step"]: stages(row) for row in rows if "timing_s/step" in row}
    names = list_names(steps.values())
    tokens = {row["step"]: row["perf/total_num_tokens"] for row in rows if "timing_s/step" in row}
    print("seconds" + "".join(f"{name:>16}" for name in names) + f"{'tokens':>10}")
    for step, seconds in steps.items():
        note = "   (warm-up)" if step == min(steps) else ""
        print(
            f"step {step:2d}"
            + "".join(f"{seconds.get(name, 0.0):16.3f}" for name in names)
            + f"{tokens[step]:10.0f}{note}"
        )
    warm = [step for step in steps if step != min(steps)]
    for step in warm:
        steps[step]["else"] = steps[step]["step"] - sum(
            steps[step].get(part, 0.0) for part in PARTS
        )
    limits = {step: compute_limits(step, measured) for step in warm}
    ratios = {
        part: median(limits[step][part] / steps[step][part] for step in warm) for part in PARTS
    }
    ratios["step"] = median(
        sum(limits[step][part] for part in PARTS) / steps[step]["step"] for step in warm
    )
    stage_s = compute_medians([steps[step] for step in warm])
    limit_s = compute_medians([limits[step] for step in warm])
    limit_s["step"] = round(sum(limit_s[part] for part in PARTS), 3)
    reload_s = median(measured["reload"])
    print(f"\n{'stage':<16}{'median, s':>12}{'limit, s':>12}{'limit / time':>14}")
    for name in [*names, "else"]:
        limit = f"{limit_s[name]:12.3f}{ratios[name]:14.2f}" if name in ratios else ""
        print(f"{name:<16}{stage_s[name]:12.3f}{limit}")
    print(
        f"\nlimit of the update: {limit_s['shared']:.2f} s with shared prompts, "
        f"{limit_s['packed']:.2f} s with a plain packed batch"
    )
    print(f"vLLM loads new weights from memory in {reload_s:.3f} s")
    return {
        "steps": len(warm),
        "stages_s": stage_s,
        "limits_s": limit_s,
        "best_over_taken": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "tokens": median(tokens[step] for step in warm),
        "reload_s": round(reload_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of the run (default: 5)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each limit (default: 3)"
    )
    parser.add_argument("--run", type=Path, help="measure only the limits of this finished run")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the recipe")
    args = parser.parse_args()
    about = machine()
    memory = Memory()
    folder = args.run
    if folder is None:
        folder, rows = demo("bench-step", args.steps, memory, Memory.EVERY, args.changes)
    else:
        rows = read_metrics(folder / "metrics.jsonl")
    result = report(rows, measure_limits(folder, args.rounds))
    peaks = dict(sorted(memory.peaks.items(), key=lambda item: -item[1]))
    print("\npeak memory, GB: " + ", ".join(f"{name} {size:.2f}" for name, size in peaks.items()))
    print(json.dumps({"benchmark": "step", **about, **result, "peak_gb": peaks}))


if __name__ == "__main__":
    main()
