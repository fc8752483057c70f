"""verl's FSDP workers (actor, reference, critic, reward model): episodes in, one policy update out.

    start_workers(config)             worker processes, one per GPU; the actor's models are not loaded yet
    to_batch(episodes, pad)           -> DataProto of padded tensors
    log_probs, ref_log_probs, values  of the sampled tokens, by the trainer's own models
    apply_kl, correct, advantages     from rewards to advantages: verl's, or one's own
    update_critic, update_actor       PPO epochs over mini-batches of the batch (verl's losses), metrics back

Shapes: B episodes, P longest prompt, R longest response, both in tokens. Prompts are padded on the
left and responses on the right, so a row of `input_ids` [B, P+R] is one unbroken sequence. Padding is
known by `attention_mask` alone, never by its token id, which may be the id of EOS.

Workers take a batch packed, without its padding (verl's `left_right_2_no_padding`), and answer packed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.core_algos import (
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_kl_controller,
)
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from kit.config import user_functions
from kit.config.load import gpus
from kit.config.user_functions import asks_for, needs_reference
from kit.extras import parallelism

IMAGES = ("multi_modal_inputs",)  # of a batch, what workers read and is no tensor
DRIVERS = (
    "turn",
    "token_level_scores",
    "token_level_rewards",
)  # of a batch's tensors, what no worker reads
PASS = "one_pass"  # in the place of a metric: (rows [b], log_probs [b, R], entropy [b, R]) of a micro-batch
WorkerGroup = Any  # a RayWorkerGroup, on which verl binds the workers' methods at run time


class Workers(NamedTuple):
    """Groups of worker processes, by what they hold; None for what the recipe does not need."""

    actor: WorkerGroup  # with the reference, and the rollout's side of the weight sync
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    ref: WorkerGroup | None = (
        None  # the reference, where that is another model (a teacher), or on GPUs of its own
    )


def start_workers(config: DictConfig, sft: bool = False) -> Workers:
    """Start one process per GPU, which holds all that the recipe trains or asks, so that one allocator gives its cache
    back before vLLM wakes. The actor's models are loaded by `init_model()`, the others here. sft: the actor alone.

    The actor also holds the frozen reference when a KL term or the advantage needs it (role actor_rollout_ref), unless
    that is the model below its adapter (LoRA), a teacher, or on GPUs of its own.
    """
    elsewhere = (
        config.actor_rollout_ref.model.lora_rank
        or user_functions.teacher(config)
        or config.trainer.resource_pools.ref
    )
    role = (
        "actor"
        if sft
        else "actor_rollout_ref"
        if needs_reference(config) and not elsewhere
        else "actor_rollout"
    )
    actor = (ActorRolloutRefWorker, {"config": config.actor_rollout_ref, "role": role})
    return start_roles(config, {"actor": actor, **({} if sft else beside_actor(config))})


def start_roles(config: DictConfig, roles: dict[str, tuple[type, dict[str, Any]]]) -> Workers:
    """On each GPU one process with all of them (verl's create_colocated_worker_cls), but for those with GPUs of their
    own (trainer.resource_pools). roles: class and arguments of each, by its name in Workers."""
    groups, apart = (
        dict[str, WorkerGroup](),
        [name for name in roles if config.trainer.resource_pools.get(name)],
    )
    for names in filter(
        None, ([name for name in roles if name not in apart], *([name] for name in apart))
    ):
        parts = {
            name: RayClassWithInitArgs(ray.remote(roles[name][0]), **roles[name][1])
            for name in names
        }
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints the base class
            whole = create_colocated_worker_cls(parts) if len(parts) > 1 else parts[names[0]]
        group = RayWorkerGroup(
            resource_pool=RayResourcePool(
                [gpus(config, names[0])] * config.trainer.nnodes, max_colocate_count=1
            ),
            ray_cls_with_init=whole,
            device_name=config.trainer.device,
            ray_wait_register_center_timeout=config.trainer.ray_wait_register_center_timeout,
        )
        groups |= group.spawn(parts) if len(parts) > 1 else {names[0]: group}
    workers = Workers(*(groups.get(name) for name in Workers._fields))
    if workers.critic:
        workers.critic.reset()
        workers.critic.set_loss_fn(
            functools.partial(value_loss, config=omega_conf_to_dataclass(config.critic))
        )
    if workers.reward_model:
        workers.reward_model.reset()
    if workers.ref:
        workers.ref.init_model()
    return workers


def beside_actor(config: DictConfig) -> dict[str, tuple[type, dict[str, Any]]]:
    """The critic, the reward model and a reference that is not the actor's, where the recipe needs them."""
    roles: dict[str, tuple[type, dict[str, Any]]] = {}
    if asks_for(config, "values"):  # GAE
        roles["critic"] = (TrainingWorker, {"config": value_model_config(config.critic)})
    if config.reward.reward_model.enable:
        model = copy.deepcopy(config.critic)
        model.model.path = model.model.tokenizer_path = config.reward.reward_model.model_path
        settings = value_model_config(model)
        settings.engine_config.forward_only = True  # bf16, and on the host while it is not asked
        roles["reward_model"] = (TrainingWorker, {"config": settings})
    teacher = user_functions.teacher(config)
    if teacher or (config.trainer.resource_pools.ref and needs_reference(config)):
        ref = copy.deepcopy(
            config.actor_rollout_ref
        )  # not in the actor's worker: verl 0.9.1 loads the policy's there
        ref.model.path, ref.model.lora_rank = teacher or ref.model.path, 0
        roles["ref"] = (ActorRolloutRefWorker, {"config": ref, "role": "ref"})
    return roles


def value_model_config(config: DictConfig) -> TrainingWorkerConfig:
    """verl's critic.* as its engine worker takes it (source: verl 0.9.1, RayPPOTrainer.init_workers)."""
    critic = omega_conf_to_dataclass(config)
    critic.engine.infer_max_token_len_per_gpu = critic.forward_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )


def set_policy_loss(actor: WorkerGroup, config: DictConfig) -> None:
    """From now on the actor's updates minimise the recipe's loss, with the coefficients that `config` has now.

    It is verl's, or one's own (kit/config/user_functions.py), which is registered here, but not in the workers.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    loss: Callable[..., Any] = ppo_loss
    if user_functions.is_own(loss_mode):
        loss = functools.partial(_own_ppo_loss, loss_mode, POLICY_LOSS_REGISTRY[loss_mode])
    if one_pass(config):
        loss = functools.partial(_one_pass_loss, loss)
    actor.set_loss_fn(
        functools.partial(loss, omega_conf_to_dataclass(config.actor_rollout_ref.actor))
    )


def _own_ppo_loss(
    name: str, function: Any, config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> Any:
    """verl's ppo_loss, in a worker's process, with a policy loss that verl there has not heard of."""
    POLICY_LOSS_REGISTRY[name] = function
    return ppo_loss(config, model_output, data, dp_group)


def _one_pass_loss(
    loss: Any, config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> Any:
    """`loss` where the policy that sampled is the present one: this pass has its log-probs, and tells them."""
    found = [
        no_padding_2_padding(model_output[name], data).detach() for name in ("log_probs", "entropy")
    ]  # [b, R]
    if "old_log_probs" not in data:
        data["old_log_probs"] = found[0]
    if not (config.calculate_entropy or config.entropy_coeff):
        model_output.pop("entropy")  # which is only looked at
    result, metrics = loss(config, model_output, data, dp_group)
    return result, {
        **metrics,
        PASS: (data["row"].cpu(), *(tensor.float().cpu() for tensor in found)),
    }


def one_pass(config: DictConfig) -> bool:
    """Whether the update's own forward pass gives the old log-probs, which are of the same weights: a batch takes one
    optimiser step, and nothing asks for them before it."""
    actor, corrects = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    asked = config.algorithm.recompute_old_log_probs or config.algorithm.use_kl_in_reward
    asked = asked or corrects.bypass_mode or corrects.rollout_is or corrects.rollout_rs
    asked = asked or asks_for(config, "old_log_probs") or asks_for(config, "sum_pi_squared")
    return (
        not asked
        and actor.ppo_mini_batch_size == config.data.train_batch_size
        and actor.ppo_epochs == 1
    )


def world_size(config: DictConfig, role: str = "actor") -> int:
    return gpus(config, role) * int(config.trainer.nnodes)


def data_parallel_size(config: DictConfig, role: str = "actor") -> int:
    """Ranks that each see their own part of a batch: a role's GPUs over those that hold one model together."""
    return world_size(config, role) // parallelism.same_rows(config)


# --- batches -------------------------------------------------------------------------------------


def to_batch(episodes: Sequence[Any], pad_token_id: int, temperature: float) -> DataProto:
    """Kept episodes -> verl's batch.

    episodes: records with prompt_ids [p], response_ids [r], response_mask [r] (1 = sampled by the policy,
    0 = observed), log_probs [r] (the sampler's), reward, turn_rewards, turns, reward_components, baseline and
    group_id, as inference.Episode has them. temperature: that of sampling; the trainer divides its logits by it
    too. The reward sits on each response's last token; where the environment paid each turn, those sit on their
    turns' last tokens, and the rest of the reward (what a shaper added) on the response's. `turn` [B, R] counts the
    policy's turns from 0, -1 on what was observed, whatever the mask leaves out. Components that every episode has
    become arrays of the batch, where verl's multi-reward advantage (gdpo) looks for them.
    """
    p, r = (
        torch.tensor([len(getattr(e, name)) for e in episodes])
        for name in ("prompt_ids", "response_ids")
    )  # [B]
    prompt_mask = torch.arange(int(p.max())).flip(0) < p[:, None]  # [B, P]
    real = torch.arange(int(r.max())) < r[:, None]  # [B, R], observed tokens included
    prompts = _spread([e.prompt_ids for e in episodes], prompt_mask, pad_token_id)  # [B, P]
    responses = _spread([e.response_ids for e in episodes], real, pad_token_id)  # [B, R]
    attention_mask = torch.cat([prompt_mask, real], dim=1).long()  # [B, P+R]
    scores = np.zeros(responses.shape, np.float32)  # [B, R]
    turn = np.full(responses.shape, -1)  # [B, R]
    for row, e in enumerate(episodes):
        paid = e.turn_rewards or [0.0] * len(e.turns)
        for k, (begin, end, _) in enumerate(e.turns):
            turn[row, begin:end] = k
            scores[row, end - 1] += paid[k]
        scores[row, len(e.response_ids) - 1] += e.reward - sum(paid)

    named = set.intersection(*[set(e.reward_components) for e in episodes])
    components = {name: [e.reward_components[name] for e in episodes] for name in sorted(named)}
    batch = DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),  # [B, P+R]
            "attention_mask": attention_mask,
            "position_ids": attention_mask.cumsum(dim=1).sub_(1).clamp_(min=0),  # [B, P+R]
            "response_mask": _spread([e.response_mask for e in episodes], real, 0),  # [B, R]
            "rollout_log_probs": _spread([e.log_probs for e in episodes], real, 0.0),  # [B, R]
            "token_level_scores": torch.from_numpy(scores),
            "turn": torch.from_numpy(turn),
        },
        non_tensors={"uid": [e.group_id for e in episodes], **components},
        meta_info={"temperature": temperature},
    )
    if all(e.baseline is not None for e in episodes):
        batch.batch["reward_baselines"] = torch.tensor(
            [e.baseline for e in episodes]
        ).float()  # [B]
    batch.meta_info["global_token_num"] = attention_mask.sum(
        dim=1
    ).tolist()  # verl's throughput metrics read it
    return batch


def _spread(rows: Sequence[Sequence[Any]], places: torch.Tensor, fill: int | float) -> torch.Tensor:
    """Numbers of B rows at their `places` [B, T], `fill` elsewhere: int64, or float32 where `fill` is a float."""
    kind = np.float32 if isinstance(fill, float) else np.int64
    numbers = np.fromiter(itertools.chain.from_iterable(rows), kind, int(places.sum()))
    return torch.full(places.shape, fill).masked_scatter_(places, torch.from_numpy(numbers))


class _Answer(NamedTuple):
    """A forward pass of the workers: what they say and what they were asked, both packed, and the rows' order there."""

    output: TensorDict
    data: TensorDict
    order: list[int]  # row of the batch, at each place; repeated rows are >= B

    def padded(self, name: str, rows: int) -> torch.Tensor:
        """[B, R] float32: what was computed just before each response token."""
        back = torch.tensor(self.order).argsort()[:rows]
        return no_padding_2_padding(tu.get(self.output, name), self.data).float()[back]


def _infer(call: Callable[..., Any], batch: DataProto, ranks: int, **flags: Any) -> _Answer:
    """Run a worker's forward pass over `batch`, its rows dealt to the ranks by length."""
    order, _ = arrange(batch.batch["attention_mask"].sum(dim=1).tolist(), 1, ranks)
    rows = [
        i if i < len(batch) else 0 for i in order
    ]  # filling repeats a row, so that every rank gets as many
    data = left_right_2_no_padding(batch[rows].to_tensordict())
    tu.assign_non_tensor(data, compute_loss=False, **flags)
    return _Answer(_wait(call(data)), data, order)


def log_probs(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, torch.Tensor]:
    """At the weights of the sampler, each [B, R]: log_probs of the sampled tokens, entropy, and sum_pi_squared (the
    sum of the squared probabilities of all tokens) where the advantage asks for it."""
    names = [
        "log_probs",
        "entropy",
        *(["sum_pi_squared"] if asks_for(config, "sum_pi_squared") else []),
    ]
    flags = {"calculate_entropy": True, "calculate_sum_pi_squared": "sum_pi_squared" in names}
    answer = _infer(actor.compute_log_prob, batch, data_parallel_size(config), **flags)
    return {name: answer.padded(name, len(batch)) for name in names}


def old_log_probs(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, float]:
    """Add old_log_probs [B, R] to the batch, with what else the advantage asks for. Metrics: the entropy, and how far
    the sampler's probabilities are from the trainer's (verl's calculate_debug_metrics)."""
    return _measured(batch, **log_probs(actor, batch, config))


def _measured(
    batch: DataProto, log_probs: torch.Tensor, entropy: torch.Tensor, **others: Any
) -> dict[str, float]:
    batch.batch.update({"old_log_probs": log_probs, **others})
    unsampled = (
        batch.batch["turn"] < 0
    )  # [B, R]: observed, or a row's own answer, of which the sampler said nothing
    batch.batch["rollout_log_probs"][unsampled] = log_probs[unsampled]
    mask = batch.batch["response_mask"]
    return {
        "actor/entropy": float((entropy * mask).sum() / mask.sum()),
        **calculate_debug_metrics(batch),
    }


def ref_log_probs(workers: Workers, batch: DataProto, config: DictConfig) -> torch.Tensor:
    """The teacher's or the frozen reference's log-probs [B, R]; with LoRA that is the actor without its adapter."""
    call, flags = (workers.ref or workers.actor).compute_ref_log_prob, {}
    if workers.ref is None and config.actor_rollout_ref.model.lora_rank > 0:
        call, flags = workers.actor.compute_log_prob, {"no_lora_adapter": True}
    ranks = data_parallel_size(config, "ref" if workers.ref else "actor")
    answer = _infer(call, batch, ranks, calculate_entropy=False, **flags)
    return answer.padded("log_probs", len(batch))


def values(critic: WorkerGroup, batch: DataProto, config: DictConfig) -> torch.Tensor:
    """The critic's values [B, R]: of the state before each response token, which is what that token's return is of."""
    return _infer(critic.infer_batch, batch, data_parallel_size(config, "critic")).padded(
        "values", len(batch)
    )


def add_reward_model(
    reward_model: WorkerGroup, episodes: Sequence[Any], pad_token_id: int, config: DictConfig
) -> None:
    """Give each episode the component `reward_model`: a learned reward, its head's output at the last token.

    The ids are the policy's own, prompt included, so the reward model must share the policy's tokenizer and template.
    """
    batch = to_batch(episodes, pad_token_id, temperature=1.0)
    output, _, order = _infer(
        reward_model.infer_batch, batch, data_parallel_size(config, "reward_model")
    )
    packed = tu.get(output, "values")  # nested [B, p+r]
    for row, end in zip(order, packed.offsets()[1:], strict=True):
        if row < len(episodes):
            episodes[row].reward_components["reward_model"] = float(packed.values()[end - 1])


def kl_controller(config: DictConfig, value: float) -> Any:
    """verl's controller of the KL coefficient in the reward; an adaptive one goes on from `value`, unless that is 0."""
    controller = get_kl_controller(config.algorithm.kl_ctrl)
    if config.algorithm.kl_ctrl.type == "adaptive":
        controller.value = value or controller.value
    return controller


def apply_kl(batch: DataProto, controller: Any, config: DictConfig) -> dict[str, float]:
    """Take the KL penalty off `token_level_rewards` [B, R] (verl's apply_kl_penalty); its metrics."""
    return dict(apply_kl_penalty(batch, controller, config.algorithm.kl_penalty)[1])


def correct(batch: DataProto, config: DictConfig) -> dict[str, float]:
    """Importance weights and rejection between sampler and trainer, where the recipe asks for them (verl's
    rollout_corr_helper): adds `rollout_is_weights` [B, R], takes tokens out of `response_mask`. Metrics always."""
    return dict(
        compute_rollout_correction_and_add_to_batch(batch, config.algorithm.rollout_correction)[1]
    )


def advantages(batch: DataProto, config: DictConfig) -> None:
    """Add advantages and returns [B, R]: verl's compute_advantage, or a function of one's own with what it asks for."""
    settings = config.algorithm
    if settings.adv_estimator in [estimator.value for estimator in AdvantageEstimator]:
        compute_advantage(
            batch,
            adv_estimator=settings.adv_estimator,
            gamma=settings.gamma,
            lam=settings.lam,
            norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo,
            config=settings,
        )
        return
    function = get_adv_estimator_fn(settings.adv_estimator)
    known = {
        "rollout_is_weights": None,
        **batch.batch,
        "index": batch.non_tensor_batch["uid"],
        "config": settings,
    }
    known |= {"gamma": settings.gamma, "lam": settings.lam}
    batch.batch["advantages"], batch.batch["returns"] = function(
        **user_functions.arguments(function, known)
    )


def step_metrics(
    batch: DataProto, timing: dict[str, float], config: DictConfig
) -> dict[str, float]:
    """verl's metrics of a step that was trained on: rewards, lengths, advantages; times by token; tokens per second."""
    found = compute_data_metrics(
        batch, use_critic="values" in batch.batch
    ) | compute_timing_metrics(batch, timing)
    return found | compute_throughout_metrics(batch, timing, n_gpus=world_size(config))


def arrange(lengths: Sequence[int], mini_batches: int, ranks: int) -> tuple[list[int], int]:
    """The order in which verl's workers must get B rows, and how many rows of filling (index >= B) that takes.

    verl cuts a batch into `ranks` equal runs and each run into `mini_batches` equal ones. Rows are dealt to
    the mini-batches in turn, so none goes without, and within one to ranks by length, so none waits. Filling
    is needed when episodes were dropped: it carries no loss (see update_actor).

    >>> arrange([5, 5, 5], mini_batches=1, ranks=2)
    ([0, 2, 1, 3], 1)
    """
    slots = mini_batches * ranks
    filling = -len(lengths) % slots
    rows = list(lengths) + [1] * filling
    order: list[list[int]] = [[] for _ in range(ranks)]
    for m in range(mini_batches):
        members = list(range(m, len(rows), mini_batches))
        parts = [list(range(len(members)))]
        if ranks > 1:
            parts = get_seqlen_balanced_partitions(
                [rows[i] for i in members], k_partitions=ranks, equal_size=True
            )
        for rank, part in enumerate(parts):
            order[rank] += [members[i] for i in part]
    return [i for rank in order for i in rank], filling


def update_actor(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, float]:
    """ppo_epochs over the batch in mini-batches of actor.ppo_mini_batch_size prompts; returns verl's metrics.

    A batch that lost episodes is cut into as many mini-batches as a whole one, each a little smaller. With `one_pass`
    also does what `old_log_probs` and `correct` do, where that was left to it.
    Raises what the workers raise. Source: verl 0.9.1, RayPPOTrainer._update_actor.
    """
    cfg = config.actor_rollout_ref.actor
    flags = {
        "calculate_entropy": bool(
            cfg.calculate_entropy or cfg.entropy_coeff != 0.0 or one_pass(config)
        ),
        "compute_loss": True,
        "distillation_use_topk": False,
        "distillation_only": False,
    }
    return _update(actor.update_actor, batch, config, cfg, "actor", flags)


def update_critic(critic: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, float]:
    """As update_actor, for the clipped value loss (verl 0.9.1, RayPPOTrainer._update_critic)."""
    return _update(
        critic.train_mini_batch, batch, config, config.critic, "critic", {"compute_loss": True}
    )


def update_sft(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, float]:
    """One optimiser step on the cross entropy of the response tokens (verl's sft_loss), mean over tokens."""
    flags = {"calculate_entropy": False, "compute_loss": True, "distillation_use_topk": False}
    cfg = copy.deepcopy(config.actor_rollout_ref.actor)
    cfg.ppo_mini_batch_size, cfg.ppo_epochs = config.data.train_batch_size, 1
    return _update(actor.update_actor, batch, config, cfg, "actor", flags, nested_mask=True)


def _update(
    call: Callable[..., Any],
    batch: DataProto,
    config: DictConfig,
    cfg: DictConfig,
    name: str,
    flags: dict[str, Any],
    nested_mask: bool = False,
) -> dict[str, float]:
    ranks = data_parallel_size(config, name)
    live = (
        batch.batch["response_mask"].any(dim=1).nonzero()[:, 0]
    )  # [L]; the others still count as episodes below
    most = config.data.train_batch_size // cfg.ppo_mini_batch_size
    mini_batches = max(1, min(most, len(live) // ranks))
    order, _ = arrange(batch.batch["attention_mask"].sum(dim=1)[live].tolist(), mini_batches, ranks)
    places = torch.tensor(order, dtype=torch.long)  # [L + filling]
    filled = places >= len(live)  # by copies of the first row, that count for nothing
    rows = live[places.masked_fill(filled, 0)]  # [L + filling]
    tensors = {
        key: tensor[rows] for key, tensor in batch.batch.items() if key not in DRIVERS
    }  # [L + filling, ...]
    tensors["row"] = rows + 1  # 0 is filling
    for key in tensors.keys() & {"response_mask", "advantages", "row"}:
        tensors[key][filled] = 0
    others = {
        key: batch.non_tensor_batch[key][rows.numpy()]
        for key in IMAGES
        if key in batch.non_tensor_batch
    }
    whole = DataProto.from_dict(tensors, non_tensors=others, meta_info=batch.meta_info)
    data = left_right_2_no_padding(whole.to_tensordict())
    if nested_mask:  # sft_loss wants the mask over prompt and response, packed as the ids are
        mask = torch.cat(
            [torch.zeros_like(tensors["prompts"]), tensors["response_mask"]], dim=1
        )  # [L, P+R]
        real = tensors["attention_mask"].bool()  # [L, P+R]
        data["loss_mask"] = torch.nested.nested_tensor_from_jagged(
            mask[real], offsets=data["input_ids"].offsets()
        )
    tu.assign_non_tensor(
        data,
        mini_batch_size=len(order) // mini_batches,
        global_batch_size=len(batch)
        / mini_batches,  # what sequence-mean losses divide by: no filling
        epochs=cfg.ppo_epochs,
        seed=cfg.data_loader_seed,
        dataloader_kwargs={"shuffle": cfg.shuffle},
        **flags,
    )
    found = tu.get(_wait(call(data)), "metrics")
    passed = found.pop(PASS, [])
    metrics = reduce_metrics(rename_dict(found, f"{name}/"))
    if passed and "old_log_probs" not in batch.batch:
        rows, *values = (torch.cat(parts) for parts in zip(*passed, strict=True))
        pass_of = [
            torch.zeros(len(batch) + 1, value.shape[1]).index_copy(0, rows, value)[1:]
            for value in values
        ]
        metrics |= _measured(batch, *pass_of) | correct(batch, config)
    mfu = metrics.pop(f"{name}/mfu", None)
    if mfu is not None and config.trainer.device != "cpu":  # verl has no peak figure for a CPU
        metrics[f"perf/mfu/{name}"] = mfu
    return {key: float(value) for key, value in metrics.items()}


def _wait(output: Any) -> Any:
    """verl's critic answers with a future, its actor with the result."""
    return output if isinstance(output, TensorDict) else output.get()
