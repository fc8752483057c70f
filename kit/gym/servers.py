"""Start NeMo Gym's servers from the nemo-gym package, wait until they answer, keep them up, and stop them.

Lift this file alone into another project; it needs only httpx and psutil, and another interpreter that has
nemo-gym (`make gym` makes one in .venv-gym):

    servers = {"math": {"start": {"server": "math_with_judge"}}, "far": {"url": "http://10.0.0.7:8001"}}
    with running_servers(servers, Path("logs")) as urls:
        ...  # urls["math"] is "http://127.0.0.1:23456"; far was not started, only waited for

Each server is one process with one log. A name without `agent` is one resources server (/seed_session, tools, /verify).
For a name with `agent` Gym's agent answers (POST /run) and owns the turns; behind it stand the resources server and
`policy_model`, Gym's model server, which all agents of a run share and which asks `policy`, an OpenAI-compatible
endpoint, for its answers and their token ids. Settings come from the server's own YAML in the package; a recipe names
only what it changes. A server gets its own settings and the addresses of the others, through its standard input. An
environment variable that is named like a secret is hidden from it, unless `env` of its start names that variable.
Verifiers that ask models by name (judges) need kit/extras/judges/judge_parsing.py, at the same
place beside it; kit/extras/judges/judge_proxy.py names those processes.

One resources server, until Ctrl-C: python -m kit.gym.servers NAME [--path FOLDER] [--port 8001] [--python PYTHON]
An environment of its own for a server that needs more: python -m kit.gym.servers install NAME (gym_environments.py)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import difflib
import errno
import importlib.util
import json
import logging
import os
import re
import runpy
import secrets
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

START_DEADLINE_S = 90.0  # a Gym server imports for 3 to 30 s before it answers
END_S = 2.0  # for a process that was killed to give its port back
RESTART_S = 5.0  # between two restarts of one server, at least
START_KEYS = {
    "python",
    "install",
    "server",
    "path",
    "host",
    "port",
    "config",
    "agent",
    "agent_config",
    "env",
}
PYTHON = ".venv-gym/bin/python"  # that has nemo-gym; never this one, which it would break
ENVIRONMENTS = (
    ".venv-gym-servers"  # beside that, with what one server needs (kit/extras/gym_environments.py)
)
MODELS = "responses_api_models"
JUDGE_PARSING = Path(__file__).parents[1] / "extras" / "judges" / "judge_parsing.py"
HOST = "127.0.0.1"
POLICY_MODEL = "policy_model"  # the name that Gym's own YAML uses for the model that is trained
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")  # what a log file may be called by
FROM_STDIN = "--from-stdin"  # argument: standard input holds the arguments of `serve`, as JSON
# An environment variable with such a name holds a secret.
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
# Servers that read more of another block than its address: impl -> the other's impl.
READS_SETTINGS = {"browsecomp_agent": "vllm_model", "rdkit_chemistry": "ns_tools"}
MOST_BYTES = 2**24  # of the answer to a check
ASK_S = 5.0  # seconds for the answer to a check
HEAD_S = 10.0  # the same for a head server
logger = logging.getLogger(__name__)
Block = Mapping[str, Any]  # one process, as `plan` says


class GymStartError(RuntimeError):
    """A Gym server that is not there, or did not start; the message says what to do."""


class FetchError(RuntimeError):
    """A request that has no usable answer; the message is the reason."""


def fetch(
    url: str,
    method: str = "GET",
    deadline_s: float = ASK_S,
    use_proxy: bool = False,
    **request: Any,
) -> httpx.Response:
    """Send one request and read the whole answer, within a deadline and a size limit.

    use_proxy: whether the proxy of the environment may be asked. request: headers and json, as for
    httpx. Redirects are not followed: another host must not get the request. Raises FetchError.
    """
    with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop that runs
        answer = _fetch(url, method, deadline_s, use_proxy, request)
        return pool.submit(asyncio.run, answer).result()


async def _fetch(
    url: str, method: str, deadline_s: float, use_proxy: bool, request: dict[str, Any]
) -> httpx.Response:
    import httpx  # not at the top: the Gym environment runs this file too, and need not have it

    # uncompressed, so that a short body cannot become a long one
    headers = {**request.pop("headers", {}), "Accept-Encoding": "identity"}
    body = bytearray()
    try:
        async with (
            asyncio.timeout(deadline_s),
            httpx.AsyncClient(timeout=None, trust_env=use_proxy, follow_redirects=False) as http,
            http.stream(method, url, headers=headers, **request) as answer,
        ):
            async for part in answer.aiter_raw():
                body += part
                if len(body) > MOST_BYTES:
                    raise FetchError(f"the answer is longer than {MOST_BYTES:,} bytes")
    except TimeoutError:
        raise FetchError(f"no complete answer within {deadline_s:.1f} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(f"{type(error).__name__}: {error}") from None
    if answer.has_redirect_location:
        target = answer.headers["location"]
        raise FetchError(
            f"HTTP {answer.status_code} redirects to {target}; set that address instead"
        )
    return httpx.Response(answer.status_code, content=bytes(body))


def discover(head: str) -> tuple[dict[str, str], dict[str, str]]:
    """Ask a Gym head server who is there: ({resources server: url}, {agent: its resources server}).

    head: "http://host:11000". Raises GymStartError. Needs pyyaml: the head answers YAML inside a JSON string.
    """
    import yaml

    try:
        answer = fetch(f"{head}/global_config_dict_yaml", deadline_s=HEAD_S)
        if answer.status_code != 200:
            raise FetchError(f"HTTP {answer.status_code} from /global_config_dict_yaml")
        known = yaml.safe_load(answer.json())
        blocks = {name: block for name, block in known.items() if isinstance(block, dict)}
    except (FetchError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise GymStartError(
            f"gym.head_server: {head} is no head server of Gym's ({error!r}); ng_run starts one"
        ) from None
    servers, agents = {}, {}
    for name, block in blocks.items():
        for server in (block.get("resources_servers") or {}).values():
            host = server.get("host") or HOST
            if host in (
                "0.0.0.0",
                HOST,
                "localhost",
            ):  # as the head sees itself; we may sit elsewhere
                host = urlsplit(head).hostname
            if server.get("port"):  # else it is configured, but not started
                servers[name] = f"http://{host}:{server['port']}"
        for agent in (block.get("responses_api_agents") or {}).values():
            if reference := (agent.get("resources_server") or {}).get("name"):
                agents[name] = reference
    return servers, agents


def is_port(port: Any) -> bool:
    """Whether `port`, a number or its digits, is one that a server can have."""
    return bool(re.fullmatch("[0-9]{1,5}", str(port))) and 0 < int(port) < 65536


def port_in_use(host: str, port: int) -> bool:
    """True when something listens on host:port."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((host, port)) == 0


def free_port(host: str = HOST) -> int:
    """A port that was free a moment ago. Raises GymStartError.

    From 20000 to 32767: above Ray's workers and below what Linux gives to outgoing connections, either of
    which could take the port while the server that it is meant for still imports.
    """
    port = 20000 + secrets.randbelow(12768)
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return free_port(host)
            raise GymStartError(
                f"host {host!r} is not one of this machine's ({error}); use 127.0.0.1"
            ) from None
    return port


def check_server(name: str, spec: Mapping[str, Any]) -> None:
    """Whether a server's url answers, or its start can work (spec: see `running_servers`). Raises GymStartError."""
    start, where = spec.get("start") or {}, f"gym.servers.{name}.start"
    for key, part in ("gym.servers", name), (f"{where}.agent", start.get("agent") or "none"):
        if not NAME.fullmatch(str(part)):
            raise GymStartError(
                f"{key}: {part!r} is no name; take letters, digits, _, - and ., but no . at its begin"
            )
    if spec.get("url"):
        return wait_ready(name, str(spec["url"]).rstrip("/"))
    if unknown := set(start) - START_KEYS:
        raise GymStartError(
            f"{where}: unknown key {min(unknown)!r}; it takes {', '.join(sorted(START_KEYS))}"
        )
    if wrong := [
        k for k in ("config", "agent_config") if not isinstance(start.get(k) or {}, Mapping)
    ]:
        raise GymStartError(
            f"{where}.{wrong[0]} is {start[wrong[0]]!r}; it takes keys and values of Gym's YAML"
        )
    check_variables(f"{where}.env", start.get("env") or [])
    if start.get("agent_config") and not start.get("agent"):
        raise GymStartError(f"{where}.agent_config is set, but no agent; add agent: simple_agent")
    if name in (POLICY_MODEL, "head_server", "dry_run"):
        raise GymStartError(
            f"gym.servers.{name}: Gym uses that name itself; choose another, and set start.server"
        )
    host, port, python = start.get("host") or HOST, start.get("port"), start.get("python") or PYTHON
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise GymStartError(
            f"gym.servers.{name}: no interpreter at {python}; `make gym` makes that environment"
        )
    if port and not is_port(port):
        raise GymStartError(
            f"{where}.port is {port!r}; it takes a number up to 65535, or nothing for a free port"
        )
    free_port(host)  # which knows a host that is not here
    folder_of(name, start)
    if port and port_in_use(host, int(port)):
        raise GymStartError(
            f"gym.servers.{name}: port {port} on {host} is in use; set another one, or give its url"
        )


def check_variables(where: str, names: Any) -> None:
    """Check that `names` is a list of environment variables that are set. Raises GymStartError."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise GymStartError(
            f"{where} is {names!r}; set a list of names of environment variables, as [HF_TOKEN]"
        )
    if missing := [name for name in names if str(name) not in os.environ]:
        raise GymStartError(
            f"{where}: the environment variable {missing[0]} is not set; export it, or leave it out"
        )


def folder_of(name: str, start: Mapping[str, Any]) -> str:
    """A server's folder: a name under resources_servers; of `path`, from here or the kit's folder, absolute, so that
    joined to the package's it stays what it is. Raises GymStartError."""
    path, where = start.get("path"), f"gym.servers.{name}.start"
    if not path:
        return str(start.get("server") or name)
    if others := [key for key in ("server", "install") if start.get(key)]:
        todo = f"leave {others[0]} out; what the folder needs goes into the environment of start.python"
        raise GymStartError(
            f"{where} has path, a folder of your own, and {others[0]}, of nemo-gym's servers; {todo}"
        )
    folders = [f for f in (Path(str(path)), Path(__file__).parents[2] / str(path)) if f.is_dir()]
    if not (found := [f for f in folders if (f / "app.py").is_file()]):
        lack = (
            f"{folders[0].absolute()} has no app.py"
            if folders
            else f"no such folder here ({Path.cwd()})"
        )
        raise GymStartError(
            f"{where}.path={path}: {lack}; it takes a folder like templates/verifier, to be copied"
        )
    return str(found[0].resolve())


def verdicts() -> Any:
    """kit/extras/judges/judge_parsing.py, by its path: this also runs in the Gym environment, where there is no kit."""
    name = "kit_verdicts"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, JUDGE_PARSING)
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def asked_models(name: str, start: Mapping[str, Any]) -> dict[str, str]:
    """{key: name} of the models that a server to be started asks, by its YAML; {} where there is no such server."""
    server, python = folder_of(name, start), Path(start.get("python") or PYTHON).absolute()
    for package in python.parents[1].glob("lib/python3*/site-packages"):
        if (package / "resources_servers" / server / "app.py").is_file():
            block = {
                "kind": "resources_servers",
                "impl": server,
                "of": server,
                "changes": start.get("config") or {},
            }
            return dict(
                verdicts().asked_models(settings({**block, "host": HOST, "port": 0}, package))
            )
    return {}


def check_asked(
    name: str, start: Mapping[str, Any], models: Collection[str], trust: Collection[str] = ()
) -> None:
    """Whether gym.judges has all that a server asks, and it is known what its judges must say. Raises GymStartError."""
    known = {*models, POLICY_MODEL} if start.get("agent") else set(models)
    asked, server = asked_models(name, start), folder_of(name, start)
    told = server if start.get("path") else f"nemo-gym's {server}"
    for key, model in asked.items():
        if model not in known:
            way_out = f"set gym.judges.{model}, or another {key} in gym.servers.{name}.start.config"
            raise GymStartError(
                f"gym.servers.{name}: {told} asks the model {model} ({key}); {way_out}"
            )
    if asked and server not in verdicts().VERDICTS and name not in trust:
        why = "pays for a judge's text that holds no verdict as for a wrong answer, and the kit cannot tell them apart"
        raise GymStartError(
            f"gym.servers.{name}: {told} {why}; gym.unchecked_judges=[{name}] takes that as it is"
        )


def interpreter(name: str, start: Mapping[str, Any]) -> str:
    """The interpreter of a server: that of an environment of its own, where it has or wants one, else `python`.

    Raises GymStartError.
    """
    server, python = folder_of(name, start), start.get("python") or PYTHON
    own = Path(python).absolute().parents[2] / ENVIRONMENTS / server / "bin" / "python"
    if start.get("install"):
        from kit.extras import gym_environments  # not at the top: this file can be lifted out alone

        try:
            return str(gym_environments.install(server, python))
        except gym_environments.InstallError as error:
            raise GymStartError(f"gym.servers.{name}.start.install: {error}") from None
    return str(own if own.is_file() and not start.get("python") else Path(python).absolute())


def plan(
    name: str,
    start: Mapping[str, Any],
    policy: Mapping[str, Any] | None,
    models: Collection[str] = (),
    trust: Collection[str] = (),
) -> list[Block]:
    """The processes behind one name, as blocks of Gym's config; the last of them answers for the name.

    A block runs the folder kind/impl of the package, or impl, a path, with `python`; `changes` go over what the YAML of
    the resources server `of` says about it, and `where` is the recipe's key for them. models, trust: as for
    `check_asked`. Raises GymStartError.
    """
    check_server(name, {"start": start})
    check_asked(name, start, models, trust)
    server, host, where = (
        folder_of(name, start),
        start.get("host") or HOST,
        f"gym.servers.{name}.start",
    )
    shared = {
        "python": interpreter(name, start),
        "host": host,
        "of": server,
        "trusted": name in trust,
    }
    shared["shown"] = list(start.get("env") or [])
    blocks = [(name, "resources_servers", server, start.get("config") or {}, f"{where}.config")]
    if agent := start.get("agent"):
        if not policy:
            raise GymStartError(
                f"{where}.agent={agent} asks a policy and was given none; pass one, or leave out agent"
            )
        model = {"return_token_id_information": True, "uses_reasoning_parser": False, **policy}
        owner = {
            "resources_server": {"type": "resources_servers", "name": name},
            "model_server": {"type": MODELS, "name": POLICY_MODEL},
            **(start.get("agent_config") or {}),
        }
        blocks.append((POLICY_MODEL, MODELS, "vllm_model", model, "policy"))
        blocks.append(
            (f"{name}_{agent}", "responses_api_agents", agent, owner, f"{where}.agent_config")
        )
    keys = ("name", "kind", "impl", "changes", "where")
    ports = [*(free_port(host) for _ in blocks[1:]), int(start.get("port") or free_port(host))]
    made = [
        {**dict(zip(keys, b, strict=True)), **shared, "port": p}
        for b, p in zip(blocks, ports, strict=True)
    ]
    return [
        {**b, "shown": []} if b["name"] == POLICY_MODEL else b for b in made
    ]  # which all agents share


def start_server(block: Block, blocks: Iterable[Block], mode: str = "wb") -> Popen[bytes]:
    """Start the process of `block`, which finds the others by their names; does not wait for it. mode: of its log."""
    blocks = list(blocks)
    known = [] if "command" in block else [known_to(block, b) for b in blocks if "impl" in b]
    handover = {
        "name": block["name"],
        "parent": os.getpid(),
        "blocks": known,
        "command": block.get("command"),
    }
    hidden = {name for b in blocks for name in b.get("hidden", ())}
    Path(block["log"]).parent.mkdir(parents=True, exist_ok=True)
    python = block.get("python") or sys.executable
    # -P: the kit's modules stay out of its way
    command = [python, "-P", str(Path(__file__).absolute()), FROM_STDIN]
    # By standard input: other processes of this user can read arguments and environment.
    with os.fdopen(os.memfd_create("handover"), "w+b") as memory, open(block["log"], mode) as out:
        memory.write(json.dumps(handover).encode())
        memory.seek(0)
        env = environment(block, hidden)
        # a session of its own: Ctrl-C is the kit's, which stops servers in order
        return Popen(command, stdin=memory, stdout=out, stderr=out, env=env, start_new_session=True)


def known_to(block: Block, other: Block) -> Block:
    """Return what the server of `block` gets of `other`: its own settings, of others the address."""
    if other["name"] == block["name"] or READS_SETTINGS.get(block["impl"]) == other["impl"]:
        return other
    return {key: other[key] for key in ("name", "kind", "impl", "host", "port")}


def without_secrets(shown: Collection[str]) -> dict[str, str]:
    """Return this process's environment variables, without those named like a secret, except `shown` ones."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in shown or not SECRET.search(name)
    }


def environment(block: Block, hidden: Collection[str]) -> dict[str, str]:
    """Return the environment variables for the process of `block`: some servers run the policy's code.

    Left out are `hidden` ones, secrets that its recipe does not name, and those of this interpreter.
    """
    shown = block.get("shown", ())
    env = {
        name: value
        for name, value in without_secrets(shown).items()
        if name in shown or not (name in hidden or name.startswith(("PYTHON", "VIRTUAL_ENV")))
    }
    # no tracker that phones home
    return env | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", **block.get("env", {})}


def is_listening(process: Popen[bytes], port: int) -> bool:
    """Return whether `process`, or one that it has started, listens on the port."""
    import psutil  # not at the top: the Gym environment runs this file too, and need not have it

    try:
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return False
    for member in family:
        with contextlib.suppress(psutil.Error):
            connections = member.net_connections("tcp")
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
                return True
    return False


def wait_ready(
    name: str,
    url: str,
    process: Popen[bytes] | None = None,
    log: Path | None = None,
    deadline_s: float | None = None,
) -> None:
    """Wait until `url` answers GET /openapi.json. Raises GymStartError with the next thing to do.

    A server that the kit started has `deadline_s`, by default START_DEADLINE_S; one that it did not start must be there
    (5 s).
    """
    deadline = time.monotonic() + ((deadline_s or START_DEADLINE_S) if process else ASK_S)
    port = urlsplit(url).port if process else None
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0 and not (
        process and process.poll() is not None
    ):
        try:
            answer = fetch(f"{url}/openapi.json", deadline_s=min(ASK_S, left))
            if answer.status_code != 200 or not isinstance(answer.json().get("paths"), dict):
                why = f"HTTP {answer.status_code} from /openapi.json"
            elif process and port and not is_listening(process, port):
                why = f"port {port} belongs to another process; stop that, or set start.port"
            else:
                return
        except (FetchError, ValueError, AttributeError) as error:
            if why == "no answer" or left > ASK_S:  # the last try has less time, and says less
                why = str(error)
        time.sleep(0.2)
    if process:
        if process.poll() is not None:
            taken = f"; {why}" if "belongs to another process" in why else ""
            why = f"it exited with status {process.returncode}{taken}"
        tail = log.read_text(errors="replace").strip().splitlines()[-5:] if log else []
        raise GymStartError(
            f"gym server {name} did not start: {why}; log {log}: " + " | ".join(tail)
        )
    command = f"python -m kit.gym.servers {name} --port {url.rpartition(':')[2]}"
    raise GymStartError(
        f"gym.servers.{name}.url: {url} does not answer ({why}); run `{command}`, or set start instead"
    )


def stop_servers(processes: Collection[Popen[bytes]]) -> None:
    """SIGTERM to all servers and whatever they forked, and SIGKILL to what is left 5 s later."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 5.0
    for process in processes:
        with contextlib.suppress(TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # a fork may outlive the server
            process.wait(5.0)


def keep_up(
    blocks: Mapping[str, Block],
    started: dict[str, Popen[bytes]],
    on_restart: Callable[[str], None],
    on_lost: Callable[[str], None],
    ended: Event,
) -> None:
    """Once a second, start again what has died of `started`, until `ended` is set. Runs in a thread.

    If another process takes the port of a server that died, call on_lost once with a message, and
    start that server no more. The servers end with this thread (PR_SET_PDEATHSIG), so the thread must
    outlive whatever fails in it.
    """
    due = dict.fromkeys(started, 0.0)  # earliest time.monotonic() of the next restart, seconds
    unproved: set[str] = set()  # restarted, and not seen yet to listen on their port
    lost: set[str] = set()
    while not ended.wait(1.0):
        for name in started.keys() - lost:
            block, process = blocks[name], started[name]
            status, log = process.poll(), block["log"]
            is_due = name in unproved if status is None else time.monotonic() >= due[name]
            if not is_due:
                continue
            try:
                if status is not None:
                    stop_servers([process])  # what it forked may have its port
                if is_taken(block, process):
                    lost.add(name)
                    told = (
                        f"gym server {name} ended, and another process has its port {block['port']}"
                    )
                    on_lost(f"{told}; stop that process, and start again; log {log}")
                elif status is not None:
                    due[name] = time.monotonic() + RESTART_S
                    unproved.add(name)
                    started[name] = start_server(block, blocks.values(), "ab")
                    logger.warning(
                        "gym server %s ended with status %s, and is started again; log %s",
                        name,
                        status,
                        log,
                    )
                    on_restart(name)
                elif is_listening(process, block["port"]):
                    unproved.remove(name)
            except Exception:
                logger.exception("gym server %s ended with status %s; log %s", name, status, log)


def is_taken(block: Block, process: Popen[bytes]) -> bool:
    """Return whether another process than that of `block` listens on its port, and goes on to.

    A process that `process` had forked may take a moment to end.
    """
    host, port = block["host"], int(block["port"])
    deadline = time.monotonic() + END_S
    while port_in_use(host, port) and not is_listening(process, port):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def model_block(model: Block, starts: Sequence[Mapping[str, Any]], log_dir: Path) -> Block:
    """A process of `models` (see running_servers), with what it lacks of a block."""
    python = str(Path(next((s["python"] for s in starts if s.get("python")), PYTHON)).absolute())
    shared = {"host": HOST, "log": str(log_dir / f"gym_{model['name']}.log")}
    if "command" not in model:
        shared |= {
            "kind": MODELS,
            "python": python,
            "of": "",
            "where": f"gym.judges.{model['name']}.config",
        }
    return {"port": free_port(), **shared, **model}


@contextlib.contextmanager
def running_servers(
    servers: Mapping[str, Mapping[str, Any]],
    log_dir: Path,
    meanwhile: Callable[[], Any] = lambda: None,
    policy: Mapping[str, Any] | None = None,
    on_restart: Callable[[str], None] = lambda _: None,
    models: Iterable[Block] = (),
    trust: Collection[str] = (),
    on_lost: Callable[[str], None] = logger.error,
) -> Iterator[dict[str, str]]:
    """{name: {url: ...} or {start: ...}} -> {name: url}, all answering; those started stop at exit.

    start, each key optional: python (an interpreter that has nemo-gym), install (true: an environment of its own, from
    what the server lists), server (folder under resources_servers; the name), path (in its place: a folder of one's
    own, with app.py), config (changes to its YAML), host (127.0.0.1), port (a free one), agent (folder under
    responses_api_agents: it owns the turns; url and port are then the agent's), agent_config (changes to its YAML),
    env (names of environment variables with secrets that it needs).
    policy: {base_url, api_key, model} that agents ask. models: what verifiers ask by name, {name, impl: folder under
    responses_api_models, changes: its settings, hidden: variables that no server sees}, and what those ask in turn,
    {name, command, env, port, deadline_s}.
    trust: names whose judges' texts are taken as they are. The servers start side by side, and beside what `meanwhile`
    does. One that dies later is started again, on its port, and `on_restart(name)` is called from a thread; of an
    agent's servers the name may be policy_model or {name}_{agent}. If another process has taken that port,
    `on_lost(message)` is called from the thread: the answers on that port are not the server's. Raises GymStartError.
    """
    blocks: dict[str, Block] = {}  # by the name that Gym knows them by
    started: dict[str, Popen[bytes]] = {}
    urls: dict[str, str] = {}
    starts = [spec.get("start") or {} for spec in servers.values() if not spec.get("url")]
    for model in models if starts else ():
        blocks[model["name"]] = model_block(model, starts, log_dir)
    names = list(blocks)
    for name, spec in servers.items():
        if spec.get("url"):
            urls[name] = str(spec["url"]).rstrip("/")
            wait_ready(name, urls[name])
            continue
        for block in plan(name, spec.get("start") or {}, policy, names, trust):
            if block["name"] in blocks and (block["name"] != POLICY_MODEL or POLICY_MODEL in names):
                raise GymStartError(
                    f"gym.servers: two servers would be called {block['name']}; rename {name}"
                )
            blocks.setdefault(
                block["name"], {**block, "log": str(log_dir / f"gym_{block['name']}.log")}
            )
            urls[name] = f"http://{block['host']}:{block['port']}"
    ended = Event()
    keeper = Thread(target=keep_up, args=(blocks, started, on_restart, on_lost, ended), daemon=True)
    try:
        for name, block in blocks.items():
            started[name] = start_server(block, blocks.values())
        meanwhile()
        for name, block in blocks.items():
            url = f"http://{block['host']}:{block['port']}"
            wait_ready(name, url, started[name], Path(block["log"]), block.get("deadline_s"))
        keeper.start()
        yield urls
    finally:
        ended.set()
        try:
            if keeper.is_alive():  # it may be starting one just now
                keeper.join()
        finally:
            stop_servers(started.values())


# --- inside the Gym environment ------------------------------------------------------------------


def serve(
    name: str, parent: int, blocks: list[dict[str, Any]], command: list[str] | None = None
) -> None:
    """Become the server `name`: hand Gym the blocks as `ng_run` does, by two environment variables; or `command`."""
    ctypes.CDLL(None).prctl(
        1, signal.SIGTERM
    )  # PR_SET_PDEATHSIG: end with the kit, whatever its exit
    if os.getppid() != parent:
        sys.exit("the process that asked for this server is gone")
    if command:
        os.execv(command[0], command)
    block = next(b for b in blocks if b["name"] == name)
    found = importlib.util.find_spec("nemo_gym")
    if not found or not found.origin:
        sys.exit(f"{sys.executable} has no nemo-gym; `make gym` makes an environment that has")
    package, impl = Path(found.origin).parent.parent, block["impl"]
    folder = package / block["kind"] / impl
    if not (folder / "app.py").is_file():
        kind = block["kind"].removeprefix("responses_api_").removesuffix("s").replace("_", " ")
        near = difflib.get_close_matches(
            impl, [path.parent.name for path in folder.parent.glob("*/app.py")], 4, 0.0
        )
        sys.exit(
            f"nemo-gym has no {kind} {impl!r}; nearest are {', '.join(near)}; all are in {folder.parent}"
        )
    import pydantic
    import yaml

    config: dict[str, Any] = {}
    for b in blocks:  # of most other servers only the address is known
        address = {"entrypoint": "app.py", "host": b["host"], "port": b["port"]}
        entry = settings(b, package) if "changes" in b else address
        config[b["name"]] = {b["kind"]: {Path(b["impl"]).name: entry}}
    # `???`, or `${name}` of a file that the kit does not read
    if unset := re.findall(r"(\w+): .*(?:\?\?\?|\$\{\w+\})", yaml.safe_dump(config[name])):
        sys.exit(
            f"the YAML for {impl} leaves {', '.join(unset)} to you; set it in {block['where']}"
        )
    config |= {"head_server": {"host": block["host"], "port": block["port"]}, "dry_run": False}
    os.environ["NEMO_GYM_CONFIG_DICT"], os.environ["NEMO_GYM_CONFIG_PATH"] = (
        yaml.safe_dump(config),
        name,
    )
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        gym = importlib.import_module("nemo_gym.server_utils")
        gym.initialize_ray = lambda: None  # type: ignore[attr-defined]  # 6 processes that most servers never use
        ask_models(block, blocks, config[name][block["kind"]][folder.name])
        runpy.run_path(str(folder / "app.py"), run_name="__main__")
    except ModuleNotFoundError as error:
        todo = f"`python -m kit.gym.servers install {impl}`, or start.install: true, makes an environment that has it"
        todo += f" (what {folder} lists)"
        if Path(impl).is_absolute():
            todo = f"install it beside nemo-gym, for {sys.executable}, or set start.python to one that has both"
        sys.exit(f"no module {error.name!r} for {impl}; {todo}")
    except pydantic.ValidationError as error:
        fields = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        sys.exit(f"{impl}: its settings do not fit ({fields}); set them in {block['where']}")


def ask_models(block: Block, blocks: Iterable[Block], config: dict[str, Any]) -> None:
    """A verifier's requests to models are read (judge_parsing.py); Gym's GenRM gets an address, no vLLM of its own."""
    if block["kind"] == "resources_servers" and (asked := verdicts().asked_models(config)):
        places = {f"{b['host']}:{b['port']}" for b in blocks if b["kind"] == MODELS}
        verdict = "" if block["trusted"] else verdicts().VERDICTS.get(block["impl"], "")
        verdicts().watch(set(asked.values()), places, verdict)
    if block["impl"] == "genrm_model":
        vllm = importlib.import_module(f"{MODELS}.vllm_model.app")
        local: Any = types.ModuleType(f"{MODELS}.local_vllm_model.app")
        local.LocalVLLMModel, local.LocalVLLMModelConfig = vllm.VLLMModel, vllm.VLLMModelConfig
        sys.modules[local.__name__] = local


def settings(block: Block, package: Path) -> dict[str, Any]:
    """What Gym is told about one server: the package's YAML, then the changes, then host and port.

    The YAML is the first that knows kind and impl: of the server `of` (its namesake first), then of impl.
    """
    import yaml

    kind, impl, of = block["kind"], Path(block["impl"]).name, Path(block["of"]).name
    folders = [
        package / "resources_servers" / block["of"] / "configs",
        package / kind / block["impl"] / "configs",
    ]
    if kind == MODELS:
        folders = []  # these files describe judges and ${policy_base_url}; the changes say all of it
    files = (
        path
        for d in folders
        for path in sorted(d.glob("*.yaml"), key=lambda p: (p.stem != of, p.name))
    )
    entries = (
        entry for path in files for entry in (yaml.safe_load(path.read_text()) or {}).values()
    )
    kinds = (e[kind] for e in entries if isinstance(e, dict) and isinstance(e.get(kind), dict))
    found = {"domain": "other"} if kind == "resources_servers" else {}
    found |= next((servers[impl] for servers in kinds if servers.get(impl)), {})
    return {
        "entrypoint": "app.py",
        **found,
        **block["changes"],
        "host": block["host"],
        "port": block["port"],
    }


def main() -> None:
    """Serve one resources server in the foreground until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        description="Start one resources server of the installed nemo-gym package."
    )
    what = "folder under resources_servers, for example reasoning_gym; `install NAME`: an environment for it, no start"
    parser.add_argument("name", nargs="+", help=what)
    parser.add_argument(
        "--path", help="folder of a server of your own, with app.py; NAME is then any"
    )
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--python", help=f"interpreter that has nemo-gym ({PYTHON})")
    start = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    *words, name = start.pop("name")
    if words not in ([], ["install"]):
        parser.error(f"one server at a time, or `install NAME`, not {' '.join([*words, name])}")
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: sys.exit(0))
    try:
        if words:
            print(
                f"{name}: {interpreter(name, {**start, 'install': True})}; `start: {{}}` now uses it",
                flush=True,
            )
            return
        with running_servers({name: {"start": start}}, Path("runs/gym")) as urls:
            print(f"{name} serves on {urls[name]}; Ctrl-C stops it", flush=True)
            signal.pause()
    except GymStartError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    if sys.argv[1:] == [FROM_STDIN]:
        handover = json.load(sys.stdin)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        del sys.argv[1:]  # the server's app.py may read them
        serve(**handover)
    else:
        main()
