"""TRL's GRPOTrainer on the demo's task. benchmarks/peers.py runs it, in
a separate environment (.venv-trl).

Prints one JSON line last: of each step its seconds, those that went into answers and their rewards,
and the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
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
    """1 for the equation alone, in part where the answer only contains it: the rule of the demo's
    verifier.
    """
    texts = [completion[0]["content"].strip() for completion in completions]
    return [len(a) / len(t) if a in t else 0.0 for t, a in zip(texts, answer, strict=True)]


def dataset(path: Path) -> Dataset:
    """Prompts as messages, and what is asked for."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Dataset.from_list(
        [{"prompt": r["responses_create_params"]["input"], "answer": r["answer"]} for r in rows]
    )


class Clock(TrainerCallback):
    """Seconds of each step, and of what is wrapped by `around`."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append({"gen": 0.0})
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1]["step"] = time.perf_counter() - self.begin

    def around(self, trainer: Any, name: str) -> None:
        function = getattr(trainer, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.steps[-1]["gen"] += time.perf_counter() - begin
            self.steps[-1]["tokens"] = int(
                result["prompt_mask"].sum() + result["completion_mask"].sum()
            )
            return result

        setattr(trainer, name, clocked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of products; weights fp32",
    )
    parser.add_argument(
        "--micro-batch", type=int, default=64, help="answers together; an optimizer step has 64"
    )
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=64 // args.micro_batch,  # 8 prompts x 8 answers
        num_generations=8,
        max_completion_length=48,
        temperature=0.8,
        beta=0.0,  # no reference model
        learning_rate=3e-5,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        optim="adamw_torch_fused",
        bf16=args.dtype == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,  # slower, and memory is not what a CPU lacks
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        seed=1,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    clock = Clock()
    settings = {
        "args": config,
        "processing_class": tokenizer,
        "reward_funcs": reward,
        "callbacks": [clock],
    }
    trainer = trl.GRPOTrainer(model=model, train_dataset=dataset(args.rows), **settings)
    clock.around(trainer, "_generate_and_score_completions")
    trainer.train()
    versions = {package.__name__: package.__version__ for package in (trl, transformers, torch)}
    print(json.dumps({"steps": clock.steps, "versions": versions}))


if __name__ == "__main__":
    main()
