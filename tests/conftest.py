"""A tiny Llama with a character tokenizer, a trivial Gym task, and one session of the real stack over them.

The model is random: two layers, 64 wide, 40 characters. The task asks for the digit 7; Gym's reasoning_gym
server pays 1 for exactly that and len("7") / len(answer) for an answer that contains it, so chance earns a
little and learning earns much more. Whole tool calls and game moves are tokens of their own (ACTIONS), so
that even a random model plays with real tools and games, and can learn to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

# verl reads these when it is first imported; a run of algorithm.py takes them from configs/cpu.yaml
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu"}

import config as recipes

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "tests" / "tiny.yaml"
CPU = ROOT / "configs" / "cpu.yaml"
ACTIONS = {
    "increment": '<tool_call>{"name": "increment_counter", "arguments": {"count": 1}}</tool_call>',
    "directory": '<tool_call>{"name": "company_directory_find_email_address", "arguments": {"name": "x"}}</tool_call>',
    "unknown": '<tool_call>{"name": "verify", "arguments": {}}</tool_call>',
    "hit": "<action>hit</action>",
    "stand": "<action>stand</action>",
}
END = 1  # the id of <end>
GYM_PYTHON = ROOT / ".venv-gym" / "bin" / "python"


def make_model(folder: Path, tied: bool, seed: int = 0) -> Path:
    """A random two-layer Llama whose tokens are characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = "0123456789abcdefghijklmnopqrstuvwxyz ?"
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<end>", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token="<end>",
        pad_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(ACTIONS.values()))
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | length }} {% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %} {% endfor %}"
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,  # of 32: vLLM has no CPU kernel for narrower ones
            num_key_value_heads=1,
            max_position_embeddings=1024,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def row(question: str = "say 7", answer: str = "7", **extra) -> dict:
    """A row of the trivial task."""
    params = {"input": [{"role": "user", "content": question}]}
    return {
        "responses_create_params": params,
        "question": question,
        "answer": answer,
        "metadata": {"source_dataset": "chain_sum"},
        **extra,
    }


def counting(question: str = "count", steps: int = 1) -> dict:
    """A row whose task is to call a real tool so many times: Gym's example_session_state_mgmt pays 1 for that."""
    tool = {"type": "function", "name": "increment_counter", "description": "", "parameters": {"type": "object"}}
    params = {"input": question, "tools": [{**tool, "strict": True}]}  # Gym answers 422 without strict
    return {"responses_create_params": params, "initial_count": 3, "expected_count": 3 + steps}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_task(folder: Path) -> None:
    """The rows of the tiny recipe, train and val, and those of a task with a tool."""
    words = ["say", "tell me", "i want", "give", "now", "please", "write", "print"]
    write_rows(folder / "train.jsonl", [row(f"{word} 7") for word in words])
    write_rows(folder / "val.jsonl", [row(f"{word} me 7") for word in words])
    write_rows(folder / "tools.jsonl", [counting(f"{word} one") for word in words])


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """A folder with tied/ and untied/ models, scored/ (one with a scalar head), and the task's rows."""
    folder = tmp_path_factory.mktemp("kit")
    for name, tied in (("tied", True), ("untied", False)):
        make_model(folder / name, tied)
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    scored = AutoModelForTokenClassification.from_pretrained(folder / "tied", num_labels=1, dtype=torch.float32)
    scored.save_pretrained(folder / "scored")  # a reward model
    AutoTokenizer.from_pretrained(folder / "tied").save_pretrained(folder / "scored")
    write_task(folder)
    return folder


def tiny(workspace: Path, *changes: str) -> list[str]:
    """Arguments of the tiny recipe: key=value overrides."""
    return [
        f"actor_rollout_ref.model.path={workspace / 'tied'}",
        f"env.train_files=[{workspace / 'train.jsonl'}]",
        f"env.val_files=[{workspace / 'val.jsonl'}]",
        f"gym.servers.reasoning_gym.start.python={GYM_PYTHON}",
        *changes,
    ]


def load(workspace: Path, *changes: str):
    """The tiny recipe, merged and checked: (config, data)."""
    config, _ = recipes.load_config([str(RECIPE), str(CPU)], tiny(workspace, *changes))
    return config, recipes.prepare(config)


def command(workspace: Path, *arguments: str) -> list[str]:
    """The command line of a run of the tiny recipe."""
    return [sys.executable, str(ROOT / "algorithm.py"), "--config", str(RECIPE), "--config", str(CPU), *arguments]


def run(arguments: list[str], cwd: Path, timeout: int = 300) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=timeout)


def metrics_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def survivors(mark: str, patience: float = 20.0) -> list[str]:
    """Command lines of the processes that still carry `mark` in their environment after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("KIT_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


@pytest.fixture(scope="session")
def stack(workspace):
    """The real thing, once: Gym server, Ray, FSDP actor, vLLM. Yields a namespace with all of it."""
    import contextlib
    from types import SimpleNamespace

    import inference
    from run import Run

    os.chdir(workspace)
    changes = ["ray_kwargs.ray_init.num_gpus=8", "ray_kwargs.ray_init.num_cpus=64"]  # logical: room for more workers
    changes += ["actor_rollout_ref.actor.optim.lr=0.01"]
    changes += ["actor_rollout_ref.rollout.max_model_len=1024"]  # room for conversations
    config, data = load(workspace, *changes)
    with Run(config) as started, contextlib.ExitStack() as exits:
        loop, gym, policy, servers, (actor, *_) = started.start(exits, data)
        sync = inference.weight_sync(config, actor, servers)
        sync.update_weights(0)
        yield SimpleNamespace(config=config, data=data, loop=loop, actor=actor, policy=policy, gym=gym, sync=sync)
