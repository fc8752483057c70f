"""The values of a recipe with types, and the questions that they answer.

The checks before a run take `Settings`; everything else takes a `Recipe` (recipe.py), which has
the derived values, too.

Convenience: each question about a recipe is answered in one place.
"""

from __future__ import annotations

import functools
from typing import Any

from kit.recipe.keys import EPISODE_COMMANDS, SAMPLING_COMMANDS
from kit.recipe.load import Source
from kit.recipe.schema import ActorSection, CriticSection, PolicyModel, RolloutSection, Values
from kit.recipe.training_engine import TrainingEngine, find_engine
from kit.recipe.user_functions import read_estimator_arguments


class Settings(Values):
    """The values of a recipe, merged and resolved, for a command. A Recipe has the derived ones."""

    command: str  # train, rollout, evaluate or sft

    def get(self, key: str) -> Any:  # values have any type
        """Return the value of a dotted key, None if there is no such key."""
        value: Any = self
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        return value

    # --- sections ---

    @property
    def actor(self) -> ActorSection:
        """Return the section actor_rollout_ref.actor."""
        return self.actor_rollout_ref.actor

    @property
    def rollout(self) -> RolloutSection:
        """Return the section actor_rollout_ref.rollout."""
        return self.actor_rollout_ref.rollout

    @property
    def model(self) -> PolicyModel:
        """Return the section actor_rollout_ref.model."""
        return self.actor_rollout_ref.model

    # --- roles ---

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """Return the arguments of the advantage estimator, which decide which models the run needs.

        Imports verl. Raises UserFunctionError.
        """
        return frozenset(read_estimator_arguments(self.algorithm.adv_estimator))

    @property
    def trains(self) -> bool:
        """Return whether the command trains a model."""
        return self.command not in SAMPLING_COMMANDS

    @property
    def has_episodes(self) -> bool:
        """Return whether the command samples episodes, or trains on them."""
        return self.command in EPISODE_COMMANDS

    @property
    def has_critic(self) -> bool:
        """Return whether the advantage needs the values of a critic."""
        return self.command == "train" and "values" in self.arguments

    @property
    def has_reference(self) -> bool:
        """Return whether a KL term or the advantage needs the log-probs of a reference model."""
        has_kl_term = self.actor.use_kl_loss or self.algorithm.use_kl_in_reward
        return self.command == "train" and (has_kl_term or "ref_log_prob" in self.arguments)

    @property
    def has_reward_model(self) -> bool:
        """Return whether a reward model scores the responses."""
        return self.command == "train" and self.reward.reward_model.enable

    @property
    def teacher(self) -> str:
        """Return the path of the teacher that replaces the reference, or an empty string."""
        if self.command != "train" or not self.distillation.enabled:
            return ""
        return self.distillation.teacher_models.teacher_model.model_path or ""

    @property
    def compares_group(self) -> bool:
        """Return whether the advantage compares the responses of a group, which then needs two."""
        return "index" in self.arguments

    # --- GPUs ---

    @functools.cached_property
    def engine(self) -> TrainingEngine:
        """Return the training engine: how its GPUs share a model and its rows."""
        return find_engine(self)

    def gpus_per_node(self, role: str = "actor") -> int:
        """Return the GPUs per node of a role: those of its pool, or the actor's if it has none.

        role: actor, critic, ref or reward_model.
        """
        return self.trainer.resource_pools.sizes().get(role) or self.trainer.n_gpus_per_node

    def world_size(self, role: str = "actor") -> int:
        """Return the GPUs of a role on all nodes."""
        return self.gpus_per_node(role) * self.trainer.nnodes

    def data_parallel_size(self, role: str = "actor") -> int:
        """Return the ranks with different rows: a role's GPUs / the GPUs that share each row."""
        return self.world_size(role) // self.engine.model_gpus

    @property
    def rollout_gpus(self) -> int:
        """GPUs of the rollout engine on all nodes: the actor's, or separate ones (nnodes)."""
        return (self.rollout.nnodes or self.trainer.nnodes) * self.rollout.n_gpus_per_node

    @property
    def replica_gpus(self) -> int:
        """GPUs of one copy of the model in the rollout engine."""
        return self.rollout.tensor_model_parallel_size * self.rollout.data_parallel_size

    @property
    def replicas(self) -> int:
        """Copies of the model in the rollout engine."""
        return self.rollout_gpus // self.replica_gpus

    @property
    def all_gpus(self) -> int:
        """GPUs that the command uses, on all nodes."""
        if not self.trains:
            return self.rollout_gpus
        per_node = self.trainer.n_gpus_per_node
        if self.command != "train":
            return per_node * self.trainer.nnodes
        per_node += sum(self.trainer.resource_pools.sizes().values())
        separate = self.rollout_gpus if self.rollout.nnodes else 0
        return per_node * self.trainer.nnodes + separate

    # --- sizes ---

    @property
    def max_episode_length(self) -> int:
        """Tokens of the longest episode."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_prompt_batches(self) -> int:
        """Return the most batches of prompts for one step: more than one with filter_groups."""
        groups = self.algorithm.filter_groups
        return groups.max_num_gen_batches if groups.enable else 1

    def mini_batches(self, role: str = "actor") -> int:
        """Return the optimizer steps for one pass over a batch. role: actor or critic."""
        section: ActorSection | CriticSection = self.critic if role == "critic" else self.actor
        return self.data.train_batch_size // section.ppo_mini_batch_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the actor for one batch."""
        return self.mini_batches() * self.actor.ppo_epochs

    @functools.cached_property
    def is_on_policy(self) -> bool:
        """Return whether the update takes its own log-probs as the old ones.

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
            self.algorithm.recompute_old_log_probs
            or self.algorithm.use_kl_in_reward
            or correction.bypass_mode
            or correction.rollout_is
            or correction.rollout_rs
            or results & self.arguments
        )
        return not is_needed_before


def make_settings(source: Source, command: str) -> Settings:
    """Return the values of a source, which have been checked, with their types."""
    return Settings.model_validate(source.resolved | {"command": command})
