"""A run at a terminal: what is wrong with it, its steps, its best and worst episodes, what to look at next.

python algorithm.py show runs/A [--worst 10]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich import markup
from rich.console import Console
from rich.table import Table

from kit.errors import ConfigError
from kit.extras.report import diagnosis
from kit.extras.report.run_data import Folder
from kit.runs.text import printable

ROWS = 12  # steps in the table
COLUMNS = {  # short enough for a terminal of 80
    "rollout/reward/mean": "reward",
    "response_length/mean": "length",
    "rollout/ended/length_frac": "cut",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad",
    "rollout/zero_variance_groups": "equal",
    "rollout/failed_frac": "failed",
    "val/loss": "held-out",
    "timing_s/step": "sec",
}


def escape(text: str) -> str:
    """A text that others wrote, for rich: neither its markup nor a terminal's commands in it do anything."""
    return markup.escape(printable(text))


def main(arguments: Sequence[str]) -> None:
    """The command. Exits with a line where the path is no run's folder."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py show", description="A run at a terminal."
    )
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument(
        "--worst", type=int, default=3, metavar="N", help="so many of the worst episodes (3)"
    )
    args = parser.parse_args(arguments)
    try:
        run = Folder(args.run)
    except ConfigError as error:
        sys.exit(f"error: {printable(str(error))}")
    console = Console(emoji=False)
    console.print(
        f"[bold]{escape(str(run.path))}[/]  {escape(diagnosis.headline(run))}", highlight=False
    )
    found = diagnosis.findings(run)
    for finding in found:
        console.print(f"\n[bold yellow]![/] {escape(finding.what)}", highlight=False)
        console.print(
            f"  [dim]shown by {escape(', '.join(finding.shown))}[/]\n  next: {escape(finding.todo)}",
            highlight=False,
        )
    if not found:
        console.print("nothing stands out")
    if len(run.steps):
        console.print("\nsteps (held-out: answers with a reward of 1 or more)", style="dim")
        console.print(steps(run.steps))
    trained = run.episodes[run.episodes["file"].str.startswith("step_")]
    latest = trained if len(trained) else run.episodes
    latest = latest[latest["step"] == latest["step"].max()]
    for title, some in (
        ("best", latest.sort_values("best")[:3]),
        ("worst", latest.sort_values("worst")[: args.worst]),
    ):
        if len(some):
            console.print("", examples(escape(f"the {title} of {some['file'].iloc[0]}"), some))
    page = run.path / "report.html"
    todo = (
        f"open {page}" if page.is_file() else f"python -m kit.extras.report.report_page {run.path}"
    )
    console.print(f"\nnext: {escape(todo)}", highlight=False, soft_wrap=True)


def steps(frame: pd.DataFrame) -> Table:
    """Steps, evenly, the first and the last among them; a column for each of COLUMNS that has numbers, and held-out."""
    held_out = {name: name.split("/")[1] for name in frame if "/acc/mean@" in name}
    held_out = held_out if len(held_out) > 1 else dict.fromkeys(held_out, "held-out")
    names = {
        name: title
        for name, title in (COLUMNS | held_out).items()
        if name in frame and frame[name].notna().any()
    }
    places = set(np.linspace(0, len(frame) - 1, ROWS).round().astype(int))
    kept = frame.iloc[
        [
            i
            for i in range(len(frame))
            if i in places or any(frame[n].notna().iloc[i] for n in held_out)
        ]
    ]
    table = Table("step", *names.values(), box=None, header_style="bold", padding=(0, 1, 0, 0))
    for step, row in kept.iterrows():
        table.add_row(
            str(step), *("" if np.isnan(row[name]) else f"{row[name]:.3g}" for name in names)
        )
    return table


def examples(title: str, some: pd.DataFrame) -> Table:
    """Episodes: what was asked, what was said, what that earned or why it failed."""
    table = Table(
        "reward",
        "prompt",
        "answer",
        title=title,
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for episode in some.itertuples():
        worth = (
            f"{episode.reward:.3g}" if episode.reward == episode.reward else escape(episode.status)
        )
        asked, said = (
            escape(" ".join(text.split())) for text in (episode.prompt[-100:], episode.answer[:300])
        )
        table.add_row(worth, asked, said)
    return table
