"""Export a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from omegaconf import OmegaConf

from kit.runs import files
from kit.runs.checkpoints import EXPORTED, step_of

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
        shutil.rmtree(target / "lora_adapter", ignore_errors=True)
        for old in target.glob("model*.safetensors*"):  # an old index may name old weights
            old.unlink()
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / name, target / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    (target / EXPORTED).write_text(f"{step_of(checkpoint)}\n")


def merge(checkpoint: Path, target: Path) -> None:
    """Write weights, tokenizer and configuration of a checkpoint (verl.model_merger)."""
    # it warns about DTensors that are read without a process group
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
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
    FSDPModelMerger(config).merge_and_save()
    if (target / "lora_adapter").is_dir():
        merge_adapter(target)
    hf_config = json.loads((target / "config.json").read_text())
    if "vision_config" in hf_config:
        model = OmegaConf.load(checkpoint / "config.yaml").actor_rollout_ref.model.path
        copy_processor(model, target)


def merge_adapter(target: Path) -> None:
    """Merge the LoRA adapter, which verl writes to a separate folder, into the base model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    model = PeftModel.from_pretrained(base, target / "lora_adapter")
    model.merge_and_unload().save_pretrained(target)


def copy_processor(model: str, target: Path) -> None:
    """Copy the files of an image processor, which verl does not save."""
    from transformers.utils import cached_file

    for name in PROCESSOR_FILES:
        file = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if file:
            shutil.copy(file, target / name)
