"""Episodes from verl's vLLM servers: token ids in, token ids out, each verified as soon as it ends.

    start_servers(config, actor)   vLLM replicas next to the actor's GPUs; loads the actor's models too
    start_sampler(config)          vLLM replicas alone, with the weights of the model's folder
    Servers                        them at work: rollout(...), sleep(), publish(step)
    rollout(requests, ...)         episodes, all at once, each with its Gym server, verified as it ends

An `Episode` (episodes.py) is the one record that goes through the kit. Its ids and log-probs are those that vLLM
sampled, never re-tokenised text; text is decoded for the verifier, the tools and the logs only. What the
environment says (tool answers, observations) is tokenised once, and masked 0. An episode that could not
be generated or verified is data too: `status` says why, and no reward is made up for it.

Who owns the turns follows from the server (gym_client.Gym.kind): for `verify` and `step` servers `play`
below does; an `agent` server plays by itself against openai_server.py, and its token ids come back (`replay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

import env
import gym_client
from env import Task
from gym_client import Gym, GymError, ServerDownError, Session
from kit.config.load import sampling_gpus
from kit.data.episodes import ABORTED, Episode, Versions, append, fill, uncollected
from kit.errors import RunError
from kit.extras import images
from kit.rollout import chat

Requests = Sequence[tuple[Task, str]]  # with the id of the task's group
OnDone = Callable[[int, Episode], None]  # called with the index of an episode that ended
AT_ONCE = 32  # episodes that begin before the event loop does anything else
LONGEST_TOKEN = (
    256  # characters, at most, of any token; so a longer text than this times the room does not fit
)
REPLAYS = 3  # times that an episode is played again, after its Gym server went away under it


@dataclass
class Policy:
    """The sampler, and what it takes to talk to it in tokens."""

    client: LLMServerClient
    tokenizer: Any
    stop_ids: set[int]  # ids that end a turn
    max_prompt_length: int  # tokens
    max_response_length: int  # tokens of an episode after its prompt, observed ones included
    max_turns: int | None  # answers of the policy in one episode; None: as many as fit
    max_tool_chars: int  # a tool's answer is cut to this for the model, in the middle
    tool_format: str  # how the model writes tool calls: a name of vLLM's tool parsers, or of verl's
    deadline_s: float  # for one answer, from when its episode has a place; then its status is `generate_timeout`
    sampling: dict[str, Any] = field(
        default_factory=dict
    )  # vLLM's parameters of the rollout under way
    vocabulary: int | None = None  # ids that the model has
    seed: int | None = (
        None  # rollout.seed, where rollout.full_determinism asks for the same answers in every run
    )
    places: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(256)
    )  # for episodes that play at once
    version: int | None = (
        None  # of the weights that the servers must sample from: the step they were synced at
    )
    ahead: int = 0  # steps that they may be older, or newer (trainer.one_step_off)


def make_policy(
    config: DictConfig, client: LLMServerClient, data: Any, deadline_s: float
) -> Policy:
    """A Policy from verl's keys: data.max_*_length, rollout.multi_turn.*, and so many episodes at once as its engines
    take (rollout.max_num_seqs each). data: kit.runs.preparation.Data."""
    rollout = config.actor_rollout_ref.rollout
    turns, engines = rollout.multi_turn, sampling_gpus(config) // rollout.tensor_model_parallel_size
    return Policy(
        client,
        data.tokenizer,
        data.stop_ids,
        config.data.max_prompt_length,
        config.data.max_response_length,
        turns.max_assistant_turns,
        turns.max_tool_response_length,
        turns.format,
        deadline_s,
        vocabulary=data.model.vocab_size,
        seed=rollout.seed if rollout.full_determinism else None,
        places=asyncio.Semaphore(engines * rollout.max_num_seqs),
        ahead=config.trainer.one_step_off,
    )


def sampling_params(config: DictConfig, validate: bool) -> dict[str, Any]:
    """vLLM's sampling parameters from rollout.* (training) or rollout.val_kwargs.* (evaluation)."""
    source = (
        config.actor_rollout_ref.rollout.val_kwargs
        if validate
        else config.actor_rollout_ref.rollout
    )
    return {
        "temperature": source.temperature if source.do_sample else 0.0,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "logprobs": True,
    }


# --- servers -------------------------------------------------------------------------------------


async def start_servers(config: DictConfig, actor: Any) -> LLMServerManager:
    """Load the actor's models and start its vLLM servers, or those on GPUs of their own (rollout.nnodes); side by side
    where that is safe.

    vLLM sizes its KV cache by measuring free memory, which must not move meanwhile; told the size
    (engine_kwargs.vllm.kv_cache_memory_bytes) it does not measure, and both start at once.
    """
    rollout = config.actor_rollout_ref.rollout
    at_once = rollout.nnodes or (rollout.engine_kwargs.get("vllm") or {}).get(
        "kv_cache_memory_bytes"
    )
    manager = LLMServerManager(config, worker_group=None if rollout.nnodes else actor)  # type: ignore[arg-type]
    if not at_once:
        await asyncio.to_thread(actor.init_model)
    servers = asyncio.create_task(manager._initialize_llm_servers())
    if at_once:
        await asyncio.sleep(
            0.5
        )  # for the servers to ask the workers, which answer no one while they load, for devices
        await asyncio.to_thread(actor.init_model)
    await servers
    return manager


async def start_sampler(config: DictConfig, first: int = 0) -> LLMServerManager:
    """Start vLLM servers that load the model's own weights: to sample without training. first: of their numbers."""
    config = copy.deepcopy(config)
    rollout = config.actor_rollout_ref.rollout
    rollout.load_format, rollout.nnodes = "auto", rollout.nnodes or config.trainer.nnodes
    manager = LLMServerManager(config, start_rank=first)
    await manager._initialize_llm_servers()
    return manager


class Servers:
    """vLLM's replicas at work, beside the Gym servers: where episodes come from.

    actor: whose weights the replicas get (verl's CheckpointEngineManager); without one they keep those of their folder.
    players: kit.extras.rollout_workers.Players, which play in the place of this process.
    """

    def __init__(
        self,
        config: DictConfig,
        manager: LLMServerManager,
        actor: Any,
        policy: Policy,
        gym: Gym,
        loop: asyncio.Runner,
        players: Any = None,
    ):
        self.manager, self.policy, self.gym, self.loop, self.players = (
            manager,
            policy,
            gym,
            loop,
            players,
        )
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        replicas = manager.get_replicas()
        self.sync = (
            CheckpointEngineManager(config=engine, actor_wg=actor, replicas=replicas)
            if actor
            else None
        )
        self.asleep = False

    def rollout(
        self,
        requests: Requests,
        sampling: dict[str, Any],
        on_done: OnDone = lambda *_: None,
        baselines: bool = False,
    ) -> list[Episode]:
        """`rollout` with those sampling parameters; baselines: `rollout_with_baselines`."""
        return self.loop.run(self.play(requests, sampling, on_done, baselines))

    def play(
        self, requests: Requests, sampling: dict[str, Any], on_done: OnDone, baselines: bool
    ) -> Coroutine[Any, Any, list[Episode]]:
        """The same, to be waited for; by the processes of rollout.agent.num_workers, where there are some."""
        self.policy.sampling = sampling | images.banned(self.policy.tokenizer)
        if self.players:
            return self.players.rollout(requests, self.policy.sampling, on_done, baselines)
        return (rollout_with_baselines if baselines else rollout)(
            requests, self.policy, self.gym, on_done
        )

    def sleep(self) -> None:
        """vLLM gives back its GPU memory (free_cache_engine); `publish` wakes it."""
        if self.sync:
            self.sync.sleep_replicas()
            self.asleep = True

    def publish(self, step: int) -> None:
        """From now on vLLM samples from the actor's weights after `step`."""
        if self.sync:
            self.sync.update_weights(step)
            self.policy.version, self.asleep = step, False
            if self.players:
                self.players.set_version(step)


# --- turns ---------------------------------------------------------------------------------------


async def sample(
    policy: Policy, request_id: str, prompt_ids: list[int], max_tokens: int, **shown: Any
) -> tuple[list[int], list[float], Versions]:
    """One answer of the policy: (ids, log-probs, versions as in Episode), the stop token included. Raises GymError.

    request_id: of the episode and, after a `#`, its turn. shown: what images.shown gives beside ids. Failures of
    one request become a reason; a dead vLLM server raises ray.exceptions.RayError, one that still has the weights of
    another step RunError.
    """
    params = {**policy.sampling, "max_tokens": max_tokens}
    if (
        policy.seed is not None
    ):  # verl would give all answers to a prompt the same one, so that all are the same
        params["seed"] = zlib.crc32(f"{policy.seed} {request_id}".encode())
    try:
        async with asyncio.timeout(policy.deadline_s):
            # the episode's id keeps its turns on one replica, whose cache holds their prefix
            output = await policy.client.generate(
                request_id=request_id.partition("#")[0],
                prompt_ids=prompt_ids,
                sampling_params=params,
                **shown,
            )
    except TimeoutError:
        raise GymError(
            "generate_timeout", f"vLLM gave no answer within {policy.deadline_s:g} s"
        ) from None
    ids, told, now = list(output.token_ids), output.extra_fields, policy.version
    versions: Versions = told.get("versions", [(len(ids), told.get("global_steps", now))])
    if now is not None and (
        bad := [v for _, v in versions if v is None or abs(now - v) > policy.ahead]
    ):
        raise RunError(
            f"a vLLM server samples from the weights of step {bad[0]}, the trainer's are of step {now}: "
            "the sync did not reach it; see logs/ray of the run, then the same command goes on from the last checkpoint"
        )
    if output.stop_reason in ABORTED or not ids:
        raise GymError(
            "aborted", f"vLLM ended the request without an answer ({output.stop_reason})"
        )
    if output.log_probs is None or len(output.log_probs) != len(ids):
        raise GymError("no_log_probs", f"vLLM sent {len(ids)} tokens without a log-prob for each")
    return ids, list(output.log_probs), versions


async def play(
    episode: Episode, task: Task, session: Session, policy: Policy, request_id: str
) -> None:
    """Fill `episode`: turns of policy and environment until an answer without calls, a limit, or the world's end.

    On a `verify` server the policy's tool calls are run, in order; `judge` then has the last answer verified with all
    that came before it. On a `step` server every answer is a step, whose rewards are summed. Raises GymError.
    """
    _ask(episode, task, session, policy)
    while not episode.ended:
        begin = time.perf_counter()
        room = policy.max_response_length - len(episode.response_ids)
        seen, turn_id = (
            episode.prompt_ids + episode.response_ids,
            f"{request_id}#{len(episode.turns)}",
        )
        asked, pictures = images.shown(policy.tokenizer, seen, task)
        ids, log_probs, versions = await sample(policy, turn_id, asked, room, **pictures)
        _count(episode, "generate", begin)
        session.last_ids = ids  # for a verifier that is a function
        thought, text, calls = await chat.understand(policy, ids, task.tools)
        said = [gym_client.reasoning(thought)] if thought else []
        said += [gym_client.message(text)] if text or not calls else []
        said += calls
        episode.output += said
        append(episode, ids, log_probs, versions)
        if ids[-1] not in policy.stop_ids:
            episode.ended = "length"

        begin = time.perf_counter()
        items = await _react(episode, session, said, calls)
        _count(episode, "tools", begin)
        if episode.ended:
            break
        episode.output += items
        if policy.max_turns and len(episode.turns) >= policy.max_turns:
            episode.ended = "turns"
            break
        names = {call["call_id"]: call["name"] for call in calls}
        messages = [chat.observed_message(item, names, policy.max_tool_chars) for item in items]
        room = policy.max_response_length - len(episode.response_ids)
        if (
            sum(len(m["content"]) for m in messages) > LONGEST_TOKEN * room
        ):  # too long, whatever the tokenizer
            episode.ended = "length"
            break
        new = chat.observed_ids(messages, policy.tokenizer, policy.stop_ids)
        if len(episode.response_ids) + len(new) >= policy.max_response_length:
            episode.ended = "length"
            break
        append(episode, new)


async def judge(episode: Episode, session: Session) -> None:
    """What a `verify` server says of an episode that was played; a `step` server has said it. Raises GymError."""
    if session.kind == "verify":
        begin = time.perf_counter()
        verdict = await session.verify(gym_client.response(episode.output))
        _count(episode, "verify", begin)
        _settle(episode, verdict)


def _ask(episode: Episode, task: Task, session: Session, policy: Policy) -> None:
    """The prompt, with what the environment says first. Raises GymError('no_prompt' | 'prompt_too_long')."""
    observation = session.observation
    if task.prompt_ids and not observation:
        return
    if not task.messages and not observation:
        raise GymError(
            "no_prompt", f"{task.row_id}: its input is empty, and {task.server} says nothing either"
        )
    limit = f"data.max_prompt_length={policy.max_prompt_length}"
    if (
        observation and len(observation) > LONGEST_TOKEN * policy.max_prompt_length
    ):  # do not spend seconds on it
        raise GymError(
            "prompt_too_long",
            f"{task.row_id}: {len(observation)} characters observed, over {limit}",
        )
    if observation:
        episode.prompt_ids = chat.first_prompt_ids(
            task.messages, observation, task.tools, policy.tokenizer, task.row_id
        )
    else:
        episode.prompt_ids = env.encode(task.messages, task.tools, policy.tokenizer, task.row_id)
    if len(episode.prompt_ids) > policy.max_prompt_length:
        why = f"{len(episode.prompt_ids)} tokens with the observation"
        raise GymError("prompt_too_long", f"{task.row_id}: {why}, over {limit}")


async def _react(
    episode: Episode, session: Session, said: list[dict[str, Any]], calls: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What the environment answers to what was said, as Responses items; sets `ended` where that is the end."""
    if session.kind == "step":
        turn = await session.step(gym_client.response(said))
        episode.turn_rewards.append(turn.reward)
        episode.reward = sum(episode.turn_rewards)
        if turn.terminated or turn.truncated:
            episode.ended = "terminated" if turn.terminated else "truncated"
            return []
        told = (
            [{"role": "user", "type": "message", "content": turn.observation}]
            if turn.observation
            else []
        )
        return [
            *(
                gym_client.function_call_output(o["call_id"], o["output"])
                for o in turn.tool_outputs
            ),
            *told,
        ]
    if not episode.ended and (not calls or not session.executable):
        episode.ended = "stop"
    if episode.ended:
        return []
    answers = [
        (call["call_id"], await session.call_tool(call["name"], call["arguments"]))
        for call in calls
    ]
    return [gym_client.function_call_output(call_id, answer) for call_id, answer in answers]


def replay(episode: Episode, response: dict[str, Any], policy: Policy) -> None:
    """Fill `episode` from the Response of an agent's /run, whose model calls carry their token ids.

    Raises GymError('not_contiguous' | 'no_tokens').
    """
    fill(episode, response["output"])
    if not episode.turns:
        why = "answers without token ids: is its model server the kit's?"
        raise GymError("no_tokens", f"the agent of {episode.server} {why}")
    if response.get("incomplete_details") or episode.response_ids[-1] not in policy.stop_ids:
        episode.ended = "length"
    else:  # an agent that is out of turns comes back with the answer to a call
        episode.ended = (
            "turns" if episode.output[-1].get("type") == "function_call_output" else "stop"
        )


def _count(episode: Episode, what: str, begin: float) -> None:
    episode.timings[what] = episode.timings.get(what, 0.0) + time.perf_counter() - begin


def _settle(episode: Episode, verdict: gym_client.Verdict) -> None:
    episode.reward, episode.reward_components, episode.verdict = (
        verdict.reward,
        verdict.components,
        verdict.details,
    )
    episode.timings["verify_call"] = verdict.latency_s


# --- episodes ------------------------------------------------------------------------------------


def in_groups(tasks: Iterable[Task], n: int, name: str) -> list[tuple[Task, str]]:
    """Each task n times, with the id of its group: `name`, which no other batch of the run has, and its place."""
    return [(task, f"{name}/{i}") for i, task in enumerate(tasks) for _ in range(n)]


async def rollout(
    requests: Requests, policy: Policy, gym: Gym, on_done: OnDone = lambda *_: None
) -> list[Episode]:
    """An episode for each (task, group id), in their order; `on_done(index, episode)` sees each as it ends.

    Each is verified as it ends, while others generate, the next one in its place. Failures of the environment become a
    status; a dead vLLM server raises (ray.exceptions.RayError).
    """
    members: Counter[str] = Counter()
    greedy = "" if policy.sampling.get("temperature", 1.0) else "greedy-"

    async def play_once(task: Task, group_id: str, request_id: str) -> Episode:
        episode = Episode(task.row_id, group_id, task.server, task.prompt_ids, row=task.row)
        try:
            agent = await gym.kind(task.server) == "agent"
            async with contextlib.AsyncExitStack() as stack:
                async with policy.places:
                    if agent:
                        begun = policy.version
                        verdict, response = await gym.run(
                            task.server, task.row, policy.deadline_s, policy.vocabulary
                        )
                        replay(episode, response, policy)
                        episode.versions = [
                            (sum(episode.response_mask), begun)
                        ]  # the oldest that it can be
                        _settle(episode, verdict)
                    else:
                        session = await stack.enter_async_context(
                            gym.session(task.server, task.row)
                        )
                        await play(episode, task, session, policy, request_id)
                if not agent:
                    await judge(episode, session)
            check_ids(episode)
        except (ServerDownError, RunError, ray.exceptions.RayError):
            raise  # these end the run
        except GymError as error:
            episode.status, episode.error, episode.reward = error.reason, str(error), None
            episode.lost = error.lost
        except env.DataError as error:  # the chat template does not take what the environment said
            episode.status, episode.error, episode.reward = "template", str(error), None
        except (
            Exception
        ) as error:  # of what a policy, a row or a server said, and nobody thought of
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{error!r} at {where.filename}:{where.lineno}, a fault of the kit's: please report it"
            episode.status, episode.error, episode.reward = "unforeseen", why, None
        return episode

    async def one(index: int, task: Task, group_id: str, request_id: str) -> Episode:
        for again in range(
            REPLAYS + 1
        ):  # the server went away under an open session: a new one may live
            episode = await play_once(task, group_id, f"{request_id}{'again-' * again}")
            if not episode.lost:
                break
        on_done(index, episode)
        return episode

    episodes = []
    with uncollected():
        for i, (task, group_id) in enumerate(requests):
            coroutine = one(i, task, group_id, f"{greedy}{group_id}-{members[group_id]}")
            episodes.append(asyncio.create_task(coroutine))
            members[group_id] += 1
            if i % AT_ONCE == 0:  # who else waits for the loop has its turn
                await asyncio.sleep(0)
        return await asyncio.gather(*episodes)


def check_ids(episode: Episode) -> None:
    """An episode's lists belong together. Raises GymError('bad_ids') with what does not fit."""
    length = len(episode.response_ids)
    sampled = sum(end - begin for begin, end, _ in episode.turns)
    if not length or len(episode.response_mask) != length or len(episode.log_probs) != length:
        lists = f"{length} ids, {len(episode.response_mask)} of mask, {len(episode.log_probs)} log-probs"
        raise GymError(
            "bad_ids", f"{episode.row_id}: the response's lists differ in length: {lists}"
        )
    if sum(episode.response_mask) != sampled:
        why = f"{sampled} sampled tokens, {sum(episode.response_mask)} in the mask"
        raise GymError("bad_ids", f"{episode.row_id}: {why}")


async def rollout_with_baselines(
    requests: Requests, policy: Policy, gym: Gym, on_done: OnDone = lambda *_: None
) -> list[Episode]:
    """`rollout`, and beside it a greedy answer for each group, whose reward becomes its `baseline` (ReMax: Li et al.
    2023, arXiv:2310.10505, algorithm 2). A group without one fails, as `no_baseline`. Raises GymError for an agent.
    """
    agents = [
        server
        for server in {task.server for task, _ in requests}
        if await gym.kind(server) == "agent"
    ]
    if agents:
        why = f"wants greedy answers, which the agent of {agents[0]} cannot give; choose another"
        raise GymError("no_greedy", f"algorithm.adv_estimator {why}")
    once = [
        (task, group_id)
        for group_id, task in {group_id: task for task, group_id in requests}.items()
    ]
    greedy = dataclasses.replace(policy, sampling={**policy.sampling, "temperature": 0.0})
    episodes, baselines = await asyncio.gather(
        rollout(requests, policy, gym, on_done), rollout(once, greedy, gym, on_done)
    )
    of = {e.group_id: e for e in baselines}
    for e in episodes:
        e.baseline = of[e.group_id].reward
        if e.status == "ok" and e.baseline is None:
            e.status, e.reward, e.error = (
                "no_baseline",
                None,
                f"the greedy answer failed: {of[e.group_id].error}",
            )
    return episodes
