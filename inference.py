"""Rollouts: episodes from verl's vLLM servers, token ids in and token ids out.

    run_turns(episode, ...)       the turns of one episode: the function to edit first
    rollout(requests, ...)        a batch of episodes, concurrently, each verified as it ends
    start_servers(...)            vLLM replicas next to the actor's GPUs, and the actor's models
    start_standalone_servers()    vLLM replicas without an actor: the weights of the model folder
    Servers                       these replicas in a run: rollout, sleep, update_weights

An `Episode` (kit/data/episode.py) is the one record of the kit. Sampled tokens keep the ids and the
log-probs that vLLM returned. Their text is decoded only for the verifier, the tools and the logs,
and is never tokenized again. Observations (tool outputs, messages of the environment) are tokenized
once, and their mask is 0. A failed episode is data too: `status` has the reason, and there is no
reward.

The kind of the Gym server (`Gym.kind`) decides who runs the turns. For `verify` and `step` servers
it is `run_turns`. An `agent` or `environment` server runs the turns itself, and samples from the
endpoint of kit/engine/endpoint. Its Response has the token ids (`episode_from_response`), which
must be those that the endpoint sampled. With `env.agent` an agent of the recipe runs the turns
(extras/agents), and the row's verifier verifies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.ray_utils import auto_await
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import LLMServerManager

import env
import gym_client
from env import Json, Task
from gym_client import RUNS_EPISODES, Gym, GymError, ServerDownError, Session
from kit.chat import responses as chat
from kit.chat.parsed_response import ParsedResponse
from kit.chat.template import TURNS
from kit.data.episode import (
    Episode,
    TrainingRow,
    append_tokens,
    from_output_items,
    from_turn_items,
    gc_paused,
    set_sampled,
)
from kit.data.reward_scale import find_scale
from kit.engine import weight_proof
from kit.engine.interfaces import EpisodeWorkers, EventLoop, OnDone
from kit.engine.sampling import (
    MAX_CHARS_PER_TOKEN,
    EpisodeRequest,
    RolloutContext,
    SampleStore,
    Sampling,
    request_group,
    sample,
)
from kit.engine.worker_group import WorkerGroup
from kit.errors import RunError
from kit.recipe.keys import ROLLOUT
from kit.recipe.recipe import Recipe

logger = logging.getLogger(__name__)
MAX_SESSION_RETRIES = 3  # new attempts at an episode whose Gym server lost the session
YIELD_EVERY = 32  # after this many episodes are started, other tasks of the event loop may run
# verl's servers first ask the workers for their devices (vLLMReplica.launch_servers in verl 0.9.1).
# A worker that loads a model does not answer, and no event says that all have.
DEVICE_ANSWERS_S = 0.5


# =================================================================================================
# EDIT HERE: the turns of an episode
# =================================================================================================
# For another agent loop, change `run_turns`. For other ways to end an episode, change `run_tools`,
# `take_step` and `append_observations`. Keep these rules, on which the trainer relies:
#   - Only `append_tokens` extends the response. Pass it log-probs for sampled tokens only.
#   - A sampled token never changes, and no text replaces it.
#   - A failure raises GymError. It never becomes a reward.


async def run_turns(
    episode: Episode,
    task: Task,
    session: Session,
    context: RolloutContext,
    sampling: Sampling,
    request_id: str,
) -> None:
    """Alternate turns of the policy and the environment until `episode.ended` is set.

    `ended` is then the reason: a response without tool calls, a limit of tokens or turns, or the
    end of the environment. request_id: of the episode (`EpisodeId`). Raises GymError.
    """
    check_template(session, context)
    build_prompt(episode, task, session, context)
    while not episode.ended:
        response = await sample_turn(episode, task, context, sampling, request_id)
        observations = await step_environment(episode, session, response)
        if not episode.ended:
            append_observations(episode, task, response.calls, observations, context)


def check_template(session: Session, context: RolloutContext) -> None:
    """Check that the chat template has the turns of a game. Raises RunError."""
    template = context.template
    if session.kind == "step" and context.max_turns != 1 and TURNS in template.failures:
        raise RunError(template.describe_failure(TURNS))


def build_prompt(episode: Episode, task: Task, session: Session, context: RolloutContext) -> None:
    """Set the prompt: the task's messages, then the environment's first observation if it has one.

    If there is no observation, the episode keeps the task's `prompt_ids`.
    Raises GymError('no_prompt' | 'prompt_too_long').
    """
    observation = session.observation
    episode.tools = [env.flatten_tool(tool) for tool in task.tools]
    episode.observation = observation or ""
    if task.prompt_ids and not observation:
        return
    if not task.messages and not observation:
        problem = f"its input is empty, and {task.server} returned no first observation"
        raise GymError("no_prompt", f"{task.row_id}: {problem}. Add an input to the row.")
    limit = context.max_prompt_length
    advice = f"over data.max_prompt_length={limit}. Raise it, or shorten the observation."
    if observation and len(observation) > MAX_CHARS_PER_TOKEN * limit:  # tokenizing is slow
        problem = f"{task.row_id}: {len(observation)} characters observed, {advice}"
        raise GymError("prompt_too_long", problem)
    template = context.template.with_arguments(task.template_arguments, task.row_id)
    episode.prompt_ids = template.encode_prompt(
        task.messages, task.tools, task.row_id, observation, task.images
    )
    length = len(episode.prompt_ids)
    if length > limit:
        problem = f"{task.row_id}: {length} tokens with the observation, {advice}"
        raise GymError("prompt_too_long", problem)


async def sample_turn(
    episode: Episode, task: Task, context: RolloutContext, sampling: Sampling, request_id: str
) -> ParsedResponse:
    """Sample one response of the policy, append it to the episode, and return it parsed.

    If the response does not end with a stop token, it used all remaining tokens. Then `ended`
    becomes "length". Raises GymError.
    """
    begin = time.perf_counter()
    ids = episode.prompt_ids + episode.response_ids
    prompt_ids, image_inputs = context.processor.engine_inputs(ids, task)
    turn_id = f"{request_id}#{len(episode.turns)}"
    max_tokens = context.max_response_length - len(episode.response_ids)
    sampled = await sample(context, sampling, turn_id, prompt_ids, max_tokens, **image_inputs)
    add_time(episode, "generate", begin)
    response = await chat.parse_response(context.template, sampled.ids, task.tools, ids)
    episode.output += response.items
    episode.responses.append(response)
    append_tokens(episode, sampled.ids, sampled.log_probs, sampled.policy_versions)
    if sampled.ids[-1] not in context.stop_ids:
        episode.ended = "length"
    return response


async def step_environment(
    episode: Episode, session: Session, response: ParsedResponse
) -> list[Json]:
    """Pass a response to the environment, and return the observations.

    They are items of OpenAI's Responses format. Sets `episode.ended` if the environment or the
    policy ends the episode. Raises GymError.
    """
    begin = time.perf_counter()
    if session.kind == "step":
        observations = await take_step(episode, session, response)
    else:
        observations = await run_tools(episode, session, response.calls)
    add_time(episode, "tools", begin)
    return observations


async def take_step(episode: Episode, session: Session, response: ParsedResponse) -> list[Json]:
    """Take one step of a `step` server, and add its reward to the reward of the episode."""
    result = await session.step(gym_client.make_response(response.items), response)
    episode.turn_rewards.append(result.reward)
    episode.reward = sum(episode.turn_rewards)
    if result.terminated:
        episode.ended = "terminated"
    elif result.truncated:
        episode.ended = "truncated"
    observations = [
        gym_client.function_call_output(output["call_id"], output["output"])
        for output in result.tool_outputs
    ]
    if result.observation:
        message = {"role": "user", "type": "message", "content": result.observation}
        observations.append(message)
    return observations


async def run_tools(episode: Episode, session: Session, calls: Sequence[Json]) -> list[Json]:
    """Run the tool calls of a response on a `verify` server, in order, and return their outputs.

    A response without calls ends the episode. If the server runs no tools, a response with calls
    ends it too, since the call itself is the answer.
    """
    outputs: list[Json] = []
    if not episode.ended and (not calls or not session.executable):
        episode.ended = "stop"
    if episode.ended:
        return outputs
    for call in calls:
        output = await session.call_tool(call["name"], call["arguments"])
        outputs.append(gym_client.function_call_output(call["call_id"], output))
    return outputs


def append_observations(
    episode: Episode,
    task: Task,
    calls: Sequence[Json],
    observations: list[Json],
    context: RolloutContext,
) -> None:
    """Append the tokens of observations to the response, with a mask of 0.

    At a limit of turns or tokens, end the episode without these tokens. At least one token must be
    left for the next response. Raises GymError('template').
    """
    episode.output += observations
    if context.max_turns and len(episode.turns) >= context.max_turns:
        episode.ended = "turns"
        return
    names = {call["call_id"]: call["name"] for call in calls}
    messages = [
        chat.observation_message(item, names, context.max_tool_chars) for item in observations
    ]
    room = context.max_response_length - len(episode.response_ids)
    characters = sum(len(message["content"]) for message in messages)
    if characters > MAX_CHARS_PER_TOKEN * room:  # tokenizing takes seconds
        episode.ended = "length"
        return
    last_id = episode.response_ids[-1]
    template = context.template.with_arguments(task.template_arguments, task.row_id)
    new_ids = template.encode_continuation(messages, last_id)
    if len(new_ids) >= room:
        episode.ended = "length"
        return
    append_tokens(episode, new_ids)


async def verify(episode: Episode, session: Session) -> None:
    """Set the reward of an episode on a `verify` server. A `step` server has set it already.

    Raises GymError.
    """
    if session.kind != "verify":
        return
    begin = time.perf_counter()
    last = episode.responses[-1] if episode.responses else None
    result = await session.verify(gym_client.make_response(episode.output), last)
    add_time(episode, "verify", begin)
    set_reward(episode, result)


# =================================================================================================
# TRY NOT TO MODIFY: the machinery around the turns
# =================================================================================================
# --- the record of an episode --------------------------------------------------------------------


def add_time(episode: Episode, name: str, begin: float) -> None:
    """Add the seconds since `begin` (time.perf_counter) to a timing of the episode."""
    seconds = time.perf_counter() - begin
    episode.timings[name] = episode.timings.get(name, 0.0) + seconds


def set_reward(episode: Episode, result: gym_client.VerifyResult) -> None:
    """Copy the result of a verifier into the episode."""
    episode.reward = result.reward
    episode.reward_components = result.components
    episode.verify_result = result.details
    episode.timings["verify_call"] = result.latency_s


# --- one episode ---------------------------------------------------------------------------------


async def run_episode(
    request: EpisodeRequest,
    sampling: Sampling,
    context: RolloutContext,
    gym: Gym,
) -> Episode:
    """Make one attempt at an episode, and verify it.

    Raises the errors that end the run: ServerDownError, RunError, ray.exceptions.RayError. Any
    other error sets the episode's `status`.
    """
    task = request.task
    episode = Episode(task.row_id, request.id.group_id, task.server, task.prompt_ids, row=task.row)
    episode.images = [image.source for image in task.images]
    episode.scale = find_scale(context.scales, task.server, task.row.get("data_source"))
    try:
        if await gym.kind(task.server) in RUNS_EPISODES:
            await run_agent(episode, request, context, gym)
        else:
            await run_session(episode, request, context, gym, sampling)
        check_ids(episode, context)
        limit_components(episode, context)
    except (ServerDownError, RunError, ray.exceptions.RayError):
        raise
    except TimeoutError:  # of run_session
        problem = f"the turns took over {context.episode_timeout_s:g} s, half of"
        problem += " trainer.stage_timeout_s. Make the server faster, or raise that."
        record_failure(episode, GymError("timeout", problem))
    except Exception as error:
        record_failure(episode, error)
    return episode


async def run_session(
    episode: Episode,
    request: EpisodeRequest,
    context: RolloutContext,
    gym: Gym,
    sampling: Sampling,
) -> None:
    """Run the turns of an episode, and verify it.

    The slot is released before the verification, so that the next episode can start. The turns have
    a timeout: each call has one, but a server decides how many calls there are.
    """
    task, episode_id = request
    async with contextlib.AsyncExitStack() as stack:
        async with context.episode_slots, asyncio.timeout(context.episode_timeout_s):
            opening = gym.session(task.server, task.row, episode_id.gym_index)
            session = await stack.enter_async_context(opening)
            arguments = (episode, task, session, context, sampling, episode_id.request_id)
            if context.agent:
                await stack.enter_async_context(context.agent.run_turns(*arguments))
            else:
                await run_turns(*arguments)
        await verify(episode, session)


async def run_agent(
    episode: Episode, request: EpisodeRequest, context: RolloutContext, gym: Gym
) -> None:
    """Let a Gym server run and verify the whole episode, within the timeout of its turns."""
    task = request.task
    index = request.id.gym_index
    limit_s = min(context.timeout_s, context.episode_timeout_s)
    async with context.episode_slots:
        run = await gym.run(task.server, task.row, limit_s, context.vocab_size, index)
    episode_from_response(episode, run.response, context)
    set_reward(episode, run.result)


def episode_from_response(episode: Episode, response: Json, context: RolloutContext) -> None:
    """Fill `episode` from the Response of an agent's /run, whose model calls have token ids.

    Raises GymError('not_contiguous' | 'not_sampled' | 'no_tokens' | 'prompt_too_long').
    """
    from_output_items(episode, response["output"])
    starts = [0, *(turn.output_end for turn in episode.turns)]
    for start, turn in zip(starts, episode.turns, strict=False):
        episode.responses.append(from_turn_items(episode.output[start : turn.output_end]))
    if context.samples:
        take_samples(episode, context.samples)
    is_incomplete = bool(response.get("incomplete_details"))
    if not episode.turns and is_incomplete:
        problem = (
            f"the agent's first prompt is over data.max_prompt_length={context.max_prompt_length}"
        )
        raise GymError("prompt_too_long", f"{problem}. Raise it, or shorten the row.")
    if not episode.turns:
        problem = f"the agent of {episode.server} answers without token ids"
        raise GymError("no_tokens", f"{problem}. Set its model server to the kit's endpoint.")
    lengths = (len(episode.prompt_ids), len(episode.response_ids))
    limits = (context.max_prompt_length, context.max_response_length)
    if lengths[0] > limits[0] or lengths[1] > limits[1]:
        problem = (
            f"the agent left out calls: {lengths} tokens of prompt and response, over {limits}"
        )
        raise GymError("not_contiguous", f"{problem}. Return all model calls from /run.")
    ends_with_stop = episode.response_ids[-1] in context.stop_ids
    has_all_turns = context.max_turns is not None and len(episode.turns) >= context.max_turns
    if is_incomplete and ends_with_stop and has_all_turns:
        episode.ended = "turns"
    elif is_incomplete or not ends_with_stop:
        episode.ended = "length"
    elif episode.output[-1].get("type") == "function_call_output":
        episode.ended = "turns"  # the agent reached its own limit of turns after this tool call
    else:
        episode.ended = "stop"


def take_samples(episode: Episode, samples: SampleStore) -> None:
    """Set the log-probs and the policy versions of an agent's episode from what was sampled.

    Raises GymError('not_sampled') for ids that the policy endpoint did not sample: an agent could
    train the policy on any text.
    """
    for turn in episode.turns:
        prompt_ids = episode.prompt_ids + episode.response_ids[: turn.start]
        sampled = samples.take(prompt_ids, episode.response_ids[turn.start : turn.end])
        set_sampled(episode, turn, sampled.log_probs, sampled.policy_versions)


def limit_components(episode: Episode, context: RolloutContext) -> None:
    """Remove reward components beyond the first names of a server: each name is a metric."""
    names = context.component_names.setdefault(episode.server, set())
    for name in list(episode.reward_components):
        if len(names) < gym_client.MAX_COMPONENTS:
            names.add(name)
        elif name not in names:
            del episode.reward_components[name]


def check_ids(episode: Episode, context: RolloutContext) -> None:
    """Check that the lists of an episode fit together, and its branches into a micro-batch.

    Raises GymError('bad_ids' | 'prompt_too_long').
    """
    for row in episode.rows:
        if problem := find_bad_ids(row):
            raise GymError("bad_ids", f"{episode.row_id}: {problem}")
    for branch in episode.branches:
        length = len(branch.prompt_ids) + len(branch.response_ids)
        if length > context.max_length:
            raise GymError(
                "prompt_too_long",
                f"a branch of the agent's episode has {length} tokens, and a training row may have "
                f"{context.max_length} (data.max_prompt_length + data.max_response_length). Raise "
                "one of them.",
            )


def find_bad_ids(row: TrainingRow) -> str:
    """Return how the lists of a training row do not fit together, "" if they do."""
    length = len(row.response_ids)
    masked_in = sum(row.response_mask)
    sampled = sum(turn.end - turn.start for turn in row.turns)
    if not length or len(row.response_mask) != length or len(row.log_probs) != length:
        lengths = f"{len(row.response_mask)} of mask, {len(row.log_probs)} log-probs"
        return f"the response's lists differ in length: {length} ids, {lengths}"
    if masked_in != sampled:
        return f"{sampled} sampled tokens, {masked_in} in the mask"
    return ""


def record_failure(episode: Episode, error: Exception) -> None:
    """Set the status and the error of an episode that failed, and remove its reward."""
    episode.reward = None
    episode.error = str(error)
    if isinstance(error, GymError):
        episode.status = error.reason
        episode.session_lost = error.session_lost
        episode.failure = error.details
    elif isinstance(error, env.DataError):  # the chat template rejects the environment's text
        episode.status = "template"
    else:  # the kit did not foresee this output of a policy, a row or a server
        line = traceback.extract_tb(error.__traceback__)[-1]
        episode.status = "unforeseen"
        episode.error = (
            f"{error!r} at {line.filename}:{line.lineno}. "
            "This is a bug in Quintet. Report it (CONTRIBUTING.md)."
        )


# --- a batch of episodes -------------------------------------------------------------------------


def ignore_episode(index: int, episode: Episode) -> None:
    """Do nothing: the default of `on_done`."""


async def rollout(
    requests: Sequence[EpisodeRequest],
    sampling: Sampling,
    context: RolloutContext,
    gym: Gym,
    on_done: OnDone = ignore_episode,
) -> list[Episode]:
    """Run an episode for each request, concurrently, and return them in the order of requests.

    Each episode is verified when its turns end, while others still generate. If the environment
    fails, the episode's `status` has the reason. Raises RunError, ServerDownError, and
    ray.exceptions.RayError if a vLLM server is dead.

    on_done: is called when an episode ends, with the index of its request.
    """

    async def run_one(index: int, request: EpisodeRequest) -> Episode:
        episode = await run_with_retries(request, sampling, context, gym)
        on_done(index, episode)
        return episode

    tasks = []
    with gc_paused():
        for index, request in enumerate(requests):
            tasks.append(asyncio.create_task(run_one(index, request)))
            if index % YIELD_EVERY == 0:  # thousands of tasks in a row would block other tasks
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)


async def run_with_retries(
    request: EpisodeRequest,
    sampling: Sampling,
    context: RolloutContext,
    gym: Gym,
) -> Episode:
    """Run an episode, and start it again under a new id if the Gym server lost its session.

    A stage ends if no episode ends, so none starts again after half of its time.
    """
    task, episode_id = request
    began = time.monotonic()
    episode = await run_episode(request, sampling, context, gym)
    for attempt in range(1, MAX_SESSION_RETRIES + 1):
        seconds = time.monotonic() - began
        if not episode.session_lost or seconds > context.episode_timeout_s / 2:
            break
        again = EpisodeRequest(task, episode_id._replace(attempt=attempt))
        episode = await run_episode(again, sampling, context, gym)
    if episode.status == "ok":
        for after_episode in context.after_episode:
            await after_episode(episode, gym)
    return episode


async def rollout_with_baselines(
    requests: Sequence[EpisodeRequest],
    sampling: Sampling,
    context: RolloutContext,
    gym: Gym,
    on_done: OnDone = ignore_episode,
) -> list[Episode]:
    """Run `rollout`, and concurrently one greedy episode per group: its reward is the `baseline`.

    ReMax: Li et al. 2023, arXiv:2310.10505, algorithm 2. If the greedy episode fails, the others
    of its group fail as `no_baseline`. Raises GymError('no_greedy') for a server with an agent.
    on_done: also gets the greedy episodes, each with the number of its group as index.
    """
    tasks_by_group = {request.id.group_id: request.task for request in requests}
    for server in {task.server for task in tasks_by_group.values()}:
        if await gym.kind(server) in RUNS_EPISODES:
            problem = f"needs greedy responses, which the agent of {server} cannot give"
            raise GymError("no_greedy", f"algorithm.adv_estimator {problem}. Choose another one.")
    greedy_requests = []
    for group_id, task in tasks_by_group.items():
        greedy_requests += request_group(task, group_id, 1, is_baseline=True)
    greedy_sampling = {**sampling, "temperature": 0.0}
    episodes, greedy_episodes = await asyncio.gather(
        rollout(requests, sampling, context, gym, on_done),
        rollout(greedy_requests, greedy_sampling, context, gym, on_done),
    )
    greedy_of_group = {episode.group_id: episode for episode in greedy_episodes}
    for episode in episodes:
        greedy = greedy_of_group[episode.group_id]
        episode.baseline = greedy.reward
        if episode.status == "ok" and greedy.reward is None:
            episode.status = "no_baseline"
            episode.reward = None
            episode.error = f"the greedy answer failed: {greedy.error}"
    return episodes


# --- the vLLM servers ----------------------------------------------------------------------------


def monkey_patch_server_prints() -> None:
    """Write to the log what verl's manager of servers prints: the addresses of the servers."""
    llm_server.print = logger.debug  # type: ignore[attr-defined]


async def start_servers(recipe: Recipe, actor: WorkerGroup) -> LLMServerManager:
    """Load the actor's models and start its vLLM servers, concurrently where that is safe.

    The servers are on the actor's GPUs, or on others (rollout.nnodes). vLLM measures the free
    memory to choose the size of its KV cache. If models load on the same GPU during this, the size
    is wrong. If engine_kwargs.vllm.kv_cache_memory_bytes sets the size, vLLM does not measure.
    """
    monkey_patch_server_prints()
    rollout = recipe.rollout
    has_fixed_cache = (rollout.engine_kwargs.get("vllm") or {}).get("kv_cache_memory_bytes")
    worker_group = None if rollout.nnodes else actor
    config = recipe.for_verl()
    manager = LLMServerManager(config, worker_group=worker_group)  # type: ignore[arg-type]
    if not rollout.nnodes and not has_fixed_cache:
        await asyncio.to_thread(actor.init_model)
        await manager._initialize_llm_servers()
        return manager
    servers = asyncio.create_task(manager._initialize_llm_servers())
    await asyncio.sleep(DEVICE_ANSWERS_S)
    await asyncio.to_thread(actor.init_model)
    await servers
    return manager


async def start_standalone_servers(recipe: Recipe, start_rank: int = 0) -> LLMServerManager:
    """Start vLLM servers with the weights of the model folder, to sample without training.

    start_rank: the number of the first replica.
    """
    monkey_patch_server_prints()
    config = recipe.for_verl()
    rollout = config.actor_rollout_ref.rollout
    rollout.load_format = "auto"
    rollout.nnodes = rollout.nnodes or config.trainer.nnodes
    manager = LLMServerManager(config, start_rank=start_rank)
    await manager._initialize_llm_servers()
    return manager


class WeightSync(CheckpointEngineManager):
    """verl's manager of syncs. No replica samples before it has proved its weights.

    proof: the metric of the last sync. is_checked: whether the engine can be checked.
    """

    is_checked = True
    is_proved = True
    step: int | None = None
    proof: Mapping[str, float] = MappingProxyType({})

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> None:
        """Send the actor's weights to all replicas. Raises RunError if one has others."""
        self.step = global_steps
        self.is_proved = not self.is_checked
        await super().update_weights(global_steps)
        await self.prove()

    @auto_await
    async def resume_generation_replicas(self) -> None:
        """Let the replicas sample again. verl calls it at the end of a sync, too."""
        await self.prove()
        await super().resume_generation_replicas()

    async def prove(self) -> None:
        """Check the last sync, once."""
        if not self.is_proved:
            self.proof = await weight_proof.ask_replicas(self.replicas, self.step)
            self.is_proved = True


class Servers:
    """The vLLM replicas and the Gym servers of a run: the source of its episodes.

    actor: the trainer's worker group, whose weights the replicas receive (verl's
    CheckpointEngineManager). Without it they keep the weights of the model folder.
    workers: of an optional feature, which run the episodes instead of this process, or None.
    """

    def __init__(
        self,
        recipe: Recipe,
        manager: LLMServerManager,
        actor: WorkerGroup | None,
        context: RolloutContext,
        gym: Gym,
        loop: EventLoop,
        workers: EpisodeWorkers | None = None,
    ):
        self.manager = manager
        self.context = context
        self.gym = gym
        self.loop = loop
        self.workers = workers
        self.is_asleep = False
        self.checkpoint_manager: WeightSync | None = None
        settings = omega_conf_to_dataclass(recipe.for_verl(f"{ROLLOUT}.checkpoint_engine"))
        replicas = manager.get_replicas()
        if actor:
            self.checkpoint_manager = WeightSync(
                config=settings,
                actor_wg=actor,  # type: ignore[arg-type]
                replicas=replicas,
            )
            obstacle = weight_proof.find_obstacle(recipe)
            self.checkpoint_manager.is_checked = not obstacle
            if obstacle:
                weight_proof.warn_once(f"{obstacle}, so no sync of the weights is checked")
            else:
                weight_proof.attach_to_group(actor, recipe.rollout.dtype)

    def rollout(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_done: OnDone = ignore_episode,
        baselines: bool = False,
    ) -> list[Episode]:
        """Wait for `rollout` of this module, or with `baselines` for `rollout_with_baselines`."""
        return self.loop.run(self.rollout_async(requests, sampling, on_done, baselines))

    def rollout_async(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        on_done: OnDone,
        baselines: bool,
    ) -> Coroutine[Any, Any, list[Episode]]:
        """Return a coroutine that runs the episodes, here or in the workers."""
        sampling = sampling | self.context.processor.sampling_params()
        if self.context.samples:
            self.context.samples.begin_batch(sampling)
        if self.workers:
            return self.workers.rollout(requests, sampling, on_done, baselines)
        run = rollout_with_baselines if baselines else rollout
        return run(requests, sampling, self.context, self.gym, on_done)

    def start_rollout(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, baselines: bool = False
    ) -> None:
        """Do nothing: `rollout` samples a batch. With trainer.one_step_off, this starts it."""

    def sleep(self) -> None:
        """Free vLLM's GPU memory (rollout.free_cache_engine). `update_weights` wakes vLLM."""
        if self.checkpoint_manager:
            self.checkpoint_manager.sleep_replicas()
            self.is_asleep = True

    def update_weights(self, step: int) -> Mapping[str, float]:
        """Send the actor's weights after `step` to vLLM, which then samples from them.

        Returns metrics. Raises RunError if a replica does not have these weights.
        """
        if not self.checkpoint_manager:
            return {}
        self.checkpoint_manager.update_weights(step)
        self.is_asleep = False
        self.context.policy_version = step
        if self.workers:
            self.workers.set_policy_version(step)
        return self.checkpoint_manager.proof
