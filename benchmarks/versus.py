"""Compare a step of Quintet with vLLM and a bare update, verl's main_ppo and TRL on one GPU.

    .venv-gpu/bin/python benchmarks/versus.py [--only kit raw] [--model FOLDER] [--dry]

The work: GRPO with a KL term on 128 prompts with 8 responses of exactly 256 tokens, two optimizer
steps of fused AdamW, micro-batches of 24,576 tokens, no evaluation. On a smaller card, lower
--prompts and --tokens. The reward is a hash of the response, so the model does not become better.

    kit    `algorithm.py --config math --config one_gpu`
    raw    vLLM alone on the prompts of kit's second step, and the update of the bare model on its
           episodes (versus_raw.py). Run kit first
    verl   `python -m verl.trainer.main_ppo`
    trl    GRPOTrainer with vLLM in its process and sleep mode (versus_trl.py). It has its own
           folder, because verl 0.9.1 does not start where TRL 1.x can be imported: .venv-uv/bin/uv
           pip install --python .venv-gpu/bin/python --target .versus-trl --no-deps trl==1.16.0

Without flash-attn, kit, raw and verl use torch's attention for packed sequences
(extras/without_flash_attn.py), and TRL, which pads, uses sdpa. The table has medians without the
first step. Results stay in runs/versus, and a later command with the same work adds to them. --dry
prints the commands and resolves their settings without a GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from measure import ROOT, machine, read_metrics, run, stages

FOLDER = ROOT / "runs" / "versus"
KIT_RUN = ROOT / "runs" / "versus_kit"
TRL_FOLDER = ROOT / ".versus-trl"
RESPONSES = 8  # to a prompt
PROMPT = 128  # tokens, at most
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)  # batch sizes of vLLM's CUDA graphs
VERIFIER = """import zlib


def score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return zlib.crc32(solution_str.encode()) % 1000 / 999
"""
# {column: names of the stages whose seconds it has}
COLUMNS = {
    "step": ("step",),
    "sampling": ("gen",),
    "log-probs": ("old_log_prob", "ref"),
    "update": ("update_actor",),
    "sync": ("update_weights",),
}
RAW_TASKS = {"vllm": "sampling", "update": "update"}  # {task of versus_raw.py: column}
START = "start"  # seconds from the command to the end of step 1, minus those of step 1
NAMES = {"kit": "Quintet", "raw": "vLLM alone, bare update", "verl": "verl, main_ppo", "trl": "TRL"}
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
Step = dict[str, float]


@dataclass(frozen=True)
class Work:
    """The sizes of a comparison, the same for each slice."""

    model: str  # folder, or a name of the hub
    steps: int
    prompts: int
    response: int  # tokens
    tokens: int  # of a micro-batch
    has_flash_attn: bool


class Slice(NamedTuple):
    """A command that runs the steps, and how its steps are read."""

    command: Callable[[Work], list[str]]
    dry: list[str]  # words that make the command resolve its settings only
    read: Callable[[str], list[Step]]  # from its output
    first_step: str  # pattern of the line that ends step 1


def list_shared(work: Work) -> dict[str, object]:
    """Return the keys that Quintet and verl have in common."""
    return {
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": work.response,
        f"{MODEL}.path": work.model,
        f"{ACTOR}.ppo_mini_batch_size": work.prompts // 2,
        f"{ACTOR}.ppo_max_token_len_per_gpu": work.tokens,
        f"{ACTOR}.use_kl_loss": "true",
        f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.optim.lr": 2e-6,
        f"{ROLLOUT}.n": RESPONSES,
        f"{ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{ROLLOUT}.max_num_seqs": max(GRAPHS),
        f"{ROLLOUT}.max_num_batched_tokens": 8192,
        f"{ROLLOUT}.cudagraph_capture_sizes": f"[{','.join(map(str, GRAPHS))}]",
        f"{ROLLOUT}.ignore_eos": "true",
        "trainer.total_training_steps": work.steps,
        "trainer.n_gpus_per_node": 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
    }


def make_kit_command(work: Work) -> list[str]:
    own = {
        "trainer.experiment_name": KIT_RUN.name,
        "trainer.print_samples_every": 0,
        "env.train_files": f"[{FOLDER / 'rows.parquet'}]",
        "env.val_files": "[]",
        "env.verifier": f"{FOLDER / 'verifier.py'}:score",
        "gym.servers.math_with_judge": "null",
    }
    recipes = ["--config", "math", "--config", "one_gpu"]
    changes = [f"{key}={value}" for key, value in (list_shared(work) | own).items()]
    return [sys.executable, "algorithm.py", *recipes, *changes]


def make_verl_command(work: Work) -> list[str]:
    rows = str(FOLDER / "rows.parquet")
    own: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": rows,
        "data.val_files": rows,
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.use_dynamic_bsz": "true",
        f"{ACTOR}.optim.override_optimizer_config": "{fused: true}",
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        "reward.custom_reward_function.path": str(FOLDER / "verifier.py"),
        "reward.custom_reward_function.name": "score",
        "trainer.val_before_train": "false",
        "trainer.logger": "[console]",
    }
    if not work.has_flash_attn:
        own[f"+{MODEL}.override_config.attn_implementation"] = "torch_varlen"
    changes = [f"{key}={value}" for key, value in (list_shared(work) | own).items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *changes]


def make_trl_command(work: Work) -> list[str]:
    settings = asdict(work) | {"rows": str(FOLDER / "rows.parquet"), "responses": RESPONSES}
    settings["prompt"] = PROMPT
    return [sys.executable, "benchmarks/versus_trl.py", json.dumps(settings)]


def make_raw_command(work: Work, task: str) -> list[str]:
    rollouts = str(KIT_RUN / "rollouts" / "step_2.jsonl")
    settings = asdict(work) | {"rollouts": rollouts, "graphs": GRAPHS}
    return [sys.executable, "benchmarks/versus_raw.py", task, json.dumps(settings)]


def list_variables(name: str, work: Work) -> dict[str, str]:
    """Return the environment variables of a slice."""
    path = f"{ROOT}:{TRL_FOLDER}" if name == "trl" else str(ROOT)
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if name == "verl" and not work.has_flash_attn:  # verl imports it in each process
        variables["VERL_USE_EXTERNAL_MODULES"] = "extras.without_flash_attn"
    return variables


# --- results -------------------------------------------------------------------------------------


def to_step(seconds: Mapping[str, float]) -> Step:
    """Return the seconds of a step by column. seconds: by stage."""
    return {
        column: sum(seconds.get(name, 0.0) for name in names) for column, names in COLUMNS.items()
    }


def read_kit(_output: str, path: Path = KIT_RUN / "metrics.jsonl") -> list[Step]:
    return [to_step(stages(row)) for row in read_metrics(path) if "timing_s/step" in row]


def read_verl(output: str) -> list[Step]:
    """Read the lines of verl's console logger: step:1 - timing_s/gen:3.2 - ..."""
    steps = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines():
        if "timing_s/step:" in line:
            pairs = re.findall(r"timing_s/(\w+):(?:np\.float\d+\()?([\d.e+-]+)", line)
            steps.append(to_step({name: float(value) for name, value in pairs}))
    return steps


def read_trl(output: str) -> list[Step]:
    """Read the lines of versus_trl.py: STEP {"gen": 3.2, ...}"""
    return [to_step(json.loads(text)) for text in re.findall(r"(?m)^STEP (.*)$", output)]


SLICES = {
    "kit": Slice(make_kit_command, ["--dry-run"], read_kit, r"^step 1/"),
    "verl": Slice(make_verl_command, ["--cfg", "job", "--resolve"], read_verl, "timing_s/step:"),
    "trl": Slice(make_trl_command, ["--dry"], read_trl, r"^STEP "),
}


def summarize(steps: Sequence[Step], first_step_s: float) -> Step:
    """Return the median of each column without step 1, and the seconds of the start.

    first_step_s: from the command to the end of step 1.
    """
    warm = steps[1:]
    medians = {column: round(median(step[column] for step in warm), 3) for column in COLUMNS}
    return medians | {START: round(first_step_s - steps[0]["step"], 1)}


def render_table(results: Mapping[str, Step]) -> str:
    """Return the results as a Markdown table, in seconds."""
    columns = [*COLUMNS, START]
    lines = [f"| seconds | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for name, title in NAMES.items():
        if name in results:
            values = [results[name].get(column) for column in columns]
            cells = ["" if value is None else f"{value:g}" for value in values]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def list_ratios(results: Mapping[str, Step]) -> list[str]:
    """Return Quintet's step over those of the peers, and the limits over Quintet's stages."""
    if "kit" not in results:
        return []
    kit = results["kit"]
    lines = []
    for name in [name for name in ("verl", "trl") if name in results]:
        ratios = [
            f"{column} {kit[column] / results[name][column]:.2f}" for column in ("step", START)
        ]
        lines.append(f"Quintet / {NAMES[name]}: {', '.join(ratios)}")
    for column, limit in results.get("raw", {}).items():
        lines.append(f"alone / Quintet: {column} {limit / kit[column]:.2f}")
    return lines


def write_files() -> None:
    """Write the rows in verl's format, which all slices read, and the verifier."""
    import pandas as pd

    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "verifier.py").write_text(VERIFIER)
    rows = []
    for number in range(1024):
        text = f"Continue: {', '.join(map(str, range(number, number + 4 + number % 20)))}"
        truth = {"style": "rule", "ground_truth": str(number)}
        row = {"data_source": "versus", "prompt": [{"role": "user", "content": text}]}
        rows.append(row | {"reward_model": truth, "extra_info": {"index": number}})
    pd.DataFrame(rows).to_parquet(FOLDER / "rows.parquet")


def run_slice(name: str, work: Work, limit_s: float) -> Step:
    """Run a slice and return its summary. Exits with the end of its log if it fails."""
    peer = SLICES[name]
    if name == "kit":
        shutil.rmtree(KIT_RUN, ignore_errors=True)
    log = FOLDER / f"{name}.log"
    begin = time.monotonic()
    first: list[float] = []

    def look(_processes: object) -> None:
        passed = time.monotonic() - begin
        if not first and re.search(peer.first_step, log.read_text(errors="replace"), re.MULTILINE):
            first.append(passed)
        if passed > limit_s:
            sys.exit(f"{name} did not end in {limit_s:g} s. Read {log}, or raise --limit.")

    run(peer.command(work), log, look, 0.5, variables=list_variables(name, work))
    steps = peer.read(log.read_text(errors="replace"))
    if len(steps) != work.steps or not first:
        sys.exit(f"{name} printed {len(steps)} of {work.steps} steps. Read {log}.")
    return summarize(steps, first[0])


def run_raw(work: Work) -> Step:
    """Return the seconds of vLLM alone and of the bare update."""
    result = {}
    for task, column in RAW_TASKS.items():
        log = FOLDER / f"raw_{task}.log"
        variables = list_variables("raw", work)
        run(make_raw_command(work, task), log, lambda _: None, 0.5, variables=variables)
        lines = re.findall(r"^RAW (.*)$", log.read_text(errors="replace"), re.MULTILINE)
        result[column] = float(json.loads(lines[-1])["seconds"])
    return result


def check_slice(name: str, work: Work) -> None:
    """Print the command of a slice, and let it resolve its settings. Exits if it cannot."""
    if name == "raw":
        print(*[shlex.join(make_raw_command(work, task)) for task in RAW_TASKS], sep="\n")
        return
    print(shlex.join(SLICES[name].command(work)), flush=True)
    command = [*SLICES[name].command(work), *SLICES[name].dry]
    env = os.environ | list_variables(name, work)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} does not resolve: {(done.stdout + done.stderr)[-3000:]}")
    print(f"{name}: resolved, {len(done.stdout.splitlines())} lines\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*NAMES], choices=NAMES, metavar="SLICE")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="folder or hub name")
    parser.add_argument("--steps", type=int, default=4, help="of each slice (default: 4)")
    parser.add_argument("--prompts", type=int, default=128, help="of a step (default: 128)")
    parser.add_argument("--response", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--tokens", type=int, default=24576, help="of a micro-batch")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a slice")
    parser.add_argument("--dry", action="store_true", help="resolve all settings without a GPU")
    args = parser.parse_args()
    if importlib.util.find_spec("trl"):
        parser.error(f"verl does not start where TRL 1.x is. Move TRL to {TRL_FOLDER}: see --help.")
    model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    has_flash_attn = importlib.util.find_spec("flash_attn") is not None
    work = Work(model, args.steps, args.prompts, args.response, args.tokens, has_flash_attn)
    write_files()
    if args.dry:
        for name in args.only:
            check_slice(name, work)
        return
    about = machine()
    path = FOLDER / "results.json"
    results: dict[str, Step] = {}
    if path.is_file():
        saved = json.loads(path.read_text())
        results = saved["results"] if saved["work"] == asdict(work) else {}
    for name in args.only:
        results[name] = run_raw(work) if name == "raw" else run_slice(name, work, args.limit)
        path.write_text(json.dumps({"work": asdict(work), "results": results}))
    print(f"\n{render_table(results)}\n", *list_ratios(results), sep="\n")
    print(json.dumps({"benchmark": "versus", **about, "work": asdict(work), "results": results}))


if __name__ == "__main__":
    main()
