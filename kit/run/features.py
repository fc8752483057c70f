"""Optional features: the three classes that they derive from, and the table that names them.

Each entry of ENTRIES is a module or folder that you can delete. A key of the recipe or a command
turns a feature on. If you delete a feature, recipes that do not turn it on keep working. A recipe
that does gets one error with its name. No other part of the kit names a feature.

A feature parses its keys once, in its constructor, when the recipe is not checked yet. Later it
never changes: other processes get copies of it. Its class derives from one or several of these:

    RecipeCheck   prepare.py and summary.py call it, before anything starts
    RunPart       launch.py calls it, while the run starts and runs
    RunOutput     run_files.py calls it, for what a run leaves behind

Convenience: a fork may delete what it does not use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kit.errors import ConfigError
from kit.optional import is_installed, missing_error
from kit.recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from gym_client import Gym, Json
    from inference import Servers
    from kit.data.episode import Episode
    from kit.engine.inputs import RunInputs
    from kit.engine.interfaces import EpisodeWorkers, EventLoop
    from kit.engine.sampling import Agent, RolloutContext
    from kit.recipe.recipe import Recipe
    from kit.run.launch import Launch
    from kit.verify.python_verifiers.settings import VerifierSpec


class RecipeCheck:
    """A check of the recipe. Each method does nothing unless a feature has it."""

    def __init__(self, settings: Settings):
        """Parse the keys of the feature."""

    def begin_imports(self, settings: Settings) -> None:
        """Start work that can overlap with the checks. Not called in a dry run."""

    def check_start(self, settings: Settings) -> Iterable[str]:
        """Return what this machine lacks to start the run. Not called in a dry run."""
        return ()

    def check_settings(self, settings: Settings) -> Iterable[Exception | str]:
        """Return the problems that can be found without verl."""
        return ()

    def derive(self, settings: Settings, hf_config: PretrainedConfig) -> Mapping[str, object]:
        """Return {dotted key: value} of values that follow from others and from the model."""
        return {}

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterable[str]:
        """Return problems with the sizes of the model."""
        return ()

    def list_tools(self, settings: Settings) -> list[Json]:
        """Return the tools of rows that have none, in the format of a chat. Raises ConfigError."""
        return []

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


class RunPart:
    """A part of a run. What it starts belongs to `Launch.stack`."""

    def __init__(self, settings: Settings):
        """Parse the keys of the feature."""

    def before_gym(self, launch: Launch) -> None:
        """Start processes that the Gym servers need, or plan those to start with them."""

    def before_ray(self, launch: Launch) -> None:
        """Start processes that Ray needs. Add what has to wait for Ray to launch.on_ray."""

    def make_loop(self) -> EventLoop | None:
        """Return an event loop to use in place of make_runner's."""
        return None

    def verifiers(self) -> Mapping[str, VerifierSpec]:
        """Return further Python verifiers, which no row names: {name: verifier}."""
        return {}

    def start_episode_workers(
        self, launch: Launch, context: RolloutContext, urls: Mapping[str, str]
    ) -> EpisodeWorkers | None:
        """Start processes that run the episodes. urls: {Gym server: url}."""
        return None

    def servers_class(self) -> type[Servers] | None:
        """Return a class to use in place of inference.Servers."""
        return None

    def make_agent(self, launch: Launch, context: RolloutContext) -> Agent | None:
        """Return an agent that runs the turns of the episodes."""
        return None

    def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
        """Start what needs the workers. addresses: HTTP servers of the rollout engine."""

    async def after_episode(self, episode: Episode, gym: Gym) -> None:
        """Look at a verified episode, in any process, and maybe add to its `measures`."""


class RunOutput:
    """An output of a run."""

    def __init__(self, settings: Settings):
        """Parse the keys of the feature."""

    def write_report(self, folder: Path) -> Iterable[str]:
        """Write the report of a run, and return lines about its first finding. folder: its own."""
        return ()

    def describe_episodes(self, episodes: Sequence[Episode]) -> Iterable[str]:
        """Return lines about the episodes of `rollout` and `evaluate`."""
        return ()

    def write_export(self, recipe: Recipe, folder: Path) -> None:
        """Add files to the export of a run, which is complete. folder: of the run."""


class Features(NamedTuple):
    """The features that a recipe and a command turn on, in the order of ENTRIES."""

    checks: tuple[RecipeCheck, ...] = ()
    parts: tuple[RunPart, ...] = ()
    outputs: tuple[RunOutput, ...] = ()


# --- what turns a feature on ---------------------------------------------------------------------


def always(settings: Settings) -> bool:
    """For features that every run uses."""
    return True


def starts_servers(settings: Settings) -> bool:
    """Return whether the run starts a Gym server, whose settings may name a judge."""
    return settings.has_episodes and any(each.start for each in settings.gym.servers.values())


def uses_megatron(settings: Settings) -> bool:
    """Return whether Megatron trains."""
    return settings.model_engine == "megatron"


def uses_other_backend(settings: Settings) -> bool:
    """Return whether sampling uses SGLang, transformers, fp8 or speculative decoding."""
    rollout = settings.rollout
    vllm = rollout.engine_kwargs.get("vllm") or {}
    return bool(
        rollout.name != "vllm"
        or rollout.quantization
        or rollout.engine_kwargs.get("sglang")
        or vllm.get("speculative_config")
    )


def uses_gloo(settings: Settings) -> bool:
    """Return whether weights are sent to separate servers by gloo."""
    return settings.command == "train" and settings.rollout.checkpoint_engine.backend == "gloo"


def samples_ahead(settings: Settings) -> bool:
    """Return whether the next batch is sampled while this one is trained on."""
    return settings.command == "train" and settings.trainer.one_step_off == 1


def forks_workers(settings: Settings) -> bool:
    """Return whether workers are forked from a process that has imported their modules."""
    is_other_cluster = settings.ray_kwargs.ray_init.get("address")
    return bool(os.environ.get("PRELOAD_MODULES")) and not is_other_cluster


class Entry(NamedTuple):
    """A feature that can be deleted."""

    module: str
    class_name: str  # of its feature
    turned_on_by: str  # a key of the recipe, or a command
    # None: the key turned_on_by, unless the command has no episodes
    is_on: Callable[[Settings], bool] | None = None
    may_be_missing: bool = False  # True: a run that turns it on also works without it

    def is_needed(self, settings: Settings) -> bool:
        """Return whether a recipe and its command turn the feature on."""
        if self.is_on:
            return self.is_on(settings)
        return settings.has_episodes and bool(settings.get(self.turned_on_by))


ENTRIES = (
    Entry("extras.preflight", "Preflight", "every run", always, True),
    Entry("extras.supervisor", "Supervisor", "every run", always, True),
    Entry("lab.features", "Report", "every run", always, True),
    Entry("lab.features", "RunCard", "every run", lambda settings: settings.trains, True),
    Entry("extras.judges", "ServerJudges", "a Gym server", starts_servers, True),
    Entry("extras.judges", "Judges", "gym.judges"),
    Entry("extras.policy_programs", "PolicyPrograms", "env.verifier_pool.sandbox"),
    Entry("extras.agents", "Agents", "env.agent"),
    Entry("extras.environments", "Environments", "env.environment"),
    Entry("extras.shadow_verifier", "ShadowVerifier", "env.shadow_verifier"),
    Entry("extras.megatron", "Megatron", "model_engine", uses_megatron),
    Entry("extras.backends", "Backends", "an option of the rollout engine", uses_other_backend),
    Entry("extras.gloo", "Gloo", "checkpoint_engine.backend=gloo", uses_gloo),
    Entry("extras.monitor", "Monitor", "actor_rollout_ref.rollout.prometheus.enable"),
    Entry("extras.one_step_off", "OneStepOff", "trainer.one_step_off", samples_ahead),
    Entry(
        "extras.rollout_workers", "RolloutWorkers", "actor_rollout_ref.rollout.agent.num_workers"
    ),
    Entry("kit.cpu.fork_server", "Preload", "PRELOAD_MODULES", forks_workers),
)


def make_features(settings: Settings) -> Features:
    """Make the features that a recipe and its command turn on."""
    made: list[object] = []
    for entry in ENTRIES:
        if entry.is_needed(settings) and is_installed(entry.module):
            feature = getattr(importlib.import_module(entry.module), entry.class_name)
            made.append(feature(settings))
    return Features(
        tuple(feature for feature in made if isinstance(feature, RecipeCheck)),
        tuple(feature for feature in made if isinstance(feature, RunPart)),
        tuple(feature for feature in made if isinstance(feature, RunOutput)),
    )


def find_missing(settings: Settings) -> list[ConfigError]:
    """Return an error for each feature that a recipe turns on, and that was deleted."""
    needed = [entry for entry in ENTRIES if entry.is_needed(settings)]
    missing = [each for each in needed if not each.may_be_missing and not is_installed(each.module)]
    return [missing_error(entry.module, entry.turned_on_by) for entry in missing]
