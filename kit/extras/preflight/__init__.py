"""Estimate before a run whether it fits this machine's memory and disk. Find missing packages.

Hooks of kit/extras/__init__.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from kit.extras.preflight import memory, node


def warnings(config: DictConfig, inputs: Any, command: str) -> Iterator[str]:
    """Everything that will not fit, or is missing on this node."""
    yield from memory.find_shortages(config, inputs.model, command)
    yield from node.find_problems(config, inputs.model, command)


def dry_run_lines(config: DictConfig, inputs: Any, command: str) -> list[str]:
    """The estimated memory of each stage."""
    return memory.describe(config, inputs.model, command)
