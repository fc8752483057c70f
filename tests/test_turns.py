"""Tests that an episode has exactly the tokens that were sampled and observed in its turns.

Doubles of policy and environment make any conversation and chat template possible. test_stack.py
tests the same code with vLLM and Gym servers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import zlib
from types import SimpleNamespace

import pytest

import env
import gym_client
import inference
from tests.helpers.rollouts import (
    CHATML,
    STOPS,
    TEMPLATES,
    Game,
    Script,
    ToolSession,
    bytes_tokenizer,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    keep_samples,
    one_turn_each,
    play,
    task_of,
)

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
@pytest.mark.parametrize("seed", range(12))
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


def test_the_text_of_an_episode_is_that_of_the_rendered_conversation():
    """This holds for text that decodes to itself after it is encoded."""
    tokenizer = chatml_tokenizer()
    task = task_of(tokenizer)
    tool_text = '{"found": "it"}'
    texts = ["I will look." + call(), "Here it is."]
    client = one_turn_each(texts, tokenizer)
    episode = play(task, ToolSession([tool_text]), context_of(client, tokenizer))
    conversation = [
        *task.messages,
        {"role": "assistant", "content": texts[0]},
        {"role": "tool", "content": tool_text},
        {"role": "assistant", "content": texts[1]},
    ]
    expected = tokenizer.apply_chat_template(conversation, tools=task.tools, tokenize=False)
    text = tokenizer.decode(episode.prompt_ids + episode.response_ids)
    assert text == expected.removesuffix("\n")


def test_the_verifier_sees_every_item_in_order():
    tokenizer = chatml_tokenizer()
    first = "<think>hm</think>Wait." + call() + call('{"a": 1}')
    client = one_turn_each([first, call(), "done"], tokenizer)
    session = ToolSession(["one", "two", "three"])
    episode = play(task_of(tokenizer), session, context_of(client, tokenizer))
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
    tokenizer = chatml_tokenizer()
    client = one_turn_each([call(), call(), call(), "done"], tokenizer)
    session = ToolSession(["x" * 60] * 3)
    episode = play(task_of(tokenizer), session, context_of(client, tokenizer, **changes))
    assert (episode.ended, len(episode.turns)) == (ended, turns)
    assert episode.response_mask[-1] == 1  # the last token is a sampled one
    assert len(episode.response_ids) <= changes.get("max_response_length", 20000)
    types = [item["type"] for item in session.verified["output"]]
    # the calls of the last turn are also run, as in Gym's agent
    assert types.count("function_call_output") == min(turns, 3)


def list_verified_types(session) -> list[str]:
    return [item["type"] for item in session.verified["output"]]


def test_a_response_without_a_stop_token_runs_no_tools():
    tokenizer = chatml_tokenizer()
    session = ToolSession([])
    whole_call = tokenizer.encode(call(), add_special_tokens=False)
    episode = play(task_of(tokenizer), session, context_of(Script([whole_call]), tokenizer))
    assert episode.ended == "length" and list_verified_types(session) == ["function_call"]


def test_a_call_ends_the_episode_if_no_tool_has_a_route():
    tokenizer = chatml_tokenizer()
    session = ToolSession([])
    session.executable = set()
    client = one_turn_each([call()], tokenizer)
    episode = play(task_of(tokenizer), session, context_of(client, tokenizer))
    assert episode.ended == "stop" and list_verified_types(session) == ["function_call"]


def test_a_long_tool_output_is_truncated_for_the_model_but_not_for_the_verifier():
    tokenizer = chatml_tokenizer()
    output = "a" * 500 + "b" * 500
    session = ToolSession([output])
    client = one_turn_each([call(), "ok"], tokenizer)
    context = context_of(client, tokenizer, max_tool_chars=100)
    episode = play(task_of(tokenizer), session, context)
    text = tokenizer.decode(episode.response_ids)
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
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["move"] * 9, tokenizer)
    game = Game(steps, terminated=terminated)
    context = context_of(client, tokenizer, **changes)
    episode = play(task_of(tokenizer, tools=False), game, context)
    assert (episode.ended, episode.reward) == (ended, reward)
    prompt = tokenizer.decode(episode.prompt_ids)
    assert prompt.endswith("user\nYour move.<|im_end|>\n<|im_start|>assistant\n")
    assert all(len(items) == 1 for items in game.bodies)  # a step has only the items of its turn


def test_an_empty_row_without_an_observation_is_a_failure():
    tokenizer = chatml_tokenizer()
    task = env.Task("x:1", {"responses_create_params": {"input": []}}, "server", [], [])
    with pytest.raises(gym_client.GymError) as caught:
        play(task, Game(1, observation=None), context_of(Script([]), tokenizer))
    assert caught.value.reason == "no_prompt"


# --- limits, requests and times of an episode ----------------------------------------------------


class Recorder(Script):
    """A script that also records each request's id and parameters."""

    def __init__(self, answers):
        super().__init__(answers)
        self.requests: list[tuple[str, dict]] = []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.requests.append((request_id, sampling_params))
        return await super().generate(request_id, prompt_ids, sampling_params)


def test_later_turns_may_use_the_tokens_that_are_left():
    tokenizer = chatml_tokenizer()
    client = Recorder(encode_turns([call(), "y" * 400], tokenizer))
    context = context_of(client, tokenizer, max_response_length=250)
    episode = play(task_of(tokenizer), ToolSession(["x" * 60]), context)
    assert len(episode.turns) == 2 and len(episode.response_ids) == 250
    assert episode.ended == "length"
    limits = [params["max_tokens"] for _, params in client.requests]
    assert limits == [250, 250 - episode.turns[1][0]]


@pytest.mark.parametrize(("room", "turns"), [(1, 2), (0, 1)])
def test_an_observation_must_leave_a_token_for_the_next_response(room, turns):
    tokenizer = chatml_tokenizer()

    def run_with_limit(limit):
        client = Script(encode_turns([call(), "y" * 9], tokenizer))
        context = context_of(client, tokenizer, max_response_length=limit)
        return play(task_of(tokenizer), ToolSession(["x" * 60]), context)

    whole = run_with_limit(20000)
    begin, _, _ = whole.turns[1]
    episode = run_with_limit(begin + room)
    assert (len(episode.turns), episode.ended) == (turns, "length")


def test_turns_of_an_episode_share_its_request_id_but_not_the_seed():
    tokenizer = chatml_tokenizer()
    client = Recorder(encode_turns([call(), call(), "done"], tokenizer))
    play(task_of(tokenizer), ToolSession(["one", "two"]), context_of(client, tokenizer, seed=3))
    assert [request_id for request_id, _ in client.requests] == ["r"] * 3
    seeds = [params["seed"] for _, params in client.requests]
    assert seeds == [zlib.crc32(f"3 r#{turn}".encode()) for turn in range(3)]


def test_calls_are_run_in_order_with_their_names_and_arguments():
    tokenizer = chatml_tokenizer()
    calls = []

    async def call_tool(name, arguments):
        calls.append((name, arguments))
        return f"answer {len(calls)}"

    session = ToolSession([])
    session.call_tool = call_tool
    texts = [call('{"a": 1}') + call('{"b": 2}', "other"), "done"]
    task = task_of(tokenizer)
    other = {**task.tools[0]["function"], "name": "other"}
    task.tools.append({"type": "function", "function": other})
    episode = play(task, session, context_of(one_turn_each(texts, tokenizer), tokenizer))
    assert calls == [("look_up", '{"a": 1}'), ("other", '{"b": 2}')]
    first, second, one, two, _ = episode.output
    assert (one["call_id"], one["output"]) == (first["call_id"], "answer 1")
    assert (two["call_id"], two["output"]) == (second["call_id"], "answer 2")


class GameWithTools(Game):
    """A game whose steps also return tool outputs."""

    async def step(self, response, last):
        result = await super().step(response, last)
        outputs = [{"call_id": f"c{self.steps_left}", "output": f"seen {self.steps_left}"}]
        observation = "Look." if self.steps_left == 2 else None
        return dataclasses.replace(result, observation=observation, tool_outputs=outputs)


def test_a_step_returns_tool_outputs_before_its_observation():
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["a", "b", "c"], tokenizer)
    task = task_of(tokenizer, tools=False)
    episode = play(task, GameWithTools(3), context_of(client, tokenizer))
    observed = [item for item in episode.output if item.get("role") != "assistant"]
    outputs = [(i["type"], i.get("call_id"), i.get("output")) for i in (observed[0], observed[2])]
    assert outputs == [
        ("function_call_output", "c2", "seen 2"),
        ("function_call_output", "c1", "seen 1"),
    ]
    assert observed[1] == {"role": "user", "type": "message", "content": "Look."}
    assert len(observed) == 3
    assert (episode.turn_rewards, episode.reward) == ([0.5, 0.5, 0.5], 1.5)
    text = tokenizer.decode(episode.response_ids)
    assert text.index("seen 2") < text.index("user\nLook.") < text.index("seen 1")


@pytest.mark.parametrize(("over", "fails"), [(0, False), (1, True)])
def test_an_observation_that_makes_the_prompt_too_long_is_a_failure(over, fails):
    tokenizer = chatml_tokenizer()
    task = task_of(tokenizer, tools=False)
    messages = [*task.messages, {"role": "user", "content": "Your move."}]
    length = len(env.encode_messages(messages, task.tools, tokenizer, "x:1"))
    client = one_turn_each(["move"], tokenizer)
    context = context_of(client, tokenizer, max_prompt_length=length - over)
    if not fails:
        assert len(play(task, Game(1), context).prompt_ids) == length
        return
    message = f"{length} tokens .* data.max_prompt_length={length - 1}"
    with pytest.raises(gym_client.GymError, match=message) as caught:
        play(task, Game(1), context)
    assert caught.value.reason == "prompt_too_long" and not client.prompts


def test_only_a_task_without_prompt_ids_is_encoded():
    tokenizer = chatml_tokenizer()
    task = task_of(tokenizer)

    def get_prompt_ids(ids):
        context = context_of(one_turn_each(["a"], tokenizer), tokenizer)
        return play(dataclasses.replace(task, prompt_ids=ids), ToolSession([]), context).prompt_ids

    assert get_prompt_ids([]) == task.prompt_ids
    assert get_prompt_ids([7, 8]) == [7, 8]


def test_timings_are_summed_over_turns(monkeypatch):
    tokenizer = chatml_tokenizer()
    clock = itertools.count(100)
    monkeypatch.setattr(inference, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    client = one_turn_each([call(), call(), "done"], tokenizer)
    session = ToolSession(["one", "two"])
    episode = play(task_of(tokenizer), session, context_of(client, tokenizer))
    assert episode.timings == {"generate": 3.0, "tools": 3.0, "verify": 1.0, "verify_call": 0.0}
    # Python verifiers read the last turn
    assert session.last.written == "done"


def test_a_step_server_is_not_called_to_verify():
    tokenizer = chatml_tokenizer()
    context = context_of(one_turn_each(["move"], tokenizer), tokenizer)
    episode = play(task_of(tokenizer, tools=False), Game(1), context)
    assert "verify" not in episode.timings and episode.reward == 0.5


# --- episodes of Gym's agents --------------------------------------------------------------------


def make_items(*calls) -> list[dict]:
    """The output items of /run. calls: (prompt ids, sampled ids) of each model call."""
    items = []
    for prompt_ids, ids in calls:
        item = gym_client.message("text")
        item["prompt_token_ids"] = prompt_ids
        item["generation_token_ids"] = ids
        items.append(item)
    return items


def read_response(response, tokenizer=None) -> inference.Episode:
    episode = inference.Episode("x:1", "g", "server", [])
    context = context_of(None, tokenizer or chatml_tokenizer())
    keep_samples(context.samples, response["output"])
    inference.episode_from_response(episode, response, context)
    return episode


def test_an_agents_model_calls_are_joined_to_one_episode():
    tokenizer = chatml_tokenizer()
    stop = tokenizer.eos_token_id
    output = make_items(([1, 2], [3, stop]), ([1, 2, 3, stop, 7, 8], [9, stop]))
    output.insert(1, gym_client.function_call_output("c", "seen"))
    episode = read_response({"output": output}, tokenizer)
    assert episode.prompt_ids == [1, 2] and episode.response_ids == [3, stop, 7, 8, 9, stop]
    assert episode.response_mask == [1, 1, 0, 0, 1, 1] and episode.turns == [(0, 2, 1), (4, 6, 3)]
    assert episode.ended == "stop"
    assert not any("token_ids" in key for item in episode.output for key in item)


@pytest.mark.parametrize(
    ("ids", "more", "details", "ended"),
    [
        ([3], [], None, "length"),
        (["stop"], [gym_client.message("")], {"reason": "max_output_tokens"}, "length"),
        (["stop"], [gym_client.function_call_output("c", "seen")], None, "turns"),
    ],
    ids=["no stop token", "incomplete", "tool output last"],
)
def test_the_reason_why_an_agents_episode_ended(ids, more, details, ended):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    ids = [tokenizer.eos_token_id if i == "stop" else i for i in ids]
    output = make_items(([1, 2], ids)) + more
    episode = read_response({"output": output, "incomplete_details": details}, tokenizer)
    assert episode.ended == ended


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([([1, 2], [3]), ([1, 2, 4, 5], [6])], "not_contiguous"),
        ([([1, 2], [3]), ([1, 2], [6])], "not_contiguous"),
        ([], "no_tokens"),
        ([(None, [3])], "not_contiguous"),
    ],
    ids=["other ids", "shorter", "none", "no prompt"],
)
def test_ids_that_do_not_continue_the_previous_call_are_a_failure(calls, reason):
    with pytest.raises(gym_client.GymError) as caught:
        read_response({"output": make_items(*calls)})
    assert caught.value.reason == reason


def test_an_agents_episode_may_be_as_long_as_the_recipe_allows():
    context = context_of(None, chatml_tokenizer())
    prompt, response = context.max_prompt_length, context.max_response_length

    def read(prompt_length, response_length):
        episode = inference.Episode("x:1", "g", "server", [])
        output = make_items(([1] * prompt_length, [2] * response_length))
        keep_samples(context.samples, output)
        inference.episode_from_response(episode, {"output": output}, context)
        return len(episode.prompt_ids), len(episode.response_ids)

    assert read(prompt, response) == (prompt, response)
    for lengths in ((prompt + 1, response), (prompt, response + 1)):
        with pytest.raises(gym_client.GymError, match="left out calls") as caught:
            read(*lengths)
        assert caught.value.reason == "not_contiguous"


def test_the_first_difference_of_two_calls_is_named():
    calls = [([1, 2], [3]), ([1, 2, 4, 5], [6])]
    with pytest.raises(gym_client.GymError, match="differ from the 3 earlier ids at position 2"):
        read_response({"output": make_items(*calls)})
    with pytest.raises(gym_client.GymError, match="at position 1"):
        read_response({"output": make_items(([1, 2], [3]), ([1], [6]))})
