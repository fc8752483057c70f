"""Turns of policy and environment in tokens: what was sampled and what was observed, and nothing else.

The policy here is a script and the environment a stub, so that every conversation and template can be tried;
the same code against vLLM and real Gym servers is in test_stack.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import zlib
from types import SimpleNamespace

import pytest
from conftest import gym_examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import env
import gym_client
import inference
from kit.rollout import chat, openai_server

# Chat templates in the manner of four families; the calls are written as Hermes writes them.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# ... which drops the thoughts of earlier turns, as Qwen3's does: a conversation rendered anew would differ
FORGETFUL = CHATML.replace(
    "{{ m.content or '' }}",
    "{{ (m.content or '') if loop.last else (m.content or '').split('</think>')[-1] }}",
)
LLAMA = (
    "<|begin|>{% if tools %}<|start_header|>system<|end_header|>\n\nTools: {{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|start_header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}<|eot|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %} {{ m.content }}{% endif %}</s>{% endif %}"
    "{% endfor %}"
)
STOPS = {"chatml": "<|im_end|>", "forgetful": "<|im_end|>", "llama": "<|eot|>", "mistral": "</s>"}
TEMPLATES = {"chatml": CHATML, "forgetful": FORGETFUL, "llama": LLAMA, "mistral": MISTRAL}
TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
}
LETTERS = "abc xyz\n\t{}\"'<>&|éß中🙂0123456789"


def bytes_tokenizer(template: str, stop: str) -> PreTrainedTokenizerFast:
    """Every byte a token, and the template's marks: loses nothing, so decoded text can be compared."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=stop, clean_up_tokenization_spaces=False
    )
    marks = [
        "<|im_start|>",
        "<|begin|>",
        "<|start_header|>",
        "<|end_header|>",
        "<s>",
        "[INST]",
        "[/INST]",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": [m for m in marks if m != stop]})
    tokenizer.chat_template = template
    return tokenizer


class Script:
    """A policy that says what it was told to, and remembers what it was asked."""

    def __init__(self, answers: list[list[int]]):
        self.answers, self.prompts = list(answers), []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.prompts.append(list(prompt_ids))
        ids = self.answers.pop(0)[: sampling_params["max_tokens"]]
        log_probs = [-0.5 - i for i in range(len(ids))]
        return SimpleNamespace(
            token_ids=ids, log_probs=log_probs, stop_reason="completed", extra_fields={}
        )


class World:
    """A verify server's session whose tools answer from a list."""

    kind, observation, executable = "verify", None, {"look_up"}

    def __init__(self, answers: list[str]):
        self.answers, self.verified = list(answers), None

    async def call_tool(self, name, arguments):
        return self.answers.pop(0)

    async def verify(self, response):
        self.verified = response
        return gym_client.Verdict(1.0, {"a": 1.0})


def policy_of(script, tokenizer, **changes) -> inference.Policy:
    defaults = {
        "max_prompt_length": 4000,
        "max_response_length": 20000,
        "max_turns": None,
        "max_tool_chars": 4096,
    }
    settings = {**defaults, "tool_format": "hermes", "deadline_s": 5.0, **changes}
    return inference.Policy(script, tokenizer, {tokenizer.eos_token_id}, **settings)


def task_of(tokenizer, tools=True, prompt="Look it up.") -> env.Task:
    row = {"responses_create_params": {"input": prompt, **({"tools": [TOOL]} if tools else {})}}
    messages, chat_tools = env.render(row, "x:1")
    ids = env.encode(messages, chat_tools, tokenizer, "x:1")
    return env.Task("x:1", row, "server", messages, ids, tools=chat_tools)


def play(task, world, policy) -> inference.Episode:
    episode = inference.Episode(task.row_id, "g", task.server, task.prompt_ids)

    async def to_the_verdict():
        await inference.play(episode, task, world, policy, "r")
        await inference.judge(episode, world)

    asyncio.run(to_the_verdict())
    return episode


def call(arguments: str = "{}", name: str = "look_up") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("seed", range(12))
def test_an_episode_is_what_was_sampled_and_what_was_observed(family, seed):
    """Random conversations: each prompt is the last one, the answer to it, and the observation, id for id."""
    rng = random.Random(f"{family} {seed}")
    tokenizer = bytes_tokenizer(TEMPLATES[family], STOPS[family])
    stop = tokenizer.eos_token_id

    def words(low: int, high: int) -> str:
        return "".join(rng.choices(LETTERS, k=rng.randint(low, high)))

    said, heard = [], []
    for _ in range(rng.randint(1, 4)):
        calls = [call(json.dumps({"q": words(0, 9)})) for _ in range(rng.randint(1, 3))]
        thought = f"<think>{words(0, 20)}</think>" if rng.random() < 0.5 else ""
        said.append(
            tokenizer.encode(
                thought + words(0, 20).replace("<", "") + "".join(calls), add_special_tokens=False
            )
        )
        heard.append([words(0, 60) for _ in calls])
    said.append(
        rng.choices(range(256), k=rng.randint(0, 30))
    )  # bytes at random: no text would encode to them
    said = [ids + [stop] for ids in said]

    script, world = Script(said), World([text for texts in heard for text in texts])
    episode = play(task_of(tokenizer, prompt=words(1, 30)), world, policy_of(script, tokenizer))

    assert episode.ended == "stop" and episode.reward == 1.0 and len(episode.turns) == len(said)
    sampled = [episode.response_ids[begin:end] for begin, end, _ in episode.turns]
    assert sampled == said  # id for id
    for k, (begin, end, _) in enumerate(episode.turns):
        assert script.prompts[k] == episode.prompt_ids + episode.response_ids[:begin]
        assert episode.response_mask[begin:end] == [1] * (end - begin)
        assert episode.log_probs[begin:end] == [-0.5 - i for i in range(end - begin)]
    assert sum(episode.response_mask) == sum(map(len, said))
    assert len(episode.response_ids) == len(episode.response_mask) == len(episode.log_probs)
    for (_, end, _), (begin, _, _), texts in zip(
        episode.turns, episode.turns[1:], heard, strict=False
    ):
        observed = tokenizer.decode(episode.response_ids[end:begin], skip_special_tokens=False)
        position = 0
        for text in texts:  # in order, each once
            position = observed.index(text, position) + len(text)
        opening = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
        closing = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        assert observed.endswith(opening[len(closing) :])  # the template's own opening of an answer


def test_a_conversation_reads_as_the_template_writes_it():
    """Where text encodes back to itself, an episode is exactly the template's rendering of the conversation."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    task, tool_text = task_of(tokenizer), '{"found": "it"}'
    said = ["I will look." + call(), "Here it is."]
    script = Script(
        [
            tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
            for text in said
        ]
    )
    episode = play(task, World([tool_text]), policy_of(script, tokenizer))
    conversation = [
        *task.messages,
        {"role": "assistant", "content": said[0]},
        {"role": "tool", "content": tool_text},
        {"role": "assistant", "content": said[1]},
    ]
    expected = tokenizer.apply_chat_template(conversation, tools=task.tools, tokenize=False)
    assert tokenizer.decode(episode.prompt_ids + episode.response_ids) == expected.removesuffix(
        "\n"
    )


def one_turn_each(texts, tokenizer):
    return Script(
        [
            tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
            for text in texts
        ]
    )


def test_the_verifier_sees_every_item_in_order():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    script = one_turn_each(
        ["<think>hm</think>Wait." + call() + call('{"a": 1}'), call(), "done"], tokenizer
    )
    world = World(["one", "two", "three"])
    episode = play(task_of(tokenizer), world, policy_of(script, tokenizer))
    output = world.verified["output"]
    kinds = [item["type"] for item in output]
    call_and_answer = ["function_call", "function_call_output"]
    assert kinds == [
        *("reasoning", "message", "function_call", *call_and_answer, "function_call_output"),
        *call_and_answer,
        "message",
    ]
    assert [item["output"] for item in output if "output" in item] == ["one", "two", "three"]
    assert output[0]["summary"][0]["text"] == "hm" and output[1]["content"][0]["text"] == "Wait."
    assert [item["arguments"] for item in output if item["type"] == "function_call"] == [
        "{}",
        '{"a": 1}',
        "{}",
    ]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    assert calls == [item["call_id"] for item in output if item["type"] == "function_call_output"]
    assert episode.response == "done" and episode.reward_components == {"a": 1.0}
    assert (
        episode.transcript
        == 'Wait. look_up({}) look_up({"a": 1}) => one => two look_up({}) => three done'
    )


@pytest.mark.parametrize(
    ("changes", "ended", "turns"),
    [
        ({}, "stop", 4),
        ({"max_turns": 2}, "turns", 2),
        ({"max_response_length": 100}, "length", 1),
    ],
    ids=["stop", "turns", "length"],
)
def test_limits(changes, ended, turns):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    script = one_turn_each([call(), call(), call(), "done"], tokenizer)
    world = World(["x" * 60] * 3)
    episode = play(task_of(tokenizer), world, policy_of(script, tokenizer, **changes))
    assert (episode.ended, len(episode.turns)) == (ended, turns)
    assert episode.response_mask[-1] == 1  # nothing observed hangs on the end
    assert len(episode.response_ids) <= changes.get("max_response_length", 20000)
    outputs = [item for item in world.verified["output"] if item["type"] == "function_call_output"]
    assert len(outputs) == min(
        turns, 3
    )  # calls made in the last turn were run, as Gym's agent does


def test_a_turn_cut_off_runs_no_tools():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    world = World([])
    script = Script(
        [tokenizer.encode(call(), add_special_tokens=False)]
    )  # the call is whole, the stop token missing
    episode = play(task_of(tokenizer), world, policy_of(script, tokenizer))
    assert episode.ended == "length" and [i["type"] for i in world.verified["output"]] == [
        "function_call"
    ]


def test_a_call_is_the_answer_where_no_tool_has_a_route():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    world = World([])
    world.executable = set()
    episode = play(
        task_of(tokenizer), world, policy_of(one_turn_each([call()], tokenizer), tokenizer)
    )
    assert episode.ended == "stop" and [i["type"] for i in world.verified["output"]] == [
        "function_call"
    ]


def test_a_long_tool_answer_is_cut_for_the_model_and_whole_for_the_verifier():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    answer = "a" * 500 + "b" * 500
    world = World([answer])
    episode = play(
        task_of(tokenizer),
        world,
        policy_of(one_turn_each([call(), "ok"], tokenizer), tokenizer, max_tool_chars=100),
    )
    seen = tokenizer.decode(episode.response_ids)
    assert "a" * 50 + "\n... 900 characters ...\n" + "b" * 50 in seen and "a" * 51 not in seen
    assert world.verified["output"][1]["output"] == answer


class Game:
    """A step server's session: so many steps of reward 0.5, then the end."""

    kind, executable = "step", set()

    def __init__(self, steps, observation="Your move.", terminated=True):
        self.left, self.observation, self.how, self.bodies = steps, observation, terminated, []

    async def step(self, response):
        self.bodies.append(response["output"])
        self.left -= 1
        done = self.left == 0
        return gym_client.Turn(
            None if done else "Next?", 0.5, done and self.how, done and not self.how
        )


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
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    script, game = one_turn_each(["move"] * 9, tokenizer), Game(steps, terminated=terminated)
    episode = play(task_of(tokenizer, tools=False), game, policy_of(script, tokenizer, **changes))
    assert (episode.ended, episode.reward) == (ended, reward)
    assert tokenizer.decode(episode.prompt_ids).endswith(
        "user\nYour move.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(len(items) == 1 for items in game.bodies)  # a step tells of its own turn only


def test_an_empty_row_that_nobody_adds_to_is_a_failure():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    task = env.Task("x:1", {"responses_create_params": {"input": []}}, "server", [], [])
    with pytest.raises(gym_client.GymError) as caught:
        play(task, Game(1, observation=None), policy_of(Script([]), tokenizer))
    assert caught.value.reason == "no_prompt"


@pytest.mark.parametrize(
    "more", ["{{ loop.length }}", "{% if loop.length > 2 %}{{ raise_exception('no') }}{% endif %}"]
)
def test_a_template_that_cannot_go_on_is_a_failure(more):
    tokenizer = bytes_tokenizer(
        "{% for m in messages %}" + more + "{{ m.content }}{% endfor %}", "<|im_end|>"
    )
    with pytest.raises(gym_client.GymError) as caught:
        chat.observed_ids([{"role": "user", "content": "x"}], tokenizer, {tokenizer.eos_token_id})
    assert caught.value.reason == "template"


# --- limits, requests and times of an episode -----------------------------------------------------


class Recorder(Script):
    """A script that also records each request's id and parameters."""

    def __init__(self, answers):
        super().__init__(answers)
        self.requests: list[tuple[str, dict]] = []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.requests.append((request_id, sampling_params))
        return await super().generate(request_id, prompt_ids, sampling_params)


def encoded(texts, tokenizer) -> list[list[int]]:
    return [
        [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for text in texts
    ]


def test_later_turns_have_the_room_that_is_left():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    script = Recorder(encoded([call(), "y" * 400], tokenizer))
    episode = play(
        task_of(tokenizer), World(["x" * 60]), policy_of(script, tokenizer, max_response_length=250)
    )
    assert (
        len(episode.turns) == 2 and len(episode.response_ids) == 250 and episode.ended == "length"
    )
    assert [params["max_tokens"] for _, params in script.requests] == [
        250,
        250 - episode.turns[1][0],
    ]


@pytest.mark.parametrize(("room", "turns"), [(1, 2), (0, 1)])
def test_an_observation_must_leave_room_for_an_answer(room, turns):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])

    def conversation(limit):
        script = Script(encoded([call(), "y" * 9], tokenizer))
        return play(
            task_of(tokenizer),
            World(["x" * 60]),
            policy_of(script, tokenizer, max_response_length=limit),
        )

    whole = conversation(20000)
    begin, _, _ = whole.turns[1]
    episode = conversation(begin + room)
    assert (len(episode.turns), episode.ended) == (turns, "length")


def test_turns_of_an_episode_share_its_request_and_have_a_seed_each():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    script = Recorder(encoded([call(), call(), "done"], tokenizer))
    play(task_of(tokenizer), World(["one", "two"]), policy_of(script, tokenizer, seed=3))
    assert [name for name, _ in script.requests] == ["r"] * 3
    seeds = [params["seed"] for _, params in script.requests]
    assert seeds == [zlib.crc32(f"3 r#{turn}".encode()) for turn in range(3)]


def test_calls_are_run_in_order_with_their_names_and_arguments():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    asked = []

    async def call_tool(name, arguments):
        asked.append((name, arguments))
        return f"answer {len(asked)}"

    world = World([])
    world.call_tool = call_tool
    said = [call('{"a": 1}') + call('{"b": 2}', "other"), "done"]
    task = task_of(tokenizer)
    task.tools.append(
        {"type": "function", "function": {**task.tools[0]["function"], "name": "other"}}
    )
    episode = play(task, world, policy_of(one_turn_each(said, tokenizer), tokenizer))
    assert asked == [("look_up", '{"a": 1}'), ("other", '{"b": 2}')]
    first, second, one, two, _ = episode.output
    assert (one["call_id"], one["output"]) == (first["call_id"], "answer 1")
    assert (two["call_id"], two["output"]) == (second["call_id"], "answer 2")


def test_a_step_answers_calls_and_observes_in_order():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])

    class Tools(Game):
        async def step(self, response):
            turn = await super().step(response)
            answered = [{"call_id": f"c{self.left}", "output": f"seen {self.left}"}]
            return dataclasses.replace(
                turn, observation="Look." if self.left == 2 else None, tool_outputs=answered
            )

    script = one_turn_each(["a", "b", "c"], tokenizer)
    episode = play(task_of(tokenizer, tools=False), Tools(3), policy_of(script, tokenizer))
    said = [item for item in episode.output if item.get("role") != "assistant"]
    assert [
        (item["type"], item.get("call_id"), item.get("output")) for item in (said[0], said[2])
    ] == [
        ("function_call_output", "c2", "seen 2"),
        ("function_call_output", "c1", "seen 1"),
    ]
    assert said[1] == {"role": "user", "type": "message", "content": "Look."} and len(said) == 3
    assert (episode.turn_rewards, episode.reward) == ([0.5, 0.5, 0.5], 1.5)
    seen = tokenizer.decode(episode.response_ids)
    assert seen.index("seen 2") < seen.index("user\nLook.") < seen.index("seen 1")


@pytest.mark.parametrize(("over", "fails"), [(0, False), (1, True)])
def test_a_prompt_that_an_observation_makes_too_long_fails_by_name(over, fails):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    task = task_of(tokenizer, tools=False)
    asked = [*task.messages, {"role": "user", "content": "Your move."}]
    length = len(env.encode(asked, task.tools, tokenizer, "x:1"))
    script = one_turn_each(["move"], tokenizer)
    policy = policy_of(script, tokenizer, max_prompt_length=length - over)
    if not fails:
        assert len(play(task, Game(1), policy).prompt_ids) == length
        return
    with pytest.raises(
        gym_client.GymError, match=f"{length} tokens .* data.max_prompt_length={length - 1}"
    ) as caught:
        play(task, Game(1), policy)
    assert caught.value.reason == "prompt_too_long" and not script.prompts


def test_a_task_without_ids_is_encoded_and_one_with_ids_is_taken_as_it_is():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    task = task_of(tokenizer)
    without = dataclasses.replace(task, prompt_ids=[])
    assert (
        play(without, World([]), policy_of(one_turn_each(["a"], tokenizer), tokenizer)).prompt_ids
        == task.prompt_ids
    )
    given = dataclasses.replace(task, prompt_ids=[7, 8])
    assert play(
        given, World([]), policy_of(one_turn_each(["a"], tokenizer), tokenizer)
    ).prompt_ids == [7, 8]


def test_seconds_are_summed_over_turns(monkeypatch):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    clock = itertools.count(100)
    monkeypatch.setattr(inference, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    script = one_turn_each([call(), call(), "done"], tokenizer)
    world = World(["one", "two"])
    episode = play(task_of(tokenizer), world, policy_of(script, tokenizer))
    assert episode.timings == {"generate": 3.0, "tools": 3.0, "verify": 1.0, "verify_call": 0.0}
    assert world.last_ids[:-1] == tokenizer.encode(
        "done", add_special_tokens=False
    )  # for verifiers that read ids


def test_a_step_server_is_not_asked_to_verify():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    game = Game(1)
    episode = play(
        task_of(tokenizer, tools=False),
        game,
        policy_of(one_turn_each(["move"], tokenizer), tokenizer),
    )
    assert "verify" not in episode.timings and episode.reward == 0.5


# --- agents that own the turns --------------------------------------------------------------------


def items_of(*calls) -> list[dict]:
    """/run's output items: one message per model call (prompt ids, ids), with their token ids."""
    return [
        {
            **gym_client.message("text"),
            "prompt_token_ids": p,
            "generation_token_ids": g,
            "generation_log_probs": [-1.0] * len(g),
        }
        for p, g in calls
    ]


def empty_episode() -> inference.Episode:
    return inference.Episode("x:1", "g", "server", [])


def test_an_agents_episode_is_put_together_from_its_calls():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    stop = tokenizer.eos_token_id
    episode = empty_episode()
    output = items_of(([1, 2], [3, stop]), ([1, 2, 3, stop, 7, 8], [9, stop]))
    output.insert(1, gym_client.function_call_output("c", "seen"))
    inference.replay(episode, {"output": output}, policy_of(None, tokenizer))
    assert episode.prompt_ids == [1, 2] and episode.response_ids == [3, stop, 7, 8, 9, stop]
    assert episode.response_mask == [1, 1, 0, 0, 1, 1] and episode.turns == [(0, 2, 1), (4, 6, 3)]
    assert episode.ended == "stop" and not any(
        "token_ids" in key for item in episode.output for key in item
    )


@pytest.mark.parametrize(
    ("ids", "more", "details", "ended"),
    [
        ([3], [], None, "length"),
        (["stop"], [gym_client.message("")], {"reason": "max_output_tokens"}, "length"),
        (["stop"], [gym_client.function_call_output("c", "seen")], None, "turns"),
    ],
    ids=["cut off", "out of context", "out of turns"],
)
def test_how_an_agents_episode_ended(ids, more, details, ended):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    ids = [tokenizer.eos_token_id if i == "stop" else i for i in ids]
    episode = empty_episode()
    response = {"output": items_of(([1, 2], ids)) + more, "incomplete_details": details}
    inference.replay(episode, response, policy_of(None, tokenizer))
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
def test_a_break_in_an_agents_ids_is_a_failure(calls, reason):
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    with pytest.raises(gym_client.GymError) as caught:
        inference.replay(empty_episode(), {"output": items_of(*calls)}, policy_of(None, tokenizer))
    assert caught.value.reason == reason


def test_the_address_starts_the_next_prompt_with_what_was_sampled():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    chat_tools = env.render({"responses_create_params": {"input": "x", "tools": [TOOL]}}, "x:1")[1]
    odd = [
        200,
        201,
        202,
        *tokenizer.encode(call(), add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    script = Script([odd, [5, tokenizer.eos_token_id]])
    policy = policy_of(script, tokenizer)
    first = {
        "messages": [{"role": "user", "content": "Look it up."}],
        "tools": chat_tools,
        "temperature": 9,
    }
    status, answer = asyncio.run(openai_server.complete(first, policy))
    said = answer["choices"][0]["message"]
    assert status == 200 and answer["choices"][0]["finish_reason"] == "tool_calls"
    assert said["generation_token_ids"] == odd and len(said["generation_log_probs"]) == len(odd)
    tool_answer = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "seen"}
    second = {"messages": [*first["messages"], said, tool_answer], "tools": chat_tools}
    status, answer = asyncio.run(openai_server.complete(second, policy))
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    prompt = answer["choices"][0]["message"]["prompt_token_ids"]
    assert (
        prompt == script.prompts[1]
        and prompt[: len(script.prompts[0]) + len(odd)] == script.prompts[0] + odd
    )
    assert (
        tokenizer.decode(prompt[len(script.prompts[0]) + len(odd) :])
        .strip()
        .startswith("<|im_start|>tool\nseen")
    )


def test_the_address_refuses_for_good_what_a_parser_cannot_read():
    """500 would have Gym ask, and the policy answer, three times over."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    policy = policy_of(one_turn_each(["hello"], tokenizer), tokenizer)
    chat_tools = env.render({"responses_create_params": {"input": "x", "tools": [TOOL]}}, "x:1")[1]
    policy.tool_format = "no such format"
    body = {"messages": [{"role": "user", "content": "x"}], "tools": chat_tools}
    status, answer = asyncio.run(openai_server.complete(body, policy))
    assert status == 422 and "no such format parser failed" in answer["error"]["message"]


def test_the_address_says_when_the_context_is_full():
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    policy = policy_of(Script([]), tokenizer, max_prompt_length=5, max_response_length=5)
    status, answer = asyncio.run(
        openai_server.complete({"messages": [{"role": "user", "content": "x" * 50}]}, policy)
    )
    assert status == 400 and "context length" in answer["error"]["message"]


def test_every_tool_of_gyms_examples_suits_the_parser():
    """vLLM's parsers are handed the row's tools, in vLLM's own schema."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    said = tokenizer.encode(
        "<tool_call>{broken</tool_call> and " + call(), add_special_tokens=False
    )
    rows = 0
    for path in gym_examples():
        for where, text in env.raw_rows(path):
            with contextlib.suppress(env.DataError):  # tests/test_env.py has which
                tools = env.render(env.parse_row(text, where), where)[1]
                if tools:
                    thought, text, calls = asyncio.run(
                        chat.understand(policy_of(None, tokenizer), said, tools)
                    )
                    assert (
                        not thought and "broken" in text and not calls
                    )  # what cannot be read is text
                    calls = asyncio.run(
                        chat.understand(policy_of(None, tokenizer), said[31:], tools)
                    )[2]
                    assert [c["name"] for c in calls] == ["look_up"]
                    rows += 1
    assert rows > 50
