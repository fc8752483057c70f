"""The keys of a recipe: which ones exist, which ones this trainer uses, and what to set instead."""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf


class KeyTable(NamedTuple):
    """The contents of verl_keys.yaml, which explains each field."""

    used: list[str]
    dataclass_fields: list[str]
    kit: list[str]
    free_form: list[str]
    unused: dict[str, str | None]
    renamed: dict[str, str]


KEYS = KeyTable(**yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text()))
USED_KEYS = [*KEYS.used, *KEYS.dataclass_fields, *KEYS.kit, "gym", "env"]


def is_below(key: str, *parents: str) -> bool:
    """Whether a dotted key is one of `parents`, or below one."""
    return f"{key}.".startswith(tuple(f"{parent}." for parent in parents))


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


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of a configuration's leaves, with interpolations as they were written."""
    node: Any = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    leaves: dict[str, Any] = {}
    for name, value in node.items():
        if value and isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def diff(
    config: DictConfig, defaults: Mapping[str, Any] | DictConfig
) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (value, default)} of the leaves in which two configurations differ."""
    values = flatten(config)
    usual = flatten(defaults)
    is_changed = {key: key not in usual or value != usual[key] for key, value in values.items()}
    return {key: (values[key], usual.get(key)) for key in values if is_changed[key]}


def find_changes(config: DictConfig, defaults: DictConfig) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (value, default)} of verl's keys with another value than verl would give them.

    verl's default of a key may refer to another key, such as
    `${oc.select:actor_rollout_ref.rollout.n,1}`. Then the value of that key in `config` counts.
    config: a resolved recipe. Keys that only the kit has are left out.
    """
    usual = flatten(defaults)
    recipe = copy.deepcopy(config)
    changes = {}
    for key, (value, default) in diff(config, defaults).items():
        if is_kit_key(key):
            continue
        # a reference to a section gives the values of all keys below it
        source = key
        while source not in usual and "." in source:
            source = source.rpartition(".")[0]
        reference = usual.get(source)
        if isinstance(reference, str) and "${" in reference:
            default = resolve_reference(recipe, source, reference)
            default = flatten({source: default}).get(key)
            if value == default:
                continue
        changes[key] = (value, default)
    return changes


def resolve_reference(recipe: DictConfig, key: str, reference: str) -> Any:
    """The value that `reference`, an interpolation, has at a key. `recipe` stays as it is."""
    value = OmegaConf.select(recipe, key)
    OmegaConf.update(recipe, key, reference, merge=False)
    resolved = to_plain(OmegaConf.select(recipe, key))
    OmegaConf.update(recipe, key, value, merge=False)
    return resolved


def find_unknown_keys(
    overlay: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Dotted keys of `overlay` that `defaults` lacks.

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


def unknown_key_hint(
    key: str, overlay: Any, engine: str, engine_keys: Mapping[str, Sequence[str]]
) -> str:
    """A sentence about a key that does not exist: its new name, its engine, or a similar key.

    engine: the recipe's model_engine. engine_keys: {model_engine: the keys of its defaults}.
    """
    if new_name := KEYS.renamed.get(key):
        return f"It is now {new_name}."
    for other, keys in engine_keys.items():
        if other != engine and any(is_below(leaf, key) for leaf in keys):
            return f"It belongs to model_engine={other}, and this recipe has {engine}. Remove it."
    usable = [leaf for leaf in engine_keys[engine] if is_used(leaf)]
    # a key that was written without its first part, such as `rollout.n`
    completed = [f"actor_rollout_ref.{leaf}" for leaf in flatten(overlay) if is_below(leaf, key)]
    similar = [leaf for leaf in completed if leaf in usable]
    similar = similar or difflib.get_close_matches(key, usable, n=1)
    if similar:
        return f"Did you mean {similar[0]}?"
    return "See configs/base.yaml, and verl's trainer/config for verl's keys."


def reset_invalid_keys(config: DictConfig, base: DictConfig, unknown: Sequence[str]) -> list[str]:
    """Reset keys that nothing reads, and keys with a value of the wrong type -> a message for each.

    A reset key gets its value from `base`, so that later checks see valid values. `unknown` keys
    stay as they are.
    """
    expected = flatten(base)
    changes = {
        key: value
        for key, (value, _) in diff(config, expected).items()
        if not is_below(key, *unknown)
    }
    unused = {key: to_plain(OmegaConf.select(config, key)) for key in changes if not is_used(key)}
    for key in unused.keys() & expected.keys():
        OmegaConf.update(config, key, expected[key], merge=False)
    messages = []
    for key, value in changes.items():
        default = expected.get(key)
        if key in unused:
            resolved_default = to_plain(OmegaConf.select(config, key))
            if key not in expected or unused[key] != resolved_default:
                hint = unused_hint(key)
                messages.append(f"{key} is a verl option that this trainer does not use. {hint}")
        elif has_wrong_type(key, value, default):
            OmegaConf.update(config, key, default)
            messages.append(f"{key}={value} is not valid. Give a value like {default}.")
    return messages


def has_wrong_type(key: str, value: Any, default: Any) -> bool:
    """Whether a value is text or null where the default is a number."""
    if key == "trainer.total_training_steps" and value is None:
        return False  # then trainer.total_epochs decides
    if not isinstance(default, (int, float)) or key.endswith("rollout_is_threshold"):
        return False  # that threshold also takes a range, "0.8_1.5"
    if value is None:
        return is_below(key, "data", "trainer", "gym", "env")
    return isinstance(value, (str, list)) and not str(value).startswith("${")


def to_plain(config: Any) -> Any:
    """An OmegaConf node as plain dicts and lists, resolved; any other value as it is."""
    is_node = OmegaConf.is_config(config)
    return OmegaConf.to_container(config, resolve=True) if is_node else config
