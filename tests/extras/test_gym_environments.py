"""Python environments for Gym servers with extra requirements: their packages, failed installs."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from extras import gym_environments
from kit.recipe.schema import ServerStart
from kit.verify import process_specs
from kit.verify.network import GymStartError
from tests.helpers.recipes import GYM_PYTHON, ROOT

SITE_PACKAGES = next(ROOT.glob(".venv-gym/lib/python3*/site-packages"))


def test_a_failed_install_leaves_nothing(tmp_path, monkeypatch):
    python = tmp_path / ".venv-gym" / "bin" / "python"
    for folder in ("bin", "lib", "pyvenv.cfg"):
        (tmp_path / ".venv-gym").mkdir(exist_ok=True)
        (tmp_path / ".venv-gym" / folder).symlink_to(ROOT / ".venv-gym" / folder)
    original = subprocess.run
    calls = []

    def run(command, **settings):
        calls.append(command[2:4])
        if command[2:4] == ["pip", "install"] and "--no-deps" not in command:
            text = "No solution found\nbecause of a reason"
            return subprocess.CompletedProcess(command, 1, "", text)
        if command[2] == "venv":
            return original(command, **settings)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gym_environments.subprocess, "run", run)
    problem = (
        r"gym\.servers\.x\.start\.install: no environment for asr_with_pc: .*because of a reason"
    )
    with pytest.raises(GymStartError, match=problem):
        process_specs.resolve_python(
            "x", ServerStart(python=str(python), server="asr_with_pc", install=True)
        )
    assert calls[-1] == ["pip", "install"]
    left = [path.name for path in (tmp_path / ".venv-gym-servers").iterdir()]
    assert left == [".asr_with_pc.lock"]
    with pytest.raises(GymStartError, match="no such resources server"):
        gym_environments.install_environment("mcqaa", str(python))


def test_two_runs_build_an_environment_once(tmp_path, monkeypatch):
    """The second waits for the first. Otherwise it would delete what the first runs from."""
    python = tmp_path / ".venv-gym" / "bin" / "python"
    python.parent.mkdir(parents=True)
    built = []

    def build(final, python, base, packages, contents):
        built.append(final.name)
        time.sleep(0.3)
        (final / "bin").mkdir(parents=True)
        (final / "installed.txt").write_text(contents)

    monkeypatch.setattr(gym_environments, "build", build)
    monkeypatch.setattr(process_specs, "find_package", lambda _: SITE_PACKAGES)
    monkeypatch.setattr(
        process_specs, "environment_folder", lambda server, _: tmp_path / "servers" / server
    )
    with ThreadPoolExecutor() as pool:
        folders = list(
            pool.map(gym_environments.install_environment, ["mcqa"] * 2, [str(python)] * 2)
        )
    assert built == ["mcqa"] and len(set(folders)) == 1


def test_a_server_uses_its_environment_once_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(process_specs, "environment_folder", lambda *_: tmp_path)
    monkeypatch.setattr(process_specs, "PYTHON", str(GYM_PYTHON))
    assert process_specs.resolve_python("mcqa", ServerStart()) == str(GYM_PYTHON)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert process_specs.resolve_python("mcqa", ServerStart()) == str(tmp_path / "bin" / "python")


def test_a_requirement_with_another_source_is_not_installed_from_pypi():
    with pytest.raises(GymStartError, match="human-eval-infilling"):
        gym_environments.read_requirements(SITE_PACKAGES / "resources_servers" / "code_fim")


def test_a_requirement_with_a_relative_path_is_relative_to_the_folder_of_the_server(tmp_path):
    lines = ["# a comment", "-e nemo-gym[dev] @ ../../", "-e ../../", "a>=1  # why", "-e ./lib[b]"]
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    assert gym_environments.read_requirements(tmp_path) == ["a>=1", f"{tmp_path}/lib[b]"]


def test_the_packages_of_gyms_extra_named_sandbox_are_installed_if_a_server_needs_it():
    servers = SITE_PACKAGES / "resources_servers"
    packages = "\n".join(gym_environments.read_requirements(servers / "job_bench"))
    assert "opensandbox>=0.1.15" in packages and "mammoth>=1.13.0" in packages
    assert "opensandbox" not in "\n".join(gym_environments.read_requirements(servers / "moldetox"))
