"""Requests per second of Quintet's Gym client and of raw aiohttp, against a verifier that takes 20
ms.

    python benchmarks/gym_client.py [--rounds 10] [--episodes 2048]

The verifier is a FastAPI server in a separate process. Each round sends all episodes together (two
posts each: /seed_session and /verify, about 2 kB either way), once through `Gym` and once through
one aiohttp.ClientSession without a connection limit, in turns. Held against: 0.8 of raw aiohttp's
requests/s, and memory after the last round within 5% of that after the third. Both sides share the
cores with the server: compare the ratio only.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import aiohttp
import psutil
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # before this folder, which has a gym_client too
from gym_client import Gym, message_response

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 3 + 4? " * 100}]},
    "answer": "7",
}
app = FastAPI()


class Body(BaseModel):
    model_config = ConfigDict(extra="allow")


@app.post("/seed_session")
async def seed_session(body: Body, response: Response) -> dict:
    response.set_cookie("session", os.urandom(16).hex())
    return {}


@app.post("/verify")
async def verify(body: Body) -> Body:
    await asyncio.sleep(0.02)
    return Body(**body.model_extra, reward=1.0)  # Gym's servers send the row back too


async def through_kit(gym: Gym) -> float:
    async with gym.session("slow", ROW) as session:
        return (await session.verify(message_response("7"))).reward


async def through_aiohttp(http: aiohttp.ClientSession, url: str) -> float:
    async with http.post(f"{url}/seed_session", json=ROW) as answer:
        await answer.json()
    async with http.post(
        f"{url}/verify", json={**ROW, "response": message_response("7")}
    ) as answer:
        return (await answer.json())["reward"]


async def measure(
    url: str, rounds: int, episodes: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Requests/s of each side in each round, and this process's memory in MB after each round."""
    rates: dict[str, list[float]] = {"kit": [], "aiohttp": []}
    memory = []
    raw = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    async with Gym({"slow": url}, concurrency=episodes) as gym, raw as http:
        sides = {"kit": lambda: through_kit(gym), "aiohttp": lambda: through_aiohttp(http, url)}
        for i in range(rounds):
            for side in sorted(
                sides, reverse=i % 2 == 1
            ):  # the other one first in every second round
                start = time.perf_counter()
                rewards = await asyncio.gather(*(sides[side]() for _ in range(episodes)))
                rates[side].append(2 * episodes / (time.perf_counter() - start))
                assert rewards == [1.0] * episodes
            gc.collect()
            memory.append(psutil.Process().memory_info().rss / 1e6)
            print(
                f"{i + 1:5d}{rates['kit'][-1]:10.0f}{rates['aiohttp'][-1]:10.0f}{memory[-1]:10.1f}",
                flush=True,
            )
    return rates, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:  # nemo-gym's own servers keep idle connections for 30 s as well
        return uvicorn.run(
            app, port=args.serve, log_level="warning", access_log=False, timeout_keep_alive=30
        )

    load = os.getloadavg()[0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
        print("round   kit r/s   raw r/s    RSS MB")
        rates, memory = asyncio.run(measure(f"http://127.0.0.1:{port}", args.rounds, args.episodes))
    finally:
        server.terminate()
        server.wait()
    kit, raw = (statistics.median(rates[side]) for side in ("kit", "aiohttp"))
    result = {
        "benchmark": "gym_client",
        "date": time.strftime("%Y-%m-%d"),
        "kit_requests_per_s": round(kit),
        "aiohttp_requests_per_s": round(raw),
        "ratio": round(kit / raw, 2),  # at least 0.8
        "memory_growth": round(memory[-1] / memory[min(2, len(memory) - 1)] - 1, 3),  # at most 0.05
        "load_before": round(load, 2),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("aiohttp", "httpx", "fastapi", "uvicorn")},
    }
    print(json.dumps(result))
    sys.exit(result["ratio"] < 0.8 or result["memory_growth"] > 0.05)


if __name__ == "__main__":
    main()
