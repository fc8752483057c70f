"""Every error that ends a run names a way out: an imperative, what there is, or what was meant."""

from __future__ import annotations

import ast
import re

from conftest import ROOT

ENDS = {
    "ConfigError",
    "UserFunctionError",
    "RunError",
    "DataError",
    "Refused",
    "GymStartError",
    "ServerDownError",
}
FILES = [*ROOT.glob("*.py"), *ROOT.glob("kit/**/*.py"), *ROOT.glob("templates/*.py")]
WAY_OUT = re.compile(
    r"\b(accept|add|change|check|choose|convert|correct|fix|free|give|install|join|keep|leave|"
    r"let|look|lower|make|makes|mend|must|name|needs|pass|put|raise|remove|rename|rerun|"
    r"restart|resume|return|run|save|see|set|start|starts|take|takes|try|use|wants|write|"
    r"did you mean|it has|there is|go(es)? on from|nearest are|nor one of|has|tried on|"
    r"problems with)\b",
    re.IGNORECASE,
)


def strings(node: ast.AST, known: dict[str, str]) -> str:
    """The text of an expression, with that of the names it is put together from."""
    found = [
        str(n.value)
        for n in ast.walk(node)
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    return " ".join(
        [*found, *(known.get(n.id, "") for n in ast.walk(node) if isinstance(n, ast.Name))]
    )


def without_a_way_out(source: str, file: str) -> tuple[list[str], int]:
    """(the errors that say nothing of what to do, how many there are)."""
    tree, silent, count = ast.parse(source), [], 0
    module = {t.id: strings(n.value, {}) for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
              if isinstance(t, ast.Name)}  # fmt: skip
    for function in [
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]:
        known = dict(module)
        for node in ast.walk(function):
            if isinstance(
                node, ast.Assign | ast.AugAssign | ast.NamedExpr | ast.For
            ) and not isinstance(node, ast.For):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                    known[name] = known.get(name, "") + " " + strings(node.value, known)
        for node in ast.walk(function):
            named = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ENDS
            )
            if named and node.args:
                count += 1
                told = strings(node, known)
                if re.search(r"\w", told) and not WAY_OUT.search(
                    told
                ):  # no word of its own: it passes others on
                    silent.append(f"{file}:{node.lineno}: {strings(node, {})}")
    return sorted(set(silent)), count


def test_every_error_names_a_way_out():
    found = [without_a_way_out(path.read_text(), str(path.relative_to(ROOT))) for path in FILES]
    assert [line for silent, _ in found for line in silent] == []
    assert sum(count for _, count in found) > 80  # else this test looks in the wrong place


def test_an_error_without_one_is_found():
    function = "def f(x):\n    why = f'{x} is bad'\n    raise ConfigError(f'x={x}: {why}')\n"
    assert without_a_way_out(function, "f.py")[0][0].startswith("f.py:3: x=")
    assert without_a_way_out(function.replace("bad", "bad; lower it"), "f.py") == ([], 1)
