"""Save, find, check and load checkpoints, in verl's layout.

A checkpoint is written to a folder saving_<N>, which is then renamed to global_step_<N>. The
manifest (the size of every file) is written last. So a folder is complete if its manifest agrees
with its files, under both names. A run may be killed at any time. All ranks must share a file
system: the manifest is written only if the shards of every rank are there.

Protects: trained weights, from a save that is cut, a recipe that does not fit, and code in files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from env import Json
from kit.data.fingerprint import Fingerprint
from kit.errors import ConfigError, RunError
from kit.recipe.keys import flatten
from kit.recipe.recipe import Recipe
from kit.recipe.redaction import write_yaml
from kit.run import files, identity

if TYPE_CHECKING:
    from training import Workers

MANIFEST = "manifest.json"
FINGERPRINT = "config.fingerprint.json"  # next to config.yaml, in a run folder, too
POINTER = "latest_checkpointed_iteration.txt"  # verl's file: the step of the last checkpoint
EXPORTED = "step.txt"  # in an export: the step of its weights
NAME = re.compile(r"(?:global_step|saving)_(\d+)")
# Keys that a resumed run must not change, since its ranks load the saved shards. It may change all
# others, and the number of nodes if that of ranks stays.
RANKS = ("trainer.n_gpus_per_node", "trainer.nnodes")  # their product is the number of ranks
FIXED_KEYS = (
    "model_engine",
    "actor_rollout_ref.actor.strategy",
    "critic.strategy",
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.target_modules",
)
# Keys that a resumed run must not change if it loads the optimizer. With most of them, a new value
# would have no effect, since the saved optimizer has the old one. FSDP would take another `lr`, and
# the run would not be the same.
OPTIMIZER_KEY = re.compile(
    r"(actor_rollout_ref\.actor|critic)\.optim\.(lr|betas|weight_decay|optimizer|override_.*)$"
)
# Changes of these keys are not printed. They set how a run is started, or follow from
# trainer.total_training_steps.
UNREPORTED_KEY = re.compile(
    r"trainer\.(resume_|default_local_dir)|.*(experiment_name|optim\.total_training_steps)$"
    r"|ray_kwargs\."
)


# --- save ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoopState:
    """The state of the loop that a checkpoint saves, besides the workers. Replaced at each step."""

    command: str = "train"
    step: int = 0
    batches: int = 0  # batches of prompts so far
    # {row id: rate}; in a file, by the content of the row
    pass_rates: dict[str, float] = dataclasses.field(default_factory=dict)
    kl_coef: float = 0.0  # the adaptive coefficient of the KL penalty
    rows: int = 0  # prompts of all batches so far, whose size a resumed run may change


def save(workers: Workers, folder: Path, state: LoopState, recipe: Recipe) -> Path:
    """Write a checkpoint, and delete old ones beyond trainer.max_actor_ckpt_to_keep.

    Raises RunError if it cannot be written, for example on a full disk; earlier checkpoints stay.
    """
    target = folder / f"global_step_{state.step}"
    partial = folder / f"saving_{state.step}"
    # left by a run that was killed while it saved, maybe with more ranks
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write(workers, partial, state, recipe)
    except Exception as error:  # a partial checkpoint must not keep the disk full
        shutil.rmtree(partial, ignore_errors=True)
        cause = str(getattr(error, "cause", None) or error).strip() or repr(error)
        last = find_newest(folder)[0] or "the start"
        raise RunError(
            f"The checkpoint of step {state.step} could not be written: "
            f"{cause.splitlines()[-1]}. If the disk is full, make room in {folder}. Then rerun the "
            f"same command to resume from {last}. See docs/troubleshooting.md."
        ) from error
    with files.explain_write_errors(target):
        if target.exists():  # broken, or of an earlier run; saving_N is complete
            shutil.rmtree(target)
        os.replace(partial, target)
    with files.replace_atomically(folder / POINTER) as pointer:
        pointer.write_text(str(state.step))
    delete_old(folder, target, recipe.trainer.max_actor_ckpt_to_keep)
    return target


def write(workers: Workers, partial: Path, state: LoopState, recipe: Recipe) -> None:
    """Write all files of a checkpoint. Raises OSError and the exceptions of the workers."""
    import torch  # takes a second, which a refused recipe need not wait for

    for name, group in {"actor": workers.actor, "critic": workers.critic}.items():
        if group is None:
            continue
        group.save_checkpoint(str((partial / name).absolute()), None, state.step, None)
        missing = find_missing_shards(partial / name, group.world_size, recipe)
        if missing:
            raise OSError(
                f"{len(missing)} shards of {group.world_size} ranks are not there, as on a file "
                f"system that the nodes do not share: {missing[0]}, ..."
            )
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "config.yaml").write_text(write_yaml(recipe.redacted()))
    run_fingerprint = Path("runs") / recipe.trainer.experiment_name / FINGERPRINT
    if run_fingerprint.is_file():
        shutil.copy(run_fingerprint, partial / FINGERPRINT)
    torch.save(dataclasses.asdict(state), partial / "data.pt")
    write_manifest(partial)


def delete_old(folder: Path, newest: Path, keep: int | None) -> None:
    """Delete all complete checkpoints but the last `keep`. None, 0, -1: keep all, as in verl."""
    if keep is None or keep < 1:
        return
    others = [path for path in list_checkpoints(folder) if path != newest and not find_damage(path)]
    for old in others[keep - 1 :]:
        with files.explain_write_errors(old):
            shutil.rmtree(old)


def find_missing_shards(folder: Path, ranks: int, recipe: Recipe) -> list[str]:
    """List the ranks' files that are missing in `folder` (actor or critic)."""
    section = recipe.actor if folder.name == "actor" else recipe.critic
    names = recipe.engine.list_shards(section.checkpoint.save_contents, ranks)
    return [name for name in names if not (folder / name).is_file()]


def write_manifest(checkpoint: Path) -> None:
    """Write the manifest, once every file is on the disk and not only in memory."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in paths}
    with files.replace_atomically(checkpoint / MANIFEST) as partial, partial.open("w") as out:
        json.dump({"files": sizes}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


# --- find ----------------------------------------------------------------------------------------


def set_aside(folder: Path, step: int) -> Iterator[str]:
    """Rename complete checkpoints after `step`, since the run trains these steps again.

    Yields a line about each.
    """
    for checkpoint in list_checkpoints(folder):
        if step_of(checkpoint) > step and not find_damage(checkpoint):
            stamp = time.strftime("%Y%m%d-%H%M%S")
            aside = checkpoint.with_name(f"abandoned_{stamp}_{checkpoint.name}")
            os.replace(checkpoint, aside)
            yield f"{checkpoint} is of steps that are trained again. It is now {aside.name}"


def find_damage(checkpoint: Path) -> str:
    """Describe the first file that is missing or wrong. Empty if the checkpoint is complete."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"it has no {MANIFEST}, which is written last"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return ""


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name. Raises ConfigError for another name."""
    match = NAME.fullmatch(checkpoint.name)
    if match:
        return int(match[1])
    raise ConfigError(f"{checkpoint} is not the name of a checkpoint. Give a global_step_<N>.")


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, the newest first, complete or not."""
    paths = [path for path in folder.glob("*_*") if path.is_dir() and NAME.fullmatch(path.name)]
    # of one step, global_step_N comes before saving_N, as in the order of their names
    return sorted(sorted(paths), key=step_of, reverse=True)


def find_newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and a line about each newer one that is not."""
    notes: list[str] = []
    for checkpoint in list_checkpoints(folder):
        damage = find_damage(checkpoint)
        if not damage:
            return checkpoint, notes
        notes.append(f"{checkpoint} is not complete and is not used: {damage}")
    return None, notes


class NothingLeftError(ConfigError):
    """The run that this recipe would resume is finished."""


def find_resume_point(recipe: Recipe) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume from, and lines to print, by verl's trainer.resume_mode.

    resume_mode: auto, disable or resume_path. Raises NothingLeftError, and ConfigError if there are
    checkpoints and none is complete, or if the newest in this run's folder is of another run.
    """
    folder = Path(recipe.trainer.default_local_dir)
    checkpoint, notes = find_newest(folder)
    if checkpoint and not is_of_run(checkpoint, recipe):
        raise ConfigError(
            f"trainer.default_local_dir={folder} has checkpoints of the run "
            f"{read_owner(checkpoint)}, and this is {recipe.trainer.experiment_name}. Remove this "
            "key, or give each run its folder. To start from that checkpoint, set trainer."
            "resume_mode=resume_path and trainer.resume_from_path, too."
        )
    if recipe.trainer.resume_mode == "disable":
        return None, []
    if recipe.trainer.resume_mode == "resume_path":
        checkpoint = Path(recipe.trainer.resume_from_path or "nowhere")
        notes = []
        damage = find_damage(checkpoint)
        if damage:
            raise ConfigError(
                f"trainer.resume_from_path={checkpoint} is not a complete checkpoint: {damage}. "
                "Give another, or let trainer.resume_mode=auto find the newest. "
                'See docs/troubleshooting.md, "Resume".'
            )
    elif notes and not checkpoint and (folder / POINTER).is_file():
        raise ConfigError(
            f"{notes[0]}. There is no other. Set trainer.resume_mode=disable to start at step 0."
        )
    if not checkpoint:
        return None, notes
    total = recipe.last_step
    is_own = is_of_run(checkpoint, recipe)
    if not is_own:
        notes.append(f"{checkpoint} is of the run {read_owner(checkpoint)}.")
    if step_of(checkpoint) < total:
        return checkpoint, notes
    is_pending = is_own and not is_exported(recipe.trainer.experiment_name, total)
    if is_pending and step_of(checkpoint) == total:
        notes.append(f"All {total} steps are done. The last evaluation and the export remain.")
        return checkpoint, notes
    raise NothingLeftError(
        f"Nothing is left to train: {checkpoint} is the last of {total} steps. Raise "
        "trainer.total_training_steps, or set another trainer.experiment_name."
    )


def is_of_run(checkpoint: Path, recipe: Recipe) -> bool:
    """Return whether a checkpoint is of this run: in its folder (maybe renamed), or by its name."""
    name = recipe.trainer.experiment_name
    is_inside = checkpoint.resolve().is_relative_to((Path("runs") / name).resolve())
    return is_inside or read_owner(checkpoint) in (name, None)


def read_owner(checkpoint: Path) -> object:
    """Return the name of the run that wrote a checkpoint, None if it is not known."""
    return identity.read_run(checkpoint).values.get("trainer.experiment_name")


def is_exported(run: str, step: int) -> bool:
    """Return whether the export of a run holds the weights of a step. run: its experiment_name."""
    return read_exported_step(Path("runs") / run / "export") == step


def list_checkpoint_folders(run: Path) -> list[Path]:
    """Return where a run may have its checkpoints: as its config.yaml says, and in its folder.

    run: its folder, which may have been moved.
    """
    saved = identity.read_run(run).values.get("trainer.default_local_dir")
    return [Path(saved), run / "checkpoints"] if saved else [run / "checkpoints"]


def read_exported_step(export: Path) -> int | None:
    """Return the step of the weights in an export, None if the folder is none."""
    path = export / EXPORTED
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


# --- check and load ------------------------------------------------------------------------------


def check(checkpoint: Path, recipe: Recipe, fingerprint: Fingerprint | None = None) -> list[str]:
    """Check that this recipe can resume from a checkpoint, and return lines to print.

    fingerprint: of the run that resumes. Raises RunError for a checkpoint of another command or
    layout, or with other contents than tensors and plain values.
    """
    saved_command = read(checkpoint / "data.pt").get("command")
    if saved_command != recipe.command:
        raise RunError(
            f"{checkpoint} is of `{saved_command}`, not of `{recipe.command}`. Set another "
            "trainer.experiment_name."
        )
    before = identity.read_run(checkpoint)
    now = fingerprint or Fingerprint(flatten(recipe.redacted()))
    changes = list_changes(before, now)
    refused = list_refused(recipe, changes, before.values, now.values)
    if recipe.has_critic and not (checkpoint / "critic").is_dir():
        refused.append("a critic, which that run did not have")
    if refused:
        raise RunError(
            f"{checkpoint} cannot be resumed with {'; '.join(refused)}. Set these back, or set "
            'another trainer.experiment_name. See docs/reliability.md, "Resuming a run".'
        )
    notes = [f"Changed since {checkpoint}: {', '.join(changes.values())}"] if changes else []
    notes += [f"WARNING     {text} since {checkpoint}" for text in now.list_row_changes(before)]
    for path in sorted(checkpoint.glob("*/*.pt")):
        read(path)  # before verl loads it, which would run code in it
    return notes


def list_changes(before: Fingerprint, now: Fingerprint) -> dict[str, str]:
    """Return {key: what changed}, without UNREPORTED_KEY and without rows."""
    changes = now.list_changes(before)
    return {key: text for key, text in changes.items() if not UNREPORTED_KEY.match(key)}


def list_refused(recipe: Recipe, changes: Mapping[str, str], before: Json, now: Json) -> list[str]:
    """List the changes that do not fit the saved shards or optimizer. before, now: all values."""
    ranks_before, ranks_now = (math.prod(values[key] for key in RANKS) for values in (before, now))
    refused = []
    for key, change in changes.items():
        optimizer = OPTIMIZER_KEY.match(key)
        if key in FIXED_KEYS or (key in RANKS and ranks_before != ranks_now):
            refused.append(f"{change} (the saved shards do not fit)")
        elif optimizer:
            contents_key = f"{optimizer[1]}.checkpoint.load_contents"
            if "optimizer" in (recipe.get(contents_key) or ["optimizer"]):
                reason = "the saved optimizer has its value"
                refused.append(f"{change} ({reason}; {contents_key}=[model] starts a new one)")
    return refused


def read(path: Path) -> Json:
    """Read a file of tensors and plain values. Raises RunError for any other content."""
    import numpy as np
    import torch
    import torch.distributed.tensor  # noqa: F401  (defines DTensor, the type of FSDP's shards)

    make_array = np.empty(0).__reduce__()[0]
    # the state of NumPy's random numbers is saved, too
    numpy_rng: list[Any] = [make_array, np.ndarray, np.dtype, np.dtypes.UInt32DType]
    try:
        with torch.serialization.safe_globals(numpy_rng):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # zip, pickle and torch raise different ones
        raise RunError(
            f"{path} is not loaded, since it holds more than tensors and plain values. "
            "Resume from another checkpoint (trainer.resume_mode=resume_path)."
        ) from error


def load(workers: Workers, checkpoint: Path) -> LoopState:
    """Restore model, optimizer and RNG of every worker, and return the state of the loop."""
    for name, group in {"actor": workers.actor, "critic": workers.critic}.items():
        if group is not None:
            group.load_checkpoint(str((checkpoint / name).absolute()))
    return LoopState(**read(checkpoint / "data.pt"))
