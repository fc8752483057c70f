"""The signatures of the core name their types."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.helpers.recipes import ROOT

CORE = [ROOT.glob("*.py"), ROOT.glob("kit/*.py")]
CORE += [
    ROOT.glob(f"kit/{name}/**/*.py") for name in ("config", "data", "gym", "rollout", "runs", "cpu")
]
COROUTINE = "Coroutine[Any, Any, "  # what calling an async function returns


def list_annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    """List the annotations of a function's parameters and of its result."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [each for each in (arguments.vararg, arguments.kwarg) if each]
    annotations = [parameter.annotation for parameter in parameters]
    yield from filter(None, [*annotations, function.returns])


def names_any(annotation: ast.expr) -> bool:
    return bool(re.search(r"\bAny\b", ast.unparse(annotation).replace(COROUTINE, "")))


def test_each_any_in_a_signature_has_its_reason():
    """The reason is a comment on the line: a library has no type, or the value is any JSON."""
    problems = []
    count = 0
    for path in sorted(path for paths in CORE for path in paths):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for annotation in filter(names_any, list_annotations(node)):
                count += 1
                if " # " not in lines[annotation.end_lineno - 1]:
                    problems.append(f"{path.relative_to(ROOT)}:{annotation.lineno}: {node.name}")
    assert not problems, "\n".join(problems)
    assert count > 30
