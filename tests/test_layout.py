"""The repository stands alone, and stays the house that it is: nothing outside is named, and sizes and order hold."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

FIVE = ("algorithm", "inference", "training", "env", "gym_client")
TOP = (  # what may stand at the root
    *(f"{name}.py" for name in FIVE),
    *(".ci", ".gitignore", "LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements*"),
    *("benchmarks", "configs", "docs", "kit", "templates", "tests"),
)
ONE_LINES, LOOP_LINES = 600, 400  # of each of the five; of algorithm.py
FUNCTION_LINES = 60
# Of one machine or another folder; written so that this file does not name them itself.
OUTSIDE = [rf"(?<![\w.])/{name}/" for name in ("root", "work", "home", "mnt", "Users")] + [
    r"(?<![\w.])\.\./\w+/",  # a folder beside it
    r"ROOT" + r"\.parent",
]
HOST = r"^(?!\s*#).*(https?://|--(extra-)?index-url|--find-links|(^|\s)-[if]\s| @ )"  # comments may name one
LAZY = ("later", "kit.later", "importlib.import_module", "__import__")
LITTLE = {
    "env",
    "gym_client",
    "errors",
    "data.episodes",
}  # what templates may import: they are copied elsewhere


def files() -> list[Path]:
    """All files of the repository, those not yet committed too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [
        ROOT / name for name in sorted(set(listed.split("\0"))) if name and (ROOT / name).is_file()
    ]


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_no_file_names_a_path_outside_of_the_repository():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files()
        if path.suffix != ".png"
        for number, line in enumerate(lines_of(path), 1)
        if any(re.search(pattern, within(line, path)) for pattern in OUTSIDE)
    ]
    assert not found, "\n".join(found)


def within(line: str, path: Path) -> str:
    """A line without the links of a page to other files of the repository."""
    links = re.findall(r"\]\(([^)#]+)", line) if path.suffix == ".md" else []
    for link in links:
        if (target := (path.parent / link).resolve()).exists() and target.is_relative_to(ROOT):
            line = line.replace(link, "")
    return line


def test_requirements_name_no_host():
    found = [
        f"{path.name}: {line}"
        for path in files()
        if path.name.startswith("requirements")
        for line in lines_of(path)
        if re.search(HOST, line)
    ]
    assert not found, found


def test_at_the_root_are_the_five_files_and_what_belongs_beside_them():
    top = {path.relative_to(ROOT).parts[0] for path in files()}
    assert not [name for name in top if not any(fnmatch.fnmatch(name, allowed) for allowed in TOP)]
    assert {name for name in top if name.endswith(".py")} == {f"{name}.py" for name in FIVE}


def test_the_five_files_stay_readable_in_one_sitting():
    lines = {path.name: len(lines_of(path)) for path in ours() if path.parent == ROOT}
    wrong = [
        f"{name} has {count} lines, over {ONE_LINES}"
        for name, count in lines.items()
        if count > ONE_LINES
    ]
    wrong += [f"algorithm.py has {lines['algorithm.py']} lines, over {LOOP_LINES}"] * (
        lines["algorithm.py"] > LOOP_LINES
    )
    assert not wrong, "\n".join(wrong)


def ours() -> list[Path]:
    """The Python files of the root, kit/ and templates/."""
    folders = (ROOT / "kit", ROOT / "templates")
    return [
        p
        for p in files()
        if p.suffix == ".py" and (p.parent == ROOT or any(f in p.parents for f in folders))
    ]


def name_of(path: Path) -> str:
    """The dotted name of a file, within kit/ without `kit.`: env, errors, data.episodes, ..."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "kit" else parts)


def test_no_function_is_long():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in ours()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


# --- one way -------------------------------------------------------------------------------------


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, whenever and however: at its top, in a function, for types, `later`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in LAZY
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def of_ours(path: Path) -> set[str]:
    """The modules of the root and of kit/ that a file imports: env, recipe, ..."""
    kit = {name_of(p) for p in (ROOT / "kit").rglob("*.py") if p.stem != "__init__"}
    found = set()
    for name in imported(path):
        first, _, rest = name.partition(".")
        if first == "kit":  # of `from kit.x.y import z`, kit.x.y is the module
            found |= {rest, rest.rpartition(".")[0]} & kit
        elif first in (*FIVE, "templates"):
            found.add(first)
    return found


def order() -> list[str]:
    """The modules in the order of the list in kit/__init__.py; env and gym_client come first, and know none of them."""
    text = ast.get_docstring(ast.parse((ROOT / "kit" / "__init__.py").read_text())) or ""
    listed, end, _ = text.partition("env and gym_client")
    assert end, "the list of kit/__init__.py ends with `env and gym_client`"
    known = {name_of(p) for p in ours() if p.parent != ROOT / "templates"} - {"env", "gym_client"}
    names = [word for word in re.findall(r"[\w.]*\w", listed.partition(":")[2]) if word in known]
    assert len(names) == len(set(names)), f"twice in the list of kit/__init__.py: {names}"
    return ["env", "gym_client", *names]


def test_every_file_imports_only_from_those_before_it():
    places = {name: place for place, name in enumerate(order())}
    wrong = []
    for path in ours():
        name, needed = name_of(path), of_ours(path)
        if path.parent == ROOT / "templates":
            wrong += [f"templates/{path.name} imports {n}" for n in sorted(needed - LITTLE)]
        elif name not in places:  # scripts, and the __init__ of packages
            wrong += [
                f"{name}, which is not in the list of kit/__init__.py, imports {n}" for n in needed
            ]
        else:
            later = [n for n in needed if places.get(n, len(places)) >= places[name]]
            wrong += [f"{name} imports {n}" for n in sorted(later)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("env", ("torch", "verl", "ray", "vllm", "kit", "gym_client")),
        ("gym_client", ("torch", "verl", "ray", "vllm", "kit", "env")),
        ("training", ("aiohttp", "httpx", "vllm", "gym_client", "inference")),
    ],
)
def test_what_can_be_lifted_out_alone_knows_nothing_of_the_rest(name, never):
    assert not {module.partition(".")[0] for module in imported(ROOT / f"{name}.py")} & set(never)
