"""Optional features: the class that they derive from, and the table by which the kit finds them.

Each entry of ENTRIES is a module or folder that you can delete. A key of the recipe or a command
turns a feature on. If you delete a feature, recipes that do not turn it on keep working. A recipe
that does gets one error with its name. No other part of the kit names a feature.

A run has an object of each feature that is on (Recipe.features). The kit calls the methods of
`Feature` on all of them. `load` imports other parts when a command, a model or rows need them.

Every process may import this file, so it imports only light modules.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast

from kit.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from types import ModuleType, TracebackType

    from omegaconf import DictConfig
    from transformers import PretrainedConfig

    from gym_client import Gym
    from inference import OnDone, Servers
    from kit.data.episode import Episode
    from kit.engine.inputs import RunInputs
    from kit.engine.sampling import EpisodeRequest, RolloutContext, Sampling
    from kit.recipe.recipe import Recipe
    from kit.run.launch import Launch
    from kit.verify.python_verifiers.settings import VerifierSpec

Result = TypeVar("Result")


class Feature:
    """A feature of a run. The methods are all that the kit calls; here, each does nothing.

    A feature parses its keys once, in its constructor, when the recipe is not checked yet. Later it
    never changes: other processes get copies of it. What it starts belongs to `Launch.stack`.
    """

    def __init__(self, config: DictConfig, command: str):
        """Parse the recipe. command: train, rollout, evaluate or sft."""
        self.command = command

    # --- before the recipe is complete; problems are exceptions or texts ---

    def begin_imports(self, config: DictConfig) -> None:
        """Start work that can overlap with the checks. Not called in a dry run."""

    def check_recipe(self, config: DictConfig) -> Iterable[Exception | str]:
        """Return the problems that can be found without verl."""
        return ()

    def set_sizes(self, config: DictConfig, hf_config: PretrainedConfig) -> None:
        """Set values that follow from the model. hf_config: its Hugging Face configuration."""

    # --- the complete recipe ---

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterable[Exception | str]:
        """Return problems with the sizes of the model."""
        return ()

    def check_inputs(self, recipe: Recipe, inputs: RunInputs) -> None:
        """Check the loaded rows, and servers that the run needs. Raises ConfigError."""

    def summary_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return lines of the summary."""
        return ()

    def warnings(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return warnings, one line each."""
        return ()

    def dry_run_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return more lines of a dry run."""
        return ()

    # --- while the run starts (kit/run/launch.py) ---

    def before_gym(self, launch: Launch) -> None:
        """Start processes that the Gym servers need, or plan those to start with them."""

    def before_ray(self, launch: Launch) -> None:
        """Start processes that Ray needs. Add what has to wait for Ray to launch.on_ray."""

    def make_loop(self) -> EventLoop | None:
        """Return an event loop to use in place of make_runner's."""
        return None

    def start_episode_workers(
        self, launch: Launch, context: RolloutContext, urls: Mapping[str, str]
    ) -> EpisodeWorkers | None:
        """Start processes that run the episodes. urls: {Gym server: url}."""
        return None

    def servers_class(self) -> type[Servers] | None:
        """Return a class to use in place of inference.Servers."""
        return None

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Start what needs the workers. addresses: HTTP servers of the rollout engine."""

    def verifiers(self) -> Mapping[str, VerifierSpec]:
        """Return further Python verifiers, which no row names: {name: verifier}."""
        return {}

    # --- while it runs ---

    async def after_episode(self, episode: Episode, gym: Gym) -> None:
        """Look at a verified episode, in any process, and maybe add to its `measures`."""

    def sandbox_command(self, command: Sequence[str], readable: Sequence[Path]) -> list[str] | None:
        """Return the command line that runs a verifier process in a sandbox.

        readable: the files and folders that the process reads.
        """
        return None

    def write_report(self, folder: Path) -> Iterable[str]:
        """Write the report of a run, and return lines about its first finding. folder: its own."""
        return ()

    def write_export(self, recipe: Recipe, folder: Path) -> None:
        """Add files to the export of a run, which is complete. folder: of the run."""


class EventLoop(Protocol):
    """The methods of asyncio.Runner that a run uses."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def get_loop(self) -> asyncio.AbstractEventLoop: ...

    def run(self, work: Coroutine[Any, Any, Result], /) -> Result: ...


class EpisodeWorkers(Protocol):
    """Processes that run episodes in place of the driver (inference.py)."""

    async def rollout(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_done: OnDone,
        baselines: bool = False,
    ) -> list[Episode]: ...

    def set_policy_version(self, step: int) -> None: ...

    def mark_restarted(self, server: str) -> None: ...

    def metrics(self) -> dict[str, float]: ...


OnFeatures: TypeAlias = "Callable[[Sequence[Feature], DictConfig], None]"


def ignore_features(features: Sequence[Feature], config: DictConfig) -> None:
    """Do nothing: the default of `on_features`."""


def first(results: Iterable[Result | None]) -> Result | None:
    """Return the first result that is not None, if there is one."""
    return next((result for result in results if result is not None), None)


# --- what turns a feature on ---------------------------------------------------------------------


def always(config: DictConfig, command: str) -> bool:
    """For features that every run uses."""
    return True


def trains(config: DictConfig, command: str) -> bool:
    """Whether the command trains a model, which it exports."""
    return command in ("train", "sft")


def starts_servers(config: DictConfig, command: str) -> bool:
    """Whether the run starts a Gym server, whose settings may name a judge."""
    servers = [server for server in config.gym.servers.values() if isinstance(server, Mapping)]
    return command != "sft" and any(server.get("start") for server in servers)


def uses_megatron(config: DictConfig, command: str) -> bool:
    """Whether Megatron trains."""
    return bool(config.model_engine == "megatron")


def uses_other_backend(config: DictConfig, command: str) -> bool:
    """Whether sampling uses SGLang, transformers, fp8 or speculative decoding."""
    rollout = config.actor_rollout_ref.rollout
    engine_kwargs = rollout.engine_kwargs
    return bool(
        rollout.name != "vllm"
        or rollout.quantization
        or engine_kwargs.get("sglang")
        or (engine_kwargs.get("vllm") or {}).get("speculative_config")
    )


def uses_gloo(config: DictConfig, command: str) -> bool:
    """Whether weights are sent to separate servers by gloo."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    return bool(command == "train" and engine.backend == "gloo")


def uses_monitor(config: DictConfig, command: str) -> bool:
    """Whether the run serves metrics to Prometheus."""
    return bool(config.actor_rollout_ref.rollout.prometheus.enable)


def samples_ahead(config: DictConfig, command: str) -> bool:
    """Whether the next batch is sampled while this one is trained on."""
    return bool(command == "train" and config.trainer.one_step_off == 1)


def forks_workers(config: DictConfig, command: str) -> bool:
    """Whether workers are forked from a process that has imported their modules."""
    is_other_cluster = config.ray_kwargs.ray_init.get("address")
    return bool(os.environ.get("PRELOAD_MODULES")) and not is_other_cluster


class Entry(NamedTuple):
    """A feature that can be deleted."""

    module: str
    class_name: str  # of its Feature
    turned_on_by: str  # a key of the recipe, or a command
    # None: the key turned_on_by, unless the command is sft, which has no episodes
    is_on: Callable[[DictConfig, str], bool] | None = None
    is_optional: bool = False  # True: a run that turns it on also works without it

    def is_needed(self, config: DictConfig, command: str) -> bool:
        """Whether a recipe or a command turns the feature on."""
        if self.is_on:
            return self.is_on(config, command)
        return command != "sft" and bool(operator.attrgetter(self.turned_on_by)(config))


ENTRIES = (
    Entry("extras.preflight", "Preflight", "every run", always, True),
    Entry("extras.supervisor", "Supervisor", "every run", always, True),
    Entry("lab.features", "Report", "every run", always, True),
    Entry("lab.features", "RunCard", "every run", trains, True),
    Entry("extras.judges", "ServerJudges", "a Gym server", starts_servers, True),
    Entry("extras.judges", "Judges", "gym.judges"),
    Entry("extras.policy_programs", "PolicyPrograms", "env.verifier_pool.sandbox"),
    Entry("extras.shadow_verifier", "ShadowVerifier", "env.shadow_verifier"),
    Entry("extras.megatron", "Megatron", "model_engine", uses_megatron),
    Entry("extras.backends", "Backends", "an option of the rollout engine", uses_other_backend),
    Entry("extras.gloo", "Gloo", "checkpoint_engine.backend=gloo", uses_gloo),
    Entry("extras.monitor", "Monitor", "rollout.prometheus.enable", uses_monitor),
    Entry("extras.one_step_off", "OneStepOff", "trainer.one_step_off", samples_ahead),
    Entry(
        "extras.rollout_workers", "RolloutWorkers", "actor_rollout_ref.rollout.agent.num_workers"
    ),
    Entry("kit.cpu.fork_server", "Preload", "PRELOAD_MODULES", forks_workers),
)


def make_features(config: DictConfig, command: str) -> tuple[Feature, ...]:
    """Make the features that a recipe and a command turn on, in the order of ENTRIES."""
    made = []
    for entry in ENTRIES:
        if entry.is_needed(config, command) and is_installed(entry.module):
            module = importlib.import_module(entry.module)
            feature = cast("type[Feature]", getattr(module, entry.class_name))
            made.append(feature(config, command))
    return tuple(made)


def find_missing(config: DictConfig, command: str) -> list[ConfigError]:
    """Return an error for each feature that a recipe turns on, and that was deleted."""
    required = [entry for entry in ENTRIES if not entry.is_optional]
    needed = [entry for entry in required if entry.is_needed(config, command)]
    missing = [entry for entry in needed if not is_installed(entry.module)]
    return [missing_error(entry.module, entry.turned_on_by) for entry in missing]


def missing_error(module: str, turned_on_by: str) -> ConfigError:
    """Return the error about a feature that was deleted."""
    path = module.replace(".", "/")
    return ConfigError(
        f"{turned_on_by} needs {path}, which this copy does not have. Restore it, or remove that "
        "key or command."
    )


@functools.cache
def is_installed(module: str) -> bool:
    """Return whether a module or folder is there."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent folder is missing
        return False


# --- parts that a command, a model or rows need --------------------------------------------------

# The commands of optional features that train without episodes: {name: its module}
COMMANDS: Mapping[str, str] = {"sft": "extras.sft"}
# The commands that start no run, or several: {name: the module whose `main` it is}
TOOLS: Mapping[str, str] = {
    "show": "lab.report.show",
    "compare": "lab.evidence.compare",
    "sweep": "lab.evidence.sweep",
    "explain": "lab.explain.command",
    "probe": "lab.probe.command",
    "price": "lab.price",
}
# {part: its module}
PARTS: Mapping[str, str] = {
    "images": "extras.images",  # of a model that reads images
    "environments": "extras.gym_environments",  # of servers that require more packages
    "programs": "extras.policy_programs.program_scores",  # scores responses that are code
    "rows": "lab.convert",  # converts files of rows
}


def load(name: str, needed_by: str) -> ModuleType:
    """Return the module of a command, a tool or a part. Raises ConfigError if it was deleted.

    needed_by: a key of the recipe, or another reason, for the message.
    """
    module = {**COMMANDS, **TOOLS, **PARTS}[name]
    if not is_installed(module):
        raise missing_error(module, needed_by)
    return importlib.import_module(module)
