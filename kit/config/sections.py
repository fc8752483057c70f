"""The kit's part of a recipe as types: the sections `gym:` and `env:`, and its other keys.

configs/base.yaml explains each key. Numbers have the rules of numbers.py, which also turn a value
such as -1 into the one that the code reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from kit.config import numbers
from kit.config.keys import to_plain
from kit.config.numbers import Number, show


def follow(rule: Number, value: Any) -> Any:
    """Return a number as the code reads it. Raises ValueError."""
    if not rule.is_valid(value):
        raise ValueError(f"must be {rule.describe()}. Change it.")
    return rule.normalize(value)


def by(rule: Number) -> BeforeValidator:
    """Make the validator of a field with a number."""
    return BeforeValidator(functools.partial(follow, rule))


Count = Annotated[int, by(numbers.COUNT)]
CountOrZero = Annotated[int, by(numbers.COUNT_OR_ZERO)]
CountOrAll = Annotated[int | None, by(numbers.ALL)]  # None: all
Seconds = Annotated[float, by(numbers.SECONDS)]
Fraction = Annotated[float, by(numbers.FRACTION)]
Concurrency = Annotated[int | Literal["auto"], by(numbers.CONCURRENCY)]


def check_spec(value: Any) -> Any:
    """Return the name of a function, or its name and settings. Raises ValueError."""
    is_spec = isinstance(value, str) or (isinstance(value, dict) and "function" in value)
    if not is_spec:
        raise ValueError(f"is not a function. Write {SPEC}.")
    return value


SPEC = "path.py:function, or {function: path.py:function, its settings}"
FunctionSpec = Annotated[str | dict[str, Any], BeforeValidator(check_spec)]
NO_NAMES: Mapping[str, str] = MappingProxyType({})


class Section(BaseModel):
    """A section of a recipe, which never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, node: Any) -> Self:
        """Read a valid section of a configuration. Raises pydantic's ValidationError."""
        return cls.model_validate(to_plain(node))


# --- gym -----------------------------------------------------------------------------------------


class ServerStart(Section):
    """A Gym server that the run starts. kit/gym/process_specs.py explains the keys."""

    python: str | None = None
    install: bool = False
    server: str | None = None
    path: str | None = None
    config: dict[str, Any] = {}
    global_config: dict[str, Any] = {}
    host: str | None = None
    port: Annotated[int | None, by(numbers.PORT.with_words({None: "a free port"}))] = None
    agent: str | None = None
    agent_config: dict[str, Any] = {}
    environment: str | None = None
    env: list[str] = []


class Server(Section):
    """A Gym server: one that runs at `url`, or one to start."""

    url: str | None = None
    start: ServerStart | None = None


class PolicyEndpointKeys(Section):
    """The OpenAI-compatible endpoint for agents."""

    host: str
    port: Annotated[int | None, by(numbers.PORT.with_words({None: "a free port"}))]


class GymSection(Section):
    """The section `gym:`."""

    servers: dict[str, Server]
    judges: dict[str, Any]  # an optional feature parses it
    unchecked_judges: list[str] = []
    head_server: str | None
    timeout_s: Seconds
    attempts: Count
    outage_budget_s: Annotated[float, by(Number(0, 10**9))]
    concurrency: Concurrency | dict[str, Concurrency]
    max_failed_frac: Fraction
    policy_endpoint: PolicyEndpointKeys


# --- env -----------------------------------------------------------------------------------------


class VerifierPool(Section):
    """The processes that run Python verifiers."""

    processes: Annotated[int | None, by(numbers.COUNT.with_words({None: "one per CPU core"}))]
    timeout_s: Seconds
    memory_gb: Annotated[float, by(numbers.POSITIVE)]
    sandbox: str | None
    env: list[str]


class EnvSection(Section):
    """The section `env:`."""

    train_files: list[str | dict[str, Any]]
    val_files: list[str | dict[str, Any]]
    only_servers: list[str] | None
    verifier: FunctionSpec | None
    verifier_pool: VerifierPool
    allow_unsandboxed_code: bool
    sampler: FunctionSpec | None
    filters: list[FunctionSpec]
    reward: FunctionSpec | None
    image_hosts: list[str]
    max_rows: CountOrAll
    val_max_rows: CountOrAll
    keep_rollouts: CountOrAll


# --- the kit's keys next to verl's ---------------------------------------------------------------

PoolSize = Annotated[int | None, by(numbers.COUNT.with_words({None: "the actor's GPUs"}))]


class ResourcePools(Section):
    """GPUs per node for one role, in addition to trainer.n_gpus_per_node."""

    critic: PoolSize
    ref: PoolSize
    reward_model: PoolSize

    def sizes(self) -> dict[str, int]:
        """{role: GPUs per node} of the roles with separate GPUs."""
        return {role: count for role, count in self.model_dump().items() if count}


class KitKeys(Section):
    """The kit's keys in verl's sections. KIT_KEYS has their full names."""

    resource_pools: ResourcePools
    one_step_off: Annotated[int, by(Number(0, 1, is_whole=True))]
    print_samples_every: CountOrZero
    stage_timeout_s: Seconds
    allow_memory_over_estimate: bool
    recompute_old_log_probs: bool


KIT_KEYS = {
    "resource_pools": "trainer.resource_pools",
    "one_step_off": "trainer.one_step_off",
    "print_samples_every": "trainer.print_samples_every",
    "stage_timeout_s": "trainer.stage_timeout_s",
    "allow_memory_over_estimate": "trainer.allow_memory_over_estimate",
    "recompute_old_log_probs": "algorithm.recompute_old_log_probs",
}


class Sections(NamedTuple):
    """All that the kit adds to verl's configuration."""

    gym: GymSection
    env: EnvSection
    kit: KitKeys


def read_sections(config: DictConfig) -> Sections:
    """Read the kit's part of a valid configuration. Raises pydantic's ValidationError."""
    values = {name: OmegaConf.select(config, key) for name, key in KIT_KEYS.items()}
    kit = KitKeys.model_validate({name: to_plain(value) for name, value in values.items()})
    return Sections(GymSection.read(config.gym), EnvSection.read(config.env), kit)


# --- problems ------------------------------------------------------------------------------------

# {a type of pydantic's error: what the value must be, and the fix}
REASONS = {
    "extra_forbidden": "is unknown. Remove it.",
    "missing": "is missing. Set it.",
    "string_type": "must be a text. Give one.",
    "bool_type": "must be true or false. Change it.",
    "bool_parsing": "must be true or false. Change it.",
    "list_type": "must be a list. Write [...].",
    "dict_type": "is a section of keys. Set its keys.",
    "model_type": "is a section of keys. Set its keys.",
}


def find_problems(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each invalid value of the kit's part of a configuration."""
    own = {name: to_plain(OmegaConf.select(config, key)) for name, key in KIT_KEYS.items()}
    yield from describe_problems(GymSection, to_plain(config.gym), "gym.")
    yield from describe_problems(EnvSection, to_plain(config.env), "env.")
    yield from describe_problems(KitKeys, own, "", KIT_KEYS)


def describe_problems(
    section: type[Section], values: Any, prefix: str, names: Mapping[str, str] = NO_NAMES
) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each invalid value of a section. names: {field: key}."""
    try:
        section.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    else:
        return
    for problem in problems:
        first, *others = (str(part) for part in problem["loc"])
        key = ".".join([prefix + names.get(first, first), *others])
        reason = REASONS.get(problem["type"], problem["msg"])
        if problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"])
        yield key, f"{key}={show(problem['input'])} {reason}"
