"""Verify rows with Python functions or environment classes, without a Gym server.

    env:
      verifier: my_reward.py:compute_score  # for all rows of files without another verifier
      train_files:
        - data/sums.jsonl
        - {path: data/games.jsonl, verifier: my_game.py:Game}
        - {path: data/mcqa.jsonl, server: mcqa}  # a Gym server
        - {path: data/gsm8k.jsonl, verifier: {function: my_reward.py:compute_score, strict: true}}

With `env.verifier`, the kit starts only the Gym servers that a file names. Further keys of a
verifier, such as `strict`, are its settings. `verl` is verl's default_compute_score; with the
setting sandbox_fusion_url it runs programs in that sandbox.

A function gets these keyword arguments, as from verl. It returns a finite number, or a dict with a
finite number `score`. A bool, a Decimal, a 0-d array and a 0-d tensor are numbers, too. Other
numbers in the dict become metrics, and everything else is saved in the rollouts.
    data_source     of the row, otherwise the name of the function
    solution_str    the policy's last turn, decoded without special tokens, with its reasoning
    ground_truth    of the row, unchanged: reward_model.ground_truth, answer, ... or None
                    (ground_truths.py)
    extra_info      of the row, with verl's num_turns and rollout_reward_scores, and the whole row
                    as `row`

A class is instantiated for each episode. It has two methods:
    reset(row)      returns the first observation, or None
    step(text)      gets the text of the policy's turn, returns (observation, reward, done)

Functions and methods may be async. They run in separate processes. Each verifier has
env.verifier_pool.processes, and each process runs one call at a time, for timeout_s at most. An
environment is pickled after each call, so its next step may run in another process. If a process is
lost, only the episode of that call fails, and the next call starts a new process.

A failed call is a GymError, so its episode fails without a reward. The reasons:
    raised          an exception, also sys.exit
    memory          MemoryError: a process may use env.verifier_pool.memory_gb
    bad_answer      not a finite number: None, text, a list, NaN, a dict without `score`, ...
    timeout         no answer in time. The process is killed.
    died            the process ended: a crash of C code, os._exit, no memory on the machine
    too_large       a pickled environment of over 64 MiB

The file of a verifier imports the files next to it (kit/config/python_files.py). Each verifier is
called before a run starts (verifier_trial.py).

The functions below are hooks of kit/extras/__init__.py. They import modules in their bodies. Each
verifier process imports this package, too, and must stay small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def rewrite_recipe(config: Any) -> None:
    """If env.verifier is set, remove the Gym servers that no file names."""
    from kit.extras.python_verifiers import verifier_settings

    verifier_settings.remove_unused_servers(config)


def check_recipe(config: Any, command: str) -> Iterator[Exception]:
    """Check the verifiers of a recipe, without loading one."""
    from kit.extras.python_verifiers import verifier_settings

    if command != "sft":
        yield from verifier_settings.find_problems(config)


def verifier_names(config: Any) -> set[str]:
    """Return the names of the Python verifiers. Raises UserFunctionError, ConfigError."""
    from kit.extras.python_verifiers import verifier_settings

    return set(verifier_settings.read_specs(config))


def file_entries(config: Any, key: str) -> list[Any]:
    """Return the entries of env.train_files or env.val_files, with the verifier as their server.

    Raises UserFunctionError, ConfigError.
    """
    from kit.extras.python_verifiers import verifier_settings

    return [file.entry for file in verifier_settings.read_row_files(config, key)]


def unsandboxed_verifiers(config: Any, tasks: Sequence[Any]) -> list[str]:
    """Return the names of the verifiers that run code of the policy without a sandbox.

    Raises UserFunctionError, ConfigError.
    """
    from kit.extras.python_verifiers import verifier_settings

    if config.env.verifier_pool.sandbox:
        return []
    names = []
    for name, spec in verifier_settings.read_specs(config).items():
        sources = {str(task.row.get("data_source")) for task in tasks if task.server == name}
        if verifier_settings.runs_policy_code(spec, sources):
            names.append(name)
    return names


def check_inputs(config: Any, inputs: Any, command: str) -> None:
    """Call each verifier, and keep its rewards for the summary. Raises UserFunctionError."""
    from kit.extras.python_verifiers import verifier_settings, verifier_trial

    specs = verifier_settings.read_specs(config)
    inputs.trials = verifier_trial.try_verifiers(specs, inputs.tasks, config, inputs.tokenizer)


def summary_lines(config: Any, inputs: Any, command: str) -> list[str]:
    """Return the lines of the summary: the verifiers, and the rewards of the trial."""
    from kit.extras.python_verifiers import verifier_settings

    specs = verifier_settings.read_specs(config)
    return [
        f"verifier    {verifier_settings.describe(config, list(specs.values()))}",
        *[f"            {line}" for line in inputs.trials],
    ]


def make_pools(config: Any, logs: Path) -> dict[str, Any]:
    """Make a pool of processes for each verifier: {name: pool}. Starts no process."""
    from kit.extras.python_verifiers import verifier_pool

    return verifier_pool.make_pools(config, logs)
