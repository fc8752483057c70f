"""Train on GPUs without flash-attn: torch computes what verl 0.9.1 uses flash-attn for.

    attention     `torch_varlen`, an attention of transformers: torch's kernel for packed sequences
    log-probs     in blocks of rows. Without flash-attn, verl computes them token by token. Only for
                  recipes that need all logits (kit/recipe/fused_head.py)
    value models  use the attention of their config. verl loads them with flash_attention_2

extras/preflight/attention.py adds this module to VERL_USE_EXTERNAL_MODULES if flash-attn is
missing. Then verl imports it at the start of each process. Sequence parallelism is not replaced.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import verl.utils.torch_functional as verl_F
from transformers import AttentionInterface, AutoModelForTokenClassification
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "torch_varlen"
MAX_BLOCK_SIZE = 2**27  # logits that are converted to fp32 together: 0.5 GiB
USE_SDPA = (
    "Set override_config.attn_implementation=sdpa in actor_rollout_ref.model, and in critic.model "
    "if the recipe has a critic."
)

# --- attention -----------------------------------------------------------------------------------


class Packing(NamedTuple):
    """The sequences of a packed micro-batch."""

    position_ids: torch.Tensor  # [1, T]
    offsets: torch.Tensor  # [B+1], int32: the begin of each sequence, and the end of the last
    max_length: int


# The packing of the current micro-batch. Its layers have the same position ids, and computing it
# makes the host wait for the GPU.
_packing: Packing | None = None


def find_sequences(position_ids: torch.Tensor) -> Packing:
    """Find the sequences of a packed micro-batch. Each begins at position 0. position_ids: [1, T].

    Source: transformers 5.9, prepare_fa_kwargs_from_position_ids.
    """
    global _packing
    if _packing is None or _packing.position_ids is not position_ids:
        starts = (position_ids[0] == 0).nonzero()[:, 0]
        offsets = F.pad(starts, (0, 1), value=position_ids.shape[1]).to(torch.int32)
        _packing = Packing(position_ids, offsets, int(offsets.diff().max()))
    return _packing


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sequence of a packed micro-batch.

    The arguments are those of transformers' attention functions.
    query [1, H, T, D]; key, value [1, H_kv, T, D]. Returns [1, T, H, D], and no weights.
    Raises ValueError without a packed micro-batch, NotImplementedError for other attention.
    """
    if not getattr(module, "is_causal", True):  # the vision part of a model
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    tokens = query.shape[2]
    # transformers passes no mask to an attention that it does not know, also of a padded batch
    if position_ids is None or position_ids.shape != (1, tokens) or len(query) != 1:
        raise ValueError(
            f"attn_implementation={NAME} works only on packed micro-batches with position ids: one "
            f"row, not {len(query)}. {USE_SDPA}"
        )
    packing = find_sequences(position_ids)
    raise_if_unsupported(query, value, packing, options)
    dtype = get_target_dtype(query, module) or query.dtype
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # [T, heads, D]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # torch 2.11 has no argument for key heads that several query heads share
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    output = attend(q.contiguous(), k.contiguous(), v.contiguous(), packing, scaling)
    return output.unsqueeze(0), None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    """Compute the attention by torch's kernel. q, k, v and the result: [T, H, D].

    The arguments are those that torch 2.11 and 2.13 have in common. Raises NotImplementedError.
    """
    from torch.nn.attention.varlen import varlen_attn

    if q.dtype == torch.float32:
        raise NotImplementedError(f"attn_implementation={NAME} has no float32. {USE_SDPA}")
    offsets = packing.offsets
    length = packing.max_length
    output: Any = varlen_attn(
        q, k, v, offsets, offsets, length, length, scale=scale, window_size=(-1, 0)
    )
    if torch.are_deterministic_algorithms_enabled() and output.requires_grad:
        make_backward_deterministic(output, [q, k, v])
    return cast(torch.Tensor, output)


def make_backward_deterministic(output: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Have torch choose its deterministic kernel for the backward pass of an attention.

    With verl's full_determinism, torch only warns of kernels that are not deterministic, and then
    chooses the other one. So torch is strict from the gradient of the output to that of an input.
    """
    trained = next(each for each in inputs if each.requires_grad)
    output.register_hook(lambda _: set_strictness(True))
    trained.register_hook(lambda _: set_strictness(False))


def set_strictness(is_strict: bool) -> None:
    """Have torch choose deterministic kernels, or choose any and warn."""
    torch.use_deterministic_algorithms(True, warn_only=not is_strict)


def raise_if_unsupported(
    query: torch.Tensor, value: torch.Tensor, packing: Packing, options: dict[str, Any]
) -> None:
    """Raise NotImplementedError if the model's attention has a feature that is missing here."""
    features = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    window = options.get("sliding_window")
    if window and window < packing.max_length:
        features.append(
            f"a sliding window of {window} tokens (the longest row: {packing.max_length})"
        )
    if options.get("dropout"):
        features.append("dropout")
    if query.shape[-1] != value.shape[-1]:
        features.append("values that are not as wide as keys")
    if features:
        raise NotImplementedError(
            f"attn_implementation={NAME} does not support {', '.join(features)}, which the model's "
            f"attention has. {USE_SDPA}"
        )


# --- log-probs -----------------------------------------------------------------------------------


class LogProbsInBlocks(torch.autograd.Function):
    """Log-probs of labels: logits [N, V], labels [N] -> [N] in fp32.

    If is_inplace, the gradient overwrites the logits, as with flash-attn. So nothing may read the
    logits after the backward pass. kit/cpu has another function: a CPU needs blocks that fit into
    its cache, and the entropy in the same pass.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, is_inplace: bool
    ) -> torch.Tensor:
        log_norm = torch.empty(len(logits), device=logits.device)  # log of the sum of exp(logits)
        for rows in split_rows(logits):
            log_norm[rows] = logits[rows].float().logsumexp(-1)
        ctx.save_for_backward(logits, labels, log_norm)
        ctx.is_inplace = is_inplace
        return logits.gather(1, labels[:, None])[:, 0].float() - log_norm

    @staticmethod
    def backward(ctx: Any, log_prob_grad: torch.Tensor) -> Any:
        logits, labels, log_norm = ctx.saved_tensors
        gradient = logits if ctx.is_inplace else torch.empty_like(logits)
        for rows in split_rows(logits):
            block = (logits[rows] - log_norm[rows, None]).exp_()  # probabilities in fp32
            block.mul_(-log_prob_grad[rows, None])
            block.scatter_add_(1, labels[rows, None], log_prob_grad[rows, None])
            gradient[rows] = block
        return gradient, None, None


def split_rows(logits: torch.Tensor) -> Iterator[slice]:
    """Split rows of logits [N, V] into blocks of at most MAX_BLOCK_SIZE logits."""
    size = max(1, MAX_BLOCK_SIZE // logits.shape[1])
    for start in range(0, len(logits), size):
        yield slice(start, start + size)


def logprobs_from_logits_flash_attn(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    """Return log-probs of labels [N] in fp32: logits [N, V]. Replaces verl's function."""
    return LogProbsInBlocks.apply(logits, labels, inplace_backward)


def logprobs_from_logits_v2(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return log-probs of labels [...] in fp32: logits [..., V]. Replaces verl's function.

    verl calls it with full_determinism, because flash-attn's function is not deterministic.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    return LogProbsInBlocks.apply(rows, labels.reshape(-1), False).view(labels.shape)


# --- patches of libraries ------------------------------------------------------------------------


def monkey_patch_log_probs() -> None:
    """Have verl's logprobs_from_logits compute blocks of rows."""
    verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
    verl_F.logprobs_from_logits_flash_attn = logprobs_from_logits_flash_attn
    verl_F.logprobs_from_logits_v2 = logprobs_from_logits_v2


def monkey_patch_value_models() -> None:
    """Load critics and reward models with the attention of their config.

    verl's load_valuehead_model requests flash_attention_2 in every case.
    """
    load_value_model = AutoModelForTokenClassification.from_pretrained

    def from_pretrained(*args: Any, config: Any = None, **kwargs: Any) -> Any:
        if config is not None:
            kwargs["attn_implementation"] = config._attn_implementation
        return load_value_model(*args, config=config, **kwargs)

    AutoModelForTokenClassification.from_pretrained = from_pretrained  # type: ignore[method-assign]


# Every process must know the name, since it is in the config of checkpoints too.
AttentionInterface.register(NAME, varlen_attention)
if torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is None:
    monkey_patch_log_probs()
    monkey_patch_value_models()
