"""Requests of a rollout, and one response of the policy: token ids in, token ids out.

Protects: training, from stale weights and from token ids that the policy did not sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from env import Json, Task
from gym_client import EpisodeIndex, Gym, GymError, Session
from kit.chat.processor import TextProcessor
from kit.chat.template import ChatTemplate
from kit.data.episode import ABORTED, Episode, PolicyVersion, PolicyVersions
from kit.data.reward_scale import Scales
from kit.engine.inputs import RunInputs
from kit.errors import RunError
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from verl.workers.rollout.replica import TokenOutput

    from kit.engine.client import Client

AfterEpisode = Callable[[Episode, Gym], Awaitable[None]]
Sampling = Json  # vLLM's sampling parameters, from `build_sampling_params`
DEFAULT_SLOTS = 256
MAX_CHARS_PER_TOKEN = 256  # no token is longer: a text of over 256 * n characters has over n tokens
TASK_INDEX_BITS = 52  # a float of JSON is exact up to 53 bits


class SampledResponse(NamedTuple):
    """One response of the policy, with its stop token, unless it used all tokens of the request."""

    ids: list[int]
    log_probs: list[float]  # one per id, at the sampling temperature
    policy_versions: PolicyVersions


class SampleStore:
    """What the policy endpoint samples in one batch, until an episode takes it.

    An agent's Response claims token ids and log-probs. The endpoint knows both. Two episodes may
    have sampled the same response, so an entry is a list.
    """

    def __init__(self) -> None:
        # Requests of agents do not say which batch they belong to: to the last one that began.
        self.sampling: Sampling = {}
        self.batch = 0
        self._responses: dict[bytes, list[SampledResponse]] = {}

    def begin_batch(self, sampling: Sampling) -> None:
        """Let the endpoint sample in this way, and forget the responses of the batch before."""
        self.sampling = sampling
        self.batch += 1
        self._responses.clear()

    def add(self, prompt_ids: list[int], sampled: SampledResponse) -> None:
        """Keep a response and its prompt."""
        self._responses.setdefault(digest(prompt_ids, sampled.ids), []).append(sampled)

    def take(self, prompt_ids: list[int], ids: list[int]) -> SampledResponse:
        """Remove and return the response with these ids. Raises GymError('not_sampled')."""
        responses = self._responses.get(digest(prompt_ids, ids))
        if not responses:
            raise GymError(
                "not_sampled",
                f"{len(ids)} token ids after a prompt of {len(prompt_ids)} are not what the policy "
                "endpoint sampled in this batch, or another episode has them. Return the token ids "
                "of each model call once, as the endpoint sent them.",
            )
        return responses.pop()


def digest(prompt_ids: list[int], ids: list[int]) -> bytes:
    """Return the hash of a prompt and a response."""
    return hashlib.sha256(repr((prompt_ids, ids)).encode()).digest()


class Agent(Protocol):
    """An agent that runs the turns of episodes in place of inference.run_turns (env.agent)."""

    def run_turns(
        self,
        episode: Episode,
        task: Task,
        session: Session,
        context: RolloutContext,
        sampling: Sampling,
        request_id: str,
    ) -> AbstractAsyncContextManager[None]:
        """Run the turns on entry. At the end of the block, delete the files of the episode."""
        ...


@dataclass
class RolloutContext:
    """The client of the rollout engine, and the settings of model and recipe that turns use."""

    client: Client
    template: ChatTemplate
    max_prompt_length: int  # tokens
    max_response_length: int  # tokens of an episode after its prompt, including observed ones
    max_turns: int | None  # responses of the policy in one episode; None: as many as fit
    max_tool_chars: int  # a longer tool output is cut in the middle, for the model only
    timeout_s: float  # for one response, once its episode has a slot
    vocab_size: int | None = None
    seed: int | None = None  # rollout.seed if rollout.full_determinism is set
    episode_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(DEFAULT_SLOTS)
    )
    policy_version: int | None = None  # the step whose weights the servers have; None: no check
    max_staleness: int = 0  # allowed distance from policy_version, in steps
    scales: Scales = field(default_factory=dict)  # of the verifiers' rewards
    # Of the policy endpoint. None in a rollout worker, since the endpoint is in the driver.
    samples: SampleStore | None = field(default_factory=SampleStore)
    episode_timeout_s: float = math.inf  # for all turns of an episode, once it has a slot
    # {server: the first names of its reward components, of which a run has at most MAX_COMPONENTS}
    component_names: dict[str, set[str]] = field(default_factory=dict)
    # functions of optional features that look at a verified episode
    after_episode: Sequence[AfterEpisode] = ()
    agent: Agent | None = None  # runs the turns in place of inference.run_turns

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self.template.tokenizer

    @property
    def processor(self) -> TextProcessor:
        """Return the model's processor, which may read images."""
        return self.template.processor

    @property
    def stop_ids(self) -> set[int]:
        """Return the ids that end a turn."""
        return self.template.stop_ids

    @property
    def max_length(self) -> int:
        """Return the number of tokens of the longest episode."""
        return self.max_prompt_length + self.max_response_length


# --- the context of a rollout ---------------------------------------------------------------------


def make_rollout_context(
    recipe: Recipe,
    client: Client,
    inputs: RunInputs,
    timeout_s: float,
    after_episode: Sequence[AfterEpisode] = (),
) -> RolloutContext:
    """Make the context from verl's keys: data.max_*_length, rollout.multi_turn.* and others.

    Each engine runs rollout.max_num_seqs sequences concurrently. There is one episode slot for each
    of them.
    """
    rollout = recipe.rollout
    turns = rollout.multi_turn
    engines = recipe.rollout_gpus // rollout.tensor_model_parallel_size
    return RolloutContext(
        client=client,
        template=inputs.template,
        max_prompt_length=recipe.data.max_prompt_length,
        max_response_length=recipe.data.max_response_length,
        max_turns=turns.max_assistant_turns,
        max_tool_chars=turns.max_tool_response_length,
        timeout_s=timeout_s,
        vocab_size=inputs.model.vocab_size,
        seed=rollout.seed if rollout.full_determinism else None,
        episode_slots=asyncio.Semaphore(engines * rollout.max_num_seqs),
        max_staleness=recipe.trainer.one_step_off,
        scales=inputs.scales,
        episode_timeout_s=recipe.trainer.stage_timeout_s / 2,  # a stage ends if no episode ends
        after_episode=after_episode,
    )


def build_sampling_params(recipe: Recipe, is_validation: bool) -> Sampling:
    """Return vLLM's parameters from rollout.*, or for validation from rollout.val_kwargs.*."""
    rollout = recipe.rollout
    source = rollout.val_kwargs if is_validation else rollout
    sampling = {
        "temperature": source.temperature if source.do_sample else 0.0,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "logprobs": True,
    }
    if rollout.name == "vllm":  # other engines do not have this parameter
        # Only ids are used. vLLM needs the text of a response if you add stop strings (`stop`).
        sampling["detokenize"] = False
    return sampling


async def sample(
    context: RolloutContext,
    sampling: Sampling,
    request_id: str,
    prompt_ids: list[int],
    max_tokens: int,
    **image_inputs: object,
) -> SampledResponse:
    """Sample one response of the policy, of at most `max_tokens` tokens.

    request_id: `EPISODE#TURN`, or any id without a `#`.
    image_inputs: from `processor.engine_inputs`.
    Raises GymError if this request failed, ray.exceptions.RayError if a vLLM server is dead, and
    RunError if a server has the weights of another step.
    """
    params = {**sampling, "max_tokens": max_tokens}
    if context.seed is not None:
        # verl would give all requests for one prompt the same seed, and so the same response.
        params["seed"] = zlib.crc32(f"{context.seed} {request_id}".encode())
    try:
        async with asyncio.timeout(context.timeout_s):
            output = await context.client.generate(
                # All turns of an episode have the same id here. So they go to one replica, which
                # has their prefix in its cache.
                request_id=request_id.partition("#")[0],
                prompt_ids=prompt_ids,
                sampling_params=params,
                **image_inputs,
            )
    except TimeoutError:
        problem = f"vLLM gave no answer within {context.timeout_s:g} s"
        raise GymError("generate_timeout", problem) from None
    except OSError as error:
        raise GymError("aborted", f"vLLM cannot be reached: {error!r}") from error
    ids = list(output.token_ids)
    policy_versions = read_policy_versions(output, context.policy_version)
    check_policy_versions(policy_versions, context)
    if output.stop_reason in ABORTED or not ids:
        problem = f"vLLM ended the request without an answer ({output.stop_reason})"
        raise GymError("aborted", problem)
    if output.log_probs is None or len(output.log_probs) != len(ids):
        raise GymError("no_log_probs", f"vLLM sent {len(ids)} tokens without a log-prob for each")
    return SampledResponse(ids, list(output.log_probs), policy_versions)


def read_policy_versions(output: TokenOutput, default: int | None) -> PolicyVersions:
    """Return the versions of the weights that sampled `output`.

    With one_step_off, kit/engine/client.py adds `versions`, one for each part of a response.
    Otherwise verl's servers send one `global_steps`. default: the version if they send none.
    """
    fields = output.extra_fields
    if "versions" in fields:
        return [PolicyVersion(*version) for version in fields["versions"]]
    return [PolicyVersion(len(output.token_ids), fields.get("global_steps", default))]


def check_policy_versions(policy_versions: PolicyVersions, context: RolloutContext) -> None:
    """Raise RunError if tokens are from weights that are older or newer than allowed."""
    current = context.policy_version
    if current is None:
        return
    for version in policy_versions:
        if version.step is None or abs(current - version.step) > context.max_staleness:
            raise RunError(
                f"a vLLM server samples from the weights of step {version.step}, the trainer's are "
                f"of step {current}: the weight update did not reach this server. Read logs/ray in "
                "the run folder, then rerun the same command to resume from the last checkpoint."
            )


# --- what to sample ------------------------------------------------------------------------------


class EpisodeId(NamedTuple):
    """The identity of an episode. Its names elsewhere follow from it.

    A step may sample a row twice, so an episode's file has other indices
    (kit.data.episode.RecordIndex).
    """

    group_id: str  # BATCH/NUMBER OF THE TASK: episodes with the same one form a GRPO group
    task_index: int  # the group's number for Gym servers; random, so that no other run uses it
    number: int  # among the episodes of the group, from 0
    is_baseline: bool = False  # the greedy episode of ReMax, next to those of the group
    attempt: int = 0  # how often the episode was started again

    @property
    def request_id(self) -> str:
        """Return the id for the rollout engine. The seeds of the responses follow from it."""
        prefix = "greedy-" if self.is_baseline else ""
        suffix = f"-again-{self.attempt}" if self.attempt else ""
        return f"{prefix}{self.group_id}-{self.number}{suffix}"

    @property
    def gym_index(self) -> EpisodeIndex:
        """Return the numbers for the Gym server."""
        return EpisodeIndex(self.task_index, self.number)


class EpisodeRequest(NamedTuple):
    """A request for one episode of a task."""

    task: Task
    id: EpisodeId


def request_group(
    task: Task, group_id: str, n: int, is_baseline: bool = False
) -> list[EpisodeRequest]:
    """Request n episodes of a task."""
    task_index = secrets.randbits(TASK_INDEX_BITS)
    ids = [EpisodeId(group_id, task_index, number, is_baseline) for number in range(n)]
    return [EpisodeRequest(task, episode_id) for episode_id in ids]


def repeat_per_group(tasks: Iterable[Task], n: int, name: str) -> list[EpisodeRequest]:
    """Request n episodes of each task. name: the name of the batch, unique in the run."""
    requests: list[EpisodeRequest] = []
    for number, task in enumerate(tasks):
        requests += request_group(task, f"{name}/{number}", n)
    return requests


class RolloutArgs(NamedTuple):
    """The arguments of `inference.Servers.rollout`."""

    requests: list[EpisodeRequest]
    sampling: Sampling
    baselines: bool  # whether to add one greedy episode for each group


def make_rollout_args(
    recipe: Recipe, tasks: Sequence[Task], batch_name: str, is_validation: bool
) -> RolloutArgs:
    """Make the requests of a batch, and choose how to sample. batch_name: unique in the run."""
    rollout = recipe.rollout
    n = rollout.val_kwargs.n if is_validation else rollout.n
    return RolloutArgs(
        repeat_per_group(tasks, n, batch_name),
        build_sampling_params(recipe, is_validation),
        baselines=not is_validation and "reward_baselines" in recipe.arguments,
    )
