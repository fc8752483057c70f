"""The tiny recipe of the tests: its rows, its arguments and its commands."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from env import Json
from kit.errors import UserFunctionError
from kit.recipe.keys import merge_nested, set_nested
from kit.recipe.load import Source, read_source
from kit.recipe.recipe import Recipe, build
from kit.recipe.user_functions import RecipeFunctions, reward_of_verifier
from kit.run import prepare

# Environment variables of commands that tests start, without the variables set above.
CLEAN_ENV = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}


ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kit", "extras", "lab", "templates")
# The product's code.
SOURCES = sorted(
    [*ROOT.glob("*.py"), *(p for name in FOLDERS for p in ROOT.glob(f"{name}/**/*.py"))]
)


RECIPE = ROOT / "tests" / "tiny.yaml"


CPU = ROOT / "configs" / "machines" / "cpu.yaml"


GYM_PYTHON = ROOT / ".venv-gym" / "bin" / "python"


# Settings of `algorithm` for training.compute_advantages. Each value affects the result.
ALGORITHM = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "gamma": 0.9, "lam": 0.5}


WORDS = ["say", "tell me", "i want", "give", "now", "please", "write", "print"]


def row(question: str = "say 7", answer: str = "7", **extra) -> dict:
    """A row of the trivial task."""
    params = {"input": [{"role": "user", "content": question}]}
    return {
        "responses_create_params": params,
        "question": question,
        "answer": answer,
        "metadata": {"source_dataset": "chain_sum"},
        **extra,
    }


def make_counter_row(question: str = "count", steps: int = 1) -> dict:
    """A row whose task is to call a real tool `steps` times.

    Gym's server example_session_state_mgmt gives a reward of 1 for that.
    """
    tool = {
        "type": "function",
        "name": "increment_counter",
        "description": "",
        "parameters": {"type": "object"},
        "strict": True,  # Gym answers 422 without it
    }
    params = {"input": question, "tools": [tool]}
    return {"responses_create_params": params, "initial_count": 3, "expected_count": 3 + steps}


def gym_examples() -> list[Path]:
    """List the files with example rows in the installed nemo-gym."""
    arguments = [str(GYM_PYTHON), "-c", "import nemo_gym; print(nemo_gym.__file__)"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip()).parent.parent / "resources_servers"
    paths = sorted(p for p in folder.glob("*/data/*example*.jsonl") if "rollouts" not in p.name)
    assert len(paths) > 50, f"{folder} has {len(paths)} files of examples"
    return paths


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write a JSONL file -> its path."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_task(folder: Path) -> None:
    """Write train.jsonl and val.jsonl for the tiny recipe, and tools.jsonl for a tool task."""
    write_rows(folder / "train.jsonl", [row(f"{word} 7") for word in WORDS])
    write_rows(folder / "val.jsonl", [row(f"{word} me 7") for word in WORDS])
    write_rows(folder / "tools.jsonl", [make_counter_row(f"{word} one") for word in WORDS])


def write_chats(folder: Path) -> list[str]:
    """Write a file of conversations, whose answer is 7 -> the keys of `sft` that name it."""
    rows = []
    for word in ("say", "give") * 4:
        question = {"role": "user", "content": f"{word} 7"}
        rows.append({"messages": [question, {"role": "assistant", "content": "7"}]})
    path = write_rows(folder / "chats.jsonl", rows)
    return [f"env.train_files=[{path}]", f"env.val_files=[{path}]", "data.train_batch_size=8"]


def tiny(workspace: Path, *changes: str) -> list[str]:
    """The key=value arguments of the tiny recipe, and further changes."""
    return [
        f"actor_rollout_ref.model.path={workspace / 'tied'}",
        f"env.train_files=[{workspace / 'train.jsonl'}]",
        f"env.val_files=[{workspace / 'val.jsonl'}]",
        f"gym.servers.reasoning_gym.start.python={GYM_PYTHON}",
        *changes,
    ]


def load(
    workspace: Path, *changes: str, overlays: Sequence[str] = (), command: str = "train"
) -> prepare.Prepared:
    """Load and check the tiny recipe with overlays of configs/ -> (recipe, inputs)."""
    files = [str(CPU), str(RECIPE), *overlays]
    return prepare.prepare(read_source(files, tiny(workspace, *changes)), command)


@functools.cache
def read_tiny() -> Source:
    """Read the tiny recipe, whose files need not exist."""
    return read_source([str(CPU), str(RECIPE)], [])


@functools.cache
def build_tiny() -> Recipe:
    """Build the tiny recipe, whose files are not read."""
    functions = RecipeFunctions(reward_of_verifier, [], None)
    return build(read_tiny(), functions=functions)


def make_partial(sections: Json | None = None, command="train", arguments=()) -> Recipe:
    """Make the tiny recipe with other values, of which nothing follows.

    sections: nested. arguments: of the advantage.
    """
    recipe = replace_values(build_tiny().model_copy(update={"command": command}), sections or {})
    recipe.__dict__["arguments"] = frozenset(arguments)
    return recipe


def changed(recipe: Recipe, *changes: str) -> Recipe:
    """Make a recipe with key=value changes, without checks. Nothing follows from them.

    An advantage that is no function of a file keeps the arguments of the recipe's.
    """
    sections: Json = {}
    for change in changes:
        key, _, text = change.partition("=")
        set_nested(sections, key, yaml.safe_load(text))
    result = replace_values(recipe, sections)
    try:
        _ = result.arguments
    except (UserFunctionError, ValueError):
        result.__dict__["arguments"] = recipe.arguments
    return result


def replace_values(recipe: Recipe, sections: Json) -> Recipe:
    """Make a recipe with other values. sections: nested."""
    nested = merge_nested(recipe.nested, sections)
    resolved = merge_nested(recipe.resolved, sections)
    others = {"source": recipe.source, "nested": nested, "resolved": resolved}
    others |= {"functions": recipe.functions, "facts": recipe.facts, "command": recipe.command}
    return Recipe.model_validate(resolved | others)


def command(workspace: Path, *arguments: str) -> list[str]:
    """Return the command line of a run of the tiny recipe."""
    return [
        sys.executable,
        str(ROOT / "algorithm.py"),
        "--config",
        str(CPU),
        "--config",
        str(RECIPE),
        *arguments,
    ]


def run(
    arguments: list[str], cwd: Path, timeout: int = 300, **variables: str
) -> subprocess.CompletedProcess:
    """Run a command to its end -> its exit status and output."""
    env = CLEAN_ENV | variables
    return subprocess.run(
        arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def metrics_of(folder) -> list[dict]:
    """Read the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
