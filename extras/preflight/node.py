"""Check disk and shared memory of the node that a run starts on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from extras.preflight import memory
from extras.preflight.memory import GIB
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def find_problems(recipe: Recipe, text_config: PretrainedConfig) -> Iterator[str]:
    """Yield a line for each thing that this node lacks.

    text_config: the Hugging Face configuration of the text model.
    """
    if recipe.trains and not memory.find_obstacle(recipe, text_config):
        yield from check_disk(recipe, text_config)
    yield from check_shared_memory(recipe)


def check_disk(recipe: Recipe, text_config: PretrainedConfig) -> Iterator[str]:
    """Check that the disk has room for the checkpoints that are kept, and for one more.

    A checkpoint has the weights and AdamW's moments of all ranks.
    """
    trainer = recipe.trainer
    engine = recipe.actor.fsdp_config
    assert engine  # FSDP trains (find_obstacle)
    parts = memory.estimate_states(recipe, text_config, engine, recipe.model)
    saves = 1
    if trainer.save_freq > 0:
        saves = -(-recipe.last_step // trainer.save_freq)
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


def check_shared_memory(recipe: Recipe) -> Iterator[str]:
    """Check that /dev/shm has room for NCCL and, on a CPU, for the weights that are sent.

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
