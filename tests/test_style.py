"""Checks the style rules that Ruff cannot check: short functions, and one thing per statement.

Ruff checks line length, branches, statements and nesting (pyproject.toml).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.helpers.recipes import ROOT, SOURCES

MAX_FUNCTION_LINES = 50
MAX_SUMMARY = 100  # characters of a docstring's first line
MAX_COMPREHENSION = 160  # characters, about two lines
MAX_LAMBDA = 40  # characters


def is_walrus_test(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a walrus is the condition of an `if`, or the left side of its comparison."""
    parent = parents[node]
    if isinstance(parent, ast.Compare) and parent.left is node:
        node, parent = parent, parents[parent]
    return isinstance(parent, (ast.If, ast.While)) and parent.test is node


def multiplies_text(node: ast.BinOp) -> bool:
    """Return whether this is `"text" * condition`. An `if` is clearer."""
    for text, factor in ((node.left, node.right), (node.right, node.left)):
        if isinstance(factor, ast.Constant):
            continue
        if isinstance(text, ast.JoinedStr):
            return True
        if isinstance(text, ast.List) and isinstance(factor, (ast.Compare, ast.BoolOp)):
            return True
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            continue
        if re.search("[A-Za-z]", text.value):
            return True
    return False


def find_structure_problems(tree: ast.Module) -> Iterator[str]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Tuple) and not is_swap(node):
                yield f"{line}: two assignments in one: {ast.unparse(node)[:80]}"
        elif isinstance(node, ast.NamedExpr) and not is_walrus_test(node, parents):
            yield f"{line}: a walrus inside a larger expression: {ast.unparse(node)[:80]}"
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            text = ast.unparse(node)
            if len(node.generators) > 1:
                yield f"{line}: a comprehension with two `for`: {text[:80]}"
            elif len(text) > MAX_COMPREHENSION:
                yield f"{line}: a comprehension of {len(text)} characters: {text[:80]}"
        elif (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and multiplies_text(node)
        ):
            yield f"{line}: text * condition: {ast.unparse(node)[:80]}"
        elif isinstance(node, ast.Lambda) and len(ast.unparse(node.body)) > MAX_LAMBDA:
            yield f"{line}: a lambda that should be a function: {ast.unparse(node)[:80]}"


def is_swap(node: ast.Assign) -> bool:
    """Return whether this is `a, b = b, a`."""
    target = node.targets[0]
    assert isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
    return {ast.unparse(part) for part in target.elts} == {
        ast.unparse(part) for part in node.value.elts
    }


def count_lines(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def find_size_problems(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            lines = count_lines(node) - (count_lines(first) if is_documented else 0)
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(summary) > MAX_SUMMARY:
                yield f"{node.lineno}: the docstring's first line has {len(summary)} characters"


def test_source_files_follow_the_style_rules():
    problems = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for problem in (*find_structure_problems(tree), *find_size_problems(tree)):
            problems.append(f"{path.relative_to(ROOT)}:{problem}")
    assert problems == []


def test_each_module_of_the_kit_says_whether_it_protects_or_is_a_convenience():
    """A person who wants to delete it has to know."""
    missing = []
    for path in sorted((ROOT / "kit").rglob("*.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        says = [line for line in lines if re.match("(Protects|Convenience): .+", line)]
        if path.name != "__init__.py" and len(says) != 1:
            missing.append(str(path.relative_to(ROOT)))
    assert missing == []
