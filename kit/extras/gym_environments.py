"""An environment for one server of nemo-gym's, with what that server asks for beyond what `make gym` installs.

    python -m kit.gym.servers install NAME        or in a recipe: gym.servers.NAME.start.install: true

It is .venv-gym-servers/NAME beside the environment that has nemo-gym: that one's packages, by uv's hard links, its
nemo-gym, linked, and on top what the server's requirements.txt or pyproject.toml lists, as Gym itself does it. It is
made under another name and renamed when it is whole; one that is there is used again while the list stays the same.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name

ENVIRONMENTS = ".venv-gym-servers"
DEADLINE_S = 3600.0  # for one call of uv, which may fetch gigabytes


class InstallError(RuntimeError):
    """An environment that could not be made; the message says what of it, and what to do."""


def environment(server: str, python: str) -> Path:
    """Where the environment of `server` is, or would be. python: the interpreter that has nemo-gym."""
    return Path(python).absolute().parents[2] / ENVIRONMENTS / server


def site_packages(python: str) -> Path | None:
    """The folder in which the interpreter of an environment has nemo-gym, without asking it."""
    found = Path(python).absolute().parents[1].glob("lib/python3*/site-packages")
    return next((folder for folder in found if (folder / "nemo_gym").is_dir()), None)


def requirements(folder: Path) -> list[str]:
    """What a server of the package lists, but for nemo-gym itself. folder: resources_servers/NAME."""
    if (folder / "pyproject.toml").is_file():
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        sources = project.get("tool", {}).get("uv", {}).get("sources", {})
        named = {canonicalize_name(name): source for name, source in sources.items()}
        lines = [located(line, named) for line in project["project"].get("dependencies", [])]
    else:
        path = folder / "requirements.txt"
        lines = path.read_text().splitlines() if path.is_file() else []
    stripped = [line.strip() for line in lines]
    return [
        x for x in stripped if x and not x.startswith(("#", "-e nemo-gym", "nemo-gym", "nemo_gym"))
    ]


def located(line: str, sources: Mapping[NormalizedName, Any]) -> str:
    """Return a requirement at the place that `sources` (tool.uv.sources) gives for its name.

    Without that place, another package of the same name on PyPI would be installed. Raises
    InstallError for kinds of places that it does not know.
    """
    requirement = Requirement(line)
    source = sources.get(canonicalize_name(requirement.name))
    if source is None or canonicalize_name(requirement.name) == "nemo-gym":
        return line
    keys = source.keys() if isinstance(source, dict) else set()
    revisions = keys & {"rev", "tag", "branch"}
    if (
        "git" in keys
        and keys <= {"git", "rev", "tag", "branch", "subdirectory"}
        and len(revisions) <= 1
    ):
        revision = "".join(f"@{source[key]}" for key in revisions)
        folder = f"#subdirectory={source['subdirectory']}" if "subdirectory" in keys else ""
        requirement.url = f"git+{source['git']}{revision}{folder}"
    elif keys == {"url"}:
        requirement.url = source["url"]
    else:
        problem = f"tool.uv.sources has {requirement.name} = {source!r}, which is not taken"
        raise InstallError(
            f"{problem}; install {requirement.name} from there, and set start.python"
        )
    requirement.specifier = SpecifierSet()  # a requirement has either versions or a place
    return str(requirement)


def install(server: str, python: str) -> Path:
    """Make the environment of `server`, unless it is there; returns its interpreter. Raises InstallError."""
    base, final = site_packages(python), environment(server, python)
    if base is None:
        raise InstallError(
            f"no environment for {server}: {python} has no nemo-gym; `make gym` makes one that has"
        )
    if not (base / "resources_servers" / server / "app.py").is_file():
        known = [path.parent.name for path in base.glob("resources_servers/*/app.py")]
        near = ", ".join(difflib.get_close_matches(server, known, 4, 0.0))
        raise InstallError(
            f"no environment for {server}: nemo-gym has no such resources server; nearest are {near}"
        )
    uv = find_uv()
    if not uv:
        raise InstallError(
            f"no environment for {server}: no uv beside {sys.executable} or on PATH; `pip install uv`"
        )
    listed = requirements(base / "resources_servers" / server)
    marker = "\n".join([*sorted(p.name for p in base.glob("nemo_gym-*.dist-info")), *listed]) + "\n"
    if (final / "installed.txt").is_file() and (final / "installed.txt").read_text() == marker:
        return final / "bin" / "python"
    made = final.with_name(f".{server}.{os.getpid()}")
    try:
        run(
            server,
            [uv, "venv", "--quiet", "--relocatable", "--clear", "--python", python, str(made)],
        )
        fill(server, uv, made, python, base, listed)
        (made / "installed.txt").write_text(marker)
        if final.exists():
            shutil.rmtree(final)
        made.rename(final)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return final / "bin" / "python"


def fill(server: str, uv: str, made: Path, python: str, base: Path, listed: list[str]) -> None:
    """The packages of the environment `base`, its nemo-gym, and `listed` into `made`. Raises InstallError."""
    into = [uv, "pip", "install", "--quiet", "--python", str(made / "bin" / "python")]
    frozen = run(server, [uv, "pip", "freeze", "--quiet", "--python", python]).splitlines()
    pins = [line for line in frozen if "==" in line and not line.startswith("nemo-gym")]
    run(server, [*into, "--no-deps", "--requirement", "-"], "\n".join(pins))
    site = next(made.glob("lib/python3*/site-packages"))
    for record in base.glob("nemo_gym-*.dist-info/RECORD"):
        tops = {line.partition("/")[0] for line in record.read_text().splitlines() if "/" in line}
        for top in tops - {".."}:
            (site / top).symlink_to((base / top).resolve())
    if listed:
        run(server, [*into, "--requirement", "-"], "\n".join(listed))


def find_uv() -> str | None:
    """uv, beside this interpreter or on PATH."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("uv", path=beside)


def run(server: str, command: list[str], text: str = "") -> str:
    """stdout of uv. Raises InstallError with the last it said."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=env, timeout=DEADLINE_S
        )
        said, status = done.stderr.strip(), done.returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        said, status = str(error), 1
    if status:
        told = " ".join(" ".join(said.splitlines()[-12:]).split())[-600:]
        what = " ".join(command[1:3])
        raise InstallError(
            f"no environment for {server}: uv {what} failed, and nothing is left of it: {told}"
        )
    return done.stdout
