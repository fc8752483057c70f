"""Tests that `make` installs the tested packages: each has a version and a hash."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.helpers.recipes import ROOT

# Packages from several sources with different files: PyTorch's index and a folder (Makefile).
WITHOUT_HASH = {
    "requirements-cpu.txt": ["torch"],
    "requirements-gym.txt": [],
    "requirements-gpu.txt": [],
    "requirements-docs.txt": [],
}
MIN_PACKAGES = {"requirements-docs.txt": 25}  # all others have 101


def list_packages(name):
    """List the lines of a file, one for each package."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("name", WITHOUT_HASH)
def test_every_package_has_its_hash(name):
    packages = list_packages(name)
    assert len(packages) >= MIN_PACKAGES.get(name, 101)
    assert not [line for line in packages if not re.match(r"[\w.-]+==[\w.+]+", line)]
    unhashed = [
        line.partition("==")[0]
        for line in packages
        if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", line)
    ]
    assert unhashed == WITHOUT_HASH[name]


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
