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

TURNS = [
    scripted.make_call("get_number", name="x"),
    scripted.make_call("get_number", name="y"),
    "The answer is 42.",
]


@pytest.mark.parametrize(
    "name", ["openai_chat", "openai_responses", "anthropic_runner", "pydantic_ai"]
)
def test_an_sdk_gives_one_row_for_each_episode(name, tmp_path):
    """Eight episodes at the same time. The policy does not write JSON as the SDK does."""
    spec = AgentSpec(
        function=f"tests/extras/agents/sdk_agents.py:{name}",
        python=str(ROOT / ".venv-agents/bin/python"),
    )
    episodes, policy = scripted.run_episodes(spec, TURNS, 8, "What is x + y?", tmp_path)
    assert [(each.status, each.error, each.reward) for each in episodes] == [("ok", "", 1.0)] * 8
    for episode in episodes:
        assert not episode.branches and episode.ended == "stop"
        turns = [episode.response_ids[turn.start : turn.end] for turn in episode.turns]
        assert turns == policy.answers  # id for id
        assert sum(episode.response_mask) == sum(map(len, policy.answers))
        observed = scripted.TOKENIZER.decode(episode.response_ids)
        assert observed.index("40") < observed.index("The answer is")
    assert policy.sampled_count == 8 * sum(map(len, policy.answers))  # each call once


@pytest.mark.parametrize("name", ["codex", "opencode"])
def test_a_coding_agent_works_without_a_network(name, tmp_path):
    if not (ROOT / ".venv-agents/bin" / name).exists():
        pytest.skip(f"{name} is not installed: make coding-agents")
    command = [sys.executable, "-m", "tests.extras.agents.scripted", name, str(tmp_path)]
    namespace = ["unshare", "--map-root-user", "--net"]
    done = subprocess.run([*namespace, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["error"], found["reward"]) == ("ok", "", 1.0)
    assert found["rows"] == 1 and found["calls"] == [2], found
