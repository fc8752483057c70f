"""Checkpoints: whole or not there, found again, checked before anything starts; verl's layout, so verl's tools work.

    save(workers, folder, state, ...)    <folder>/global_step_<N>/{actor,critic,data.pt,config.yaml,manifest.json}
    newest(folder)                       the last whole one, and what is wrong with those after it
    check(checkpoint, config, command)   that it is of this recipe's model, and what of the recipe changed since
    load(workers, checkpoint)            the workers' weights, optimisers, schedulers and RNG; the driver's state
    export(checkpoint, target)           a Hugging Face folder

A checkpoint is written as saving_<N>, with its manifest (the size of every file) last, and then renamed. So a folder
with a manifest that agrees with its files is whole, whatever it is called and whenever the run was killed. All ranks
must see one file system: the manifest is written only where the shards of every rank are seen.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kit.config import user_functions
from kit.config.load import leaves, public
from kit.errors import ConfigError, RunError
from kit.extras import parallelism
from kit.runs import files

MANIFEST = "manifest.json"
POINTER = "latest_checkpointed_iteration.txt"  # verl's: the step of the last one
EXPORTED = "step.txt"  # in an export: the step whose weights it holds
NAME = re.compile(r"(?:global_step|saving)_(\d+)")
LAYOUT = "the shards are laid out for it"
RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")  # whose product they are
# What a checkpoint cannot go on with otherwise, and why. All else may change, and is said.
FIXED = {
    **dict.fromkeys(RANKS, "each rank loads the shard that it wrote"),
    **dict.fromkeys(
        ["model_engine", "actor_rollout_ref.actor.strategy", "critic.strategy"], LAYOUT
    ),
    **dict.fromkeys(parallelism.of_sizes(), LAYOUT),
    "actor_rollout_ref.model.lora_rank": "the adapters have other shapes",
    "actor_rollout_ref.model.target_modules": "the adapters sit elsewhere",
}
# These come back with the optimizer's state, whatever the recipe says; without that (load_contents) they may change.
OPTIMIZER = re.compile(
    r"(actor_rollout_ref\.actor|critic)\.optim\.(lr|betas|weight_decay|optimizer|override_.*)$"
)
# How it is started, and what follows from trainer.total_training_steps.
UNTOLD = re.compile(
    r"trainer\.(resume_|default_local_dir)|.*(experiment_name|optim\.total_training_steps)$|ray_kwargs\."
)


def save(workers: Any, folder: Path, state: dict[str, Any], config: DictConfig) -> Path:
    """Write a checkpoint, point POINTER at it, and delete what trainer.max_actor_ckpt_to_keep has no room for.

    workers: training.Workers. state: what the driver needs to go on, plain values only, with its `step`. Raises
    RunError where it cannot be written, a full disk above all; what was there before stays.
    """
    import torch  # not at the top: a second, which a recipe that is refused need not wait

    target, partial = folder / f"global_step_{state['step']}", folder / f"saving_{state['step']}"
    shutil.rmtree(
        partial, ignore_errors=True
    )  # of a run that was killed while it saved, maybe with more ranks
    try:
        for name, group in {"actor": workers.actor, "critic": workers.critic}.items():
            if group is not None:
                group.save_checkpoint(str((partial / name).absolute()), None, state["step"], None)
                if missing := unseen(partial / name, group.world_size, config):
                    lost = f"{len(missing)} shards of {group.world_size} ranks are not there"
                    raise OSError(
                        f"{lost}, as on a file system that not all nodes share: {missing[0]}, ..."
                    )
        partial.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(public(config), partial / "config.yaml")
        torch.save(state, partial / "data.pt")
        seal(partial)
    except Exception as error:  # of a worker or of ours, by any name: half a checkpoint must not keep the disk full
        shutil.rmtree(partial, ignore_errors=True)
        last = newest(folder)[0]
        why = (str(getattr(error, "cause", None) or error).strip() or repr(error)).splitlines()[-1]
        raise RunError(
            f"the checkpoint of step {state['step']} could not be written: {why}; see that there is room in {folder}, "
            f"then the same command goes on from {last or 'the start'}"
        ) from error
    with files.writing(target):
        if target.exists():  # the same step again: a broken one, or of an earlier run; until then saving_N is the one
            shutil.rmtree(target)
        os.replace(partial, target)
    with files.replacing(folder / POINTER) as pointer:
        pointer.write_text(str(state["step"]))
    keep = config.trainer.max_actor_ckpt_to_keep
    others = [path for path in found(folder) if path != target and not broken(path)]
    for old in others[keep - 1 :] if keep else []:
        with files.writing(old):
            shutil.rmtree(old)
    return target


def unseen(folder: Path, ranks: int, config: DictConfig) -> list[str]:
    """The shards that so many ranks must have written into `folder` (actor or critic), and that are not there."""
    section = "actor_rollout_ref.actor" if folder.name == "actor" else "critic"
    saved = OmegaConf.select(config, f"{section}.checkpoint.save_contents") or list(
        parallelism.SHARDS
    )
    names = parallelism.written(config.model_engine, saved, ranks)
    return sorted(name for name in names if not (folder / name).is_file())


def not_finite(workers: Any) -> list[str]:
    """The weights, and the optimiser's state, that hold a NaN or an infinity on any rank: their names."""
    import ray

    def look(worker: Any, name: str) -> list[str]:  # in the worker, to which it travels by value
        import torch

        held = getattr(worker, "worker_dict", {name: worker})[name]
        engine = getattr(held, "actor", held).engine
        modules = (
            engine.module if isinstance(engine.module, list) else [engine.module]
        )  # Megatron's, of stages
        tensors = [
            item
            for module in modules
            for item in module.named_parameters()
            if item[1].untyped_storage().size()
        ]
        for state in getattr(engine.optimizer, "state", {}).values():
            tensors += [
                (f"the optimizer's {name}", value)
                for name, value in state.items()
                if torch.is_tensor(value)
            ]
        local = (
            (name, value.to_local() if hasattr(value, "to_local") else value)
            for name, value in tensors
        )
        return [name for name, value in local if not torch.isfinite(value).all()]

    groups = [
        (name, group)
        for name in ("actor", "critic")
        if (group := getattr(workers, name)) is not None
    ]
    found = ray.get(
        [
            worker.__ray_call__.remote(look, name)
            for name, group in groups
            for worker in group.workers
        ]
    )
    return sorted({name for names in found for name in names})


def set_aside(folder: Path, step: int) -> list[str]:
    """Give whole checkpoints after `step` another name, since the run begins there again; a line on each."""
    lines = []
    for checkpoint in found(folder):
        if step_of(checkpoint) > step and not broken(checkpoint):
            aside = checkpoint.with_name(
                f"abandoned_{time.strftime('%Y%m%d-%H%M%S')}_{checkpoint.name}"
            )
            os.replace(checkpoint, aside)
            lines.append(f"{checkpoint} is of steps that are trained again: it is now {aside.name}")
    return lines


def seal(checkpoint: Path) -> None:
    """Write the manifest, once every file is on the disk and not only in memory."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    with (checkpoint / f"{MANIFEST}.tmp").open("w") as out:
        json.dump({"files": sizes}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(checkpoint / f"{MANIFEST}.tmp", checkpoint / MANIFEST)


def broken(checkpoint: Path) -> str:
    """What is wrong with a checkpoint; empty if it is whole."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    if odd := next(
        (path for path in checkpoint.rglob("*") if not (path.is_file() or path.is_dir())), None
    ):
        return f"{odd.relative_to(checkpoint)} is not a regular file"  # to read a FIFO would wait forever
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        sizes = None
    if not isinstance(sizes, dict):
        return f"it has no {MANIFEST}, which is written last"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return ""


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name. Raises ConfigError for another name."""
    if match := NAME.fullmatch(checkpoint.name):
        return int(match[1])
    raise ConfigError(
        f"{checkpoint} is not called as checkpoints are; give a folder global_step_<N>"
    )


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first, whole or not."""
    named = [path for path in folder.glob("*_*") if path.is_dir() and NAME.fullmatch(path.name)]
    return sorted(
        named, key=lambda path: (step_of(path), path.name.startswith("global")), reverse=True
    )


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """(the newest whole checkpoint, a line on each newer one that is not)."""
    lines: list[str] = []
    for checkpoint in found(folder):
        if not (why := broken(checkpoint)):
            return checkpoint, lines
        lines.append(f"{checkpoint} is not whole, and left alone: {why}")
    return None, lines


def resume_point(config: DictConfig) -> tuple[Path | None, list[str]]:
    """(the checkpoint to go on from, what to tell), by verl's keys: trainer.resume_mode = auto | disable | resume_path.

    Raises ConfigError if nothing would be left to train, or where none of the checkpoints that are there is whole.
    """
    folder, total = Path(config.trainer.default_local_dir), config.trainer.total_training_steps
    checkpoint: Path | None = None
    lines: list[str] = []
    if config.trainer.resume_mode == "resume_path":
        checkpoint = Path(config.trainer.resume_from_path or "nowhere")
        if why := broken(checkpoint):
            raise ConfigError(
                f"trainer.resume_from_path={checkpoint} is not a whole checkpoint: {why}; give another, or let "
                "trainer.resume_mode=auto find the newest"
            )
    elif config.trainer.resume_mode == "auto":
        checkpoint, lines = newest(folder)
        if lines and not checkpoint and (folder / POINTER).is_file():
            raise ConfigError(
                f"{lines[0]}; there is no other. trainer.resume_mode=disable begins again at step 0"
            )
    if not checkpoint or step_of(checkpoint) < total:
        return checkpoint, lines
    exported = Path("runs") / config.trainer.experiment_name / "export" / EXPORTED
    if step_of(checkpoint) == total and not (
        exported.is_file() and exported.read_text().strip() == str(total)
    ):
        return checkpoint, [
            *lines,
            f"all {total} steps are done; what is left is the last evaluation and the export",
        ]
    more = "raise trainer.total_training_steps, or give the run another trainer.experiment_name"
    raise ConfigError(f"nothing left to train: {checkpoint} is the last of {total} steps; {more}")


def before_replay(config: DictConfig, rollouts: Path) -> Path | None:
    """The checkpoint before the step of rollouts/step_<N>.jsonl, None for the first step; the recipe is made that of a
    run of this one step, in a folder of its own. Raises ConfigError."""
    match = re.fullmatch(r"step_(\d+)\.jsonl", rollouts.name)
    if not match or not rollouts.is_file():
        raise ConfigError(
            f"--replay {rollouts} is no rollouts file of a run; give runs/<name>/rollouts/step_<N>.jsonl"
        )
    step = int(match[1])
    checkpoint: Path | None = None
    if config.trainer.resume_mode == "resume_path":
        checkpoint = Path(config.trainer.resume_from_path or "nowhere")
    elif step > 1:
        folders = (rollouts.parent.parent / "checkpoints", Path(config.trainer.default_local_dir))
        places = [folder / f"global_step_{step - 1}" for folder in folders]
        checkpoint = next((place for place in places if place.is_dir()), places[0])
    if checkpoint and ((why := broken(checkpoint)) or step_of(checkpoint) != step - 1):
        raise ConfigError(
            f"--replay {rollouts} starts from the weights after step {step - 1}, but {checkpoint} is "
            f"{f'not whole: {why}' if why else 'of another step'}; save every step (trainer.save_freq=1), or set "
            "trainer.resume_mode=resume_path and another trainer.resume_from_path"
        )
    name = f"{config.trainer.experiment_name}_replay_{step}"
    config.trainer.experiment_name, config.trainer.default_local_dir = (
        name,
        f"runs/{name}/checkpoints",
    )
    config.env.val_files, config.trainer.val_before_train = [], False
    return checkpoint


# --- what it holds -------------------------------------------------------------------------------


def check(checkpoint: Path, config: DictConfig, command: str) -> list[str]:
    """What to tell of a checkpoint to go on from. Raises RunError for one of another model, command or layout, or with
    anything but tensors and plain values in it."""
    made = read(checkpoint / "data.pt").get("command")
    if made != command:
        raise RunError(
            f"{checkpoint} is of `{made}`, not of `{command}`: give another trainer.experiment_name"
        )
    then, now = leaves(OmegaConf.load(checkpoint / "config.yaml")), leaves(public(config))
    keys = [
        key for key in {**then, **now} if then.get(key) != now.get(key) and not UNTOLD.match(key)
    ]
    changed = {key: f"{key} {then.get(key)} -> {now.get(key)}" for key in keys}
    ranks = [math.prod(recipe[key] for key in RANKS) for recipe in (then, now)]
    free = RANKS if ranks[0] == ranks[1] else ()  # as many, on other nodes
    fixed = {key: why for key in keys if key not in free and (why := why_fixed(key, config))}
    refused = [f"{changed[key]} ({why})" for key, why in fixed.items()]
    if (
        command == "train"
        and user_functions.asks_for(config, "values")
        and not (checkpoint / "critic").is_dir()
    ):
        refused.append("a critic, which that run did not have")
    allowed = [text for key, text in changed.items() if key not in fixed]
    said = [f"changed since {checkpoint}, and allowed: {', '.join(allowed)}"] if allowed else []
    if refused:
        raise RunError(
            f"{checkpoint} cannot go on with {'; '.join(refused)}. Set these back, or give the run another "
            f"trainer.experiment_name{'; ' + said[0] if said else ''}"
        )
    for path in sorted(checkpoint.glob("*/*.pt")):
        tensors = read(path)
        if path.parent.name == "actor" and path.name.startswith("model_"):
            check_shapes(path, tensors, Path(config.actor_rollout_ref.model.path))
    if now["model_engine"] == "megatron":  # by pickle, in its own reader
        said.append(
            f"{checkpoint} is read by Megatron, which would run what is in it: go on from your own alone"
        )
    return said


def why_fixed(key: str, config: DictConfig) -> str:
    """Why a checkpoint cannot go on with another value of `key`; empty if it can."""
    if match := OPTIMIZER.match(key):
        contents = f"{match[1]}.checkpoint.load_contents"
        if "optimizer" in (OmegaConf.select(config, contents) or ["optimizer"]):
            return f"the saved optimizer has its own; {contents}=[model] begins a new one"
    return FIXED.get(key, "")


def read(path: Path) -> Any:
    """A file of tensors and plain values. Raises RunError for any other: verl's own loading would run what is in it."""
    import numpy as np
    import torch
    import torch.distributed.tensor  # DTensor, of which FSDP's shards are

    state = np.random.get_state()[1].__reduce__()[0]  # type: ignore[index, union-attr]  # numpy's RNG is saved too
    known = [state, np.ndarray, np.dtype, np.dtypes.UInt32DType, type(np.dtype("uint32"))]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # zip, pickle and torch each have their own
        text = str(error).strip() or repr(error)
        line = (re.findall(r".*unsupported .*", text, re.IGNORECASE) or text.splitlines())[
            0
        ].strip()
        raise RunError(
            f"{path} is not loaded, as it is not tensors and plain values alone: {line}; go on from another checkpoint "
            "(trainer.resume_mode=resume_path)"
        ) from None


def check_shapes(path: Path, tensors: dict[str, Any], model: Path) -> None:
    """A checkpoint's tensors have the shapes of the model's. Raises RunError with both.

    Names that only one of them has are left to FSDP, which refuses them by itself: files and modules of one model may
    differ in names. Of a model of the hub, which is not here yet, nothing is known.
    """
    from safetensors import safe_open

    theirs = {
        re.sub(r"base_model\.model\.|base_layer\.", "", name): t for name, t in tensors.items()
    }
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(theirs.keys() & set(weights.keys())):
                wanted, has = tuple(weights.get_slice(name).get_shape()), tuple(theirs[name].shape)
                if wanted != has:
                    raise RunError(
                        f"{path} is of another model: its {name} is {has}, that of {model} is {wanted}; set "
                        "actor_rollout_ref.model.path to its own, or give another trainer.experiment_name"
                    )


# --- back to work --------------------------------------------------------------------------------


def load(workers: Any, checkpoint: Path) -> dict[str, Any]:
    """Restore model, optimiser, scheduler and RNG of every worker (training.Workers); returns the driver's `state`."""
    for name, group in {"actor": workers.actor, "critic": workers.critic}.items():
        if group is not None:
            group.load_checkpoint(str((checkpoint / name).absolute()))
    return read(checkpoint / "data.pt")


def export(checkpoint: Path, target: Path) -> None:
    """Merge a checkpoint's shards into a Hugging Face folder, tokenizer included (verl.model_merger).

    The files are written to a subfolder and then moved, so that a full disk leaves an earlier export whole.
    """
    target.mkdir(parents=True, exist_ok=True)
    partial = target / files.PART  # within the folder, which may be a link to another disk
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
    try:
        merge(checkpoint, partial)
        written = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        (target / EXPORTED).unlink(missing_ok=True)
        shutil.rmtree(target / "lora_adapter", ignore_errors=True)
        for old in target.glob("model*.safetensors*"):  # else an old index may name old weights
            old.unlink()
        for path in written:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / path, target / path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    (target / EXPORTED).write_text(f"{step_of(checkpoint)}\n")


def merge(checkpoint: Path, target: Path) -> None:
    """Write the weights, the tokenizer and the configuration of a checkpoint as a Hugging Face folder."""
    # its warnings about DTensors that are read without a process group are of no use
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    actor = str(checkpoint / "actor")
    saved = checkpoint / "actor" / "model" / "huggingface"
    if saved.is_dir():  # Megatron's is one already
        shutil.copytree(saved, target)
        return
    config = ModelMergerConfig(
        "merge", "fsdp", str(target), local_dir=actor, hf_model_config_path=f"{actor}/huggingface"
    )
    FSDPModelMerger(config).merge_and_save()
    if (
        target / "lora_adapter"
    ).is_dir():  # verl writes the base model beside the adapter; the policy is both
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
        PeftModel.from_pretrained(base, target / "lora_adapter").merge_and_unload().save_pretrained(
            target
        )
    if "vision_config" in json.loads((target / "config.json").read_text()):
        keep_processor(
            OmegaConf.load(checkpoint / "config.yaml").actor_rollout_ref.model.path, target
        )


def keep_processor(model: str, target: Path) -> None:
    """What a model that sees has beside weights and tokenizer, which verl does not save."""
    from transformers.utils import cached_file

    for name in (
        "processor_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    ):
        if file := cached_file(model, name, _raise_exceptions_for_missing_entries=False):
            shutil.copy(file, target / name)
