"""Tests that each error that ends a run has a fix: an imperative, valid values or a suggestion."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT

# Errors that end a run.
ERRORS = {
    "ConfigError",
    "UserFunctionError",
    "RunError",
    "DataError",
    "Refused",
    "GymStartError",
    "ServerDownError",
}
FILES = [*ROOT.glob("*.py"), *ROOT.glob("kit/**/*.py"), *ROOT.glob("templates/*.py")]
FIX = re.compile(
    r"\b(accept|add|change|check|choose|convert|correct|delete|fix|free|give|inspect|install|join|"
    r"keep|lower|make|must|name|needs|pass|put|raise|remove|rename|rerun|restart|resume|return|"
    r"run|save|see|set|shorten|start|takes|try|use|write|did you mean|it has|there is|nearest are|"
    r"tried on|problems with)\b",
    re.IGNORECASE,
)


class Messages(NamedTuple):
    """The errors of a source file."""

    without_fix: list[str]  # `file:line: text` of each error without a fix
    count: int  # the number of all errors


def join_strings(node: ast.AST, texts: dict[str, str]) -> str:
    """The text of an expression. texts: {name: text} of the names in it."""
    constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    parts = [value for value in constants if isinstance(value, str)]
    names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return " ".join([*parts, *(texts.get(name, "") for name in names)])


def read_module_texts(tree: ast.Module) -> dict[str, str]:
    """{name: text} of the constants of a module."""
    texts = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    texts[target.id] = join_strings(node.value, {})
    return texts


def add_assigned_texts(function: ast.AST, texts: dict[str, str]) -> None:
    """Add the texts that a function assigns to names."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.NamedExpr):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    earlier = texts.get(name.id, "")
                    texts[name.id] = f"{earlier} {join_strings(node.value, texts)}"


def is_error(node: ast.AST) -> bool:
    """Whether a node creates an error that ends a run and has a message."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return node.func.id in ERRORS and bool(node.args)


def find_messages(source: str, file: str) -> Messages:
    """Find the errors of a source file, and those that name no fix."""
    tree = ast.parse(source)
    constants = read_module_texts(tree)
    without_fix = set()
    count = 0
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        texts = dict(constants)
        add_assigned_texts(function, texts)
        for node in filter(is_error, ast.walk(function)):
            count += 1
            text = join_strings(node, texts)
            # a message without a letter only repeats that of another error
            if re.search(r"\w", text) and not FIX.search(text):
                without_fix.add(f"{file}:{node.lineno}: {join_strings(node, {})}")
    return Messages(sorted(without_fix), count)


def read_messages(path: Path) -> Messages:
    return find_messages(path.read_text(), str(path.relative_to(ROOT)))


def test_every_error_names_a_fix():
    messages = [read_messages(path) for path in FILES]
    assert [line for file in messages for line in file.without_fix] == []
    assert sum(file.count for file in messages) > 80  # otherwise, FILES is wrong


def test_an_error_without_a_fix_is_found():
    source = "def f(x):\n    reason = f'{x} is bad'\n    raise ConfigError(f'x={x}: {reason}')\n"
    assert find_messages(source, "f.py").without_fix[0].startswith("f.py:3: x=")
    assert find_messages(source.replace("bad", "bad. Lower it"), "f.py") == ([], 1)
