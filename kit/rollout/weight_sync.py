"""verl's weight sync over sockets of the run's own; configs/base.yaml names it.

verl 0.9.1 calls them /tmp/rl-colocate-zmq-JOB-replica-R-rank-L.sock, after Ray's job. Every local Ray begins with the
same job, so two runs on a machine would read each other's weights. Here they lie in the temporary folder, which is one
of the run and of nobody else (kit/extras/supervisor/process_monitor.py): what goes over them is unpickled.
"""

from __future__ import annotations

import tempfile
from typing import Any

from verl.workers.rollout import base

from kit.rollout import stores

stores.keep_rendezvous_on_loopback()  # verl imports this file in each worker
base._ROLLOUT_REGISTRY["vllm", "async"] = (
    "kit.rollout.weight_sync.ServerAdapter"  # of the trainer's ranks, which send
)
base._ROLLOUT_REGISTRY["hf", "async"] = "kit.extras.hf_rollout.ServerAdapter"


def own(handle: str) -> str:
    """verl's address, in the temporary folder."""
    return handle.replace("ipc:///tmp/", f"ipc://{tempfile.gettempdir()}/")


def load_clip(tower: Any, weights: Any) -> set[str]:
    """transformers 5.10 has no `vision_model` in the names of CLIP's weights any more, vLLM 0.28 has."""
    inner = ((name.removeprefix("vision_model."), weight) for name, weight in weights)
    return {f"vision_model.{name}" for name in tower.vision_model.load_weights(inner)}


def __getattr__(name: str) -> type:
    # vLLM's classes take 10 s to import, and not everybody who imports verl has a use for them
    if name == "ServerAdapter":
        from verl.workers.rollout.vllm_rollout import ServerAdapter as Theirs

        class ServerAdapter(Theirs):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs)
                self.zmq_handle = own(self.zmq_handle)

        return globals().setdefault(name, ServerAdapter)
    if name == "WorkerExtension":
        from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
        from vllm.model_executor.models import clip

        clip.CLIPVisionModel.load_weights = load_clip  # type: ignore[attr-defined]

        class WorkerExtension(vLLMColocateWorkerExtension):
            """Of vLLM's workers, which receive."""

            def _get_zmq_handle(self) -> str:
                return own(super()._get_zmq_handle())

        return globals().setdefault(name, WorkerExtension)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
