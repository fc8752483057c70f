"""verl's FSDP actor (and frozen reference, and critic): episodes in, one policy update out; checkpoints; export.

    start_workers(config)    groups of worker processes, one per GPU; models are not loaded yet
    to_batch(episodes, pad)  -> DataProto of padded tensors
    log_probs(...)           the trainer's own log-probs of the sampled tokens, and the entropy
    update_actor(...)        PPO epochs over mini-batches of the batch (verl's ppo_loss), metrics back
    save, load, export       verl's checkpoint layout, so verl's tools work on it; a Hugging Face folder

Shapes: B episodes, P longest prompt, R longest response, both in tokens. Prompts are padded on the
left and responses on the right, so a row of `input_ids` [B, P+R] is one unbroken sequence. Padding is
known by `attention_mask` alone, never by its token id, which may be the id of EOS.

Workers take a batch packed, without its padding (verl's `left_right_2_no_padding`), and answer packed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

WorkerGroup = Any  # a RayWorkerGroup, on which verl binds the workers' methods at run time


def start_workers(config: DictConfig) -> tuple[WorkerGroup, WorkerGroup | None]:
    """Start one worker process per GPU for the actor, and one more for the critic if the advantage needs values.

    Returns (actor, critic or None). Call `init_model()` on the actor and `start_critic` to load the models. The
    actor also holds the frozen reference when a KL term needs it (role actor_rollout_ref).
    """
    role = "actor_rollout_ref" if needs_reference(config) else "actor_rollout"
    pool = RayResourcePool([config.trainer.n_gpus_per_node] * config.trainer.nnodes, max_colocate_count=3)
    workers = [RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role=role)]
    if needs_critic(config):
        workers.append(RayClassWithInitArgs(ray.remote(TrainingWorker), config=critic_worker_config(config)))
    groups = [
        RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=worker,
            device_name=config.trainer.device,
            ray_wait_register_center_timeout=config.trainer.ray_wait_register_center_timeout,
        )
        for worker in workers
    ]
    return groups[0], groups[1] if len(groups) > 1 else None


def critic_worker_config(config: DictConfig) -> TrainingWorkerConfig:
    """verl's critic.* as its engine worker takes it (source: verl 0.9.1, RayPPOTrainer.init_workers)."""
    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.forward_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )


def start_critic(critic: WorkerGroup, config: DictConfig) -> None:
    """Load the value model and give it verl's clipped value loss."""
    critic.reset()
    critic.set_loss_fn(functools.partial(value_loss, config=omega_conf_to_dataclass(config.critic)))


def needs_critic(config: DictConfig) -> bool:
    """Whether the advantage is computed from values (GAE)."""
    return bool(config.algorithm.adv_estimator == "gae")


def needs_reference(config: DictConfig) -> bool:
    """Whether any KL term compares the policy with the model it started from."""
    return bool(config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward)


def world_size(config: DictConfig) -> int:
    """All GPUs of the run."""
    return int(config.trainer.n_gpus_per_node * config.trainer.nnodes)


def data_parallel_size(config: DictConfig) -> int:
    """Ranks that each see their own part of a batch: GPUs over Ulysses sequence-parallel size."""
    return int(world_size(config) // config.actor_rollout_ref.actor.ulysses_sequence_parallel_size)


# --- batches -------------------------------------------------------------------------------------


def to_batch(episodes: Sequence[Any], pad_token_id: int, temperature: float) -> DataProto:
    """Kept episodes -> verl's batch. The reward sits on each response's last token.

    episodes: records with prompt_ids [p], response_ids [r], response_mask [r] (1 = sampled by the policy,
    0 = observed), log_probs [r] (the sampler's), reward, reward_components and group_id, as inference.Episode
    has them. temperature: that of sampling; the trainer divides its logits by it too. Components that every
    episode has become arrays of the batch, where verl's multi-reward advantage (gdpo) looks for them.
    """
    P = max(len(e.prompt_ids) for e in episodes)
    R = max(len(e.response_ids) for e in episodes)

    def left(rows: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[fill] * (P - len(row)) + row for row in rows])

    def right(rows: list[list[Any]], fill: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor([row + [fill] * (R - len(row)) for row in rows], dtype=dtype)

    prompts = left([e.prompt_ids for e in episodes], pad_token_id)  # [B, P]
    responses = right([e.response_ids for e in episodes], pad_token_id)  # [B, R]
    prompt_mask = left([[1] * len(e.prompt_ids) for e in episodes], 0)  # [B, P]
    real = right([[1] * len(e.response_ids) for e in episodes], 0)  # [B, R], observed tokens included
    attention_mask = torch.cat([prompt_mask, real], dim=1)  # [B, P+R]
    scores = torch.zeros(responses.shape, dtype=torch.float32)  # [B, R]
    scores[torch.arange(len(episodes)), real.sum(dim=1) - 1] = torch.tensor([e.reward for e in episodes]).float()

    named = set.intersection(*[set(e.reward_components) for e in episodes])
    components = {name: [e.reward_components[name] for e in episodes] for name in sorted(named)}
    batch = DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),  # [B, P+R]
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),  # [B, P+R]
            "response_mask": right([e.response_mask for e in episodes], 0),  # [B, R]
            "rollout_log_probs": right([e.log_probs for e in episodes], 0.0, torch.float32),  # [B, R]
            "token_level_scores": scores,
        },
        non_tensors={"uid": [e.group_id for e in episodes], **components},
        meta_info={"temperature": temperature},
    )
    batch.meta_info["global_token_num"] = attention_mask.sum(dim=1).tolist()  # verl's throughput metrics read it
    return batch


def _infer(call: Callable[..., Any], batch: DataProto, ranks: int, **flags: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Run a worker's forward pass over `batch`: ({name: [B, R] float32}, the worker's metrics)."""
    padded, _ = pad_dataproto_to_divisor(batch, ranks)  # repeats rows, so that every rank gets as many
    data = left_right_2_no_padding(padded.to_tensordict())
    tu.assign_non_tensor(data, compute_loss=False, **flags)
    output = _wait(call(data))
    named = {name: tu.get(output, name) for name in ("log_probs", "entropy", "values")}
    rows = {k: no_padding_2_padding(v, data).float()[: len(batch)] for k, v in named.items() if v is not None}
    return rows, tu.get(output, "metrics")


def log_probs(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The actor's log-probs [B, R] of the sampled tokens, and its entropy [B, R], at the weights of the sampler."""
    rows, _ = _infer(actor.compute_log_prob, batch, data_parallel_size(config), calculate_entropy=True)
    return rows["log_probs"], rows["entropy"]


def ref_log_probs(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> torch.Tensor:
    """The frozen reference's log-probs [B, R] of the sampled tokens; with LoRA, the actor without its adapter."""
    if config.actor_rollout_ref.model.lora_rank > 0:
        call, flags = actor.compute_log_prob, {"no_lora_adapter": True}
    else:
        call, flags = actor.compute_ref_log_prob, {}
    rows, _ = _infer(call, batch, data_parallel_size(config), calculate_entropy=False, **flags)
    return rows["log_probs"]


def values(critic: WorkerGroup, batch: DataProto, config: DictConfig) -> torch.Tensor:
    """The critic's values [B, R]: of the state before each response token, which is what that token's return is of."""
    rows, _ = _infer(critic.infer_batch, batch, data_parallel_size(config))
    return rows["values"]


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
            parts = get_seqlen_balanced_partitions([rows[i] for i in members], k_partitions=ranks, equal_size=True)
        for rank, part in enumerate(parts):
            order[rank] += [members[i] for i in part]
    return [i for rank in order for i in rank], filling


def update_actor(actor: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, float]:
    """ppo_epochs over the batch in mini-batches of actor.ppo_mini_batch_size prompts; returns verl's metrics.

    A batch that lost episodes is cut into as many mini-batches as a whole one, each a little smaller.
    Raises what the workers raise. Source: verl 0.9.1, RayPPOTrainer._update_actor.
    """
    cfg = config.actor_rollout_ref.actor
    flags = {
        "calculate_entropy": bool(cfg.calculate_entropy or cfg.entropy_coeff != 0.0),
        "compute_loss": True,
        "distillation_use_topk": False,
        "distillation_only": False,
    }
    return _update(actor.update_actor, batch, config, cfg, "actor", flags)


def update_critic(critic: WorkerGroup, batch: DataProto, config: DictConfig) -> dict[str, float]:
    """As update_actor, for the clipped value loss (verl 0.9.1, RayPPOTrainer._update_critic)."""
    return _update(critic.train_mini_batch, batch, config, config.critic, "critic", {"compute_loss": True})


def _update(
    call: Callable[..., Any], batch: DataProto, config: DictConfig, cfg: DictConfig, name: str, flags: dict[str, Any]
) -> dict[str, float]:
    ranks = data_parallel_size(config)
    whole = config.data.train_batch_size // cfg.ppo_mini_batch_size
    mini_batches = max(1, min(whole, len(batch) // ranks))
    order, filling = arrange(batch.batch["attention_mask"].sum(dim=1).tolist(), mini_batches, ranks)

    tensors = {}
    for key, tensor in batch.batch.items():
        fill = tensor[:1].expand(filling, *tensor.shape[1:])  # [filling, ...] copies of row 0 ...
        if key in ("response_mask", "advantages"):
            fill = torch.zeros_like(fill)  # ... that count for nothing
        tensors[key] = torch.cat([tensor, fill])[torch.tensor(order)]  # [B + filling, ...]
    data = left_right_2_no_padding(DataProto.from_dict(tensors, meta_info=batch.meta_info).to_tensordict())
    tu.assign_non_tensor(
        data,
        mini_batch_size=len(order) // mini_batches,
        global_batch_size=len(batch) / mini_batches,  # what sequence-mean losses divide by: real rows only
        epochs=cfg.ppo_epochs,
        seed=cfg.data_loader_seed,
        dataloader_kwargs={"shuffle": cfg.shuffle},
        **flags,
    )
    metrics = reduce_metrics(rename_dict(tu.get(_wait(call(data)), "metrics"), f"{name}/"))
    mfu = metrics.pop(f"{name}/mfu", None)
    if mfu is not None and config.trainer.device != "cpu":  # verl has no peak figure for a CPU
        metrics[f"perf/mfu/{name}"] = mfu
    return {key.replace("critic/critic/", "critic/"): float(value) for key, value in metrics.items()}


def _wait(output: Any) -> Any:
    """verl's critic answers with a future, its actor with the result."""
    return output if isinstance(output, TensorDict) else output.get()


# --- checkpoints ---------------------------------------------------------------------------------


def save(actor: WorkerGroup, critic: WorkerGroup | None, folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write <folder>/global_step_<step>/{actor,critic,data.pt} and point latest_checkpointed_iteration.txt at it.

    Written under another name and renamed, so a folder called global_step_N is whole. state: what the
    driver needs to go on, plain values only.
    """
    target, partial = folder / f"global_step_{step}", folder / f"saving_{step}"
    for name, group in {"actor": actor, "critic": critic}.items():
        if group is not None:
            group.save_checkpoint(str((partial / name).absolute()), None, step, None)
    torch.save(state, partial / "data.pt")
    os.replace(partial, target)
    pointer = folder / "latest_checkpointed_iteration.txt"
    pointer.with_suffix(".tmp").write_text(str(step))
    os.replace(pointer.with_suffix(".tmp"), pointer)
    return target


def load(actor: WorkerGroup, critic: WorkerGroup | None, checkpoint: Path) -> dict[str, Any]:
    """Restore model, optimiser, scheduler and RNG of every worker; returns the driver's `state`."""
    for name, group in {"actor": actor, "critic": critic}.items():
        if group is not None:
            group.load_checkpoint(str((checkpoint / name).absolute()))
    state: dict[str, Any] = torch.load(checkpoint / "data.pt", weights_only=True)
    return state


def export(checkpoint: Path, target: Path) -> Path:
    """Merge a checkpoint's shards into a Hugging Face folder, tokenizer included (verl.model_merger)."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    actor = str(checkpoint / "actor")
    merger = FSDPModelMerger(
        ModelMergerConfig(
            operation="merge",
            backend="fsdp",
            local_dir=actor,
            target_dir=str(target),
            hf_model_config_path=str(checkpoint / "actor" / "huggingface"),
        )
    )
    merger.merge_and_save()
    return target
