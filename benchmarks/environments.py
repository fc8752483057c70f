"""Start each resources server of the installed nemo-gym, and request a reward from it.

    python benchmarks/environments.py [--results DIR] [--only mcqa,blackjack]

The script prints the table of docs/environments.md at the end. Each server is examined in a
separate process, with a time limit, one after the other. Each result is a file in DIR, by default
runs/environments. So the same command resumes.

A server is started alone, with the settings in SETTINGS. It verifies a fixed response (ANSWERS) to
the first example row of the package. Whether the response is right does not matter: the server must
return a reward. If the server lacks a Python module, it gets a separate environment
(extras/gym_environments.py).

The judges that a server needs are a stub on this machine, with a reply that the server can parse
(JUDGE). Each server with a judge verifies once more, while the judge refuses the key. A reward is
then a fault, and is reported as one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import env
from extras.judges import judge_proxy, judge_settings, list_models
from gym_client import Gym, GymError, find_routed_tools, function_call, message, response
from kit.data.row_files import read_raw_rows
from kit.data.verl_rows import parse_row
from kit.gym import network, process_specs
from kit.gym import servers as gym_servers

LIMIT_S = 420.0  # for one server, including the installation of its environment
START_TIMEOUT_S = 90.0
VERIFY_TIMEOUT_S = 20.0
ANSWER = "The answer is \\boxed{A}"
MOVE = "<action>Left</action>"  # for /step, since two games return 400 for text without a move
ANSWERS = {  # texts for which the server calls its judge; otherwise ANSWER
    "text_to_sql": "```sql\nSELECT 1\n```",
    "proof_judge": "## Solution\nClear.\n## Self Evaluation\n\\boxed{1}",
    "proof_verification": "It holds. \\boxed{1}",
    "widesearch": "```markdown\n| a | b |\n| --- | --- |\n| 1 | 2 |\n```",
}
CALLS = {  # calls before the text
    "finance_sec_search": function_call("call_1", "submit_final_result", '{"final_result": "7"}')
}
JUDGE: dict[str, str | Sequence[str]] = {  # the judge's reply, or its replies in turn
    "aalcr": "CORRECT",
    "abstention": "A",
    "aegis_v4_safety": "User Safety: safe\nResponse Safety: safe",
    "agentif": '["math"]\nYES',
    "arena": "[[A>B]]",
    "arena_judge": "[[A>B]]",
    "bbq": (
        '{"selected_answer": null, "answer_class": "incorrect_answer", "rationale": "None."}',
        '{"quality_class": "low", "uses_protected_rationale": false, '
        '"uses_unsupported_proxy": false, "rationale": "None."}',
    ),
    "browsecomp_advanced_harness": "correct: yes",
    "deepsearchqa": '{"Answer Correctness": {"Correctness Details": {"A": true}}}',
    "equivalence_llm_judge": "[[A=B]]",
    "false_statement_judge": "<points>2</points>",
    "finance_agent_v2": '{"score": 1, "reason": "It does."}',
    "finance_sec_search": "[[2]]",
    "frontierscience_judge": "Judgement: YES",
    "gdp_pdf": '{"score": "1", "rationale": "It does."}',
    "gdpval": '{"overall_score": 1.0, "criteria_scores": []}',
    "imo_proofbench_judge": "Judgement: Yes",
    "inverse_if": '{"result": "PASS", "explanation": "It does."}',
    "jailbreak_detection": "[[SAFE]] [[HAS_EXPLANATION]] [[PROPER_HARD_REFUSAL]]",
    "labbench2_vlm": "[[A=B]]",
    "longmemeval": "yes",
    "math_with_autograder": "\\boxed{Correct}",
    "multichallenge": "[[YES]]",
    "omniscience": "A",
    "over_refusal_detection": "[[COMPLIED]]",
    "physics_judge": "[Correct]",
    "proof_judge": "\\boxed{1}",
    "proof_verification": "\\boxed{1}",
    "simpleqa": "A",
    "tavily_search": "correct: yes",
    "terminus_judge": "[[A=B]]",
    "text_to_sql": "[[A=B]]",
    "ugphysics_judge": "TRUE",
    "verifif": '{"verdict": "YES", "reasoning": "It does."} [[YES]]',
    "widesearch": '```json\n{"idx_0": 1, "a": "b"}\n```',
    "xstest": "Harmful request: no\nResponse refusal: no\nHarmful response: no",
}
NOTICES = "NOTICES"  # stands for the path of a file that excludes no domain
SEARCH = {"tavily_api_key": "none", "exclude_domains_file_path": NOTICES}
ADDRESS = {"judge_base_url": "", "judge_api_key": "none", "judge_model": "stub"}
SETTINGS: dict[str, dict[str, Any]] = {
    "browsecomp_advanced_harness": SEARCH,
    "finance_sec_search": {"tavily_api_key": None},
    "google_search": {"google_api_key": "none", "google_cx": "none"},
    "tavily_search": SEARCH,
    "verifif": {"judge_server_name": "judge_model", **ADDRESS},
}
# {what is missing: servers that return a reward without it}, from the servers' source code. Some of
# them return 0 instead of an error.
LACKS = {
    "its tools need a network": "browsecomp_advanced_harness google_search tavily_search",
    "rows of audio": "asr_with_pc",
}
NOTES: dict[str, str] = {}  # server -> what is missing
for note, names in LACKS.items():
    NOTES |= dict.fromkeys(names.split(), note)
# {server: the thing without which it returns no reward}, from its source code. For the servers that
# are not in this table, see CAUSES.
NEEDS = {
    "asr_with_pc": "rows without audio",
    "bigcodebench": "a second environment, which it builds with uv",
    "cvdp": "a sandbox with a simulator",
    "interactive_browser": "a browser for Playwright",
    "job_bench": "a sandbox",
    "math_formal_lean": "a sandbox with Lean",
    "nemo_user_sim": "its environment server, because its rows have no prompt",
    "osworld": "virtual machines",
    "rolemrc": "the data of NLTK",
    "scicode": "its test data",
    "speed_bench": "the metrics of a vLLM server",
    "workspace_bench": "a sandbox",
}
# {pattern of the server's message: what it needs}
CAUSES = {
    r"[Ss]andbox|docker|singularity|apptainer|No such file or directory: ?'?(docker|git)": (
        "a sandbox (`start.global_config`)"
    ),
    r"download and build|[Gg]it operation|git', 'clone|hub\.com/|`uv pip": "packages from git",
    r"Name or service not known|URLError|SEC ticker|Failed to resolve|Connect|getaddrinfo": (
        "a network"
    ),
    r"api_key|API_KEY|API key": "a key of a service",
    r"rollout_index": "all episodes of a group at the same time",
    r"HTTP 422": "its own agent",
    r"27 GB|does not exist|FileNotFoundError|No such file|not found": "its data",
    r"marks its reward as invalid": "a judge whose replies it can parse",
    r"does not set": "settings",
    r"within \d+ s|did not start|no answer": "more time",
}
TOO_LARGE = {  # needs of servers whose environments are not made here: several gigabytes each
    "longmt_eval": "torch and packages from git",
    "vlm_eval_kit": "60 packages with torch, for rows of images",
    "wmt_translation": "torch and COMET models",
}
NOT_SERVERS = {
    "gymnasium": "the base class of the reset/step servers",
    "sec_local_index": "a library of finance_agent_v2",
}
# Recipe and mean reward of the first and the last step with SmolLM2-135M-Instruct, from
# docs/environments.md. For `math_cpu`, a link.
TRAINED = {
    "blackjack": "`blackjack`: -0.50 to -0.31",
    "example_session_state_mgmt": "`counter`: 0.75 to 0.96",
    "mcqa": "`mcqa`: 0",
    "reasoning_gym": "`math_cpu`: [results](results.md)",
    "structured_outputs": "`structured_outputs`: 0",
    "workplace_assistant": "`workplace_assistant`: 0",
}
UNCALLED = "its judge was not called"


@dataclass
class Result:
    """The result for one server. If `missing` is empty, it returned a reward."""

    name: str
    rows: int = 0  # example rows that the kit can use
    all_rows: int = 0
    kind: str = ""
    tools: str = ""  # "routed of offered"
    agents: str = ""
    judges: str = ""  # names of the models that it calls
    is_installed: bool = False  # whether it has a separate environment
    reward: float | None = None
    milliseconds: float = 0.0  # of the second verification
    failing_judge: str = ""  # a fault of the kit, or why no judge could be tested
    missing: str = ""  # what the server lacks, often its own message


class MissingError(Exception):
    """The server returns no reward. The text is what it lacks."""


# --- rows ----------------------------------------------------------------------------------------


def read_examples(folder: Path, result: Result) -> list[dict[str, Any]]:
    """Return the usable example rows of a server, and count them in `result`."""
    rows = []
    for path in sorted((folder / "data").glob("*example*.jsonl")):
        if "rollouts" in path.name:
            continue
        for row_id, raw in read_raw_rows(path):
            result.all_rows += 1
            try:
                row = parse_row(raw, row_id)
                env.render_row(row, row_id)
            except env.DataError as error:
                print(f"    {error}", file=sys.stderr)
                continue
            rows.append(row)
    result.rows = len(rows)
    return rows


def count_tools(rows: Iterable[dict[str, Any]], routes: Any) -> str:
    """Return "routed of offered" over all rows, or "" if they offer no tools."""
    offered = set()
    for row in rows:
        tools = row["responses_create_params"].get("tools") or []
        offered |= {tool["name"] for tool in tools if tool.get("name") is not None}
    return f"{len(find_routed_tools(offered, routes))} of {len(offered)}" if offered else ""


def list_agents(folder: Path) -> str:
    """Return the agents in the YAML files of a server."""
    agents: set[str] = set()
    for path in (folder / "configs").glob("*.yaml"):
        for block in (yaml.safe_load(path.read_text()) or {}).values():
            if isinstance(block, dict):
                agents |= {*(block.get("responses_api_agents") or {})}
    return ", ".join(sorted(agents))


# --- a judge -------------------------------------------------------------------------------------


class Stub:
    """An OpenAI-compatible server: a judge that replies with `texts` in turn.

    If `status` is not 200, it replies with an error of that status.
    """

    def __init__(self) -> None:
        self.texts: Sequence[str] = [""]
        self.status = 200
        self.calls = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                data = json.dumps(stub.next_reply()).encode()
                self.send_response(stub.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((network.HOST, 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://{network.HOST}:{self.server.server_port}/v1"

    def next_reply(self) -> dict[str, Any]:
        """Return the body of the next reply."""
        text = self.texts[self.calls % len(self.texts)]
        self.calls += 1
        if self.status != 200:
            return {"error": {"message": "no"}}
        reply = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": reply}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "stub"}
        return {**head, "choices": [choice]}

    def set_replies(self, replies: str | Sequence[str], status: int = 200) -> None:
        """Set the replies from now on."""
        self.texts = [replies] if isinstance(replies, str) else replies
        self.status = status
        self.calls = 0


# --- one server ----------------------------------------------------------------------------------


def examine(name: str, python: str) -> Result:
    """Examine one server, in a separate environment if it lacks a module."""
    result = Result(name, missing=NOT_SERVERS.get(name, ""))
    package = process_specs.find_package(python)
    if package is None:
        raise SystemExit(f"{python} has no nemo-gym. To install it, run `make gym`.")
    folder = package / "resources_servers" / name
    result.agents = list_agents(folder)
    if result.missing:
        return result
    rows = read_examples(folder, result)
    with tempfile.TemporaryDirectory() as logs:
        start: dict[str, Any] = {"python": python, "config": make_settings(name, Path(logs))}
        try:
            if not rows:
                raise MissingError("an example row that Quintet can use")
            try:
                attempt(result, rows, start, Path(logs))
            except MissingError as error:
                if "no module" not in str(error).lower():
                    raise
                if name in TOO_LARGE:
                    raise MissingError(TOO_LARGE[name]) from None
                result.is_installed = True
                attempt(result, rows, start | {"install": True}, Path(logs))
        except MissingError as error:
            result.missing = shorten(str(error))
    return result


def make_settings(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a server. Replaces NOTICES by the path of a file in `folder`."""
    path = folder / "notices.json"
    path.write_text('{"notices": []}')
    settings = SETTINGS.get(name, {})
    return {key: str(path) if value == NOTICES else value for key, value in settings.items()}


def attempt(result: Result, rows: list[dict[str, Any]], start: dict[str, Any], logs: Path) -> None:
    """Start a server with a stub of its judges, and request rewards. Raises MissingError."""
    name = result.name
    try:
        models = list_models(name, start).values()
        result.judges = ", ".join(sorted(set(models)))
        judge = Stub()
        settings = {model: {"base_url": judge.url, "model": "stub"} for model in models}
        judges = judge_settings.build_judges(settings, VERIFY_TIMEOUT_S / 2)
        with (
            judge_proxy.JudgeProxy(judges) as proxy,
            gym_servers.running_servers(
                {name: {"start": start}},
                logs,
                other_specs=proxy.process_specs(logs, start["python"]),
            ) as urls,
        ):
            asyncio.run(request_rewards(result, urls[name], rows, judge))
    except network.GymStartError as error:
        cause = re.split(r"See its log \S+: | \| |its files are removed: ", str(error))[-1]
        raise MissingError(cause) from None
    except SystemExit as error:  # kit/gym/server_process.py exits if a setting is missing
        raise MissingError(str(error)) from None


async def request_rewards(
    result: Result, url: str, rows: list[dict[str, Any]], judge: Stub
) -> None:
    """Request rewards from a server with the kit's client. Raises MissingError."""
    name = result.name
    judge.set_replies(JUDGE.get(name, "yes"))
    async with Gym({name: url}, timeout_s=VERIFY_TIMEOUT_S, attempts=1) as gym:
        try:
            result.kind = await gym.kind(name)
            result.tools = count_tools(rows, await gym.routes(name))
            await get_reward(gym, result, rows[0])  # the first call may import and compile
            begin = time.perf_counter()
            result.reward = await get_reward(gym, result, rows[0])
            result.milliseconds = 1000 * (time.perf_counter() - begin)
            if not result.judges:
                return
            for row in rows:  # up to the first one for which the server calls the judge
                await get_reward(gym, result, row)
                if judge.calls:
                    result.failing_judge = await try_failing_judge(gym, result, row, judge)
                    return
        except GymError as error:
            raise MissingError(str(error).removeprefix(url)) from None
        result.failing_judge = UNCALLED


async def get_reward(gym: Gym, result: Result, row: dict[str, Any]) -> float:
    """Return the reward for the fixed response. Raises GymError."""
    name = result.name
    answer = message(ANSWERS.get(name, ANSWER))
    async with gym.session(name, row) as session:
        if result.kind == "step":
            return (await session.step(response([message(MOVE)]))).reward
        items = [CALLS[name], answer] if name in CALLS else [answer]
        return (await session.verify(response(items))).reward


async def try_failing_judge(gym: Gym, result: Result, row: dict[str, Any], judge: Stub) -> str:
    """Return a fault if the server returns a reward although its judge fails, or ""."""
    judge.set_replies("", 401)
    with contextlib.suppress(GymError):
        reward = await get_reward(gym, result, row)
        return f"A FAULT: reward {reward:g} although its judge replies 401"
    return ""


def shorten(text: str, length: int = 90) -> str:
    """Shorten a message to a table cell.

    Removes quotes, line breaks, vertical bars, log prefixes and paths of packages.
    """
    text = re.sub(r'^\(\w+\) |[^ ]+/site-packages/|[\\"]', "", text.replace("\\n", " "))
    text = re.sub(r"\s+", " ", text).replace("|", "/").strip()
    return text if len(text) <= length else text[: length - 3] + "..."


# --- all servers ---------------------------------------------------------------------------------


def examine_apart(name: str, python: str, path: Path) -> Result:
    """Run `examine` in a separate process, within LIMIT_S, and write its result to `path`."""
    command = [sys.executable, __file__, "--python", python, "--server", name]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, start_new_session=True)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            result = Result(name, missing=f"an answer within {LIMIT_S:.0f} s")
        else:
            out.seek(0)
            lines = out.read().decode().splitlines()
            failed = Result(name, missing=f"its examination ended with {process.returncode}")
            result = Result(**json.loads(lines[-1])) if process.returncode == 0 else failed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its servers die with it
            process.wait()
    path.write_text(json.dumps(asdict(result)))
    return result


def describe(result: Result) -> str:
    """Return the last cell of a server's line in the table."""
    if result.missing:
        return explain(result)
    parts = [f"reward in {result.milliseconds:.0f} ms"]
    if result.judges:
        parts.append(f"judge: {result.judges}")
        parts.append(result.failing_judge)
    if result.is_installed:
        parts.append("separate environment")
    parts.append(NOTES.get(result.name, ""))
    return "; ".join(part for part in parts if part)


def explain(result: Result) -> str:
    """Return what a server needs, with the server's message."""
    if result.name in NOT_SERVERS:
        return f"no server: {result.missing}"
    if result.name in TOO_LARGE:
        return f"needs {TOO_LARGE[result.name]}"
    if result.name in NEEDS:
        return f"needs {NEEDS[result.name]} ({result.missing})"
    shown = re.sub(r"(?<![\w/:])/(?:[\w.-]+/)+\S*", "...", result.missing)  # paths of this machine
    for pattern, cause in CAUSES.items():
        if re.search(pattern, result.missing):
            return f"needs {cause} ({shown})"
    return shown


def print_table(results: Sequence[Result]) -> None:
    """Print the table of docs/environments.md, and the number of servers with a reward."""
    print("| server | rows | kind | tools | Gym's agent | trained | result |")
    print("| --- | ---: | --- | ---: | --- | --- | --- |")
    for result in results:
        rows = f"{result.rows} of {result.all_rows}" if result.all_rows else ""
        trained = TRAINED.get(result.name, "")
        cells = [result.name, rows, result.kind, result.tools, result.agents, trained]
        print(f"| {' | '.join([*cells, describe(result)])} |")
    verifying = [result for result in results if not result.missing]
    judged = [result for result in verifying if result.judges]
    uncalled = [result for result in judged if result.failing_judge == UNCALLED]
    installed = [result for result in verifying if result.is_installed]
    print(
        f"\n{len(verifying)} of {len(results)} folders gave a reward for one fixed response to one "
        f"example row: {len(judged)} with a judge ({len(uncalled)} of them: {UNCALLED}), "
        f"{len(installed)} in a separate environment."
    )


def examine_all(names: Sequence[str], args: argparse.Namespace) -> list[Result]:
    """Examine the servers of --only, or else those that have no result yet. Return all results."""
    again = set(args.only.split(",")) if args.only else set()
    args.results.mkdir(parents=True, exist_ok=True)
    results = []
    for number, name in enumerate(names, 1):
        path = args.results / f"{name}.json"
        if path.exists() and name not in again:
            results.append(Result(**json.loads(path.read_text())))
        elif not again or name in again:
            begin = time.monotonic()
            results.append(examine_apart(name, args.python, path))
            line = f"{number}/{len(names)} {name}: {describe(results[-1])}"
            print(f"{line} ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Examine the servers and print the table. With --server, examine one and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=Path("runs/environments"), help="folder for the results"
    )
    parser.add_argument("--only", help="examine these servers again: names separated by commas")
    parser.add_argument("--server", help="examine one server in this process, and print its result")
    parser.add_argument(
        "--python", default=process_specs.PYTHON, help="interpreter that has nemo-gym"
    )
    args = parser.parse_args()
    network.START_TIMEOUT_S = START_TIMEOUT_S
    folder = Path(sys.executable).parent  # of uv, which the server bigcodebench runs
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    if args.server:
        print(json.dumps(asdict(examine(args.server, args.python))))
        return
    package = process_specs.find_package(args.python)
    if package is None:
        sys.exit(f"{args.python} has no nemo-gym. To install it, run `make gym`.")
    folders = (package / "resources_servers").glob("[!_]*/")
    results = examine_all(sorted(folder.name for folder in folders), args)
    print_table(results)


if __name__ == "__main__":
    main()
