"""Draw held-out accuracy and training reward of finished runs, and print their table.

    python benchmarks/curve.py runs/seed1 runs/seed2 --out docs/results.png

`right` counts the held-out answers that contain the right equation, whatever stands around it: what the
model knew, while `acc` is what the verifier paid in full.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

ACC, REWARD = "val-core/reasoning_gym/acc/mean@1", "critic/rewards/mean"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def right(run: Path, step: int) -> float:
    """Fraction of the held-out answers of `step` that contain the right equation."""
    episodes = [line["_episode"] for line in read(run / "rollouts" / f"val_{step}.jsonl")]
    sums = [e["prompt"].removeprefix("Complete the equation: ").removesuffix(" =").split(" + ") for e in episodes]
    wanted = [f"{a} + {b} = {int(a) + int(b)}" for a, b in sums]
    return sum(w in e["answer"] for w, e in zip(wanted, episodes, strict=True)) / len(episodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", default="docs/results.png")
    args = parser.parse_args()
    matplotlib.use("Agg")
    figure, (left, middle) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    print("| run | step | minutes | held-out acc | held-out right | reward (train) | response tokens | step, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for run in args.runs:
        rows = read(run / "metrics.jsonl")
        held_out, steps = [r for r in rows if ACC in r], [r for r in rows if REWARD in r]
        at = {r["step"]: r for r in steps}
        known = {r["step"]: right(run, r["step"]) for r in held_out}
        left.plot([r["step"] for r in held_out], [r[ACC] for r in held_out], marker="o", label=f"{run.name}: acc")
        line = left.lines[-1]
        left.plot(list(known), list(known.values()), ls=":", color=line.get_color(), label=f"{run.name}: right")
        middle.plot([r["step"] for r in steps], [r[REWARD] for r in steps], label=run.name)
        for r in held_out:
            step = at.get(r["step"], {})
            cells = [step.get(k) for k in (REWARD, "response_length/mean", "timing_s/step")]
            shown = [f"{v:.2f}" if v is not None else "" for v in cells]
            minutes = (r["time"] - rows[0]["time"]) / 60
            print(
                f"| {run.name} | {r['step']} | {minutes:.1f} | {r[ACC]:.3f} | {known[r['step']]:.3f} | "
                f"{shown[0]} | {shown[1]} | {shown[2]} |"
            )
    left.set(xlabel="step", ylabel="held-out rows, greedy", ylim=(0, 1), title="held-out accuracy")
    middle.set(xlabel="step", ylabel="mean reward, sampled", ylim=(0, 1), title="training reward")
    for axes in (left, middle):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
