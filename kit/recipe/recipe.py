"""The recipe of a run: verl's configuration, the kit's sections, and everything that follows.

`kit/run/prepare.py` makes a `Recipe` once its checks have passed. Nothing changes it. A loop in
Python that needs another value makes another recipe (`change`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from kit.features import Feature, make_features
from kit.recipe import resources
from kit.recipe.keys import EPISODE_COMMANDS, SAMPLING_COMMANDS, to_plain
from kit.recipe.load import override
from kit.recipe.sections import EnvSection, GymSection, KitKeys, Sections, read_sections
from kit.recipe.user_functions import (
    TEACHER,
    RecipeFunctions,
    estimator_arguments,
    load_recipe_functions,
)


class Parallelism(NamedTuple):
    """How the GPUs of a training engine share a model and its rows."""

    model: int = 1  # GPUs that work on the same rows of a batch
    sequence: int = 1  # GPUs that share the tokens of one row


def find_parallelism(config: DictConfig) -> Parallelism:
    """Find how the GPUs of the training engine share a model and its rows."""
    actor = config.actor_rollout_ref.actor
    if config.model_engine == "megatron":
        engine = actor.megatron
        layers = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size
        return Parallelism(layers * engine.context_parallel_size, engine.context_parallel_size)
    ulysses = int(actor.ulysses_sequence_parallel_size)
    return Parallelism(ulysses, ulysses)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe that passed its checks. It never changes.

    verl: verl's configuration, read-only. The kit's keys are in it, too, as in the run's
    config.yaml. Code reads those from `sections`, where they have types.
    defaults: verl's configuration before any recipe.
    arguments: of the advantage estimator. They decide which models the run needs.
    features: the optional features that are on.
    """

    command: str  # train, rollout, evaluate or sft
    verl: DictConfig
    defaults: DictConfig
    sections: Sections
    functions: RecipeFunctions
    arguments: frozenset[str]
    features: tuple[Feature, ...]

    def get(self, key: str) -> Any:  # values have any type
        """Return the value of a dotted key as plain data, None if there is no such key."""
        return to_plain(OmegaConf.select(self.verl, key))

    def change(self, *arguments: str) -> Recipe:
        """Make a recipe with other values, each as key=value of the command line.

        Use it for values that the loop reads in each step (docs/guides/python.md). Sizes that
        follow from others are not computed again. Raises ConfigError, UserFunctionError.
        """
        config = override(self.verl, self.defaults, arguments)
        return freeze(config, self.defaults, self.command, None, self.features)

    def with_config(self, config: DictConfig) -> Recipe:
        """Make a recipe of another configuration, of which it has a copy.

        It has the same functions, and needs the same models.
        """
        verl = copy_read_only(config)
        return dataclasses.replace(self, verl=verl, sections=read_sections(verl))

    def for_verl(self) -> DictConfig:
        """Copy verl's configuration, resolved, for verl's classes, which may change it.

        Other processes do not know the kit's resolvers.
        """
        values: Any = OmegaConf.to_container(self.verl, resolve=True)
        return cast(DictConfig, OmegaConf.create(values))

    # --- the kit's sections ---

    @property
    def gym(self) -> GymSection:
        """The section `gym:`."""
        return self.sections.gym

    @property
    def env(self) -> EnvSection:
        """The section `env:`."""
        return self.sections.env

    @property
    def kit(self) -> KitKeys:
        """The kit's keys in verl's sections."""
        return self.sections.kit

    # --- sections of verl's configuration ---

    @property
    def actor(self) -> DictConfig:
        """actor_rollout_ref.actor."""
        return self.verl.actor_rollout_ref.actor

    @property
    def rollout(self) -> DictConfig:
        """actor_rollout_ref.rollout."""
        return self.verl.actor_rollout_ref.rollout

    @property
    def model(self) -> DictConfig:
        """actor_rollout_ref.model."""
        return self.verl.actor_rollout_ref.model

    @property
    def data(self) -> DictConfig:
        """Batch size, lengths and seed of the rows."""
        return self.verl.data

    @property
    def algorithm(self) -> DictConfig:
        """The advantage, KL terms and corrections."""
        return self.verl.algorithm

    @property
    def trainer(self) -> DictConfig:
        """Steps, checkpoints and GPUs."""
        return self.verl.trainer

    # --- roles ---

    @property
    def trains(self) -> bool:
        """Whether the command trains a model."""
        return self.command not in SAMPLING_COMMANDS

    @property
    def has_episodes(self) -> bool:
        """Whether the command samples episodes, or trains on them."""
        return self.command in EPISODE_COMMANDS

    @property
    def has_critic(self) -> bool:
        """Whether the advantage needs the values of a critic."""
        return self.command == "train" and "values" in self.arguments

    @property
    def has_reference(self) -> bool:
        """Whether a KL term or the advantage needs the log-probs of a reference model."""
        has_kl_term = self.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        is_needed = has_kl_term or "ref_log_prob" in self.arguments
        return self.command == "train" and bool(is_needed)

    @property
    def has_reward_model(self) -> bool:
        """Whether a reward model scores the responses."""
        return self.command == "train" and bool(self.verl.reward.reward_model.enable)

    @property
    def teacher(self) -> str:
        """The path of the teacher that replaces the reference, or an empty string."""
        if self.command != "train" or not self.verl.distillation.enabled:
            return ""
        return str(self.get(TEACHER) or "")

    @property
    def compares_group(self) -> bool:
        """Whether the advantage compares the responses of a group, which then needs two."""
        return "index" in self.arguments

    # --- GPUs ---

    @functools.cached_property
    def parallelism(self) -> Parallelism:
        """How the GPUs of the training engine share a model and its rows."""
        return find_parallelism(self.verl)

    def gpus_per_node(self, role: str = "actor") -> int:
        """GPUs per node for a role: those of its resource pool, or the actor's if it has none.

        role: actor, critic, ref or reward_model.
        """
        return resources.gpus_per_node(self.verl, role)

    def world_size(self, role: str = "actor") -> int:
        """The GPUs of a role on all nodes."""
        return self.gpus_per_node(role) * int(self.trainer.nnodes)

    def data_parallel_size(self, role: str = "actor") -> int:
        """Ranks with different rows: a role's GPUs / the GPUs that share each row."""
        return self.world_size(role) // self.parallelism.model

    @property
    def rollout_gpus(self) -> int:
        """GPUs of the rollout engine on all nodes: the actor's, or separate ones (nnodes)."""
        return resources.rollout_gpus(self.verl)

    @property
    def replicas(self) -> int:
        """Copies of the model in the rollout engine."""
        size = self.rollout.tensor_model_parallel_size * self.rollout.data_parallel_size
        return self.rollout_gpus // int(size)

    @property
    def all_gpus(self) -> int:
        """GPUs that the command uses, on all nodes."""
        return resources.all_gpus(self.verl, self.command)

    # --- sizes ---

    @property
    def max_prompt_batches(self) -> int:
        """The most batches of prompts for one step: more than one with filter_groups."""
        groups = self.algorithm.filter_groups
        return int(groups.max_num_gen_batches) if groups.enable else 1

    def mini_batches(self, role: str = "actor") -> int:
        """Optimizer steps for one pass over a whole batch. role: actor or critic."""
        section = self.verl.critic if role == "critic" else self.actor
        return int(self.data.train_batch_size // section.ppo_mini_batch_size)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the actor for one batch."""
        return self.mini_batches() * int(self.actor.ppo_epochs)

    @functools.cached_property
    def is_on_policy(self) -> bool:
        """Whether the update takes its own log-probs as the old ones.

        If one optimizer step uses the whole batch, its forward pass runs at the weights from before
        the update, so that a separate pass for the old log-probs would give the same. It runs only
        if an earlier stage reads its results. This saves 4 to 6 s of a step of 30 s on a CPU with
        AMX (docs/performance.md).
        """
        if self.optimizer_steps != 1:
            return False
        correction = self.algorithm.rollout_correction
        # The pass also fills the rollout log-probs that the engine does not have.
        results = {"old_log_probs", "rollout_log_probs", "sum_pi_squared"}
        is_needed_before = (
            self.kit.recompute_old_log_probs
            or self.algorithm.use_kl_in_reward
            or correction.bypass_mode
            or correction.rollout_is
            or correction.rollout_rs
            or results & self.arguments
        )
        return not is_needed_before


def copy_read_only(config: DictConfig) -> DictConfig:
    """Copy a configuration. Nothing can change the copy."""
    copied = copy.deepcopy(config)
    OmegaConf.set_readonly(copied, True)
    return copied


def freeze(
    config: DictConfig,
    defaults: DictConfig,
    command: str = "train",
    functions: RecipeFunctions | None = None,
    features: tuple[Feature, ...] | None = None,
) -> Recipe:
    """Make the recipe of a checked configuration, of which it has a copy.

    functions, features: those of the configuration; None: load them here.
    """
    verl = copy_read_only(config)
    return Recipe(
        command,
        verl,
        defaults,
        read_sections(verl),
        functions or load_recipe_functions(verl),
        frozenset(estimator_arguments(verl)),
        make_features(verl, command) if features is None else features,
    )
