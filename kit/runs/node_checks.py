"""Check what a run needs from this machine before it starts anything, and provide what it can."""

from __future__ import annotations

import os
import resource

from kit.config.recipe import Recipe
from kit.errors import RunError
from kit.runs import isolation

# Open files. Ray's GCS and raylet, and vLLM, each need hundreds. Linux's default is 1024.
MIN_OPEN_FILES = 1024
MAX_OPEN_FILES = 65536  # as in Ray; with more, programs that close every possible file take long
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def check_node(recipe: Recipe) -> None:
    """Raise RunError for a limit or a setting of this machine with which the run cannot start."""
    check_limits()
    if recipe.trainer.device == "cuda" and not recipe.verl.ray_kwargs.ray_init.get("address"):
        check_visible_gpus(recipe.all_gpus)


def check_limits() -> None:
    """Raise RunError for a limit of this machine with which no run can start."""
    isolation.check_tmpdir_length()
    raise_file_limit()


def raise_file_limit() -> None:
    """Raise this process's limit of open files, which its children inherit. Raises RunError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # in Python, "no limit" is -1
    if soft < 0 or soft >= MAX_OPEN_FILES:
        return
    limit = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < MIN_OPEN_FILES:
        raise RunError(
            f"This process may open {limit} files (ulimit -n), and a run needs {MIN_OPEN_FILES}. "
            f"Run `ulimit -n {MIN_OPEN_FILES}` in a new shell. If the shell refuses it, raise the "
            "hard limit: nofile in /etc/security/limits.conf, or `docker run --ulimit nofile`."
        )


def check_visible_gpus(needed: int) -> None:
    """Raise RunError if CUDA_VISIBLE_DEVICES hides GPUs that the run needs on this machine."""
    value = os.environ.get(VISIBLE_GPUS)
    if value is None:
        return
    count = count_entries(value)
    if count < needed:
        raise RunError(
            f"{VISIBLE_GPUS}={value!r} shows {count} GPUs to the run, and its recipe needs "
            f"{needed} (trainer.n_gpus_per_node). Unset it, list more GPUs, or add --config cpu."
        )


def count_entries(value: str) -> int:
    """Count the GPUs that a value of CUDA_VISIBLE_DEVICES lists. As in CUDA, -1 ends the list."""
    count = 0
    for entry in value.split(","):
        name = entry.strip()
        if not (name.isdigit() or name.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count
