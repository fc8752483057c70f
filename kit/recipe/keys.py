"""The keys of a recipe: which ones exist, which ones this trainer uses, and what to set instead.

Protects: a key that nothing reads ends the run before a worker starts.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from env import Json

ROOT = Path(__file__).resolve().parents[2]  # the folder of the repository
MIN_SIMILARITY = 0.8  # of the last parts of two keys: a wrong suggestion is worse than none
SAMPLING_COMMANDS = ("rollout", "evaluate")  # they train nothing
EPISODE_COMMANDS = ("train", *SAMPLING_COMMANDS)
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CRITIC = "critic.model.path"
REWARD_MODEL = "reward.reward_model.model_path"
TEACHER = "distillation.teacher_models.teacher_model.model_path"
TRAIN = "env.train_files"
VAL = "env.val_files"
FSDP = "dp"  # verl's name of the engine that this kit runs by default
MODEL_ENGINES = (FSDP, "megatron")  # verl composes a different configuration for each


class KeyTable(NamedTuple):
    """The contents of verl_keys.yaml, which explains each field."""

    used: list[str]
    dataclass_fields: list[str]
    kit: list[str]
    free_form: list[str]
    texts: list[str]
    unused: dict[str, str | None]
    renamed: dict[str, str]
    peers: dict[str, list[str]]


KEYS = KeyTable(**yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text()))
ADVICE_OF_PEERS: dict[str, str] = {}  # {name: a key of this kit, or a sentence}
for advice, names in KEYS.peers.items():
    ADVICE_OF_PEERS |= dict.fromkeys(names, advice)
USED_KEYS = [*KEYS.used, *KEYS.dataclass_fields, *KEYS.kit, "gym", "env"]


def is_below(key: str, *parents: str) -> bool:
    """Return whether a dotted key is one of `parents`, or below one."""
    return f"{key}.".startswith(tuple(f"{parent}." for parent in parents))


def is_kit_key(key: str) -> bool:
    """Return whether a dotted key is the kit's rather than verl's."""
    return is_below(key, "gym", "env", *KEYS.kit)


@functools.cache
def is_used(key: str) -> bool:
    """Return whether this trainer or one of verl's workers reads a key.

    If several entries of verl_keys.yaml cover the key, the longest one decides.
    """
    covering = [name for name in (*USED_KEYS, *KEYS.unused) if is_below(key, name)]
    return max(covering, key=len, default="") in USED_KEYS


def describe_unused(key: str) -> str:
    """Return a sentence that says what to do about a key that nothing reads."""
    covering = [name for name in KEYS.unused if is_below(key, name)]
    hint = KEYS.unused[max(covering, key=len)] if covering else None
    if not hint:
        return "Remove it."
    is_sentence = hint.endswith(".")
    return hint if is_sentence else f"Set {hint} instead."


def find_unknown_keys(overlay: Json, defaults: Json, prefix: str = "") -> Iterator[str]:
    """Yield the keys of `overlay` that `defaults` lacks.

    An empty mapping in the defaults takes any key.
    """
    for name, value in overlay.items():
        key = f"{prefix}{name}"
        default = defaults.get(name)
        if name not in defaults:
            if key not in KEYS.dataclass_fields and not is_below(key, *KEYS.free_form):
                yield key
        elif default and isinstance(default, dict) and isinstance(value, dict):
            yield from find_unknown_keys(value, default, f"{key}.")


def describe_unknown(key: str, overlay: Json, keys: Sequence[str]) -> str:
    """Return a sentence about a key that does not exist: its new name, or the key to set.

    keys: of the defaults.
    """
    if new_name := KEYS.renamed.get(key):
        return f"It is now {new_name}."
    if key in keys:
        return "In a file keys are nested: write each part of it below the part before."
    usable = [leaf for leaf in keys if is_used(leaf) and "._" not in leaf]
    usable += KEYS.dataclass_fields
    for leaf in flatten(overlay):
        name = leaf.rpartition(".")[2]
        found = is_below(leaf, key) and (ADVICE_OF_PEERS.get(name) or find_similar(leaf, usable))
        if found:
            return found if found.endswith(".") else f"Did you mean {found}?"
    return "See configs/base.yaml, and verl's trainer/config for verl's keys."


def find_similar(key: str, leaves: Sequence[str]) -> str:
    """Return the leaf whose last part is most similar to that of a key, else ""."""
    names = {leaf.rpartition(".")[2] for leaf in leaves}
    for found in difflib.get_close_matches(key.rpartition(".")[2], names, 1, MIN_SIMILARITY):
        named = [leaf for leaf in leaves if f".{leaf}".endswith(f".{found}")]
        return difflib.get_close_matches(key, named, 1, 0)[0]
    return ""


def make_command(target: str) -> str:
    """Return the command that makes a target of the Makefile from the current folder."""
    return f"make {target}" if Path.cwd() == ROOT else f"make -C {ROOT} {target}"


# --- nested values -------------------------------------------------------------------------------


def flatten(values: Json, prefix: str = "") -> Json:
    """Return {dotted key: value} of the leaves of nested mappings."""
    leaves: Json = {}
    for name, value in values.items():
        if value and isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def select_nested(values: object, key: str) -> object:
    """Return the value of a dotted key in nested mappings, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def set_nested(values: Json, key: str, value: object) -> None:
    """Set the value of a dotted key in nested mappings, and make the mappings on the way."""
    *parents, last = key.split(".")
    for name in parents:
        below = values.get(name)
        values[name] = dict(below) if isinstance(below, dict) else {}
        values = values[name]
    values[last] = value


def merge_nested(base: Json, overlay: Json) -> Json:
    """Return nested mappings with the values of both; those of `overlay` decide."""
    merged = dict(base)
    for name, value in overlay.items():
        below = merged.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            value = merge_nested(below, value)
        merged[name] = value
    return merged


def diff(values: Json, defaults: Json) -> dict[str, tuple[object, object]]:
    """Return {dotted key: (value, default)} of the leaves in which two recipes differ."""
    leaves = flatten(values)
    usual = flatten(defaults)
    is_changed = {key: key not in usual or value != usual[key] for key, value in leaves.items()}
    return {key: (leaves[key], usual.get(key)) for key in leaves if is_changed[key]}


def escape(value: object) -> object:
    """Return a value whose ${...} are not resolved: a file of a model may come from others.

    n backslashes before it become 2n + 1, of which OmegaConf makes n again.
    """
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
