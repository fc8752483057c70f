"""Measure the stages of a step of the demo, and the peak memory of its processes.

    python benchmarks/step.py [--steps 5] [key=value ...]

A step has 8 prompts with 8 responses of SmolLM2-135M. The command starts `algorithm.py` as a user
does. The first step is a warm-up, and it is left out of the medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from measure import Memory, demo, machine, stages


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the seconds of each stage and step, and return the medians of the warm steps.

    rows: the lines of metrics.jsonl.
    """
    trained = [row for row in rows if "timing_s/step" in row]
    warm = trained[1:]
    steps = [stages(row) for row in trained]
    names = list(dict.fromkeys(name for step in steps for name in step))
    medians = {name: median(step.get(name, 0.0) for step in steps[1:]) for name in names}
    print(f"{'stage':<16}{'median, s':>12}   each step, s")
    for name in names:
        seconds = " ".join(f"{step.get(name, 0.0):8.3f}" for step in steps)
        print(f"{name:<16}{medians[name]:12.3f}   {seconds}")
    return {
        "steps": len(warm),
        "stages_s": {name: round(seconds, 3) for name, seconds in medians.items()},
        "tokens": median(row["perf/total_num_tokens"] for row in warm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of the run (default: 5)")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes of the recipe")
    args = parser.parse_args()
    about = machine()
    memory = Memory()
    _, rows = demo("bench-step", args.steps, memory, Memory.EVERY, args.changes)
    result = report(rows)
    peaks = dict(sorted(memory.peaks.items(), key=lambda item: -item[1]))
    print("peak memory, GB: " + ", ".join(f"{name} {size:.2f}" for name, size in peaks.items()))
    print(json.dumps({"benchmark": "step", **about, **result, "peak_gb": peaks}))


if __name__ == "__main__":
    main()
