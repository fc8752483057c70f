"""Make an environment for one Gym server that requires more packages than `make gym` installs.

    python -m kit.verify.servers install NAME
    gym.servers.NAME.start.install: true      (in a recipe)

The environment is .venv-gym-servers/NAME, next to .venv-gym, which has nemo-gym. It has the
packages of that one (uv uses hard links) and a link to its nemo-gym. It also has the packages that
the server's requirements.txt or pyproject.toml lists, as Gym installs them. It is built under a
temporary name and renamed when it is complete. It is reused until the list changes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from kit.recipe.keys import make_command
from kit.verify import process_specs
from kit.verify.network import GymStartError

TIMEOUT_S = 3600.0  # for one call of uv, which may download gigabytes


def install_environment(server: str, python: str) -> Path:
    """Make the environment of `server` if necessary, and return its interpreter.

    python: the interpreter that has nemo-gym. Raises GymStartError.
    """
    base = process_specs.find_package(python)
    if base is None:
        raise GymStartError(
            f"no environment for {server}: {python} has no nemo-gym. To install it, run "
            f"`{make_command('gym')}`."
        )
    folder = base / "resources_servers" / server
    if not (folder / "app.py").is_file():
        raise GymStartError(f"no environment for {server}: nemo-gym has no such resources server.")
    final = process_specs.environment_folder(server, base)
    packages = read_requirements(folder)
    contents = "\n".join([*process_specs.list_versions(base), *packages]) + "\n"
    final.parent.mkdir(parents=True, exist_ok=True)
    with final.with_name(f".{server}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be building it
        marker = final / "installed.txt"
        if not marker.is_file() or marker.read_text() != contents:
            build(final, python, base, packages, contents)
    return final / "bin" / "python"


def build(final: Path, python: str, base: Path, packages: list[str], contents: str) -> None:
    """Build an environment next to `final`, and move it there. Raises GymStartError."""
    folder = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        run_uv("venv", "--relocatable", "--clear", "--python", python, str(folder))
        install_packages(folder, python, base, packages)
        (folder / "installed.txt").write_text(contents)
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)
    except GymStartError as error:
        raise GymStartError(f"no environment for {final.name}: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install_packages(folder: Path, python: str, base: Path, packages: list[str]) -> None:
    """Install the packages of the environment `base`, its nemo-gym and `packages` into `folder`.

    Raises GymStartError.
    """
    install = ("pip", "install", "--python", str(folder / "bin" / "python"), "--requirement", "-")
    frozen = run_uv("pip", "freeze", "--python", python).splitlines()
    pins = [line for line in frozen if "==" in line and not line.startswith("nemo-gym")]
    run_uv(*install, "--no-deps", text="\n".join(pins))
    site_packages = next(folder.glob("lib/python3*/site-packages"))
    for record in base.glob("nemo_gym-*.dist-info/RECORD"):
        lines = record.read_text().splitlines()
        names = {line.partition("/")[0] for line in lines if "/" in line}
        for name in names - {".."}:
            (site_packages / name).symlink_to((base / name).resolve())
    if packages:
        run_uv(*install, text="\n".join(packages))


# --- requirements of a server --------------------------------------------------------------------


def read_requirements(folder: Path) -> list[str]:
    """Return the packages that a server lists, without nemo-gym, but with those of its extras.

    folder: resources_servers/NAME of the package. Raises GymStartError.
    """
    requirements = folder / "requirements.txt"
    lines = requirements.read_text().splitlines() if requirements.is_file() else []
    if (folder / "pyproject.toml").is_file():
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        lines = project["project"].get("dependencies", [])
        sources = project.get("tool", {}).get("uv", {}).get("sources", {})
        # Without its source, uv would install another package of the same name.
        if sources.keys() - {"nemo-gym"}:
            raise GymStartError(
                f"no environment for {folder.name}: its packages have other sources "
                f"({', '.join(sources)}). Install them yourself, and set start.python."
            )
    lines = [line.partition(" #")[0].strip() for line in lines]
    skipped = ("#", "-e nemo-gym", "nemo-gym", "nemo_gym", "-e ../..")
    # "-e ./lib[extra]" is a folder of the server
    packages = [
        line.replace("-e ./", f"{folder.absolute()}/")
        for line in lines
        if line and not line.startswith(skipped)
    ]
    if re.search(r"nemo-gym\[.*\bsandbox\b.*\]", "\n".join(lines)):
        packages += list_sandbox_packages(folder.parents[1])
    return packages


def list_sandbox_packages(package: Path) -> list[str]:
    """Return the packages of nemo-gym's extra `sandbox`. package: its site-packages."""
    packages = []
    for distribution in metadata.distributions(name="nemo-gym", path=[str(package)]):
        for requirement in map(Requirement, distribution.requires or []):
            if 'extra == "sandbox"' in str(requirement.marker):
                requirement.marker = None
                packages.append(str(requirement))
    return packages


# --- uv ------------------------------------------------------------------------------------------


def run_uv(*arguments: str, text: str = "") -> str:
    """Run uv with `text` as its standard input; return its output. Raises GymStartError."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    uv = shutil.which("uv", path=os.pathsep.join(folders))
    if not uv:
        raise GymStartError("uv is not installed. Run `pip install uv`.")
    skipped = ("PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
    command = [uv, "--quiet", *arguments]
    process = subprocess.run(
        command, input=text, capture_output=True, text=True, env=env, timeout=TIMEOUT_S
    )
    if process.returncode:
        reason = " ".join(process.stderr.split())[-600:]
        raise GymStartError(f"`uv {' '.join(arguments[:2])}` failed: {reason}")
    return process.stdout
