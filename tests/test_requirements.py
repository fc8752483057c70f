"""What `make` installs is what was tested: each package by its version and its hash."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

# of two places that may have different files: PyTorch's index and a folder (Makefile)
WITHOUT_HASH = {"requirements-cpu.txt": ["torch"], "requirements-gym.txt": []}


@pytest.mark.parametrize("name", WITHOUT_HASH)
def test_every_package_has_its_hash(name):
    text = (ROOT / name).read_text().replace("\\\n", " ")
    packages = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert len(packages) > 100
    assert not [line for line in packages if not re.match(r"[\w.-]+==[\w.+]+", line)]
    unhashed = [
        line.partition("==")[0]
        for line in packages
        if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", line)
    ]
    assert unhashed == WITHOUT_HASH[name]
