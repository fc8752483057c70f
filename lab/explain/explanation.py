"""Measure a step: which groups it came from, how noisy it is, and which episode broke it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from env import Json
from kit.data.episode import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_SHOWN = 20
CONTEXT = 5  # tokens before and after a token
NAMES = {"behavior": "recorded log-probs", "log_probs": "log-probs"}


class Gradient(NamedTuple):
    """A gradient g, and G, the gradient of the whole batch."""

    norm: float  # |g|
    dot: float  # <g, G>; NaN before G is known

    @property
    def is_finite(self) -> bool:
        """Whether no number of the gradient is NaN or infinite."""
        return math.isfinite(self.norm)

    def cosine(self, batch_norm: float) -> float | None:
        """Return the cosine with G, None if one of them is 0."""
        if not self.norm or not batch_norm:
            return None
        return max(-1.0, min(1.0, self.dot / (self.norm * batch_norm)))

    def share(self, batch_norm: float) -> float:
        """Return <g, G> / |G|^2. The shares of all parts have the sum 1; a part may oppose G."""
        return self.dot / batch_norm**2 if batch_norm else 0.0


@dataclasses.dataclass
class Explanation:
    """What a step did: the content of explain_<N>.json. reason: why it cannot be used, if so."""

    step: int
    checkpoint: str  # the weights that the step started from
    reason: str = ""
    gradient_norm: float = math.nan
    signal_to_noise: float | None = None
    importance: Json = dataclasses.field(default_factory=dict)
    groups: list[Json] = dataclasses.field(default_factory=list)
    tokens: list[Json] = dataclasses.field(default_factory=list)
    blame: list[Json] = dataclasses.field(default_factory=list)


# --- the gradient --------------------------------------------------------------------------------


def measure_signal(norms: Sequence[float], batch_norm: float) -> float | None:
    """Return |G| / the standard error of G, the sum of n group gradients g_i; None if unknown.

    n g_i is an estimate of G from one group. With S = sum |n g_i - G|^2 / (n - 1), the trace of
    their covariance, the standard error of G is sqrt(S / n). Source: McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1.
    """
    n = len(norms)
    if n < 2:
        return None
    squares = math.fsum(norm**2 for norm in norms)
    trace = (n**2 * squares - n * batch_norm**2) / (n - 1)
    return batch_norm / math.sqrt(trace / n) if trace > 0 else None


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


# --- tokens and episodes -------------------------------------------------------------------------


def list_rewards(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """List the rewards of episodes by name: those of the verifier only if training had others."""
    trained = [float(episode.trained_reward or 0.0) for episode in episodes]
    verified = [float(episode.reward or 0.0) for episode in episodes]
    if trained == verified:
        return {"reward": trained}
    return {"reward trained on": trained, "verifier's reward": verified}


def describe_tokens(
    episodes: Sequence[Episode], tensors: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase
) -> list[Json]:
    """Describe the tokens that the step moves most. tensors: log_probs, advantages, mask: [B, R].

    The size of a move is |A| (1 - p): at the first optimizer step, the gradient of the loss by the
    logit of a sampled token is proportional to it (A: advantage, p: its probability).
    """
    probabilities = tensors["log_probs"].exp()
    advantages = tensors["advantages"]
    moves = advantages.abs() * (1 - probabilities) * tensors["mask"]  # [B, R]
    moves = moves.nan_to_num(0.0, 0.0, 0.0)
    count = min(TOKENS_SHOWN, int((moves > 0).sum()))
    sizes, places = moves.flatten().topk(count)
    described = []
    for size, place in zip(sizes.tolist(), places.tolist(), strict=True):
        row, position = divmod(place, moves.shape[1])
        episode = episodes[row]
        token = name_episode(episode) | name_token(episode, position, tokenizer)
        token["advantage"] = float(advantages[row, position])
        token["probability"] = float(probabilities[row, position])
        described.append(token | {"size": size})
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


def list_bad_numbers(row: int, episode: Episode, tensors: Mapping[str, Tensor]) -> list[str]:
    """List what is NaN or infinite in an episode, besides the advantages: these are its group's.

    tensors: mask, and those of NAMES.
    """
    reasons = []
    reward = episode.trained_reward
    if reward is None or not math.isfinite(reward):
        reasons.append(f"its reward is {reward}")
    mask = tensors["mask"][row].bool()
    for key in NAMES:
        count = int((~tensors[key][row][mask].isfinite()).sum())
        if count:
            reasons.append(f"{count} of its {NAMES[key]} are NaN or infinite")
    return reasons
