"""NeMo Gym's own model server (vllm_model) and agent as clients of the policy endpoint.

The model server's process gets the Responses requests of an agent and converts them, in both
directions, as in a run. Most tests play the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from gym_client import Gym
from inference import Episode, episode_from_response
from kit.engine.endpoint import server as endpoint_server
from kit.engine.endpoint.prompts import Prompts
from kit.engine.endpoint.shared import SharedClients
from kit.verify.network import find_free_port
from kit.verify.servers import running_servers
from tests.helpers.recipes import GYM_PYTHON, make_counter_row
from tests.helpers.rollouts import (
    STOPS,
    TEMPLATES,
    TOOL,
    Script,
    bytes_tokenizer,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    one_turn_each,
)

KEY = "a key of this test"
PORT = find_free_port()
URL = f"http://127.0.0.1:{PORT}/v1"
# Reads a request per line, and writes the response of the model server.
MODEL_SERVER = """
import asyncio, json, sys, types, unittest.mock
import nemo_gym.server_utils as server_utils
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming as Params
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

server_utils.get_global_config_dict = dict
URL, KEY = sys.argv[1:]

def make_server():
    client = unittest.mock.MagicMock(spec=server_utils.ServerClient, global_config_dict={})
    config = VLLMModelConfig(
        host="", port=0, entrypoint="", name="policy_model", base_url=URL, api_key=KEY,
        model="policy", return_token_id_information=True, uses_reasoning_parser=True,
    )
    return VLLMModel(config=config, server_client=client)

async def main():
    server = make_server()
    output = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        params = json.loads(line)
        request = types.SimpleNamespace(
            session={server_utils.SESSION_ID_KEY: "s"}, state=types.SimpleNamespace(), headers={}
        )
        try:
            response = await server.responses(request, Params(**params))
            answer = response.model_dump(mode="json")
        except Exception as error:
            content = getattr(error, "response_content", b"").decode()
            status = getattr(error, "status", 0)
            answer = {"failure": repr(error), "status": status, "body": content}
        print(json.dumps(answer), file=output, flush=True)

asyncio.run(main())
"""


class ModelServer:
    """The process of Gym's model server, and the endpoint that it calls."""

    def __init__(self, process):
        self.process = process
        context = context_of(None, chatml_tokenizer())  # `use` replaces it
        self.endpoint = endpoint_server.Endpoint(context, KEY)
        self.loop = asyncio.Runner()

    async def ask(self, params) -> dict:
        """Send one Responses request to the model server."""
        self.process.stdin.write(json.dumps(params) + "\n")
        self.process.stdin.flush()
        return json.loads(await asyncio.to_thread(self.process.stdout.readline))

    def use(self, context) -> None:
        """Serve another context."""
        self.endpoint.context = context
        self.endpoint.shared = SharedClients(context, Prompts())

    async def play(self, params, outputs) -> dict:
        """Run the turns of an agent like Gym's simple_agent, and return its last Response.

        outputs: of the tools.
        """
        items = params["input"]
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        answers = list(outputs)
        new_items = []
        while True:
            body = {**params, "input": [*items, *new_items]}
            response = await self.ask(body)
            if "failure" in response:
                return response
            new_items += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls or response["incomplete_details"]:
                return {**response, "output": new_items}
            for item in calls:
                output = {"type": "function_call_output", "call_id": item["call_id"]}
                new_items.append({**output, "output": answers.pop(0)})


@pytest.fixture(scope="module")
def server():
    """The model server. The process starts once, and so does the endpoint."""
    process = subprocess.Popen(
        [str(GYM_PYTHON), "-c", MODEL_SERVER, URL, KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    server = ModelServer(process)
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        loop = stack.enter_context(server.loop)
        runner = web.AppRunner(server.endpoint.make_app(), shutdown_timeout=0)
        loop.run(runner.setup())
        stack.callback(lambda: loop.run(runner.cleanup()))
        loop.run(web.TCPSite(runner, "127.0.0.1", PORT).start())
        assert process.stdout.readline().strip() == "ready"
        yield server


def play(server, context, *arguments) -> dict:
    server.use(context)
    return server.loop.run(server.play(*arguments))


# --- prompts -------------------------------------------------------------------------------------

LOOK_UP = {**TOOL, "strict": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Größe in °C"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    },
    "required": ["city"],
    "additionalProperties": False,
}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "a" * 9, "name": "look_up"}
ROW = {
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "Use °C."},
        {"role": "user", "content": [{"type": "input_text", "text": part} for part in "ab"]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {**CALLED, "arguments": '{"n": 7}', "call_id": "b" * 9},
        {**CALLED, "arguments": '{"n": {"m": [1, 2.5, "é"]}}'},
        {"type": "function_call_output", "call_id": "b" * 9, "output": '{"ok":true}'},
        {"type": "function_call_output", "call_id": "a" * 9, "output": '{"ok":true}'},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Now three."},
    ],
    "tools": [{**LOOK_UP, "parameters": SCHEMA}],
}


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_the_first_prompt_is_the_one_of_the_dry_run(server, family):
    tokenizer = bytes_tokenizer(TEMPLATES[family], STOPS[family])
    client = one_turn_each(["Done."], tokenizer)
    context = context_of(client, tokenizer)
    play(server, context, ROW, [])
    messages, tools = env.render_row({"responses_create_params": ROW}, "x:1")
    expected = context.template.encode_prompt(messages, tools, "x:1")
    assert client.prompts == [expected], tokenizer.decode(client.prompts[0])


# --- turns ---------------------------------------------------------------------------------------

PARAMS = {"input": "Look it up.", "instructions": "Be brief.", "tools": [LOOK_UP]}
TWO_CALLS = call('{"q": [1, {"é": null}]}') + call('{ "q":2.0 }')
ANSWERS = [
    "<think>Plan: " + call('{"q": "draft"}') + " no</think>\n\nI look. " + call('{"q": "final"}'),
    "  Two at once.\n" + TWO_CALLS,
    call('{"q": NaN}') + call("{}", "verify"),
    "ä" + call('"text"') + call(),
    "It is <think>not a thought</think> 7.",
]
OUTPUTS = ["seen", "", '{"a": "<|im_end|>"}', "ü\n", "5", "6", "7"]


def make_episode(response, context) -> Episode:
    episode = Episode("x:1", "g", "server", [])
    episode_from_response(episode, response, context)
    return episode


def count_sampled(episode) -> int:
    return sum(episode.response_mask)


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_the_turns_of_an_agent_are_one_contiguous_episode(server, family, caplog):
    tokenizer = bytes_tokenizer(TEMPLATES[family], STOPS[family])
    client = one_turn_each(ANSWERS, tokenizer)
    sampled = [list(ids) for ids in client.answers]
    context = context_of(client, tokenizer)
    response = play(server, context, PARAMS, OUTPUTS)
    episode = make_episode(response, context)
    assert len(episode.turns) == 5 and episode.ended == "stop" and "rewritten" not in caplog.text
    turns = [episode.response_ids[turn.start : turn.end] for turn in episode.turns]
    assert turns == sampled and count_sampled(episode) == sum(map(len, sampled))
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert [(item["name"], item["arguments"]) for item in calls] == [
        ("look_up", '{"q": "final"}'),
        ("look_up", '{"q": [1, {"é": null}]}'),
        ("look_up", '{"q": 2.0}'),
        ("look_up", '{"q": NaN}'),
        ("look_up", '"text"'),
        ("look_up", "{}"),
    ]
    thought = response["output"][0]
    assert thought["type"] == "reasoning" and "draft" in thought["summary"][0]["text"]


FRAGMENTS = ["<think>", "</think>", "<think>x</think>", "\n\n", " ", "é", "<|im_start|>"]
FRAGMENTS += [call('{"q": "a<b"}'), call("{}", "verify"), "<tool_call>", '{"name": "look_up"']


@given(st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=6), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_no_text_of_the_policy_looks_like_a_rewritten_history(server, turns):
    """Property: after each turn of any text with a call, Gym's converter returns what it got."""
    tokenizer = bytes_tokenizer(TEMPLATES["forgetful"], STOPS["forgetful"])
    texts = ["".join(fragments) + "</think>" + call() for fragments in turns]
    context = context_of(one_turn_each([*texts, "Done."], tokenizer), tokenizer)
    response = play(server, context, PARAMS, ["seen"] * 30)
    assert server.endpoint.shared.rewritten_count == 0
    make_episode(response, context)


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "limits", "row", "turns", "ended"),
    [
        # all tokens after the first prompt count, also those of the tool's outputs
        ([call(), call(), "Done."], {"max_response_length": 84}, {}, 1, "length"),
        ([call(), call(), "Done."], {"max_response_length": 400}, {}, 3, "stop"),
        ([call()] * 5, {"max_turns": 3}, {}, 3, "turns"),
        (["Hello."], {}, {"max_output_tokens": 4}, 1, "length"),
    ],
)
def test_an_agent_has_the_limits_of_an_episode_of_the_kit(server, texts, limits, row, turns, ended):
    tokenizer = chatml_tokenizer()
    client = one_turn_each(texts, tokenizer)
    context = context_of(client, tokenizer, **limits)
    episode = make_episode(play(server, context, PARAMS | row, ["seen"] * 5), context)
    assert len(episode.response_ids) <= context.max_response_length
    assert len(episode.turns) == len(client.prompts) == turns  # no request was repeated
    assert episode.ended == ended and (not row or episode.response == "Hell")


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
    async with endpoint_server.serve(context, "127.0.0.1", port, KEY), Gym(urls) as gym:
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
