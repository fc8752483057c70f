"""Train for many steps with faults, and check that no process leaks memory, files or sockets.

    python benchmarks/soak.py [--steps 300] [--faults 0.1] [--out docs/soak.md]

The run trains the tests' tiny model with a Gym server. A proxy in front of the server spoils one
call in ten, chosen at random. It breaks the connection, answers 500 or 503, answers late, or sends
half a JSON object, a page of HTML or a reward of NaN.

The table compares steps 50 to 75 with the last 25 steps. The exit status is 1 if a process grew by
more than LIMITS, or if a step is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import datetime
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure import ROLES  # noqa: E402

from kit.gym.network import find_free_port  # noqa: E402
from kit.gym.servers import running_servers  # noqa: E402
from tests.helpers import models, recipes  # noqa: E402

FAULTS = ("reset", "500", "503", "half", "html", "nan", "late")
# how much a process may grow between the two parts of the table; noise is much smaller
LIMITS = {"MB": 20.0, "files": 5, "sockets": 5}
Usage = dict[str, dict[str, float]]  # {role of a process: {MB, files, sockets}}


def proxy(target: str, port: int, share: float, spoiled: collections.Counter) -> None:
    """In a thread, serve `target` on `port` with faults in the fraction `share` of the calls.

    spoiled: the number of calls by fault; the key of calls without a fault is "".
    """
    rng = random.Random(0)

    async def handle(request: web.Request) -> web.StreamResponse:
        fault = rng.choice(FAULTS) if request.method == "POST" and rng.random() < share else ""
        spoiled[fault] += 1
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
        body = await request.read()
        async with request.app["http"].request(
            request.method, target + request.path, data=body, headers=headers
        ) as answer:
            text = await answer.read()
            status = answer.status
            cookies = answer.headers.getall("Set-Cookie", [])
        if fault == "half":
            text = text[: len(text) // 2] if len(text) > 2 else b"{"
        if fault == "html":
            text = b"<html>spoiled</html>"
        if fault == "nan" and request.path == "/verify":
            text = json.dumps({**json.loads(text), "reward": float("nan")}).encode()
        reply = web.Response(body=text, status=status, content_type="application/json")
        for cookie in cookies:
            reply.headers.add("Set-Cookie", cookie)
        return reply

    async def serve() -> None:
        app = web.Application(client_max_size=2**26)
        app["http"] = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()


def measure_usage(driver: psutil.Process, servers: list[psutil.Process]) -> Usage:
    """Measure the driver, its child processes and the Gym servers.

    The role `/dev/shm` is the shared memory of the machine.
    """
    usage: Usage = {}
    for process in [driver, *driver.children(recursive=True), *servers]:
        try:
            title = " ".join(process.cmdline())
            role = next(
                (name for pattern, name in ROLES.items() if re.search(pattern, title)), None
            )
            if role:
                links = [os.readlink(link.path) for link in os.scandir(f"/proc/{process.pid}/fd")]
                sockets = sum(link.startswith("socket:") for link in links)
                mb = process.memory_info().rss / 2**20
                usage[role] = {"MB": mb, "files": len(links) - sockets, "sockets": sockets}
        except (psutil.Error, OSError):
            continue
    shared = list(Path("/dev/shm").iterdir())
    shared_bytes = sum(path.stat().st_size for path in shared if path.exists())
    usage["/dev/shm"] = {"MB": shared_bytes / 2**20, "files": len(shared)}
    return usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="at least 100 (default: 300)")
    parser.add_argument(
        "--faults", type=float, default=0.1, help="fraction of the calls to spoil (default: 0.1)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "soak.md", help="result page")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    spoiled: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    models.make_model(folder / "tied", tied=True)
    recipes.write_task(folder)
    with running_servers(
        {"reasoning_gym": {"start": {"python": str(recipes.GYM_PYTHON)}}}, folder
    ) as urls:
        port = find_free_port()
        proxy(urls["reasoning_gym"], port, args.faults, spoiled)
        with (folder / "out.log").open("w") as out:
            run = subprocess.Popen(
                make_command(folder, port, args.steps),
                cwd=folder,
                env=recipes.CLEAN_ENV,
                stdout=out,
                stderr=out,
            )
        samples = watch(run, folder / "runs" / "soak" / "metrics.jsonl")
    if run.returncode:
        log = (folder / "out.log").read_text()
        sys.exit(f"The run ended with status {run.returncode}: {log[-3000:]}")
    report(args, folder, samples, spoiled, time.monotonic() - begin)


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


def watch(run: subprocess.Popen, metrics: Path) -> list[tuple[int, Usage]]:
    """Measure the processes after every fifth step until the run ends -> [(step, usage)]."""
    driver = psutil.Process(run.pid)
    servers = []
    for process in psutil.Process().children(recursive=True):
        if process.pid != run.pid and "server_process.py" in " ".join(process.cmdline()):
            servers.append(process)
    samples = []
    last = 0
    while run.poll() is None:
        time.sleep(0.5)
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        rows = [json.loads(line) for line in lines]
        step = max((row["step"] for row in rows if "rollout/failed_frac" in row), default=0)
        if step > last and step % 5 == 0:
            last = step
            samples.append((step, measure_usage(driver, servers)))
    return samples


def count_failures(steps: list[dict[str, float]]) -> str:
    """Return the number of failed episodes by status, as text."""
    counts: collections.Counter[str] = collections.Counter()
    for metrics in steps:
        for name, value in metrics.items():
            if name.startswith("rollout/failed/"):
                counts[name.removeprefix("rollout/failed/")] += int(value)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none"


def report(
    args: argparse.Namespace,
    folder: Path,
    samples: list[tuple[int, Usage]],
    spoiled: collections.Counter,
    seconds: float,
) -> None:
    """Write the result page. Exit with status 1 if a process grew or a step is missing."""
    lines = (folder / "runs" / "soak" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "rollout/failed_frac" in row]
    failed = statistics.mean(row["rollout/failed_frac"] for row in steps)
    early = [usage for step, usage in samples if 50 <= step < 75]
    late = [usage for step, usage in samples if step > args.steps - 25]
    calls = sum(spoiled.values())
    median_s = statistics.median(row["timing_s/step"] for row in steps)
    lines = [
        "# A long run with faults",
        "",
        f"`python benchmarks/soak.py --steps {args.steps} --faults {args.faults:g}`, "
        f"{datetime.date.today()}, on a CPU: {os.cpu_count()} cores, "
        f"load {os.getloadavg()[1]:.1f}, {seconds / 60:.0f} minutes.",
        "",
        "The run trains the tests' tiny model with a Gym server. A proxy in front of the server "
        "spoils calls at random:",
        "it breaks the connection, answers 500 or 503, sends an invalid body, or answers late.",
        "",
        f"- Spoiled calls: {calls - spoiled['']} of {calls}.",
        f"- Completed steps: {len(steps)} of {args.steps}. Median time of a step: "
        f"{median_s:.2f} s.",
        f"- Failed episodes: {failed:.2%} ({count_failures(steps)}).",
        "",
        "The table has the medians of two parts of the run. `/dev/shm` is the machine's shared "
        "memory.",
        "",
        "| process | MB, steps 50 to 75 | MB, last 25 | files | sockets |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    problems = []
    for role in late[-1]:
        before = compute_medians(early, role)
        after = compute_medians(late, role)
        cells = [
            f"{before[kind]:.0f} → {after[kind]:.0f}" if kind in before else ""
            for kind in ("files", "sockets")
        ]
        lines.append(f"| {role} | {before['MB']:.0f} | {after['MB']:.0f} | {' | '.join(cells)} |")
        for kind in before:
            if after[kind] - before[kind] > LIMITS[kind]:
                change = f"from {before[kind]:.0f} to {after[kind]:.0f}"
                problems.append(f"{role}: {kind} grew {change}, by more than {LIMITS[kind]:g}")
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if len(steps) != args.steps:
        problems.append(f"{args.steps - len(steps)} steps have no metrics")
    if problems:
        sys.exit("; ".join(problems))


def compute_medians(samples: list[Usage], role: str) -> dict[str, float]:
    """Return the median usage of a process over some samples."""
    usages = [usage[role] for usage in samples if role in usage]
    return {kind: statistics.median(usage[kind] for usage in usages) for kind in usages[-1]}


if __name__ == "__main__":
    main()
