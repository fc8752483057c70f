"""Read the Python verifiers that a recipe names, and check their settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omegaconf import DictConfig

from gym_client import Json
from kit.config import user_functions
from kit.config.keys import to_plain
from kit.config.resources import cores
from kit.errors import ConfigError, UserFunctionError
from kit.extras.python_verifiers import sandbox
from kit.extras.python_verifiers.verl_scorer import runs_response

VERL = "verl"  # the name of verl's scorer in a recipe
VERIFIER_KEY = "env.verifier"
FILE_KEYS = ("env.train_files", "env.val_files")
SANDBOXES = (None, "bwrap")  # of env.verifier_pool.sandbox


@dataclass(frozen=True)
class VerifierSpec:
    """A Python verifier that the recipe names."""

    name: str  # in metrics and rollouts, which name a Gym server for other rows
    reference: str  # path.py:function, path.py:Class or verl, as in the recipe
    key: str  # of the recipe
    path: str = ""  # of its file, empty for verl's scorer
    settings: Json = field(default_factory=dict)


class RowFile(NamedTuple):
    """An entry of env.train_files or env.val_files."""

    entry: Any  # its `server` is the name of its Python verifier, if it has one
    verifier: VerifierSpec | None  # of its rows, None if a Gym server verifies them


# --- read ----------------------------------------------------------------------------------------


def read_spec(value: Any, key: str) -> VerifierSpec:
    """Read the value of a verifier key: a name, or `function` and its settings.

    Raises UserFunctionError.
    """
    settings = dict(value) if isinstance(value, Mapping) else {"function": value}
    reference = str(settings.pop("function", ""))
    if reference == VERL:
        return VerifierSpec(VERL, VERL, key, "", settings)
    name = reference.rpartition(":")[2]
    if not user_functions.is_user_function(reference) or not name.isidentifier():
        raise UserFunctionError(
            f"{key}={value} is not a Python verifier. Name path.py:function, path.py:Class or "
            f"{VERL}, or {{function: one of these, and its settings}}."
        )
    path = user_functions.find_function_file(reference, key)
    return VerifierSpec(name, reference, key, str(path.resolve()), settings)


def read_default(config: DictConfig) -> VerifierSpec | None:
    """Read env.verifier, the verifier of all files without another one.

    Raises UserFunctionError.
    """
    value = to_plain(config.env.verifier)
    return read_spec(value, VERIFIER_KEY) if value else None


def read_row_files(config: DictConfig, key: str) -> list[RowFile]:
    """Read the entries of env.train_files or env.val_files with their verifiers.

    Raises UserFunctionError, ConfigError.
    """
    default = read_default(config)
    entries = config.env[key.removeprefix("env.")] or []
    if isinstance(entries, str):  # invalid: kit/runs/prepare.py reports it
        return []
    return [read_row_file(entry, default, key) for entry in to_plain(entries)]


def read_row_file(entry: Any, default: VerifierSpec | None, key: str) -> RowFile:
    """Read an entry. A `verifier` or `server` in it replaces the default verifier.

    Raises UserFunctionError, ConfigError.
    """
    fields = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
    value = fields.pop("verifier", None)
    server = fields.get("server")
    if value and server:
        raise ConfigError(
            f"{key}: {fields.get('path')} has a server and a verifier. Remove one of them."
        )
    spec = default
    if value:
        spec = read_spec(value, f"{key}: verifier")
    elif server:
        spec = None
    if spec is None:
        return RowFile(entry, None)
    return RowFile(fields | {"server": spec.name}, spec)


def read_specs(config: DictConfig) -> dict[str, VerifierSpec]:
    """Read all Python verifiers of a recipe: {name: spec}.

    Raises UserFunctionError, ConfigError.
    """
    default = read_default(config)
    specs = [default] if default else []
    for key in FILE_KEYS:
        for file in read_row_files(config, key):
            if file.verifier:
                specs.append(file.verifier)
    named: dict[str, VerifierSpec] = {}
    for spec in specs:
        other = named.setdefault(spec.name, spec)
        check_name(spec, other, config.gym.servers)
    return named


def check_name(spec: VerifierSpec, other: VerifierSpec, servers: Mapping[str, Any]) -> None:
    """Check that no Gym server and no other verifier has the name. Raises ConfigError.

    other: the first verifier with this name, possibly the same.
    """
    if (other.path, other.settings) != (spec.path, spec.settings):
        raise ConfigError(
            f"two verifiers have the name {spec.name} in metrics: {describe_spec(other)} and "
            f"{describe_spec(spec)}. Rename one function."
        )
    if spec.name in servers:
        raise ConfigError(
            f"{spec.key}={spec.reference}: gym.servers has an entry {spec.name}, too. Rename one."
        )


def remove_unused_servers(config: DictConfig) -> None:
    """If env.verifier is set, remove the Gym servers that no file names: no row uses them."""
    if not config.env.verifier:
        return
    used = set()
    for key in FILE_KEYS:
        for entry in config.env[key.removeprefix("env.")] or ():
            if isinstance(entry, Mapping):
                used.add(entry.get("server"))
    for name in list(config.gym.servers):
        if name not in used:
            del config.gym.servers[name]
    if not config.gym.servers:
        config.gym.judges = {}  # only servers use judges


# --- check ---------------------------------------------------------------------------------------


def find_problems(config: DictConfig) -> Iterator[Exception]:
    """Check the verifiers of a recipe and their sandbox, without loading a verifier."""
    try:
        read_specs(config)
    except (UserFunctionError, ConfigError) as error:
        yield error
    yield from find_sandbox_problems(config.env.verifier_pool.get("sandbox"))


def find_sandbox_problems(name: Any) -> Iterator[Exception]:
    """Check env.verifier_pool.sandbox: it is known, and works on this machine."""
    if name not in SANDBOXES:
        yield ConfigError(
            f"env.verifier_pool.sandbox={name} is not supported. Choose null or bwrap."
        )
        return
    problem = sandbox.find_problem() if name else ""
    if problem:
        yield ConfigError(f"env.verifier_pool.sandbox={name}: {problem}, or set it to null.")


def runs_policy_code(spec: VerifierSpec, data_sources: Iterable[Any]) -> bool:
    """Return whether verl's scorer runs code of the policy on this machine for these rows."""
    if spec.path:
        return False
    return any(runs_response(source, spec.settings) for source in data_sources)


# --- describe ------------------------------------------------------------------------------------


def describe(config: DictConfig, specs: Sequence[VerifierSpec]) -> str:
    """Describe the verifiers and their processes, for the summary of a recipe."""
    names = ", ".join(describe_spec(spec) for spec in specs)
    pool = config.env.verifier_pool
    return (
        f"{names}: {count_processes(config)} processes, {pool.timeout_s:g} s a call, "
        f"{pool.memory_gb:g} GiB each"
    )


def describe_spec(spec: VerifierSpec) -> str:
    """Return the reference of a verifier, with its settings if it has some."""
    return f"{spec.reference} {spec.settings}" if spec.settings else spec.reference


def count_processes(config: DictConfig) -> int:
    """Return env.verifier_pool.processes, or the number of cores if it is null."""
    return config.env.verifier_pool.processes or cores()
