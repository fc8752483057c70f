"""What a run asks of the node that it is started on, besides its devices' memory (kit/extras/preflight/memory.py)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kit.config.load import MODEL, ROLLOUT, all_gpus
from kit.extras.preflight import memory
from kit.extras.preflight.memory import GIB


def lacks(config: DictConfig, c: Any, command: str) -> Iterator[str]:
    """What this node has too little of. c: the Hugging Face config of the text model."""
    settings, rollout = config.trainer, config.actor_rollout_ref.rollout
    if (
        command in ("train", "sft")
        and config.model_engine == "dp"
        and all(getattr(c, name, None) for name in memory.NEEDED)
    ):
        yield from _disk(config, c)
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    wanted, shared = (
        max(GIB, 2 * bucket * settings.n_gpus_per_node),
        shutil.disk_usage("/dev/shm").free,
    )
    if shared < wanted:
        why = "weights and NCCL's messages go through it; start the container with a larger --shm-size"
        yield f"/dev/shm has {shared / GIB:.2f} GiB free, of {wanted / GIB:.1f}: {why}"
    if settings.device != "cpu" and not memory.device(config)[1]:  # else it will run on another
        yield from _gpus(config, command)


def _disk(config: DictConfig, c: Any) -> Iterator[str]:
    """Weights and AdamW's moments of all ranks, for each checkpoint that stays, and the next."""
    settings, engine = config.trainer, config.actor_rollout_ref.actor.fsdp_config
    _, parts = memory.trainer(config, c, 0, engine, config.actor_rollout_ref.model)
    saves = -(-settings.total_training_steps // settings.save_freq) if settings.save_freq > 0 else 1
    count = min(saves, (settings.max_actor_ckpt_to_keep or saves) + 1)
    size = count * memory.shards_of(config, engine) * (parts["weights"] + parts["optimiser"])
    folder = Path(settings.default_local_dir).absolute()
    free = shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.is_dir())).free
    if free < size:
        more = "lower trainer.max_actor_ckpt_to_keep, raise trainer.save_freq"
        yield f"{count} checkpoints take {size / GIB:.1f} GiB, and {folder} has {free / GIB:.1f}: {more}, or make room"


def _gpus(config: DictConfig, command: str) -> Iterator[str]:
    settings, model, trains = (
        config.trainer,
        config.actor_rollout_ref.model,
        command in ("train", "sft"),
    )
    found = len(
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    )
    if not config.ray_kwargs.ray_init.get("address") and found != (
        taken := all_gpus(config, command)
    ):
        yield f"this node has {found} GPUs, and the run takes {taken}: set trainer.n_gpus_per_node"
    if trains and (cores := len(os.sched_getaffinity(0))) < settings.n_gpus_per_node:
        asked = f"Ray gives one to each of {settings.n_gpus_per_node} processes"
        yield f"this node has {cores} cores, and {asked}: set ray_kwargs.ray_init.num_cpus to that, and they share"
    rollout = config.actor_rollout_ref.rollout
    if (
        command == "train"
        and rollout.nnodes
        and rollout.checkpoint_engine.backend == "nccl"
        and not importlib.util.find_spec("cupy")
    ):
        way = f"uv pip install cupy-cuda13x, or set {ROLLOUT}.checkpoint_engine.backend=gloo"
        yield f"weights go to servers on GPUs of their own over nccl, by cupy, which is not installed: {way}"
    packages = [config.model_engine] * trains + [rollout.name] * (command != "sft")
    for package in packages:
        if package not in ("dp", "hf") and not importlib.util.find_spec(package):
            yield f"{package} is not installed: docs/backends.md has what it needs"
    attention = model.override_config.get("attn_implementation", "flash_attention_2")
    if (
        trains
        and attention == "flash_attention_2"
        and not any(map(importlib.util.find_spec, ("flash_attn", "kernels")))
    ):
        way = "install flash-attn as requirements.txt says, or kernels, which takes it from the hub"
        yield f"{attention} is not installed: {way}, or set {MODEL}.override_config.attn_implementation=sdpa"
