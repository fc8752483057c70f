"""Tests that each error that ends a run has a fix: an imperative, valid values or a suggestion."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.helpers.recipes import ROOT, SOURCES

# Errors that end a run.
ERRORS = {"ConfigError", "UserFunctionError", "RunError", "DataError", "GymStartError"}
FIX = re.compile(
    r"\b(Add|Change|Check|Choose|Compute|Convert|Copy|Correct|Did you mean|Download|Export|Free|"
    r"Give|Inspect|Install|Join|Keep|Let|Lower|Make|Name|Pass|Put|Raise|Read|Remove|Rename|Rerun|"
    r"Resize|Restart|Restore|Resume|Return|Run|Save|See|Set|Shorten|Start|Train|Try|Unset|Use|Wait|"
    r"Write|must be|must have|or set|[Tt]o \w+ (it|one), (run|set))\b"
)


class Errors(NamedTuple):
    """The errors of a source file whose text is known."""

    without_fix: list[str]  # `file:line: text`
    total: int


def list_errors(source: str) -> Iterator[ast.Call]:
    """List the calls that create an error that ends a run and has a message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and node.args:
            yield node


def find_errors(source: str, file: str) -> Errors:
    """Find the errors of a source file. Those that end with a variable may have their fix in it."""
    without_fix = []
    count = 0
    for node in list_errors(source):
        message = node.args[0]
        parts = message.values if isinstance(message, ast.JoinedStr) else [message]
        texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in parts]
        if not texts[-1].strip(". "):
            continue
        count += 1
        if not FIX.search("".join(texts)):
            without_fix.append(f"{file}:{node.lineno}: {''.join(texts)}")
    return Errors(without_fix, count)


def test_every_error_names_a_fix():
    errors = [find_errors(path.read_text(), str(path.relative_to(ROOT))) for path in SOURCES]
    assert [line for file in errors for line in file.without_fix] == []
    assert sum(file.total for file in errors) > 80  # otherwise, SOURCES is wrong


def test_an_error_without_a_fix_is_found():
    source = "raise ConfigError(f'x={x} is bad, you can lower it')"
    assert find_errors(source, "f.py") == (["f.py:1: x= is bad, you can lower it"], 1)
    assert find_errors(source.replace("you can lower", "Lower"), "f.py") == ([], 1)
    assert find_errors("raise ConfigError(f'x: {reason}.')", "f.py") == ([], 0)
