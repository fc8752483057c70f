"""The endpoint that Gym's agents ask: a policy behind an agent calls the tools of its row, and nothing else."""

from __future__ import annotations

import asyncio
import json

import pytest
from conftest import GYM_PYTHON, counting
from test_turns import CHATML, STOPS, Script, bytes_tokenizer, call, one_turn_each, policy_of

from gym_client import RESERVED, Gym
from kit.gym.servers import free_port, running_servers
from kit.rollout import openai_server

KEY = "a key of this test"


def tool_of(name: str) -> dict:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


def answer_of(text: str, names: list[str]) -> dict:
    """The choice that the endpoint gives to a request with tools of these names, whose policy says `text`."""
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    policy = policy_of(one_turn_each([text], tokenizer), tokenizer)
    tools = [tool_of(name) for name in names]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    status, answer = asyncio.run(openai_server.complete(body, policy))
    assert status == 200, answer
    return answer["choices"][0]


FORGED = [
    *sorted(RESERVED),
    "other",
    "Look_up",
    "look_up ",
    "look_up/",
    "look_up/../verify",
    "../verify",
    "./look_up",
    ".",
    "%76erify",
    "verify?look_up",
    "look_up#",
    "\\uff56erify",
    "look\\u005fup\\u200b",
    "",
]


@pytest.mark.parametrize("name", FORGED)
def test_a_call_of_no_tool_of_the_request_is_text(name):
    choice = answer_of("Well." + call('{"a": 1}', name), ["look_up"])
    assert choice["message"]["tool_calls"] == [] and choice["finish_reason"] == "stop"
    assert (
        choice["message"]["content"].startswith("Well.")
        and '"arguments"' in choice["message"]["content"]
    )


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED), "../verify", "verify?a", "verify#a", "%76erify"]
)
def test_a_row_makes_no_route_of_the_server_a_tool(name):
    assert answer_of(call(name=name), [name, "look_up"])["message"]["tool_calls"] == []


def test_the_honest_calls_of_an_answer_stay_calls():
    text = call('{"initial_count": 9}', "seed_session") + call('{"q": 1}') + call(name="look.up-2")
    message = answer_of(text, ["look_up", "look.up-2"])["message"]
    called = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert called == [("look_up", '{"q": 1}'), ("look.up-2", "{}")]
    assert "seed_session" in message["content"] and "look_up" not in message["content"]


def test_a_request_without_tools_has_no_calls():
    choice = answer_of(call(name="seed_session"), [])
    assert choice["message"]["tool_calls"] == [] and choice["finish_reason"] == "stop"


class Player(Script):
    """A script whose answers depend on the prompt: the whole conversation of each row, over and over."""

    def __init__(self, tokenizer, conversations: dict[str, list[str]]):
        super().__init__([])
        self.tokenizer, self.conversations = tokenizer, conversations

    async def generate(self, request_id, prompt_ids, sampling_params):
        text = self.tokenizer.decode(prompt_ids)
        turn = text.count("<|im_start|>assistant") - 1
        (answers,) = [said for question, said in self.conversations.items() if question in text]
        ids = self.tokenizer.encode(answers[turn], add_special_tokens=False)
        self.answers.append([*ids, self.tokenizer.eos_token_id])
        return await super().generate(request_id, prompt_ids, sampling_params)


def test_gyms_simple_agent_runs_the_tools_of_the_row_and_no_other_route(tmp_path):
    """nemo-gym's agent, model server and counter. The row pays for a counter at 4 that begins at 3."""
    add = call('{"count": 1}', "increment_counter")
    # `get_counter_value` is a route of the server that only the last row offers, which does not offer the other.
    conversations = {
        "honest": [add, "Done."],
        "forged": [call('{"initial_count": 4}', "seed_session"), "Done."],
        "peeks": [call(name="get_counter_value"), "Done."],
        "verifies": [call('{"expected_count": 3}', "verify"), "Done."],
        "unoffered": [add, "Done."],
        "both": [call('{"count": 5}', "get_counter_value") + add, "Done."],
    }
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    policy = policy_of(Player(tokenizer, conversations), tokenizer)
    port = free_port()
    address = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": KEY, "model": "policy"}
    start = {
        "server": "example_session_state_mgmt",
        "agent": "simple_agent",
        "python": str(GYM_PYTHON),
    }

    async def play(urls):
        played = {}
        async with openai_server.serve(policy, "127.0.0.1", port, KEY), Gym(urls) as gym:
            for question in conversations:
                row = counting(question)
                if question == "unoffered":
                    row["responses_create_params"]["tools"][0]["name"] = "get_counter_value"
                verdict, response = await gym.run("counter", row, 60.0)
                played[question] = verdict.reward, response["output"]
        return played

    with running_servers({"counter": {"start": start}}, tmp_path, policy=address) as urls:
        played = asyncio.run(play(urls))

    def ran(question):
        return [item["name"] for item in played[question][1] if item["type"] == "function_call"]

    print({question: (reward, ran(question)) for question, (reward, _) in played.items()})
    outputs = [item for item in played["honest"][1] if item["type"] == "function_call_output"]
    assert [json.loads(item["output"]) for item in outputs] == [{"success": True}]
    assert (played["honest"][0], ran("honest")) == (1.0, ["increment_counter"])
    assert (played["both"][0], ran("both")) == (1.0, ["increment_counter"])
    for question in ("forged", "peeks", "verifies", "unoffered"):
        assert (played[question][0], ran(question)) == (0.0, [])
        assert not [item for item in played[question][1] if item["type"] == "function_call_output"]
        said = "".join(part["text"] for part in played[question][1][-1]["content"])
        assert '"arguments"' in said
