"""Compares updates with those of verl's trainer, and with other splits into micro-batches.

The workers use FSDP and the tiny model, in float32. There are two bounds:

- LOSS is a relative bound on differences of advantages, losses and gradient norms.
- GRADIENT is a bound on the norm of the difference of two gradients, divided by the norm of one.
  PLAIN is this bound for plain torch, which has other kernels for attention and log-probs.
  The optimizer is SGD with a learning rate of 1, so the change of the weights is the gradient.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import sft_loss, value_loss

import algorithm
import training
from kit.data.episode import Branch, Episode, TurnSpan
from kit.data.selection import group_episodes, select_trainable, take_groups
from kit.recipe.load import read_source
from kit.recipe.recipe import Recipe
from kit.recipe.user_functions import register_in_verl
from kit.run import prepare
from kit.run.checkpoints import LoopState
from kit.run.workers import start_workers
from tests.helpers import plain_torch
from tests.helpers.cases import MODES
from tests.helpers.plain_torch import Data, compute_log_probs
from tests.helpers.recipes import CPU, RECIPE, ROOT, changed, tiny
from tests.helpers.stack import kill_workers, with_values
from tests.helpers.workers import ACTOR

LOSS = 1e-6
GRADIENT = 1e-6
PLAIN = 1e-5
SGD = [
    f"{ACTOR}.optim.optimizer=SGD",
    f"{ACTOR}.optim.lr=1.0",
    f"{ACTOR}.optim.weight_decay=0.0",
    f"{ACTOR}.optim.clip_grad=1e9",
]


def load_recipe(workspace, *changes, overlays=()):
    """Load the tiny recipe with overlays of configs/ and check it."""
    arguments = tiny(
        workspace,
        f"actor_rollout_ref.model.path={workspace / 'untied'}",
        "data.max_response_length=24",
    )
    return prepare.prepare(read_source([str(CPU), str(RECIPE), *overlays], [*arguments, *changes]))


def start_actor(recipe) -> training.Workers:
    workers = start_workers(recipe)
    workers.actor.init_model()
    return workers


def make_episodes(seed=0, groups=8, members=4) -> list[Episode]:
    """Make episodes of different lengths, with rewards from 0 to 1, some with observed tokens."""
    rng = random.Random(seed)
    episodes = []
    for g in range(groups):
        prompt = [rng.randrange(2, 40) for _ in range(rng.randint(2, 9))]
        for _ in range(members):
            R = rng.randint(1, 24)
            mask = [1] * R
            if R > 6 and rng.random() < 0.5:
                mask[3:5] = [0, 0]
            episodes.append(
                Episode(
                    row_id="r",
                    group_id=f"g{g}",
                    server="s",
                    prompt_ids=prompt,
                    response_ids=[rng.randrange(1, 40) for _ in range(R)],
                    response_mask=mask,
                    log_probs=[-3.6 + 0.3 * rng.random() for _ in range(R)],
                    reward=rng.choice([0.0, 0.0, 0.25, 1.0]),
                    ended="length" if R == 24 else "stop",
                )
            )
    return episodes


def read_weights(workers, folder, name="actor") -> dict[str, torch.Tensor]:
    """Read {name: complete parameter} of a group from a checkpoint."""
    group = getattr(workers, name)
    group.save_checkpoint(str(folder), None, 0, None)
    shards = []
    for file in sorted(folder.glob("model_world_size_*.pt")):
        shard = torch.load(file, weights_only=False)
        shards.append({k: getattr(v, "_local_tensor", v) for k, v in shard.items()})
    # FSDP splits the first dimension
    return {k: torch.cat([shard[k] for shard in shards]).clone() for k in shards[0]}


def compute_distance(a, b) -> float:
    """Compute the norm of the difference of two sets of weights."""
    return float(torch.stack([(a[k] - b[k]).float().norm() for k in a]).norm())


# --- a step of the kit and a step of verl's trainer ----------------------------------------------


def make_verl_batch(episodes, order, recipe) -> DataProto:
    """Make a batch as verl's agent loop does, padded to the maximum lengths of the recipe."""
    P = recipe.data.max_prompt_length
    R = recipe.data.max_response_length
    rows = [episodes[i] for i in order]

    def pad_right(values, padding=0):
        return torch.tensor([list(v) + [padding] * (R - len(v)) for v in values])  # [B, R]

    prompts = torch.tensor([[1] * (P - len(e.prompt_ids)) + e.prompt_ids for e in rows])  # [B, P]
    responses = pad_right([e.response_ids for e in rows], 1)
    in_prompt = [[0] * (P - len(e.prompt_ids)) + [1] * len(e.prompt_ids) for e in rows]
    in_response = pad_right([[1] * len(e.response_ids) for e in rows])
    attention = torch.cat([torch.tensor(in_prompt), in_response], dim=1)  # [B, P+R]
    scores = torch.zeros(len(rows), R)
    for row, e in zip(scores, rows, strict=True):
        row[len(e.response_ids) - 1] = e.reward
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": pad_right([e.response_mask for e in rows]),
        "rollout_log_probs": pad_right([e.log_probs for e in rows], 0.0),
        "token_level_scores": scores,
        "token_level_rewards": scores,
    }
    uid = np.array([e.group_id for e in rows], dtype=object)
    meta = {"temperature": 1.0, "global_token_num": attention.sum(dim=1).tolist()}
    batch = TensorDict(tensors, len(rows))
    return DataProto(batch=batch, non_tensor_batch={"uid": uid}, meta_info=meta)


def order_for_verl(episodes, recipe) -> list[int]:
    """Order the rows so that verl's consecutive mini-batches have those of the kit.

    The kit deals rows to mini-batches in turn.
    """
    mini_batches = recipe.data.train_batch_size // recipe.actor.ppo_mini_batch_size
    order: list[int] = []
    for m in range(mini_batches):
        order += range(len(episodes))[m::mini_batches]
    return order


def run_verl_step(episodes, workers, recipe):
    """Run a step of RayPPOTrainer, as its `fit` does, and return (advantages, metrics)."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
    from verl.utils.metric import reduce_metrics

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config = recipe.for_verl()
    trainer.ref_in_actor = False
    trainer.distillation_config = None
    trainer.actor_rollout_wg = workers.actor
    trainer.ref_policy_wg = workers.actor
    trainer.critic_wg = workers.critic
    order = order_for_verl(episodes, recipe)
    batch = make_verl_batch(episodes, order, recipe)
    old, _ = trainer._compute_old_log_prob(batch)
    old.batch.pop("entropys")
    batch = batch.union(old)
    if recipe.has_reference:
        batch = batch.union(trainer._compute_ref_log_prob(batch))
    if workers.critic:
        batch = batch.union(trainer._compute_values(batch))
    keys = ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo")
    settings = {key: getattr(recipe.algorithm, key) for key in keys}
    batch = compute_advantage(batch, config=recipe.for_verl("algorithm"), **settings)
    metrics = {}
    if workers.critic:
        metrics |= reduce_metrics(trainer._update_critic(batch).meta_info["metrics"])
    metrics |= reduce_metrics(trainer._update_actor(batch).meta_info["metrics"])
    back = torch.tensor(order).argsort()
    return batch.batch["advantages"][back], metrics


def run_kit_step(episodes, workers, recipe):
    """Run a step as algorithm.py does, and return (advantages, metrics)."""
    batch = training.build_batch(episodes, 1, 1.0)
    log_probs = training.compute_log_probs(workers.actor, batch, recipe)["log_probs"]
    batch.batch["old_log_probs"] = log_probs
    if recipe.has_reference:
        batch.batch["ref_log_prob"] = training.compute_ref_log_probs(workers, batch, recipe)
    if workers.critic:
        batch.batch["values"] = training.compute_values(workers.critic, batch, recipe)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    training.compute_advantages(batch, recipe)
    metrics = {}
    if workers.critic:
        metrics |= training.update_critic(workers.critic, batch, recipe)
    metrics |= training.update_actor(workers.actor, batch, recipe)
    return batch.batch["advantages"], metrics


def set_losses(workers, recipe) -> None:
    """Give actor and critic the losses of a recipe."""
    training.set_policy_loss(workers.actor, recipe)
    if workers.critic:
        settings = omega_conf_to_dataclass(recipe.for_verl("critic"))
        workers.critic.set_loss_fn(functools.partial(value_loss, config=settings))


def list_changes(name: str) -> list[str]:
    """List settings of a recipe. None of the advantage has a neutral value such as gamma=1."""
    changes = [
        *SGD,
        "actor_rollout_ref.rollout.n=4",
        f"{ACTOR}.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=4",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.5",
    ]
    if name == "grpo":
        changes.append("algorithm.norm_adv_by_std_in_grpo=false")
    return changes


class StepResult(NamedTuple):
    """The result of a step, and the weights before and after it."""

    advantages: torch.Tensor  # [B, R]
    metrics: dict[str, Any]
    before: dict[str, torch.Tensor]  # of the actor
    after: list[dict[str, torch.Tensor]]  # of the actor, and of a critic


def run_step(step, episodes, workers, recipe, folder) -> StepResult:
    """Run a step, and then restore the weights. folder: where to write checkpoints."""
    groups = {"actor": workers.actor}
    if workers.critic:
        groups["critic"] = workers.critic
    for name, group in groups.items():
        group.save_checkpoint(str(folder / f"start_{name}"), None, 0, None)
    before = read_weights(workers, folder / "before")
    advantages, metrics = step(episodes, workers, recipe)
    after = [read_weights(workers, folder / name, name) for name in groups]
    for name, group in groups.items():
        group.load_checkpoint(str(folder / f"start_{name}"))
    return StepResult(advantages, metrics, before, after)


METRICS = ["actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl"]


@pytest.mark.parametrize(
    ("name", "more_metrics"),
    [
        ("grpo", ["actor/kl_loss"]),
        ("ppo", ["critic/vf_loss", "critic/grad_norm", "critic/vpred_mean"]),
    ],
)
def test_a_step_equals_that_of_verls_trainer(
    stack, values, worker_variants, workspace, tmp_path, name, more_metrics
):
    """Both have the same episodes, weights and seed, and two mini-batches.

    The recipes have a KL term and a critic. verl pads to other lengths, which changes the rounding.
    AdamW divides by small numbers, so the difference would become 6e-6.
    """
    recipe = load_recipe(workspace, *list_changes(name), overlays=[name]).recipe
    episodes = make_episodes()
    critic = with_values(stack, values).critic if name == "ppo" else None
    workers = training.Workers(worker_variants["one rank"][0].actor, critic, None)
    set_losses(workers, recipe)
    kit = run_step(run_kit_step, episodes, workers, recipe, tmp_path / "kit")
    verl = run_step(run_verl_step, episodes, workers, recipe, tmp_path / "verl")
    moved = compute_distance(kit.before, kit.after[0])
    assert compute_distance(kit.before, verl.before) == 0.0 and moved > 0.01
    verl_advantages = verl.advantages[:, : kit.advantages.shape[1]]
    torch.testing.assert_close(kit.advantages, verl_advantages, rtol=LOSS, atol=LOSS)
    for key in METRICS + more_metrics:
        expected = pytest.approx(float(verl.metrics[key]), rel=LOSS, abs=LOSS)
        assert kit.metrics[key] == expected, key
    for kit_weights, verl_weights in zip(kit.after, verl.after, strict=True):
        assert compute_distance(kit_weights, verl_weights) < GRADIENT * moved


# --- a step of the kit and a step of plain torch --------------------------------------------------


def make_turn_episodes(groups=8, members=4) -> list[Episode]:
    """Make episodes with one or two turns, rewards of turns, and all that a recipe reads."""
    episodes = make_episodes(seed=3, groups=groups, members=members)
    rng = random.Random(3)
    for episode in episodes:
        mask = episode.response_mask
        end = len(mask)
        episode.turns = [TurnSpan(0, end, 1)]
        if 0 in mask:  # an observation of two tokens
            episode.turns = [TurnSpan(0, 3, 1), TurnSpan(5, end, 2)]
        parts = [rng.choice([0.0, 0.25, 1.0]) for _ in episode.turns]
        episode.turn_rewards = parts
        episode.reward = sum(parts)
        episode.baseline = 0.5
        episode.reward_components = {"reward_model": rng.random()}
    return episodes


def select_for(name: str, recipe: Recipe) -> list[Episode]:
    """Select the episodes that pass a recipe's filters. For `spin`, add the rows' answers."""
    episodes = make_turn_episodes(groups=24)
    if not name.startswith("turn_"):
        for episode in episodes:
            episode.turn_rewards = []
    if name in ("dapo", "curriculum"):
        episodes, _ = select_trainable(episodes, 2, recipe.functions.filters)
    kept = take_groups(episodes, 8)
    if name == "spin":
        for first in kept[::4]:
            answer = copy.deepcopy(first)
            answer.response_ids = [7, 9, 11, 3]
            answer.response_mask = [1] * 4
            answer.log_probs = [0.0] * 4
            answer.turns = []
            kept.append(answer)
    return kept


def load_plain_model(workspace, weights) -> Any:
    model = AutoModelForCausalLM.from_pretrained(workspace / "untied", dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def run_trainer_step(episodes, workers, recipe, inputs) -> tuple[DataProto, dict[str, float]]:
    """Run the stages of Trainer.step after `collect`, and return (batch, metrics)."""
    run: Any = SimpleNamespace(stage=lambda _: contextlib.nullcontext())
    no_servers: Any = None
    state = LoopState(step=1, batches=1)
    trainer = algorithm.Trainer(recipe, inputs, run, workers, no_servers, state)
    trainer.shape_rewards(episodes)
    batch = training.to_batch(episodes, inputs, recipe)
    trainer.compute_log_probs(batch)
    trainer.compute_advantages(batch)
    trainer.update(batch)
    return batch, trainer.metrics


def read_plain_data(episodes, batch, model, reference) -> Data:
    """Compute the data of a batch by plain models. A critic's values are those of the workers."""
    masks = [torch.tensor(e.response_mask, dtype=torch.float32) for e in episodes]
    lengths = [len(mask) for mask in masks]
    values = batch.batch.get("values", torch.zeros_like(batch.batch["token_level_scores"]))
    with torch.no_grad():
        old = [compute_log_probs(model, e) for e in episodes]
        ref = [compute_log_probs(reference, e) for e in episodes]
    rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    return Data(episodes, old, ref, rows, masks)


@pytest.fixture(scope="module")
def checkpoints(worker_variants, tmp_path_factory) -> tuple[str, str]:
    """Save the SGD actor: its initial weights, and those one step away from its reference."""
    workers, recipe = worker_variants["one rank"]
    initial, moved = (str(tmp_path_factory.mktemp(name)) for name in ("initial", "moved"))
    workers.actor.save_checkpoint(initial, None, 0, None)
    set_loss_settings(workers, OmegaConf.to_container(recipe.for_verl(ACTOR)))
    batch = training.build_batch(make_episodes(seed=5), 1, 1.0)
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["advantages"] = 0.3 * batch.batch["response_mask"]
    training.update_actor(workers.actor, batch, recipe)
    workers.actor.save_checkpoint(moved, None, 0, None)
    return initial, moved


@pytest.fixture
def moved_actor(worker_variants, checkpoints):
    """Yield the SGD actor, one step away from its reference. Other tests find it as it started."""
    initial, moved = checkpoints
    actor = worker_variants["one rank"][0].actor
    actor.load_checkpoint(moved)
    yield actor
    actor.load_checkpoint(initial)


# The others differ from these by their advantage or loss, which other tests compare with papers.
FAST = ("dapo", "distill", "grpo", "ppo", "remax", "rollout_correction", "spin", "turn_gae")
NAMES = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.soak)
    for name in plain_torch.RECIPES
]


def test_every_algorithm_recipe_is_compared():
    recipes = {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    assert recipes == {*plain_torch.RECIPES, "sft", "lora"}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_each_recipe_equals_plain_torch(
    stack, values, moved_actor, workspace, tmp_path, name
):
    """From rewards to weights: advantages, losses, mini-batches and the optimizer's steps."""
    plain_recipe = plain_torch.RECIPES[name]
    changes = [change for change in list_changes(name) if "norm_adv_by_std" not in change]
    if plain_recipe.is_on_policy:
        changes = [change for change in changes if "actor.ppo_mini_batch_size" not in change]
    paths = {"distill": "distillation.teacher_models.teacher_model.model_path"}
    paths["reward_model"] = "reward.reward_model.model_path"
    if name in paths:
        folder = "scored" if name == "reward_model" else "untied"
        changes.append(f"{paths[name]}={workspace / folder}")
    if name in ("reinforce_plus_plus", "remax"):
        changes.append("algorithm.gamma=1.0")
    recipe, inputs, _ = load_recipe(workspace, *changes, overlays=[name])
    loss_mode = recipe.actor.policy_loss.loss_mode
    register_in_verl(recipe.algorithm.adv_estimator, loss_mode)
    critic = with_values(stack, values).critic if recipe.has_critic else None
    workers = training.Workers(moved_actor, critic, None)
    set_losses(workers, recipe)
    before = read_weights(workers, tmp_path / "before")
    episodes = select_for(name, recipe)
    batch, _ = run_trainer_step(episodes, workers, recipe, inputs)
    after = read_weights(workers, tmp_path / "after")

    model = load_plain_model(workspace, before)
    data = read_plain_data(episodes, batch, model, load_plain_model(workspace, None))
    updates = 1 if plain_recipe.is_on_policy else 2
    advantages = plain_torch.run_step(model, data, plain_recipe, updates)
    for row, expected in enumerate(advantages):
        actual = (batch.batch["advantages"] * batch.batch["response_mask"])[row, : len(expected)]
        torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)
    plain = dict(model.named_parameters())
    moved = compute_distance(before, after)
    difference = compute_distance(after, {k: plain[k].detach() for k in after})
    assert 0 < difference < PLAIN * moved, (difference, moved)


def make_branched_episodes() -> list[Episode]:
    """Make episodes of one to three rows. A branch's prompt has tokens that the main row trains."""
    episodes = make_episodes(seed=7)
    rng = random.Random(7)
    for episode in episodes:
        for _ in range(rng.randrange(3)):
            R = rng.randint(1, 12)
            branch = Branch(episode.prompt_ids + episode.response_ids[: rng.randint(1, 9)])
            branch.response_ids = [rng.randrange(1, 40) for _ in range(R)]
            branch.response_mask = [1] * R
            branch.log_probs = [-3.6 + 0.3 * rng.random() for _ in range(R)]
            episode.branches.append(branch)
    return episodes


def compute_episodes_loss(model, episodes, mode) -> torch.Tensor:
    """Compute 1/N sum_e 1/T_e sum_b sum_t loss(A_e) of N episodes, or what `mode` has for it."""
    sums = []
    counts = []
    for group in group_episodes(episodes).values():
        rewards = torch.tensor([episode.reward for episode in group])
        for episode, advantage in zip(group, rewards - rewards.mean(), strict=True):
            losses = []
            for row in episode.rows:
                new, old = compute_log_probs(model, row), torch.tensor(row.log_probs)
                loss = plain_torch.ppo()(new, old, advantage, old)
                losses.append(loss[torch.tensor(row.response_mask).bool()])
            sums.append(torch.cat(losses).sum())
            counts.append(sum(map(len, losses)))
    if mode == "token-mean":
        return torch.stack(sums).sum() / sum(counts)
    if mode == "seq-mean-token-sum":
        return torch.stack(sums).mean()
    return (torch.stack(sums) / torch.tensor(counts)).mean()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_episode_of_several_rows_counts_as_one(worker_variants, workspace, tmp_path, mode):
    """Micro-batches of 64 tokens split episodes. If each row counted as one, it would differ."""
    workers, recipe = worker_variants["one rank"]
    changes = (f"{ACTOR}.loss_agg_mode={mode}", "algorithm.norm_adv_by_std_in_grpo=false")
    recipe = changed(recipe, *changes)
    set_loss_settings(workers, OmegaConf.to_container(recipe.for_verl(ACTOR)))
    flags = {"calculate_entropy": False, "compute_loss": True, "max_token_len_per_gpu": 64}

    def update(episodes, workers, recipe, splits_episodes=False):
        batch = training.build_batch(episodes, 1, 1.0)
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        training.compute_advantages(batch, recipe)
        if splits_episodes:
            batch.non_tensor_batch["episode"] = np.arange(len(batch))
        data = training.make_update_data(batch, 1, 1, recipe.actor, **flags)
        output = training.wait_for_output(workers.actor.update_actor(data))
        return batch.batch["advantages"], training.collect_metrics(output, recipe, "actor")

    episodes = make_branched_episodes()
    step = run_step(update, episodes, workers, recipe, tmp_path / "step")
    model = load_plain_model(workspace, step.before)
    loss = compute_episodes_loss(model, episodes, mode)
    loss.backward()
    expected = {k: step.before[k] - p.grad for k, p in model.named_parameters()}
    moved = compute_distance(step.before, step.after[0])
    assert compute_distance(step.after[0], expected) < PLAIN * moved
    assert step.metrics["actor/pg_loss"] == pytest.approx(float(loss), rel=LOSS, abs=LOSS)
    if mode != "token-mean":
        wrong = functools.partial(update, splits_episodes=True)
        step = run_step(wrong, episodes, workers, recipe, tmp_path / "wrong")
        assert compute_distance(step.after[0], expected) > 0.1 * moved


def test_a_step_of_sft_equals_plain_torch(moved_actor, workspace, tmp_path):
    """The loss is the mean cross entropy of the response tokens that have a mask of 1."""
    from extras.sft import update_sft

    actor = moved_actor
    recipe = load_recipe(workspace, *SGD).recipe
    workers = training.Workers(actor, None, None)
    before = read_weights(workers, tmp_path / "before")
    settings = omega_conf_to_dataclass(recipe.for_verl(ACTOR))
    actor.set_loss_fn(functools.partial(sft_loss, config=settings))
    episodes = make_episodes(groups=8, members=1)
    update_sft(actor, training.build_batch(episodes, 1, 1.0), recipe)
    after = read_weights(workers, tmp_path / "after")

    model = load_plain_model(workspace, before)
    rows = [compute_log_probs(model, episode) for episode in episodes]
    masks = [torch.tensor(episode.response_mask) for episode in episodes]
    total = sum((row * mask).sum() for row, mask in zip(rows, masks, strict=True))
    (-total / sum(mask.sum() for mask in masks)).backward()
    expected = {k: before[k] - p.grad for k, p in model.named_parameters()}
    moved = compute_distance(before, after)
    difference = compute_distance(after, {k: expected[k] for k in after})
    assert 0 < difference < PLAIN * moved, (difference, moved)


# --- a batch in other micro-batches --------------------------------------------------------------

# (name of the workers, tokens per micro-batch)
SPLITS = [
    ("one rank", 2048),
    ("one rank", 64),
    ("one rank", 33),
    ("two ranks", 2048),
    ("two ranks", 64),
    ("padded", 64),
]


@pytest.fixture(scope="module")
def worker_variants(stack, workspace):
    """Yield {name: (workers, recipe)}: one rank, two ranks, and one that pads instead of packing.

    The optimizer is SGD, so a change of the weights is the gradient.
    """
    padded = [
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=false",
    ]
    variants = {"one rank": [], "two ranks": ["trainer.n_gpus_per_node=2"], "padded": padded}
    recipes = [load_recipe(workspace, *SGD, *changes).recipe for changes in variants.values()]
    # grpo needs it
    with_reference = [changed(recipe, f"{ACTOR}.use_kl_loss=true") for recipe in recipes]
    with ThreadPoolExecutor() as pool:  # they import their modules concurrently
        workers = list(pool.map(start_actor, with_reference))
    started = dict(zip(variants, zip(workers, recipes, strict=True), strict=True))
    yield started
    for group in workers:
        kill_workers(group)


class Update(NamedTuple):
    """The results of an update."""

    loss: float
    grad_norm: float
    gradient: dict[str, torch.Tensor]


def run_split_update(workers, recipe, mode, tokens, episodes, folder) -> Update:
    """Run an update with micro-batches of `tokens` tokens, and then restore the weights."""
    recipe = changed(recipe, f"{ACTOR}.loss_agg_mode={mode}")
    if mode == "seq-mean-token-sum-norm":  # as kit/run/prepare.py
        length = recipe.data.max_response_length
        recipe = changed(recipe, f"{ACTOR}.loss_scale_factor={length}")
    settings = OmegaConf.to_container(recipe.for_verl(ACTOR))
    set_loss_settings(workers, settings)
    batch = training.build_batch(episodes, 1, 1.0)
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    signs = torch.linspace(-1, 1, len(episodes))[:, None]
    batch.batch["advantages"] = signs * batch.batch["response_mask"]
    flags = {"calculate_entropy": False, "compute_loss": True, "max_token_len_per_gpu": tokens}
    ranks = recipe.data_parallel_size()
    data = training.make_update_data(batch, ranks, 1, recipe.actor, **flags)

    def update(_episodes, workers, recipe):
        output = training.wait_for_output(workers.actor.update_actor(data))
        return batch.batch["advantages"], training.collect_metrics(output, recipe, "actor")

    step = run_step(update, episodes, workers, recipe, folder)
    gradient = {k: step.before[k] - step.after[0][k] for k in step.before}
    return Update(step.metrics["actor/loss"], step.metrics["actor/grad_norm"], gradient)


# test_policy_losses.py computes the means of the other modes over micro-batches and ranks.
@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.soak) for mode in MODES[1:])]
)
def test_the_split_of_a_batch_does_not_change_the_update(
    worker_variants, workspace, tmp_path, mode
):
    """Micro-batches have 33, 64 or 2,048 tokens, packed or padded, on one or two ranks."""
    episodes = make_episodes()[:31]  # an odd number: one of two ranks gets a padding row
    episodes[7].response_mask = [0] * len(episodes[7].response_mask)
    results = {}
    for name, tokens in SPLITS:
        workers, recipe = worker_variants[name]
        folder = tmp_path / f"{name}_{tokens}"
        results[name, tokens] = run_split_update(workers, recipe, mode, tokens, episodes, folder)
    loss, norm, gradient = results["one rank", 2048]
    zero = {k: torch.zeros_like(v) for k, v in gradient.items()}
    # the change of the weights is the gradient
    assert norm > 0 and compute_distance(gradient, zero) == pytest.approx(norm, rel=1e-3)
    for split, other in results.items():
        difference = compute_distance(gradient, other.gradient)
        assert other.loss == pytest.approx(loss, rel=LOSS, abs=LOSS * norm), split
        assert other.grad_norm == pytest.approx(norm, rel=LOSS), split
        assert difference < GRADIENT * norm, split


def set_loss_settings(workers, settings):
    """Give the workers verl's ppo_loss with another configuration."""
    from verl.workers.utils.losses import ppo_loss

    actor_config = omega_conf_to_dataclass(OmegaConf.create(settings))
    workers.actor.set_loss_fn(functools.partial(ppo_loss, actor_config))
