"""What a node lacks: each lack is a line with a fix, from the GPUs that the run may use."""

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
def test_only_visible_gpus_count_and_parts_of_one_do_not(smi, monkeypatch, visible, count):
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
def test_a_driver_that_is_too_old_for_cuda_13_is_a_problem(smi, driver, is_old):
    smi(driver_version=driver)
    config, _ = load_config(["math"], [])
    problems = list(node.check_driver(config))
    assert len(problems) == is_old
    assert all(problem.startswith(f"NVIDIA driver {driver} is too old") for problem in problems)
    on_cpu, _ = load_config(["math", "cpu"], [])
    assert not list(node.check_driver(on_cpu))


def test_each_shortage_of_a_node_is_a_line_with_a_fix(smi, no_packages, monkeypatch, tmp_path):
    """Disk and shared memory on every node; GPUs, cores and packages on a node with GPUs."""
    changes = [
        "trainer.n_gpus_per_node=4",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={tmp_path}/new",
        "trainer.save_freq=10",
    ]
    config = make_config("1.5B", *changes)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=500 * GIB))
    assert list(node.find_problems(config, qwen("1.5B"), "train")) == []  # no GPU: another node

    def free(folder):
        return SimpleNamespace(free={"/dev/shm": 2**26}.get(str(folder), 50 * GIB))

    monkeypatch.setattr(node.shutil, "disk_usage", free)
    monkeypatch.setattr(node.os, "sched_getaffinity", lambda _: {0, 1})
    smi(gpus=2)
    config = make_config("1.5B", *changes)
    disk, shared, found, cores, engine, slow = node.find_problems(config, qwen("1.5B"), "train")
    # two stay while the third is written; weights and two moments in fp32
    size = 3 * 12 * memory.count_parameters(qwen("1.5B")).model / GIB
    assert disk.startswith(
        f"3 checkpoints take {size:.1f} GiB, and {tmp_path}/new has 50.0. Lower trainer.max_actor"
    )
    assert shared.startswith("/dev/shm has 0.06 GiB free, and the weight sync and NCCL need 1.0.")
    assert found.startswith("This node has 2 GPUs, and the run uses 4. Set trainer.n_gpus_per_node")
    assert cores.startswith("This node has 2 cores, and Ray gives one to each of 4 processes. Set ")
    assert engine == "vllm is not installed. See docs/backends.md."
    assert slow.startswith("flash-attn is not installed, so the trainer uses sdpa: results are")
    rollout_problems = node.find_problems(make_config("1.5B"), qwen("1.5B"), "rollout")
    assert len(list(rollout_problems)) == 3  # nothing is trained
    config.actor_rollout_ref.rollout.nnodes = 1
    config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
    *_, found, _, cupy, _, _ = node.find_problems(config, qwen("1.5B"), "train")
    assert "the run uses 8" in found
    assert "by cupy, which is not installed. Install requirements-gpu.txt, or set" in cupy


def test_weights_pass_through_shared_memory_on_a_cpu_only(monkeypatch):
    """On GPUs they stay in GPU memory: eight of them do not need 32 GiB of /dev/shm."""
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * GIB))
    on_gpus = make_config("1.5B", "trainer.n_gpus_per_node=8")
    assert not list(node.check_shared_memory(on_gpus))
    on_gpus.trainer.device = "cpu"
    (problem,) = node.check_shared_memory(on_gpus)
    assert problem.startswith("/dev/shm has 20.00 GiB free, and the weight sync and NCCL need 32.0")


# --- without flash-attn --------------------------------------------------------------------------

ATTENTION = "actor_rollout_ref.model.override_config"
PAGE = '. See docs/backends.md, "flash-attn".'


def chosen(config) -> str | None:
    return config.actor_rollout_ref.model.override_config.get("attn_implementation")


def test_grpo_trains_with_sdpa_and_says_what_that_costs(smi, no_packages):
    smi(gpus=1)
    config = make_config("1.5B")
    assert chosen(config) == "sdpa" and not list(attention.check(config, "train"))
    (cost,) = attention.warnings(config, "train")
    assert "4 to 5 times as long" in cost and "make math FLASH_ATTN=build" in cost
    assert cost.endswith(PAGE)


def test_an_attention_that_the_recipe_names_is_kept(smi, no_packages):
    smi(gpus=1)
    eager = make_config("1.5B", f"+{ATTENTION}.attn_implementation=eager")
    assert chosen(eager) == "eager" and not list(attention.warnings(eager, "train"))
    flash = make_config("1.5B", f"+{ATTENTION}.attn_implementation=flash_attention_2")
    (missing,) = attention.warnings(flash, "train")
    assert missing.startswith("flash_attention_2 is not installed. Install flash-attn")
    assert missing.endswith(PAGE)


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
def test_what_cannot_work_without_flash_attn_is_one_error(smi, no_packages, change, part):
    smi(gpus=2)
    config, _ = load_config(["math"], ["trainer.n_gpus_per_node=2", change])
    (problem,) = prepare.extras.collect("check_workers", config, "train", config, "train")
    assert f"is not installed, and verl needs it for {part}. Install flash-attn" in problem
    assert problem.endswith(PAGE)


def test_another_node_may_have_flash_attn(no_packages, monkeypatch, tmp_path):
    """A dry run on a machine without GPUs changes no attention and refuses no critic."""
    monkeypatch.setenv("PATH", str(tmp_path))
    config = make_config("1.5B", "algorithm.adv_estimator=gae")
    assert chosen(config) is None and not list(attention.check(config, "train"))


def test_flash_attn_is_used_where_it_is_installed(smi, monkeypatch):
    smi(gpus=1)
    monkeypatch.setattr(attention, "is_installed", lambda package: package == "flash_attn")
    config = make_config("1.5B", "algorithm.adv_estimator=gae")
    assert chosen(config) is None and not list(attention.check(config, "train"))
    assert not list(attention.warnings(config, "train"))
