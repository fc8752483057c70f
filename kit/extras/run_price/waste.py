"""The share of a run's episodes and tokens from which nothing was learned.

An episode counts once, for the first of these reasons that holds:

    failed          it has no reward
    skipped step    its step changed no weights, for example because of NaN
    zero variance   all rewards of its group are equal, and its advantages are 0, or it was
                    filtered: dynamic sampling leaves out such groups
    filtered        it was verified, and not trained on: a filter, a small group, or a surplus group
    masked          a filter masked its tokens: its advantages are 0, and its reward is not the
                    mean of its group
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from env import Json
from kit.data.episode import SAMPLED_IDS
from kit.data.json_lines import read_metrics
from kit.data.metrics import mean
from kit.data.reward_scale import are_equal
from kit.data.rollout_files import read_records, read_scale
from kit.runs import files

KINDS = ("failed", "skipped step", "zero variance", "filtered", "masked")
MAX_STEPS = 20  # rollouts files that are read, the newest; one of a large run has gigabytes


class Spent(NamedTuple):
    """Episodes and sampled tokens."""

    episodes: int = 0
    tokens: int = 0

    def plus(self, tokens: int) -> Spent:
        """Return these and one more episode."""
        return Spent(self.episodes + 1, self.tokens + tokens)


class Waste(NamedTuple):
    """What steps spent in all, and on each of KINDS. steps: whose rollouts were read."""

    steps: int
    all: Spent
    by_kind: dict[str, Spent]


class StepFiles(NamedTuple):
    """What a run wrote about a step.

    is_zero: {(row, rollout): whether all advantages are 0} of the episodes that were trained on;
    None if the step wrote no advantages.
    """

    records: list[Json]
    is_zero: dict[tuple[int, int], bool] | None
    has_filters: bool
    is_skipped: bool


def measure_waste(folder: Path) -> Waste:
    """Sort the episodes of a run's last MAX_STEPS steps. The rollouts files must be there."""
    lines: dict[int, Json] = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        if "rollout/episodes" in line:
            lines[line["step"]] = line
    paths = {step: folder / "rollouts" / f"step_{step}.jsonl" for step in sorted(lines)}
    steps = [step for step, path in paths.items() if path.is_file()][-MAX_STEPS:]
    total = Spent()
    by_kind = dict.fromkeys(KINDS, Spent())
    for step in steps:
        for kind, tokens in sort_episodes(read_step(folder, step, lines[step])):
            total = total.plus(tokens)
            if kind:
                by_kind[kind] = by_kind[kind].plus(tokens)
    return Waste(len(steps), total, by_kind)


def read_step(folder: Path, step: int, line: Json) -> StepFiles:
    """Read the files of a step. line: its metrics."""
    records = [record for _, record in read_records(folder / "rollouts" / f"step_{step}.jsonl")]
    filtered = sum(abs(line[name] or 0) for name in line if name.startswith("rollout/filtered/"))
    path = folder / "advantages" / f"step_{step}.npz"
    is_zero = read_zeros(path) if path.is_file() else None
    return StepFiles(records, is_zero, bool(filtered), "training/skipped_nonfinite_steps" in line)


def read_zeros(path: Path) -> dict[tuple[int, int], bool] | None:
    """Return {(row, rollout): whether all advantages are 0} of a file of advantages.

    None for a file without the indices, as earlier versions wrote it.
    """
    with files.open_arrays(path) as saved:
        if "record_index" not in saved:
            return None
        ends = np.cumsum(saved["lengths"])
        parts = np.split(saved["values"], ends[:-1])
        indices = [(int(row), int(rollout)) for row, rollout in saved["record_index"]]
    return {index: not part.any() for index, part in zip(indices, parts, strict=True)}


def sort_episodes(step: StepFiles) -> Iterator[tuple[str, int]]:
    """Yield (one of KINDS or an empty string, sampled tokens) of each episode of a step."""
    groups: dict[str, list[float]] = {}
    for record in step.records:
        if is_verified(record):
            groups.setdefault(record["_episode"]["group_id"], []).append(float(record["reward"]))
    for record in step.records:
        rewards = groups.get(record["_episode"]["group_id"], [])
        yield find_kind(record, step, rewards), count_tokens(record)


def find_kind(record: Json, step: StepFiles, rewards: Sequence[float]) -> str:
    """Return why nothing was learned from an episode, or an empty string.

    rewards: of the verified episodes of its group.
    """
    if not is_verified(record):
        return "failed"
    if step.is_skipped:
        return "skipped step"
    index = (int(record["_ng_task_index"]), int(record["_ng_rollout_index"]))
    if step.is_zero is not None and step.is_zero.get(index) is False:
        return ""
    if len(rewards) > 1 and are_equal(rewards, read_scale(record["_episode"]).spread):
        return "zero variance"
    if step.is_zero is not None and index not in step.is_zero:
        return "filtered"
    is_mean = are_equal([float(record["reward"]), mean(rewards)])
    return "masked" if step.is_zero is not None and step.has_filters and not is_mean else ""


def is_verified(record: Json) -> bool:
    """Whether an episode has a reward."""
    return record["_episode"].get("status") == "ok" and record.get("reward") is not None


def count_tokens(record: Json) -> int:
    """Count the tokens that the policy sampled in an episode."""
    return sum(len(item.get(SAMPLED_IDS) or ()) for item in record["response"]["output"])
