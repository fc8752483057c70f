"""What `make` installs is what was tested: each package by its version and its hash."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import ROOT

# of two places that may have different files: PyTorch's index and a folder (Makefile)
WITHOUT_HASH = {
    "requirements-cpu.txt": ["torch"],
    "requirements-gym.txt": [],
    "requirements-gym-0.4.0.txt": [],
    "requirements-gpu.txt": [],
    "requirements-docs.txt": [],
}
MIN_PACKAGES = {"requirements-gym-0.4.0.txt": 1, "requirements-docs.txt": 25}  # the others: 101


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


def test_gym_0_4_0_changes_only_packages_that_0_7_0_has():
    """`make gym GYM=0.4.0` installs both files, one after the other, without dependencies."""
    newest = {line.partition("==")[0] for line in list_packages("requirements-gym.txt")}
    older = {line.partition("==")[0] for line in list_packages("requirements-gym-0.4.0.txt")}
    assert older <= newest


def test_the_lock_file_of_gpus_has_what_requirements_txt_lists():
    locked = (ROOT / "requirements-gpu.txt").read_text()
    lines = [
        line.partition("#")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()
    ]
    pins = [re.sub(r"\[.*\]", "", line).strip() for line in lines if "==" in line]
    assert len(pins) > 10
    assert not [pin for pin in pins if f"\n{pin} \\\n" not in locked]
    assert "\ncupy-cuda13x==14.0.1 \\\n" in locked  # of verl's extra cupy-cu130


def list_commands(target: str) -> str:
    """The commands of a target that is made for the first time, without running them."""
    command = ["make", "-n", "-B", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_environments_of_cpu_and_gpu_leave_each_other_alone():
    on_gpus, on_cpus = list_commands("math"), list_commands("test")
    assert "-r requirements-gpu.txt" in on_gpus and "-r requirements-cpu.txt" in on_cpus
    assert not re.findall(r"\.venv/\S*", on_gpus)
    assert not re.findall(r"\.venv-(?:gpu|uv)\S*", on_cpus)
