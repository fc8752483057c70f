"""Train with TRL's GRPOTrainer on a GPU, and measure its steps.

    python benchmarks/versus_trl.py SETTINGS [--dry]

benchmarks/versus.py runs this command, and SETTINGS is its JSON. --dry checks the settings without
a GPU. Each batch of responses gives a line: STEP, then its seconds by stage as JSON. A batch takes
two optimizer steps of TRL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

MICRO_BATCH = 64  # responses. TRL pads, and counts responses instead of tokens
UPDATES = 2  # optimizer steps of a batch


def make_settings(work: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of GRPOConfig."""
    batch = work["prompts"] * work["responses"]
    accumulated = batch // UPDATES // MICRO_BATCH
    attention = "flash_attention_2" if work["has_flash_attn"] else "sdpa"
    return {
        "output_dir": tempfile.mkdtemp(prefix="versus-trl-"),
        "max_steps": UPDATES * work["steps"],
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": UPDATES * accumulated,
        "num_generations": work["responses"],
        "max_completion_length": work["response"],
        "temperature": 1.0,
        "learning_rate": 2e-6,
        "lr_scheduler_type": "constant",
        "beta": 0.001,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": True,
        "gradient_checkpointing": True,
        "model_init_kwargs": {"attn_implementation": attention},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": work["prompt"] + work["response"],
        "generation_kwargs": {"ignore_eos": True},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Return a hash of each response, as the verifier of versus.py."""
    texts = [completion[0]["content"] for completion in completions]
    return [zlib.crc32(text.encode()) % 1000 / 999 for text in texts]


class Clock:
    """The seconds of a batch by method. One method may call another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begin: float | None = None

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its seconds to `name`."""
        import torch

        def timed(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        return timed

    def finish(self, step: float) -> dict[str, float]:
        """Return the seconds by the names of verl's stages, and forget them."""
        sync = self.seconds.get("sync", 0.0)
        turn = self.seconds["turn"]
        scored = self.seconds["scored"]
        self.seconds.clear()
        self.begin = None
        stages = {"gen": turn - sync, "update_weights": sync, "old_log_prob": scored - turn}
        return stages | {"update_actor": step - scored, "step": step}


def train(work: dict[str, Any]) -> None:
    """Train, and print a line for each batch."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock()

    class PrintSteps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if clock.begin is None:
                torch.cuda.synchronize()
                clock.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step % UPDATES == 0 and clock.begin is not None:
                torch.cuda.synchronize()
                seconds = clock.finish(time.perf_counter() - clock.begin)
                print(f"STEP {json.dumps(seconds)}", flush=True)

    rows = load_dataset("parquet", data_files=work["rows"], split="train")
    trainer = GRPOTrainer(
        model=work["model"],
        args=GRPOConfig(**make_settings(work)),
        processing_class=AutoTokenizer.from_pretrained(work["model"], padding_side="left"),
        train_dataset=rows.select_columns(["prompt"]),
        reward_funcs=reward,
        callbacks=[PrintSteps()],
    )
    generation = trainer.vllm_generation
    generation.sync_weights = clock.wrap("sync", generation.sync_weights)
    for name, method in (
        ("turn", "_generate_single_turn"),
        ("scored", "_generate_and_score_completions"),
    ):
        setattr(trainer, method, clock.wrap(name, getattr(trainer, method)))
    trainer.train()


def main() -> None:
    work = json.loads(sys.argv[1])
    # colocated vLLM reads the variables of a distributed launch
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29511"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    if "--dry" in sys.argv[2:]:
        from trl import GRPOConfig

        # without a GPU, transformers refuses bf16
        print(GRPOConfig(**make_settings(work) | {"bf16": False, "use_cpu": True}))
        return
    train(work)


if __name__ == "__main__":
    main()
