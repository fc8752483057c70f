"""Test doubles for rollouts: a client that records requests, and a Gym with fixed rewards."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from omegaconf import OmegaConf

import env
import gym_client
import inference
from kit.rollout.sampler import SamplerContext, repeat_per_group

STOP = 1
SAMPLING = {"temperature": 0.7, "top_p": 0.9}


class RecordingClient:
    """A client that answers each request with [5, 1] and records it. `change` edits an answer."""

    def __init__(self, change=lambda output, request: None, pause=0.0):
        self.requests: list[SimpleNamespace] = []
        self.change = change
        self.pause = pause
        self.running = 0
        self.max_running = 0

    async def generate(self, request_id, prompt_ids, sampling_params, **more):
        request = SimpleNamespace(
            id=request_id, prompt_ids=prompt_ids, params=sampling_params, more=more
        )
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await asyncio.sleep(self.pause)
        self.running -= 1
        output = SimpleNamespace(
            token_ids=[5, STOP], log_probs=[-1.0, -2.0], stop_reason="completed", extra_fields={}
        )
        self.change(output, request)
        return output


class FixedRewards:
    """A Gym with a verify server that gives `rewards` in the order in which sessions open."""

    def __init__(self, *rewards, kind="verify", fail=lambda number: None):
        self.rewards = list(rewards)
        self.server_kind = kind
        self.fail = fail
        self.opened: list[tuple] = []
        self.runs: list[tuple] = []
        self.numbers: list[tuple] = []
        self.responses: list[dict] = []
        self.open_count = 0

    async def kind(self, server):
        return self.server_kind

    @contextlib.asynccontextmanager
    async def session(self, server, row, numbers):
        self.numbers.append(numbers)
        number = len(self.opened)
        self.opened.append((server, row))
        error = self.fail(number)
        if error:
            raise error

        async def verify(response, _):
            self.responses.append(response)
            details = {"extracted": number}
            return gym_client.VerifyResult(
                self.rewards[number], {"part": 0.5}, latency_s=0.25, details=details
            )

        self.open_count += 1
        yield verify_session(verify)
        self.open_count -= 1

    async def run(self, *arguments):
        self.runs.append(arguments)
        item = gym_client.message("five")
        item |= {
            "prompt_token_ids": [2, 3],
            "generation_token_ids": [5, STOP],
            "generation_log_probs": [-1.0, -2.0],
        }
        result = gym_client.VerifyResult(
            0.75, {"part": 0.5}, latency_s=0.25, details={"extracted": 5}
        )
        return gym_client.RunResult(result, {"output": [item]})


def verify_session(verify) -> SimpleNamespace:
    """A session of a verify server without tools."""
    return SimpleNamespace(kind="verify", observation=None, executable=set(), verify=verify)


def make_tokenizer(text: str) -> SimpleNamespace:
    """A tokenizer that decodes all ids to `text`. It has no special tokens and no template."""
    return SimpleNamespace(
        decode=lambda ids, **_: text,
        chat_template=None,
        added_tokens_decoder={},
        get_added_vocab=dict,
        all_special_tokens=[],
        unk_token=None,
    )


def make_context(client, **changes) -> SamplerContext:
    tokenizer = make_tokenizer("five")
    return SamplerContext(client, tokenizer, {STOP}, 32, 12, None, 100, "hermes", 5.0, **changes)


def make_tasks(count: int) -> list[env.Task]:
    messages = [{"role": "user", "content": "say 7"}]
    return [
        env.Task(f"rows:{i}", {"row": i}, f"server {i}", messages, [10 + i, 20 + i])
        for i in range(count)
    ]


def run_rollout(
    client,
    gym,
    count=1,
    n=1,
    on_done=lambda *_: None,
    baselines=False,
    sampling=SAMPLING,
    **changes,
) -> list[inference.Episode]:
    """Run a rollout with n episodes for each of `count` tasks -> the episodes."""
    rollout = inference.rollout_with_baselines if baselines else inference.rollout
    requests = repeat_per_group(make_tasks(count), n, "4")
    return asyncio.run(rollout(requests, sampling, make_context(client, **changes), gym, on_done))


def make_recipe(**rollout) -> OmegaConf:
    """A recipe with the keys that inference.py and the sampler read. All numbers are different."""
    settings = {
        "name": "vllm",
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 40,
        "val_kwargs": {"do_sample": True, "temperature": 0.3, "top_p": 0.4, "top_k": 5},
        "multi_turn": {
            "max_assistant_turns": 6,
            "max_tool_response_length": 99,
            "format": "llama3_json",
        },
        "nnodes": 0,
        "n_gpus_per_node": 4,
        "tensor_model_parallel_size": 2,
        "max_num_seqs": 7,
        "full_determinism": True,
        "seed": 11,
        "load_format": "dummy",
        "engine_kwargs": {"vllm": {}},
        "checkpoint_engine": {
            "_target_": "verl.workers.config.CheckpointEngineConfig",
            "backend": "naive",
        },
        **rollout,
    }
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": settings},
            "data": {"max_prompt_length": 123, "max_response_length": 456},
            "trainer": {"nnodes": 3, "one_step_off": 2},
        }
    )
