"""Prove after each weight sync that the rollout engine has the tensors that the trainer sent.

    trainer    adds up each tensor that it sends (`send_with_sums`). The sums are sent last, as one
               more tensor, so they reach the engine on the same way as the weights
    engine     adds up each tensor that arrives, and compares the sums (`Arrival.receive`)
               records which part of an arrived tensor is copied to which part of a parameter, and
               compares their sums: at the end, and before vLLM packs the parameter for a kernel
               checks that every element of every parameter was written
    driver     asks each replica for its report before it samples (`raise_if_unproved`)

Parts of parameters are compared, so q, k and v may be fused, and tensor parallelism may split them.
`add_up` describes the two sums and what they cannot see. The loader of the engine decides which
part belongs where; that is not checked here, but by the log-probs at the first step.

Protects: samples, from weights that are not those of the trainer.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kit.errors import RunError
from kit.recipe.keys import ROLLOUT

if TYPE_CHECKING:
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    from kit.engine.worker_group import WorkerGroup
    from kit.recipe.settings import Settings

Weights = Iterable[tuple[str, torch.Tensor]]
Worker = Any  # of verl's trainer, or of vLLM, which adds its classes at run time

logger = logging.getLogger(__name__)
METRIC = "training/weights_proved"
SUMS = "quintet.sums_of_weights"  # the name of the tensor that is sent last
SCATTER = 0x9E3779B97F4A7C15 - 2**64  # odd, as a signed 64-bit integer: the golden ratio
RUNS = 16  # runs of words that are added before they are weighted
RUN = 1021  # words; a prime, so that the rows of a matrix do not begin at the same place of runs
MAX_NAMED = 3  # problems that an error names


class Report(TypedDict):
    """What one worker of an engine found in one sync. Only plain values pass vLLM's processes."""

    problems: list[str]
    unknown: list[str]  # parameters that the engine changes after they arrive
    compared: int  # elements
    total: int  # elements


def find_obstacle(settings: Settings) -> str:
    """Return why the rollout engine of a recipe cannot be checked. Empty if it can."""
    rollout = settings.rollout
    vllm = rollout.engine_kwargs.get("vllm") or {}
    quantization = settings.get(f"{ROLLOUT}.quantization") or vllm.get("quantization")
    if rollout.name not in ("vllm", "hf"):
        return f"{ROLLOUT}.name={rollout.name} has no access to its weights"
    if quantization:
        return f"{ROLLOUT}.quantization={quantization} changes the weights after they arrive"
    return ""


# --- sums ----------------------------------------------------------------------------------------


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums of a tensor's bits, int64 [2], on its device. They wrap.

    The first is the sum of the elements, as 64-bit words; exchanged words do not change it. The
    second weights each word by its position, so it differs then. To save time, words are first
    added in blocks of 16 neighboring runs of 1021 words. An exchange of two words of a block is
    missed if their distance is a multiple of 1021: of two rows only if a row has under 16 words.
    """
    with _disable_current_modes():  # which would record these operations, and slow them down
        return _add_up(tensor)


def _add_up(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8:
        data = F.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    words = data.view(torch.int64)
    whole = len(words) // (RUNS * RUN) * RUNS * RUN
    blocks = words[:whole].view(-1, RUNS, RUN).sum(1)  # [blocks, RUN]
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    # sums over one axis, so that few numbers are weighted
    for values in (blocks.sum(1), blocks.sum(0), words[whole:]):
        weighted = (values * make_weights(len(values), words.device)).sum()
        sums[1] = sums[1] * SCATTER + weighted
    sums[0] = blocks.sum() + words[whole:].sum()
    return sums


@functools.lru_cache(maxsize=64)
def make_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return a scattered weight for each position, int64 [count]."""
    positions = torch.arange(1, count + 1, device=device) * SCATTER
    return (positions ^ (positions >> 29)) * SCATTER


def send_with_sums(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, then their sums as JSON in a tensor of bytes."""
    sums: dict[str, torch.Tensor] = {}
    device: torch.device | None = None
    for name, tensor in weights:
        sums[name] = add_up(tensor)
        device = tensor.device
        yield name, tensor
    text = json.dumps({name: pair.tolist() for name, pair in sums.items()})
    yield SUMS, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def attach_sums(worker: Worker) -> None:
    """Have the actor's engine in a worker of verl's send sums with its weights, once."""
    role = getattr(worker, "worker_dict", {"actor": worker})["actor"]
    engine = role.actor.engine
    if "get_per_tensor_param" in vars(engine):
        return
    get_weights = engine.get_per_tensor_param

    @functools.wraps(get_weights)
    def get_per_tensor_param(**options: object) -> tuple[Iterator[Any], object]:
        weights, adapter = get_weights(**options)
        return send_with_sums(weights.items() if isinstance(weights, dict) else weights), adapter

    engine.get_per_tensor_param = get_per_tensor_param


def attach_to_group(actor: WorkerGroup) -> None:
    """Have all ranks of the actor send sums with their weights."""
    import ray

    ray.get([worker.__ray_call__.remote(attach_sums) for worker in actor.workers])


# --- in the engine's process ---------------------------------------------------------------------


class Source(NamedTuple):
    """An arrived tensor, by its place in memory."""

    start: int  # address
    end: int
    name: str


class Place(NamedTuple):
    """A part of a parameter."""

    offset: int  # in the storage, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach().as_strided(self.shape, self.stride, self.offset)


class Part(NamedTuple):
    """What was written to a place. sums: as they must be now; None if that is not known."""

    source: str
    sums: torch.Tensor | None


class Comparison(NamedTuple):
    """The sums of a part of a parameter, as they are and as they must be."""

    text: str
    actual: torch.Tensor
    expected: torch.Tensor


class Arrival(TorchDispatchMode):
    """One sync, in a process of the rollout engine. While entered, it records each copy.

    model: of the engine. The method that packs a layer of vLLM is replaced meanwhile.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sources: list[Source] = []
        self.sent: dict[str, list[int]] | None = None
        self.received: dict[str, torch.Tensor] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.parts: dict[int, dict[Place, Part]] = {}  # by the address of the storage
        self.packed: set[int] = set()  # ids of modules
        self.known: set[str] = set()  # parameters that were compared
        self.comparisons: list[Comparison] = []
        self.report = Report(problems=[], unknown=[], compared=0, total=0)
        self.is_adapter = False  # whether an adapter arrives, which leaves the parameters

    # --- what arrives --------------------------------------------------------------------------

    def receive(self, weights: Weights) -> list[tuple[str, torch.Tensor]]:
        """Add up the tensors that arrive. Returns them without the trainer's sums."""
        tensors = []
        for name, tensor in weights:
            if name == SUMS:
                self.sent = json.loads(bytes(tensor.cpu().numpy()))
                continue
            self.received[name] = add_up(tensor)
            self.dtypes[name] = tensor.dtype
            tensors.append((name, tensor))
        self.trace(tensors)
        return tensors

    def trace(self, weights: Weights) -> None:
        """Recognize copies from these tensors, until the next call."""
        places = ((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in weights)
        self.sources = sorted(Source(start, start + size, name) for start, size, name in places)

    def find_source(self, tensor: torch.Tensor) -> Source | None:
        """Return the arrived tensor that this one is a view of."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self.sources, address, key=lambda source: source.start)
        source = self.sources[index - 1] if index else None
        return source if source and address < source.end else None

    # --- what is written -----------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self.record_copy(args[0], args[1])
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.record(args[0], Part("a constant", add_up(args[0])))
        return result

    def record_copy(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Record where a copy goes, and the sums of what it writes there."""
        source = self.find_source(tensor)
        before = tensor.untyped_storage().data_ptr()
        if source and source.end - source.start == tensor.nbytes and tensor.is_contiguous():
            is_same = target.dtype == tensor.dtype == self.dtypes[source.name]
            sums = self.received[source.name] if is_same else add_up(tensor.to(target.dtype))
            self.record(target, Part(source.name, sums))
        elif source:
            part = tensor.to(target.dtype).expand(target.shape)
            self.record(target, Part(source.name, add_up(part)))
        elif before in self.parts and place_of(tensor) == place_of(target):
            # vLLM loads into a new tensor, and copies it to the parameter
            self.parts[target.untyped_storage().data_ptr()] = self.parts.pop(before)
        else:
            self.record(target, Part("", None))

    def record(self, target: torch.Tensor, part: Part) -> None:
        """Record what was written to a part of a parameter."""
        if not target.is_meta and target.numel():
            address = target.untyped_storage().data_ptr()
            self.parts.setdefault(address, {})[place_of(target)] = part

    # --- what vLLM packs -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)  # vLLM's
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading = functools.partial(
                    self.pack, type(method).process_weights_after_loading, method
                )
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                vars(method).pop("process_weights_after_loading", None)

    def pack(
        self, process: Callable[..., None], method: object, module: torch.nn.Module, *args: object
    ) -> None:
        """Compare the parameters of a layer of vLLM, which then packs them."""
        self.packed.add(id(module))
        parameters = dict(module.named_parameters(recurse=False))
        addresses = [each.untyped_storage().data_ptr() for each in parameters.values()]
        for name, parameter in parameters.items():
            self.compare(f"{self.names.get(id(module), '')}.{name}", parameter)
        process(method, module, *args)
        kept = {each.untyped_storage().data_ptr() for each in module.parameters(recurse=False)}
        for address in addresses:
            if address not in kept:  # another tensor may get this memory
                self.parts.pop(address, None)

    # --- the comparison ------------------------------------------------------------------------

    def compare(self, name: str, parameter: torch.Tensor) -> None:
        """Compare a parameter with what was written to it."""
        parts = self.parts.get(parameter.untyped_storage().data_ptr(), {})
        is_known = bool(parts) and all(part.sums is not None for part in parts.values())
        if name in self.known and not is_known:  # it was compared before it was packed
            return
        if is_known:
            self.known.add(name)
        written = sum(math.prod(place.shape) for place in parts)
        if written < parameter.numel():
            rest = int(parameter.count_nonzero())  # padding is 0
            rest -= sum(int(place.view(parameter).count_nonzero()) for place in parts)
            if rest or not parts:
                missing = parameter.numel() - written
                text = f"{name}: {missing:,} of {parameter.numel():,} elements were not written"
                self.report["problems"].append(text)
        for place, part in parts.items():
            size = math.prod(place.shape)
            self.report["total"] += size
            if part.sums is None:
                self.report["unknown"].append(name)
            else:
                actual = add_up(place.view(parameter))
                text = f"{name} (from {part.source})"
                self.comparisons.append(Comparison(text, actual, part.sums))
                self.report["compared"] += size

    def finish(self) -> Report:
        """Compare the parameters, and what was sent with what arrived."""
        if not self.is_adapter:
            self.compare_parameters()
        self.report["problems"] += self.compare_sent()
        for text, actual, expected in self.comparisons:
            self.report["problems"] += describe_difference(text, actual, expected.tolist())
        self.report["unknown"] = sorted(set(self.report["unknown"]))
        return self.report

    def compare_parameters(self) -> None:
        """Compare all parameters except those that were packed and dropped."""
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        is_parameter = {id(parameter) for parameter in self.model.parameters()}
        for name, tensor in tensors:
            is_written = tensor.untyped_storage().data_ptr() in self.parts
            if tensor.numel() and (is_written or id(tensor) in is_parameter):
                self.compare(name, tensor)
        for name, module in self.model.named_modules():
            if hasattr(module, "cpu_linear") and id(module) not in self.packed:
                text = f"{name}: vLLM computes with a packed copy of an earlier sync"
                self.report["problems"].append(text)

    def compare_sent(self) -> Iterator[str]:
        """Yield what differs between the trainer's tensors and those that arrived."""
        if self.sent is None:
            yield "the sums of the trainer did not arrive"
            return
        for name in sorted(self.sent.keys() ^ self.received.keys()):
            yield f"{name} was {'sent and did not arrive' if name in self.sent else 'never sent'}"
        for name in self.sent.keys() & self.received.keys():
            yield from describe_difference(name, self.received[name], self.sent[name])


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor is in its storage."""
    shape = tuple(tensor.shape)
    return Place(int(tensor.storage_offset()), shape, tensor.stride(), tensor.dtype)


def describe_difference(name: str, actual: torch.Tensor, expected: Sequence[int]) -> Iterator[str]:
    """Yield a sentence if the sums of a tensor differ."""
    sums = actual.tolist()
    if sums != list(expected):
        is_moved = sums[0] == expected[0]
        yield f"{name}: {'elements are in other places' if is_moved else 'the values differ'}"


def compare_adapter(
    report: Report, worker: Worker, weights: Weights, peft_config: dict[str, object]
) -> None:
    """Compare the adapter that vLLM uses with the one that arrived, element by element.

    vLLM's own functions make the layers that the arrived tensors must become: they scale, fuse and
    split them. The adapter in use must be equal to them.
    """
    from verl.workers.rollout.vllm_rollout import utils
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    loader = worker.model_runner.lora_manager
    manager = loader._adapter_manager
    request = utils.TensorLoRARequest(
        lora_name=utils.VLLM_LORA_NAME,
        lora_int_id=utils.VLLM_LORA_INT_ID,
        lora_path=utils.VLLM_LORA_PATH,
        peft_config=peft_config,
        lora_tensors={name: tensor.clone() for name, tensor in weights},  # vLLM scales them
    )
    adapter = loader._load_adapter(request)
    manager._create_merged_loras_inplace(adapter)
    for name in adapter.loras.keys() - manager.modules.keys():
        report["problems"].append(f"{name} has an adapter, and vLLM has no such layer")
    if utils.VLLM_LORA_INT_ID not in manager.lora_index_to_id:
        report["problems"].append("vLLM has no adapter")
        return
    slot = manager.lora_index_to_id.index(utils.VLLM_LORA_INT_ID)
    for name, module in manager.modules.items():
        layer = manager._get_lora_layer_weights(adapter, name)
        for kind in ("lora_a", "lora_b"):
            used = [buffer[slot, 0] for buffer in getattr(module, f"{kind}_stacked")]
            size = sum(buffer.numel() for buffer in used)
            report["total"] += size
            if layer and not isinstance(module, BaseLinearLayerWithLoRA):
                report["unknown"].append(f"{name}.{kind}")
                continue
            report["compared"] += size
            if not all(map(torch.equal, used, fit_adapter(module, kind, layer, used))):
                report["problems"].append(f"{name}.{kind}: the values differ")


def fit_adapter(
    module: BaseLinearLayerWithLoRA, kind: str, layer: object, used: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what a layer's buffers must hold: zeros, and this rank's part of the adapter."""
    tensors = getattr(layer, kind, None)  # of one projection, or of each that is fused
    if tensors is not None and module.tp_size > 1:
        tensors = getattr(module, f"slice_{kind}")(tensors)
    parts = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    expected = [torch.zeros_like(buffer) for buffer in used]
    for buffer, part in zip(expected, parts, strict=False):
        if part is not None:
            buffer[: part.shape[0], : part.shape[1]] = part
    return expected


# --- in the driver -------------------------------------------------------------------------------


async def ask_replicas(replicas: Sequence[Any], step: int | None) -> dict[str, float]:
    """Return the metric of a sync. Raises RunError if a replica has other weights.

    replicas: verl's RolloutReplica.
    """
    servers = [replica.servers[0] for replica in replicas]
    calls = [server.collective_rpc.remote("take_weight_reports") for server in servers]
    shares = []
    unknown: set[str] = set()
    for replica, workers in zip(replicas, await asyncio.gather(*calls), strict=True):
        problems: list[str] = []
        for reports in workers:
            problems += itertools.chain.from_iterable(report["problems"] for report in reports)
            if not reports:
                problems.append("no weights arrived")
            unknown.update(*(report["unknown"] for report in reports))
            total = sum(report["total"] for report in reports)
            shares.append(sum(report["compared"] for report in reports) / max(total, 1))
        if problems:
            rest = len(problems) - MAX_NAMED
            more = f"; and {rest} more" if rest > 0 else ""
            raise RunError(
                f"Step {step}: replica {replica.replica_rank} of the rollout engine does not have "
                f"the weights that the trainer sent: {'; '.join(problems[:MAX_NAMED])}{more}. "
                "Nothing was sampled from them. Rerun the same command to resume from the last "
                f"checkpoint. If this happens again, try another {ROLLOUT}.name, and report it "
                "(CONTRIBUTING.md)."
            )
    if unknown:
        warn_once(
            f"the engine changes tensors that arrive, so they are not compared: {sorted(unknown)}"
        )
    return {METRIC: min(shares)}


@functools.cache
def warn_once(message: str) -> None:
    """Write a warning to the log, the first time."""
    logger.warning(message)
