"""Check `gym.servers` of a recipe, and plan the processes of the servers that it starts.

docs/tutorial.md lists the keys of `start` of a server.

Without `agent` one process serves /seed_session, the tools and /verify. With `agent` there are
three: Gym's agent (POST /run), the resources server behind it, and `policy_model`. This is Gym's
model server, which all agents of a run share. It gets responses and their token ids from the
policy, an OpenAI-compatible endpoint. With `environment` there is a fourth, in front of the agent.

Convenience: a recipe names a server of nemo-gym, and the run plans and starts it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gym_client import Json
from kit import optional
from kit.recipe.keys import ROOT, make_command
from kit.recipe.schema import Server, ServerStart
from kit.verify import network
from kit.verify.network import HOST, GymStartError
from kit.verify.server_process import AGENTS, ENVIRONMENTS, MODELS, RESOURCES, ProcessSpec

PYTHON = ".venv-gym/bin/python"  # separate: nemo-gym would break the environment of the run
POLICY_MODEL = "policy_model"  # the name of the trained model in Gym's YAML files
VALID_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


# --- checks --------------------------------------------------------------------------------------


def is_valid_name(name: object) -> bool:
    """Return whether `name` can be the name of a process and of its log file."""
    return bool(VALID_NAME.fullmatch(str(name)))


def check_server(name: str, server: Server) -> None:
    """Check that a server's `url` answers, or that its `start` can work. Raises GymStartError."""
    if not is_valid_name(name):
        raise GymStartError(
            f"gym.servers: {name!r} is not a valid name. "
            "Use letters, digits, _, - and ., and do not start with a dot."
        )
    if server.url:
        network.wait_ready(name, server.url.rstrip("/"), kind=server.kind)
        return
    start = server.start or ServerStart()
    key = f"gym.servers.{name}.start"
    missing = [variable for variable in start.env or [] if variable not in os.environ]
    if missing:
        raise GymStartError(
            f"{key}.env: the environment variable {missing[0]} is not set. Export it, or remove it."
        )
    python = find_python(start)
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise GymStartError(
            f"gym.servers.{name}: no interpreter at {python}. To make it, run "
            f"`{make_command('gym')}`."
        )
    find_folder(name, start)
    network.check_address(key, start.host or HOST, start.port)


def find_python(start: ServerStart) -> str:
    """Return the interpreter of a server. Its path is relative to this folder or the project."""
    python = start.python or PYTHON
    is_here = Path(python).is_file() or not (ROOT / python).is_file()
    return python if is_here else str(ROOT / python)


def find_folder(name: str, start: ServerStart) -> str:
    """Return the folder of a server: its name under resources_servers, or an absolute path.

    `path` is relative to the current folder or to the project. Raises GymStartError.
    """
    if not start.path:
        return start.server or name
    key = f"gym.servers.{name}.start"
    other = "server" if start.server else "install"
    if start.server or start.install:
        raise GymStartError(
            f"{key} has path and {other}. Remove {other}, which is for servers of nemo-gym."
        )
    for folder in (Path(start.path), ROOT / start.path):
        if (folder / "app.py").is_file():
            return str(folder.resolve())
    raise GymStartError(
        f"{key}.path={start.path}: there is no app.py in this folder of {Path.cwd()}. Copy "
        "templates/verifier to start from."
    )


# --- processes -----------------------------------------------------------------------------------


def plan_processes(
    name: str, start: ServerStart, policy: Mapping[str, str] | None
) -> list[ProcessSpec]:
    """Return the specs of the processes of one server; the last one answers for its name.

    policy: {base_url, api_key, model} for agents. Raises GymStartError.
    """
    check_server(name, Server(start=start))
    folder = find_folder(name, start)
    resources = ProcessSpec(
        name,
        RESOURCES,
        folder,
        start.config or {},
        f"gym.servers.{name}.start.config",
        host=start.host or HOST,
        resources_server=folder,
        python=resolve_python(name, start),
        visible_variables=list(start.env or []),
        global_config=start.global_config or {},
    )
    specs = [resources]
    if start.agent:
        specs += plan_agent(resources, start.agent, start, policy or {})
    for spec in specs:
        spec.port = network.find_free_port(spec.host)
    specs[-1].port = start.port or specs[-1].port
    return specs


def plan_agent(
    resources: ProcessSpec, agent: str, start: ServerStart, policy: Mapping[str, str]
) -> list[ProcessSpec]:
    """Return the specs of the policy's model server, of the agent and of the environment server."""
    key = f"gym.servers.{resources.name}.start"
    resources_server = {"type": RESOURCES, "name": resources.name}
    model = {"return_token_id_information": True, "uses_reasoning_parser": True, **policy}
    shared = replace(resources, visible_variables=[], global_config={})  # by all agents of a run
    agent_name = f"{resources.name}_{agent}"
    agent_config = {
        "resources_server": resources_server,
        "model_server": {"type": MODELS, "name": POLICY_MODEL},
        **(start.agent_config or {}),
    }
    specs = [
        derive_spec(shared, POLICY_MODEL, MODELS, "vllm_model", model, "policy"),
        derive_spec(resources, agent_name, AGENTS, agent, agent_config, f"{key}.agent_config"),
    ]
    if start.environment:
        name = f"{resources.name}_{start.environment}"
        agent_server = {"type": AGENTS, "name": agent_name}
        config = {"resources_server": resources_server, "agent_server": agent_server}
        environment_key = f"{key}.environment"
        specs.append(
            derive_spec(resources, name, ENVIRONMENTS, start.environment, config, environment_key)
        )
    return specs


def derive_spec(
    spec: ProcessSpec, name: str, kind: str, folder: str, overrides: Json, config_key: str
) -> ProcessSpec:
    """Return the spec of another process of the same server."""
    return replace(
        spec, name=name, kind=kind, folder=folder, overrides=overrides, config_key=config_key
    )


# --- interpreters --------------------------------------------------------------------------------


def resolve_python(name: str, start: ServerStart) -> str:
    """Return the interpreter of a server.

    With `install`, makes an environment for the server and returns its interpreter. Otherwise
    returns `python` if the recipe sets it, else the interpreter of an existing environment for the
    server, else that of .venv-gym. Raises GymStartError.
    """
    folder = find_folder(name, start)
    python = find_python(start)
    if start.install:
        key = f"gym.servers.{name}.start.install"
        try:
            environments = optional.load("environments", key)
            return str(environments.install_environment(folder, python))
        except GymStartError as error:
            raise GymStartError(f"{key}: {error}") from None
    package = find_package(python)
    if package and not start.python:
        own_python = environment_folder(folder, package) / "bin" / "python"
        if own_python.is_file():
            return str(own_python)
    return str(Path(python).absolute())


def find_package(python: str) -> Path | None:
    """Return the site-packages folder with nemo-gym of an interpreter, or None."""
    for folder in Path(python).absolute().parents[1].glob("lib/python3*/site-packages"):
        if (folder / "nemo_gym").is_dir():
            return folder
    return None


def environment_folder(server: str, package: Path) -> Path:
    """Return the folder of the environment for one server (kit/optional.py).

    It is next to the environment that has nemo-gym. package: site-packages with nemo-gym.
    """
    base = package.parents[2]
    if not (base / "pyvenv.cfg").is_file():  # the packages of a system
        base = ROOT / ".venv-gym"
    return base.with_name(f"{base.name}-servers") / server


def list_versions(package: Path) -> list[str]:
    """Return the names of nemo-gym's .dist-info folders: one, with the version."""
    return sorted(path.name for path in package.glob("nemo_gym-*.dist-info"))
