"""A machine on which a recipe cannot run: one line, with the recipe or command that works."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any, NamedTuple
from unittest import mock

import pytest

from extras import preflight
from extras.preflight import fit, gpus, machine
from kit.optional import is_installed
from kit.recipe import checks
from kit.recipe.load import read_source
from kit.recipe.settings import make_settings
from scripts.hardware_page import make_config
from tests.helpers import nodes
from tests.helpers.nodes import make_recipe, qwen
from tests.helpers.recipes import CLEAN_ENV, ROOT

RTX4090 = {"name": "NVIDIA GeForce RTX 4090", "memory_total": "24564", "compute_cap": "8.9"}


def write_package(folder, module, name, version, text):
    """Write an installed package with one module."""
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(module)


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A function that makes this machine look like a node with these GPUs and packages."""

    def change(smi, visible=None, package=()) -> None:
        path = nodes.write_nvidia_smi(tmp_path, **smi)["PATH"] if smi else str(tmp_path)
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        if package:
            write_package(tmp_path, *package)
            monkeypatch.syspath_prepend(tmp_path)
        is_installed.cache_clear()
        gpus.read_gpus.cache_clear()

    yield change
    is_installed.cache_clear()
    gpus.read_gpus.cache_clear()
    sys.modules.pop("flash_attn", None)


def find_problems(*arguments: str) -> list[str]:
    """Find all problems of this machine with the recipe `math`, as a run does."""
    files = ["math"]
    if arguments[:1] == ("--config",):
        files.append(arguments[1])
        arguments = arguments[2:]
    settings = make_settings(read_source(files, arguments), "train")
    checks = preflight.Preflight(settings)
    return [*checks.check_start(settings), *checks.check_settings(settings)]


NO_GPU: dict[str, Any] = {}
H100: dict[str, Any] = {"gpus": 1}


class Bad(NamedTuple):
    """A machine, and the beginning and the end of the one line that names its problem."""

    begin: str
    end: str
    smi: dict[str, Any] = NO_GPU
    visible: str | None = None
    package: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("trainer.n_gpus_per_node=1",)


TRL = "trl 1.16.0 is installed, and verl 0.9.1 imports AutoModelForCausalLMWithValueHead from it"
OTHER_TORCH = 'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDevice")'
BAD = {
    "no GPU": Bad(
        "The recipe needs 1 GPU, and this machine shows none.",
        "To train on the CPU, add --config cpu",
    ),
    "all GPUs are hidden": Bad(
        "The recipe needs 1 GPU, and this machine shows none, because CUDA_VISIBLE_DEVICES=.",
        "Run: unset CUDA_VISIBLE_DEVICES",
        H100,
        visible="",
    ),
    "fewer GPUs than the recipe's 8": Bad(
        "The recipe needs 8 GPUs, and this machine shows 1 x NVIDIA GeForce RTX 4090, 24.0 GiB.",
        "Add --config gpu_24gb trainer.n_gpus_per_node=1",
        RTX4090,
        arguments=(),
    ),
    "an old driver": Bad(
        "NVIDIA driver 550.54.14 is too old for CUDA 13, which torch uses.",
        "Install driver 580 or newer.",
        {"driver_version": "550.54.14"},
    ),
    "a GPU without bfloat16": Bad(
        "Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0.",
        "or add --config cpu.",
        {"name": "Tesla T4", "compute_cap": "7.5"},
    ),
    "the beginning of a UUID": Bad(
        "CUDA_VISIBLE_DEVICES lists GPU-0000000, which is neither the index nor the whole UUID",
        "Run: export CUDA_VISIBLE_DEVICES=GPU-00000000,GPU-00000001",
        {"gpus": 2},
        visible="0,GPU-0000000",
    ),
    "an index that does not exist": Bad(
        "CUDA_VISIBLE_DEVICES lists 7, which",
        "Run: export CUDA_VISIBLE_DEVICES=0,1",
        {"gpus": 2},
        visible="0,7",
    ),
    "another TRL": Bad(TRL, " trl", H100, package=("trl", "trl", "1.16.0", "")),
    "flash-attn for another torch": Bad(
        "flash-attn 2.7.4 cannot be used with torch 2.",
        " flash-attn",
        H100,
        package=("flash_attn", "flash-attn", "2.7.4", OTHER_TORCH),
    ),
    "flash-attn of another version": Bad(
        "flash-attn-4 4.0.0 cannot be used with torch 2.",
        " flash-attn-4",
        H100,
        package=("flash_attn", "flash-attn-4", "4.0.0", ""),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_machine_lacks_is_one_line_with_what_works(node, name):
    bad = BAD[name]
    node(bad.smi, bad.visible, bad.package)
    (line,) = find_problems(*bad.arguments)
    assert line.startswith(bad.begin) and line.endswith(bad.end), line
    assert "\n" not in line


def test_an_old_driver_may_have_a_newer_cuda(node, monkeypatch):
    node({"driver_version": "550.54.14"})
    monkeypatch.setattr(machine, "read_cuda_version", lambda: 13000)
    assert find_problems("trainer.n_gpus_per_node=1") == []


def test_a_start_asks_nvidia_smi_once(node):
    node(H100)
    with mock.patch.object(gpus, "read_smi", wraps=gpus.read_smi) as read_smi:
        find_problems()
    read_smi.assert_called_once()


class Good(NamedTuple):
    """A machine without a problem."""

    smi: dict[str, Any] = H100
    visible: str | None = None
    package: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("trainer.n_gpus_per_node=1",)


VALUE_HEAD = '_import_structure = {"models": ["AutoModelForCausalLMWithValueHead"]}'
GOOD = {
    "one H100": Good(),
    "GPUs by UUID": Good(
        {"gpus": 4}, "GPU-00000002,GPU-00000000", (), ("trainer.n_gpus_per_node=2",)
    ),
    "a part of a GPU": Good(H100, "MIG-1"),
    "a CPU": Good({}, arguments=("--config", "cpu")),
    "a cluster": Good({}, arguments=("ray_kwargs.ray_init.address=auto",)),
    "TRL 0.29": Good(package=("trl", "trl", "0.29.0", VALUE_HEAD)),
    "flash-attn": Good(
        package=("flash_attn", "flash-attn", "2.8.3", "def flash_attn_varlen_func(): pass")
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_machine_that_can_run_the_recipe_has_no_problem(node, name):
    good = GOOD[name]
    node(good.smi, good.visible, good.package)
    assert find_problems(*good.arguments) == []


def test_the_command_ends_before_it_reads_a_file_or_starts_a_process(tmp_path):
    """The rows of `math` are not there either, and a dry run without a GPU gets to them."""
    command = [sys.executable, str(ROOT / "algorithm.py"), "--config", "math"]
    environment = CLEAN_ENV | {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    run = functools.partial(
        subprocess.run, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    done = run(command)
    expected = "error: The recipe needs 8 GPUs, and this machine shows none, because "
    assert done.returncode == 1 and done.stderr.startswith(expected)
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
    assert not list(tmp_path.iterdir())
    assert "gsm8k_train.jsonl: no such file" in run([*command, "--dry-run"]).stderr


def test_gpus_of_two_kinds_are_a_warning_with_a_command_for_one_kind(node):
    node({"gpus": 3, "name": ["H100", "A10", "H100"], "memory_total": ["81559", "23028", "81559"]})
    (line,) = machine.describe_differences()
    assert line.startswith("This machine's GPUs differ (2 x H100, 79.6 GiB, 1 x A10, 22.5 GiB)")
    assert line.endswith("run: export CUDA_VISIBLE_DEVICES=GPU-00000000,GPU-00000002")
    node({"gpus": 3}, visible=line.partition("DEVICES=")[2])
    assert not list(machine.describe_differences())


# --- the recipe that fits ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "count", "machine_recipe", "model"),
    [
        (81559, 8, "", "Qwen2.5-0.5B"),
        (81559, 1, "one_gpu", "Qwen2.5-0.5B"),
        (38 * 1024, 1, "one_gpu", "Qwen2.5-0.5B"),
        (24564, 1, "gpu_24gb", "Qwen2.5-0.5B"),
        (22 * 1024, 4, "gpu_24gb", "Qwen2.5-0.5B"),
        (15 * 1024, 1, "gpu_16gb", "Qwen2.5-0.5B"),
        (8188, 1, "gpu_16gb", "SmolLM2-135M"),
    ],
)
def test_make_math_chooses_a_recipe_that_fits_and_prints_it(
    node, capsys, mib, count, machine_recipe, model
):
    """It fits, by the estimate, with the model that check_gpu_node.sh accepts or suggests."""
    argument = f"trainer.n_gpus_per_node={count}"
    chosen = f"--config {machine_recipe} {argument}" if machine_recipe else argument
    node({"gpus": count, "memory_total": str(mib)})
    with mock.patch("torch.cuda.init"):
        gpus.main()
    printed = capsys.readouterr()
    assert printed.out == f"{chosen}\n"
    assert printed.err.startswith(f"== {count} x NVIDIA H100 80GB HBM3, {mib / 1024:.1f} GiB: ")
    files = ["math", machine_recipe] if machine_recipe else ["math"]
    config = make_config(model)
    recipe = make_recipe(config, argument, recipes=files)
    assert recipe.trainer.n_gpus_per_node == count
    assert fit.fits(recipe, config, mib * 2**20)


TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
FRACTION = "actor_rollout_ref.rollout.gpu_memory_utilization"


@pytest.mark.parametrize(
    ("model", "mib", "changes", "advice"),
    [
        ("0.5B", 24564, [], "Add --config gpu_24gb."),
        ("0.5B", 16376, [], "Add --config gpu_16gb."),
        ("0.5B", 24564, [f"{TOKENS}=24576"], f"Set {FRACTION}=0.55 {TOKENS}=12288."),
        ("1.5B", 24564, [], "Add --config lora --config gpu_24gb."),
        ("0.5B", 81559, [f"{TOKENS}=98304"], f"Set {TOKENS}=64512."),
        ("0.5B", 81559, [f"{FRACTION}=0.95"], f"Set {FRACTION}=0.8."),
        (
            "0.5B",
            24564,
            ["trainer.n_gpus_per_node=2"],
            "Add --config gpu_24gb trainer.n_gpus_per_node=2.",
        ),
        ("32B", 81559, [], "No recipe of configs/machines makes it fit: use a smaller model"),
        ("0.5B", 8188, [], "No recipe of configs/machines makes it fit: use a smaller model"),
    ],
)
def test_a_recipe_that_does_not_fit_gets_one_that_does(node, model, mib, changes, advice):
    """An argument stays when a recipe is added, so then the advice is a value for it.

    With all logits, since these are more recipes that do not fit.
    """
    node({"gpus": 2, "memory_total": str(mib)})
    recipe = make_recipe(model, "actor_rollout_ref.model.use_fused_kernels=false", *changes)
    lines = list(fit.find_large_stages(recipe, qwen(model)))
    assert lines and all(f" GiB. {advice}" in line for line in lines), lines


def test_full_determinism_is_accepted_on_one_gpu(node):
    """Torch computes the attention, with its deterministic backward pass."""
    node(H100)
    recipe = make_recipe("0.5B", recipes=["math", "one_gpu", "deterministic"])
    checks.instantiate_verl_configs(recipe)
    assert recipe.rollout.full_determinism and recipe.actor.fsdp_config.full_determinism
    assert recipe.model.override_config["attn_implementation"] == "torch_varlen"
    assert find_problems("--config", "deterministic", "trainer.n_gpus_per_node=1") == []
