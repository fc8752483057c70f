"""Measure the lowest time of an update: the bare model on the episodes of a finished run.

    python benchmarks/bare_model.py RUN [--rounds 3]     RUN: a run folder (benchmarks/step.py)

An update is a forward and backward pass and torch's fused AdamW. It is measured in two ways:

    shared   A prompt is computed once for all its responses, by kit/cpu/packed_layout.py and the
             attention and log-probs of kit/cpu/cpu_engine.py. Only on a CPU.
    packed   Each response follows its own copy of the prompt, in one packed row, with torch's
             attention and cross entropy.

The script also measures `copy`, a copy of all weights in memory. It prints one line of JSON last:
the seconds of each step as a list, with one number for each round.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from measure import ROOT, Row, finished_run, timed

sys.path.insert(0, str(ROOT))
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform"}
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM

from kit.cpu import cpu_engine, packed_layout

KINDS = {"shared": "cpu_packed", "packed": "packed"}  # way of an update -> its attention
# The lengths of the rows of the current micro-batch, because transformers has no argument for them.
_lengths: list[int] = []


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each row of a packed batch.

    The arguments are those of transformers' attention functions. query, key and value have the
    shape [1, heads, T, D]. Returns the output [1, T, heads, D], and no weights.
    """
    output = F.scaled_dot_product_attention(
        pad_rows(query),
        pad_rows(key),
        pad_rows(value),
        is_causal=True,
        scale=scaling,
        enable_gqa=True,
    ).transpose(1, 2)  # [rows, longest, heads, D]
    rows = [row[:length] for row, length in zip(output, _lengths, strict=True)]
    return torch.cat(rows)[None], None


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Split a packed tensor into padded rows: [1, heads, T, D] -> [rows, heads, longest, D]."""
    return pad_sequence(x[0].transpose(0, 1).split(_lengths), batch_first=True).transpose(1, 2)


AttentionInterface.register("packed", packed_attention)


def log_probs(model: Any, kind: str, rows: list[Row]) -> torch.Tensor:
    """Compute the log-probs [A] of the tokens of the responses."""
    device = model.device
    sequences = [prompt + response for prompt, response in rows]
    _lengths[:] = map(len, sequences)
    ids = torch.tensor(list(itertools.chain.from_iterable(sequences)))  # [T]
    positions = torch.cat([torch.arange(length) for length in _lengths])  # [T]
    nested = torch.nested.nested_tensor_from_jagged(ids, torch.tensor([0, *_lengths]).cumsum(0))
    layout = packed_layout.lay_out(nested, torch.tensor([len(prompt) for prompt, _ in rows]))
    labels = ids.roll(-1)[layout.response_positions].to(device)  # [A]
    if kind == "packed":
        inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
        inputs["logits_to_keep"] = layout.response_positions.to(device)
        logits = model(**inputs, use_cache=False).logits[0]  # [A, vocabulary]
        return -F.cross_entropy(logits.float(), labels, reduction="none")
    cpu_engine._layout = layout
    index = layout.gather_index  # [U]
    inputs = {"input_ids": ids[None, index], "position_ids": positions[None, index]}
    inputs["logits_to_keep"] = layout.packed_positions[layout.response_positions]
    logits = model(**inputs, use_cache=False).logits[0]  # [A, vocabulary]
    return cpu_engine.LogProbEntropy.apply(logits, labels)[0]


def micro_batches(kind: str, rows: list[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Split rows into micro-batches of at most `max_tokens`, in the order of the rows.

    With `shared`, the prompt of consecutive rows counts once.
    """
    batch: list[Row] = []
    batch_tokens = 0
    for prompt, response in rows:
        is_shared = kind == "shared" and batch and batch[-1][0] == prompt
        tokens = len(response) if is_shared else len(prompt) + len(response)
        if batch and batch_tokens + tokens > max_tokens:
            yield batch
            batch = []
            batch_tokens = 0
            tokens = len(prompt) + len(response)
        batch.append((prompt, response))
        batch_tokens += tokens
    yield batch


def update(
    model: Any,
    kind: str,
    rows: list[Row],
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> None:
    """Take one optimizer step on the responses. settings: the recipe's section of the actor.

    If the model is in bfloat16, the optimizer has a float32 copy of the weights, as Quintet's has.
    """
    model.set_attn_implementation(KINDS[kind])
    total = sum(len(response) for _, response in rows)
    for batch in micro_batches(kind, rows, settings["ppo_max_token_len_per_gpu"]):
        (-log_probs(model, kind, batch).sum() / total).backward()
    weights = optimizer.param_groups[0]["params"]
    pairs = list(zip(weights, model.parameters(), strict=True))
    copies = [(weight, parameter) for weight, parameter in pairs if weight is not parameter]
    for weight, parameter in copies:
        weight.grad = parameter.grad.float()
    torch.nn.utils.clip_grad_norm_(weights, settings["optim"]["clip_grad"])
    optimizer.step()
    for weight, parameter in copies:
        parameter.data.copy_(weight.data)
    model.zero_grad()
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def copy(model: Any) -> list[torch.Tensor]:
    """Copy all weights in memory."""
    copied = [parameter.detach().clone() for parameter in model.parameters()]
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return copied


def load_model(config: dict[str, Any]) -> Any:
    """Load the model of a recipe in the recipe's type, on its device."""
    settings = config["actor_rollout_ref"]["model"]
    precision = config["actor_rollout_ref"]["actor"]["fsdp_config"].get("mixed_precision") or {}
    name = precision.get("param_dtype", "bf16")
    dtype = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}.get(name, name))
    model = AutoModelForCausalLM.from_pretrained(settings["path"], dtype=dtype)
    model.train().to(config["trainer"]["device"])
    if settings["enable_gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
    return model


def make_optimizer(model: Any, lr: float) -> torch.optim.Optimizer:
    """Make an optimizer of float32 weights: the model's own, or copies of them."""
    weights = []
    for parameter in model.parameters():
        is_float32 = parameter.dtype == torch.float32
        weights.append(parameter if is_float32 else parameter.detach().float().requires_grad_())
    return torch.optim.AdamW(weights, lr=lr, fused=True)


def main() -> None:
    config, steps, rounds = finished_run(__doc__)
    settings = config["actor_rollout_ref"]["actor"]
    kinds = list(KINDS) if config["trainer"]["device"] == "cpu" else ["packed"]
    model = load_model(config)
    optimizer = make_optimizer(model, settings["optim"]["lr"])
    seconds: dict[str, Any] = {kind: {step: [] for step in steps} for kind in kinds}
    first_rows = next(iter(steps.values()))
    for kind in kinds:  # not measured, because the first update is slower
        update(model, kind, first_rows, optimizer, settings)
    for _ in range(rounds):
        for step, rows in steps.items():
            for kind in kinds:
                seconds[kind][step].append(timed(update, model, kind, rows, optimizer, settings))
    copies = [timed(copy, model) for _ in range(rounds + 1)]
    print(json.dumps({**seconds, "copy": copies[1:]}))


if __name__ == "__main__":
    main()
