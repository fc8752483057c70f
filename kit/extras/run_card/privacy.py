"""Remove secrets and paths of this machine from texts of the run card."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kit.config.keys import ROOT, flatten
from kit.config.redaction import (
    HIDDEN,
    MIN_SECRET_LENGTH,
    SECRET_VARIABLE,
    has_settings,
    names_secret,
    redacted,
    secret_values,
    without_passwords,
)

# An absolute path: no part of a URL, of a relative path or of ~/path. The last part is a group.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~$}<@-])/(?:[\w.+@,-]+/)*([\w.+@,-]+)")
# `name: value` or `name=value` inside of a word of the command line
NAMED_VALUE = re.compile(r"""(['"]?)([\w-]+)\1(\s*[:=]\s*)(['"]?)([^,{}\[\]'"\s]+)\4""")


class Cleaner:
    """Removes the secrets of a recipe and of the environment, and absolute paths, from texts."""

    def __init__(self, config: DictConfig):
        secrets = {value for value, _ in secret_values()} | find_secrets(config)
        long = [text for text in secrets if len(text) >= MIN_SECRET_LENGTH]
        self.secrets = sorted(long, key=len, reverse=True)  # one may contain another
        folders = {str(Path.cwd()), os.path.realpath(Path.cwd()), str(ROOT)}
        self.folders = sorted((f"{name}/" for name in folders), key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return a text without secrets. Paths are relative, or only their last part is left."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        text = without_passwords(text)
        for folder in self.folders:
            text = text.replace(folder, "")
        return ABSOLUTE_PATH.sub(r"\1", text)

    def clean_words(self, words: Sequence[str]) -> list[str]:
        """Return words of a command line without settings of servers, secrets and paths."""
        shown = (
            f"{word.partition('=')[0]}={HIDDEN}" if has_settings(word) else word for word in words
        )
        return [self.clean(hide_named(word)) for word in shown]


def find_secrets(config: DictConfig) -> set[str]:
    """Return the values of a recipe that are secrets."""
    values = flatten(OmegaConf.create(OmegaConf.to_container(config, resolve=True)))
    shown = flatten(redacted(config))
    secrets = set()
    for key, value in values.items():
        text = str(shown.get(key))
        has_variable = "${oc.env:" in text and SECRET_VARIABLE.search(text)
        if text != str(value) and (HIDDEN in text or has_variable):
            secrets.add(str(value))
    return secrets


def hide_named(word: str) -> str:
    """Hide the values in a key=value word whose names mark them as secrets.

    >>> hide_named("gym.judges={j: {api_key: abc, model: m}}")
    'gym.judges={j: {api_key: <hidden>, model: m}}'
    """

    def hide(match: re.Match[str]) -> str:
        quote, name, separator, value_quote, value = match.groups()
        if not names_secret(name, value):
            return match[0]
        return f"{quote}{name}{quote}{separator}{value_quote}{HIDDEN}{value_quote}"

    return NAMED_VALUE.sub(hide, word)
