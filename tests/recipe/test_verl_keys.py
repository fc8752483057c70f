"""Each key of verl has an effect, or is an error; each hint names a key that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from kit.errors import ConfigError
from kit.recipe.keys import KEYS, flatten, is_below, is_kit_key, is_used, merge_nested, set_nested
from kit.recipe.load import check_value, describe_unquoted, read_defaults, read_source
from kit.recipe.recipe import find_differences
from kit.recipe.schema import find_problems
from tests.helpers.recipes import build_tiny, make_partial

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
    return flatten(read_defaults().base.resolved)


def load_errors(tmp_path: Path, keys: dict[str, Any]) -> list[str]:
    """The errors about a recipe with these keys."""
    recipe: dict[str, Any] = {}
    for key, value in keys.items():
        set_nested(recipe, key, value)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    try:
        read_source([str(tmp_path / "recipe.yaml")], [])
    except ConfigError as error:
        return [line.partition(". ")[2] for line in str(error).splitlines()[1:]] or [str(error)]
    return []


def change_value(key: str, value: Any) -> Any:
    """A different valid value of a key."""
    candidates = [not value, 0.5, 2, 1, "fsdp2", "other", ["other"], [2], {"other": {}}]
    candidates += ["token", "reinforce", "k3", "adaptive", "disable", "bf16", "0.5"]
    if not is_used(key):
        return next(new for new in candidates if new != value)
    kinds = (type(value), type(None)) if value is None else (type(value),)
    likely = [new for new in candidates if isinstance(new, kinds)]
    for new in likely + candidates:
        values = merge_nested(read_defaults().base.resolved, {})
        set_nested(values, key, new)
        if (
            new != value
            and not list(find_problems(values))
            and not (check_value(key, new, value) or describe_unquoted(key, new))
        ):
            return new
    raise AssertionError(key)


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
    keys += flatten(read_defaults("megatron").base.values)  # sections that FSDP does not have
    for name in [*KEYS.used, *KEYS.kit, *KEYS.unused, *KEYS.renamed.values()]:
        assert any(is_below(key, name) for key in keys), name


def test_find_differences_compares_with_the_value_that_verl_would_use():
    """If a default refers to another key, it has the value of that key in the recipe."""
    rollout = "actor_rollout_ref.rollout"
    recipe = build_tiny().change("data.max_prompt_length=77")
    changes = find_differences(recipe)
    assert changes["data.max_prompt_length"] == (77, 512)
    assert recipe.get(f"{rollout}.prompt_length") == 77  # verl's default refers to it
    assert f"{rollout}.prompt_length" not in changes
    assert changes["trainer.device"] == ("cpu", "cuda")
    other = make_partial({"actor_rollout_ref": {"rollout": {"prompt_length": 3}}})
    assert find_differences(other)[f"{rollout}.prompt_length"] == (3, other.data.max_prompt_length)
