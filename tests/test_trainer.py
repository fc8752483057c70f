"""Tests the training loop: the calls of a run and of a step, their order, and what is written.

The doubles of helpers/trainer.py record all calls.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import algorithm
import training
from kit.errors import ConfigError, NonFiniteStep, RunError, SkippedStep
from kit.recipe.schedule import POSITION
from kit.run import checkpoints, finite_check
from kit.run.checkpoints import LoopState
from tests.helpers.recipes import row, write_rows
from tests.helpers.trainer import (
    ACTOR,
    CORRECTION,
    QUIET,
    REFILL,
    ROLLOUT,
    list_group_ids,
    list_row_ids,
    make_plan,
    read_run_lines,
)
from tests.helpers.workers import is_close

GAE = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8"]


@pytest.fixture
def start(workspace, recorder):
    """Return a function that starts a Trainer of the quiet tiny recipe with changes."""

    def start_trainer(*changes, **named):
        return algorithm.train(make_plan(workspace, *QUIET, *changes, **named))

    return start_trainer


# --- the run -------------------------------------------------------------------------------------


def test_a_run_evaluates_and_saves_after_the_steps_in_the_recipe(workspace, recorder, capsys):
    """It evaluates every two steps, saves every three, and does both after the last of five."""
    sizes = ["trainer.total_training_steps=5", "trainer.test_freq=2", "trainer.save_freq=3"]
    with algorithm.train(make_plan(workspace, *sizes)) as trainer:
        assert trainer.scores == {}
        trainer.fit()
        assert trainer.run.stages.is_complete
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


def test_a_run_that_ends_before_its_last_step_exports_nothing(start, recorder, capsys):
    with start():
        pass
    assert recorder.calls == ["sleep", "update_weights 0"]
    assert "Finished in" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ([], 0.0),  # the old log-probs are the sampler's, so the trainer computes others
        (["algorithm.recompute_old_log_probs=true"], -0.5),
        (["algorithm.recompute_old_log_probs=true", f"{CORRECTION}.bypass_mode=true"], 0.0),
    ],
    ids=["on policy", "recomputed", "bypassed"],
)
def test_the_engines_are_compared_once_before_the_first_update(
    start, recorder, changes, difference
):
    recorder.record(finite_check, "raise_if_engines_differ", lambda *_: None)
    with start(*changes) as trainer:
        trainer.step_or_skip()
        trainer.step_or_skip()
    compared = [
        name for name in recorder.calls if name in ("raise_if_engines_differ", "update_actor")
    ]
    assert compared == ["raise_if_engines_differ", "update_actor", "update_actor"]
    batch, log_probs, model_type, _ = recorder.arguments["raise_if_engines_differ"]
    is_sampled = batch.batch["response_mask"].bool()
    differences = (log_probs - batch.batch["rollout_log_probs"])[is_sampled]
    assert set(differences.tolist()) == {difference} and model_type == "llama"


def test_a_resumed_run_has_the_state_of_its_checkpoint(start, recorder, tmp_path, capsys):
    """The state has the step, the batches, the pass rates and the adaptive coefficient."""
    state = LoopState("train", 5, 9, {"x": 1.0}, kl_coef=0.75)
    recorder.record(checkpoints, "load", lambda *_: state)
    changes = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
    ]
    folder = tmp_path / "global_step_5"
    with start(*changes, resume_from=folder) as trainer:
        assert recorder.list_stages() == ["sleep", "load", "update_weights 5"]
        assert recorder.arguments["load"] == (recorder.workers, folder)
        assert trainer.state == state
        assert trainer.kl_controller.value == 0.75
        assert trainer.run.files.checkpoint == folder
        assert "load_checkpoint" in trainer.run.stages.timing
        assert f"Resumed from {folder}" in capsys.readouterr().out.replace("\n", "")
        trainer.step_or_skip()
        assert (trainer.state.step, trainer.state.batches) == (6, 10)
        assert list_group_ids(recorder.servers.rollouts[0].requests)[0] == "10/0"


def test_a_checkpoint_has_the_state_after_the_last_update(start, recorder):
    """Later changes are not saved."""
    with start() as trainer:
        trainer.step_or_skip()
        assert trainer.saved_state == trainer.state
        recorder.record(trainer.run.files, "save")
        trainer.state = replace(trainer.state, step=9)
        assert trainer.save() == trainer.run.files.checkpoint
        workers, state = recorder.arguments["save"]
        assert workers is recorder.workers
        assert state.step == 1


# --- a step --------------------------------------------------------------------------------------


def test_a_step_of_the_tiny_recipe(start, recorder):
    """It passes its episodes to the batch, and the batch to the update, and computes nothing else.

    It has no metrics or times of the step before.
    """
    with start() as trainer:
        trainer.metrics["stale"] = 1.0
        trainer.run.stages.timing["stale"] = 1.0
        metrics = trainer.step_or_skip()
        kept, *_ = recorder.arguments["to_batch"]
        assert len(kept) == 64
        batch, recipe = recorder.arguments["compute_advantages"]
        assert recipe is trainer.recipe
        assert recorder.arguments["update_actor"] == ("actor", batch, recipe)
        expected = (batch, trainer.run.stages.timing, trainer.recipe)
        assert recorder.arguments["compute_step_metrics"] == expected
        assert torch.equal(batch.batch["token_level_rewards"], batch.batch["token_level_scores"])
        written = np.load(trainer.run.folder / "advantages" / "step_1.npz")
        assert [tuple(index) for index in written["record_index"]] == [e.record_index for e in kept]
        assert not {"stale", "timing_s/stale"} & set(metrics)
        stages = {"step", "gen", "sleep", "adv", "update_actor", "update_weights"}
        times = {name.partition("/")[2] for name in metrics if name.startswith("timing_s/")}
        assert stages <= times and not {"old_log_prob", "ref", "values"} & times
        assert metrics["actor/pg_loss"] == read_run_lines(trainer)[-1]["actor/pg_loss"] == 0.5
        assert metrics["perf/throughput"] > 0
        assert metrics["rollout/kept"] == metrics["rollout/episodes"] == 64
        assert metrics["rollout/staleness/max"] == 0
        assert metrics["rollout/prompt_batches"] == 1
        trainer.step_or_skip()
        assert trainer.metrics["training/global_step"] == 2
        assert trainer.metrics["rollout/staleness/max"] == 0
    unused = {
        "apply_kl_penalty",
        "apply_rollout_correction",
        "add_old_log_probs",
        "add_reward_model_scores",
        "compute_ref_log_probs",
        "compute_values",
        "update_critic",
        "start_rollout",
    }
    assert not unused & set(recorder.calls)


def test_the_epoch_counts_batches_of_prompts_and_not_steps(start, workspace, tmp_path):
    """Two files have 12 rows in total. A batch has 4 rows, and step 2 uses the seventh batch."""
    more = write_rows(tmp_path / "more.jsonl", [row(f"add {i}") for i in range(4)])
    files = f"env.train_files=[{workspace / 'train.jsonl'},{more}]"
    changes = [files, "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
    with start(*changes) as trainer:
        row_ids: list[str] = []
        for batch in range(3):
            trainer.state = replace(trainer.state, batches=batch, rows=4 * batch)
            row_ids += [task.row_id for task in trainer.take_tasks()]
        assert sum(row_id.startswith(str(more)) for row_id in row_ids) == 4
        assert len(set(row_ids)) == 12
        trainer.state = replace(trainer.state, step=1, batches=6, rows=24)
        assert trainer.step_or_skip()["training/epoch"] == 7 * 4 / 12


def test_an_evaluation_samples_each_held_out_task_with_val_kwargs(start, recorder):
    settings = ["n=3", "top_k=5", "do_sample=true", "temperature=0.5"]
    changes = [*(f"{ROLLOUT}.val_kwargs.{setting}" for setting in settings)]
    changes.append("trainer.val_before_train=true")
    with start(*changes) as trainer:
        trainer.state = replace(trainer.state, step=3)
        trainer.evaluate()
        [rollout] = recorder.servers.rollouts
        row_ids = list_row_ids(rollout.requests)
        assert row_ids[::3] == row_ids[1::3] == row_ids[2::3]
        assert row_ids[::3] == [task.row_id for task in trainer.inputs.validation]
        assert list_group_ids(rollout.requests)[:4] == ["val_3/0"] * 3 + ["val_3/1"]
        assert (rollout.sampling["temperature"], rollout.sampling["top_k"]) == (0.5, 5)
        assert trainer.run.stages.open_episodes == 0
        records = read_run_lines(trainer, "rollouts/val_3.jsonl")
        assert [record["_ng_task_index"] for record in records] == np.repeat(range(8), 3).tolist()
        line = read_run_lines(trainer)[-1]
        assert line["step"] == 3
        assert line["val-core/reasoning_gym/reward/mean@3"] == 8 / 24
        assert line["timing_s/testing"] == trainer.run.stages.timing["testing"]


def test_a_step_samples_each_training_task_with_the_rollout_settings(start, recorder):
    settings = ["temperature=0.7", "top_p=0.75", "n=2", "val_kwargs.n=3", "val_kwargs.top_k=5"]
    settings += ["val_kwargs.do_sample=true", "val_kwargs.temperature=0.5"]
    changes = [*(f"{ROLLOUT}.{setting}" for setting in settings)]
    with start(*changes) as trainer:
        trainer.state = replace(trainer.state, step=3)
        first = [task.row_id for task in trainer.take_tasks()]
        trainer.step_or_skip()
        [rollout] = recorder.servers.rollouts
        row_ids = list_row_ids(rollout.requests)
        assert row_ids[::2] == row_ids[1::2]
        assert row_ids[::2] == first
        assert list_group_ids(rollout.requests)[:3] == ["1/0", "1/0", "1/1"]
        assert (rollout.sampling["temperature"], rollout.sampling["top_p"]) == (0.7, 0.75)
        assert len(read_run_lines(trainer, "rollouts/step_4.jsonl")) == 16


def test_without_held_out_rows_nothing_is_evaluated(start, recorder):
    with start("env.val_files=[]") as trainer:
        trainer.evaluate()
        assert recorder.servers.rollouts == []
        assert trainer.scores == {}


# --- what a run writes and prints ----------------------------------------------------------------


def test_records_have_the_index_of_their_row_and_each_step_prints_a_line(start, capsys):
    """The index is the position in the files, whatever the order of the rows in a batch."""
    with start("data.train_batch_size=2") as trainer:
        trainer.step_or_skip()
        trainer.step_or_skip()
    indices = {task.row_id: index for index, task in enumerate(trainer.inputs.train)}
    sampled = []
    for step in (1, 2):
        for record in read_run_lines(trainer, f"rollouts/step_{step}.jsonl"):
            sampled.append(record["_ng_task_index"])
            assert sampled[-1] == indices[record["_episode"]["row_id"]]
    assert sampled != sorted(sampled)  # batches are not in the order of the files
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1].split("/")[0] for line in lines] == ["1", "2"]
    assert "reward" in lines[0]


# --- the order of calls ---------------------------------------------------------------------------

OLD = "add_old_log_probs"


@pytest.mark.parametrize(
    ("changes", "forward_passes"),
    [
        ([], []),  # the forward pass of the update computes the old log-probs
        (["algorithm.recompute_old_log_probs=true"], [OLD]),
        ([f"{ACTOR}.ppo_mini_batch_size=4"], [OLD]),
        ([f"{ACTOR}.ppo_epochs=2"], [OLD]),
        (["algorithm.use_kl_in_reward=true"], [OLD, "compute_ref_log_probs"]),
        ([f"{CORRECTION}.rollout_is=token"], [OLD]),
        (["trainer.critic_warmup=1"], [OLD]),
        ([f"{CORRECTION}.bypass_mode=true"], []),
    ],
)
def test_vllm_sleeps_while_the_trainer_computes_updates_and_saves(
    workspace, recorder, changes, forward_passes
):
    with algorithm.train(make_plan(workspace, "trainer.save_freq=1", *changes)) as trainer:
        assert recorder.calls == ["sleep", "update_weights 0"]
        recorder.calls.clear()
        trainer.step_or_skip()
    updates = [] if "trainer.critic_warmup=1" in changes else ["update_actor"]
    stages = ["rollout", "sleep", *forward_passes, *updates, "save 1", "update_weights 1"]
    assert recorder.list_stages() == stages


def test_a_run_that_resumes_after_its_last_step_evaluates_and_exports(
    workspace, recorder, tmp_path
):
    """Ctrl-C in the last step saves it. The same command then evaluates and exports."""
    changes = ("trainer.total_training_steps=5", "trainer.val_before_train=false")
    plan = make_plan(workspace, *changes, resume_from=tmp_path / "global_step_5")
    with algorithm.train(plan) as trainer:
        trainer.fit()
    expected = ["sleep", "load global_step_5", "update_weights 5", "validate", "export 5"]
    assert recorder.calls == expected


def test_a_run_is_over_after_the_export_of_its_last_step(
    workspace, recorder, tmp_path, monkeypatch
):
    plan = make_plan(workspace, "trainer.total_training_steps=5")
    (tmp_path / plan.recipe.trainer.default_local_dir / "global_step_5").mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "find_damage", lambda _: "")
    export = tmp_path / "runs" / plan.recipe.trainer.experiment_name / "export"
    export.mkdir(parents=True)
    (export / checkpoints.EXPORTED).write_text("4\n")  # the export of an earlier step
    assert checkpoints.find_resume_point(plan.recipe)[0].name == "global_step_5"
    (export / checkpoints.EXPORTED).write_text("5\n")
    with pytest.raises(ConfigError, match="Nothing is left to train"):
        checkpoints.find_resume_point(plan.recipe)


def test_an_error_during_sampling_saves_the_state_of_the_last_update(
    workspace, recorder, monkeypatch
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

            monkeypatch.setattr(recorder.servers, "rollout", fail)
            trainer.step_or_skip()
    assert recorder.calls[-1] == "save 1"
    assert trainer.saved_state.batches == 1
    assert trainer.state.batches == 3


# --- prompts and episodes -------------------------------------------------------------------------


def take_row_ids(trainer, batch: int) -> list[str]:
    """Return the row ids of the prompts of a batch of four."""
    trainer.state = replace(trainer.state, batches=batch - 1, rows=4 * (batch - 1))
    return [task.row_id for task in trainer.take_tasks()]


def test_greedy_responses_are_sampled_for_an_advantage_that_reads_them(start, recorder):
    """They are sampled only in training. The number of open episodes includes them."""
    with start("algorithm.adv_estimator=remax") as trainer:
        trainer.evaluate()
        trainer.step_or_skip()
        assert [rollout.baselines for rollout in recorder.servers.rollouts] == [False, True]
        assert trainer.run.stages.open_episodes == 8
        batch = recorder.arguments["compute_advantages"][0].batch
        rewards = torch.tensor([float(i % 3 == 0) for i in range(64)])
        assert is_close(batch["advantages"], (rewards - 0.25)[:, None].expand(64, 3))


def test_a_sampler_gets_the_sizes_and_seed_of_the_recipe_and_the_pass_rates(start, recorder):
    changes = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "data.seed=7"]
    changes.append("env.sampler=templates/samplers.py:by_pass_rate")
    with start(*changes) as trainer:
        trainer.state = replace(trainer.state, pass_rates={"x": 0.5})
        order = take_row_ids(trainer, 3)
        recorder.record(trainer.inputs.source, "sampler")
        assert take_row_ids(trainer, 3) == order
        assert recorder.arguments["sampler"] == (trainer.inputs.train, 4, 3, 7, {"x": 0.5})
    with start(*changes, "data.seed=8") as trainer:
        assert take_row_ids(trainer, 3) != order


def test_pass_rates_of_sampled_rows_are_averaged_and_others_do_not_change(start, recorder):
    with start() as trainer:
        row_ids = [task.row_id for task in trainer.inputs.train]
        before = dict.fromkeys(row_ids, 1.0) | {"other": 0.25}
        trainer.state = replace(trainer.state, pass_rates=before)
        recorder.servers.reward = lambda i, group_id: float(i % 8 < 2)
        trainer.collect()
        assert trainer.state.pass_rates == dict.fromkeys(row_ids, 0.625) | {"other": 0.25}
        assert before["other"] == 0.25
        assert set(before.values()) == {1.0, 0.25}


# --- refilled batches ----------------------------------------------------------------------------


def compute_reward(i: int, group_id: str) -> float:
    """Return 1 for all responses to the first four prompts of odd batches.

    All other groups have rewards of 0 and 1.
    """
    batch, _, prompt = group_id.partition("/")
    is_uniform = int(batch) % 2 and int(prompt) < 4
    return 1.0 if is_uniform else float(i % 2)


def test_a_batch_is_refilled_with_groups_whose_rewards_differ(start, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=5"]
    with start(*refill) as trainer:
        recorder.servers.reward = compute_reward
        metrics = trainer.step_or_skip()
        kept = recorder.arguments["to_batch"][0]
        group_ids = [f"1/{i}" for i in range(4, 8)] + [f"2/{i}" for i in range(4)]
        assert [e.group_id for e in kept[::8]] == group_ids
        assert len(kept) == 64
        assert all(e.group_id == kept[i - i % 8].group_id for i, e in enumerate(kept))
        assert trainer.state.batches == metrics["rollout/prompt_batches"] == 2
        assert metrics["rollout/filtered/drop_uniform"] == 32
        assert (metrics["rollout/episodes"], metrics["rollout/kept"]) == (128, 64)
        assert metrics["rollout/groups_dropped"] == 8
        records = read_run_lines(trainer, "rollouts/step_1.jsonl")
        assert [record["_episode"]["group_id"] for record in records[::64]] == ["1/0", "2/0"]
        assert len(records) == 128


def test_refilling_ends_after_max_num_gen_batches(start, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=3"]
    with start(*refill) as trainer:
        recorder.servers.reward = lambda i, group_id: 1.0
        message = "of 192 responses 192 dropped by drop_uniform, so the weights stay"
        with pytest.raises(SkippedStep, match=message):
            trainer.step()
        assert trainer.state.batches == 3
        assert len(recorder.servers.rollouts) == 3
        assert trainer.metrics["rollout/filtered/drop_uniform"] == 3 * 64
        recorder.servers.reward = lambda i, group_id: float(group_id.startswith("4/0") and i == 0)
        assert len(trainer.collect()) == 8  # an incomplete batch is used


def test_prompts_of_batches_that_may_be_truncated_are_shuffled_by_the_seed(start):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=2", "data.shuffle=false"]
    orders = set()
    for seed in (1, 2):
        with start(*refill, f"data.seed={seed}") as trainer:
            in_file = [task.row_id for task in trainer.inputs.train]
            for batch in (1, 2):
                order = take_row_ids(trainer, batch)
                assert order == take_row_ids(trainer, batch)
                assert sorted(order) == sorted(in_file)
                assert order != in_file
                orders.add(tuple(order))
    assert len(orders) == 4
    with start("data.shuffle=false") as trainer:
        assert take_row_ids(trainer, 1) == in_file


@pytest.mark.parametrize(("estimator", "groups"), [("grpo", 7), ("reinforce_plus_plus", 8)])
def test_a_group_of_one_is_dropped_if_the_advantage_compares_responses(
    start, recorder, monkeypatch, estimator, groups
):
    changes = ["gym.max_failed_frac=1", f"algorithm.adv_estimator={estimator}"]
    rollout = recorder.servers.rollout

    def fail_all_but_one(requests, *arguments, **named):
        episodes = rollout(requests, *arguments, **named)
        for episode in episodes[1:8]:
            episode.status = "timeout"
            episode.reward = None
        return episodes

    monkeypatch.setattr(recorder.servers, "rollout", fail_all_but_one)
    with start(*changes) as trainer:
        kept = trainer.collect()
    assert len({e.group_id for e in kept}) == groups
    assert len(kept) == 56 + groups - 7


def test_too_many_failures_end_the_run(start, recorder):
    recorder.servers.fails = True
    with pytest.raises(RunError, match=r"64 of 64 episodes failed"):
        with start("gym.max_failed_frac=0.5") as trainer:
            trainer.step_or_skip()
    assert len(read_run_lines(trainer, "failures.jsonl")) == 64


# --- trainer.one_step_off ------------------------------------------------------------------------

ONE_STEP_OFF = [
    "trainer.one_step_off=1",
    f"{ROLLOUT}.full_determinism=false",
    "trainer.total_training_steps=2",
]


def test_the_rollout_of_the_next_batch_starts_before_the_update(start, recorder):
    sizes = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
    changes = [*ONE_STEP_OFF, *sizes, f"{ROLLOUT}.temperature=0.7"]
    with start(*changes) as trainer:
        trainer.step_or_skip()
        [started] = recorder.servers.started
        group_ids = list_group_ids(started.requests)
        assert group_ids[::8] == [f"2/{i}" for i in range(4)]
        assert group_ids == sorted(group_ids[::8] * 8)
        assert list_row_ids(started.requests)[::8] == take_row_ids(trainer, 2)
        assert started.sampling["temperature"] == 0.7
        assert started.baselines is False
        calls = recorder.calls
        start = calls.index("start_rollout")
        assert calls.index("sleep", 2) < start < calls.index("update_actor")
        trainer.step_or_skip()
        assert list_group_ids(recorder.servers.rollouts[1].requests) == group_ids
        assert len(recorder.servers.started) == 1  # the last step does not start another one


# --- rewards -------------------------------------------------------------------------------------


def test_a_learned_reward_is_a_component_that_env_reward_can_read(start, recorder):
    """The means of the verifier's components are still over all episodes."""
    recorder.workers = training.Workers("actor", None, "reward model")
    with start() as trainer:
        functions = trainer.recipe.functions._replace(
            reward=lambda e: e.reward + e.reward_components["reward_model"]
        )
        trainer.recipe = trainer.recipe.model_copy(update={"functions": functions})
        metrics = trainer.step_or_skip()
        model, kept, *others = recorder.arguments["add_reward_model_scores"]
        assert model == "reward model" and others == [trainer.inputs, trainer.recipe]
        assert [e.shaped_reward for e in kept] == [4.0 + float(i % 3 == 0) for i in range(64)]
        assert metrics["reward/reasoning_gym/reward_model/mean"] == 4.0
        batch = recorder.arguments["compute_advantages"][0].batch
        assert batch["token_level_rewards"].sum(dim=1).tolist() == [e.shaped_reward for e in kept]
        trainer.metrics = {"reward/reasoning_gym/right/mean": 0.75}
        trainer.shape_rewards(kept)
        assert trainer.metrics["reward/reasoning_gym/right/mean"] == 0.75


# --- log-probs, values and advantages ------------------------------------------------------------


def test_critic_warmup_trains_only_the_critic(start, recorder):
    """With critic_warmup=2, steps 1 and 2 compute old log-probs and update only the critic.

    The learning rate of each model starts with its first update.
    """
    recorder.workers = training.Workers("actor", "critic", None)
    positions = []

    def update(model, batch, _recipe):
        positions.append((model, batch.meta_info[POSITION]))
        return {f"{model}/loss": 0.75}

    recorder.record(training, "update_critic", update)
    recorder.record(training, "update_actor", update)
    changes = [*GAE, "trainer.critic_warmup=2"]
    with start(*changes) as trainer:
        for updates_actor in (False, False, True, True):
            recorder.calls.clear()
            metrics = trainer.step_or_skip()
            names = ("add_old_log_probs", "compute_values", "update_critic", "update_actor")
            calls = [name for name in recorder.calls if name in names]
            if updates_actor:
                assert calls == ["compute_values", "update_critic", "update_actor"]
            else:
                assert calls == ["add_old_log_probs", "compute_values", "update_critic"]
            assert ("actor/loss" in metrics) == updates_actor
            assert ("actor/entropy" in metrics) == (not updates_actor)
            assert metrics["critic/loss"] == 0.75
        batch = recorder.arguments["compute_advantages"][0]
        assert recorder.arguments["compute_values"] == ("critic", batch, trainer.recipe)
        assert recorder.arguments["update_critic"] == ("critic", batch, trainer.recipe)
        assert metrics["critic/values/mean"] == 0.25
    critic = [("critic", step) for step in range(4)]
    assert positions == [*critic[:3], ("actor", 0), critic[3], ("actor", 1)]


def test_the_adaptive_coefficient_of_a_kl_penalty_is_saved(start, recorder):
    settings = ["type=adaptive", "horizon=640", "kl_coef=0.4", "target_kl=0.1"]
    changes = ["algorithm.use_kl_in_reward=true"]
    changes += [f"algorithm.kl_ctrl.{setting}" for setting in settings]
    with start(*changes) as trainer:
        metrics = trainer.step_or_skip()
        batch, controller, recipe = recorder.arguments["apply_kl_penalty"]
        assert controller is trainer.kl_controller
        assert recipe is trainer.recipe
        expected = (recorder.workers, batch, trainer.recipe)
        assert recorder.arguments["compute_ref_log_probs"] == expected
        tensors = batch.batch
        assert is_close(tensors["ref_log_prob"], tensors["rollout_log_probs"] - 1.0)
        penalty = 0.4 * 0.5 * torch.ones(64, 3)  # old - ref = 0.5 on each token
        assert is_close(tensors["token_level_rewards"], tensors["token_level_scores"] - penalty)
        assert metrics["actor/reward_kl_penalty_coeff"] == 0.4
        assert "timing_s/ref" in metrics
        new = 0.4 * (1 + 0.2 * 64 / 640)
        assert trainer.state.kl_coef == trainer.saved_state.kl_coef == pytest.approx(new)
        assert type(trainer.state.kl_coef) is float


def test_rollout_engine_and_trainer_are_compared_if_both_log_probs_exist(start, recorder):
    """The difference is -0.5 on each token."""
    with start(f"{CORRECTION}.rollout_is=token") as trainer:
        metrics = trainer.step_or_skip()
        batch, recipe = recorder.arguments["apply_rollout_correction"]
        assert recipe is trainer.recipe
        expected = np.full((64, 3), np.exp(-0.5))
        assert is_close(batch.batch["rollout_is_weights"], expected)
        assert any(name.startswith("rollout_corr/") for name in metrics)
        assert "timing_s/old_log_prob" in metrics
        assert metrics["actor/entropy"] == 0.125


def test_in_bypass_mode_the_rollout_engine_is_the_old_policy_and_the_loss_corrects(start, recorder):
    with start(f"{CORRECTION}.bypass_mode=true") as trainer:
        trainer.step_or_skip()
        batch = recorder.arguments["update_actor"][1].batch
        assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])
        assert not {"apply_rollout_correction", "add_old_log_probs"} & set(recorder.calls)


# --- skipped steps -------------------------------------------------------------------------------


def test_a_step_whose_tokens_are_all_rejected_is_skipped(start, recorder, monkeypatch, capsys):
    def reject(batch, _config):
        batch.batch["response_mask"][:] = 0
        return {}

    monkeypatch.setattr(training, "apply_rollout_correction", reject)
    with start("algorithm.recompute_old_log_probs=true") as trainer:
        trainer.run.files.nonfinite_steps = 2
        trainer.step_or_skip()
        assert "update_actor" not in recorder.calls
        assert recorder.calls[-1] == "update_weights 1"
        assert trainer.run.files.nonfinite_steps == 0
        assert trainer.metrics["training/skipped_nonfinite_steps"] == 0
        assert not (trainer.run.folder / "nonfinite").exists()
    output = capsys.readouterr().out.replace("\n", "")
    assert "step 1 skipped: algorithm.rollout_correction.rollout_rs rejected every token" in output


def break_update(*_, **__):
    return {"actor/grad_norm": math.nan}


def break_values(_critic, batch, _config):
    return torch.full_like(batch.batch["rollout_log_probs"], math.nan)


def break_advantages(batch, _config):
    nan = torch.full_like(batch.batch["token_level_rewards"], math.nan)
    batch.batch["advantages"] = nan
    batch.batch["returns"] = nan


@pytest.mark.parametrize(
    ("name", "function", "later_calls"),
    [
        ("compute_values", break_values, ["compute_advantages", "update_critic", "update_actor"]),
        ("compute_advantages", break_advantages, ["update_critic", "update_actor"]),
        ("update_actor", break_update, ["update_weights 1"]),
    ],
)
def test_a_nonfinite_step_stops_immediately_and_its_error_has_the_batch(
    start, recorder, monkeypatch, name, function, later_calls
):
    recorder.workers = training.Workers("actor", "critic", None)
    monkeypatch.setattr(training, name, function)
    with start(*GAE) as trainer:
        with pytest.raises(NonFiniteStep) as caught:
            trainer.step()
        assert not set(later_calls) & set(recorder.calls)
        assert caught.value.batch.batch["responses"].tolist() == [[5, 6, 1]] * 64


def test_three_nonfinite_steps_in_a_row_end_the_run(start, recorder, monkeypatch, capsys):
    """They are saved like others. A finite step resets their count."""
    finite = training.update_actor
    message = r"3 non-finite steps in a row, the last: actor/grad_norm is nan.* See docs/"
    with pytest.raises(RunError, match=message):
        with start("trainer.save_freq=1") as trainer:
            updates = [break_update, finite, break_update, break_update]
            for step, count in enumerate((1, 0, 1, 2), 1):
                monkeypatch.setattr(training, "update_actor", updates[step - 1])
                trainer.step_or_skip()
                assert recorder.list_stages()[-2:] == [f"save {step}", f"update_weights {step}"]
                path = trainer.run.folder / "nonfinite" / f"step_{step}.pt"
                assert path.is_file() == (count > 0)
                assert trainer.saved_state.step == trainer.state.step == step
                line = read_run_lines(trainer)[-1]
                assert line["step"] == step
                assert line.get("training/skipped_nonfinite_steps", 0) == count
            trainer.step_or_skip()
    output = capsys.readouterr().out.replace("\n", "")
    reason = "actor/grad_norm is nan; the batch is in runs/tiny/nonfinite/step_1.pt"
    assert "step 1 was trained on NaN or infinity (verl leaves out mini-batches " in output
    assert f"the others changed the weights): {reason}" in output


def test_a_skipped_step_is_saved_and_evaluated_like_any_other(start, recorder):
    recorder.servers.fails = True
    changes = ["gym.max_failed_frac=1", "trainer.save_freq=1", "trainer.test_freq=1"]
    with start(*changes) as trainer:
        recorder.calls.clear()
        metrics = trainer.step_or_skip()
        trainer.evaluate_if_due()
        assert recorder.calls == ["rollout", "save 1", "validate"]
        assert trainer.saved_state == trainer.state
        assert metrics["rollout/failed_frac"] == 1.0
        assert metrics["training/epoch"] == 1.0
