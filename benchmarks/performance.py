"""Write docs/performance.md and its picture from the results of the other benchmarks.

    make bench                           runs the benchmarks, then this
    python benchmarks/performance.py     this alone

Each result is the last line that a benchmark printed, in runs/bench/NAME.json. The text of the page
after MARK is written by hand, and kept. The exit status is 1 if a result is missing.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.png"
MARK = "<!-- benchmarks/performance.py writes the text above. Edit the text below by hand. -->"
NAMES = ("step", "startup", "driver", "peers")
WIDTH = 120  # of a line of the page
Found = dict[str, dict[str, Any]]


def read() -> Found:
    """Return the last line that each benchmark printed, without those that failed."""
    found = {}
    for name in NAMES:
        try:
            found[name] = json.loads((ROOT / "runs" / "bench" / f"{name}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            print(f"{name}: not measured", file=sys.stderr)
    return found


def targets(found: Found) -> list[list[str]]:
    """Return [target, goal, measured, met] of each target, as text."""
    rows: list[tuple[str, float, str, float, str]] = []  # target, measured, sign, goal, unit
    if peers := found.get("peers"):
        ratio = peers["kit"]["step"] / peers["trl"]["step"]
        rows.append(("step: Quintet's time / TRL's time without vLLM", ratio, "<=", 0.5, ""))
    if step := found.get("step"):
        rows += step_targets(step)
    if startup := found.get("startup"):
        first = startup["warm"]["first_answer_s"]
        rows.append(("time from the command to the first response", first, "<=", 45, " s"))
    if driver := found.get("driver"):
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
    """The targets of one step. A ratio is the quotient of two numbers that the page shows."""
    taken = round_seconds(step["stages_s"])
    best = round_seconds(step["limits_s"])
    sync = 2 * best["update_weights"] + round(step["reload_s"], 2)
    rest = 100 * taken["else"] / taken["step"]
    rows = [
        ("step: time / sum of its limits", taken["step"] / best["step"], "<=", 1.25, ""),
        ("generation: limit / time", best["gen"] / taken["gen"], ">=", 0.95, ""),
        ("update: limit / time", best["update_actor"] / taken["update_actor"], ">=", 0.85, ""),
        (
            "weight sync: time (limit: two copies and a reload)",
            taken["update_weights"],
            "<=",
            sync,
            " s",
        ),
        ("all other work: share of a step", rest, "<=", 3, " %"),
    ]
    if step["peak_gb"]:
        rows.append(("peak memory of all processes", step["peak_gb"]["all"], "<=", 9, " GB"))
    return rows


def table(head: str, rows: list[list[str]]) -> str:
    """Return a Markdown table. All columns except the first are aligned to the right."""
    count = head.count("|") - 1
    lines = [head, "| --- |" + " ---: |" * (count - 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def round_seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Round to the digits that the page shows."""
    return {name: round(value, 2) for name, value in seconds.items()}


def wrap(text: str) -> str:
    """Wrap the paragraphs and list items of a Markdown text at WIDTH characters."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(("|", "#", "!", "<")):
            blocks.append(block)
            continue
        items = re.split(r"\n(?=- )", block)
        indents = ["  " if item.startswith("- ") else "" for item in items]
        lines = [
            textwrap.fill(
                " ".join(item.split()),
                WIDTH,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for item, indent in zip(items, indents, strict=True)
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def step_part(step: dict[str, Any]) -> str:
    """Return the section about the stages of a step."""
    taken = round_seconds(step["stages_s"])
    best = round_seconds(step["limits_s"])
    rows = []
    for name, seconds in taken.items():
        limit = best.get(name)
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
  CPUs. It takes {best["shared"]:.2f} s. A plain packed batch takes {best["packed"]:.2f} s.
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

{table("| | step, s | of it sampling, s | tokens | ms per token | peak memory, GB |", rows)}"""


def startup_part(startup: dict[str, Any]) -> str:
    """Return the section about the start of a run."""
    cold, warm = startup["cold"], startup["warm"]
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


STAGES = (
    "sampling",
    "update (in the two bars with TRL: all except sampling)",
    "weight sync",
    "all else",
)
LEAST_S = 1.5  # the shortest part of a bar that gets its value as text


def draw(found: Found) -> None:
    """Draw the stages of a step: Quintet, the limits, TRL."""
    matplotlib.use("Agg")
    bars: list[tuple[str, float, list[float]]] = []  # label, seconds of a step, of each of STAGES
    if step := found.get("step"):
        parts = ("gen", "update_actor", "update_weights")
        taken, best = step["stages_s"], step["limits_s"]
        bars.append(("Quintet", taken["step"], [taken[part] for part in (*parts, "else")]))
        bars.append(("limits", best["step"], [*(best[part] for part in parts), 0.0]))
    if peers := found.get("peers"):
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
    about = next(iter(found.values()))
    axis.set_title(
        "One GRPO step on a CPU: SmolLM2-135M, 8 prompts x 8 responses\n"
        f"{about['cpu']}, {about['cores']} cores, {about['date']}",
        fontsize=10,
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(STAGES))]
    figure.legend(handles, STAGES, loc="outside lower center", ncols=len(STAGES), fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def draw_bar(axis: Any, row: int, total: float, stages: list[float]) -> None:
    """Draw one bar: its stages, the values of the longer ones, and its total."""
    begin = 0.0
    for i, width in enumerate(stages):
        axis.barh(row, width, left=begin, color=f"C{i}")
        if width >= LEAST_S:
            middle = begin + width / 2
            axis.text(middle, row, f"{width:.2f}", ha="center", va="center", color="white")
        begin += width
    axis.text(begin, row, f" {total:.2f} s", va="center", weight="bold")


def main() -> None:
    found = read()
    if not found:
        sys.exit("There are no results. Run `make bench`.")
    about = next(iter(found.values()))
    versions = ", ".join(
        f"{package} {version}" for package, version in about.get("versions", {}).items()
    )
    loads = ", ".join(
        f"{part['load_before']} before {name}"
        for name, part in found.items()
        if "load_before" in part
    )
    parts = [
        "# Performance",
        f"`make bench`, {about['date']}, on one machine without a GPU: {about['cpu']}, "
        f"{about['cores']} cores ({', '.join(about['flags'])}), {about['memory_gb']} GB. "
        f"Versions: {versions}. Load of the machine: {loads}.",
        "The task is `make demo`: SmolLM2-135M-Instruct, 8 prompts with 8 responses per step. The "
        "model's weights come from a file in 4 bits (GGUF, Q4_1), converted to bfloat16. Nothing on "
        "this page was measured on a GPU.",
        "![Seconds of one step, by stage: Quintet, its limits, TRL](performance.png)",
        table("| target | goal | measured | met |", targets(found)),
    ]
    parts += [
        part(found[name])
        for name, part in (("step", step_part), ("peers", peers_part))
        if name in found
    ]
    parts += [startup_part(found["startup"])] if "startup" in found else []
    by_hand = PAGE.read_text().partition(MARK)[2] if PAGE.is_file() else "\n"
    PAGE.write_text(wrap("\n\n".join([*parts, MARK])) + by_hand)
    draw(found)
    print(f"Wrote {PAGE.relative_to(ROOT)} and its picture. Kept {len(by_hand.split())} words")
    sys.exit(0 if len(found) == len(NAMES) else 1)


if __name__ == "__main__":
    main()
