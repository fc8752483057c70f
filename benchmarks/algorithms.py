"""Train recipes of configs/algorithms/ on one small task, with three seeds.

    make algorithms                                       all runs
    python benchmarks/algorithms.py --only dapo remax     some runs, into the same folder

The task is that of the tests: a random two-layer model with a tokenizer of 40 characters is asked
for the digit 7. A step has 8 prompts with 8 responses each. Gym's reasoning_gym server gives the
reward 1 for exactly this digit, and 1 / length for a response that contains it. A batch has two
optimizer steps, unless the recipe sets another number. The teacher of `distill` was trained to
respond with 7. The recipes of single turns have another task of the tests: call a real tool once
(Gym's example_session_state_mgmt), then respond.

A run ends when the mean reward of five steps reaches 0.9, or after --steps. A seed sets the random
model and the order of the prompts. All runs of a seed share one session of Ray, vLLM and Gym
servers, as the tests do. The command prints a table. Rewards of each step are in results.json. A
run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measure import ROOT, machine

from tests.helpers.models import make_model, make_pretrained
from tests.helpers.recipes import WORDS, load, write_task
from tests.helpers.stack import SESSION, Stack, kill_workers, session

LR = "actor_rollout_ref.actor.optim.lr"
CRITIC = ["critic.optim.lr=0.003", "critic.ppo_mini_batch_size=4"]
DIGIT_TASK = [f"{LR}=0.003"]
TOOL_TASK = [
    f"{LR}=0.005",
    "env.train_files=[{path: tools.jsonl, server: counter}]",
    "data.max_response_length=32",
    "env.val_files=[]",
]
TEACHER = "distillation.teacher_models.teacher_model.model_path=teacher"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
PLAIN_RECIPES = (  # recipes that need no further settings and no separate workers
    "grpo dr_grpo dapo rloo reinforce_plus_plus remax gspo opo gpg cispo gdpo online_dpo sppo spin "
    "curriculum rollout_correction"
)


class Setup(NamedTuple):
    """The settings of a run."""

    recipes: list[str]
    changes: list[str]
    has_workers: bool = False  # separate workers, for other models or another learning rate


SETUPS = {
    "default": Setup([], DIGIT_TASK),
    **{name: Setup([name], DIGIT_TASK) for name in PLAIN_RECIPES.split()},
    "bypass": Setup(["rollout_correction"], [*DIGIT_TASK, BYPASS]),
    "ppo": Setup(["ppo"], [*DIGIT_TASK, *CRITIC], True),
    "distill": Setup(["distill"], [*DIGIT_TASK, TEACHER], True),
    "turns: default": Setup([], TOOL_TASK, True),
    "turns: turn_grpo": Setup(["turn_grpo"], TOOL_TASK, True),
    "turns: turn_gae": Setup(["turn_gae"], [*TOOL_TASK, *CRITIC], True),
}
GOAL = 0.9  # mean reward at which a run ends
GOAL_STEPS = 5  # over so many steps
RECIPE_TEXT = """
actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}
trainer: {print_samples_every: 0, test_freq: -1, save_freq: -1, val_before_train: false}
"""
Results = dict[str, dict[str, dict[str, Any]]]  # {run: {seed: result}}, as in results.json


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


def prepare(folder: Path, seed: int) -> Path:
    """Write the models, the rows and the recipe of a seed, unless they exist."""
    if not (folder / "bench.yaml").exists():  # the last file
        folder.mkdir(parents=True, exist_ok=True)
        mark_responses(make_model(folder / "untied", tied=False, seed=seed))
        make_pretrained(folder / "teacher", folder / "untied", WORDS, "7")
        write_task(folder)
        (folder / "bench.yaml").write_text(RECIPE_TEXT)
    return folder


@contextlib.contextmanager
def start_separate_workers(stack: Stack, recipes: list[str], changes: list[str]) -> Iterator[Any]:
    """Start the workers that a recipe needs, in addition to the session's."""
    from kit.run.workers import start_workers

    recipe = load(stack.workspace, *SESSION, *changes, overlays=recipes).recipe
    workers = start_workers(recipe)
    try:
        workers.actor.init_model()
        yield workers
    finally:
        kill_workers(workers)


def has_reached_goal(rewards: list[float]) -> bool:
    """Return whether the mean reward of the last GOAL_STEPS steps is at least GOAL."""
    return len(rewards) >= GOAL_STEPS and statistics.mean(rewards[-GOAL_STEPS:]) >= GOAL


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
        while len(rewards) < max_steps and not has_reached_goal(rewards):
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


def run_seed(folder: Path, seed: int, names: list[str], steps: int, results: Results) -> None:
    """Make the runs of a seed in one session. Their results go to `results` and to results.json."""
    missing = [name for name in names if str(seed) not in results.get(name, {})]
    if not missing:
        return
    with (folder / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
        with session(folder, *DIGIT_TASK) as stack:
            for name in missing:
                result = run(stack, name, seed, steps)
                results.setdefault(name, {})[str(seed)] = result
                (folder.parent / "results.json").write_text(json.dumps(results))
                print(f"seed {seed} {name}: {count_steps(result)} steps", file=sys.stderr)


def count_steps(result: dict[str, Any]) -> str:
    """Return the number of steps until the goal, such as `18`, or `> 80` if it was not reached."""
    rewards = result["rewards"]
    return str(len(rewards)) if has_reached_goal(rewards) else f"> {len(rewards)}"


def print_table(results: Results) -> None:
    """Print a Markdown table with a line for each run."""
    print(
        f"| run | first 3 steps | steps until {GOAL}, by seed | episodes | held out, greedy | "
        "seconds a step |\n| --- |" + " ---: |" * 5
    )
    for name in filter(results.get, SETUPS):
        seeds = list(results[name].values())
        first_rewards = itertools.chain.from_iterable(result["rewards"][:3] for result in seeds)
        seconds = itertools.chain.from_iterable(result["seconds"] for result in seeds)
        cells = [
            name,
            f"{statistics.mean(first_rewards):.2f}",
            ", ".join(map(count_steps, seeds)),
            f"{statistics.median(result['episodes'] for result in seeds):.0f}",
            ", ".join(f"{result['held']:.2f}" for result in seeds if result["held"] is not None),
            f"{statistics.median(seconds):.1f}",
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "algorithms")
    parser.add_argument("--only", nargs="*", choices=SETUPS, default=[*SETUPS], metavar="RUN")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=80, help="maximum steps of a run")
    args = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    folder = args.folder.resolve()
    path = folder / "results.json"
    results: Results = json.loads(path.read_text()) if path.is_file() else {}
    # All models are made before the first session, because a session changes transformers.
    folders = [prepare(folder / f"seed_{seed}", seed) for seed in range(args.seeds)]
    for seed, seed_folder in enumerate(folders):
        run_seed(seed_folder, seed, args.only, args.steps, results)
    print_table(results)


if __name__ == "__main__":
    main()
