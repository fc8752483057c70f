"""Environments of Prime's library verifiers 0.3.1 run the turns, and give the reward.

`make test` installs it in .venv-verifiers. All episodes run at the same time, in one process.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from kit.recipe.load import read_yaml
from kit.recipe.schema import AgentSpec
from tests.extras.agents import scripted
from tests.helpers.recipes import ROOT

RECIPE = read_yaml("verifiers")["env"]
SCRIPT = "extras/agents/verifiers_script.py"
PYTHON = ROOT / ".venv-verifiers/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs make .venv-verifiers/ready")

ENVIRONMENT = '''
import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return int(a) * int(b)


def correct(completion, answer, **_):
    if answer == "broken":
        raise ValueError("the scorer is broken")
    return None if answer == "none" else float(answer in completion[-1]["content"])


def describe(completion, **_):
    return {"length": len(completion)}  # no number, but it has no weight


def load_environment(answers):
    rows = [{"question": f"6 times 7? {answer}", "answer": answer} for answer in answers]
    data = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[correct, describe], weights=[1.0, 0.0])
    return vf.ToolEnv(dataset=data, tools=[multiply], rubric=rubric)
'''
ANSWERS = ["42", "43", "broken", "none", "outage"]
TURNS = [scripted.make_call("multiply", a="6", b="7"), "The answer is 42."]


class Policy(scripted.Policy):
    """A policy whose engine fails for one task."""

    async def generate(self, request_id, prompt_ids, sampling_params):
        if "outage" in scripted.TOKENIZER.decode(prompt_ids):
            raise OSError("no engine")
        return await super().generate(request_id, prompt_ids, sampling_params)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """An episode for each answer, {answer: episode}."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "vf_products.py").write_text(ENVIRONMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        arguments = json.dumps({"answers": ANSWERS})
        command = [PYTHON, ROOT / SCRIPT, "vf-products", folder / "rows.jsonl", arguments]
        subprocess.run(command, check=True)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").open()]
        spec = AgentSpec(**{**RECIPE["agent"], "python": str(PYTHON)})
        episodes = scripted.run_episodes(spec, Policy(TURNS), folder, rows, RECIPE["verifier"])
        return dict(zip(ANSWERS, episodes, strict=True))


def test_the_environment_gives_the_reward(episodes):
    right = episodes["42"]
    assert (right.status, right.error, right.reward) == ("ok", "", 1.0)
    assert right.reward_components["total_tool_calls"] == 1  # a metric of ToolEnv
    assert len(right.turns) == 2 and not right.branches
    assert "42" in scripted.TOKENIZER.decode(right.response_ids) and right.response == TURNS[1]
    assert episodes["43"].reward == 0.0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("broken", "the scorer is broken"),  # verifiers itself returns 0 for these two
        ("none", "float() argument must be"),
        ("outage", "no engine"),
    ],
)
def test_a_failure_is_no_reward(episodes, answer, text):
    episode = episodes[answer]
    assert episode.status != "ok" and episode.reward is None and text in episode.error
