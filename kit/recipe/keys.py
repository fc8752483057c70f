"""The keys of a recipe: which ones exist, which ones this trainer uses, and what to set instead."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from env import Json

ROOT = Path(__file__).resolve().parents[2]  # the folder of the repository
MIN_SIMILARITY = 0.8  # of the last parts of two keys: a wrong suggestion is worse than none
SAMPLING_COMMANDS = ("rollout", "evaluate")  # they train nothing
EPISODE_COMMANDS = ("train", *SAMPLING_COMMANDS)


class KeyTable(NamedTuple):
    """The contents of verl_keys.yaml, which explains each field."""

    used: list[str]
    dataclass_fields: list[str]
    kit: list[str]
    free_form: list[str]
    texts: list[str]
    mixed: list[str]
    lists: list[str]
    unused: dict[str, str | None]
    renamed: dict[str, str]
    peers: dict[str, list[str]]


KEYS = KeyTable(**yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text()))
ADVICE_OF_PEERS: dict[str, str] = {}  # {name: a key of this kit, or a sentence}
for advice, names in KEYS.peers.items():
    ADVICE_OF_PEERS |= dict.fromkeys(names, advice)
USED_KEYS = [*KEYS.used, *KEYS.dataclass_fields, *KEYS.kit, "gym", "env"]


def is_below(key: str, *parents: str) -> bool:
    """Whether a dotted key is one of `parents`, or below one."""
    return f"{key}.".startswith(tuple(f"{parent}." for parent in parents))


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of verl_keys.yaml: * stands for a part of a name, ** for any text."""
    parts = [re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("**")]
    return re.compile(".*".join(parts))


def matches(key: str, pattern: str) -> bool:
    """Whether a dotted key matches a pattern of verl_keys.yaml."""
    return compile_pattern(pattern).fullmatch(key) is not None


def matches_any(key: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted key matches one of the patterns."""
    return any(matches(key, pattern) for pattern in patterns)


def is_kit_key(key: str) -> bool:
    """Whether a dotted key is the kit's rather than verl's."""
    return is_below(key, "gym", "env", *KEYS.kit)


@functools.cache
def is_used(key: str) -> bool:
    """Whether this trainer or one of verl's workers reads a key.

    If several entries of verl_keys.yaml cover the key, the longest one decides.
    """
    covering = [name for name in (*USED_KEYS, *KEYS.unused) if is_below(key, name)]
    return max(covering, key=len, default="") in USED_KEYS


def unused_hint(key: str) -> str:
    """A sentence that says what to do about a key that nothing reads."""
    covering = [name for name in KEYS.unused if is_below(key, name)]
    hint = KEYS.unused[max(covering, key=len)] if covering else None
    if not hint:
        return "Remove it."
    is_sentence = hint.endswith(".")
    return hint if is_sentence else f"Set {hint} instead."


def flatten(config: object, prefix: str = "") -> Json:
    """{dotted key: value} of a configuration's leaves, with interpolations as they were written."""
    node: Any = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    leaves: Json = {}
    for name, value in node.items():
        if value and isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def diff(config: DictConfig, defaults: DictConfig | Json) -> dict[str, tuple[object, object]]:
    """{dotted key: (value, default)} of the leaves in which two configurations differ."""
    values = flatten(config)
    usual = flatten(defaults)
    is_changed = {key: key not in usual or value != usual[key] for key, value in values.items()}
    return {key: (values[key], usual.get(key)) for key in values if is_changed[key]}


def find_changes(config: DictConfig, defaults: DictConfig) -> dict[str, tuple[object, object]]:
    """{dotted key: (value, default)} of verl's keys with another value than verl would give them.

    verl's default of a key may refer to another key, such as
    `${oc.select:actor_rollout_ref.rollout.n,1}`. Then the value of that key in `config` counts.
    config: a resolved recipe. Keys that only the kit has are left out.
    """
    references = {}
    for key, default in flatten(defaults).items():
        if isinstance(default, str) and "${" in default:
            references[key] = default
    usual = copy.deepcopy(config)
    for key, reference in references.items():
        OmegaConf.update(usual, key, reference, merge=False)
    resolved = flatten(to_plain(usual))
    changes = {}
    for key, (value, default) in diff(config, defaults).items():
        if is_below(key, *references):
            default = resolved.get(key)
        if value != default and not is_kit_key(key):
            changes[key] = (value, default)
    return changes


def find_unknown_keys(overlay: Json, defaults: Json, prefix: str = "") -> Iterator[str]:
    """The keys of `overlay` that `defaults` lacks.

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


def unknown_key_hint(key: str, overlay: Json, keys: Sequence[str]) -> str:
    """A sentence about a key that does not exist: its new name, or the key to set.

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


def select_nested(values: object, key: str) -> object:
    """Return the value of a dotted key in nested mappings, or None."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def to_plain(config: object) -> Any:  # a recipe's values have any type
    """An OmegaConf node as plain dicts and lists, resolved; any other value as it is."""
    is_node = OmegaConf.is_config(config)
    return OmegaConf.to_container(config, resolve=True) if is_node else config
