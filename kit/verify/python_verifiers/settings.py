"""Read the Python verifiers that a recipe names.

Convenience: a recipe names a function and its settings in one line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gym_client import Json
from kit import optional
from kit.errors import ConfigError, UserFunctionError
from kit.recipe import user_functions
from kit.recipe.entries import Entry
from kit.recipe.keys import TRAIN, VAL
from kit.recipe.python_files import find_user_file
from kit.recipe.schema import EnvSection
from kit.verify.python_verifiers.verl_scorer import CODE_SOURCES, runs_response

VERL = "verl"  # the name of verl's scorer in a recipe
VERIFIER_KEY = "env.verifier"
RAW_TEXT = "raw_text"  # the key next to `function` that is no setting of the function


@dataclass(frozen=True)
class VerifierSpec:
    """A Python verifier that the recipe names."""

    name: str  # in metrics and rollouts, which name a Gym server for other rows
    reference: str = field(compare=False)  # path.py:function, path.py:Class or verl
    key: str = field(compare=False)  # of the recipe
    path: str = ""  # of its file, empty for verl's scorer
    settings: Json = field(default_factory=dict)
    raw_text: bool = False  # whether it reads the whole response, with its thought

    def __str__(self) -> str:
        settings = {RAW_TEXT: True, **self.settings} if self.raw_text else self.settings
        return f"{self.reference} {settings}" if settings else self.reference

    def scores_code(self, data_source: object) -> bool:
        """Return whether responses to rows of a data source are code that verl's scorer runs."""
        return not self.path and data_source in CODE_SOURCES

    def runs_response(self, data_source: object) -> bool:
        """Return whether verl's scorer runs responses to a data source on this machine."""
        return not self.path and runs_response(data_source, self.settings)


@dataclass(frozen=True)
class PythonVerifiers:
    """The Python verifiers of a recipe, and its files of rows."""

    specs: Mapping[str, VerifierSpec]  # by name
    entries: Mapping[str, list[Entry]]  # {key: entries}; `server` also names a Python verifier


# --- read ----------------------------------------------------------------------------------------


def read_verifiers(env: EnvSection, servers: Collection[str]) -> PythonVerifiers:
    """Read the Python verifiers of a recipe. Raises UserFunctionError, ConfigError.

    servers: the names in gym.servers.
    """
    default = read_spec(env.verifier, VERIFIER_KEY) if env.verifier else None
    if env.environment:
        environment = optional.load("environment", "env.environment")
        default = environment.read_spec(env.environment, default)
    named = {default.name: default} if default else {}
    entries: dict[str, list[Entry]] = {}
    for key, listed in ((TRAIN, env.train_files), (VAL, env.val_files)):
        entries[key] = []
        for entry in listed:
            spec = read_spec(entry.verifier, f"{key}: verifier") if entry.verifier else default
            if spec and not entry.server:
                check_same(spec, named.setdefault(spec.name, spec))
                entry = entry._replace(server=spec.name)
            entries[key].append(entry)
    for name in named.keys() & set(servers):
        raise ConfigError(
            f"{named[name].key}={named[name].reference}: gym.servers has an entry {name}, too. "
            "Rename one."
        )
    return PythonVerifiers(named, entries)


def find_replaced_servers(env: EnvSection, servers: Iterable[str]) -> list[str]:
    """Return the Gym servers that no row uses: with a verifier, those that no file names.

    servers: the names in gym.servers.
    """
    if not env.verifier and not env.environment:
        return []
    used = {env.shadow_verifier} if isinstance(env.shadow_verifier, str) else set()
    used |= {entry.server for entry in (*env.train_files, *env.val_files)}
    return [name for name in servers if name not in used]


def read_spec(value: str | Json, key: str) -> VerifierSpec:
    """Read the value of a verifier key: a name, or `function` and its settings.

    Raises UserFunctionError.
    """
    settings = dict(value) if isinstance(value, Mapping) else {"function": value}
    reference = str(settings.pop("function", ""))
    raw_text = settings.pop(RAW_TEXT, False)
    if not isinstance(raw_text, bool):
        raise UserFunctionError(f"{key}: {RAW_TEXT}={raw_text} is not true or false. Correct it.")
    if reference == VERL:
        return VerifierSpec(VERL, VERL, key, "", settings, raw_text)
    name = reference.rpartition(":")[2]
    if not user_functions.is_user_function(reference) or not name.isidentifier():
        raise UserFunctionError(
            f"{key}={value} is not a Python verifier. Name path.py:function, path.py:Class or "
            f"{VERL}, or {{function: one of these, and its settings}}."
        )
    path = find_user_file(reference, key)
    return VerifierSpec(name, reference, key, str(path.resolve()), settings, raw_text)


def check_same(spec: VerifierSpec, other: VerifierSpec) -> None:
    """Check that two verifiers of one name are the same. Raises ConfigError."""
    if spec != other:
        raise ConfigError(
            f"two verifiers have the name {spec.name} in metrics: {other} and {spec}. Rename one "
            "function."
        )
