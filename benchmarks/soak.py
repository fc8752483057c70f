"""Train for many steps with faults, and check that no process leaks memory, files or sockets.

    python benchmarks/soak.py [--steps 300] [--faults 0.1]

The run trains the tests' tiny model with a Gym server. A proxy in front of the server spoils one
call in ten, chosen at random. It breaks the connection, answers 500 or 503, answers late, or sends
half a JSON object, a page of HTML or a reward of NaN.

The command prints medians of steps 50 to 75 and of the last 25 steps. The exit status is 1 if a
process grew by more than LIMITS, or if a step is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pandas as pd
import psutil
from aiohttp import web
from measure import ROLES, machine, read_metrics, role, run

from kit.verify.network import find_free_port
from kit.verify.servers import running_servers
from tests.helpers import models, recipes

FAULTS = ("reset", "500", "503", "half", "html", "nan", "late")
# how much a process may grow between the two parts of the table; noise is much smaller
LIMITS = {"MB": 20.0, "files": 5, "sockets": 5}


class Proxy:
    """Serves `target` on a free port, with faults in the fraction `share` of the calls."""

    def __init__(self, target: str, share: float):
        self.target = target
        self.share = share
        self.rng = random.Random(0)
        self.spoiled: collections.Counter[str] = collections.Counter()  # "": without a fault
        self.port = find_free_port()
        threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True).start()

    async def serve(self) -> None:
        self.http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        await asyncio.Event().wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        is_spoiled = request.method == "POST" and self.rng.random() < self.share
        fault = self.rng.choice(FAULTS) if is_spoiled else ""
        self.spoiled[fault] += 1
        if fault == "reset":
            if request.transport:
                request.transport.abort()
            return web.Response()  # the client does not get it
        if fault in ("500", "503"):
            return web.json_response({"detail": "spoiled"}, status=int(fault))
        if fault == "late":
            await asyncio.sleep(0.3)
        kept = ("cookie", "content-type")
        headers = {name: value for name, value in request.headers.items() if name.lower() in kept}
        async with self.http.request(
            request.method, self.target + request.path, data=await request.read(), headers=headers
        ) as answer:
            text = await answer.read()
        if fault == "half":
            text = text[: len(text) // 2] if len(text) > 2 else b"{"
        if fault == "html":
            text = b"<html>spoiled</html>"
        if fault == "nan" and request.path == "/verify":
            text = json.dumps({**json.loads(text), "reward": float("nan")}).encode()
        reply = web.Response(body=text, status=answer.status, content_type="application/json")
        for cookie in answer.headers.getall("Set-Cookie", []):
            reply.headers.add("Set-Cookie", cookie)
        return reply


class Watch:
    """Measures the processes of the run and the Gym servers. measure.run calls it."""

    def __init__(self, metrics: Path):
        self.metrics = metrics
        self.samples: list[dict[str, Any]] = []

    def __call__(self, _: list[psutil.Process]) -> None:
        rows = read_metrics(self.metrics) if self.metrics.is_file() else []
        step = max((row["step"] for row in rows if "rollout/failed_frac" in row), default=0)
        for process in psutil.Process().children(recursive=True):
            try:
                name = role(process)
                if name not in ROLES.values():
                    continue
                links = [os.readlink(link.path) for link in os.scandir(f"/proc/{process.pid}/fd")]
                sockets = sum(link.startswith("socket:") for link in links)
                mb = process.memory_info().rss / 2**20
                self.add(step, name, mb, len(links) - sockets, sockets)
            except (psutil.Error, OSError):
                continue  # the process has ended
        shared = list(Path("/dev/shm").iterdir())
        sizes = [path.stat().st_size for path in shared if path.exists()]
        self.add(step, "/dev/shm", sum(sizes) / 2**20, len(shared), 0)

    def add(self, step: int, process: str, mb: float, files: int, sockets: int) -> None:
        """Add a sample of a process, or of the shared memory of the machine."""
        sample = {"step": step, "process": process, "MB": mb, "files": files, "sockets": sockets}
        self.samples.append(sample)


def make_command(folder: Path, port: int, steps: int) -> list[str]:
    """Return the command of the run, which calls the proxy on `port`."""
    changes = [
        "trainer.experiment_name=soak",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=25",
        "trainer.test_freq=50",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.print_samples_every=0",
        "gym.servers.reasoning_gym.start=null",
        f"gym.servers.reasoning_gym.url=http://127.0.0.1:{port}",
        "gym.concurrency=32",
        # vLLM's KV cache takes memory when it is first used. All of this size is used by step 50.
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864",
        # With a high rate the policy learns the task. Then most groups have zero variance.
        "actor_rollout_ref.actor.optim.lr=0.0001",
    ]
    arguments = recipes.tiny(folder, *changes)
    arguments = [argument for argument in arguments if "start.python" not in argument]
    return recipes.command(folder, *arguments)


def print_steps(rows: list[dict[str, Any]], spoiled: collections.Counter[str]) -> None:
    """Print the numbers of calls, steps and failed episodes."""
    steps = pd.DataFrame(rows)
    failures = steps.filter(like="rollout/failed/").sum().astype(int).to_dict()
    print(f"spoiled calls: {spoiled.total() - spoiled['']} of {spoiled.total()}")
    print(f"steps: {len(steps)}, median {steps['timing_s/step'].median():.2f} s")
    print(f"failed episodes: {steps['rollout/failed_frac'].mean():.2%}, {failures}")


def report(watch: Watch, steps: int) -> list[str]:
    """Print the medians of both parts of the run, and return the processes that grew."""
    samples = pd.DataFrame(watch.samples)
    parts = [samples[samples.step.between(50, 74)], samples[samples.step > steps - 25]]
    early, late = (part.groupby("process")[[*LIMITS]].median() for part in parts)
    print(early.join(late, lsuffix=", early", rsuffix=", late").round().to_string())
    growth = (late - early).stack()
    too_large = [value > LIMITS[kind] for (_, kind), value in growth.items()]
    return [f"{name}: {kind} grew by {n:.0f}" for (name, kind), n in growth[too_large].items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="at least 100 (default: 300)")
    parser.add_argument("--faults", type=float, default=0.1, help="share of calls (default: 0.1)")
    args = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    models.make_model(folder / "tied", tied=True)
    recipes.write_task(folder)
    for name in os.environ.keys() - recipes.CLEAN_ENV.keys():
        del os.environ[name]
    servers = {"reasoning_gym": {"start": {"python": str(recipes.GYM_PYTHON)}}}
    watch = Watch(folder / "runs" / "soak" / "metrics.jsonl")
    with running_servers(servers, folder) as urls:
        proxy = Proxy(urls["reasoning_gym"], args.faults)
        command = make_command(folder, proxy.port, args.steps)
        run(command, folder / "out.log", watch, 3.0, folder)
    rows = [row for row in read_metrics(watch.metrics) if "rollout/failed_frac" in row]
    print_steps(rows, proxy.spoiled)
    problems = report(watch, args.steps)
    if len(rows) != args.steps:
        problems.append(f"{args.steps - len(rows)} steps have no metrics")
    sys.exit("; ".join(problems) or 0)


if __name__ == "__main__":
    main()
