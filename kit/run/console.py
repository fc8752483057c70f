"""The console output of a run.

Each step is one line. At a terminal there is a progress bar below the lines, unless with --quiet.
Without the bar, `rollout` and `evaluate` print how many episodes have ended, every LINE_S seconds.

Protects: the terminal, from control characters that a policy or a server wrote.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kit.data.episode import Episode
from kit.errors import remove_control_characters

LINE_S = 30.0
MIN_SECONDS = 0.05  # shorter stages are not shown
# labels of stages; the others show their own name
STAGE_LABELS = {"update_actor": "update", "update_weights": "sync", "testing": "eval"}
HIDDEN_STAGES = ("step", "first_episode")
console = Console(emoji=False)


class Display:
    """The progress of a run on the console.

    title: the label of the bar. total: the number of steps; 0: the command has none, and the bar
    counts episodes. completed: steps of earlier runs.
    """

    def __init__(self, title: str, total: int, completed: int):
        self.total = total
        self.episodes = ""  # how many of the current batch have ended
        self.is_stopped = threading.Event()
        columns = (
            "{task.description}",
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            "{task.fields[stage]}",
            TimeElapsedColumn(),
            "left",
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        # steps are long, so the time left is estimated from the mean of all steps
        self.bar = Progress(*columns, console=console, speed_estimate_period=math.inf)
        self.task = self.bar.add_task(
            title, total=total or 1, completed=completed, stage="starting"
        )

    def start(self) -> None:
        """Start drawing."""
        if console.is_interactive:
            self.bar.start()
        elif not self.total:
            threading.Thread(target=self.print_episodes, daemon=True).start()

    def stop(self) -> None:
        """Stop drawing."""
        self.is_stopped.set()
        if console.is_interactive:
            self.bar.stop()

    def show_stage(self, stage: str) -> None:
        """Show the current stage next to the bar."""
        self.bar.update(self.task, stage=stage)

    def show_episodes(self, done: int, failed: int, total: int) -> None:
        """Show how many episodes of a batch have ended."""
        errors = f", {failed} failed" if failed else ""
        self.episodes = f"{done}/{total} episodes{errors}" if done < total else ""
        self.show_stage(f"{done}/{total} episodes")
        if not self.total:
            self.set_progress(done, total)

    def print_episodes(self) -> None:
        """Print how many episodes have ended, until `stop`."""
        began = time.monotonic()
        while not self.is_stopped.wait(LINE_S):
            if self.episodes:
                say(f"{self.episodes}, {(time.monotonic() - began) / 60:.1f} min")

    def set_progress(self, completed: int, total: int | None = None) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=completed, total=total)

    def print_step(self, step: int, values: dict[str, str], timing: Mapping[str, float]) -> None:
        """Print a step's values and the seconds of its stages."""
        self.set_progress(step)
        line = "  ".join(f"{name} {value}" for name, value in values.items())
        say(f"step {step}/{self.total}  {line}  {describe_seconds(timing)}")


def describe_seconds(timing: Mapping[str, float]) -> str:
    """Return the seconds of a step and of its stages: `20.6s (gen 5.8 update 13.8 sync 1.0)`."""
    stages = [
        f"{STAGE_LABELS.get(name, name)} {seconds:.1f}"
        for name, seconds in timing.items()
        if name not in HIDDEN_STAGES and seconds >= MIN_SECONDS
    ]
    total = timing.get("step", sum(timing.values()))
    return f"{total:.1f}s ({' '.join(stages)})"


class LogFormatter(logging.Formatter):
    """Formats log lines, which may quote a server, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return remove_control_characters(super().format(record))


def say(text: str) -> None:
    """Print one line, above the progress bar."""
    console.print(remove_control_characters(text), markup=False, highlight=False, soft_wrap=True)


def count_nouns(number: int, noun: str) -> str:
    """Return "1 run" or "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def step_values(metrics: Mapping[str, float], is_reward_shaped: bool) -> dict[str, str]:
    """Return the values of a step's line, by label.

    `reward` is the verifier's mean over all verified episodes. is_reward_shaped: whether env.reward
    or a KL term changes the reward. If so, `verifier` and `shaped` are shown instead.
    """
    names = {"reward": "rollout/reward/mean"}
    if is_reward_shaped and "critic/rewards/mean" in metrics:
        names = {"verifier": "rollout/reward/mean", "shaped": "critic/rewards/mean"}
    names |= {
        "len": "response_length/mean",
        "entropy": "actor/entropy",
        "grad": "actor/grad_norm",
        "stale": "replay/staleness",
        "kl": "replay/kl",
        "ess": "replay/ess",
    }
    values = {
        label: format_value(metrics[name]) for label, name in names.items() if name in metrics
    }
    kept = metrics["rollout/kept"]
    episodes = metrics["rollout/episodes"]
    if kept < episodes:
        values["kept"] = f"{kept:.0f}/{episodes:.0f}"
    zero_variance = metrics["rollout/zero_variance_groups"]
    if zero_variance:
        values["zero-var"] = f"{zero_variance:.0f} groups"
    values["failed"] = f"{metrics['rollout/failed_frac']:.0%}"
    return values


def format_value(value: float) -> str:
    """Format a number: without decimals from 10 on, else with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.3g}"


def print_examples(episodes: Sequence[Episode], count: int) -> None:
    """Print the `count` best and worst episodes."""
    ranked = sorted(episodes, key=lambda episode: episode.reward or 0.0, reverse=True)
    worst = ranked[max(count, len(ranked) - count) :]
    for episode in [*ranked[:count], *worst]:
        question = " ".join(episode.question.split())
        if len(question) > 100:
            question = f"...{question[-97:]}"
        reward = f"reward {episode.reward:.2f}"
        if episode.trained_reward != episode.reward:
            reward = f"verifier {episode.reward:.2f}, trained on {episode.trained_reward:.2f}"
        say(f"    {question!r} -> {episode.transcript[:200]!r}  {reward}")
