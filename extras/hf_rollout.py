"""A rollout engine that samples by transformers' `generate` (rollout.name: hf, configs/hf.yaml).

Use it to debug, for models that vLLM lacks, and on machines where vLLM does not install. It is
slower than vLLM: a batch begins when the previous one has ended.

Each rank of the trainer has a server (a Ray actor with the whole model) on its GPU, or on a
separate one. It samples tokens as vLLM does (temperature, top_k, top_p, seed) and returns the
log-prob of each token after these settings.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.plugin.platform.platform_manager import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)
from verl.workers.rollout.utils import ensure_async_iterator

from kit.config.model_files import stop_token_ids

GATHER_S = 0.02  # how long to wait for more requests before a batch begins


class SamplingKey(NamedTuple):
    """Settings that change the logits. Rows with the same settings are processed together."""

    temperature: float  # 1.0: unchanged
    top_k: int  # 0: all tokens
    top_p: float  # 1.0: all tokens


@dataclass
class Request:
    """A response to sample."""

    prompt_ids: list[int]
    params: dict[str, Any]  # vLLM's: max_tokens, temperature, top_p, top_k, seed, ignore_eos
    output: asyncio.Future[TokenOutput]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return not self.params.get("temperature", 1.0)

    @property
    def sampling_key(self) -> SamplingKey:
        """The settings, with neutral values for those that are missing or turned off."""
        return SamplingKey(
            temperature=self.params.get("temperature", 1.0) or 1.0,
            top_k=max(self.params.get("top_k") or 0, 0),
            top_p=self.params.get("top_p") or 1.0,
        )

    @property
    def ignores_stop_tokens(self) -> bool:
        """Whether only max_tokens ends the response."""
        return bool(self.params.get("ignore_eos"))


def make_logits_processors(key: SamplingKey) -> LogitsProcessorList:
    """Return transformers' processors for the settings, in vLLM's order."""
    processors: list[Any] = []
    if key.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(key.temperature))
    if key.top_k:
        processors.append(TopKLogitsWarper(key.top_k))
    if key.top_p < 1.0:
        processors.append(TopPLogitsWarper(key.top_p))
    return LogitsProcessorList(processors)


class RecordingSampler(LogitsProcessor):
    """Sample the next token of each row, record its log-prob, and have `generate` take it.

    `generate` itself returns no such log-probs, and has one seed and one set of settings per batch.
    All of it happens on the model's device: the logits of a batch are too large to copy each time.
    """

    def __init__(self, requests: list[Request], device: torch.device):
        self.log_probs: list[torch.Tensor] = []  # of each token [B], on the device
        self.generators: dict[int, torch.Generator] = {}  # of the rows with a seed
        unseeded_rows = []
        rows_by_key: dict[SamplingKey, list[int]] = {}
        for row, request in enumerate(requests):
            rows_by_key.setdefault(request.sampling_key, []).append(row)
            seed = request.params.get("seed")
            if request.is_greedy:
                continue
            if seed is None:
                unseeded_rows.append(row)
            else:
                self.generators[row] = torch.Generator(device).manual_seed(seed)
        self.unseeded_rows = torch.tensor(unseeded_rows, dtype=torch.long, device=device)
        self.groups = [
            (torch.tensor(rows, device=device), make_logits_processors(key))
            for key, rows in rows_by_key.items()
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that allow only the sampled token: 0 for it, -inf for all others.

        input_ids [B, T], scores [B, V] -> [B, V].
        """
        logits = scores.float()
        for rows, processors in self.groups:
            logits[rows] = processors(input_ids[rows], logits[rows])  # type: ignore[arg-type]
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.argmax(-1, keepdim=True)  # [B, 1]
        if len(self.unseeded_rows):
            probs = log_probs[self.unseeded_rows].exp()
            tokens[self.unseeded_rows] = torch.multinomial(probs, 1)
        for row, generator in self.generators.items():
            tokens[row] = torch.multinomial(log_probs[row].exp(), 1, generator=generator)
        self.log_probs.append(log_probs.gather(1, tokens)[:, 0])
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens, 0.0)


class StopCriteria(StoppingCriteria):
    """End a row at a stop token or its max_tokens, and all rows if the server is paused."""

    def __init__(self, requests: list[Request], server: Server):
        self.requests = requests
        self.server = server
        self.token_count = 0
        self.is_done = torch.zeros(len(requests), dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.token_count += 1
        last_tokens = input_ids[:, -1].tolist()
        is_paused = self.server.paused  # another thread changes it: one value for all rows
        for row, (request, token) in enumerate(zip(self.requests, last_tokens, strict=True)):
            is_stopped = token in self.server.stop_ids and not request.ignores_stop_tokens
            is_full = self.token_count >= request.params["max_tokens"]
            self.is_done[row] |= is_stopped or is_full or is_paused
        return self.is_done.to(input_ids.device)


class Server:
    """A model that samples responses, with the methods that verl calls on its servers."""

    def __init__(self, config: Any, model_config: Any):
        self.config = config
        self.model_config = model_config
        self.queue: list[Request] = []
        self.has_requests = asyncio.Event()
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.paused = False
        self.step: int | None = None  # of the weights

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

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Return a response's tokens, with the log-prob of each."""
        room = self.config.max_model_len - len(prompt_ids)
        max_tokens = max(1, min(room, sampling_params["max_tokens"]))
        params = {**sampling_params, "max_tokens": max_tokens}
        output = asyncio.get_running_loop().create_future()
        self.queue.append(Request(list(prompt_ids), params, output))
        self.has_requests.set()
        return await output

    async def run_batches(self) -> None:
        """Sample one batch after another, until the process ends."""
        while True:
            await self.has_requests.wait()
            await asyncio.sleep(GATHER_S)
            batch = self.take_batch()
            if batch:
                await self.run_batch(batch)

    def take_batch(self) -> list[Request]:
        """Take requests from the queue: max_num_seqs at most, none if the server is paused."""
        size = 0 if self.paused else self.config.max_num_seqs
        batch = self.queue[:size]
        self.queue = self.queue[size:]
        if self.paused or not self.queue:
            self.has_requests.clear()
        return batch

    async def run_batch(self, batch: list[Request]) -> None:
        """Sample a batch, and set the requests' outputs, or the exception that it raised."""
        self.is_idle.clear()
        try:
            outputs = await asyncio.to_thread(self.generate_batch, batch)
        except Exception as error:
            for request in batch:
                if not request.output.done():
                    request.output.set_exception(error)
        else:
            for request, output in zip(batch, outputs, strict=True):
                if not request.output.done():  # done: its caller was canceled
                    request.output.set_result(output)
        self.is_idle.set()

    @torch.no_grad()
    def generate_batch(self, batch: list[Request]) -> list[TokenOutput]:
        """Sample a batch. Prompts are padded on the left."""
        width = max(len(request.prompt_ids) for request in batch)
        pad_id = self.model.generation_config.pad_token_id
        ids = []
        mask = []
        for request in batch:
            padding = width - len(request.prompt_ids)
            ids.append([pad_id] * padding + request.prompt_ids)
            mask.append([0] * padding + [1] * len(request.prompt_ids))
        sampler = RecordingSampler(batch, self.device)
        generated = self.model.generate(
            torch.tensor(ids).to(self.device),  # [B, T]
            attention_mask=torch.tensor(mask).to(self.device),
            max_new_tokens=max(request.params["max_tokens"] for request in batch),
            do_sample=False,
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([StopCriteria(batch, self)]),
        )
        responses = generated[:, width:].tolist()  # [B, N]
        log_probs = torch.stack(sampler.log_probs, 1).tolist()  # [B, N]
        rows = zip(batch, responses, log_probs, strict=True)
        return [self.trim(request, tokens, values) for request, tokens, values in rows]

    def trim(self, request: Request, ids: list[int], log_probs: list[float]) -> TokenOutput:
        """Return a row's tokens up to its end. `generate` adds padding until the batch ends."""
        stop_ids = set() if request.ignores_stop_tokens else self.stop_ids
        end = request.params["max_tokens"]
        for index, token in enumerate(ids[:end]):
            if token in stop_ids:
                end = index + 1
                break
        return TokenOutput(
            token_ids=ids[:end],
            log_probs=log_probs[:end],
            stop_reason="completed" if end <= len(ids) else "aborted",
            extra_fields={"global_steps": self.step},
        )

    async def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace some of the model's weights. Raises KeyError for a name that it does not have."""
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        tied_names = getattr(self.model, "_tied_weights_keys", None) or ()
        for name, tensor in weights.items():
            if name in tensors or name not in tied_names:
                tensors[name].data.copy_(tensor)

    async def set_step(self, step: int | None) -> None:
        """Record the training step of the present weights."""
        self.step = step

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Pause: end the responses of the running batch where they are, and start no other."""
        self.paused = True
        await self.is_idle.wait()

    async def resume_generation(self) -> None:
        """Sample again."""
        self.paused = False
        self.has_requests.set()

    async def sleep(self) -> None:
        """Release the GPU's memory if rollout.free_cache_engine is set."""
        if self.config.free_cache_engine:
            await self.is_idle.wait()
            self.model.to("cpu")
            get_platform().empty_cache()

    async def wake_up(self, tags: Any = None) -> None:
        """Load the weights onto the GPU again."""
        self.model.to(self.device)

    async def release_kv_cache(self) -> None:
        """Do nothing: there is no cache between two batches."""

    resume_kv_cache = clear_kv_cache = release_kv_cache


def find_device(_: Any) -> tuple[str, str]:
    """Return the Ray node and the device of the worker that runs this."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's server in Ray."""
    return f"hf_server_{replica_rank}"


class WeightReceiver(CheckpointEngineWorker):
    """verl's worker on a separate GPU.

    Since the class is in this module, its process imports the module, which registers the engine.
    """


class HFReplica(RolloutReplica):
    """verl's replica: it starts the server next to its worker."""

    def get_ray_class_with_init_args(self) -> Any:
        """Return the class of the worker on a separate GPU, with its arguments."""
        worker = super().get_ray_class_with_init_args()
        worker.cls = ray.remote(WeightReceiver)
        return worker

    async def sleep(self) -> None:
        """Have the server release its GPU. On a separate GPU nothing would wake it up again."""
        if self.rollout_mode is not RolloutMode.STANDALONE:
            await super().sleep()

    async def launch_servers(self) -> None:
        """Start the server on the worker's node and device."""
        node, device = await self.workers[0].__ray_call__.remote(find_device)
        platform = get_platform()
        env_vars = dict.fromkeys(platform.ray_noset_envvars(), "1")
        env_vars[platform.visible_devices_envvar()] = device
        actor_class = ray.remote(Server).options(
            name=server_name(self.replica_rank),
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": env_vars},
        )
        self._server_handle = actor_class.remote(self.config, self.model_config)
        self._server_address = server_name(self.replica_rank)
        self.servers = [self._server_handle]
        await self._server_handle.start.remote()


class ServerAdapter(BaseRollout):
    """The trainer's side of a server, in a rank of the actor or in a worker that receives weights.

    replica_rank: the number of the server, or -1 in a rank of the actor. That rank is then the
    number of its server.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank

    @property
    def server(self) -> Any:
        """The server's handle."""
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Have the server load its weights onto the GPU again."""
        await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        """Have the server release its GPU's memory."""
        await self.server.sleep.remote()

    async def update_weights(  # type: ignore[override]
        self, weights: Any, global_steps: int | None = None, **_: Any
    ) -> None:
        """Send all weights, in buckets of update_weights_bucket_megabytes."""
        bucket_size = self.config.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        bucket: dict[str, torch.Tensor] = {}
        used = 0
        async for name, tensor in ensure_async_iterator(weights):
            if bucket and used + tensor.nbytes > bucket_size:
                await self.server.load_weights.remote(bucket)
                bucket = {}
                used = 0
            bucket[name] = tensor.detach().cpu()
            used += tensor.nbytes
        await self.server.load_weights.remote(bucket)
        await self.server.set_step.remote(global_steps)


# This runs in the driver. In the trainer's workers it runs because model.external_lib
# (configs/hf.yaml) names this module.
RolloutReplicaRegistry.register("hf", lambda: HFReplica)
_ROLLOUT_REGISTRY["hf", "async"] = f"{__name__}.ServerAdapter"
