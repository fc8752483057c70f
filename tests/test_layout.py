"""Tests that the repository stands alone, and what its five root files import.

import-linter checks the order of the packages, and deptry the requirements (pyproject.toml).
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.recipes import ROOT

# Paths of one machine, or outside the repository. They are written so that they do not match here.
FOREIGN_PATHS = [rf"(?<![\w.])/{name}/" for name in ("root", "work", "home", "mnt", "Users")]
FOREIGN_PATHS += [r"(?<![\w.])\.\./\w+/", r"ROOT" + r"\.parent"]
# A URL or a local path in a requirements file. Comments may contain one.
HOST = r"^(?!\s*#).*(https?://|--(extra-)?index-url|--find-links|(^|\s)-[if]\s| @ )"


def list_files() -> list[Path]:
    """List all files of the repository, also those that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = [ROOT / name for name in sorted(set(listed.split("\0"))) if name]
    return [path for path in paths if path.is_file()]


def remove_local_links(line: str, path: Path) -> str:
    """Return a line of a page without its links to other files of the repository."""
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
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            text = remove_local_links(line, path)
            if any(re.search(pattern, text) for pattern in FOREIGN_PATHS):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not problems, "\n".join(problems)


def test_requirements_name_no_host():
    problems = []
    for path in ROOT.glob("requirements*"):
        lines = [line for line in path.read_text().splitlines() if re.search(HOST, line)]
        problems += [f"{path.name}: {line}" for line in lines]
    assert not problems


def list_top_imports(name: str) -> set[str]:
    """Return the first names of what a root file imports outside of its functions."""
    names = set()
    for node in ast.parse((ROOT / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    return names


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("env", {"torch", "verl", "ray", "vllm", "kit", "gym_client"}),
        ("gym_client", {"torch", "verl", "ray", "vllm", "kit", "env"}),
        ("training", {"aiohttp", "httpx", "vllm", "gym_client", "inference"}),
        ("inference", {"training"}),
    ],
)
def test_a_root_file_does_not_import_forbidden_modules(name, forbidden):
    """env.py and gym_client.py can be copied alone. Only commands of env.py import the kit."""
    assert not list_top_imports(name) & forbidden


def test_the_lock_file_of_gpus_has_what_requirements_txt_lists():
    locked = (ROOT / "requirements-gpu.txt").read_text()
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [re.sub(r"\[.*\]|#.*", "", line).strip() for line in lines if "==" in line]
    assert [pin for pin in pins if pin and f"\n{pin} \\\n" not in locked] == []


def list_commands(target: str) -> str:
    """Return the commands of a target that was not made before. They are not run."""
    command = ["make", "-n", "-B", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_commands_for_gpus_and_cpus_use_separate_environments():
    assert not re.findall(r"\.venv/\S*", list_commands("math"))
    assert not re.findall(r"\.venv-(?:gpu|uv)\S*", list_commands("test"))
