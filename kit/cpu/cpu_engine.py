"""verl's FSDP engines for a CPU, without the work that costs a CPU most.

    prompts      each distinct prompt is computed once for all its responses in a micro-batch
                 (packed_layout.py); micro-batches keep the responses to a prompt together
    attention    responses of similar length on a grid, in two matmuls
    logits       only where they predict a token of a response
    log-probs    computed together with the entropy: one pass over tiles of rows, in fp32. Their
                 gradient overwrites the logits

The results are those of verl's engines: the same numbers up to rounding, packed as verl packs them.
Log-probs of prompt tokens, which nothing reads, are zeros.

kit/cpu/platform.py imports this file in each process that trains. The import registers the engines
with verl and patches verl's functions of logits and micro-batches.

Protects: gradients on a CPU, which are those of verl's engines (tests/cpu/test_verl_engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import verl.utils.torch_functional as verl_F
import verl.workers.engine.fsdp.transformer_impl as fsdp
from tensordict import TensorDict
from torch.distributed import ProcessGroup
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verl.utils import tensordict_utils as tu
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.base import EngineRegistry

from kit.cpu.packed_layout import MAX_GRID_KEYS, Grid, Layout, find_unique_prompts, lay_out
from kit.engine.packing_trial import monkey_patch_engine

Context = Any  # of a torch.autograd.Function; torch has no type for what it holds
Inputs = dict[str, Any]  # of a model, or values that verl keeps for its output
TILE_ROWS = 16  # rows of logits that are computed together, and fit into a core's cache

# --- attention -----------------------------------------------------------------------------------

# The layout of the current forward pass, because transformers has no argument for it. The backward
# pass does not need it.
_layout: Layout | None = None


def grid_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,  # of this attention, by the model
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of each response to its prompt and itself.

    The arguments are those of transformers' attention functions.
    query [1, H, U, D]; key, value [1, H_kv, U, D]. Returns [1, U, H, D], and no weights.
    Raises ValueError without a packed micro-batch, NotImplementedError for other attention.
    """
    if not getattr(module, "is_causal", True):  # the vision part of a model
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if _layout is None:
        raise ValueError(
            "attn_implementation=cpu_packed works only on packed batches. "
            "Set actor_rollout_ref.model.use_remove_padding=true."
        )
    if features := find_missing_features(module, sliding_window, options):
        raise NotImplementedError(f"attn_implementation=cpu_packed has no {' and '.join(features)}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, heads, D]
    scale = scaling or q.shape[-1] ** -0.5
    outputs = []
    for grid in _layout.grids:
        output = attend(
            select_rows(q, grid.query_index),
            select_rows(k, grid.key_index),
            select_rows(v, grid.key_index),
            mask_window(grid, sliding_window) if sliding_window else grid.attn_mask,
            scale,
        )
        outputs.append(output.flatten(0, 1))  # [n * L, H, D]
    return torch.cat(outputs).index_select(0, _layout.inverse_index).unsqueeze(0), None


def find_missing_features(
    module: torch.nn.Module, sliding_window: int | None, options: Mapping[str, object]
) -> list[str]:
    """Return the features of a layer's attention that grids lack.

    transformers computes no mask for them. So a layer that only its mask limits is one of these.
    """
    features = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else ""
    has_window = kind == "sliding_attention" and getattr(config, "sliding_window", None)
    if kind == "chunked_attention" or (has_window and not sliding_window):
        features.append(kind)
    return features


def mask_window(grid: Grid, window: int) -> torch.Tensor:
    """Return the mask of a grid that also hides keys outside of a sliding window of tokens."""
    positions = grid.key_positions  # [n, P+L]
    queries = positions[:, -grid.query_index.shape[1] :]  # [n, L]
    is_outside = queries[:, :, None] - positions[:, None] >= window  # [n, L, P+L]
    return grid.attn_mask | is_outside[:, None, None]


def select_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a grid: x [U, heads, D], index [n, length] -> [n, heads, length, D]."""
    # index_select has a faster backward pass than indexing
    rows = x.index_select(0, index.flatten())
    return rows.view(*index.shape, *x.shape[1:]).transpose(1, 2)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend in a grid: q, k, v [n, H or H_kv, L or P+L, D] -> [n, L, H, D of v]."""
    n, H, L, _ = q.shape
    H_kv, keys = k.shape[1:3]
    if keys > MAX_GRID_KEYS:
        is_seen = ~attn_mask[:, 0]  # [n, 1, L, P+L]
        output = F.scaled_dot_product_attention(q, k, v, is_seen, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)
    # The query heads that share a key head form one matrix, so that keys are not copied.
    q = q.reshape(n, H_kv, -1, q.shape[-1])  # [n, H_kv, H/H_kv * L, D]
    scores = (q @ k.transpose(2, 3)).view(n, H_kv, -1, L, keys).float() * scale
    weights = scores.masked_fill(attn_mask, -torch.inf).softmax(-1).to(v.dtype)
    return (weights.view(n, H_kv, -1, keys) @ v).view(n, H, L, v.shape[-1]).transpose(1, 2)


# --- log-probs and entropy -----------------------------------------------------------------------


class LogProbEntropy(torch.autograd.Function):
    """Log-probs of labels, and entropies: logits [A, V], labels [A] -> two [A], in fp32.

    The gradient overwrites the logits. So nothing may read the logits after the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Context, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_norm = torch.empty(len(logits))  # log of the sum of exp(logits)
        mean = torch.empty(len(logits))  # of the logits, weighted by their probabilities
        buffer = torch.empty(TILE_ROWS, logits.shape[1])
        for start in range(0, len(logits), TILE_ROWS):
            rows = slice(start, start + TILE_ROWS)
            tile = logits[rows].float()
            maximum = tile.amax(-1, keepdim=True)
            weights = torch.sub(tile, maximum, out=buffer[: len(tile)]).exp_()
            total = weights.sum(-1)
            log_norm[rows] = total.log() + maximum[:, 0]
            mean[rows] = torch.linalg.vecdot(weights, tile) / total
        ctx.save_for_backward(logits, labels, log_norm, mean)
        log_probs = logits.gather(1, labels[:, None])[:, 0].float() - log_norm
        return log_probs, log_norm - mean

    @staticmethod
    def backward(
        ctx: Context, log_prob_grad: torch.Tensor, entropy_grad: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        logits, labels, log_norm, mean = ctx.saved_tensors
        buffer = torch.empty(TILE_ROWS, logits.shape[1])
        is_entropy_used = bool(entropy_grad.any())  # False if entropy_coeff is 0
        for start in range(0, len(logits), TILE_ROWS):
            rows = slice(start, start + TILE_ROWS)
            tile = logits[rows].float()
            probs = torch.sub(tile, log_norm[rows, None], out=buffer[: len(tile)]).exp_()
            factor = -log_prob_grad[rows, None]
            if is_entropy_used:
                factor = (mean[rows, None] - tile) * entropy_grad[rows, None] + factor
            probs.mul_(factor)
            logits[rows] = probs.scatter_add_(1, labels[rows, None], log_prob_grad[rows, None])
        return logits, None


class ScaleInPlace(torch.autograd.Function):
    """Divide logits [A, V] by temperature [A, 1] in place.

    The logits are a view. If a view is changed in place, autograd itself makes a copy.
    """

    @staticmethod
    def forward(ctx: Context, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(temperature)
        return logits.detach().div_(temperature)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (temperature,) = ctx.saved_tensors
        return gradient.div_(temperature), None  # made by LogProbEntropy, used only here


class LogitsResult(NamedTuple):
    """A result of LogProbEntropy, and the logits that it belongs to."""

    logits: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor


# The labels and the result of the current forward pass. verl computes the entropy first, with a
# function that has no argument for labels.
_labels: torch.Tensor | None = None
_result: LogitsResult | None = None

verl_entropy_from_logits = verl_F.entropy_from_logits
verl_logprobs_from_logits = fsdp.logprobs_from_logits


def compute_once(logits: torch.Tensor) -> LogitsResult:
    """Return the log-probs and entropies of logits [A, V], computed at the first call."""
    global _result
    if _result is None or _result.logits is not logits:
        _result = LogitsResult(logits, *LogProbEntropy.apply(logits, _labels))
    return _result


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return entropies [A]; verl's function if the micro-batch is not packed."""
    if _labels is None:
        return verl_entropy_from_logits(logits)
    return compute_once(logits).entropy


def logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """Return log-probs of labels [A]; verl's function if the micro-batch is not packed."""
    if _labels is None:
        return verl_logprobs_from_logits(logits, labels, inplace_backward)
    return compute_once(logits).log_probs


def scale_logits(
    logits: torch.Tensor, temperature: torch.Tensor, *, is_unit_temperature: bool
) -> torch.Tensor:
    """Divide logits [A, V] by temperature [A, 1] in place. verl divides a copy."""
    if is_unit_temperature:
        return logits
    return ScaleInPlace.apply(logits, temperature.clamp(min=1e-8).to(logits.dtype))


# --- micro-batches -------------------------------------------------------------------------------

verl_prepare_micro_batches = fsdp.prepare_micro_batches


def prepare_micro_batches(
    data: TensorDict, dp_group: ProcessGroup | None = None, **options: object
) -> tuple[list[TensorDict], list[list[int]]]:
    """Split a batch by its tokens as verl does, but keep the responses to a prompt together.

    A prompt that neighboring responses share counts once. Every rank has the same number of
    micro-batches. Returns these, and their row indices.
    """
    if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True) or "prompts" not in data:
        return verl_prepare_micro_batches(data, dp_group, **options)
    prompt_lengths = count_prompt_tokens(data)
    unique = find_unique_prompts(data["input_ids"], prompt_lengths, data.get("image", None))
    tokens = data["input_ids"].offsets().diff() - prompt_lengths  # [B] to compute for each row
    tokens[unique.prompt_rows] += prompt_lengths[unique.prompt_rows]
    costs = tokens[unique.order].tolist()
    needed = math.ceil(sum(costs) / data["max_token_len_per_gpu"])
    count = torch.tensor(min(len(costs), needed))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=dp_group)
    parts = split_by_cost(unique.order, costs, int(count))
    return [tu.index_select_tensor_dict(data, part) for part in parts], parts


def count_prompt_tokens(data: TensorDict) -> torch.Tensor:
    """Return the lengths of the prompts [B]: verl's mask covers prompts first, then responses."""
    return data["attention_mask"][:, : data["prompts"].shape[1]].sum(dim=1)


def split_by_cost(rows: Sequence[int], costs: Sequence[int], count: int) -> list[list[int]]:
    """Split rows, in their order, into `count` parts of about the same cost.

    No part is empty if there are at least as many rows as parts.
    """
    total = sum(costs)
    parts: list[list[int]] = [[] for _ in range(count)]
    current = 0
    cost_before = 0
    for index, (row, cost) in enumerate(zip(rows, costs, strict=True)):
        is_full = cost_before + cost / 2 > (current + 1) * total / count
        is_rest_short = len(rows) - index < count - current  # each later part needs a row
        if parts[current] and current + 1 < count and (is_full or is_rest_short):
            current += 1
        parts[current].append(row)
        cost_before += cost
    return parts


# --- verl's engines ------------------------------------------------------------------------------


class PackedInputs:
    """Mixin that packs the inputs of both engines. It precedes verl's class in the bases."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Inputs, Inputs]:
        """Return the model's inputs in the packed order, and the layout among the other values."""
        global _layout
        inputs, args = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if "temperature_rmpad" not in args:  # use_remove_padding: false, with torch's attention
            return inputs, args
        if args.get("pad_size"):
            raise NotImplementedError(
                f"A CPU's engine does not support padded packed batches ({args['pad_size']} "
                "tokens). Remove ulysses_sequence_parallel_size and pad_to_length."
            )
        layout = lay_out(
            micro_batch["input_ids"],
            count_prompt_tokens(micro_batch),
            micro_batch.get("image", None),
        )
        _layout = layout
        args["layout"] = layout
        if "multi_modal_inputs" in micro_batch:
            images_of_rows = list(micro_batch.get("multi_modal_inputs"))
            images = [images_of_rows[row] for row in layout.prompt_rows]
            inputs |= extract_multi_modal_inputs(images)
        for name in ("input_ids", "position_ids"):
            inputs[name] = inputs[name][..., layout.gather_index]
        return inputs, args


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithLMHead(PackedInputs, fsdp.FSDPEngineWithLMHead):
    """The engine of the actor and the reference."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Inputs, Inputs]:
        """Return the model's inputs, with logits only where they predict a response's token."""
        inputs, args = super().prepare_model_inputs(micro_batch)
        if "layout" not in args:
            return inputs, args
        layout = args["layout"]
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            args[name] = args[name][layout.response_positions]
        inputs["logits_to_keep"] = layout.packed_positions[layout.response_positions]
        return inputs, args

    def prepare_model_outputs(
        self,
        output: Any,  # of the model; transformers has a class for each kind
        output_args: Inputs,
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., object] | None,
    ) -> dict[str, torch.Tensor]:
        """Return log-probs and entropies as verl does, with zeros where prompts are predicted."""
        global _labels, _result
        if "layout" not in output_args:
            return super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
        layout = output_args["layout"]
        offsets = F.pad(layout.response_lengths.cumsum(0), (1, 0))  # [B+1]
        # verl reads the length of each row from its ids, but these logits are only of responses
        responses = micro_batch.copy()
        responses["input_ids"] = nest(torch.empty(int(offsets[-1])), offsets)
        _labels = output_args["input_ids_rmpad_rolled"]
        outputs = super().prepare_model_outputs(
            output, output_args, responses, logits_processor_func
        )
        _labels = None
        _result = None
        row_offsets = micro_batch["input_ids"].offsets()
        for name, nested in outputs.items():
            values = nested.values()  # [A]
            zeros = values.new_zeros(len(layout.packed_positions))  # [T]
            outputs[name] = nest(
                zeros.index_copy(0, layout.response_positions, values), row_offsets
            )
        return outputs


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithValueHead(PackedInputs, fsdp.FSDPEngineWithValueHead):
    """The engine of the critic."""

    def prepare_model_outputs(
        self,
        output: Any,  # of the model; transformers has a class for each kind
        output_args: Inputs,
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., object] | None,
    ) -> dict[str, torch.Tensor]:
        """Return values as verl does, of all tokens in verl's order."""
        if "layout" in output_args:
            output.logits = output.logits[:, output_args["layout"].packed_positions]
        return super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )


def nest(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return packed values as a nested tensor. offsets: [B+1]."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def monkey_patch_verl() -> None:
    """Have verl's engine use this file's functions of logits and micro-batches."""
    fsdp.logprobs_from_logits = logprobs_from_logits
    fsdp._scale_logits_by_temperature = scale_logits
    verl_F.entropy_from_logits = entropy_from_logits
    fsdp.prepare_micro_batches = prepare_micro_batches  # type: ignore[assignment]


monkey_patch_verl()
monkey_patch_engine()
