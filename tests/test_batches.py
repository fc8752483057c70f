"""Tests how episodes become a batch, in which order workers get its rows, and their outputs.

These tests do not use Ray. The worker groups are doubles that record each batch.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

import training
from kit.config.recipe import Recipe
from kit.data.episode import TurnSpan
from tests.helpers.recipes import ALGORITHM, make_partial
from tests.helpers.workers import (
    ACTOR,
    RecordingGroup,
    changed,
    compute_outputs,
    is_close,
    make_batch,
    make_episode,
    rows_of,
    seven_episodes,
    two_rank_recipe,
)


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return two_rank_recipe(workspace)


# --- tensors -------------------------------------------------------------------------------------


def test_the_mask_and_not_the_id_marks_padding():
    PAD = 2  # also the id of EOS, which the policy samples
    episodes = [
        make_episode([5, 6, 7], [8, PAD], turns=[]),
        make_episode([9], [PAD], turns=[], reward=0.5),
    ]
    batch = training.build_batch(episodes, PAD, temperature=0.7)
    b = batch.batch
    assert b["input_ids"].tolist() == [[5, 6, 7, 8, PAD], [PAD, PAD, 9, PAD, PAD]]
    assert b["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert b["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 1]]
    # the mask has the sampled EOS, but not the padding
    assert b["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert b["token_level_scores"].tolist() == [[0.0, 1.0], [0.5, 0.0]]  # at the last token
    assert b["rollout_log_probs"].tolist() == [[-0.5, -0.5], [-0.5, 0.0]]
    assert batch.meta_info["temperature"] == 0.7 and batch.meta_info["global_token_num"] == [5, 2]


def test_padding_has_the_pad_id_and_no_log_prob():
    batch = make_batch([make_episode([5, 6], [7]), make_episode([5], [7, 8])])
    assert batch.batch["prompts"].tolist() == [[5, 6], [3, 5]]
    assert batch.batch["responses"].tolist() == [[7, 3], [7, 8]]
    assert batch.batch["input_ids"].tolist() == [[5, 6, 7, 3], [3, 5, 7, 8]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 1, 2, 2], [0, 0, 1, 2]]
    assert batch.batch["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, 0.0], [-0.5, -0.5]]
    assert batch.meta_info == {"temperature": 0.7, "global_token_num": [3, 3]}
    assert list(batch.non_tensor_batch["uid"]) == ["a", "a"]


def test_observed_tokens_are_attended_to_and_have_no_loss():
    episode = make_episode([5], [6, 7, 8], mask=[1, 0, 1], turns=[])
    batch = training.build_batch([episode], 0, 1.0)
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert batch.batch["response_mask"].tolist() == [[1, 0, 1]]


def test_the_batch_of_a_step_has_the_recipes_temperature_and_images(recipe):
    recipe = changed(recipe, "actor_rollout_ref.rollout.temperature=0.6")
    calls = []
    processor = SimpleNamespace(add_images=lambda *arguments: calls.append(arguments))
    inputs = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=4), processor=processor)
    episodes = [make_episode([5, 6], [7]), make_episode([5], [7])]
    batch = training.to_batch(episodes, inputs, recipe)
    assert batch.meta_info["temperature"] == 0.6
    assert batch.batch["prompts"].tolist() == [[5, 6], [4, 5]]
    [(given_batch, given_episodes)] = calls
    assert given_batch is batch and given_episodes is episodes


# --- rewards -------------------------------------------------------------------------------------


def test_turn_rewards_are_at_the_end_of_turns_and_the_rest_is_at_the_end_of_the_response():
    turns = [TurnSpan(0, 2, 1), TurnSpan(3, 5, 3)]
    with_turn_rewards = make_episode(
        [5, 6], [1, 2, 9, 3, 4, 8], [1, 1, 0, 1, 1, 0], turns, reward=1.0, turn_rewards=[0.25, 0.5]
    )
    turns = [TurnSpan(0, 1, 1), TurnSpan(2, 3, 3)]
    without = make_episode([5], [1, 9, 2], [1, 0, 1], turns, reward=0.5)
    batch = make_batch([with_turn_rewards, without]).batch
    assert batch["token_level_scores"].tolist() == [
        [0, 0.25, 0, 0, 0.5, 0.25],
        [0, 0, 0.5, 0, 0, 0],
    ]
    assert batch["turn"].tolist() == [[0, 0, -1, 1, 1, -1], [0, -1, 1, -1, -1, -1]]
    assert batch["token_level_scores"].dtype == torch.float32


def test_a_turn_that_ends_with_the_response_keeps_both_rewards():
    turns = [TurnSpan(0, 1, 1), TurnSpan(1, 2, 2)]
    episode = make_episode([5], [1, 2], turns=turns, reward=1.0, turn_rewards=[0.25, 0.5])
    assert make_batch([episode]).batch["token_level_scores"].tolist() == [[0.25, 0.75]]


def test_baselines_are_in_the_batch_if_every_episode_has_one():
    both = [make_episode([5], [7], baseline=0.25), make_episode([5], [7], baseline=0.0)]
    assert is_close(make_batch(both).batch["reward_baselines"], [0.25, 0.0])
    both[0].baseline = None
    assert "reward_baselines" not in make_batch(both).batch


def test_components_of_the_reward_reach_verls_multi_reward_advantage():
    """gdpo normalizes each component separately. The sum of both is the same in all episodes."""
    parts = [
        {"right": 1.0, "format": 0.0},
        {"right": 0.0, "format": 1.0},
        {"right": 1.0, "format": 0.0},
    ]
    episodes = [make_episode([1], [2, 3], turns=[], reward=1.0) for _ in parts]
    for episode, part in zip(episodes, parts, strict=True):
        episode.reward_components = part
    batch = training.build_batch(episodes, 0, 1.0)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    weights = {"gdpo_reward_keys": ["right", "format"], "gdpo_reward_weights": [1.0, 0.1]}
    algorithm = ALGORITHM | {"adv_estimator": "gdpo"} | weights
    training.compute_advantages(batch, make_partial({"algorithm": algorithm}))
    advantages = batch.batch["advantages"]  # [3, 2]
    assert advantages[0, 0] > 0 > advantages[1, 0] and torch.equal(advantages[0], advantages[2])


# --- the order of rows for the workers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "mini_batches", "ranks"), [(64, 1, 1), (61, 2, 2), (9, 8, 1), (16, 4, 4), (5, 2, 2)]
)
def test_every_rank_gets_its_share_of_every_mini_batch(rows, mini_batches, ranks):
    rng = random.Random(rows)
    lengths = [rng.randint(3, 90) for _ in range(rows)]
    order = training.balance_rows(lengths, mini_batches, ranks)
    padding = len(order) - rows
    assert sorted(order) == list(range(rows + padding)) and 0 <= padding < mini_batches * ranks
    per_slot = len(order) // (mini_batches * ranks)
    slots = [order[i : i + per_slot] for i in range(0, len(order), per_slot)]
    for m in range(mini_batches):
        # mini-batch m of all ranks has every mini_batches-th row
        members = []
        for rank in range(ranks):
            members += slots[rank * mini_batches + m]
        real = [i for i in members if i < rows]
        assert all(i % mini_batches == m for i in members) and len(real) >= rows // mini_batches


def test_ranks_that_share_one_model_count_once(recipe):
    """Each of three nodes has two GPUs for the actor, and four separate ones for the critic.

    With ulysses_sequence_parallel_size=2, two ranks share a sequence.
    """
    recipe = changed(recipe, "trainer.nnodes=3", "trainer.resource_pools.critic=4")
    assert recipe.world_size() == 6
    assert recipe.world_size("critic") == 12
    assert recipe.data_parallel_size() == 6
    assert recipe.data_parallel_size("critic") == 12
    recipe = changed(recipe, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert recipe.data_parallel_size() == 3
    assert recipe.data_parallel_size("critic") == 6


def test_forward_passes_are_balanced_over_ranks_and_come_back_in_order():
    """Responses have 1,024 or 100 tokens, on 8 ranks.

    In the order of the batch, the slowest rank would have 1.82 times the mean.
    """
    rng = random.Random(0)
    lengths = [rng.choice([1024, 100, 100, 100]) for _ in range(61)]
    rows = [make_episode([1] * 4, [2] * n, turns=[], group=str(i)) for i, n in enumerate(lengths)]
    batch = training.build_batch(rows, 0, 1.0)
    seen = {}

    def call(data):
        tokens = data["input_ids"].offsets().diff()  # of each row, in the order of the workers
        parts = tokens.view(8, -1).sum(dim=1).float()
        seen["slowest"] = float(parts.max() / parts.mean())
        seen["rows"] = len(tokens)
        values = torch.nested.nested_tensor_from_jagged(
            torch.repeat_interleave(tokens.float(), tokens), offsets=data["input_ids"].offsets()
        )
        return TensorDict({"values": values}, batch_size=len(tokens))

    values = training.run_forward(call, batch, 8).to_padded("values")  # [B, R]
    assert seen["rows"] == 64 and seen["slowest"] < 1.3
    for row, episode in zip(values, rows, strict=True):
        length = len(episode.response_ids)
        assert set(row[:length].tolist()) == {float(length + 4)}


def test_wait_for_output_also_accepts_a_future():
    output = TensorDict({}, batch_size=[])
    assert training.wait_for_output(output) is output
    assert training.wait_for_output(SimpleNamespace(get=lambda: output)) is output


def test_log_probs_come_back_in_the_order_of_the_batch(recipe):
    episodes = seven_episodes()
    actor = RecordingGroup()
    results = training.compute_log_probs(actor, make_batch(episodes), recipe)
    assert results.keys() == {"log_probs", "entropy"}
    assert is_close(results["log_probs"], compute_outputs(episodes, -0.01))
    assert is_close(results["entropy"], compute_outputs(episodes, 0.02))
    [(method, data)] = actor.calls
    assert method == "compute_log_prob" and len(data) == 8  # two ranks get four rows each
    assert rows_of(data).count([10, 11, 12, 13]) == 2  # padding repeats the first row
    assert tu.get(data, "calculate_entropy") is True and tu.get(data, "compute_loss") is False
    assert tu.get(data, "calculate_sum_pi_squared") is False
    assert tu.get(data, "temperature") == 0.7


def test_the_sum_of_squared_probabilities_is_computed_if_the_advantage_needs_it(recipe):
    other = changed(recipe, "algorithm.adv_estimator=optimal_token_baseline")
    episodes = seven_episodes()
    actor = RecordingGroup()
    batch = make_batch(episodes)
    training.add_old_log_probs(actor, batch, other)
    assert tu.get(actor.data, "calculate_sum_pi_squared") is True
    assert is_close(batch.batch["sum_pi_squared"], compute_outputs(episodes, 0.04))
    batch = make_batch(episodes)
    training.add_old_log_probs(actor, batch, recipe)
    assert "sum_pi_squared" not in batch.batch


def test_sampled_tokens_keep_the_log_probs_of_the_rollout_engine():
    """Observed tokens and rows without a turn get those of the trainer. Turns start at 0."""
    turns = [TurnSpan(0, 1, 1), TurnSpan(2, 3, 3)]
    with_observed = make_episode([5], [7, 8, 9], [1, 0, 1], turns)
    batch = make_batch([with_observed, make_episode([5], [7, 8, 9], turns=[])])
    log_probs = torch.tensor([[-1.5, -1.75, -1.0], [-2.0, -2.25, -2.5]])
    entropy = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, 5.0]])
    metrics = training.set_old_log_probs(batch, log_probs, entropy, sum_pi_squared=entropy)
    assert is_close(batch.batch["rollout_log_probs"], [[-0.5, -1.75, -0.5], [-2.0, -2.25, -2.5]])
    assert torch.equal(batch.batch["old_log_probs"], log_probs)
    assert torch.equal(batch.batch["sum_pi_squared"], entropy)
    assert metrics["actor/entropy"] == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    differences = np.exp(-0.5) - np.exp([-1.5, -1.0])
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(differences[0], rel=1e-5)
    mean = differences.sum() / 5
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(mean, rel=1e-5)


def test_the_old_log_probs_and_the_entropy_come_from_the_workers(recipe):
    episodes = seven_episodes()
    actor = RecordingGroup()
    batch = make_batch(episodes)
    metrics = training.add_old_log_probs(actor, batch, recipe)
    assert is_close(batch.batch["old_log_probs"], compute_outputs(episodes, -0.01))
    entropies = compute_outputs(episodes, 0.02)
    del entropies[3]  # its mask is 0
    assert metrics["actor/entropy"] == pytest.approx(sum(map(sum, entropies)) / 13)


@pytest.mark.parametrize(
    ("lora_rank", "is_separate", "method", "adapter"),
    [
        (0, False, "compute_ref_log_prob", None),
        (1, False, "compute_log_prob", True),
        (8, True, "compute_ref_log_prob", None),  # a teacher
    ],
)
def test_the_reference_is_the_teacher_the_frozen_model_or_the_actor_without_its_adapter(
    recipe, lora_rank, is_separate, method, adapter
):
    changes = [f"actor_rollout_ref.model.lora_rank={lora_rank}", "trainer.resource_pools.ref=1"]
    recipe = changed(recipe, *changes)
    episodes = seven_episodes()
    actor = RecordingGroup()
    ref = RecordingGroup()
    workers = training.Workers(actor, None, None, ref if is_separate else None)
    log_probs = training.compute_ref_log_probs(workers, make_batch(episodes), recipe)
    is_adapter_off = lora_rank and not is_separate
    assert is_close(log_probs, compute_outputs(episodes, -0.01 if is_adapter_off else -0.1))
    called, unused = (ref, actor) if is_separate else (actor, ref)
    assert [name for name, _ in called.calls] == [method] and not unused.calls
    assert len(called.data) == (7 if is_separate else 8)  # one separate rank, or the actor's two
    assert tu.get(called.data, "no_lora_adapter") is adapter
    assert tu.get(called.data, "calculate_entropy") is False


def test_a_value_belongs_to_the_state_before_its_token(recipe):
    episodes = seven_episodes()
    critic = RecordingGroup()
    recipe = changed(recipe, "trainer.resource_pools.critic=3")
    values = training.compute_values(critic, make_batch(episodes), recipe)
    assert is_close(values, compute_outputs(episodes, 0.03))
    [(method, data)] = critic.calls
    assert method == "infer_batch" and len(data) == 9  # three ranks


def test_a_learned_reward_is_the_heads_output_at_the_last_token(recipe):
    """Each episode gets its own reward, in whatever order the ranks have the rows."""
    episodes = seven_episodes()
    model = RecordingGroup()
    recipe = changed(recipe, "trainer.resource_pools.reward_model=3")
    inputs = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=3))
    training.add_reward_model_scores(model, episodes, inputs, recipe)
    for e in episodes:
        assert e.reward_components == {"reward_model": pytest.approx(0.03 * e.response_ids[-1])}
        assert e.reward == 1.0  # only env.reward may change the reward
    [(method, data)] = model.calls
    assert method == "infer_batch" and len(data) == 9 and tu.get(data, "temperature") == 1.0
    ids = torch.cat([data["prompts"], data["responses"]], dim=1)
    assert set(ids.flatten().tolist()) & {0, 1, 2, 3} == {3}  # the tokenizer's pad id
