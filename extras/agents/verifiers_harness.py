"""The turns of verifiers v1 in this process. Its harness `null` downloads packages per episode."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import aiohttp
import verifiers.v1 as v1
from mcp import Client, MCPError
from verifiers.v1.configs.harness import HarnessConfig

MODEL_FAILED = 97  # the exit status that verifiers reads


class InProcessHarness(v1.Harness[HarnessConfig]):
    """A chat with the tools of MCP servers, until the policy calls none."""

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
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        tools = {}
        body: dict[str, Any] = {"model": ctx.model, "messages": messages}
        async with contextlib.AsyncExitStack() as stack:
            for server, address in servers.items():
                client = await stack.enter_async_context(Client(address))
                for tool in (await client.list_tools()).tools:
                    name = f"{server}_{tool.name}"
                    tools[name] = (client, tool.name)
                    function = {"name": name, "description": tool.description or ""}
                    function["parameters"] = tool.input_schema
                    body.setdefault("tools", []).append({"type": "function", "function": function})
            headers = {"Authorization": f"Bearer {key}"}
            http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
            while True:
                async with http.post(f"{url}/chat/completions", json=body) as response:
                    text = await response.text()
                if response.status != 200:
                    return v1.ProgramResult(MODEL_FAILED, "", text[:500])
                message = json.loads(text)["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return v1.ProgramResult(0, message.get("content") or "", "")
                for call in message["tool_calls"]:
                    output = await call_tool(tools, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


async def call_tool(tools: dict[str, Any], function: dict[str, str]) -> str:
    """Return the output of a tool, or what is wrong with the call."""
    try:
        client, name = tools[function["name"]]
        result = await client.call_tool(name, json.loads(function["arguments"]))
        return "".join(part.text for part in result.content if part.type == "text")
    except (KeyError, ValueError, MCPError) as error:
        return f"error: {error!r}"


__all__ = ["InProcessHarness"]
