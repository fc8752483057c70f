"""Measure vLLM alone, or the update of the bare model, on the episodes of a run.

    python benchmarks/versus_raw.py vllm|update SETTINGS

benchmarks/versus.py runs this command, and SETTINGS is its JSON. The last line is RAW and JSON with
the shortest of two measurements, after a warm-up. Without a GPU, both run in float32 on the CPU, as
a rehearsal.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

UPDATES = 2  # optimizer steps of a batch
ROUNDS = 2


class Row(NamedTuple):
    """The token ids of an episode."""

    prompt: list[int]
    response: list[int]


def read_episodes(path: Path) -> list[Row]:
    """Read the episodes of one turn that a run wrote."""
    rows = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["_episode"]["status"] == "ok":
            item = record["response"]["output"][-1]
            rows.append(Row(item["prompt_token_ids"], item["generation_token_ids"]))
    return rows


def pack(rows: list[Row], limit: int) -> list[list[Row]]:
    """Split rows into micro-batches of at most `limit` tokens, in order."""
    batches: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        length = len(row.prompt) + len(row.response)
        if batches[-1] and size + length > limit:
            batches.append([])
            size = 0
        batches[-1].append(row)
        size += length
    return batches


def measure(function: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the seconds of the shortest of ROUNDS calls, after a warm-up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def sample(work: dict[str, Any], rows: list[Row], device: str) -> dict[str, float]:
    """Sample with vLLM alone: responses to the same prompts, with the same lengths."""
    from vllm import LLM, SamplingParams, TokensPrompt

    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    options |= {"kv_cache_memory_bytes": 2**28, "block_size": 32}
    if device == "cuda":
        graphs = {"cudagraph_capture_sizes": work["graphs"]}
        options = {"dtype": "bfloat16", "gpu_memory_utilization": 0.5, "compilation_config": graphs}
    engine = LLM(
        work["model"],
        skip_tokenizer_init=True,
        max_model_len=max(len(row.prompt) + len(row.response) for row in rows) + 8,
        max_num_seqs=max(work["graphs"]),
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        **options,
    )
    prompts = [TokensPrompt(prompt_token_ids=row.prompt) for row in rows]
    shared: dict[str, Any] = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    shared["detokenize"] = False
    sampling = [SamplingParams(max_tokens=len(row.response), **shared) for row in rows]

    def generate() -> None:
        engine.reset_prefix_cache()
        engine.generate(prompts, sampling, use_tqdm=False)

    seconds = measure(generate, lambda: None)
    sampled = sum(len(row.response) for row in rows)
    return {"seconds": round(seconds, 3), "tokens_per_s": round(sampled / seconds)}


class BareTrainer:
    """The model in bfloat16 and AdamW with weights in float32, without FSDP, Ray and verl."""

    def __init__(self, work: dict[str, Any], device: str):
        import torch
        from transformers import AutoModelForCausalLM

        import extras.without_flash_attn as substitute  # also for its log-probs

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.device = device
        model: Any = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
        self.model = model.to(device)
        self.model.train()
        self.model.gradient_checkpointing_enable()
        if device == "cuda":
            self.model.set_attn_implementation(substitute.NAME)
        self.weights = [p.detach().float().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-9, fused=True)

    def add_gradient(self, rows: list[Row]) -> None:
        """Add the gradient of the response tokens of a micro-batch."""
        import torch
        from verl.utils.torch_functional import logprobs_from_logits

        ids = torch.tensor([list(itertools.chain.from_iterable(p + r for p, r in rows))])
        places = [torch.arange(len(row.prompt) + len(row.response)) for row in rows]
        marks = [[0.0] * (len(p) - 1) + [1.0] * len(r) + [0.0] for p, r in rows]
        mask = torch.tensor(list(itertools.chain.from_iterable(marks)), device=self.device)  # [T]
        ids = ids.to(self.device)  # [1, T]
        positions = torch.cat(places)[None].to(self.device)
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        log_probs = logprobs_from_logits(logits, ids[0].roll(-1))  # [T]
        (-(log_probs * mask).sum() / mask.sum()).backward()

    def update(self, batches: list[list[Row]]) -> None:
        """Take one optimizer step over some micro-batches."""
        import torch

        for rows in batches:
            self.add_gradient(rows)
        for weight, parameter in zip(self.weights, self.model.parameters(), strict=True):
            weight.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        for weight, parameter in zip(self.weights, self.model.parameters(), strict=True):
            parameter.data.copy_(weight.data)
        self.model.zero_grad()


def update(work: dict[str, Any], rows: list[Row], device: str) -> dict[str, float]:
    """Take the optimizer steps of the batch with the bare model."""
    import torch

    trainer = BareTrainer(work, device)
    size = -(-len(rows) // UPDATES)  # rounded up
    parts = [
        pack(rows[begin : begin + size], work["tokens"]) for begin in range(0, len(rows), size)
    ]

    def run_batch() -> None:
        for batches in parts:
            trainer.update(batches)

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = measure(run_batch, synchronize)
    tokens = sum(len(row.prompt) + len(row.response) for row in rows)
    return {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds)}


def main() -> None:
    import torch

    task, work = sys.argv[1], json.loads(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = read_episodes(Path(work["rollouts"]))
    result = sample(work, rows, device) if task == "vllm" else update(work, rows, device)
    print(f"RAW {json.dumps(result)}", flush=True)
    os._exit(0)  # vLLM's shutdown takes long, and no file is open


if __name__ == "__main__":
    main()
