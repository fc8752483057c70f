"""inference.py: turns of an episode, rollouts with their failures and baselines, and the servers.

Doubles of policy, environment and servers make any conversation, template and failure possible.
test_stack.py and test_steps.py test the same code with vLLM and Gym.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import random
import zlib
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock, Mock

import pytest
import ray

import env
import gym_client
import inference
from gym_client import GymError
from kit.data.episode import Branch, TurnSpan, append_tokens
from kit.engine.sampling import sample
from kit.errors import RunError
from tests.helpers.rollouts import (
    STOP,
    STOPS,
    TEMPLATES,
    FixedRewards,
    Game,
    RecordingClient,
    Script,
    ToolSession,
    bytes_tokenizer,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    keep_samples,
    make_context,
    make_recipe,
    one_turn_each,
    play,
    run_rollout,
    task_of,
)

TOKENIZER = chatml_tokenizer()
LETTERS = "abc xyz\n\t{}\"'<>&|éß中🙂0123456789"


class RandomConversation:
    """Turns with 1 to 3 tool calls and their outputs, and a final response."""

    def __init__(self, rng: random.Random, tokenizer):
        self.rng = rng
        self.responses: list[list[int]] = []
        self.outputs: list[list[str]] = []
        for _ in range(rng.randint(1, 4)):
            calls = [call(json.dumps({"q": self.text(0, 9)})) for _ in range(rng.randint(1, 3))]
            thought = f"<think>{self.text(0, 20)}</think>" if rng.random() < 0.5 else ""
            text = thought + self.text(0, 20).replace("<", "") + "".join(calls)
            self.responses.append(tokenizer.encode(text, add_special_tokens=False))
            self.outputs.append([self.text(0, 60) for _ in calls])
        # random bytes that are not the encoding of any text
        self.responses.append(rng.choices(range(256), k=rng.randint(0, 30)))
        self.responses = [[*ids, tokenizer.eos_token_id] for ids in self.responses]

    def text(self, low: int, high: int) -> str:
        return "".join(self.rng.choices(LETTERS, k=self.rng.randint(low, high)))


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("seed", range(8))
def test_an_episode_has_exactly_the_sampled_and_the_observed_tokens(family, seed):
    """Each prompt is the previous prompt, its response and the observation, id for id."""
    rng = random.Random(f"{family} {seed}")
    tokenizer = bytes_tokenizer(TEMPLATES[family], STOPS[family])
    conversation = RandomConversation(rng, tokenizer)
    responses = conversation.responses
    client = Script(responses)
    session = ToolSession(list(itertools.chain.from_iterable(conversation.outputs)))
    task = task_of(tokenizer, prompt=conversation.text(1, 30))
    episode = play(task, session, context_of(client, tokenizer))

    assert episode.ended == "stop" and episode.reward == 1.0
    assert len(episode.turns) == len(responses)
    sampled = [episode.response_ids[begin:end] for begin, end, _ in episode.turns]
    assert sampled == responses  # id for id
    for k, (begin, end, _) in enumerate(episode.turns):
        assert client.prompts[k] == episode.prompt_ids + episode.response_ids[:begin]
        assert episode.response_mask[begin:end] == [1] * (end - begin)
        assert episode.log_probs[begin:end] == [-0.5 - i for i in range(end - begin)]
    assert sum(episode.response_mask) == sum(map(len, responses))
    assert len(episode.response_ids) == len(episode.response_mask) == len(episode.log_probs)
    question = [{"role": "user", "content": "?"}]
    closed = tokenizer.apply_chat_template(question, tokenize=False)
    opened = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    pairs = itertools.pairwise(episode.turns)
    for ((_, end, _), (begin, _, _)), texts in zip(pairs, conversation.outputs, strict=True):
        observed = tokenizer.decode(episode.response_ids[end:begin], skip_special_tokens=False)
        position = 0
        for text in texts:  # in order, each once
            position = observed.index(text, position) + len(text)
        # the observation ends with the generation prompt of the template
        assert observed.endswith(opened[len(closed) :])


def converse(turns, session, tools=True, **changes):
    """Play an episode in which the policy samples the texts `turns`. changes: of the context."""
    client = one_turn_each(turns, TOKENIZER)
    return play(task_of(TOKENIZER, tools=tools), session, context_of(client, TOKENIZER, **changes))


def test_the_verifier_sees_every_item_in_order():
    first = "<think>hm</think>Wait." + call() + call('{"a": 1}')
    session = ToolSession(["one", "two", "three"])
    episode = converse([first, call(), "done"], session)
    output = session.verified["output"]
    kinds = [item["type"] for item in output]
    call_and_output = ["function_call", "function_call_output"]
    assert kinds == [
        *("reasoning", "message", "function_call", *call_and_output, "function_call_output"),
        *call_and_output,
        "message",
    ]
    assert [item["output"] for item in output if "output" in item] == ["one", "two", "three"]
    assert output[0]["summary"][0]["text"] == "hm" and output[1]["content"][0]["text"] == "Wait."
    calls = [item for item in output if item["type"] == "function_call"]
    outputs = [item for item in output if item["type"] == "function_call_output"]
    assert [item["arguments"] for item in calls] == ["{}", '{"a": 1}', "{}"]
    assert [item["call_id"] for item in calls] == [item["call_id"] for item in outputs]
    assert episode.response == "done" and episode.reward_components == {"a": 1.0}
    transcript = 'Wait. look_up({}) look_up({"a": 1}) => one => two look_up({}) => three done'
    assert episode.transcript == transcript


@pytest.mark.parametrize(
    ("changes", "ended", "turns"),
    [
        ({}, "stop", 4),
        ({"max_turns": 2}, "turns", 2),
        ({"max_response_length": 100}, "length", 1),
    ],
    ids=["stop", "turns", "length"],
)
def test_an_episode_ends_at_its_limits(changes, ended, turns):
    session = ToolSession(["x" * 60] * 3)
    episode = converse([call(), call(), call(), "done"], session, **changes)
    assert (episode.ended, len(episode.turns)) == (ended, turns)
    assert episode.response_mask[-1] == 1  # the last token is a sampled one
    assert len(episode.response_ids) <= changes.get("max_response_length", 20000)
    types = [item["type"] for item in session.verified["output"]]
    # the calls of the last turn are also run, as in Gym's agent
    assert types.count("function_call_output") == min(turns, 3)


def test_a_long_tool_output_is_truncated_for_the_model_but_not_for_the_verifier():
    output = "a" * 500 + "b" * 500
    session = ToolSession([output])
    episode = converse([call(), "ok"], session, max_tool_chars=100)
    text = TOKENIZER.decode(episode.response_ids)
    assert "a" * 50 + "\n... 900 characters ...\n" + "b" * 50 in text and "a" * 51 not in text
    assert session.verified["output"][1]["output"] == output


@pytest.mark.parametrize(
    ("steps", "terminated", "changes", "ended", "reward"),
    [
        (3, True, {}, "terminated", 1.5),
        (2, False, {}, "truncated", 1.0),
        (9, True, {"max_turns": 2}, "turns", 1.0),
        (9, True, {"max_response_length": 30}, "length", 0.5),
    ],
    ids=["terminated", "truncated", "turns", "length"],
)
def test_rewards_of_steps_are_summed(steps, terminated, changes, ended, reward):
    game = Game(steps, terminated=terminated)
    episode = converse(["move"] * 9, game, tools=False, **changes)
    assert (episode.ended, episode.reward) == (ended, reward)
    assert "verify" not in episode.timings  # a step server is not called to verify
    prompt = TOKENIZER.decode(episode.prompt_ids)
    assert prompt.endswith("user\nYour move.<|im_end|>\n<|im_start|>assistant\n")
    assert all(len(items) == 1 for items in game.bodies)  # a step has only the items of its turn


# --- limits, requests and times of an episode ----------------------------------------------------


def test_later_turns_may_use_the_tokens_that_are_left():
    client = Script(encode_turns([call(), "y" * 400], TOKENIZER))
    context = context_of(client, TOKENIZER, max_response_length=250)
    episode = play(task_of(TOKENIZER), ToolSession(["x" * 60]), context)
    assert len(episode.turns) == 2 and len(episode.response_ids) == 250
    assert episode.ended == "length"
    limits = [params["max_tokens"] for _, params in client.requests]
    assert limits == [250, 250 - episode.turns[1][0]]


def test_turns_of_an_episode_share_its_request_id_but_not_the_seed():
    client = one_turn_each([call(), call(), "done"], TOKENIZER)
    play(task_of(TOKENIZER), ToolSession(["one", "two"]), context_of(client, TOKENIZER, seed=0))
    requests = [(request_id, params["seed"]) for request_id, params in client.requests]
    assert requests == [("r", zlib.crc32(f"0 r#{turn}".encode())) for turn in range(3)]


class GameWithTools(Game):
    """A game whose steps also return tool outputs."""

    async def step(self, response, last):
        result = await super().step(response, last)
        outputs = [{"call_id": f"c{self.steps_left}", "output": f"seen {self.steps_left}"}]
        observation = "Look." if self.steps_left == 2 else None
        return dataclasses.replace(result, observation=observation, tool_outputs=outputs)


def test_a_step_returns_tool_outputs_before_its_observation():
    episode = converse(["a", "b", "c"], GameWithTools(3), tools=False)
    observed = [item for item in episode.output if item.get("role") != "assistant"]
    assert observed == [
        gym_client.function_call_output("c2", "seen 2"),
        {"role": "user", "type": "message", "content": "Look."},
        gym_client.function_call_output("c1", "seen 1"),
    ]
    assert (episode.turn_rewards, episode.reward) == ([0.5, 0.5, 0.5], 1.5)
    text = TOKENIZER.decode(episode.response_ids)
    assert text.index("seen 2") < text.index("user\nLook.") < text.index("seen 1")


@pytest.mark.parametrize(("over", "fails"), [(0, False), (1, True)])
def test_an_observation_that_makes_the_prompt_too_long_is_a_failure(over, fails):
    task = task_of(TOKENIZER, tools=False)
    messages = [*task.messages, {"role": "user", "content": "Your move."}]
    length = len(env.encode_messages(messages, task.tools, TOKENIZER, "x:1"))
    client = one_turn_each(["move"], TOKENIZER)
    context = context_of(client, TOKENIZER, max_prompt_length=length - over)
    if not fails:
        assert len(play(task, Game(1), context).prompt_ids) == length
        return
    message = f"{length} tokens .* data.max_prompt_length={length - 1}"
    with pytest.raises(GymError, match=message) as caught:
        play(task, Game(1), context)
    assert caught.value.reason == "prompt_too_long" and not client.prompts


# --- episodes of Gym's agents --------------------------------------------------------------------


def make_items(*calls) -> list[dict]:
    """Return the output items of /run. calls: (prompt ids, sampled ids) of each model call."""
    items = []
    for prompt_ids, ids in calls:
        item = gym_client.make_message("text")
        item["prompt_token_ids"] = prompt_ids
        item["generation_token_ids"] = ids
        items.append(item)
    return items


def read_response(response, tokenizer=TOKENIZER) -> inference.Episode:
    episode = inference.Episode("x:1", "g", "server", [])
    context = context_of(None, tokenizer)
    keep_samples(context.samples, response["output"])
    inference.episode_from_response(episode, response, context)
    return episode


def test_an_agents_model_calls_are_joined_to_one_episode():
    stop = TOKENIZER.eos_token_id
    output = make_items(([1, 2], [3, stop]), ([1, 2, 3, stop, 7, 8], [9, stop]))
    output.insert(1, gym_client.function_call_output("c", "seen"))
    output[2]["content"][0]["text"] = "last"
    episode = read_response({"output": output})
    assert episode.prompt_ids == [1, 2] and episode.response_ids == [3, stop, 7, 8, 9, stop]
    assert episode.response_mask == [1, 1, 0, 0, 1, 1] and episode.turns == [(0, 2, 1), (4, 6, 3)]
    assert episode.ended == "stop"
    assert [(each.written, each.calls) for each in episode.responses] == [
        ("text", []),
        ("last", []),
    ]
    assert episode.response == "last"
    assert not any("token_ids" in key for item in episode.output for key in item)


@pytest.mark.parametrize(
    ("ids", "more", "details", "ended"),
    [
        ([3], [], None, "length"),
        (["stop"], [gym_client.make_message("")], {"reason": "max_output_tokens"}, "length"),
        (["stop"], [gym_client.function_call_output("c", "seen")], None, "turns"),
    ],
    ids=["no stop token", "incomplete", "tool output last"],
)
def test_the_reason_why_an_agents_episode_ended(ids, more, details, ended):
    ids = [TOKENIZER.eos_token_id if i == "stop" else i for i in ids]
    output = make_items(([1, 2], ids)) + more
    episode = read_response({"output": output, "incomplete_details": details})
    assert episode.ended == ended


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([([1, 2], [3]), ([1, 2, 4, 5], [6])], "not_contiguous"),
        ([], "no_tokens"),
        ([(None, [3])], "not_contiguous"),
    ],
    ids=["other ids", "none", "no prompt"],
)
def test_ids_that_do_not_continue_the_previous_call_are_a_failure(calls, reason):
    with pytest.raises(GymError) as caught:
        read_response({"output": make_items(*calls)})
    assert caught.value.reason == reason


def test_an_agents_episode_may_be_as_long_as_the_recipe_allows():
    context = context_of(None, TOKENIZER)
    prompt, response = context.max_prompt_length, context.max_response_length

    def read(prompt_length, response_length):
        episode = inference.Episode("x:1", "g", "server", [])
        output = make_items(([1] * prompt_length, [2] * response_length))
        keep_samples(context.samples, output)
        inference.episode_from_response(episode, {"output": output}, context)
        return len(episode.prompt_ids), len(episode.response_ids)

    assert read(prompt, response) == (prompt, response)
    for lengths in ((prompt + 1, response), (prompt, response + 1)):
        with pytest.raises(GymError, match="left out calls") as caught:
            read(*lengths)
        assert caught.value.reason == "not_contiguous"


# --- rollouts ------------------------------------------------------------------------------------


def test_each_episode_has_its_task_its_group_its_request_and_its_result():
    client = RecordingClient()
    gym = FixedRewards(0.0, 0.25, 0.5, 0.75)
    done = []
    episodes = run_rollout(
        client, gym, count=2, n=2, on_done=lambda *both: done.append(both), policy_version=3
    )
    assert [e.group_id for e in episodes] == ["4/0", "4/0", "4/1", "4/1"]
    assert [(e.row_id, e.server, e.row) for e in episodes[1:3]] == [
        ("rows:0", "server 0", {"row": 0}),
        ("rows:1", "server 1", {"row": 1}),
    ]
    prompts = {request.id: request.prompt_ids for request in client.requests}
    assert len(client.requests) == len(prompts)
    assert sorted(prompts) == ["4/0-0", "4/0-1", "4/1-0", "4/1-1"]
    assert (prompts["4/0-1"], prompts["4/1-0"]) == ([10, 20], [11, 21])
    assert gym.opened[1:3] == [("server 0", {"row": 0}), ("server 1", {"row": 1})]
    assert sorted(index for index, _ in done) == [0, 1, 2, 3]
    assert all(episodes[index] is e for index, e in done)
    for number, e in enumerate(episodes):
        assert (e.status, e.error, e.ended, e.reward) == ("ok", "", "stop", 0.25 * number)
        assert (e.reward_components, e.verify_result) == ({"part": 0.5}, {"extracted": number})
        assert e.timings["verify_call"] == 0.25 and e.policy_versions == [(2, 3)]
    assert gym.open_count == 0
    assert gym.responses[0]["output"][0]["content"][0]["text"] == "five"


def test_the_garbage_collector_pauses_during_a_rollout():
    collects = []
    run_rollout(
        RecordingClient(), FixedRewards(1.0), on_done=lambda *_: collects.append(gc.isenabled())
    )
    assert collects == [False] and gc.isenabled()


@pytest.mark.parametrize("kind", ["verify", "agent"])
def test_no_more_episodes_run_than_there_are_slots(kind):
    client = RecordingClient()
    gym = FixedRewards(*[1.0] * 6, kind=kind)
    owner, name = (client, "generate") if kind == "verify" else (gym, "run")
    run_one = getattr(owner, name)
    running = []

    async def run(*arguments, **named):
        running.append(1)
        assert len(running) <= 2
        await asyncio.sleep(0.02)
        running.pop()
        return await run_one(*arguments, **named)

    setattr(owner, name, run)
    episodes = run_rollout(client, gym, count=3, n=2, episode_slots=asyncio.Semaphore(2))
    assert [episode.status for episode in episodes] == ["ok"] * 6


def test_an_episode_is_verified_after_the_next_one_has_its_slot():
    client = RecordingClient()
    gym = FixedRewards(1.0, 1.0)
    both_sampled = asyncio.Event()
    generate_one = client.generate

    async def generate(*arguments, **named):
        if len(client.requests) == 1:
            both_sampled.set()
        return await generate_one(*arguments, **named)

    client.generate = generate

    @contextlib.asynccontextmanager
    async def session(*_):
        async def verify(*_):
            await asyncio.wait_for(both_sampled.wait(), 2)
            return gym_client.VerifyResult(1.0)

        yield SimpleNamespace(kind="verify", observation=None, executable=set(), verify=verify)

    gym.session = session
    episodes = run_rollout(client, gym, n=2, episode_slots=asyncio.Semaphore(1))
    assert [e.status for e in episodes] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("losses", "status", "reward"), [(1, "ok", 1.0), (9, "session_lost", None)]
)
def test_an_episode_that_lost_its_session_is_repeated_under_new_request_ids(losses, status, reward):
    request_ids: list[str] = []

    def change(output, request):
        request_ids.append(request.id)
        if len(request_ids) <= losses:
            raise GymError("session_lost", "the server was started again", session_lost=True)

    done = []
    (episode,) = run_rollout(
        RecordingClient(change), FixedRewards(*[1.0] * 9), on_done=lambda *both: done.append(both)
    )
    again = [f"4/0-0-again-{number}" for number in (1, 2, 3)]
    assert request_ids == ["4/0-0", *again][: losses + 1]
    assert (episode.status, episode.reward) == (status, reward)
    assert episode.session_lost is (reward is None) and done == [(0, episode)]


def raising(error):
    """Make turns that fail after the episode had a reward."""

    async def run_turns(episode, *_):
        episode.reward = 1.0
        raise error

    return run_turns


def with_lists(ids, mask, log_probs):
    """Make turns whose lists have the given contents. One token was sampled."""

    async def run_turns(episode, *_):
        append_tokens(episode, [5], [0.0])
        episode.response_ids = ids
        episode.response_mask = mask
        episode.log_probs = log_probs

    return run_turns


def with_branch(prompt, mask=(1,)):
    """Make turns that leave a second training row."""

    async def run_turns(episode, *_):
        append_tokens(episode, [5], [0.0])
        episode.branches = [Branch(prompt, [6], list(mask), [0.0], [TurnSpan(0, 1, 1)])]

    return run_turns


@pytest.mark.parametrize(
    ("run_turns", "status", "error"),
    [
        (raising(GymError("http_500", "broken")), "http_500", "broken"),
        (raising(env.DataError("odd")), "template", "odd"),
        (raising(ValueError("odd")), "unforeseen", f"ValueError('odd') at {__file__}:"),
        (with_lists([5], [1], [0.0] * 2), "bad_ids", "1 ids, 1 of mask, 2 log-probs"),
        (with_lists([5, 6], [1, 1], [0.0] * 2), "bad_ids", "1 sampled tokens, 2 in the mask"),
        (with_branch([5], mask=[0]), "bad_ids", "1 sampled tokens, 0 in the mask"),
        (
            with_branch([5] * 99),
            "prompt_too_long",
            "a branch of the agent's episode has 100 tokens",
        ),
    ],
)
def test_an_episode_that_fails_has_no_reward(monkeypatch, run_turns, status, error):
    monkeypatch.setattr(inference, "run_turns", run_turns)
    (episode,) = run_rollout(RecordingClient(), FixedRewards(1.0))
    assert (episode.status, episode.reward) == (status, None) and error in episode.error


FATAL = [
    ray.exceptions.RayActorError(),
    RunError("stale weights"),
    gym_client.ServerDownError("server_down", "for 90 s"),
]


@pytest.mark.parametrize("error", FATAL)
def test_a_dead_engine_or_server_ends_the_run(error):
    def change(*_):
        raise error

    with pytest.raises(type(error)):
        run_rollout(RecordingClient(change), FixedRewards(1.0))


# --- rollouts of agents --------------------------------------------------------------------------


def test_an_agent_runs_the_row_with_the_log_probs_and_versions_of_the_endpoint():
    gym = FixedRewards(kind="agent")
    (episode,) = run_rollout(RecordingClient(), gym, policy_version=7, vocab_size=1000)
    (arguments,) = gym.runs
    assert arguments[:4] == ("server 0", {"row": 0}, 5.0, 1000) and not gym.opened
    assert (episode.prompt_ids, episode.response_ids, episode.ended) == ([2, 3], [5, STOP], "stop")
    assert (episode.reward, episode.reward_components) == (0.75, {"part": 0.5})
    assert episode.verify_result == {"extracted": 5}
    assert episode.log_probs == [-1.0, -2.0] and episode.policy_versions == [(2, 6)]
    assert episode.timings["verify_call"] == 0.25


# --- baselines -----------------------------------------------------------------------------------


def test_each_group_gets_the_reward_of_one_greedy_response(monkeypatch):
    rewards = {
        "4/0-0": 0.0,
        "4/0-1": 0.25,
        "4/1-0": 0.5,
        "4/1-1": 0.75,
        "greedy-4/0-0": 2.0,
        "greedy-4/1-0": 3.0,
    }
    client = RecordingClient()
    done = []

    async def verify(episode, session):
        episode.reward = rewards[episode.verify_result["request"]]

    async def run_turns(episode, task, session, context, sampling, request_id):
        response = await sample(context, sampling, request_id, task.prompt_ids, 9)
        append_tokens(episode, *response)
        episode.verify_result["request"] = request_id

    monkeypatch.setattr(inference, "run_turns", run_turns)
    monkeypatch.setattr(inference, "verify", verify)
    episodes = run_rollout(
        client,
        FixedRewards(),
        count=2,
        n=2,
        baselines=True,
        on_done=lambda *both: done.append(both),
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
    for _, episode in done:
        is_greedy = episode.verify_result["request"].startswith("greedy-")
        assert is_greedy or any(episode is returned for returned in episodes)


def test_a_group_without_a_greedy_response_fails_and_keeps_its_other_failures():
    def change(output, request):
        if request.id == "greedy-4/0-0":
            output.stop_reason = "aborted"
        if request.id == "4/0-1":
            output.log_probs = None

    client = RecordingClient(change)
    episodes = run_rollout(client, FixedRewards(*[1.0] * 9), count=2, n=2, baselines=True)
    assert [(e.status, e.reward, e.baseline) for e in episodes] == [
        ("no_baseline", None, None),
        ("no_log_probs", None, None),
        *[("ok", 1.0, 1.0)] * 2,
    ]
    error = "the greedy answer failed: vLLM ended the request without an answer (aborted)"
    assert episodes[0].error == error and "without a log-prob" in episodes[1].error


# --- servers -------------------------------------------------------------------------------------


class Manager:
    """A double of verl's LLMServerManager that records its arguments and the start of servers."""

    instances: list[Manager]
    events: list[str]

    def __init__(self, config, **more):
        self.config = config
        self.more = more
        self.instances.append(self)

    async def _initialize_llm_servers(self):
        self.events.append("servers start")
        await asyncio.sleep(0.1)
        self.events.append("servers call the workers")
        await asyncio.sleep(0.6)
        self.events.append("servers are ready")


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(Manager, "instances", [], raising=False)
    monkeypatch.setattr(Manager, "events", [], raising=False)
    monkeypatch.setattr(inference, "LLMServerManager", Manager)
    return Manager


@pytest.mark.parametrize(
    ("changes", "is_concurrent", "has_other_gpus"),
    [
        ({}, False, False),
        ({"engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 9}}}, True, False),
        ({"nnodes": 2}, True, True),
    ],
    ids=["measures memory", "fixed cache size", "separate GPUs"],
)
def test_servers_and_models_load_concurrently_only_if_vllm_measures_no_memory(
    manager, changes, is_concurrent, has_other_gpus
):
    actor = SimpleNamespace(init_model=lambda: manager.events.append("models loaded"))
    servers = asyncio.run(inference.start_servers(make_recipe(**changes), actor))
    assert [servers] == manager.instances
    assert servers.more == {"worker_group": None if has_other_gpus else actor}
    events = ["servers start", "servers call the workers", "servers are ready"]
    concurrent = [*events[:2], "models loaded", events[2]]
    assert manager.events == (concurrent if is_concurrent else ["models loaded", *events])


@pytest.mark.parametrize(("nnodes", "expected"), [(0, 3), (2, 2)])
def test_standalone_servers_load_the_weights_of_the_model_folder(manager, nnodes, expected):
    recipe = make_recipe(nnodes=nnodes)
    servers = asyncio.run(inference.start_standalone_servers(recipe, start_rank=5))
    rollout = servers.config.actor_rollout_ref.rollout
    assert (rollout.load_format, rollout.nnodes) == ("auto", expected)
    assert servers.more == {"start_rank": 5}
    assert manager.events[-1] == "servers are ready"
    assert recipe == make_recipe(nnodes=nnodes)  # the recipe of the caller is not changed


@pytest.fixture
def make_servers(monkeypatch):
    """Return a function that makes Servers with doubles of verl's managers."""
    monkeypatch.setattr(inference, "WeightSync", Mock())
    monkeypatch.setattr(inference.weight_proof, "attach_to_group", Mock())

    def make(workers, trains=True) -> inference.Servers:
        context = make_context(None)
        # as for a model whose image tokens must not be sampled
        processor: Any = SimpleNamespace(sampling_params=lambda: {"logit_bias": {9: -100.0}})
        context.template.processor = processor
        doubles: Any = [Mock() for _ in range(3)]
        manager, actor, gym = doubles
        loop = asyncio.Runner()
        recipe = make_recipe()
        group = actor if trains else None
        return inference.Servers(recipe, manager, group, context, gym, loop, workers)

    return make


def test_weights_have_the_number_of_their_step(make_servers):
    workers = Mock()
    servers = make_servers(workers)
    made: Any = inference.WeightSync
    assert made.call_args.kwargs["config"].backend == "naive"
    assert made.call_args.kwargs["replicas"] is servers.manager.get_replicas.return_value
    assert not servers.is_asleep and servers.context.policy_version is None
    servers.sleep()
    assert servers.is_asleep
    assert servers.update_weights(4) is made.return_value.proof
    assert not servers.is_asleep and servers.context.policy_version == 4
    assert made.return_value.mock_calls == [mock.call.sleep_replicas(), mock.call.update_weights(4)]
    assert workers.mock_calls == [mock.call.set_policy_version(4)]


@pytest.mark.parametrize("name", ["rollout", "rollout_with_baselines", "workers"])
def test_a_rollout_runs_here_or_in_the_workers_with_the_sampling_of_the_call(
    make_servers, monkeypatch, name
):
    run = AsyncMock()
    workers = Mock(rollout=run) if name == "workers" else None
    if not workers:
        monkeypatch.setattr(inference, name, run)
    servers = make_servers(workers)
    baselines = name != "rollout"
    result = servers.rollout("requests", {"temperature": 0.4}, print, baselines)
    sampling = {"temperature": 0.4, "logit_bias": {9: -100.0}}
    others = [print, True] if workers else [servers.context, servers.gym, print]
    assert result is run.return_value
    assert run.call_args == mock.call("requests", sampling, *others)
    assert servers.context.samples.sampling == sampling


def test_servers_without_a_trainer_have_no_weights_to_send(make_servers):
    servers = make_servers(None, trains=False)
    servers.sleep()
    assert not servers.is_asleep and servers.update_weights(4) == {}


def test_no_replica_samples_before_its_weights_are_proved(monkeypatch):
    """verl lets the replicas sample again at the end of a sync."""
    monkeypatch.setattr(inference.CheckpointEngineManager, "update_weights", AsyncMock())
    replica = AsyncMock()
    settings: Any = Mock(backend="naive", custom_backend_module=None)
    sync = inference.WeightSync(settings, Mock(), [replica])
    ask = AsyncMock(side_effect=[RunError("replica 0"), {"proved": 1.0}])
    monkeypatch.setattr(inference.weight_proof, "ask_replicas", ask)
    sync.resume_generation_replicas()  # before the first sync
    assert replica.mock_calls == [mock.call.resume_generation()] and not ask.mock_calls
    with pytest.raises(RunError):
        sync.update_weights(3)
    assert len(replica.mock_calls) == 1
    for _ in range(2):
        sync.resume_generation_replicas()
    assert sync.proof == {"proved": 1.0} and ask.mock_calls == [mock.call([replica], 3)] * 2
    assert replica.mock_calls == [mock.call.resume_generation()] * 3
    sync.is_checked = False
    sync.update_weights(4)
    assert len(ask.mock_calls) == 2
