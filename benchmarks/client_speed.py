"""Compare the requests per second of Quintet's Gym client and of plain aiohttp.

    python benchmarks/client_speed.py [--rounds 10] [--episodes 2048]

The verifier is a FastAPI server in a separate process. It takes 20 ms for an answer. In each round,
all episodes run concurrently, once through `gym_client.Gym` and once through one
aiohttp.ClientSession without a connection limit. The two sides take turns to go first. An episode
sends two requests of about 2 kB, /seed_session and /verify, and gets about 2 kB back.

The goals are at least 0.8 of aiohttp's requests per second, and at most 5% more memory after the
last round than after the third. The exit status is 1 if a goal is missed. The server shares the
cores with both sides, so compare only the ratio.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gym_client import Gym, message_response

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 3 + 4? " * 100}]},
    "answer": "7",
}
MIN_RATIO = 0.8  # of aiohttp's requests per second
MAX_MEMORY_GROWTH = 0.05  # after the third round
KEEP_ALIVE_S = 30  # Gym's servers also keep idle connections for so long
app = FastAPI()


class Body(BaseModel):
    """A JSON object with any fields."""

    model_config = ConfigDict(extra="allow")


@app.post("/seed_session")
async def seed_session(body: Body, response: Response) -> dict:
    """Set a session cookie."""
    response.set_cookie("session", os.urandom(16).hex())
    return {}


@app.post("/verify")
async def verify(body: Body) -> Body:
    """Return the row with a reward, as Gym's servers do."""
    await asyncio.sleep(0.02)
    return Body(**{**(body.model_extra or {}), "reward": 1.0})


async def verify_through_kit(gym: Gym) -> float:
    """Run one episode through Quintet's client, and return its reward."""
    async with gym.session("slow", ROW) as session:
        return (await session.verify(message_response("7"))).reward


async def verify_through_aiohttp(http: aiohttp.ClientSession, url: str) -> float:
    """Run one episode through aiohttp, and return its reward."""
    async with http.post(f"{url}/seed_session", json=ROW) as answer:
        await answer.json()
    body = {**ROW, "response": message_response("7")}
    async with http.post(f"{url}/verify", json=body) as answer:
        return (await answer.json())["reward"]


class Measurement(NamedTuple):
    """The values of each round."""

    rates: dict[str, list[float]]  # requests per second, by side
    memory_mb: list[float]  # of this process, after the round


async def measure(url: str, rounds: int, episodes: int) -> Measurement:
    """Run all rounds, and print a line for each."""
    result = Measurement({"kit": [], "aiohttp": []}, [])
    raw = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    async with Gym({"slow": url}, concurrency=episodes) as gym, raw as http:
        sides = {
            "kit": lambda: verify_through_kit(gym),
            "aiohttp": lambda: verify_through_aiohttp(http, url),
        }
        for i in range(rounds):
            for side in sorted(sides, reverse=i % 2 == 1):  # the other side first in every second
                begin = time.perf_counter()
                rewards = await asyncio.gather(*(sides[side]() for _ in range(episodes)))
                result.rates[side].append(2 * episodes / (time.perf_counter() - begin))
                assert rewards == [1.0] * episodes
            gc.collect()
            result.memory_mb.append(psutil.Process().memory_info().rss / 1e6)
            rates = [result.rates[side][-1] for side in ("kit", "aiohttp")]
            print(
                f"{i + 1:5d}{rates[0]:10.0f}{rates[1]:10.0f}{result.memory_mb[-1]:10.1f}",
                flush=True,
            )
    return result


def find_free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_verifier() -> Iterator[str]:
    """Start the verifier in a separate process, and yield its URL once it listens."""
    port = find_free_port()
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if server.poll() is not None:
                    sys.exit(f"the verifier exited with status {server.returncode}")
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def serve(port: int) -> None:
    """Serve the verifier until the process is terminated."""
    uvicorn.run(
        app,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=2048, help="of each round and side")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    load = os.getloadavg()[0]
    with running_verifier() as url:
        print("round   kit r/s   raw r/s    RSS MB")
        measurement = asyncio.run(measure(url, args.rounds, args.episodes))
    kit = statistics.median(measurement.rates["kit"])
    raw = statistics.median(measurement.rates["aiohttp"])
    memory_mb = measurement.memory_mb
    third = memory_mb[min(2, len(memory_mb) - 1)]
    result: dict[str, Any] = {
        "benchmark": "gym_client",
        "date": time.strftime("%Y-%m-%d"),
        "kit_requests_per_s": round(kit),
        "aiohttp_requests_per_s": round(raw),
        "ratio": round(kit / raw, 2),
        "memory_growth": round(memory_mb[-1] / third - 1, 3),
        "load_before": round(load, 2),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("aiohttp", "httpx", "fastapi", "uvicorn")},
    }
    print(json.dumps(result))
    sys.exit(result["ratio"] < MIN_RATIO or result["memory_growth"] > MAX_MEMORY_GROWTH)


if __name__ == "__main__":
    main()
