"""Parse the YAML of recipe files and the key=value arguments of the command line.

On the command line a text stays as it is typed: as YAML, `a #b` is `a`. The types of schema.py, or
the default of a key, say what is a text.

Convenience: values need no second quotes on the command line, and errors name the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from env import Json
from kit.errors import ConfigError
from kit.recipe.keys import KEYS
from kit.recipe.schema import list_types

NUMBER_TAGS = [f"tag:yaml.org,2002:{name}" for name in ("int", "float")]
TEXT_TAG = "tag:yaml.org,2002:str"
OMEGACONF_LOADER: Any = get_yaml_loader()


class Loader(OMEGACONF_LOADER):
    """YAML as OmegaConf reads it. A number with _ or : is a text: 2026_11_26, 12:30, 0.5_2."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: object) -> str:
        """Return the tag of a node."""
        tag = str(super().resolve(kind, value, implicit))
        return TEXT_TAG if tag in NUMBER_TAGS and {*"_:"} & {*value} else tag


def parse_yaml(text: str, source: str) -> object:
    """Parse the value of a key, or a whole recipe. source: for messages. Raises ConfigError."""
    line = ""
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        reason = error.problem or error.context or ""
        if error.problem_mark and "\n" in text:
            line = f" in line {error.problem_mark.line + 1}"
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # of tags such as !!timestamp
        reason = " ".join(str(error).split())
    raise ConfigError(
        f"{source}: not valid YAML{line}: {reason}. Correct it, or quote the texts in it."
    )


def read_saved(path: Path) -> Json:
    """Return the recipe that a run saved, as plain data: nothing in it is resolved.

    The folder may come from others. Raises ConfigError.
    """
    try:
        content = yaml.load(path.read_text(), Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no recipe ({reason:.200}). Name another run.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no recipe, since it has no keys. Name another run.")
    return content


def parse_argument(argument: str, defaults: Json) -> Json:
    """Parse key=value of the command line into nested mappings. Raises ConfigError.

    defaults: {dotted key: its default}.
    """
    key, _, text = argument.lstrip("+").partition("=")
    if "[" in key or not all(key.split(".")):
        raise ConfigError(f"{argument}: {key!r} is not a key. Write section.key=value.")
    value: Any = parse_value(key, text, defaults.get(key))
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def parse_value(key: str, text: str, default: object) -> object:
    """Parse the text after `key=`. Raises ConfigError."""
    kinds = list_types(key) or ({type(default)} if default is not None else set())
    if key in KEYS.texts:
        kinds = {str, type(None)}
    if text in ("null", "") and kinds != {str}:
        return None
    is_bracket = text.lstrip().startswith(("[", "{"))
    may_nest = bool(kinds & {list, dict})
    if str in kinds and not (is_bracket and may_nest):
        return text
    if list in kinds and not is_bracket:
        return text  # the check of lists shows how to write it
    return parse_yaml(text, f"{key}={text}")
