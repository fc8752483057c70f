"""The policy endpoint under load: 1,000 concurrent agents, compared with plain aiohttp.

    python benchmarks/endpoint_load.py [--sessions 1000] [--calls 5] [--bytes 4000]

The server is this process, the clients are another one. The rollout engine is a stub of 10 ms. The
plain server reads JSON, waits as long and writes JSON. Each agent sends a system message of that
many bytes, a tool, and a task that eight agents share. Each response calls the tool. All outputs
of it differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
Args = argparse.Namespace
PAUSE_S = 0.01
GROUP = 8  # agents with the same task, as the episodes of a GRPO group
CALL = '<tool_call>{"name": "f", "arguments": {"q" :  1}}</tool_call><|im_end|>'
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}


class Engine:
    """A rollout engine that calls the tool in each response."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = tokenizer.encode(CALL, add_special_tokens=False)

    async def generate(self, *_: Any, **__: Any) -> SimpleNamespace:
        await asyncio.sleep(PAUSE_S)
        return SimpleNamespace(
            token_ids=self.ids,
            log_probs=[-1.0] * len(self.ids),
            stop_reason="completed",
            extra_fields={},
        )


async def answer_plainly(request: web.Request) -> web.Response:
    """Read JSON, wait, and write JSON of the size of a reply."""
    json.loads(await request.read())
    await asyncio.sleep(PAUSE_S)
    function = {"name": "f", "arguments": '{"q": 1}'}
    call = {"id": "a", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "tool_calls", "logprobs": None, "message": message}
    return web.json_response({"id": "x" * 40, "created": 0, "model": "m", "choices": [choice]})


# --- the clients ---------------------------------------------------------------------------------


async def play(
    client: aiohttp.ClientSession, url: str, number: int, args: Args, times: list[float]
) -> None:
    """Play one agent."""
    messages = [
        {"role": "system", "content": ("Be careful and brief. " * args.bytes)[: args.bytes]},
        {"role": "user", "content": f"Task {number // GROUP}."},
    ]
    for turn in range(args.calls):
        body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]})
        begin = time.perf_counter()
        async with client.post(url, data=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
        times.append(time.perf_counter() - begin)
        message = reply["choices"][0]["message"]
        output = f"{number} and {turn}: " + "42" * 40
        call_id = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": output}]


async def run_clients(args: Args) -> None:
    """Play all agents concurrently, and print the times of their calls."""
    times: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        urls = json.loads(sys.stdin.read())
        await asyncio.gather(*(play(client, url, n, args, times) for n, url in enumerate(urls)))
    times.sort()
    print(json.dumps([statistics.median(times), times[int(len(times) * 0.99)]]))


# --- the server ----------------------------------------------------------------------------------


async def measure(urls: list[str]) -> tuple[float, float]:
    """Start the clients on these URLs, one each, and return the median and the 99th percentile."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *sys.argv[1:], "--clients", stdin=-1, stdout=-1
    )
    output, _ = await process.communicate(json.dumps(urls).encode())
    median, p99 = json.loads(output)
    return median, p99


async def main(args: Args) -> None:
    """Measure both servers."""
    sys.path.insert(0, str(ROOT))
    from transformers import AutoTokenizer  # here, so that the clients start sooner

    from kit.chat.processor import TextProcessor
    from kit.chat.template import ChatTemplate
    from kit.data.episode import Episode, gc_paused
    from kit.engine.endpoint import server
    from kit.engine.endpoint.sessions import Sessions
    from kit.engine.sampling import RolloutContext
    from kit.recipe.load import read_yaml
    from kit.recipe.schema import AgentsSection
    from kit.verify.network import find_free_port

    limits = AgentsSection(**read_yaml("base")["agents"])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template = ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id})
    template.tool_format = "hermes"
    client: Any = Engine(tokenizer)
    context = RolloutContext(client, template, 8192, 4096, None, 4096, 60.0)
    opened = Sessions()
    app = web.Application()
    app.router.add_post("/", answer_plainly)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    ports = (find_free_port(), find_free_port())
    await web.TCPSite(runner, "127.0.0.1", ports[0]).start()
    async with server.serve(context, "127.0.0.1", ports[1], "the key", opened):
        first = opened.open(context, {}, limits)  # imports the tool parsers
        path = f"http://127.0.0.1:{ports[1]}/s/%s/v1/chat/completions"
        await measure([path % first.key])
        process = psutil.Process()
        before = process.memory_info().rss
        sessions = [opened.open(context, {}, limits) for _ in range(args.sessions)]
        with gc_paused():  # as in a rollout
            plain = await measure([f"http://127.0.0.1:{ports[0]}/"] * args.sessions)
            endpoint = await measure([path % session.key for session in sessions])
        memory = (process.memory_info().rss - before) / 2**20
        for session in sessions:
            episode = Episode("x:1", "g", "s", [])
            session.fill(episode)
            assert len(episode.turns) == args.calls and not episode.branches
    print(f"{args.sessions} agents, {args.calls} calls each, {args.bytes} bytes")
    print(f"plain aiohttp  p50 {plain[0] * 1000:.0f} ms, p99 {plain[1] * 1000:.0f} ms")
    print(f"endpoint       p50 {endpoint[0] * 1000:.0f} ms, p99 {endpoint[1] * 1000:.0f} ms")
    print(f"ratio of p50   {endpoint[0] / plain[0]:.2f}; memory {memory:.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=4000)
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asyncio.run(run_clients(arguments) if arguments.clients else main(arguments))
