"""The scripts with which `make math` prepares a GPU node. They print a line for each problem."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private.services import determine_plasma_store_config
from ray._private.utils import resolve_object_store_memory

from kit.config.load import load_config
from kit.config.recipe import freeze
from kit.extras.preflight import gpus, memory
from kit.extras.preflight import node as node_checks
from kit.extras.preflight.memory import GIB
from tests.helpers import nodes
from tests.helpers.nodes import qwen
from tests.helpers.recipes import ROOT

FOLDER = ROOT / "kit" / "extras" / "preflight"


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
    for name in ("cc", "python3"):
        write_program(tmp_path, name, "exit 0")
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
        ({"compute_cap": "7.5"}, "a GPU has compute capability 7.5. Use GPUs of 8.0"),
        ({"memory_total": "24564"}, "a GPU has 23 GiB, and configs/math.yaml needs 38. Run: make"),
        ({"memory_used": "70000"}, "another process uses 68 GiB of a GPU. End it"),
    ],
)
def test_each_problem_of_the_gpus_is_one_line(node, values, line):
    nodes.write_nvidia_smi(node, gpus=2, **values)
    done = run_script("check_gpu_node.sh", node)
    assert done.returncode == 1 and done.stdout.startswith(f"missing: {line}")
    assert len(done.stdout.splitlines()) == 1 and not done.stderr


def test_each_problem_of_the_machine_is_one_line(node):
    write_free_space(node, disk_gib=7, shared_gib=0)
    write_program(node, "uname", "echo aarch64")
    write_program(node, "getconf", "echo glibc 2.17")
    for name in ("cc", "python3"):
        write_program(node, name, "exit 1")
    done = run_script("check_gpu_node.sh", node)
    beginnings = [
        "requirements-gpu.txt is for x86_64, and this machine is aarch64. Compile it",
        "glibc 2.17; the packages need",
        "no C compiler that works: Triton and vLLM compile at their start. Run: apt-get",
        "no python3 with venv, which installs uv. Run: apt-get install python3-venv",
        f"7 GiB are free in {node}, of 40. Free some, or",
        "0 GiB are free in /dev/shm, of 1. Start the container with --shm-size=32g",
    ]
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and len(lines) == len(beginnings) and not done.stderr
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"missing: {beginning}")


@pytest.mark.parametrize(("force", "status"), [("", 1), ("0", 1), ("1", 0)])
def test_force_continues_although_something_is_missing(node, force, status):
    """With CUDA's forward compatibility package, a driver before 580 is enough."""
    nodes.write_nvidia_smi(node, driver_version="535.183.01", compute_cap="7.5")
    done = run_script("check_gpu_node.sh", node, FORCE=force)
    assert done.returncode == status and len(done.stdout.splitlines()) == 2
    assert done.stdout.startswith("missing: NVIDIA driver 535.183.01 is too old")
    assert "forward compatibility package, and set FORCE=1." in done.stdout


def test_force_does_not_train_without_a_gpu(node):
    write_program(node, "nvidia-smi", "exit 9")
    assert run_script("check_gpu_node.sh", node, FORCE="1").returncode == 1


def read_number(name: str) -> int:
    """Read a constant of check_gpu_node.sh."""
    script = (FOLDER / "check_gpu_node.sh").read_text()
    return int(re.findall(rf"^{name}=(\d+)", script, re.MULTILINE)[0])


def test_the_disk_has_room_for_all_files_of_make_math(monkeypatch):
    """The script's number is the sum of the installed files and of all that the run writes."""
    recipe = freeze(*load_config(["math", "warm_math"], []))
    model = qwen("0.5B")
    monkeypatch.setattr(node_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    (line,) = node_checks.check_disk(recipe, model)
    checkpoints = float(re.search(r"take ([0-9.]+) GiB", line)[1])
    episodes = recipe.trainer.total_training_steps * 8 * recipe.data.train_batch_size
    rollouts = episodes * 340 / 1000 * 20 / 2**20  # 20 KiB per 1,000 tokens
    weights = memory.count_parameters(model).model / GIB
    environments = (9.7e9 + 1.2e9) / GIB  # as the Makefile says
    total = environments + 2 * weights + 4 * weights + checkpoints + rollouts
    assert total < read_number("MIN_DISK_GIB") < total + 6


@pytest.mark.parametrize("gib_of_memory", [16, 128, 2048])
def test_with_the_advised_shared_memory_rays_object_store_stays_in_memory(
    monkeypatch, gib_of_memory, tmp_path
):
    """With 8 GiB, Ray writes objects to its temporary folder on a machine with much memory."""
    advice = (FOLDER / "check_gpu_node.sh").read_text().partition("--shm-size=")[2]
    size = int(advice.partition("g")[0]) * GIB
    monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: size)
    monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: gib_of_memory * GIB)
    store = resolve_object_store_memory(gib_of_memory * GIB)
    folder, *_ = determine_plasma_store_config(store, str(tmp_path))
    assert folder == "/dev/shm"


def test_the_scripts_and_python_require_the_same_driver():
    assert read_number("MIN_DRIVER") == gpus.MIN_DRIVER


def test_without_a_gpu_the_command_for_a_cpu_is_printed(node):
    write_program(node, "nvidia-smi", "exit 9")
    done = run_script("check_gpu_node.sh", node)
    assert done.stdout == "nvidia-smi -L lists no GPU. On a CPU, run: make demo\n"
    assert done.returncode == 1


def test_only_visible_gpus_are_checked(node):
    write_program(
        node,
        "nvidia-smi",
        'case "$*" in -L) echo "GPU 0: x" ;; *--id=1*memory.used*) echo 70000 ;; '
        "*memory.total*) echo 81559 ;; *driver*) echo 580.1 ;; *) echo 9.0 ;; esac",
    )
    assert run_script("check_gpu_node.sh", node).returncode == 0
    busy = run_script("check_gpu_node.sh", node, CUDA_VISIBLE_DEVICES="1")
    assert "another process uses 68 GiB" in busy.stdout


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_headers", [True, False])
def test_the_systems_python_is_used_if_it_has_headers(node, has_headers):
    """Triton compiles against the headers. The Python of uv has them."""
    write_program(node, "python3.12", f"exit {int(not has_headers)}")
    write_program(node, "uv", 'test "$2" = install || echo /of/uv/python3.12')
    done = run_script("find_python.sh", node, str(node / "uv"))
    expected = str(node / "python3.12") if has_headers else "/of/uv/python3.12"
    assert (done.returncode, done.stdout.strip()) == (0, expected)


def test_without_python_312_the_package_to_install_is_printed(node):
    write_program(node, "python3.12", "exit 1")
    write_program(node, "uv", "exit 1")
    done = run_script("find_python.sh", node, str(node / "uv"))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "apt-get install python3.12-dev" in done.stderr


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


def test_a_wheel_that_cannot_be_downloaded_is_one_line_and_nothing_is_compiled(environment):
    done = install_flash_attn(environment, UV_STATUS="1")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert "Run: make math FLASH_ATTN=that-file.whl (or FLASH_ATTN=build, one hour)" in done.stdout
    assert "Until then torch computes its part, and recipes that need it are ref" in done.stdout
    assert "--no-build-isolation" not in "".join(read_calls(environment))


def test_an_installed_flash_attn_is_kept(environment):
    write_program(environment / "venv" / "bin", "python", "exit 0")
    assert install_flash_attn(environment, "build").returncode == 0 and not read_calls(environment)


def test_it_is_compiled_only_on_request_and_for_the_gpus_of_this_machine(environment):
    (environment / "cuda" / "bin").mkdir(parents=True)
    write_program(environment / "cuda" / "bin", "nvcc", 'echo "Cuda, release 13.0, V13.0.88"')
    write_program(
        environment, "uv", 'echo "$@" "$FLASH_ATTN_CUDA_ARCHS" "$MAX_JOBS" "$CUDA_HOME" >> calls'
    )
    write_program(environment, "nproc", "echo 64")
    cuda = str(environment / "cuda")
    assert install_flash_attn(environment, "build", CUDA_HOME=cuda).returncode == 0
    assert read_calls(environment)[-1].endswith(
        f"--no-build-isolation flash-attn==2.8.3 90 16 {cuda}"
    )


def test_a_compiler_of_another_cuda_version_is_one_line(environment):
    (environment / "cuda" / "bin").mkdir(parents=True)
    write_program(environment / "cuda" / "bin", "nvcc", 'echo "Cuda, release 12.4, V12.4.1"')
    done = install_flash_attn(environment, "build", CUDA_HOME=str(environment / "cuda"))
    assert done.returncode == 1 and not read_calls(environment)
    assert done.stdout.startswith("missing: ") and len(done.stdout.splitlines()) == 1


def test_a_file_that_the_user_gives_is_installed(environment):
    assert install_flash_attn(environment, "mine.whl").returncode == 0
    assert read_calls(environment)[0].endswith("mine.whl")
    assert install_flash_attn(environment, "mine.whl", UV_STATUS="1").returncode == 1
