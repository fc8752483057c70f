"""Checks before a run: memory, the node, flash-attn, and the scripts of `make math`."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from extras import preflight
from extras.preflight import attention, fit, gpus, memory, node
from extras.preflight.memory import GIB
from kit.engine import head_in_blocks
from kit.engine.head_in_blocks import HeadInBlocks
from kit.recipe.load import read_source
from kit.recipe.recipe import Recipe
from kit.recipe.settings import make_settings
from tests.helpers import nodes
from tests.helpers.nodes import make_recipe, qwen
from tests.helpers.recipes import ROOT

TINY = {"vocab_size": 40, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
FOLDER = ROOT / "extras" / "preflight"
SUBSTITUTE = attention.SUBSTITUTE_MODULE


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Yield a function that puts an `nvidia-smi` with these GPUs on the PATH."""

    def install(**settings) -> None:
        monkeypatch.setenv("PATH", nodes.write_nvidia_smi(tmp_path, **settings)["PATH"])
        gpus.read_gpus.cache_clear()

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield install
    gpus.read_gpus.cache_clear()


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(attention, "is_installed", lambda name: name == SUBSTITUTE)


# --- memory --------------------------------------------------------------------------------------


def estimate(model: str, *changes: str):
    """Estimate the memory of each stage of training on GPUs of 80 GiB."""
    return memory.estimate_stages(make_recipe(model, *changes), qwen(model), 80 * GIB)


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_of_a_real_model_are_counted(tied):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**TINY, **heads, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert memory.count_parameters(config) == model.num_parameters()
    of_first_layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert memory.count_layer(config) == of_first_layer


@pytest.mark.parametrize(("kv_heads", "dtype"), [(4, torch.bfloat16), (2, torch.float32)])
def test_activations_are_the_tensors_that_autograd_keeps(kv_heads, dtype):
    config = LlamaConfig(**TINY, num_attention_heads=4, num_key_value_heads=kv_heads)
    model = LlamaForCausalLM(config).to(dtype).model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = 64
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(tokens)[None] % 40, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimated = 3 * tokens * memory.activation_bytes(config, dtype.itemsize)
    assert estimated == pytest.approx(measured, rel=0.1)  # the estimate omits the last norm


def test_weights_and_optimizer_agree_with_sizes_computed_by_hand():
    parts = estimate("1.5B")["update"]
    size = memory.count_parameters(qwen("1.5B"))
    assert (parts["weights"], parts["optimizer"]) == (4 * size, 8 * size)
    # blocks, hidden states of 24,576 tokens, the head's gradient
    assert parts["logits"] == 10 * 2**25 + 10 * 24576 * 1536 + 2 * 151936 * 1536
    fused = "actor_rollout_ref.model.use_fused_kernels"
    whole = estimate("1.5B", f"{fused}=false")["update"]
    assert whole["logits"] == 3 * 24576 * 151936 * 2
    sharded = estimate("1.5B", "trainer.n_gpus_per_node=8")["update"]
    assert (sharded["weights"], sharded["optimizer"]) == (4 * size / 8, 8 * size / 8)
    assert (parts["gradients"], sharded["gradients"]) == (4 * size, 4 * size / 8)
    engine = "actor_rollout_ref.actor.fsdp_config"
    offloads = [f"{engine}.param_offload=true", f"{engine}.optimizer_offload=true"]
    offloaded = estimate("1.5B", *offloads)
    assert not {"weights", "optimizer"} & offloaded["generate"].keys()
    assert offloaded["update"] == parts
    adapter = estimate("1.5B", "actor_rollout_ref.model.lora_rank=16")["update"]
    assert adapter["weights"] == parts["weights"] and adapter["optimizer"] < parts["optimizer"] / 50
    assert parts["logits"] - adapter["logits"] == 2 * 151936 * 1536
    assert set(estimate("1.5B")) == {"generate", "update"}
    with_critic = estimate("1.5B", "algorithm.adv_estimator=gae")
    assert with_critic["update"]["critic"] == 12 * size and "logits" not in with_critic["critic"]


def test_the_head_of_151936_words_takes_1_gb_at_32768_tokens():
    recipe = make_recipe("0.5B")
    model = SimpleNamespace(vocab_size=151936, hidden_size=1024)  # Qwen3-0.6B
    assert memory.estimate_logits(recipe, model, 32768, 2) == pytest.approx(0.98e9, rel=0.01)
    large = SimpleNamespace(vocab_size=151936, hidden_size=2560)  # Qwen3-4B
    assert memory.estimate_logits(recipe, large, 32768, 2) < 2e9


def measure_peak(function: Callable[[], object]) -> int:
    """The most bytes that the tensors of a function take together."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_the_head_take_the_estimated_memory(dtype, monkeypatch):
    sizes = SimpleNamespace(vocab_size=4096, hidden_size=32)
    for module in (memory, head_in_blocks):
        monkeypatch.setattr(module, "BLOCK_SIZE", 2**17)
    tokens = 512
    hidden = torch.randn(tokens, sizes.hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(sizes.vocab_size, sizes.hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.arange(tokens)

    def compute() -> None:
        log_probs, entropy = HeadInBlocks.apply(hidden, weight, labels, 0.7, 512)
        (log_probs.sum() + entropy.sum()).backward()

    compute()
    hidden.grad = weight.grad = None
    measured = measure_peak(compute)
    estimated = memory.estimate_logits(make_recipe("0.5B"), sizes, tokens, dtype.itemsize)
    assert 0.6 * estimated < measured < 1.05 * estimated, (measured, estimated)
    assert measured < 12 * tokens * sizes.vocab_size / 4  # of four blocks


def test_a_model_with_other_configuration_keys_is_not_estimated():
    recipe = make_recipe("1.5B")
    experts = Qwen3MoeConfig(**TINY, num_attention_heads=4, num_experts=8)
    others = {
        "no intermediate_size, num_hidden_layers": SimpleNamespace(hidden_size=8),
        "a mixture of experts": experts,
    }
    for reason, other in others.items():
        (line,) = memory.describe(recipe, other)
        assert reason in line
        assert not list(fit.find_excess(recipe, other))


# One NVIDIA H100 80GB HBM3 (81,559 MiB), driver 580.159.04, torch 2.11.0, vLLM 0.24.0, 2026-11-26.
# `generate` and `update`: the highest reading of nvidia-smi in the stage, in GiB.
# cache, tokens: "Available KV cache memory" and "GPU KV cache size" in vLLM's log.
H100_MIB = 81559
COMMON: dict[str, Any] = {"vocab_size": 49152, "tie_word_embeddings": True}
QWEN2 = Qwen2Config(
    **COMMON,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
)
QWEN3 = Qwen3Config(
    **COMMON,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
READINGS = {
    "Qwen2, 402M": (QWEN2, {"generate": 46.57, "update": 11.07}, 38.16, 3334144),
    "Qwen3, 176M": (QWEN3, {"generate": 43.70, "update": 7.42}, 38.75, 1269824),
}
MEASURED_SIZES = [
    "data.train_batch_size=32",
    "data.max_prompt_length=128",
    "data.max_response_length=128",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "actor_rollout_ref.rollout.max_num_seqs=256",
    "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2,4,8,16,32,64,128,256]",
    "actor_rollout_ref.model.use_fused_kernels=false",  # the head in blocks was not measured
]


@pytest.mark.parametrize("name", READINGS)
def test_the_estimates_agree_with_readings_on_one_h100(name):
    model, readings, cache, tokens = READINGS[name]
    recipe = make_recipe(model, *MEASURED_SIZES)
    stages = memory.estimate_stages(recipe, model, H100_MIB * 2**20)
    for stage, reading in readings.items():
        estimated = sum(stages[stage].values()) / GIB
        assert reading - 0.2 < estimated < reading + 0.6, stage
    estimated_cache = stages["generate"]["KV cache"]
    assert estimated_cache / GIB == pytest.approx(cache, rel=0.01)
    token = memory.cache_bytes_per_token(recipe, model)
    assert estimated_cache / token == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"], 1),
        (["data.max_response_length=16384"], 1),
        (["data.max_response_length=16384", "actor_rollout_ref.rollout.max_num_seqs=64"], 0),
    ],
)
def test_a_kv_cache_without_room_for_a_replicas_episodes_is_a_warning(changes, count, monkeypatch):
    monkeypatch.setattr(memory, "find_device", lambda _: memory.Device(80 * GIB, ""))
    lines = list(memory.check_cache(make_recipe("0.5B", *changes), qwen("0.5B")))
    assert len(lines) == count
    assert all(line.startswith("The KV cache has room for") for line in lines)


@pytest.mark.parametrize(
    ("factor", "changes", "note", "is_refused"),
    [
        (1.14, [], "", False),
        (1.16, [], "", True),
        (3.0, ["trainer.allow_memory_over_estimate=true"], "", False),
        (3.0, [], ", assumed: this node has no GPU", False),
        (3.0, ["trainer.device=cpu"], "", False),
    ],
)
def test_a_stage_far_over_the_gpus_memory_is_refused(
    factor, changes, note, is_refused, monkeypatch
):
    command = "sft" if is_refused else "train"
    recipe = make_recipe("1.5B", *changes, command=command)
    model = qwen("1.5B")
    needed = sum(memory.estimate_stages(recipe, model, 80 * GIB)["update"].values())
    fraction = "actor_rollout_ref.rollout.gpu_memory_utilization=0.01"  # only `update` is large
    recipe = make_recipe("1.5B", fraction, *changes, command=command)
    device = memory.Device(int(needed / factor), note)
    monkeypatch.setattr(memory, "find_device", lambda _: device)
    hf_config = SimpleNamespace(get_text_config=lambda: model, model_type="qwen2")
    found = preflight.Preflight(recipe).check_model(recipe, hf_config)
    problems = [problem for problem in found if "update needs" in problem]
    assert len(problems) == is_refused
    assert all("trainer.allow_memory_over_estimate=true" in problem for problem in problems)
    shortages = fit.find_large_stages(recipe, model)
    assert any(line.startswith("update needs") for line in shortages)


# --- the node ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("visible", "count"), [(None, 8), ("0,1", 2), ("", 0)])
def test_only_visible_gpus_are_counted_and_mig_parts_are_not(smi, monkeypatch, visible, count):
    smi(gpus=8, mig_parts=7)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(gpus.list_gpus()) == len(gpus.query("memory.total")) == count


def test_little_disk_and_shared_memory_are_warnings_with_a_fix(monkeypatch, tmp_path):
    recipe = make_recipe(
        "1.5B",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={tmp_path}/new",
        "trainer.save_freq=10",
    )
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=500 * GIB))
    assert list(node.find_problems(recipe, qwen("1.5B"))) == []

    def report_little_space(folder):
        free = 2**26 if str(folder) == "/dev/shm" else 50 * GIB
        return SimpleNamespace(free=free)

    monkeypatch.setattr(node.shutil, "disk_usage", report_little_space)
    disk, shared_memory = node.find_problems(recipe, qwen("1.5B"))
    # Two checkpoints stay while the third is written. Each has weights and two moments in fp32.
    size = 3 * 12 * memory.count_parameters(qwen("1.5B")) / GIB
    assert disk.startswith(f"3 checkpoints take {size:.1f} GiB, and {tmp_path}/new has 50.0. Lower")
    assert shared_memory.startswith("/dev/shm has 0.06 GiB free")


# --- without flash-attn --------------------------------------------------------------------------

ATTENTION = "actor_rollout_ref.model.override_config"


def get_attention(recipe: Recipe) -> str | None:
    return recipe.model.override_config.get("attn_implementation")


def list_modules(recipe: Recipe) -> list[str]:
    """List the modules that verl imports in each process."""
    variables = recipe.ray_kwargs.ray_init["runtime_env"]["env_vars"]
    return variables["VERL_USE_EXTERNAL_MODULES"].split(",")


def test_torch_replaces_flash_attn_for_all_models(smi, no_packages):
    smi(gpus=1)
    recipe = make_recipe("1.5B", "algorithm.adv_estimator=gae", "reward.reward_model.enable=true")
    chosen = [m.override_config["attn_implementation"] for m in (recipe.model, recipe.critic.model)]
    assert chosen == ["torch_varlen"] * 2
    assert list_modules(recipe) == ["kit.engine.verl_patches", SUBSTITUTE]
    assert not list(attention.check_model(recipe, qwen("1.5B")))
    (line,) = attention.describe(recipe)
    assert line.startswith("attention   torch_varlen: flash-attn is not installed")


@pytest.mark.parametrize(("window", "name"), [(9999, "torch_varlen"), (100, "sdpa")])
def test_a_window_that_is_shorter_than_an_episode_needs_sdpa(smi, no_packages, window, name):
    """Torch's kernel would ignore it, and the rows of the trial of models are shorter."""
    smi(gpus=1)
    model = MistralConfig(sliding_window=window)
    assert get_attention(make_recipe(model)) == name


@pytest.mark.parametrize(
    ("model", "size", "needed"),
    [
        (qwen("1.5B"), 2, "ulysses_sequence_parallel_size=2"),
        (Qwen2_5_VLConfig(), 1, "model type qwen2_5_vl"),
    ],
    ids=["ulysses", "qwen2_5_vl"],
)
def test_what_verl_computes_only_with_flash_attn_is_one_error(
    smi, no_packages, model, size, needed
):
    smi(gpus=2)
    ulysses = f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}"
    source = read_source(["math"], ["trainer.n_gpus_per_node=2", ulysses])
    (problem,) = attention.check_model(make_settings(source, "train"), model)
    assert needed in problem
    assert not list(attention.check_model(make_settings(source, "rollout"), model))


def test_another_node_may_have_flash_attn(no_packages, monkeypatch, tmp_path):
    """A dry run on a machine without GPUs changes no attention and refuses nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    recipe = make_recipe("1.5B", "algorithm.adv_estimator=gae", ulysses)
    assert get_attention(recipe) is None
    assert not list(attention.check_model(recipe, qwen("1.5B")))
    assert list_modules(recipe) == ["kit.engine.verl_patches"]
    named = make_recipe("1.5B", f"+{ATTENTION}.attn_implementation=torch_varlen")
    assert SUBSTITUTE in list_modules(named)


@pytest.mark.parametrize("package", ["flash_attn", "kernels"])
def test_flash_attn_is_used_if_it_is_installed(smi, monkeypatch, package):
    """If transformers downloads the kernel, log-probs still need a substitute."""
    smi(gpus=1)
    monkeypatch.setattr(attention, "is_installed", lambda name: name in (package, SUBSTITUTE))
    recipe = make_recipe("1.5B", "algorithm.adv_estimator=gae")
    assert get_attention(recipe) is None
    assert not list(attention.check_model(recipe, qwen("1.5B")))
    is_loaded = SUBSTITUTE in list_modules(recipe)
    assert is_loaded == (package == "kernels")


# --- the scripts of `make math` ------------------------------------------------------------------


def write_program(folder: Path, name: str, body: str) -> None:
    """Write a shell script that stands in for a program."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def run_script(name: str, folder: Path, *arguments: str, **variables: str):
    """Run a script with the programs of a folder first on the PATH."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    return subprocess.run(
        ["bash", str(FOLDER / name), *arguments],
        env={**environment, "PATH": path, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def write_free_space(folder: Path, disk_gib: int, shared_gib: int) -> None:
    """Write a `df` that reports this free space in a folder and in /dev/shm."""
    write_program(
        folder,
        "df",
        f"gib={disk_gib}; if [ ${{!#}} = /dev/shm ]; then gib={shared_gib}; fi\n"
        "echo Avail; echo $((gib * 1024 ** 3))",
    )


@pytest.fixture
def gpu_node(tmp_path) -> Path:
    """A folder with stand-ins for the programs of a node without problems."""
    nodes.write_nvidia_smi(tmp_path, gpus=8)
    write_free_space(tmp_path, disk_gib=100, shared_gib=16)
    write_program(tmp_path, "cc", "exit 0")
    return tmp_path


def test_each_problem_of_a_node_is_one_line(gpu_node):
    done = run_script("check_gpu_node.sh", gpu_node)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    nodes.write_nvidia_smi(
        gpu_node, driver_version="550.54.14", memory_total="8188", compute_cap="7.5"
    )
    write_free_space(gpu_node, disk_gib=7, shared_gib=0)
    write_program(gpu_node, "cc", "exit 1")
    done = run_script("check_gpu_node.sh", gpu_node)
    beginnings = [
        "NVIDIA driver 550.54.14 is too old for CUDA 13. Install",
        "a GPU has 7 GiB, and Qwen2.5-0.5B needs 15 (docs/hardware.md). Train a smaller model. Run",
        "a GPU has compute capability 7.5, and bfloat16 needs 8.0. Use a newer GPU",
        "no C compiler that works",
        f"7 GiB are free in {gpu_node}, of 40.",
        "0 GiB are free in /dev/shm, of 1.",
    ]
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and len(lines) == len(beginnings) and not done.stderr
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"missing: {beginning}")
    assert run_script("check_gpu_node.sh", gpu_node, FORCE="1").returncode == 0


@pytest.mark.parametrize(("visible", "status"), [("0,GPU-00000001", 0), ("GPU-1234", 1)])
def test_a_node_is_checked_with_names_of_gpus(gpu_node, visible, status):
    done = run_script("check_gpu_node.sh", gpu_node, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == status and len(done.stdout.splitlines()) == status, done.stdout


def test_flash_attn_is_installed_from_a_wheel_for_these_versions(gpu_node):
    (gpu_node / "venv" / "bin").mkdir(parents=True)
    write_program(gpu_node / "venv" / "bin", "python", "exit 1")
    write_program(gpu_node, "uv", 'echo "$@" >> calls')
    done = run_script("flash_attn.sh", gpu_node, "./uv", "venv", "")
    assert (done.returncode, done.stdout) == (0, "")
    (call,) = (gpu_node / "calls").read_text().splitlines()
    assert call.endswith("flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl") and "--no-deps" in call
