"""Clients with the endpoint's own key: Gym's agents, and judges that are the policy.

Nothing says which episode a request of Gym's agents belongs to. But they send back the token ids of
each response, with which they got it. So a response is known by its ids as well as by its text, and
all calls of a batch are in one tree. If an agent rewrites its history, the messages are encoded as
a new conversation. The prompt does not begin with the earlier tokens, and the episode fails as
not_contiguous.

Protects: training, from token ids that do not belong to the text that the policy saw.
"""

from __future__ import annotations

import logging
import uuid

from gym_client import find_callable_tools
from kit.data.episode import TOKEN_FIELDS
from kit.engine.endpoint.prompts import Prompts, respond
from kit.engine.endpoint.requests import Request, RequestError, make_overflow
from kit.engine.endpoint.tree import Call, Tree
from kit.engine.sampling import RolloutContext

logger = logging.getLogger(__name__)
REWRITTEN = (
    "an agent has rewritten the history of its conversation, so its episode fails as "
    "not_contiguous. Later cases are counted only as failed episodes. Turn off the agent's "
    'compaction. See docs/environments.md, "Agents that rewrite the history".'
)


class SharedClients:
    """The clients that share the endpoint's own key."""

    def __init__(self, context: RolloutContext, prompts: Prompts):
        self.context = context
        self.prompts = prompts
        self.tree = Tree()
        self.batch = 0  # of the tree
        self.rewritten_count = 0

    async def complete(self, request: Request) -> Call:
        """Answer a request. Raises RequestError, GymError, and as `sample`."""
        samples = self.context.samples
        assert samples, "the policy endpoint is in the driver, whose context has a store"
        if samples.batch != self.batch:
            self.tree = Tree()
            self.batch = samples.batch
        if request.choice == "forced":
            raise RequestError("The policy decides which tools it calls. Use auto.", "tool_choice")
        # Gym's agents post each call to the route of that name, without a check. A call of
        # `seed_session` would start the session again, with an answer that the policy wrote. Agents
        # do not URL-quote the name either, so `verify?x` would reach /verify.
        names = request.callable_names
        safe = {name for name in find_callable_tools(names) if not set(name) & set("?#")}
        request.hidden = names - safe
        tree = self.tree
        call = await self.prompts.build(self.context, tree, request)
        if call.is_rewritten:
            self.rewritten_count += 1
            if self.rewritten_count == 1:
                logger.warning(REWRITTEN)
        request.room = find_room(call, request, self.context)
        prompt = call.prompt
        request_id = uuid.uuid4().hex
        sampled = await respond(self.context, samples.sampling, request_id, request, call, prompt)
        if request.for_training:
            samples.add(prompt, sampled)
            tree.add(call, (prompt, sampled.ids))
        values = (prompt, sampled.ids, sampled.log_probs)
        call.token_fields = dict(zip(TOKEN_FIELDS, values, strict=True))
        return call


def find_room(call: Call, request: Request, context: RolloutContext) -> int:
    """Return how many tokens the response may have. Raises RequestError if there are none.

    The limits are those of an episode whose turns the kit runs: of the first prompt, of all tokens
    after it, and of the turns. An episode with a rewritten history fails anyway. For it and for a
    judge's request, only the engine's context is a limit.
    """
    if call.is_rewritten or not request.for_training:
        room = context.max_length - call.prompt_length
        if room <= 0:
            limits = f"data.max_prompt_length + max_response_length = {context.max_length}"
            raise make_overflow(f"{call.prompt_length} tokens, {limits}")
        return room
    turn = len(call.path) - 1
    if context.max_turns and turn >= context.max_turns:
        raise make_overflow(f"{turn} turns, max_assistant_turns={context.max_turns}")
    return find_row_room(call, context)


def find_row_room(call: Call, context: RolloutContext) -> int:
    """Return the room of a response in a training row. Raises RequestError if there is none."""
    first = len(call.path[0].prompt_ids)
    later = call.prompt_length - first
    limits = (context.max_prompt_length, context.max_response_length)
    if first > limits[0]:
        raise make_overflow(f"a prompt of {first} tokens, data.max_prompt_length={limits[0]}")
    if later >= limits[1]:
        problem = f"{later} tokens after the first prompt, data.max_response_length={limits[1]}"
        raise make_overflow(problem)
    return limits[1] - later
