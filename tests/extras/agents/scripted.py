"""Episodes of an agent over the policy endpoint, with a scripted policy in place of a model.

    unshare -rn python -m tests.extras.agents.scripted codex

runs a coding agent without a network, and prints what its episode has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import env
import inference
from extras.agents.processes import FunctionAgent, run_command
from extras.agents.runner import AgentRunner
from gym_client import VerifyResult
from kit.data.episode import Episode
from kit.engine.endpoint.server import serve
from kit.engine.endpoint.sessions import Sessions
from kit.engine.sampling import request_group
from kit.recipe.load import read_yaml
from kit.recipe.schema import AgentSpec
from kit.verify.network import find_free_port
from tests.helpers.rollouts import chatml_tokenizer, context_of, encode_turns, make_limits

TOKENIZER = chatml_tokenizer()
LENGTHS = {"max_prompt_length": 10**6, "max_response_length": 10**6}
SHELL = "echo 42 > answer.txt"


class Policy:
    """A rollout engine that plays the same turns in each episode."""

    def __init__(self, turns: list[str], pause_s: float):
        self.answers = encode_turns(turns, TOKENIZER)
        self.pause_s = pause_s
        self.cancelled_count = 0
        self.counts = Counter[str]()  # {episode: its calls}
        self.sampled_count = 0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any) -> Any:
        """Return the next turn of an episode. A call without tools, as for a title, is no turn."""
        try:
            await asyncio.sleep(self.pause_s)
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        ids = encode_turns(["A title"], TOKENIZER)[0]
        if "\nTools: [" in TOKENIZER.decode(prompt_ids):
            turn = self.counts[request_id]
            ids = self.answers[min(turn, len(self.answers) - 1)]
            self.counts[request_id] += 1
        self.sampled_count += len(ids)
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            stop_reason="completed",
            extra_fields={},
        )


class Verifier:
    """A Gym whose verifier looks for 42 in the answer, or in the file of a coding agent."""

    async def kind(self, _: str) -> str:
        return "verify"

    @contextlib.asynccontextmanager
    async def session(self, server: str, row: Any, *_: object) -> Any:
        session = SimpleNamespace(kind="verify", row=row)

        async def verify(_: Any, response: Any) -> VerifyResult:
            text = response.written
            if folder := session.row.get("extra_info", {}).get("work_folder"):
                text = (Path(folder) / "answer.txt").read_text()
            return VerifyResult(float("42" in text))

        session.verify = verify
        yield session


def make_call(tool: str, /, **arguments: str) -> str:
    """Write a call. JSON of an SDK would have other spaces."""
    text = json.dumps(arguments).replace(":", " :  ")
    return f'<tool_call>{{"name":"{tool}",  "arguments":{text}}}</tool_call>'


def run_episodes(
    spec: AgentSpec,
    turns: list[str],
    folder: Path,
    count: int = 1,
    max_calls: int = 20,
    timeout_s: float = 300.0,
    pause_s: float = 0.0,
) -> tuple[list[Episode], Policy]:
    """Run episodes of an agent at the same time. The policy repeats the last of its turns."""
    policy = Policy(turns, pause_s)
    context = context_of(policy, TOKENIZER, **LENGTHS, timeout_s=2000.0)
    sessions = Sessions()
    port = find_free_port()
    limits = make_limits(max_calls=max_calls, max_rows=8, timeout_s=timeout_s)
    function = FunctionAgent(spec, folder / "agent.log")
    agent: Any = function.run if spec.function else partial(run_command, spec, True)
    context.agent = AgentRunner(agent, sessions, f"http://127.0.0.1:{port}", limits)
    question = "What is x + y? Write it into answer.txt."
    row = {"question": question}
    task = env.Task("rows:1", row, "s", [{"role": "user", "content": question}], [])
    gym: Any = Verifier()

    async def run() -> list[Episode]:
        try:
            async with serve(context, "127.0.0.1", port, "own key", sessions):
                return await inference.rollout(request_group(task, "0", count), {}, context, gym)
        finally:
            function.close()

    return asyncio.run(run()), policy


# {coding agent: a call of its shell}
CALLS = {
    "codex": make_call("exec_command", cmd=SHELL),
    "opencode": make_call("bash", command=SHELL, description="Writes it"),
}


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ["TMPDIR"] = sys.argv[2]
    spec = AgentSpec(**read_yaml(sys.argv[1])["env"]["agent"])
    turns = [CALLS[sys.argv[1]], "Done."]
    (episode,), policy = run_episodes(spec, turns, Path(sys.argv[2]))
    found = {"episode": [episode.status, episode.error, episode.reward]}
    found["calls"] = [len(row.turns) for row in episode.rows]
    print(json.dumps(found))
