"""The memory estimate: parameters of models, sizes computed by hand, stages that do not fit."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from extras import preflight
from extras.preflight import memory
from extras.preflight.memory import GIB
from tests.helpers import nodes
from tests.helpers.nodes import QWEN, make_recipe, qwen
from tests.helpers.recipes import ROOT

TINY = {"vocab_size": 40, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}


def estimate(model: str, *changes: str):
    """Estimate the memory of each stage of training on GPUs of 80 GiB."""
    return memory.estimate_stages(make_recipe(model, *changes), qwen(model), 80 * GIB)


def find_shortages(recipe, model) -> list[str]:
    """List the warnings about memory."""
    return [*memory.find_large_stages(recipe, model), *memory.check_cache(recipe, model)]


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_of_a_real_model_are_counted(tied):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**TINY, **heads, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert memory.count_parameters(config).model == model.num_parameters()
    of_first_layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert memory.count_parameters(config).layer == of_first_layer


def test_the_parameters_of_published_models_are_counted():
    for name, (published, _) in QWEN.items():
        assert memory.count_parameters(qwen(name)).model == pytest.approx(published, rel=0.01)


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


def test_the_kv_cache_agrees_with_sizes_computed_by_hand():
    recipe = make_recipe("1.5B", command="evaluate")
    # 2 tensors (key, value) x 28 layers x 2 heads x 128 values x 2 bytes
    assert memory.cache_bytes_per_token(recipe, qwen("1.5B")) == 2 * 28 * 2 * 128 * 2
    lines = memory.describe(recipe, qwen("1.5B"))
    cache = 0.6 * 80 * GIB - 2 * memory.count_parameters(qwen("1.5B")).model
    cache -= memory.VLLM_WORKSPACE
    episodes = f"{int(cache / 28672 / 1536)} concurrent episodes of 1536 tokens"
    assert lines[-1] == f"KV cache    28 KiB a token: {episodes}"
    assert not find_shortages(recipe, qwen("1.5B"))


def test_weights_and_optimizer_agree_with_sizes_computed_by_hand():
    parts = estimate("1.5B")["update"]
    size = memory.count_parameters(qwen("1.5B")).model
    assert (parts["weights"], parts["optimizer"]) == (4 * size, 8 * size)
    assert parts["logits"] == 3 * 24576 * 151936 * 2
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
    assert set(estimate("1.5B")) == {"generate", "log-probs", "update", "sync"}
    with_critic = estimate("1.5B", "algorithm.adv_estimator=gae")
    assert with_critic["update"]["critic"] == 12 * size and "logits" not in with_critic["critic"]


def test_each_stage_that_does_not_fit_is_a_line_with_its_keys(monkeypatch):
    monkeypatch.setattr(memory, "find_device", lambda _: memory.Device(80 * GIB, ""))
    small = make_recipe("1.5B")
    assert not find_shortages(small, qwen("1.5B"))
    assert len(memory.describe(small, qwen("1.5B"))) == 6
    shortages = find_shortages(make_recipe("32B"), qwen("32B"))
    stages = [text.split()[0] for text in shortages[:4]]
    assert stages == ["generate", "log-probs", "update", "sync"] and len(shortages) == 5
    for stage, text in zip(stages, shortages, strict=False):
        assert memory.KEYS[stage] in text and "trainer.n_gpus_per_node" in text
    assert shortages[4].startswith("The KV cache has room for 0 episodes of 1536 tokens")
    engine = "actor_rollout_ref.actor.fsdp_config"
    changes = [  # eight GPUs, and states offloaded to the CPU
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        f"{engine}.param_offload=true",
        f"{engine}.optimizer_offload=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    ]
    assert not find_shortages(make_recipe("32B", *changes), qwen("32B"))


def test_a_model_with_other_configuration_keys_is_not_estimated():
    recipe = make_recipe("1.5B")
    experts = Qwen3MoeConfig(**TINY, num_attention_heads=4, num_experts=8)
    others = {
        "no intermediate_size, num_hidden_layers": SimpleNamespace(hidden_size=8),
        "a mixture of experts": experts,
    }
    for reason, other in others.items():
        (line,) = memory.describe(recipe, other)
        assert reason in line and not find_shortages(recipe, other)
        assert not list(memory.find_excess(recipe, other))


@pytest.mark.parametrize("recipes", [["math"], ["math", "ppo"], ["math", "ahead"]])
def test_the_sizes_of_math_yaml_fit_on_one_h100(recipes):
    """The sizes are estimates, so a tenth of the GPU's 79.6 GiB must stay free."""
    model = qwen("0.5B")  # the model of configs/math.yaml
    recipe = make_recipe(model, recipes=recipes)
    stages = memory.estimate_stages(recipe, model, int(79.6 * GIB))
    assert max(sum(parts.values()) for parts in stages.values()) < 0.9 * 79.6 * GIB


def test_a_weight_sync_over_nccl_takes_two_buckets_on_each_gpu():
    """verl sends one bucket while it fills the other. With gloo and CUDA IPC there is one."""
    bucket = 2048 * 2**20
    shared = estimate("1.5B")["sync"]["bucket"]
    separate = "actor_rollout_ref.rollout.nnodes=1"
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    over_nccl = estimate("1.5B", separate, f"{key}=nccl")["sync"]["bucket"]
    over_gloo = estimate("1.5B", separate, f"{key}=gloo")["sync"]["bucket"]
    assert (shared, over_nccl, over_gloo) == (bucket, 2 * bucket, bucket)


# --- readings on a GPU ---------------------------------------------------------------------------

# One NVIDIA H100 80GB HBM3 (81,559 MiB), driver 580.159.04, torch 2.11.0, vLLM 0.24.0, 2026-11-26.
# `generate`, `log-probs` and `update`: the highest reading of nvidia-smi in the stage, in GiB.
# cache, tokens: "Available KV cache memory" and "GPU KV cache size" in vLLM's log. `sync` has no
# reading that compares: the KV cache woke in the same tenth of a second.
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
    "Qwen2, 402M": (QWEN2, {"generate": 46.57, "log-probs": 8.65, "update": 11.07}, 38.16, 3334144),
    "Qwen3, 176M": (QWEN3, {"generate": 43.70, "log-probs": 6.01, "update": 7.42}, 38.75, 1269824),
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
    ("changes", "warned"),
    [
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"], True),
        (["data.max_response_length=16384"], True),
        (["data.max_response_length=16384", "actor_rollout_ref.rollout.max_num_seqs=64"], False),
    ],
)
def test_a_kv_cache_without_room_for_a_replicas_episodes_is_a_warning(changes, warned):
    recipe = make_recipe("0.5B", *changes)
    lines = find_shortages(recipe, qwen("0.5B"))
    assert [line.startswith("The KV cache has room for") for line in lines] == [True] * warned
    assert not find_shortages(make_recipe("0.5B", *changes, command="evaluate"), qwen("0.5B"))


def test_offloading_lowers_the_stages_but_not_the_update():
    engine = "actor_rollout_ref.actor.fsdp_config"
    offloads = [f"{engine}.param_offload=true", f"{engine}.optimizer_offload=true"]
    here = estimate("1.5B")
    offloaded = estimate("1.5B", *offloads)
    assert offloaded["update"] == here["update"]
    states = 12 * memory.count_parameters(qwen("1.5B")).model
    for stage in ("generate", "sync"):
        saved = sum(here[stage].values()) - sum(offloaded[stage].values())
        assert saved == pytest.approx(states)


# --- far too large -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "changes", "note", "is_refused"),
    [
        (0.99, [], "", False),
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
    found = preflight.Preflight(recipe.verl, command).check_model(recipe, hf_config)
    problems = [problem for problem in found if "update needs" in problem]
    assert len(problems) == is_refused
    assert all("trainer.allow_memory_over_estimate=true" in problem for problem in problems)
    shortages = find_shortages(recipe, model)
    assert any(line.startswith("update needs") for line in shortages) is (factor > 1)


# --- Qwen3-4B on one GPU -------------------------------------------------------------------------

QWEN3_4B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


@pytest.mark.parametrize(
    ("recipes", "refused"),
    [
        (["math", "one_gpu", "math_4b"], []),
        (["math", "one_gpu", "lora"], []),
        (["math", "one_gpu"], ["generate"]),
    ],
)
def test_qwen3_4b_fits_on_one_gpu_with_its_recipe(recipes, refused, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", nodes.write_nvidia_smi(tmp_path)["PATH"])
    model = AutoConfig.from_pretrained(tmp_path)
    assert memory.count_parameters(model).model == pytest.approx(4.02e9, rel=0.01)
    recipe = make_recipe(model, recipes=recipes)
    lines = memory.describe(recipe, model)
    assert lines[0].endswith("a GPU has 79.6 GiB")
    problems = list(memory.find_excess(recipe, model))
    assert [problem.split()[0] for problem in problems][: len(refused)] == refused
    assert bool(problems) is bool(refused)
    if recipes[-1] == "math_4b":
        assert not find_shortages(recipe, model)
        stages = {line.split()[0]: float(line.split()[1].rstrip(":")) for line in lines[1:-1]}
        assert max(stages.values()) < 0.95 * 79.6
        text = (ROOT / "configs" / "math_4b.yaml").read_text().replace("\n# ", " ")
        sizes = [f"{stage} {size}" for stage, size in stages.items()]
        assert ", ".join(sizes).replace(", log", " GiB, log", 1) in text
        assert f"room for {lines[-1].split(': ')[1].split()[0]} responses" in text
