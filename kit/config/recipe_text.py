"""Parse the YAML of recipe files and the key=value arguments of the command line.

A text stays as it is typed: as YAML, the name 2026_11_26 is the number 20261126, 12:30 is 750, and
`a #b` is `a`. The callers know which keys are texts (values.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from env import Json
from kit.config.values import Kinds, describe_error
from kit.errors import ConfigError

LOADER = get_yaml_loader()  # YAML as OmegaConf reads it: 1e-6 is a number
TYPED_TAGS = [f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool")]
TEXT_TAG = "tag:yaml.org,2002:str"


class NotYamlError(ValueError):
    """A text that is not valid YAML. line: where, from 1; 0: unknown."""

    def __init__(self, reason: str, line: int = 0):
        super().__init__(reason)
        self.line = line


def parse_yaml(text: str, key: str, is_text: Callable[[str], bool]) -> object:
    """Parse the value of a key, or with key="" a whole recipe. Raises NotYamlError."""
    try:
        loader = LOADER(text)
        node = loader.get_single_node()
        if node is None:
            return None
        keep_texts(node, key, is_text)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise NotYamlError(error.problem or error.context or "", line) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # of a tag such as !!int
        raise NotYamlError(" ".join(str(error).split())) from None


def read_saved(path: Path) -> Json:
    """Return the recipe that a run saved, as plain data: nothing in it is resolved.

    The folder may come from others. Raises ConfigError.
    """
    try:
        content = yaml.load(path.read_text(), LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no recipe ({reason:.200}). Name another run.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no recipe, since it has no keys. Name another run.")
    return content


def keep_texts(node: yaml.Node, key: str, is_text: Callable[[str], bool]) -> None:
    """Turn numbers and booleans without quotes into the texts that were typed, below text keys."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.tag in TYPED_TAGS and is_text(key):
            node.tag = TEXT_TAG
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            keep_texts(item, f"{key}.*", is_text)
    elif isinstance(node, yaml.MappingNode):
        for name, item in node.value:
            is_merge = name.value == "<<"  # YAML's merge key: the names are of this mapping
            keep_texts(item, key if is_merge else f"{key}.{name.value}".lstrip("."), is_text)


def parse_argument(argument: str, kinds: Kinds) -> Json:
    """Parse key=value of the command line into nested mappings. Raises ConfigError."""
    key, _, text = argument.lstrip("+").partition("=")
    if "[" in key:
        whole = shlex.quote(f"{key.partition('[')[0]}=[...]")
        raise ConfigError(f"{argument}: a list has no keys for its items. Set all of it: {whole}.")
    if not all(key.split(".")):
        raise ConfigError(f"{argument}: {key!r} is not a key. Write section.key=value.")
    if text == "???":
        raise ConfigError(f"{argument}: ??? is OmegaConf's missing value. Set another.")
    value: Any = parse_value(key, text, kinds)
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def parse_value(key: str, text: str, kinds: Kinds) -> object:
    """Parse the text after `key=`. Raises ConfigError."""
    is_bracket = text.lstrip().startswith(("[", "{"))
    if text in ("null", "") and kinds.takes_null(key):
        return None
    if kinds.is_text(key) and not (is_bracket and kinds.is_mixed(key)):
        return text
    if kinds.is_list(key) and kinds.is_text(f"{key}.*") and not is_bracket:
        return text  # the check of lists shows how to write it
    try:
        return parse_yaml(text, key, kinds.is_text)
    except NotYamlError as error:
        fix = "Quote the value, or correct it"
        if is_bracket:
            fix = "Close the bracket, and quote texts in it that have special characters"
        raise ConfigError(f"{key}={text}: not valid YAML: {error}. {fix}.") from None


def to_config(content: Json, source: str) -> DictConfig:
    """Return a recipe's plain content as a DictConfig. source: for messages. Raises ConfigError."""
    try:
        return OmegaConf.create(content)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {describe_error(error)}") from None
