"""The lowest time of an update here: the episodes of a finished run's steps, and nothing around the
model.

    python benchmarks/bare_model.py RUN [--rounds 3]     RUN: a run's folder (from step.py)

One forward and backward pass, and torch's fused AdamW, in two ways: `shared` computes prompts once
for their answers, by packed_layout.py and the attention and log-probs of cpu_engine.py (on a CPU
alone); `packed` is a plain packed batch, every answer behind its prompt, torch's own attention and
cross entropy. And `copy`, of all weights in memory. Prints one JSON line last: seconds, of each
step a list, one for each round.
"""

from __future__ import annotations

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

KINDS = {"shared": "cpu_packed", "packed": "packed"}  # and their attention
_lengths: list[int] = []  # of the rows of the packed batch under way


def packed_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention of each row to itself, as transformers calls it: [1, H, T, D] -> [1, T, H,
    D].
    """
    options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    out = F.scaled_dot_product_attention(
        _grid(query), _grid(key), _grid(value), **options
    ).transpose(1, 2)
    return torch.cat([row[:length] for row, length in zip(out, _lengths, strict=True)])[None], None


def _grid(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] -> [rows, heads, longest, D]"""
    return pad_sequence(x[0].transpose(0, 1).split(_lengths), batch_first=True).transpose(1, 2)


AttentionInterface.register("packed", packed_attention)


def log_probs(model: Any, kind: str, rows: list[Row]) -> torch.Tensor:
    """Of the answers' tokens [A]."""
    device = model.device
    _lengths[:] = [len(prompt) + len(answer) for prompt, answer in rows]
    ids = torch.tensor([token for prompt, answer in rows for token in prompt + answer])  # [T]
    positions = torch.cat([torch.arange(length) for length in _lengths])  # [T]
    nested = torch.nested.nested_tensor_from_jagged(ids, torch.tensor([0, *_lengths]).cumsum(0))
    layout = packed_layout.lay_out(nested, torch.tensor([len(prompt) for prompt, _ in rows]))
    labels = ids.roll(-1)[layout.response_positions].to(device)  # [A]
    if kind == "packed":
        inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
        inputs["logits_to_keep"] = layout.response_positions.to(device)
        logits = model(**inputs, use_cache=False).logits[0]  # [A, vocabulary]
        return -F.cross_entropy(logits.float(), labels, reduction="none")
    cpu_engine._layout, take = layout, layout.gather_index
    inputs = {"input_ids": ids[None, take], "position_ids": positions[None, take]}
    kept = layout.packed_positions[layout.response_positions]
    logits = model(**inputs, logits_to_keep=kept, use_cache=False).logits[0]
    return cpu_engine.LogProbEntropy.apply(logits, labels)[0]


def micro_batches(kind: str, rows: list[Row], most: int) -> Iterator[list[Row]]:
    """Rows in their order, as many together as have `most` tokens; a prompt that is shared counts
    once.
    """
    part: list[Row] = []
    size = 0
    for prompt, answer in rows:
        known = kind == "shared" and part and part[-1][0] == prompt
        more = len(answer) + (0 if known else len(prompt))
        if part and size + more > most:
            yield part
            part, size, more = [], 0, len(prompt) + len(answer)
        part, size = [*part, (prompt, answer)], size + more
    yield part


def update(
    model: Any,
    kind: str,
    rows: list[Row],
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
) -> None:
    """One optimizer step on the answers.

    In bf16 the optimizer keeps separate fp32 weights, as Quintet's does.
    """
    model.set_attn_implementation(KINDS[kind])
    total = sum(len(answer) for _, answer in rows)
    for part in micro_batches(kind, rows, settings["ppo_max_token_len_per_gpu"]):
        (-log_probs(model, kind, part).sum() / total).backward()
    masters = optimizer.param_groups[0]["params"]
    pairs = [(m, p) for m, p in zip(masters, model.parameters(), strict=True) if m is not p]
    for master, parameter in pairs:
        master.grad = parameter.grad.float()
    torch.nn.utils.clip_grad_norm_(masters, settings["optim"]["clip_grad"])
    optimizer.step()
    for master, parameter in pairs:
        parameter.data.copy_(master.data)
    model.zero_grad()
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def copy(model: Any) -> list[torch.Tensor]:
    copied = [parameter.detach().clone() for parameter in model.parameters()]
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return copied


def main() -> None:
    config, steps, rounds = finished_run(__doc__)
    settings, path = (
        config["actor_rollout_ref"]["actor"],
        config["actor_rollout_ref"]["model"]["path"],
    )
    name = (settings["fsdp_config"].get("mixed_precision") or {}).get("param_dtype", "bf16")
    dtype = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}.get(name, name))
    device, kinds = config["trainer"]["device"], list(KINDS)[config["trainer"]["device"] != "cpu" :]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).train().to(device)
    if config["actor_rollout_ref"]["model"]["enable_gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
    own = [
        p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
        for p in model.parameters()
    ]
    optimizer = torch.optim.AdamW(own, lr=settings["optim"]["lr"], fused=True)
    seconds: dict[str, Any] = {kind: {step: [] for step in steps} for kind in kinds}
    for kind in kinds:  # warms up
        update(model, kind, next(iter(steps.values())), optimizer, settings)
    for _ in range(rounds):
        for step, rows in steps.items():
            for kind in kinds:
                seconds[kind][step].append(timed(update, model, kind, rows, optimizer, settings))
    copies = [timed(copy, model) for _ in range(rounds + 1)]
    print(json.dumps({**seconds, "copy": copies[1:]}))


if __name__ == "__main__":
    main()
