"""Call an agent in a dry run, with a policy that answers each request with the same text."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gym_client
from extras.agents import make_agent_runner
from extras.agents.processes import FunctionAgent, read_end
from gym_client import GymError
from kit.data.episode import Episode
from kit.engine.endpoint.prompts import Prompts
from kit.engine.endpoint.server import serve
from kit.engine.endpoint.sessions import Sessions
from kit.engine.sampling import build_sampling_params, make_rollout_context
from kit.run.event_loops import make_runner
from kit.run.verifier_trial import RESPONSE
from kit.verify.network import find_free_port

if TYPE_CHECKING:
    from extras.agents import Agents
    from kit.engine.endpoint.requests import Request
    from kit.engine.endpoint.tree import Call, Tree
    from kit.engine.inputs import RunInputs
    from kit.engine.sampling import RolloutContext
    from kit.recipe.recipe import Recipe

HOST = "127.0.0.1"
TRIAL_S = 120.0  # then the agent is ended
MAX_PROMPT = 6000  # characters
MAX_OUTPUT = 2000


class RecordingPrompts(Prompts):
    """Keeps the first prompt."""

    first_ids: list[int] | None = None

    async def build(self, context: RolloutContext, tree: Tree, request: Request) -> Call:
        """Build the prompt of a request, and keep it. Raises as `Prompts.build`."""
        call = await super().build(context, tree, request)
        self.first_ids = self.first_ids or call.prompt
        return call


async def answer(ids: list[int], *, sampling_params: dict[str, Any], **_: object) -> object:
    """Return the first of the ids as a response, in the form of verl's TokenOutput."""
    ids = ids[: sampling_params["max_tokens"]]
    fields = {"log_probs": [0.0] * len(ids), "stop_reason": "completed", "extra_fields": {}}
    return SimpleNamespace(token_ids=ids, **fields)


def try_agent(agents: Agents, recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
    """Call the agent with the first row. Yield its first prompt, its output and its failure."""
    prompts = RecordingPrompts()
    failure = ""
    with tempfile.TemporaryDirectory() as folder, make_runner() as loop:
        log = Path(folder) / "agent.log"
        try:
            loop.run(run_episode(agents, recipe, inputs, prompts, log))
        except GymError as error:
            failure = str(error)
            if error.reason == "agent_lost":
                failure = "the function's process ended"
        output = read_end(log, MAX_OUTPUT)
    row_id = inputs.tasks[0].row_id
    if prompts.first_ids:
        yield f"the agent's first prompt ({row_id}, {len(prompts.first_ids)} tokens):"
        yield gym_client.cut_middle(str(inputs.tokenizer.decode(prompts.first_ids)), MAX_PROMPT)
    if output:
        yield f"the agent's output:\n{output}"
    result = f"FAILED: {' '.join(failure.split())}" if failure else "it ends"
    yield f"agent       on row {row_id}, if the policy answers {RESPONSE!r}: {result}"


async def run_episode(
    agents: Agents, recipe: Recipe, inputs: RunInputs, prompts: Prompts, log: Path
) -> None:
    """Run the first row's turns over a policy endpoint without a model. Raises GymError."""
    task = inputs.tasks[0]
    ids = inputs.tokenizer.encode(RESPONSE, add_special_tokens=False)
    client: Any = SimpleNamespace(generate=partial(answer, [*ids, min(inputs.stop_ids)]))
    context = make_rollout_context(recipe, client, inputs, TRIAL_S)
    sampling = build_sampling_params(recipe, is_validation=False)
    sessions = Sessions()
    sessions.prompts = prompts
    port = find_free_port(HOST)
    episode = Episode(task.row_id, "0/0", task.server, [], row=task.row)
    session: Any = SimpleNamespace(kind="verify", row=task.row)
    assert agents.spec
    function = FunctionAgent(agents.spec, log)
    limits = agents.settings.model_copy(update={"timeout_s": TRIAL_S})
    runner = make_agent_runner(agents.spec, limits, function, sessions, f"http://{HOST}:{port}")
    try:
        async with (
            serve(context, HOST, port, secrets.token_hex(16), sessions),
            runner.run_turns(episode, task, session, context, sampling, "dry-run"),
        ):
            pass
    finally:
        await function.aclose()
