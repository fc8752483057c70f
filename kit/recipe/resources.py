"""How many GPUs and CPU cores a recipe uses, and the resolvers that recipes may call.

Convenience: a recipe may depend on the machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from env import Json
from kit.recipe.keys import SAMPLING_COMMANDS

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of /proc/cpuinfo


class GpuCounts(NamedTuple):
    """The keys of a recipe that say how many GPUs it uses."""

    nodes: int  # trainer.nnodes
    per_node: int  # trainer.n_gpus_per_node
    pools: int  # the sum of trainer.resource_pools, on each node
    rollout_nodes: int  # rollout.nnodes; 0: the rollout engine has the actor's GPUs
    rollout_per_node: int  # rollout.n_gpus_per_node

    @classmethod
    def of(cls, values: Json) -> GpuCounts:
        """Read the keys of a nested and resolved recipe."""
        trainer = values["trainer"]
        rollout = values["actor_rollout_ref"]["rollout"]
        pools = sum(count or 0 for count in trainer["resource_pools"].values())
        return cls(
            trainer["nnodes"],
            trainer["n_gpus_per_node"],
            pools,
            rollout["nnodes"],
            rollout["n_gpus_per_node"],
        )

    @property
    def rollout(self) -> int:
        """GPUs of the rollout engine."""
        return (self.rollout_nodes or self.nodes) * self.rollout_per_node

    def total(self, command: str = "train") -> int:
        """Return the GPUs that a command uses, on all nodes."""
        if command in SAMPLING_COMMANDS:
            return self.rollout
        if command != "train":
            return self.per_node * self.nodes
        separate = self.rollout if self.rollout_nodes else 0
        return (self.per_node + self.pools) * self.nodes + separate


def cores(processes: object = 1) -> int:
    """Return the CPU cores for each of N processes that share the cores of this process.

    A recipe writes ${cores:N}.
    """
    count = processes if isinstance(processes, int) and processes > 0 else 1
    return max(1, len(os.sched_getaffinity(0)) // count)


def _all_gpus_of_root(_root_: DictConfig) -> int:  # OmegaConf passes the root by this name
    values: Any = OmegaConf.to_container(_root_.trainer, resolve=True)
    rollout = {key: _root_.actor_rollout_ref.rollout[key] for key in ("nnodes", "n_gpus_per_node")}
    return GpuCounts.of({"trainer": values, "actor_rollout_ref": {"rollout": rollout}}).total()


def choose(condition: bool, value: object, otherwise: object) -> object:
    """Return the first value if the condition holds, else the second.

    A recipe writes ${choose:${key},value,otherwise}, if a value depends on another key.
    """
    return value if condition else otherwise


def matmul_dtype() -> str:
    """Return the type in which this machine's cores multiply fastest.

    A recipe writes ${matmul_dtype:}.
    """
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"


OmegaConf.register_new_resolver("choose", choose, replace=True)
OmegaConf.register_new_resolver("cores", cores, replace=True)
OmegaConf.register_new_resolver("all_gpus", _all_gpus_of_root, replace=True)
OmegaConf.register_new_resolver("matmul_dtype", matmul_dtype, replace=True)
