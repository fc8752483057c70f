"""Tests of LoRA with verl's FSDP engine: the policy that is trained is sampled and exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from kit.engine.worker_patches import fix_initial_adapter
from kit.errors import ConfigError
from kit.recipe.adapters import VERL_ALPHA, check_lora, describe_adapter
from kit.run import export
from tests.helpers.models import make_model

IDS = torch.tensor([[5, 9, 2, 30, 7, 7, 1]])


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    """Start a process group of one rank, unless the process has one."""
    if torch.distributed.is_initialized():
        yield
        return
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model(folder / "tied", tied=True),
        "untied": make_model(folder / "untied", tied=False),
    }


def make_recipe(model: Path, *changes: str) -> Any:
    """Return the sections of a recipe that LoRA uses. changes: of actor_rollout_ref.model."""
    section = {"path": str(model), "lora_rank": 4, "lora_alpha": 6, "target_modules": "all-linear"}
    section |= {"exclude_modules": None, "lora_adapter_path": None, "trust_remote_code": False}
    section |= {"lora": {"merge": True}}
    recipe = {
        "actor_rollout_ref": {"model": section, "rollout": {"dtype": "bfloat16"}},
        "trainer": {"resource_pools": {"ref": None}},
    }
    prefix = "actor_rollout_ref.model."
    return OmegaConf.merge(recipe, OmegaConf.from_dotlist([prefix + change for change in changes]))


def check(recipe: Any) -> None:
    for error in check_lora(recipe):
        raise error


def make_engine(recipe: Any, **contents: Any) -> FSDPEngine:
    """Make verl's engine with FSDP2, which keeps gathered weights. contents: of the checkpoint."""
    settings: Any = OmegaConf.to_container(recipe.actor_rollout_ref.model)
    engine = FSDPEngine(
        HFModelConfig(**settings, override_config={"attn_implementation": "eager"}),
        FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            reshard_after_forward=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        FSDPOptimizerConfig(lr=0.1, total_training_steps=5),
        CheckpointConfig(**contents),
    )
    engine.initialize()
    if recipe.actor_rollout_ref.model.lora_adapter_path:
        worker: Any = SimpleNamespace(engine=engine)
        fix_initial_adapter(worker)
    else:
        change_adapter(engine, seed=0)
    return engine


def change_adapter(engine: FSDPEngine, seed: int) -> None:
    """Give all trained weights random values, as training would."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.to_local().normal_(std=0.3)


def compute_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()  # [1, 7, V]


def export_checkpoint(engine: FSDPEngine, recipe: Any, folder: Path) -> torch.nn.Module:
    """Save the engine's weights, and export them as a run does."""
    engine.save_checkpoint(str(folder / "global_step_1" / "actor"))
    OmegaConf.save(recipe, folder / "global_step_1" / "config.yaml")
    export.merge(folder / "global_step_1", folder / "export")
    return AutoModelForCausalLM.from_pretrained(folder / "export", dtype="auto")


# --- one policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "error"),
    [
        ("[q_proj,lm_head]", "adapts lm_head, which"),
        (".*(embed_tokens|lm_head|k_proj)", r"adapts model\.embed_tokens, lm_head, which"),
        ("[down_proj]", ""),
    ],
)
def test_target_modules_outside_of_the_layers_are_refused(models, targets, error):
    problems = [
        str(problem)
        for problem in check_lora(make_recipe(models["tied"], f"target_modules={targets}"))
    ]
    assert len(problems) == bool(error) and re.search(error, "".join(problems))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tied", ["target_modules=all-linear"]),
        ("untied", [r"target_modules='.*\.layers\.0\..*(q|up)_proj'"]),
        ("untied", ["exclude_modules=[v_proj,gate_proj]", "lora_alpha=1"]),
    ],
    ids=str,
)
def test_the_trained_policy_is_the_one_that_is_sampled_and_exported(
    models, kind, changes, tmp_path
):
    recipe = make_recipe(models[kind], *changes)
    engine = make_engine(recipe)
    trained = compute_logits(engine.module)
    base = compute_logits(AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32))
    assert (trained - base).abs().max() > 0.05  # the adapter does something
    sent = dict(engine.get_per_tensor_param()[0])  # as for the rollout engine
    assert torch.equal(compute_logits(engine.module), trained)  # and the trainer is as before
    exported = export_checkpoint(engine, recipe, tmp_path / "bf16")
    assert exported.dtype == torch.bfloat16
    weights = exported.state_dict()
    for name, weight in sent.items():
        assert torch.equal(weights[name], weight.to(torch.bfloat16)), name
    assert set(weights) - set(sent) <= {"lm_head.weight"}
    recipe.actor_rollout_ref.rollout.dtype = "float32"
    exported = export_checkpoint(engine, recipe, tmp_path / "fp32")
    assert torch.allclose(compute_logits(exported), trained, atol=1e-5)


# --- an adapter to start from --------------------------------------------------------------------


def write_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    """Write a random adapter of peft."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, **(defaults | settings))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(str(folder))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_reference_is_the_policy_that_the_run_starts_from(models, tmp_path):
    """Also after a resume. Then the trained weights are others, and the reference is the same."""
    path = write_adapter(models["tied"], tmp_path / "sft", lora_dropout=0.5)
    recipe = make_recipe(models["tied"], f"lora_adapter_path={path}")
    check(recipe)
    first = make_engine(recipe)
    initial = compute_logits(first.module)
    base = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float32)
    assert (initial - compute_logits(base)).abs().max() > 0.01
    assert torch.equal(reference_logits(first), initial)
    change_adapter(first, seed=1)
    trained = compute_logits(first.module)
    assert (trained - initial).abs().max() > 0.01
    assert torch.equal(reference_logits(first), initial)
    assert torch.equal(compute_logits(first.module), trained)
    first.module.train()  # without dropout
    assert torch.equal(first.module(IDS).logits.float(), trained)
    first.save_checkpoint(str(tmp_path / "actor"))

    resumed = make_engine(recipe)
    resumed.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert torch.equal(compute_logits(resumed.module), trained)
    assert torch.equal(reference_logits(resumed), initial)


def reference_logits(engine: FSDPEngine) -> torch.Tensor:
    """Return the logits of the reference pass: verl calls `disable_adapter` for it."""
    with engine.disable_adapter():
        return compute_logits(engine.module)


@pytest.mark.parametrize("alpha", [VERL_ALPHA, 6])
def test_the_recipe_takes_the_settings_of_the_adapter(models, tmp_path, monkeypatch, alpha):
    monkeypatch.chdir(tmp_path)
    path = write_adapter(models["tied"], tmp_path / "sft")
    changes = ["lora_adapter_path=sft", "lora_rank=0", f"lora_alpha={alpha}"]
    recipe = make_recipe(models["tied"], *changes)
    check(recipe)
    model = recipe.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (4, 6)
    assert list(model.target_modules) == ["q_proj", "v_proj"]
    assert model.lora_adapter_path == str(path)  # workers run in other folders
    (line,) = describe_adapter(model)
    assert line.endswith(f"rank 4, alpha 6, trained on {models['tied']}")


def test_all_contradictions_of_recipe_and_adapter_are_in_one_error(models, tmp_path):
    path = write_adapter(models["tied"], tmp_path / "sft")
    changes = ["lora_rank=8", "lora_alpha=5", "target_modules=[q_proj]", "exclude_modules=[x]"]
    recipe = make_recipe(models["tied"], f"lora_adapter_path={path}", *changes)
    (problem,) = check_lora(recipe)
    for change in changes:
        assert f"Remove actor_rollout_ref.model.{change.partition('=')[0]}." in str(problem)


@pytest.mark.parametrize(
    ("field", "value"), [("use_dora", True), ("bias", "all"), ("init_lora_weights", "pissa")]
)
def test_an_adapter_with_features_that_would_be_lost_is_refused(models, tmp_path, field, value):
    path = write_adapter(models["tied"], tmp_path / "sft")
    edit_config(path, **{field: value})
    with pytest.raises(ConfigError, match=f"it has {field}="):
        check(make_recipe(models["tied"], f"lora_adapter_path={path}"))


def test_an_adapter_is_not_added_twice(models, tmp_path):
    """An export has the merged weights."""
    path = write_adapter(models["tied"], tmp_path / "export" / "lora_adapter")
    shutil.copytree(models["tied"], tmp_path / "export", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="is merged into"):
        check(make_recipe(tmp_path / "export", f"lora_adapter_path={path}"))


def test_a_separate_reference_has_no_adapter(models, tmp_path):
    path = write_adapter(models["tied"], tmp_path / "sft")
    recipe = make_recipe(models["tied"], f"lora_adapter_path={path}")
    recipe.trainer.resource_pools.ref = 1
    with pytest.raises(ConfigError, match="the separate reference would be the model without"):
        check(recipe)


def test_training_continues_from_the_adapter_of_an_export(models, tmp_path):
    """The second run starts at the weights at which the first one ended, for trainer and engine."""
    recipe = make_recipe(models["tied"], r"exclude_modules='.*layers\.1.*'", "lora_alpha=5")
    recipe.actor_rollout_ref.rollout.dtype = "float32"
    check(recipe)
    first = make_engine(recipe)
    trained = compute_logits(first.module)
    exported = export_checkpoint(first, recipe, tmp_path)
    path = tmp_path / "export" / "lora_adapter"
    second = make_recipe(models["tied"], f"lora_adapter_path={path}", "lora_rank=0")
    second.actor_rollout_ref.model.lora_alpha = VERL_ALPHA
    check(second)
    engine = make_engine(second)
    assert torch.equal(compute_logits(engine.module), trained)
    weights = exported.state_dict()
    for name, weight in engine.get_per_tensor_param()[0]:  # as for the rollout engine
        assert torch.equal(weights[name].to(weight.dtype), weight), name


def test_a_run_without_a_trainer_samples_from_the_merged_adapter(models, tmp_path):
    path = write_adapter(models["untied"], tmp_path / "sft")
    recipe = make_recipe(models["untied"], f"lora_adapter_path={path}")
    check(recipe)
    trained = compute_logits(make_engine(recipe).module)
    model = recipe.actor_rollout_ref.model
    export.write_merged(model.path, str(path), "float32", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.allclose(compute_logits(merged), trained, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    assert (trained - compute_logits(base)).abs().max() > 0.01
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


# --- FSDP1, on two ranks -------------------------------------------------------------------------
