"""Make an environment for one Gym server that requires more packages than `make gym` installs.

    python -m kit.gym.servers install NAME    or in a recipe: gym.servers.NAME.start.install: true

The environment is .venv-gym-servers/NAME, next to .venv-gym, which has nemo-gym. It has the
packages of that one (uv uses hard links) and a link to its nemo-gym. It also has the packages that
the server's requirements.txt or pyproject.toml lists, as Gym installs them. It is built under a
temporary name and renamed when it is complete. It is reused until the list changes.
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name

from kit.config.keys import make_command
from kit.gym import process_specs
from kit.gym.network import GymStartError

TIMEOUT_S = 3600.0  # for one call of uv, which may download gigabytes


class InstallError(GymStartError):
    """An environment cannot be made. The message names the server, the cause and the fix."""


def install_environment(server: str, python: str) -> Path:
    """Make the environment of `server` if necessary, and return its interpreter.

    python: the interpreter that has nemo-gym. Raises InstallError.
    """
    base = check_base(server, python)
    final = process_specs.environment_folder(server, base)
    uv = find_uv()
    if not uv:
        raise InstallError(
            f"no environment for {server}: found no uv next to {sys.executable} or on PATH. "
            "Run `pip install uv`."
        )
    packages = read_requirements(base / "resources_servers" / server)
    contents = "\n".join([*process_specs.list_versions(base), *packages]) + "\n"
    if not has_contents(final, contents):
        final.parent.mkdir(parents=True, exist_ok=True)
        with final.with_name(f".{server}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not has_contents(final, contents):  # another run may have just built it
                build(server, uv, final, python, base, packages, contents)
    return final / "bin" / "python"


def has_contents(folder: Path, contents: str) -> bool:
    """Whether an environment is complete, and of this list of packages."""
    marker = folder / "installed.txt"
    return marker.is_file() and marker.read_text() == contents


def build(
    server: str, uv: str, final: Path, python: str, base: Path, packages: list[str], contents: str
) -> None:
    """Build an environment next to `final`, and move it there. Raises InstallError."""
    folder = final.with_name(f".{server}.{os.getpid()}")
    create = ["venv", "--quiet", "--relocatable", "--clear", "--python", python, str(folder)]
    try:
        run_uv(server, [uv, *create])
        install_packages(server, uv, folder, python, base, packages)
        (folder / "installed.txt").write_text(contents)
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_base(server: str, python: str) -> Path:
    """Return the site-packages folder that has nemo-gym and the server. Raises InstallError."""
    base = process_specs.find_package(python)
    if base is None:
        raise InstallError(
            f"no environment for {server}: {python} has no nemo-gym. To install it, run "
            f"`{make_command('gym')}`."
        )
    if not (base / "resources_servers" / server / "app.py").is_file():
        servers = [path.parent.name for path in base.glob("resources_servers/*/app.py")]
        nearest = ", ".join(difflib.get_close_matches(server, servers, 4, 0.0))
        raise InstallError(
            f"no environment for {server}: nemo-gym has no such resources server; "
            f"nearest are {nearest}"
        )
    return base


def install_packages(
    server: str, uv: str, folder: Path, python: str, base: Path, packages: list[str]
) -> None:
    """Install the packages of the environment `base`, its nemo-gym and `packages` into `folder`.

    Raises InstallError.
    """
    install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    frozen = run_uv(server, [uv, "pip", "freeze", "--quiet", "--python", python]).splitlines()
    pins = [line for line in frozen if "==" in line and not line.startswith("nemo-gym")]
    run_uv(server, [*install, "--no-deps", "--requirement", "-"], "\n".join(pins))
    site_packages = next(folder.glob("lib/python3*/site-packages"))
    for record in base.glob("nemo_gym-*.dist-info/RECORD"):
        lines = record.read_text().splitlines()
        names = {line.partition("/")[0] for line in lines if "/" in line}
        for name in names - {".."}:
            (site_packages / name).symlink_to((base / name).resolve())
    if packages:
        run_uv(server, [*install, "--requirement", "-"], "\n".join(packages))


# --- requirements of a server --------------------------------------------------------------------


def read_requirements(folder: Path) -> list[str]:
    """Return the packages that a server lists, without nemo-gym, but with those of its extras.

    folder: resources_servers/NAME of the package. Raises InstallError.
    """
    if (folder / "pyproject.toml").is_file():
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        sources = project.get("tool", {}).get("uv", {}).get("sources", {})
        by_name = {canonicalize_name(name): source for name, source in sources.items()}
        lines = [add_source(line, by_name) for line in project["project"].get("dependencies", [])]
    else:
        path = folder / "requirements.txt"
        lines = path.read_text().splitlines() if path.is_file() else []
    lines = [line.partition(" #")[0].strip() for line in lines]
    skipped = ("#", "-e nemo-gym", "nemo-gym", "nemo_gym", "-e ../..")
    # "-e ./lib[extra]" is a folder of the server
    packages = [
        line.replace("-e ./", f"{folder.absolute()}/")
        for line in lines
        if line and not line.startswith(skipped)
    ]
    if re.search(r"nemo-gym\[.*\bsandbox\b.*\]", "\n".join(lines)):
        packages += list_extra(folder.parents[1], "sandbox")
    return packages


def list_extra(package: Path, extra: str) -> list[str]:
    """Return the packages of one extra of nemo-gym, such as `sandbox`. package: its folder."""
    packages = []
    for metadata in package.glob("nemo_gym-*.dist-info/METADATA"):
        for line in metadata.read_text().splitlines():
            name, _, condition = line.removeprefix("Requires-Dist: ").partition("; extra == ")
            if line.startswith("Requires-Dist: ") and condition.strip("\"'") == extra:
                packages.append(name)
    return packages


def add_source(line: str, sources: Mapping[NormalizedName, Any]) -> str:
    """Return a requirement with the source that tool.uv.sources lists for its name.

    Without the source, pip would install another package of the same name from PyPI. Raises
    InstallError for unsupported kinds of sources.
    """
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    source = sources.get(name)
    if source is None or name == "nemo-gym":
        return line
    keys = source.keys() if isinstance(source, dict) else set()
    if is_git_source(keys):
        requirement.url = git_url(source)
    elif keys == {"url"}:
        requirement.url = source["url"]
    else:
        raise InstallError(
            f"tool.uv.sources has {requirement.name} = {source!r}, which is not supported. "
            f"Install {requirement.name} from there and set start.python."
        )
    requirement.specifier = SpecifierSet()  # a requirement has either versions or a source
    return str(requirement)


def is_git_source(keys: AbstractSet[str]) -> bool:
    """Return whether these are the keys of a git source with at most one revision."""
    revisions = keys & {"rev", "tag", "branch"}
    is_supported = keys <= {"git", "rev", "tag", "branch", "subdirectory"}
    return "git" in keys and is_supported and len(revisions) <= 1


def git_url(source: Mapping[str, str]) -> str:
    """Return the URL of a git source, with its revision and folder, as pip reads it."""
    url = f"git+{source['git']}"
    for key in ("rev", "tag", "branch"):
        if key in source:
            url += f"@{source[key]}"
    if "subdirectory" in source:
        url += f"#subdirectory={source['subdirectory']}"
    return url


# --- uv ------------------------------------------------------------------------------------------


def find_uv() -> str | None:
    """Return the path of uv: next to this interpreter, or on PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return shutil.which("uv", path=os.pathsep.join(folders))


def run_uv(server: str, command: list[str], text: str = "") -> str:
    """Run uv with `text` as its standard input; return its standard output. Raises InstallError."""
    skipped = ("PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(skipped)}
    try:
        process = subprocess.run(
            command, input=text, capture_output=True, text=True, env=env, timeout=TIMEOUT_S
        )
        error_text = process.stderr.strip() if process.returncode else ""
        has_failed = process.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        error_text = str(error)
        has_failed = True
    if has_failed:
        last_lines = " ".join(error_text.splitlines()[-12:])
        raise InstallError(
            f"no environment for {server}: `uv {' '.join(command[1:3])}` failed, and its files are "
            f"removed: {' '.join(last_lines.split())[-600:]}"
        )
    return process.stdout
