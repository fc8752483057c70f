"""What servers, agents, judges, adapters and run folders send is data, a claim and a size.

One test for each kind of attack, over all entrances: text in something that evaluates, a claim
about what the kit knows itself, a size after parsing, and a list of what is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time

import httpx
import pytest
from omegaconf import OmegaConf

import env
import gym_client
import inference
from gym_client import Gym, GymError, message_response
from kit.data.episode import Episode
from kit.engine.endpoint.requests import RequestError
from kit.engine.endpoint.server import parse_body
from kit.engine.sampling import SampleStore
from kit.errors import ConfigError, RunError, UserFunctionError, remove_control_characters
from kit.recipe import adapters
from kit.recipe.derive import Facts
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.recipe.recipe_text import read_saved
from kit.recipe.redaction import write_yaml
from kit.run import checkpoints
from kit.run.console import LogFormatter, say
from kit.verify import network, servers
from kit.verify.network import GymStartError, discover_servers
from kit.verify.server_process import ProcessSpec
from tests.helpers.http import ROW, VERIFY_ROUTES, ScriptedServer, after
from tests.helpers.recipes import CPU, RECIPE
from tests.helpers.rollouts import (
    RecordingClient,
    ask_chat,
    ask_endpoint,
    chatml_tokenizer,
    context_of,
    make_context,
    one_turn_each,
)

SECRET = "sk-live-123456789"
VARIABLE = "${oc.env:OPENAI_API_KEY}"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


# --- text in something that evaluates -------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"port": f"8001/{VARIABLE}"},
        {"port": 8001, "host": VARIABLE},
        {"port": 8001, "host": "me@other/path?"},
        {"port": 8001, "host": ["10.0.0.1"]},
        "text",
    ],
    ids=str,
)
def test_a_head_server_gives_only_hosts_and_ports(entry):
    head = ScriptedServer()
    head.openapi = json.dumps({"math": {"resources_servers": {"math": entry}}})
    with pytest.raises(GymStartError, match="is not a Gym head server") as caught:
        discover_servers(head.url)
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    head.openapi = json.dumps({"math": {"resources_servers": {"math": {"port": "8001"}}}})
    assert discover_servers(head.url).servers == {"math": "http://127.0.0.1:8001"}


@pytest.mark.parametrize("text", [VARIABLE, f"a\\{VARIABLE}", f"{{{{ x }}}} {VARIABLE}", "\\\\${"])
def test_no_text_of_a_models_files_is_resolved(text):
    adapter = adapters.Adapter("/a", 8, 16, text, [text], None, ())
    facts = Facts(chat_template=text, adapter=adapter)
    source = read_source([str(CPU), str(RECIPE)], [f"{adapters.PATH}=/a"])
    recipe = build(source, facts=facts)
    for_verl = recipe.for_verl("actor_rollout_ref.model")
    for model in (recipe.model, for_verl):
        assert model.target_modules == text and model.custom_chat_template == text
    saved = write_yaml(recipe.redacted())
    assert SECRET not in saved
    assert OmegaConf.create(saved).actor_rollout_ref.model.target_modules == text


def test_nothing_in_the_config_of_a_run_folder_is_resolved(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"trainer: {{default_local_dir: '{VARIABLE}', experiment_name: '{VARIABLE}'}}")
    assert read_saved(path)["trainer"]["experiment_name"] == VARIABLE
    assert checkpoints.list_checkpoint_folders(tmp_path)[0].name == VARIABLE


@pytest.mark.parametrize("text", ["[" * 5000, "- 1", "!!python/object/apply:os.getcwd []"])
def test_a_config_that_is_no_recipe_is_an_error_of_one_line(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is no recipe") as caught:
        read_saved(tmp_path / "config.yaml")
    assert len(str(caught.value)) < 500


def test_no_message_has_a_command_for_the_terminal(capsys):
    from extras.judges.judge_proxy import JudgeError

    text = "\x1b]52;c;cm0gLXJm\x07 \x9b31m"
    simple = (ConfigError, UserFunctionError, RunError, GymStartError)
    errors = [*(kind(text) for kind in simple), GymError("x", text), JudgeError("x", text)]
    shown = [str(error) for error in errors]
    record = logging.LogRecord("kit", logging.WARNING, "", 0, "%s", (text,), None)
    shown.append(LogFormatter().format(record))
    say(text)
    shown.append(capsys.readouterr().out)
    assert not set("".join(shown)) & {"\x1b", "\x07", "\x9b"}
    assert remove_control_characters("a\r\x08\n\tb") == "a\n\tb"


# --- a claim about what the kit knows -------------------------------------------------------------


def change_ids(items):
    items[1]["generation_token_ids"] = [*items[1]["generation_token_ids"][:-2], 99, 1]


def change_prompt(items):
    items[1]["prompt_token_ids"] = [*items[1]["prompt_token_ids"], 65]


def join_turns(items):
    last = items.pop()
    items[0]["generation_token_ids"] = last["prompt_token_ids"] + last["generation_token_ids"]


def add_prompt_to_response(items):
    del items[1]
    prompt = items[0]["prompt_token_ids"]
    items[0]["generation_token_ids"] = prompt[-1:] + items[0]["generation_token_ids"]
    items[0]["prompt_token_ids"] = prompt[:-1]


async def play_agent(context) -> list[dict]:
    """Play two turns over the policy endpoint -> the items of /run."""
    messages = [{"role": "user", "content": "hi"}]
    items = []
    for _ in range(2):
        reply = await ask_chat({"messages": messages}, context)
        answer = reply.body["choices"][0]["message"]
        items.append(gym_client.make_message(answer["content"]))
        names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        items[-1] |= {name: answer[name] for name in names}
        messages += [answer, {"role": "user", "content": "go on"}]
    return items


def read_items(items, context) -> Episode:
    episode = Episode("x:1", "g", "server", [])
    inference.episode_from_response(episode, {"output": items}, context)
    return episode


def make_agent_context():
    tokenizer = chatml_tokenizer()
    return context_of(one_turn_each(["one", "two"] * 3, tokenizer), tokenizer, policy_version=4)


@pytest.mark.parametrize(
    "change",
    [change_ids, change_prompt, join_turns, add_prompt_to_response],
    ids=lambda f: f.__name__,
)
def test_an_episode_has_only_ids_that_the_endpoint_sampled(change):
    context = make_agent_context()
    items = asyncio.run(play_agent(context))
    change(items)
    with pytest.raises(GymError, match="are not what the policy endpoint sampled") as caught:
        read_items(items, context)
    assert caught.value.reason == "not_sampled"


def test_each_sampled_response_counts_once_with_the_log_probs_of_the_endpoint():
    context = make_agent_context()
    first, second = asyncio.run(play_agent(context)), asyncio.run(play_agent(context))
    assert first[0]["generation_token_ids"] == second[0]["generation_token_ids"]
    for item in first:
        item["generation_log_probs"] = [1e30]
    episode = read_items(first, context)
    assert [value for value in episode.log_probs if value] == [-0.5, -1.5, -2.5, -3.5] * 2
    assert episode.policy_versions == [(4, 4), (4, 4)]
    assert read_items(second, context).turns
    with pytest.raises(GymError, match="another episode has them"):
        read_items(first, context)
    asyncio.run(play_agent(context))
    context.samples = SampleStore()
    with pytest.raises(GymError, match="in this batch"):
        read_items(first, context)


@pytest.mark.parametrize(
    ("routes", "kind", "named"),
    [
        (["/run"], "verify", "agent"),
        (["/seed_session", "/verify", "/look"], "step", "verify"),
        (["/seed_session", "/verify"], "agent", "verify"),
    ],
)
def test_a_server_of_another_kind_is_refused_with_the_key(routes, kind, named):
    server = ScriptedServer(**{path.removeprefix("/"): [(200, {})] for path in routes})
    with pytest.raises(GymStartError, match=rf"Set gym.servers.s.kind={named}"):
        network.wait_ready("s", server.url, kind=kind)
    network.wait_ready("s", server.url, kind=named)


def test_a_server_that_also_publishes_run_stays_a_verifier():
    server = ScriptedServer(run=[(200, {})], **VERIFY_ROUTES)

    async def read_kind():
        async with Gym({"s": server.url}, kinds={"s": "verify"}) as gym:
            async with gym.session("s", ROW) as session:
                return await gym.kind("s"), session.kind

    assert asyncio.run(read_kind()) == ("verify", "verify")


# --- what bytes and calls become ------------------------------------------------------------------

STEP = {"observation": "2", "reward": 4.0}


async def play_session(gym, calls=1):
    """Play a session with tools, steps or a verification -> its last result."""
    async with gym.session("s", ROW) as session:
        if session.kind == "step":
            for _ in range(calls):
                result = await session.step(message_response("x"))
            return result
        if calls > 1:
            return await session.call_tool("look", "{}")
        return await session.verify(message_response("x"))


@pytest.mark.parametrize(
    ("routes", "calls", "reason"),
    [
        ({"verify": [(200, b'{"reward": 1, "x": [' + b"{}," * 300_000 + b"{}]}")]}, 1, "too_large"),
        ({"verify": [(200, b'{"reward": 1, "x": "' + b"x" * 2**21 + b'"}')]}, 1, "too_large"),
        ({"seed_session": [(200, {}, "a=" + "x" * 5000)]}, 1, "too_large"),
        ({"verify": [(200, {"reward": 11.0})]}, 1, "bad_answer"),
        ({"verify": [(200, {"reward": -1e39})]}, 1, "bad_answer"),
        ({"verify": [(200, {"reward": 1, "reward_components": {"a": 1e4}})]}, 1, "bad_answer"),
        ({"step": [(200, {**STEP, "reward": 10.5})], "reset": [(200, {})]}, 1, "bad_answer"),
        ({"step": [(200, STEP)], "reset": [(200, {})]}, 3, "bad_answer"),
    ],
    ids=["objects", "bytes", "cookies", "reward", "negative", "component", "step", "sum"],
)
def test_an_answer_beyond_a_limit_fails_its_episode(routes, calls, reason, monkeypatch):
    monkeypatch.setattr(gym_client, "MAX_COOKIE_BYTES", 4000)
    server = ScriptedServer(**(routes if "step" in routes else {**VERIFY_ROUTES, **routes}))

    async def play():
        async with Gym({"s": server.url}) as gym:
            await play_session(gym, calls)

    with pytest.raises(GymError) as caught:
        asyncio.run(play())
    assert caught.value.reason == reason
    if reason == "bad_answer":
        assert "gym.max_reward" in str(caught.value)


@pytest.mark.parametrize(("part", "pause_s"), [(b" ", 0.1), (b" " * 2**20, 0.0)])
def test_a_server_can_neither_delay_the_start_nor_fill_the_memory(part, pause_s):
    def send_endlessly():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(part)
                time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=send_endlessly, daemon=True).start()
        with pytest.raises(httpx.ReadTimeout, match="over 4194304 bytes or 1 s"):
            network.get(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1.0)


def test_a_long_output_of_a_tool_keeps_its_beginning_and_its_end():
    server = ScriptedServer(**VERIFY_ROUTES, look=[(200, b"a" * 2**20 + b"z" * 2**20)])

    async def play():
        async with Gym({"s": server.url}, max_tool_chars=100) as gym:
            return await play_session(gym, calls=2)

    output = asyncio.run(play())
    assert len(output) < 200 and output.startswith("a" * 50) and output.endswith("z" * 50)


def test_a_server_has_at_most_100_names_of_components():
    context = make_context(RecordingClient())
    for number in range(300):
        episode = Episode("x:1", "g", "server", [], reward=1.0)
        episode.reward_components = {"honest": 0.5, f"name {number}": 0.5}
        inference.limit_components(episode, context)
        assert "honest" in episode.reward_components
    assert len(context.component_names["server"]) == 100


def test_an_episode_has_a_time_limit_over_all_its_calls():
    slow = after(0.3, (200, {"observation": "2", "reward": 0.0}))
    server = ScriptedServer(reset=[(200, {"observation": "1"})], step=[slow])
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["x"] * 50, tokenizer)
    context = context_of(client, tokenizer, episode_timeout_s=1.0)
    task = env.Task("x:1", ROW, "s", [{"role": "user", "content": "go"}], [5])
    requests = inference.request_group(task, "g", 1)

    async def play():
        async with Gym({"s": server.url}, timeout_s=5.0) as gym:
            return await inference.rollout(requests, {}, context, gym)

    began = time.monotonic()
    (episode,) = asyncio.run(play())
    assert (episode.status, episode.reward) == ("timeout", None)
    assert "trainer.stage_timeout_s" in episode.error and time.monotonic() - began < 10


def test_a_conversation_that_is_too_long_is_not_tokenized(monkeypatch):
    context = context_of(None, chatml_tokenizer(), max_prompt_length=64, max_response_length=100)
    monkeypatch.setattr(context, "template", None)
    for content in ("lorem " * 200_000, [{"type": "text", "text": "x" * 10**6}] * 2):
        body = {"messages": [{"role": "user", "content": content}]}
        reply = ask_endpoint(body, context)
        assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")


def test_a_request_with_many_objects_is_not_parsed():
    with pytest.raises(RequestError, match="objects and lists"):
        parse_body(b"[" + b"{}," * 200_000 + b"{}]")


# --- lists of what is allowed ---------------------------------------------------------------------


def test_a_process_of_others_sees_the_variables_of_a_list(monkeypatch):
    public = {"LC_TIME", "CUDA_VISIBLE_DEVICES", "HF_HOME", "PATH"}
    hidden = {"DATABASE_URL", "GITHUB_PAT", "https_proxy", "SSH_AUTH_SOCK", "XPATH", "PATH_TO"}
    for name in public | hidden:
        monkeypatch.setenv(name, "x")
    spec = ProcessSpec("s")
    for seen in (servers.build_environment(spec), servers.list_public_variables(())):
        assert public <= seen.keys() and not hidden & seen.keys()
    spec.visible_variables = ["GITHUB_PAT"]
    assert hidden & servers.build_environment(spec).keys() == {"GITHUB_PAT"}


def test_a_sandbox_has_only_packages_the_kit_and_what_is_named(tmp_path, monkeypatch):
    from extras.policy_programs.sandbox import sandbox_command

    monkeypatch.chdir(tmp_path)
    command = sandbox_command(["true"], [tmp_path / "mine.py"])
    binds = [command[i + 1] for i, word in enumerate(command) if word.startswith("--ro-bind")]
    assert str(tmp_path / "mine.py") in binds
    hidden = {"/", "/etc", "/root", "/home", "/var", "/run", "/tmp", str(tmp_path)}
    assert not hidden & set(binds)
    assert not [path for path in binds if path.endswith(("/data", "/runs", ".env", ".git"))]
