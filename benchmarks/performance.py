"""docs/performance.md and its picture, out of what the other benchmarks printed:
runs/bench/NAME.json, a line each.

    make bench                           runs them, and this
    python benchmarks/performance.py     this alone

The page after MARK is written by hand, and kept. The exit status is 1 where a
benchmark is missing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "performance.png"
MARK = "<!-- From here on by hand: benchmarks/performance.py writes what is above, and keeps the rest. -->"
NAMES = ("step", "startup", "driver", "peers")
Found = dict[str, dict[str, Any]]


def read() -> Found:
    """The last line that each benchmark printed; nothing of one that has not ended well."""
    found = {}
    for name in NAMES:
        try:
            found[name] = json.loads((ROOT / "runs" / "bench" / f"{name}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            print(f"{name}: not measured", file=sys.stderr)
    return found


def targets(found: Found) -> list[list[str]]:
    """[what, wanted, measured, whether that is met] of each target, as text."""
    rows: list[tuple[str, float, str, float, str]] = []  # what, measured, sign, wanted, unit
    if peers := found.get("peers"):
        rows.append(("a step, as a share of TRL's", peers["kit_over_trl_step"], "<=", 0.5, ""))
    if step := found.get("step"):
        taken, best, ratio = step["stages_s"], step["limits_s"], step["best_over_taken"]
        sync = 2 * best["update_weights"] + step["reload_s"]
        rows.append(("a step, over the sum of its limits", 1 / ratio["step"], "<=", 1.25, ""))
        rows.append(("generation: raw vLLM's time over the kit's", ratio["gen"], ">=", 0.95, ""))
        packed = best["packed"] / taken["update_actor"]
        rows.append(("update: the bare packed model's time over the kit's", packed, ">=", 0.85, ""))
        rows.append(
            (
                "sync: two copies of the weights and vLLM's reload",
                taken["update_weights"],
                "<=",
                sync,
                " s",
            )
        )
        rows.append(("all else, of the step", 100 * taken["else"] / taken["step"], "<=", 3, " %"))
        rows += (
            [("memory of all processes", step["peak_gb"]["all"], "<=", 9, " GB")]
            if step["peak_gb"]
            else []
        )
    if startup := found.get("startup"):
        rows.append(
            (
                "from the command to the first answer",
                startup["warm"]["first_answer_s"],
                "<=",
                45,
                " s",
            )
        )
    if driver := found.get("driver"):
        rows.append(("the driver, for an episode", driver["ms_per_episode"], "<=", 1, " ms"))
        stalls = [
            each["stall"] for each in driver.values() if isinstance(each, dict) and "stall" in each
        ]
        rows.append(("its event loop is late by at most", max(stalls), "<=", 100, " ms"))
    told = []
    for what, measured, sign, wanted, unit in rows:
        met = measured <= wanted if sign == "<=" else measured >= wanted
        told.append(
            [what, f"{sign} {wanted:.3g}{unit}", f"{measured:.3g}{unit}", "yes" if met else "no"]
        )
    return told


def table(head: str, rows: list[list[str]]) -> str:
    """Markdown; all columns but the first to the right."""
    count = head.count("|") - 1
    lines = [head, "| --- |" + " ---: |" * (count - 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def step_part(step: dict[str, Any]) -> str:
    taken, best, ratio = step["stages_s"], step["limits_s"], step["best_over_taken"]
    beside = {name: [f"{best[name]:.2f}", f"{ratio[name]:.2f}"] for name in ratio}
    rows = [
        [name, f"{seconds:.2f}", *beside.get(name, ["", ""])] for name, seconds in taken.items()
    ]
    memory = ", ".join(f"{name} {size:.2f}" for name, size in step["peak_gb"].items())
    return f"""## A step, stage by stage

Medians of {step["steps"]} warm steps of about {step["tokens"]:.0f} tokens (`benchmarks/step.py`), each stage with
the time of the same work alone: raw vLLM on the same prompts with answers as long
(`benchmarks/raw_vllm.py`), the bare model's forward and backward pass and fused AdamW on the same episodes, and a copy
of all weights in memory (`benchmarks/bare_model.py`). The checkpoint after the last step is left out.

An update at best takes {best["shared"]:.2f} s with prompts computed once for their answers, {best["packed"]:.2f} s as
a plain packed batch. vLLM takes new weights from memory in {step["reload_s"]:.2f} s.

{table("| stage | kit, s | at best, s | best / kit |", rows)}

Peak memory, GB, of each kind of process and of all together: {memory}."""


def peers_part(peers: dict[str, Any]) -> str:
    names = ("step", "gen", "tokens", "ms_a_token")
    rows = [
        [label, *(f"{part[name]:.4g}" for name in names), f"{part['peak_gb']['all']:.1f}"]
        for label, part in (
            ("kit", peers["kit"]),
            (f"TRL {peers['trl_versions']['trl']}", peers["trl"]),
        )
    ]
    settings = peers["trl_settings"]
    return f"""## Compared with TRL

`benchmarks/peers.py`: TRL's GRPOTrainer on the same model, rows and sizes, by turns with the kit. It samples by
transformers' own generation, in {settings["dtype"]} with micro-batches of {settings["micro_batch"]} answers, the
fastest of those tried.

{table("| | step, s | of that sampling | tokens | ms a token | memory, GB |", rows)}"""


def startup_part(startup: dict[str, Any]) -> str:
    cold, warm = startup["cold"], startup["warm"]
    rows = [
        [line["process"] + (f" x {line['count']}" if line["count"] > 1 else "")]
        + [
            "" if line[key] is None else f"{line[key]:.1f}"
            for key in ("there_s", "cpu_s", "busy_from_s", "busy_to_s")
        ]
        for line in warm["processes"]
    ]
    return f"""## To the first answer

`benchmarks/startup.py`: the first answer is there {warm["first_answer_s"]:.0f} s after the command,
{cold["first_answer_s"]:.0f} s with the files dropped from the disk cache before. By then each process, with a warm
cache:

{table("| process | there after, s | CPU, s | busy from, s | to, s |", rows)}"""


def draw(found: Found) -> None:
    """The stages of a step: the kit, its limits, TRL."""
    matplotlib.use("Agg")
    bars: list[tuple[str, list[float]]] = []  # sampling, update, sync, all else
    if step := found.get("step"):
        parts = ("gen", "update_actor", "update_weights")
        bars.append(("kit", [step["stages_s"][part] for part in (*parts, "else")]))
        bars.append(("at best", [step["limits_s"][part] for part in parts] + [0.0]))
    if "trl" in (peers := found.get("peers", {})):
        bars.append(
            ("TRL", [peers["trl"]["gen"], peers["trl"]["step"] - peers["trl"]["gen"], 0.0, 0.0])
        )
    figure, axis = plt.subplots(figsize=(8, 0.9 + 0.6 * len(bars)), layout="constrained")
    begins = [0.0] * len(bars)
    for i, label in enumerate(("sampling", "update", "sync", "all else")):
        widths = [seconds[i] for _, seconds in bars]
        axis.barh([name for name, _ in bars], widths, left=begins, label=label)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a step (median)")
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    found = read()
    if not found:
        sys.exit("nothing was measured; make bench")
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
        f"`make bench`, {about['date']}: {about['cpu']}, {about['cores']} cores "
        f"({', '.join(about['flags'])}), "
        f"{about['memory_gb']} GB; {versions}. Load: {loads}.",
        f"![the stages of a step: the kit, what they take at "
        f"best{', TRL' * ('peers' in found)}](performance.png)",
        table("| target | wanted | measured | met |", targets(found)),
    ]
    parts += [
        part(found[name])
        for name, part in (("step", step_part), ("peers", peers_part))
        if name in found
    ]
    parts += [startup_part(found["startup"])] if "startup" in found else []
    by_hand = PAGE.read_text().partition(MARK)[2] if PAGE.is_file() else "\n"
    PAGE.write_text("\n\n".join([*parts, MARK]) + by_hand)
    draw(found)
    print(f"{PAGE.relative_to(ROOT)} and its picture; by hand: {len(by_hand.split())} words")
    sys.exit(0 if len(found) == len(NAMES) else 1)


if __name__ == "__main__":
    main()
