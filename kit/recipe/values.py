"""Check the values of a recipe: sections, lists, texts and numbers.

is_text(key, default)         whether a key is a text; is_list: a list
remove_misplaced(content)     a message for each value that has another form than its key
expand_paths(content)         replace ~/ at the start of texts
find_invalid_keys(config)     a message for each key that nothing reads or with an invalid value

The types of sections.py check the values of the kit's keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit.recipe import sections
from kit.recipe.keys import (
    KEYS,
    diff,
    flatten,
    is_below,
    is_kit_key,
    is_used,
    matches_any,
    to_plain,
    unused_hint,
)
from kit.recipe.numbers import find_rule, show


def is_text(key: str, default: object) -> bool:
    """Whether a key is a text: by verl_keys.yaml, or because its default is one."""
    if matches_any(key, KEYS.texts):
        return True
    return isinstance(default, str) and find_rule(key) is None and not may_be_more(key)


def is_list(key: str, default: object) -> bool:
    """Whether the value of a key is a list."""
    return isinstance(default, list) or matches_any(key, KEYS.lists)


def may_be_more(key: str) -> bool:
    """Whether the value of a text key may also be a number, a list or a mapping."""
    return matches_any(key, KEYS.mixed)


# --- sections and lists --------------------------------------------------------------------------


def remove_misplaced(content: Json, base: Json, prefix: str = "") -> Iterator[str]:
    """Remove values whose form differs from the base's -> a message for each.

    A section of keys, for example, cannot become a number. base: the values that `content`
    overrides, unresolved.
    """
    for name in list(content):
        key = f"{prefix}{name}"
        if key == "trainer.logger" and isinstance(content[name], str):
            content[name] = [content[name]]  # verl also takes a name
        value = content[name]
        default = base.get(name)
        problem = describe_misplaced(key, value, default)
        if problem:
            yield problem
            del content[name]
        elif isinstance(value, dict):
            below = default if isinstance(default, dict) else {}
            yield from remove_misplaced(value, below, f"{key}.")


def describe_misplaced(key: str, value: object, default: object) -> str:
    """Describe a value that has another form than its key; empty if the form is right."""
    names = []
    if isinstance(default, dict):
        names = [name for name in default if is_used(f"{key}.{name}")]
    is_checked = is_used(key) or bool(names)
    if not is_checked or (value is None and not default):
        return ""
    if value == "???" and default is not None:
        return f"{key}=??? is OmegaConf's missing value. Set it."
    if isinstance(default, dict):
        if isinstance(value, dict):
            return ""
        example = f"{key}.{names[-1] if names else 'name'}"
        return f"{key}={show(value)}: {key} is a section of keys. Set its keys, such as {example}."
    if is_list(key, default):
        if isinstance(value, list):
            return ""
        return f"{key}={show(value)} must be a list. Write [...]."
    if isinstance(value, dict) and is_single(key, default):
        return f"{key}={show(value)}: {key} has no keys below it. Write {key}=value."
    return ""


def is_single(key: str, default: object) -> bool:
    """Whether a key has one value: no mapping."""
    is_reference = isinstance(default, str) and "${" in default  # it may be one to a section
    if may_be_more(key) or is_reference:
        return False
    return find_rule(key, default) is not None or is_text(key, default)


def fill_empty(config: DictConfig, base: Json) -> None:
    """Replace null by an empty mapping or list where that is the default."""
    for key, default in flatten(base).items():
        if default in ({}, []) and OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, default)


def expand_paths(value: object) -> Any:  # as the value
    """Return a recipe, or the value of a key, with ~/ replaced at the start of its texts."""
    if isinstance(value, dict):
        return {name: expand_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [expand_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(str(value)) if is_path else value


# --- values --------------------------------------------------------------------------------------


def find_invalid_keys(config: DictConfig, base: DictConfig, unknown: Sequence[str]) -> list[str]:
    """A message for each changed key that nothing reads, or with an invalid value.

    unknown: keys that have a message.
    """
    messages = []
    known = list(unknown)
    for key, (value, _) in diff(config, flatten(base)).items():
        problem = "" if is_below(key, *unknown) else check_key(config, key, value, base)
        if problem:
            messages.append(problem)
            known.append(key)
    try:
        problems = list(sections.find_problems(config))
    except OmegaConfBaseException:  # a reference to nothing, which has a message
        problems = []
    return messages + [problem for key, problem in problems if not is_below(key, *known)]


def check_key(config: DictConfig, key: str, value: object, base: DictConfig) -> str:
    """Describe a changed key that nothing reads, or with an invalid value; empty if it is valid.

    value: unresolved. The values of the kit's keys are not checked here.
    """
    default = to_plain(OmegaConf.select(base, key))
    is_typed_number = isinstance(value, (bool, int, float))
    try:
        resolved = to_plain(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        return f"{key}={show(value)}: {describe_error(error)}"
    if resolved is not None:  # a name with a dot cannot be selected
        value = resolved
    if not is_used(key):
        unused = f"{key} is a verl option that this trainer does not use. {unused_hint(key)}"
        return "" if value == default else unused
    if is_kit_key(key):
        return ""
    if is_typed_number and is_text(key, default) and not may_be_more(key):
        return f"{key}={show(value)} is a number or a switch in YAML, not a text. Quote it."
    return describe_invalid(key, value, default)


def describe_error(error: OmegaConfBaseException) -> str:
    """Describe an error of OmegaConf in one line, with a fix."""
    reason = str(error).partition("\n")[0].strip().rstrip(".")
    fix = "Correct it"
    if "interpolation" in reason.lower() or "${" in reason:
        fix = "Correct ${...}, or write \\${ for these characters"
    return f"{reason}. {fix}."


def describe_invalid(key: str, value: object, default: object) -> str:
    """Describe an invalid value; empty if the value is valid."""
    rule = find_rule(key, default)
    if rule:
        if rule.is_valid(value):
            return ""
        is_quoted = isinstance(value, str) and value.isdecimal()
        fix = "Remove the quotes" if is_quoted else "Change it"
        return f"{key}={show(value)} must be {rule.describe()}. {fix}."
    if isinstance(default, bool):
        is_switch = isinstance(value, (bool, int)) and value in (0, 1)
        return "" if is_switch else f"{key}={show(value)} must be true or false. Change it."
    if value == "" and default:
        return f"{key} is empty. Give a value like {default}."
    is_plain = isinstance(value, (str, int, float))  # a number may come from ${...}
    is_missing = value is None and default is None
    if is_plain or is_missing or may_be_more(key) or not is_text(key, default):
        return ""
    return f"{key}={show(value)} must be a text. Change it."
