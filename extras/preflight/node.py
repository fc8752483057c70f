"""Check disk, shared memory, GPUs, cores and packages of the node that a run starts on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from extras.preflight import attention, gpus, memory
from extras.preflight.memory import GIB
from kit.config.load import FSDP, ROLLOUT
from kit.config.recipe import Recipe


def find_problems(recipe: Recipe, text_config: Any) -> Iterator[str]:
    """A line for each thing that this node lacks.

    text_config: the Hugging Face configuration of the text model.
    """
    trains = recipe.command in ("train", "sft")
    if trains and not memory.find_obstacle(recipe, text_config):
        yield from check_disk(recipe, text_config)
    yield from check_shared_memory(recipe)
    is_gpu_node = recipe.trainer.device != "cpu" and not memory.find_device(recipe).note
    if is_gpu_node:  # else the run will use another node
        yield from check_gpus(recipe)
        yield from check_packages(recipe)


def check_disk(recipe: Recipe, text_config: Any) -> Iterator[str]:
    """The disk has room for the checkpoints that are kept, and for one more.

    A checkpoint has the weights and AdamW's moments of all ranks.
    """
    trainer = recipe.trainer
    engine = recipe.actor.fsdp_config
    parts = memory.estimate_states(recipe, text_config, engine, recipe.model)
    saves = 1
    if trainer.save_freq > 0:
        saves = -(-trainer.total_training_steps // trainer.save_freq)
    count = min(saves, (trainer.max_actor_ckpt_to_keep or saves) + 1)
    shards = memory.count_shards(recipe, engine)
    size = count * shards * (parts["weights"] + parts["optimizer"])
    folder = Path(trainer.default_local_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < size:
        yield (
            f"{count} checkpoints take {size / GIB:.1f} GiB, and {folder} has {free / GIB:.1f}. "
            "Lower trainer.max_actor_ckpt_to_keep, raise trainer.save_freq, or make room."
        )


def check_driver(config: DictConfig) -> Iterator[str]:
    """A problem if this node's driver is too old. The workers would fail minutes after starting.

    With CUDA's forward compatibility package an older driver works. Then the user sets FORCE=1, as
    for check_gpu_node.sh.
    """
    if config.trainer.device == "cpu" or os.environ.get("FORCE") == "1":
        return
    driver = gpus.find_old_driver()
    if driver:
        yield (
            f"NVIDIA driver {driver} is too old for CUDA 13. Install driver {gpus.MIN_DRIVER} or "
            "newer. Or install CUDA's forward compatibility package, and set FORCE=1."
        )


def check_shared_memory(recipe: Recipe) -> Iterator[str]:
    """/dev/shm has room for NCCL's messages and, on a CPU, for the weights that are sent.

    On GPUs vLLM reads the weights in the trainer's GPU memory, by CUDA IPC.
    """
    needed = GIB
    if recipe.trainer.device == "cpu":
        bucket = recipe.rollout.checkpoint_engine.update_weights_bucket_megabytes
        needed = max(GIB, 2 * bucket * 2**20 * recipe.trainer.n_gpus_per_node)
    free = shutil.disk_usage("/dev/shm").free
    if free < needed:
        yield (
            f"/dev/shm has {free / GIB:.2f} GiB free, and the weight sync and NCCL need "
            f"{needed / GIB:.1f}. Start the container with a larger --shm-size."
        )


def check_gpus(recipe: Recipe) -> Iterator[str]:
    """The node has the GPUs and the cores that the run uses."""
    count = gpus.count_gpus()
    needed = recipe.all_gpus
    is_one_node = not recipe.verl.ray_kwargs.ray_init.get("address")
    if is_one_node and count != needed:
        yield f"This node has {count} GPUs, and the run uses {needed}. Set trainer.n_gpus_per_node."
    processes = recipe.trainer.n_gpus_per_node
    cores = len(os.sched_getaffinity(0))
    if recipe.command in ("train", "sft") and cores < processes:
        yield (
            f"This node has {cores} cores, and Ray gives one to each of {processes} processes. Set "
            f"ray_kwargs.ray_init.num_cpus={processes} to share them."
        )


def check_packages(recipe: Recipe) -> Iterator[str]:
    """The packages that the recipe needs are installed."""
    rollout = recipe.rollout
    sends_by_nccl = rollout.nnodes and rollout.checkpoint_engine.backend == "nccl"
    if recipe.command == "train" and sends_by_nccl and not attention.is_installed("cupy"):
        yield (
            "Weights are sent to separate GPUs over NCCL by cupy, which is not installed. Install "
            f"requirements-gpu.txt, or set {ROLLOUT}.checkpoint_engine.backend=gloo."
        )
    trains = recipe.command in ("train", "sft")
    packages = []
    if trains and recipe.verl.model_engine != FSDP:
        packages.append(recipe.verl.model_engine)
    if recipe.command != "sft" and rollout.name != "hf":
        packages.append(rollout.name)
    for package in packages:
        if not attention.is_installed(package):
            yield f"{package} is not installed. See docs/backends.md."
    yield from attention.warnings(recipe.verl, recipe.command)
