"""Tests which prompts and episodes the loop uses: samplers, filters, failures and one_step_off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import algorithm
from kit.errors import RunError, SkippedStep
from tests.helpers.trainer import (
    ACTOR,
    QUIET,
    REFILL,
    ROLLOUT,
    list_group_ids,
    list_row_ids,
    make_plan,
    read_run_lines,
)
from tests.helpers.workers import is_close


def take_row_ids(trainer, batch: int) -> list[str]:
    """The row ids of the prompts of a batch of four."""
    trainer.state = replace(trainer.state, batches=batch - 1, rows=4 * (batch - 1))
    return [task.row_id for task in trainer.take_tasks()]


@pytest.mark.parametrize("name", ["remax", "grpo"])
def test_greedy_responses_are_sampled_for_an_advantage_that_reads_them(workspace, recorder, name):
    """They are sampled only in training. The number of open episodes includes them."""
    plan = make_plan(workspace, *QUIET, f"algorithm.adv_estimator={name}")
    with algorithm.train(plan) as trainer:
        trainer.evaluate()
        trainer.step_or_skip()
        baselines = [rollout.baselines for rollout in recorder.servers.rollouts]
        assert baselines == [False, name == "remax"]
        assert trainer.run.stages.open_episodes == (8 if name == "remax" else 0)
        batch = recorder.arguments["compute_advantages"][0].batch
        if name == "remax":
            rewards = torch.tensor([float(i % 3 == 0) for i in range(64)])
            assert is_close(batch["advantages"], (rewards - 0.25)[:, None].expand(64, 3))


def test_a_sampler_gets_the_sizes_and_seed_of_the_recipe_and_the_pass_rates(workspace, recorder):
    changes = [*QUIET, "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "data.seed=7"]
    changes.append("env.sampler=templates/samplers.py:by_pass_rate")
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        trainer.state = replace(trainer.state, pass_rates={"x": 0.5})
        order = take_row_ids(trainer, 3)
        recorder.record(trainer.inputs.source, "sampler")
        assert take_row_ids(trainer, 3) == order
        assert recorder.arguments["sampler"] == (trainer.inputs.train, 4, 3, 7, {"x": 0.5})
    with algorithm.train(make_plan(workspace, *changes, "data.seed=8")) as trainer:
        assert take_row_ids(trainer, 3) != order


def test_pass_rates_of_sampled_rows_are_averaged_and_others_do_not_change(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
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
    """In odd batches, all responses to each of the first four prompts have the reward 1.

    All other groups have rewards of 0 and 1.
    """
    batch, _, prompt = group_id.partition("/")
    is_uniform = int(batch) % 2 and int(prompt) < 4
    return 1.0 if is_uniform else float(i % 2)


def test_a_batch_is_refilled_with_groups_whose_rewards_differ(workspace, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=5"]
    with algorithm.train(make_plan(workspace, *QUIET, *refill)) as trainer:
        recorder.servers.reward = compute_reward
        metrics = trainer.step_or_skip()
        kept = recorder.arguments["to_batch"][0]
        group_ids = [f"1/{i}" for i in range(4, 8)] + [f"2/{i}" for i in range(4)]
        assert [e.group_id for e in kept[::8]] == group_ids
        assert len(kept) == 64
        assert all(e.group_id == kept[i - i % 8].group_id for i, e in enumerate(kept))
        assert trainer.state.batches == metrics["rollout/prompt_batches"] == 2
        assert metrics["rollout/filtered/drop_uniform"] == 32
        assert metrics["rollout/episodes"] == 128
        assert metrics["rollout/kept"] == 64
        assert metrics["rollout/groups_dropped"] == 8
        records = read_run_lines(trainer, "rollouts/step_1.jsonl")
        assert [record["_episode"]["group_id"] for record in records[::64]] == ["1/0", "2/0"]
        assert len(records) == 128


def test_refilling_ends_after_max_num_gen_batches(workspace, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=3"]
    with algorithm.train(make_plan(workspace, *QUIET, *refill)) as trainer:
        recorder.servers.reward = lambda i, group_id: 1.0
        message = r"no group is left to train on\. See runs/tiny/rollouts/step_1\.jsonl"
        with pytest.raises(SkippedStep, match=message):
            trainer.step()
        assert trainer.state.batches == 3
        assert len(recorder.servers.rollouts) == 3
        assert trainer.metrics["rollout/filtered/drop_uniform"] == 3 * 64
        recorder.servers.reward = lambda i, group_id: float(group_id.startswith("4/0") and i == 0)
        assert len(trainer.collect()) == 8  # an incomplete batch is used


def test_without_filter_groups_a_step_has_one_batch_of_prompts(workspace, recorder):
    plan = make_plan(workspace, *QUIET, f"{REFILL}.max_num_gen_batches=3")
    with algorithm.train(plan) as trainer:
        recorder.servers.reward = lambda i, group_id: 1.0
        assert len(trainer.collect()) == 64
        sampled = list_row_ids(recorder.servers.rollouts[0].requests)[::8]
        assert take_row_ids(trainer, 1) == sampled


def test_prompts_of_batches_that_may_be_truncated_are_shuffled_by_the_seed(workspace, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=2", "data.shuffle=false"]
    orders = set()
    for seed in (1, 2):
        plan = make_plan(workspace, *QUIET, *refill, f"data.seed={seed}")
        with algorithm.train(plan) as trainer:
            in_file = [task.row_id for task in trainer.inputs.train]
            for batch in (1, 2):
                order = take_row_ids(trainer, batch)
                assert order == take_row_ids(trainer, batch)
                assert sorted(order) == sorted(in_file)
                assert order != in_file
                orders.add(tuple(order))
    assert len(orders) == 4
    with algorithm.train(make_plan(workspace, *QUIET, "data.shuffle=false")) as trainer:
        assert take_row_ids(trainer, 1) == in_file


@pytest.mark.parametrize(("estimator", "groups"), [("grpo", 7), ("reinforce_plus_plus", 8)])
def test_a_group_of_one_is_dropped_if_the_advantage_compares_responses(
    workspace, recorder, monkeypatch, estimator, groups
):
    changes = [*QUIET, "gym.max_failed_frac=1", f"algorithm.adv_estimator={estimator}"]
    rollout = recorder.servers.rollout

    def fail_all_but_one(requests, *arguments, **named):
        episodes = rollout(requests, *arguments, **named)
        for episode in episodes[1:8]:
            episode.status = "timeout"
            episode.reward = None
        return episodes

    monkeypatch.setattr(recorder.servers, "rollout", fail_all_but_one)
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
        kept = trainer.collect()
    assert len({e.group_id for e in kept}) == groups
    assert len(kept) == 56 + groups - 7


def test_too_many_failures_end_the_run(workspace, recorder):
    recorder.servers.fails = True
    plan = make_plan(workspace, *QUIET, "gym.max_failed_frac=0.5")
    with pytest.raises(RunError, match=r"64 of 64 episodes failed"):
        with algorithm.train(plan) as trainer:
            trainer.step_or_skip()
    assert len(read_run_lines(trainer, "failures.jsonl")) == 64


# --- trainer.one_step_off ------------------------------------------------------------------------

ONE_STEP_OFF = [
    "trainer.one_step_off=1",
    f"{ROLLOUT}.full_determinism=false",
    "trainer.total_training_steps=2",
]


def test_the_rollout_of_the_next_batch_starts_before_the_update(workspace, recorder):
    sizes = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
    changes = [*QUIET, *ONE_STEP_OFF, *sizes, f"{ROLLOUT}.temperature=0.7"]
    with algorithm.train(make_plan(workspace, *changes)) as trainer:
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


def test_without_one_step_off_no_rollout_starts_early(workspace, recorder):
    with algorithm.train(make_plan(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
    assert recorder.servers.started == []
