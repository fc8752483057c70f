"""Tests of checkpoints: interrupted saves, damaged files, other models, and code in files."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from env import Json
from kit.errors import ConfigError, RunError
from kit.recipe.keys import merge_nested, set_nested
from kit.run import checkpoints, identity
from kit.run.run import Run
from tests.helpers.recipes import load, make_partial, row, write_rows


class Group:
    """A worker group whose ranks write the same files as verl's: a model shard and the RNG."""

    world_size = 2

    def __init__(self, width: int = 4):
        self.width = width

    def save_checkpoint(self, path, *_):
        os.makedirs(path, exist_ok=True)
        for rank in (0, 1):
            end = f"world_size_{self.world_size}_rank_{rank}.pt"
            torch.save({"layer.weight": torch.ones(self.width, 3)}, f"{path}/model_{end}")
            rng = {"numpy": np.random.get_state(), "torch": torch.get_rng_state()}
            torch.save({"rng": rng}, f"{path}/extra_state_{end}")
        Path(path, "fsdp_config.json").write_text("{}")


def make_config(folder: Path, **trainer) -> Json:
    """Make a configuration that saves to a folder. trainer: keys of its section `trainer`."""
    settings = {
        "default_local_dir": str(folder),
        "resume_mode": "auto",
        "total_training_steps": 100,
        "n_gpus_per_node": 2,
        "nnodes": 1,
        "max_actor_ckpt_to_keep": None,
        "experiment_name": "checked",
    }
    actor = {
        "optim": {"lr": 0.1},
        "strategy": "fsdp2",
        "checkpoint": {"save_contents": ["model", "extra"]},
    }
    model = {"path": str(folder / "model"), "lora_rank": 0}
    sections = {
        "trainer": settings | trainer,
        "actor_rollout_ref": {"actor": actor, "model": model},
    }
    return {**sections, "algorithm": {"adv_estimator": "grpo"}}


def save(folder: Path, step: int, group=None, **trainer) -> Path:
    """Save a checkpoint of a step. group: the actor's worker group."""
    workers: Any = SimpleNamespace(actor=group or Group(), critic=None)
    state = checkpoints.LoopState("train", step)
    recipe = make_partial(make_config(folder, **trainer))
    return checkpoints.save(workers, folder, state, recipe)


def find_resume_point(folder: Path, **trainer) -> tuple[Path | None, list[str]]:
    """Find the checkpoint from which a run resumes."""
    return checkpoints.find_resume_point(make_partial(make_config(folder, **trainer)))


def check(checkpoint: Path, config: Json, command="train", arguments=()) -> list[str]:
    """Check that a recipe can resume from a checkpoint, and return lines to print."""
    return checkpoints.check(checkpoint, make_partial(config, command, arguments))


# Audit events of the calls that change the file system.
FILE_EVENTS = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "shutil.rmtree",
    "os.replace",
)


def save_and_die(folder: Path, n: int) -> None:
    """Save step 2, and kill this process at the n-th call that changes the file system."""
    left = n

    def die(event, _):
        nonlocal left
        if event in FILE_EVENTS:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    save(folder, 2, Group(width=5))
    os._exit(0)


def test_a_save_that_is_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    """A child process saves step 2, over complete steps 1 and 2 of an earlier run.

    It kills itself at its n-th call of the file system, for each n until the save is complete.
    """
    monkeypatch.setattr(checkpoints, "write_yaml", str)  # YAML takes most of the time of a save
    moments = set()
    for n in range(1, 1000):
        folder = tmp_path / str(n)
        save(folder, 1)
        save(folder, 2)
        child = os.fork()
        if not child:
            save_and_die(folder, n)
        _, status = os.waitpid(child, 0)
        last, notes = checkpoints.find_newest(folder)
        assert last is not None and not checkpoints.find_damage(last)
        shard = checkpoints.read(last / "actor" / "model_world_size_2_rank_1.pt")
        width = shard["layer.weight"].shape[0]
        state = checkpoints.read(last / "data.pt")
        moments.add((last.name, width, state["step"]))
        assert all("_2 is not complete and is not used" in note for note in notes)
        again = save(folder, 2, Group(width=6))  # files of the killed save do not matter
        assert checkpoints.find_newest(folder)[0] == again and not (folder / "saving_2").exists()
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    else:
        raise AssertionError("no save was complete")
    # The old step 2 is used until it is deleted. Then the new one is complete as saving_2.
    assert n > 20 and moments == {
        ("global_step_2", 4, 2),
        ("saving_2", 5, 2),
        ("global_step_2", 5, 2),
    }


def test_a_truncated_file_is_reported_and_the_previous_checkpoint_is_used(tmp_path):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    name = "actor/model_world_size_2_rank_1.pt"
    size = (last / name).stat().st_size
    os.truncate(last / name, size // 2)
    checkpoint, notes = find_resume_point(tmp_path)
    assert checkpoint == tmp_path / "global_step_1"
    unused = f"{last} is not complete and is not used"
    assert notes == [f"{unused}: {name} has {size // 2} bytes of {size}"]
    (last / name).unlink()
    assert checkpoints.find_newest(tmp_path)[1] == [f"{unused}: {name} is missing"]
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        find_resume_point(tmp_path, resume_mode="resume_path", resume_from_path=str(last))
    shutil.rmtree(tmp_path / "global_step_1")
    with pytest.raises(ConfigError, match="There is no other"):
        find_resume_point(tmp_path)


def test_shards_of_only_half_of_the_ranks_are_an_error(tmp_path):
    """Two nodes do not share a disk: the driver sees only the shards of its node."""
    first = save(tmp_path, 1)

    class GroupOfFour(Group):
        """It has four ranks, and only two of them write to this folder."""

        world_size = 4

    with pytest.raises(RunError, match="4 shards of 4 ranks are not there"):
        save(tmp_path, 2, GroupOfFour())
    assert checkpoints.find_newest(tmp_path) == (first, [])


def test_old_checkpoints_are_deleted_but_never_the_last_complete_one(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step, max_actor_ckpt_to_keep=2)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == [
        "global_step_4",
        "global_step_3",
    ]
    os.truncate(tmp_path / "global_step_4" / "data.pt", 3)
    save(tmp_path, 5, max_actor_ckpt_to_keep=1)  # it neither counts nor deletes the incomplete one
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == [
        "global_step_5",
        "global_step_4",
    ]
    assert checkpoints.find_newest(tmp_path)[0] == tmp_path / "global_step_5"
    # after a run starts again at step 0, it keeps the checkpoint that it has just saved
    assert save(tmp_path, 2, max_actor_ckpt_to_keep=1).is_dir()


def test_checkpoints_of_later_steps_than_the_resumed_one_are_renamed(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    os.truncate(tmp_path / "global_step_3" / "data.pt", 3)
    [note] = checkpoints.set_aside(tmp_path, 1)
    assert "global_step_2 is of steps that are trained again. It is now abandoned_" in note
    assert checkpoints.find_newest(tmp_path)[0] == tmp_path / "global_step_1"
    assert not checkpoints.find_damage(next(tmp_path.glob("abandoned_*_global_step_2")))
    assert (tmp_path / "global_step_3").is_dir()  # an incomplete one keeps its name


def test_a_file_that_contains_code_is_not_loaded(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/executed",)

    checkpoint = save(tmp_path, 1)
    for name in (
        "data.pt",
        "actor/extra_state_world_size_2_rank_1.pt",
        "actor/model_world_size_2_rank_0.pt",
    ):
        path = checkpoint / name
        original = path.read_bytes()
        torch.save({"step": Malicious()}, path)
        with pytest.raises(RunError, match=f"{name} is not loaded"):
            check(checkpoint, make_config(tmp_path))
        path.write_bytes(pickle.dumps({"step": Malicious()}))
        with pytest.raises(RunError, match=f"{name} is not loaded"):
            check(checkpoint, make_config(tmp_path))
        path.write_bytes(original)
    assert not (tmp_path / "executed").exists()
    assert check(checkpoint, make_config(tmp_path)) == []


def test_changed_keys_are_notes_or_errors(tmp_path):
    checkpoint = save(tmp_path, 1)
    config = make_config(tmp_path)
    config["trainer"]["total_training_steps"] = 200
    allowed = f"Changed since {checkpoint}: trainer.total_training_steps 100 -> 200"
    assert check(checkpoint, config) == [allowed]
    with pytest.raises(RunError, match="is of `train`, not of `sft`"):
        check(checkpoint, config, "sft")
    with pytest.raises(RunError, match="a critic, which that run did not have"):
        changed = config | {"algorithm": {"adv_estimator": "gae"}}
        check(checkpoint, changed, arguments=["values"])
    # the same number of ranks, on two nodes
    spread = merge_nested(config, {"trainer": {"n_gpus_per_node": 1, "nnodes": 2}})
    (note,) = check(checkpoint, spread)
    assert "trainer.n_gpus_per_node 2 -> 1" in note and "trainer.nnodes 1 -> 2" in note
    config["trainer"]["n_gpus_per_node"] = 4
    with pytest.raises(RunError, match="n_gpus_per_node 2 -> 4"):
        check(checkpoint, config)


def test_settings_in_the_saved_optimizer_must_not_change(tmp_path):
    key = "actor_rollout_ref.actor"
    checkpoint = save(tmp_path, 1)
    config = make_config(tmp_path)
    set_nested(config, f"{key}.optim.lr", 0.5)
    with pytest.raises(RunError, match=rf"{key}\.optim\.lr .*the saved optimizer"):
        check(checkpoint, config)
    set_nested(config, f"{key}.checkpoint.load_contents", ["model"])
    assert f"{key}.optim.lr" in check(checkpoint, config)[0]


# --- what has changed, and whose checkpoint it is ------------------------------------------------

REWARD = "def f(episode):\n    return {}\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Return the current folder, with rows and a reward."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [row(f"say {n}") for n in range(8)])
    (tmp_path / "rw.py").write_text(REWARD.format(1.0))
    return tmp_path


def start(workspace) -> tuple:
    """Plan a run of the rows and the reward, and return (recipe, fingerprint)."""
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"
    changes = ["env.train_files=[rows.jsonl]", "env.reward=rw.py:f", contents]
    recipe, inputs, _ = load(workspace, *changes)
    return recipe, identity.make_fingerprint(recipe, inputs)


def test_a_resume_names_edited_rows_and_functions(workspace, here):
    from lab import run_card

    recipe, before = start(workspace)
    with Run(recipe, None, before):
        workers = SimpleNamespace(actor=Group(), critic=None)
        state = checkpoints.LoopState(step=1)
        checkpoint = checkpoints.save(workers, Path("runs/tiny/checkpoints"), state, recipe)
    assert checkpoints.check(checkpoint, recipe, before) == []
    rows = [row("new"), *(row(f"say {n}") for n in range(1, 8))]
    write_rows(here / "rows.jsonl", rows)
    (here / "rw.py").write_text(REWARD.format(0.5))
    recipe, after = start(workspace)
    changed, others = checkpoints.check(checkpoint, recipe, after)
    assert changed == f"Changed since {checkpoint}: the content of env.reward=rw.py:f"
    assert others == (
        "WARNING     env.train_files has other rows: 1 added, 1 removed (an edited row counts as "
        f"both) since {checkpoint}"
    )
    with Run(recipe, checkpoint, after):
        pass
    [line] = run_card.list_resume_changes(Path("runs/tiny"))
    assert "After step 1" in line and "1 added, 1 removed" in line


def test_a_folder_with_checkpoints_of_another_run_is_refused(here):
    checkpoint = save(Path("ck"), 1, experiment_name="one")
    assert find_resume_point(Path("ck"), experiment_name="one")[0] == checkpoint
    for mode in ("auto", "disable"):
        with pytest.raises(ConfigError, match="has checkpoints of the run one, and this is two"):
            find_resume_point(Path("ck"), experiment_name="two", resume_mode=mode)
    named: dict[str, Any] = {"resume_mode": "resume_path", "resume_from_path": str(checkpoint)}
    named["experiment_name"] = "two"
    notes = [f"{checkpoint} is of the run one."]
    assert find_resume_point(Path("mine"), **named) == (checkpoint, notes)
    named["total_training_steps"] = 1
    with pytest.raises(ConfigError, match="Nothing is left to train"):
        find_resume_point(Path("mine"), **named)  # it would export weights of `one`


def test_a_run_whose_folder_was_renamed_owns_its_checkpoints(here):
    save(Path("runs/one/checkpoints"), 1, experiment_name="one")
    Path("runs/one").rename("runs/two")
    folder = Path("runs/two/checkpoints")
    checkpoint, notes = find_resume_point(folder, experiment_name="two")
    assert checkpoint == Path("runs/two/checkpoints/global_step_1") and notes == []


def test_contents_without_the_weights_are_refused_before_the_start(workspace):
    with pytest.raises(ConfigError, match="has no `model`"):
        load(workspace, "critic.checkpoint.save_contents=[hf_model,optimizer]")
