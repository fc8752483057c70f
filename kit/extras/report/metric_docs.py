"""What the words of a run mean: its metrics, its files, how an episode fails, its exit status; and docs/reference.md.

    python -m kit.extras.report.metric_docs > docs/reference.md    # a test compares the two

The words are in kit/extras/report/metric_docs.yaml; keys, defaults and what they mean come from configs/base.yaml.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from kit.config.load import ROOT, base_configs, is_kit_key, leaves, read_yaml, unread

VERLS = "https://verl.readthedocs.io/en/latest/examples/config.html"


class Metric(NamedTuple):
    """Names of metrics, one or several with * for servers and the like; what they are in."""

    names: str
    unit: str
    meaning: str
    healthy: str = ""


_told = yaml.safe_load(Path(__file__).with_name("metric_docs.yaml").read_text())
METRICS = [Metric(names, *told) for names, told in _told["metrics"].items()]
STATUSES: dict[str, list[str]] = _told["statuses"]  # of a failed episode: what happened, what to do
ENDED, EXITS, FILES = (_told[part] for part in ("ended", "exits", "files"))  # what each means


def describe(name: str) -> Metric | None:
    """What a metric is, by its name."""
    return next(
        (
            m
            for m in METRICS
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in m.names.split())
        ),
        None,
    )


def of_status(status: str) -> list[str]:
    """[what happened, what to do] of a failed episode."""
    return next(
        (told for name, told in STATUSES.items() if fnmatch.fnmatchcase(status, name)), ["", ""]
    )


# --- the page ------------------------------------------------------------------------------------


def keys() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of each key of the kit's own, and of verl's that configs/base.yaml sets, as its comments
    say it."""
    path: list[str] = []
    found: dict[str, list[str]] = {}
    for line in (ROOT / "configs" / "base.yaml").read_text().splitlines():
        told = re.match(r"^( *)([\w.]+):(?= |$)([^#]*)(?:# (.*))?$", line)
        if told:
            path[len(told[1]) // 2 :] = [told[2]]
            found[".".join(path)] = [told[4] or ""]
        elif (more := re.match(r"^ +# (.*)$", line)) and found:
            found[next(reversed(found))].append(more[1])
    base = OmegaConf.to_container(read_yaml("base"), resolve=False)
    for key, value in leaves(base).items():
        parents = [
            key.rsplit(".", i)[0] for i in range(key.count(".") + 1)
        ]  # a comment may be the whole mapping's
        said = next((words for name in parents if any(words := found.get(name, []))), [])
        yield key, plain(value), " ".join(filter(None, said))


def plain(value: Any) -> str:
    """A value as YAML has it on a line."""
    text = OmegaConf.to_yaml(OmegaConf.create({"x": value})).strip().removeprefix("x:")
    return " ".join(text.split()) if value not in ({}, []) else text.strip()


def most_used() -> dict[str, tuple[str, list[str]]]:
    """{key of verl's: (its default here, the recipes that set it)}, of those that recipes in configs/ set."""
    base, known = read_yaml("base"), leaves(base_configs()[0])
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        if path.stem == "base":
            continue
        for key in leaves(OmegaConf.to_container(read_yaml(str(path)), resolve=False)):
            ours = key.startswith("ray_kwargs.") or is_kit_key(key)
            if (
                key in known
                and not ours
                and unread(key) is None
                and OmegaConf.select(base, key) is None
            ):
                found.setdefault(key, []).append(path.stem)
    return {key: (plain(known[key]), recipes) for key, recipes in sorted(found.items())}


OWN_KEYS = """The kit's own, all of them, and those of verl's whose default is another here (`configs/base.yaml`). A
recipe sets them in YAML, the command line by `key=value`. A key that nothing reads is an error with the nearest
name."""
VERLS_KEYS = f"""Those that recipes of the kit set. What each means: [verl's page]({VERLS});
what a recipe changes: its `--dry-run`."""
OF_METRICS = """Of `metrics.jsonl`, trackers and Prometheus. `*` stands for a server or a stage, or is mean, max, min.
Healthy is what runs of the kit's recipes look like."""
OF_FILES = "In `runs/<trainer.experiment_name>/`."
OF_STATUS = (
    "`status` is `ok`, or one of these; then the episode has no reward, and is not trained on."
)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in rows]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *escaped)]


def page() -> str:
    """docs/reference.md."""
    code = "`{}`".format
    own = [[code(key), code(default), told] for key, default, told in keys()]
    theirs = [
        [code(key), code(value), ", ".join(recipes)]
        for key, (value, recipes) in most_used().items()
    ]
    metrics = [
        [" ".join(map(code, m.names.split())), m.unit, m.meaning, m.healthy] for m in METRICS
    ]
    sections = [
        ("Keys", OWN_KEYS, ["key", "default", "meaning"], own),
        ("Keys of verl's", VERLS_KEYS, ["key", "verl's default", "set by"], theirs),
        ("Metrics", OF_METRICS, ["metric", "unit", "meaning", "a healthy run"], metrics),
        (
            "Files of a run",
            OF_FILES,
            ["file", "what it holds"],
            [[code(name), told] for name, told in FILES.items()],
        ),
        (
            "How an episode ends",
            "",
            ["`ended`", "meaning"],
            [[code(k), v] for k, v in ENDED.items()],
        ),
        (
            "How an episode fails",
            OF_STATUS,
            ["`status`", "what", "to do"],
            [[code(k), *v] for k, v in STATUSES.items()],
        ),
        ("Exit status", "", ["status", "meaning"], [[code(k), v] for k, v in EXITS.items()]),
    ]
    lines = [
        "# Reference",
        "",
        "Made from the code by `python -m kit.extras.report.metric_docs`; a test holds that it is.",
    ]
    for title, intro, head, rows in sections:
        lines += ["", f"## {title}", "", *([intro, ""] if intro else []), *table(head, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
