"""Checks the style rules that Ruff cannot check: short functions, plain names and plain English.

Ruff checks line length, branches, statements and nesting (pyproject.toml). The list of banned
phrases also applies to the Markdown pages of the documentation.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("C*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("kit/**/*.py"), *ROOT.glob("templates/**/*.py")])
MAX_FUNCTION_LINES = 50
MAX_COMPREHENSION = 160  # characters, about two lines
MAX_LAMBDA = 40  # characters
MAX_MARKDOWN_LINE = 120  # characters; rows of tables may be longer

BANNED_PHRASES = [
    "beside",
    "at once",
    "goes on",
    "go on",
    "of its own",
    "of their own",
    "of one's own",
    "one's own",
    "but for",
    "in the place of",
    "in its place",
    "leave away",
    "leave it out",
    "wants",
    "told",
    "mend",
    "meanwhile",
    "by itself alone",
    "as it is said",
    "gets nowhere",
    "got nowhere",
]
BANNED_PHRASE = re.compile(rf"\b({'|'.join(BANNED_PHRASES)})\b", re.IGNORECASE)
# a sentence with a clause as its subject, such as `What it needs is a row.`
CLAUSE_SUBJECT = re.compile(
    r"(?:^|[.:;] )(What|Where|Who|Whoever|Whatever) (?!is\b.*\?|if\b)[a-z]", re.MULTILINE
)
# names that do not describe their value
BANNED_NAMES = {
    "told",
    "said",
    "why",
    "asked",
    "found",
    "theirs",
    "ours",
    "way_out",
    "todo",
    "owed",
    "made",
    "given",
    "known",
}


def read_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def iterate_texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment, and of each string that contains a space."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "noqa" not in token.string:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def find_phrase_problems(path: Path) -> Iterator[str]:
    for line, text in iterate_texts(path):
        for pattern in (BANNED_PHRASE, CLAUSE_SUBJECT):
            for match in pattern.finditer(text):
                context = text[max(0, match.start() - 30) : match.end() + 30]
                yield f"{line}: {match[0].strip()!r} in {context!r}"


def iterate_markdown_paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, list item, heading and table row. Code is left out."""
    is_code = False
    first = 0
    words: list[str] = []
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        if line.startswith("```"):
            is_code = not is_code
        is_text = bool(line.strip()) and not is_code and not line.startswith("```")
        starts = re.match(r"\s*([-*>|#]|\d+\.) ?", line)
        if words and (starts or not is_text):
            yield first, re.sub(r"`[^`]*`", "`code`", " ".join(words))
            words = []
        if is_text:
            first = first if words else number
            words.append(line[starts.end() if starts and not words else 0 :].strip())


def find_markdown_problems(path: Path) -> Iterator[str]:
    """The banned phrases of a page, and its lines that are too long."""
    for line, text in iterate_markdown_paragraphs(path):
        for pattern in (BANNED_PHRASE, CLAUSE_SUBJECT):
            for match in pattern.finditer(text):
                context = text[max(0, match.start() - 30) : match.end() + 30]
                yield f"{line}: {match[0].strip()!r} in {context!r}"
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > MAX_MARKDOWN_LINE and not line.startswith(("|", "#")) and " " in line:
            yield f"{number}: {len(line)} characters"


def iterate_defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each name that the file defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or (
            isinstance(node, ast.ExceptHandler) and node.name
        ):
            yield node.lineno, node.name


def find_name_problems(path: Path) -> Iterator[str]:
    for line, name in iterate_defined_names(read_tree(path)):
        if name.strip("_") in BANNED_NAMES:
            yield f"{line}: the name {name!r} does not describe its value; choose a specific name"


def is_walrus_test(node: ast.expr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a walrus is the whole condition of an `if`, or the left side of its comparison."""
    parent = parents[node]
    if isinstance(parent, ast.Compare) and parent.left is node:
        node, parent = parent, parents[parent]
    return isinstance(parent, (ast.If, ast.While)) and parent.test is node


def multiplies_text(node: ast.BinOp) -> bool:
    """Whether this is `"text" * condition`. An `if` is clearer."""
    for text, factor in ((node.left, node.right), (node.right, node.left)):
        if isinstance(factor, ast.Constant):
            continue
        if isinstance(text, ast.JoinedStr):
            return True
        if isinstance(text, ast.List) and isinstance(factor, (ast.Compare, ast.BoolOp)):
            return True
        is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
        if is_text and re.search("[A-Za-z]", text.value):
            return True
    return False


def find_structure_problems(path: Path) -> Iterator[str]:
    tree = read_tree(path)
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
    """Whether this is `a, b = b, a`."""
    target = node.targets[0]
    assert isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
    return {ast.unparse(part) for part in target.elts} == {
        ast.unparse(part) for part in node.value.elts
    }


def find_size_problems(path: Path) -> Iterator[str]:
    tree = read_tree(path)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = first.end_lineno - first.lineno + 1 if is_documented else 0
            lines = node.end_lineno - node.lineno + 1 - docstring
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(summary) > 100:
                yield f"{node.lineno}: the docstring's first line has {len(summary)} characters"


def find_problems(path: Path) -> list[str]:
    """All style problems of a source file, each as `line: description`."""
    return [
        *find_phrase_problems(path),
        *find_name_problems(path),
        *find_structure_problems(path),
        *find_size_problems(path),
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_follows_the_style_rules(path):
    assert find_problems(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_no_banned_phrase_and_no_long_line(path):
    assert list(find_markdown_problems(path)) == []


def test_banned_phrases_in_markdown_are_found(tmp_path):
    """They are found across lines, in lists and in tables, but not in code."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\nAll of them start at\nonce.\n\n- What it needs is a row.\n\n"
        "| a | b |\n| --- | --- |\n| it is told | `told` |\n\n```text\ntold at once\n```\n"
    )
    found = [problem.partition(" in ")[0] for problem in find_markdown_problems(page)]
    assert found == ["3: 'at once'", "6: 'What i'", "10: 'told'"]
