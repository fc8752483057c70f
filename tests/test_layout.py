"""Tests that the repository stands alone and that its packages import in one direction."""

from __future__ import annotations

import ast
import fnmatch
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.recipes import ROOT, SOURCES

ROOT_MODULES = ("algorithm", "inference", "training", "env", "gym_client")
# File and folder names that may exist in the root.
ROOT_NAMES = (
    *(f"{name}.py" for name in ROOT_MODULES),
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "requirements*",
    "scripts",
    "benchmarks",
    "configs",
    "docs",
    "kit",
    "extras",
    "lab",
    "mkdocs.yml",
    "templates",
    "tests",
)
# A part imports only from the parts before it, and from the same folder.
PARTS = (
    ("kit.errors",),
    ("kit.features",),
    ("env",),
    ("gym_client",),
    ("kit.config",),
    ("kit.data",),
    ("kit.gym",),
    ("kit.rollout",),
    ("training", "inference"),
    ("kit.runs",),
    ("algorithm",),
)
# Templates are copied to other projects, so they import little.
TEMPLATE_IMPORTS = {
    "env",
    "gym_client",
    "kit.errors",
    "kit.config.python_files",
    "kit.data.episode",
    "kit.data.selection",
}
# Names of extras that are also common words in code, or keys of a recipe.
COMMON_NAMES = {"backends", "images", "judges", "monitor", "one_step_off"}
COMMON_NAMES |= {"shadow_verifier"}
VALUES = {  # other names of extras in a module, with another meaning
    "kit.config.checks": {"gloo"},  # verl's name of a checkpoint engine
    "kit.config.load": {"megatron"},  # verl's name of a training engine
    "kit.config.numbers": {"megatron"},
    "kit.config.recipe": {"megatron"},
    "kit.data.verl_rows": {"sft"},  # the command, in a hint
    "kit.runs.cli": {"sft"},  # the command, in the help
}
# Paths of one machine, or outside the repository. They are written so that they do not match here.
FOREIGN_PATHS = [rf"(?<![\w.])/{name}/" for name in ("root", "work", "home", "mnt", "Users")]
FOREIGN_PATHS += [r"(?<![\w.])\.\./\w+/", r"ROOT" + r"\.parent"]
# A URL or a local path in a requirements file. Comments may contain one.
HOST = r"^(?!\s*#).*(https?://|--(extra-)?index-url|--find-links|(^|\s)-[if]\s| @ )"


def list_files() -> list[Path]:
    """All files of the repository, also those that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = [ROOT / name for name in sorted(set(listed.split("\0"))) if name]
    return [path for path in paths if path.is_file()]


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# --- the repository needs no other folder --------------------------------------------------------


def remove_local_links(line: str, path: Path) -> str:
    """A line of a page without its links to other files of the repository."""
    links = re.findall(r"\]\(([^)#]+)", line) if path.suffix == ".md" else []
    for link in links:
        target = (path.parent / link).resolve()
        if target.exists() and target.is_relative_to(ROOT):
            line = line.replace(link, "")
    return line


def test_no_file_names_a_path_outside_the_repository():
    problems = []
    for path in list_files():
        if path.suffix == ".png":
            continue
        for number, line in enumerate(read_lines(path), 1):
            text = remove_local_links(line, path)
            if any(re.search(pattern, text) for pattern in FOREIGN_PATHS):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not problems, "\n".join(problems)


def test_requirements_name_no_host():
    problems = []
    for path in list_files():
        if path.name.startswith("requirements"):
            lines = [line for line in read_lines(path) if re.search(HOST, line)]
            problems += [f"{path.name}: {line}" for line in lines]
    assert not problems, problems


def test_the_root_has_only_known_files_and_folders():
    top = {path.relative_to(ROOT).parts[0] for path in list_files()}
    unknown = [
        name for name in top if not any(fnmatch.fnmatch(name, pattern) for pattern in ROOT_NAMES)
    ]
    assert not unknown
    files = {name for name in top if name.endswith(".py")}
    assert files == {f"{name}.py" for name in ROOT_MODULES}


def test_no_folder_of_a_script_has_a_module_with_a_standard_library_name():
    """`python kit/x/script.py` puts kit/x first on sys.path.

    There, a file platform.py would replace Python's module `platform`.
    """
    texts = [p.read_text() for p in list_files() if p.suffix in ("", ".md", ".py", ".yaml")]
    names = re.findall(r"python\S* ((?:[\w-]+/)+\w+\.py)", "\n".join(texts))
    scripts = {ROOT / name for name in names}
    assert ROOT / "benchmarks" / "step.py" in scripts
    hiding = []
    for script in scripts:
        paths = script.parent.glob("*.py")
        hiding += [path for path in paths if path.stem in sys.stdlib_module_names]
    assert not hiding


# --- packages import in one direction ------------------------------------------------------------


def get_module_name(path: Path) -> str:
    """The dotted name of a file, such as env, kit.data.episode or extras.judges."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def list_imports(path: Path) -> Iterator[str]:
    """The dotted name of each import of a file, at its top and in functions.

    The functions of kit/features.py import optional features, and its hooks have types of all
    parts, which only mypy imports. So of this file only the imports at its top count.
    """
    tree = ast.parse(path.read_text())
    for node in tree.body if path == FEATURES else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports must be absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)


FEATURES = ROOT / "kit" / "features.py"
MODULES = {get_module_name(path): path for path in SOURCES}


@functools.cache
def list_project_imports(path: Path) -> frozenset[str]:
    """The modules of this repository that a file imports, without the packages above them."""
    names = {name for name in list_imports(path) if name in MODULES}
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    # `from extras.judges import judge_proxy` does not use the package extras.judges
    own = {"kit", get_module_name(path)}
    return frozenset(names - packages - own)


def find_part(name: str) -> int | None:
    """The index of a module's part in PARTS. None for modules of lab, extras and cpu."""
    for position, members in enumerate(PARTS):
        for member in members:
            if name == member or name.startswith(f"{member}."):
                return position
    return None


def test_core_modules_import_only_from_parts_before_them():
    problems = []
    for name, path in MODULES.items():
        position = find_part(name)
        if position is None or name == "kit":
            continue
        for other in list_project_imports(path):
            other_position = find_part(other)
            is_same_folder = position == other_position and name.startswith("kit.")
            is_before = other_position is not None and other_position < position
            if not (is_before or is_same_folder):
                problems.append(f"{name} imports {other}")
    assert problems == []


def test_no_import_cycles():
    graph = {name: list_project_imports(path) for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


class RemoveTexts(ast.NodeTransformer):
    """Removes docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def test_only_the_table_of_features_names_an_extra():
    extras = {path.stem for path in (ROOT / "extras").iterdir()} - {"__init__", "__pycache__"}
    assert {"sft", "megatron", "policy_programs", "gloo"} <= extras
    assert extras > COMMON_NAMES
    problems = []
    for name, path in MODULES.items():
        if find_part(name) is None or path == FEATURES:
            continue
        text = path.read_text()
        code = ast.unparse(RemoveTexts().visit(ast.parse(text)))
        words = set(re.findall(r"\w+", code)) - COMMON_NAMES - VALUES.get(name, set())
        paths = re.findall(r"\bextras[./]\w+", text)
        problems += [f"{name}: {found}" for found in (*paths, *sorted(words & extras))]
    assert problems == []


def test_only_the_table_of_features_names_a_module_of_the_lab():
    problems = []
    for name, path in MODULES.items():
        if not name.startswith("lab") and path != FEATURES:
            problems += [f"{name}: {found}" for found in list_imports(path) if found == "lab"]
            problems += [name] * bool(re.search(r"\blab[./]\w+", path.read_text()))
    assert problems == []


def test_extras_do_not_import_each_other():
    problems = []
    for name, path in MODULES.items():
        if not name.startswith(("extras.", "kit.cpu.")):
            continue
        folder = ".".join(name.split(".")[:2])
        for other in list_project_imports(path):
            if other.startswith("extras.") and not f"{other}.".startswith(f"{folder}."):
                problems.append(f"{name} imports {other}")
    assert problems == []


def test_templates_import_only_a_few_modules():
    for path in (ROOT / "templates").glob("*.py"):
        assert list_project_imports(path) <= TEMPLATE_IMPORTS, path


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("env", ("torch", "verl", "ray", "vllm", "gym_client")),
        ("gym_client", ("torch", "verl", "ray", "vllm", "kit", "env")),
        ("training", ("aiohttp", "httpx", "vllm", "gym_client", "inference")),
        ("inference", ("training",)),
    ],
)
def test_a_root_file_does_not_import_forbidden_modules(name, forbidden):
    imported = {module.partition(".")[0] for module in list_imports(ROOT / f"{name}.py")}
    assert not imported & set(forbidden)


def test_env_imports_the_kit_only_inside_functions():
    """Only commands such as `python env.py check` need kit/. Tasks and rendering do not."""
    tree = ast.parse((ROOT / "env.py").read_text())
    for node in tree.body:
        names = [alias.name for alias in getattr(node, "names", [])]
        assert not any(name.startswith("kit") for name in [*names, getattr(node, "module", "")])
