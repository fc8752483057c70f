"""A tiny Llama with a character tokenizer, a trivial Gym task, and one session of the real stack over them.

The model is random: two layers, 64 wide, 40 characters. The task asks for the digit 7; Gym's reasoning_gym
server pays 1 for exactly that and len("7") / len(answer) for an answer that contains it, so chance earns a
little and learning earns much more. Whole tool calls and game moves are tokens of their own (ACTIONS), so
that even a random model plays with real tools and games, and can learn to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from omegaconf import DictConfig

# verl reads these when it is first imported; a run of algorithm.py takes them from configs/machines/cpu.yaml
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.rollout.verl_patches",
}

from kit.config.load import load_config
from kit.extras.report.metric_docs import find_metric
from kit.rollout.sampler import make_sampler_context
from kit.runs import prepare

# a shell that starts the tests in the background has them ignore SIGINT, and all that they start inherits it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# what a command starts with, whatever recipes have set in this process by then
GIVEN = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "tests" / "tiny.yaml"
CPU = ROOT / "configs" / "machines" / "cpu.yaml"
ACTIONS = {
    "increment": '<tool_call>{"name": "increment_counter", "arguments": {"count": 1}}</tool_call>',
    "directory": '<tool_call>{"name": "company_directory_find_email_address", "arguments": {"name": "x"}}</tool_call>',
    "unknown": '<tool_call>{"name": "verify", "arguments": {}}</tool_call>',
    "hit": "<action>hit</action>",
    "stand": "<action>stand</action>",
}
END = 1  # the id of <end>
GYM_PYTHON = ROOT / ".venv-gym" / "bin" / "python"
# settings of `algorithm` for training.compute_advantages, none at the value at which it has no effect
ALGORITHM = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "gamma": 0.9, "lam": 0.5}


WORDS = ["say", "tell me", "i want", "give", "now", "please", "write", "print"]


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
            max_position_embeddings=2048,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_mixture(folder: Path, source: Path) -> Path:
    """A random mixture of four experts with the tokenizer of the tiny Llama in `source`."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    c, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    names += (
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "eos_token_id",
        "pad_token_id",
    )
    sizes = {name: getattr(c, name) for name in names}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, bos_token_id=None)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


SEES = (  # a chat template of parts; of text among them it says nothing, as LLaVA's own
    "{% if tools %}{{ tools | length }} {% endif %}{% for m in messages %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% if m['role'] == 'assistant' %}<end>{% endif %} {% endfor %}"
)


def make_vision_model(folder: Path, source: Path) -> Path:
    """A random LLaVA with the tokenizer of the tiny Llama in `source`: an image is 16 tokens. Its projector is large,
    so that colours differ by something."""
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaProcessor,
    )
    from transformers import LlavaForConditionalGeneration as Llava
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer, text = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.chat_template, text.vocab_size = SEES, len(tokenizer)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=8, projection_dim=64)
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": text.tie_word_embeddings}
    seen = {"image_token_index": image, "image_seq_length": 16, "vision_feature_layer": -1}
    model = Llava(LlavaConfig(vision_config=vision, text_config=text, **seen, **tied))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "projector" in name and "weight" in name:
                weight.mul_(10)
    square = {"height": 32, "width": 32}
    how = {
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    pixels = CLIPImageProcessorPil(size=square, crop_size=square)
    model.save_pretrained(folder)
    LlavaProcessor(pixels, tokenizer, chat_template=SEES, **how).save_pretrained(folder)
    return folder


def make_pretrained(
    folder: Path, source: Path, prompts: list[str], digits: str = "0123456789"
) -> None:
    """The random model, fitted to answer any of `digits`. LoRA leaves the output head as it is, and under a random one,
    whose rows have a norm of 0.16, no normed state (norm 8) can make a token likely: logits stay within 1.3 of zero."""
    import random

    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer, rng = AutoTokenizer.from_pretrained(source), random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        chats = [[{"role": "user", "content": f"{prompt} 7"}] for prompt in prompts]
        asked = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        ids = [
            tokenizer.encode(text + rng.choice(digits)) + [tokenizer.eos_token_id] for text in asked
        ]
        width = max(map(len, ids))
        batch = torch.tensor(
            [row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]
        )  # [8, width]
        wanted = torch.tensor(
            [[-100] * (len(row) - 2) + row[-2:] + [-100] * (width - len(row)) for row in ids]
        )
        loss = model(batch, labels=wanted).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"pretrained model: loss {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    tool = {
        "type": "function",
        "name": "increment_counter",
        "description": "",
        "parameters": {"type": "object"},
    }
    params = {
        "input": question,
        "tools": [{**tool, "strict": True}],
    }  # Gym answers 422 without strict
    return {"responses_create_params": params, "initial_count": 3, "expected_count": 3 + steps}


def gym_examples() -> list[Path]:
    """The files of example rows in the installed nemo-gym."""
    code = "import pathlib, nemo_gym; print(pathlib.Path(nemo_gym.__file__).parent.parent / 'resources_servers')"
    folder = subprocess.run(
        [GYM_PYTHON, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    found = sorted(
        p for p in Path(folder).glob("*/data/*example*.jsonl") if "rollouts" not in p.name
    )
    assert len(found) > 50, f"{folder} has {len(found)} files of examples"
    return found


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_task(folder: Path) -> None:
    """The rows of the tiny recipe, train and val, and those of a task with a tool."""
    write_rows(folder / "train.jsonl", [row(f"{word} 7") for word in WORDS])
    write_rows(folder / "val.jsonl", [row(f"{word} me 7") for word in WORDS])
    write_rows(folder / "tools.jsonl", [counting(f"{word} one") for word in WORDS])


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """A folder with tied/ and untied/ models, scored/ (one with a scalar head), and the task's rows."""
    folder = tmp_path_factory.mktemp("kit")
    for name, tied in (("tied", True), ("untied", False)):
        make_model(folder / name, tied)
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    scored = AutoModelForTokenClassification.from_pretrained(
        folder / "tied", num_labels=1, dtype=torch.float32
    )
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


def load(workspace: Path, *changes: str, overlays: Sequence[str] = ()):
    """The tiny recipe with overlays of configs/, merged and checked: (config, data)."""
    config, _ = load_config([str(CPU), str(RECIPE), *overlays], tiny(workspace, *changes))
    return config, prepare.prepare(config)


def command(workspace: Path, *arguments: str) -> list[str]:
    """The command line of a run of the tiny recipe."""
    return [
        sys.executable,
        str(ROOT / "algorithm.py"),
        "--config",
        str(CPU),
        "--config",
        str(RECIPE),
        *arguments,
    ]


def run(
    arguments: list[str], cwd: Path, timeout: int = 300, **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments, cwd=cwd, env=GIVEN | variables, capture_output=True, text=True, timeout=timeout
    )


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of an HTTP server of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def metrics_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def survivors(mark: str, patience: float = 20.0) -> list[str]:
    """Command lines of the processes that still carry `mark` in their environment after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("KIT_MARK") == mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


# --- what pytest does with every test -------------------------------------------------------------

# Files with tests that start a whole run of algorithm.py or install packages, besides those of the stack's group.
STARTS_COMMANDS = (
    "test_backends",
    "test_conftest",
    "test_docs",
    "test_draft_tokens",
    "test_extras_deleted",
    "test_gym_environments",
    "test_hf_rollout",
    "test_images",
    "test_isolation",
    "test_judge_servers",
    "test_prometheus",
    "test_readme",
    "test_scale",
    "test_servers",
    "test_trackers",
)
# Reasons for which a test may be skipped in CI: begin each with the words of the test's own reason.
SKIPS_IN_CI = ("needs root: ", "needs bubblewrap")


def timeout_s(item: pytest.Item) -> float:
    """Return how long a test may take, with its fixtures.

    The method is `thread` (pyproject.toml): that of signals would take SIGALRM and its only timer
    from signals.py. It ends the process of the tests, and reaper.py what that has started.
    """
    if item.get_closest_marker("soak"):
        return 3600.0
    is_slow = item.get_closest_marker("xdist_group") or item.path.stem in STARTS_COMMANDS
    return 600.0 if is_slow else 120.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI a test that is skipped has failed, unless the environment lacks something by design."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(SKIPS_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {reason}"
    return report


# --- the real thing, once ------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """One process has all that starts the stack, whole runs first, so that the session does not idle beside them; the
    other has the rest."""
    for item in items:
        if "stack" in item.fixturenames or item.path.stem in (
            "test_reliability",
            "test_cli",
            "test_signals",
        ):
            item.add_marker(pytest.mark.xdist_group("stack"))
        elif "chromium" in item.fixturenames:  # which two processes cannot fetch at once
            item.add_marker(pytest.mark.xdist_group("chromium"))
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(timeout_s(item)))
    items.sort(
        key=lambda item: (
            1 + ("stack" in item.fixturenames) if item.get_closest_marker("xdist_group") else 3
        )
    )
    return (yield)


@dataclass
class Stack:
    """One session of the stack, which tests share: Gym servers of every kind, Ray, an FSDP actor and vLLM."""

    config: DictConfig
    data: prepare.RunInputs
    workspace: Path
    workers: Any  # training.Workers
    servers: Any  # inference.Servers
    fresh: Path  # the actor's checkpoint from before any update

    @contextlib.contextmanager
    def trainer(
        self,
        name: str,
        *changes: str,
        overlays: Sequence[str] = (),
        workers: Any = None,
        gym: Any = None,
    ):
        """A Trainer of the tiny recipe with overlays of configs/ and changes, in runs/<name>, over this session's vLLM.

        workers: in the place of the session's, whose weights are set back to where they began, and whose loss becomes
        the recipe's. gym: in the place of the session's servers.
        """
        import inference
        import training
        from algorithm import Trainer
        from kit.config import user_functions
        from kit.runs.run_dir import Run

        config, data = load(
            self.workspace, f"trainer.experiment_name={name}", *SESSION, *changes, overlays=overlays
        )
        user_functions.register_in_verl(
            config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
        )
        if workers is None:
            workers = self.workers
            workers.actor.load_checkpoint(str(self.fresh))
        training.set_policy_loss(workers.actor, config)
        was = self.servers
        policy = make_sampler_context(config, was.context.client, data, 60.0)
        servers = inference.Servers(
            config, was.manager, workers.actor, policy, gym or was.gym, was.loop
        )
        state = {"command": "train", "step": 0, "batches": 0, "pass_rates": {}, "kl_coef": 0.0}
        shutil.rmtree(self.workspace / "runs" / name, ignore_errors=True)
        with Run(config) as run:
            trainer = Trainer(config, data, run, workers, servers, state)
            trainer.update_weights()
            with run.save_on_stop(trainer.save):
                yield trainer
        lines = metrics_of(run.folder) if (run.folder / "metrics.jsonl").is_file() else []
        logged = {name for line in lines for name in line}
        unknown = sorted(name for name in logged - {"step", "time"} if not find_metric(name))
        assert not unknown, (
            f"docs/reference.md is made of kit/extras/report/metric_docs.yaml, which does not know {unknown}"
        )


@contextlib.contextmanager
def with_verifiers(stack: Stack, *changes: str):
    """The functions of a recipe beside the session's servers."""
    from kit.extras.python_verifiers import verifier_pool
    from kit.gym.verifiers import VerifierRouter

    config, data = load(stack.workspace, *SESSION, *changes)
    pools = verifier_pool.make_pools(config, stack.workspace)
    gym = VerifierRouter(stack.servers.gym.gym, pools, data.tokenizer)
    try:
        yield gym
    finally:
        for pool in gym.pools.values():
            stack.servers.loop.run(pool.close())


SESSION = [  # the untied model (tied: runs/test_cli.py), logical GPUs for workers beside the session's, room to talk
    "actor_rollout_ref.model.path=untied",
    "ray_kwargs.ray_init.num_gpus=16",
    "ray_kwargs.ray_init.num_cpus=96",
    "actor_rollout_ref.actor.optim.lr=0.005",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.rollout.disable_log_stats=false",
    "gym.servers.counter.start.server=example_session_state_mgmt",
    f"gym.servers.counter.start.python={GYM_PYTHON}",
    f"gym.servers.blackjack.start.python={GYM_PYTHON}",
    f"gym.servers.shop.start={{path: {ROOT / 'templates' / 'verifier'}, python: {GYM_PYTHON}}}",
    f"gym.servers.office.start={{server: workplace_assistant, agent: simple_agent, python: {GYM_PYTHON}}}",
    f"gym.servers.judged.start={{server: abstention, python: {GYM_PYTHON}, config: {{judge_prompt_template: grade}}}}",
    "gym.judges.genrm_model=policy",
    "env.train_files=[{path: train.jsonl, server: reasoning_gym}]",
    "env.val_files=[{path: val.jsonl, server: reasoning_gym}]",
]


@contextlib.contextmanager
def session(workspace: Path, *changes: str) -> Iterator[Stack]:
    """A Stack over the models and rows of a folder, which becomes the working one."""
    import algorithm  # noqa: F401  (its own imports first)
    from kit.runs import launch
    from kit.runs.run_dir import Run

    os.chdir(workspace)
    reference = "actor_rollout_ref.actor.use_kl_loss=true"  # so that the actor holds one, for recipes with a KL term
    config, data = load(workspace, *SESSION, *changes, reference, "trainer.experiment_name=session")
    with Run(config) as run, contextlib.ExitStack() as exits:
        workers, servers = launch.start(run, data, exits)
        fresh = workspace / "fresh"
        workers.actor.save_checkpoint(str(fresh), None, 0, None)
        servers.sleep()
        servers.update_weights(0)
        yield Stack(config, data, workspace, workers, servers, fresh)


@pytest.fixture(scope="session")
def stack(workspace) -> Iterator[Stack]:
    """The real thing, once."""
    with session(workspace) as running:
        yield running


@pytest.fixture(scope="session")
def values(stack):
    """A critic and a reward model beside the session's actor; the critic's first checkpoint is in fresh_critic."""
    from kit.runs.workers import optional_roles, start_roles

    changes = [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=0.001",
        "reward.reward_model.enable=true",
    ]
    changes += [f"reward.reward_model.model_path={stack.workspace / 'scored'}", "env.val_files=[]"]
    config, _ = load(stack.workspace, *SESSION, *changes)
    alone = start_roles(config, optional_roles(config))
    alone.critic.save_checkpoint(str(stack.workspace / "fresh_critic"), None, 0, None)
    yield alone
    drop(alone)


def with_values(stack, values, critic=True, reward_model=False):
    """The session's actor and those of `values`, as they were in the beginning."""
    import training

    stack.workers.actor.load_checkpoint(str(stack.fresh))
    values.critic.load_checkpoint(str(stack.workspace / "fresh_critic"))
    return training.Workers(
        stack.workers.actor,
        values.critic if critic else None,
        values.reward_model if reward_model else None,
    )


def drop(workers) -> None:
    """End worker groups that a test has started, and free their logical CPUs and GPUs."""
    import ray

    for group in filter(None, workers):
        for worker in group.workers:
            ray.kill(worker)
        pool = getattr(group, "resource_pool", None)  # groups that share processes have none
        for placement in pool.pgs if pool else ():
            ray.util.remove_placement_group(placement)
