"""Batches, log-probs, advantages and updates, with verl's FSDP workers (actor, reference, critic).

In the order of a step of algorithm.py:

    to_batch                         episodes -> DataProto of padded tensors
    add_old_log_probs, compute_ref_log_probs, compute_values
                                     forward passes of the trainer's models over the batch
    apply_kl_penalty, apply_rollout_correction, compute_advantages
                                     from rewards to advantages: verl's functions, or custom ones
    update_critic, update_actor      PPO epochs over mini-batches of the batch, with verl's losses

To change the advantage, edit the first section, or name a custom function in the recipe. If it
reads another tensor, add that in the second section, "batches". To change the loss, name a custom
function in the recipe: the loss runs in the workers. templates/ has examples. The other sections
move tensors to the workers and back. kit/run/workers.py starts them.

Shapes: B rows, P tokens in the longest prompt, R in the longest response. An episode is one row, or
several if an agent has branches (kit/data/training_rows.py). Prompts are padded on the left and
responses on the right, so a row of `input_ids` [B, P+R] is one unbroken sequence. Only
`attention_mask` marks the padding. Token ids do not mark it: the pad id may equal the EOS id. The
workers get S rows, a multiple of the number of their ranks. The workers take and return packed
tensors, which have no padding (verl's `left_right_2_no_padding`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup
from verl import DataProto
from verl.trainer.ppo import core_algos, metric_utils, ray_trainer
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from kit.data import batch_keys as keys
from kit.data import token_rewards, training_rows
from kit.data.episode import Episode, TrainingRow, list_rows
from kit.engine.inputs import RunInputs
from kit.engine.worker_group import WorkerGroup, WorkerOutput
from kit.errors import RunError, SkippedStep
from kit.recipe.keys import ACTOR
from kit.recipe.recipe import Recipe
from kit.recipe.schedule import POSITION
from kit.recipe.schema import ActorSection, TrainedModel
from kit.recipe.user_functions import (
    AdvantageInputs,
    LossInputs,
    is_user_function,
    make_loss_config,
    select_arguments,
)

REWARD_MODEL = "reward_model"  # the reward component of a reward model
KLController = core_algos.AdaptiveKLController  # or the fixed one, which has no common base
LossResult = tuple[Tensor, dict[str, Any]]  # the loss of a micro-batch [], and its metrics
Loss = Callable[..., LossResult]  # (config, model_output, data, dp_group)


class Workers(NamedTuple):
    """Groups of worker processes by role; None for a role that the recipe does not need."""

    actor: WorkerGroup  # may also hold the reference; sends the weights to the rollout engine
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    ref: WorkerGroup | None = None  # only if the reference is a teacher or has separate GPUs


# --- EDIT HERE: from rewards to advantages -------------------------------------------------------
#
# These functions run in the driver, on the whole batch, with tensors [B, R] on the CPU. The batch
# has all that `build_batch` adds, and `token_level_rewards`, which algorithm.py sets to
# `token_level_scores`. If the recipe needs them, it also has `old_log_probs`, `ref_log_prob` and
# `values`. The update reads `advantages` (actor) and `returns` (critic). kit/data/batch_keys.py has
# all names, with their shapes.


def make_kl_controller(recipe: Recipe, kl_coef: float) -> KLController:
    """Make verl's KL controller. kl_coef: the checkpoint's coefficient, or 0 in a new run."""
    controller = core_algos.get_kl_controller(recipe.for_verl("algorithm.kl_ctrl"))
    if recipe.algorithm.kl_ctrl.type == "adaptive" and kl_coef:
        controller.value = kl_coef
    return controller


def apply_kl_penalty(
    batch: DataProto, controller: KLController, recipe: Recipe
) -> dict[str, float]:
    """Set `token_level_rewards` [B, R] to the scores minus verl's KL penalty. Return metrics."""
    _, metrics = ray_trainer.apply_kl_penalty(batch, controller, recipe.algorithm.kl_penalty)
    return dict(metrics)


def apply_rollout_correction(batch: DataProto, recipe: Recipe) -> dict[str, float]:
    """Correct for differences between rollout engine and trainer, and return their metrics.

    With algorithm.rollout_correction, this adds importance weights `rollout_is_weights` [B, R] and
    removes rejected tokens from `response_mask`. Source: verl's rollout_corr_helper.
    """
    settings = recipe.for_verl("algorithm.rollout_correction")
    _, metrics = compute_rollout_correction_and_add_to_batch(batch, settings)  # type: ignore[arg-type]
    return dict(metrics)


def compute_advantages(batch: DataProto, recipe: Recipe) -> None:
    """Add `advantages` and `returns` [B, R], with verl's compute_advantage or a custom function.

    The estimator gets the batch's `token_level_rewards`, with those of masked tokens on trained
    ones, and without the rounding errors of equal rewards (kit/data/token_rewards.py). A custom
    function gets those AdvantageInputs that it names (kit/recipe/user_functions.py). Raises
    SkippedStep if the estimator cannot work because only one token is trained: it whitens.

    An episode of several rows is one line for the estimator.
    """
    name = recipe.algorithm.adv_estimator
    is_verl = name in [estimator.value for estimator in core_algos.AdvantageEstimator]
    call_estimator = call_verl_estimator if is_verl else call_custom_estimator
    is_trained = batch.batch[keys.RESPONSE_MASK].bool()  # [B, R]
    reason = f"{name} normalizes over the trained tokens, and the batch has only one"
    lines = training_rows.find_lines(batch) if training_rows.has_branches(batch) else None
    episodes = training_rows.join_batch(batch, lines) if lines else batch
    try:
        advantages, returns = call_estimator(episodes, recipe)
    except ValueError as error:  # of verl's whitening, or a UserFunctionError
        if is_trained.sum() > 1:
            raise
        raise SkippedStep(f"{reason}: {error}") from error
    if lines:
        advantages = lines.split(advantages)
        returns = lines.split(returns)
    if is_trained.sum() == 1 and not advantages[is_trained].isfinite():
        raise SkippedStep(reason)
    batch.batch[keys.ADVANTAGES] = advantages
    batch.batch[keys.RETURNS] = returns


def call_verl_estimator(batch: DataProto, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns), each [B, R], with one of verl's estimators."""
    settings = recipe.for_verl("algorithm")  # verl's estimators read it as a mapping
    groups = batch.non_tensor_batch[keys.GROUPS]  # [B]
    tensors = batch.batch.clone(recurse=False)
    rewards = tensors[keys.REWARDS]  # [B, R]
    rewards = token_rewards.carry_rewards(rewards, tensors[keys.RESPONSE_MASK])
    tensors[keys.REWARDS] = token_rewards.level_equal_rewards(
        rewards, groups, settings.adv_estimator, settings.gamma
    )
    arrays = {keys.GROUPS: groups}
    if settings.adv_estimator == "gdpo":
        # with a prefix, since a component may have any name
        components = {f"component {k}": read_component(batch, k) for k in settings.gdpo_reward_keys}
        arrays |= components
        settings.gdpo_reward_keys = list(components)
    data = DataProto(tensors, arrays)
    ray_trainer.compute_advantage(
        data,
        adv_estimator=settings.adv_estimator,
        gamma=settings.gamma,
        lam=settings.lam,
        norm_adv_by_std_in_grpo=settings.norm_adv_by_std_in_grpo,
        config=settings,  # type: ignore[arg-type]
    )
    return data.batch[keys.ADVANTAGES], data.batch[keys.RETURNS]


def read_component(batch: DataProto, name: str) -> np.ndarray:
    """Return a reward component of each episode [B], 0 in groups where all have the same.

    The advantage of such a group would only have rounding errors. Raises RunError.
    """
    components = batch.non_tensor_batch[keys.COMPONENTS]  # [B] of dicts
    for values in components:
        if name not in values:
            names = ", ".join(sorted(values)) or "none"
            raise RunError(
                f"algorithm.gdpo_reward_keys has {name}, but an episode has only these reward "
                f"components: {names}. Let the verifier or env.reward return {name} each time."
            )
    rewards = torch.tensor([float(values[name]) for values in components])[:, None]  # [B, 1]
    groups = batch.non_tensor_batch[keys.GROUPS]
    return np.asarray(token_rewards.level_groups(rewards, groups, 0.0)[:, 0])


def call_custom_estimator(batch: DataProto, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns), each [B, R], with a custom function.

    If it reads `turn`, rewards stay in their turn. Else they move like those for verl's estimators.
    """
    settings = recipe.algorithm
    estimator = core_algos.get_adv_estimator_fn(settings.adv_estimator)
    tensors = dict(batch.batch.items())
    has_turns = "turn" in inspect.signature(estimator).parameters
    rewards = token_rewards.carry_rewards(
        tensors[keys.REWARDS],
        tensors[keys.RESPONSE_MASK],
        tensors[keys.TURN] if has_turns else None,
    )
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        token_level_scores=tensors[keys.SCORES],
        response_mask=tensors[keys.RESPONSE_MASK],
        turn=tensors[keys.TURN],
        index=batch.non_tensor_batch[keys.GROUPS],
        values=tensors.get(keys.VALUES),
        old_log_probs=tensors.get(keys.OLD_LOG_PROBS),
        ref_log_prob=tensors.get(keys.REF_LOG_PROBS),
        rollout_log_probs=tensors[keys.ROLLOUT_LOG_PROBS],
        rollout_is_weights=tensors.get(keys.WEIGHTS),
        sum_pi_squared=tensors.get(keys.SQUARES),
        reward_baselines=tensors.get(keys.BASELINES),
        gamma=settings.gamma,
        lam=settings.lam,
        config=recipe.for_verl("algorithm"),
    )
    advantages, returns = estimator(**select_arguments(estimator, vars(inputs)))
    return advantages, returns


def has_advantages(batch: DataProto) -> bool:
    """Return whether a trained token has an advantage other than 0.

    Without one, the policy loss usually has no gradient (`loss_has_other_terms`). AdamW would still
    move the weights, by its momentum and its weight decay.
    """
    return bool((batch.batch[keys.ADVANTAGES] * batch.batch[keys.RESPONSE_MASK]).any())


def loss_has_other_terms(recipe: Recipe) -> bool:
    """Return whether the actor's loss has a gradient where all advantages are 0.

    A KL or entropy term has one. A policy loss is tried on two responses whose log-probs are those
    of the old policy, as at the first optimizer step of a batch. In bypass mode the old policy is
    the rollout engine, which differs.
    """
    actor = recipe.actor
    has_kl_term = actor.use_kl_loss and actor.kl_loss_coef != 0.0
    if has_kl_term or actor.entropy_coeff != 0.0:
        return True
    mask = torch.ones(2, 3, dtype=torch.bool)  # [B, R]
    config = make_loss_config(recipe.for_verl(ACTOR), mask)
    old_log_prob = torch.full((2, 3), -1.0)  # [B, R]
    difference = 0.1 if recipe.algorithm.rollout_correction.bypass_mode else 0.0
    inputs = LossInputs(
        old_log_prob=old_log_prob,
        log_prob=(old_log_prob + difference).requires_grad_(),  # [B, R]
        advantages=torch.zeros(2, 3),
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )
    loss_function = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    loss, _ = loss_function(**vars(inputs))
    if not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, inputs.log_prob, allow_unused=True)
    return gradient is not None and bool(gradient.any())


def compute_step_metrics(
    batch: DataProto, timing: dict[str, float], recipe: Recipe
) -> dict[str, float]:
    """Compute verl's metrics of a trained step: rewards, lengths, advantages, times, throughput.

    Those of lengths and advantages are over rows, those of rewards over episodes.
    """
    use_critic = keys.VALUES in batch.batch
    data_metrics = metric_utils.compute_data_metrics(batch, use_critic)
    if training_rows.has_branches(batch):
        main_rows = training_rows.select_main_rows(batch)
        for name, value in metric_utils.compute_data_metrics(main_rows, use_critic).items():
            if name.startswith(("critic/score/", "critic/rewards/")):
                data_metrics[name] = value
    timing_metrics = metric_utils.compute_timing_metrics(batch, timing)
    throughput = metric_utils.compute_throughout_metrics(batch, timing, n_gpus=recipe.all_gpus)
    return data_metrics | timing_metrics | throughput


# --- batches: add here the tensors that a custom advantage reads ---------------------------------


def to_batch(episodes: Sequence[Episode], inputs: RunInputs, recipe: Recipe) -> DataProto:
    """Make verl's batch from episodes, with the model inputs of their images.

    The trainer divides its logits by the temperature of sampling, as the rollout engine does.
    Raises the RunError of check_branches.
    """
    check_branches(episodes, recipe)
    temperature = recipe.rollout.temperature
    batch = build_batch(episodes, inputs.tokenizer.pad_token_id, temperature)
    images = [episodes[number].images for number in batch.non_tensor_batch[keys.EPISODES]]
    inputs.processor.add_images(batch, images)
    return batch


def check_branches(episodes: Sequence[Episode], recipe: Recipe) -> None:
    """Raise RunError if an episode has several rows and the recipe needs one."""
    reason = ""
    if any(episode.branches for episode in episodes):
        reason = training_rows.find_reason_against(recipe)
    if reason:
        raise RunError(reason)


def build_batch(episodes: Sequence[Episode], pad_token_id: int, temperature: float) -> DataProto:
    """Make verl's batch from the token ids, masks, log-probs and rewards of episodes with B rows.

    The names of reward components come from verifiers. So the batch has all components in one array
    of dicts, where no name can replace a tensor.
    """
    rows = list_rows(episodes)
    numbers = np.arange(len(episodes)).repeat([len(e.rows) for e in episodes]).tolist()  # [B]
    prompt_lengths = torch.tensor([len(row.prompt_ids) for row in rows])  # [B]
    response_lengths = torch.tensor([len(row.response_ids) for row in rows])  # [B]
    in_prompt = torch.arange(int(prompt_lengths.max())).flip(0) < prompt_lengths[:, None]  # [B, P]
    in_response = torch.arange(int(response_lengths.max())) < response_lengths[:, None]  # [B, R]
    prompts = pad_rows([row.prompt_ids for row in rows], in_prompt, pad_token_id)  # [B, P]
    responses = pad_rows([row.response_ids for row in rows], in_response, pad_token_id)  # [B, R]
    response_mask = pad_rows([row.response_mask for row in rows], in_response, 0)  # [B, R]
    log_probs = pad_rows([row.log_probs for row in rows], in_response, 0.0)  # [B, R]
    attention_mask = torch.cat([in_prompt, in_response], dim=1).long()  # [B, P+R]
    tensors = {
        keys.PROMPTS: prompts,
        keys.RESPONSES: responses,
        keys.INPUT_IDS: torch.cat([prompts, responses], dim=1),  # [B, P+R]
        keys.ATTENTION_MASK: attention_mask,
        keys.POSITION_IDS: attention_mask.cumsum(dim=1).sub_(1).clamp_(min=0),  # [B, P+R]
        keys.RESPONSE_MASK: response_mask,
        keys.ROLLOUT_LOG_PROBS: log_probs,
        keys.SCORES: place_rewards(episodes, responses.shape[1]),  # [B, R]
        keys.TURN: number_turns(rows, responses.shape[1]),  # [B, R]
    }
    if all(e.baseline is not None for e in episodes):
        tensors[keys.BASELINES] = torch.tensor([episodes[k].baseline for k in numbers]).float()
    arrays = {
        keys.GROUPS: [episodes[k].group_id for k in numbers],
        keys.COMPONENTS: [episodes[k].reward_components for k in numbers],
        keys.EPISODES: numbers,
    }
    token_counts = attention_mask.sum(dim=1).tolist()  # [B]
    meta_info = {keys.TEMPERATURE: temperature, keys.TOKEN_COUNTS: token_counts}
    return DataProto.from_dict(tensors, non_tensors=arrays, meta_info=meta_info)


def place_rewards(episodes: Sequence[Episode], width: int) -> torch.Tensor:
    """Write the reward to the last token of each main row, and return float32 [B, R]. width: R.

    If the environment gave turn rewards, the last token of each turn gets the reward of that turn.
    The last token of the response also gets the shaped reward minus their sum.
    """
    scores = np.zeros((len(list_rows(episodes)), width), np.float32)  # [B, R]
    row = -1
    for episode in episodes:
        row += len(episode.rows)  # the main row is the last one
        turn_rewards = episode.turn_rewards or [0.0] * len(episode.turns)
        for k, span in enumerate(episode.turns):
            scores[row, span.end - 1] += turn_rewards[k]
        reward = episode.trained_reward
        assert reward is not None, f"{episode.row_id} was not verified"
        scores[row, len(episode.response_ids) - 1] += reward - sum(turn_rewards)
    return torch.from_numpy(scores)


def number_turns(rows: Sequence[TrainingRow], width: int) -> torch.Tensor:
    """Number the turns of the policy from 0, and return int64 [B, R], -1 elsewhere. width: R.

    A turn keeps its number if a filter masks it in `response_mask`.
    """
    turn = np.full((len(rows), width), -1)  # [B, R]
    for number, row in enumerate(rows):
        for k, span in enumerate(row.turns):
            turn[number, span.start : span.end] = k
    return torch.from_numpy(turn)


def pad_rows(
    rows: Sequence[Sequence[float]], is_filled: torch.Tensor, padding: float
) -> torch.Tensor:
    """Write B rows of numbers where `is_filled` [B, T] is true, and `padding` elsewhere.

    The result [B, T] is float32 if `padding` is a float, else int64.
    """
    dtype = np.float32 if isinstance(padding, float) else np.int64
    numbers = np.fromiter(itertools.chain.from_iterable(rows), dtype, int(is_filled.sum()))
    padded = torch.full(is_filled.shape, padding)  # [B, T]
    return padded.masked_scatter_(is_filled, torch.from_numpy(numbers))


# --- TRY NOT TO MODIFY: rows in the order of the workers -----------------------------------------


class WorkerRows(NamedTuple):
    """The rows of a batch that the workers get, in their order."""

    rows: torch.Tensor  # [S] index into the batch
    is_padding: torch.Tensor  # [S] whether the row is a copy, added to give all ranks as many rows


def pad_to_ranks(batch: DataProto, live: torch.Tensor, mini_batches: int, ranks: int) -> WorkerRows:
    """Order the rows `live` [L] of a batch for the workers. Padding repeats its first row."""
    lengths = batch.batch[keys.ATTENTION_MASK].sum(dim=1)[live].tolist()
    order = torch.tensor(balance_rows(lengths, mini_batches, ranks), dtype=torch.long)  # [S]
    is_padding = order >= len(live)  # [S]
    source = torch.where(is_padding, 0, order)  # [S]
    return WorkerRows(live[source], is_padding)


def balance_rows(lengths: Sequence[int], mini_batches: int, ranks: int) -> list[int]:
    """Order L rows, given their lengths, as verl's workers must get them; indices >= L are padding.

    verl cuts a batch into `ranks` equal blocks of rows, and each block into `mini_batches` parts.
    Rows are dealt to the mini-batches one by one, so that none is empty. Within a mini-batch, the
    ranks get rows with similar total lengths, so that no rank waits for another. If L is not a
    multiple of `mini_batches * ranks`, for example after episodes were dropped, padding is added.

    >>> balance_rows([5, 4, 1], mini_batches=1, ranks=2)  # rank 0: 5 + 1 tokens; 1: 4 + padding
    [0, 2, 1, 3]
    """
    padding = -len(lengths) % (mini_batches * ranks)
    padded = list(lengths) + [1] * padding
    rows_of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(mini_batches):
        members = list(range(first, len(padded), mini_batches))
        parts = [list(range(len(members)))]
        if ranks > 1:
            member_lengths = [padded[i] for i in members]
            parts = get_seqlen_balanced_partitions(member_lengths, ranks, equal_size=True)
        for rank, part in enumerate(parts):
            rows_of_ranks[rank] += [members[i] for i in part]
    return list(itertools.chain.from_iterable(rows_of_ranks))


def wait_for_output(output: WorkerOutput) -> TensorDict:
    """Return the result of a worker call: verl's critic returns a future, its actor the result."""
    return output if isinstance(output, TensorDict) else output.get()


# --- TRY NOT TO MODIFY: forward passes -----------------------------------------------------------


class PackedOutput(NamedTuple):
    """The output of a forward pass, packed, with the rows that the workers got."""

    output: TensorDict
    data: TensorDict
    worker_rows: WorkerRows

    def to_padded(self, name: str) -> torch.Tensor:
        """Return one output as float32 [B, R], in the batch's order.

        The output of position t - 1 predicts token t. So each response token gets the output of
        the position before it.
        """
        values = no_padding_2_padding(tu.get(self.output, name), self.data).float()  # [S, R]
        is_row = ~self.worker_rows.is_padding  # [S]
        order = self.worker_rows.rows[is_row].argsort()  # [B]
        return values[is_row][order]


def run_forward(
    call: Callable[[TensorDict], WorkerOutput], batch: DataProto, ranks: int, **flags: object
) -> PackedOutput:
    """Call a forward pass of the workers on all rows of a batch. flags: for verl's engine."""
    worker_rows = pad_to_ranks(batch, torch.arange(len(batch)), 1, ranks)
    data = left_right_2_no_padding(select_worker_data(batch)[worker_rows.rows].to_tensordict())
    tu.assign_non_tensor(data, compute_loss=False, **flags)
    return PackedOutput(wait_for_output(call(data)), data, worker_rows)


def compute_log_probs(
    actor: WorkerGroup, batch: DataProto, recipe: Recipe
) -> dict[str, torch.Tensor]:
    """Compute, at the actor's weights, `log_probs` of the response tokens and `entropy`, [B, R].

    If the advantage needs it, also `sum_pi_squared`: the sum of p^2 over the vocabulary.
    """
    names = ["log_probs", "entropy"]
    if keys.SQUARES in recipe.arguments:
        names.append(keys.SQUARES)
    flags = {"calculate_entropy": True, "calculate_sum_pi_squared": keys.SQUARES in names}
    result = run_forward(actor.compute_log_prob, batch, recipe.data_parallel_size(), **flags)
    return {name: result.to_padded(name) for name in names}


def add_old_log_probs(actor: WorkerGroup, batch: DataProto, recipe: Recipe) -> dict[str, float]:
    """Add `old_log_probs` [B, R] to the batch. Return the metrics of set_old_log_probs."""
    return set_old_log_probs(batch, **compute_log_probs(actor, batch, recipe))


def set_old_log_probs(
    batch: DataProto, log_probs: torch.Tensor, entropy: torch.Tensor, **others: torch.Tensor
) -> dict[str, float]:
    """Add the results of compute_log_probs to the batch, except the entropy. Return metrics.

    These are the mean entropy, and how far the probabilities of the rollout engine are from the
    trainer's (verl's calculate_debug_metrics).
    """
    batch.batch.update({keys.OLD_LOG_PROBS: log_probs, **others})
    # The rollout engine has no log-probs of observed tokens, or of a response that a filter wrote.
    is_unsampled = batch.batch[keys.TURN] < 0  # [B, R]
    batch.batch[keys.ROLLOUT_LOG_PROBS][is_unsampled] = log_probs[is_unsampled]
    mask = batch.batch[keys.RESPONSE_MASK]
    mean_entropy = float((entropy * mask).sum() / mask.sum())
    return {"actor/entropy": mean_entropy, **calculate_debug_metrics(batch)}


def compute_ref_log_probs(workers: Workers, batch: DataProto, recipe: Recipe) -> torch.Tensor:
    """Compute log-probs [B, R] of the response tokens by the teacher or the frozen reference.

    With LoRA the reference is the actor without its adapter, or with the one that it started from.
    """
    flags = {"calculate_entropy": False}
    if workers.ref:
        call = workers.ref.compute_ref_log_prob
    elif recipe.model.lora_rank > 0:
        call = workers.actor.compute_log_prob
        flags["no_lora_adapter"] = True
    else:
        call = workers.actor.compute_ref_log_prob
    ranks = recipe.data_parallel_size("ref" if workers.ref else "actor")
    return run_forward(call, batch, ranks, **flags).to_padded("log_probs")


def compute_values(critic: WorkerGroup, batch: DataProto, recipe: Recipe) -> torch.Tensor:
    """Compute the critic's values [B, R], each of the state before a response token."""
    ranks = recipe.data_parallel_size("critic")
    return run_forward(critic.infer_batch, batch, ranks).to_padded("values")


def add_reward_model_scores(
    reward_model: WorkerGroup, episodes: Sequence[Episode], inputs: RunInputs, recipe: Recipe
) -> None:
    """Give each episode the reward component `reward_model`: the head's output at the last token.

    The model reads the policy's token ids, so it needs the policy's tokenizer and chat template.
    Raises RunError if the verifier has a component of this name, or an episode several rows.
    """
    check_branches(episodes, recipe)
    for episode in episodes:
        if REWARD_MODEL in episode.reward_components:
            raise RunError(
                f"{episode.server} returned a reward component {REWARD_MODEL}, which is the name "
                "of the reward model's. Rename it in the verifier."
            )
    batch = build_batch(episodes, inputs.tokenizer.pad_token_id, temperature=1.0)
    ranks = recipe.data_parallel_size("reward_model")
    result = run_forward(reward_model.infer_batch, batch, ranks)
    values = tu.get(result.output, "values")  # nested [S, t]
    scores = values.values()[values.offsets()[1:] - 1]  # [S]
    is_row = ~result.worker_rows.is_padding  # [S]
    rows = result.worker_rows.rows[is_row].tolist()
    for row, score in zip(rows, scores[is_row].tolist(), strict=True):
        episodes[row].reward_components[REWARD_MODEL] = score


# --- TRY NOT TO MODIFY: updates ------------------------------------------------------------------

DRIVER_ONLY_KEYS = (keys.SCORES, keys.REWARDS)  # not sent to the workers
# metrics of an update that are not named by its role
OTHER_METRICS = ("training/", "rollout_corr/")


def set_schedule_position(batch: DataProto, position: int) -> None:
    """Set the learning rate of the next update, by the number of training steps before it."""
    batch.meta_info[POSITION] = position


def update_actor(actor: WorkerGroup, batch: DataProto, recipe: Recipe) -> dict[str, float]:
    """Train the actor for ppo_epochs over mini-batches of the batch, and return verl's metrics.

    A mini-batch has actor.ppo_mini_batch_size prompts, fewer if episodes were dropped. Raises the
    exceptions of the workers. Source: verl 0.9.1, RayPPOTrainer._update_actor.
    """
    settings = recipe.actor
    data = make_update_data(
        batch,
        recipe.data_parallel_size(),
        recipe.mini_batches(),
        settings,
        calculate_entropy=bool(is_entropy_in_loss(settings) or recipe.is_on_policy),
        compute_loss=True,
        distillation_use_topk=False,
        distillation_only=False,
    )
    return collect_metrics(wait_for_output(actor.update_actor(data)), recipe, "actor")


def update_critic(critic: WorkerGroup, batch: DataProto, recipe: Recipe) -> dict[str, float]:
    """Train the critic with the clipped value loss, and return metrics.

    Source: verl 0.9.1, RayPPOTrainer._update_critic.
    """
    settings = recipe.critic
    mini_batches = recipe.mini_batches("critic")
    ranks = recipe.data_parallel_size("critic")
    data = make_update_data(batch, ranks, mini_batches, settings, compute_loss=True)
    return collect_metrics(wait_for_output(critic.train_mini_batch(data)), recipe, "critic")


def make_update_data(
    batch: DataProto, ranks: int, mini_batches: int, settings: TrainedModel, **flags: object
) -> TensorDict:
    """Pack the L rows that have a token to train on, with the settings of the update for verl.

    mini_batches: fewer if there is not a row for each rank in each. settings: verl's section of
    the role. flags: for verl's engine; they override what `settings` gives.
    """
    live = batch.batch[keys.RESPONSE_MASK].any(dim=1).nonzero()[:, 0]  # [L]
    mini_batches = max(1, min(mini_batches, len(live) // ranks))
    worker_rows = pad_to_ranks(batch, live, mini_batches, ranks)
    if isinstance(settings, ActorSection):
        batch = training_rows.weigh_advantages(batch, settings)
    data = to_worker_batch(batch, worker_rows)
    values = {
        "mini_batch_size": len(worker_rows.rows) // mini_batches,
        # the divisor of means over sequences: it counts masked episodes, but no padding
        "global_batch_size": training_rows.count_episodes(batch) / mini_batches,
        "epochs": settings.ppo_epochs,
        "seed": settings.data_loader_seed,
        "dataloader_kwargs": {"shuffle": settings.shuffle},
    }
    tu.assign_non_tensor(data, **(values | flags))
    return data


def to_worker_batch(batch: DataProto, worker_rows: WorkerRows) -> TensorDict:
    """Copy rows into a packed batch for an update. Padding rows have a mask of 0, so no loss."""
    copied = select_worker_data(batch)[worker_rows.rows]
    for key in (keys.RESPONSE_MASK, keys.ADVANTAGES):
        if key in copied.batch:
            copied.batch[key][worker_rows.is_padding] = 0
    return left_right_2_no_padding(copied.to_tensordict())


def select_worker_data(batch: DataProto) -> DataProto:
    """Select the tensors and arrays of a batch that the workers read."""
    names = [name for name in batch.batch.keys() if name not in DRIVER_ONLY_KEYS]  # noqa: SIM118
    return batch.select(names, [keys.IMAGES])


def collect_metrics(output: TensorDict, recipe: Recipe, role: str) -> dict[str, float]:
    """Average an update's metrics over micro-batches and ranks. Each gets its role as a prefix."""
    named = {}
    for name, value in reduce_metrics(dict(tu.get(output, "metrics"))).items():
        if name == "mfu" and recipe.trainer.device == "cpu":  # verl has no peak FLOPS of a CPU
            continue
        if name == "mfu":
            name = f"perf/mfu/{role}"
        elif not name.startswith((f"{role}/", *OTHER_METRICS)):
            name = f"{role}/{name}"
        named[name] = float(value)
    return named


# --- TRY NOT TO MODIFY: the loss in the workers --------------------------------------------------


def is_entropy_in_loss(settings: ActorConfig | ActorSection) -> bool:
    """Return whether verl's ppo_loss reads the entropy. settings: verl's section of the actor."""
    return bool(settings.calculate_entropy or settings.entropy_coeff != 0.0)


def set_policy_loss(actor: WorkerGroup, recipe: Recipe) -> None:
    """Send the recipe's loss, with the coefficients that `recipe` has now, to the workers.

    user_functions.register_in_verl registers a custom loss only in this process. In the workers,
    compute_custom_loss registers it.
    """
    settings = recipe.actor
    name = settings.policy_loss.loss_mode
    loss: Loss = ppo_loss
    if is_user_function(name):
        function = core_algos.POLICY_LOSS_REGISTRY[name]
        loss = functools.partial(compute_custom_loss, name, function)
    if recipe.is_on_policy:
        loss = functools.partial(compute_on_policy_loss, loss)
    actor.set_loss_fn(functools.partial(loss, omega_conf_to_dataclass(recipe.for_verl(ACTOR))))


def compute_custom_loss(
    name: str,
    function: core_algos.PolicyLossFn,
    config: ActorConfig,
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: ProcessGroup | None = None,
) -> LossResult:
    """Register a custom policy loss in a worker, and compute verl's ppo_loss with it."""
    core_algos.POLICY_LOSS_REGISTRY[name] = function
    return ppo_loss(config, model_output, data, dp_group)


def compute_on_policy_loss(
    loss: Loss,
    config: ActorConfig,
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: ProcessGroup | None = None,
) -> LossResult:
    """Compute `loss` in a worker with this pass's log-probs, detached, as the old ones.

    Also returns the metrics that the separate pass would give. If the batch has old log-probs, as
    after a step that trained only the critic, these are kept.
    """
    entropy = no_padding_2_padding(model_output["entropy"], data).detach()  # [b, R]
    if not is_entropy_in_loss(config):
        model_output.pop("entropy")  # it was computed for the metric only
    if keys.OLD_LOG_PROBS in data:
        return loss(config, model_output, data, dp_group)
    log_probs = no_padding_2_padding(model_output["log_probs"], data).detach()  # [b, R]
    data[keys.OLD_LOG_PROBS] = log_probs
    result, metrics = loss(config, model_output, data, dp_group)
    return result, metrics | measure_policy(log_probs, entropy, data)


def measure_policy(log_probs: Tensor, entropy: Tensor, data: TensorDict) -> dict[str, Metric]:
    """Measure a micro-batch: the entropy, and how far the rollout engine is from the trainer.

    log_probs, entropy: [b, R], at the weights before the update. The means are over the trained
    tokens of the whole batch. Formulas: verl's calculate_debug_metrics and rollout_corr_helper.
    """
    mask = data[keys.RESPONSE_MASK].bool()  # [b, R]
    # The rollout engine has no log-probs of a response that a filter wrote.
    is_sampled = data[keys.TURN] >= 0  # [b, R]
    log_ratio = (log_probs - data[keys.ROLLOUT_LOG_PROBS]).masked_fill(~is_sampled, 0.0)  # [b, R]
    difference = (log_probs.exp() - (log_probs - log_ratio).exp()).abs() * mask  # [b, R]
    share = data["dp_size"] / data["batch_num_tokens"]  # verl adds up micro-batches, not ranks

    def mean(values: Tensor) -> Metric:
        return Metric(AggregationType.SUM, (values * mask).sum() * share)

    return {
        "actor/entropy": mean(entropy),
        "training/rollout_probs_diff_mean": mean(difference),
        "training/rollout_probs_diff_max": Metric(AggregationType.MAX, difference.max()),
        "rollout_corr/kl": mean(-log_ratio),
        "rollout_corr/k3_kl": mean(log_ratio.exp() - log_ratio - 1),
    }
