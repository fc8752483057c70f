"""Replacements for functions of vLLM 0.28 that are slow or wrong on a CPU.

vllm_worker.py applies them in vLLM's worker. Numbers are the points in platform.py's header.

Protects: samples on a CPU, from uninitialized temperatures (16) and unpacked experts (17).
"""

from __future__ import annotations

from typing import Any

import torch


def zero_weights(layer: torch.nn.Module, model_config: object) -> None:
    """Set a layer's own weights to zero, until the trainer's arrive (13)."""
    for weight in layer.parameters(recurse=False):
        weight.data.zero_()


def monkey_patch_dummy_weights() -> None:
    """Have vLLM start with zeros as weights (13).

    vLLM draws random weights for each module, and again for each module that contains it. On one
    core that takes 6 s for 135M weights.
    """
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.initialize_dummy_weights = zero_weights  # type: ignore[assignment]


def sample_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row by its probabilities: [B, V] -> [B] (14).

    vLLM draws exponential noise for each token of the vocabulary. On a CPU that takes half as long
    as the model. One uniform number for each row, looked up in the cumulative probabilities, has
    the same distribution.
    """
    cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    drawn = torch.rand(len(logits), 1, dtype=torch.float64) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, drawn, right=True).view(-1)
    return tokens.clamp_(max=logits.shape[-1] - 1)


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Count the elements of each row that are >= its value: [B, V], [B, 1] -> [B] (14).

    vLLM adds up the truth values as 64-bit numbers, which takes four times as long.
    """
    return (x >= values).view(torch.int8).sum(-1, dtype=torch.int32)


def monkey_patch_sampling() -> None:
    """Have vLLM's sampler use the functions above (14)."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.compiled_random_sample = sample_tokens
    sampler.batched_count_greater_than = count_at_least


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each row's value for each of its draft tokens: [B] -> [num_tokens] (16).

    cu_num_tokens: [B], cumulative numbers of draft tokens.
    """
    x = torch.where(x == replace_from, torch.tensor(replace_to, dtype=x.dtype), x)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.repeat_interleave(counts, output_size=num_tokens)


def monkey_patch_draft_tokens() -> None:
    """Have vLLM's rejection sampler use expand_batch_to_tokens (16).

    vLLM's kernel writes to an integer copy of its output, so that the temperature at each draft
    token is uninitialized memory. The responses then follow no distribution, and log-probs are NaN.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def monkey_patch_experts() -> None:
    """Have vLLM pack the weights of experts after each weight sync (17).

    vLLM packs them only when it first loads them. Reloaded weights would not be packed. They have
    the same shape, so vLLM would read them as packed ones.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe

    method_class: Any = moe.UnquantizedFusedMoEMethod
    load_experts = method_class.process_weights_after_loading

    def load_and_pack_experts(
        method: Any,  # vLLM gives its field no type
        layer: torch.nn.Module,
    ) -> None:
        is_reload = method.moe_kernel is not None
        load_experts(method, layer)
        if is_reload:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method_class.process_weights_after_loading = load_and_pack_experts


def monkey_patch_vllm() -> None:
    """Apply all patches of this file."""
    monkey_patch_dummy_weights()
    monkey_patch_sampling()
    monkey_patch_draft_tokens()
    monkey_patch_experts()
