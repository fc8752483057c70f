"""Log-probs and entropies from hidden states and the head, in blocks of logits.

All logits of a micro-batch [tokens, vocabulary] would need more memory than the rest of an update.
With use_fused_kernels, verl 0.9.1 computes blocks of 512 tokens. This module replaces its function,
which adds up the head's gradient over the blocks in bfloat16, rounds entropies to bfloat16 and
holds seven fp32 copies of a block: 2.2 GB with 151,936 words. Here:

    forward    blocks of tokens, so that each row of logits is complete
    backward   blocks of the vocabulary, so that each row of the head's gradient is complete. Logits
               are computed again, for the tokens that have a gradient: not those of prompts

kit/recipe/fused_head.py has the models. On a CPU, kit/cpu/cpu_engine.py is used.

Convenience: longer micro-batches on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from verl.utils import fsdp_utils
from verl.utils.experimental import torch_functional

from kit.recipe.fused_head import BLOCK_SIZE

Context = Any  # of a torch.autograd.Function; torch has no type for what it holds
Grads = tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]
ALIGNMENT = 64  # matrix products of a GPU are slower if a size is not a multiple of it


class Tokens(NamedTuple):
    """The tokens whose log-probs and entropies are computed."""

    rows: torch.Tensor  # [N, H] hidden states
    labels: torch.Tensor  # [N, 1]
    log_norm: torch.Tensor  # [N, 1] log of the sum of exp(logits)
    mean: torch.Tensor  # [N, 1] of the logits, weighted by their probabilities
    log_prob_grad: torch.Tensor  # [N, 1]
    entropy_grad: torch.Tensor  # [N, 1]


class HeadInBlocks(torch.autograd.Function):
    """Log-probs of labels, and entropies: hidden [..., H], weight [V, H], labels [...].

    Returns two [...] in fp32. The matrix products are in the type of `weight`, which is that of
    FSDP's mixed precision. The arguments are those of verl's FusedLinearForPPOFunction.
    """

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        _chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)  # [N, H]
        columns = labels.reshape(-1, 1)  # [N, 1]
        results = rows.new_empty(3, len(rows), 1, dtype=torch.float32)
        for part in split(len(rows), len(weight)):
            logits = compute_logits(rows[part], weight, temperature)  # [n, V]
            results[:, part] = summarize(logits, columns[part])
            del logits  # before the next block
        label_logits, log_norm, mean = results
        ctx.save_for_backward(rows, weight, columns, log_norm, mean)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.hidden_like = hidden.shape, hidden.dtype
        return (label_logits - log_norm).view(labels.shape), (log_norm - mean).view(labels.shape)

    @staticmethod
    def backward(ctx: Context, *output_grads: torch.Tensor | None) -> Grads:
        rows, weight, labels, log_norm, mean = ctx.saved_tensors
        grads = [
            torch.zeros_like(mean) if grad is None else grad.reshape(-1, 1)  # [N, 1]
            for grad in output_grads
        ]
        has_grad = ((grads[0] != 0) | (grads[1] != 0))[:, 0]  # [N]
        tensors = (rows, labels, log_norm, mean, *grads)
        tokens = Tokens(*(tensor[has_grad] for tensor in tensors))  # M of N
        rows_grad = torch.zeros_like(tokens.rows, dtype=torch.float32)  # [M, H]
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for part in split(len(weight), len(tokens.rows)):
            logits_grad = compute_gradient(tokens, weight[part], part.start, ctx.temperature)
            rows_grad += logits_grad @ weight[part]
            if weight_grad is not None:
                torch.mm(logits_grad.t(), tokens.rows, out=weight_grad[part])
            del logits_grad  # before the next block
        shape, dtype = ctx.hidden_like
        hidden_grad = rows_grad.new_zeros(len(rows), shape[-1], dtype=dtype)
        hidden_grad[has_grad] = rows_grad.to(dtype)
        return hidden_grad.view(shape), weight_grad, None, None, None


def summarize(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the label's logit, `log_norm` and `mean`: [n, V], [n, 1] -> [3, n, 1]."""
    maximum = logits.amax(-1, keepdim=True)
    weights = (logits - maximum).exp_()
    total = weights.sum(-1, keepdim=True)
    mean = weights.mul_(logits).sum(-1, keepdim=True) / total
    return torch.stack([logits.gather(1, labels), total.log() + maximum, mean])


def compute_gradient(
    tokens: Tokens, weight: torch.Tensor, start: int, temperature: float
) -> torch.Tensor:
    """Return the gradient of the logits of some words [N, v], in the type of the weights.

    weight: [v, H] the head's rows of these words. start: the id of the first.
    """
    logits = compute_logits(tokens.rows, weight, temperature)  # [N, v]
    gradient = (logits - tokens.log_norm).exp_()  # the probabilities
    gradient *= logits.sub_(tokens.mean).mul_(tokens.entropy_grad).add_(tokens.log_prob_grad)
    gradient.neg_()
    column = tokens.labels - start  # [N, 1]
    is_here = (column >= 0) & (column < len(weight))
    gradient.scatter_add_(1, column.clamp(0, len(weight) - 1), tokens.log_prob_grad * is_here)
    return gradient.div_(temperature).to(weight.dtype)


def compute_logits(rows: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits in fp32, divided by the temperature: rows [n, H], weight [v, H] -> [n, v]."""
    with torch.autocast(rows.device.type, enabled=False):
        return (rows @ weight.t()).float().div_(temperature)


def split(count: int, width: int) -> Iterator[slice]:
    """Split `count` rows into blocks of at most BLOCK_SIZE numbers. width: of a row."""
    size = max(1, BLOCK_SIZE // max(1, width))
    if size > ALIGNMENT:
        size -= size % ALIGNMENT
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


@functools.cache
def monkey_patch_fused_head() -> None:
    """Have verl's fused head compute with this file's function, and FSDP2 gather its weights.

    verl reads the head's weights in the model's forward pass, and has FSDP2 shard a head that is
    not tied by itself, so that only a call of the head would gather them.
    https://github.com/verl-project/verl/pull/7427
    """
    torch_functional.FusedLinearForPPOFunction = HeadInBlocks  # type: ignore[assignment,misc]
    verl_select = fsdp_utils._select_fsdp2_wrap_targets

    def select_wrap_targets(
        model: torch.nn.Module, layer_classes: Sequence[str]
    ) -> list[torch.nn.Module]:
        targets = verl_select(model, layer_classes)
        if getattr(model, "_verl_fused_kernels_backend", None):
            targets = [target for target in targets if not isinstance(target, torch.nn.Linear)]
        return targets

    fsdp_utils._select_fsdp2_wrap_targets = select_wrap_targets
