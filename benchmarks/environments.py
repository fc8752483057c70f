"""What of NeMo Gym runs here: every server that the example rows name, started, seeded and asked for a reward.

    python benchmarks/environments.py DIR [--only mcqa,blackjack] >table.md

DIR holds one NAME.jsonl for each resources server NAME, as NeMo Gym publishes them. Each server is started
alone from the installed nemo-gym package, with no model, no judge, no sandbox and no settings of ours, and
gets the first row and a fixed answer: whether that is right does not matter here, only whether the server can
say so. `NEEDS` says what a server lacks then, as read in its source: several pay 0 for that instead of failing.

The table, on stdout, is docs/environments.md's. `rows` counts those that env.render accepts; `kind` is who owns
the turns (gym_client.py); `tools` are those that the rows offer, of which some have a route (or a catch-all) on the
server, while the others are only compared; `Gym's agent` is what the server's own YAML names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before this folder, which has a gym_client too
import env
from gym_client import Gym, GymError, message_response, routed
from kit import gym_servers

VERIFY_DEADLINE_S = 10.0
ANSWER = "The answer is \\boxed{A}"
MOVE = "<action>Left</action>"  # for /step: two of the games answer 400 to a text without a move
NEEDS = {
    "needs a judge": """aalcr abstention arena_judge bbq conversational_tool_use_simulation frontierscience_judge
        gdpval imo_proofbench_judge inverse_if jailbreak_detection longmemeval multichallenge physics_judge
        proof_judge proof_verification text_to_sql toolsandbox verifif""",
    "needs a network": """browsecomp_advanced_harness finance_agent_v2 finance_sec_search google_search
        spider2_lite tavily_search""",
    "needs a sandbox": "cvdp deepswe legal_agent_bench math_formal_lean scicode",
    "needs packages from git": "code_fim ether0 longmt_eval ns_tools openenv vlm_eval_kit",
    "needs an environment of its own, which it builds with uv": "bigcodebench",
    "needs jiwer and whisper-normalizer, for rows of audio": "asr_with_pc",
    "needs 27 GB of test data": "competitive_coding_challenges",
    "the base class of the reset/step servers": "gymnasium",
}
WHY = {name: why for why, names in NEEDS.items() for name in names.split()}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def rendered(rows: list[dict[str, Any]], name: str) -> int:
    """How many of the rows the kit can put to a model."""
    count = 0
    for number, row in enumerate(rows, 1):
        try:
            env.render(row, f"{name}.jsonl:{number}")
            count += 1
        except env.DataError as error:
            print(f"    {error}", file=sys.stderr)
    return count


def short(text: str, length: int = 80) -> str:
    """One table cell of a message: no line breaks, bars, log prefixes and paths of packages."""
    text = re.sub(r'^\(\w+\) |[^ ]+/site-packages/|[\\"]', "", text.replace("\\n", " "))
    text = re.sub(r"\s+", " ", text).replace("|", "/").strip()
    return text if len(text) <= length else text[: length - 3] + "..."


def because(name: str, said: str) -> str:
    """What the server lacks, where that is known, and its own words."""
    return f"{WHY[name]} ({short(said)})" if name in WHY else short(said)


async def ask(name: str, url: str, row: dict[str, Any]) -> tuple[str, frozenset[str], str]:
    """(kind, routes, the verdict on a server that answers), through the kit's own client."""
    kind, routes = "", frozenset[str]()
    try:
        async with Gym({name: url}, timeout_s=VERIFY_DEADLINE_S, attempts=1) as gym:
            kind, routes = await gym.kind(name), await gym.routes(name)
            for _ in range(2):  # the first call may import and compile
                async with gym.session(name, row) as session:
                    begin = time.perf_counter()
                    if kind == "step":
                        reward = (await session.step(message_response(MOVE))).reward
                    else:
                        reward = (await session.verify(message_response(ANSWER))).reward
                    latency = 1000 * (time.perf_counter() - begin)
    except GymError as error:
        return kind, routes, because(name, str(error).removeprefix(url))
    return (
        kind,
        routes,
        because(name, f"without it, reward {reward:g}") if name in WHY else f"reward in {latency:.0f} ms",
    )


def agents_of(name: str, package: Path) -> str:
    """Gym's agents for this server, by the YAML that ships with it."""
    blocks = [
        block
        for path in sorted((package / "resources_servers" / name / "configs").glob("*.yaml"))
        for block in (yaml.safe_load(path.read_text()) or {}).values()
        if isinstance(block, dict)
    ]
    return ", ".join(sorted({agent for block in blocks for agent in block.get("responses_api_agents") or {}}))


def tools_of(rows: list[dict[str, Any]], routes: frozenset[str]) -> str:
    """`routed of offered` over all rows, `offered` of a server that is not there, or nothing."""
    offered = {t.get("name") for row in rows for t in row["responses_create_params"].get("tools") or []} - {None}
    return "" if not offered else f"{len(routed(offered, routes))} of {len(offered)}" if routes else str(len(offered))


def examine(name: str, rows: list[dict[str, Any]], python: str, logs: Path) -> tuple[str, str, str]:
    """(kind, tools, verdict) of one server."""
    try:
        with gym_servers.running_servers({name: {"start": {"python": python}}}, logs) as urls:
            kind, routes, verdict = asyncio.run(ask(name, urls[name], rows[0]))
            return kind, tools_of(rows, routes), verdict
    except gym_servers.GymStartError as error:
        print(f"    {error}", file=sys.stderr)
        if "has no resources server" in str(error):
            also = f"; {WHY[name]}" if name in WHY else ""
            return "", tools_of(rows, frozenset()), f"not in nemo-gym 0.4.0{also}"
        said = re.split(r"; log \S+: | \| ", str(error))[-1]  # the last line of its log
        return "", tools_of(rows, frozenset()), because(name, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="one NAME.jsonl for each server")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--python", default=".venv-gym/bin/python", help="interpreter that has nemo-gym")
    args = parser.parse_args()
    gym_servers.START_DEADLINE_S = 40.0
    names = args.only.split(",") if args.only else sorted(path.stem for path in args.folder.glob("*.jsonl"))
    where = "import pathlib, nemo_gym; print(pathlib.Path(nemo_gym.__file__).parent.parent)"
    package = Path(
        subprocess.run([args.python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    )
    print(
        "| server | rows | kind | tools | Gym's agent | verdict |\n| --- | ---: | --- | ---: | --- | --- |", flush=True
    )
    verdicts = []
    with tempfile.TemporaryDirectory() as logs:
        for number, name in enumerate(names, 1):
            print(f"{number}/{len(names)} {name}", file=sys.stderr, flush=True)
            rows = read(args.folder / f"{name}.jsonl")
            kind, tools, verdict = examine(name, rows, args.python, Path(logs))
            verdicts.append(verdict)
            cells = [name, f"{rendered(rows, name)} of {len(rows)}", kind, tools, agents_of(name, package), verdict]
            print(f"| {' | '.join(cells)} |", flush=True)
    paid = sum(verdict.startswith("reward") for verdict in verdicts)
    missing = sum(verdict.startswith("not in") for verdict in verdicts)
    print(f"\n{paid} of {len(names)} servers verify in the environment of `make gym` alone; {missing} are not in it.")


if __name__ == "__main__":
    main()
