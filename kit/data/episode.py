"""The episode: one conversation of the policy about one task, with its token ids and its reward.

An `Episode` is the only record that the kit passes on. It goes from the rollout engine to the
verifier, the filters, the trainer and the rollouts files (kit/data/rollout_files.py).

Protects: sampled token ids, which stay those that the rollout engine returned.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gym_client import TOKEN_FIELDS, GymError, Json
from kit.chat.parsed_response import ParsedResponse, write_call
from kit.data.reward_scale import UNKNOWN, RewardScale
from kit.errors import find_first_difference

# Gym's names for the token ids and log-probs. The last output item of each model call has them.
PROMPT_IDS, SAMPLED_IDS, LOG_PROBS = TOKEN_FIELDS

ABORTED = ("aborted", "abort")  # the stop reasons of vLLM and SGLang for an aborted request


class TurnSpan(NamedTuple):
    """The tokens of one turn of the policy: response_ids[start:end]."""

    start: int
    end: int
    output_end: int  # the turn's last item is output[output_end - 1]


class PolicyVersion(NamedTuple):
    """A number of consecutive sampled tokens, and the step whose weights sampled them."""

    token_count: int
    step: int | None  # None: unknown


class RecordIndex(NamedTuple):
    """The place of an episode in its rollouts file."""

    task: int  # `_ng_task_index` of the file: the index of the row
    rollout: int  # `_ng_rollout_index`: the index among the episodes of the row


PolicyVersions = list[PolicyVersion]
NOT_WRITTEN = RecordIndex(-1, -1)


@dataclass
class Branch:
    """Tokens of an episode in a training row other than its main one. R: of this row.

    An agent that compacts its history or calls a subagent makes several prompts. The prompt of a
    branch may hold tokens that another row of the episode trains. Each is in one response only.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)  # [R]
    response_mask: list[int] = field(default_factory=list)  # [R], 1 = sampled, 0 = observed
    log_probs: list[float] = field(default_factory=list)  # [R], by the rollout engine; 0 = observed
    turns: list[TurnSpan] = field(default_factory=list)
    policy_versions: PolicyVersions = field(default_factory=list)  # of the sampled tokens, in order
    output: list[Json] = field(default_factory=list)  # the response as Responses items


@dataclass
class Episode:
    """One conversation about one task. R is the number of response tokens.

    The response is everything after the prompt: sampled tokens, and observed ones between them.
    """

    row_id: str  # file:line of the task's row
    group_id: str  # the same for all episodes of one task in one step: the group of GRPO
    server: str  # the Gym server that verifies the episode
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)  # [R]
    response_mask: list[int] = field(default_factory=list)  # [R], 1 = sampled, 0 = observed
    log_probs: list[float] = field(default_factory=list)  # [R], by the rollout engine; 0 = observed
    turns: list[TurnSpan] = field(default_factory=list)
    # One per turn. A file has them as `output` only.
    responses: list[ParsedResponse] = field(default_factory=list, compare=False)
    policy_versions: PolicyVersions = field(default_factory=list)  # of the sampled tokens, in order
    output: list[Json] = field(default_factory=list)  # the response as Responses items
    branches: list[Branch] = field(default_factory=list)  # further rows of an agent's episode
    ended: str = ""  # stop, length, turns, terminated, or truncated (a limit of the environment)
    reward: float | None = None  # the verifier's; None: not verified
    shaped_reward: float | None = None  # env.reward's, to train on; None: the verifier's
    scale: RewardScale = UNKNOWN  # of the verifier's rewards
    turn_rewards: list[float] = field(default_factory=list)  # one per turn, or empty
    reward_components: dict[str, float] = field(default_factory=dict)
    baseline: float | None = None  # the reward of a greedy response to the same prompt (ReMax)
    verify_result: Json = field(default_factory=dict)  # the verifier's other fields
    measures: dict[str, float] = field(default_factory=dict)  # of features; never trained on
    status: str = "ok"  # or the reason of the failure, as in gym_client.GymError
    error: str = ""
    failure: Json = field(default_factory=dict)  # the server's fields about it, if any
    session_lost: bool = False  # the Gym server stopped during the episode
    timings: dict[str, float] = field(default_factory=dict)  # seconds of generate, tools, verify
    row: Json = field(default_factory=dict)  # the task's row, unchanged
    tools: list[Json] = field(default_factory=list)  # Responses format: that the policy was offered
    observation: str = ""  # the environment's first one, the end of the prompt
    images: list[str] = field(default_factory=list)  # addresses of the task's images, in order
    record_index: RecordIndex = NOT_WRITTEN

    @property
    def rows(self) -> list[TrainingRow]:
        """Return the training rows: the branches, and then the episode itself, the main row."""
        return [*self.branches, self]

    @property
    def is_right(self) -> bool:
        """Return whether the verifier gave the full reward, which acc and pass rates count."""
        is_verified = self.status == "ok" and self.reward is not None
        return is_verified and self.scale.is_full(self.reward or 0.0)

    @property
    def trained_reward(self) -> float | None:
        """Return the reward to train on: the shaped one, or the verifier's before it is shaped."""
        return self.reward if self.shaped_reward is None else self.shaped_reward

    @property
    def question(self) -> str:
        """Return the text of the row's last input message, and the first observation."""
        messages = self.row.get("responses_create_params", {}).get("input") or ""
        content = messages if isinstance(messages, str) else messages[-1].get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        return "\n".join(text for text in (content, self.observation) if text)

    @property
    def response(self) -> str:
        """Return the text of the policy's last message."""
        messages = [item for item in self.output if item.get("role") == "assistant"]
        return join_text(messages[-1]) if messages else ""

    @property
    def transcript(self) -> str:
        """Return the response for people: the policy's text, its calls, and the observations."""
        parts = []
        for item in self.output:
            if item["type"] == "function_call":
                parts.append(f"{item['name']}({item['arguments']})")
            elif item.get("role") == "assistant":
                parts.append(join_text(item))
            elif item["type"] != "reasoning":
                parts.append(f"=> {item.get('output') or item.get('content')}")
        return " ".join(parts)


TrainingRow = Branch | Episode


def list_rows(episodes: Iterable[Episode]) -> list[TrainingRow]:
    """List the training rows of episodes, in the order of the episodes."""
    return list(itertools.chain.from_iterable(episode.rows for episode in episodes))


def join_text(message: Json) -> str:
    """Join the text parts of an assistant's message item."""
    return "".join(part["text"] for part in message["content"])


def append_tokens(
    row: TrainingRow,
    ids: list[int],
    log_probs: list[float] | None = None,
    policy_versions: Sequence[PolicyVersion] = (),
) -> None:
    """Append tokens to the response: sampled ones with log-probs, observed ones without."""
    start = len(row.response_ids)
    row.response_ids += ids
    if log_probs is None:
        row.response_mask += [0] * len(ids)
        row.log_probs += [0.0] * len(ids)
        return
    row.response_mask += [1] * len(ids)
    row.log_probs += log_probs
    row.policy_versions += policy_versions
    row.turns.append(TurnSpan(start, start + len(ids), len(row.output)))


def from_output_items(row: TrainingRow, output: Sequence[Json]) -> None:
    """Fill an empty episode or branch from Responses output items, some of which carry token ids.

    The prompt of each model call must begin with all earlier tokens, id for id. The new tokens at
    its end are then the observation. `set_sampled` sets the log-probs: an agent's items may have
    any. Raises GymError('not_contiguous').
    """
    earlier: list[int] = []
    for item in output:
        prompt_ids, sampled_ids = (list(item.get(name) or []) for name in (PROMPT_IDS, SAMPLED_IDS))
        others = {name: value for name, value in item.items() if name not in TOKEN_FIELDS}
        row.output.append({name: value for name, value in others.items() if value is not None})
        if not sampled_ids:
            continue
        call = f"model call {len(row.turns) + 1}"
        if not prompt_ids or prompt_ids[: len(earlier)] != earlier:
            raise GymError(
                "not_contiguous",
                f"{call}: its {len(prompt_ids)} prompt ids differ from the {len(earlier)} earlier "
                f"ids at position {find_first_difference(prompt_ids, earlier)}",
            )
        if earlier:
            append_tokens(row, prompt_ids[len(earlier) :])
        else:
            row.prompt_ids = prompt_ids
        append_tokens(row, sampled_ids, [0.0] * len(sampled_ids))
        earlier = prompt_ids + sampled_ids


def from_turn_items(items: Sequence[Json]) -> ParsedResponse:
    """Make a response, without its thought, of a turn's items that an agent returns."""
    messages = [item for item in items if item.get("role") == "assistant"]
    calls = [item for item in items if item.get("type") == "function_call"]
    text = "\n".join(map(join_text, messages))
    written = "\n".join([text, *map(write_call, calls)]).lstrip("\n")
    return ParsedResponse("", text, calls, written, written)


def set_sampled(
    row: TrainingRow,
    turn: TurnSpan,
    log_probs: list[float],
    policy_versions: Sequence[PolicyVersion] = (),
) -> None:
    """Set the log-probs of a turn, and add the versions of its tokens. Raises GymError."""
    if len(log_probs) != turn.end - turn.start:
        counts = f"{turn.end - turn.start} sampled ids, {len(log_probs)} log-probs"
        raise GymError("bad_ids", f"the turn of the tokens from {turn.start} on has {counts}")
    row.log_probs[turn.start : turn.end] = log_probs
    row.policy_versions += policy_versions


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector inside the block.

    Each pass visits all tokens of a batch. With a large batch this takes a second, and during that
    second no request gets a response.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
