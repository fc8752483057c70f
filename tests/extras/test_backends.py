"""Engines and backends other than FSDP with vLLM: training, dry runs, options that are refused."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kit.chat import responses as chat
from kit.chat import tool_calls
from kit.errors import ConfigError
from kit.recipe.load import read_source
from kit.recipe.recipe import find_differences
from kit.run import prepare, summary
from tests.helpers.models import make_mixture
from tests.helpers.recipes import GYM_PYTHON, command, metrics_of, run, tiny
from tests.helpers.rollouts import CHATML, STOPS, bytes_tokenizer, call, context_of


@pytest.mark.soak
def test_a_mixture_of_experts_learns(workspace):
    """vLLM packs the weights of the experts again after each sync, and samples from them."""
    path = make_mixture(workspace / "mixture", workspace / "untied")
    changes = [
        f"actor_rollout_ref.model.path={path}",
        "trainer.experiment_name=mixture",
        "trainer.save_freq=-1",
    ]
    done = run(
        command(workspace, *tiny(workspace, *changes, "trainer.total_training_steps=30")), workspace
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [m for m in metrics_of(workspace / "runs" / "mixture") if "actor/grad_norm" in m]
    print("rewards", [round(m["rollout/reward/mean"], 2) for m in steps])
    assert len(steps) == 30
    assert all(m["training/rollout_probs_diff_max"] < 1e-4 for m in steps)
    assert steps[-1]["rollout/reward/mean"] > steps[0]["rollout/reward/mean"] + 0.04


# --- dry runs: these backends need GPUs ----------------------------------------------------------

DEVICES = {  # {recipe of configs/: the devices in the summary}
    "megatron": "8 cuda of megatron, 8 vLLM replicas",
    "sglang": "8 cuda, 8 SGLang replicas",
    "fp8": "8 cuda, 8 vLLM replicas",
    "drafts": "8 cuda, 8 vLLM replicas",
}
SMALL = [
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.max_prompt_length=32",
]


@pytest.fixture(scope="module")
def wide(workspace) -> Path:
    """The tiny model, with larger sizes in its config, which fp8 and Megatron can divide."""
    folder = shutil.copytree(workspace / "tied", workspace / "wide")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 256, "num_key_value_heads": 2}
    config |= {"intermediate_size": 512, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def summarize(workspace, *overrides: str, changes: Sequence[str] = ()) -> str:
    """Return the dry run's summary of configs/math.yaml and `overrides`, with the tiny rows."""
    model = f"actor_rollout_ref.model.path={workspace / 'wide'}"
    gym = f"gym.servers.math_with_judge.start.python={GYM_PYTHON}"
    rows = [
        f"env.{kind}_files=[{{path: {workspace / kind}.jsonl, server: reasoning_gym}}]"
        for kind in ("train", "val")
    ]
    keys = [*tiny(workspace, model, *SMALL), *rows, gym, "data.max_response_length=1024", *changes]
    recipe, inputs, _ = prepare.prepare(read_source(["math", *overrides], keys))
    assert find_differences(recipe)
    return summary.summarize(recipe, inputs)


@pytest.mark.parametrize("name", DEVICES)
def test_verl_accepts_the_recipes_for_gpus(workspace, wide, name):
    assert f"devices     {DEVICES[name]}" in summarize(workspace, name)


ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ([], ["model_engine=torchtitan"], "is not one of dp, megatron"),
        (
            ["megatron", "ppo"],
            ["critic.megatron.tensor_model_parallel_size=4"],
            "Set them to the same values",
        ),
        (["megatron"], [f"{ACTOR}.megatron.context_parallel_size=8"], "8 GPUs must be a multiple"),
        ([], [f"{ROLLOUT}.enable_rollout_routing_replay=true"], "replays expert routing only with"),
        (["sglang", "cpu"], [], "sglang needs GPUs"),
        (["sglang"], [f"{ROLLOUT}.enable_prefix_caching=false"], "is not read with"),
        (
            [],
            [f"{ROLLOUT}.engine_kwargs.sglang.x=1"],
            "sglang needs actor_rollout_ref.rollout.name",
        ),
        (["fp8", "cpu"], [], "quantization=fp8 on a CPU"),
        (
            ["drafts"],
            [f"{ROLLOUT}.engine_kwargs.vllm.speculative_config.method=eagle"],
            "gets no weight updates",
        ),
        (["monitoring"], [f"{ROLLOUT}.disable_log_stats=true"], "disable_log_stats=false"),
    ],
)
def test_options_that_do_not_work_together_are_refused(
    workspace, wide, overrides, changes, message, monkeypatch
):
    monkeypatch.chdir(workspace)
    with pytest.raises(ConfigError, match=re.escape(message)):
        print(summarize(workspace, *overrides, changes=changes))


def test_verl_parses_tool_calls_if_vllm_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    parameters = {"properties": {"a": {"$ref": "b"}, "b": True}}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]

    def parse(text: str):
        ids = tokenizer.encode(text, add_special_tokens=False)
        return asyncio.run(chat.parse_response(context_of(None, tokenizer).template, ids, tools))

    broken = "<tool_call>{broken</tool_call>"
    assert (parse(broken).text, parse(broken).calls) == (broken, [])
    assert [c["name"] for c in parse("<think>so</think>" + call()).calls] == ["look_up"]
    formats = tool_calls.list_tool_formats()
    tool_calls.check_tool_format("qwen3_coder", formats)
    with pytest.raises(ConfigError, match="format=mistral: there is no such tool parser"):
        tool_calls.check_tool_format("mistral", formats)
