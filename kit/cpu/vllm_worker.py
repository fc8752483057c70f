"""Weight sync in vLLM's worker on a CPU. vLLM imports it by worker_extension_cls (cpu.yaml).

Only vLLM's worker may import it: the imports take half a minute. Numbers are the points in
platform.py's header.

Protects: samples on a CPU, from weights of an earlier step (7, 8).
"""

from __future__ import annotations

import os
from typing import Any

# 12. With rollout.full_determinism verl requests vLLM's batch-invariant kernels. vLLM's worker
# reads the variable when it imports attention and again after it has imported this file.
# configs/machines/deterministic.yaml has the settings that replace these kernels.
os.environ.pop("VLLM_BATCH_INVARIANT", None)

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
    BucketedWeightReceiver,
)

from kit.cpu import vllm_patches
from kit.engine import verl_patches
from kit.engine.weight_proof import Arrival

vllm_patches.monkey_patch_vllm()


class WorkerExtension(verl_patches.WorkerExtension):
    """Methods that vLLM adds to its worker, and that verl calls (7).

    vLLM's layers for a CPU pack their weights and drop the originals. So each sync must load the
    whole set of weights.
    """

    def receive_and_load(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive the trainer's weights, or its LoRA adapter, and use them from now on.

        Raises NotImplementedError for base weights of a model with an adapter.
        """
        if peft_config and base_sync_done:
            # vLLM keeps an adapter apart from the packed weights, which do not change
            self.device = torch.device("cpu")
            super().receive_and_load(peft_config, base_sync_done, use_shm)
            return
        if peft_config:
            raise NotImplementedError(
                "On a CPU, vLLM cannot receive the base weights of a model with a LoRA adapter. "
                "Set actor_rollout_ref.rollout.load_format=auto, so that vLLM loads them."
            )
        dtype = self.model_runner.model_config.dtype
        weights = receive_weights(self._get_zmq_handle(), dtype, use_shm, self.arrival)
        self.arrival.trace(weights)
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        refresh_tied_lm_head(self.model_runner.model)


def receive_weights(
    handle: str, dtype: torch.dtype, use_shm: bool, arrival: Arrival
) -> list[tuple[str, torch.Tensor]]:
    """Receive all weights that the trainer sends. handle: the address of its socket."""
    weights: list[tuple[str, torch.Tensor]] = []

    def copy_bucket(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        # These are views of a buffer that the next bucket overwrites.
        tensors = arrival.receive(bucket)
        weights.extend((name, weight.to(dtype, copy=True)) for name, weight in tensors)

    receiver = BucketedWeightReceiver(
        zmq_handle=handle, device=torch.device("cpu"), use_shm=use_shm
    )
    receiver.receive_weights(on_bucket_received=copy_bucket)
    return weights


def refresh_tied_lm_head(model: Any) -> None:  # of any of vLLM's classes
    """Pack the weights of a tied lm_head again (8): reload_weights does not refresh its copy."""
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
