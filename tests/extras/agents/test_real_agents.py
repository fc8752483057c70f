"""Unmodified agents run their turns over the policy endpoint: SDKs, and coding agents.

`make .venv-agents/ready` installs the SDKs, `make coding-agents` the coding agents. The tests of
the coding agents are skipped without them. They run in a namespace that has no network.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kit.recipe.schema import AgentSpec
from tests.extras.agents import scripted
from tests.helpers.recipes import ROOT

pytestmark = pytest.mark.slow  # each agent imports its SDK
TURNS = [
    scripted.make_call("get_number", name="x"),
    scripted.make_call("get_number", name="y"),
    "The answer is 42.",
]


def make_spec(name: str) -> AgentSpec:
    python = str(ROOT / ".venv-agents/bin/python")
    return AgentSpec(function=f"tests/extras/agents/sdk_agents.py:{name}", python=python)


@pytest.mark.parametrize(
    "name", ["openai_chat", "openai_responses", "anthropic_runner", "pydantic_ai"]
)
def test_an_sdk_gives_one_row_for_each_episode(name, tmp_path):
    """Eight episodes at the same time. The policy does not write JSON as the SDK does."""
    policy = scripted.Policy(TURNS)
    episodes = scripted.run_episodes(make_spec(name), policy, tmp_path, [scripted.ROW] * 8)
    assert [(each.status, each.error, each.reward) for each in episodes] == [("ok", "", 1.0)] * 8
    for episode in episodes:
        turns = [episode.response_ids[turn.start : turn.end] for turn in episode.turns]
        assert turns == policy.answers and not episode.branches  # id for id
        assert sum(episode.response_mask) == sum(map(len, policy.answers))
        text = scripted.TOKENIZER.decode(episode.response_ids)
        assert text.index("40") < text.index("The answer is")
    assert policy.sampled_count == 8 * sum(map(len, policy.answers))  # each call once


def test_an_agent_that_never_stops_ends_at_its_limit_and_is_verified(tmp_path):
    policy = scripted.Policy(TURNS[:1])
    (episode,) = scripted.run_episodes(make_spec("openai_chat"), policy, tmp_path, max_calls=3)
    assert (episode.status, episode.ended, episode.reward) == ("ok", "turns", 0.0)
    assert len(episode.turns) == 3 and episode.response == "Limit reached."


def test_the_call_of_an_agent_that_is_killed_ends_with_it(tmp_path):
    """Otherwise the policy would go on with it after the next update of the weights."""
    policy = scripted.Policy(TURNS, pause_s=1000.0)
    (episode,) = scripted.run_episodes(make_spec("openai_chat"), policy, tmp_path, timeout_s=30.0)
    assert (episode.status, policy.cancelled_count) == ("agent_timeout", 1)


@pytest.mark.parametrize("name", ["codex", "opencode"])
def test_a_coding_agent_works_without_a_network(name, tmp_path):
    if not (ROOT / ".venv-agents/bin" / name).exists():
        pytest.skip(f"needs a coding agent: make coding-agents gets {name}")
    command = [sys.executable, "-m", "tests.extras.agents.scripted", name, str(tmp_path)]
    namespace = ["unshare", "--map-root-user", "--net"]
    done = subprocess.run([*namespace, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"episode": ["ok", "", 1.0], "calls": [2]}
