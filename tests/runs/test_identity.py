"""Tests of what a resumed run says about what has changed, and of who owns a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.errors import ConfigError
from kit.runs import checkpoints, identity
from kit.runs.run import Run
from lab import run_card
from tests.helpers.recipes import load, make_partial, row, write_rows
from tests.runs.test_checkpoints import Group, make_config, save

REWARD = "def f(episode):\n    return {}\n"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current folder, with rows and a reward."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [row(f"say {n}") for n in range(8)])
    (tmp_path / "rw.py").write_text(REWARD.format(1.0))
    return tmp_path


def start(workspace) -> tuple:
    """Plan a run of the rows and the reward -> (recipe, fingerprint)."""
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"
    changes = ["env.train_files=[rows.jsonl]", "env.reward=rw.py:f", contents]
    recipe, inputs = load(workspace, *changes)
    return recipe, identity.make_fingerprint(recipe, inputs)


def test_a_resume_names_edited_rows_and_functions(workspace, here):
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


def find(folder: str, name: str, **trainer):
    recipe = make_partial(make_config(Path(folder), experiment_name=name, **trainer))
    return checkpoints.find_resume_point(recipe)


def test_a_folder_with_checkpoints_of_another_run_is_refused(here):
    checkpoint = save(Path("ck"), 1, experiment_name="one")
    assert find("ck", "one")[0] == checkpoint
    for mode in ("auto", "disable"):
        with pytest.raises(ConfigError, match="has checkpoints of the run one, and this is two"):
            find("ck", "two", resume_mode=mode)
    named = {"resume_mode": "resume_path", "resume_from_path": str(checkpoint)}
    assert find("mine", "two", **named) == (checkpoint, [f"{checkpoint} is of the run one."])
    with pytest.raises(ConfigError, match="Nothing is left to train"):
        find("mine", "two", **named, total_training_steps=1)  # it would export weights of `one`


def test_a_run_whose_folder_was_renamed_owns_its_checkpoints(here):
    save(Path("runs/one/checkpoints"), 1, experiment_name="one")
    Path("runs/one").rename("runs/two")
    checkpoint, notes = find("runs/two/checkpoints", "two")
    assert checkpoint == Path("runs/two/checkpoints/global_step_1") and notes == []


def test_contents_without_the_weights_are_refused_before_the_start(workspace):
    with pytest.raises(ConfigError, match="has no `model`"):
        load(workspace, "critic.checkpoint.save_contents=[hf_model,optimizer]")
