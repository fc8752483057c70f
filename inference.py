"""Episodes from verl's vLLM servers: token ids in, token ids out, each verified as soon as it ends.

    start_servers(config, actor)   vLLM replicas next to the actor's GPUs; loads the actor's models too
    start_sampler(config)          vLLM replicas alone, with the weights of the model's folder
    weight_sync(...)               the actor's weights to every replica
    rollout(requests, ...)         episodes, all at once, each with its Gym server, verified as it ends

An `Episode` (episodes.py) is the one record that goes through the kit. Its ids and log-probs are those that vLLM
sampled, never re-tokenised text; text is decoded for the verifier, the tools and the logs only. What the
environment says (tool answers, observations) is tokenised once, and masked 0. An episode that could not
be generated or verified is data too: `status` says why, and no reward is made up for it.

Who owns the turns follows from the server (gym_client.Gym.kind): for `verify` and `step` servers `play`
below does; an `agent` server plays by itself against door.py, and its token ids come back (`replay`).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import verl.workers.rollout.router
from jinja2 import TemplateError
from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

import env
import gym_client
from config import RunError
from env import Task
from episodes import Episode
from gym_client import Gym, GymError, ServerDownError, Session
from training import WorkerGroup

IN_FLIGHT = 2048  # episodes at once; more wait, without a session
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
    tool_format: str  # how the model writes tool calls: a name of vLLM's tool parsers
    deadline_s: float  # for one answer; over it the episode's status is `generate_timeout`
    sampling: dict[str, Any] = field(default_factory=dict)  # vLLM's parameters of the rollout under way
    seed: int | None = None  # rollout.seed, where rollout.full_determinism asks for the same answers in every run
    version: int | None = None  # of the weights that the servers must sample from: the step they were synced at


def make_policy(
    config: DictConfig, client: LLMServerClient, tokenizer: Any, stop_ids: set[int], deadline_s: float
) -> Policy:
    """A Policy from verl's keys: data.max_*_length, rollout.multi_turn.*."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    return Policy(
        client,
        tokenizer,
        stop_ids,
        config.data.max_prompt_length,
        config.data.max_response_length,
        turns.max_assistant_turns,
        turns.max_tool_response_length,
        turns.format,
        deadline_s,
        seed=config.actor_rollout_ref.rollout.seed if config.actor_rollout_ref.rollout.full_determinism else None,
    )


def sampling_params(config: DictConfig, validate: bool) -> dict[str, Any]:
    """vLLM's sampling parameters from rollout.* (training) or rollout.val_kwargs.* (evaluation)."""
    source = config.actor_rollout_ref.rollout.val_kwargs if validate else config.actor_rollout_ref.rollout
    return {
        "temperature": source.temperature if source.do_sample else 0.0,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "logprobs": True,
    }


# --- servers -------------------------------------------------------------------------------------


async def start_servers(config: DictConfig, actor: WorkerGroup) -> LLMServerManager:
    """Load the actor's models and start its vLLM servers; side by side where that is safe.

    vLLM sizes its KV cache by measuring free memory, which must not move meanwhile; told the size
    (engine_kwargs.vllm.kv_cache_memory_bytes) it does not measure, and both start at once.
    """
    vllm = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    manager = await _start_router(config, worker_group=actor)
    if not vllm.get("kv_cache_memory_bytes"):
        await asyncio.to_thread(actor.init_model)
    servers = asyncio.create_task(manager._initialize_llm_servers())
    if vllm.get("kv_cache_memory_bytes"):
        await asyncio.sleep(0.5)  # for the servers to ask the workers, which answer no one while they load, for devices
        await asyncio.to_thread(actor.init_model)
    await servers
    return await _route(manager)


async def start_sampler(config: DictConfig) -> LLMServerManager:
    """Start vLLM servers that load the model's own weights: to sample without training."""
    config = copy.deepcopy(config)
    rollout = config.actor_rollout_ref.rollout
    rollout.load_format, rollout.nnodes = "auto", config.trainer.nnodes
    manager = await _start_router(config)
    await manager._initialize_llm_servers()
    return await _route(manager)


async def _start_router(config: DictConfig, **workers: Any) -> LLMServerManager:
    # The router's process starts first, beside all else, and gets its class by value: importing verl for it would
    # take the process 15 s of a core, for which the first request would wait.
    ray.cloudpickle.register_pickle_by_value(verl.workers.rollout.router)
    return await LLMServerManager.create_empty(config=config, **workers)


async def _route(manager: LLMServerManager) -> LLMServerManager:
    handles = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    await manager.global_load_balancer.add_servers.remote(handles)
    return manager


def weight_sync(config: DictConfig, actor: WorkerGroup, servers: LLMServerManager) -> CheckpointEngineManager:
    """verl's weight transfer; `update_weights(step)` on it makes the sampler's weights the trainer's."""
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    return CheckpointEngineManager(config=engine, actor_wg=actor, replicas=servers.get_replicas())


# --- turns ---------------------------------------------------------------------------------------


async def sample(
    policy: Policy, request_id: str, prompt_ids: list[int], max_tokens: int
) -> tuple[list[int], list[float]]:
    """One answer of the policy: (ids, log-probs), the stop token included. Raises GymError.

    request_id: of the episode and, after a `#`, its turn. Failures of one request become a reason; a dead vLLM server
    raises ray.exceptions.RayError, one that still has the weights of another step RunError.
    """
    params = {**policy.sampling, "max_tokens": max_tokens}
    if policy.seed is not None:  # verl would give all answers to a prompt the same one, so that all are the same
        params["seed"] = zlib.crc32(f"{policy.seed} {request_id}".encode())
    try:
        async with asyncio.timeout(policy.deadline_s):
            # the episode's id keeps its turns on one replica, whose cache holds their prefix
            output = await policy.client.generate(
                request_id=request_id.partition("#")[0], prompt_ids=prompt_ids, sampling_params=params
            )
    except TimeoutError:
        raise GymError("generate_timeout", f"vLLM gave no answer within {policy.deadline_s:g} s") from None
    version = output.extra_fields.get("global_steps", policy.version)
    if policy.version is not None and version != policy.version:
        raise RunError(
            f"a vLLM server samples from the weights of step {version}, the trainer's are of step {policy.version}: "
            "the sync did not reach it; see logs/ray of the run, then the same command goes on from the last checkpoint"
        )
    ids = list(output.token_ids)
    if output.stop_reason == "aborted" or not ids:
        raise GymError("aborted", f"vLLM ended the request without an answer ({output.stop_reason})")
    if output.log_probs is None or len(output.log_probs) != len(ids):
        raise GymError("no_log_probs", f"vLLM sent {len(ids)} tokens without a log-prob for each")
    return ids, list(output.log_probs)


def understand(policy: Policy, ids: list[int], tools: list[dict[str, Any]]) -> tuple[str, str, list[dict[str, Any]]]:
    """An answer's ids -> (thought, text, function calls), as the verifier and the tools read it.

    Calls are found by vLLM's parser for the model's format; what it cannot read is text. A thought is what
    precedes `</think>`, where the model writes one. Raises GymError('tool_parser').
    """
    text, calls = policy.tokenizer.decode(ids, skip_special_tokens=True), []
    if tools:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        # some formats mark their calls with special tokens
        raw = policy.tokenizer.decode(ids[:-1] if ids[-1] in policy.stop_ids else ids, skip_special_tokens=False)
        try:
            request: Any = ChatCompletionRequest.model_validate({"messages": [], "model": "policy", "tools": tools})
            parser = ToolParserManager.get_tool_parser(policy.tool_format)(policy.tokenizer, request.tools)
            found = parser.extract_tool_calls(raw, request)
        except Exception as error:  # forty parsers of vLLM's, and whatever a policy writes: none may end the run
            raise GymError(
                "tool_parser", f"vLLM's {policy.tool_format} parser failed on {raw[:200]!r}: {error!r}"
            ) from error
        if found.tools_called:
            text = found.content or ""
            # nine letters or digits, since some chat templates (Mistral's) take nothing else
            named = [(uuid.uuid4().hex[:9], call.function) for call in found.tool_calls]
            calls = [gym_client.function_call(call_id, call.name, call.arguments) for call_id, call in named]
    thought, mark, answer = text.rpartition("</think>")
    return (thought.removeprefix("<think>").strip(), answer.lstrip("\n"), calls) if mark else ("", text, calls)


def observed_ids(messages: list[dict[str, Any]], tokenizer: Any, stop_ids: set[int]) -> list[int]:
    """The ids between a sampled answer and the next one: [rest of the answer's turn, `messages`, next opening].

    messages: what the environment said (role tool or user). The chat template is asked for a conversation
    that ends in an answer and for the same one continued; what it adds after the answer's stop token, which
    was sampled, is new. So nothing that was sampled is ever encoded again. Raises GymError where the template
    cannot continue a conversation.
    """
    calls = [
        {"id": m["tool_call_id"], "type": "function", "function": {"name": m["name"], "arguments": {}}}
        for m in messages
        if m["role"] == "tool"
    ]
    answer = {"role": "assistant", "content": "An answer.", **({"tool_calls": calls} if calls else {})}
    start = [{"role": "user", "content": "A question."}, answer]
    try:
        ended = tokenizer.apply_chat_template(start, tokenize=False)
        whole = tokenizer.apply_chat_template(start + messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise GymError("template", f"the chat template does not take what the environment said: {error}") from error
    stops = [s for s in tokenizer.convert_ids_to_tokens(sorted(stop_ids)) if ended.rstrip().endswith(s)]
    if stops:  # whole, after as many stop tokens as `ended` has
        pieces = whole.split(stops[0])
        turns = ended.count(stops[0])
        new = stops[0].join(pieces[turns:]) if len(pieces) > turns else ""
    else:
        new = whole[len(ended) :] if whole.startswith(ended) else ""
    if not new:
        raise GymError(
            "template",
            "the chat template does not continue a conversation where its last answer ended; set "
            "actor_rollout_ref.model.custom_chat_template",
        )
    return list(tokenizer.encode(new, add_special_tokens=False))


def shorten(text: str, limit: int) -> str:
    """`text`, or its beginning and end where it is over `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


async def play(episode: Episode, task: Task, session: Session, policy: Policy, request_id: str) -> None:
    """Fill `episode`: turns of policy and environment until an answer without calls, a limit, or the world's end.

    On a `verify` server the policy's tool calls are run, in order, and the last answer is verified with all
    that came before it. On a `step` server every answer is a step, whose rewards are summed. Raises GymError.
    """
    messages = list(task.messages)
    if session.observation:
        messages.append({"role": "user", "content": session.observation})
    if messages != task.messages or not task.prompt_ids:
        if not messages:
            raise GymError("no_prompt", f"{task.row_id}: its input is empty, and {task.server} says nothing either")
        episode.prompt_ids = env.encode(messages, task.tools, policy.tokenizer, task.row_id)
        if len(episode.prompt_ids) > policy.max_prompt_length:
            tokens = f"{len(episode.prompt_ids)} tokens with the observation"
            over = f"over data.max_prompt_length={policy.max_prompt_length}"
            raise GymError("prompt_too_long", f"{task.row_id}: {tokens}, {over}")

    while not episode.ended:
        begin = time.perf_counter()
        room = policy.max_response_length - len(episode.response_ids)
        ids, log_probs = await sample(
            policy, f"{request_id}#{len(episode.turns)}", episode.prompt_ids + episode.response_ids, room
        )
        _count(episode, "generate", begin)
        thought, text, calls = understand(policy, ids, task.tools)
        said = [gym_client.reasoning(thought)] if thought else []
        said += [gym_client.message(text)] if text or not calls else []
        said += calls
        episode.output += said
        _append(episode, ids, log_probs)
        if ids[-1] not in policy.stop_ids:
            episode.ended = "length"

        begin, observed = time.perf_counter(), []
        if session.kind == "step":
            turn = await session.step(gym_client.response(said))
            episode.turn_rewards.append(turn.reward)
            episode.reward = sum(episode.turn_rewards)
            if turn.terminated or turn.truncated:
                episode.ended = "terminated" if turn.terminated else "truncated"
                return
            names = {call["call_id"]: call["name"] for call in calls}
            observed = [(names.get(o["call_id"], ""), o["call_id"], o["output"]) for o in turn.tool_outputs]
        elif not episode.ended:
            if not calls or not session.executable:
                episode.ended = "stop"
            for call in calls if session.executable else ():
                answer = await session.call_tool(call["name"], call["arguments"])
                observed.append((call["name"], call["call_id"], answer))
        _count(episode, "tools", begin)
        if episode.ended:
            break

        episode.output += [gym_client.function_call_output(call_id, answer) for _, call_id, answer in observed]
        messages = [
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": shorten(answer, policy.max_tool_chars)}
            for name, call_id, answer in observed
        ]
        if session.kind == "step" and turn.observation:
            messages.append({"role": "user", "content": turn.observation})
            episode.output.append({"role": "user", "type": "message", "content": turn.observation})
        if policy.max_turns and len(episode.turns) >= policy.max_turns:
            episode.ended = "turns"
            break
        new = observed_ids(messages, policy.tokenizer, policy.stop_ids)
        if len(episode.response_ids) + len(new) >= policy.max_response_length:
            episode.ended = "length"
            break
        _append(episode, new)

    if session.kind == "verify":
        begin = time.perf_counter()
        verdict = await session.verify(gym_client.response(episode.output))
        _count(episode, "verify", begin)
        _settle(episode, verdict)


def replay(episode: Episode, response: dict[str, Any], policy: Policy) -> None:
    """Fill `episode` from the Response of an agent's /run, whose model calls carry their token ids.

    Each call's prompt must begin with all that came before it, id for id: then what is new in it was observed.
    Raises GymError('not_contiguous' | 'no_tokens').
    """
    seen: list[int] = []
    for item in response["output"]:
        keys = ("generation_token_ids", "prompt_token_ids", "generation_log_probs")
        ids, prompt, log_probs = (item.pop(key, None) or [] for key in keys)
        episode.output.append({key: value for key, value in item.items() if value is not None})
        if not ids:
            continue
        if not prompt or prompt[: len(seen)] != seen or len(log_probs) != len(ids):
            same = next((i for i, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), len(prompt))
            why = (
                f"model call {len(episode.turns) + 1} has {len(prompt)} prompt tokens, which part from the {len(seen)} "
            )
            raise GymError("not_contiguous", f"{why}seen before at {same}; {len(ids)} ids, {len(log_probs)} log-probs")
        if seen:
            _append(episode, prompt[len(seen) :])
        else:
            episode.prompt_ids = prompt
        _append(episode, ids, log_probs)
        seen = prompt + ids
    if not seen:
        raise GymError(
            "no_tokens", f"the agent of {episode.server} answers without token ids: is its model server the kit's?"
        )
    if response.get("incomplete_details") or seen[-1] not in policy.stop_ids:
        episode.ended = "length"
    else:  # an agent that is out of turns comes back with the answer to a call
        episode.ended = "turns" if episode.output[-1].get("type") == "function_call_output" else "stop"


def _append(episode: Episode, ids: list[int], log_probs: list[float] | None = None) -> None:
    """Tokens at the end of the response: sampled with log-probs, observed without."""
    begin = len(episode.response_ids)
    episode.response_ids += ids
    episode.response_mask += [int(log_probs is not None)] * len(ids)
    episode.log_probs += log_probs if log_probs is not None else [0.0] * len(ids)
    if log_probs is not None:
        episode.turns.append((begin, begin + len(ids), len(episode.output)))


def _count(episode: Episode, what: str, begin: float) -> None:
    episode.timings[what] = episode.timings.get(what, 0.0) + time.perf_counter() - begin


def _settle(episode: Episode, verdict: gym_client.Verdict) -> None:
    episode.reward, episode.reward_components, episode.verdict = verdict.reward, verdict.components, verdict.details
    episode.timings["verify_call"] = verdict.latency_s


# --- episodes ------------------------------------------------------------------------------------


def in_groups(tasks: Iterable[Task], n: int, name: str) -> list[tuple[Task, str]]:
    """Each task n times, with the id of its group: `name`, which no other batch of the run has, and its place."""
    return [(task, f"{name}/{i}") for i, task in enumerate(tasks) for _ in range(n)]


async def rollout(
    requests: Sequence[tuple[Task, str]],
    policy: Policy,
    gym: Gym,
    on_done: Callable[[int, Episode], None] = lambda *_: None,
) -> list[Episode]:
    """An episode for each (task, group id), in their order; `on_done(index, episode)` sees each as it ends.

    Each is verified as it ends, while others still generate. Failures of the environment become a status; a
    dead vLLM server raises (ray.exceptions.RayError).
    """
    places = asyncio.Semaphore(IN_FLIGHT)
    members: Counter[str] = Counter()
    greedy = "" if policy.sampling.get("temperature", 1.0) else "greedy-"

    async def play_once(task: Task, group_id: str, request_id: str) -> Episode:
        episode = Episode(task.row_id, group_id, task.server, task.prompt_ids, row=task.row)
        try:
            if await gym.kind(task.server) == "agent":
                verdict, response = await gym.run(task.server, task.row, policy.deadline_s)
                replay(episode, response, policy)
                _settle(episode, verdict)
            else:
                async with gym.session(task.server, task.row) as session:
                    await play(episode, task, session, policy, request_id)
            check_ids(episode)
        except ServerDownError:
            raise
        except GymError as error:
            episode.status, episode.error, episode.reward = error.reason, str(error), None
            episode.lost = error.lost
        return episode

    async def one(index: int, task: Task, group_id: str, request_id: str) -> Episode:
        async with places:
            for again in range(REPLAYS + 1):  # the server went away under an open session: a new one may live
                episode = await play_once(task, group_id, f"{request_id}{'again-' * again}")
                if not episode.lost:
                    break
        on_done(index, episode)
        return episode

    episodes = []
    for i, (task, group_id) in enumerate(requests):
        episodes.append(one(i, task, group_id, f"{greedy}{group_id}-{members[group_id]}"))
        members[group_id] += 1
    return await asyncio.gather(*episodes)


def check_ids(episode: Episode) -> None:
    """An episode's lists belong together. Raises GymError('bad_ids') with what does not fit."""
    length = len(episode.response_ids)
    sampled = sum(end - begin for begin, end, _ in episode.turns)
    if not length or len(episode.response_mask) != length or len(episode.log_probs) != length:
        lists = f"{length} ids, {len(episode.response_mask)} of mask, {len(episode.log_probs)} log-probs"
        raise GymError("bad_ids", f"{episode.row_id}: the response's lists differ in length: {lists}")
    if sum(episode.response_mask) != sampled:
        raise GymError(
            "bad_ids", f"{episode.row_id}: {sampled} sampled tokens, {sum(episode.response_mask)} in the mask"
        )


async def rollout_with_baselines(
    requests: Sequence[tuple[Task, str]],
    policy: Policy,
    gym: Gym,
    on_done: Callable[[int, Episode], None] = lambda *_: None,
) -> list[Episode]:
    """`rollout`, and beside it a greedy answer for each group, whose reward becomes its `baseline` (ReMax: Li et al.
    2023, arXiv:2310.10505, algorithm 2). A group without one fails, as `no_baseline`. Raises GymError for an agent.
    """
    agents = [server for server in {task.server for task, _ in requests} if await gym.kind(server) == "agent"]
    if agents:
        raise GymError(
            "no_greedy",
            f"algorithm.adv_estimator wants greedy answers, which the agent of {agents[0]} cannot give; choose another",
        )
    once = [(task, group_id) for group_id, task in {group_id: task for task, group_id in requests}.items()]
    greedy = dataclasses.replace(policy, sampling={**policy.sampling, "temperature": 0.0})
    episodes, baselines = await asyncio.gather(
        rollout(requests, policy, gym, on_done), rollout(once, greedy, gym, on_done)
    )
    of = {e.group_id: e for e in baselines}
    for e in episodes:
        e.baseline = of[e.group_id].reward
        if e.status == "ok" and e.baseline is None:
            e.status, e.reward, e.error = "no_baseline", None, f"the greedy answer failed: {of[e.group_id].error}"
    return episodes
