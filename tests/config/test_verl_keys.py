"""Tests that each verl key of a recipe has an effect, or is reported as unused.

A key counts as read if its last part is a name that the source code reads. The source code is that
of the kit and of the parts of verl that the kit runs. Names are attributes, and strings passed to
get, getattr, pop, select and [...].

The check has a limit. The same name may belong to a different key. If you find such a key, add it
to `unused` in kit/config/verl_keys.yaml.
"""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from kit.config.keys import (
    KEYS,
    find_changes,
    flatten,
    is_below,
    is_kit_key,
    is_used,
    matches_any,
    unknown_key_hint,
)
from kit.config.load import base_configs, default_keys, load_config, value_kinds
from kit.config.numbers import find_rule
from tests.helpers.recipes import ROOT

VERL_DIR = Path(verl.__file__).parent

# The parts of verl that the kit runs: FSDP workers, vLLM servers, and functions of the trainer.
VERL_PARTS = (
    "base_config.py",
    "protocol.py",
    "checkpoint_engine",
    "models",
    "single_controller",
    "utils",
    "workers",
    "trainer/ppo/core_algos.py",
    "trainer/ppo/rollout_corr_helper.py",
    "trainer/ppo/metric_utils.py",
)

# Files of these parts that the kit does not run: other engines and servers, profilers, and verl's
# own data sets, rewards and agent loops.
EXCLUDED_VERL_FILES = re.compile(
    r"megatron|mcore|mindspeed|torchtitan|veomni|automodel|turbo|sglang|trtllm|modelopt"
    r"|hf_rollout|naive|tinker|npu|hccl|reward_|dataset|rollout_trace|skip/|distillation"
    r"|profiler|rollout/schemas|config/critic|utils/config"
)

# Files of the kit that check keys. A check does not count as a use.
EXCLUDED_KIT_FILES = ("load.py", "checks.py", "keys.py", "numbers.py", "sections.py", "values.py")

# Keys that no code reads by name.
UNCHECKED_KEYS = re.compile(
    r"_target_$"  # Hydra creates a dataclass from it
    r"|^model_engine$"  # Hydra's defaults list uses it; tests/extras/test_backends.py
    r"|engine_kwargs\.vllm\."  # passed to vLLM
    r"|\.override_config\."  # for the config of the model, which transformers reads
    rf"|^({'|'.join(map(re.escape, KEYS.free_form))})\."  # passed to ray.init
)

LOOKUP_FUNCTIONS = ("get", "getattr", "_get_attr", "pop", "select")


def list_kit_sources() -> list[Path]:
    """The Python files of the kit that may use a key."""
    paths = []
    for pattern in ("*.py", "kit/**/*.py", "extras/**/*.py", "lab/**/*.py", "templates/*.py"):
        paths += ROOT.glob(pattern)
    return [path for path in paths if path.name not in EXCLUDED_KIT_FILES]


def list_verl_sources() -> list[Path]:
    """The Python files of verl that the kit runs."""
    paths = []
    for part in VERL_PARTS:
        path = VERL_DIR / part
        paths += [path] if path.is_file() else path.rglob("*.py")
    return [
        path for path in paths if not EXCLUDED_VERL_FILES.search(str(path.relative_to(VERL_DIR)))
    ]


@functools.cache
def collect_read_names() -> frozenset[str]:
    """Every name that the source code of the kit and of verl reads."""
    verl_sources = list_verl_sources()
    kit_sources = list_kit_sources()
    assert len(verl_sources) > 80 and len(kit_sources) > 15
    names: set[str] = set()
    for path in kit_sources + verl_sources:
        names.update(find_read_names(path.read_text()))
    return frozenset(names)


def find_read_names(source: str) -> Iterator[str]:
    """The attributes that a source file reads, and the keys that it looks up."""
    for node in ast.walk(ast.parse(source)):
        lookup_keys: list[ast.expr] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Subscript):
            lookup_keys = [node.slice]
        elif isinstance(node, ast.Call) and get_function_name(node) in LOOKUP_FUNCTIONS:
            lookup_keys = node.args
        for key in lookup_keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield from key.value.split(".")


def get_function_name(call: ast.Call) -> str:
    """The name of the called function or method, without its object."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return getattr(call.func, "id", "")


def is_unchecked(key: str) -> bool:
    return UNCHECKED_KEYS.search(key) is not None


def find_unread_keys(keys: list[str]) -> list[str]:
    """The keys whose last part no source file reads."""
    read_names = collect_read_names()
    return [key for key in keys if key.split(".")[-1] not in read_names and not is_unchecked(key)]


@functools.cache
def load_defaults() -> dict[str, Any]:
    """{dotted key: default} of verl's YAML files and of configs/base.yaml."""
    return flatten(load_config([], [])[0])


def list_dataclass_only_keys() -> list[str]:
    """The keys that exist in verl's dataclasses but not in its YAML files."""
    return list(walk_dataclass_only_keys(base_configs()[0], ""))


def walk_dataclass_only_keys(section: DictConfig, prefix: str) -> Iterator[str]:
    target = section.get("_target_")
    fields = dataclasses.fields(get_class(target)) if target else ()
    for field in fields:
        # `field.name in section` is False for a key with the value ???
        if section._get_node(field.name) is None:
            yield f"{prefix}{field.name}"
    for name in map(str, section):
        child = section._get_node(name)
        if not isinstance(child, DictConfig):
            continue
        if not child._is_none() and not child._is_interpolation():
            yield from walk_dataclass_only_keys(child, f"{prefix}{name}.")


def load_errors(tmp_path: Path, keys: dict[str, Any]) -> str:
    """The errors that load_config reports for a recipe with these keys, one per line."""
    recipe = OmegaConf.create()
    for key, value in keys.items():
        OmegaConf.update(recipe, key, value, force_add=True)
    OmegaConf.save(recipe, tmp_path / "recipe.yaml")
    problems = []
    load_config([str(tmp_path / "recipe.yaml")], [], problems)
    return "\n".join(map(str, problems))


def change_value(key: str, value: Any) -> Any:
    """A different valid value of a key, or if it is no number, of its type."""
    value = value_kinds().defaults.get(key, value)  # resolved
    rule = find_rule(key)
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


def test_every_key_that_a_recipe_may_set_is_read():
    assert not find_unread_keys([key for key in load_defaults() if is_used(key)])
    assert not find_unread_keys(KEYS.dataclass_fields)
    unread = ["gym.nobody_reads_this", "actor_rollout_ref.rollout.max_parallel_turns"]
    assert find_unread_keys(["trainer.save_freq", *unread]) == unread


def test_the_name_check_finds_many_of_verls_unused_keys():
    unused = []
    for key in load_defaults():
        if not is_used(key) and key.startswith(("actor_rollout_ref.", "critic.")):
            unused.append(key)
    unread = find_unread_keys(unused)
    assert len(unread) > 80
    for name in (
        "over_sample_rate",
        "max_parallel_calls",
        "tool_response_truncate_side",
        "use_prefix_grouper",
        "async_save",
    ):
        assert any(key.endswith(f".{name}") for key in unread), name


def test_used_keys_are_accepted_and_unused_keys_are_errors(tmp_path):
    used = {}
    unused = {}
    for key, value in load_defaults().items():
        if not is_unchecked(key) and not is_kit_key(key):  # tests/config/test_sections.py
            keys = used if is_used(key) else unused
            keys[key] = change_value(key, value)
    errors = load_errors(tmp_path, unused).splitlines()
    reported = {error.split()[0] for error in errors}
    assert reported == set(unused) and len(errors) == len(unused) > 400
    assert all("is a verl option that this trainer does not use" in error for error in errors)
    assert load_errors(tmp_path, used) == "" and len(used) > 200


def test_dataclass_only_keys_are_errors_unless_the_table_lists_them(tmp_path):
    keys = list_dataclass_only_keys()
    assert set(KEYS.dataclass_fields) <= set(keys)
    values = {key: change_value(key, None) for key in keys}
    errors = load_errors(tmp_path, values).splitlines()
    unknown = {error.split("unknown key ")[1].split(". ")[0] for error in errors}
    assert unknown == set(keys) - set(KEYS.dataclass_fields)


def test_every_key_of_the_tables_exists():
    """The entries of KEYS.dataclass_fields have their own test."""
    keys = [*load_defaults(), *KEYS.dataclass_fields]
    keys += flatten(base_configs("megatron")[1])  # sections that FSDP does not have
    for name in [*KEYS.used, *KEYS.kit, *KEYS.unused]:
        assert any(f"{key}.".startswith(f"{name}.") for key in keys), name


def test_a_renamed_key_is_an_error_that_gives_the_new_name(tmp_path):
    errors = load_errors(
        tmp_path, {"env.show_every": 5, "gym.door.port": 1, "trainer.rollout_ahead": 1}
    )
    assert "unknown key env.show_every. It is now trainer.print_samples_every." in errors
    assert "unknown key gym.door. It is now gym.policy_endpoint." in errors
    assert "unknown key trainer.rollout_ahead. It is now trainer.one_step_off." in errors


@pytest.mark.parametrize(("old", "new"), KEYS.renamed.items())
def test_a_new_name_exists_and_the_old_one_does_not(old, new):
    keys = flatten(base_configs()[1])
    assert any(f"{key}.".startswith(f"{new}.") for key in keys)
    assert not any(f"{key}.".startswith(f"{old}.") for key in keys)


def test_find_changes_compares_with_the_value_that_verl_would_use():
    """If a default refers to another key or section, it has the value of that key in the recipe."""
    defaults = OmegaConf.create(
        {
            "n": 1,
            "copy": "${n}",
            "other": "${n}",
            "section": {"size": 1},
            "same_section": "${section}",
            "changed_section": "${section}",
            "new": {},
            "gym": {"attempts": 3},
        }
    )
    config = OmegaConf.create(
        {
            "n": 8,
            "copy": 8,
            "other": 2,
            "section": {"size": 4},
            "same_section": {"size": 4},
            "changed_section": {"size": 1},
            "new": {"key": "x"},
            "gym": {"attempts": 1},
        }
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


def find_keys(text: str) -> list[str]:
    """Find the keys of a recipe in a text."""
    sections = "actor_rollout_ref|algorithm|critic|data|env|gym|trainer"
    return re.findall(rf"\b(?:{sections})(?:\.[a-z_]+)+", text)


def test_each_key_of_a_hint_is_used():
    known = [*flatten(base_configs()[0]), *KEYS.dataclass_fields]
    for advice in KEYS.peers:
        for key in find_keys(advice):
            exists = any(is_below(leaf, key) or is_below(key, leaf) for leaf in known)
            assert exists and is_used(key), key


def test_the_guide_and_the_hints_give_the_same_keys_for_trls_names():
    text = (ROOT / "docs" / "guides" / "from_trl.md").read_text().partition("## 5. Key by key")[2]
    rows = [line.split(" | ") for line in text.partition("\n## ")[0].splitlines()]
    columns: dict[str, str] = {}  # {TRL's name: the other columns of its rows}
    for first, *others in rows:
        for name in re.findall(r"`([a-z]+_[a-z_]+|beta|delta|epsilon|seed|temperature)`", first):
            columns[name] = columns.get(name, "") + " ".join(others)
    del columns["sequence_mask"]  # a value
    assert len(columns) > 40
    keys = {"dp": default_keys("dp")}
    for name, text in columns.items():
        hint = unknown_key_hint(name, {name: 1}, "dp", keys)
        names = [key.rpartition(".")[2] for key in find_keys(hint)]
        is_shown = any(re.search(rf"\b{key}\b", text) for key in names)
        assert is_shown or hint.startswith("Remove it"), (name, hint)
