"""The process of one Gym server: read a task from standard input, then become that server.

kit/gym/servers.py starts this file by its path, with the interpreter of NeMo Gym's environment
(.venv-gym). That environment has neither the packages of this project nor its modules. So this file
imports only the standard library, and inside functions yaml, pydantic and nemo_gym.

The task is JSON: {"name": of the server, "parent_pid", "command": see below, "specs": [...]}.
A spec is a dict that describes one process of a run. Its keys:

    name, host, port    its name in Gym's configuration, and its address
    kind, folder        its code: the folder kind/folder of the package, or an absolute path
    resources_server    the folder of the server whose YAML files describe this process
    overrides           settings that replace those of the YAML
    global_config       entries of Gym's configuration that describe no process, such as a sandbox
    config_key          the key of the recipe that sets `overrides`, for messages
    python, log         its interpreter and its log file
    visible_variables   environment variables that the process sees besides the public ones
    command, env        the command and additional variables of a process that is not from Gym
    start_timeout_s     how long it may take to start

A server receives its own spec in full. Of most others it receives only name, kind, folder, host and
port.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

RESOURCES = "resources_servers"  # kinds of servers: folders of the nemo-gym package
MODELS = "responses_api_models"
AGENTS = "responses_api_agents"
ENVIRONMENTS = "environment_servers"  # since Gym 0.7
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
Json = dict[str, Any]  # an object. Gym's interpreter, which runs this file, has no gym_client
ProcessSpec = Json


def main() -> None:
    """Become the server that the task on standard input names."""
    task = json.load(sys.stdin)
    # The server may read its standard input, but not the task.
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    exit_with_parent(task["parent_pid"])
    if task["command"]:
        os.execv(task["command"][0], task["command"])
    run_server(task["name"], task["specs"])


def exit_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process as soon as the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the process that started this server has already ended")


def run_server(name: str, specs: list[ProcessSpec]) -> None:
    """Run the app.py of the server `name`. Gym's configuration is in two environment variables."""
    spec = next(each for each in specs if each["name"] == name)
    package = find_package()
    folder = find_app_folder(spec, package)
    config = build_gym_config(spec, specs, package)
    import pydantic
    import yaml

    os.environ["NEMO_GYM_CONFIG_DICT"] = yaml.safe_dump(config)
    os.environ["NEMO_GYM_CONFIG_PATH"] = name
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        gym: Any = importlib.import_module("nemo_gym.server_utils")
        gym.initialize_ray = skip_ray
        if spec["folder"] == "genrm_model":
            use_remote_genrm()
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    except ImportError as error:
        # Without a package, a folder of its name next to app.py has an "unknown location".
        if not isinstance(error, ModuleNotFoundError) and "unknown location" not in str(error):
            raise
        exit_for_module(error.name, spec, folder)
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        sys.exit(
            f"{spec['folder']}: invalid settings ({'; '.join(problems)}). "
            f"Correct them in {spec['config_key']}."
        )


def skip_ray() -> None:
    """Replace Gym's start of Ray by nothing: most servers never use its six processes."""


def find_package() -> Path:
    """Return the site-packages folder that has nemo-gym. Exits if this interpreter does not."""
    module = importlib.util.find_spec("nemo_gym")
    if not module or not module.origin:
        sys.exit(
            f"{sys.executable} has no nemo-gym. To make an environment with it, run `make gym`."
        )
    return Path(module.origin).parent.parent


def find_app_folder(spec: ProcessSpec, package: Path) -> Path:
    """Return the folder of the server's app.py. Exits with similar names if there is none."""
    folder = package / spec["kind"] / spec["folder"]  # an absolute folder replaces the rest
    if (folder / "app.py").is_file():
        return folder
    names = [path.parent.name for path in folder.parent.glob("*/app.py")]
    nearest = difflib.get_close_matches(spec["folder"], names, 4, 0.0)
    kinds = {RESOURCES: "resources server", MODELS: "model", AGENTS: "agent"}
    kind = kinds.get(spec["kind"], "environment server")
    sys.exit(
        f"nemo-gym has no {kind} {spec['folder']!r}. Choose one of {folder.parent}; "
        f"the nearest are {', '.join(nearest)}"
    )


def exit_for_module(module: str | None, spec: ProcessSpec, folder: Path) -> NoReturn:
    """Exit with the command that installs a missing module."""
    name = spec["folder"]
    if Path(name).is_absolute():
        hint = (
            f"Install it for {sys.executable}, which has nemo-gym, "
            "or set start.python to an interpreter that has both"
        )
    else:
        hint = (
            f"Run `python -m kit.gym.servers install {name}` or set start.install=true. "
            f"Both make an environment with the requirements of {folder}"
        )
    sys.exit(f"no module {module!r} for {name}. {hint}")


# --- settings ------------------------------------------------------------------------------------


def build_gym_config(spec: ProcessSpec, specs: Iterable[ProcessSpec], package: Path) -> Json:
    """Return the configuration that Gym's own command would give to the server of `spec`."""
    import yaml

    config: Json = {}
    for each in specs:
        settings = {"entrypoint": "app.py", "host": each["host"], "port": each["port"]}
        if "overrides" in each:
            settings = build_settings(each, package)
        config[each["name"]] = {each["kind"]: {Path(each["folder"]).name: settings}}
    entries = spec.get("global_config") or {}
    check_entries(spec, entries, config)
    # The value is `???`, or a `${name}` that another file defines. That file is not read here.
    open_values = re.findall(r"(\w+): .*(\?\?\?|\$\{\w+\})", yaml.safe_dump(config[spec["name"]]))
    unset = [key for key, value in open_values if value[2:-1] not in entries]
    if unset:
        sys.exit(
            f"the YAML of {spec['folder']} does not set {', '.join(unset)}. "
            f"Set it in {spec['config_key']}."
        )
    config["head_server"] = {"host": spec["host"], "port": spec["port"]}
    config["dry_run"] = False
    return {**entries, **config}


def check_entries(spec: ProcessSpec, entries: Iterable[str], config: Json) -> None:
    """Exit if entries of global_config have the names of servers, or names that Gym reserves."""
    clashes = sorted({*entries} & {*config, "head_server", "dry_run"})
    if clashes:
        sys.exit(
            f"global_config of {spec['folder']} has an entry {clashes[0]}, the name of a server "
            "or of Gym's own. Choose another name."
        )


def build_settings(spec: ProcessSpec, package: Path) -> Json:
    """Return Gym's settings of one server: its YAML, overrides, host and port. Later ones win."""
    settings: Json = {"entrypoint": "app.py"}
    if spec["kind"] == RESOURCES:
        settings["domain"] = "other"
    if spec["kind"] != MODELS:  # their YAML describes other models; `overrides` is complete
        settings |= read_yaml_settings(spec, package)
    return {**settings, **spec["overrides"], "host": spec["host"], "port": spec["port"]}


def read_yaml_settings(spec: ProcessSpec, package: Path) -> Json:
    """Return the first settings for this kind and folder in the package's YAML files, or {}.

    The files of the resources server come first. Among these, the file with the server's name
    comes first.
    """
    server = spec["resources_server"]
    folders = [package / RESOURCES / server, package / spec["kind"] / spec["folder"]]
    for entry in read_yaml_entries(folders, Path(server).name):
        servers = entry.get(spec["kind"])
        settings = servers.get(Path(spec["folder"]).name) if isinstance(servers, dict) else None
        if settings:
            return dict(settings)
    return {}


def read_yaml_entries(folders: Iterable[Path], preferred: str) -> Iterator[Json]:
    """Yield the top-level objects of each configs/*.yaml, first those of `preferred`.yaml."""
    import yaml

    def by_name(path: Path) -> tuple[bool, str]:
        return path.stem != preferred, path.name

    for folder in folders:
        for path in sorted((folder / "configs").glob("*.yaml"), key=by_name):
            entries = yaml.safe_load(path.read_text()) or {}
            yield from (entry for entry in entries.values() if isinstance(entry, dict))


def use_remote_genrm() -> None:
    """Have Gym's genrm_model use an address, as vllm_model does. Gym would start vLLM."""
    vllm = importlib.import_module(f"{MODELS}.vllm_model.app")
    local: Any = types.ModuleType(f"{MODELS}.local_vllm_model.app")
    local.LocalVLLMModel = vllm.VLLMModel
    local.LocalVLLMModelConfig = vllm.VLLMModelConfig
    sys.modules[local.__name__] = local


if __name__ == "__main__":
    main()
