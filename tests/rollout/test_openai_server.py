"""The policy endpoint for Gym's agents: its token ids, and the tool calls that it allows."""

from __future__ import annotations

import asyncio
import json

import pytest

import env
from gym_client import RESERVED, Gym
from kit.gym.network import find_free_port
from kit.gym.servers import running_servers
from kit.rollout import openai_server
from tests.helpers.recipes import GYM_PYTHON, make_counter_row
from tests.helpers.rollouts import (
    TOOL,
    Script,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    one_turn_each,
)

KEY = "a key of this test"
QUESTION = {"role": "user", "content": "Look it up."}


def complete(body: dict, context) -> openai_server.Reply:
    return asyncio.run(openai_server.complete_chat(body, context))


def get_message(reply) -> dict:
    return reply.body["choices"][0]["message"]


# --- tokens --------------------------------------------------------------------------------------


def test_the_next_prompt_starts_with_the_sampled_tokens():
    tokenizer = chatml_tokenizer()
    tools = env.render_tools([TOOL], "x:1")
    (call_ids,) = encode_turns([call()], tokenizer)
    sampled = [200, 201, 202, *call_ids]  # no text has the first three ids as its encoding
    client = Script([sampled, [5, tokenizer.eos_token_id]])
    context = context_of(client, tokenizer)
    first = {"messages": [QUESTION], "tools": tools, "temperature": 9}
    reply = complete(first, context)
    message = get_message(reply)
    assert reply.status == 200 and reply.body["choices"][0]["finish_reason"] == "tool_calls"
    assert message["generation_token_ids"] == sampled
    assert len(message["generation_log_probs"]) == len(sampled)
    call_id = message["tool_calls"][0]["id"]
    output = {"role": "tool", "tool_call_id": call_id, "content": "seen"}
    reply = complete({"messages": [QUESTION, message, output], "tools": tools}, context)
    assert reply.status == 200 and reply.body["choices"][0]["finish_reason"] == "stop"
    prompt = get_message(reply)["prompt_token_ids"]
    before = client.prompts[0] + sampled
    assert prompt == client.prompts[1] and prompt[: len(before)] == before
    observed = tokenizer.decode(prompt[len(before) :])
    assert observed.strip().startswith("<|im_start|>tool\nseen")


def test_sampling_parameters_are_those_of_the_run():
    params = []

    class Recorder(Script):
        async def generate(self, request_id, prompt_ids, sampling_params):
            params.append(sampling_params)
            return await super().generate(request_id, prompt_ids, sampling_params)

    tokenizer = chatml_tokenizer()
    client = Recorder(encode_turns(["a", "b"], tokenizer))
    context = context_of(client, tokenizer, endpoint_sampling={"temperature": 0.5})
    complete({"messages": [QUESTION], "temperature": 9}, context)
    context.endpoint_sampling = {"temperature": 0.0}  # as when an evaluation starts
    complete({"messages": [QUESTION]}, context)
    assert [each["temperature"] for each in params] == [0.5, 0.0]


def test_if_no_parser_reads_a_response_the_status_is_not_retried():
    """After a 500, Gym would send the request three times. Each time the policy would sample."""
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["hello"], tokenizer)
    context = context_of(client, tokenizer, tool_format="no such format")
    body = {"messages": [QUESTION], "tools": env.render_tools([TOOL], "x:1")}
    reply = complete(body, context)
    assert reply.status == 422
    assert "no such format parser failed" in reply.body["error"]["message"]


def test_a_prompt_without_room_for_a_response_is_reported_as_context_length():
    context = context_of(Script([]), chatml_tokenizer(), max_prompt_length=5, max_response_length=5)
    reply = complete({"messages": [{"role": "user", "content": "x" * 50}]}, context)
    assert reply.status == 400 and "context length" in reply.body["error"]["message"]


# --- calls ---------------------------------------------------------------------------------------


def make_tool(name: str) -> dict:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }


def complete_with_tools(text: str, names: list[str]) -> dict:
    """Send a request with tools of these names. The policy writes `text`. Return the choice."""
    tokenizer = chatml_tokenizer()
    context = context_of(one_turn_each([text], tokenizer), tokenizer)
    tools = [make_tool(name) for name in names]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    reply = complete(body, context)
    assert reply.status == 200, reply.body
    return reply.body["choices"][0]


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
    choice = complete_with_tools("Well." + call('{"a": 1}', name), ["look_up"])
    content = choice["message"]["content"]
    assert choice["message"]["tool_calls"] == [] and choice["finish_reason"] == "stop"
    assert content.startswith("Well.") and '"arguments"' in content


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED), "../verify", "verify?a", "verify#a", "%76erify"]
)
def test_a_row_cannot_declare_a_route_of_the_server_as_a_tool(name):
    assert complete_with_tools(call(name=name), [name, "look_up"])["message"]["tool_calls"] == []


def test_calls_of_offered_tools_stay_calls():
    text = call('{"initial_count": 9}', "seed_session") + call('{"q": 1}') + call(name="look.up-2")
    message = complete_with_tools(text, ["look_up", "look.up-2"])["message"]
    called = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert called == [("look_up", '{"q": 1}'), ("look.up-2", "{}")]
    assert "seed_session" in message["content"] and "look_up" not in message["content"]


def test_a_request_without_tools_has_no_calls():
    choice = complete_with_tools(call(name="seed_session"), [])
    assert choice["message"]["tool_calls"] == [] and choice["finish_reason"] == "stop"


# --- Gym's simple_agent --------------------------------------------------------------------------


class FixedConversations(Script):
    """A policy with a fixed conversation for each row. The question in the prompt selects it."""

    def __init__(self, tokenizer, conversations: dict[str, list[str]]):
        super().__init__([])
        self.tokenizer = tokenizer
        self.conversations = conversations

    async def generate(self, request_id, prompt_ids, sampling_params):
        text = self.tokenizer.decode(prompt_ids)
        turn = text.count("<|im_start|>assistant") - 1
        (question,) = [question for question in self.conversations if question in text]
        self.answers += encode_turns([self.conversations[question][turn]], self.tokenizer)
        return await super().generate(request_id, prompt_ids, sampling_params)


ADD = call('{"count": 1}', "increment_counter")
# {question: the turns of the policy}. `get_counter_value` is a route of the server. Only the row
# "unoffered" has it as a tool, and this row does not have the tool increment_counter.
CONVERSATIONS = {
    "honest": [ADD, "Done."],
    "forged": [call('{"initial_count": 4}', "seed_session"), "Done."],
    "peeks": [call(name="get_counter_value"), "Done."],
    "verifies": [call('{"expected_count": 3}', "verify"), "Done."],
    "unoffered": [ADD, "Done."],
    "both": [call('{"count": 5}', "get_counter_value") + ADD, "Done."],
}


async def run_rows(urls, context, port) -> dict[str, tuple[float, list[dict]]]:
    """Run each row of CONVERSATIONS with the agent. Return {question: (reward, output items)}."""
    results = {}
    async with openai_server.serve(context, "127.0.0.1", port, KEY), Gym(urls) as gym:
        for question in CONVERSATIONS:
            row = make_counter_row(question)
            if question == "unoffered":
                row["responses_create_params"]["tools"][0]["name"] = "get_counter_value"
            result, response = await gym.run("counter", row, 60.0)
            results[question] = result.reward, response["output"]
    return results


def select_items(output, kind) -> list[dict]:
    return [item for item in output if item["type"] == kind]


def test_gyms_simple_agent_runs_the_tools_of_the_row_and_no_other_route(tmp_path):
    """The counter server of nemo-gym starts at 3. It gives a reward of 1 if the counter is 4."""
    tokenizer = chatml_tokenizer()
    context = context_of(FixedConversations(tokenizer, CONVERSATIONS), tokenizer)
    port = find_free_port()
    endpoint = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": KEY, "model": "policy"}
    start = {
        "server": "example_session_state_mgmt",
        "agent": "simple_agent",
        "python": str(GYM_PYTHON),
    }
    with running_servers({"counter": {"start": start}}, tmp_path, policy=endpoint) as urls:
        results = asyncio.run(run_rows(urls, context, port))

    calls = {}  # {question: the names of the tools that the policy called}
    for question, (reward, output) in results.items():
        calls[question] = [item["name"] for item in select_items(output, "function_call")]
        print(question, reward, calls[question])
    outputs = select_items(results["honest"][1], "function_call_output")
    assert [json.loads(item["output"]) for item in outputs] == [{"success": True}]
    assert (results["honest"][0], calls["honest"]) == (1.0, ["increment_counter"])
    assert (results["both"][0], calls["both"]) == (1.0, ["increment_counter"])
    for question in ("forged", "peeks", "verifies", "unoffered"):
        reward, output = results[question]
        assert (reward, calls[question]) == (0.0, [])
        assert not select_items(output, "function_call_output")
        text = "".join(part["text"] for part in output[-1]["content"])
        assert '"arguments"' in text
