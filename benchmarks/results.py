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
import sys
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from figures import draw_range, save_light_and_dark
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.run_folder import RunFolder  # noqa: E402

ACCURACY = "val-core/reasoning_gym/acc/mean@1"
REWARD = "rollout/reward/mean"
COLUMNS = {REWARD: ".2f", "response_length/mean": ".2f"}


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
    """Print the table of docs/results.md."""
    print("| run | step | held-out acc | held-out right | reward (train) | response tokens |")
    print("| --- |" + " ---: |" * 5)
    for name, frame in evaluations.items():
        for step, line in frame.iterrows():
            cells = [name, str(step), f"{line[ACCURACY]:.3f}", f"{line['right']:.3f}"]
            for column, digits in COLUMNS.items():
                value = line.get(column, float("nan"))
                cells.append("" if pd.isna(value) else f"{value:{digits}}")
            print(f"| {' | '.join(cells)} |")


def draw_labeled(
    axis: Axes, curves: list[pd.Series], label: str, color: str, va: str = "center"
) -> None:
    """Draw the mean and the range of some curves. The label is at the end of the mean's line.

    va: the vertical alignment of the label, as in matplotlib.
    """
    mean = draw_range(axis, curves, color)
    axis.annotate(
        label,
        (mean.index[-1], mean.iloc[-1]),
        xytext=(5, 0),
        textcoords="offset points",
        va=va,
        color=color,
        annotation_clip=False,
    )


def draw(evaluations: dict[str, pd.DataFrame], rewards: dict[str, pd.Series]) -> Figure:
    """Draw the mean and the range of held-out accuracy and of training reward over the runs."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    accuracy = [frame[ACCURACY] for frame in evaluations.values()]
    draw_labeled(axes[0], accuracy, "only the\nequation", "C0", "top")
    right = [frame["right"] for frame in evaluations.values()]
    draw_labeled(axes[0], right, "contains the\nequation", "C1", "bottom")
    draw_labeled(axes[1], list(rewards.values()), "reward", "C2")
    axes[0].set_title("held-out rows, greedy: fraction of responses", fontsize=10)
    axes[1].set_title("training rows, sampled: mean reward of a step", fontsize=10)
    for axis in axes:
        last = max(frame.index[-1] for frame in evaluations.values())
        axis.set(xlabel="step", ylim=(0, 1), xlim=(0, 1.25 * last))
        axis.set_xticks(range(0, last + 1, max(1, last // 5)))
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"SmolLM2-135M on a CPU, {len(evaluations)} runs: line is the mean, band is the range",
        fontsize=11,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.png", help="picture")
    args = parser.parse_args()
    evaluations = {folder.name: read_evaluations(folder) for folder in args.runs}
    rewards = {folder.name: RunFolder(folder).steps[REWARD].dropna() for folder in args.runs}
    print_table(evaluations)
    save_light_and_dark(partial(draw, evaluations, rewards), args.out)


if __name__ == "__main__":
    main()
