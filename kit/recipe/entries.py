"""Parse an entry of env.train_files or env.val_files, which names files or a function of rows.

Convenience: one form for files and functions of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gym_client import Json
from kit.errors import ConfigError


class Entry(NamedTuple):
    """An entry of env.train_files or env.val_files. Its rows are one stream."""

    file: str  # its path or function; if earlier entries have it, with (2), (3), ... added
    weight: float | None = None  # the share of each batch
    server: str = ""  # the server of all its rows; "": the row names it
    verifier: str | Json | None = None  # the Python verifier of its rows
    function: Json | None = None  # {function: path.py:name, its settings} that generates rows


def parse_entry(value: str | Json) -> Entry:
    """Parse an entry: a path, or {path or function, weight, server, verifier}.

    All other keys are settings of the function. Raises ConfigError.
    """
    fields: Json = dict(value) if isinstance(value, Mapping) else {"path": value}
    weight = fields.pop("weight", None)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 < weight < float("inf")):
        raise ConfigError(f"has weight={weight}. A weight must be a number over 0. Change it.")
    server = str(fields.pop("server", None) or "")
    verifier = fields.pop("verifier", None)
    if verifier and server:
        raise ConfigError("has a server and a verifier. Remove one of them.")
    if "function" in fields:
        return Entry(str(fields["function"]), weight, server, verifier, fields)
    path = fields.pop("path", None)
    if not path or fields:
        raise ConfigError("must be a path, or {path, weight, server}. Change it.")
    return Entry(str(path), weight, server, verifier)
