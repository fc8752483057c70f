"""The kit's part of a recipe as types: the sections `gym:` and `env:`, and its other keys.

configs/base.yaml explains each key. The types are also the checks of these keys: `find_problems`
describes each value that has another type. Numbers have the rules of numbers.py.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Iterator
from typing import Annotated, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from env import Json
from gym_client import KINDS
from kit.recipe import numbers
from kit.recipe.entries import parse_entry
from kit.recipe.keys import KEYS, to_plain
from kit.recipe.numbers import Number, show

SPEC = "path.py:function, or {function: path.py:function, its settings}"


def follow(rule: Number, value: object) -> object:
    """Return a valid number. Raises ValueError."""
    if not rule.is_valid(value):
        raise ValueError(f"must be {rule.describe()}. Change it.")
    return value


def by(rule: Number) -> BeforeValidator:
    """Make the validator of a field with a number."""
    return BeforeValidator(functools.partial(follow, rule))


def check_spec(value: object) -> object:
    """Return the name of a function, or its name and settings. Raises ValueError."""
    if isinstance(value, str) or (isinstance(value, dict) and "function" in value):
        return value
    raise ValueError(f"is not a function. Write {SPEC}.")


def check_entry(value: object) -> object:
    """Return an entry of a list of files, which parse_entry reads. Raises ValueError."""
    if isinstance(value, (str, dict)):
        parse_entry(value)
        return value
    raise ValueError("is no file. Write a path, or {path: ..., ...}.")


def read_limits(value: object) -> object:
    """Return {server: limit} of gym.concurrency, which may be one limit. Raises ValueError."""
    return value if isinstance(value, dict) else {"default": follow(numbers.CONCURRENCY, value)}


def check_kind(kind: object, info: ValidationInfo) -> str:
    """Return the kind of a server, by default that of its `start`. Raises ValueError."""
    start = info.data.get("start")
    default = "verify"
    if start and start.agent:
        default = "environment" if start.environment else "agent"
    if kind and kind not in KINDS:
        raise ValueError(f"must be {', '.join(KINDS)}. Choose one.")
    if kind and start and start.agent and kind != default:
        raise ValueError(f"differs from start, whose agent makes it {default}. Remove kind.")
    return str(kind or default)


Count = Annotated[int, by(numbers.COUNT)]
CountOrZero = Annotated[int, by(numbers.COUNT_OR_ZERO)]
CountOrAll = Annotated[int | None, by(numbers.ALL)]  # None: all
Processes = Annotated[int | None, by(numbers.COUNT.with_words({None: "one per CPU core"}))]
PoolSize = Annotated[int | None, by(numbers.COUNT.with_words({None: "the actor's GPUs"}))]
Port = Annotated[int | None, by(numbers.PORT.with_words({None: "a free port"}))]
Seconds = Annotated[float, by(numbers.SECONDS)]
Fraction = Annotated[float, by(numbers.FRACTION)]
Concurrency = Annotated[int | Literal["auto"], by(numbers.CONCURRENCY)]
Url = Annotated[str, Field(pattern="^https?://")]
Settings = Json
Limits = Annotated[dict[str, Concurrency], BeforeValidator(read_limits)]
FunctionSpec = Annotated[str | Json, BeforeValidator(check_spec)]
FileEntry = Annotated[str | Json, BeforeValidator(check_entry)]


class Section(BaseModel):
    """A section of a recipe, which never changes."""

    # a text may come from a reference to a number
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


# --- gym -----------------------------------------------------------------------------------------


class ServerStart(Section):
    """A Gym server that the run starts. kit/verify/process_specs.py checks the machine."""

    python: str | None = None
    install: bool | None = None
    server: str | None = None
    path: str | None = None
    config: Settings | None = None
    global_config: Settings | None = None
    host: str | None = None
    port: Port = None
    agent: str | None = None
    agent_config: Settings | None = None
    environment: str | None = None
    env: list[str] | None = None

    @field_validator("agent_config", "environment")
    @classmethod
    def check_agent(cls, value: object, info: ValidationInfo) -> object:
        """Return a setting of an agent. Raises ValueError if there is no agent."""
        if value and not info.data.get("agent"):
            raise ValueError("is set without an agent. Add agent: simple_agent.")
        return value


class Server(Section):
    """A Gym server: one that runs at `url`, or one to start.

    kind: which of the server's routes the run calls. The server cannot choose it, since another
    kind may have other powers. If it is not set, it is that of `start`, or `verify`.
    """

    url: Url | None = None
    start: ServerStart | None = None
    kind: Annotated[str, BeforeValidator(check_kind), Field(validate_default=True)] = ""

    @model_validator(mode="after")
    def check_source(self) -> Server:
        """Raise ValueError unless the server has one source."""
        if (self.url is None) == (self.start is None):
            raise ValueError(
                "must have either url: http://host:port or start: {python, server, port, config}. "
                "Change it."
            )
        return self


class PolicyEndpointKeys(Section):
    """The OpenAI-compatible endpoint for agents."""

    host: Annotated[str, Field(min_length=1)]
    port: Port


class GymSection(Section):
    """The section `gym:`."""

    servers: dict[str, Server]
    judges: Json  # an optional feature parses it
    head_server: Url | None
    max_reward: Annotated[float, by(numbers.POSITIVE)]
    timeout_s: Seconds
    attempts: Count
    outage_budget_s: Annotated[float, by(Number(0, 10**9))]
    concurrency: Limits
    max_failed_frac: Fraction
    policy_endpoint: PolicyEndpointKeys


# --- env -----------------------------------------------------------------------------------------


class VerifierPool(Section):
    """The processes that run Python verifiers."""

    processes: Processes
    timeout_s: Seconds
    memory_gb: Annotated[float, by(numbers.POSITIVE)]
    sandbox: str | None
    readable: list[str]
    env: list[str]


class EnvSection(Section):
    """The section `env:`."""

    train_files: list[FileEntry]
    val_files: list[FileEntry]
    only_servers: list[str] | None
    verifier: FunctionSpec | None
    shadow_verifier: FunctionSpec | None
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

FULL_NAMES = {key.rpartition(".")[2]: key for key in KEYS.kit}


class ResourcePools(Section):
    """GPUs per node for one role, in addition to trainer.n_gpus_per_node."""

    critic: PoolSize
    ref: PoolSize
    reward_model: PoolSize

    def sizes(self) -> dict[str, int]:
        """{role: GPUs per node} of the roles with separate GPUs."""
        return {role: count for role, count in self.model_dump().items() if count}


class KitKeys(Section):
    """The kit's keys in verl's sections. Outside of Python they have their full names."""

    model_config = ConfigDict(alias_generator=FULL_NAMES.__getitem__)

    resource_pools: ResourcePools
    one_step_off: Annotated[int, by(Number(0, 1, is_whole=True))]
    print_samples_every: CountOrZero
    stage_timeout_s: Seconds
    allow_memory_over_estimate: bool
    recompute_old_log_probs: bool
    replay_min_ess: Fraction


class Sections(Section):
    """All that the kit adds to verl's configuration."""

    gym: GymSection
    env: EnvSection
    kit: KitKeys


def read_sections(config: DictConfig) -> Sections:
    """Read the kit's part of a valid configuration. Raises pydantic's ValidationError."""
    kit = {key: to_plain(OmegaConf.select(config, key)) for key in KEYS.kit}
    values = {"gym": to_plain(config.gym), "env": to_plain(config.env), "kit": kit}
    return Sections.model_validate(values)


# --- problems ------------------------------------------------------------------------------------


def find_problems(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each invalid value of the kit's part of a configuration.

    For an item of a list, it is the key of the list.
    """
    try:
        read_sections(config)
    except ValidationError as error:
        problems = error.errors()
    else:
        return
    for problem in problems:
        parts = itertools.takewhile(lambda part: isinstance(part, str), problem["loc"])
        key = ".".join(map(str, parts)).removeprefix("kit.")
        if problem["type"] == "extra_forbidden":
            names = (*Server.model_fields, *ServerStart.model_fields)  # others are known here
            similar = difflib.get_close_matches(key.rpartition(".")[2], names, n=1)
            hint = f"Did you mean {similar[0]}?" if similar else "Remove it."
            yield key, f"unknown key {key}. {hint}"
        else:
            reason = f"is invalid: {problem['msg']}. Change it."
            if problem["type"] == "value_error":
                reason = str(problem["ctx"]["error"])
            yield key, f"{key}={show(problem['input'])} {reason}"
