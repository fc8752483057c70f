"""Prove after each weight sync that the rollout engine has the tensors that the trainer sent.

    trainer    adds up each tensor that it sends, in the engine's type (`send_with_sums`). The sums
               are sent last, as one more tensor, on the same way as the weights
    engine     records which part of an arrived tensor is copied to which part of a parameter, and
               compares their sums at the end (`Arrival`). Every element of every parameter must be
               written. If vLLM packs a parameter for a kernel, its memory is kept until then
    driver     asks each replica for its report before it samples (`ask_replicas`)

A parameter with a whole tensor is compared with the sums of the trainer. If it has a part of one,
as with tensor parallelism, the tensor that arrived is compared with them, and the parameter with
the part. `add_up` describes the two sums and what they cannot see. The loader of the engine decides
which part belongs where; that is not checked here, but by the log-probs at the first step.

Protects: samples, from weights that are not those of the trainer.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kit.errors import RunError
from kit.recipe.keys import MODEL, ROLLOUT

if TYPE_CHECKING:
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    from kit.engine.worker_group import WorkerGroup
    from kit.recipe.recipe import Recipe

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


def find_obstacle(recipe: Recipe) -> str:
    """Return why the rollout engine of a recipe cannot be checked. Empty if it can."""
    rollout = recipe.rollout
    vllm = rollout.engine_kwargs.get("vllm") or {}
    quantization = rollout.quantization or vllm.get("quantization")
    if rollout.name not in ("vllm", "hf"):
        return f"{ROLLOUT}.name={rollout.name} has no access to its weights"
    if quantization:
        return f"{ROLLOUT}.quantization={quantization} changes the weights after they arrive"
    if recipe.facts.model and recipe.facts.model.quantization:
        method = recipe.facts.model.quantization
        return (
            f"{MODEL}.path has weights in {method}, to which the engine changes those that arrive"
        )
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
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if data.numel() % 8:
            data = F.pad(data, (0, -data.numel() % 8))
        elif data.storage_offset() % 8:
            data = data.clone()
        words = data.view(torch.int64)
        whole = len(words) // (RUNS * RUN) * RUNS * RUN
        blocks = words[:whole].view(-1, RUNS, RUN).sum(1)  # [blocks, RUN]
        columns = blocks.sum(0)
        rest = words[whole:]
        second = torch.zeros((), dtype=torch.int64, device=words.device)
        # sums over one axis, so that few numbers are weighted
        for values in (blocks.sum(1), columns, rest):
            weights = make_weights(len(values), words.device)
            second = second * SCATTER + (values * weights).sum()
        return torch.stack([columns.sum() + rest.sum(), second])


@functools.lru_cache(maxsize=64)
def make_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return a scattered weight for each position, int64 [count]."""
    positions = torch.arange(1, count + 1, device=device) * SCATTER
    return (positions ^ (positions >> 29)) * SCATTER


def send_with_sums(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, then the sums of each in the engine's dtype, as JSON in a tensor of bytes."""
    sums: dict[str, torch.Tensor] = {}
    device: torch.device | None = None
    for name, tensor in weights:
        sums[name] = add_up(tensor.to(dtype))
        device = tensor.device
        yield name, tensor
    text = json.dumps({name: pair.tolist() for name, pair in sums.items()})
    yield SUMS, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def attach_sums(worker: Worker, dtype: torch.dtype) -> None:
    """Have the actor's engine in a worker of verl's send sums with its weights, once."""
    role = getattr(worker, "worker_dict", {"actor": worker})["actor"]
    engine = role.actor.engine
    if "get_per_tensor_param" in vars(engine):
        return
    get_weights = engine.get_per_tensor_param

    @functools.wraps(get_weights)
    def get_per_tensor_param(**options: object) -> tuple[Iterator[Any], object]:
        weights, adapter = get_weights(**options)
        pairs = weights.items() if isinstance(weights, dict) else weights
        return send_with_sums(pairs, dtype), adapter

    engine.get_per_tensor_param = get_per_tensor_param


def attach_to_group(actor: WorkerGroup, dtype: str) -> None:
    """Have all ranks of the actor send sums with their weights. dtype: of the rollout engine."""
    import ray

    engine_dtype = getattr(torch, dtype)
    ray.get([worker.__ray_call__.remote(attach_sums, engine_dtype) for worker in actor.workers])


# --- in the engine's process ---------------------------------------------------------------------


class Source(NamedTuple):
    """An arrived tensor."""

    start: int  # address
    name: str
    tensor: torch.Tensor


class Part(NamedTuple):
    """A part of a parameter that was written."""

    tensor: torch.Tensor  # It keeps the memory of a parameter that vLLM packs and drops.
    source: str  # an arrived tensor; "" if it is not known what was written
    sums: torch.Tensor | None  # None: those that the trainer sends for the whole source


class Arrival(TorchDispatchMode):
    """One sync, in a process of the rollout engine. While entered, it records each copy.

    model: of the engine. dtype: of the engine, in which the trainer has added up its tensors.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.sources: list[Source] = []
        self.sent: dict[str, list[int]] | None = None
        self.arrived: set[str] = set()
        self.added_up: dict[str, torch.Tensor] = {}  # arrived tensors of which parts were copied
        self.addresses = {address_of(each) for each in model.parameters()}
        # by the address of the storage, and by the place in it
        self.parts: dict[int, dict[tuple[object, ...], Part]] = {}
        modules = model.named_modules()
        # a CPU's functions, which have a packed copy of a layer's weights
        self.packed = {name: m.cpu_linear for name, m in modules if hasattr(m, "cpu_linear")}
        self.report = Report(problems=[], unknown=[], compared=0, total=0)
        self.is_adapter = False  # whether an adapter arrives, which leaves the parameters

    def receive(self, weights: Weights) -> list[tuple[str, torch.Tensor]]:
        """Note the tensors that arrive. Returns them without the trainer's sums."""
        tensors = dict(weights)
        if SUMS in tensors:
            self.sent = json.loads(bytes(tensors.pop(SUMS).cpu().numpy()))
        self.arrived |= tensors.keys()
        return [*tensors.items()]

    def trace(self, weights: Weights) -> None:
        """Recognize copies from these tensors, and keep them until the next call."""
        sources = [Source(tensor.data_ptr(), name, tensor) for name, tensor in weights]
        self.sources = sorted(sources, key=lambda source: source.start)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default and args[0].numel() and not args[0].is_meta:
            target = args[0]
            place = (target.storage_offset(), target.shape, target.stride())
            part = self.describe_copy(target, args[1])
            self.parts.setdefault(address_of(target), {})[place] = part
        return func(*args, **(kwargs or {}))

    def describe_copy(self, target: torch.Tensor, tensor: torch.Tensor) -> Part:
        """Return what a copy has to write."""
        start = tensor.data_ptr()
        index = bisect.bisect_right(self.sources, start, key=lambda source: source.start)
        source = self.sources[index - 1] if index else None
        if source and start < source.start + source.tensor.nbytes:
            is_whole = tensor.nbytes == source.tensor.nbytes and tensor.is_contiguous()
            if is_whole and target.dtype == self.dtype:
                return Part(target, source.name, None)
            self.add_up(source.name, source.tensor)
            name = source.name
        elif address_of(tensor) in self.parts:  # vLLM loads into a new tensor, and copies it
            name = next(iter(self.parts[address_of(tensor)].values())).source
        else:
            return Part(target, "", None)
        return Part(target, name, add_up(tensor.to(target.dtype).expand(target.shape)))

    def add_up(self, name: str, tensor: torch.Tensor) -> None:
        """Add up an arrived tensor as the trainer has, once."""
        if name not in self.added_up:
            self.added_up[name] = add_up(tensor.to(self.dtype))

    # --- the comparison ------------------------------------------------------------------------

    def finish(self) -> Report:
        """Compare the parameters, and what was sent with what arrived."""
        if self.sent is None:
            self.report["problems"].append("the sums of the trainer did not arrive")
            return self.report
        if not self.is_adapter:
            self.compare_parameters(self.sent)
        problems = self.report["problems"]
        for name in sorted(self.sent.keys() ^ self.arrived):
            text = "sent and did not arrive" if name in self.sent else "never sent"
            problems.append(f"{name} was {text}")
        for name, sums in self.added_up.items():
            problems += describe_difference(name, sums, self.sent.get(name))
        self.report["unknown"].sort()
        return self.report

    def compare_parameters(self, sent: Mapping[str, list[int]]) -> None:
        """Compare what was written to the parameters. A buffer may keep its values."""
        problems = self.report["problems"]
        parameters: dict[int, tuple[str, torch.Tensor]] = {}
        for name, buffer in self.model.named_buffers():
            parameters[address_of(buffer)] = (name, buffer)
        for name, parameter in self.model.named_parameters():
            parameters[address_of(parameter)] = (name, parameter)
            if not parameter.numel() or address_of(parameter) in self.parts:
                continue
            if address_of(parameter) in self.addresses:
                problems += self.find_gap(name, parameter, [])
            else:  # vLLM has packed what was written into a new tensor
                self.compare(name, Part(parameter, "", None), sent)
        for address, parts in self.parts.items():
            written = [*parts.values()]
            tensor = written[0].tensor
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            packed = tensor.as_strided((count,), (1,), 0)
            default = (f"the parameter with {written[0].source}", packed)
            name, tensor = parameters.get(address, default)
            if tensor is packed and not written[0].source:
                continue  # no parameter
            problems += self.find_gap(name, tensor, written)
            for part in written:
                self.compare(name, part, sent)
        for name, function in self.packed.items():
            if self.model.get_submodule(name).cpu_linear is function:
                problems.append(f"{name}: vLLM computes with a packed copy of an earlier sync")

    def find_gap(
        self, name: str, parameter: torch.Tensor, written: Sequence[Part]
    ) -> Iterator[str]:
        """Yield a problem if elements of a parameter were not written. Padding is 0."""
        missing = parameter.numel() - sum(part.tensor.numel() for part in written)
        if missing > 0:
            others = int(parameter.count_nonzero())
            others -= sum(int(part.tensor.count_nonzero()) for part in written)
            if others or not written:
                yield f"{name}: {missing:,} of {parameter.numel():,} elements were not written"

    def compare(self, name: str, part: Part, sent: Mapping[str, list[int]]) -> None:
        """Compare a part of a parameter with its source."""
        size = part.tensor.numel()
        self.report["total"] += size
        if not part.source:
            self.report["unknown"].append(name)
            return
        self.report["compared"] += size
        expected = sent.get(part.source) if part.sums is None else part.sums.tolist()
        text = f"{name} (from {part.source})"
        self.report["problems"] += describe_difference(text, add_up(part.tensor), expected)

    # --- an adapter ----------------------------------------------------------------------------

    def compare_adapter(
        self, worker: Worker, weights: Weights, peft_config: dict[str, object]
    ) -> None:
        """Let vLLM load the arrived adapter again, which must not change the one that it uses."""
        from verl.workers.rollout.vllm_rollout import utils

        self.is_adapter = True
        tensors = {name: tensor.clone() for name, tensor in weights}  # vLLM scales them
        for name, tensor in tensors.items():
            self.add_up(name, tensor)
        request = utils.TensorLoRARequest(
            lora_name=utils.VLLM_LORA_NAME,
            lora_int_id=utils.VLLM_LORA_INT_ID,
            lora_path=utils.VLLM_LORA_PATH,
            peft_config=peft_config,
            lora_tensors=tensors,
        )
        loader = worker.model_runner.lora_manager
        manager = loader._adapter_manager
        used = {name: torch.cat(list_buffers(layer)) for name, layer in manager.modules.items()}
        loader.remove_adapter(utils.VLLM_LORA_INT_ID)
        loader.add_adapter(request)
        problems = self.report["problems"]
        for name in manager.get_adapter(utils.VLLM_LORA_INT_ID).loras.keys() - used.keys():
            problems.append(f"{name} has an adapter, and vLLM has no such layer")
        for name, layer in manager.modules.items():
            self.report["total"] += used[name].numel()
            self.report["compared"] += used[name].numel()
            if not torch.equal(used[name], torch.cat(list_buffers(layer))):
                problems.append(f"{name}: the values of the adapter differ")


def list_buffers(layer: BaseLinearLayerWithLoRA) -> list[torch.Tensor]:
    """Return the tensors in which a layer of vLLM has its adapter, flattened."""
    buffers = (*layer.lora_a_stacked, *layer.lora_b_stacked)
    return [buffer.flatten() for buffer in buffers]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def describe_difference(name: str, sums: torch.Tensor, expected: list[int] | None) -> Iterator[str]:
    """Yield a sentence if the sums of a tensor differ. expected: None if it was never sent."""
    actual = sums.tolist()
    if expected and actual != expected:
        is_moved = actual[0] == expected[0]
        yield f"{name}: {'elements are in other places' if is_moved else 'the values differ'}"


# --- in the driver -------------------------------------------------------------------------------


async def ask_replicas(replicas: Sequence[Any], step: int | None) -> dict[str, float]:
    """Return the metric of a sync. Raises RunError if a replica has other weights.

    replicas: verl's RolloutReplica.
    """
    servers = [replica.servers[0] for replica in replicas]
    calls = [server.collective_rpc.remote("take_weight_reports") for server in servers]
    everything: list[Report] = []
    for replica, workers in zip(replicas, await asyncio.gather(*calls), strict=True):
        reports = [*itertools.chain(*workers)]
        problems = [*itertools.chain(*(report["problems"] for report in reports))]
        if not all(workers):
            problems.append("no weights arrived")
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
        everything += reports
    unknown = sorted(set().union(*(report["unknown"] for report in everything)))
    if unknown:
        warn_once(f"the engine changes tensors that arrive, so they are not compared: {unknown}")
    total = sum(report["total"] for report in everything)
    return {METRIC: sum(report["compared"] for report in everything) / max(total, 1)}


@functools.cache
def warn_once(message: str) -> None:
    """Write a warning to the log, the first time."""
    logger.warning(message)
