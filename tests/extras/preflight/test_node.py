"""The checks of a node: each problem is one line with a fix. Only visible GPUs are checked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import (
    Llama4Config,
    LlavaConfig,
    MistralConfig,
    Qwen2_5_VLConfig,
)

from extras.preflight import attention, gpus, memory, node
from extras.preflight.memory import GIB
from kit.config.load import load_config
from kit.config.recipe import freeze
from tests.helpers import nodes
from tests.helpers.nodes import make_recipe, qwen


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that puts an `nvidia-smi` with these GPUs on the PATH."""

    def install(**settings) -> None:
        monkeypatch.setenv("PATH", nodes.write_nvidia_smi(tmp_path, **settings)["PATH"])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(attention, "is_installed", lambda _: False)


@pytest.mark.parametrize(("visible", "count"), [(None, 8), ("0,1", 2), ("", 0)])
def test_only_visible_gpus_are_counted_and_mig_parts_are_not(smi, monkeypatch, visible, count):
    smi(gpus=8, mig_parts=7)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == len(gpus.query("memory.total")) == count


def test_without_nvidia_smi_there_is_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.count_gpus() == 0 and gpus.query("driver_version") == []
    assert gpus.find_old_driver() == ""


def test_the_memory_of_a_device_is_that_of_the_smallest_visible_gpu(smi, monkeypatch, tmp_path):
    on_cpu = freeze(*load_config(["math", "cpu"], ["trainer.n_gpus_per_node=2"]))
    assert memory.find_device(on_cpu).size == memory.psutil.virtual_memory().total // 2
    recipe = freeze(*load_config(["math"], []))
    smi(gpus=2)
    assert memory.find_device(recipe) == (81559 * 2**20, "")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert memory.find_device(recipe).size == 80 * GIB
    assert "assumed" in memory.find_device(recipe).note


@pytest.mark.parametrize(("driver", "is_old"), [("570.124.06", True), ("580.65.06", False)])
def test_a_driver_that_is_too_old_for_cuda_13_is_a_problem(smi, monkeypatch, driver, is_old):
    monkeypatch.delenv("FORCE", raising=False)
    smi(driver_version=driver)
    config, _ = load_config(["math"], [])
    problems = list(node.check_driver(config))
    assert len(problems) == is_old
    assert all(problem.startswith(f"NVIDIA driver {driver} is too old") for problem in problems)
    on_cpu, _ = load_config(["math", "cpu"], [])
    assert not list(node.check_driver(on_cpu))
    monkeypatch.setenv("FORCE", "1")  # with CUDA's forward compatibility package
    assert not list(node.check_driver(config))


def test_each_shortage_of_a_node_is_a_line_with_a_fix(smi, no_packages, monkeypatch, tmp_path):
    """Disk and shared memory are checked on every node; the rest on a node with GPUs."""
    changes = [
        "trainer.n_gpus_per_node=4",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={tmp_path}/new",
        "trainer.save_freq=10",
    ]
    recipe = make_recipe("1.5B", *changes)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=500 * GIB))
    # This machine has no GPU, so the run is taken to be on another node.
    assert list(node.find_problems(recipe, qwen("1.5B"))) == []

    def report_little_space(folder):
        free = 2**26 if str(folder) == "/dev/shm" else 50 * GIB
        return SimpleNamespace(free=free)

    monkeypatch.setattr(node.shutil, "disk_usage", report_little_space)
    smi(gpus=2)
    recipe = make_recipe("1.5B", *changes)
    problems = list(node.find_problems(recipe, qwen("1.5B")))
    disk, shared_memory, gpu_count, engine = problems
    # Two checkpoints stay while the third is written. Each has weights and two moments in fp32.
    size = 3 * 12 * memory.count_parameters(qwen("1.5B")).model / GIB
    assert disk.startswith(
        f"3 checkpoints take {size:.1f} GiB, and {tmp_path}/new has 50.0. Lower trainer.max_actor"
    )
    assert shared_memory.startswith(
        "/dev/shm has 0.06 GiB free, and the weight sync and NCCL need 1.0."
    )
    assert gpu_count.startswith(
        "This node has 2 GPUs, and the run uses 4. Set trainer.n_gpus_per_node"
    )
    assert engine == "vllm is not installed. See docs/backends.md."
    rollout_problems = node.find_problems(make_recipe("1.5B", command="rollout"), qwen("1.5B"))
    assert len(list(rollout_problems)) == 3  # nothing is trained


def test_weights_pass_through_shared_memory_on_a_cpu_only(monkeypatch):
    """On GPUs the weights stay in GPU memory, so eight GPUs do not need 32 GiB of /dev/shm."""
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * GIB))
    on_gpus = make_recipe("1.5B", "trainer.n_gpus_per_node=8")
    assert not list(node.check_shared_memory(on_gpus))
    (problem,) = node.check_shared_memory(on_gpus.change("trainer.device=cpu"))
    assert problem.startswith("/dev/shm has 20.00 GiB free, and the weight sync and NCCL need 32.0")


# --- without flash-attn --------------------------------------------------------------------------

ATTENTION = "actor_rollout_ref.model.override_config"


def get_attention(config) -> str | None:
    return config.actor_rollout_ref.model.override_config.get("attn_implementation")


def list_modules(config) -> list[str]:
    """List the modules that verl imports in each process."""
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    return variables.VERL_USE_EXTERNAL_MODULES.split(",")


def test_torch_replaces_flash_attn_for_all_models(smi, no_packages):
    smi(gpus=1)
    config = make_recipe(
        "1.5B", "algorithm.adv_estimator=gae", "reward.reward_model.enable=true"
    ).verl
    models = (config.actor_rollout_ref.model, config.critic.model)
    assert [model.override_config.attn_implementation for model in models] == ["torch_varlen"] * 2
    assert list_modules(config) == ["kit.rollout.verl_patches", "extras.without_flash_attn"]
    assert not list(attention.check_model(config, qwen("1.5B"), "train"))
    assert not list(attention.warnings(config, "train"))
    (line,) = attention.describe(config, "train")
    assert line.startswith("attention   torch_varlen: flash-attn is not installed")
    again = config.copy()
    OmegaConf.set_readonly(again, False)
    attention.choose(again, qwen("1.5B"), "train")
    assert again == config


@pytest.mark.parametrize(
    ("hf_config", "is_short"),
    [
        (qwen("1.5B"), False),
        (LlavaConfig(), False),
        (MistralConfig(sliding_window=500), False),  # as long as all episodes
        (MistralConfig(sliding_window=499), True),
        (Llama4Config(text_config={"attention_chunk_size": 64}), True),
        (LlavaConfig(text_config=MistralConfig(sliding_window=10)), True),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_window_that_is_shorter_than_an_episode_is_seen(hf_config, is_short):
    """Torch's kernel would ignore it, and the rows of the trial of models are shorter."""
    assert attention.has_short_window(hf_config, 500) == is_short


def test_for_a_short_window_the_trainer_uses_sdpa_and_a_warning_names_the_cost(
    smi, no_packages, monkeypatch
):
    smi(gpus=1)
    monkeypatch.setattr(attention, "has_short_window", lambda *_: True)
    config = make_recipe("1.5B").verl
    assert get_attention(config) == "sdpa"
    assert len(list(attention.warnings(config, "train"))) == 1
    assert "extras.without_flash_attn" in list_modules(config)  # for the log-probs


def test_an_attention_that_the_recipe_names_is_kept(smi, no_packages):
    smi(gpus=1)
    for name, warnings in (("eager", 0), ("flash_attention_2", 1)):
        config = make_recipe("1.5B", f"+{ATTENTION}.attn_implementation={name}").verl
        assert get_attention(config) == name
        assert len(list(attention.warnings(config, "train"))) == warnings


@pytest.mark.parametrize(
    ("model", "needed"),
    [(qwen("1.5B"), "ulysses_sequence_parallel_size=2"), (Qwen2_5_VLConfig(), "model type qwen2")],
    ids=["ulysses", "qwen2_5_vl"],
)
def test_what_verl_computes_only_with_flash_attn_is_one_error(smi, no_packages, model, needed):
    smi(gpus=2)
    ulysses = 1 + ("ulysses" in needed)
    changes = [f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={ulysses}"]
    config, _ = load_config(["math"], ["trainer.n_gpus_per_node=2", *changes])
    (problem,) = attention.check_model(config, model, "train")
    assert needed in problem
    assert not list(attention.check_model(config, model, "rollout"))


def test_another_node_may_have_flash_attn(no_packages, monkeypatch, tmp_path):
    """A dry run on a machine without GPUs changes no attention and refuses nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    config = make_recipe("1.5B", "algorithm.adv_estimator=gae", ulysses).verl
    assert get_attention(config) is None
    assert not list(attention.check_model(config, qwen("1.5B"), "train"))
    assert list_modules(config) == ["kit.rollout.verl_patches"]
    named = make_recipe("1.5B", f"+{ATTENTION}.attn_implementation=torch_varlen").verl
    assert "extras.without_flash_attn" in list_modules(named)


@pytest.mark.parametrize("package", ["flash_attn", "kernels"])
def test_flash_attn_is_used_if_it_is_installed(smi, monkeypatch, package):
    """If transformers downloads the kernel, log-probs still need a substitute."""
    smi(gpus=1)
    monkeypatch.setattr(attention, "is_installed", lambda name: name == package)
    config = make_recipe("1.5B", "algorithm.adv_estimator=gae").verl
    assert get_attention(config) is None
    assert not list(attention.check_model(config, qwen("1.5B"), "train"))
    assert not list(attention.warnings(config, "train"))
    is_loaded = "extras.without_flash_attn" in list_modules(config)
    assert is_loaded == (package == "kernels")
