"""What `make` installs is what was tested: each package by its version and its hash."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

# of two places that may have different files: PyTorch's index and a folder (Makefile)
WITHOUT_HASH = {"requirements-cpu.txt": ["torch"], "requirements-gym.txt": []}
WITHOUT_HASH["requirements-gym-0.4.0.txt"] = []


def list_packages(name):
    """List the lines of a file, one for each package."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("name", WITHOUT_HASH)
def test_every_package_has_its_hash(name):
    packages = list_packages(name)
    assert len(packages) > (0 if name == "requirements-gym-0.4.0.txt" else 100)
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
