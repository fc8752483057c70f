"""Batches, forward passes and updates of training.py: worker groups that record each batch stand in for verl's.

Answers of the stub workers follow from the token ids alone, so that each expected number can be written down.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import load
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

import training
from kit.data.episodes import Episode

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
# Factor of the token id, by the name of the answer.
FACTORS = {"log_probs": -0.01, "entropy": 0.02, "values": 0.03, "sum_pi_squared": 0.04}


class Pending:
    """An answer that is fetched by `get`, as verl's critic gives it."""

    def __init__(self, output: TensorDict):
        self.output = output

    def get(self) -> TensorDict:
        return self.output


class RecordingGroup:
    """A worker group that keeps each batch it is given, with the name of the method."""

    def __init__(self, metrics: dict[str, Any] | None = None):
        self.calls: list[tuple[str, TensorDict]] = []
        self.metrics = metrics or {}

    @property
    def data(self) -> TensorDict:
        return self.calls[-1][1]

    def compute_log_prob(self, data):
        return self.infer("compute_log_prob", data, 1)

    def compute_ref_log_prob(self, data):
        return self.infer("compute_ref_log_prob", data, 10)

    def infer_batch(self, data):
        return Pending(self.infer("infer_batch", data, 1))

    def update_actor(self, data):
        return self.update("update_actor", data)

    def train_mini_batch(self, data):
        return Pending(self.update("train_mini_batch", data))

    def infer(self, method, data, times):
        self.calls.append((method, data))
        ids = data["input_ids"]
        answers = {}
        for name, factor in FACTORS.items():
            numbers = times * factor * ids.values().double()
            answers[name] = torch.nested.nested_tensor_from_jagged(numbers, offsets=ids.offsets())
        return TensorDict(answers, batch_size=len(data))

    def update(self, method, data):
        self.calls.append((method, data))
        output = TensorDict({}, batch_size=[])
        tu.assign_non_tensor_data(output, "metrics", copy.copy(self.metrics))
        return output


@pytest.fixture(scope="module")
def recipe(workspace) -> DictConfig:
    """The tiny recipe on two ranks: 4 prompts a batch, 2 a mini-batch, 2 epochs."""
    changes = ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2"]
    changes += [
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.data_loader_seed=7",
    ]
    return load(workspace, *changes)[0]


def changed(config: DictConfig, *changes: str) -> DictConfig:
    """A copy of a recipe with changes, key=value, that nothing checks."""
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(changes)))


def said(prompt, response, mask=None, turns=None, reward=1.0, group="a", **more) -> Episode:
    mask = mask or [1] * len(response)
    turns = [(0, len(response), 1)] if turns is None else turns
    log_probs = [-0.5] * len(response)
    return Episode("r", group, "s", prompt, response, mask, log_probs, turns, reward=reward, **more)


def seven() -> list[Episode]:
    """Rows of different lengths; the fourth, ids 40 and up, has no token to train on."""
    return [
        said([10], [11, 12, 13], group="a"),
        said([20, 21], [22], group="a"),
        said([30], [31, 32], group="b"),
        said([40], [41, 42], mask=[0, 0], group="b"),
        said([50, 51], [52, 53, 54, 55], group="c"),
        said([60], [61], group="c"),
        said([70], [71, 72], group="d"),
    ]


def to_batch(episodes) -> training.DataProto:
    return training.to_batch(episodes, 3, 0.7)


def ready(episodes) -> training.DataProto:
    """A batch with all that an update reads; the advantage of a row is its place, from 1."""
    batch = to_batch(episodes)
    shape = batch.batch["responses"].shape
    batch.batch["advantages"] = torch.arange(1.0, len(episodes) + 1)[:, None].expand(shape).clone()
    batch.batch["old_log_probs"] = torch.full(shape, -0.25)
    return batch


def rows_of(data: TensorDict, name: str = "input_ids") -> list[list[int]]:
    return [row.tolist() for row in data[name].unbind()]


def shifted(episodes, factor: float) -> list[list[float]]:
    """What the stub workers say just before each response token, padded with zeros."""
    width = max(len(e.response_ids) for e in episodes)
    expected = []
    for e in episodes:
        before = [e.prompt_ids[-1], *e.response_ids[:-1]]
        expected.append([factor * i for i in before] + [0.0] * (width - len(before)))
    return expected


def close(found: torch.Tensor, expected: Any) -> bool:
    expected = torch.as_tensor(expected, dtype=torch.float32)
    return (
        found.dtype == torch.float32
        and found.shape == expected.shape
        and torch.allclose(found, expected, atol=1e-6)
    )


# --- batches -------------------------------------------------------------------------------------


def test_a_turns_reward_sits_on_its_last_token_and_the_rest_on_the_response():
    turns = [(0, 2, 1), (3, 5, 3)]
    paid = said(
        [5, 6], [1, 2, 9, 3, 4, 8], [1, 1, 0, 1, 1, 0], turns, reward=1.0, turn_rewards=[0.25, 0.5]
    )
    unpaid = said([5], [1, 9, 2], [1, 0, 1], [(0, 1, 1), (2, 3, 3)], reward=0.5)
    batch = to_batch([paid, unpaid]).batch
    assert batch["token_level_scores"].tolist() == [
        [0, 0.25, 0, 0, 0.5, 0.25],
        [0, 0, 0.5, 0, 0, 0],
    ]
    assert batch["turn"].tolist() == [[0, 0, -1, 1, 1, -1], [0, -1, 1, -1, -1, -1]]
    assert batch["token_level_scores"].dtype == torch.float32


def test_a_turn_that_ends_with_the_response_keeps_both_rewards():
    e = said([5], [1, 2], turns=[(0, 1, 1), (1, 2, 2)], reward=1.0, turn_rewards=[0.25, 0.5])
    assert to_batch([e]).batch["token_level_scores"].tolist() == [[0.25, 0.75]]


def test_padding_has_the_pad_id_and_no_log_prob():
    batch = to_batch([said([5, 6], [7]), said([5], [7, 8])])
    assert batch.batch["prompts"].tolist() == [[5, 6], [3, 5]]
    assert batch.batch["responses"].tolist() == [[7, 3], [7, 8]]
    assert batch.batch["input_ids"].tolist() == [[5, 6, 7, 3], [3, 5, 7, 8]]
    assert batch.batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert batch.batch["position_ids"].tolist() == [[0, 1, 2, 2], [0, 0, 1, 2]]
    assert batch.batch["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch.batch["rollout_log_probs"].tolist() == [[-0.5, 0.0], [-0.5, -0.5]]
    assert batch.meta_info == {"temperature": 0.7, "global_token_num": [3, 3]}
    assert list(batch.non_tensor_batch["uid"]) == ["a", "a"]


def test_baselines_are_in_the_batch_if_every_episode_has_one():
    both = [said([5], [7], baseline=0.25), said([5], [7], baseline=0.0)]
    assert close(to_batch(both).batch["reward_baselines"], [0.25, 0.0])
    both[0].baseline = None
    assert "reward_baselines" not in to_batch(both).batch


def test_ranks_that_hold_one_model_together_count_once(recipe):
    """Three nodes of two GPUs, the critic on one of its own per node, a sequence cut over two."""
    config = changed(recipe, "trainer.nnodes=3", "trainer.resource_pools.critic=4")
    assert (training.world_size(config), training.world_size(config, "critic")) == (6, 12)
    assert (training.data_parallel_size(config), training.data_parallel_size(config, "critic")) == (
        6,
        12,
    )
    config = changed(config, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert (training.data_parallel_size(config), training.data_parallel_size(config, "critic")) == (
        3,
        6,
    )


# --- forward passes ------------------------------------------------------------------------------


def test_log_probs_come_back_in_the_order_of_the_batch(recipe):
    made, actor = seven(), RecordingGroup()
    found = training.log_probs(actor, to_batch(made), recipe)
    assert found.keys() == {"log_probs", "entropy"}
    assert close(found["log_probs"], shifted(made, -0.01))
    assert close(found["entropy"], shifted(made, 0.02))
    [(method, data)] = actor.calls
    assert method == "compute_log_prob" and len(data) == 8  # two ranks get four rows each
    assert rows_of(data).count([10, 11, 12, 13]) == 2  # filling repeats the first row
    assert tu.get(data, "calculate_entropy") is True and tu.get(data, "compute_loss") is False
    assert tu.get(data, "calculate_sum_pi_squared") is False
    assert tu.get(data, "temperature") == 0.7


def test_the_sum_of_squared_probabilities_is_asked_for_where_the_advantage_needs_it(recipe):
    config = changed(recipe, "algorithm.adv_estimator=optimal_token_baseline")
    made, actor = seven(), RecordingGroup()
    batch = to_batch(made)
    training.old_log_probs(actor, batch, config)
    assert tu.get(actor.data, "calculate_sum_pi_squared") is True
    assert close(batch.batch["sum_pi_squared"], shifted(made, 0.04))
    training.old_log_probs(actor, batch := to_batch(made), recipe)
    assert "sum_pi_squared" not in batch.batch


def test_the_samplers_log_probs_stay_where_it_sampled():
    """The first turn is turn 0. Observed tokens, and rows without a turn, take the trainer's log-probs."""
    observed = said([5], [7, 8, 9], [1, 0, 1], [(0, 1, 1), (2, 3, 3)])
    batch = to_batch([observed, said([5], [7, 8, 9], turns=[])])
    log_probs = torch.tensor([[-1.5, -1.75, -1.0], [-2.0, -2.25, -2.5]])
    entropy = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, 5.0]])
    found = training._measured(batch, log_probs, entropy, sum_pi_squared=entropy)
    assert close(batch.batch["rollout_log_probs"], [[-0.5, -1.75, -0.5], [-2.0, -2.25, -2.5]])
    assert torch.equal(batch.batch["old_log_probs"], log_probs)
    assert torch.equal(batch.batch["sum_pi_squared"], entropy)
    assert found["actor/entropy"] == pytest.approx((1 + 2 + 3 + 4 + 5) / 5)
    apart = np.exp(-0.5) - np.exp([-1.5, -1.0])
    assert found["training/rollout_probs_diff_max"] == pytest.approx(apart[0], rel=1e-5)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(apart.sum() / 5, rel=1e-5)


def test_the_pass_before_the_update_measures_what_the_workers_say(recipe):
    made, actor = seven(), RecordingGroup()
    batch = to_batch(made)
    found = training.old_log_probs(actor, batch, recipe)
    assert close(batch.batch["old_log_probs"], shifted(made, -0.01))
    entropies = [
        row for i, row in enumerate(shifted(made, 0.02)) if i != 3
    ]  # the fourth row's mask is 0
    assert found["actor/entropy"] == pytest.approx(sum(map(sum, entropies)) / 13)


@pytest.mark.parametrize(
    ("lora_rank", "apart", "method", "adapter"),
    [
        (0, False, "compute_ref_log_prob", None),
        (1, False, "compute_log_prob", True),
        (8, True, "compute_ref_log_prob", None),  # a teacher
    ],
)
def test_the_reference_is_the_teacher_the_frozen_model_or_the_actor_without_its_adapter(
    recipe, lora_rank, apart, method, adapter
):
    config = changed(
        recipe, f"actor_rollout_ref.model.lora_rank={lora_rank}", "trainer.resource_pools.ref=1"
    )
    made, actor, ref = seven(), RecordingGroup(), RecordingGroup()
    workers = training.Workers(actor, None, None, ref if apart else None)
    found = training.ref_log_probs(workers, to_batch(made), config)
    assert close(found, shifted(made, -0.01 if lora_rank and not apart else -0.1))
    asked, idle = (ref, actor) if apart else (actor, ref)
    assert [name for name, _ in asked.calls] == [method] and not idle.calls
    assert len(asked.data) == (7 if apart else 8)  # its own ranks: one, or the actor's two
    assert tu.get(asked.data, "no_lora_adapter") is adapter
    assert tu.get(asked.data, "calculate_entropy") is False


def test_a_value_is_of_the_state_before_its_token(recipe):
    made, critic = seven(), RecordingGroup()
    config = changed(recipe, "trainer.resource_pools.critic=3")
    found = training.values(critic, to_batch(made), config)
    assert close(found, shifted(made, 0.03))
    [(method, data)] = critic.calls
    assert method == "infer_batch" and len(data) == 9  # three ranks


def test_a_learned_reward_is_the_heads_output_at_the_last_token(recipe):
    """Each episode gets its own, whatever the order in which the ranks had them."""
    made, model = seven(), RecordingGroup()
    config = changed(recipe, "trainer.resource_pools.reward_model=3")
    training.add_reward_model(model, made, 3, config)
    for e in made:
        assert e.reward_components == {"reward_model": pytest.approx(0.03 * e.response_ids[-1])}
        assert e.reward == 1.0  # which `env.reward` changes, if at all
    [(method, data)] = model.calls
    assert method == "infer_batch" and len(data) == 9 and tu.get(data, "temperature") == 1.0
    first = torch.cat([data["prompts"], data["responses"]], dim=1)
    assert set(first.flatten().tolist()) & {0, 1, 2, 3} == {3}  # the pad id that it was given


# --- from rewards to advantages ------------------------------------------------------------------


def test_the_adaptive_coefficient_resumes_and_the_fixed_one_does_not(recipe):
    ctrl = "algorithm.kl_ctrl"
    config = changed(recipe, f"{ctrl}.type=adaptive", f"{ctrl}.horizon=100", f"{ctrl}.kl_coef=0.2")
    assert training.kl_controller(config, 0.5).value == 0.5
    assert training.kl_controller(config, 0.0).value == 0.2
    assert training.kl_controller(changed(config, f"{ctrl}.type=fixed"), 0.5).value == 0.2


def test_the_kl_penalty_is_taken_off_the_rewards(recipe):
    """By verl's `abs`, which is positive where `kl` is negative; the controller then moves."""
    ctrl = "algorithm.kl_ctrl"
    changes = [f"{ctrl}.type=adaptive", f"{ctrl}.horizon=100", f"{ctrl}.target_kl=0.1"]
    config = changed(recipe, *changes, "algorithm.kl_penalty=abs")
    batch = to_batch([said([5], [7, 8]), said([5], [7], reward=0.5)])
    batch.batch["old_log_probs"] = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]])
    batch.batch["ref_log_prob"] = torch.tensor([[-1.5, -1.0], [-1.25, 9.0]])
    controller = training.kl_controller(config, 0.4)
    found = training.apply_kl(batch, controller, config)
    rewards = batch.batch["token_level_rewards"]
    assert close(rewards, [[-0.4 * 0.5, 1.0 - 0.4 * 1.0], [0.5 - 0.4 * 0.25, 0.0]])
    assert found["actor/reward_kl_penalty_coeff"] == 0.4
    assert found["actor/reward_kl_penalty"] == pytest.approx((0.75 + 0.25) / 2)
    assert controller.value == pytest.approx(0.4 * (1 + 0.2 * 2 / 100))


def test_a_correction_weighs_and_rejects_tokens(recipe):
    batch = to_batch([said([5], [7, 8]), said([5], [7, 8])])
    batch.batch["old_log_probs"] = torch.tensor([[-0.2, -0.5], [-0.5, -3.0]])
    mask = batch.batch["response_mask"].clone()
    found = training.correct(batch, changed(recipe, f"{CORRECTION}.rollout_is=token"))
    weights = np.exp([[0.3, 0.0], [0.0, -2.5]])
    assert close(batch.batch["rollout_is_weights"], weights)
    assert any(name.startswith("rollout_corr/") for name in found)
    assert torch.equal(batch.batch["response_mask"], mask)
    rejects = [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='0.5_2'"]
    training.correct(batch, changed(recipe, *rejects))
    assert batch.batch["response_mask"].tolist() == [[1, 1], [1, 0]]


def credited(config, *changes, groups="aabb", rewards=(1.0, 0.0, 0.5, 0.25)) -> Any:
    """A batch with its advantages, of answers of two tokens."""
    made = [said([5], [7, 8], reward=r, group=g) for g, r in zip(groups, rewards, strict=True)]
    batch = to_batch(made)
    batch.batch["token_level_rewards"] = 2 * batch.batch["token_level_scores"]
    batch.batch["values"] = torch.tensor([[0.1, 0.4]] * len(made))
    training.advantages(batch, changed(config, *changes))
    return batch.batch


def test_gae_discounts_by_gamma_and_averages_by_lambda(recipe):
    found = credited(
        recipe, "algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.5"
    )
    expected = []
    for reward in (2.0, 0.0, 1.0, 0.5):
        last = reward - 0.4
        first = 0.9 * 0.4 - 0.1 + 0.9 * 0.5 * last
        expected.append([first + 0.1, last + 0.4])
    assert close(found["returns"], expected)


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_compares_the_answers_of_a_group(recipe, by_std):
    found = credited(recipe, f"algorithm.norm_adv_by_std_in_grpo={str(by_std).lower()}")
    centred = np.array([1.0, -1.0, 0.25, -0.25])
    spread = np.array([2**0.5, 2**0.5, 0.125**0.5, 0.125**0.5])
    expected = centred / (spread + 1e-6) if by_std else centred
    assert close(found["advantages"], np.repeat(expected[:, None], 2, axis=1))


def test_verls_other_estimators_read_the_recipe(recipe):
    found = credited(recipe, "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9")
    assert close(found["returns"], [[0.9 * r, r] for r in (2.0, 0.0, 1.0, 0.5)])


@pytest.mark.parametrize("weighed", [True, False])
def test_an_estimator_of_the_recipe_gets_what_it_names(recipe, monkeypatch, weighed):
    given = {}

    def mine(token_level_rewards, index, gamma, lam, config, rollout_is_weights, values):
        given.update(locals())
        return token_level_rewards + 1, token_level_rewards + 2

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "mine.py:f", mine)
    config = changed(
        recipe, "algorithm.adv_estimator=mine.py:f", "algorithm.gamma=0.9", "algorithm.lam=0.5"
    )
    batch = to_batch([said([5], [7], group="a"), said([5], [7], group="b")])
    batch.batch["token_level_rewards"] = torch.tensor([[0.25], [0.5]])
    batch.batch["values"] = torch.tensor([[0.1], [0.2]])
    if weighed:
        batch.batch["rollout_is_weights"] = torch.tensor([[3.0], [4.0]])
    training.advantages(batch, config)
    assert (given["gamma"], given["lam"], list(given["index"])) == (0.9, 0.5, ["a", "b"])
    assert given["config"] == config.algorithm
    assert close(given["values"], [[0.1], [0.2]])
    assert (
        close(given["rollout_is_weights"], [[3.0], [4.0]])
        if weighed
        else given["rollout_is_weights"] is None
    )
    assert close(batch.batch["advantages"], [[1.25], [1.5]]) and close(
        batch.batch["returns"], [[2.25], [2.5]]
    )


def test_metrics_of_a_step_are_per_gpu_and_of_its_critic(recipe):
    batch = ready(seven())
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.batch["returns"] = batch.batch["advantages"]
    timing = {"step": 2.0, "gen": 1.0}
    found = training.step_metrics(batch, timing, recipe)
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in seven())
    assert found["perf/total_num_tokens"] == tokens and found["perf/time_per_step"] == 2.0
    assert found["perf/throughput"] == pytest.approx(tokens / (2.0 * 2))  # two GPUs
    assert found["timing_per_token_ms/gen"] == pytest.approx(1000 / 15)
    assert found["timing_s/gen"] == 1.0
    assert "critic/rewards/mean" in found and "critic/values/mean" not in found
    batch.batch["values"] = torch.full_like(batch.batch["advantages"], 0.5)
    assert training.step_metrics(batch, timing, recipe)["critic/values/mean"] == 0.5


# --- updates -------------------------------------------------------------------------------------


def test_an_update_gets_each_live_row_once_in_whole_mini_batches(recipe):
    """Six live rows of seven on 2 ranks in 2 mini-batches: two rows of filling, which count for nothing."""
    made, actor = (
        seven(),
        RecordingGroup({"pg_loss": [1.0, 3.0], "actor/grad_norm": [2.0], "mfu": [0.5]}),
    )
    batch = ready(made)
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    found = training.update_actor(actor, batch, recipe)
    assert found == {"actor/pg_loss": 2.0, "actor/grad_norm": 2.0}
    [(method, data)] = actor.calls
    assert method == "update_actor" and len(data) == 8
    places = data["row"].tolist()
    assert sorted(places) == [0, 0, 1, 2, 3, 5, 6, 7]
    for place, ids, mask, advantage in zip(
        places, rows_of(data), data["response_mask"], data["advantages"], strict=True
    ):
        e = made[place - 1] if place else made[0]
        assert ids == e.prompt_ids + e.response_ids
        live = len(e.response_ids) if place else 0
        assert mask.tolist() == [1] * live + [0] * (4 - live)
        assert set(advantage.tolist()) == {float(place)}
    assert not {"turn", "token_level_scores", "token_level_rewards"} & set(data.keys())
    assert close(
        data["rollout_log_probs"], batch.batch["rollout_log_probs"][[max(p - 1, 0) for p in places]]
    )
    assert close(data["old_log_probs"], [[-0.25] * 4] * 8)
    assert all(
        torch.equal(batch.batch[name], tensor) for name, tensor in before.items()
    )  # filling is of a copy


def test_a_mini_batch_holds_rows_of_every_part_of_the_batch(recipe):
    """Rows are dealt to the mini-batches in turn: those of the first are the 1st, 3rd, 5th... live rows."""
    actor = RecordingGroup()
    training.update_actor(actor, ready(seven()), recipe)
    places = actor.data["row"].tolist()
    mini_batches = [places[0:2] + places[4:6], places[2:4] + places[6:8]]  # of both ranks
    assert sorted(mini_batches[0]) == [0, 1, 3, 6] and sorted(mini_batches[1]) == [0, 2, 5, 7]
    training.update_actor(actor, ready(seven()), changed(recipe, "trainer.n_gpus_per_node=3"))
    places = actor.data["row"].tolist()  # of three ranks, a row of each mini-batch
    assert (sorted(places[0::2]), sorted(places[1::2])) == ([1, 3, 6], [2, 5, 7])


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_update_is_asked_for_as_the_recipe_says(recipe, shuffle):
    actor = RecordingGroup()
    training.update_actor(
        actor, ready(seven()), changed(recipe, f"{ACTOR}.shuffle={str(shuffle).lower()}")
    )
    data = actor.data
    assert tu.get(data, "mini_batch_size") == 4 and tu.get(data, "global_batch_size") == 3.5
    assert tu.get(data, "epochs") == 2 and tu.get(data, "seed") == 7
    assert tu.get(data, "dataloader_kwargs") == {"shuffle": shuffle}
    assert tu.get(data, "compute_loss") is True and tu.get(data, "temperature") == 0.7
    assert (
        tu.get(data, "distillation_use_topk") is False
        and tu.get(data, "distillation_only") is False
    )


@pytest.mark.parametrize(
    ("changes", "entropy"),
    [
        ([], False),
        ([f"{ACTOR}.entropy_coeff=0.1"], True),
        ([f"{ACTOR}.calculate_entropy=true"], True),
        (
            [f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=1"],
            True,
        ),  # the pass that gives old log-probs
    ],
)
def test_the_entropy_is_computed_where_something_reads_it(recipe, changes, entropy):
    actor = RecordingGroup()
    training.update_actor(
        actor, ready(seven()), changed(recipe, f"{ACTOR}.calculate_entropy=false", *changes)
    )
    assert tu.get(actor.data, "calculate_entropy") is entropy


@pytest.mark.parametrize(
    ("rows", "mini_batches", "per_mini_batch"), [(7, 2, 4), (4, 1, 4), (2, 1, 2)]
)
def test_a_small_batch_is_cut_into_fewer_mini_batches(recipe, rows, mini_batches, per_mini_batch):
    """Each rank has a row of each mini-batch: 6, 3 and 2 live rows on 2 ranks."""
    actor = RecordingGroup()
    training.update_actor(actor, ready(seven()[:rows]), recipe)
    assert tu.get(actor.data, "mini_batch_size") == per_mini_batch
    assert tu.get(actor.data, "global_batch_size") == rows / mini_batches
    assert len(actor.data) == mini_batches * per_mini_batch


def test_one_row_alone_is_still_an_update(recipe):
    actor = RecordingGroup()
    training.update_actor(actor, ready(seven()[2:4]), recipe)
    assert actor.data["row"].tolist() in ([1, 0], [0, 1])


def test_the_critic_learns_by_its_own_settings_on_its_own_ranks(recipe):
    changes = [
        "critic.ppo_mini_batch_size=4",
        "critic.ppo_epochs=3",
        "critic.data_loader_seed=9",
        "critic.shuffle=true",
    ]
    config = changed(recipe, *changes, "trainer.resource_pools.critic=4", f"{ACTOR}.shuffle=false")
    critic = RecordingGroup({"vf_loss": [0.5, 1.0], "critic/lr": [0.1]})
    found = training.update_critic(critic, ready(seven()), config)
    assert found == {"critic/vf_loss": 0.75, "critic/lr": 0.1}
    [(method, data)] = critic.calls
    assert (
        method == "train_mini_batch" and len(data) == 8
    )  # 6 live rows on 4 ranks, in one mini-batch
    assert tu.get(data, "mini_batch_size") == 8 and tu.get(data, "global_batch_size") == 7
    assert tu.get(data, "epochs") == 3 and tu.get(data, "seed") == 9
    assert (
        tu.get(data, "dataloader_kwargs") == {"shuffle": True}
        and tu.get(data, "compute_loss") is True
    )


def test_utilisation_is_a_metric_of_devices_whose_peak_is_known(recipe):
    config = changed(recipe, "trainer.device=cuda")
    actor, critic = RecordingGroup({"mfu": [0.25, 0.75]}), RecordingGroup({"mfu": [0.5]})
    assert training.update_actor(actor, ready(seven()), config) == {"perf/mfu/actor": 0.5}
    assert training.update_critic(critic, ready(seven()), config) == {"perf/mfu/critic": 0.5}
    assert training.update_actor(RecordingGroup({"lr": [0.5]}), ready(seven()), config) == {
        "actor/lr": 0.5
    }


def test_images_go_with_their_rows(recipe):
    batch, actor = ready(seven()), RecordingGroup()
    batch.non_tensor_batch["multi_modal_inputs"] = np.array(
        [{"pixels": i} for i in range(7)], dtype=object
    )
    training.update_actor(actor, batch, recipe)
    images = [image["pixels"] for image in tu.get(actor.data, "multi_modal_inputs")]
    assert images == [max(place - 1, 0) for place in actor.data["row"].tolist()]
    assert "uid" not in actor.data


def test_fine_tuning_takes_one_step_on_the_tokens_of_the_response(recipe):
    made = seven()
    made[0].response_mask = [1, 0, 1]
    actor = RecordingGroup({"loss": [0.5]})
    assert training.update_sft(actor, ready(made), recipe) == {"actor/loss": 0.5}
    [(method, data)] = actor.calls
    assert method == "update_actor"
    assert tu.get(data, "epochs") == 1 and tu.get(data, "mini_batch_size") == len(data) == 6
    assert tu.get(data, "global_batch_size") == 7
    assert tu.get(data, "calculate_entropy") is False and tu.get(data, "compute_loss") is True
    assert tu.get(data, "distillation_use_topk") is False
    for place, mask, ids in zip(
        data["row"].tolist(), rows_of(data, "loss_mask"), rows_of(data), strict=True
    ):
        e = made[place - 1]
        assert mask == [0] * len(e.prompt_ids) + e.response_mask and len(mask) == len(ids)
    assert recipe.actor_rollout_ref.actor.ppo_epochs == 2  # the recipe stays as it is


def test_without_fine_tuning_the_loss_mask_is_that_of_the_response(recipe):
    actor = RecordingGroup()
    training.update_actor(actor, ready(seven()), recipe)
    assert torch.equal(actor.data["loss_mask"], actor.data["response_mask"])


# --- the pass that updates also measures ---------------------------------------------------------

ONE_PASS = [f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=1"]


@pytest.mark.parametrize(
    "change",
    [
        "algorithm.recompute_old_log_probs=true",
        "algorithm.use_kl_in_reward=true",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k1",
        "algorithm.adv_estimator=templates/advantages.py:pairs",  # asks for old_log_probs
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
    ],
)
def test_what_needs_old_log_probs_before_the_update_has_a_pass_for_them(recipe, change):
    config = changed(recipe, *ONE_PASS)
    assert training.one_pass(config)
    assert not training.one_pass(changed(config, change))


@pytest.mark.parametrize(("name", "one_pass"), [("sum_pi_squared", False), ("response_mask", True)])
def test_an_estimator_of_squared_probabilities_alone_has_a_pass_for_them(
    recipe, tmp_path, name, one_pass
):
    """verl's estimators that read them read the old log-probs, too; one of the recipe need not."""
    file = tmp_path / "mine.py"
    file.write_text(f"def f({name}):\n    return {name}, {name}\n")
    config = changed(recipe, *ONE_PASS, f"algorithm.adv_estimator={file}:f")
    assert training.one_pass(config) is one_pass


def test_the_updates_own_pass_gives_old_log_probs_in_the_order_of_the_batch(recipe):
    """Two micro-batches whose rows are mixed; a place of 0 is filling."""
    config = changed(recipe, *ONE_PASS)
    batch = ready([said([5], [7, 8]), said([5], [7]), said([5], [7, 8])])
    del batch.batch["old_log_probs"]
    first = (
        torch.tensor([3, 0]),
        torch.tensor([[-3.0, -3.5], [-9.0, -9.0]]),
        torch.tensor([[0.3, 0.4], [9.0, 9.0]]),
    )
    second = (
        torch.tensor([2, 1]),
        torch.tensor([[-2.0, 0.0], [-1.0, -1.5]]),
        torch.tensor([[0.5, 0.0], [0.1, 0.2]]),
    )
    found = training.update_actor(
        RecordingGroup({training.PASS: [first, second], "loss": [1.0]}), batch, config
    )
    assert close(batch.batch["old_log_probs"], [[-1.0, -1.5], [-2.0, 0.0], [-3.0, -3.5]])
    assert found["actor/entropy"] == pytest.approx((0.1 + 0.2 + 0.5 + 0.3 + 0.4) / 5)
    apart = np.exp(-0.5) - np.exp([-1.0, -1.5, -2.0, -3.0, -3.5])
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(apart.mean(), rel=1e-5)
    assert found["actor/loss"] == 1.0 and any(name.startswith("rollout_corr/") for name in found)
    assert not any(training.PASS in name for name in found)
    assert all(type(value) is float for value in found.values())


def test_old_log_probs_that_are_there_already_stay(recipe):
    batch = ready([said([5], [7])])
    passed = (torch.tensor([1]), torch.tensor([[-3.0]]), torch.tensor([[0.3]]))
    found = training.update_actor(
        RecordingGroup({training.PASS: [passed]}), batch, changed(recipe, *ONE_PASS)
    )
    assert close(batch.batch["old_log_probs"], [[-0.25]]) and found == {}


def test_an_update_without_its_own_pass_measures_nothing(recipe):
    batch = ready([said([5], [7])])
    del batch.batch["old_log_probs"]
    assert training.update_actor(RecordingGroup({"loss": [1.0]}), batch, recipe) == {
        "actor/loss": 1.0
    }


@pytest.mark.parametrize(("computes", "coefficient"), [(False, 0.0), (True, 0.0), (False, 0.1)])
@pytest.mark.parametrize("known", [True, False])
def test_the_loss_of_one_pass_takes_its_own_log_probs_as_the_old_ones(computes, coefficient, known):
    data = left_right_2_no_padding(to_batch([said([5], [7, 8]), said([5, 6], [9])]).to_tensordict())
    data["row"] = torch.tensor([2, 0])
    if known:
        data["old_log_probs"] = torch.full((2, 2), -7.0)
    given = {}
    for name in ("log_probs", "entropy"):
        numbers = (FACTORS[name] * data["input_ids"].values().double()).requires_grad_()
        given[name] = torch.nested.nested_tensor_from_jagged(
            numbers, offsets=data["input_ids"].offsets()
        )
    seen = {}

    def loss(config, model_output, data, dp_group):
        seen.update(
            output=set(model_output), old=data["old_log_probs"], config=config, group=dp_group
        )
        return "loss", {"pg_loss": 1.0}

    config = SimpleNamespace(calculate_entropy=computes, entropy_coeff=coefficient)
    result, metrics = training._one_pass_loss(loss, config, given, data, "ranks")
    rows, log_probs, entropy = metrics.pop(training.PASS)
    assert (
        result == "loss"
        and metrics == {"pg_loss": 1.0}
        and seen["config"] is config
        and seen["group"] == "ranks"
    )
    assert rows.tolist() == [2, 0] and not log_probs.requires_grad and not seen["old"].requires_grad
    assert close(log_probs, [[-0.05, -0.07], [-0.06, 0.0]]) and close(
        entropy, [[0.1, 0.14], [0.12, 0.0]]
    )
    assert close(seen["old"].float(), [[-7.0] * 2] * 2 if known else log_probs)
    assert seen["output"] == (
        {"log_probs", "entropy"} if computes or coefficient else {"log_probs"}
    )


class Losing:
    """An actor that keeps its loss."""

    def set_loss_fn(self, loss):
        self.loss = loss


@pytest.mark.parametrize("changes", [[], ONE_PASS])
@pytest.mark.parametrize("name", ["gspo", "mine.py:loss"])
def test_the_actors_loss_is_the_recipes(recipe, monkeypatch, changes, name):
    """A worker that has not heard of a loss of the recipe registers it before it asks verl for it."""
    config = changed(
        recipe, *changes, f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.clip_ratio=0.3"
    )
    asked = []

    def ppo_loss(config, model_output, data, dp_group=None):
        asked.append((config, model_output, data, dp_group, POLICY_LOSS_REGISTRY.get(name)))
        return "loss", {}

    def one_pass_loss(loss, *given):
        asked.append("one pass")
        return loss(*given)

    def mine():
        """A loss of the recipe."""

    monkeypatch.setattr(training, "ppo_loss", ppo_loss)
    monkeypatch.setattr(training, "_one_pass_loss", one_pass_loss)
    if ".py:" in name:
        monkeypatch.setitem(POLICY_LOSS_REGISTRY, name, mine)
    actor = Losing()
    training.set_policy_loss(actor, config)
    if ".py:" in name:
        monkeypatch.delitem(POLICY_LOSS_REGISTRY, name)  # as in a worker's process
    assert actor.loss("output", "data", "ranks") == ("loss", {})
    assert asked[:-1] == ["one pass"] * bool(changes)
    settings, *given, registered = asked[-1]
    assert given == ["output", "data", "ranks"]
    assert settings.clip_ratio == 0.3 and settings.policy_loss.loss_mode == name
    assert registered is mine if ".py:" in name else registered is not None
