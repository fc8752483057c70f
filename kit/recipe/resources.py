"""How many GPUs and CPU cores a recipe uses, and for which role."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from kit.recipe.keys import SAMPLING_COMMANDS

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of /proc/cpuinfo


def gpus_per_node(config: DictConfig, role: str = "actor") -> int:
    """GPUs per node for a role: those of its resource pool, or the actor's if it has none.

    role: actor, critic, ref or reward_model.
    """
    return int(config.trainer.resource_pools.get(role) or config.trainer.n_gpus_per_node)


def rollout_gpus(config: DictConfig) -> int:
    """GPUs of the rollout engine on all nodes: the actor's, or separate ones (rollout.nnodes)."""
    rollout = config.actor_rollout_ref.rollout
    return int((rollout.nnodes or config.trainer.nnodes) * rollout.n_gpus_per_node)


def all_gpus(config: DictConfig, command: str = "train") -> int:
    """GPUs that a command uses, on all nodes."""
    if command in SAMPLING_COMMANDS:
        return rollout_gpus(config)
    per_node = config.trainer.n_gpus_per_node
    if command != "train":
        return int(per_node * config.trainer.nnodes)
    per_node += sum(count or 0 for count in config.trainer.resource_pools.values())
    total = per_node * config.trainer.nnodes
    if config.actor_rollout_ref.rollout.nnodes:
        total += rollout_gpus(config)
    return int(total)


def cores(processes: object = 1) -> int:
    """CPU cores for each of N processes that share the cores of this process.

    A recipe writes ${cores:N}.
    """
    count = processes if isinstance(processes, int) and processes > 0 else 1
    return max(1, len(os.sched_getaffinity(0)) // count)


def _all_gpus_of_root(_root_: DictConfig) -> int:  # OmegaConf passes the root by this name
    return all_gpus(_root_)


def choose(condition: bool, value: object, otherwise: object) -> object:
    """The first value if the condition holds, else the second.

    A recipe writes ${choose:${key},value,otherwise}, if a value depends on another key.
    """
    return value if condition else otherwise


def matmul_dtype() -> str:
    """The type in which this machine's cores multiply fastest. A recipe writes ${matmul_dtype:}."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return "bfloat16" if flags & BFLOAT16_FLAGS else "float32"


OmegaConf.register_new_resolver("choose", choose, replace=True)
OmegaConf.register_new_resolver("cores", cores, replace=True)
OmegaConf.register_new_resolver("all_gpus", _all_gpus_of_root, replace=True)
OmegaConf.register_new_resolver("matmul_dtype", matmul_dtype, replace=True)
