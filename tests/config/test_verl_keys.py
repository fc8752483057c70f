"""Each of verl's keys that a recipe may set is read by the kit, or by the parts of verl it runs.

The tests collect names from the source of both: attributes, and words given to get, getattr, pop,
select and [...]. A key is unused if its last part is not among these names.

The check has a limit: the name may belong to another key. If you find such a key, add it to
`unused` in kit/config/verl_keys.yaml.
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
from conftest import ROOT
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from kit.config.keys import KEYS, find_changes, flatten, is_used
from kit.config.load import base_configs, load_config

THEIRS = Path(verl.__file__).parent
RUNS = (  # of verl, by the kit: FSDP's workers beside vLLM, and some of its trainer's functions
    *(
        "base_config.py",
        "protocol.py",
        "checkpoint_engine",
        "models",
        "single_controller",
        "utils",
        "workers",
    ),
    *(
        "trainer/ppo/core_algos.py",
        "trainer/ppo/rollout_corr_helper.py",
        "trainer/ppo/metric_utils.py",
    ),
)
# below those: other engines and servers, verl's own data, rewards and agent loops, profilers
NOT = re.compile(
    r"megatron|mcore|mindspeed|torchtitan|veomni|automodel|turbo|sglang|trtllm|modelopt|hf_rollout|naive|tinker|npu|hccl"
    r"|reward_|dataset|rollout_trace|skip/|distillation|profiler|rollout/schemas|config/critic|utils/config"
)
OTHERS = re.compile(  # keys that are not verl's to read by name
    r"_target_$"  # hydra's, which makes a dataclass of it
    r"|^model_engine$"  # by which all is composed: tests/extras/test_backends.py
    r"|engine_kwargs\.vllm\."  # vLLM's
    rf"|^({'|'.join(map(re.escape, KEYS.free_form))})\."  # ray.init's
)


@functools.cache
def names_read() -> frozenset[str]:
    """Every name that the source of the kit and of verl's workers asks something for."""
    ours = [
        path for pattern in ("*.py", "kit/**/*.py", "templates/*.py") for path in ROOT.glob(pattern)
    ]
    ours = [
        path for path in ours if path.name not in ("load.py", "checks.py", "keys.py")
    ]  # to check a key is not to use it
    theirs = [
        path
        for part in RUNS
        for path in [THEIRS / part, *(THEIRS / part).rglob("*.py")]
        if path.is_file()
    ]
    theirs = [path for path in theirs if not NOT.search(str(path.relative_to(THEIRS)))]
    assert len(theirs) > 80 and len(ours) > 15
    return frozenset(name for path in ours + theirs for name in names_in(path.read_text()))


def names_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        words: list[ast.expr] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Subscript):
            words = [node.slice]
        elif isinstance(node, ast.Call):
            asked = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            words = node.args if asked in ("get", "getattr", "_get_attr", "pop", "select") else []
        for word in words:
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                yield from word.value.split(".")


def idle(keys: list[str]) -> list[str]:
    return [
        key for key in keys if key.split(".")[-1] not in names_read() and not OTHERS.search(key)
    ]


@functools.cache
def known() -> dict[str, Any]:
    """{key: value} of verl's YAML and of configs/base.yaml."""
    return flatten(load_config([], [])[0])


def dataclass_fields() -> list[str]:
    """The keys that verl's dataclasses have, and its YAML has not."""

    def walk(node: DictConfig, prefix: str) -> Iterator[str]:
        target = OmegaConf.to_container(node).get("_target_")
        for field in dataclasses.fields(get_class(target)) if target else ():
            if node._get_node(field.name) is None:  # `in` does not see what is ???
                yield f"{prefix}{field.name}"
        for name in node:
            child = node._get_node(name)
            if (
                isinstance(child, DictConfig)
                and not child._is_none()
                and not child._is_interpolation()
            ):
                yield from walk(child, f"{prefix}{name}.")

    return list(walk(base_configs()[0], ""))


def told(tmp_path: Path, keys: dict[str, Any]) -> str:
    """What load_config says to a recipe with these keys."""
    recipe, problems = OmegaConf.create(), []
    for key, value in keys.items():
        OmegaConf.update(recipe, key, value, force_add=True)
    OmegaConf.save(recipe, tmp_path / "recipe.yaml")
    load_config([str(tmp_path / "recipe.yaml")], [], problems)
    return "\n".join(map(str, problems))


def other(value: Any) -> Any:
    """A value of the same kind that is not `value`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return not value if isinstance(value, bool) else "other"
    return value + 1


def test_every_key_that_a_recipe_may_set_is_read():
    assert not idle([key for key in known() if is_used(key)])
    assert not idle(KEYS.dataclass_fields)
    planted = ["gym.nobody_reads_this", "actor_rollout_ref.rollout.max_parallel_turns"]
    assert idle(["trainer.save_freq", *planted]) == planted


def test_the_names_find_half_of_what_is_idle():
    keys = [
        key
        for key in known()
        if not is_used(key) and key.startswith(("actor_rollout_ref.", "critic."))
    ]
    assert len(idle(keys)) > 80
    for name in (
        "over_sample_rate",
        "max_parallel_calls",
        "tool_response_truncate_side",
        "use_prefix_grouper",
        "async_save",
    ):
        assert any(key.endswith(f".{name}") for key in idle(keys)), name


def test_a_key_is_taken_or_refused_as_the_tables_say(tmp_path):
    refused = {
        key: other(value)
        for key, value in known().items()
        if not is_used(key) and not OTHERS.search(key)
    }
    lines = told(tmp_path, refused).splitlines()
    assert {line.split()[0] for line in lines} == set(refused) and len(lines) == len(refused) > 400
    assert all("is a verl option that this trainer does not use" in line for line in lines)
    taken = {
        key: other(value)
        for key, value in known().items()
        if is_used(key) and not OTHERS.search(key)
    }
    assert told(tmp_path, taken) == "" and len(taken) > 200


def test_a_field_of_verls_dataclasses_is_read_or_refused(tmp_path):
    fields = dataclass_fields()
    assert set(KEYS.dataclass_fields) <= set(fields)
    lines = told(tmp_path, dict.fromkeys(fields, 1)).splitlines()
    assert {line.split("unknown key ")[1].split(". ")[0] for line in lines} == set(fields) - set(
        KEYS.dataclass_fields
    )


def test_the_tables_name_what_verl_has():
    for name in [*KEYS.used, *KEYS.dataclass_fields, *KEYS.kit, *KEYS.unused]:
        others = name.endswith((".megatron", ".veomni"))  # which are there with these engines
        assert (
            others
            or name in KEYS.dataclass_fields
            or any(f"{key}.".startswith(f"{name}.") for key in known())
        ), name


def test_a_key_of_an_earlier_version_is_an_error_with_its_new_name(tmp_path):
    problems = told(tmp_path, {"env.show_every": 5, "gym.door.port": 1, "trainer.rollout_ahead": 1})
    assert "unknown key env.show_every. It is now trainer.print_samples_every." in problems
    assert "unknown key gym.door. It is now gym.policy_endpoint." in problems
    assert "unknown key trainer.rollout_ahead. It is now trainer.one_step_off." in problems


@pytest.mark.parametrize(("old", "new"), KEYS.renamed.items())
def test_a_new_name_exists_and_the_old_one_does_not(old, new):
    keys = flatten(base_configs()[1])
    assert any(f"{key}.".startswith(f"{new}.") for key in keys)
    assert not any(f"{key}.".startswith(f"{old}.") for key in keys)


def test_a_change_is_a_value_that_verl_would_not_give():
    """A default that refers to another key or section counts as the value of that key."""
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
