"""What the loop hands to servers, workers and functions of training.py, and what it keeps: all of it is recorded."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import row, write_rows
from test_loop import Servers, calls, planned  # noqa: F401  (a fixture)
from worker_doubles import close

import algorithm
import gym_client
import training
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import ReplayServers
from kit.errors import NonFiniteStep, RunError, SkippedStep
from kit.extras import images
from kit.runs import checkpoints
from kit.runs.launch import Started

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
REFILL = "algorithm.filter_groups"
QUIET = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]


class RecordingServers(Servers):
    """Servers that keep each request. reward(i, group id) is what the i-th answer of a batch is worth."""

    def __init__(self, made):
        super().__init__(made)
        self.asked: list[SimpleNamespace] = []
        self.begun: list[SimpleNamespace] = []
        self.version = 0
        self.reward = lambda i, group_id: float(i % 3 == 0)

    def rollout(self, requests, sampling, on_done, baselines=False):
        self.asked.append(
            SimpleNamespace(requests=requests, sampling=sampling, baselines=baselines)
        )
        made = super().rollout(requests, sampling, on_done, baselines)
        for i, e in enumerate(made):
            e.policy_versions = [(3, self.version)]
            e.reward_components = {"right": 0.5}
            e.baseline = 0.25 if baselines else None
            if e.status == "ok":
                e.reward = self.reward(i, e.group_id)
        return made

    def start_rollout(self, requests, sampling, baselines):
        self.calls.append("begin")
        self.begun.append(
            SimpleNamespace(requests=requests, sampling=sampling, baselines=baselines)
        )

    def update_weights(self, step):
        super().update_weights(step)
        self.version = step


class Recorder:
    """Calls by name, with their arguments, in the one order that servers and workers share."""

    def __init__(self, monkeypatch, servers):
        self.monkeypatch, self.servers, self.made = monkeypatch, servers, servers.calls
        self.given: dict[str, tuple[Any, ...]] = {}  # arguments of the last call
        self.workers = training.Workers("actor", None, None)
        self.started: tuple[Any, ...] = ()

    def record(self, owner, name, function=None):
        """Replace owner.name by `function`, or keep what it does; its arguments are recorded."""
        original = function or getattr(owner, name)

        def recorded(*arguments, **named):
            self.given[name] = (*arguments, *named.values())
            self.made.append(name)
            return original(*arguments, **named)

        self.monkeypatch.setattr(owner, name, recorded)

    def start(self, run, data, stack, sample=True):
        self.started = (run, data, stack, sample)
        return Started(self.workers, self.servers if sample else None)


@pytest.fixture
def recorder(calls, monkeypatch) -> Recorder:  # noqa: F811
    made, _ = calls
    found = Recorder(monkeypatch, RecordingServers(made))
    monkeypatch.setattr("kit.runs.launch.start", found.start)

    def measured(_, batch, __):
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"] - 0.5
        return {"actor/entropy": 0.125}

    def referred(_, batch, __):
        return batch.batch["rollout_log_probs"] - 1.0

    def valued(_, batch, __):
        return torch.full_like(batch.batch["rollout_log_probs"], 0.25)

    def rewarded(_, episodes, *__):
        for e in episodes:
            e.reward_components["reward_model"] = 4.0

    found.record(training, "add_old_log_probs", measured)
    found.record(training, "compute_ref_log_probs", referred)
    found.record(training, "compute_values", valued)
    found.record(training, "add_reward_model_scores", rewarded)
    found.record(training, "update_actor", lambda *_: {"actor/pg_loss": 0.5})
    found.record(training, "update_critic", lambda *_: {"critic/vf_loss": 0.75})
    for name in ("to_batch", "apply_kl_penalty", "apply_rollout_correction", "compute_advantages", "compute_step_metrics"):
        found.record(training, name)
    return found


def lines_of(trainer, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.run.folder / name).read_text().splitlines()]


def ids(requests) -> list[str]:
    return [task.row_id for task, _ in requests]


def groups_of(requests) -> list[str]:
    return [group_id for _, group_id in requests]


# --- the run -------------------------------------------------------------------------------------


def test_a_run_evaluates_and_saves_when_it_is_due(workspace, recorder, capsys):
    """Of five steps: tests every two, checkpoints every three, both after the last."""
    sizes = ["trainer.total_training_steps=5", "trainer.test_freq=2", "trainer.save_freq=3"]
    with algorithm.train(planned(workspace, *sizes)) as trainer:
        assert trainer.scores == {}
        trainer.fit()
        assert trainer.run.guard.pending_export == "the same command exports the model"
    kinds = ("validate", "rollout", "save", "publish", "export")
    made = [name for name in recorder.made if name.startswith(kinds)]
    assert made == [
        *("publish 0", "validate"),
        *("rollout", "publish 1"),
        *("rollout", "publish 2", "validate"),
        *("rollout", "save 3", "publish 3"),
        *("rollout", "publish 4", "validate"),
        *("rollout", "save 5", "publish 5", "validate", "export 5"),
    ]
    assert "finished in" in capsys.readouterr().out
    steps = [line["step"] for line in lines_of(trainer)]
    assert steps == [0, 0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert "timing_s/update_weights" in lines_of(trainer)[1]


def test_a_run_that_is_not_evaluated_first_is_evaluated_in_the_end(workspace, recorder):
    changes = [*QUIET, "trainer.total_training_steps=2"]
    with algorithm.train(planned(workspace, *changes)) as trainer:
        trainer.fit()
        assert trainer.scores
    assert recorder.made.count("validate") == 1 and recorder.made.index(
        "validate"
    ) > recorder.made.index("publish 2")


def test_a_run_that_does_not_come_to_its_end_exports_nothing(workspace, recorder, capsys):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
    assert not any(name.startswith("export") for name in recorder.made)
    assert "finished in" not in capsys.readouterr().out


def test_a_run_starts_with_servers_and_a_fresh_state(workspace, recorder):
    plan = planned(workspace, *QUIET)
    with algorithm.train(plan) as trainer:
        run, data, _, sample = recorder.started
        assert (run, data, sample) == (trainer.run, plan.inputs, True)
        assert trainer.state == {
            "command": "train",
            "step": 0,
            "batches": 0,
            "pass_rates": {},
            "kl_coef": 0.0,
        }
        assert trainer.saved_state == trainer.state and trainer.saved_state is not trainer.state
        assert (trainer.config, trainer.inputs, trainer.workers) == (
            plan.config,
            plan.inputs,
            recorder.workers,
        )
        assert trainer.servers is recorder.servers
        assert {"sleep", "update_weights"} <= set(trainer.run.timing) and run.last == 40
        assert run.command == "train"


def test_a_resumed_run_continues_its_checkpoint(workspace, recorder, monkeypatch, tmp_path, capsys):
    """Its step, its batches, its pass rates and its adaptive coefficient."""
    state = {"command": "train", "step": 5, "batches": 9, "pass_rates": {"x": 1.0}, "kl_coef": 0.75}
    recorder.record(checkpoints, "load", lambda *_: dict(state))
    changes = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
    ]
    folder = tmp_path / "global_step_5"
    with algorithm.train(planned(workspace, *QUIET, *changes, resume_from=folder)) as trainer:
        assert recorder.given["load"] == (recorder.workers, folder)
        assert trainer.state == state and trainer.kl_ctrl.value == 0.75
        assert trainer.run.checkpoint == folder and "load_checkpoint" in trainer.run.timing
        assert f"resumed from {folder}" in capsys.readouterr().out.replace("\n", "")
        trainer.step_or_skip()
        assert (trainer.state["step"], trainer.state["batches"]) == (6, 10)
        assert groups_of(recorder.servers.asked[0].requests)[0] == "10/0"


@pytest.mark.parametrize("resumed", [True, False])
def test_a_replay_trains_on_recorded_episodes_for_one_step(workspace, recorder, tmp_path, resumed):
    folder = tmp_path / "global_step_5" if resumed else None
    sizes = ["data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", "env.val_files=[]"]
    plan = planned(workspace, *QUIET, *sizes, resume_from=folder)
    task, made = plan.inputs.train[0], []
    for group_id, reward in (("1/0", 0.0), ("1/0", 1.0), ("1/1", 0.0), ("1/1", 1.0)):
        e = Episode(task.row_id, group_id, task.server, [5], row=task.row, reward=reward)
        e.output.append(gym_client.message("six"))
        append_tokens(e, [7, 8], [-1.0, -1.0])
        made.append(e)
    with algorithm.train(plan._replace(recorded=[made])) as trainer:
        assert recorder.started[3] is False and isinstance(trainer.servers, ReplayServers)
        assert trainer.run.last == (6 if resumed else 1)
        trainer.step_or_skip()
        assert recorder.given["to_batch"][0] == made and "update_actor" in recorder.made


# --- a step --------------------------------------------------------------------------------------


def test_a_step_hands_its_episodes_on_and_keeps_what_they_gave(workspace, recorder):
    recorder.record(images, "add")
    changes = [*QUIET, f"{ROLLOUT}.temperature=0.7", "trainer.test_freq=-1"]
    with algorithm.train(planned(workspace, *changes)) as trainer:
        trainer.metrics["stale"], trainer.run.timing["stale"], trainer.run.nonfinite_steps = 1.0, 1.0, 2
        found = trainer.step_or_skip()
        kept, pad, temperature = recorder.given["to_batch"]
        assert len(kept) == 64 and (pad, temperature) == (trainer.inputs.tokenizer.pad_token_id, 0.7)
        batch, episodes, tokenizer = recorder.given["add"]
        assert episodes == kept and tokenizer is trainer.inputs.tokenizer
        assert recorder.given["update_actor"] == ("actor", batch, trainer.config)
        assert recorder.given["compute_advantages"] == (batch, trainer.config)
        assert recorder.given["compute_step_metrics"] == (batch, trainer.run.timing, trainer.config)
        assert found is trainer.metrics and trainer.run.nonfinite_steps == 0
        assert not {"stale", "timing_s/stale"} & set(found)
        stages = ("step", "gen", "sleep", "adv", "update_actor", "update_weights")
        assert {f"timing_s/{name}" for name in stages} <= set(found)
        assert "timing_s/old_log_prob" not in found and "timing_s/ref" not in found
        assert found["training/global_step"] == 1 and found["actor/pg_loss"] == 0.5
        assert (
            found["perf/throughput"] > 0
            and found["rollout/kept"] == found["rollout/episodes"] == 64
        )
        assert found["rollout/staleness/max"] == 0 and found["rollout/prompt_batches"] == 1
        written = np.load(trainer.run.folder / "advantages" / "step_1.npz")
        assert [tuple(place) for place in written["places"]] == [e.record_index for e in kept]
        assert lines_of(trainer)[-1]["actor/pg_loss"] == 0.5
        trainer.step_or_skip()
        assert (
            trainer.metrics["training/global_step"] == 2
            and trainer.metrics["rollout/staleness/max"] == 0
        )
        assert (trainer.run.folder / "advantages" / "step_2.npz").is_file()


def test_the_epoch_counts_batches_of_prompts_not_steps(workspace, recorder, tmp_path):
    """Batches of 4 of the 12 rows of two files; seven of them, by step 2."""
    more = write_rows(tmp_path / "more.jsonl", [row(f"add {i}") for i in range(4)])
    files = f"env.train_files=[{workspace / 'train.jsonl'},{more}]"
    changes = [*QUIET, files, "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
    with algorithm.train(planned(workspace, *changes)) as trainer:
        rows = [task.row_id for batch in (1, 2, 3) for task in trainer.tasks(batch)]
        assert sum(name.startswith(str(more)) for name in rows) == 4 and len(set(rows)) == 12
        trainer.state["step"], trainer.state["batches"] = 1, 6
        assert trainer.step_or_skip()["training/epoch"] == 7 * 4 / 12


def test_each_task_is_asked_n_times_as_the_recipe_says(workspace, recorder):
    sampling = ["temperature=0.7", "top_p=0.75", "n=2", "val_kwargs.n=3", "val_kwargs.top_k=5"]
    val = ["val_kwargs.do_sample=true", "val_kwargs.temperature=0.5"]
    changes = [
        *QUIET,
        *(f"{ROLLOUT}.{change}" for change in (*sampling, *val)),
        "trainer.val_before_train=true",
    ]
    with algorithm.train(planned(workspace, *changes)) as trainer:
        trainer.state["step"] = 3
        trainer.evaluate()
        [asked] = recorder.servers.asked
        tasks = trainer.inputs.validation
        assert ids(asked.requests) == [task.row_id for task in tasks for _ in range(3)]
        assert groups_of(asked.requests)[:4] == ["val_3/0"] * 3 + ["val_3/1"]
        assert (asked.sampling["temperature"], asked.sampling["top_k"], asked.baselines) == (
            0.5,
            5,
            False,
        )
        assert "val-core/reasoning_gym/reward/mean@3" in trainer.scores and trainer.run.open == 0
        written = lines_of(trainer, "rollouts/val_3.jsonl")
        assert [line["_ng_task_index"] for line in written] == [
            i for i in range(8) for _ in range(3)
        ]
        logged = lines_of(trainer)[-1]
        assert logged["step"] == 3 and logged["val-core/reasoning_gym/reward/mean@3"] == 8 / 24
        assert logged["timing_s/testing"] == trainer.run.timing["testing"]

        trainer.step_or_skip()
        asked = recorder.servers.asked[-1]
        assert ids(asked.requests) == [task.row_id for task in trainer.tasks(1) for _ in range(2)]
        assert groups_of(asked.requests)[:3] == ["1/0", "1/0", "1/1"]
        assert (asked.sampling["temperature"], asked.sampling["top_p"], asked.baselines) == (
            0.7,
            0.75,
            False,
        )
        assert len(lines_of(trainer, "rollouts/step_4.jsonl")) == 16


def test_an_evaluation_writes_its_answers_to_trackers_and_report(workspace, recorder, monkeypatch):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        recorder.record(trainer.run, "log_responses")
        recorder.record(trainer.run, "report_if_due")
        trainer.evaluate()
        step, episodes = recorder.given["log_responses"]
        assert step == 0 and len(episodes) == 8 and "report_if_due" in recorder.made


def test_without_held_out_rows_nothing_is_evaluated(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET, "env.val_files=[]")) as trainer:
        trainer.evaluate()
        assert recorder.servers.asked == [] and trainer.scores == {}


@pytest.mark.parametrize("name", ["remax", "grpo"])
def test_greedy_answers_are_asked_for_where_the_advantage_reads_them(workspace, recorder, name):
    """In training alone; the count of a batch includes them."""
    with algorithm.train(planned(workspace, *QUIET, f"algorithm.adv_estimator={name}")) as trainer:
        trainer.evaluate()
        trainer.step_or_skip()
        assert [asked.baselines for asked in recorder.servers.asked] == [False, name == "remax"]
        assert trainer.run.open == (8 if name == "remax" else 0)
        batch = recorder.given["compute_advantages"][0].batch
        if name == "remax":
            rewards = torch.tensor([float(i % 3 == 0) for i in range(64)])
            assert close(batch["advantages"], (rewards - 0.25)[:, None].expand(64, 3))


def test_a_sampler_is_given_the_recipes_sizes_and_the_pass_rates(workspace, recorder):
    changes = [*QUIET, "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "data.seed=7"]
    with algorithm.train(planned(workspace, *changes)) as trainer:
        trainer.state["pass_rates"] = {"x": 0.5}
        order = [task.row_id for task in trainer.tasks(3)]
        recorder.record(trainer.inputs.source, "sampler")
        assert [task.row_id for task in trainer.tasks(3)] == order
        assert recorder.given["sampler"] == (trainer.inputs.train, 4, 3, 7, {"x": 0.5})
    with algorithm.train(planned(workspace, *changes, "data.seed=8")) as trainer:
        assert [task.row_id for task in trainer.tasks(3)] != order


def test_pass_rates_move_halfway_and_rows_that_were_not_asked_keep_theirs(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        rows = [task.row_id for task in trainer.inputs.train]
        before = dict.fromkeys(rows, 1.0) | {"other": 0.25}
        trainer.state["pass_rates"] = before
        recorder.servers.reward = lambda i, group_id: float(i % 8 < 2)
        trainer.collect()
        assert trainer.state["pass_rates"] == dict.fromkeys(rows, 0.625) | {"other": 0.25}
        assert before["other"] == 0.25 and set(before.values()) == {1.0, 0.25}


# --- batches that are filled up ------------------------------------------------------------------


def half_equal(i: int, group_id: str) -> float:
    """In odd batches the answers to the first four prompts are all worth the same."""
    batch, _, place = group_id.partition("/")
    return 1.0 if int(batch) % 2 and int(place) < 4 else float(i % 2)


def test_a_batch_is_filled_up_with_groups_that_teach(workspace, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=5"]
    with algorithm.train(planned(workspace, *QUIET, *refill)) as trainer:
        recorder.servers.reward = half_equal
        found = trainer.step_or_skip()
        kept = recorder.given["to_batch"][0]
        places = [f"1/{i}" for i in range(4, 8)] + [f"2/{i}" for i in range(4)]
        assert [e.group_id for e in kept] == [place for place in places for _ in range(8)]
        assert trainer.state["batches"] == found["rollout/prompt_batches"] == 2
        assert found["rollout/filtered/drop_uniform"] == 32 and found["rollout/episodes"] == 128
        assert found["rollout/kept"] == 64 and found["rollout/groups_dropped"] == 8
        written = lines_of(trainer, "rollouts/step_1.jsonl")
        assert [line["_episode"]["group_id"] for line in written[::64]] == ["1/0", "2/0"] and len(
            written
        ) == 128


def test_filling_up_ends_after_so_many_batches(workspace, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=3"]
    with algorithm.train(planned(workspace, *QUIET, *refill)) as trainer:
        recorder.servers.reward = lambda i, group_id: 1.0
        with pytest.raises(
            SkippedStep, match=r"no group left to train on; see runs/tiny/rollouts/step_1\.jsonl"
        ):
            trainer.step()
        assert trainer.state["batches"] == 3 and len(recorder.servers.asked) == 3
        assert trainer.metrics["rollout/filtered/drop_uniform"] == 3 * 64
        recorder.servers.reward = lambda i, group_id: float(group_id.startswith("4/0") and i == 0)
        assert len(trainer.collect()) == 8  # what the batches gave, though it is not full


def test_without_filter_groups_one_batch_of_prompts_makes_a_step(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET, f"{REFILL}.max_num_gen_batches=3")) as trainer:
        recorder.servers.reward = lambda i, group_id: 1.0
        assert trainer.max_gen_batches == 1 and len(trainer.collect()) == 64
        assert [task.row_id for task in trainer.tasks(1)] == ids(
            recorder.servers.asked[0].requests
        )[::8]


def test_prompts_of_batches_that_are_cut_come_in_an_order_of_the_seed(workspace, recorder):
    refill = [f"{REFILL}.enable=true", f"{REFILL}.max_num_gen_batches=2", "data.shuffle=false"]
    orders = []
    for seed in (1, 2):
        with algorithm.train(planned(workspace, *QUIET, *refill, f"data.seed={seed}")) as trainer:
            in_file = [task.row_id for task in trainer.inputs.train]
            for batch in (1, 2):
                order = [task.row_id for task in trainer.tasks(batch)]
                assert order == [task.row_id for task in trainer.tasks(batch)]
                assert sorted(order) == sorted(in_file) and order != in_file
                orders.append(tuple(order))
    assert len(set(orders)) == 4
    with algorithm.train(planned(workspace, *QUIET, "data.shuffle=false")) as trainer:
        assert [task.row_id for task in trainer.tasks(1)] == in_file


@pytest.mark.parametrize(("estimator", "groups"), [("grpo", 7), ("reinforce_plus_plus", 8)])
def test_a_group_of_one_is_trained_on_unless_answers_are_compared(
    workspace, recorder, monkeypatch, estimator, groups
):
    changes = [*QUIET, "gym.max_failed_frac=1", f"algorithm.adv_estimator={estimator}"]
    rollout = recorder.servers.rollout

    def lose(requests, *arguments, **named):
        made = rollout(requests, *arguments, **named)
        for e in made[1:8]:
            e.status, e.reward = "timeout", None
        return made

    monkeypatch.setattr(recorder.servers, "rollout", lose)
    with algorithm.train(planned(workspace, *changes)) as trainer:
        kept = trainer.collect()
    assert len({e.group_id for e in kept}) == groups and len(kept) == 56 + groups - 7


def test_too_many_failures_end_the_run(workspace, recorder):
    recorder.servers.fails = True
    with pytest.raises(RunError, match=r"64 of 64 episodes failed"):
        with algorithm.train(planned(workspace, *QUIET, "gym.max_failed_frac=0.5")) as trainer:
            trainer.step_or_skip()
    assert len(lines_of(trainer, "failures.jsonl")) == 64


# --- one step ahead ------------------------------------------------------------------------------

AHEAD = [
    "trainer.one_step_off=1",
    f"{ROLLOUT}.full_determinism=false",
    "trainer.total_training_steps=2",
]


def test_the_next_batch_is_begun_while_this_one_trains(workspace, recorder):
    sizes = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"]
    changes = [*QUIET, *AHEAD, *sizes, f"{ROLLOUT}.temperature=0.7"]
    with algorithm.train(planned(workspace, *changes)) as trainer:
        trainer.step_or_skip()
        [begun] = recorder.servers.begun
        assert groups_of(begun.requests) == [f"2/{i}" for i in range(4) for _ in range(8)]
        assert ids(begun.requests)[::8] == [task.row_id for task in trainer.tasks(2)]
        assert begun.sampling["temperature"] == 0.7 and begun.baselines is False
        assert (
            recorder.made.index("sleep", 2)
            < recorder.made.index("begin")
            < recorder.made.index("update_actor")
        )
        trainer.step_or_skip()
        assert groups_of(recorder.servers.asked[1].requests) == groups_of(begun.requests)
        assert len(recorder.servers.begun) == 1  # the last step begins none


def test_nothing_is_begun_without_the_key(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
    assert recorder.servers.begun == []


# --- rewards -------------------------------------------------------------------------------------


def test_a_learned_reward_is_a_component_that_the_recipes_reward_reads(
    workspace, recorder, monkeypatch
):
    """Means of components that the verifier gave stay those of all episodes."""
    recorder.workers = training.Workers("actor", None, "reward model")
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        trainer.inputs.reward = lambda e: e.reward + e.reward_components["reward_model"]
        found = trainer.step_or_skip()
        model, kept, pad, config = recorder.given["add_reward_model_scores"]
        assert (model, pad, config) == (
            "reward model",
            trainer.inputs.tokenizer.pad_token_id,
            trainer.config,
        )
        assert [e.reward for e in kept] == [4.0 + float(i % 3 == 0) for i in range(64)]
        assert (
            found["reward/reasoning_gym/reward_model/mean"] == 4.0
            and "timing_s/reward_model" in found
        )
        assert found["reward/reasoning_gym/right/mean"] == 0.5
        scores = recorder.given["compute_advantages"][0].batch["token_level_rewards"].sum(dim=1)
        assert scores.tolist() == [e.reward for e in kept]
        trainer.metrics = {"reward/reasoning_gym/right/mean": 0.75}
        trainer.reward(kept)
        assert trainer.metrics["reward/reasoning_gym/right/mean"] == 0.75


def test_without_a_reward_model_the_reward_is_the_verifiers(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        found = trainer.step_or_skip()
        assert "add_reward_model_scores" not in recorder.made and "timing_s/reward_model" not in found


# --- what the trainer measures -------------------------------------------------------------------


def test_the_actor_waits_for_its_critic_for_so_many_steps(workspace, recorder):
    """trainer.critic_warmup=2: steps 1 and 2 measure the old log-probs and train the critic alone."""
    recorder.workers = training.Workers("actor", "critic", None)
    changes = [
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=2",
        "critic.ppo_mini_batch_size=8",
    ]
    with algorithm.train(planned(workspace, *QUIET, *changes)) as trainer:
        for learns in (False, False, True):
            recorder.made.clear()
            found = trainer.step_or_skip()
            names = ("add_old_log_probs", "compute_values", "update_critic", "update_actor")
            made = [name for name in recorder.made if name in names]
            before = ["compute_values"] if learns else ["add_old_log_probs", "compute_values"]
            assert made == [*before, "update_critic", *["update_actor"] * learns]
            assert ("actor/pg_loss" in found) == ("timing_s/update_actor" in found) == learns
            assert ("actor/entropy" in found) == ("timing_s/old_log_prob" in found) == (not learns)
            assert found["critic/vf_loss"] == 0.75 and {
                "timing_s/values",
                "timing_s/update_critic",
            } <= set(found)
        batch = recorder.given["compute_advantages"][0]
        assert recorder.given["compute_values"] == ("critic", batch, trainer.config)
        assert recorder.given["update_critic"] == ("critic", batch, trainer.config)
        assert recorder.given["add_old_log_probs"][::2] == ("actor", trainer.config)
        assert set(batch.batch["values"].flatten().tolist()) == {0.25}
        assert found["critic/values/mean"] == 0.25


def test_a_kl_penalty_is_of_the_reference_and_its_coefficient_is_saved(workspace, recorder):
    ctrl = ["type=adaptive", "horizon=640", "kl_coef=0.4", "target_kl=0.1"]
    changes = [
        "algorithm.use_kl_in_reward=true",
        *(f"algorithm.kl_ctrl.{change}" for change in ctrl),
    ]
    with algorithm.train(planned(workspace, *QUIET, *changes)) as trainer:
        found = trainer.step_or_skip()
        batch, controller, config = recorder.given["apply_kl_penalty"]
        assert controller is trainer.kl_controller and config is trainer.config
        assert recorder.given["compute_ref_log_probs"] == (recorder.workers, batch, trainer.config)
        assert close(batch.batch["ref_log_prob"], batch.batch["rollout_log_probs"] - 1.0)
        penalty = 0.4 * 0.5 * torch.ones(64, 3)  # old - ref = 0.5 on each token
        assert close(
            batch.batch["token_level_rewards"], batch.batch["token_level_scores"] - penalty
        )
        assert found["actor/reward_kl_penalty_coeff"] == 0.4 and "timing_s/ref" in found
        moved = 0.4 * (1 + 0.2 * 64 / 640)
        assert trainer.state["kl_coef"] == trainer.saved_state["kl_coef"] == pytest.approx(moved)
        assert type(trainer.state["kl_coef"]) is float


def test_without_a_kl_penalty_rewards_are_the_scores(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET, f"{ACTOR}.use_kl_loss=true")) as trainer:
        trainer.step_or_skip()
        batch = recorder.given["compute_advantages"][0].batch
        assert torch.equal(batch["token_level_rewards"], batch["token_level_scores"])
        assert (
            "apply_kl_penalty" not in recorder.made
            and "ref_log_prob" in batch
            and trainer.state["kl_coef"] == 0.0
        )


def test_sampler_and_trainer_are_compared_where_both_are_known(workspace, recorder):
    """old - sampled = -0.5 on each token."""
    with algorithm.train(planned(workspace, *QUIET, f"{CORRECTION}.rollout_is=token")) as trainer:
        found = trainer.step_or_skip()
        batch, config = recorder.given["apply_rollout_correction"]
        assert config is trainer.config and close(
            batch.batch["rollout_is_weights"], np.full((64, 3), np.exp(-0.5))
        )
        assert any(name.startswith("rollout_corr/") for name in found)
        assert "timing_s/old_log_prob" in found and found["actor/entropy"] == 0.125


def test_in_bypass_mode_the_sampler_is_the_old_policy_and_the_loss_corrects(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET, f"{CORRECTION}.bypass_mode=true")) as trainer:
        trainer.step_or_skip()
        batch = recorder.given["update_actor"][1].batch
        assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])
        assert not {"apply_rollout_correction", "add_old_log_probs"} & set(recorder.made)


def test_old_log_probs_that_the_update_gives_are_not_corrected_before(workspace, recorder):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
    assert not {"apply_rollout_correction", "add_old_log_probs", "compute_ref_log_probs", "compute_values", "update_critic"} & set(
        recorder.made
    )


def test_a_step_whose_tokens_are_all_rejected_is_skipped(workspace, recorder, monkeypatch, capsys):
    def reject(batch, _):
        batch.batch["response_mask"][:] = 0
        return {}

    monkeypatch.setattr(training, "apply_rollout_correction", reject)
    with algorithm.train(
        planned(workspace, *QUIET, "algorithm.recompute_old_log_probs=true")
    ) as trainer:
        trainer.run.nonfinite_steps = 2
        trainer.step_or_skip()
        assert "update_actor" not in recorder.made and recorder.made[-1] == "publish 1"
        assert trainer.run.nonfinite_steps == 0 and trainer.metrics["training/skipped_nonfinite_steps"] == 0
        assert not (trainer.run.folder / "damaged").exists()
    told = capsys.readouterr().out.replace("\n", "")
    assert "step 1 skipped: algorithm.rollout_correction.rollout_rs rejected every token" in told


# --- damage --------------------------------------------------------------------------------------


def broken(*_, **__):
    return {"actor/grad_norm": math.nan}


def break_values(_, batch, __):
    return torch.full_like(batch.batch["rollout_log_probs"], math.nan)


def break_advantages(batch, _):
    nan = torch.full_like(batch.batch["token_level_rewards"], math.nan)
    batch.batch["advantages"] = batch.batch["returns"] = nan


@pytest.mark.parametrize(
    ("name", "function", "after"),
    [
        ("compute_values", break_values, ["compute_advantages", "update_critic", "update_actor"]),
        ("compute_advantages", break_advantages, ["update_critic", "update_actor"]),
        ("update_actor", broken, ["publish 1"]),
    ],
)
def test_a_damaged_step_stops_at_once_and_keeps_its_batch(
    workspace, recorder, monkeypatch, name, function, after
):
    recorder.workers = training.Workers("actor", "critic", None)
    monkeypatch.setattr(training, name, function)
    changes = ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=8"]
    with algorithm.train(planned(workspace, *QUIET, *changes)) as trainer:
        with pytest.raises(NonFiniteStep) as caught:
            trainer.step()
        assert not set(after) & set(recorder.made)
        assert caught.value.batch.batch["responses"].tolist() == [[5, 6, 1]] * 64


def test_three_damaged_steps_in_a_row_end_the_run(workspace, recorder, monkeypatch, capsys):
    monkeypatch.setattr(training, "update_actor", broken)
    with pytest.raises(
        RunError, match=r"3 damaged steps in a row, the last: actor/grad_norm is nan"
    ):
        with algorithm.train(planned(workspace, *QUIET, "trainer.save_freq=1")) as trainer:
            for step in (1, 2):
                recorder.made.clear()
                found = trainer.step_or_skip()
                assert found["training/skipped_nonfinite_steps"] == trainer.run.nonfinite_steps == step
                assert recorder.made[-2:] == [f"save {step}", f"publish {step}"]
                assert (trainer.run.folder / "damaged" / f"step_{step}.pt").is_file()
                assert trainer.saved_state["step"] == trainer.state["step"] == step
                logged = lines_of(trainer)[-1]
                assert logged["step"] == step and logged["training/skipped_nonfinite_steps"] == step
            trainer.step_or_skip()
    told = capsys.readouterr().out.replace("\n", "")
    assert (
        "step 1 skipped: actor/grad_norm is nan; the batch is in runs/tiny/damaged/step_1.pt"
        in told
    )


def test_a_good_step_between_damaged_ones_starts_the_count_again(workspace, recorder, monkeypatch):
    good = training.update_actor
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        for function, count in ((broken, 1), (broken, 2), (good, 0), (broken, 1)):
            monkeypatch.setattr(training, "update_actor", function)
            found = trainer.step_or_skip()
            assert trainer.run.nonfinite_steps == found.get("training/skipped_nonfinite_steps", 0) == count


def test_a_skipped_step_counts_as_learned_and_is_evaluated(workspace, recorder):
    recorder.servers.fails = True
    changes = ["gym.max_failed_frac=1", "trainer.save_freq=1", "trainer.test_freq=1"]
    with algorithm.train(planned(workspace, *QUIET, *changes)) as trainer:
        recorder.made.clear()
        found = trainer.step_or_skip()
        assert recorder.made == ["rollout", "save 1", "validate"]
        assert trainer.saved_state == trainer.state and trainer.saved_state is not trainer.state
        assert found["rollout/failed_frac"] == 1.0 and found["training/epoch"] == 1.0


def test_what_is_saved_is_of_the_update_that_the_workers_have(workspace, recorder):
    """The state is copied with the update; what changes later is not in it."""
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        trainer.step_or_skip()
        assert trainer.saved_state == trainer.state and trainer.saved_state is not trainer.state
        recorder.record(trainer.run, "save")
        trainer.state["step"] = 9
        assert trainer.save() == trainer.run.checkpoint
        workers, state = recorder.given["save"]
        assert workers is recorder.workers and state["step"] == 1


# --- what a run writes and prints ----------------------------------------------------------------


def test_rollouts_have_the_places_of_their_rows_and_each_step_its_line(workspace, recorder, capsys):
    """The places are those in the files, whatever the order in which the rows were sampled."""
    with algorithm.train(
        planned(workspace, "data.train_batch_size=2", "trainer.print_samples_every=2", *QUIET)
    ) as trainer:
        trainer.step_or_skip()
        trainer.step_or_skip()
    places = {task.row_id: place for place, task in enumerate(trainer.inputs.train)}
    seen = []
    for step in (1, 2):
        records = lines_of(trainer, f"rollouts/step_{step}.jsonl")
        seen += [record["_ng_task_index"] for record in records]
        assert all(
            record["_ng_task_index"] == places[record["_episode"]["row_id"]] for record in records
        )
        assert [record["_ng_rollout_index"] for record in records] == [
            *range(len(records) // 2)
        ] * 2
    assert seen != sorted(seen)  # the order is not that of the files
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1", "2"] and "reward" in lines[0]


def test_an_evaluation_with_failures_prints_a_warning(workspace, recorder, capsys):
    with algorithm.train(planned(workspace, *QUIET)) as trainer:
        rollout = trainer.servers.rollout

        def fail_first(*arguments, **named):
            made = rollout(*arguments, **named)
            made[0].status, made[0].reward, made[0].error = "timeout", None, "no answer"
            return made

        trainer.evaluate()
        assert "WARNING" not in capsys.readouterr().out
        trainer.servers.rollout = fail_first
        trainer.evaluate()
    output = capsys.readouterr().out
    assert "if a failed one counts as 0; see failures.jsonl" in output.replace("\n", " ")
