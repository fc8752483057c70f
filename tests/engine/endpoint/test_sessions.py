"""Sessions of agents: keys, calls that continue others, retries, limits, and training rows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time

import aiohttp
import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import env
from gym_client import GymError
from kit.data.episode import Episode
from kit.engine.endpoint import server, sessions
from kit.engine.endpoint.dialects import chat, messages, responses
from kit.engine.endpoint.sessions import Sessions
from kit.recipe.schema import AgentsSection
from kit.verify.network import find_free_port
from tests.helpers.rollouts import (
    TOOL,
    Script,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    make_limits,
    one_turn_each,
)

TOKENIZER = chatml_tokenizer()
TOOLS = env.render_tools([TOOL], "x:1")
USER = {"role": "user", "content": "Look it up."}
CHAT = "/v1/chat/completions"
THINKS = "<think>A plan.</think>I look. "


class Agent:
    """The session of an agent, and what a client needs to reach it."""

    def __init__(self, session, url):
        self.session = session
        self.url = url
        self.http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"})

    async def post(self, path, body, **options):
        """Send a request -> (status, JSON)."""
        async with self.http.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def say(self, *given, path=CHAT, **fields) -> dict:
        """Send a chat, and return the message of the response."""
        body = {"messages": list(given) or [USER], **fields}
        status, reply = await self.post(path, body)
        assert status == 200, reply
        return reply["choices"][0]["message"]

    def fill(self) -> Episode:
        """Return the episode with the rows of the session."""
        episode = Episode("x:1", "g", "server", [])
        self.session.fill(episode)
        return episode


@contextlib.asynccontextmanager
async def serving(client, **changes):
    """Serve a policy, and yield an agent. changes: of the limits, or of the context."""
    limits = {key: changes.pop(key) for key in list(changes) if key in AgentsSection.model_fields}
    sampling = changes.pop("sampling", {"detokenize": False})
    opened = Sessions()
    port = find_free_port()
    context = context_of(client, TOKENIZER, **changes)
    async with server.serve(context, "127.0.0.1", port, "the key", opened):
        session = opened.open(context, sampling, make_limits(**limits))
        agent = Agent(session, f"http://127.0.0.1:{port}")
        agent.sessions = opened
        async with agent.http:
            yield agent
        opened.close(session)


def run(play, *texts, client=None, **changes) -> Episode:
    """Run an agent on a policy that writes `texts`, and return its episode."""

    async def main():
        async with serving(client or one_turn_each(texts, TOKENIZER), **changes) as agent:
            await play(agent)
            return agent.fill()

    return asyncio.run(main())


def output_of(call_id, text="found") -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def list_sampled(row) -> list[list[int]]:
    return [row.response_ids[turn.start : turn.end] for turn in row.turns]


# --- three APIs ----------------------------------------------------------------------------------

ODD = THINKS + call('{"q" :  [1,2.50]}')  # no JSON library writes it so
TURNS = [ODD, call('{ "q":"x"}') + call("{}"), "Done."]


async def play_chat(agent, stream):
    given = [USER]
    async with openai.AsyncOpenAI(
        base_url=agent.url + "/v1", api_key=agent.session.key, max_retries=0
    ) as client:
        for _ in TURNS:
            options = {"model": "m", "messages": given, "tools": TOOLS}
            if stream:
                async with client.chat.completions.stream(**options) as events:
                    answer = (await events.get_final_completion()).choices[0].message
            else:
                answer = (await client.chat.completions.create(**options)).choices[0].message
            given.append(answer.model_dump(exclude={"reasoning_content", "parsed"}))
            for each in answer.tool_calls or []:
                each_id = each.id
                given.append(output_of(each_id))
    assert answer.content == "Done."


async def play_responses(agent, stream):
    """The first call continues by id, the others with the whole conversation."""
    given = [USER]
    options = {"model": "m", "instructions": "Be brief.", "tools": [TOOL]}
    url = f"{agent.url}/s/{agent.session.key}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        earlier = None
        for _ in TURNS:
            more = {"input": given, "previous_response_id": earlier}
            if stream:
                async with client.responses.stream(**options, **more) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**options, **more)
            calls = [item for item in response.output if item.type == "function_call"]
            outputs = [
                {"type": "function_call_output", "call_id": each.call_id, "output": "found"}
                for each in calls
            ]
            earlier = response.id
            given = outputs
    assert response.output_text == "Done."


async def play_messages(agent, stream):
    """Anthropic's threads: later requests have only what is new."""
    tool = {"name": "look_up", "description": "", "input_schema": {"type": "object"}}
    billing = "x-anthropic-billing-header: {}"
    given = [USER]
    thread = {"type": "start"}
    async with anthropic.AsyncAnthropic(
        base_url=agent.url, api_key=agent.session.key, max_retries=0
    ) as client:
        for number in range(len(TURNS)):
            system = [
                {"type": "text", "text": billing.format(number)},
                {"type": "text", "text": "Be brief."},
            ]
            options = {"model": "m", "max_tokens": 900, "messages": given, "tools": [tool]}
            options |= {"system": system, "extra_body": {"thread": thread}}
            if stream:
                async with client.messages.stream(**options) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**options)
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": c.id, "content": "found"} for c in calls
            ]
            given = [{"role": "user", "content": results}]
            thread = {"type": "continue", "previous_message_id": answer.id}
        count = await client.messages.count_tokens(model="m", messages=[USER])
    assert answer.content[-1].text == "Done." and count.input_tokens > 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [play_chat, play_responses, play_messages])
def test_a_conversation_is_one_row_of_what_was_sampled(play, stream):
    """Whatever the client does to thoughts, ids and the JSON of arguments."""
    policy = one_turn_each(TURNS, TOKENIZER)
    sampled = list(policy.answers)
    episode = run(lambda agent: play(agent, stream), client=policy)
    assert list_sampled(episode) == sampled and not episode.branches
    whole = episode.prompt_ids + episode.response_ids
    for prompt in policy.prompts:
        assert whole[: len(prompt)] == prompt
    assert sum(episode.response_mask) == sum(map(len, sampled))
    assert episode.log_probs[0] == -0.5 and episode.ended == "stop"
    assert [response.text for response in episode.responses] == ["I look. ", "", "Done."]
    kinds = [item["type"] for item in episode.output]
    assert kinds.count("function_call") == kinds.count("function_call_output") == 3
    assert episode.response == "I look. Done." or episode.response == "Done."


REPLY_TYPES = {
    chat: (ChatCompletion, ChatCompletionChunk),
    responses: (Response, ResponseStreamEvent),
    messages: (Message, RawMessageStreamEvent),
}


@pytest.mark.parametrize("text", ["Hi", "<think>So.</think>Hi" + call() * 2, "<think>cut"])
@pytest.mark.parametrize("dialect", REPLY_TYPES)
def test_the_types_of_the_sdks_accept_each_reply_and_event(dialect, text):
    custom = {"type": "custom", "name": "look_up"}
    tools = {chat: TOOLS, responses: [custom, {"type": "web_search"}], messages: []}[dialect]
    body = {"input": [USER]} if dialect is responses else {"messages": [USER]}
    body |= {"tools": tools, "stream_options": {"include_usage": True}}

    async def ask(agent):
        reply = await server.complete(agent.session, dialect, body)
        whole, event_type = REPLY_TYPES[dialect]
        TypeAdapter(whole).validate_python(reply)
        events = list(dialect.make_events(body, reply))
        for _, event in events:
            TypeAdapter(event_type).validate_python(event)
        assert len(events) > 2

    run(ask, text)


def test_text_and_calls_of_a_chat_are_in_different_chunks():
    """AutoGen skips the calls in a chunk that has text, and would end its episode there."""
    body = {"messages": [{**USER, "name": "user"}], "tools": TOOLS, "tool_choice": "auto"}

    async def ask(agent):
        reply = await server.complete(agent.session, chat, body)
        chunks = [event["choices"][0] for _, event in chat.make_events(body, reply)]
        assert [list(chunk["delta"]) for chunk in chunks] == [["role"], ["content"], ["tool_calls"]]
        assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "tool_calls"]

    run(ask, "I look." + call())


def test_codex_tools_of_a_namespace_and_of_one_text():
    spawn = {**TOOL, "name": "spawn"}
    tools = [
        {"type": "namespace", "name": "agents", "tools": [spawn]},
        {"type": "custom", "name": "patch", "description": "Edit."},
        {"type": "web_search"},
    ]
    texts = [call(name="agents__spawn") + call('{"input": "+ a"}', "patch"), "Done."]

    async def play(agent):
        items = [USER, {"role": "developer", "content": "Be quick."}]
        body = {"input": items, "tools": tools, "store": False}
        _, reply = await agent.post("/v1/responses", body)
        spawned, patch = reply["output"]
        assert (spawned["namespace"], spawned["name"]) == ("agents", "spawn")
        assert (patch["type"], patch["input"]) == ("custom_tool_call", "+ a")
        items += [
            *reply["output"],
            {"type": "function_call_output", "call_id": spawned["call_id"], "output": "1"},
            {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "2"},
        ]
        await agent.post("/v1/responses", body)

    episode = run(play, *texts)
    assert len(episode.turns) == 2
    text = TOKENIZER.decode(episode.prompt_ids)
    assert "agents__spawn" in text and "system\nBe quick." in text and "web_search" not in text


def test_a_stop_string_ends_a_response_and_its_ids_stay():
    ids = TOKENIZER.encode("Thought. Observation:", add_special_tokens=False)
    policy = Script([ids, *encode_turns(["Done."], TOKENIZER)])

    async def play(agent):
        answer = await agent.say(USER, stop=["Observation:"])
        assert answer["content"] == "Thought. "
        body = {"messages": [USER, answer, USER], "stop_sequences": ["!"]}
        assert (await agent.post("/v1/messages", body))[1]["content"][0]["text"] == "Done."

    episode = run(play, client=policy)
    assert list_sampled(episode)[0] == ids and len(episode.turns) == 2
    assert policy.requests[0][1]["stop"] == ["Observation:"]


# --- refused -------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
BLOCK = {"type": "image", "source": {"type": "base64", "data": "aaaa"}}
SCHEMA = {"format": {"type": "json_schema", "name": "a", "schema": {}}}


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"n": 2}, "n="),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"logit_bias": {"1": 2}}, "logit_bias"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "tools it calls"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "So"}]}, "last message"),
        (CHAT, {"messages": [USER], "stop": 3}, "stop"),
        ("/v1/responses", {"text": SCHEMA}, "constrained"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"previous_response_id": "x"}, "previous_response_id"),
        ("/v1/responses", {"input": [{"type": "file_search_call"}]}, "file_search_call"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tools it calls"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [BLOCK]}]}, "image"),
        ("/v1/messages", {"messages": []}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_in_the_form_of_the_api(path, change, named):
    async def play(agent):
        body = {"input": "Hi."} if path == "/v1/responses" else {"messages": [USER]}
        status, reply = await agent.post(path, {**body, **change})
        assert status == 400 and named in reply["error"]["message"], reply
        assert reply["error"]["type"] == "invalid_request_error"
        assert (reply.get("type") == "error") == (path == "/v1/messages")
        assert not agent.session.over.is_set()
        await agent.say()

    assert len(run(play, "Hi.").turns) == 1


def test_smolagents_choice_of_tools_may_be_ignored():
    async def play(agent):
        for _ in range(2):
            await agent.say(USER, tools=TOOLS, tool_choice="required", temperature=0.1)

    episode = run(play, "Hi.", "Hi.", ignore_tool_choice=True)
    assert episode.turns and episode.measures["agent_ignored_fields"] == 1


def test_a_long_prompt_is_an_error_on_which_claude_code_compacts():
    async def play(agent):
        answer = await agent.say()
        for long in (
            [{**USER, "content": "x" * 200}],
            [USER, answer, {**USER, "content": "y" * 90}],
        ):
            status, reply = await agent.post("/v1/messages", {"messages": long})
            assert status == 400 and reply["error"]["message"].startswith("prompt is too long")

    assert run(play, "Hi.", max_prompt_length=100, max_response_length=80).ended == "length"


# --- keys ----------------------------------------------------------------------------------------


def test_a_key_is_of_one_episode_and_ends_with_it():
    """Another agent's key, a closed one and none are refused before anything is sampled."""

    async def play(agent):
        other = agent.sessions.open(agent.session.context, {}, make_limits())
        await agent.say(path=f"/s/{other.key}{CHAT}")
        with pytest.raises(GymError, match="no call"):
            agent.fill()  # the call is of the other episode
        agent.sessions.close(other)
        for key, status in ((other.key, 403), ("x", 401)):
            assert (await agent.post(f"/s/{key}{CHAT}", {}))[0] == status
        async with agent.http.head(agent.url + "/api/hello") as response:
            assert response.status == 200
        async with agent.http.get(agent.url + "/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        await agent.say()

    assert len(run(play, "Theirs.", "Mine.").turns) == 1


def test_what_an_agent_claims_to_have_sampled_is_not_trained():
    async def play(agent):
        answer = await agent.say()
        forged = {
            **answer,
            "content": "pwned",
            "prompt_token_ids": [1],
            "generation_token_ids": [2],
        }
        await agent.say(USER, forged, USER)

    episode = run(play, "Honest.", "Done.")
    (branch,) = episode.branches
    rows = [list_sampled(row)[0] for row in (episode, branch)]
    assert rows == encode_turns(["Done.", "Honest."], TOKENIZER)
    assert "pwned" in TOKENIZER.decode(episode.prompt_ids)


# --- retries -------------------------------------------------------------------------------------


class Slow(Script):
    """A policy that takes a moment."""

    async def generate(self, *arguments, **options):
        await asyncio.sleep(0.2)
        return await super().generate(*arguments, **options)


def test_a_retry_gets_the_answer_of_the_first_call():
    """If a header counts retries, or if the first connection is gone."""
    policy = Slow(encode_turns("abcd", TOKENIZER))

    async def play(agent):
        body = {"messages": [USER]}
        timeout = aiohttp.ClientTimeout(total=0.05)
        with pytest.raises(asyncio.TimeoutError):
            await agent.post(CHAT, body, timeout=timeout)
        assert (await agent.say())["content"] == "a"
        two = await asyncio.gather(agent.say(), agent.say())  # both connections live
        assert {each["content"] for each in two} == {"b", "c"}
        retry = {"x-stainless-retry-count": "1"}
        _, reply = await agent.post(CHAT, body, headers=retry)
        assert reply["choices"][0]["message"]["content"] in "bc"
        assert (await agent.say())["content"] == "d"

    episode = run(play, client=policy)
    assert len(episode.branches) == 3 and episode.measures["agent_retries"] == 2


def test_a_stream_says_that_it_lives(monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)

    async def play(agent):
        for change, event in (({}, "data: [DONE]"), ({"tools": TOOLS}, "event: error")):
            body = {"messages": [USER], "stream": True, **change}
            async with agent.http.post(agent.url + CHAT, json=body) as response:
                lines = (await response.text()).split("\n\n")
            assert lines.count(": keep-alive") >= 2 and lines[-2].startswith(event), lines
            agent.session.context.template.tool_format = "no such format"

    with pytest.raises(GymError, match="parser"):
        run(play, client=Slow(encode_turns("ab", TOKENIZER)))


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "ended"),
    [({"max_calls": 3}, "turns"), ({"max_tokens": 15}, "length")],
)
def test_an_agent_that_never_stops_is_ended(monkeypatch, limits, ended):
    monkeypatch.setattr(sessions, "GRACE_S", 0.1)

    async def loop(agent):
        given = [USER]
        while True:
            given += [await agent.say(*given), USER]
            await asyncio.sleep(0.02)

    async def play(agent):
        task = asyncio.create_task(loop(agent))
        await asyncio.wait_for(agent.session.over.wait(), 5)
        task.cancel()
        assert (await agent.say())["content"] == "Limit reached."

    episode = run(play, *["Again."] * 200, **limits)
    assert episode.ended == ended and episode.measures["agent_limited"] >= 1
    assert "Limit" not in json.dumps(episode.output)
    assert len(episode.turns) == 3


def test_a_failure_of_the_engine_fails_the_episode():
    async def play(agent):
        status, reply = await agent.post("/v1/messages", {"messages": [USER]})
        assert status == 500 and reply["error"]["type"] == "api_error"
        assert agent.session.over.is_set()

    client = Script([[]])  # no token
    with pytest.raises(GymError, match="without an answer") as caught:
        run(play, client=client)
    assert caught.value.reason == "aborted"


def test_an_engine_that_is_not_reached_is_named():
    class Gone(Script):
        async def generate(self, *arguments, **options):
            raise ConnectionResetError("closed")

    async def play(agent):
        status, reply = await agent.post(CHAT, {"messages": [USER], "stream": True})
        assert status == 500 and reply["error"]["code"] == "aborted"

    with pytest.raises(GymError, match=r"vLLM cannot be reached: .*closed"):
        run(play, client=Gone([]))


def test_an_agent_without_a_call_fails():
    async def play(agent):
        pass

    with pytest.raises(GymError) as caught:
        run(play)
    assert caught.value.reason == "no_calls"


# --- rows ----------------------------------------------------------------------------------------


async def rewrite(agent):
    """Two calls, then a call whose history lacks the first answer."""
    first = await agent.say(tools=TOOLS)
    await agent.say(USER, first, USER, tools=TOOLS)
    await agent.say(USER, {"role": "assistant", "content": "A summary."}, USER, tools=TOOLS)


def test_a_rewritten_history_forks_or_fails():
    texts = ["a", "b", "c"]
    episode = run(rewrite, *texts)
    (branch,) = episode.branches
    sampled = encode_turns(texts, TOKENIZER)
    assert (list_sampled(episode), list_sampled(branch)) == (sampled[2:], sampled[:2])
    assert not run(rewrite, *texts, branches="main").branches
    limited = run(rewrite, *texts, max_rows=1)
    assert not limited.branches and limited.measures["agent_rows_dropped"] == 1
    with pytest.raises(AssertionError, match="not_contiguous"):
        run(rewrite, *texts, on_rewrite="fail")


def test_a_title_is_no_row_and_a_summary_is_one():
    async def play(agent):
        await agent.say({"role": "user", "content": "Write a title."})
        await agent.say(tools=TOOLS)
        await agent.say({"role": "user", "content": "Summarize."})
        await agent.say({"role": "user", "content": "So far: Summary."}, tools=TOOLS)

    episode = run(play, "Title", "a", "Summary", "Done.")
    rows = [list_sampled(row)[0] for row in (episode, *episode.branches)]
    assert rows == encode_turns(["Done.", "a", "Summary"], TOKENIZER)
    assert episode.measures["agent_auxiliary"] == 1


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=14))
@settings(max_examples=40, deadline=None)
def test_each_sampled_token_is_trained_once(steps):
    """Property: for any tree of calls. A step continues an earlier call, or begins anew."""
    texts = [f"<think>{number % 3}</think>{number % 4}" for number in range(len(steps))]
    policy = one_turn_each(texts, TOKENIZER)
    sampled = list(policy.answers)

    async def play(agent):
        ends = [[]]
        for number, (parent, is_root) in enumerate(steps):
            before = [] if is_root else ends[parent % len(ends)]
            given = [*before, {"role": "user", "content": f"Question {number}."}]
            reply = await server.complete(agent.session, chat, {"messages": given, "tools": TOOLS})
            ends.append([*given, reply["choices"][0]["message"]])

    episode = run(play, client=policy)
    rows = [episode, *episode.branches]
    assert sorted(itertools.chain(*map(list_sampled, rows))) == sorted(sampled)
    assert sum(sum(row.response_mask) for row in rows) == sum(map(len, sampled))
    prompts = [prompt + ids for prompt, ids in zip(policy.prompts, sampled, strict=True)]
    assert all(row.prompt_ids + row.response_ids in prompts for row in rows)
    assert list_sampled(episode)[-1] == sampled[-1]
    assert all(len(row.response_mask) == len(row.log_probs) for row in rows)


# --- one agent against the others ----------------------------------------------------------------

OPENED = "<think>" * 12_000
LARGE = [
    json.dumps({"messages": [{"role": "user", "content": "lorem " * 700_000}]}),
    json.dumps({"messages": [USER, {"role": "assistant", "content": OPENED}, USER]}),
    '{"messages": [' + "{}," * 10**7 + "{}]}",
]


@pytest.mark.parametrize("body", LARGE, ids=["text", "thoughts", "objects"])
def test_no_request_of_an_agent_delays_another_agents(body):
    async def play(agent):
        await agent.say()  # imports what parses a response
        request = agent.http.post(agent.url + CHAT, data=body)
        task = asyncio.ensure_future(request)
        longest = 0.0
        while not task.done():
            begin = time.thread_time()  # of the event loop, on a machine with other work
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - begin)
        (await task).release()
        print(f"longest pause {longest:.3f} s")
        assert longest < 0.1

    run(play, "a", "b", max_prompt_length=30_000)
