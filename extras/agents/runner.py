"""Run the turns of an episode by an agent. It calls the policy endpoint with the episode's key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

import gym_client
from env import Json, Task
from gym_client import GymError, Session
from kit.chat.parsed_response import ParsedResponse
from kit.data.episode import Episode
from kit.errors import RunError

if TYPE_CHECKING:
    from kit.engine.endpoint.sessions import AgentSession, Sessions
    from kit.engine.sampling import RolloutContext, Sampling
    from kit.recipe.schema import AgentsSection

WORK = "work"  # the folder of a command
logger = logging.getLogger("kit.agents")


class AgentCall(NamedTuple):
    """What an agent gets for one episode."""

    row: Json
    prompt: str  # the text of the row's messages
    base_url: str  # of the policy endpoint, without /v1
    key: str  # of this episode
    folder: Path  # for its files, until the episode is verified
    result: Json  # gets what a function returned with a reward


@dataclass
class AgentRunner:
    """The agent of a run (kit.engine.sampling.Agent)."""

    run_agent: Callable[[AgentCall], Awaitable[str | None]]  # returns the answer
    sessions: Sessions  # of the policy endpoint
    base_url: str  # of the policy endpoint, without /v1
    limits: AgentsSection
    first_prompts: dict[str, int] | None = None  # {row: hash of its first one}; None: not compared

    @contextlib.asynccontextmanager
    async def run_turns(
        self,
        episode: Episode,
        task: Task,
        session: Session,
        context: RolloutContext,
        sampling: Sampling,
        request_id: str,
    ) -> AsyncIterator[None]:
        """Run the turns on entry. At the end of the block, delete the files of the episode.

        Raises GymError, and RunError if the verifier plays turns itself.
        """
        if session.kind != "verify":
            problem = f"{task.server} plays turns, as env.agent does"
            raise RunError(f"{problem}. Set a verifier that only scores.")
        folder = Path(tempfile.mkdtemp(prefix="agent-"))
        agent_session = self.sessions.open(context, sampling, self.limits, request_id)
        prompt = "\n\n".join(str(message["content"]) for message in task.messages)
        call = AgentCall(task.row, prompt, self.base_url, agent_session.key, folder, {})
        try:
            try:
                answer = await self.run_until_over(call, agent_session)
            finally:
                self.sessions.close(agent_session)
            agent_session.fill(episode)
            self.compare_prompts(task.row_id, agent_session)
            if answer is not None and answer.strip() != episode.response.strip():
                episode.output.append(gym_client.make_message(answer))
                episode.responses[-1] = ParsedResponse.of_text(answer)  # the verifier reads it
            extra: Json = {"agent": call.result} if call.result else {}
            if (folder / WORK).is_dir():
                extra["work_folder"] = str(folder / WORK)
            if extra:
                known = task.row.get("extra_info") or {}
                session.row = {**task.row, "extra_info": {**known, **extra}}
            yield
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def compare_prompts(self, row_id: str, agent_session: AgentSession) -> None:
        """Warn once if two episodes of a row begin with different prompts."""
        if self.first_prompts is None:
            return
        digest = hash(tuple(agent_session.tree.calls[0].prompt))
        if self.first_prompts.setdefault(row_id, digest) == digest:
            return
        self.first_prompts = None
        logger.warning(
            "Two episodes of %s begin with different prompts, although the agent got the same row. "
            "All episodes share one process, so a list outside of the function joins them. Make "
            "each list and agent inside the function. If a time or a random number differs, their "
            "rewards may not be comparable.",
            row_id,
        )

    async def run_until_over(self, call: AgentCall, agent_session: AgentSession) -> str | None:
        """Return the agent's answer, None if a limit has ended it. Raises GymError."""
        timeout_s = self.limits.timeout_s
        run = asyncio.ensure_future(self.run_agent(call))
        over = asyncio.create_task(agent_session.over.wait())
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({run, over}, timeout=timeout_s, return_when=first)
        finally:
            over.cancel()
            run.cancel()
            await asyncio.wait({run})
        calls = len(agent_session.tree.calls)
        problem = (
            f"the agent did not end within agents.timeout_s={timeout_s:g} (calls of the policy: "
            f"{calls}). Raise it."
        )
        error: BaseException | None = GymError("agent_timeout", problem)
        if not run.cancelled():
            error = run.exception()
        if agent_session.failure:
            raise agent_session.failure
        # An agent may end with an error at a limit, which the policy has reached by its responses.
        is_limited = bool(agent_session.limit or agent_session.cut)
        if error and not (is_limited and isinstance(error, GymError) and not error.session_lost):
            raise error
        return None if error else run.result()


async def call_url(url: str, call: AgentCall) -> str | None:
    """Have an agent that runs elsewhere run an episode, and return its answer. Raises GymError."""
    body = {"row": call.row, "base_url": call.base_url, "key": call.key}
    text = ""
    try:
        async with aiohttp.request("POST", url, json=body) as response:
            text = await response.text()
            response.raise_for_status()
            answer: str | None = json.loads(text)["answer"]
            return answer
    except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
        raise GymError("agent_raised", f"{url}: {error!r} {text[:200]}") from None
