"""The NeMo Gym servers that run here: each server of the example rows is started, seeded and
called for a reward.

    python benchmarks/environments.py DIR [--only mcqa,blackjack] >table.md

DIR holds one NAME.jsonl for each resources server NAME, as NeMo Gym publishes them. Each server is
started alone from the installed nemo-gym package, with the settings of SETTINGS, and gets the first
row and a fixed answer (ANSWERS): whether that is right does not matter here, only whether the
server can say so. One that lacks a module gets a separate environment (gym_environments.py). The
judges that it asks by name are a stub on this machine that says what a judge should (JUDGE); each
such server is asked twice more, of a judge that talks nonsense and of one that refuses the key: a
reward then would be a bug in Quintet, and is reported as one. `NEEDS` says what a server still
lacks, as read in its source: some pay 0 for that instead of failing.

The table, on stdout, is docs/environments.md's. `rows` counts those that env.render_row accepts;
`kind` is who owns the turns (gym_client.py); `tools` are those that the rows offer, of which some
have a route (or a catch-all) on the server, while the others are only compared; `Gym's agent` is
what the server's own YAML names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # before this folder, which has a gym_client too
import env
from gym_client import Gym, GymError, find_routed_tools, function_call, message, response
from kit.extras.judges import judge_proxy, judge_settings
from kit.gym import network, process_specs
from kit.gym import servers as gym_servers

VERIFY_DEADLINE_S = 10.0
ANSWER = "The answer is \\boxed{A}"
MOVE = "<action>Left</action>"  # for /step: two of the games answer 400 to a text without a move
ANSWERS = {  # that reach the judge
    "text_to_sql": "```sql\nSELECT 1\n```",
    "proof_judge": "## Solution\nClear.\n## Self Evaluation\n\\boxed{1}",
    "proof_verification": "It holds. \\boxed{1}",
}
CALLS = {
    "finance_sec_search": function_call("call_1", "submit_final_result", '{"final_result": "7"}')
}
JUDGE = {  # what a judge says that finds it right
    "aalcr": "CORRECT",
    "abstention": "A",
    "arena_judge": "[[A>B]]",
    "browsecomp_advanced_harness": "correct: yes",
    "finance_sec_search": "[[2]]",
    "frontierscience_judge": "Judgement: YES",
    "gdpval": '{"overall_score": 1.0, "criteria_scores": []}',
    "imo_proofbench_judge": "Judgement: Yes",
    "inverse_if": '{"result": "PASS", "explanation": "It does."}',
    "jailbreak_detection": "[[SAFE]]",
    "multichallenge": "[[YES]]",
    "physics_judge": "[Correct]",
    "proof_judge": "\\boxed{1}",
    "proof_verification": "\\boxed{1}",
    "tavily_search": "correct: yes",
    "text_to_sql": "[[A=B]]",
    "verifif": '{"verdict": "YES", "reasoning": "It does."} [[YES]]',
}
NONSENSE = "Lorem ipsum dolor sit amet."
SEARCH = {
    "tavily_api_key": "none",
    "exclude_domains_file_path": "NOTICES",
}  # NOTICES: a file that excludes nothing
ASKED = {
    "judge_base_url": "",
    "judge_api_key": "none",
    "judge_model": "stub",
}  # where judge_server_name is set
SETTINGS = {
    "browsecomp_advanced_harness": SEARCH,
    "finance_sec_search": {"tavily_api_key": None},
    "google_search": {"google_api_key": "none", "google_cx": "none"},
    "tavily_search": SEARCH,
    "verifif": {"judge_server_name": "judge_model", **ASKED},
}
NEEDS = {
    "needs a judge": "bbq conversational_tool_use_simulation longmemeval toolsandbox",
    "its tools need a network": "browsecomp_advanced_harness google_search tavily_search",
    "needs a network": "finance_agent_v2 finance_sec_search spider2_lite",
    "needs a sandbox": "cvdp deepswe legal_agent_bench math_formal_lean scicode",
    "needs packages from git": "code_fim ether0 longmt_eval ns_tools openenv",
    "needs 60 packages with torch (6 GB), for rows of images": "vlm_eval_kit",
    "needs a second environment, which it builds with uv": "bigcodebench",
    "needs Python 3.12, or setuptools below 81": "grl_sokoban",
    "rows of audio": "asr_with_pc",
    "needs 27 GB of test data": "competitive_coding_challenges",
    "the base class of the reset/step servers": "gymnasium",
}
WHY = {name: why for why, names in NEEDS.items() for name in names.split()}
FINE = {"asr_with_pc", "google_search"}  # verify for all that
TOO_LARGE = {"vlm_eval_kit"}


def read(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def rendered(rows: list[dict[str, Any]], name: str) -> int:
    """How many of the rows the kit can put to a model."""
    count = 0
    for number, row in enumerate(rows, 1):
        try:
            env.render_row(row, f"{name}.jsonl:{number}")
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
    """The parts that the server lacks, if that is known, and its own words."""
    return f"{WHY[name]} ({short(said)})" if name in WHY else short(said)


class Stub:
    """An OpenAI-compatible address: a judge that says `text`, or answers `status`. `asked`: how
    often it was.
    """

    def __init__(self) -> None:
        self.text, self.status, self.asked = "", 200, 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                stub.asked += 1
                message = {"role": "assistant", "content": stub.text}
                head = {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "stub",
                }
                body = {
                    **head,
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                }
                data = json.dumps(
                    body if stub.status == 200 else {"error": {"message": "no"}}
                ).encode()
                self.send_response(stub.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((network.HOST, 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://{network.HOST}:{self.server.server_port}/v1"


async def reward_of(gym: Gym, name: str, kind: str, row: dict[str, Any]) -> float:
    """The reward of the server for the fixed answer. Raises GymError."""
    said = message(ANSWERS.get(name, ANSWER))
    async with gym.session(name, row) as session:
        if kind == "step":
            return (await session.step(response([message(MOVE)]))).reward
        return (
            await session.verify(response([CALLS[name], said] if name in CALLS else [said]))
        ).reward


async def ask(
    name: str, url: str, rows: list[dict[str, Any]], judge: Stub
) -> tuple[str, frozenset[str], str]:
    """(kind, routes, the verdict on a server that answers), through the kit's own client."""
    kind, routes = "", frozenset[str]()
    judge.text, judge.status, judge.asked = JUDGE.get(name, ""), 200, 0
    try:
        async with Gym({name: url}, timeout_s=VERIFY_DEADLINE_S, attempts=1) as gym:
            kind, routes = await gym.kind(name), await gym.routes(name)
            await reward_of(gym, name, kind, rows[0])  # the first call may import and compile
            begin = time.perf_counter()
            reward = await reward_of(gym, name, kind, rows[0])
            paid = f"reward in {1000 * (time.perf_counter() - begin):.0f} ms"
            for row in rows if name in JUDGE else ():  # to one for which it is asked
                await reward_of(gym, name, kind, row)
                if judge.asked:
                    return kind, routes, f"{paid}; {await failing(gym, name, kind, row, judge)}"
    except GymError as error:
        return kind, routes, because(name, str(error).removeprefix(url))
    if name in JUDGE:
        return kind, routes, f"{paid}; its judge was never asked"
    lacks = name in WHY and name not in FINE
    return kind, routes, because(name, f"without it, reward {reward:g}") if lacks else paid


async def failing(gym: Gym, name: str, kind: str, row: dict[str, Any], judge: Stub) -> str:
    """The result of a judge that replies with nonsense, and of one that refuses the key."""
    for text, status in (NONSENSE, 200), ("", 401):
        judge.text, judge.status = text, status
        try:
            reward = await reward_of(gym, name, kind, row)
            return f"A FAULT: it pays {reward:g} where its judge says {text or status!r}"
        except GymError as error:
            if error.reason not in ("masked", "timeout"):  # some ask for minutes by themselves
                return f"{because(name, str(error))} where its judge says {text or status!r}"
    return "none where its judge fails"


def agents_of(name: str, package: Path) -> str:
    """Gym's agents for this server, by the YAML that ships with it."""
    blocks = [
        block
        for path in sorted((package / "resources_servers" / name / "configs").glob("*.yaml"))
        for block in (yaml.safe_load(path.read_text()) or {}).values()
        if isinstance(block, dict)
    ]
    return ", ".join(
        sorted({agent for block in blocks for agent in block.get("responses_api_agents") or {}})
    )


def tools_of(rows: list[dict[str, Any]], routes: frozenset[str]) -> str:
    """`routed of offered` over all rows, `offered` of a server that is not there, or nothing."""
    offered = {
        t.get("name") for row in rows for t in row["responses_create_params"].get("tools") or []
    } - {None}
    return (
        ""
        if not offered
        else f"{len(find_routed_tools(offered, routes))} of {len(offered)}"
        if routes
        else str(len(offered))
    )


def examine(
    name: str, rows: list[dict[str, Any]], python: str, logs: Path, judge: Stub
) -> tuple[str, str, str]:
    """(kind, tools, result) of one server, in a separate environment if it lacks a module."""
    (logs / "notices.json").write_text('{"notices": []}')
    settings = {
        k: str(logs / "notices.json") if v == "NOTICES" else v
        for k, v in SETTINGS.get(name, {}).items()
    }
    start: dict[str, Any] = {"python": python, "config": settings}
    kind, tools, verdict = attempt(name, rows, start, logs, judge)
    if "no module" in verdict.lower() and name not in TOO_LARGE:
        kind, tools, verdict = attempt(name, rows, start | {"install": True}, logs, judge)
        return (
            kind,
            tools,
            f"{verdict}; separate environment" if verdict.startswith("reward") else verdict,
        )
    return kind, tools, verdict


def attempt(
    name: str, rows: list[dict[str, Any]], start: dict[str, Any], logs: Path, judge: Stub
) -> tuple[str, str, str]:
    names = process_specs.find_judges(name, start).values()
    asked = {model: {"base_url": judge.url, "model": "stub"} for model in names}
    try:
        with (
            judge_proxy.JudgeProxy(judge_settings.build_judges(asked, VERIFY_DEADLINE_S)) as proxy,
            gym_servers.running_servers(
                {name: {"start": start}}, logs, judge_specs=proxy.process_specs()
            ) as urls,
        ):
            kind, routes, verdict = asyncio.run(ask(name, urls[name], rows, judge))
            if verdict.startswith("reward"):
                verdict += f", by {', '.join(sorted(asked))}" * bool(
                    asked
                ) + f"; {WHY.get(name)}" * (name in WHY)
            return kind, tools_of(rows, routes), verdict
    except network.GymStartError as error:
        print(f"    {error}", file=sys.stderr)
        if "has no resources server" in str(error):
            also = f"; {WHY[name]}" if name in WHY else ""
            return "", tools_of(rows, frozenset()), f"not in nemo-gym 0.4.0{also}"
        said = re.split(r"See its log \S+: | \| ", str(error))[-1]  # the last line of its log
        return "", tools_of(rows, frozenset()), because(name, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="one NAME.jsonl for each server")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument(
        "--python", default=".venv-gym/bin/python", help="interpreter that has nemo-gym"
    )
    args = parser.parse_args()
    network.START_TIMEOUT_S = 40.0
    names = (
        args.only.split(",")
        if args.only
        else sorted(path.stem for path in args.folder.glob("*.jsonl"))
    )
    where = "import pathlib, nemo_gym; print(pathlib.Path(nemo_gym.__file__).parent.parent)"
    package = Path(
        subprocess.run(
            [args.python, "-c", where], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    print(
        "| server | rows | kind | tools | Gym's agent | verdict |\n| --- | ---: | --- | ---: | "
        "--- | --- |",
        flush=True,
    )
    verdicts, judge = [], Stub()
    with tempfile.TemporaryDirectory() as logs:
        for number, name in enumerate(names, 1):
            print(f"{number}/{len(names)} {name}", file=sys.stderr, flush=True)
            rows = read(args.folder / f"{name}.jsonl")
            kind, tools, verdict = examine(name, rows, args.python, Path(logs), judge)
            verdicts.append(verdict)
            cells = [
                name,
                f"{rendered(rows, name)} of {len(rows)}",
                kind,
                tools,
                agents_of(name, package),
                verdict,
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    paid = sum(verdict.startswith("reward") for verdict in verdicts)
    missing = sum(verdict.startswith("not in") for verdict in verdicts)
    own = sum("separate environment" in verdict for verdict in verdicts)
    by = sum(", by " in verdict for verdict in verdicts)
    print(
        f"\n{paid} of the {len(names) - missing} servers that nemo-gym 0.4.0 has verify, {by} of "
        f"them by a judge and"
    )
    print(f"{own} in a separate environment;  {missing} are not in it.")


if __name__ == "__main__":
    main()
