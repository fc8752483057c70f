"""Show a run in the terminal: its problems, its steps, its best and worst episodes.

python algorithm.py show runs/A [--worst 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich import markup
from rich.console import Console
from rich.table import Table

from kit.data.metrics import read_test_set
from kit.errors import remove_control_characters
from lab.report import diagnosis
from lab.run_folder import RunFolder, is_accuracy

MAX_STEPS = 12  # rows of the table, not counting steps with an evaluation
BEST_EPISODES = 3
PROMPT_CHARACTERS = 100  # from the end of the prompt
RESPONSE_CHARACTERS = 300
COLUMNS = {  # metric: title; all of them fit into a terminal of 80 columns
    "rollout/reward/mean": "reward",
    "response_length/mean": "length",
    "rollout/ended/length_frac": "trunc.",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad",
    "rollout/zero_variance_groups": "zero-var",
    "rollout/failed_frac": "failed",
    "val/loss": "held-out",
    "timing_s/step": "sec",
}


def main(arguments: Sequence[str]) -> None:
    """Run the command `show`. Exits with an error message if the path is not a run directory."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py show",
        description="Show a run in the terminal: its problems, its steps, its episodes.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--worst", type=int, default=3, metavar="N", help="number of worst episodes (default: 3)"
    )
    args = parser.parse_args(arguments)
    run = RunFolder(args.run.expanduser())
    console = Console(emoji=False)
    summary = f"[bold]{escape_text(str(run.path))}[/]  {escape_text(diagnosis.summarize(run))}"
    console.print(summary, highlight=False)
    print_problems(console, run)
    if len(run.steps):
        caption = "\nsteps (acc: fraction of held-out responses with the full reward"
        if diagnosis.is_reward_shaped(run):
            caption += "; reward: the verifier's, and another one is trained on"
        caption += ")"
        console.print(caption, style="dim")
        console.print(build_step_table(run.steps))
    print_episodes(console, run, args.worst)
    page = run.path / "report.html"
    next_step = f"python -m lab.report.report_page {run.path}"
    if page.is_file():
        next_step = f"open {page}"
    console.print(f"\nnext: {escape_text(next_step)}", highlight=False, soft_wrap=True)


def print_problems(console: Console, run: RunFolder) -> None:
    """Print each problem of a run with its evidence and the next step."""
    findings = diagnosis.find_problems(run)
    for finding in findings:
        evidence = escape_text(", ".join(finding.evidence))
        console.print(f"\n[bold yellow]![/] {escape_text(finding.problem)}", highlight=False)
        console.print(f"  [dim]evidence: {evidence}[/]", highlight=False)
        console.print(f"  next: {escape_text(finding.next_step)}", highlight=False)
    if not findings:
        console.print("No problems detected")


def print_episodes(console: Console, run: RunFolder, worst: int) -> None:
    """Print the best and the worst episodes of the last training step, or else of the last file."""
    trained = run.episodes[run.episodes["file"].str.startswith("step_")]
    latest = trained if len(trained) else run.episodes
    latest = latest[latest["step"] == latest["step"].max()]
    best_episodes = latest.sort_values("best")[:BEST_EPISODES]
    worst_episodes = latest.sort_values("worst")[:worst]
    for title, episodes in (("best", best_episodes), ("worst", worst_episodes)):
        if len(episodes):
            heading = escape_text(f"{title} episodes of {episodes['file'].iloc[0]}")
            console.print("", build_episode_table(heading, episodes))


def escape_text(text: str) -> str:
    """Escape untrusted text, so that rich markup and terminal commands in it have no effect."""
    return markup.escape(remove_control_characters(text))


def build_step_table(steps: pd.DataFrame) -> Table:
    """Build a table of evenly spaced steps: the first, the last, and each with an evaluation.

    It has the COLUMNS that the run has, and columns for the held-out scores.
    """
    scores = find_scores(steps)
    titles = {}
    for name, title in (COLUMNS | scores).items():
        if name in steps and steps[name].notna().any():
            titles[name] = title
    steps = steps[steps[list(titles)].notna().any(axis=1)]
    has_score = steps[list(scores)].notna().any(axis=1).to_numpy()
    is_shown = has_score.astype(bool)
    is_shown[np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int)] = True
    table = Table("step", *titles.values(), box=None, header_style="bold", padding=(0, 1, 0, 0))
    for step, metrics in steps[is_shown].iterrows():
        cells = ["" if np.isnan(metrics[name]) else f"{metrics[name]:.3g}" for name in titles]
        table.add_row(str(step), *cells)
    return table


def find_scores(steps: pd.DataFrame) -> dict[str, str]:
    """Return the metrics with held-out scores, and their titles.

    These are acc of each test set, and the mean reward where it is not the same.
    """
    accuracies = [name for name in steps if is_accuracy(name)]
    titles = {}
    for name in accuracies:
        test_set = read_test_set(name) if len(accuracies) > 1 else "held-out"
        titles[name] = f"{test_set} acc"
        reward = name.replace("/acc/", "/reward/")
        if reward in steps and not steps[reward].equals(steps[name]):
            titles[reward] = f"{test_set} reward"
    return titles


def build_episode_table(title: str, episodes: pd.DataFrame) -> Table:
    """Build a table of episodes: reward or status, end of the prompt, beginning of the response."""
    table = Table("reward", "prompt", "response", box=None, header_style="bold")
    table.title = title
    table.title_justify = "left"
    for episode in episodes.itertuples():
        result = escape_text(episode.status)
        if not np.isnan(episode.reward):
            result = f"{episode.reward:.3g}"
        prompt = " ".join(episode.prompt[-PROMPT_CHARACTERS:].split())
        response = " ".join(episode.response[:RESPONSE_CHARACTERS].split())
        table.add_row(result, escape_text(prompt), escape_text(response))
    return table
