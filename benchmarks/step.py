"""A step of the demo, stage by stage, each with its lowest possible time.

8 prompts x 8 responses with SmolLM2-135M.

    python benchmarks/step.py [--steps 5] [--rounds 3] [--run runs/NAME] [key=value ...]

Starts `algorithm.py` as a user would and watches the memory of its processes by name. When it has
ended, the same work is done without it, in separate processes, each step `--rounds` times: raw
vLLM (benchmarks/raw_vllm.py), the bare model and a copy of its weights (benchmarks/bare_model.py).
The first step warms the kit up and is left out. Prints tables, and one JSON line last. --run: a run
that is over, of which only the limits are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from measure import ROOT, Memory, demo, last_json, machine, stages

PARTS = (
    "gen",
    "update_actor",
    "update_weights",
)  # the stages that have a limit; the rest of a step is `else`


def measure_limits(folder: Path, rounds: int) -> dict[str, Any]:
    """The time of raw vLLM for a run's steps, then the bare model."""
    found: dict[str, Any] = {}
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
            sys.exit(f"{script} ended with {done.returncode}")
        found |= last_json(done.stdout)
    return found


def limits_of(step: int, found: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step's parts at best; of the two ways to lay out an update, the faster one."""
    seconds = {name: median(found[name][f"step_{step}"]) for name in ("gen", "shared", "packed")}
    return {
        "gen": seconds["gen"],
        "update_actor": min(seconds["shared"], seconds["packed"]),
        "update_weights": median(found["copy"]),
        "shared": seconds["shared"],
        "packed": seconds["packed"],
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(median(row.get(name, 0.0) for row in rows), 3) for name in names}


def report(rows: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """Print the steps, and the stages with their limits. The figures of the warm steps."""
    steps = {row["step"]: stages(row) for row in rows if "timing_s/step" in row}
    names = list(dict.fromkeys(name for taken in steps.values() for name in taken))
    tokens = {row["step"]: row["perf/total_num_tokens"] for row in rows if "timing_s/step" in row}
    print("seconds" + "".join(f"{name:>16}" for name in names) + f"{'tokens':>10}")
    for step, taken in steps.items():
        note = "   (warm-up)" if step == min(steps) else ""
        print(
            f"step {step:2d}"
            + "".join(f"{taken.get(n, 0.0):16.3f}" for n in names)
            + f"{tokens[step]:10.0f}{note}"
        )
    warm = [step for step in steps if step != min(steps)]
    for step in warm:
        steps[step]["else"] = steps[step]["step"] - sum(
            steps[step].get(part, 0.0) for part in PARTS
        )
    limits = {step: limits_of(step, found) for step in warm}
    ratios = {
        part: median(limits[step][part] / steps[step][part] for step in warm) for part in PARTS
    }
    ratios["step"] = median(
        sum(limits[step][part] for part in PARTS) / steps[step]["step"] for step in warm
    )
    taken, best = medians([steps[step] for step in warm]), medians([limits[step] for step in warm])
    best["step"] = round(sum(best[part] for part in PARTS), 3)
    print(f"\n{'stage':<16}{'median, s':>12}{'at best, s':>12}{'best / taken':>14}")
    for name in [*names, "else"]:
        limit = f"{best[name]:12.3f}{ratios[name]:14.2f}" if name in ratios else ""
        print(f"{name:<16}{taken[name]:12.3f}{limit}")
    print(
        f"\nupdate at best: prompts shared {best['shared']:.2f} s, plain packed batch "
        f"{best['packed']:.2f} s"
    )
    print(f"vLLM takes new weights from memory in {median(found['reload']):.3f} s")
    told = {name: round(ratio, 3) for name, ratio in ratios.items()}
    counted = {
        "tokens": median(tokens[step] for step in warm),
        "reload_s": round(median(found["reload"]), 3),
    }
    return {
        "steps": len(warm),
        "stages_s": taken,
        "limits_s": best,
        "best_over_taken": told,
        **counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="times that each limit is measured")
    parser.add_argument("--run", type=Path, help="a run that is over: measure its limits alone")
    parser.add_argument("changes", nargs="*", metavar="key=value")
    args = parser.parse_args()
    about, memory, folder = machine(), Memory(), args.run
    if folder is None:
        folder, rows = demo("bench-step", args.steps, memory, Memory.EVERY, args.changes)
    else:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = report(rows, measure_limits(folder, args.rounds))
    peaks = dict(sorted(memory.peaks.items(), key=lambda item: -item[1]))
    print("\npeak memory, GB: " + ", ".join(f"{name} {size:.2f}" for name, size in peaks.items()))
    print(json.dumps({"benchmark": "step", **about, **result, "peak_gb": peaks}))


if __name__ == "__main__":
    main()
