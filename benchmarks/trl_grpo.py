"""Train the demo's task with TRL's GRPOTrainer, and measure its steps.

    .venv-trl/bin/python benchmarks/trl_grpo.py MODEL ROWS STEPS float32|bfloat16 MICRO_BATCH

benchmarks/peers.py runs this command. MICRO_BATCH is the number of responses per forward and
backward pass, of the 64 in a step. Weights are float32 in both types.

The last line is JSON. It has the seconds of each step (`step`), the part of them for responses and
rewards (`gen`), the number of tokens, and the versions of the packages.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Compute the same reward as the demo's verifier.

    It is 1 for exactly the equation (`answer`), and len(equation) / len(response) for a response
    that contains it.
    """
    texts = [completion[0]["content"].strip() for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [len(equation) / len(text) if equation in text else 0.0 for text, equation in pairs]


def load_dataset(path: Path) -> Dataset:
    """Load the prompts as messages, and the equation of each row as `answer`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Dataset.from_list(
        [{"prompt": r["responses_create_params"]["input"], "answer": r["answer"]} for r in rows]
    )


class Clock(TrainerCallback):
    """Measures the seconds of each step, and of the method that `wrap` gets."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append({"gen": 0.0})
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1]["step"] = time.perf_counter() - self.begin

    def wrap(self, function: Any) -> Any:
        """Return a function that adds its seconds to `gen`, and records its tokens."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.steps[-1]["gen"] += time.perf_counter() - begin
            tokens = result["prompt_mask"].sum() + result["completion_mask"].sum()
            self.steps[-1]["tokens"] = int(tokens)
            return result

        return timed


def main() -> None:
    model_path, rows, steps, dtype, micro_batch = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        max_steps=int(steps),
        per_device_train_batch_size=int(micro_batch),
        gradient_accumulation_steps=64 // int(micro_batch),  # 8 prompts x 8 responses
        num_generations=8,
        max_completion_length=48,
        temperature=0.8,
        beta=0.0,  # no reference model
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        optim="adamw_torch_fused",
        bf16=dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,  # it would save memory, and take more time
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        seed=1,
    )
    clock = Clock()
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        args=config,
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        train_dataset=load_dataset(Path(rows)),
        reward_funcs=reward,
        callbacks=[clock],
    )
    method = "_generate_and_score_completions"
    setattr(trainer, method, clock.wrap(getattr(trainer, method)))
    trainer.train()
    versions = {package.__name__: package.__version__ for package in (trl, transformers, torch)}
    print(json.dumps({"steps": clock.steps, "versions": versions}))


if __name__ == "__main__":
    main()
