"""What a recipe may compute: the resolvers of ${name:...}.

Convenience: a recipe may depend on the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of /proc/cpuinfo


def cores(processes: object = 1) -> int:
    """Return the CPU cores for each of N processes that share the cores of this process.

    A recipe writes ${cores:N}.
    """
    count = processes if isinstance(processes, int) and processes > 0 else 1
    return max(1, len(os.sched_getaffinity(0)) // count)


def count_all_gpus(_root_: DictConfig) -> int:  # OmegaConf passes the root by this name
    """Return the GPUs that training uses, on all nodes. A recipe writes ${all_gpus:}."""
    trainer = _root_.trainer
    rollout = _root_.actor_rollout_ref.rollout
    pools = sum(count or 0 for count in trainer.resource_pools.values())
    separate = rollout.nnodes * rollout.n_gpus_per_node
    return int((trainer.n_gpus_per_node + pools) * trainer.nnodes + separate)


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
OmegaConf.register_new_resolver("all_gpus", count_all_gpus, replace=True)
OmegaConf.register_new_resolver("matmul_dtype", matmul_dtype, replace=True)
