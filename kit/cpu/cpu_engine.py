"""verl's FSDP engines on a CPU, without the work that a CPU feels most. platform.py puts them into verl's registry.

    prompts    computed once for all their answers in a micro-batch, since attention is causal: [p1 p2 | a1 a2 a3 a4];
               micro-batches keep answers to a prompt together, and count it once
    attention  answers of like lengths side by side on a grid, in two matmuls. One call for each sequence would have
               oneDNN compile kernels for each length, in each layer, for a batch whose lengths never come again
    logits     of the answers' tokens alone
    log-probs  and entropy in one pass over tiles of rows, in fp32; their gradient takes the logits' place

What comes out is what verl's engines put out: the same numbers to rounding, packed as verl packs them, with zeros
where log-probs are of prompt tokens, which nobody reads.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import verl.utils.torch_functional as verl_F
import verl.workers.engine.fsdp.transformer_impl as fsdp
from tensordict import TensorDict
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verl.utils import tensordict_utils as tu
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine.base import EngineRegistry

LONGEST = (
    512  # keys that a grid may have; longer rows go one by one through torch's flash attention
)
SCORES = 2**24  # elements of a grid's scores, at most
TILE = 16  # rows of logits that are worked on at once, and stay in a core's cache


# --- where the tokens of a micro-batch stand ------------------------------------------------------


class Grid(NamedTuple):
    """n rows side by side: L queries each, over the P keys of their prompts and their own L."""

    tokens: (
        torch.Tensor
    )  # [n, L] places in the packed row [U]; beyond a row's end that of its last token
    real: torch.Tensor  # [n, L] False beyond a row's end
    keys: (
        torch.Tensor
    )  # [n, P+L] the same of the rows' prompts, then of the rows; P = 0 where the rows are prompts
    hidden: torch.Tensor  # [n, 1, 1, L, P+L] True where a query does not see a key


class Layout(NamedTuple):
    """A packed row [U]: prompts, each once, then answers. T tokens as verl packs them, every prompt with its answer."""

    take: torch.Tensor  # [U] the token of T that stands at each place
    place: torch.Tensor  # [T] where each token of T stands
    said: torch.Tensor  # [A] tokens of T whose next token is of an answer
    answers: torch.Tensor  # [B] lengths of the answers; their sum is A
    grids: list[Grid]
    back: torch.Tensor  # [U] where each place is found in the grids' rows, one grid after another
    asked: list[int]  # of each prompt, the row of B where it comes first


def lay_out(ids: torch.Tensor, prompts: torch.Tensor, images: torch.Tensor | None = None) -> Layout:
    """ids: nested [B, t], every prompt with its answer. prompts: [B], lengths, of at least 1. images: [B], rows of one
    number have the same."""
    offsets, tokens = ids.offsets().tolist(), ids.values().tolist()
    seen = [0] * len(prompts) if images is None else images.tolist()
    known: dict[tuple[int, ...], int] = {}  # a prompt's images and ids -> its index
    asked: list[int] = []
    first: list[tuple[int, int]] = []  # of each prompt: where in T, its length
    rows: list[tuple[int, int, int]] = []  # of each answer: where in T, its length, its prompt
    spans = list(zip(offsets, offsets[1:], prompts.tolist(), range(len(prompts)), strict=False))
    for begin, end, length, row in sorted(
        spans, key=lambda s: (tokens[s[0] : s[1]], seen[s[3]])
    ):  # rounds alike so
        prompt = known.setdefault((seen[row], *tokens[begin : begin + length]), len(known))
        if prompt == len(first):
            first.append((begin, length))
            asked.append(row)
        rows.append((begin + length, end - begin - length, prompt))
    starts = [0]  # of all prompts, then of all answers, in U
    for _, length, *_ in [*first, *rows]:
        starts.append(starts[-1] + length)
    take = torch.cat([torch.arange(begin, begin + length) for begin, length, *_ in [*first, *rows]])
    place = torch.empty(len(tokens), dtype=torch.long)
    said = []
    for (begin, length, prompt), start in zip(rows, starts[len(first) :], strict=False):
        size = first[prompt][1]
        place[begin - size : begin] = torch.arange(starts[prompt], starts[prompt] + size)
        place[begin : begin + length] = torch.arange(start, start + length)
        said.append(torch.arange(begin - 1, begin + length - 1))
    grids = _grids([(starts[i], length, 0, 0) for i, (_, length) in enumerate(first)])
    own = [
        (starts[len(first) + i], length, starts[p], first[p][1])
        for i, (_, length, p) in enumerate(rows)
    ]
    grids += _grids([span for span in own if span[1]])
    back = torch.empty_like(take)
    real = torch.cat([grid.real.flatten() for grid in grids])  # [all rows of all grids]
    back[torch.cat([grid.tokens.flatten() for grid in grids])[real]] = real.nonzero().flatten()
    return Layout(
        take, place, torch.cat(said), torch.tensor([row[1] for row in rows]), grids, back, asked
    )


def _grids(spans: list[tuple[int, int, int, int]]) -> list[Grid]:
    """spans: (start and length of a row, start and length of its prompt) in U. Rows of a grid are of like lengths."""
    grids: list[Grid] = []
    alike: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for span in spans:  # by powers of two, of which the first is 64: shorter ones are not worth kernels of their own
        alike.setdefault((max(6, span[1].bit_length()), max(6, span[3].bit_length())), []).append(
            span
        )
    for members in alike.values():
        L, P = (max(span[i] for span in members) for i in (1, 3))
        at_once = 1 if L + P > LONGEST else max(1, SCORES // (16 * L * (L + P)))
        for i in range(0, len(members), at_once):
            start, length, begin, size = (
                torch.tensor(members[i : i + at_once]).unsqueeze(-1).unbind(1)
            )  # [n, 1] each
            own, before = torch.arange(int(length.max())), torch.arange(int(size.max()))
            outside = (before >= size)[:, None].expand(-1, len(own), -1)  # [n, L, P]
            later = (own > own[:, None]).expand(len(start), -1, -1)  # [n, L, L]
            hidden = torch.cat([outside, later], dim=2)[:, None, None]
            tokens, prompts = start + own.minimum(length - 1), begin + before.minimum(size - 1)
            grids.append(Grid(tokens, own < length, torch.cat([prompts, tokens], dim=1), hidden))
    return grids


# --- attention -----------------------------------------------------------------------------------

_layout: Layout | None = None  # of the forward pass under way; its backward pass needs none


def grid_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, **options
):
    """Causal attention of the layout's answers to their prompts and to themselves, as transformers calls it.

    query [1, H, U, D]; key, value [1, H_kv, U, D]. Returns ([1, U, H, D], None).
    """
    if not getattr(module, "is_causal", True):  # of a part of the model that sees images
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if _layout is None:
        raise ValueError(
            "attn_implementation=cpu_packed wants actor_rollout_ref.model.use_remove_padding=true"
        )
    longest = max(grid.hidden.shape[-1] for grid in _layout.grids)
    unknown = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if unknown or (sliding_window or longest) < longest:
        what = ", ".join(unknown) or f"a window of {sliding_window} tokens, under {longest},"
        raise NotImplementedError(
            f"attn_implementation=cpu_packed: the model's attention has {what} which it lacks"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, H, D]
    scale = scaling or q.shape[-1] ** -0.5
    outputs = []
    for grid in _layout.grids:
        outputs.append(
            _attend(
                _rows(q, grid.tokens), _rows(k, grid.keys), _rows(v, grid.keys), grid.hidden, scale
            )
        )
    return torch.cat([o.flatten(0, 1) for o in outputs]).index_select(0, _layout.back).unsqueeze(
        0
    ), None


def _rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[n, heads, length, D] out of [U, heads, D]. By index_select, whose backward pass is faster than indexing's."""
    return x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:]).transpose(1, 2)


def _attend(q, k, v, hidden, scale):
    """q [n, H, L, D]; k, v [n, H_kv, P+L, D] -> [n, L, H, D]."""
    (n, H, L, D), (heads, keys) = q.shape, k.shape[1:3]
    if keys > LONGEST:
        seen = ~hidden[:, 0]  # [n, 1, L, P+L]
        return F.scaled_dot_product_attention(
            q, k, v, seen, scale=scale, enable_gqa=True
        ).transpose(1, 2)
    # query heads of one key head side by side, so that keys are not copied
    q = q.reshape(n, heads, -1, D)  # [n, H_kv, H/H_kv * L, D]
    scores = (q @ k.transpose(2, 3)).view(n, heads, -1, L, keys).float() * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
    return (weights.view(n, heads, -1, keys) @ v).view(n, H, L, D).transpose(1, 2)


# --- log-probs and entropy -----------------------------------------------------------------------


class _Said(torch.autograd.Function):
    """Of logits [T, V]: log softmax at labels [T], and entropy, both fp32 [T]. The gradient takes the logits' place."""

    @staticmethod
    def forward(ctx, logits, labels):
        (norm, mean), part = torch.empty(2, len(logits)), torch.empty(TILE, logits.shape[1])
        for begin in range(0, len(logits), TILE):
            at = slice(begin, begin + TILE)
            tile = logits[at].float()
            most = tile.amax(-1, keepdim=True)
            weights = torch.sub(tile, most, out=part[: len(tile)]).exp_()
            total = weights.sum(-1)
            norm[at], mean[at] = (
                total.log() + most[:, 0],
                torch.linalg.vecdot(weights, tile) / total,
            )
        ctx.save_for_backward(logits, labels, norm, mean)
        return logits.gather(1, labels[:, None])[:, 0].float() - norm, norm - mean

    @staticmethod
    def backward(ctx, of_label, of_entropy):
        logits, labels, norm, mean = ctx.saved_tensors
        part, looked_at = (
            torch.empty(TILE, logits.shape[1]),
            not of_entropy.any(),
        )  # alone (entropy_coeff: 0)
        for begin in range(0, len(logits), TILE):
            at = slice(begin, begin + TILE)
            tile, down = logits[at].float(), -of_label[at, None]
            weights = torch.sub(tile, norm[at, None], out=part[: len(tile)]).exp_()
            weights.mul_(
                down if looked_at else (mean[at, None] - tile) * of_entropy[at, None] + down
            )
            logits[at] = weights.scatter_add_(1, labels[at, None], -down)
        return logits, None


# Of the forward pass under way, since verl asks for the entropy first, without labels; logits, and what _Said says.
_labels: torch.Tensor | None = None
_found: tuple[torch.Tensor, ...] = ()
_verls = verl_F.entropy_from_logits, fsdp.logprobs_from_logits


def _said(logits):
    global _found
    if not _found or _found[0] is not logits:
        _found = (logits, *_Said.apply(logits, _labels))
    return _found


def _entropy(logits):
    return _verls[0](logits) if _labels is None else _said(logits)[2]


def _log_probs(logits, labels, inplace_backward=True):
    return _verls[1](logits, labels, inplace_backward) if _labels is None else _said(logits)[1]


class _Scaled(torch.autograd.Function):
    """logits / temperature [T, 1] in the place of logits, which are a view: autograd would copy them for that."""

    @staticmethod
    def forward(ctx, logits, temperature):
        ctx.save_for_backward(temperature)
        return logits.detach().div_(temperature)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.div_(*ctx.saved_tensors), None  # which _Said has made for this


def _scale(logits, temperature, *, is_unit_temperature):
    return (
        logits
        if is_unit_temperature
        else _Scaled.apply(logits, temperature.clamp(min=1e-8).to(logits.dtype))
    )


fsdp.logprobs_from_logits, fsdp._scale_logits_by_temperature = _log_probs, _scale
verl_F.entropy_from_logits = _entropy


# --- micro-batches -------------------------------------------------------------------------------

_verls_micro_batches = fsdp.prepare_micro_batches


def _micro_batches(data: TensorDict, dp_group=None, **options):
    """verl's, but answers to a prompt stay together, and it counts once. As many on every rank."""
    if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True) or "prompts" not in data:
        return _verls_micro_batches(data, dp_group, **options)
    rows = [row.tolist() for row in data["input_ids"].unbind()]
    prompts = data["attention_mask"][:, : data["prompts"].shape[1]].sum(dim=1).tolist()
    images = data["image"].tolist() if "image" in data else [0] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: (rows[i], images[i]))  # alike however they come
    known: set[tuple[int, ...]] = set()
    costs = []  # in this order
    for i in order:
        asked = (images[i], *rows[i][: prompts[i]])
        costs.append(len(rows[i]) - prompts[i] * (asked in known))
        known.add(asked)
    total = sum(costs)
    count = torch.tensor(min(len(rows), math.ceil(total / data["max_token_len_per_gpu"])))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=dp_group)
    parts: list[list[int]] = [[] for _ in range(int(count))]
    k = done = 0
    for place, (i, cost) in enumerate(zip(order, costs, strict=True)):
        full = done + cost / 2 > (k + 1) * total / len(parts)
        if parts[k] and k + 1 < len(parts) and (full or len(rows) - place < len(parts) - k):
            k += 1
        parts[k].append(i)
        done += cost
    return [tu.index_select_tensor_dict(data, part) for part in parts], parts


fsdp.prepare_micro_batches = _micro_batches


# --- verl's engines ------------------------------------------------------------------------------


class _Packed:
    """What both engines do to a micro-batch before and after the model."""

    def prepare_model_inputs(self, micro_batch: TensorDict):
        global _layout
        inputs, args = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if "temperature_rmpad" not in args:  # use_remove_padding: false, with attention of torch's
            return inputs, args
        if args.get("pad_size"):
            raise NotImplementedError(
                "on a CPU: ulysses_sequence_parallel_size > 1, pad_to_length; leave them out"
            )
        lengths = micro_batch["attention_mask"][:, : micro_batch["prompts"].shape[1]].sum(
            dim=1
        )  # [B]
        _layout = args["layout"] = layout = lay_out(
            micro_batch["input_ids"], lengths, micro_batch.get("image", None)
        )
        if "multi_modal_inputs" in micro_batch:  # each prompt's once, in their order
            given = list(micro_batch.get("multi_modal_inputs"))
            inputs |= extract_multi_modal_inputs([given[row] for row in layout.asked])
        for name in ("input_ids", "position_ids"):
            inputs[name] = inputs[name][..., layout.take]
        return inputs, args


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithLMHead(_Packed, fsdp.FSDPEngineWithLMHead):
    def prepare_model_inputs(self, micro_batch: TensorDict):
        inputs, args = super().prepare_model_inputs(micro_batch)
        if "layout" not in args:
            return inputs, args
        said = args["layout"].said
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            args[name] = args[name][said]
        inputs["logits_to_keep"] = args["layout"].place[said]
        return inputs, args

    def prepare_model_outputs(
        self, output, output_args, micro_batch: TensorDict, logits_processor_func
    ):
        global _labels, _found
        if "layout" not in output_args:
            return super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
        layout, offsets = output_args["layout"], micro_batch["input_ids"].offsets()
        answers = micro_batch.copy()
        ends = F.pad(layout.answers.cumsum(0), (1, 0))
        answers["input_ids"] = torch.nested.nested_tensor_from_jagged(
            torch.empty(int(ends[-1])), ends
        )
        _labels = output_args["input_ids_rmpad_rolled"]
        found = super().prepare_model_outputs(output, output_args, answers, logits_processor_func)
        _labels, _found = None, ()
        for name, nested in found.items():
            whole = (
                nested.values()
                .new_zeros(len(layout.place))
                .index_copy(0, layout.said, nested.values())
            )
            found[name] = torch.nested.nested_tensor_from_jagged(whole, offsets)
        return found


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithValueHead(_Packed, fsdp.FSDPEngineWithValueHead):
    def prepare_model_outputs(
        self, output, output_args, micro_batch: TensorDict, logits_processor_func
    ):
        if "layout" in output_args:
            output.logits = output.logits[:, output_args["layout"].place]
        return super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )
