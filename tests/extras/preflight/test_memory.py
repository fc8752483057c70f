"""The memory estimate: parameters of models, sizes computed by hand, stages that do not fit."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kit.config.load import load_config
from kit.extras.preflight import memory
from kit.extras.preflight.memory import GIB
from kit.runs import prepare

TINY = {"vocab_size": 40, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
# Qwen2.5: {model: (published number of parameters, sizes of its config.json)}
QWEN = {
    "0.5B": (0.494e9, (896, 4864, 24, 14, 2, 151936, True)),
    "1.5B": (1.54e9, (1536, 8960, 28, 12, 2, 151936, True)),
    "32B": (32.5e9, (5120, 27648, 64, 40, 8, 152064, False)),
}
CONFIG_KEYS = (  # of the sizes in QWEN
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


def qwen(name: str) -> Qwen2Config:
    """The configuration of a model of QWEN."""
    _, sizes = QWEN[name]
    return Qwen2Config(**dict(zip(CONFIG_KEYS, sizes, strict=True)))


def make_config(model: str, *changes: str):
    """Load configs/math.yaml for one GPU and a model of QWEN, and set the sizes of a run."""
    config, _ = load_config(["math"], ["trainer.n_gpus_per_node=1", *changes])
    prepare.set_sizes(config, qwen(model))
    return config


def estimate(model: str, *changes: str):
    """Estimate the memory of each stage of training on GPUs of 80 GiB."""
    return memory.estimate_stages(make_config(model, *changes), qwen(model), 80 * GIB, "train")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "heads", [{"num_attention_heads": 4}, {"num_attention_heads": 4, "num_key_value_heads": 2}]
)
@pytest.mark.parametrize("head", [{}, {"head_dim": 64}])
def test_the_parameters_of_a_real_model_are_counted(tied, heads, head):
    config = LlamaConfig(**TINY, **heads, **head, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert memory.count_parameters(config).model == model.num_parameters()
    of_first_layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert memory.count_parameters(config).layer == of_first_layer


def test_the_parameters_of_experts_and_of_published_models_are_counted():
    config = Qwen3MoeConfig(**TINY, num_attention_heads=4, moe_intermediate_size=64, num_experts=8)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    # The estimate omits routers, and the norms of queries and keys.
    assert memory.count_parameters(config).model == pytest.approx(model.num_parameters(), rel=0.02)
    for name, (published, _) in QWEN.items():
        assert memory.count_parameters(qwen(name)).model == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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
    # 2 tensors (key, value) x 28 layers x 2 heads x 128 values x 2 bytes
    assert memory.kv_bytes_per_token(qwen("1.5B"), 2) == 2 * 28 * 2 * 128 * 2
    config = make_config("1.5B")
    lines = memory.describe(config, qwen("1.5B"), "evaluate")
    cache = 0.6 * 80 * GIB - 2 * memory.count_parameters(qwen("1.5B")).model
    episodes = f"{int(cache / 28672 / 1536)} concurrent episodes of 1536 tokens"
    assert lines[-1] == f"KV cache    28 KiB a token: {episodes}"
    assert not memory.find_shortages(config, qwen("1.5B"), "evaluate")


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("changes", [[], ["algorithm.adv_estimator=gae"]], ids=["grpo", "ppo"])
def test_the_gpu_recipe_fits_and_the_kv_cache_holds_all_concurrent_episodes(gpus, changes):
    config = make_config("0.5B", f"trainer.n_gpus_per_node={gpus}", *changes)
    assert not memory.find_shortages(config, qwen("0.5B"), "train")
    episode = config.data.max_prompt_length + config.data.max_response_length
    cache = 0.6 * 80 * GIB - 2 * memory.count_parameters(qwen("0.5B")).model
    needed = config.actor_rollout_ref.rollout.max_num_seqs * episode
    assert needed * memory.kv_bytes_per_token(qwen("0.5B"), 2) < cache


def test_weights_and_optimizer_agree_with_sizes_computed_by_hand():
    parts = estimate("1.5B")["update"]
    size = memory.count_parameters(qwen("1.5B")).model
    assert (parts["weights"], parts["optimizer"]) == (4 * size, 8 * size)
    assert parts["logits"] == 3 * 24576 * 151936 * 2
    sharded = estimate("1.5B", "trainer.n_gpus_per_node=8")["update"]
    assert (sharded["weights"], sharded["optimizer"]) == (4 * size / 8, 8 * size / 8)
    assert (parts["gradients"], sharded["gradients"]) == (4 * size, 4 * size / 8)
    # without a synchronization after each micro-batch, each GPU has all gradients
    no_sync = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=true"
    unsharded = estimate("1.5B", "trainer.n_gpus_per_node=8", no_sync)["update"]
    assert unsharded["gradients"] == 4 * size
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
    small = make_config("1.5B")
    assert not memory.find_shortages(small, qwen("1.5B"), "train")
    assert len(memory.describe(small, qwen("1.5B"), "train")) == 6
    shortages = memory.find_shortages(make_config("32B"), qwen("32B"), "train")
    stages = [text.split()[0] for text in shortages[:4]]
    assert stages == ["generate", "log-probs", "update", "sync"] and len(shortages) == 5
    for text in shortages[:4]:
        assert "a GPU has 80.0 GiB" in text and "trainer.n_gpus_per_node" in text
    page = 'See docs/guides/gpu.md, "4. Read the memory lines".'
    assert all(text.endswith(page) for text in shortages)
    assert shortages[4].startswith("The KV cache holds no episode of 1536 tokens")
    assert "tensor_model_parallel_size" in shortages[4]
    assert "Lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in shortages[2]
    engine = "actor_rollout_ref.actor.fsdp_config"
    changes = [  # eight GPUs, and states offloaded to the CPU
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        f"{engine}.param_offload=true",
        f"{engine}.optimizer_offload=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    ]
    assert not memory.find_shortages(make_config("32B", *changes), qwen("32B"), "train")


def test_a_model_with_other_configuration_keys_is_not_estimated():
    config = make_config("1.5B")
    other = SimpleNamespace(hidden_size=8)
    lines = memory.describe(config, other, "train")
    assert "no intermediate_size, num_hidden_layers" in lines[0]
    assert not memory.find_shortages(config, other, "train")


@pytest.mark.parametrize("recipes", [["math"], ["math", "ppo"], ["math", "ahead"]])
def test_the_sizes_of_math_yaml_fit_on_one_h100(recipes):
    """The sizes are estimates, so a tenth of the GPU's 79.6 GiB must stay free."""
    config, _ = load_config(recipes, ["trainer.n_gpus_per_node=1"])
    model = qwen("0.5B")  # the model of configs/math.yaml
    prepare.set_sizes(config, model)
    stages = memory.estimate_stages(config, model, int(79.6 * GIB), "train")
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
