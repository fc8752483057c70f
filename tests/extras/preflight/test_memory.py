"""The estimate of memory: counts against real models, sizes by hand, and what does not fit is told
with its keys.
"""

import subprocess
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
from kit.extras.preflight import memory, node
from kit.extras.preflight.memory import GIB
from kit.runs import prepare

TINY = {"vocab_size": 40, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
QWEN = {  # Qwen2.5, as their config.json has them: parameters as published, sizes
    "1.5B": (1.54e9, (1536, 8960, 28, 12, 2, 151936, True)),
    "32B": (32.5e9, (5120, 27648, 64, 40, 8, 152064, False)),
}
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def qwen(name: str) -> Qwen2Config:
    return Qwen2Config(
        **dict(zip((*NAMES, "vocab_size", "tie_word_embeddings"), QWEN[name][1], strict=True))
    )


def planned(model: str, *changes: str):
    """configs/math.yaml for one GPU and a model of Qwen2.5's, as a run would have it."""
    config, _ = load_config(["math"], ["trainer.n_gpus_per_node=1", *changes])
    prepare.set_sizes(config, qwen(model))
    return config


def stages(model: str, *changes: str):
    return memory.stages(planned(model, *changes), qwen(model), 80 * GIB, "train")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "heads", [{"num_attention_heads": 4}, {"num_attention_heads": 4, "num_key_value_heads": 2}]
)
@pytest.mark.parametrize("head", [{}, {"head_dim": 64}])
def test_parameters_are_those_of_a_real_model(tied, heads, head):
    config = LlamaConfig(**TINY, **heads, **head, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert memory.parameters(config)[0] == model.num_parameters()
    assert memory.parameters(config)[1] == sum(
        p.numel() for p in model.model.layers[0].parameters()
    )


def test_parameters_of_experts_and_of_published_models():
    config = Qwen3MoeConfig(**TINY, num_attention_heads=4, moe_intermediate_size=64, num_experts=8)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    assert memory.parameters(config)[0] == pytest.approx(
        model.num_parameters(), rel=0.02
    )  # routers, q's and k's norms
    for name, (published, _) in QWEN.items():
        assert memory.parameters(qwen(name))[0] == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_are_what_autograd_keeps(keys, dtype):
    config = LlamaConfig(**TINY, num_attention_heads=4, num_key_value_heads=keys)
    model = LlamaForCausalLM(config).to(dtype).model
    own, tokens = {p.untyped_storage().data_ptr() for p in model.parameters()}, 64
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(tokens)[None] % 40, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimated = 3 * tokens * memory.activations(config, dtype.itemsize)
    assert estimated == pytest.approx(measured, rel=0.1)  # the last norm is not in it


def test_the_cache_of_a_token_by_hand():
    assert (
        memory.kv_bytes(qwen("1.5B"), 2) == 2 * 28 * 2 * 128 * 2
    )  # key and value, layers, heads, width, bytes
    config = planned("1.5B")
    lines, wrong = memory.report(config, qwen("1.5B"), "evaluate")
    cache = 0.6 * 80 * GIB - 2 * memory.parameters(qwen("1.5B"))[0]
    assert (
        lines[-1]
        == f"KV cache    28 KiB a token: {int(cache / 28672 / 1536)} episodes of 1536 at once"
        and not wrong
    )


def test_weights_and_optimiser_by_hand():
    parts, size = stages("1.5B")["update"], memory.parameters(qwen("1.5B"))[0]
    assert (parts["weights"], parts["optimiser"]) == (4 * size, 8 * size)
    assert parts["logits"] == 3 * 24576 * 151936 * 2
    split = stages("1.5B", "trainer.n_gpus_per_node=8")["update"]
    assert (split["weights"], split["optimiser"]) == (4 * size / 8, 8 * size / 8)
    assert (parts["gradients"], split["gradients"]) == (4 * size, 4 * size / 8)
    whole = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=true"
    assert stages("1.5B", "trainer.n_gpus_per_node=8", whole)["update"]["gradients"] == 4 * size
    away = "actor_rollout_ref.actor.fsdp_config."
    away = stages("1.5B", f"{away}param_offload=true", f"{away}optimizer_offload=true")
    assert not {"weights", "optimiser"} & away["generate"].keys() and away["update"] == parts
    adapter = stages("1.5B", "actor_rollout_ref.model.lora_rank=16")["update"]
    assert adapter["weights"] == parts["weights"] and adapter["optimiser"] < parts["optimiser"] / 50
    assert set(stages("1.5B")) == {"generate", "log-probs", "update", "sync"}
    with_critic = stages("1.5B", "algorithm.adv_estimator=gae")
    assert with_critic["update"]["critic"] == 12 * size and "logits" not in with_critic["critic"]


def test_what_does_not_fit_one_gpu_is_told_with_its_keys(monkeypatch):
    monkeypatch.setattr(memory, "device", lambda _: (80 * GIB, ""))
    lines, wrong = memory.report(planned("1.5B"), qwen("1.5B"), "train")
    assert not wrong and len(lines) == 6
    _, wrong = memory.report(planned("32B"), qwen("32B"), "train")
    assert [text.split()[0] for text in wrong] == ["generate", "log-probs", "update", "sync", "the"]
    assert all(
        "a GPU has 80.0 GiB" in text and "trainer.n_gpus_per_node" in text for text in wrong[:4]
    )
    assert (
        "holds no episode of 1536 tokens" in wrong[4] and "tensor_model_parallel_size" in wrong[4]
    )
    assert "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in wrong[2]
    spread = ["trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=8"]
    spread += [
        f"actor_rollout_ref.actor.fsdp_config.{key}_offload=true" for key in ("param", "optimizer")
    ]
    spread += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"]
    assert not memory.report(planned("32B", *spread), qwen("32B"), "train")[1]


def test_the_device(monkeypatch):
    def nowhere(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    config, _ = load_config(["math", "cpu"], ["trainer.n_gpus_per_node=2"])
    assert memory.device(config)[0] == memory.psutil.virtual_memory().total // 2
    config, _ = load_config(["math"], [])
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="81559\n143771\n")
    )
    assert memory.device(config) == (81559 * 2**20, "")
    monkeypatch.setattr(subprocess, "run", nowhere)
    assert memory.device(config)[0] == 80 * GIB and "assumed" in memory.device(config)[1]


def test_a_model_of_another_form_is_not_estimated():
    lines, wrong = memory.report(planned("1.5B"), SimpleNamespace(hidden_size=8), "train")
    assert "no intermediate_size, num_hidden_layers" in lines[0] and not wrong


def test_what_this_node_has_too_little_of(monkeypatch, tmp_path):
    """Room for checkpoints and shared memory anywhere; GPUs, cores and a flash attention where
    there are GPUs.
    """
    changes = [
        "trainer.n_gpus_per_node=4",
        "algorithm.adv_estimator=gae",
        "trainer.max_actor_ckpt_to_keep=2",
    ]
    config = planned(
        "1.5B", *changes, f"trainer.default_local_dir={tmp_path}/new", "trainer.save_freq=10"
    )
    assert list(node.lacks(config, qwen("1.5B"), "train")) == []  # no GPU, so it will run elsewhere

    def free(folder):
        return SimpleNamespace(free={"/dev/shm": 2**26}.get(str(folder), 50 * GIB))

    monkeypatch.setattr(node.shutil, "disk_usage", free)
    monkeypatch.setattr(node.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: SimpleNamespace(stdout="81559\n143771\n")
    )
    disk, shared, gpus, cores, sampler, attention = node.lacks(config, qwen("1.5B"), "train")
    size = (
        3 * 12 * memory.parameters(qwen("1.5B"))[0] / GIB
    )  # two stay while the third is written; fp32, two moments
    assert disk.startswith(
        f"3 checkpoints take {size:.1f} GiB, and {tmp_path}/new has 50.0: lower trainer.max_actor"
    )
    assert shared.startswith("/dev/shm has 0.06 GiB free, of ")
    assert gpus.startswith("this node has 2 GPUs, and the run takes 4: set trainer.n_gpus_per_node")
    assert cores.startswith("this node has 2 cores, and Ray gives one to each of 4 processes: set ")
    assert sampler.startswith("vllm is not installed: docs/backends.md")
    assert attention.startswith("flash_attention_2 is not installed: install flash-attn")
    assert (
        len(list(node.lacks(planned("1.5B"), qwen("1.5B"), "rollout"))) == 3
    )  # which trains nothing
    config.actor_rollout_ref.rollout.nnodes = 1
    config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
    *_, gpus, _, cupy, _, _ = node.lacks(config, qwen("1.5B"), "train")
    assert (
        "the run takes 8" in gpus
        and "by cupy, which is not installed: uv pip install cupy-cuda13x, or set" in cupy
    )
