"""Answers by transformers' own `generate`, as one more of verl's rollout backends (rollout.name: hf, configs/hf.yaml):
for debugging, for models that vLLM lacks, and for machines that it does not install on. Slower: a batch begins when the
one before it has ended.

Beside each of the trainer's ranks, or on a GPU of its own, is a server (an actor of Ray) with the whole model. It draws
tokens as vLLM does (temperature, top_k, top_p, seed) and tells the log-prob of each after these.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

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
from verl.plugin.platform.platform_manager import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)
from verl.workers.rollout.utils import ensure_async_iterator

from kit.runs.preparation import stop_token_ids

GATHER_S = 0.02  # for more requests to come, before a batch begins


@dataclass
class Request:
    """An answer that somebody waits for."""

    prompt_ids: list[int]
    params: dict[str, Any]  # vLLM's: max_tokens, temperature, top_p, top_k, seed, ignore_eos
    answer: asyncio.Future[TokenOutput]
    generator: torch.Generator | None = field(init=False)

    def __post_init__(self) -> None:
        seed = self.params.get("seed")
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    @property
    def greedy(self) -> bool:
        return not self.params.get("temperature", 1.0)

    @property
    def way(self) -> tuple[float, int, float]:
        """Temperature, top_k, top_p; each as if it were not there where it says so."""
        top_k = self.params.get("top_k") or 0
        return (
            self.params.get("temperature", 1.0) or 1.0,
            max(top_k, 0),
            self.params.get("top_p") or 1.0,
        )


class Draw(LogitsProcessor):
    """Draws the next token of each row, and has `generate` take that: so its log-prob is known, and a row has its own
    way and seed."""

    def __init__(self, requests: list[Request]):
        self.requests = requests
        self.log_probs: list[torch.Tensor] = []  # of each token [B], on the host
        ways: dict[tuple[float, int, float], list[int]] = {}
        for row, request in enumerate(requests):
            ways.setdefault(request.way, []).append(row)
        self.ways = [(rows, warpers(*way)) for way, rows in ways.items()]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, T], [B, V] -> [B, V], 0 at what was drawn and -inf elsewhere."""
        logits = scores.float()
        for rows, warp in self.ways:
            logits[rows] = warp(input_ids[rows], logits[rows])  # type: ignore[arg-type]
        told = logits.log_softmax(-1).cpu()
        drawn = told.argmax(-1)  # [B]
        for row, request in enumerate(self.requests):
            if not request.greedy:
                drawn[row] = torch.multinomial(told[row].exp(), 1, generator=request.generator)
        self.log_probs.append(told.gather(1, drawn[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(
            1, drawn[:, None].to(scores.device), 0.0
        )


def warpers(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """What changes the logits of a row before one is drawn; transformers', in vLLM's order."""
    found: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    found += [TopKLogitsWarper(top_k)] if top_k else []
    return LogitsProcessorList(found + ([TopPLogitsWarper(top_p)] if top_p < 1.0 else []))


class Ended(StoppingCriteria):
    """A row ends at a stop token or its max_tokens, all of them where the server is held."""

    def __init__(self, requests: list[Request], server: Server):
        self.requests, self.server, self.count = requests, server, 0
        self.done = torch.zeros(len(requests), dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.count += 1
        for row, (request, last) in enumerate(
            zip(self.requests, input_ids[:, -1].tolist(), strict=True)
        ):
            stops = last in self.server.stop_ids and not request.params.get("ignore_eos")
            self.done[row] |= (
                stops or self.count >= request.params["max_tokens"] or self.server.held
            )
        return self.done.to(input_ids.device)


class Server:
    """A model that answers, as verl asks its servers."""

    def __init__(self, config: Any, model_config: Any):
        self.config, self.settings = config, model_config
        self.waiting: list[Request] = []
        self.asked, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.held = False
        self.step: int | None = None

    async def launch(self) -> None:
        """Load the model, and begin to answer."""
        path, trust = (
            self.settings["path"],
            {"trust_remote_code": self.settings.get("trust_remote_code", False)},
        )
        tokenizer = AutoTokenizer.from_pretrained(path, **trust)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # not the attention that the trainer has, which may be for packed rows alone
        dtype = getattr(torch, self.config.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", **trust
        )
        self.model: Any = model.to(self.device).eval()  # type: ignore[arg-type]
        self.stop_ids = stop_token_ids(tokenizer, self.model.generation_config)
        self.model.generation_config = GenerationConfig(
            pad_token_id=tokenizer.pad_token_id or 0
        )  # no ways of its own
        self.serving = asyncio.create_task(self.serve())

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """An answer in tokens, with the log-prob of each."""
        room = self.config.max_model_len - len(prompt_ids)
        params = {**sampling_params, "max_tokens": max(1, min(room, sampling_params["max_tokens"]))}
        request = Request(list(prompt_ids), params, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self.asked.set()
        return await request.answer

    async def serve(self) -> None:
        """Batch after batch, for ever."""
        while True:
            await self.asked.wait()
            await asyncio.sleep(GATHER_S)
            size = self.config.max_num_seqs
            batch, self.waiting = self.waiting[:size], self.waiting[size:]
            if self.held:
                self.waiting, batch = [*batch, *self.waiting], []
            if self.held or not self.waiting:
                self.asked.clear()
            if batch:
                self.idle.clear()
                try:
                    answers = await asyncio.to_thread(self.sample, batch)
                    for request, answer in zip(batch, answers, strict=True):
                        request.answer.set_result(answer)
                except Exception as error:  # who waits is told
                    for request in batch:
                        request.answer.set_exception(error)
                self.idle.set()

    @torch.no_grad()
    def sample(self, batch: list[Request]) -> list[TokenOutput]:
        """All answers to a batch, prompts padded on the left."""
        longest, pad = (
            max(len(r.prompt_ids) for r in batch),
            self.model.generation_config.pad_token_id,
        )
        ids = torch.tensor(
            [[pad] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in batch]
        )  # [B, T]
        mask = torch.tensor(
            [[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch]
        )
        draw, ended = Draw(batch), Ended(batch, self)
        out = self.model.generate(
            ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max(r.params["max_tokens"] for r in batch),
            do_sample=False,
            logits_processor=LogitsProcessorList([draw]),
            stopping_criteria=StoppingCriteriaList([ended]),
        )
        log_probs = torch.stack(draw.log_probs, 1).tolist()  # [B, N]
        rows = out[:, longest:].tolist()
        return [
            self.cut(request, *row) for request, *row in zip(batch, rows, log_probs, strict=True)
        ]

    def cut(self, request: Request, ids: list[int], log_probs: list[float]) -> TokenOutput:
        """A row's tokens up to where it ended, while the rest of the batch went on."""
        stops = () if request.params.get("ignore_eos") else self.stop_ids
        limit = request.params["max_tokens"]
        end = next((place for place, token in enumerate(ids[:limit], 1) if token in stops), limit)
        reason = "completed" if end <= len(ids) else "aborted"
        told = {"global_steps": self.step}
        return TokenOutput(
            token_ids=ids[:end], log_probs=log_probs[:end], stop_reason=reason, extra_fields=told
        )

    async def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Some of the trainer's weights in the place of the model's. Raises KeyError for one that it has not."""
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        tied = getattr(self.model, "_tied_weights_keys", None) or ()
        for name, tensor in weights.items():
            if name in own or name not in tied:
                own[name].data.copy_(tensor)

    async def set_step(self, step: int | None) -> None:
        """The weights are those after `step` now."""
        self.step = step

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End the batch under way as it is, and begin no other."""
        self.held = True
        await self.idle.wait()

    async def resume_generation(self) -> None:
        self.held = False
        self.asked.set()

    async def sleep(self) -> None:
        """Give the GPU's memory back (rollout.free_cache_engine)."""
        if self.config.free_cache_engine:
            await self.idle.wait()
            self.model.to("cpu")
            get_platform().empty_cache()

    async def wake_up(self, tags: Any = None) -> None:
        self.model.to(self.device)

    async def release_kv_cache(self) -> None:
        """There is none between two batches."""

    resume_kv_cache = clear_kv_cache = release_kv_cache


class HFReplica(RolloutReplica):
    """verl's replica: where its server is."""

    async def sleep(self) -> None:
        if (
            self.rollout_mode is not RolloutMode.STANDALONE
        ):  # which has its GPU to itself, and nobody to wake it
            await super().sleep()

    async def launch_servers(self) -> None:
        def place(_: Any) -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]

        node, device = await self.workers[0].__ray_call__.remote(place)
        platform = get_platform()
        variables = {
            platform.visible_devices_envvar(): device,
            **dict.fromkeys(platform.ray_noset_envvars(), "1"),
        }
        options = {
            "name": f"hf_server_{self.replica_rank}",
            "max_concurrency": self.max_concurrency,
        }
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        make = ray.remote(Server).options(
            scheduling_strategy=where, runtime_env={"env_vars": variables}, **options
        )
        self._server_handle = make.remote(self.config, self.model_config)
        self.servers = [self._server_handle]
        await self._server_handle.launch.remote()
        self._server_address = options["name"]


class ServerAdapter(BaseRollout):
    """The trainer's side of a server: of the rank beside it, or of its own process on a GPU of its own."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        self.replica = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank

    @property
    def server(self) -> Any:
        return ray.get_actor(f"hf_server_{self.replica}")

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(  # type: ignore[override]
        self, weights: Any, global_steps: int | None = None, **_: Any
    ) -> None:
        """All of them, as many at once as checkpoint_engine.update_weights_bucket_megabytes holds."""
        size, held = self.config.checkpoint_engine.update_weights_bucket_megabytes * 2**20, 0
        bucket: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if bucket and held + tensor.nbytes > size:
                await self.server.load.remote(bucket)
                bucket, held = {}, 0
            bucket[name] = tensor.detach().cpu()
            held += tensor.nbytes
        await self.server.load.remote(bucket)
        await self.server.set_step.remote(global_steps)


RolloutReplicaRegistry.register("hf", lambda: HFReplica)
