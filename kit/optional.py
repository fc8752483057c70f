"""Optional modules: commands and parts that can be deleted, and how the kit loads them.

Only this table, that of kit/run/features.py and verl's plugin keys name a module of extras/, lab/
or kit/cpu/. A command, a model or rows need them. Every process may import this file.

Convenience: a fork may delete what it does not use, and gets one error where it is needed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

from kit.errors import ConfigError

# The commands that train without episodes: {name: its module}
COMMANDS: Mapping[str, str] = {"sft": "extras.sft"}
# The commands that start no run, or several: {name: the module whose `main` it is}
TOOLS: Mapping[str, str] = {
    "show": "lab.report.show",
    "compare": "lab.evidence.compare",
    "sweep": "lab.evidence.sweep",
    "explain": "lab.explain.command",
    "probe": "lab.probe.command",
    "price": "lab.price",
}
# {part: its module}
PARTS: Mapping[str, str] = {
    "images": "extras.images",  # of a model that reads images
    "environments": "extras.gym_environments",  # of servers that require more packages
    "environment": "extras.environments",  # of env.environment
    "programs": "extras.policy_programs.program_scores",  # scores responses that are code
    "sandbox": "extras.policy_programs.sandbox",  # of Python verifiers
    "rows": "lab.convert",  # converts files of rows
}


def load(name: str, needed_by: str) -> ModuleType:
    """Return the module of a command, a tool or a part. Raises ConfigError if it was deleted.

    needed_by: a key of the recipe, or another reason, for the message.
    """
    module = {**COMMANDS, **TOOLS, **PARTS}[name]
    if not is_installed(module):
        raise missing_error(module, needed_by)
    return importlib.import_module(module)


def missing_error(module: str, turned_on_by: str) -> ConfigError:
    """Return the error about a module that was deleted."""
    path = module.replace(".", "/")
    return ConfigError(
        f"{turned_on_by} needs {path}, which this copy does not have. Restore it, or remove that "
        "key or command."
    )


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether a module or folder is there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent folder is missing
        return False
