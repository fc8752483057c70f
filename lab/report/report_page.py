"""Write report.html, which shows one run or several. It needs no server and no network.

    python -m lab.report.report_page runs/A [runs/B ...]

The page is report_page.html plus compressed data. plotly draws the charts, DataTables (bundled by
itables) shows the tables. The browser unpacks large parts only when they are looked at.
"""

from __future__ import annotations

import argparse
import base64
import fnmatch
import functools
import gzip
import html
import importlib.resources
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import orjson
import yaml

from env import Json
from kit.data.episode import gc_paused
from kit.data.metrics import HIGH, LOW, name_interval
from kit.errors import ConfigError, RunError
from kit.recipe.keys import flatten
from kit.recipe.redaction import without_settings
from kit.run import files
from lab.report import diagnosis, episode_view
from lab.report.metric_docs import find_metric
from lab.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODES_PER_CHUNK = 100  # unpacked together when one of them is opened
KEYS = orjson.OPT_NON_STR_KEYS


class Chart(NamedTuple):
    """A chart of metrics over steps. patterns: names of metrics, where * stands for any text."""

    title: str
    patterns: list[str]
    is_stacked: bool = False


CHARTS = [
    Chart("Reward", ["rollout/reward/mean", "reward/*/mean", "critic/rewards/mean"]),
    Chart("Held-out", ["val-core/*", "rollout/*/acc/*", "val/loss"]),
    Chart(
        "Response length (tokens)",
        ["response_length/mean", "response_length/max", "val-aux/*/response_length/mean"],
    ),
    Chart("How episodes end", ["rollout/ended/*"], is_stacked=True),
    Chart("Entropy (nats)", ["actor/entropy"]),
    Chart("KL divergence (nats)", ["actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"]),
    Chart("Clipped ratios", ["*_clipfrac*"]),
    Chart("Gradient norm", ["actor/grad_norm", "critic/grad_norm"]),
    Chart("Zero-variance and dropped groups", ["rollout/*groups*"]),
    Chart("Rollout engine against trainer (probability)", ["training/rollout_probs_diff_m*"]),
    Chart("Failed episodes by reason", ["rollout/failed/*"], is_stacked=True),
    Chart("Advantages", ["critic/advantages/*"]),
    Chart("Critic", ["critic/vf_loss", "critic/vf_explained_var"]),
    Chart("Time by stage (s)", ["timing_s/*"], is_stacked=True),
    Chart("Throughput (tokens/s per GPU)", ["perf/throughput"]),
    Chart("Memory (GiB)", ["actor/perf/*"]),
    Chart("Verification time (s)", ["verify/latency_s/*"]),
    Chart("Loss", ["actor/pg_loss", "actor/loss"]),
]
# Times that are not stages of a step. The stacked chart of stages must not contain them.
NOT_STAGES = ("timing_s/step", "timing_s/first_episode", "timing_s/start")


def write_page(
    runs: Sequence[RunFolder], out: Path, comparison: Mapping[str, object] | None = None
) -> Path:
    """Write the page of these runs to `out`, and return `out`.

    comparison: what the command `compare` shows: lines, and charts with bands.
    Raises RunError if the page cannot be written.
    """
    with gc_paused():
        page = render_page(runs, comparison)
    with files.replace_atomically(out) as partial:
        partial.write_text(page)
    return out


def render_page(runs: Sequence[RunFolder], comparison: Mapping[str, object] | None = None) -> str:
    """Render the page: report_page.html with the data of the runs."""
    chosen = episode_view.choose_episodes_with_tokens(runs)
    columns = episode_view.tabulate_episodes(runs)
    views = episode_view.list_episode_views(runs, chosen)
    vocabularies = [
        episode_view.decode_vocabulary(run, load_tokenizer(run), chosen) for run in runs
    ]
    data = {
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [describe_run(run) for run in runs],
        "charts": list(build_charts(runs)),
        "metrics": [tabulate_metrics(run) for run in runs],
        "meanings": list_meanings(runs),
        "episodes": {"columns": columns, "chunk": EPISODES_PER_CHUNK},
        "config_diff": diff_configs(runs),
        "comparison": comparison,
    }
    parts: Json = {"data": data, "vocabularies": vocabularies}
    for number, start in enumerate(range(0, len(views), EPISODES_PER_CHUNK)):
        parts[f"chunk-{number}"] = views[start : start + EPISODES_PER_CHUNK]
    packed = {name: pack(part) for name, part in parts.items()} | load_libraries()
    scripts = [
        f'<script type="text/plain" id="{name}">{text}</script>' for name, text in packed.items()
    ]
    page = Path(__file__).with_name("report_page.html").read_text()
    page = page.replace("<!-- title -->", html.escape(", ".join(run.name for run in runs)))
    return page.replace("<!-- data -->", "\n".join(scripts))


def pack(part: object) -> str:
    """Pack a text, or a value as JSON, as base64 for the page. NaN becomes null."""
    try:
        text = part.encode() if isinstance(part, str) else orjson.dumps(part, option=KEYS)
    except TypeError:  # half of a surrogate pair: only the escapes of `json` can express it
        text = json.dumps(json.loads(json.dumps(part), parse_constant=lambda _: None)).encode()
    return base64.b64encode(gzip.compress(text, 6)).decode()


@functools.cache
def load_libraries() -> dict[str, str]:
    """Load the JavaScript libraries, packed: plotly.js, and DataTables from itables."""
    plotly = importlib.resources.files("plotly") / "package_data" / "plotly.min.js"
    tables = importlib.resources.files("itables") / "html"
    return {
        "plotly": pack(plotly.read_text()),
        "tables-js": pack((tables / "dt_bundle.js").read_text()),
        "tables-css": pack((tables / "dt_bundle.css").read_text()),
    }


def load_tokenizer(run: RunFolder) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a run from its export or its model; None if neither is local."""
    model = Path(run.get_setting("actor_rollout_ref.model.path") or "")
    folders = [run.path / "export", model]
    folders = [folder for folder in folders if (folder / "tokenizer_config.json").is_file()]
    if not folders:
        return None
    from transformers import AutoTokenizer  # takes 3 s

    try:  # the files may be untrusted: their code is not run, and the user is not asked to allow it
        return AutoTokenizer.from_pretrained(
            folders[0].absolute(), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # such files can raise anything
        run.unreadable.append(f"the tokenizer in {folders[0]} was not loaded: {error!r:.150}")
        return None


# --- runs and metrics ----------------------------------------------------------------------------


def describe_run(run: RunFolder) -> Json:
    """Describe a run for the page: name, summary, findings, recipe."""
    notes = run.unreadable.copy()
    if run.skipped_files:
        notes.append(f"{run.skipped_files} rollout files are not on this page")
    return {
        "name": run.name,
        "summary": diagnosis.summarize(run),
        "findings": [finding._asdict() for finding in diagnosis.find_problems(run)],
        "config": yaml.safe_dump(without_settings(run.recipe), sort_keys=False),
        "note": "; ".join(notes),
    }


def list_meanings(runs: Sequence[RunFolder]) -> dict[str, str]:
    """Describe each metric of the runs that metric_docs.yaml knows: {name: text}."""
    meanings = {}
    for name in itertools.chain.from_iterable(run.steps for run in runs):
        metric = find_metric(name)
        if metric:
            unit = f" [{metric.unit}]" if metric.unit else ""
            healthy = f" Healthy: {metric.healthy}." if metric.healthy else ""
            meanings[name] = f"{metric.meaning}{unit}.{healthy}"
    return meanings


def build_charts(runs: Sequence[RunFolder]) -> Iterator[Json]:
    """Build the CHARTS for which the runs have numbers."""
    for chart in CHARTS:
        lines = []
        for number, run in enumerate(runs):
            lines += build_lines(chart, number, run)
        if lines:
            kind = "stacked" if chart.is_stacked else "lines"
            yield {"title": chart.title, "kind": kind, "lines": lines}


def build_lines(chart: Chart, number: int, run: RunFolder) -> list[Json]:
    """Build the lines of a chart for one run. A line that is 0 throughout is left out."""
    lines: list[Json] = []
    names = itertools.chain.from_iterable(list_charted(run, pattern) for pattern in chart.patterns)
    for name in dict.fromkeys(names):
        values = run.steps[name].dropna()
        points = {"x": list(values.index), "y": [float(f"{value:.5g}") for value in values]}
        # two metrics may have the same values; one line is enough
        is_duplicate = any(points.items() <= line.items() for line in lines)
        if values.any() and not is_duplicate:
            lines.append({"name": name, "run": number, **points, **list_margins(name, run)})
    return lines


def list_charted(run: RunFolder, pattern: str) -> list[str]:
    """List the metrics of a run that a chart with this pattern shows."""
    names = [name for name in run.steps if fnmatch.fnmatchcase(name, pattern)]
    return [name for name in names if name not in NOT_STAGES and not name.endswith((LOW, HIGH))]


def list_margins(name: str, run: RunFolder) -> dict[str, list[float]]:
    """List how far the interval of a score reaches above and below it; {} if it has none."""
    ends = name_interval(name)
    if not set(ends.values()) <= set(run.steps):
        return {}
    scores = run.steps[name].dropna()
    above = run.steps[ends[HIGH]].reindex(scores.index) - scores
    below = scores - run.steps[ends[LOW]].reindex(scores.index)
    return {"above": above.fillna(0.0).tolist(), "below": below.fillna(0.0).tolist()}


def tabulate_metrics(run: RunFolder) -> Json:
    """Make the columns of all metrics of a run, for the table and the chart of any metric."""
    frame = run.steps.drop(columns="time", errors="ignore")
    columns = {}
    for name in sorted(frame):
        columns[name] = [float(f"{value:.6g}") for value in frame[name]]
    return {"steps": list(frame.index), "columns": columns}


def diff_configs(runs: Sequence[RunFolder]) -> list[list[str]]:
    """List the keys that the recipes of several runs set differently: [key, value in each run]."""
    if len(runs) < 2:
        return []
    configs = [flatten(run.recipe) for run in runs]
    rows = []
    for key in sorted(set().union(*configs)):
        values = [str(config.get(key, "")) for config in configs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.report.report_page",
        description="Write the report page of one run, or of several runs side by side.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    args = parser.parse_args(arguments)
    folder = args.runs[0] if len(args.runs) == 1 else Path()
    try:
        runs = [RunFolder(path.expanduser()) for path in args.runs]
        print(write_page(runs, folder.expanduser() / "report.html"))
    except (ConfigError, RunError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
