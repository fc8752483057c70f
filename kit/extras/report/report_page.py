"""report.html: a run to look at, or runs side by side, in one page that needs no server and no network.

    python -m kit.extras.report.report_page runs/A [runs/B ...] [--out report.html]

The page is report_page.html with data in it: plotly draws, DataTables (from itables) shows the episodes. All that is
large is compressed and unpacked by the browser when it is looked at.
"""

from __future__ import annotations

import argparse
import base64
import functools
import gzip
import html
import importlib.resources
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd

from kit.config.load import leaves
from kit.data.episodes import IDS, uncollected
from kit.errors import ConfigError, RunError
from kit.extras.report import diagnosis, run_data
from kit.extras.report.metric_docs import describe, of_status
from kit.extras.report.run_data import Folder
from kit.runs import files

CHUNK = 100  # episodes that are unpacked at once, when one of them is looked at
MOST_TOKENS = (
    4_000_000  # whose log-probs the page holds, of the best and worst of each step first: 12 MB
)
LONGEST = 4_000  # characters of a text in the table
MOST_SPANS = 50_000  # tokens of one call that are shown one by one
LONGEST_OPENED = 100_000  # characters of a text of an episode that is opened: a browser lays out more for seconds
CHARTS: list[tuple[str, list[str], str]] = [  # title, metrics, how: lines or stacked bars
    ("Reward", ["rollout/reward/mean", "reward/*/mean", "critic/rewards/mean"], "lines"),
    ("Held-out", ["val-core/*", "rollout/*/acc/*", "val/loss"], "lines"),
    (
        "Length, tokens",
        ["response_length/mean", "response_length/max", "val-aux/*/response_length/mean"],
        "lines",
    ),
    ("How episodes end", ["rollout/ended/*"], "stacked"),
    ("Entropy, nats", ["actor/entropy"], "lines"),
    ("KL, nats", ["actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"], "lines"),
    (
        "Ratios clipped",
        ["actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"],
        "lines",
    ),
    ("Gradient norm", ["actor/grad_norm", "critic/grad_norm"], "lines"),
    (
        "Groups that teach nothing",
        ["rollout/zero_variance_groups", "rollout/groups_dropped"],
        "lines",
    ),
    (
        "Sampler against trainer",
        ["training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"],
        "lines",
    ),
    ("Failures by reason, episodes", ["rollout/failed/*"], "stacked"),
    ("Advantages", ["critic/advantages/*"], "lines"),
    ("Critic", ["critic/vf_loss", "critic/vf_explained_var"], "lines"),
    ("Time by stage, s", ["timing_s/*"], "stacked"),
    ("Tokens a second", ["perf/throughput"], "lines"),
    ("Memory, GiB", ["actor/perf/*"], "lines"),
    ("Verdicts, s", ["verify/latency_s/*"], "lines"),
    ("Loss", ["actor/pg_loss", "actor/loss"], "lines"),
]
WHOLE = (
    "timing_s/step",
    "timing_s/first_episode",
    "timing_s/start",
)  # which are no stages of a step


def write(paths: Sequence[Path], out: Path) -> Path:
    """The page of these runs: `out`. Raises ConfigError where a path is no run's folder, RunError."""
    with uncollected():
        page = render([Folder(path) for path in paths])
    with files.replacing(out) as partial:
        partial.write_text(page)
    return out


def render(runs: Sequence[Folder]) -> str:
    """The page as text: kit/extras/report/report_page.html with all that it shows in it."""
    chosen = with_tokens(runs)
    index, details = episodes(runs, chosen)
    title = ", ".join(run.name for run in runs)
    data = {
        "title": title,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [about(run) for run in runs],
        "charts": list(charts(runs)),
        "metrics": [metrics(run) for run in runs],
        "meanings": {name: told for run in runs for name in run.steps if (told := meaning(name))},
        "episodes": index,
        "pairs": [pair for run in runs for pair in before_after(run)],
        "difference": difference(runs),
    }
    parts = {
        "data": data,
        "vocabulary": [vocabulary(run, chosen) for run in runs],
        **{f"chunk-{i}": d for i, d in enumerate(details)},
    }
    packed = {name: pack(part) for name, part in parts.items()} | libraries()
    scripts = "\n".join(
        f'<script type="text/plain" id="{name}">{text}</script>' for name, text in packed.items()
    )
    page = Path(__file__).with_name("report_page.html").read_text()
    return page.replace("<!-- title -->", html.escape(title)).replace("<!-- data -->", scripts)


def pack(part: Any) -> str:
    """Text, or anything that JSON has, for the page."""
    try:
        text = (
            part.encode()
            if isinstance(part, str)
            else orjson.dumps(part, option=orjson.OPT_NON_STR_KEYS)
        )
    except TypeError:  # half of a surrogate pair, which only JSON's own escape can have
        text = json.dumps(json.loads(json.dumps(part), parse_constant=lambda _: None)).encode()
    return base64.b64encode(gzip.compress(text, 6)).decode()


@functools.cache
def libraries() -> dict[str, str]:
    """What others keep, packed: plotly.js; DataTables and its extensions, as itables bundles them."""
    plotly, tables = importlib.resources.files("plotly"), importlib.resources.files("itables")
    files = {"plotly": plotly / "package_data" / "plotly.min.js"}
    files |= {f"tables-{kind}": tables / "html" / f"dt_bundle.{kind}" for kind in ("js", "css")}
    return {name: pack(file.read_text()) for name, file in files.items()}


def vocabulary(run: Folder, chosen: list[tuple[Folder, dict[str, Any]]]) -> dict[int, str]:
    """{token id: text} of the tokens that are shown of a run; nothing where nobody knows them."""
    tokenizer = load_tokenizer(run)
    shown = {
        i for of, record in chosen if of is run for ids, _ in run_data.sampled(record) for i in ids
    }
    return {i: tokenizer.decode([i]) for i in sorted(shown)} if tokenizer else {}


def load_tokenizer(run: Folder) -> Any:
    """That of the run's model, from its export or the recipe's folder; None where neither is on this machine."""
    path = run.setting("actor_rollout_ref.model.path") or ""
    folder = next(
        (f for f in (run.path / "export", Path(path)) if (f / "tokenizer_config.json").is_file()),
        None,
    )
    if folder is None:
        return None
    from transformers import AutoTokenizer  # 3 s

    try:  # the folder may be a stranger's: code in it is not run, nor asked about
        return AutoTokenizer.from_pretrained(
            folder.absolute(), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a stranger's files make of it
        run.broken.append(f"the tokenizer in {folder} was not loaded: {error!r:.150}")
        return None


# --- what the page shows -------------------------------------------------------------------------


def about(run: Folder) -> dict[str, Any]:
    """A run's name, headline, findings, configuration."""
    found = [finding._asdict() for finding in diagnosis.findings(run)]
    left_out = f"{run.left_out} files of rollouts are not in this page" * bool(run.left_out)
    return {
        "name": run.name,
        "headline": diagnosis.headline(run),
        "findings": found,
        "config": run.text,
        "note": left_out,
    }


def meaning(name: str) -> str:
    """What a metric is, for a reader who points at it."""
    told = describe(name)
    healthy = f" Healthy: {told.healthy}." if told and told.healthy else ""
    return f"{told.meaning}{f' [{told.unit}]' * bool(told.unit)}.{healthy}" if told else ""


def charts(runs: Sequence[Folder]) -> Iterator[dict[str, Any]]:
    """Those of CHARTS for which there are numbers."""
    for title, patterns, how in CHARTS:
        found: list[dict[str, Any]] = []
        for number, run in enumerate(runs):
            names = [name for pattern in patterns for name in run.steps if matches(name, pattern)]
            for name in dict.fromkeys(names):
                values = run.steps[name].dropna()
                line = {
                    "run": number,
                    "x": list(values.index),
                    "y": [float(f"{value:.5g}") for value in values],
                }
                if values.any() and not any(
                    line.items() <= other.items() for other in found
                ):  # two names, one number
                    found.append({"name": name, **line})
        if found:
            yield {"title": title, "how": how, "lines": found}


def matches(name: str, pattern: str) -> bool:
    """Whether a chart shows a metric."""
    start, star, end = pattern.partition("*")
    return name not in WHOLE and (
        name == pattern or (bool(star) and name.startswith(start) and name.endswith(end))
    )


def metrics(run: Folder) -> dict[str, Any]:
    """All numbers of a run by metric, for the table and the chart of whatever is asked."""
    steps = run.steps.drop(columns="time", errors="ignore")
    columns = {
        name: [None if np.isnan(v) else float(f"{v:.6g}") for v in steps[name]]
        for name in sorted(steps)
    }
    return {"steps": list(steps.index), "columns": columns}


def episodes(
    runs: Sequence[Folder], chosen: list[tuple[Folder, dict[str, Any]]]
) -> tuple[dict[str, Any], list[Any]]:
    """(the table's columns; for each CHUNK of its rows, what is shown of an episode that is opened)."""
    with_ids = {id(record) for _, record in chosen}
    tables, details = list[pd.DataFrame](), list[dict[str, Any]]()
    for number, run in enumerate(runs):
        frame = run.episodes.assign(run=number)
        frame["rank"] = ranks(frame)
        tables.append(frame)
        worth = {step: run.advantages(step) for step in frame["step"].unique()}
        for (file, step, record), place in zip(run.records, frame["place"], strict=True):
            known = worth[step] if file.startswith("step") else {}
            details.append(detail(record, known.get(place), id(record) in with_ids))
    frame = pd.concat(tables, ignore_index=True)
    frame["prompt"], frame["answer"] = frame["prompt"].str[:LONGEST], frame["answer"].str[:LONGEST]
    frame["parts"] = [
        " ".join(f"{k}={v:.3g}" for k, v in parts.items()) for parts in frame["parts"]
    ]
    for name in ("reward", "seconds"):
        frame[name] = frame[name].round(4)
    shown = [
        "run",
        "step",
        "file",
        "rank",
        "server",
        "prompt",
        "answer",
        "reward",
        "parts",
        "status",
        "ended",
    ]
    shown += ["tokens", "turns", "tools", "seconds", "row_id"]
    columns = {
        name: [None if v is None or v != v else v for v in frame[name].tolist()] for name in shown
    }
    chunks = [details[i : i + CHUNK] for i in range(0, len(details), CHUNK)]
    return {"columns": columns, "chunk": CHUNK}, chunks


def ranks(frame: pd.DataFrame) -> list[str]:
    """'best' and 'worst' for the three of each file that earned most and least, and `failed`."""
    failed, best, worst = frame["status"] != "ok", frame["best"] <= 3, frame["worst"] <= 3
    return [
        "failed" if f else "best" if b else "worst" if w else ""
        for f, b, w in zip(failed, best, worst, strict=True)
    ]


def with_tokens(runs: Sequence[Folder]) -> list[tuple[Folder, dict[str, Any]]]:
    """(run, record) of the episodes whose tokens the page holds: MOST_TOKENS, best and worst of a step first."""
    every: list[tuple[bool, int, Folder, dict[str, Any], int]] = []
    for run in runs:
        extremes = ranks(run.episodes)
        for (_, step, record), rank, tokens in zip(
            run.records, extremes, run.episodes["tokens"], strict=True
        ):
            every.append((not rank, -step, run, record, tokens))
    chosen, total = [], 0
    for _, _, run, record, tokens in sorted(every, key=lambda each: each[:2]):
        total += tokens
        if total <= MOST_TOKENS:
            chosen.append((run, record))
    return chosen


def detail(record: dict[str, Any], advantages: np.ndarray | None, tokens: bool) -> dict[str, Any]:
    """An episode as it is opened: the conversation, item by item; of sampled tokens ids, log-probs and advantages."""
    told = record["_episode"]
    asked = record.get("responses_create_params", {}).get("input") or told["prompt"]
    items = (
        [{"role": "user", "text": asked}]
        if isinstance(asked, str)
        else [said(item) for item in asked]
    )
    begin = 0
    for item in record["response"]["output"]:
        shown, ids = said(item), item.get(IDS[1]) or []
        if ids and tokens and len(ids) <= MOST_SPANS:
            some = (
                advantages
                if advantages is None or len(advantages) == 1
                else advantages[begin : begin + len(ids)]
            )
            values = None if some is None else [float(f"{v:.3g}") for v in some]
            shown |= {
                "ids": ids,
                "log_probs": [round(p, 2) for p in item[IDS[2]]],
                "advantages": values,
            }
        begin += len(ids)
        items.append(shown)
    known = {
        "row": told["row_id"],
        "group": told["group_id"],
        "error": told["error"],
        "timings": told["timings"],
    }
    known |= {"todo": of_status(told["status"])[1]} if told["status"] != "ok" else {}
    verdict = {
        k: v
        for k, v in record.items()
        if k not in NOT_SAID and isinstance(v, (str, int, float, bool))
    }
    items = [{**item, "text": shortened(item["text"])} for item in items]
    return {**known, "items": items, "verdict": {k: str(v)[:300] for k, v in verdict.items()}}


NOT_SAID = {
    "_episode",
    "responses_create_params",
    "response",
    "agent_ref",
    "_ng_task_index",
    "_ng_rollout_index",
}


def said(item: dict[str, Any]) -> dict[str, Any]:
    """An item of a conversation, for people: who, and what."""
    if item.get("type") == "function_call":
        return {"role": "call", "text": f"{item['name']}({item['arguments']})"}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "text": str(item.get("output"))}
    content = item.get("content") or item.get("summary") or ""
    parts = content if isinstance(content, list) else [{"text": str(content)}]
    return {
        "role": item.get("role") or item.get("type") or "",
        "text": "".join(map(text_of, parts)),
    }


def shortened(text: str) -> str:
    """A text of at most LONGEST_OPENED characters, with a note of where all of it is."""
    rest = len(text) - LONGEST_OPENED
    if rest <= 0:
        return text
    note = f"[{rest} more characters are not in this page; rollouts/*.jsonl has the whole text]"
    return f"{text[:LONGEST_OPENED]}\n{note}"


def text_of(part: Any) -> str:
    """A part of a message; of an image its name."""
    return (
        str(part.get("text") or part.get("image_url") or "")
        if isinstance(part, dict)
        else str(part)
    )


def before_after(run: Folder) -> Iterator[dict[str, Any]]:
    """Held-out rows in the first evaluation and in the last: what was answered, and what that earned."""
    held = run.episodes[run.episodes["file"].str.startswith("val_")]
    if held.empty or held["step"].min() == held["step"].max():
        return
    first, last = (
        held[held["step"] == step].drop_duplicates("row_id")
        for step in (held["step"].min(), held["step"].max())
    )
    both = first.merge(last, on="row_id", suffixes=("", "_after"))
    for each in both.itertuples():
        rewards = [None if r != r else round(r, 4) for r in (each.reward, each.reward_after)]
        answers = [each.answer[:LONGEST], each.answer_after[:LONGEST]]
        yield {
            "run": run.name,
            "prompt": each.prompt[:LONGEST],
            "answers": answers,
            "rewards": rewards,
        }


def difference(runs: Sequence[Folder]) -> list[list[str]]:
    """[key, value in each run] of what the recipes of several runs set differently."""
    if len(runs) < 2:
        return []
    every = [leaves(run.config) for run in runs]
    names = sorted({key for each in every for key in each})
    rows = [[name, *(str(each.get(name, "")) for each in every)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m kit.extras.report.report_page",
        description="Runs as a page, one or side by side.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument(
        "--out", type=Path, help="of one run report.html in its folder, of several report.html here"
    )
    args = parser.parse_args(arguments)
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    try:
        print(write(args.runs, out))
    except (ConfigError, RunError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
