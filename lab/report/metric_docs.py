"""The meaning of metrics, statuses and files of a run; writes docs/reference.md.

    python -m lab.report.metric_docs > docs/reference.md    # a test compares the two

The texts are in metric_docs.yaml. Keys and defaults come from configs/base.yaml and its comments.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from kit.config.keys import ROOT, flatten
from kit.config.load import read_yaml

KEY_LINE = re.compile(r"^( *)([\w.]+):(?= |$)[^#]*(?:# (.*))?$")  # indent, key, comment
COMMENT_LINE = re.compile(r"^ +# (.*)$")


class Metric(NamedTuple):
    """One entry of `metrics` in metric_docs.yaml. names: patterns with *, separated by spaces."""

    names: str
    meaning: str
    unit: str = ""
    healthy: str = ""


class Status(NamedTuple):
    """Status of a failed episode: the cause of the failure, and the fix."""

    cause: str
    fix: str


class Key(NamedTuple):
    """A config key with its default as YAML and its meaning."""

    name: str
    default: str
    meaning: str


DOCS = yaml.safe_load(Path(__file__).with_name("metric_docs.yaml").read_text())
METRICS = [Metric(names, **entry) for names, entry in DOCS["metrics"].items()]
STATUSES = {name: Status(**entry) for name, entry in DOCS["statuses"].items()}
FILES: dict[str, str] = DOCS["files"]


def find_metric(name: str) -> Metric | None:
    """Return the description of a metric; None if there is none."""
    for metric in METRICS:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in metric.names.split()):
            return metric
    return None


def find_status(name: str) -> Status:
    """Return the description of an episode's status; empty texts if there is none."""
    for pattern, status in STATUSES.items():
        if fnmatch.fnmatchcase(name, pattern):
            return status
    return Status("", "")


# --- config keys ---------------------------------------------------------------------------------


def list_kit_keys() -> list[Key]:
    """List the keys that configs/base.yaml sets: Quintet's own keys and changed verl defaults."""
    comments = read_key_comments()
    base = OmegaConf.to_container(read_yaml("base"), resolve=False)
    return [
        Key(name, format_yaml_value(value), find_comment(name, comments))
        for name, value in flatten(base).items()
    ]


def read_key_comments() -> dict[str, str]:
    """Read the comments of configs/base.yaml: {dotted key: comment}."""
    parents: list[str] = []
    comments: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (ROOT / "configs" / "base.yaml").read_text().splitlines():
        key_match = KEY_LINE.match(line)
        comment_match = COMMENT_LINE.match(line)
        if key_match:
            indent, key, comment = key_match.groups()
            parents[len(indent) // 2 :] = [key]
            lines = [comment] if comment else []
            comments[".".join(parents)] = lines
        elif comment_match:  # it continues the comment of the last key
            lines.append(comment_match[1])
    return {key: " ".join(parts) for key, parts in comments.items()}


def find_comment(key: str, comments: dict[str, str]) -> str:
    """Return the comment of a key, or else that of its nearest parent with a comment."""
    while key:
        if comments.get(key):
            return comments[key]
        key = key.rpartition(".")[0]
    return ""


def format_yaml_value(value: Any) -> str:
    """Format a value as YAML on one line."""
    text = OmegaConf.to_yaml(OmegaConf.create({"x": value})).strip().removeprefix("x:")
    if value in ({}, []):
        return text.strip()
    return " ".join(text.split())


# --- the page ------------------------------------------------------------------------------------

KEYS_TEXT = """All keys of Quintet, and the verl keys with another default in `configs/base.yaml`.
Set them in a recipe (YAML) or on the command line (`key=value`). An unknown or unused key is an
error that names the nearest key. For other keys of verl, see
[its documentation](https://verl.readthedocs.io/en/latest/examples/config.html). To see what a
recipe changes, run it with `--dry-run`."""
METRICS_TEXT = """Names in `metrics.jsonl` and in trackers. Prometheus uses other names, see
[monitoring](monitoring.md). `*` stands for a server, a stage or a statistic (mean, max, min).
The last column holds rules of thumb from CPU runs with models of at most 135M parameters. Your
model and task may differ. No run on a GPU has been compared with it."""
FILES_TEXT = "A run writes these files to `runs/<trainer.experiment_name>/`."
STATUSES_TEXT = """`status` is `ok` or one of these. A failed episode has no reward, and the policy
is not trained on it. For failures that a server does not report, see
[reliability](reliability.md#limits)."""
ENDED_TEXT = "The field `ended` of an episode that did not fail."
EXITS_TEXT = "Every command exits with one of these."


def render_reference() -> str:
    """Render docs/reference.md."""
    keys = [[f"`{key.name}`", f"`{key.default}`", key.meaning] for key in list_kit_keys()]
    metrics = [
        [" ".join(f"`{name}`" for name in one.names.split()), one.unit, one.meaning, one.healthy]
        for one in METRICS
    ]
    statuses = [[f"`{name}`", status.cause, status.fix] for name, status in STATUSES.items()]
    sections = (
        ("Keys", KEYS_TEXT, ["key", "default", "meaning"], keys),
        ("Metrics", METRICS_TEXT, ["metric", "unit", "meaning", "healthy"], metrics),
        ("Files of a run", FILES_TEXT, ["file", "content"], code_first(FILES)),
        ("How an episode ends", ENDED_TEXT, ["`ended`", "meaning"], code_first(DOCS["ended"])),
        ("How an episode fails", STATUSES_TEXT, ["`status`", "cause", "fix"], statuses),
        ("Exit status", EXITS_TEXT, ["status", "meaning"], code_first(DOCS["exits"])),
    )
    lines = [
        "# Reference",
        "",
        "Generated by `python -m lab.report.metric_docs`. `tests/test_docs.py` checks that",
        "it is current.",
    ]
    for title, text, head, rows in sections:
        lines += ["", f"## {title}", "", text, "", *format_table(head, rows)]
    return "\n".join(lines) + "\n"


def code_first(texts: dict[Any, str]) -> list[list[str]]:
    """Make a table row of each item, with its key as Markdown code."""
    return [[f"`{key}`", text] for key, text in texts.items()]


def format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table, one string per line."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *escaped]]


if __name__ == "__main__":
    print(render_reference(), end="")
