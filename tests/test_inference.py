"""Rollouts over stubs that record every request and parameter: servers, sampling, episodes, baselines.

tests/test_turns.py has the turns of one episode; the same code over vLLM and Gym is in test_stack.py and test_steps.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf

import env
import gym_client
import inference
from gym_client import GymError
from kit.errors import RunError

STOP = 1


class Client:
    """Answers [5, 1] to everything; records the requests. `change` edits the answer to one of them."""

    def __init__(self, change=lambda output, request: None, pause=0.0):
        self.requests: list[SimpleNamespace] = []
        self.change = change
        self.pause = pause
        self.running = 0
        self.most = 0

    async def generate(self, request_id, prompt_ids, sampling_params, **more):
        request = SimpleNamespace(
            id=request_id, prompt_ids=prompt_ids, params=sampling_params, more=more
        )
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.pause)
        self.running -= 1
        output = SimpleNamespace(
            token_ids=[5, STOP], log_probs=[-1.0, -2.0], stop_reason="completed", extra_fields={}
        )
        self.change(output, request)
        return output


class World:
    """A Gym whose verify server pays `rewards` in the order in which sessions were opened."""

    def __init__(self, *rewards, kind="verify", fail=lambda number: None):
        self.rewards = list(rewards)
        self.server_kind = kind
        self.fail = fail
        self.opened: list[tuple] = []
        self.runs: list[tuple] = []
        self.responses: list[dict] = []
        self.open_now = 0

    async def kind(self, server):
        return self.server_kind

    @contextlib.asynccontextmanager
    async def session(self, server, row):
        number = len(self.opened)
        self.opened.append((server, row))
        error = self.fail(number)
        if error:
            raise error

        async def verify(response):
            self.responses.append(response)
            details = {"extracted": number}
            return gym_client.Verdict(
                self.rewards[number], {"part": 0.5}, latency_s=0.25, details=details
            )

        self.open_now += 1
        yield SimpleNamespace(kind="verify", observation=None, executable=set(), verify=verify)
        self.open_now -= 1

    async def run(self, *arguments):
        self.runs.append(arguments)
        item = gym_client.message("five")
        item |= {
            "prompt_token_ids": [2, 3],
            "generation_token_ids": [5, STOP],
            "generation_log_probs": [-1.0, -2.0],
        }
        verdict = gym_client.Verdict(0.75, {"part": 0.5}, latency_s=0.25, details={"extracted": 5})
        return verdict, {"output": [item]}


def policy_of(client, **changes) -> inference.Policy:
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "five")
    settings = {"sampling": {"temperature": 0.7, "top_p": 0.9}, **changes}
    return inference.Policy(client, tokenizer, {STOP}, 32, 12, None, 100, "hermes", 5.0, **settings)


def tasks_of(count: int) -> list[env.Task]:
    said = [{"role": "user", "content": "say 7"}]
    return [
        env.Task(f"rows:{i}", {"row": i}, f"server {i}", said, [10 + i, 20 + i])
        for i in range(count)
    ]


def roll(
    client, world, count=1, n=1, on_done=lambda *_: None, baselines=False, **changes
) -> list[inference.Episode]:
    function = inference.rollout_with_baselines if baselines else inference.rollout
    requests = inference.in_groups(tasks_of(count), n, "4")
    return asyncio.run(function(requests, policy_of(client, **changes), world, on_done))


# --- from a recipe -------------------------------------------------------------------------------


def recipe_of(**rollout) -> OmegaConf:
    """The keys of verl's that inference.py reads; no two numbers are equal."""
    settings = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 40,
        "val_kwargs": {"do_sample": True, "temperature": 0.3, "top_p": 0.4, "top_k": 5},
        "multi_turn": {
            "max_assistant_turns": 6,
            "max_tool_response_length": 99,
            "format": "llama3_json",
        },
        "nnodes": 0,
        "n_gpus_per_node": 4,
        "tensor_model_parallel_size": 2,
        "max_num_seqs": 7,
        "full_determinism": True,
        "seed": 11,
        "load_format": "dummy",
        "engine_kwargs": {"vllm": {}},
        "checkpoint_engine": {
            "_target_": "verl.workers.config.CheckpointEngineConfig",
            "backend": "naive",
        },
        **rollout,
    }
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": settings},
            "data": {"max_prompt_length": 123, "max_response_length": 456},
            "trainer": {"nnodes": 3, "one_step_off": 2},
        }
    )


def test_a_policy_has_the_recipes_limits():
    data = SimpleNamespace(
        tokenizer="tokenizer", stop_ids={3, 4}, model=SimpleNamespace(vocab_size=1000)
    )
    policy = inference.make_policy(recipe_of(), "client", data, 77.0)
    assert (policy.client, policy.tokenizer, policy.stop_ids) == ("client", "tokenizer", {3, 4})
    assert (policy.max_prompt_length, policy.max_response_length) == (123, 456)
    assert (policy.max_turns, policy.max_tool_chars, policy.tool_format) == (6, 99, "llama3_json")
    assert (policy.deadline_s, policy.vocabulary, policy.seed, policy.ahead) == (77.0, 1000, 11, 2)
    assert (
        policy.places._value == 3 * 4 // 2 * 7
    )  # engines of two GPUs on three nodes of four; 7 sequences each
    assert (
        inference.make_policy(recipe_of(full_determinism=False), "client", data, 77.0).seed is None
    )


def test_sampling_follows_the_recipe_in_training_and_in_evaluation():
    training, evaluation = (
        inference.sampling_params(recipe_of(), validate) for validate in (False, True)
    )
    assert training == {"temperature": 0.7, "top_p": 0.8, "top_k": 40, "logprobs": True}
    assert evaluation == {"temperature": 0.3, "top_p": 0.4, "top_k": 5, "logprobs": True}
    greedy = {"do_sample": False, "temperature": 0.3, "top_p": 0.4, "top_k": 5}
    assert inference.sampling_params(recipe_of(val_kwargs=greedy), True)["temperature"] == 0.0


class Manager:
    """verl's LLMServerManager: records its arguments, and when its servers begin, ask the workers, and are up."""

    made: list[Manager]
    events: list[str]

    def __init__(self, config, **more):
        self.config = config
        self.more = more
        self.made.append(self)

    async def _initialize_llm_servers(self):
        self.events.append("servers begin")
        await asyncio.sleep(0.1)
        self.events.append("servers ask the workers")
        await asyncio.sleep(0.6)
        self.events.append("servers up")

    def get_replicas(self):
        return ["replica"]


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(Manager, "made", [], raising=False)
    monkeypatch.setattr(Manager, "events", [], raising=False)
    monkeypatch.setattr(inference, "LLMServerManager", Manager)
    return Manager


@pytest.mark.parametrize(
    ("changes", "together", "own_gpus"),
    [
        ({}, False, False),
        ({"engine_kwargs": {}}, False, False),
        ({"engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 9}}}, True, False),
        ({"nnodes": 2}, True, True),
    ],
    ids=["measures", "no engine arguments", "size of the cache given", "GPUs of their own"],
)
def test_servers_and_models_load_side_by_side_only_where_memory_is_not_measured(
    manager, changes, together, own_gpus
):
    actor = SimpleNamespace(init_model=lambda: manager.events.append("models loaded"))
    made = asyncio.run(inference.start_servers(recipe_of(**changes), actor))
    assert [made] == manager.made and made.more == {"worker_group": None if own_gpus else actor}
    servers = ["servers begin", "servers ask the workers", "servers up"]
    side_by_side = [*servers[:2], "models loaded", servers[2]]
    assert manager.events == (side_by_side if together else ["models loaded", *servers])


@pytest.mark.parametrize(("nnodes", "expected"), [(0, 3), (2, 2)])
def test_a_sampler_loads_the_weights_of_the_models_folder(manager, nnodes, expected):
    config = recipe_of(nnodes=nnodes)
    made = asyncio.run(inference.start_sampler(config, first=5))
    rollout = made.config.actor_rollout_ref.rollout
    assert (rollout.load_format, rollout.nnodes, made.more) == ("auto", expected, {"start_rank": 5})
    assert manager.events[-1] == "servers up"
    assert config == recipe_of(nnodes=nnodes)  # the caller's is as it was
    assert asyncio.run(inference.start_sampler(config)).more == {"start_rank": 0}


# --- servers at work -----------------------------------------------------------------------------


class Sync:
    """verl's CheckpointEngineManager: records its calls."""

    def __init__(self, **given):
        self.given = given
        self.calls: list[object] = []

    def sleep_replicas(self):
        self.calls.append("sleep")

    def update_weights(self, step):
        self.calls.append(step)


class Players:
    """kit.extras.rollout_workers.Players: records its calls."""

    def __init__(self):
        self.calls: list[object] = []

    async def rollout(self, *arguments):
        self.calls.append(arguments)
        return ["played elsewhere"]

    def set_version(self, step):
        self.calls.append(step)


def servers_of(monkeypatch, actor="actor", players=None) -> inference.Servers:
    monkeypatch.setattr(inference, "CheckpointEngineManager", Sync)
    policy = policy_of(None)
    policy.tokenizer.vision = SimpleNamespace(placeholders=[9])
    return inference.Servers(recipe_of(), Manager, actor, policy, "gym", asyncio.Runner(), players)


def test_weights_are_published_under_the_number_of_their_step(monkeypatch):
    monkeypatch.setattr(Manager, "get_replicas", lambda: ["replica"])
    players = Players()
    servers = servers_of(monkeypatch, players=players)
    given = servers.sync.given
    assert given["config"].backend == "naive" and (given["actor_wg"], given["replicas"]) == (
        "actor",
        ["replica"],
    )
    assert not servers.asleep and servers.policy.version is None
    servers.sleep()
    assert servers.asleep
    servers.publish(4)
    assert not servers.asleep and servers.policy.version == 4
    assert (servers.sync.calls, players.calls) == (["sleep", 4], [4])
    servers_of(monkeypatch).publish(4)  # without other players


def test_servers_without_an_actor_keep_their_weights_and_never_sleep(monkeypatch):
    monkeypatch.setattr(Manager, "get_replicas", lambda: ["replica"])
    players = Players()
    servers = servers_of(monkeypatch, actor=None, players=players)
    servers.sleep()
    servers.publish(4)
    assert (servers.sync, servers.asleep, servers.policy.version, players.calls) == (
        None,
        False,
        None,
        [],
    )


def test_a_rollout_is_played_here_or_by_the_players_with_the_sampling_of_the_call(monkeypatch):
    monkeypatch.setattr(Manager, "get_replicas", lambda: ["replica"])
    for name in ("rollout", "rollout_with_baselines"):

        async def played(*arguments, name=name):
            return [name, *arguments]

        monkeypatch.setattr(inference, name, played)
    sampling = {"temperature": 0.4, "logit_bias": {9: -100.0}}  # the token of images is banned
    servers = servers_of(monkeypatch)
    here = servers.policy, servers.gym
    assert servers.rollout("requests", {"temperature": 0.4}, print) == [
        "rollout",
        "requests",
        *here,
        print,
    ]
    assert servers.policy.sampling == sampling
    found = servers.rollout("requests", {"temperature": 0.4}, print, baselines=True)
    assert found == ["rollout_with_baselines", "requests", *here, print]
    assert servers.rollout("requests", {"temperature": 0.4})[4](0, None) is None

    players = Players()
    servers = servers_of(monkeypatch, players=players)
    assert servers.rollout("requests", {"temperature": 0.4}, print, baselines=True) == [
        "played elsewhere"
    ]
    assert players.calls == [("requests", sampling, print, True)]


# --- one answer ----------------------------------------------------------------------------------


def sample(client, request_id="4/0-1#2", max_tokens=9, shown=None, **changes):
    policy = policy_of(client, **changes)
    return asyncio.run(inference.sample(policy, request_id, [1, 2, 3], max_tokens, **(shown or {})))


def test_an_answer_is_asked_with_the_room_and_the_sampling_of_its_turn():
    client = Client()
    ids, log_probs, versions = sample(client, shown={"image_data": ["picture"]}, version=3)
    assert (ids, log_probs, versions) == ([5, STOP], [-1.0, -2.0], [(2, 3)])
    (request,) = client.requests
    assert (
        request.id == "4/0-1"
    )  # without the turn: all turns of an episode go to the replica that has their prefix
    assert request.prompt_ids == [1, 2, 3] and request.more == {"image_data": ["picture"]}
    assert request.params == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 9}


def test_each_turn_has_a_seed_that_follows_from_the_recipes():
    client = Client()
    sample(client, "4/0-1#0", seed=0)
    sample(client, "4/0-1#1", seed=0)
    seeds = [request.params["seed"] for request in client.requests]
    assert seeds == [zlib.crc32(b"0 4/0-1#0"), zlib.crc32(b"0 4/0-1#1")]


@pytest.mark.parametrize(
    ("told", "ahead", "bad"),
    [
        ({"global_steps": 7}, 0, None),
        ({"global_steps": 6}, 0, 6),
        ({"global_steps": 8}, 0, 8),
        ({"global_steps": None}, 2, None),
        ({"versions": [(1, 6), (1, 7)]}, 1, None),
        ({"versions": [(1, 7), (1, 5)], "global_steps": 7}, 1, 5),
        ({"versions": [(1, 8), (1, 9)]}, 1, 9),
    ],
)
def test_weights_too_many_steps_away_end_the_run(told, ahead, bad):
    def change(output, _):
        output.extra_fields = told

    fits = bad is None and None not in told.values()
    if fits:
        expected = told.get("versions", [(2, told.get("global_steps"))])
        assert sample(Client(change), version=7, ahead=ahead)[2] == expected
    else:
        why = f"samples from the weights of step {bad}, the trainer's are of step 7"
        with pytest.raises(RunError, match=why):
            sample(Client(change), version=7, ahead=ahead)
    sample(Client(change), version=None, ahead=0)  # nobody has published: whatever the servers have


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stop_reason": "aborted"}, "aborted"),
        ({"stop_reason": "abort"}, "aborted"),
        ({"token_ids": [], "log_probs": []}, "aborted"),
        ({"log_probs": None}, "no_log_probs"),
        ({"log_probs": [-1.0]}, "no_log_probs"),
    ],
)
def test_an_answer_that_is_not_whole_fails_by_name(changes, reason):
    def change(output, _):
        vars(output).update(changes)

    with pytest.raises(GymError) as caught:
        sample(Client(change))
    assert caught.value.reason == reason


def test_an_answer_that_does_not_come_in_time_fails_by_name():
    policy = policy_of(Client(pause=5.0))
    policy.deadline_s = 0.05
    begin = time.monotonic()
    with pytest.raises(GymError, match=r"vLLM gave no answer within 0\.05 s") as caught:
        asyncio.run(inference.sample(policy, "r#0", [1], 9))
    assert caught.value.reason == "generate_timeout" and time.monotonic() - begin < 2


# --- episodes ------------------------------------------------------------------------------------


def test_each_episode_has_its_task_its_group_its_request_and_its_verdict():
    client, world, done = Client(), World(0.0, 0.25, 0.5, 0.75), []
    episodes = roll(client, world, count=2, n=2, on_done=lambda *both: done.append(both), version=3)
    assert [e.group_id for e in episodes] == ["4/0", "4/0", "4/1", "4/1"]
    assert [(e.row_id, e.server, e.row) for e in episodes[1:3]] == [
        ("rows:0", "server 0", {"row": 0}),
        ("rows:1", "server 1", {"row": 1}),
    ]
    assert sorted(request.id for request in client.requests) == ["4/0-0", "4/0-1", "4/1-0", "4/1-1"]
    asked = {request.id: request.prompt_ids for request in client.requests}
    assert (asked["4/0-1"], asked["4/1-0"]) == ([10, 20], [11, 21])
    assert world.opened[1:3] == [("server 0", {"row": 0}), ("server 1", {"row": 1})]
    assert sorted(index for index, _ in done) == [0, 1, 2, 3] and all(
        episodes[index] is e for index, e in done
    )
    for number, e in enumerate(episodes):
        assert (e.status, e.error, e.ended, e.reward) == ("ok", "", "stop", 0.25 * number)
        assert (e.reward_components, e.verdict) == ({"part": 0.5}, {"extracted": number})
        assert e.timings["verify_call"] == 0.25 and e.versions == [(2, 3)]
    assert world.open_now == 0 and world.responses[0]["output"][0]["content"][0]["text"] == "five"


def test_greedy_requests_have_ids_that_no_sampled_one_has():
    client = Client()
    roll(client, World(1.0), sampling={"temperature": 0.0})
    roll(client, World(1.0), sampling={})
    assert [request.id for request in client.requests] == ["greedy-4/0-0", "4/0-0"]


def test_no_more_episodes_play_than_there_are_places():
    client = Client(pause=0.02)
    roll(client, World(*[1.0] * 6), count=3, n=2, places=asyncio.Semaphore(2))
    assert client.most == 2 and len(client.requests) == 6


def test_an_episode_is_verified_after_its_place_was_given_to_the_next():
    client, world = Client(), World(1.0, 1.0)
    both_sampled = asyncio.Event()
    was = client.generate

    async def generate(*arguments, **named):
        if len(client.requests) == 1:
            both_sampled.set()
        return await was(*arguments, **named)

    client.generate = generate

    @contextlib.asynccontextmanager
    async def session(*_):
        async def verify(_):
            await asyncio.wait_for(both_sampled.wait(), 2)
            return gym_client.Verdict(1.0)

        yield SimpleNamespace(kind="verify", observation=None, executable=set(), verify=verify)

    world.session = session
    episodes = roll(client, world, n=2, places=asyncio.Semaphore(1))
    assert [e.status for e in episodes] == ["ok", "ok"]


def test_an_episode_that_lost_its_server_is_asked_again_under_new_request_ids():
    client = Client()
    broken: list[object] = []

    def change(output, request):
        broken.append(request.id)
        raise GymError("session_lost", "the server was started again", lost=True)

    client.change = change
    done = []
    (episode,) = roll(client, World(*[1.0] * 9), on_done=lambda *both: done.append(both))
    assert broken == ["4/0-0", "4/0-0again-", "4/0-0again-again-", "4/0-0again-again-again-"]
    assert (episode.status, episode.reward, episode.lost) == ("session_lost", None, True)
    assert episode.error == "the server was started again" and done == [(0, episode)]


def test_a_failure_keeps_no_reward_whoever_failed():
    def fails(error):
        async def play(played, *_):
            played.reward = 1.0
            raise error

        return play

    def raise_odd():
        raise ValueError("odd")

    async def fails_deeper(*_):
        raise_odd()

    for error, status in [
        (GymError("http_500", "broken"), "http_500"),
        (env.DataError("odd"), "template"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inference, "play", fails(error))
            (episode,) = roll(Client(), World(1.0))
        assert (episode.status, episode.reward, episode.error) == (status, None, str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "play", fails_deeper)
        (episode,) = roll(Client(), World(1.0))
    assert (episode.status, episode.reward) == ("unforeseen", None)
    line = raise_odd.__code__.co_firstlineno + 1  # where it was raised
    assert f"ValueError('odd') at {__file__}:{line}, " in episode.error


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), RunError("stale weights")])
def test_a_dead_sampler_ends_the_run(error):
    def change(*_):
        raise error

    with pytest.raises(type(error)):
        roll(Client(change), World(1.0))


def test_an_agent_plays_the_row_with_its_own_deadline_and_the_version_at_its_start():
    world = World(kind="agent")
    (episode,) = roll(Client(), world, version=6, vocabulary=1000)
    assert world.runs == [("server 0", {"row": 0}, 5.0, 1000)] and not world.opened
    assert (episode.prompt_ids, episode.response_ids, episode.ended) == ([2, 3], [5, STOP], "stop")
    assert (episode.reward, episode.reward_components, episode.verdict) == (
        0.75,
        {"part": 0.5},
        {"extracted": 5},
    )
    assert episode.versions == [(2, 6)] and episode.timings["verify_call"] == 0.25


def test_agents_play_in_places_too():
    world = World(kind="agent")
    running, most = [], []
    was = world.run

    async def run(*arguments):
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return await was(*arguments)

    world.run = run
    roll(Client(), world, n=4, places=asyncio.Semaphore(2))
    assert max(most) == 2


# --- baselines -----------------------------------------------------------------------------------


def test_each_group_gets_the_reward_of_one_greedy_answer():
    rewards = {
        "4/0-0": 0.0,
        "4/0-1": 0.25,
        "4/1-0": 0.5,
        "4/1-1": 0.75,
        "greedy-4/0-0": 2.0,
        "greedy-4/1-0": 3.0,
    }
    client, world, done = Client(), World(), []

    async def judge(episode, session):
        episode.reward = rewards[episode.verdict["request"]]

    async def play(episode, task, session, policy, request_id):
        ids, log_probs, versions = await inference.sample(policy, request_id, task.prompt_ids, 9)
        inference.append(episode, ids, log_probs, versions)
        episode.verdict["request"] = request_id

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "play", play)
        patch.setattr(inference, "judge", judge)
        episodes = roll(
            client, world, count=2, n=2, baselines=True, on_done=lambda *both: done.append(both)
        )
    assert [(e.reward, e.baseline) for e in episodes] == [
        (0.0, 2.0),
        (0.25, 2.0),
        (0.5, 3.0),
        (0.75, 3.0),
    ]
    temperatures = {request.id: request.params["temperature"] for request in client.requests}
    assert temperatures == {name: 0.0 if name.startswith("greedy-") else 0.7 for name in rewards}
    assert all(request.params["top_p"] == 0.9 for request in client.requests)
    assert all(
        any(e is kept for kept in episodes)
        for _, e in done
        if not e.verdict["request"].startswith("greedy-")
    )


def test_a_group_without_a_greedy_answer_fails_and_keeps_its_other_failures():
    def change(output, request):
        if request.id == "greedy-4/0-0":
            output.stop_reason = "aborted"
        if request.id == "4/0-1":
            output.log_probs = None

    episodes = roll(Client(change), World(*[1.0] * 9), count=2, n=2, baselines=True)
    found = [(e.status, e.reward, e.baseline) for e in episodes]
    assert found == [
        ("no_baseline", None, None),
        ("no_log_probs", None, None),
        *[("ok", 1.0, 1.0)] * 2,
    ]
    why = "the greedy answer failed: vLLM ended the request without an answer (aborted)"
    assert episodes[0].error == why and "without a log-prob" in episodes[1].error


def test_an_agent_cannot_give_greedy_answers():
    with pytest.raises(GymError, match="the agent of server 0 cannot give") as caught:
        roll(Client(), World(kind="agent"), baselines=True)
    assert caught.value.reason == "no_greedy"
