"""Parse the YAML of recipe files and the key=value arguments of the command line.

On the command line a text stays as it is typed: as YAML, `a #b` is `a`. values.py knows which keys
are texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit.errors import ConfigError
from kit.recipe.values import describe_error, is_list, is_text, may_be_more

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

    defaults: {dotted key: its resolved default}.
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
    is_bracket = text.lstrip().startswith(("[", "{"))
    if text in ("null", "") and not isinstance(default, str):
        return None
    if is_text(key, default) and not (is_bracket and may_be_more(key)):
        return text
    if is_list(key, default) and not is_bracket:
        return text  # the check of lists shows how to write it
    return parse_yaml(text, f"{key}={text}")


def to_config(content: Json, source: str) -> DictConfig:
    """Return a recipe's plain content as a DictConfig. source: for messages. Raises ConfigError."""
    try:
        return OmegaConf.create(content)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {describe_error(error)}") from None
