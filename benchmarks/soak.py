"""A long run with faults, and the resources of each process: memory, files, sockets, shared memory.

    python benchmarks/soak.py [--steps 300] [--faults 0.1] [--out docs/soak.md]

The run trains the tests' tiny model with a Gym server. A proxy in front of the server spoils every
tenth call: it breaks the connection, answers 500 or 503, sends half a JSON object, a page of HTML
or a reward of NaN, or answers late. The table compares steps 50 to 75 with the last 25. The exit
status is 1 if anything grew by more than LIMITS.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402  (the tiny task)
import tiny_models  # noqa: E402
from measure import ROLES  # noqa: E402

from kit.gym.network import find_free_port  # noqa: E402
from kit.gym.servers import running_servers  # noqa: E402

FAULTS = ("reset", "500", "503", "half", "html", "nan", "late")
LIMITS = {
    "MB": 20.0,
    "files": 5,
    "sockets": 5,
}  # from step 50 to the end, per process; noise stays well below


def proxy(target: str, port: int, share: float, spoiled: collections.Counter) -> None:
    """Serve the answers of `target` on `port` in a thread, with faults in `share` of the calls."""
    rng = random.Random(0)

    async def handle(request: web.Request) -> web.StreamResponse:
        fault = rng.choice(FAULTS) if request.method == "POST" and rng.random() < share else ""
        spoiled[fault] += 1
        if fault == "reset":
            request.transport.abort()
            return web.Response()  # which nobody gets
        if fault in ("500", "503"):
            return web.json_response({"detail": "spoiled"}, status=int(fault))
        if fault == "late":
            await asyncio.sleep(0.3)
        headers = {
            k: v for k, v in request.headers.items() if k.lower() in ("cookie", "content-type")
        }
        body = await request.read()
        async with request.app["http"].request(
            request.method, target + request.path, data=body, headers=headers
        ) as answer:
            text, status, cookies = (
                await answer.read(),
                answer.status,
                answer.headers.getall("Set-Cookie", []),
            )
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


def look(root: psutil.Process, extra: list[psutil.Process]) -> dict[str, dict[str, float]]:
    """{role: {MB, files, sockets}} of a run's processes, and the shared memory of the machine as
    role `/dev/shm`.
    """
    found: dict[str, dict[str, float]] = {}
    for process in [root, *root.children(recursive=True), *extra]:
        try:
            title = " ".join(process.cmdline())
            role = next(
                (name for pattern, name in ROLES.items() if re.search(pattern, title)), None
            )
            if role:
                links = [os.readlink(link.path) for link in os.scandir(f"/proc/{process.pid}/fd")]
                sockets = sum(link.startswith("socket:") for link in links)
                mb = process.memory_info().rss / 2**20
                found[role] = {"MB": mb, "files": len(links) - sockets, "sockets": sockets}
        except (psutil.Error, OSError):
            continue
    shared = list(Path("/dev/shm").iterdir())
    found["/dev/shm"] = {
        "MB": sum(p.stat().st_size for p in shared if p.exists()) / 2**20,
        "files": len(shared),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--faults", type=float, default=0.1, help="share of the calls that are spoiled"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "soak.md")
    args = parser.parse_args()
    folder, spoiled, begin = (
        Path(tempfile.mkdtemp(prefix="soak-")),
        collections.Counter(),
        time.monotonic(),
    )
    tiny_models.make_model(folder / "tied", tied=True)
    conftest.write_task(folder)
    looks: list[tuple[int, dict[str, dict[str, float]]]] = []
    with running_servers(
        {"reasoning_gym": {"start": {"python": str(conftest.GYM_PYTHON)}}}, folder
    ) as urls:
        port = find_free_port()
        proxy(urls["reasoning_gym"], port, args.faults, spoiled)
        changes = [
            "trainer.experiment_name=soak",
            f"trainer.total_training_steps={args.steps}",
            "trainer.save_freq=25",
        ]
        changes += [
            "gym.servers.reasoning_gym.start=null",
            f"gym.servers.reasoning_gym.url=http://127.0.0.1:{port}",
        ]
        changes += ["trainer.test_freq=50", "trainer.max_actor_ckpt_to_keep=2"]
        changes += ["gym.concurrency=32", "trainer.print_samples_every=0"]
        # vLLM's cache becomes resident as it is first used: one that is all used by step 50
        changes += ["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=67108864"]
        # of a policy that has learned, all answers are alike: nothing to train on
        changes += ["actor_rollout_ref.actor.optim.lr=0.0001"]
        arguments = [a for a in conftest.tiny(folder, *changes) if "start.python" not in a]
        with (folder / "out.log").open("w") as out:
            run = subprocess.Popen(
                conftest.command(folder, *arguments), cwd=folder, stdout=out, stderr=out
            )
        watched, server = psutil.Process(run.pid), psutil.Process().children(recursive=True)
        server = [
            p for p in server if p.pid != run.pid and "server_process.py" in " ".join(p.cmdline())
        ]
        metrics, last = folder / "runs" / "soak" / "metrics.jsonl", 0
        while run.poll() is None:
            time.sleep(0.5)
            lines = metrics.read_text().splitlines() if metrics.is_file() else []
            step = max(
                (m["step"] for m in map(json.loads, lines) if "rollout/failed_frac" in m), default=0
            )
            if step > last and step % 5 == 0:
                last = step
                looks.append((step, look(watched, server)))
    if run.returncode:
        sys.exit(f"The run ended with {run.returncode}: {(folder / 'out.log').read_text()[-3000:]}")
    report(args, folder, looks, spoiled, time.monotonic() - begin)


def report(args, folder: Path, looks: list, spoiled: collections.Counter, seconds: float) -> None:
    """Write the table; exit with 1 if anything grew."""
    rows = [
        json.loads(line)
        for line in (folder / "runs" / "soak" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [m for m in rows if "rollout/failed_frac" in m]
    failed = statistics.mean(m["rollout/failed_frac"] for m in steps)
    reasons = collections.Counter()
    for m in steps:
        reasons.update(
            {
                k.removeprefix("rollout/failed/"): v
                for k, v in m.items()
                if k.startswith("rollout/failed/")
            }
        )
    early = [found for step, found in looks if 50 <= step < 75]
    late = [found for step, found in looks if step > args.steps - 25]
    calls, bad = sum(spoiled.values()), sum(n for fault, n in spoiled.items() if fault)
    causes = ", ".join(f"{n:.0f} {status}" for status, n in reasons.most_common())
    median_s = statistics.median(m["timing_s/step"] for m in steps)
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
        f"- Spoiled calls: {bad} of {calls}.",
        f"- Completed steps: {len(steps)} of {args.steps}. Median time of a step: "
        f"{median_s:.2f} s.",
        f"- Failed episodes: {failed:.2%} ({causes or 'none'}).",
        "",
        "The table has the medians of two parts of the run. `/dev/shm` is the machine's shared "
        "memory.",
        "",
        "| process | MB, steps 50 to 75 | MB, last 25 | files | sockets |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    grown = []
    for role, last in late[-1].items():
        before, after = (
            {kind: statistics.median(f[role][kind] for f in found if role in f) for kind in last}
            for found in (early, late)
        )
        cells = [
            f"{before[k]:.0f} → {after[k]:.0f}" if k in before else "" for k in ("files", "sockets")
        ]
        lines.append(f"| {role} | {before['MB']:.0f} | {after['MB']:.0f} | {' | '.join(cells)} |")
        grown += [
            f"{role}: {k} {before[k]:.0f} -> {after[k]:.0f}"
            for k in before
            if after[k] - before[k] > LIMITS[k]
        ]
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    if grown or len(steps) != args.steps:
        sys.exit(f"Grew by more than the limit after step 50: {'; '.join(grown)}")


if __name__ == "__main__":
    main()
