"""The process of one Gym server: read a task from standard input, then become that server.

kit/verify/servers.py starts this file by its path, with the interpreter of NeMo Gym's environment
(.venv-gym). That environment has neither the packages of this project nor its modules. So this file
imports only the standard library, and inside functions yaml, pydantic and nemo_gym.

The task is JSON: {"parent_pid", "specs": [a ProcessSpec of each process, its own first]}. A server
receives its own spec in full. Of most others it receives only name, kind, folder, host and port.

Protects: secrets in the settings of other servers, and the machine from servers without a run.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the interpreter of Gym has no gym_client
    from gym_client import Json

RESOURCES = "resources_servers"  # kinds of servers: folders of the nemo-gym package
MODELS = "responses_api_models"
AGENTS = "responses_api_agents"
ENVIRONMENTS = "environment_servers"  # since Gym 0.7
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclass
class ProcessSpec:
    """One process of a run."""

    name: str  # in Gym's configuration
    kind: str = ""  # its code: the folder kind/folder of the package; "": not of Gym
    folder: str = ""  # or an absolute path
    overrides: Json | None = None  # of the YAML's settings. None: a reader must not see them
    config_key: str = ""  # the key of the recipe that sets `overrides`, for messages
    host: str = "127.0.0.1"
    port: int = 0
    resources_server: str = ""  # the folder of the server whose YAML files describe this process
    # entries of Gym's configuration that describe no process, such as a sandbox
    global_config: Json = field(default_factory=dict)
    python: str = ""  # its interpreter
    log: str = ""
    visible_variables: Sequence[str] = ()  # environment variables besides the public ones
    command: list[str] = field(default_factory=list)  # of a process that is not of Gym
    env: dict[str, str] = field(default_factory=dict)  # additional variables
    start_timeout_s: float | None = None


def main() -> None:
    """Become the process of the first spec in the task on standard input."""
    task = json.load(sys.stdin)
    # The server may read its standard input, but not the task.
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    exit_with_parent(task["parent_pid"])
    specs = [ProcessSpec(**spec) for spec in task["specs"]]
    if specs[0].command:
        os.execv(specs[0].command[0], specs[0].command)
    run_server(specs[0], specs)


def exit_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process as soon as the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the process that started this server has already ended")


def run_server(spec: ProcessSpec, specs: Sequence[ProcessSpec]) -> None:
    """Run the app.py of a server. Gym's configuration is in two environment variables."""
    package = find_package()
    folder = find_app_folder(spec, package)
    config = build_gym_config(spec, specs, package)
    import pydantic
    import yaml

    os.environ["NEMO_GYM_CONFIG_DICT"] = yaml.safe_dump(config)
    os.environ["NEMO_GYM_CONFIG_PATH"] = spec.name
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        gym: Any = importlib.import_module("nemo_gym.server_utils")
        gym.initialize_ray = lambda: None  # most servers never use its six processes
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    except ImportError as error:
        # Without a package, a folder of its name next to app.py has an "unknown location".
        if not isinstance(error, ModuleNotFoundError) and "unknown location" not in str(error):
            raise
        hint = (
            f"Run `python -m kit.verify.servers install {spec.folder}` or set start.install=true. "
            f"Both make an environment with the requirements of {folder}"
        )
        if Path(spec.folder).is_absolute():
            hint = f"Install it for {sys.executable}, or set start.python to one that has both"
        sys.exit(f"no module {error.name!r} for {spec.folder}. {hint}")
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        sys.exit(
            f"{spec.folder}: invalid settings ({'; '.join(problems)}). "
            f"Correct them in {spec.config_key}."
        )


def find_package() -> Path:
    """Return the site-packages folder that has nemo-gym. Exits if this interpreter does not."""
    module = importlib.util.find_spec("nemo_gym")
    if not module or not module.origin:
        sys.exit(
            f"{sys.executable} has no nemo-gym. To make an environment with it, run `make gym`."
        )
    return Path(module.origin).parent.parent


def find_app_folder(spec: ProcessSpec, package: Path) -> Path:
    """Return the folder of the server's app.py. Exits if there is none."""
    folder = package / spec.kind / spec.folder  # an absolute folder replaces the rest
    if (folder / "app.py").is_file():
        return folder
    names = sorted(path.parent.name for path in folder.parent.glob("*/app.py"))
    sys.exit(
        f"nemo-gym has no folder {spec.folder!r} in {spec.kind}. Choose one of: {', '.join(names)}"
    )


# --- settings ------------------------------------------------------------------------------------


def build_gym_config(spec: ProcessSpec, specs: Iterable[ProcessSpec], package: Path) -> Json:
    """Return the configuration that Gym's own command would give to the server of `spec`."""
    import yaml

    config: Json = {}
    for each in specs:
        settings = {"entrypoint": "app.py", "host": each.host, "port": each.port}
        if each.overrides is not None:
            settings = build_settings(each, package)
        config[each.name] = {each.kind: {Path(each.folder).name: settings}}
    # The value is `???`, or a `${name}` that another file defines. That file is not read here.
    open_values = re.findall(r"(\w+): .*(\?\?\?|\$\{\w+\})", yaml.safe_dump(config[spec.name]))
    unset = [key for key, value in open_values if value[2:-1] not in spec.global_config]
    if unset:
        sys.exit(
            f"the YAML of {spec.folder} does not set {', '.join(unset)}. "
            f"Set it in {spec.config_key}."
        )
    config["head_server"] = {"host": spec.host, "port": spec.port}
    config["dry_run"] = False
    for key in spec.global_config.keys() & config.keys():
        sys.exit(f"start.global_config.{key} of {spec.name}: the run sets this entry. Remove it.")
    return {**spec.global_config, **config}


def build_settings(spec: ProcessSpec, package: Path) -> Json:
    """Return Gym's settings of one server: its YAML, overrides, host and port. Later ones win."""
    settings: Json = {"entrypoint": "app.py"}
    if spec.kind == RESOURCES:
        settings["domain"] = "other"
    if spec.kind != MODELS:  # their YAML describes other models; `overrides` is complete
        settings |= read_yaml_settings(spec, package)
    return {**settings, **(spec.overrides or {}), "host": spec.host, "port": spec.port}


def read_yaml_settings(spec: ProcessSpec, package: Path) -> Json:
    """Return the first settings for this kind and folder in the package's YAML files, or {}.

    The files of the resources server come first. Among these, the file with the server's name
    comes first.
    """
    import yaml

    server = spec.resources_server

    def by_name(path: Path) -> tuple[bool, str]:
        return path.stem != Path(server).name, path.name

    for folder in (package / RESOURCES / server, package / spec.kind / spec.folder):
        for path in sorted((folder / "configs").glob("*.yaml"), key=by_name):
            settings = find_settings(yaml.safe_load(path.read_text()), spec)
            if settings:
                return settings
    return {}


def find_settings(entries: object, spec: ProcessSpec) -> Json:
    """Return the first settings for the kind and folder of a process in a YAML file, or {}."""
    for entry in entries.values() if isinstance(entries, dict) else ():
        servers = entry.get(spec.kind) if isinstance(entry, dict) else None
        settings = servers.get(Path(spec.folder).name) if isinstance(servers, dict) else None
        if settings:
            return dict(settings)
    return {}


if __name__ == "__main__":
    main()
