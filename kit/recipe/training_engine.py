"""The training engine of a recipe: FSDP, or Megatron with its own configuration.

Convenience: another training engine is one more value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kit.recipe.keys import ACTOR, FSDP

if TYPE_CHECKING:
    from kit.recipe.schema import Values

# {an entry of verl's save_contents: the prefix of FSDP's file names}
SHARDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
FSDP_SECTIONS = {  # {the actor, or a role of trainer.resource_pools: the section of its engine}
    "actor": f"{ACTOR}.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
    "reward_model": "critic.fsdp",
}


class TrainingEngine(NamedTuple):
    """How the GPUs of a role share a model and its rows, and what the engine saves."""

    name: str = FSDP  # verl's model_engine
    model_gpus: int = 1  # GPUs that work on the same rows of a batch
    sequence_gpus: int = 1  # GPUs that share the tokens of one row
    size_key: str = ""  # the key of model_gpus

    @property
    def is_fsdp(self) -> bool:
        """Return whether it is FSDP."""
        return self.name == FSDP

    def list_shards(self, contents: Sequence[str], ranks: int) -> list[str]:
        """List the files of a checkpoint that each rank writes. contents: verl's save_contents.

        Megatron writes other files, which the manifest of a checkpoint lists.
        """
        prefixes = [SHARDS[kind] for kind in contents if kind in SHARDS and self.is_fsdp]
        pairs = itertools.product(prefixes, range(ranks))
        return sorted(f"{prefix}_world_size_{ranks}_rank_{rank}.pt" for prefix, rank in pairs)


def find_engine(values: Values) -> TrainingEngine:
    """Return the training engine of a recipe."""
    actor = values.actor_rollout_ref.actor
    if values.model_engine == FSDP:
        gpus = actor.ulysses_sequence_parallel_size
        return TrainingEngine(FSDP, gpus, gpus, f"{ACTOR}.ulysses_sequence_parallel_size")
    sizes = actor.megatron or {}
    shared = sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"]
    sequence = sizes["context_parallel_size"]
    key = f"{ACTOR}.{values.model_engine}"
    return TrainingEngine(values.model_engine, shared * sequence, sequence, key)
