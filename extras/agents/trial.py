"""Call an agent in a dry run, with a policy that answers each request with the same text."""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from extras.agents.processes import MAX_ERRORS, FunctionAgent, read_end
from gym_client import GymError
from kit.data.episode import Episode
from kit.engine.endpoint.prompts import Prompts
from kit.engine.endpoint.requests import Request
from kit.engine.endpoint.server import serve
from kit.engine.endpoint.sessions import Sessions
from kit.engine.sampling import build_sampling_params, make_rollout_context
from kit.run.event_loops import make_runner
from kit.run.verifier_trial import RESPONSE
from kit.verify.network import find_free_port

if TYPE_CHECKING:
    from extras.agents import Agents
    from kit.engine.endpoint.tree import Call, Tree
    from kit.engine.inputs import RunInputs
    from kit.engine.sampling import RolloutContext
    from kit.recipe.recipe import Recipe

HOST = "127.0.0.1"
TRIAL_S = 60.0  # then the agent is ended
MAX_MESSAGES = 8
MAX_CHARACTERS = 100  # of a message
INDENT = " " * 12


class RecordingPrompts(Prompts):
    """Keeps the first request."""

    first_request: Request | None = None

    async def build(self, context: RolloutContext, tree: Tree, request: Request) -> Call:
        """Keep the request, and build its prompt. Raises as `Prompts.build`."""
        self.first_request = self.first_request or dataclasses.replace(request)
        return await super().build(context, tree, request)


async def answer(ids: list[int], *, sampling_params: dict[str, Any], **_: object) -> object:
    """Return the first of the ids as a response, in the form of verl's TokenOutput."""
    ids = ids[: sampling_params["max_tokens"]]
    fields = {"log_probs": [0.0] * len(ids), "stop_reason": "completed", "extra_fields": {}}
    return SimpleNamespace(token_ids=ids, **fields)


def try_agent(agents: Agents, recipe: Recipe, inputs: RunInputs) -> Iterator[str]:
    """Call the agent with the first row. Yield lines about its first request and its failure."""
    prompts = RecordingPrompts()
    failure = ""
    with tempfile.TemporaryDirectory() as folder, make_runner() as loop:
        log = Path(folder) / "agent.log"
        try:
            loop.run(run_episode(agents, recipe, inputs, prompts, log))
        except GymError as error:
            failure = str(error)
            if error.reason == "agent_lost":
                failure = f"the function's process ended: {read_end(log, MAX_ERRORS)}"
    row_id = inputs.tasks[0].row_id
    yield f"request     of the agent on row {row_id}, if the policy answers {RESPONSE!r}:"
    if prompts.first_request:
        yield from describe(prompts.first_request)
    if failure:
        yield f"{INDENT}failed: {' '.join(failure.split())}"


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
    runner = agents.make_runner(function, sessions, f"http://{HOST}:{port}")
    runner.limits = runner.limits.model_copy(update={"timeout_s": TRIAL_S})
    try:
        async with (
            serve(context, HOST, port, secrets.token_hex(16), sessions),
            runner.run_turns(episode, task, session, context, sampling, "dry-run"),
        ):
            pass
    finally:
        function.close()


def describe(request: Request) -> Iterator[str]:
    """Yield a line about each of the first messages of a request, then the names of its tools."""
    for message in request.messages[:MAX_MESSAGES]:
        functions = [call["function"] for call in message.get("tool_calls", [])]
        calls = [f"{each['name']}({each['arguments']})" for each in functions]
        text = " ".join(" ".join([str(message["content"]), *calls]).split())
        yield f"{INDENT}{message['role']}: {text[:MAX_CHARACTERS]}"
    if len(request.messages) > MAX_MESSAGES:
        yield f"{INDENT}... {len(request.messages) - MAX_MESSAGES} more messages"
    names = [tool["function"]["name"] for tool in request.tools]
    yield f"{INDENT}tools: {', '.join(names) or 'none'}"
