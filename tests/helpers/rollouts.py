"""Test doubles for rollouts and turns: clients, sessions, chat templates and a Gym."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import env
import gym_client
import inference
from gym_client import GymError
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.data.episode import PolicyVersion
from kit.engine.endpoint.dialects import chat
from kit.engine.endpoint.requests import RequestError
from kit.engine.endpoint.server import Endpoint, complete, describe, parse_body
from kit.engine.sampling import (
    RolloutContext,
    SampledResponse,
    SampleStore,
    repeat_per_group,
)
from kit.recipe.load import read_yaml
from kit.recipe.recipe import Recipe
from kit.recipe.schema import AgentsSection
from tests.helpers.recipes import make_partial

STOP = 1
SAMPLING = {"temperature": 0.7, "top_p": 0.9}


class RecordingClient:
    """A client that answers each request with [5, 1] and records it. `change` edits an answer."""

    def __init__(self, change=lambda output, request: None, pause=0.0):
        self.requests: list[SimpleNamespace] = []
        self.change = change
        self.pause = pause

    async def generate(self, request_id, prompt_ids, sampling_params, **more):
        request = SimpleNamespace(
            id=request_id, prompt_ids=prompt_ids, params=sampling_params, more=more
        )
        self.requests.append(request)
        await asyncio.sleep(self.pause)
        output = SimpleNamespace(
            token_ids=[5, STOP], log_probs=[-1.0, -2.0], stop_reason="completed", extra_fields={}
        )
        self.change(output, request)
        return output


class FixedRewards:
    """A Gym with a verify server that gives `rewards` in the order in which sessions open."""

    def __init__(self, *rewards, kind="verify"):
        self.rewards = list(rewards)
        self.server_kind = kind
        self.opened: list[tuple] = []
        self.runs: list[tuple] = []
        self.responses: list[dict] = []
        self.open_count = 0
        self.samples = SampleStore()  # of the agent's policy endpoint

    async def kind(self, server):
        return self.server_kind

    @contextlib.asynccontextmanager
    async def session(self, server, row, _numbers):
        number = len(self.opened)
        self.opened.append((server, row))

        async def verify(response, _):
            self.responses.append(response)
            details = {"extracted": number}
            return gym_client.VerifyResult(
                self.rewards[number], {"part": 0.5}, latency_s=0.25, details=details
            )

        self.open_count += 1
        yield SimpleNamespace(kind="verify", observation=None, executable=set(), verify=verify)
        self.open_count -= 1

    async def run(self, *arguments):
        self.runs.append(arguments)
        item = gym_client.make_message("five")
        item |= {
            "prompt_token_ids": [2, 3],
            "generation_token_ids": [5, STOP],
            "generation_log_probs": [9.0, 9.0],  # a claim
        }
        keep_samples(self.samples, [item], step=6)
        result = gym_client.VerifyResult(
            0.75, {"part": 0.5}, latency_s=0.25, details={"extracted": 5}
        )
        return gym_client.RunResult(result, {"output": [item]})


def keep_samples(samples: SampleStore | None, output, step=None) -> None:
    """Let the policy endpoint have sampled the token ids of output items. step: of the weights."""
    assert samples
    for item in output:
        ids = item.get("generation_token_ids")
        if ids:
            versions = [PolicyVersion(len(ids), step)]
            sampled = SampledResponse(ids, [-1.0 - i for i in range(len(ids))], versions)
            samples.add(item["prompt_token_ids"], sampled)


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


def make_context(client, **changes) -> RolloutContext:
    tokenizer: Any = make_tokenizer("five")
    template = ChatTemplate(TextProcessor(tokenizer), {STOP})
    return RolloutContext(client, template, 32, 12, None, 100, 5.0, **changes)


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
    context = make_context(client, samples=gym.samples, **changes)
    return asyncio.run(rollout(requests, sampling, context, gym, on_done))


def make_recipe(**rollout) -> Recipe:
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
        "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": None}},
        "checkpoint_engine": {
            "_target_": "verl.workers.config.CheckpointEngineConfig",
            "backend": "naive",
        },
        **rollout,
    }
    sections = {
        "actor_rollout_ref": {"rollout": settings},
        "data": {"max_prompt_length": 123, "max_response_length": 456},
        "trainer": {"nnodes": 3, "one_step_off": 1, "stage_timeout_s": 90.0},
    }
    return make_partial(sections)


# Chat templates like those of three model families. Calls have the format of Hermes.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3's template, it drops the reasoning of earlier turns. So a second rendering differs.
FORGETFUL = CHATML.replace(
    "{{ m.content or '' }}",
    "{{ (m.content or '') if loop.last else (m.content or '').split('</think>')[-1] }}",
)
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
    "{% else %} {{ m.content }}{% endif %}</s>{% endif %}"
    "{% endfor %}"
)
STOPS = {"chatml": "<|im_end|>", "forgetful": "<|im_end|>", "mistral": "</s>"}
TEMPLATES = {"chatml": CHATML, "forgetful": FORGETFUL, "mistral": MISTRAL}
MARKS = ["<|im_start|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<s>"]
MARKS += ["[INST]", "[/INST]"]
TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}


def bytes_tokenizer(template: str, stop: str, marks=MARKS, **settings) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte and each special mark of the templates."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=stop, clean_up_tokenization_spaces=False, **settings
    )
    special = [mark for mark in marks if mark != stop]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    return bytes_tokenizer(CHATML, STOPS["chatml"])


class Script:
    """A rollout engine that gives a list of responses and records the requests."""

    def __init__(self, answers: list[list[int]]):
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.requests: list[tuple[str, dict]] = []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.prompts.append(list(prompt_ids))
        self.requests.append((request_id, sampling_params))
        ids = self.answers.pop(0)[: sampling_params["max_tokens"]]
        log_probs = [-0.5 - i for i in range(len(ids))]
        return SimpleNamespace(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={}
        )


def encode_turns(texts, tokenizer) -> list[list[int]]:
    """Encode the texts of responses, each with a stop token at the end."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]


def one_turn_each(texts, tokenizer) -> Script:
    return Script(encode_turns(texts, tokenizer))


class ToolSession:
    """A session of a verify server whose tools answer from a list."""

    kind = "verify"
    observation = None
    executable = {"look_up"}  # noqa: RUF012  one test replaces it

    def __init__(self, answers: list[str]):
        self.answers = list(answers)
        self.verified = None

    async def call_tool(self, name, arguments):
        return self.answers.pop(0)

    async def verify(self, response, last):
        self.verified = response
        self.last = last
        return gym_client.VerifyResult(1.0, {"a": 1.0})


class Game:
    """A session of a step server. Each step has the reward 0.5, and the last one ends the game."""

    kind = "step"
    executable = frozenset()

    def __init__(self, steps, observation="Your move.", terminated=True):
        self.steps_left = steps
        self.observation = observation
        self.terminated = terminated
        self.bodies = []

    async def step(self, response, last):
        self.bodies.append(response["output"])
        self.steps_left -= 1
        is_over = self.steps_left == 0
        return gym_client.StepResult(
            None if is_over else "Next?",
            0.5,
            terminated=is_over and self.terminated,
            truncated=is_over and not self.terminated,
        )


def context_of(client, tokenizer, tool_format="hermes", template=None, **changes) -> RolloutContext:
    template = template or ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id})
    template.tool_format = tool_format
    settings = {
        "max_prompt_length": 4000,
        "max_response_length": 20000,
        "max_turns": None,
        "max_tool_chars": 4096,
        "timeout_s": 5.0,
        **changes,
    }
    return RolloutContext(client, template, **settings)


@functools.cache
def read_limits() -> dict:
    return read_yaml("base")["agents"]


def make_limits(**changes) -> AgentsSection:
    """The section `agents:` of a recipe, with changes."""
    return AgentsSection(**{**read_limits(), **changes})


class HttpReply(NamedTuple):
    """The answer of an endpoint."""

    status: int
    body: dict


def ask_endpoint(body, context) -> HttpReply:
    """Send a chat request to the policy endpoint of a context, without HTTP."""
    return asyncio.run(ask_chat(body, context))


async def ask_chat(body, context) -> HttpReply:
    """Answer a chat request to the policy endpoint of a context."""
    endpoint = vars(context).setdefault("endpoint", Endpoint(context, "key"))
    try:
        parsed = parse_body(json.dumps(body).encode())
        return HttpReply(200, await complete(endpoint.shared, chat, parsed))
    except (RequestError, GymError, RecursionError) as error:
        failure = describe(error, is_agent=False)
        return HttpReply(failure.status, chat.write_error(failure))


def task_of(tokenizer, tools=True, prompt="Look it up.") -> env.Task:
    params = {"input": prompt}
    if tools:
        params["tools"] = [TOOL]
    row = {"responses_create_params": params}
    messages, chat_tools = env.render_row(row, "x:1")
    ids = env.encode_messages(messages, chat_tools, tokenizer, "x:1")
    return env.Task("x:1", row, "server", messages, ids, tools=chat_tools)


def play(task, session, context) -> inference.Episode:
    """Run the turns of one episode and verify it."""
    episode = inference.Episode(task.row_id, "g", task.server, task.prompt_ids)

    async def run():
        await inference.run_turns(episode, task, session, context, {}, "r")
        await inference.verify(episode, session)

    asyncio.run(run())
    return episode


def call(arguments: str = "{}", name: str = "look_up") -> str:
    """The text of a tool call in the format of Hermes."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def make_family_tokenizer(family):
    """Make a byte tokenizer with the chat template of a family of models."""
    tokenizer = bytes_tokenizer(TEMPLATES[family], STOPS[family])
    # These tokens are not special, like <think> in Qwen3. A template writes the first two.
    tokenizer.add_tokens(["[TOOL_RESULTS]", "[TOOL_CALLS]", "    "])
    return tokenizer


# --- templates with thoughts ----------------------------------------------------------------------

CONTENT = "{{ m.content or '' }}"  # of CHATML


def opening(source: str, start: str) -> str:
    """Let the generation prompt of a template open a thought."""
    return source.replace("assistant\n{% endif %}", f"assistant\n{start}\n{{% endif %}}")


def showing(start: str, end: str, without: str = "", key: str = "reasoning_content") -> str:
    """A template that writes a thought between markers, and `without` in answers without one."""
    return CHATML.replace(
        CONTENT,
        f"{{% if m.{key} %}}{start}{{{{ m.{key} }}}}{end}{{% elif m.role == 'assistant' %}}"
        f"{without}{{% endif %}}{CONTENT}",
    )


def cutting(end: str) -> str:
    """A template that cuts past answers at an end marker."""
    return CHATML.replace(CONTENT, f"{{{{ (m.content or '').split('{end}')[-1] }}}}")
