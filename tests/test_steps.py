"""Tests `Trainer.step` with FSDP, vLLM and Gym: parts that recipes combine, and weight updates."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

import training
from kit.run.workers import optional_roles, start_roles, start_workers
from tests.helpers.recipes import WORDS, row, write_rows
from tests.helpers.stack import AGREE, NO_EVALUATION, kill_workers, with_values


def read_records(trainer, step: int) -> list[dict]:
    """Read the records of rollouts/step_N.jsonl."""
    path = trainer.run.folder / "rollouts" / f"step_{step}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_baselines_a_reward_model_a_kl_penalty_and_correction_work_together(stack, values):
    """The recipe has ReMax, a reward model, an adaptive KL penalty, and rollout correction.

    All of them have metrics.
    """
    changes = [
        f"reward.reward_model.model_path={stack.workspace / 'scored'}",
        "trainer.total_training_steps=2",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=1",
        NO_EVALUATION,
    ]
    overlays = ["remax", "reward_model", "rollout_correction"]
    workers = with_values(stack, values, critic=False, reward_model=True)
    with stack.trainer("all", *changes, overlays=overlays, workers=workers) as trainer:
        steps = [dict(trainer.step_or_skip()) for _ in range(2)]
        state = torch.load(trainer.run.files.checkpoint / "data.pt", weights_only=True)
        episodes = [record["_episode"] for record in read_records(trainer, 2)]
    for m in steps:
        # vLLM and the trainer agree
        assert m["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
        # the KL penalty and the reward model change the reward
        assert m["critic/rewards/mean"] != m["reward/reasoning_gym/mean"]
        assert m["actor/grad_norm"] > 0
        assert math.isfinite(m["reward/reasoning_gym/reward_model/mean"])
    # Before step 1 there is no update, so only rounding differs. The reference computes in bf16,
    # which rounds log-probs from 2 to 4 by at most 2**-7.
    assert abs(steps[0]["actor/reward_kl_penalty"]) < 2**-7
    coefficients = [m["actor/reward_kl_penalty_coeff"] for m in steps] + [state["kl_coef"]]
    assert len(set(coefficients)) == 3  # the last one is that after the last update
    assert len(episodes) == 4
    assert all(e["baseline"] is not None for e in episodes)


def test_dapo_refills_the_batch_and_reports_how_many_batches_it_sampled(stack):
    """Dynamic sampling, filters, reward shaping and a curriculum.

    The model cannot write the answer of five of eight rows, so each batch of four is refilled.
    """
    rows = [row(f"{word} 7", "impossible" if i < 5 else "7") for i, word in enumerate(WORDS)]
    write_rows(stack.workspace / "hard.jsonl", rows)
    changes = [
        "env.train_files=[{path: hard.jsonl, server: reasoning_gym}]",
        "data.train_batch_size=4",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.n=4",
        "env.sampler=templates/samplers.py:by_pass_rate",
        NO_EVALUATION,
    ]
    with stack.trainer("dapo", *changes, overlays=["dapo"]) as trainer:
        steps = [dict(trainer.step_or_skip()) for _ in range(3)]
        files = [read_records(trainer, step) for step in (1, 2, 3)]
        state = torch.load(trainer.run.files.checkpoint / "data.pt", weights_only=True)
    batches = [m["rollout/prompt_batches"] for m in steps]
    assert set(batches) <= {1.0, 2.0, 3.0}
    assert min(batches) > 1
    # the file has the episodes of all batches
    assert [len(records) for records in files] == [16 * count for count in batches]
    for records in files:  # Gym's tools identify an episode by these two indices
        indices = [(r["_ng_task_index"], r["_ng_rollout_index"]) for r in records]
        assert len(set(indices)) == len(indices)
    for count, m in zip(batches, steps, strict=True):
        groups = 16 * count / 4 - m["rollout/groups_dropped"]
        assert groups <= 4
        assert groups == 4 or count == 3
        assert {"rollout/filtered/drop_uniform", "rollout/filtered/mask_ended"} <= m.keys()
    assert (state["step"], state["batches"]) == (3, sum(batches))
    assert 4 <= len(state["pass_rates"]) <= 8


def test_vllm_gets_the_merged_weights_of_a_lora_adapter(stack):
    """After an update, vLLM agrees with the trainer. The workers are those of this test."""
    changes = [
        "actor_rollout_ref.actor.optim.lr=0.03",
        "actor_rollout_ref.model.lora_rank=8",
        NO_EVALUATION,
    ]
    with stack.trainer("lora", *changes, overlays=["lora"]) as trainer:
        workers = start_workers(trainer.recipe)
        workers.actor.init_model()
    try:
        with stack.trainer("lora", *changes, overlays=["lora"], workers=workers) as trainer:
            for _ in range(2):
                metrics = trainer.step_or_skip()
                assert metrics["actor/grad_norm"] > 0
                assert metrics["training/rollout_probs_diff_max"] < AGREE
    finally:
        kill_workers(workers)


def test_weights_reach_vllm_over_a_socket_in_the_private_folder_of_the_run(stack):
    """verl uses the same socket name in all runs, and the receiver unpickles the data."""
    sockets: set[str] = set()
    ended = threading.Event()

    def record_sockets():
        while not ended.is_set():
            names = re.findall(r"\S*rl-colocate-zmq\S*", Path("/proc/net/unix").read_text())
            sockets.update(names)

    thread = threading.Thread(target=record_sockets)
    with stack.trainer("sockets", NO_EVALUATION) as trainer:
        thread.start()
        deadline = time.monotonic() + 60.0
        while not sockets and time.monotonic() < deadline:  # each socket is there for a moment
            trainer.update_weights()
        ended.set()
        thread.join()
    folders = {Path(name).parent for name in sockets}
    assert folders == {Path(os.environ["TMPDIR"])}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.soak
def test_critic_and_reference_run_in_separate_resource_pools(stack):
    """Each of them has two GPUs, and the actor has one.

    The reference returns the same log-probs as in the actor. The critic learns and saves shards.
    """
    changes = [
        "trainer.resource_pools={critic: 2, ref: 2}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "critic.optim.lr=0.001",
        NO_EVALUATION,
    ]
    with stack.trainer("pools", *changes, overlays=["ppo"]) as trainer:
        pools = start_roles(trainer.recipe, optional_roles(trainer.recipe))
        shared = trainer.workers
        trainer.workers = shared._replace(critic=pools.critic, ref=pools.ref)
        try:
            first = trainer.step_or_skip()
            episodes = trainer.collect()[:37]
            batch = training.build_batch(episodes, trainer.inputs.tokenizer.pad_token_id, 1.0)
            in_pool = training.compute_ref_log_probs(pools, batch, trainer.recipe)
            in_actor = training.compute_ref_log_probs(shared, batch, trainer.recipe)
            assert torch.equal(in_pool != 0, in_actor != 0)
            assert torch.allclose(in_pool, in_actor, atol=1e-4)
            second = trainer.step_or_skip()
            folder = trainer.save()
        finally:
            kill_workers([pools.critic, pools.ref])
    assert (pools.critic.world_size, pools.ref.world_size) == (2, 2)
    for metrics in (first, second):
        assert metrics["critic/grad_norm"] > 0
        assert metrics["training/rollout_probs_diff_max"] < AGREE
    assert second["actor/kl_loss"] > first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert len(list((folder / "critic").glob("model_world_size_2_rank_*.pt"))) == 2
