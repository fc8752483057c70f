"""Make, save and read the fingerprint of a run (kit/data/fingerprint.py), and what decides what.

A run folder and a checkpoint have config.yaml, with the recipe, and config.fingerprint.json, with
the digests of what the recipe names and of the rows. `evaluate` has its own pair.

Protects: comparisons, resumes and replays, from rows, functions and weights that changed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from kit.data.fingerprint import (
    ROW_KEYS,
    TEMPLATE,
    Fingerprint,
    hash_contents,
    hash_json,
    hash_row,
)
from kit.errors import ConfigError
from kit.recipe.keys import MODEL, ROLLOUT, flatten, is_below
from kit.recipe.recipe import Recipe
from kit.recipe.recipe_text import read_saved
from kit.run import files

if TYPE_CHECKING:
    from kit.engine.inputs import RunInputs

# Keys whose values may name files, functions or models that decide what a run does.
NAMING_KEYS = (
    "env",
    "gym",
    "reward",
    "distillation",
    "critic.model",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss",
    *(f"{MODEL}.{name}" for name in ("path", "lora_adapter_path", "external_lib")),
)
ENTRY_VERIFIERS = tuple(f"{key}: verifier" for key in ROW_KEYS)
VERIFIER_KEYS = ("env.verifier", "gym.servers", "gym.judges", *ENTRY_VERIFIERS)
# What the policy answers, besides its weights and the sampling parameters.
ANSWER_KEYS = (
    TEMPLATE,
    f"{MODEL}.custom_chat_template",
    "data.apply_chat_template_kwargs",
    "data.max_response_length",
    f"{ROLLOUT}.dtype",
    f"{ROLLOUT}.quantization",
    f"{ROLLOUT}.engine_kwargs",
    f"{MODEL}.override_config",
    f"{ROLLOUT}.multi_turn.format",
    f"{ROLLOUT}.multi_turn.max_assistant_turns",
    f"{ROLLOUT}.multi_turn.max_tool_response_length",
    "env.agent",
    "agents.max_calls",
    "agents.max_tokens",
)
POLICY_KEYS = (f"{MODEL}.path", f"{MODEL}.lora_adapter_path", *ANSWER_KEYS)
# What decides a score of held-out rows, besides the weights and the rows.
SCORE_KEYS = (*ANSWER_KEYS, *VERIFIER_KEYS, f"{ROLLOUT}.val_kwargs")
MACHINE_KEYS = (".python", ".port", ".host", ".url", ".concurrency", ".timeout_s", ".deadline_s")


def decides_score(key: str) -> bool:
    """Return whether a key decides a score of held-out rows."""
    return is_below(key, *SCORE_KEYS) and not key.endswith((*MACHINE_KEYS, ".val_kwargs.n"))


def verifies(key: str) -> bool:
    """Return whether a key decides the reward of a response."""
    return is_below(key, *VERIFIER_KEYS) and not key.endswith(MACHINE_KEYS)


def make_fingerprint(recipe: Recipe, inputs: RunInputs) -> Fingerprint:
    """Make the fingerprint of a recipe and its rows. It reads the files that the recipe names."""
    values = flatten(recipe.redacted())
    contents = {}
    for key, value in flatten(recipe.resolved).items():
        if is_below(key, *NAMING_KEYS) and not key.endswith(MACHINE_KEYS):
            contents[key] = hash_contents(value, key)
    contents[TEMPLATE] = hash_json(str(inputs.tokenizer.chat_template))
    for spec in inputs.verifiers.specs.values():
        if spec.key in ENTRY_VERIFIERS:
            digest = hash_contents({"function": spec.reference, **spec.settings}, spec.key)
            contents[spec.key] = hash_json([contents.get(spec.key), digest])
    rows = {}
    for key, tasks in zip(ROW_KEYS, (inputs.train, inputs.validation), strict=True):
        if tasks:
            rows[key] = [task.digest or hash_row(task.row) for task in tasks]
    return Fingerprint(values, {key: one for key, one in contents.items() if one}, rows)


def write_fingerprint(path: Path, fingerprint: Fingerprint) -> None:
    """Write a fingerprint. Raises RunError."""
    with files.replace_atomically(path) as partial:
        partial.write_text(json.dumps(dataclasses.asdict(fingerprint)))


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint. Raises ConfigError."""
    try:
        return Fingerprint(**orjson.loads(path.read_bytes())) if path.is_file() else Fingerprint()
    except (orjson.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{path} is no fingerprint: {error}. Name another run.") from None


def read_run(folder: Path, name: str = "config") -> Fingerprint:
    """Read the recipe in a folder of a run or a checkpoint, and the digests next to it."""
    path = folder / f"{name}.yaml"
    values = flatten(read_saved(path)) if path.is_file() else {}
    saved = read_fingerprint(path.with_suffix(".fingerprint.json"))
    return dataclasses.replace(saved, values=values)
