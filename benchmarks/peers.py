"""The demo's step and that of TRL's GRPOTrainer, on the same work: kit, TRL, kit, TRL, ...

    python benchmarks/peers.py [--steps 4] [--rounds 2] [--only kit|trl]

Same model folder, rows, 8 prompts x 8 answers of at most 48 tokens, temperature, learning rate,
torch's fused AdamW, no reference model, one optimiser step a batch. TRL samples by transformers'
own generation, which is what it does on a CPU, and gets its reward from a function in place; the
kit asks a Gym server. TRL's precision and micro-batch are the fastest of those tried once, two
steps each. The first step of each run is left out. Prints medians, and one JSON line last. TRL gets
a separate environment, .venv-trl, with Quintet's torch and transformers.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from statistics import median
from typing import Any

from measure import LOGS, ROOT, Memory, demo, last_json, machine, run, stages

TRL = "1.16.0"
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
MODEL, ROWS = "models/SmolLM2-135M-Instruct", "data/arithmetic_train.jsonl"
Step = dict[str, float]


def make_environment() -> None:
    """Make .venv-trl, if it is not there. torch's CPU build has the Makefile's source."""
    ready = PYTHON.parent.parent / "ready"
    if ready.is_file() and ready.read_text() == TRL:
        return
    bin = os.path.dirname(sys.executable)
    torch = importlib.metadata.version("torch")
    config = subprocess.run([f"{bin}/pip", "config", "list"], capture_output=True, text=True).stdout
    folders = [
        f for f in re.findall(r"find-links='(.*?)'", config) if glob.glob(f"{f}/torch-{torch}-*")
    ]
    source = ["--find-links", folders[0]] if folders else ["--torch-backend", "cpu"]
    wanted = [
        f"trl=={TRL}",
        f"torch=={torch}",
        f"transformers=={importlib.metadata.version('transformers')}",
    ]
    print(f"== .venv-trl: {', '.join(wanted)} (1 GB)", flush=True)
    new = ["venv", "--quiet", "--clear", "--python", sys.executable, str(ready.parent)]
    install = ["pip", "install", "--quiet", "--python", str(PYTHON), *source, *wanted]
    for words in (new, install):
        subprocess.run([f"{bin}/uv", *words], check=True)
    ready.write_text(TRL)


def kit_steps(steps: int, memory: Memory) -> list[Step]:
    """Seconds of each step by stage, and its tokens."""
    folder, rows = demo("bench-peers", steps, memory, Memory.EVERY)
    shutil.rmtree(folder)
    return [
        stages(row) | {"tokens": row["perf/total_num_tokens"]}
        for row in rows
        if "timing_s/step" in row
    ]


def trl_steps(steps: int, memory: Memory, dtype: str, micro_batch: int) -> dict[str, Any]:
    """The output of trl_grpo.py: its steps and its versions."""
    command = [
        str(PYTHON),
        "benchmarks/trl_grpo.py",
        "--model",
        MODEL,
        "--rows",
        ROWS,
        "--steps",
        str(steps),
    ]
    command += ["--dtype", dtype, "--micro-batch", str(micro_batch)]
    log = LOGS / f"trl-{dtype}-{micro_batch}.log"
    run(command, log, memory, Memory.EVERY)
    return last_json(log.read_text())


def best_settings(flags: list[str]) -> dict[str, Any]:
    """TRL's precision and micro-batch with the fastest second step. bf16 is tried where the CPU
    multiplies it.
    """
    dtypes = ["float32", "bfloat16"] if {"avx512_bf16", "amx_bf16"} & set(flags) else ["float32"]
    taken = {}
    for settings in [(dtype, size) for dtype in dtypes for size in (16, 64)]:
        taken[settings] = trl_steps(2, Memory(), *settings)["steps"][1]["step"]
        print(
            f"TRL in {settings[0]}, {settings[1]} answers a micro-batch: {taken[settings]:.1f} s "
            f"a step",
            flush=True,
        )
    dtype, size = min(taken, key=lambda settings: taken[settings])
    return {"dtype": dtype, "micro_batch": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["kit", "trl"])
    args = parser.parse_args()
    about = machine()
    taken: dict[str, list[list[Step]]] = {"kit": [], "trl": []}  # rounds of steps
    memory = {"kit": Memory(), "trl": Memory()}
    settings: dict[str, Any] = {}
    if args.only != "kit":
        make_environment()
        settings = best_settings(about["flags"])
    for turn in range(args.rounds):
        if args.only != "trl":
            taken["kit"].append(kit_steps(args.steps, memory["kit"])[1:])
        if args.only != "kit":
            done = trl_steps(args.steps, memory["trl"], **settings)
            taken["trl"].append(done["steps"][1:])
            about["trl_versions"] = done["versions"]
        for name, rounds in taken.items():
            if rounds:
                print(
                    f"round {turn + 1}, {name}: "
                    + ", ".join(f"{s['step']:.1f}" for s in rounds[-1]),
                    flush=True,
                )
    result: dict[str, Any] = {}
    for name, rounds in taken.items():
        if warm := [step for steps in rounds for step in steps]:
            middle = {
                part: round(median(step.get(part, 0.0) for step in warm), 3) for part in warm[-1]
            }
            peaks = memory[name].peaks
            result[name] = {
                **middle,
                "ms_a_token": round(1000 * middle["step"] / middle["tokens"], 2),
                "peak_gb": peaks,
            }
            print(
                f"{name}: {middle['step']:.1f} s a step, {middle['gen']:.1f} of them sampling, ",
                end="",
            )
            print(
                f"{middle['tokens']:.0f} tokens, {result[name]['ms_a_token']} ms each, "
                f"{peaks['all']:.1f} GB"
            )
    if len(result) == 2:
        for part in ("step", "ms_a_token"):
            result[f"kit_over_trl_{part}"] = round(result["kit"][part] / result["trl"][part], 3)
        print(
            f"kit / TRL: {result['kit_over_trl_step']} of a step, "
            f"{result['kit_over_trl_ms_a_token']} of a token"
        )
    print(json.dumps({"benchmark": "peers", **about, "trl_settings": settings, **result}))


if __name__ == "__main__":
    main()
