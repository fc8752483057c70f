"""The process of an agent's function, which runs it for many episodes in one event loop.

    python -P extras/agents/function_process.py my_agent.py:solve [SOCKET]

processes.py starts it, with an interpreter that may lack the kit's packages. So this file imports
only the standard library, and a module of the kit that does the same. Each connection to SOCKET is
an episode: one line of JSON with the arguments, one with `answer` or `error`. If the connection is
closed, the episode is cancelled. Without SOCKET the function is only loaded.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kit.recipe.python_files import describe_place, find_user_file, import_callable

Solve = Callable[..., Awaitable[object]]
MAX_LINE_BYTES = 2**30  # of a row
BACKLOG = 4096  # connections that wait to be accepted


def load(reference: str) -> Solve:
    """Load the function. Exits with a message."""
    try:
        solve = import_callable(reference)
        inspect.signature(solve).bind(row={}, base_url="", key="")
    except Exception as error:
        sys.exit(str(error))
    if not inspect.iscoroutinefunction(solve):
        sys.exit("it is not an async function. Write `async def`.")
    return solve


async def run(solve: Solve, file: str, arguments: dict[str, Any]) -> dict[str, object]:
    """Run one episode, and return its answer: a text, other JSON as text, or None.

    If the function returns a dict with a reward, `result` has its other keys (own_reward.py).
    """
    try:
        answer = await solve(**arguments)
        if answer is None or isinstance(answer, str):
            return {"answer": answer}
        text = json.dumps(answer)
        if isinstance(answer, dict) and "reward" in answer:
            return {"answer": answer.pop("answer", None), "result": answer}
        return {"answer": text}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        place = describe_place(error, file).strip() or "failed:"
        return {"error": f"{place} {type(error).__name__}: {error}"}


async def handle(
    solve: Solve, file: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Run the episode of a connection until it ends or the connection is closed."""
    line = (await reader.readline()).strip()
    if line:
        episode = asyncio.create_task(run(solve, file, json.loads(line)))
        is_closed = asyncio.create_task(reader.read())
        await asyncio.wait({episode, is_closed}, return_when=asyncio.FIRST_COMPLETED)
        if episode.done():
            writer.write(json.dumps(episode.result()).encode() + b"\n")
        episode.cancel()
    writer.close()


async def serve(solve: Solve, file: str, socket: str) -> None:
    """Accept episodes until the process is killed."""
    answer = functools.partial(handle, solve, file)
    server = await asyncio.start_unix_server(answer, socket, limit=MAX_LINE_BYTES, backlog=BACKLOG)
    print("ready", flush=True)
    os.dup2(2, 1)  # the agent prints to the log
    await server.serve_forever()


if __name__ == "__main__":
    reference, *socket = sys.argv[1:]
    prctl = ctypes.CDLL(None).prctl
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the driver
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: processes of the agent stay its descendants
    function = load(reference)
    if socket:
        asyncio.run(serve(function, str(find_user_file(reference).resolve()), *socket))
