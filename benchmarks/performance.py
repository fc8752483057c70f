"""Write docs/performance.md and its picture from the results of the other benchmarks.

    make bench                           runs the benchmarks, then this
    python benchmarks/performance.py     this alone

The result of a benchmark is the last line that it printed, which `make bench` saves in
runs/bench/NAME.json. The text of the page after MARK is written by hand, and it is not changed. The
exit status is 1 if a result is missing.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import save_light_and_dark
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "performance.png"
MARK = "<!-- benchmarks/performance.py writes the text above. Edit the text below by hand. -->"
NAMES = ("step", "startup", "driver", "peers")
WIDTH = 120  # longest line of the page, in characters
Results = dict[str, dict[str, Any]]  # the JSON object of each benchmark, by its name


def read_results() -> Results:
    """Return the result of each benchmark that has one."""
    results = {}
    for name in NAMES:
        try:
            results[name] = json.loads((ROOT / "runs" / "bench" / f"{name}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            print(f"runs/bench/{name}.json: no result", file=sys.stderr)
    return results


def targets(results: Results) -> list[list[str]]:
    """Return the cells of each row of the table of targets: target, goal, measured, met."""
    rows: list[tuple[str, float, str, float, str]] = []  # target, measured, sign, goal, unit
    if peers := results.get("peers"):
        ratio = peers["kit"]["step"] / peers["trl"]["step"]
        rows.append(("step: Quintet's time / TRL's time without vLLM", ratio, "<=", 0.5, ""))
    if step := results.get("step"):
        rows += step_targets(step)
    if startup := results.get("startup"):
        first = startup["warm"]["first_answer_s"]
        rows.append(("time from the command to the first response", first, "<=", 45, " s"))
    if driver := results.get("driver"):
        rows.append(("driver's time for an episode", driver["ms_per_episode"], "<=", 1, " ms"))
        parts = [part for part in driver.values() if isinstance(part, dict)]
        if stalls := [part["stall"] for part in parts if "stall" in part]:
            rows.append(("longest delay of the event loop", max(stalls), "<=", 100, " ms"))
    cells = []
    for target, measured, sign, goal, unit in rows:
        is_met = measured <= goal if sign == "<=" else measured >= goal
        texts = [f"{sign} {goal:.3g}{unit}", f"{measured:.3g}{unit}", "yes" if is_met else "no"]
        cells.append([target, *texts])
    return cells


def step_targets(step: dict[str, Any]) -> list[tuple[str, float, str, float, str]]:
    """Return the rows of the targets of one step: target, measured, sign, goal, unit.

    A ratio is the quotient of two numbers that the page shows.
    """
    measured = round_seconds(step["stages_s"])
    limits = round_seconds(step["limits_s"])
    update_ratio = limits["update_actor"] / measured["update_actor"]
    sync = measured["update_weights"]
    sync_goal = 2 * limits["update_weights"] + round(step["reload_s"], 2)
    other_percent = 100 * measured["else"] / measured["step"]
    rows = [
        ("step: time / sum of its limits", measured["step"] / limits["step"], "<=", 1.25, ""),
        ("generation: limit / time", limits["gen"] / measured["gen"], ">=", 0.95, ""),
        ("update: limit / time", update_ratio, ">=", 0.85, ""),
        ("weight sync: time (limit: two copies and a reload)", sync, "<=", sync_goal, " s"),
        ("all other work: share of a step", other_percent, "<=", 3, " %"),
    ]
    if step["peak_gb"]:
        rows.append(("peak memory of all processes", step["peak_gb"]["all"], "<=", 9, " GB"))
    return rows


def table(head: str, rows: list[list[str]]) -> str:
    """Return a Markdown table. All columns except the first one are aligned to the right."""
    count = head.count("|") - 1
    lines = [head, "| --- |" + " ---: |" * (count - 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def round_seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Round to two decimal places, as on the page."""
    return {name: round(value, 2) for name, value in seconds.items()}


def wrap(text: str) -> str:
    """Wrap the paragraphs and list items of a Markdown text at WIDTH characters."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(("|", "#", "!", "<")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        blocks.append("\n".join(wrap_item(item) for item in items))
    return "\n\n".join(blocks)


def wrap_item(text: str) -> str:
    """Wrap a paragraph, or a list item with its lines indented."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def step_part(step: dict[str, Any]) -> str:
    """Return the section about the stages of a step."""
    measured = round_seconds(step["stages_s"])
    limits = round_seconds(step["limits_s"])
    rows = []
    for name, seconds in measured.items():
        limit = limits.get(name)
        cells = ["", ""] if limit is None else [f"{limit:.2f}", f"{limit / seconds:.2f}"]
        rows.append([name, f"{seconds:.2f}", *cells])
    memory = ", ".join(f"{name} {size:.2f}" for name, size in step["peak_gb"].items())
    return f"""## A step, stage by stage

`benchmarks/step.py` measures {step["steps"]} warm steps of about {step["tokens"]:.0f} tokens. The table has their
medians, without the checkpoint after the last step. The limit of a stage is the time of the same work outside of
Quintet:

- `gen`: raw vLLM on the same prompts, with responses of the same length (`benchmarks/raw_vllm.py`). On a CPU, Quintet
  replaces vLLM's sampler and raw vLLM uses its own. So this ratio does not compare the same sampler.
- `update_actor`: a forward and backward pass of the bare model and fused AdamW on the same episodes
  (`benchmarks/bare_model.py`). The limit computes a prompt once for all its responses, with Quintet's attention for
  CPUs. It takes {limits["shared"]:.2f} s. A plain packed batch takes {limits["packed"]:.2f} s.
- `update_weights`: a copy of all weights in memory (`benchmarks/bare_model.py`). In addition, vLLM takes
  {step["reload_s"]:.2f} s to load new weights from memory.

{table("| stage | Quintet, s | limit, s | limit / Quintet |", rows)}

Peak memory by kind of process, and of all processes together, in GB: {memory}."""


def peers_part(peers: dict[str, Any]) -> str:
    """Return the section about TRL."""
    names = ("step", "gen", "tokens", "ms_a_token")
    trl = f"TRL {peers['trl_versions']['trl']}"
    rows = []
    for label, part in (("Quintet", peers["kit"]), (trl, peers["trl"])):
        cells = [f"{part[name]:.4g}" for name in names]
        rows.append([label, *cells, f"{part['peak_gb']['all']:.1f}"])
    settings = peers["trl_settings"]
    return f"""## Compared with TRL

`benchmarks/peers.py` runs TRL's GRPOTrainer and Quintet alternately, with the same model, rows and sizes: 8 prompts with
8 responses of at most 48 tokens, on a CPU. TRL generates with transformers, not with vLLM. It uses
{settings["dtype"]} and micro-batches of {settings["micro_batch"]} responses, the fastest of the settings that were
tried. Quintet's time differs from the one above, because it comes from other runs of the same task. This comparison does not
apply to GPUs, larger models or TRL with vLLM.

{table("| | step, s | of which sampling, s | tokens | ms per token | peak memory, GB |", rows)}"""


def startup_part(startup: dict[str, Any]) -> str:
    """Return the section about the start of a run."""
    cold = startup["cold"]
    warm = startup["warm"]
    rows = []
    for line in warm["processes"]:
        count = f" x {line['count']}" if line["count"] > 1 else ""
        times = [line[key] for key in ("there_s", "cpu_s", "busy_from_s", "busy_to_s")]
        cells = ["" if value is None else f"{value:.1f}" for value in times]
        rows.append([line["process"] + count, *cells])
    return f"""## Time to the first response

`benchmarks/startup.py`: the first response arrives {warm["first_answer_s"]:.0f} s after the command. If the files are
dropped from the disk cache first, it takes {cold["first_answer_s"]:.0f} s. Each number is from one run. The table shows
the processes of the run with a warm cache, up to the first response:

{table("| process | starts at, s | CPU, s | busy from, s | busy to, s |", rows)}"""


STAGES = (  # the legend of the picture
    "sampling",
    "update (in the two bars with TRL: all except sampling)",
    "weight sync",
    "all other work",
)
LEAST_S = 1.5  # the shortest part of a bar that gets its value as text


def draw(results: Results) -> Figure:
    """Draw the stages of a step of Quintet, their limits, and a step of TRL."""
    # label, seconds of the step, and seconds of each of STAGES
    bars: list[tuple[str, float, list[float]]] = []
    if step := results.get("step"):
        parts = ("gen", "update_actor", "update_weights")
        measured = step["stages_s"]
        limits = step["limits_s"]
        bars.append(("Quintet", measured["step"], [measured[part] for part in (*parts, "else")]))
        bars.append(("limits", limits["step"], [*(limits[part] for part in parts), 0.0]))
    if peers := results.get("peers"):
        for label, name in (("Quintet, alternating with TRL", "kit"), ("TRL, without vLLM", "trl")):
            part = peers[name]
            stages = [part["gen"], part["step"] - part["gen"], 0.0, 0.0]
            bars.append((label, part["step"], stages))
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.6 * len(bars)), layout="constrained")
    for row, (_, total, stages) in enumerate(bars):
        draw_bar(axis, row, total, stages)
    axis.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axis.set_xlim(0, 1.12 * max(total for _, total, _ in bars))
    axis.invert_yaxis()
    axis.set_xlabel("seconds of one step (median)")
    axis.set_axisbelow(True)
    axis.grid(axis="x", alpha=0.3)
    about = next(iter(results.values()))
    axis.set_title(
        "One GRPO step on a CPU: SmolLM2-135M, 8 prompts x 8 responses\n"
        f"{about['cpu']}, {about['cores']} cores, {about['date']}",
        fontsize=10,
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(STAGES))]
    figure.legend(handles, STAGES, loc="outside lower center", ncols=len(STAGES), fontsize=8)
    return figure


def draw_bar(axis: Any, row: int, total: float, stages: list[float]) -> None:
    """Draw one bar: its stages, and its total. Stages of at least LEAST_S get their value."""
    paper = plt.rcParams["axes.facecolor"]  # white, or black in the dark style
    begin = 0.0
    for i, width in enumerate(stages):
        axis.barh(row, width, left=begin, color=f"C{i}")
        if width >= LEAST_S:
            middle = begin + width / 2
            axis.text(middle, row, f"{width:.2f}", ha="center", va="center", color=paper)
        begin += width
    axis.text(begin, row, f" {total:.2f} s", va="center", weight="bold")


def main() -> None:
    results = read_results()
    if not results:
        sys.exit("There are no results. Run `make bench`.")
    about = next(iter(results.values()))
    versions = ", ".join(
        f"{package} {version}" for package, version in about.get("versions", {}).items()
    )
    loads = ", ".join(
        f"{part['load_before']} before {name}"
        for name, part in results.items()
        if "load_before" in part
    )
    parts = [
        "# Performance",
        f"`make bench`, {about['date']}, on one machine without a GPU: {about['cpu']}, "
        f"{about['cores']} cores ({', '.join(about['flags'])}), {about['memory_gb']} GB. "
        f"Versions: {versions}. Load of the machine: {loads}.",
        "The task is `--config math_cpu --config cpu`: SmolLM2-135M-Instruct, 8 prompts with 8 "
        "responses per step. The model's weights come from a file in 4 bits (GGUF, Q4_1), "
        "converted to bfloat16. Only the section [On a GPU](#on-a-gpu) was measured on a GPU.",
        '<picture><source media="(prefers-color-scheme: dark)" srcset="performance_dark.png">\n'
        '<img alt="Seconds of one step, by stage: Quintet, its limits, TRL" src="performance.png">'
        "</picture>",
        table("| target | goal | measured | met |", targets(results)),
    ]
    parts += [
        write_part(results[name])
        for name, write_part in (
            ("step", step_part),
            ("peers", peers_part),
            ("startup", startup_part),
        )
        if name in results
    ]
    by_hand = PAGE.read_text().partition(MARK)[2] if PAGE.is_file() else "\n"
    PAGE.write_text(wrap("\n\n".join([*parts, MARK])) + by_hand)
    save_light_and_dark(partial(draw, results), PICTURE)
    print(
        f"Wrote {PAGE.relative_to(ROOT)} and its picture. The text below the mark is unchanged "
        f"({len(by_hand.split())} words)."
    )
    sys.exit(0 if len(results) == len(NAMES) else 1)


if __name__ == "__main__":
    main()
