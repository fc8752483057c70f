"""The scripts with which `make math` prepares a GPU node. They print a line for each problem."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from extras.preflight import gpus
from tests.helpers import nodes
from tests.helpers.recipes import ROOT

FOLDER = ROOT / "extras" / "preflight"


def write_program(folder: Path, name: str, body: str) -> None:
    """Write a shell script that stands in for a program."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def run_script(name: str, folder: Path, *arguments: str, **variables: str):
    """Run a script with the programs of a folder first on the PATH."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    return subprocess.run(
        ["bash", str(FOLDER / name), *arguments],
        env={**environment, "PATH": path, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def write_free_space(folder: Path, disk_gib: int, shared_gib: int) -> None:
    """Write a `df` that reports this free space in a folder and in /dev/shm."""
    write_program(
        folder,
        "df",
        f"gib={disk_gib}; if [ ${{!#}} = /dev/shm ]; then gib={shared_gib}; fi\n"
        "echo Avail; echo $((gib * 1024 ** 3))",
    )


@pytest.fixture
def node(tmp_path) -> Path:
    """A folder with stand-ins for the programs of a node without problems."""
    nodes.write_nvidia_smi(tmp_path, gpus=8)
    write_free_space(tmp_path, disk_gib=100, shared_gib=16)
    write_program(tmp_path, "cc", "exit 0")
    return tmp_path


def test_a_node_without_problems_prints_nothing(node):
    done = run_script("check_gpu_node.sh", node)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"driver_version": "550.54.14"},
            "NVIDIA driver 550.54.14 is too old for CUDA 13. Install",
        ),
        ({"memory_total": "24564"}, "a GPU has 23 GiB, and configs/math.yaml needs 38. Run: make"),
    ],
)
def test_each_problem_of_the_gpus_is_one_line(node, values, line):
    nodes.write_nvidia_smi(node, gpus=2, **values)
    done = run_script("check_gpu_node.sh", node)
    assert done.returncode == 1 and done.stdout.startswith(f"missing: {line}")
    assert len(done.stdout.splitlines()) == 1 and not done.stderr


def test_each_problem_of_the_machine_is_one_line(node):
    write_free_space(node, disk_gib=7, shared_gib=0)
    write_program(node, "cc", "exit 1")
    done = run_script("check_gpu_node.sh", node)
    beginnings = [
        "no C compiler that works: Triton and vLLM compile at their start. Run: apt-get",
        f"7 GiB are free in {node}, of 40. Free some, or",
        "0 GiB are free in /dev/shm, of 1. Start the container with --shm-size=32g",
    ]
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and len(lines) == len(beginnings) and not done.stderr
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"missing: {beginning}")


@pytest.mark.parametrize(("force", "status"), [("0", 1), ("1", 0)])
def test_force_continues_although_something_is_missing(node, force, status):
    """With CUDA's forward compatibility package, a driver before 580 is enough."""
    nodes.write_nvidia_smi(node, driver_version="535.183.01")
    done = run_script("check_gpu_node.sh", node, FORCE=force)
    assert done.returncode == status
    assert done.stdout.startswith("missing: NVIDIA driver 535.183.01 is too old")


def test_the_scripts_and_python_require_the_same_driver():
    script = (FOLDER / "check_gpu_node.sh").read_text()
    assert int(re.findall(r"^MIN_DRIVER=(\d+)", script, re.MULTILINE)[0]) == gpus.MIN_DRIVER


# --- flash-attn ----------------------------------------------------------------------------------


@pytest.fixture
def environment(node) -> Path:
    """An environment without flash-attn, and a `uv` that writes its arguments to a file."""
    (node / "venv" / "bin").mkdir(parents=True)
    write_program(node / "venv" / "bin", "python", "exit 1")
    write_program(node, "uv", 'echo "$@" >> calls; exit ${UV_STATUS:-0}')
    return node


def install_flash_attn(environment: Path, choice: str = "", **variables: str):
    """Run the script with the value of FLASH_ATTN: a file, `build` or nothing."""
    return run_script("flash_attn.sh", environment, "./uv", "venv", choice, **variables)


def read_calls(environment: Path) -> list[str]:
    """Read the arguments of each call of `uv`."""
    path = environment / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_flash_attn_is_installed_from_a_wheel_for_these_versions(environment):
    done = install_flash_attn(environment)
    assert (done.returncode, done.stdout) == (0, "")
    (call,) = read_calls(environment)
    assert call.endswith("flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl") and "--no-deps" in call
