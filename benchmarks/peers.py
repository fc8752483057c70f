"""Compare a step of the demo with a step of TRL's GRPOTrainer on the same task.

    python benchmarks/peers.py [--steps 4] [--rounds 2] [--only kit|trl]

A round is one run of Quintet and one run of TRL. Both use the same model, rows and temperature, the
same initial learning rate, and torch's fused AdamW. A step has 8 prompts with 8 responses of at
most 48 tokens, and one optimizer step. There is no reference model.

Differences: TRL generates with transformers, and Quintet with vLLM. TRL calls a Python function for
the reward, and Quintet calls a Gym server. TRL keeps its learning rate, and
Quintet's has a cosine schedule.

First, each setting of TRL's precision and micro-batch is tried once, for two steps. The fastest one
is used. The first step of each run is left out. The command prints medians. Its last line is JSON.
TRL has a separate environment, .venv-trl, with the versions of torch and transformers in .venv.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import itertools
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
MODEL = "models/SmolLM2-135M-Instruct"
ROWS = "data/arithmetic_train.jsonl"
Step = dict[str, float]


def make_environment() -> None:
    """Make .venv-trl if it does not exist.

    The CPU build of torch comes from the same place as in the Makefile: a folder of pip's
    find-links, or PyTorch's index.
    """
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
    packages = [
        f"trl=={TRL}",
        f"torch=={torch}",
        f"transformers=={importlib.metadata.version('transformers')}",
    ]
    print(f"== .venv-trl: {', '.join(packages)} (1 GB)", flush=True)
    create = ["venv", "--quiet", "--clear", "--python", sys.executable, str(ready.parent)]
    install = ["pip", "install", "--quiet", "--python", str(PYTHON), *source, *packages]
    for arguments in (create, install):
        subprocess.run([f"{bin}/uv", *arguments], check=True)
    ready.write_text(TRL)


def run_quintet(steps: int, memory: Memory) -> list[Step]:
    """Run the demo. Return the seconds of each step by stage, and its tokens."""
    folder, rows = demo("bench-peers", steps, memory, Memory.EVERY)
    shutil.rmtree(folder)
    return [
        stages(row) | {"tokens": row["perf/total_num_tokens"]}
        for row in rows
        if "timing_s/step" in row
    ]


def run_trl(steps: int, memory: Memory, dtype: str, micro_batch: int) -> dict[str, Any]:
    """Run trl_grpo.py. Return its JSON output: steps and versions."""
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


def find_best_settings(flags: list[str]) -> dict[str, Any]:
    """Return TRL's precision and micro-batch with the fastest second step.

    bfloat16 is tried only if the CPU has instructions for it.
    """
    dtypes = ["float32", "bfloat16"] if {"avx512_bf16", "amx_bf16"} & set(flags) else ["float32"]
    seconds = {}
    for dtype, size in itertools.product(dtypes, (16, 64)):
        second_step = run_trl(2, Memory(), dtype, size)["steps"][1]
        seconds[dtype, size] = second_step["step"]
        print(
            f"TRL with {dtype} and micro-batches of {size} responses: "
            f"{second_step['step']:.1f} s per step",
            flush=True,
        )
    dtype, size = min(seconds, key=seconds.__getitem__)
    return {"dtype": dtype, "micro_batch": size}


def summarize(rounds: list[list[Step]], peaks: dict[str, float]) -> dict[str, Any]:
    """Return the medians over the steps of all rounds, and the peak memory."""
    steps = list(itertools.chain.from_iterable(rounds))
    medians = {part: round(median(step.get(part, 0.0) for step in steps), 3) for part in steps[-1]}
    ms_per_token = round(1000 * medians["step"] / medians["tokens"], 2)
    return {**medians, "ms_a_token": ms_per_token, "peak_gb": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: 2)")
    parser.add_argument("--only", choices=["kit", "trl"], help="run only Quintet or only TRL")
    args = parser.parse_args()
    about = machine()
    runs: dict[str, list[list[Step]]] = {"kit": [], "trl": []}  # the steps of each run
    memory = {"kit": Memory(), "trl": Memory()}
    settings: dict[str, Any] = {}
    if args.only != "kit":
        make_environment()
        settings = find_best_settings(about["flags"])
    for number in range(1, args.rounds + 1):
        if args.only != "trl":
            runs["kit"].append(run_quintet(args.steps, memory["kit"])[1:])
        if args.only != "kit":
            output = run_trl(args.steps, memory["trl"], **settings)
            runs["trl"].append(output["steps"][1:])
            about["trl_versions"] = output["versions"]
        for name, rounds in runs.items():
            if rounds:
                seconds = ", ".join(f"{step['step']:.1f}" for step in rounds[-1])
                print(f"round {number}, {name}: {seconds} s", flush=True)
    result: dict[str, Any] = {}
    for name, rounds in runs.items():
        if any(rounds):
            summary = summarize(rounds, memory[name].peaks)
            result[name] = summary
            print(
                f"{name}: {summary['step']:.1f} s per step, {summary['gen']:.1f} s of it sampling; "
                f"{summary['tokens']:.0f} tokens, {summary['ms_a_token']} ms per token; peak "
                f"memory {summary['peak_gb']['all']:.1f} GB"
            )
    if len(result) == 2:
        for part in ("step", "ms_a_token"):
            result[f"kit_over_trl_{part}"] = round(result["kit"][part] / result["trl"][part], 3)
        print(
            f"Quintet / TRL: {result['kit_over_trl_step']} for a step, "
            f"{result['kit_over_trl_ms_a_token']} for a token"
        )
    print(json.dumps({"benchmark": "peers", **about, "trl_settings": settings, **result}))


if __name__ == "__main__":
    main()
