"""The agent of drawers.yaml, with the OpenAI Agents SDK: one tool, which opens a drawer."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
# A question with its answer: a small model copies what it sees.
EXAMPLE = [
    {"role": "user", "content": "What is in drawer two hundred eleven?"},
    {
        "type": "function_call",
        "call_id": "1",
        "name": "open_drawer",
        "arguments": '{"number": 211}',
    },
    {"type": "function_call_output", "call_id": "1", "output": "a violin"},
    {"role": "assistant", "content": "a violin"},
]


async def solve(row: dict[str, Any], base_url: str, key: str) -> str:
    """Return what the agent says is in the row's drawer."""

    @function_tool
    def open_drawer(number: int) -> str:
        """Open a drawer and see what is in it."""
        return row["thing"] if number == row["number"] else "nothing"

    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    model = OpenAIChatCompletionsModel("policy", client)
    agent = Agent(name="drawers", instructions="Open the drawer.", model=model, tools=[open_drawer])
    question = {"role": "user", "content": row["responses_create_params"]["input"]}
    return str((await Runner.run(agent, [*EXAMPLE, question], max_turns=4)).final_output)
