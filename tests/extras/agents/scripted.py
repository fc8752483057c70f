"""Episodes of an agent over the policy endpoint, with a scripted policy in place of a model.

    unshare -rn python -m tests.extras.agents.scripted codex

runs a coding agent without a network, and prints what its episode has.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import env
import inference
from env import Json
from extras.agents.processes import FunctionAgent, run_command
from extras.agents.runner import AgentRunner
from kit.data.episode import Episode
from kit.engine.endpoint.server import serve
from kit.engine.endpoint.sessions import Sessions
from kit.engine.sampling import request_group
from kit.recipe.load import read_yaml
from kit.recipe.schema import AgentSpec
from kit.verify.network import find_free_port
from tests.helpers.rollouts import chatml_tokenizer, context_of, encode_turns, make_limits
from tests.helpers.verifiers import make_router

TOKENIZER = chatml_tokenizer()
LENGTHS = {"max_prompt_length": 10**6, "max_response_length": 10**6}
SHELL = "echo 42 > answer.txt"
QUESTION = "What is x + y? Write it into answer.txt."
ROW = {"question": QUESTION, "responses_create_params": {"input": QUESTION}}


VERIFIER = """
from pathlib import Path

def find_42(solution_str, extra_info, **_):
    folder = extra_info.get("work_folder")
    return "42" in (Path(folder, "answer.txt").read_text() if folder else solution_str)
"""


class Policy:
    """A rollout engine that plays the same turns in each episode, and repeats the last one."""

    def __init__(self, turns: list[str], pause_s: float = 0.0):
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


def make_call(tool: str, /, **arguments: str) -> str:
    """Write a call. JSON of an SDK would have other spaces."""
    text = json.dumps(arguments).replace(":", " :  ")
    return f'<tool_call>{{"name":"{tool}",  "arguments":{text}}}</tool_call>'


def run_episodes(
    spec: AgentSpec,
    policy: Policy,
    folder: Path,
    rows: Sequence[Json] = (ROW,),
    verifier: str = "",
    max_calls: int = 20,
    timeout_s: float = 300.0,
) -> list[Episode]:
    """Run an episode of an agent for each row, at the same time."""
    (folder / "find_42.py").write_text(VERIFIER)
    router = make_router(folder, verifier or f"{folder}/find_42.py:find_42")
    context = context_of(policy, TOKENIZER, **LENGTHS, timeout_s=2000.0)
    sessions = Sessions()
    port = find_free_port()
    limits = make_limits(max_calls=max_calls, max_rows=8, timeout_s=timeout_s)
    function = FunctionAgent(spec, folder / "agent.log")
    agent: Any = function.run if spec.function else partial(run_command, spec, True)
    url = f"http://127.0.0.1:{port}"
    context.agent = AgentRunner(agent, sessions, url, limits, first_prompts={})
    requests = []
    for number, row in enumerate(rows):
        messages, _ = env.render_row(row, "rows:1")
        row_id = f"rows:{rows.index(row)}"
        task = env.Task(row_id, row, next(iter(router.pools)), messages, [])
        requests += request_group(task, str(number), 1)

    async def run() -> list[Episode]:
        try:
            async with router, serve(context, "127.0.0.1", port, "own key", sessions):
                return await inference.rollout(requests, {}, context, router)
        finally:
            await function.aclose()

    return asyncio.run(run())


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
    (episode,) = run_episodes(spec, Policy(turns), Path(sys.argv[2]))
    found = {"episode": [episode.status, episode.error, episode.reward]}
    found["calls"] = [len(row.turns) for row in episode.rows]
    print(json.dumps(found))
