"""Ports, and requests to Gym servers before a run.

Only the driver uses this module. Episodes use gym_client.py, with sessions and retries.

Protects: the run from servers that do not answer, or answer for another kind or without end.
"""

from __future__ import annotations

import errno
import random
import re
import socket
import time
from itertools import chain
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import yaml
from httpx import HTTPError, InvalidURL
from yaml import YAMLError

from gym_client import UNDESCRIBED, GymError, Json, list_kinds, parse_routes
from kit.errors import QuotingError

HOST = "127.0.0.1"
START_TIMEOUT_S = 90.0  # a Gym server imports for 3 to 30 s before it answers
CHECK_TIMEOUT_S = 5.0  # for the answer to one check
MAX_BODY_BYTES = 2**22  # of the answer to a check: as objects it takes 100 MB
# In a random order. They are above the ports of Ray's workers and below those that Linux gives to
# outgoing connections: both could take a port before the server listens.
ports = iter(random.SystemRandom().sample(range(20000, 32768), 12768))
HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)
# What code for one form of JSON raises for another.
WRONG_SHAPES = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class GymStartError(QuotingError, RuntimeError):
    """A Gym server does not answer or did not start. The message includes the fix."""


# --- ports ---------------------------------------------------------------------------------------


def check_address(section: str, host: str, port: int | None) -> None:
    """Check that a server can listen on host:port. Raises GymStartError.

    section: of the recipe, with the keys host and port. port: None for any.
    """
    try:
        socket.create_server((host, port or 0)).close()  # of IPv4, as the URLs of servers
    except OSError as error:
        raise GymStartError(
            f"{section}: no server can listen on host={host}, port={port} ({error.strerror}). Set "
            "another port, or host=127.0.0.1."
        ) from None


def find_free_port(host: str = HOST) -> int:
    """Return a port on which nothing listens now, and which no earlier call returned.

    Raises OSError if there is none, or if `host` is not an address of this machine (check_address).
    """
    for port in ports:
        try:
            with socket.socket() as listener:
                listener.bind((host, port))
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"no free port on {host}")


# --- Gym servers ---------------------------------------------------------------------------------


def wait_ready(
    name: str,
    url: str,
    process: Popen[bytes] | None = None,
    log: Path | None = None,
    timeout_s: float | None = None,
    kind: str = "",
) -> None:
    """Wait until a Gym server answers GET /openapi.json, also with "not found".

    Raises GymStartError, also if it describes only other kinds of server.

    process: the server's process, if this process started it. Such a server must answer within
    `timeout_s`, by default START_TIMEOUT_S. Any other must answer within CHECK_TIMEOUT_S.
    kind: that of the recipe. Empty: any.
    """
    end = time.monotonic() + ((timeout_s or START_TIMEOUT_S) if process else CHECK_TIMEOUT_S)
    problem = "no answer"
    while time.monotonic() < end:
        if process and process.poll() is not None:
            problem = f"it exited with status {process.poll()}"
            break
        try:
            answer = get(f"{url}/openapi.json")
            problem = f"HTTP {answer.status_code} from /openapi.json"
            if answer.status_code == 200:
                return check_kind(name, url, kind, list_kinds(parse_routes(answer.json(), url)))
            if not process and f"http_{answer.status_code}" in UNDESCRIBED:
                return None
        except (HTTPError, InvalidURL, GymError, ValueError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
        time.sleep(0.2)
    if process:
        raise GymStartError(
            f"gym server {name} did not start: {problem}. See its log {log}: "
            f'{read_tail(log) or "it is empty"}. See docs/troubleshooting.md, "Gym".'
        )
    command = f"python -m kit.verify.servers {name} --port {urlsplit(url).port or 80}"
    raise GymStartError(
        f"gym.servers.{name}.url: {url} does not answer ({problem}). "
        f"To start it, run `{command}`, or set start instead of url."
    )


def get(
    url: str,
    timeout_s: float = CHECK_TIMEOUT_S,
    max_bytes: int = MAX_BODY_BYTES,
    use_proxy: bool = False,
) -> httpx.Response:
    """Send one request. A redirect is not followed. use_proxy: the one of the environment.

    The timeout of httpx is that of each part, and a server may send parts without end.
    """
    end = time.monotonic() + timeout_s
    plain = {"Accept-Encoding": "identity"}  # so that a short body cannot become a long one
    body = bytearray()
    with httpx.stream("GET", url, headers=plain, timeout=timeout_s, trust_env=use_proxy) as answer:
        for part in answer.iter_raw():
            body += part
            if len(body) > max_bytes or time.monotonic() > end:
                raise httpx.ReadTimeout(f"over {max_bytes} bytes or {timeout_s:g} s")
    return httpx.Response(answer.status_code, content=bytes(body), request=answer.request)


def check_kind(name: str, url: str, kind: str, kinds: list[str]) -> None:
    """Check that `kind` is among those of a server, if it has any. Raises GymStartError."""
    if kind and kinds and kind not in kinds:
        raise GymStartError(
            f"gym.servers.{name}.kind={kind}, but {url} has the routes of {' and '.join(kinds)}. "
            f"Set gym.servers.{name}.kind={kinds[0]}, and the url if a head server lists it."
        )


def read_tail(log: Path | None) -> str:
    """Return the last five lines of a log, or their beginnings, in one line."""
    lines = log.read_text(errors="replace").strip().splitlines() if log else []
    return " | ".join(f"{line:.200}" for line in lines[-5:])


class Discovery(NamedTuple):
    """The servers that a Gym head server lists."""

    servers: dict[str, str]  # resources or environment server -> its URL
    agents: dict[str, str]  # agent -> its resources server, or else its environment server


def discover_servers(head_server: str) -> Discovery:
    """Return the servers that a Gym head server lists. Raises GymStartError.

    head_server: "http://host:11000".
    """
    try:
        answer = get(f"{head_server}/global_config_dict_yaml").raise_for_status()
        return read_discovery(yaml.safe_load(answer.json()), head_server)  # YAML in a JSON string
    except (HTTPError, InvalidURL, YAMLError, *WRONG_SHAPES) as error:
        raise GymStartError(
            f"gym.head_server: {head_server} is not a Gym head server ({error!r:.300}). "
            "To start one, run `gym env start` in .venv-gym."
        ) from None


def read_discovery(config: Json, head_server: str) -> Discovery:
    """Return the servers in a head server's configuration. Raises the errors of wrong shapes."""
    servers: dict[str, str] = {}
    agents: dict[str, str] = {}
    environments: dict[str, str] = {}  # agent -> its environment server
    for name, entry in config.items():
        if not isinstance(entry, dict):
            continue
        for agent in (entry.get("responses_api_agents") or {}).values():
            agents[name] = get_reference(agent, "resources_server")
        kinds = ("resources_servers", "environment_servers")
        for server in chain.from_iterable((entry.get(kind) or {}).values() for kind in kinds):
            if server.get("port"):  # without a port it is configured, but not started
                servers[name] = public_url(server, head_server)
                environments[get_reference(server, "agent_server")] = name
    for agent, server in agents.items():
        agents[agent] = server or environments.get(agent, "")
    return Discovery(servers, {agent: server for agent, server in agents.items() if server})


def get_reference(settings: Json, key: str) -> str:
    """Return the name of the server that these settings refer to by `key`, or ""."""
    return str((settings.get(key) or {}).get("name") or "")


def public_url(server: Json, head_server: str) -> str:
    """Return the URL at which this process reaches a server. Raises ValueError, TypeError.

    A local address refers to the head server's machine. This process may run on another machine.
    The recipe resolves `${...}` in its values, so the address is no free text.
    """
    host = server.get("host") or HOST
    port = int(server["port"])
    if not HOST_NAME.fullmatch(host) or not 0 < port < 2**16:
        raise ValueError(f"the address {host!r:.80}, {port} is not a host and a port")
    if host in ("0.0.0.0", HOST, "localhost"):
        host = urlsplit(head_server).hostname
    return f"http://{host}:{port}"
