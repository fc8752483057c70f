"""The meaning of metrics, statuses and files of a run; writes docs/reference.md.

    python -m kit.extras.report.metric_docs > docs/reference.md    # a test compares the two

The texts are in metric_docs.yaml. Keys and defaults come from configs/base.yaml and its comments.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from kit.config.keys import ROOT, flatten, is_kit_key, is_used
from kit.config.load import base_configs, read_yaml

VERL_DOCS = "https://verl.readthedocs.io/en/latest/examples/config.html"
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


class VerlKey(NamedTuple):
    """A key of verl with verl's default as YAML, and the recipes in configs/ that set it."""

    name: str
    default: str
    recipes: list[str]


class Section(NamedTuple):
    """A section of docs/reference.md: a text, then a table."""

    title: str
    text: str
    head: list[str]
    rows: list[list[str]]


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


def list_verl_keys() -> list[VerlKey]:
    """List the verl keys that recipes in configs/ set and configs/base.yaml does not."""
    base = read_yaml("base")
    verl_defaults = flatten(base_configs()[0])
    recipes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        if path.stem == "base":
            continue
        recipe = OmegaConf.to_container(read_yaml(str(path)), resolve=False)
        for key in flatten(recipe):
            is_in_base = OmegaConf.select(base, key) is not None
            if key in verl_defaults and is_used_verl_key(key) and not is_in_base:
                recipes.setdefault(key, []).append(path.stem)
    return [
        VerlKey(key, format_yaml_value(verl_defaults[key]), names)
        for key, names in sorted(recipes.items())
    ]


def is_used_verl_key(key: str) -> bool:
    """Whether verl defines the key and this trainer reads it."""
    is_kit = is_kit_key(key) or key.startswith("ray_kwargs.")
    return not is_kit and is_used(key)


def format_yaml_value(value: Any) -> str:
    """Format a value as YAML on one line."""
    text = OmegaConf.to_yaml(OmegaConf.create({"x": value})).strip().removeprefix("x:")
    if value in ({}, []):
        return text.strip()
    return " ".join(text.split())


# --- the page ------------------------------------------------------------------------------------

KEYS_TEXT = """All keys of Quintet, and the verl keys with another default in `configs/base.yaml`.
Set them in a recipe (YAML) or on the command line (`key=value`). An unknown or unused key is an
error that names the nearest key."""
VERL_KEYS_TEXT = f"""Keys that recipes in `configs/` set. For their meaning, see
[verl's documentation]({VERL_DOCS}).
To see what a recipe changes, run it with `--dry-run`."""
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
    lines = [
        "# Reference",
        "",
        "Generated by `python -m kit.extras.report.metric_docs`. `tests/test_docs.py` checks that",
        "it is current.",
    ]
    for section in list_sections():
        lines += ["", f"## {section.title}", ""]
        if section.text:
            lines += [section.text, ""]
        lines += format_table(section.head, section.rows)
    return "\n".join(lines) + "\n"


def list_sections() -> list[Section]:
    """List the sections of docs/reference.md."""
    kit_keys = [[code(key.name), code(key.default), key.meaning] for key in list_kit_keys()]
    verl_keys = [
        [code(key.name), code(key.default), ", ".join(key.recipes)] for key in list_verl_keys()
    ]
    metrics = []
    for metric in METRICS:
        names = " ".join(code(name) for name in metric.names.split())
        metrics.append([names, metric.unit, metric.meaning, metric.healthy])
    statuses = [[code(name), status.cause, status.fix] for name, status in STATUSES.items()]
    verl_head = ["key", "verl's default", "set by"]
    ended_head = ["`ended`", "meaning"]
    status_head = ["`status`", "cause", "fix"]
    return [
        Section("Keys", KEYS_TEXT, ["key", "default", "meaning"], kit_keys),
        Section("Keys of verl", VERL_KEYS_TEXT, verl_head, verl_keys),
        Section("Metrics", METRICS_TEXT, ["metric", "unit", "meaning", "healthy"], metrics),
        Section("Files of a run", FILES_TEXT, ["file", "content"], code_first(FILES)),
        Section("How an episode ends", ENDED_TEXT, ended_head, code_first(DOCS["ended"])),
        Section("How an episode fails", STATUSES_TEXT, status_head, statuses),
        Section("Exit status", EXITS_TEXT, ["status", "meaning"], code_first(DOCS["exits"])),
    ]


def code(text: Any) -> str:
    """Format a text as Markdown code."""
    return f"`{text}`"


def code_first(texts: dict[Any, str]) -> list[list[str]]:
    """Make a table row of each item, with its key as Markdown code."""
    return [[code(key), text] for key, text in texts.items()]


def format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table, one string per line."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append([cell.replace("|", "\\|") for cell in row])
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    print(render_reference(), end="")
