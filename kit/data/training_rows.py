"""Training rows: what changes in a batch if an agent's episode has several.

Each sampled token is trained in one row of its episode; in other rows it is part of the prompt. The
episode has one advantage A_e. With N episodes, T_e trained tokens of episode e and T_b of its row
b, the mean over episodes (`loss_agg_mode: seq-mean-token-mean`) is

    L = 1/N sum_e 1/T_e sum_b sum_t loss(A_e)

verl has the mean over the tokens of each row, 1/T_b. So the advantages of a row are multiplied by
T_b/T_e, and the divisor is N, also for sums over tokens. `token-mean` needs neither. Other terms of
a loss, such as KL and entropy, get no weight (docs/algorithms.md).

Shapes: B rows, E episodes, R tokens of the longest response, T of the longest line. A line has the
response tokens of all rows of an episode, the main row's last.

Protects: advantages and losses, from episodes that count more because they have more rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kit.data import batch_keys as keys
from kit.recipe.schema import ActorSection
from kit.recipe.settings import Settings

if TYPE_CHECKING:
    from verl import DataProto

# Arguments of an estimator that have a meaning only along one row.
ONE_ROW = frozenset({"values", "turn", "sum_pi_squared"})
ROW_MEAN_LOSSES = ("sapo",)  # of verl: they ignore loss_agg_mode, and average over each row


def find_reason_against(recipe: Settings) -> str:
    """Return why a recipe cannot train on episodes of several rows; "" if it can."""
    if recipe.command != "train":
        return ""
    algorithm = recipe.algorithm
    arguments = ", ".join(sorted(ONE_ROW & recipe.arguments))
    cause = ""
    if arguments:
        cause = f"algorithm.adv_estimator={algorithm.adv_estimator} reads {arguments}"
        fix = "Choose an estimator with one advantage for each episode, such as grpo."
    elif algorithm.use_kl_in_reward:
        cause = "algorithm.use_kl_in_reward=true adds a reward to each token"
        fix = "Set it to false, and actor_rollout_ref.actor.use_kl_loss=true."
    elif recipe.has_reward_model:
        cause = "reward.reward_model.enable=true scores one row"
        fix = "Set it to false, and let the verifier compute the reward."
    elif recipe.actor.policy_loss.loss_mode == "geo_mean":
        cause = "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean is a mean over rows"
        fix = "Choose another loss, such as vanilla."
    if not cause:
        return ""
    return f"{cause}, but an episode of an agent may have several training rows. {fix}"


def count_episodes(batch: DataProto) -> int:
    """Count the episodes of a batch, or of a part that has all rows of each."""
    return len(set(batch.non_tensor_batch[keys.EPISODES]))


def has_branches(batch: DataProto) -> bool:
    """Return whether an episode of a batch has several rows."""
    return count_episodes(batch) < len(batch)


def number_episodes(batch: DataProto) -> Tensor:
    """Return the position of each row's episode among those of the batch, int64 [B]."""
    episodes = torch.tensor(batch.non_tensor_batch[keys.EPISODES].tolist())
    return episodes.unique(return_inverse=True)[1]


def select_main_rows(batch: DataProto) -> DataProto:
    """Select the main row of each episode, [E]: the last of its rows."""
    episodes = number_episodes(batch)
    is_main = episodes != torch.cat([episodes[1:], torch.tensor([-1])])
    return batch.select_idxs(is_main)


class Lines(NamedTuple):
    """Where the response tokens of a batch are: in its rows, and in lines of whole episodes."""

    in_rows: Tensor  # bool [B, R]
    in_lines: Tensor  # bool [E, T]

    def join(self, rows: Tensor, padding: int = 0) -> Tensor:
        """Move the values of response tokens from rows [B, R] to lines [E, T]."""
        lines = torch.full(self.in_lines.shape, padding, dtype=rows.dtype)
        return lines.masked_scatter_(self.in_lines, rows[self.in_rows])

    def split(self, lines: Tensor) -> Tensor:
        """Move the values of response tokens from lines [E, T] to rows [B, R]."""
        rows = torch.zeros(self.in_rows.shape, dtype=lines.dtype)
        return rows.masked_scatter_(self.in_rows, lines[self.in_lines])


def find_lines(batch: DataProto) -> Lines:
    """Find the response tokens of a batch, whose rows are in the order of build_batch."""
    width = batch.batch[keys.RESPONSES].shape[1]
    in_rows = batch.batch[keys.ATTENTION_MASK][:, -width:].bool()  # [B, R]
    lengths = sum_by_episode(in_rows.sum(dim=1), batch)  # [E]
    return Lines(in_rows, torch.arange(int(lengths.max())) < lengths[:, None])


def sum_by_episode(values: Tensor, batch: DataProto) -> Tensor:
    """Return the sum of values [B] over the rows of each episode, [E]."""
    sums = torch.zeros(count_episodes(batch), dtype=values.dtype)
    return sums.index_add_(0, number_episodes(batch), values)


def join_rows(batch: DataProto, *tensors: Tensor) -> list[Tensor]:
    """Return tensors [B, R] of response tokens as lines [E, T]."""
    lines = find_lines(batch)
    return [lines.join(tensor) for tensor in tensors]


def join_batch(batch: DataProto, lines: Lines) -> DataProto:
    """Return the batch that an advantage estimator reads: a line for each episode."""
    joined = select_main_rows(batch)
    for name, tensor in batch.batch.items():
        if tensor.shape == lines.in_rows.shape:
            joined.batch[name] = lines.join(tensor, -1 if name == keys.TURN else 0)
    return joined


def weigh_advantages(batch: DataProto, settings: ActorSection) -> DataProto:
    """Return the batch of an update: if the loss averages over rows, weighted by T_b / T_e."""
    is_row_mean = settings.loss_agg_mode == "seq-mean-token-mean"
    is_row_mean = is_row_mean or settings.policy_loss.loss_mode in ROW_MEAN_LOSSES
    if not is_row_mean or not has_branches(batch):
        return batch
    counts = batch.batch[keys.RESPONSE_MASK].sum(dim=1).float()  # [B]
    totals = sum_by_episode(counts, batch)[number_episodes(batch)]  # [B]
    weights = counts / totals.clamp(min=1)
    weighted = batch.select(list(batch.batch.keys()))  # a copy of the mapping, not of the tensors
    weighted.batch[keys.ADVANTAGES] = batch.batch[keys.ADVANTAGES] * weights[:, None]
    return weighted
