"""Tests training.py without Ray: batches, forward passes, advantages and updates.

The worker groups are doubles that record each batch.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import left_right_2_no_padding

import training
from kit.data.episode import Branch, Episode, TurnSpan
from kit.data.selection import select_trainable
from kit.data.training_rows import find_reason_against, join_rows
from kit.errors import RunError
from kit.recipe.recipe import Recipe
from tests.helpers.recipes import ALGORITHM, changed, make_partial
from tests.helpers.workers import (
    ACTOR,
    CORRECTION,
    FACTORS,
    FUSED,
    RecordingGroup,
    compute_outputs,
    is_close,
    make_batch,
    make_episode,
    make_update_batch,
    rows_of,
    sent_rows,
    seven_episodes,
    two_rank_recipe,
)


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    return two_rank_recipe(workspace)


# --- tensors -------------------------------------------------------------------------------------


def test_the_mask_and_not_the_id_marks_padding(recipe):
    """The batch has the recipe's temperature and the images of its episodes."""
    PAD = 2  # also the id of EOS, which the policy samples
    calls = []
    processor = SimpleNamespace(add_images=lambda *arguments: calls.append(arguments))
    inputs: Any = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=PAD), processor=processor)
    episodes = [
        make_episode([5, 6, 7], [8, PAD], turns=[]),
        make_episode([9], [PAD], turns=[], reward=0.5),
    ]
    episodes[1].images = ["a.png"]
    temperature = "actor_rollout_ref.rollout.temperature=0.7"
    batch = training.to_batch(episodes, inputs, changed(recipe, temperature))
    [(given_batch, images)] = calls
    assert given_batch is batch and images == [[], ["a.png"]]
    b = batch.batch
    assert b["prompts"].tolist() == [[5, 6, 7], [PAD, PAD, 9]]
    assert b["responses"].tolist() == [[8, PAD], [PAD, PAD]]
    assert b["input_ids"].tolist() == [[5, 6, 7, 8, PAD], [PAD, PAD, 9, PAD, PAD]]
    assert b["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert b["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 1]]
    # the mask has the sampled EOS, but not the padding
    assert b["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert b["token_level_scores"].tolist() == [[0.0, 1.0], [0.5, 0.0]]  # at the last token
    assert b["rollout_log_probs"].tolist() == [[-0.5, -0.5], [-0.5, 0.0]]
    assert batch.meta_info == {"temperature": 0.7, "global_token_num": [5, 2]}
    assert list(batch.non_tensor_batch["uid"]) == ["a", "a"]


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
    assert (recipe.world_size(), recipe.world_size("critic")) == (6, 12)
    recipe = changed(recipe, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert recipe.data_parallel_size() == 3
    assert recipe.data_parallel_size("critic") == 6


def test_ranks_get_about_as_many_tokens():
    """In the order of the batch, the slowest of 8 ranks would have 1.82 times the mean."""
    rng = random.Random(0)
    lengths = [rng.choice([1028, 104, 104, 104]) for _ in range(61)]
    order = training.balance_rows(lengths, 1, 8)
    padded = np.array([*lengths, 0, 0, 0])
    tokens = padded[order].reshape(8, -1).sum(axis=1)
    assert tokens.max() / tokens.mean() < 1.3


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
    metrics = training.add_old_log_probs(actor, batch, other)
    assert is_close(batch.batch["old_log_probs"], compute_outputs(episodes, -0.01))
    entropies = compute_outputs(episodes, 0.02)
    del entropies[3]  # its mask is 0
    assert metrics["actor/entropy"] == pytest.approx(sum(map(sum, entropies)) / 13)
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


# --- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_custom_estimator_gets_the_arguments_that_it_names(recipe, monkeypatch, has_weights):
    arguments = {}

    def estimator(token_level_rewards, index, gamma, lam, config, rollout_is_weights, values):
        arguments.update(locals())
        return token_level_rewards + 1, token_level_rewards + 2

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "mine.py:f", estimator)
    changes = ["algorithm.adv_estimator=mine.py:f", "algorithm.gamma=0.9", "algorithm.lam=0.5"]
    recipe = changed(recipe, *changes)
    batch = make_batch([make_episode([5], [7], group="a"), make_episode([5], [7], group="b")])
    batch.batch["token_level_rewards"] = torch.tensor([[0.25], [0.5]])
    batch.batch["values"] = torch.tensor([[0.1], [0.2]])
    if has_weights:
        batch.batch["rollout_is_weights"] = torch.tensor([[3.0], [4.0]])
    training.compute_advantages(batch, recipe)
    assert arguments["gamma"] == 0.9 and arguments["lam"] == 0.5
    assert list(arguments["index"]) == ["a", "b"]
    assert arguments["config"] == recipe.for_verl("algorithm")
    assert is_close(arguments["values"], [[0.1], [0.2]])
    if has_weights:
        assert is_close(arguments["rollout_is_weights"], [[3.0], [4.0]])
    else:
        assert arguments["rollout_is_weights"] is None
    assert is_close(batch.batch["advantages"], [[1.25], [1.5]])
    assert is_close(batch.batch["returns"], [[2.25], [2.5]])


def test_failed_episodes_do_not_change_the_advantages_of_the_others():
    recipe = make_partial({"algorithm": ALGORITHM})

    def compute(episodes):
        batch = training.build_batch(select_trainable(episodes)[0], 0, 1.0)
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        training.compute_advantages(batch, recipe)
        return batch.batch["advantages"][:, 0].tolist()

    good = [make_episode([1], [1], reward=r, group="a") for r in (0.0, 1.0, 1.0)]
    alone = make_episode([1], [1], reward=1.0, group="b")
    failed = [make_episode([1], [1], reward=None, group=g, status="http_500") for g in "aab"]
    with_failures = compute([good[0], failed[0], good[1], alone, good[2], *failed[1:]])
    assert with_failures == compute(good) == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


# --- episodes of several rows --------------------------------------------------------------------


def make_branched_episodes() -> list[Episode]:
    """Make an episode whose branch begins within its response, and one of a single row."""
    branch = Branch(
        [5, 7], [9, 9, 4], [1, 0, 1], [-0.5] * 3, [TurnSpan(0, 1, 1), TurnSpan(2, 3, 2)]
    )
    return [
        make_episode([5], [7, 8], branches=[branch], reward=0.75),
        make_episode([5], [6], reward=0.25),
    ]


def test_an_estimator_gets_one_line_for_each_episode(recipe, monkeypatch):
    """The main row comes last, so the reward follows all sampled tokens. The result is split."""

    def estimator(token_level_rewards, response_mask, index, rollout_log_probs):
        assert token_level_rewards.tolist() == [[0, 0, 0, 0, 0.75], [0.25, 0, 0, 0, 0]]
        assert response_mask.tolist() == [[1, 0, 1, 1, 1], [1, 0, 0, 0, 0]]
        assert list(index) == ["a", "a"] and rollout_log_probs[1].tolist() == [-0.5, 0, 0, 0, 0]
        positions = torch.arange(5.0).expand(2, 5)
        return positions, positions + 1

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "mine.py:f", estimator)
    batch = make_batch(make_branched_episodes())
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    training.compute_advantages(batch, changed(recipe, "algorithm.adv_estimator=mine.py:f"))
    assert batch.batch["advantages"].tolist() == [[0, 1, 2], [3, 4, 0], [0, 0, 0]]
    assert batch.batch["returns"].tolist() == [[1, 2, 3], [4, 5, 0], [1, 0, 0]]
    assert batch.batch["turn"].tolist() == [[0, -1, 1], [0, 0, -1], [0, -1, -1]]
    (is_sampled,) = join_rows(batch, batch.batch["turn"] >= 0)
    assert is_sampled.tolist() == [[1, 0, 1, 1, 1], [1, 0, 0, 0, 0]]
    metrics = training.compute_step_metrics(batch, {"step": 1.0}, recipe)
    assert metrics["critic/rewards/mean"] == 0.5 and metrics["response_length/mean"] == 2.0


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        ("algorithm.adv_estimator=gae", {"values"}),
        ("algorithm.adv_estimator=optimal_token_baseline", {"index", "sum_pi_squared"}),
        ("algorithm.adv_estimator=mine.py:f", {"turn"}),
        ("algorithm.use_kl_in_reward=true", {"index"}),
        ("reward.reward_model.enable=true", {"index"}),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", {"index"}),
    ],
)
def test_a_recipe_that_needs_one_row_refuses_branches(recipe, change, arguments):
    episodes = make_branched_episodes()
    inputs: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=3),
        processor=SimpleNamespace(add_images=lambda *_: None),
    )
    assert find_reason_against(recipe) == "" and len(training.to_batch(episodes, inputs, recipe))
    recipe = changed(recipe, change)
    recipe.__dict__["arguments"] = frozenset(arguments)
    with pytest.raises(RunError, match=f"^{change.partition('=')[0]}.*several training rows"):
        training.to_batch(episodes, inputs, recipe)
    training.to_batch(episodes[1:], inputs, recipe)


# --- metrics -------------------------------------------------------------------------------------


def test_throughput_is_per_gpu_and_the_critics_metrics_are_included(recipe):
    batch = make_update_batch(seven_episodes())
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.batch["returns"] = batch.batch["advantages"]
    timing = {"step": 2.0, "gen": 1.0}
    rollout = "actor_rollout_ref.rollout"
    separate = changed(recipe, f"{rollout}.nnodes=3", f"{rollout}.n_gpus_per_node=2")
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in seven_episodes())
    for setting, gpus in ((recipe, 2), (separate, 8)):  # six are for vLLM
        metrics = training.compute_step_metrics(batch, timing, setting)
        assert metrics["perf/throughput"] == pytest.approx(tokens / (2.0 * gpus))
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(1000 / 15)
    assert "critic/rewards/mean" in metrics and "critic/values/mean" not in metrics
    batch.batch["values"] = torch.full_like(batch.batch["advantages"], 0.5)
    assert training.compute_step_metrics(batch, timing, recipe)["critic/values/mean"] == 0.5


# --- the rows of an update -----------------------------------------------------------------------


def test_an_update_gets_each_live_row_once_in_whole_mini_batches(recipe):
    """Six of seven rows have tokens to train on. On 2 ranks, 2 mini-batches get 2 padding rows."""
    episodes = seven_episodes()
    actor = RecordingGroup({"pg_loss": [1.0, 3.0], "actor/grad_norm": [2.0], "mfu": [0.5]})
    batch = make_update_batch(episodes)
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    metrics = training.update_actor(actor, batch, recipe)
    assert metrics == {"actor/pg_loss": 2.0, "actor/grad_norm": 2.0}
    [(method, data)] = actor.calls
    assert method == "update_actor" and len(data) == 8
    rows = sent_rows(data)
    assert sorted(rows) == [0, 0, 1, 2, 3, 5, 6, 7]
    for row, ids, mask, advantage in zip(
        rows, rows_of(data), data["response_mask"], data["advantages"], strict=True
    ):
        e = episodes[row - 1] if row else episodes[0]
        assert ids == e.prompt_ids + e.response_ids
        live = len(e.response_ids) if row else 0
        assert mask.tolist() == [1] * live + [0] * (4 - live)
        assert set(advantage.tolist()) == {float(row)}
    assert not {"token_level_scores", "token_level_rewards"} & set(data.keys())
    sources = [max(row - 1, 0) for row in rows]
    assert is_close(data["rollout_log_probs"], batch.batch["rollout_log_probs"][sources])
    assert is_close(data["old_log_probs"], [[-0.25] * 4] * 8)
    # the padding was added to a copy
    assert all(torch.equal(batch.batch[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("rows", "mini_batches", "per_mini_batch"),
    [(slice(7), 2, 4), (slice(4), 1, 4), (slice(2), 1, 2), (slice(2, 4), 1, 2)],
)
def test_a_small_batch_is_split_into_fewer_mini_batches(recipe, rows, mini_batches, per_mini_batch):
    """Each rank gets a row of each mini-batch. The batches have 6, 3, 2 and 1 rows with tokens."""
    episodes = seven_episodes()[rows]
    actor = RecordingGroup()
    training.update_actor(actor, make_update_batch(episodes), recipe)
    assert tu.get(actor.data, "mini_batch_size") == per_mini_batch
    assert tu.get(actor.data, "global_batch_size") == len(episodes) / mini_batches
    assert len(actor.data) == mini_batches * per_mini_batch


def test_images_stay_with_their_rows(recipe):
    batch = make_update_batch(seven_episodes())
    actor = RecordingGroup()
    images = [{"pixels": i} for i in range(7)]
    batch.non_tensor_batch["multi_modal_inputs"] = np.array(images, dtype=object)
    training.update_actor(actor, batch, recipe)
    pixels = [image["pixels"] for image in tu.get(actor.data, "multi_modal_inputs")]
    assert pixels == [max(row - 1, 0) for row in sent_rows(actor.data)]
    assert "uid" not in actor.data


# --- the settings of an update -------------------------------------------------------------------


def test_an_update_has_the_recipes_settings(recipe):
    actor = RecordingGroup()
    recipe = changed(recipe, f"{ACTOR}.shuffle=true")
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    data = actor.data
    assert tu.get(data, "mini_batch_size") == 4 and tu.get(data, "global_batch_size") == 3.5
    assert tu.get(data, "epochs") == 2 and tu.get(data, "seed") == 7
    assert tu.get(data, "dataloader_kwargs") == {"shuffle": True}
    assert tu.get(data, "compute_loss") is True and tu.get(data, "temperature") == 0.7
    assert tu.get(data, "distillation_use_topk") is False
    assert tu.get(data, "distillation_only") is False
    assert torch.equal(data["loss_mask"], data["response_mask"])  # of SFT it differs


@pytest.mark.parametrize(
    ("changes", "entropy"),
    [
        ([], False),
        ([f"{ACTOR}.entropy_coeff=0.1"], True),
        ([f"{ACTOR}.calculate_entropy=true"], True),
        (FUSED, True),  # for the metrics of an on-policy update
    ],
)
def test_the_entropy_is_computed_if_something_reads_it(recipe, changes, entropy):
    actor = RecordingGroup()
    recipe = changed(recipe, f"{ACTOR}.calculate_entropy=false", *changes)
    training.update_actor(actor, make_update_batch(seven_episodes()), recipe)
    assert tu.get(actor.data, "calculate_entropy") is entropy


def test_an_update_of_the_critic_has_the_settings_and_ranks_of_the_critic(recipe):
    changes = [
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_epochs=3",
        "critic.data_loader_seed=9",
        "critic.shuffle=true",
    ]
    recipe = changed(recipe, *changes, "trainer.resource_pools.critic=4")
    critic = RecordingGroup({"vf_loss": [0.5, 1.0], "critic/lr": [0.1]})
    metrics = training.update_critic(critic, make_update_batch(seven_episodes()), recipe)
    assert metrics == {"critic/vf_loss": 0.75, "critic/lr": 0.1}
    [(method, data)] = critic.calls
    # 6 live rows on 4 ranks, in one mini-batch
    assert method == "train_mini_batch" and len(data) == 8
    assert tu.get(data, "mini_batch_size") == 8 and tu.get(data, "global_batch_size") == 7
    assert tu.get(data, "epochs") == 3 and tu.get(data, "seed") == 9
    assert tu.get(data, "dataloader_kwargs") == {"shuffle": True}
    assert tu.get(data, "compute_loss") is True


def test_utilization_is_a_metric_only_on_gpus(recipe):
    recipe = changed(recipe, "trainer.device=cuda")
    batch = make_update_batch(seven_episodes())
    actor = RecordingGroup({"mfu": [0.25, 0.75]})
    critic = RecordingGroup({"mfu": [0.5]})
    assert training.update_actor(actor, batch, recipe) == {"perf/mfu/actor": 0.5}
    assert training.update_critic(critic, batch, recipe) == {"perf/mfu/critic": 0.5}


# --- whether an update is on-policy --------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "algorithm.recompute_old_log_probs=true",
        "algorithm.use_kl_in_reward=true",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k1",
        "algorithm.adv_estimator=templates/advantages.py:pairs",  # needs old_log_probs
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
    ],
)
def test_old_log_probs_that_are_needed_before_the_update_need_a_separate_pass(recipe, change):
    recipe = changed(recipe, *FUSED)
    assert recipe.is_on_policy
    assert not changed(recipe, change).is_on_policy


@pytest.mark.parametrize(
    ("name", "is_on_policy"),
    [("sum_pi_squared", False), ("rollout_log_probs", False), ("response_mask", True)],
)
def test_an_estimator_that_reads_results_of_the_pass_needs_a_separate_pass(
    recipe, tmp_path, name, is_on_policy
):
    """verl's estimators that read these results also read the old log-probs. A custom one may not.

    The pass also completes rollout_log_probs. A response that a filter adds has none.
    """
    file = tmp_path / "mine.py"
    file.write_text(f"def f({name}):\n    return {name}, {name}\n")
    recipe = changed(recipe, *FUSED, f"algorithm.adv_estimator={file}:f")
    assert recipe.is_on_policy is is_on_policy


# --- the workers' side ---------------------------------------------------------------------------

EPISODES = [
    make_episode([5], [7, 8]),
    make_episode([5, 6], [9]),
    make_episode([5], [3, 2, 4], mask=[1, 0, 1]),
    make_episode([5], [6, 1], turns=[]),  # a filter wrote it
]


def make_micro_batch(episodes, tokens, ranks=1):
    """Return a micro-batch as a worker gets it, and a model's outputs: FACTORS of its ids."""
    data = left_right_2_no_padding(make_batch(episodes).to_tensordict())
    tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens)
    model_output = {}
    for name in ("log_probs", "entropy"):
        numbers = (FACTORS[name] * data["input_ids"].values().double()).requires_grad_()
        offsets = data["input_ids"].offsets()
        model_output[name] = torch.nested.nested_tensor_from_jagged(numbers, offsets=offsets)
    return data, model_output


def no_loss(*arguments):
    return "loss", {}


@pytest.mark.parametrize(("computes", "coefficient"), [(False, 0.0), (True, 0.0), (False, 0.1)])
@pytest.mark.parametrize("has_old", [True, False])
def test_the_on_policy_loss_uses_its_log_probs_as_the_old_ones(computes, coefficient, has_old):
    data, model_output = make_micro_batch(EPISODES[:2], tokens=3)
    if has_old:
        data["old_log_probs"] = torch.full((2, 2), -7.0)
    seen = {}

    def loss(config, model_output, data, dp_group):
        seen.update(output=set(model_output), old=data["old_log_probs"])
        seen.update(config=config, group=dp_group)
        return "loss", {"pg_loss": 1.0}

    config = SimpleNamespace(calculate_entropy=computes, entropy_coeff=coefficient)
    result, metrics = training.compute_on_policy_loss(loss, config, model_output, data, "ranks")
    assert result == "loss" and metrics["pg_loss"] == 1.0
    assert ("actor/entropy" in metrics) is not has_old
    assert seen["config"] is config and seen["group"] == "ranks"
    assert not seen["old"].requires_grad
    expected = [[-7.0] * 2] * 2 if has_old else [[-0.05, -0.07], [-0.06, 0.0]]
    assert is_close(seen["old"].float(), expected)
    is_entropy_used = computes or coefficient
    assert seen["output"] == ({"log_probs", "entropy"} if is_entropy_used else {"log_probs"})


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [3], [1, 2]]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_metrics_are_those_of_the_separate_pass(recipe, parts, ranks):
    """Of several micro-batches and ranks. Each rank has the same episodes here."""
    config = SimpleNamespace(calculate_entropy=False, entropy_coeff=0.0)
    batch = make_batch(EPISODES)
    tokens = int(batch.batch["response_mask"].sum()) * ranks
    results = []
    for part in parts:
        data, model_output = make_micro_batch([EPISODES[i] for i in part], tokens, ranks)
        results.append(training.compute_on_policy_loss(no_loss, config, model_output, data)[1])

    expected = training.add_old_log_probs(RecordingGroup(), batch, recipe)
    expected |= training.apply_rollout_correction(batch, recipe)
    assert len(results[0]) == 5
    for name in results[0]:
        metric = results[0][name].init_list()
        for result in results:
            metric.append(result[name])
        value = Metric.aggregate_dp([metric] * ranks)
        assert value == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("changes", [[], FUSED])
@pytest.mark.parametrize("name", ["gspo", "mine.py:loss"])
def test_the_actor_gets_the_recipes_loss(recipe, monkeypatch, changes, name):
    """A worker registers a custom loss before it calls verl's ppo_loss."""
    loss_settings = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.clip_ratio=0.3"]
    recipe = changed(recipe, *changes, *loss_settings)
    calls = []

    def ppo_loss(config, model_output, data, dp_group=None):
        calls.append((config, model_output, data, dp_group, POLICY_LOSS_REGISTRY[name]))
        return "loss", {}

    def on_policy_loss(loss, *arguments):
        calls.append("on-policy")
        return loss(*arguments)

    def custom_loss():
        """Stand for a loss of the recipe."""

    monkeypatch.setattr(training, "ppo_loss", ppo_loss)
    monkeypatch.setattr(training, "compute_on_policy_loss", on_policy_loss)
    registered = POLICY_LOSS_REGISTRY.get(name, custom_loss)
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, name, registered)
    sent = []
    training.set_policy_loss(SimpleNamespace(set_loss_fn=sent.append), recipe)
    if registered is custom_loss:
        monkeypatch.delitem(POLICY_LOSS_REGISTRY, name)  # as in a worker's process
    assert sent[0]("output", "data", "ranks") == ("loss", {})
    assert calls[:-1] == (["on-policy"] if changes else [])
    settings, *arguments = calls[-1]
    assert arguments == ["output", "data", "ranks", registered]
    assert settings.clip_ratio == 0.3 and settings.policy_loss.loss_mode == name
