"""Environments that others wrote, by their address: env.environment of a recipe.

    {openenv: URL}          an OpenEnv server; or {command: [..., "{port}"]}: the run starts it
    {mcp: URL}              the tools of an MCP server without state
    {mcp: {command: ...}}   the same with state: a process for each episode, in a folder {dir}
    {trl_class: FILE:NAME}  an environment class for TRL's GRPOTrainer

They are used for rows that name no server and no verifier. An OpenEnv server and a TRL class return
the reward. To the tools of MCP belongs env.verifier. docs/guides/environments.md has examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    DirectoryPath,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from env import Json, render_tools
from kit.errors import ConfigError
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck
from kit.verify.python_verifiers.settings import VERIFIER_KEY, VerifierSpec

if TYPE_CHECKING:
    from kit.engine.inputs import RunInputs
    from kit.recipe.recipe import Recipe
    from kit.verify.python_verifiers.pool import SessionSource

KEY = "env.environment"
KEYS = (KEY, VERIFIER_KEY)  # of the verifiers whose rows use it
SECTION = ConfigDict(frozen=True, extra="forbid")


class Command(BaseModel):
    """A program that the run starts. {port} and {dir} in its words are replaced."""

    model_config = SECTION
    command: list[str]
    start_timeout_s: PositiveFloat = 120.0


class OpenEnvSettings(BaseModel):
    """An OpenEnv server."""

    model_config = SECTION
    openenv: str | Command
    reward: Literal["sum", "last"] = "sum"  # of an episode: of its steps' rewards
    action: str | None = None  # the field that gets the policy's text; null: found, or JSON
    observation: str | None = None  # the field that the policy reads; null: all, as JSON


class McpSettings(BaseModel):
    """An MCP server."""

    model_config = SECTION
    mcp: str | Command
    files: DirectoryPath | None = None  # a folder, whose copy is {dir}; null: {dir} is empty
    processes: PositiveInt = 32  # concurrent ones; further episodes wait


class TrlSettings(BaseModel):
    """An environment class for TRL."""

    model_config = SECTION
    trl_class: str
    reward: str | None = None  # a reward function FILE:NAME; null: the class has get_reward


EnvironmentSettings = OpenEnvSettings | McpSettings | TrlSettings
KINDS: Mapping[str, type[EnvironmentSettings]] = {
    "openenv": OpenEnvSettings,
    "mcp": McpSettings,
    "trl_class": TrlSettings,
}


def parse(value: Json) -> EnvironmentSettings:
    """Parse env.environment. Raises ConfigError."""
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        raise ConfigError(
            f"{KEY}={value} must have one of {', '.join(KINDS)}. Change it. An environment of the "
            "library verifiers is an agent: add --config verifiers (docs/guides/verifiers_hub.md)."
        )
    try:
        return KINDS[kinds[0]].model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{KEY}.{place}: {first['msg']}. Correct it.") from None


def read_spec(value: Json, verifier: VerifierSpec | None) -> VerifierSpec:
    """Return the verifier of the rows: that of the environment, for MCP env.verifier.

    Raises ConfigError.
    """
    settings = parse(value)
    if isinstance(settings, McpSettings):
        if verifier is None:
            raise ConfigError(f"{KEY}.mcp gives no reward. Set {VERIFIER_KEY}.")
        return verifier
    if verifier:
        raise ConfigError(f"{KEY} gives the reward, so {VERIFIER_KEY} has no use. Remove one.")
    folder = Path(__file__).resolve().parent
    if isinstance(settings, OpenEnvSettings):
        path = str(folder / "openenv.py")
        return VerifierSpec("OpenEnv", show(settings.openenv), KEY, path, has_processes=False)
    return VerifierSpec(
        "TrlEnvironment",
        settings.trl_class,
        KEY,
        str(folder / "trl_class.py"),
        settings.model_dump(exclude_none=True),
    )


def show(address: str | Command) -> str:
    """Return a URL, or the words of a command."""
    return address if isinstance(address, str) else " ".join(address.command)


def replace_pools(
    pools: Mapping[str, SessionSource], recipe: Recipe, logs: Path
) -> dict[str, SessionSource]:
    """Return the sources of sessions of a run: {name of the verifier: its pool, or a client}."""
    from extras.environments.mcp import McpTools
    from extras.environments.openenv import OpenEnvClient

    settings = parse(recipe.env.environment or {})
    replaced = dict(pools)
    for name, pool in pools.items():
        if isinstance(settings, OpenEnvSettings) and pool.spec.key == KEY:
            replaced[name] = OpenEnvClient(pool.spec, settings, recipe, logs)
        elif isinstance(settings, McpSettings) and pool.spec.key == VERIFIER_KEY:
            replaced[name] = McpTools(pool, settings, recipe, logs)
    return replaced


class Environments(RecipeCheck):
    """An environment by its address."""

    def __init__(self, settings: Settings):
        self.tools: list[Json] = []  # of the environment, in the format of a chat

    def list_tools(self, settings: Settings) -> list[Json]:
        """Return the tools of the environment, which rows without tools get. Raises ConfigError."""
        environment = parse(settings.env.environment or {})
        if isinstance(environment, McpSettings):
            from extras.environments.mcp import list_tools

            self.tools = render_tools(list_tools(environment, settings), KEY)
        elif isinstance(environment, TrlSettings):
            from extras.environments.trl_class import describe_tools

            tools = describe_tools(environment.trl_class, environment.reward, KEY)
            self.tools = render_tools(tools, KEY)
        return self.tools

    def check_inputs(self, recipe: Recipe, inputs: RunInputs) -> None:
        """Check that the environment has the tools that rows name. Raises ConfigError."""
        specs = inputs.verifiers.specs
        known = {tool["function"]["name"] for tool in self.tools}
        for task in inputs.tasks:
            is_other = task.server not in specs or specs[task.server].key not in KEYS
            missing = {tool["function"]["name"] for tool in task.tools} - known
            if known and missing and not is_other:
                raise ConfigError(
                    f"{task.row_id}: the row has the tools {', '.join(sorted(missing))}, but {KEY} "
                    f"has {', '.join(sorted(known))}. Correct the tools of the row, or remove them."
                )

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return the list of tools."""
        names = [tool["function"]["name"] for tool in self.tools]
        return [f"tools       {', '.join(names)}"] if names else []
