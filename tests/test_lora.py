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
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from kit.engine.worker_patches import fix_initial_adapter
from kit.recipe.adapters import VERL_ALPHA, check_lora, describe_adapter, read_adapter
from kit.recipe.derive import Facts
from kit.recipe.keys import MODEL
from kit.recipe.load import read_source
from kit.recipe.recipe import Recipe, build
from kit.recipe.redaction import write_yaml
from kit.recipe.settings import make_settings
from kit.run import export
from tests.helpers.models import make_model
from tests.helpers.recipes import CPU, RECIPE

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


def make_recipe(model: Path, *changes: str, **values: str) -> Recipe:
    """Make the tiny recipe with LoRA. changes: of actor_rollout_ref.model. values: of the rest."""
    usual = [f"path={model}", "lora_rank=4", "lora_alpha=6", "lora.merge=true"]
    arguments = [f"{MODEL}.{change}" for change in [*usual, *changes]]
    arguments += ["actor_rollout_ref.rollout.dtype=bfloat16"]
    arguments += [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    source = read_source([str(CPU), str(RECIPE)], arguments)
    settings = make_settings(source, "train")
    return build(source, facts=Facts(adapter=read_adapter(settings.model)))


def list_problems(model: Path, *changes: str, **values: str) -> list[str]:
    """List the problems with the adapter of `make_recipe`."""
    recipe = make_recipe(model, *changes, **values)
    settings = make_settings(recipe.source, "train")
    return list(check_lora(settings, recipe.facts.adapter))


def make_engine(recipe: Recipe, **contents: Any) -> FSDPEngine:
    """Make verl's engine with FSDP2, which keeps gathered weights. contents: of the checkpoint."""
    model = recipe.model
    engine = FSDPEngine(
        HFModelConfig(
            path=model.path,
            lora_rank=model.lora_rank,
            lora_alpha=int(model.lora_alpha),
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,  # type: ignore[arg-type]
            lora_adapter_path=model.lora_adapter_path,
            lora={"merge": True},
            override_config={"attn_implementation": "eager"},
        ),
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
    if recipe.model.lora_adapter_path:
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


def export_checkpoint(engine: FSDPEngine, recipe: Recipe, folder: Path) -> torch.nn.Module:
    """Save the engine's weights, and export them as a run does."""
    engine.save_checkpoint(str(folder / "global_step_1" / "actor"))
    (folder / "global_step_1" / "config.yaml").write_text(write_yaml(recipe.redacted()))
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
    problems = list_problems(models["tied"], f"target_modules={targets}")
    assert len(problems) == bool(error) and re.search(error, "".join(problems))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("tied", ["target_modules=all-linear"]),
        ("untied", [r"target_modules=.*\.layers\.0\..*(q|up)_proj"]),
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
    recipe = make_recipe(models[kind], *changes, actor_rollout_ref__rollout__dtype="float32")
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
    assert not list_problems(models["tied"], f"lora_adapter_path={path}")
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
    assert not list_problems(models["tied"], *changes)
    recipe = make_recipe(models["tied"], *changes)
    model = recipe.model
    assert (model.lora_rank, model.lora_alpha) == (4, 6)
    assert model.target_modules == ["q_proj", "v_proj"]
    assert model.lora_adapter_path == str(path)  # workers run in other folders
    (line,) = describe_adapter(model, recipe.facts.adapter)
    assert line.endswith(f"rank 4, alpha 6, trained on {models['tied']}")


def test_all_contradictions_of_recipe_and_adapter_are_in_one_error(models, tmp_path):
    path = write_adapter(models["tied"], tmp_path / "sft")
    changes = ["lora_rank=8", "lora_alpha=5", "target_modules=[q_proj]", "exclude_modules=[x]"]
    (problem,) = list_problems(models["tied"], f"lora_adapter_path={path}", *changes)
    for change in changes:
        assert f"Remove actor_rollout_ref.model.{change.partition('=')[0]}." in problem


@pytest.mark.parametrize(
    ("field", "value"), [("use_dora", True), ("bias", "all"), ("init_lora_weights", "pissa")]
)
def test_an_adapter_with_features_that_would_be_lost_is_refused(models, tmp_path, field, value):
    path = write_adapter(models["tied"], tmp_path / "sft")
    edit_config(path, **{field: value})
    (problem,) = list_problems(models["tied"], f"lora_adapter_path={path}")
    assert f"it has {field}=" in problem


def test_an_adapter_is_not_added_twice(models, tmp_path):
    """An export has the merged weights."""
    path = write_adapter(models["tied"], tmp_path / "export" / "lora_adapter")
    shutil.copytree(models["tied"], tmp_path / "export", dirs_exist_ok=True)
    problems = list_problems(tmp_path / "export", f"lora_adapter_path={path}")
    assert "is merged into" in problems[0]


def test_a_separate_reference_has_no_adapter(models, tmp_path):
    path = write_adapter(models["tied"], tmp_path / "sft")
    pools = {"trainer__resource_pools__ref": "1"}
    (problem,) = list_problems(models["tied"], f"lora_adapter_path={path}", **pools)
    assert "the separate reference would be the model without" in problem


def test_training_continues_from_the_adapter_of_an_export(models, tmp_path):
    """The second run starts at the weights at which the first one ended, for trainer and engine."""
    changes = [r"exclude_modules=.*layers\.1.*", "lora_alpha=5"]
    assert not list_problems(models["tied"], *changes)
    recipe = make_recipe(models["tied"], *changes, actor_rollout_ref__rollout__dtype="float32")
    first = make_engine(recipe)
    trained = compute_logits(first.module)
    exported = export_checkpoint(first, recipe, tmp_path)
    path = tmp_path / "export" / "lora_adapter"
    changes = [f"lora_adapter_path={path}", "lora_rank=0", f"lora_alpha={VERL_ALPHA}"]
    assert not list_problems(models["tied"], *changes)
    second = make_recipe(models["tied"], *changes)
    engine = make_engine(second)
    assert torch.equal(compute_logits(engine.module), trained)
    weights = exported.state_dict()
    for name, weight in engine.get_per_tensor_param()[0]:  # as for the rollout engine
        assert torch.equal(weights[name].to(weight.dtype), weight), name


def test_a_run_without_a_trainer_samples_from_the_merged_adapter(models, tmp_path):
    path = write_adapter(models["untied"], tmp_path / "sft")
    recipe = make_recipe(models["untied"], f"lora_adapter_path={path}")
    assert not list_problems(models["untied"], f"lora_adapter_path={path}")
    trained = compute_logits(make_engine(recipe).module)
    model = recipe.model
    export.write_merged(model.path, str(path), "float32", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.allclose(compute_logits(merged), trained, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32)
    assert (trained - compute_logits(base)).abs().max() > 0.01
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


# --- FSDP1, on two ranks -------------------------------------------------------------------------
