"""Environments for Gym servers with more requirements: what is installed, and a failed install."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import ROOT

from kit.extras import gym_environments
from kit.gym import process_specs
from kit.gym.network import GymStartError

SITE_PACKAGES = next(ROOT.glob(".venv-gym/lib/python3*/site-packages"))


def test_a_failed_install_leaves_nothing(tmp_path, monkeypatch):
    python = tmp_path / ".venv-gym" / "bin" / "python"
    for folder in ("bin", "lib"):
        (tmp_path / ".venv-gym").mkdir(exist_ok=True)
        (tmp_path / ".venv-gym" / folder).symlink_to(ROOT / ".venv-gym" / folder)
    original = subprocess.run
    calls = []

    def run(command, **settings):
        calls.append(command[1:3])
        if command[1:3] == ["pip", "install"] and "--no-deps" not in command:
            text = "No solution found\nbecause of a reason"
            return subprocess.CompletedProcess(command, 1, "", text)
        if command[1] == "venv":
            return original(command, **settings)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gym_environments.subprocess, "run", run)
    problem = (
        r"gym\.servers\.x\.start\.install: no environment for asr_with_pc: .*because of a reason"
    )
    with pytest.raises(GymStartError, match=problem):
        process_specs.resolve_python(
            "x", {"python": str(python), "server": "asr_with_pc", "install": True}
        )
    assert calls[-1] == ["pip", "install"]
    assert not list((tmp_path / ".venv-gym-servers").iterdir())
    with pytest.raises(
        gym_environments.InstallError, match=r"no such resources server; nearest are .*mcqa"
    ):
        gym_environments.install_environment("mcqaa", str(python))


def test_a_requirement_from_git_is_not_installed_from_pypi():
    lines = gym_environments.read_requirements(SITE_PACKAGES / "resources_servers" / "code_fim")
    assert any(line.startswith("human-eval-infilling@ git+https://") for line in lines)
    assert not [line for line in lines if "nemo-gym" in line]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('{git = "https://x/a.git"}', "my-pkg[fast]@ git+https://x/a.git"),
        ('{git = "https://x/a.git", rev = "0123abc"}', "my-pkg[fast]@ git+https://x/a.git@0123abc"),
        ('{git = "https://x/a.git", tag = "v1"}', "my-pkg[fast]@ git+https://x/a.git@v1"),
        (
            '{git = "https://x/a.git", branch = "b", subdirectory = "c"}',
            "my-pkg[fast]@ git+https://x/a.git@b#subdirectory=c",
        ),
        ('{url = "https://x/a.whl"}', "my-pkg[fast]@ https://x/a.whl"),
        ('{index = "theirs"}', "index': 'theirs'}, which is not supported"),
        ('{git = "https://x/a.git", rev = "1", branch = "b"}', "which is not supported"),
        ('[{git = "https://x/a.git", marker = "x"}]', "which is not supported"),
    ],
    ids=str,
)
def test_a_package_comes_from_the_source_and_revision_that_its_server_names(source, line, tmp_path):
    dependencies = (
        'dependencies = ["nemo-gym[dev]", "My_Pkg[fast]>=1", "other==2; python_version > \'3\'"]'
    )
    sources = f'[tool.uv.sources]\nmy-pkg = {source}\nnemo-gym = {{path = "../.."}}'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{dependencies}\n{sources}\n")
    if "not supported" in line:
        with pytest.raises(gym_environments.InstallError, match=re.escape(line)):
            gym_environments.read_requirements(tmp_path)
    else:
        package, other = gym_environments.read_requirements(tmp_path)
        assert package.lower().replace("_", "-") == line
        assert other == "other==2; python_version > '3'"
