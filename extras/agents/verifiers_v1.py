"""Environments of verifiers v1 (0.4.0), with a harness that needs no network.

The harness `null` of verifiers installs packages with uv in each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import verifiers.v1 as v1
from mcp import Client, MCPError
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.utils import loaders


class V1:
    """A taskset, with the harness of its package or the one below."""

    def __init__(self, name: str, arguments: dict[str, Any]):
        own = loaders.default_harness_id(name)
        harness = {"id": __name__ if own == "bash" else own}
        agent = {"harness": harness, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": name, **arguments}, "agent": agent}
        self.env = loaders.load_environment(loaders.resolve_env_config(config))
        self.tasks = list(self.env.taskset)
        self.serving: asyncio.Future[None] | None = None  # tools of all tasks

    async def play(self, task: Any, url: str, key_variable: str) -> dict[str, float]:
        """Play a task, and return its metrics and its reward. Raises RuntimeError."""
        self.serving = self.serving or asyncio.ensure_future(self.env.serving().__aenter__())
        await asyncio.shield(self.serving)
        client = v1.EvalClientConfig(base_url=url, api_key_var=key_variable)
        episode = await self.env.run_episode(task, v1.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = list(episode.errors)
            for trace in episode.traces:
                errors += trace.errors
            raise RuntimeError([f"{error.type}: {error.message}" for error in errors])
        (trace,) = episode.traces
        return {**trace.metrics, "reward": trace.reward if trace.rewards else None}


class InProcessHarness(v1.Harness[HarnessConfig]):
    """A chat with tools, until the policy calls none or the conversation is too long."""

    SUPPORTS_MCP = True
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, _: Any, __: Any, url: str, key: str, servers: dict[str, str], data: Any
    ) -> v1.ProgramResult:
        """Run the turns."""
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [v1.UserMessage(content=prompt)]
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        async with contextlib.AsyncExitStack() as stack:
            policy = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key=key))
            tools = {}
            body: dict[str, Any] = {}
            for server, address in servers.items():
                client = await stack.enter_async_context(Client(address))
                for tool in (await client.list_tools()).tools:
                    name = f"{server}_{tool.name}"
                    tools[name] = (client, tool.name)
                    function = {"name": name, "description": tool.description or ""}
                    described = {**function, "parameters": tool.input_schema}
                    body.setdefault("tools", []).append({"type": "function", "function": described})
            while True:
                try:
                    completion = await policy.chat.completions.create(
                        model=ctx.model, messages=messages, **body
                    )
                except APIStatusError as error:
                    status = 0 if is_context_overflow(error) else 1
                    return v1.ProgramResult(status, "", str(error))
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return v1.ProgramResult(0, message.content or "", "")
                for call in message.tool_calls:
                    output = await call_tool(tools, call.function)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


async def call_tool(tools: dict[str, Any], function: Any) -> str:
    """Return the output of a tool, or what is wrong with the call."""
    try:
        client, name = tools[function.name]
        result = await client.call_tool(name, json.loads(function.arguments))
        return "".join(part.text for part in result.content if part.type == "text")
    except (KeyError, ValueError, MCPError) as error:
        return f"error: {error!r}"


__all__ = ["InProcessHarness"]
