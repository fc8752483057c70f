"""The small bugs that benchmarks/mutate.py plants. Each edits one expression or statement."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
COMPARISONS |= {new: old for old, new in COMPARISONS.items()}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
# An f-string with such a part is a message for people. Messages are not mutated.
MESSAGE = re.compile(r"[A-Za-z;:,] |\s[A-Za-z]")
NO_MUTATE = "# pragma: no mutate"  # in a line that is not mutated
UNCHANGED = (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Assert)
# functions and exceptions whose arguments are messages
MESSAGE_CALLS = {"say", "print", "GymError", "RunError", "ConfigError", "SkippedStep"}
MESSAGE_CALLS |= {"NonFiniteStep", "DataError"}


def is_message_call(node: ast.AST) -> bool:
    """Whether this calls a function or exception whose arguments are messages."""
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in MESSAGE_CALLS


@dataclass
class Mutant:
    """A file's source with one edit."""

    file: str
    function: str  # qualified name; empty at module level
    line: int
    lines: list[int]  # a test can notice the edit if it executes one; empty: they run at import
    edit: str  # a description: old -> new
    source: str
    number: int = 0  # how many earlier edits of the function have the same description

    @property
    def name(self) -> str:
        suffix = f" @{self.number}" if self.number else ""
        return f"{self.function}: {self.edit}{suffix}"

    def record(self, result: str, by: str) -> dict[str, Any]:
        """Return a line of the results. by: the test that failed, or why no test ran."""
        return {"mutant": self.name, "line": self.line, "result": result, "by": by}


def plant(file: str, source: str, bug: dict[str, str]) -> Mutant:
    """Return the mutant of a bug in mutate.yaml.

    Raises SystemExit if the function does not have the bug's `old` text exactly once.
    """
    functions = dict(functions_of(ast.parse(source)))
    if bug["function"] not in functions:
        raise SystemExit(
            f"mutate.yaml: {file} has no function {bug['function']}. Name the function that has "
            f"{bug['old']!r}."
        )
    node = functions[bug["function"]]
    lines = source.splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1]))
    end = sum(map(len, lines[: node.end_lineno]))
    body = source[begin:end]
    count = body.count(bug["old"])
    if count != 1:
        raise SystemExit(
            f"mutate.yaml: {bug['function']} of {file} has {bug['old']!r} {count} times. "
            "Choose a text that it has once."
        )
    mutated = source[:begin] + body.replace(bug["old"], bug["new"]) + source[end:]
    compile(mutated, file, "exec")
    line = source.count("\n", 0, begin + body.index(bug["old"])) + 1
    edited = range(line, line + bug["old"].count("\n") + 1)
    edit = f"planted: {bug['old']} -> {bug['new']}"
    lines_to_execute = set(edited)
    for edited_line in edited:
        lines_to_execute.update(statement_lines(node, edited_line))
    return Mutant(file, bug["function"], line, sorted(lines_to_execute), edit, mutated)


def statement_lines(function: ast.AST, line: int) -> range:
    """Return the lines of the innermost statement of `function` at `line`."""
    spans = [own_lines(node) for node in ast.walk(function) if isinstance(node, ast.stmt)]
    return min((span for span in spans if line in span), key=len, default=range(line, line + 1))


def shorten(text: str) -> str:
    """Cut the middle out of a text of more than 60 characters."""
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (qualified name, node) of each function in `tree`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(node, ast.ClassDef):
                yield prefix + node.name, node
            yield from functions_of(node, f"{prefix}{node.name}.")
        else:
            yield from functions_of(node, prefix)


def own_lines(node: ast.stmt) -> range:
    """Return the lines of a statement, without those of its body."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return range(node.lineno, max(node.lineno + 1, body[0].lineno))
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def find_mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of a file that compile, in the order of their lines."""
    visitor = Visitor(file, source)
    visitor.visit(ast.parse(source))
    return visitor.mutants


class Visitor:
    """Walks through a module and makes a mutant of each edit of a node."""

    def __init__(self, file: str, source: str):
        self.file = file
        self.source = source
        self.source_lines = source.splitlines(keepends=True)
        self.starts = [0]  # the index in `source` at which each line begins
        for line in self.source_lines:
            self.starts.append(self.starts[-1] + len(line))
        self.mutants: list[Mutant] = []
        self.counts: Counter[str] = Counter()  # mutants by name
        # where the visitor is now: in these classes and functions, and in this statement
        self.names: list[str] = []
        self.functions: list[Any] = []
        self.statement: ast.stmt | None = None

    def find_index(self, line: int, column: int) -> int:
        """Return the index in the source of a position. ast counts columns in bytes."""
        before = self.source_lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def edit(self, node: Any, new: str, label: str = "") -> None:
        """Add the mutant that has `new` instead of the node, if it compiles."""
        begin = self.find_index(node.lineno, node.col_offset)
        end = self.find_index(node.end_lineno, node.end_col_offset)
        mutated = self.source[:begin] + new + self.source[end:]
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError:
            return
        if any(NO_MUTATE in line for line in self.source_lines[node.lineno - 1 : node.end_lineno]):
            return
        name = ".".join(self.names)
        label = label or f"{shorten(ast.unparse(node))} -> {shorten(new)}"
        lines = self.lines_to_execute()
        mutant = Mutant(self.file, name, node.lineno, lines, label, mutated)
        mutant.number = self.counts[mutant.name]
        self.counts[mutant.name] += 1
        self.mutants.append(mutant)

    def change(self, node: Any, label: str = "", **fields: Any) -> None:
        """Add the mutant in which the node has other values in some fields."""
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        text = ast.unparse(changed)
        self.edit(node, text if isinstance(node, ast.stmt) else f"({text})", label)

    def lines_to_execute(self) -> list[int]:
        """Return `Mutant.lines` of the current statement."""
        if not self.functions or self.statement is None:
            return []
        function = self.functions[-1]
        body = range(function.body[0].lineno, function.end_lineno + 1)
        if self.statement is function:  # the edit is in a default of a parameter
            return list(body)
        return list(own_lines(self.statement))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.visit_definition(node)
            return
        if isinstance(node, ast.stmt):
            self.statement = node
        if isinstance(node, ast.AnnAssign):
            if node.value:
                self.visit(node.value)
            return
        if isinstance(node, ast.Raise):
            self.edit(node, "pass")
            return
        if isinstance(node, UNCHANGED) or is_message_call(node):
            return
        function = getattr(self, f"mutate_{type(node).__name__.lower()}", None)
        if function:
            function(node)
        if isinstance(node, ast.JoinedStr):  # Python 3.11 has no positions for its parts
            return
        for child in ast.iter_child_nodes(node):
            statement = self.statement
            self.visit(child)
            self.statement = statement

    def visit_definition(self, node: Any) -> None:
        self.names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            self.functions.append(node)
            self.statement = node
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                self.visit(default)
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        for statement in body:
            self.visit(statement)
        if not isinstance(node, ast.ClassDef):
            self.functions.pop()
        self.names.pop()

    def mutate_compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            ops = list(node.ops)
            ops[i] = COMPARISONS[type(op)]()
            self.change(node, ops=ops)

    def mutate_boolop(self, node: ast.BoolOp) -> None:
        self.change(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())

    def mutate_unaryop(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self.edit(node, f"({ast.unparse(node.operand)})")

    def mutate_binop(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS:
            self.change(node, op=OPERATORS[type(node.op)]())
        # `X | None` is a type, and not mutated
        elif isinstance(node.op, ast.BitOr) and not isinstance(node.right, ast.Constant):
            self.edit(node, f"({ast.unparse(node.left)})")

    def mutate_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Sub):
            self.change(node, op=ast.Add())
        else:
            self.edit(node, f"{ast.unparse(node.target)} = {ast.unparse(node.value)}")

    def mutate_assign(self, node: ast.Assign) -> None:
        if not isinstance(node.targets[0], ast.Name | ast.Tuple):
            self.edit(node, "pass")

    def mutate_expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant) and not is_message_call(node.value):
            self.edit(node, "pass")

    def mutate_return(self, node: ast.Return) -> None:
        if node.value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.edit(node, "return None")

    def mutate_break(self, node: Any) -> None:
        self.edit(node, "pass")

    mutate_continue = mutate_break

    def mutate_if(self, node: Any) -> None:
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self.edit(node.test, f"(not {ast.unparse(node.test)})")

    mutate_while = mutate_if
    mutate_ifexp = mutate_if

    def mutate_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.edit(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.edit(node, repr(node.value + 1))

    def mutate_call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg:
                label = f"drop {keyword.arg}= of {name}()"
                self.change(node, label, keywords=node.keywords[:i] + node.keywords[i + 1 :])
        for i, (one, two) in enumerate(zip(node.args, node.args[1:], strict=False)):
            starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
            if not starred and ast.dump(one) != ast.dump(two):
                args = list(node.args)
                args[i : i + 2] = [two, one]
                label = f"swap {shorten(ast.unparse(one))}, {shorten(ast.unparse(two))} of {name}()"
                self.change(node, label, args=args)

    def mutate_dict(self, node: ast.Dict) -> None:
        for i in range(len(node.keys)):
            key = node.keys[i]
            name = ast.unparse(key) if key else "**" + ast.unparse(node.values[i])
            label = f"drop {name} of a dict"
            keys = node.keys[:i] + node.keys[i + 1 :]
            values = node.values[:i] + node.values[i + 1 :]
            self.change(node, label, keys=keys, values=values)

    def mutate_joinedstr(self, node: ast.JoinedStr) -> None:
        texts = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
        if any(MESSAGE.search(text) for text in texts):
            return
        for i, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                self.change(node, values=node.values[:i] + node.values[i + 1 :])
