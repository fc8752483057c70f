"""Each key of verl has an effect, or is an error; each hint names a key that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kit.errors import ConfigError
from kit.recipe.keys import KEYS, find_changes, flatten, is_below, is_kit_key, is_used, matches_any
from kit.recipe.load import base_configs, load_config, resolve_defaults
from kit.recipe.numbers import find_rule

# Keys that are not checked.
UNCHECKED_KEYS = re.compile(
    r"_target_$"  # Hydra creates a dataclass from it
    r"|^model_engine$"  # Hydra's defaults list uses it; tests/extras/test_backends.py
    r"|engine_kwargs\.vllm\."  # passed to vLLM
    r"|\.override_config\."  # for the config of the model, which transformers reads
    rf"|^({'|'.join(map(re.escape, KEYS.free_form))})\."  # passed to ray.init
)


def is_unchecked(key: str) -> bool:
    return UNCHECKED_KEYS.search(key) is not None


def load_defaults() -> dict[str, Any]:
    """{dotted key: default} of verl's YAML files and of configs/base.yaml."""
    return flatten(load_config([], [])[0])


def load_errors(tmp_path: Path, keys: dict[str, Any]) -> list[str]:
    """The errors that load_config reports for a recipe with these keys."""
    recipe = OmegaConf.create()
    for key, value in keys.items():
        OmegaConf.update(recipe, key, value, force_add=True)
    OmegaConf.save(recipe, tmp_path / "recipe.yaml")
    try:
        load_config([str(tmp_path / "recipe.yaml")], [])
    except ConfigError as error:
        return [line.partition(". ")[2] for line in str(error).splitlines()[1:]] or [str(error)]
    return []


def change_value(key: str, value: Any) -> Any:
    """A different valid value of a key, or if it is no number, of its type."""
    value = resolve_defaults().get(key, value)  # resolved
    rule = find_rule(key, value if not isinstance(value, (list, dict)) else None)
    if rule:
        candidates = [[0.5], [2], 0.5, 2, 1]
        return next(new for new in candidates if rule.is_valid(new) and new != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, dict) and is_used(key):
        return {"other": {}}
    is_list = isinstance(value, list) or matches_any(key, KEYS.lists)
    return ["other"] if is_list else "other"


def test_used_keys_are_accepted_and_unused_keys_are_errors(tmp_path):
    used = {}
    unused = {}
    for key, value in load_defaults().items():
        if not is_unchecked(key) and not is_kit_key(key):  # tests/recipe/test_values.py
            keys = used if is_used(key) else unused
            keys[key] = change_value(key, value)
    errors = load_errors(tmp_path, unused)
    reported = {error.split()[0] for error in errors}
    assert reported == set(unused) and len(errors) == len(unused) > 400
    assert all("is a verl option that this trainer does not use" in error for error in errors)
    assert not load_errors(tmp_path, used) and len(used) > 200


def test_every_key_of_the_tables_exists():
    """The entries of KEYS.dataclass_fields have their own test."""
    keys = [*load_defaults(), *KEYS.dataclass_fields]
    keys += flatten(base_configs("megatron")[1])  # sections that FSDP does not have
    for name in [*KEYS.used, *KEYS.kit, *KEYS.unused, *KEYS.renamed.values()]:
        assert any(is_below(key, name) for key in keys), name


def test_find_changes_compares_with_the_value_that_verl_would_use():
    """If a default refers to another key or section, it has the value of that key in the recipe."""
    defaults = OmegaConf.create(
        {"n": 1, "copy": "${n}", "other": "${n}", "section": {"size": 1}, "new": {}}
        | {"same_section": "${section}", "changed_section": "${section}", "gym": {"attempts": 3}}
    )
    config = OmegaConf.create(
        {"n": 8, "copy": 8, "other": 2, "section": {"size": 4}, "new": {"key": "x"}}
        | {"same_section": {"size": 4}, "changed_section": {"size": 1}, "gym": {"attempts": 1}}
    )
    before = OmegaConf.to_container(config)
    assert find_changes(config, defaults) == {
        "n": (8, 1),
        "other": (2, 8),
        "section.size": (4, 1),
        "changed_section.size": (1, 4),
        "new.key": ("x", None),
    }
    assert OmegaConf.to_container(config) == before
