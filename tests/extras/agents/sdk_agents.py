"""Agents of SDKs, in .venv-agents, as their documentation writes them. Each has one tool."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

set_tracing_disabled(True)
Row = dict[str, Any]


def get_number(name: str) -> str:
    """Returns a number.

    Args:
        name: of the number
    """
    return {"x": "40", "y": "2"}[name]


async def openai_chat(row: Row, base_url: str, key: str) -> str:
    return await openai_responses(row, base_url, key, OpenAIChatCompletionsModel)


async def openai_responses(
    row: Row, base_url: str, key: str, model: Any = OpenAIResponsesModel
) -> str:
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key)
    tools: list[Any] = [function_tool(get_number)]
    agent = Agent("solver", instructions="Use it.", model=model("policy", client), tools=tools)
    return (await Runner.run(agent, row["question"])).final_output


async def anthropic_runner(row: Row, base_url: str, key: str) -> str:
    """Its second request has the tool's result only: the server keeps the thread."""

    def run() -> str:
        client = anthropic.Anthropic(base_url=base_url, api_key=key)
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=1000,
            tools=[anthropic.beta_tool(get_number)],
            messages=[{"role": "user", "content": row["question"]}],
        )
        return runner.until_done().content[-1].text  # type: ignore[union-attr]

    return await asyncio.to_thread(run)


async def pydantic_ai(row: Row, base_url: str, key: str) -> str:
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key=key)
    agent = PydanticAgent(OpenAIChatModel("policy", provider=provider), tools=[get_number])
    return (await agent.run(row["question"])).output
