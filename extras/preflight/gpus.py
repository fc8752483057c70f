"""The GPUs that this process may use: how many, their memory, and whether CUDA starts.

    python -P extras/preflight/gpus.py

This starts CUDA, and prints the arguments that adapt a recipe to the GPUs, or one line with the
reason why CUDA does not start (make math).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

TIMEOUT_S = 20.0
FIELDS = "index,uuid,name,memory.total,driver_version,compute_cap"
MIB_PER_GIB = 1024
# Below these sizes in GiB, the recipe of configs/machines is that of a smaller GPU. nvidia-smi
# shows 22.5 to 24.0 for GPUs that are sold with 24 GB, and 40.0 and more for larger ones.
MIDDLE_GIB = 38.0
SMALL_GIB = 22.0


class Gpu(NamedTuple):
    """One line of nvidia-smi."""

    number: str  # nvidia-smi's index
    uuid: str
    name: str
    mib: int  # 0 if nvidia-smi does not show it
    driver: str
    capability: str  # such as 9.0

    def __str__(self) -> str:
        return f"{self.name}, {self.mib / MIB_PER_GIB:.1f} GiB"


def read_smi(*options: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if there is no GPU or no nvidia-smi."""
    command = ["nvidia-smi", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def query(value: str) -> list[str]:
    """Return a value (nvidia-smi --help-query-gpu) of each GPU that this process sees."""
    visible = list_visible()
    if visible == []:
        return []
    ids = [f"--id={','.join(visible)}"] if visible else []
    lines = read_smi(*ids, f"--query-gpu={value}", "--format=csv,noheader,nounits")
    return [line.strip() for line in lines]


# --- the GPUs ------------------------------------------------------------------------------------


@functools.cache
def read_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of this machine. The parts of one that MIG has divided are not listed.

    nvidia-smi takes up to a second, and a start asks several times.
    """
    gpus = []
    for line in read_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"):
        number, uuid, name, mib, driver, capability = (part.strip() for part in line.split(","))
        gpus.append(Gpu(number, uuid, name, int(mib) if mib.isdigit() else 0, driver, capability))
    return tuple(gpus)


def list_visible() -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES (indices or UUIDs); None if it is not set."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return None
    entries = [entry.strip() for entry in variable.split(",")]
    return [entry for entry in entries if entry not in ("", "-1")]


def match(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names: by its index or whole UUID.

    Of a GPU that MIG has divided, CUDA shows one part, whose size nvidia-smi does not list.
    """
    if entry.startswith("MIG-") and gpus:
        return gpus[0]._replace(mib=0)
    return next((gpu for gpu in gpus if entry in (gpu.number, gpu.uuid)), None)


def list_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows to this process, without starting CUDA."""
    gpus = read_gpus()
    visible = list_visible()
    if visible is None:
        return [*gpus]
    found = [match(entry, gpus) for entry in visible]
    return [gpu for gpu in found if gpu]


# --- the recipe for them -------------------------------------------------------------------------


def name_machine(smallest_gib: float) -> str:
    """Return the recipe of configs/machines for one GPU with this memory."""
    if smallest_gib < SMALL_GIB:
        return "gpu_16gb"
    return "gpu_24gb" if smallest_gib < MIDDLE_GIB else "one_gpu"


def choose_arguments(gpus: Sequence[Gpu]) -> list[str]:
    """Return the arguments that adapt a recipe for several large GPUs to these."""
    count = len(gpus)
    name = name_machine(min(gpu.mib for gpu in gpus) / MIB_PER_GIB)
    files = ["--config", name] if count == 1 or name != "one_gpu" else []
    return [*files, f"trainer.n_gpus_per_node={count}"]


def main() -> None:
    """Start CUDA in this process. Print the arguments for its GPUs, and to stderr the GPUs."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        sys.exit(
            f"error: CUDA {torch.version.cuda} does not start: {reason} Check `nvidia-smi`: it "
            "must list the GPUs and a driver of 580 or newer."
        )
    gpus = list_gpus()
    arguments = " ".join(choose_arguments(gpus))
    print(f"== {len(gpus)} x {gpus[0]}: {arguments}", file=sys.stderr)
    print(arguments)


if __name__ == "__main__":
    main()
