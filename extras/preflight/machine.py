"""Check this machine's GPUs, driver and packages, before a recipe's model is loaded.

    find_problems    what no run can use: an old driver, a package of another version
    check_start      too few GPUs. A dry run may be for another machine

Each problem is one line with the recipe or command that works.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from extras.preflight import gpus
from extras.preflight.gpus import Gpu
from kit.optional import is_installed
from kit.recipe.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA = "13.0"  # of requirements-gpu.txt
MIN_DRIVER = 580  # of that CUDA (check_gpu_node.sh)
MIN_CAPABILITY = 8.0  # of vLLM's and torch's kernels for bfloat16
# verl 0.9.1 imports this class at the start of a worker if TRL is installed
# (verl/models/transformers/monkey_patch.py). These files of TRL 0.x name it.
TRL_CLASS = "AutoModelForCausalLMWithValueHead"
TRL_FILES = ("experimental/ppo/__init__.py", "__init__.py")
FLASH_ATTENTION = "flash_attn_varlen_func"  # transformers imports this function of flash-attn 2


def uses_own_gpus(settings: Settings) -> bool:
    """Return whether a run uses this machine's GPUs: on a CPU or with another Ray it does not."""
    is_on_cpu = settings.trainer.device == "cpu"
    return not (is_on_cpu or settings.ray_kwargs.ray_init.get("address"))


def find_problems(settings: Settings) -> Iterator[str]:
    """Yield what this machine lacks for any run with its GPUs. Without a GPU, only packages."""
    trains = settings.trains and settings.engine.is_fsdp
    if trains:
        yield from check_trl()
    if not uses_own_gpus(settings):
        return
    yield from check_names()
    found = gpus.list_gpus()
    if found:
        yield from check_driver(found)
        yield from check_capability(found)
        if trains:
            yield from check_flash_attention()


def check_start(settings: Settings) -> Iterator[str]:
    """Yield a problem if this machine has fewer GPUs than the run needs."""
    if not uses_own_gpus(settings):
        return
    found = gpus.list_gpus()
    needed = settings.all_gpus
    if len(found) >= needed:
        return
    plural = "" if needed == 1 else "s"
    text = f"The recipe needs {needed} GPU{plural}, and this machine shows"
    visible = gpus.list_visible()
    if found:
        kinds = Counter(map(str, found)).items()
        names = ", ".join(f"{count} x {kind}" for kind, count in kinds)
        yield f"{text} {names}. Add {' '.join(gpus.choose_arguments(found))}"
    elif visible is not None:
        yield f"{text} none, because {VISIBLE}={','.join(visible)}. Run: unset {VISIBLE}"
    else:
        yield f"{text} none. To train on the CPU, add --config cpu"


def describe_differences() -> Iterator[str]:
    """Yield a warning if the GPUs of this machine differ, with a command that uses one kind."""
    found = gpus.list_gpus()
    kinds = Counter(map(str, found))
    if len(kinds) < 2:
        return
    best = max(found, key=lambda gpu: gpu.mib)
    names = [gpu.uuid for gpu in found if str(gpu) == str(best)]
    counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    yield (
        f"This machine's GPUs differ ({counts}): a step waits for the slowest of them, and memory "
        f"is estimated for the smallest. To use one kind only, run: "
        f"export {VISIBLE}={','.join(names)}"
    )


# --- the GPUs ------------------------------------------------------------------------------------


def check_names() -> Iterator[str]:
    """Yield a problem for entries of CUDA_VISIBLE_DEVICES that name no GPU of this machine.

    CUDA reads the beginning of a UUID, too. vLLM 0.24 requires the whole one.
    """
    everything = gpus.read_gpus()
    entries = gpus.list_visible() or []
    unknown = [entry for entry in entries if not gpus.match(entry, everything)]
    if not unknown or not everything:
        return
    meant = [gpu.uuid for gpu in everything if gpu.uuid.startswith(tuple(entries))]
    names = ",".join(meant or [gpu.number for gpu in everything])
    yield (
        f"{VISIBLE} lists {', '.join(unknown)}, which is neither the index nor the whole UUID of a "
        f"GPU in `nvidia-smi -L`. Run: export {VISIBLE}={names}"
    )


def check_driver(found: Sequence[Gpu]) -> Iterator[str]:
    """Yield a problem if the driver is too old for torch's CUDA.

    CUDA's forward compatibility package makes some old drivers work.
    """
    driver = found[0].driver
    if int(driver.partition(".")[0]) >= MIN_DRIVER:
        return
    import torch

    cuda = int((torch.version.cuda or CUDA).partition(".")[0])
    if read_cuda_version() < 1000 * cuda:
        yield (
            f"NVIDIA driver {driver} is too old for CUDA {cuda}, which torch uses. Install driver "
            f"{MIN_DRIVER} or newer."
        )


def read_cuda_version() -> int:
    """Return the CUDA version of the installed driver, such as 12040 for 12.4; 0 without one."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def check_capability(found: Sequence[Gpu]) -> Iterator[str]:
    """Yield a problem for GPUs that have no bfloat16."""
    for gpu in found:
        if float(gpu.capability) < MIN_CAPABILITY:
            yield (
                f"{gpu.name} has compute capability {gpu.capability}, and bfloat16 needs "
                f"{MIN_CAPABILITY}. Use a GPU of the year 2020 or later, or add --config cpu."
            )
            return


# --- packages ------------------------------------------------------------------------------------


def name_package(module: str) -> str:
    """Return the name and version of the package that has a module, or the module's name."""
    packages = importlib.metadata.packages_distributions().get(module, [])[:1]
    return "".join(f"{name} {importlib.metadata.version(name)}" for name in packages) or module


def check_trl() -> Iterator[str]:
    """Yield a problem if TRL is installed without the class that verl imports from it."""
    if not is_installed("trl"):
        return
    spec = importlib.util.find_spec("trl")
    folder = next(iter((spec and spec.submodule_search_locations) or [""]))
    paths = [Path(folder) / name for name in TRL_FILES]
    if not any(path.is_file() and TRL_CLASS in path.read_text() for path in paths):
        yield (
            f"{name_package('trl')} is installed, and verl 0.9.1 imports "
            f"{TRL_CLASS} from it, which this version does not have. Install it in another "
            f"environment, and run: uv pip uninstall --python {sys.executable} trl"
        )


def check_flash_attention() -> Iterator[str]:
    """Yield a problem if flash-attn is installed, and cannot be imported or has other functions."""
    if not is_installed("flash_attn"):
        return
    try:
        getattr(importlib.import_module("flash_attn"), FLASH_ATTENTION)
    except (ImportError, AttributeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        yield (
            f"{name_package('flash_attn')} cannot be used with {name_package('torch')}: {reason}. "
            "Remove it, and torch computes its part. Run: uv pip uninstall --python "
            f"{sys.executable} {name_package('flash_attn').split()[0]}"
        )
