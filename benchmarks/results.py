"""Draw docs/results.png and its dark version from runs of configs/math_cpu.yaml. Print their table.

    python benchmarks/results.py runs/seed1 runs/seed2 runs/seed3 [--out docs/results.png]

The picture has the mean and the range of the runs: held-out accuracy of each evaluation, and the
reward of each step. For an evaluation every 2 steps, set trainer.test_freq=2 in the runs. The table
has a row for each evaluation. Its column `held-out right` is the fraction of held-out responses
that contain the field `answer` of their row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from measure import ROOT

from lab.run_folder import RunFolder

ACCURACY = "val-core/reasoning_gym/acc/mean@1"
REWARD = "rollout/reward/mean"
LENGTH = "response_length/mean"
STYLES = {"": "default", "_dark": "dark_background"}  # suffix of the file's name: matplotlib style


def compute_right(folder: Path, step: int) -> float:
    """Return the fraction of an evaluation's responses that contain `answer` of their row."""
    lines = (folder / "rollouts" / f"val_{step}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # `answer` is the solution of the row; `_episode.answer` is the text of the response
    is_right = [record["answer"] in record["_episode"]["answer"] for record in records]
    return sum(is_right) / len(is_right)


def read_evaluations(folder: Path) -> pd.DataFrame:
    """Return the metrics of the steps with an evaluation, and the column `right`."""
    steps = RunFolder(folder).steps
    evaluations = steps[steps[ACCURACY].notna()].copy()
    evaluations["right"] = [compute_right(folder, int(step)) for step in evaluations.index]
    return evaluations


def print_table(evaluations: dict[str, pd.DataFrame]) -> None:
    """Print the table of docs/results.md. The first evaluation has no reward of training."""
    print("| run | step | held-out acc | held-out right | reward (train) | response tokens |")
    print("| --- |" + " ---: |" * 5)
    for name, frame in evaluations.items():
        for step, line in frame.iterrows():
            cells = [name, str(step), f"{line[ACCURACY]:.3f}", f"{line['right']:.3f}"]
            for column in (REWARD, LENGTH):
                value = line.get(column, float("nan"))
                cells.append("" if pd.isna(value) else f"{value:.2f}")
            print(f"| {' | '.join(cells)} |")


def draw_range(axis: Axes, curves: list[pd.Series], label: str, color: str) -> None:
    """Draw the mean and the range of some curves at the steps that all have.

    curves: values by step.
    """
    table = pd.concat(curves, axis=1).dropna()
    mean = table.mean(axis=1)
    axis.fill_between(
        table.index, table.min(axis=1), table.max(axis=1), alpha=0.25, color=color, lw=0
    )
    axis.plot(table.index, mean, color=color, lw=1.5, label=label)


def draw(evaluations: dict[str, pd.DataFrame], rewards: list[pd.Series], out: Path) -> None:
    """Draw held-out accuracy and training reward, for light and for dark pages."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    frames = evaluations.values()
    draw_range(axes[0], [frame[ACCURACY] for frame in frames], "only the equation", "C0")
    draw_range(axes[0], [frame["right"] for frame in frames], "contains the equation", "C1")
    draw_range(axes[1], rewards, "reward", "C2")
    axes[0].set_title("held-out rows, greedy: fraction of responses", fontsize=10)
    axes[1].set_title("training rows, sampled: mean reward of a step", fontsize=10)
    for axis in axes:
        axis.set(xlabel="step", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.suptitle(f"SmolLM2-135M on a CPU, {len(frames)} runs: line is the mean, band the range")
    figure.savefig(out, dpi=110, transparent=True)  # because the backgrounds of pages differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.png", help="picture")
    args = parser.parse_args()
    evaluations = {folder.name: read_evaluations(folder) for folder in args.runs}
    rewards = [RunFolder(folder).steps[REWARD].dropna() for folder in args.runs]
    print_table(evaluations)
    matplotlib.use("Agg")
    for suffix, style in STYLES.items():
        with plt.style.context(style):
            draw(evaluations, rewards, args.out.with_stem(f"{args.out.stem}{suffix}"))


if __name__ == "__main__":
    main()
