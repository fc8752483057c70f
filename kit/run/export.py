"""Export a checkpoint's policy as a Hugging Face folder.

Protects: an earlier export, from a full disk, and the dtype and adapter of the sampled policy.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from safetensors import safe_open

from env import Json
from kit.recipe.adapters import ADAPTER_FOLDER
from kit.recipe.recipe_text import read_saved
from kit.run import files
from kit.run.checkpoints import EXPORTED, step_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def export(checkpoint: Path, target: Path) -> None:
    """Merge a checkpoint's shards into a Hugging Face folder, with the tokenizer.

    The files are written to a subfolder and then moved, so that a full disk leaves an earlier
    export as it was.
    """
    target.mkdir(parents=True, exist_ok=True)
    partial = target / files.PARTIAL_SUFFIX  # inside `target`, which may be a link to another disk
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    try:
        merge(checkpoint, partial)
        names = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        (target / EXPORTED).unlink(missing_ok=True)
        shutil.rmtree(target / ADAPTER_FOLDER, ignore_errors=True)
        for old in target.glob("model*.safetensors*"):  # an old index may name old weights
            old.unlink()
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / name, target / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    (target / EXPORTED).write_text(f"{step_of(checkpoint)}\n")


def merge(checkpoint: Path, target: Path) -> None:
    """Write weights, tokenizer and configuration of a checkpoint (verl.model_merger).

    The weights have the dtype of the rollout engine. So the folder has the policy that the run
    sampled from and evaluated.
    """
    from transformers import AutoModelForCausalLM
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    actor = checkpoint / "actor"
    megatron_export = actor / "model" / "huggingface"
    if megatron_export.is_dir():
        shutil.copytree(megatron_export, target)
        return
    config = ModelMergerConfig(
        "merge",
        "fsdp",
        str(target),
        local_dir=str(actor),
        hf_model_config_path=str(actor / "huggingface"),
    )
    recipe = read_saved(checkpoint / "config.yaml")["actor_rollout_ref"]
    model = recipe["model"]
    dtype = getattr(torch, recipe["rollout"]["dtype"], torch.bfloat16)  # vLLM's "auto" is no dtype
    has_adapter = model["lora_rank"] > 0
    # verl writes an adapter apart from its base model. It is merged in float32, as for the rollout
    # engine, and rounded after that.
    written = torch.float32 if has_adapter else dtype
    # The merger calls Tensor.bfloat16 on each shard. If the run samples in float32, that would be
    # another policy: after 20 steps of the demo, bfloat16 has the initial value for 83% of weights.
    with mock.patch.object(torch.Tensor, "bfloat16", lambda shard: shard.to(written)):
        FSDPModelMerger(config).merge_and_save()
    if has_adapter:
        base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        complete_adapter_config(target / ADAPTER_FOLDER, base, model)
        save_merged(base, target / ADAPTER_FOLDER, dtype, target)
    hf_config = json.loads((target / "config.json").read_text())
    hf_config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(hf_config, indent=2))
    if "vision_config" in hf_config:
        copy_processor(model["path"], target)


def save_merged(base: PreTrainedModel, adapter: Path, dtype: torch.dtype, target: Path) -> None:
    """Write a base model in float32 with an adapter merged in, rounded to `dtype`."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, adapter)
    model.merge_and_unload().to(dtype).save_pretrained(target)


def complete_adapter_config(folder: Path, base: torch.nn.Module, model: Json) -> None:
    """Complete the adapter_config.json that verl writes, so that training can continue from it.

    verl writes the last part of each adapted module's name, such as q_proj. If the recipe adapts
    only some of the modules with that name, this lists their whole names.

    model: the section actor_rollout_ref.model.
    """
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as weights:
        keys = list(weights.keys())
    adapted = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys}
    parts = {name.rpartition(".")[2] for name in adapted}
    named = {name for name, _ in base.named_modules() if name.rpartition(".")[2] in parts}
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {
        "base_model_name_or_path": model["path"],
        "lora_alpha": model["lora_alpha"],
        "target_modules": sorted(parts if named == adapted else adapted),
    }
    path.write_text(json.dumps(config, indent=2))


def write_merged(
    model: str, adapter: str, dtype: str, target: Path, trust_remote_code: bool = False
) -> None:
    """Write a model with its adapter merged in, for a run that does not train.

    dtype: of the rollout engine. The adapter is merged in float32 and rounded after that, as in
    training.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": trust_remote_code}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    written = getattr(torch, dtype, torch.bfloat16)  # vLLM's "auto" is no dtype
    save_merged(base, Path(adapter), written, target)
    AutoTokenizer.from_pretrained(model, **options).save_pretrained(target)


def copy_processor(model: str, target: Path) -> None:
    """Copy the files of an image processor, which verl does not save."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        file = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if file:
            shutil.copy(file, target / name)
