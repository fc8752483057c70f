"""The checks of a node: each problem is one line with a fix. Only visible GPUs are checked."""

from __future__ import annotations

from types import SimpleNamespace

import fake_nvidia_smi
import pytest
from test_memory import make_config, qwen

from kit.config.load import load_config
from kit.extras.preflight import attention, gpus, memory, node
from kit.extras.preflight.memory import GIB
from kit.runs import prepare


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that puts an `nvidia-smi` with these GPUs on the PATH."""

    def install(**settings) -> None:
        monkeypatch.setenv("PATH", fake_nvidia_smi.write(tmp_path, **settings)["PATH"])

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(attention, "is_installed", lambda _: False)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 8), ("0,1", 2), ("3", 1), ("0,-1,2", 1), ("", 0)]
)
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
    config, _ = load_config(["math", "cpu"], ["trainer.n_gpus_per_node=2"])
    assert memory.find_device(config).size == memory.psutil.virtual_memory().total // 2
    config, _ = load_config(["math"], [])
    smi(gpus=2)
    assert memory.find_device(config) == (81559 * 2**20, "")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert memory.find_device(config).size == 80 * GIB
    assert "assumed" in memory.find_device(config).note


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


@pytest.mark.parametrize(("force", "count"), [("1", 0), ("0", 1), ("", 1)])
def test_force_accepts_an_older_driver(smi, monkeypatch, force, count):
    """CUDA's forward compatibility package makes it work. nvidia-smi still shows its version."""
    smi(driver_version="550.54.14")
    monkeypatch.setenv("FORCE", force)
    config, _ = load_config(["math"], [])
    assert len(list(node.check_driver(config))) == count


def test_each_shortage_of_a_node_is_a_line_with_a_fix(smi, no_packages, monkeypatch, tmp_path):
    """Disk and shared memory are checked on every node; the rest on a node with GPUs."""
    changes = [
        "trainer.n_gpus_per_node=4",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={tmp_path}/new",
        "trainer.save_freq=10",
    ]
    config = make_config("1.5B", *changes)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=500 * GIB))
    # This machine has no GPU, so the run is taken to be on another node.
    assert list(node.find_problems(config, qwen("1.5B"), "train")) == []

    def report_little_space(folder):
        free = 2**26 if str(folder) == "/dev/shm" else 50 * GIB
        return SimpleNamespace(free=free)

    monkeypatch.setattr(node.shutil, "disk_usage", report_little_space)
    monkeypatch.setattr(node.os, "sched_getaffinity", lambda _: {0, 1})
    smi(gpus=2)
    config = make_config("1.5B", *changes)
    problems = list(node.find_problems(config, qwen("1.5B"), "train"))
    disk, shared_memory, gpu_count, cores, engine, attention_line = problems
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
    assert cores.startswith("This node has 2 cores, and Ray gives one to each of 4 processes. Set ")
    assert engine == "vllm is not installed. See docs/backends.md."
    assert attention_line.startswith(
        "flash-attn is not installed, so the trainer uses sdpa: results are"
    )
    rollout_problems = node.find_problems(make_config("1.5B"), qwen("1.5B"), "rollout")
    assert len(list(rollout_problems)) == 3  # nothing is trained
    config.actor_rollout_ref.rollout.nnodes = 1
    config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
    *_, gpu_count, _, cupy, _, _ = node.find_problems(config, qwen("1.5B"), "train")
    assert "the run uses 8" in gpu_count
    assert "by cupy, which is not installed. Install requirements-gpu.txt, or set" in cupy


def test_weights_pass_through_shared_memory_on_a_cpu_only(monkeypatch):
    """On GPUs the weights stay in GPU memory, so eight GPUs do not need 32 GiB of /dev/shm."""
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * GIB))
    on_gpus = make_config("1.5B", "trainer.n_gpus_per_node=8")
    assert not list(node.check_shared_memory(on_gpus))
    on_gpus.trainer.device = "cpu"
    (problem,) = node.check_shared_memory(on_gpus)
    assert problem.startswith("/dev/shm has 20.00 GiB free, and the weight sync and NCCL need 32.0")


# --- without flash-attn --------------------------------------------------------------------------

ATTENTION = "actor_rollout_ref.model.override_config"
PAGE = '. See docs/backends.md, "flash-attn".'


def get_attention(config) -> str | None:
    return config.actor_rollout_ref.model.override_config.get("attn_implementation")


def test_grpo_trains_with_sdpa_and_a_warning_states_the_cost(smi, no_packages):
    smi(gpus=1)
    config = make_config("1.5B")
    assert get_attention(config) == "sdpa" and not list(attention.check(config, "train"))
    (warning,) = attention.warnings(config, "train")
    assert "4 to 5 times as long" in warning and "make math FLASH_ATTN=build" in warning
    assert warning.endswith(PAGE)


def test_an_attention_that_the_recipe_names_is_kept(smi, no_packages):
    smi(gpus=1)
    eager = make_config("1.5B", f"+{ATTENTION}.attn_implementation=eager")
    assert get_attention(eager) == "eager" and not list(attention.warnings(eager, "train"))
    flash = make_config("1.5B", f"+{ATTENTION}.attn_implementation=flash_attention_2")
    (warning,) = attention.warnings(flash, "train")
    assert warning.startswith("flash_attention_2 is not installed. Install flash-attn")
    assert warning.endswith(PAGE)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("algorithm.adv_estimator=gae", "the critic of algorithm.adv_estimator=gae"),
        ("reward.reward_model.enable=true", "the reward model"),
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size > 1",
        ),
    ],
)
def test_a_feature_that_needs_flash_attn_is_one_error_without_it(smi, no_packages, change, part):
    smi(gpus=2)
    config, _ = load_config(["math"], ["trainer.n_gpus_per_node=2", change])
    (problem,) = prepare.extras.collect("check_workers", config, "train", config, "train")
    assert f"is not installed, and verl needs it for {part}. Install flash-attn" in problem
    assert problem.endswith(PAGE)


def test_another_node_may_have_flash_attn(no_packages, monkeypatch, tmp_path):
    """A dry run on a machine without GPUs changes no attention and refuses no critic."""
    monkeypatch.setenv("PATH", str(tmp_path))
    config = make_config("1.5B", "algorithm.adv_estimator=gae")
    assert get_attention(config) is None and not list(attention.check(config, "train"))


def test_flash_attn_is_used_if_it_is_installed(smi, monkeypatch):
    smi(gpus=1)
    monkeypatch.setattr(attention, "is_installed", lambda package: package == "flash_attn")
    config = make_config("1.5B", "algorithm.adv_estimator=gae")
    assert get_attention(config) is None and not list(attention.check(config, "train"))
    assert not list(attention.warnings(config, "train"))
