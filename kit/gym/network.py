"""HTTP requests with a deadline and a size limit, ports, and waiting for Gym servers.

Only the driver uses this module. Episodes use gym_client.py, with sessions and retries.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import socket
import time
from itertools import chain
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import yaml
from yaml import YAMLError

from env import Json
from gym_client import UNDESCRIBED, GymError, list_kinds, parse_routes
from kit.errors import QuotingError

HOST = "127.0.0.1"
START_TIMEOUT_S = 90.0  # a Gym server imports for 3 to 30 s before it answers
CHECK_TIMEOUT_S = 5.0  # for the answer to one check
MAX_BODY_BYTES = 2**22  # of the answer to a check: as objects it takes 100 MB
HOST_NAME = re.compile(r"[\w.:-]+", re.ASCII)  # or an IPv6 address
# What code for one form of JSON raises for another.
WRONG_SHAPES = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class GymStartError(QuotingError, RuntimeError):
    """A Gym server does not answer or did not start. The message includes the fix."""


class FetchError(QuotingError, RuntimeError):
    """A request has no usable answer. The message is the reason."""


def fetch(
    url: str,
    method: str = "GET",
    timeout_s: float = CHECK_TIMEOUT_S,
    use_proxy: bool = False,
    max_bytes: int = MAX_BODY_BYTES,
    **request: Any,  # as for httpx
) -> httpx.Response:
    """Send one request and read the whole answer, within a timeout and a size limit.

    use_proxy: whether to use the proxy of the environment. request: headers and json, as for httpx.
    A redirect is an error, because another host must not receive the request. Raises FetchError.
    """
    # uncompressed, so that a short body cannot become a long one
    headers = {**request.pop("headers", {}), "Accept-Encoding": "identity"}
    end = time.monotonic() + timeout_s
    try:
        with (
            httpx.Client(timeout=timeout_s, trust_env=use_proxy) as http,
            http.stream(method, url, headers=headers, **request) as answer,
        ):
            body = read_body(answer, end, max_bytes)
    except httpx.TimeoutException:
        raise FetchError(
            f"no complete answer of at most {max_bytes:,} bytes within {timeout_s:.1f} s"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(f"{type(error).__name__}: {error}") from None
    if answer.has_redirect_location:
        target = answer.headers["location"]
        raise FetchError(f"HTTP {answer.status_code} redirects to {target}. Set that URL instead.")
    return httpx.Response(answer.status_code, content=body)


def read_body(answer: httpx.Response, end: float, max_bytes: int) -> bytes:
    """Read a body until `end`, of time.monotonic(). The timeout of httpx is that of each part."""
    body = bytearray()
    for part in answer.iter_raw():
        body += part
        if len(body) > max_bytes or time.monotonic() > end:
            raise httpx.ReadTimeout("a long or slow body")
    return bytes(body)


# --- ports ---------------------------------------------------------------------------------------


chosen_ports: set[int] = set()  # of this process: servers may not listen on theirs yet


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

    The range is 20000 to 32767: above the ports of Ray's workers and below the ports that Linux
    gives to outgoing connections. Both could take the port while the new server still imports.
    Raises OSError if `host` is not an address of this machine (check_address).
    """
    while True:
        port = 20000 + secrets.randbelow(12768)
        try:
            with socket.socket() as probe:
                probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        if port not in chosen_ports:
            chosen_ports.add(port)
            return port


# --- Gym servers ---------------------------------------------------------------------------------


def wait_ready(
    name: str,
    url: str,
    process: Popen[bytes] | None = None,
    log: Path | None = None,
    timeout_s: float | None = None,
    kind: str | None = None,
) -> None:
    """Wait until a Gym server answers GET /openapi.json, also with "not found".

    Raises GymStartError, also if it describes only other kinds of server.

    process: the server's process, if this process started it. Such a server must answer within
    `timeout_s`, by default START_TIMEOUT_S. Any other must answer within CHECK_TIMEOUT_S.
    kind: that of the recipe. None: any.
    """
    end = time.monotonic() + ((timeout_s or START_TIMEOUT_S) if process else CHECK_TIMEOUT_S)
    problem = "no answer"
    while time.monotonic() < end:
        if process and process.poll() is not None:
            problem = f"it exited with status {process.poll()}"
            break
        try:
            answer = fetch(f"{url}/openapi.json", timeout_s=CHECK_TIMEOUT_S)
            return check_answer(name, url, kind, answer, is_own=bool(process))
        except FetchError as error:
            problem = str(error)
        time.sleep(0.2)
    if process:
        raise GymStartError(
            f"gym server {name} did not start: {problem}. See its log {log}: "
            f'{read_tail(log) or "it is empty"}. See docs/troubleshooting.md, "Gym".'
        )
    command = f"python -m kit.gym.servers {name} --port {urlsplit(url).port or 80}"
    raise GymStartError(
        f"gym.servers.{name}.url: {url} does not answer ({problem}). "
        f"To start it, run `{command}`, or set start instead of url."
    )


def check_answer(
    name: str, url: str, kind: str | None, answer: httpx.Response, is_own: bool
) -> None:
    """Check that a server describes the routes of a kind, if it describes any.

    Raises FetchError if it is not ready, and GymStartError if it is of another kind.
    """
    if f"http_{answer.status_code}" in UNDESCRIBED and not is_own:
        return
    if answer.status_code != 200:
        raise FetchError(f"HTTP {answer.status_code} from /openapi.json")
    try:
        kinds = list_kinds(parse_routes(answer.json(), url))
    except (ValueError, RecursionError, GymError) as error:
        raise FetchError(f"HTTP 200 from /openapi.json, but no description ({error})") from None
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
    path = "/global_config_dict_yaml"
    try:
        answer = fetch(f"{head_server}{path}")
        if answer.status_code != 200:
            raise FetchError(f"HTTP {answer.status_code} from {path}")
        return read_discovery(yaml.safe_load(answer.json()), head_server)  # YAML in a JSON string
    except (FetchError, YAMLError, *WRONG_SHAPES) as error:
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
    if ":" in str(host):  # an IPv6 address
        host = f"[{ipaddress.IPv6Address(host)}]"
    return f"http://{host}:{port}"
