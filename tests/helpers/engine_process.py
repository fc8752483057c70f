"""A vLLM engine with a tiny model, in a separate process, that receives weights with faults.

    python -m tests.helpers.engine_process weights|adapter FOLDER

prints {case: the problems that the engine reports} as JSON in its last line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Named = list[tuple[str, torch.Tensor]]

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.engine.verl_patches",
    "TORCHDYNAMO_DISABLE": "1",
    "TENSOR_PARALLEL": "1",
}
UP = "model.layers.1.mlp.up_proj.weight"


def start_worker(folder: Path, **options: Any) -> Any:
    """Start vLLM with the settings of configs/machines/cpu.yaml, and return its worker."""
    import verl  # noqa: F401  # imports kit.cpu.platform, before vLLM
    from vllm import LLM

    llm: Any = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**26,
        block_size=32,
        worker_extension_cls="kit.cpu.vllm_worker.WorkerExtension",
        distributed_executor_backend="uni",
        enable_sleep_mode=False,
        **options,
    )
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


class Engine:
    """The engine. `sync` sends weights to it, without sockets."""

    def __init__(self, folder: Path, **options: Any):
        self.worker = start_worker(folder, **options)

    def sync(
        self,
        weights: Named,
        adapter: dict[str, object] | None = None,
        alter: Callable[[Named], Sequence[tuple[str, torch.Tensor]]] = list,
    ) -> list[str]:
        """Send weights, and return the problems. alter: changes what arrives."""
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

        from kit.engine.weight_proof import send_with_sums

        arriving = alter(list(send_with_sums(weights, torch.float32)))

        def receive_weights(_: object, on_bucket_received: Callable[..., None]) -> None:
            # in two buckets
            on_bucket_received(arriving[:3], False)
            on_bucket_received(arriving[3:], True)

        receiver: Any = bucketed_weight_transfer.BucketedWeightReceiver
        receiver.receive_weights = receive_weights
        self.worker.update_weights_from_ipc(adapter, bool(adapter), True)
        [report] = self.worker.take_weight_reports()
        assert not report["unknown"] and report["compared"] == report["total"] > 10_000, report
        return report["problems"]


def exchange_rows(weight: torch.Tensor) -> torch.Tensor:
    """Exchange two rows."""
    weight = weight.clone()
    weight[[1, 5]] = weight[[5, 1]]
    return weight


def try_weights(folder: Path) -> dict[str, list[str]]:
    """Plant faults on the way of all weights of a model with a tied head."""
    from transformers import AutoModelForCausalLM

    worker_module: Any = importlib.import_module("kit.cpu.vllm_worker")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = [(n, w.clone()) for n, w in model.state_dict().items() if n != "lm_head.weight"]
    later = [(name, weight + 0.01) for name, weight in first]
    engine = Engine(folder, load_format="dummy")
    network = engine.worker.model_runner.model
    load_weights = network.load_weights
    found = {"first sync": engine.sync(first), "later sync": engine.sync(later)}
    found["dropped on the way"] = engine.sync(first, alter=lambda w: [x for x in w if x[0] != UP])
    found["rows exchanged on the way"] = engine.sync(
        later, alter=lambda w: [(n, exchange_rows(x) if n == UP else x) for n, x in w]
    )
    network.load_weights = lambda w: load_weights((n, x) for n, x in w if n != UP)
    found["dropped by the loader"] = engine.sync(first)
    network.load_weights = load_weights

    refresh = worker_module.refresh_tied_lm_head
    worker_module.refresh_tied_lm_head = lambda _: None
    found["tied head of the sync before"] = engine.sync(later)
    worker_module.refresh_tied_lm_head = refresh

    def break_norm(tied_model: torch.nn.Module) -> None:
        refresh(tied_model)
        weight = network.model.embed_tokens.weight.data
        weight[[1, 5]] = weight[[5, 1]]

    worker_module.refresh_tied_lm_head = break_norm
    found["rows exchanged in the engine"] = engine.sync(first)
    worker_module.refresh_tied_lm_head = refresh
    found["last sync"] = engine.sync(first)
    return found


def try_adapter(folder: Path) -> dict[str, list[str]]:
    """Plant the adapter of the step before, and one in which a tensor is of the step before."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # alpha / r is no power of two, and vLLM multiplies with it
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=10, target_modules="all-linear"))
    config = model.peft_config["default"].to_dict()

    def draw() -> Named:
        names = get_peft_model_state_dict(model)
        return [(name, torch.randn_like(weight)) for name, weight in names.items()]

    engine = Engine(folder, enable_lora=True, max_lora_rank=8, max_loras=1)
    before = draw()
    found = {"first sync": engine.sync(before, config), "later sync": engine.sync(draw(), config)}
    remove_lora = engine.worker.remove_lora
    engine.worker.remove_lora = lambda _: None  # then vLLM keeps the adapter that it has
    found["adapter of the sync before"] = engine.sync(draw(), config)
    engine.worker.remove_lora = remove_lora
    name, tensor = before[0]
    found["one tensor of a sync before"] = engine.sync(
        draw(), config, alter=lambda w: [(n, tensor if n == name else x) for n, x in w]
    )
    found["last sync"] = engine.sync(draw(), config)
    return found


if __name__ == "__main__":
    os.environ.update(VARIABLES)
    torch.manual_seed(0)
    action = {"weights": try_weights, "adapter": try_adapter}[sys.argv[1]]
    problems = action(Path(sys.argv[2]))
    print(json.dumps(problems), flush=True)
    os._exit(0)  # vLLM's threads would wait
