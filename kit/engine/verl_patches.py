"""Patches of verl 0.9.1 and vLLM 0.28. verl imports this module in each of its processes.

configs/base.yaml names it twice: VERL_USE_EXTERNAL_MODULES makes verl import it, and
worker_extension_cls makes vLLM's workers use `WorkerExtension`. vLLM's classes take 10 s to import,
and not every process of verl needs them. So the two classes here are created at their first use.

Protects: weights, from other users and runs that read or write verl's sockets.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d
from verl.workers.rollout import base, replica

from kit.engine import stores

# Environment variable of the trainer's ranks: the value of actor_rollout_ref.nccl_timeout.
TIMEOUT_VARIABLE = "PROCESS_GROUP_TIMEOUT_S"


def monkey_patch_vllm_classes() -> None:
    """Make the trainer's ranks send weights through `ServerAdapter`, to servers of `Replica`."""
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.ServerAdapter"
    this_module = sys.modules[__name__]
    replica.RolloutReplicaRegistry.register("vllm", lambda: this_module.Replica)


def move_to_temp_folder(address: str) -> str:
    """Move the address of verl's weight transfer from /tmp to the run's own temporary folder.

    verl names these sockets /tmp/rl-colocate-zmq-JOB-replica-R-rank-L.sock. Every local Ray starts
    with the same job id, so two runs on one machine would read each other's weights. In addition,
    verl unpickles the data from these sockets, and every user may write to /tmp. The run's
    temporary folder belongs to one run and one user (kit/run/isolation.py).
    https://github.com/verl-project/verl/issues/6233
    """
    return address.replace("ipc:///tmp/", f"ipc://{tempfile.gettempdir()}/")


def monkey_patch_training_workers() -> None:
    """Patch verl's training workers when a process that trains joins its process group.

    Their module takes seconds to import, and other processes of verl never import it.
    """
    init_process_group = torch.distributed.init_process_group

    def init_and_patch(*args: Any, **kwargs: Any) -> None:  # as for torch's function
        if "verl.workers.engine_workers" in sys.modules:
            from kit.engine.worker_patches import monkey_patch_training_worker

            monkey_patch_training_worker()
        init_process_group(*args, **kwargs)

    torch.distributed.init_process_group = init_and_patch


def monkey_patch_group_timeout() -> None:
    """Make process groups without a timeout wait as long as TIMEOUT_VARIABLE says, in seconds.

    verl 0.9.1 has the key actor_rollout_ref.nccl_timeout and does not read it: TrainingWorker
    creates its group with `timeout=None`. torch then takes 30 minutes, or 10 for a group of NCCL
    alone. The default is patched, and not the call, because FSDP and Ulysses create more groups.
    """
    default_timeout = distributed_c10d._get_default_timeout

    def get_default_timeout(backend: distributed_c10d.Backend) -> timedelta:
        seconds = os.environ.get(TIMEOUT_VARIABLE)
        return timedelta(seconds=float(seconds)) if seconds else default_timeout(backend)

    distributed_c10d._get_default_timeout = get_default_timeout


def monkey_patch_clip_weights() -> None:
    """Let vLLM load the CLIP weights that the trainer sends, for LLaVA models.

    transformers 5.10 removed `vision_model` from the names of these weights. vLLM 0.28 expects it.
    https://github.com/huggingface/trl/issues/5497
    """
    from vllm.model_executor.models import clip

    prefix = "vision_model."

    def load_weights(
        tower: clip.CLIPVisionModel, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> set[str]:
        unprefixed = ((name.removeprefix(prefix), weight) for name, weight in weights)
        return {f"{prefix}{name}" for name in tower.vision_model.load_weights(unprefixed)}

    clip.CLIPVisionModel.load_weights = load_weights  # type: ignore[attr-defined]


def make_server_adapter() -> type:
    """Create the class with which the trainer's ranks send weights."""
    from verl.workers.rollout.vllm_rollout import ServerAdapter as VerlServerAdapter

    class ServerAdapter(VerlServerAdapter):
        def __init__(self, *args: Any, **kwargs: Any):  # as for verl's class
            super().__init__(*args, **kwargs)
            self.zmq_handle = move_to_temp_folder(self.zmq_handle)

    return ServerAdapter


def make_worker_extension() -> type:
    """Create the class with which vLLM's workers receive weights, and prove that they have them."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from kit.engine.weight_proof import Arrival, Report, Weights

    monkey_patch_clip_weights()

    class WorkerExtension(vLLMColocateWorkerExtension):
        model_runner: Any  # of vLLM's worker
        arrival: Arrival
        weight_reports: list[Report]

        def _get_zmq_handle(self) -> str:
            return move_to_temp_folder(super()._get_zmq_handle())

        def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:  # as for verl's
            dtype = self.model_runner.model_config.dtype
            with Arrival(self.model_runner.model, dtype) as self.arrival:
                self.receive_and_load(*args, **kwargs)
            report = self.arrival.finish()
            del self.arrival  # and the tensors that it keeps
            # base weights and an adapter; the driver does not ask an engine that it cannot check
            self.weight_reports = [*self.take_weight_reports(), report][-2:]

        def receive_and_load(self, *args: Any, **kwargs: Any) -> None:  # as for verl's
            super().update_weights_from_ipc(*args, **kwargs)

        def _update_weights(
            self, weights: Weights, peft_config: dict[str, Any], base_sync_done: bool
        ) -> None:
            tensors = self.arrival.receive(weights)
            self.arrival.trace(tensors)
            super()._update_weights(tensors, peft_config, base_sync_done)
            if peft_config and base_sync_done:
                self.arrival.compare_adapter(self, tensors, peft_config)
            self.arrival.trace(())  # the memory is the trainer's

        def take_weight_reports(self) -> list[Report]:
            """Return what the syncs since the last call have found."""
            return vars(self).pop("weight_reports", [])

    return WorkerExtension


def make_replica() -> type:
    """Create verl's replica of vLLM, with a server that returns the results of its workers."""
    import ray
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    # the name is the title of its process
    class vLLMHttpServer(vllm_async_server.vLLMHttpServer):  # noqa: N801
        async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[object]:  # as for verl's
            return await self.engine.collective_rpc(*args, **kwargs)

    class Replica(vllm_async_server.vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any):  # as for verl's class
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(vLLMHttpServer)

    return Replica


def __getattr__(name: str) -> type:
    if name == "ServerAdapter":
        return globals().setdefault(name, make_server_adapter())
    if name == "WorkerExtension":
        return globals().setdefault(name, make_worker_extension())
    if name == "Replica":
        return globals().setdefault(name, make_replica())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


stores.monkey_patch_rendezvous()
monkey_patch_group_timeout()
monkey_patch_vllm_classes()
monkey_patch_training_workers()
