"""Measure a step: which episodes it came from, how noisy it is, and which episode broke it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from env import Json
from kit.data.episode import Episode
from kit.data.importance import measure_shift

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROUNDING = 1e-6  # relative
OUTLIER = 10.0  # a group explodes if its gradient norm is this many times the median of the others
TOKENS_SHOWN = 20
BLAMED_SHOWN = 8
CONTEXT = 5  # tokens before and after a token


class Part(NamedTuple):
    """The gradient of an episode or a group, as a part of the batch's gradient G."""

    norm: float
    dot: float  # <g, G>

    def cosine(self, batch_norm: float) -> float | None:
        """Return the cosine with G, None if one of them is 0."""
        if not self.norm or not batch_norm:
            return None
        return max(-1.0, min(1.0, self.dot / (self.norm * batch_norm)))

    def share(self, batch_norm: float) -> float:
        """Return <g, G> / |G|^2. The shares of all parts have the sum 1; a part may oppose G."""
        return self.dot / batch_norm**2 if batch_norm else 0.0


class Noise(NamedTuple):
    """How much of the batch's gradient is signal."""

    signal_to_noise: float | None  # |G| / standard error of G; None: fewer than two groups
    noise_scale: float | None  # groups; None: the signal is lost in the noise


@dataclasses.dataclass
class Explanation:
    """What a step did. `dataclasses.asdict` gives the content of explain_<N>.json."""

    step: int
    checkpoint: str  # the weights that the step started from
    reason: str = ""  # why the step cannot be used; empty: it can
    gradient_norm: float = math.nan
    noise: Json = dataclasses.field(default_factory=dict)
    importance: Json = dataclasses.field(default_factory=dict)
    groups: list[Json] = dataclasses.field(default_factory=list)
    shares: dict[str, list[tuple[str, float]]] = dataclasses.field(default_factory=dict)
    tokens: list[Json] = dataclasses.field(default_factory=list)
    blame: list[Json] = dataclasses.field(default_factory=list)


# --- the gradient --------------------------------------------------------------------------------


def measure_noise(norms: Sequence[float], batch_norm: float) -> Noise:
    """Measure the signal-to-noise ratio of G, the sum of n group gradients g_i.

    n g_i is an estimate of G from one group. With S = sum |n g_i - G|^2 / (n - 1), the trace of
    their covariance, the standard error of G is sqrt(S / n). The simple noise scale is S / |G|^2,
    where |G|^2 is estimated without bias, as |G|^2 - S / n: the number of groups at which signal
    and noise are equal. Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.9 and
    appendix A.1.
    """
    n = len(norms)
    if n < 2:
        return Noise(None, None)
    squares = math.fsum(norm**2 for norm in norms)
    trace = max(0.0, (n**2 * squares - n * batch_norm**2) / (n - 1))
    if not trace:
        return Noise(None, 0.0 if batch_norm else None)
    signal = batch_norm**2 - trace / n
    is_known = signal > ROUNDING * batch_norm**2  # one group alone has the signal 0, up to rounding
    return Noise(batch_norm / math.sqrt(trace / n), trace / signal if is_known else None)


def find_bad(rows: Sequence[int], is_bad: Callable[[Sequence[int]], bool]) -> list[int]:
    """Halve the rows until single ones are bad -> the bad rows.

    is_bad: of a set of rows; a set is bad if one of its rows is. k bad rows of n take about
    2 k log2(n) calls.
    """
    if not rows or not is_bad(rows):
        return []
    if len(rows) == 1:
        return list(rows)
    middle = len(rows) // 2
    return find_bad(rows[:middle], is_bad) + find_bad(rows[middle:], is_bad)


def find_outlier_group(norms: Mapping[str, float]) -> str:
    """Return the group with the largest gradient, if it explodes; otherwise "".

    Groups without a gradient do not count.
    """
    if not norms:
        return ""
    largest = max(norms, key=norms.__getitem__)
    others = [norm for name, norm in norms.items() if norm > 0 and name != largest]
    is_outlier = bool(others) and norms[largest] > OUTLIER * float(np.median(others))
    return largest if is_outlier else ""


# --- shares --------------------------------------------------------------------------------------


def sum_shares(
    episodes: Sequence[Episode], parts: Sequence[Part], batch_norm: float
) -> dict[str, list[tuple[str, float]]]:
    """Sum the shares of the update by server, by quartile of the response length, and by reward.

    Each of these is in ascending order. The names of rewards are those of `list_rewards`.
    """
    servers = [episode.server for episode in episodes]
    lengths = [len(episode.response_ids) for episode in episodes]
    shares = {
        "server": sum_by_label(servers, servers, parts, batch_norm),
        "length": sum_by_label(lengths, label_quartiles(lengths, " tokens"), parts, batch_norm),
    }
    for name, rewards in list_rewards(episodes).items():
        shares[name] = sum_by_label(rewards, label_values(rewards), parts, batch_norm)
    return shares


def list_rewards(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """List the rewards of episodes by name: those of the verifier only if training had others."""
    trained = [float(episode.trained_reward or 0.0) for episode in episodes]
    verified = [float(episode.reward or 0.0) for episode in episodes]
    if trained == verified:
        return {"reward": trained}
    return {"reward trained on": trained, "verifier's reward": verified}


def sum_by_label(
    values: Sequence[str] | Sequence[float],
    labels: Sequence[str],
    parts: Sequence[Part],
    batch_norm: float,
) -> list[tuple[str, float]]:
    """Sum the shares of the parts with the same label, in the order of the values."""
    sums: dict[str, float] = {}
    for _, place in sorted(zip(values, range(len(values)), strict=True)):
        sums[labels[place]] = sums.get(labels[place], 0.0) + parts[place].share(batch_norm)
    return list(sums.items())


def label_quartiles(values: Sequence[float], unit: str = "") -> list[str]:
    """Label each value with the range of its quartile. Equal values have the same label."""
    edges = np.unique(np.quantile(values, [0.25, 0.5, 0.75], method="higher"))
    numbers = np.searchsorted(edges, values, side="left").tolist()
    labels = {}
    for number in set(numbers):
        members = [value for value, k in zip(values, numbers, strict=True) if k == number]
        low = min(members)
        high = max(members)
        interval = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        labels[number] = f"{interval}{unit}"
    return [labels[number] for number in numbers]


def label_values(values: Sequence[float]) -> list[str]:
    """Label each value with itself, or with its quartile if there are more than four."""
    labels = [f"{value:g}" for value in values]
    if len(set(labels)) <= 4:
        return labels
    return label_quartiles(values)


# --- tokens and episodes -------------------------------------------------------------------------


def describe_tokens(
    episodes: Sequence[Episode],
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Json]:
    """Describe the tokens that the step moves most. log_probs, advantages, mask: [B, R].

    The size of a move is |A| (1 - p): at the first optimizer step, the gradient of the loss by the
    logit of a sampled token is proportional to it (A: advantage, p: its probability).
    """
    moves = advantages.abs() * (1 - log_probs.exp()) * mask  # [B, R]
    moves = moves.nan_to_num(0.0, 0.0, 0.0)
    count = min(TOKENS_SHOWN, int((moves > 0).sum()))
    sizes, places = moves.flatten().topk(count)
    described = []
    for size, place in zip(sizes.tolist(), places.tolist(), strict=True):
        row, position = divmod(place, moves.shape[1])
        episode = episodes[row]
        described.append(
            name_episode(episode)
            | name_token(episode, position, tokenizer)
            | {
                "advantage": float(advantages[row, position]),
                "probability": float(log_probs[row, position].exp()),
                "size": size,
            }
        )
    return described


def name_episode(episode: Episode) -> Json:
    """Name an episode: its group, its row, and its place among the episodes of the row."""
    return {
        "group": episode.group_id,
        "row": episode.row_id,
        "episode": episode.record_index.rollout,
    }


def name_token(episode: Episode, position: int, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Decode a response token with the tokens around it."""
    ids = episode.response_ids
    return {
        "position": position,
        "before": tokenizer.decode(ids[max(0, position - CONTEXT) : position]),
        "token": tokenizer.decode(ids[position : position + 1]),
        "after": tokenizer.decode(ids[position + 1 : position + 1 + CONTEXT]),
    }


def measure_importance(log_probs: Tensor, behavior: Tensor, is_sampled: Tensor) -> Json:
    """Measure the importance weights of the present policy: see measure_shift."""
    return measure_shift(log_probs, behavior, is_sampled)._asdict()


def explain_episode(
    row: int,
    episodes: Sequence[Episode],
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
) -> Json:
    """Say why an episode has the blame: numbers that are not finite, or far from the others'.

    tensors: [B, R]: mask, behavior and log_probs, of the policy that sampled and the present one,
    and advantages.
    """
    episode = episodes[row]
    reasons = list_bad_numbers(row, episode, tensors)
    for name, rewards in list_rewards(episodes).items():
        usual = float(np.nanmedian(rewards))
        reasons.append(f"its {name} is {rewards[row]:g}, the median {usual:g}")
    lengths = float(np.median([len(other.response_ids) for other in episodes]))
    reasons.append(f"it has {len(episode.response_ids)} tokens, the median {lengths:g}")
    described = name_episode(episode) | {"reward": episode.trained_reward}
    ratios = (tensors["log_probs"][row] - tensors["behavior"][row]).abs()  # [R]
    ratios = ratios.nan_to_num(math.inf, math.inf, math.inf) * tensors["mask"][row]
    ratios = ratios.nan_to_num(0.0, math.inf)  # infinity * 0 of padding
    position = int(ratios.argmax())
    token = name_token(episode, position, tokenizer)
    recorded = float(tensors["behavior"][row, position])
    present = float(tensors["log_probs"][row, position])
    reasons.append(
        f"the log-prob of token {position} ({token['token']!r}) is {present:.3g}, recorded as "
        f"{recorded:.3g}"
    )
    return described | token | {"tokens": len(episode.response_ids), "reasons": reasons}


def list_bad_numbers(row: int, episode: Episode, tensors: Mapping[str, Tensor]) -> list[str]:
    """List what is NaN or infinite in an episode."""
    reasons = []
    reward = episode.trained_reward
    if reward is None or not math.isfinite(reward):
        reasons.append(f"its reward is {reward}")
    mask = tensors["mask"][row].bool()
    names = {"behavior": "recorded log-probs", "log_probs": "log-probs", "advantages": "advantages"}
    for key, name in names.items():
        count = int((~tensors[key][row][mask].isfinite()).sum())
        if count:
            reasons.append(f"{count} of its {name} are NaN or infinite")
    return reasons
