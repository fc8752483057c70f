"""Compare a step of the demo with a step of TRL's GRPOTrainer on the same task.

    python benchmarks/peers.py [--steps 4] [--rounds 2]

A round is one run of Quintet and one run of TRL. Both use the same model, rows and temperature, the
same initial learning rate, and torch's fused AdamW. A step has 8 prompts with 8 responses of at
most 48 tokens, and one optimizer step. There is no reference model.

Differences: TRL generates with transformers, and Quintet with vLLM. TRL calls a Python function for
the reward, and Quintet calls a Gym server. TRL keeps its learning rate, and Quintet's has a cosine
schedule.

TRL's micro-batches have 16 responses, its fastest setting. Matrix products are in bfloat16 if the
CPU has instructions for it. The first step of each run is left out. The command prints medians. Its
last line is JSON. TRL has a separate environment, .venv-trl, with the versions of torch and
transformers in .venv.
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
MODEL = "models/SmolLM2-135M-Instruct"
ROWS = "data/arithmetic_train.jsonl"
MICRO_BATCH = "16"  # responses
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
    transformers = importlib.metadata.version("transformers")
    packages = [f"trl=={TRL}", f"torch=={torch}", f"transformers=={transformers}"]
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
    trained = [row for row in rows if "timing_s/step" in row]
    return [stages(row) | {"tokens": row["perf/total_num_tokens"]} for row in trained]


def run_trl(steps: int, memory: Memory, dtype: str) -> dict[str, Any]:
    """Run trl_grpo.py. Return its JSON output: steps and versions."""
    arguments = [MODEL, ROWS, str(steps), dtype, MICRO_BATCH]
    log = LOGS / "trl.log"
    run([str(PYTHON), "benchmarks/trl_grpo.py", *arguments], log, memory, Memory.EVERY)
    return last_json(log.read_text())


def summarize(name: str, steps: list[Step], memory: Memory) -> dict[str, Any]:
    """Print and return the medians over some steps, and the peak memory."""
    medians = {part: round(median(step.get(part, 0.0) for step in steps), 3) for part in steps[-1]}
    ms_per_token = round(1000 * medians["step"] / medians["tokens"], 2)
    print(
        f"{name}: {medians['step']:.1f} s per step, {medians['gen']:.1f} s of it sampling; "
        f"{medians['tokens']:.0f} tokens, {ms_per_token} ms per token; peak memory "
        f"{memory.peaks['all']:.1f} GB"
    )
    return {**medians, "ms_a_token": ms_per_token, "peak_gb": memory.peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default: 4)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: 2)")
    args = parser.parse_args()
    about = machine()
    make_environment()
    has_bfloat16 = not {"avx512_bf16", "amx_bf16"}.isdisjoint(about["flags"])
    dtype = "bfloat16" if has_bfloat16 else "float32"
    memory = {"kit": Memory(), "trl": Memory()}
    steps: dict[str, list[Step]] = {"kit": [], "trl": []}  # without the first step of a run
    for _ in range(args.rounds):
        steps["kit"] += run_quintet(args.steps, memory["kit"])[1:]
        output = run_trl(args.steps, memory["trl"], dtype)
        steps["trl"] += output["steps"][1:]
    result = {name: summarize(name, steps[name], memory[name]) for name in steps}
    for part in ("step", "ms_a_token"):
        print(f"Quintet / TRL, {part}: {result['kit'][part] / result['trl'][part]:.3f}")
    about |= {"trl_versions": output["versions"], "trl_dtype": dtype}
    print(json.dumps({"benchmark": "peers", **about, **result}))


if __name__ == "__main__":
    main()
