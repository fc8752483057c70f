"""Test doubles for turns: chat templates, a tokenizer, a scripted policy, and sessions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import env
import gym_client
import inference
from kit.rollout.sampler import SamplerContext

# Chat templates like those of four model families. Calls have the format of Hermes.
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
LLAMA = (
    "<|begin|>{% if tools %}<|start_header|>system<|end_header|>\n\n"
    "Tools: {{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}"
    "<|start_header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|eot|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
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
STOPS = {"chatml": "<|im_end|>", "forgetful": "<|im_end|>", "llama": "<|eot|>", "mistral": "</s>"}
TEMPLATES = {"chatml": CHATML, "forgetful": FORGETFUL, "llama": LLAMA, "mistral": MISTRAL}
MARKS = ["<|im_start|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<s>"]
MARKS += ["[INST]", "[/INST]"]
TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}


def bytes_tokenizer(template: str, stop: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte and each special mark of the templates."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=stop, clean_up_tokenization_spaces=False
    )
    special = [mark for mark in MARKS if mark != stop]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    return bytes_tokenizer(CHATML, STOPS["chatml"])


class Script:
    """A rollout engine that gives a list of responses and records the prompts."""

    def __init__(self, answers: list[list[int]]):
        self.answers = list(answers)
        self.prompts: list[list[int]] = []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.prompts.append(list(prompt_ids))
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

    async def verify(self, response, token_ids):
        self.verified = response
        self.token_ids = token_ids
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

    async def step(self, response, token_ids):
        self.bodies.append(response["output"])
        self.steps_left -= 1
        is_over = self.steps_left == 0
        return gym_client.StepResult(
            None if is_over else "Next?",
            0.5,
            terminated=is_over and self.terminated,
            truncated=is_over and not self.terminated,
        )


def context_of(client, tokenizer, **changes) -> SamplerContext:
    settings = {
        "max_prompt_length": 4000,
        "max_response_length": 20000,
        "max_turns": None,
        "max_tool_chars": 4096,
        "tool_format": "hermes",
        "timeout_s": 5.0,
        **changes,
    }
    return SamplerContext(client, tokenizer, {tokenizer.eos_token_id}, **settings)


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
