"""Tests the calls of a run and of a step, their order, and the files that are written.

The doubles of helpers/trainer.py record all calls.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import algorithm
from kit.errors import ConfigError
from kit.runs import checkpoints
from kit.runs.checkpoints import LoopState
from tests.helpers.recipes import row, write_rows
from tests.helpers.trainer import (
    ACTOR,
    QUIET,
    ROLLOUT,
    list_group_ids,
    list_row_ids,
    make_plan,
    read_run_lines,
)

# --- the run -------------------------------------------------------------------------------------


def test_a_run_evaluates_and_saves_after_the_steps_in_the_recipe(workspace, recorder, capsys):
    """It evaluates every two steps, saves every three, and does both after the last of five."""
    sizes = ["trainer.total_training_steps=5", "trainer.test_freq=2", "trainer.save_freq=3"]
    with algorithm.train(make_plan(workspace, *sizes)) as trainer:
        assert trainer.scores == {}
        trainer.fit()
        assert trainer.run.stages.is_export_pending
    kinds = ("validate", "rollout", "save", "update_weights", "export")
    calls = [name for name in recorder.calls if name.startswith(kinds)]
    assert calls == [
        *("update_weights 0", "validate"),
        *("rollout", "update_weights 1"),
        *("rollout", "update_weights 2", "validate"),
        *("rollout", "save 3", "update_weights 3"),
        *("rollout", "update_weights 4", "validate"),
        *("rollout", "save 5", "update_weights 5", "validate", "export 5"),
    ]
    assert "Finished in" in capsys.readouterr().out
    steps = [line["step"] for line in read_run_lines(trainer)]
    assert steps == [0, 0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert "timing_s/update_weights" in read_run_lines(trainer)[1]


def test_a_run_without_other_evaluations_evaluates_at_its_end(workspace, recorder):
    changes = [*QUIET, "trainer.total_training_steps=2"]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        trainer.fit()
        assert trainer.scores
    calls = recorder.calls
    assert calls.count("validate") == 1
    assert calls.index("validate") > calls.index("update_weights 2")


def test_a_run_that_ends_early_does_not_export(workspace, recorder, capsys):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
    assert not any(name.startswith("export") for name in recorder.calls)
    assert "Finished in" not in capsys.readouterr().out


def test_a_run_starts_with_servers_and_a_new_state(workspace, recorder):
    plan = make_plan(workspace, *QUIET)
    with algorithm.train(plan) as trainer:
        run, inputs, _, samples = recorder.started
        assert (run, inputs, samples) == (trainer.run, plan.inputs, True)
        assert trainer.state == trainer.saved_state == LoopState("train", 0, 0, {}, 0.0)
        assert (trainer.recipe, trainer.inputs) == (plan.recipe, plan.inputs)
        assert trainer.workers == recorder.workers
        assert trainer.servers is recorder.servers
        assert {"sleep", "update_weights"} <= set(trainer.run.stages.timing)
        assert run.last == 40


def test_a_resumed_run_has_the_state_of_its_checkpoint(workspace, recorder, tmp_path, capsys):
    """The state has the step, the batches, the pass rates and the adaptive coefficient."""
    state = LoopState("train", 5, 9, {"x": 1.0}, kl_coef=0.75)
    recorder.record(checkpoints, "load", lambda *_: state)
    changes = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
    ]
    folder = tmp_path / "global_step_5"
    plan = make_plan(workspace, *QUIET, *changes, resume_from=folder)
    with algorithm.train(plan) as trainer:
        assert recorder.arguments["load"] == (recorder.workers, folder)
        assert trainer.state == state
        assert trainer.kl_controller.value == 0.75
        assert trainer.run.files.checkpoint == folder
        assert "load_checkpoint" in trainer.run.stages.timing
        assert f"Resumed from {folder}" in capsys.readouterr().out.replace("\n", "")
        trainer.step_or_skip()
        assert (trainer.state.step, trainer.state.batches) == (6, 10)
        assert list_group_ids(recorder.servers.rollouts[0].requests)[0] == "10/0"


def test_a_checkpoint_has_the_state_after_the_last_update(workspace, recorder):
    """Later changes are not saved."""
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
        assert trainer.saved_state == trainer.state
        recorder.record(trainer.run.files, "save")
        trainer.state = replace(trainer.state, step=9)
        assert trainer.save() == trainer.run.files.checkpoint
        workers, state = recorder.arguments["save"]
        assert workers is recorder.workers
        assert state.step == 1


# --- a step --------------------------------------------------------------------------------------


def test_a_step_passes_its_episodes_to_the_batch_and_the_batch_to_the_update(workspace, recorder):
    changes = [*QUIET, f"{ROLLOUT}.temperature=0.7", "trainer.test_freq=-1"]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        inputs = trainer.inputs
        recorder.record(inputs.processor, "add_images")
        trainer.step_or_skip()
        kept, batch_inputs, recipe = recorder.arguments["to_batch"]
        assert len(kept) == 64
        assert batch_inputs is inputs
        assert recipe is trainer.recipe
        assert recorder.arguments["build_batch"] == (kept, inputs.tokenizer.pad_token_id, 0.7)
        batch, episodes = recorder.arguments["add_images"]
        assert episodes == kept
        assert inputs.processor.tokenizer is inputs.tokenizer
        assert recorder.arguments["update_actor"] == ("actor", batch, trainer.recipe)
        assert recorder.arguments["compute_advantages"] == (batch, trainer.recipe)
        expected = (batch, trainer.run.stages.timing, trainer.recipe)
        assert recorder.arguments["compute_step_metrics"] == expected
        written = np.load(trainer.run.folder / "advantages" / "step_1.npz")
        assert [tuple(index) for index in written["record_index"]] == [e.record_index for e in kept]


def test_a_step_has_no_metrics_or_times_of_the_previous_step(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        trainer.metrics["stale"] = 1.0
        trainer.run.stages.timing["stale"] = 1.0
        trainer.run.files.nonfinite_steps = 2
        metrics = trainer.step_or_skip()
        assert metrics is trainer.metrics
        assert trainer.run.files.nonfinite_steps == 0
        assert not {"stale", "timing_s/stale"} & set(metrics)
        stages = ("step", "gen", "sleep", "adv", "update_actor", "update_weights")
        assert {f"timing_s/{name}" for name in stages} <= set(metrics)
        assert "timing_s/old_log_prob" not in metrics
        assert "timing_s/ref" not in metrics
        assert metrics["training/global_step"] == 1
        assert metrics["actor/pg_loss"] == 0.5
        assert metrics["perf/throughput"] > 0
        assert metrics["rollout/kept"] == metrics["rollout/episodes"] == 64
        assert metrics["rollout/staleness/max"] == 0
        assert metrics["rollout/prompt_batches"] == 1
        assert read_run_lines(trainer)[-1]["actor/pg_loss"] == 0.5
        trainer.step_or_skip()
        assert trainer.metrics["training/global_step"] == 2
        assert trainer.metrics["rollout/staleness/max"] == 0
        assert (trainer.run.folder / "advantages" / "step_2.npz").is_file()


def test_the_epoch_counts_batches_of_prompts_and_not_steps(workspace, recorder, tmp_path):
    """Two files have 12 rows in total. A batch has 4 rows, and step 2 uses the seventh batch."""
    more = write_rows(tmp_path / "more.jsonl", [row(f"add {i}") for i in range(4)])
    files = f"env.train_files=[{workspace / 'train.jsonl'},{more}]"
    changes = [*QUIET, files, "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        row_ids: list[str] = []
        for batch in range(3):
            trainer.state = replace(trainer.state, batches=batch, rows=4 * batch)
            row_ids += [task.row_id for task in trainer.take_tasks()]
        assert sum(row_id.startswith(str(more)) for row_id in row_ids) == 4
        assert len(set(row_ids)) == 12
        trainer.state = replace(trainer.state, step=1, batches=6, rows=24)
        assert trainer.step_or_skip()["training/epoch"] == 7 * 4 / 12


def test_an_evaluation_samples_each_held_out_task_with_val_kwargs(workspace, recorder):
    settings = ["n=3", "top_k=5", "do_sample=true", "temperature=0.5"]
    changes = [*QUIET, *(f"{ROLLOUT}.val_kwargs.{setting}" for setting in settings)]
    changes.append("trainer.val_before_train=true")
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        trainer.state = replace(trainer.state, step=3)
        trainer.evaluate()
        [rollout] = recorder.servers.rollouts
        row_ids = list_row_ids(rollout.requests)
        assert row_ids[::3] == row_ids[1::3] == row_ids[2::3]
        assert row_ids[::3] == [task.row_id for task in trainer.inputs.validation]
        assert list_group_ids(rollout.requests)[:4] == ["val_3/0"] * 3 + ["val_3/1"]
        assert rollout.sampling["temperature"] == 0.5
        assert rollout.sampling["top_k"] == 5
        assert rollout.baselines is False
        assert "val-core/reasoning_gym/reward/mean@3" in trainer.scores
        assert trainer.run.stages.open_episodes == 0
        records = read_run_lines(trainer, "rollouts/val_3.jsonl")
        assert [record["_ng_task_index"] for record in records] == np.repeat(range(8), 3).tolist()
        line = read_run_lines(trainer)[-1]
        assert line["step"] == 3
        assert line["val-core/reasoning_gym/reward/mean@3"] == 8 / 24
        assert line["timing_s/testing"] == trainer.run.stages.timing["testing"]


def test_a_step_samples_each_training_task_with_the_rollout_settings(workspace, recorder):
    settings = ["temperature=0.7", "top_p=0.75", "n=2", "val_kwargs.n=3", "val_kwargs.top_k=5"]
    settings += ["val_kwargs.do_sample=true", "val_kwargs.temperature=0.5"]
    changes = [*QUIET, *(f"{ROLLOUT}.{setting}" for setting in settings)]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        trainer.state = replace(trainer.state, step=3)
        first = [task.row_id for task in trainer.take_tasks()]
        trainer.step_or_skip()
        [rollout] = recorder.servers.rollouts
        row_ids = list_row_ids(rollout.requests)
        assert row_ids[::2] == row_ids[1::2]
        assert row_ids[::2] == first
        assert list_group_ids(rollout.requests)[:3] == ["1/0", "1/0", "1/1"]
        assert rollout.sampling["temperature"] == 0.7
        assert rollout.sampling["top_p"] == 0.75
        assert rollout.baselines is False
        assert len(read_run_lines(trainer, "rollouts/step_4.jsonl")) == 16


def test_an_evaluation_sends_its_responses_to_trackers_and_report(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        recorder.record(trainer.run.log, "write_evaluation")
        recorder.record(trainer.run.files, "report_if_due")
        trainer.evaluate()
        step, scores, episodes = recorder.arguments["write_evaluation"]
        assert step == 0
        assert scores == trainer.scores
        assert len(episodes) == 8
        assert "report_if_due" in recorder.calls


def test_without_held_out_rows_nothing_is_evaluated(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET, "env.val_files=[]")) as trainer:
        trainer.evaluate()
        assert recorder.servers.rollouts == []
        assert trainer.scores == {}


# --- what a run writes and prints ----------------------------------------------------------------


def test_records_have_the_index_of_their_row_and_each_step_prints_a_line(
    workspace, recorder, capsys
):
    """The index is the position in the files, whatever the order of the rows in a batch."""
    changes = ["data.train_batch_size=2", "trainer.print_samples_every=2", *QUIET]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        trainer.step_or_skip()
        trainer.step_or_skip()
    indices = {task.row_id: index for index, task in enumerate(trainer.inputs.train)}
    sampled = []
    for step in (1, 2):
        records = read_run_lines(trainer, f"rollouts/step_{step}.jsonl")
        sampled += [record["_ng_task_index"] for record in records]
        for record in records:
            assert record["_ng_task_index"] == indices[record["_episode"]["row_id"]]
        rollout_indices = [record["_ng_rollout_index"] for record in records]
        assert rollout_indices == [*range(len(records) // 2)] * 2
    assert sampled != sorted(sampled)  # batches are not in the order of the files
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [json.loads(line.split()[1].split("/")[0]) for line in lines] == [1, 2]
    assert "reward" in lines[0]


def test_an_evaluation_with_failures_prints_a_warning(workspace, recorder, capsys):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        rollout = trainer.servers.rollout

        def fail_first(*arguments, **named):
            episodes = rollout(*arguments, **named)
            episodes[0].status = "timeout"
            episodes[0].reward = None
            episodes[0].error = "no answer"
            return episodes

        trainer.evaluate()
        assert "WARNING" not in capsys.readouterr().out
        trainer.servers.rollout = fail_first
        trainer.evaluate()
    output = capsys.readouterr().out.replace("\n", " ")
    assert "if a failed one counts as 0. See failures.jsonl" in output


# --- the order of calls ---------------------------------------------------------------------------

RECOMPUTE = "algorithm.recompute_old_log_probs=true"


@pytest.mark.parametrize(
    ("changes", "forward_passes"),
    [
        ([], []),  # the forward pass of the update computes the old log-probs
        ([RECOMPUTE], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_epochs=2"], ["old_log_probs"]),
        (["algorithm.use_kl_in_reward=true"], ["old_log_probs", "ref"]),
        (["algorithm.rollout_correction.rollout_is=token"], ["old_log_probs"]),
        (["trainer.critic_warmup=1"], ["old_log_probs"]),
        (["algorithm.rollout_correction.bypass_mode=true"], []),
    ],
)
def test_vllm_sleeps_while_the_trainer_computes_updates_and_saves(
    workspace, loop_doubles, changes, forward_passes
):
    calls = loop_doubles.calls
    with algorithm.train(make_plan(workspace, "trainer.save_freq=1", *changes)) as trainer:
        assert calls == ["sleep", "update_weights 0"]
        calls.clear()
        trainer.step_or_skip()
    updates = [] if "trainer.critic_warmup=1" in changes else ["update_actor"]
    assert calls == ["rollout", "sleep", *forward_passes, *updates, "save 1", "update_weights 1"]


def test_a_run_changes_no_value_of_its_recipe(workspace, loop_doubles):
    plan = make_plan(
        workspace,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
    )
    before = plan.recipe.for_verl()
    with algorithm.train(plan) as trainer:
        trainer.fit()
        assert trainer.recipe is trainer.run.recipe is plan.recipe
    assert trainer.state.step == 3 and plan.recipe.for_verl() == before


def test_a_checkpoint_is_loaded_while_vllm_sleeps(workspace, loop_doubles, tmp_path):
    calls = loop_doubles.calls
    plan = make_plan(
        workspace, "trainer.total_training_steps=6", resume_from=tmp_path / "global_step_5"
    )
    with algorithm.train(plan) as trainer:
        assert calls == ["sleep", "load global_step_5", "update_weights 5"]
        trainer.fit()
    assert calls[3:5] == ["validate", "rollout"]
    assert calls[-4:] == ["save 6", "update_weights 6", "validate", "export 6"]


def test_a_run_that_resumes_after_its_last_step_evaluates_and_exports(
    workspace, loop_doubles, tmp_path, monkeypatch
):
    """Ctrl-C in the last step saves it. The same command then evaluates and exports.

    After the export, the same command is an error.
    """
    calls = loop_doubles.calls
    changes = ("trainer.total_training_steps=5", "trainer.val_before_train=false")
    plan = make_plan(workspace, *changes, resume_from=tmp_path / "global_step_5")
    with algorithm.train(plan) as trainer:
        trainer.fit()
    assert calls == ["sleep", "load global_step_5", "update_weights 5", "validate", "export 5"]

    folder = tmp_path / plan.recipe.trainer.default_local_dir
    (folder / "global_step_5").mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "find_damage", lambda _: "")
    checkpoint, notes = checkpoints.find_resume_point(plan.recipe)
    assert checkpoint == folder.relative_to(tmp_path) / "global_step_5"
    assert "The last evaluation and the export remain" in notes[-1]
    export = tmp_path / "runs" / plan.recipe.trainer.experiment_name / "export"
    export.mkdir(parents=True)
    (export / checkpoints.EXPORTED).write_text("4\n")  # the export of an earlier step
    assert checkpoints.find_resume_point(plan.recipe)[0] == checkpoint
    (export / checkpoints.EXPORTED).write_text("5\n")
    with pytest.raises(ConfigError, match="Nothing is left to train"):
        checkpoints.find_resume_point(plan.recipe)


def test_an_error_during_sampling_saves_the_state_of_the_last_update(
    workspace, loop_doubles, monkeypatch
):
    with pytest.raises(ValueError, match="a server's"):
        with algorithm.train(make_plan(workspace)) as trainer:
            trainer.step_or_skip()
            pass_rates = dict(trainer.saved_state.pass_rates)
            trainer.inputs.source.sampler = lambda tasks, size, *_: tasks[:1] * size
            trainer.collect()
            assert trainer.saved_state.pass_rates == pass_rates != trainer.state.pass_rates

            def fail(*_, **__):
                raise ValueError("a server's")

            monkeypatch.setattr(loop_doubles.servers, "rollout", fail)
            trainer.step_or_skip()
    assert loop_doubles.calls[-1] == "save 1"
    assert trainer.saved_state.batches == 1
    assert trainer.state.batches == 3
