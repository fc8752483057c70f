"""The update of the kit against verl's own trainer, and against itself cut differently: real FSDP workers, tiny model.

Two bounds, both in float32. LOSS is relative, on advantages, losses and gradient norms. GRADIENT is on the norm of a
difference of two gradients over the norm of one; there the optimiser is SGD with a rate of 1, so that a change of
weights is the gradient. Against verl it is on the new weights, over how far they moved.
"""

from __future__ import annotations

import copy
import functools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import CPU, RECIPE, drop, tiny, with_values
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils.config import omega_conf_to_dataclass

import training
from kit.config.load import load_config
from kit.data.episode import Episode
from kit.data.selection import select_trainable, take_groups
from kit.runs import prepare as recipes

LOSS, GRADIENT = 1e-6, 1e-6
SGD = ["optimizer=SGD", "lr=1.0", "weight_decay=0.0", "clip_grad=1e9"]
SGD = [f"actor_rollout_ref.actor.optim.{change}" for change in SGD]


def recipe(workspace, *changes, overlays=()):
    """The tiny recipe with overlays of configs/, merged and checked."""
    words = tiny(
        workspace,
        f"actor_rollout_ref.model.path={workspace / 'untied'}",
        "data.max_response_length=24",
    )
    config, _ = load_config([str(CPU), str(RECIPE), *overlays], [*words, *changes])
    return config, recipes.prepare(config)


def start(config) -> training.Workers:
    workers = training.start_workers(config)
    workers.actor.init_model()
    return workers


def episodes(seed=0, groups=8, members=4) -> list[Episode]:
    """Ragged answers, some with observed tokens in the middle, some masked whole; graded rewards with ties."""
    rng, made = random.Random(seed), []
    for g in range(groups):
        prompt = [rng.randrange(2, 40) for _ in range(rng.randint(2, 9))]
        for _ in range(members):
            R = rng.randint(1, 24)
            mask = [1] * R
            if R > 6 and rng.random() < 0.5:
                mask[3:5] = [0, 0]
            made.append(
                Episode(
                    *("r", f"g{g}", "s", prompt, [rng.randrange(1, 40) for _ in range(R)], mask),
                    log_probs=[-3.6 + 0.3 * rng.random() for _ in range(R)],
                    reward=rng.choice([0.0, 0.0, 0.25, 1.0]),
                    ended="length" if R == 24 else "stop",
                )
            )
    return made


def weights(workers, folder, name="actor") -> dict[str, torch.Tensor]:
    """{name: parameter} of a group, whole, by way of a checkpoint."""
    group = getattr(workers, name)
    group.save_checkpoint(str(folder), None, 0, None)
    ranks = sorted(folder.glob("model_world_size_*.pt"))
    shards = [torch.load(file, weights_only=False) for file in ranks]
    plain = [{k: getattr(v, "_local_tensor", v) for k, v in shard.items()} for shard in shards]
    return {
        k: torch.cat([shard[k] for shard in plain]).clone() for k in plain[0]
    }  # FSDP cuts the first dimension


def distance(a, b) -> float:
    """Norm of the difference of two sets of weights."""
    return float(torch.stack([(a[k] - b[k]).float().norm() for k in a]).norm())


# --- one step of ours, one of verl's trainer ---------------------------------------------------


def verls_batch(made, order, config):
    """The same episodes as verl's agent loop pads them: to the lengths of the recipe."""
    P, R = config.data.max_prompt_length, config.data.max_response_length
    rows = [made[i] for i in order]

    def right(values, fill=0):
        return torch.tensor([list(v) + [fill] * (R - len(v)) for v in values])  # [B, R]

    prompts = torch.tensor([[1] * (P - len(e.prompt_ids)) + e.prompt_ids for e in rows])  # [B, P]
    responses = right([e.response_ids for e in rows], 1)
    seen = [[0] * (P - len(e.prompt_ids)) + [1] * len(e.prompt_ids) for e in rows]
    attention = torch.cat(
        [torch.tensor(seen), right([[1] * len(e.response_ids) for e in rows])], dim=1
    )  # [B, P+R]
    scores = torch.zeros(len(rows), R)
    for row, e in zip(scores, rows, strict=True):
        row[len(e.response_ids) - 1] = e.reward
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": right([e.response_mask for e in rows]),
        "rollout_log_probs": right([e.log_probs for e in rows], 0.0),
        "token_level_scores": scores,
        "token_level_rewards": scores,
    }
    uid = np.array([e.group_id for e in rows], dtype=object)
    meta = {"temperature": 1.0, "global_token_num": attention.sum(dim=1).tolist()}
    return training.DataProto(
        batch=TensorDict(tensors, len(rows)), non_tensor_batch={"uid": uid}, meta_info=meta
    )


def verls_step(made, workers, config):
    """(advantages, metrics) of a step by the methods of verl's RayPPOTrainer, in the order of its fit."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
    from verl.utils.metric import reduce_metrics

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config, trainer.ref_in_actor, trainer.distillation_config = config, False, None
    trainer.actor_rollout_wg = trainer.ref_policy_wg = workers.actor
    trainer.critic_wg = workers.critic
    # verl cuts rows into mini-batches as they come; the kit deals those with a token to learn to them in turn
    mini = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
    live = [i for i, e in enumerate(made) if any(e.response_mask)]
    masked = [i for i, e in enumerate(made) if not any(e.response_mask)]
    order = []
    for m in range(mini):
        order += live[m::mini]
        while len(order) < (m + 1) * len(made) // mini:
            order.append(masked.pop())
    batch = verls_batch(made, order, config)
    old, _ = trainer._compute_old_log_prob(batch)
    old.batch.pop("entropys")
    batch = batch.union(old)
    if training.needs_reference(config):
        batch = batch.union(trainer._compute_ref_log_prob(batch))
    if workers.critic:
        batch = batch.union(trainer._compute_values(batch))
    settings = {
        key: config.algorithm[key]
        for key in ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo")
    }
    batch = compute_advantage(batch, config=config.algorithm, **settings)
    metrics = {}
    if workers.critic:
        metrics |= reduce_metrics(trainer._update_critic(batch).meta_info["metrics"])
    metrics |= reduce_metrics(trainer._update_actor(batch).meta_info["metrics"])
    back = torch.tensor(order).argsort()
    return batch.batch["advantages"][back], metrics


def our_step(made, workers, config):
    """(advantages, metrics) of a step, in the order of algorithm.py."""
    batch = training.build_batch(made, 1, 1.0)
    batch.batch["old_log_probs"] = training.compute_log_probs(workers.actor, batch, config)["log_probs"]
    if training.needs_reference(config):
        batch.batch["ref_log_prob"] = training.compute_ref_log_probs(workers, batch, config)
    if workers.critic:
        batch.batch["values"] = training.compute_values(workers.critic, batch, config)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    training.compute_advantages(batch, config)
    metrics = training.update_critic(workers.critic, batch, config) if workers.critic else {}
    metrics |= training.update_actor(workers.actor, batch, config)
    return batch.batch["advantages"], metrics


def workers_of(config, stack, values, cuts, name) -> training.Workers:
    """SGD's actor (verl pads to other lengths, and of that rounding AdamW's division by a tiny root mean square would
    make 6e-6), and the session's critic for ppo, as they began, with the recipe's losses."""
    workers = with_values(stack, values, critic=name == "ppo")._replace(
        actor=cuts["one rank"][0].actor
    )
    training.set_policy_loss(workers.actor, config)
    if workers.critic:
        settings = omega_conf_to_dataclass(config.critic)
        workers.critic.set_loss_fn(functools.partial(training.value_loss, config=settings))
    return workers


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo"])
def test_a_step_is_verls_own(stack, values, cuts, workspace, tmp_path, name):
    """Same episodes, weights and seed; two mini-batches, KL term, critic, clip-higher as the recipes have them. No
    number of the advantage is at its neutral value."""
    changes = [
        *SGD,
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    changes += ["critic.ppo_mini_batch_size=4", "algorithm.gamma=0.9", "algorithm.lam=0.5"]
    changes += ["algorithm.norm_adv_by_std_in_grpo=false"] if name == "grpo" else []
    config, data = recipe(workspace, *changes, overlays=[name])
    made, _ = select_trainable(
        episodes(groups=24), 2, data.filters
    )  # for dapo: two thirds are left, some masked whole
    made = take_groups(made, 8)
    assert len(made) == 32 and all(any(e.response_mask) for e in made) == (name != "dapo")
    for e in made:
        e.reward = data.reward(e)
    workers = workers_of(config, stack, values, cuts, name)
    results = []
    for step, folder in ((our_step, "ours"), (verls_step, "verls")):
        for group in [g for g in ("actor", "critic") if getattr(workers, g)]:
            state = str(tmp_path / f"start_{group}")
            if folder == "ours":
                getattr(workers, group).save_checkpoint(state, None, 0, None)
            else:
                getattr(workers, group).load_checkpoint(state)
        before = weights(workers, tmp_path / f"{folder}_before")
        advantages, metrics = step(made, workers, config)
        after = [
            weights(workers, tmp_path / f"{folder}_{g}", g)
            for g in ("actor", "critic")
            if getattr(workers, g)
        ]
        results.append((advantages, metrics, before, after))
    for group in [
        g for g in ("actor", "critic") if getattr(workers, g)
    ]:  # other tests begin where this one did
        getattr(workers, group).load_checkpoint(str(tmp_path / f"start_{group}"))
    (ours, our_metrics, before, our_weights), (theirs, their_metrics, again, their_weights) = (
        results
    )
    assert distance(before, again) == 0.0 and distance(before, our_weights[0]) > 0.01
    torch.testing.assert_close(ours, theirs[:, : ours.shape[1]], rtol=LOSS, atol=LOSS)
    names = ["actor/pg_loss", "actor/loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl"]
    names += ["actor/kl_loss"] if name == "grpo" else []
    names += ["critic/vf_loss", "critic/grad_norm", "critic/vpred_mean"] if name == "ppo" else []
    for key in names:
        print(key, our_metrics[key], their_metrics[key])
        assert our_metrics[key] == pytest.approx(float(their_metrics[key]), rel=LOSS, abs=LOSS), key
    for a, b in zip(our_weights, their_weights, strict=True):
        moved = distance(before, our_weights[0])
        print("weights apart by", distance(a, b), "of", moved)
        assert distance(a, b) < GRADIENT * moved


def test_an_update_that_gives_the_old_log_probs_is_that_after_a_pass_for_them(
    cuts, workspace, tmp_path
):
    """One optimiser step a batch: the ratio is 1, so loss, gradient, weights and what is told of it are the same."""
    workers, _ = cuts["one rank"]
    config, _ = recipe(workspace, *SGD, "actor_rollout_ref.rollout.n=4")
    assert training.fuses_old_log_probs(config)
    training.set_policy_loss(workers.actor, config)
    made = episodes()[:31]
    made[7].response_mask = [0] * len(made[7].response_mask)
    state = str(tmp_path / "start")
    workers.actor.save_checkpoint(state, None, 0, None)
    results = []
    for name in ("two", "one"):
        batch = training.build_batch(made, 1, 1.0)
        batch.batch["advantages"] = (
            torch.linspace(-1, 1, 31)[:, None] * batch.batch["response_mask"]
        )
        measured = training.add_old_log_probs(workers.actor, batch, config) if name == "two" else {}
        metrics = measured | training.update_actor(workers.actor, batch, config)
        results.append((batch, metrics, weights(workers, tmp_path / name)))
        workers.actor.load_checkpoint(state)
    (two, metrics_two, weights_two), (one, metrics_one, weights_one) = results
    mask = two.batch["response_mask"].bool()
    torch.testing.assert_close(
        one.batch["old_log_probs"][mask], two.batch["old_log_probs"][mask], rtol=LOSS, atol=LOSS
    )
    names = ["actor/entropy", "actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"]
    names += ["training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"]
    for key in names:
        assert metrics_one[key] == pytest.approx(metrics_two[key], rel=LOSS, abs=LOSS), key
    assert "rollout_corr/kl" in metrics_one and metrics_one["actor/grad_norm"] > 0
    moved = distance(weights(workers, tmp_path / "before"), weights_two)
    assert distance(weights_one, weights_two) < GRADIENT * moved


# --- one batch, cut differently ------------------------------------------------------------------

MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]


@pytest.fixture(scope="module")
def cuts(stack, workspace):
    """Workers of one rank, of two, and of one that pads instead of packing; SGD, so that weights show gradients."""
    padding = ["actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    padding += ["actor_rollout_ref.model.use_remove_padding=false"]
    variants = {"one rank": [], "two ranks": ["trainer.n_gpus_per_node=2"], "padded": padding}
    configs = [recipe(workspace, *SGD, *changes)[0] for changes in variants.values()]
    with_reference = copy.deepcopy(configs)
    for config in with_reference:  # grpo's
        config.actor_rollout_ref.actor.use_kl_loss = True
    with ThreadPoolExecutor() as pool:  # their imports side by side
        started = dict(
            zip(variants, zip(pool.map(start, with_reference), configs, strict=True), strict=True)
        )
    yield started
    for workers, _ in started.values():
        drop(workers)


@pytest.mark.parametrize("mode", MODES)
def test_the_cut_of_a_batch_changes_nothing(cuts, workspace, tmp_path, mode):
    """Micro-batches of 32, 64 or 2,048 tokens, packed or padded, one rank or two: one loss, one gradient."""
    made = episodes()[:31]  # an odd number: one of two ranks gets a row of filling
    made[7].response_mask = [0] * len(made[7].response_mask)
    results = {}
    for name, tokens in [
        *[("one rank", t) for t in (2048, 64, 33)],
        ("two ranks", 2048),
        ("two ranks", 64),
        ("padded", 64),
    ]:
        workers, config = cuts[name]
        config = copy.deepcopy(config)
        config.actor_rollout_ref.actor.loss_agg_mode = mode
        recipes.fill_in(config, recipes.load_model_files(config)[1])
        actor = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
        set_mode(workers, actor)
        batch = training.build_batch(made, 1, 1.0)
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        batch.batch["advantages"] = (
            torch.linspace(-1, 1, 31)[:, None] * batch.batch["response_mask"]
        )
        state = str(tmp_path / "start" / name)
        folder = tmp_path / f"{name}_{tokens}"
        workers.actor.save_checkpoint(state, None, 0, None)
        before = weights(workers, folder / "before")
        flags = {"calculate_entropy": False, "compute_loss": True, "max_token_len_per_gpu": tokens}
        metrics = training._update(
            workers.actor.update_actor,
            batch,
            config,
            config.actor_rollout_ref.actor,
            "actor",
            flags,
        )
        after = weights(workers, folder / "after")
        workers.actor.load_checkpoint(state)
        gradient = {k: before[k] - after[k] for k in before}
        results[name, tokens] = (metrics["actor/loss"], metrics["actor/grad_norm"], gradient)
    loss, norm, gradient = results["one rank", 2048]
    zero = {k: torch.zeros_like(v) for k, v in gradient.items()}
    assert norm > 0 and distance(gradient, zero) == pytest.approx(
        norm, rel=1e-3
    )  # it is the gradient
    for cut, (other_loss, other_norm, other) in results.items():
        print(mode, cut, other_loss - loss, other_norm / norm - 1, distance(gradient, other) / norm)
        assert other_loss == pytest.approx(loss, rel=LOSS, abs=LOSS * norm), cut
        assert other_norm == pytest.approx(norm, rel=LOSS), cut
        assert distance(gradient, other) < GRADIENT * norm, cut


def set_mode(workers, actor):
    """Give the workers verl's ppo_loss with another configuration than they started with."""
    from verl.workers.utils.losses import ppo_loss

    workers.actor.set_loss_fn(
        functools.partial(ppo_loss, omega_conf_to_dataclass(OmegaConf.create(actor)))
    )
