"""A rollout engine that samples by transformers' `generate` (rollout.name: hf, configs/hf.yaml).

Use it to debug, for models that vLLM lacks, and on machines where vLLM does not install. It is
slower than vLLM: a batch begins when the previous one has ended.

Each rank of the trainer has a server (a Ray actor with the whole model) on its GPU. It samples
tokens as vLLM does (temperature, top_k, top_p, seed) and returns the log-prob of each token after
these settings.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.plugin.platform.platform_manager import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from env import Json
from kit.engine.weight_proof import Arrival, Report
from kit.recipe.model_files import stop_token_ids

GATHER_S = 0.02  # how long to wait for more requests before a batch begins
BATCH_SETTINGS = ("temperature", "top_k", "top_p", "ignore_eos")  # the same for a whole batch


@dataclass(eq=False)
class Request:
    """A response to sample."""

    prompt_ids: list[int]
    params: Json  # vLLM's: max_tokens, seed and those of BATCH_SETTINGS
    output: asyncio.Future[TokenOutput]

    @property
    def settings(self) -> list[Any]:  # of vLLM
        """Return the values of BATCH_SETTINGS."""
        return [self.params.get(name) for name in BATCH_SETTINGS]


class RecordingSampler(LogitsProcessor):
    """Sample the next token of each row, record its log-prob, and have `generate` take it.

    `generate` itself returns no such log-probs, and has one seed per batch. All of it happens on
    the model's device: the logits of a batch are too large to copy each time.
    """

    def __init__(self, requests: list[Request], device: torch.device):
        self.log_probs: list[torch.Tensor] = []  # of each token [B], on the device
        seeds = [request.params.get("seed") for request in requests]
        self.generators = [
            None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds
        ]
        params = requests[0].params
        temperature = params.get("temperature", 1.0)
        self.is_greedy = not temperature
        self.processors = LogitsProcessorList()  # in vLLM's order
        if temperature not in (0.0, 1.0):
            self.processors.append(TemperatureLogitsWarper(temperature))
        if (params.get("top_k") or 0) > 0:
            self.processors.append(TopKLogitsWarper(params["top_k"]))
        if (params.get("top_p") or 1.0) < 1.0:
            self.processors.append(TopPLogitsWarper(params["top_p"]))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that allow only the sampled token: 0 for it, -inf for all others.

        input_ids [B, T], scores [B, V] -> [B, V].
        """
        logits = self.processors(input_ids, scores.float())  # type: ignore[arg-type]
        log_probs = logits.log_softmax(-1)
        tokens = self.choose(log_probs)
        self.log_probs.append(log_probs.gather(1, tokens)[:, 0])
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens, 0.0)

    def choose(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Choose a token [B, 1] of each row of log_probs [B, V]."""
        if self.is_greedy:
            return log_probs.argmax(-1, keepdim=True)
        probs = log_probs.exp()
        if not any(self.generators):
            return torch.multinomial(probs, 1)
        rows = zip(probs.split(1), self.generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=each) for row, each in rows])


class Server:
    """A model that samples responses, with the methods that verl calls on its servers."""

    def __init__(self, config: Any, model_config: Any):
        self.config = config
        self.model_config = model_config
        self.queue: asyncio.Queue[Request] = asyncio.Queue()
        self.model_lock = asyncio.Lock()  # held while a batch uses the model
        self.step: int | None = None  # of the weights
        self.arrival: Arrival | None = None  # of the sync in progress
        self.reports: list[Report] = []

    async def start(self) -> None:
        """Load the model, and start to sample."""
        path = self.model_config["path"]
        trust = {"trust_remote_code": self.model_config.get("trust_remote_code", False)}
        tokenizer = AutoTokenizer.from_pretrained(path, **trust)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, self.config.dtype)
        # The trainer's attention may support only packed batches.
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", **trust
        )
        self.model: Any = model.to(self.device).eval()  # type: ignore[arg-type]
        self.stop_ids = stop_token_ids(tokenizer, self.model.generation_config)
        # The model's sampling settings do not apply.
        self.model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id or 0)
        self.batches = asyncio.create_task(self.run_batches())

    async def generate(self, prompt_ids: list[int], sampling_params: Json, **_: Any) -> TokenOutput:
        """Return a response's tokens, with the log-prob of each."""
        room = self.config.max_model_len - len(prompt_ids)
        max_tokens = max(1, min(room, sampling_params["max_tokens"]))
        params = {**sampling_params, "max_tokens": max_tokens}
        output = asyncio.get_running_loop().create_future()
        self.queue.put_nowait(Request(list(prompt_ids), params, output))
        return await output

    async def run_batches(self) -> None:
        """Sample one batch of equal settings after another, until the process ends."""
        waiting: list[Request] = []
        while True:
            if not waiting:
                waiting.append(await self.queue.get())
            await asyncio.sleep(GATHER_S)
            while not self.queue.empty():
                waiting.append(self.queue.get_nowait())
            same = [request for request in waiting if request.settings == waiting[0].settings]
            batch = same[: self.config.max_num_seqs]
            waiting = [request for request in waiting if request not in batch]
            await self.run_batch(batch)

    async def run_batch(self, batch: list[Request]) -> None:
        """Sample a batch, and set the requests' outputs, or the exception that it raised."""
        try:
            async with self.model_lock:
                outputs = await asyncio.to_thread(self.generate_batch, batch)
        except Exception as error:
            for request in batch:
                if not request.output.done():
                    request.output.set_exception(error)
            return
        for request, output in zip(batch, outputs, strict=True):
            if not request.output.done():  # done: its caller was canceled
                request.output.set_result(output)

    @torch.no_grad()
    def generate_batch(self, batch: list[Request]) -> list[TokenOutput]:
        """Sample a batch. Prompts are padded on the left."""
        width = max(len(request.prompt_ids) for request in batch)
        pads = [width - len(request.prompt_ids) for request in batch]
        pad_id = self.model.generation_config.pad_token_id
        ids = [[pad_id] * pad + r.prompt_ids for pad, r in zip(pads, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        stop_ids = set() if batch[0].params.get("ignore_eos") else self.stop_ids
        sampler = RecordingSampler(batch, self.device)
        generated = self.model.generate(
            torch.tensor(ids).to(self.device),  # [B, T]
            attention_mask=torch.tensor(mask).to(self.device),
            max_new_tokens=max(request.params["max_tokens"] for request in batch),
            eos_token_id=list(stop_ids) or None,
            do_sample=False,
            logits_processor=LogitsProcessorList([sampler]),
        )
        responses = generated[:, width:].tolist()  # [B, N]
        log_probs = torch.stack(sampler.log_probs, 1).tolist()  # [B, N]
        outputs = []
        for request, tokens, values in zip(batch, responses, log_probs, strict=True):
            end = request.params["max_tokens"]  # `generate` continues until the batch ends
            stops = (index + 1 for index, token in enumerate(tokens[:end]) if token in stop_ids)
            end = next(stops, end)
            output = TokenOutput(token_ids=tokens[:end], log_probs=values[:end])
            output.stop_reason = "completed"
            output.extra_fields = {"global_steps": self.step}
            outputs.append(output)
        return outputs

    async def load_weight(self, name: str, tensor: torch.Tensor, step: int | None) -> None:
        """Replace one of the model's weights by that of a training step. Raises KeyError."""
        self.step = step
        arrival = self.arrival or Arrival(self.model, getattr(torch, self.config.dtype))
        self.arrival = arrival
        weights = arrival.receive([(name, tensor)])
        if not weights:  # the sums, which are last
            self.reports.append(arrival.finish())
            self.arrival = None
            return
        arrival.trace(weights)
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        tied_names = getattr(self.model, "_tied_weights_keys", None) or ()
        if name in tensors or name not in tied_names:
            with arrival:
                tensors[name].data.copy_(tensor)

    async def collective_rpc(self, method: str) -> list[Any]:
        """Return the result of a method, as vLLM's servers do for each of their workers."""
        return [getattr(self, method)()]

    def take_weight_reports(self) -> list[Report]:
        """Return what the syncs since the last call have found."""
        reports = self.reports
        self.reports = []
        return reports

    async def sleep(self) -> None:
        """Release the GPU's memory if rollout.free_cache_engine is set."""
        if self.config.free_cache_engine:
            async with self.model_lock:
                self.model.to("cpu")
                get_platform().empty_cache()

    async def wake_up(self, tags: Any = None) -> None:
        """Load the weights onto the GPU again."""
        self.model.to(self.device)


def find_device(_: Any) -> tuple[str, str]:
    """Return the Ray node and the device of the worker that runs this."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


class Worker(CheckpointEngineWorker):
    """verl's worker of an engine without a trainer. Its process imports this module."""


class HFReplica(RolloutReplica):
    """verl's replica: it starts the server next to its worker."""

    def get_ray_class_with_init_args(self) -> Any:
        """Return the class of the worker of an engine without a trainer, with its arguments."""
        worker = super().get_ray_class_with_init_args()
        worker.cls = ray.remote(Worker)
        return worker

    async def launch_servers(self) -> None:
        """Start the server on the worker's node and device."""
        node, device = await self.workers[0].__ray_call__.remote(find_device)
        platform = get_platform()
        env_vars = dict.fromkeys(platform.ray_noset_envvars(), "1")
        env_vars[platform.visible_devices_envvar()] = device
        self._server_address = f"hf_server_{self.replica_rank}"
        actor_class = ray.remote(Server).options(
            name=self._server_address,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": env_vars},
        )
        self._server_handle = actor_class.remote(self.config, self.model_config)
        self.servers = [self._server_handle]
        await self._server_handle.start.remote()


class ServerAdapter(BaseRollout):
    """A rank of the actor, which has the server of its number, or a worker without a trainer."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank

    @property
    def server(self) -> Any:
        """Return the server's handle."""
        return ray.get_actor(f"hf_server_{self.replica_rank}")

    async def resume(self, tags: list[str]) -> None:
        """Have the server load its weights onto the GPU again."""
        await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        """Have the server release its GPU's memory."""
        await self.server.sleep.remote()

    async def update_weights(  # type: ignore[override]
        self, weights: Any, global_steps: int | None = None, **_: Any
    ) -> None:
        """Send all weights."""
        server = self.server
        async for name, tensor in ensure_async_iterator(weights):
            await server.load_weight.remote(name, tensor.detach().cpu(), global_steps)


# This runs in the driver. In the trainer's workers it runs because model.external_lib
# (configs/hf.yaml) names this module.
RolloutReplicaRegistry.register("hf", lambda: HFReplica)
_ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.ServerAdapter"
