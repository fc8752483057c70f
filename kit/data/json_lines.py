"""Read files of JSON lines that a run appends to: metrics.jsonl, failures.jsonl, episodes.

A line counts only if it has its line end. A process that is killed can leave a part of a line at
the end of a file, which is no line for the readers. The next command removes it before it appends.

Protects: metrics and episodes, from lines that a killed process left incomplete.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from env import Json


def read_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file without their line ends; [] if there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def has_incomplete_line(path: Path) -> bool:
    """Return whether something follows the last line end of a file. Reads its last byte."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read() not in (b"", b"\n")


def drop_incomplete_line(path: Path) -> bool:
    """Remove what follows the last line end of a file. Return whether there was anything."""
    if not has_incomplete_line(path):
        return False
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return True


def read_objects(path: Path) -> list[Json]:
    """Return the JSON objects of a file's complete lines. Other lines are skipped."""
    objects = []
    for line in read_lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def read_metrics(path: Path) -> list[Json]:
    """Return the lines of metrics.jsonl that count, in the order of their steps.

    A resumed run appends to the file, first a line of the step that it resumes from. So each line
    replaces those of later steps before it. A step may have several lines, such as that of its
    evaluation: the last value of a metric counts. The lines of `evaluate` and `rollout` count only
    if no other command wrote to the file.
    """
    lines = [line for line in read_objects(path) if isinstance(line.get("step"), int)]
    of_training = [line for line in lines if "command" not in line]
    kept: list[Json] = []
    for line in of_training or lines:
        while kept and kept[-1]["step"] > line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def read_steps(path: Path) -> dict[int, Json]:
    """Return {step: its metrics} of metrics.jsonl, in order. The last value of a metric counts."""
    steps: dict[int, Json] = {}
    for line in read_metrics(path):
        steps[line["step"]] = steps.get(line["step"], {}) | line
    return steps
