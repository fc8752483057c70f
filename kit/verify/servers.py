"""Start NeMo Gym servers, wait until they answer, restart those that die, and stop them all.

    math = {"start": {"server": "math_with_judge"}}
    other = {"url": "http://10.0.0.7:8001"}  # runs elsewhere; it is only checked
    with running_servers({"math": math, "other": other}, Path("logs")) as urls:
        ...  # urls["math"] is "http://127.0.0.1:23456"

Each server is one process with one log (server_process.py). It runs in another interpreter,
which has nemo-gym: `make gym` makes one in .venv-gym. Its settings come from the YAML of the
package; a recipe sets only the differences (kit/verify/process_specs.py).

A server receives its settings and the addresses of the others through its standard input. Of the
environment variables it sees PUBLIC_VARIABLES and those that `start.env` names.

The command `python -m kit.verify.servers NAME` serves one resources server until Ctrl-C.

Protects: secrets in the environment of the run, and the episodes of a server that dies.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from threading import Event, Thread
from typing import Any

from gym_client import Json
from kit.recipe.schema import Server, ServerStart
from kit.verify import network, server_process
from kit.verify.network import GymStartError
from kit.verify.process_specs import POLICY_MODEL, PYTHON, plan_processes, resolve_python
from kit.verify.server_process import ProcessSpec

STOP_TIMEOUT_S = 5.0  # between SIGTERM and SIGKILL
RESTART_INTERVAL_S = 5.0  # minimum between two restarts of one server
# Servers that read other servers' settings, not only their addresses: folder -> the other folder.
READS_SETTINGS = {"browsecomp_agent": "vllm_model", "rdkit_chemistry": "ns_tools"}
# Environment variables that every server and verifier sees. Any other may be a secret: a key, the
# password of a proxy, the socket of an agent.
PUBLIC_VARIABLES = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|XDG_CACHE_HOME|LANG|LANGUAGE|LC_\w+|TZ"
    r"|CUDA_\w+|NVIDIA_VISIBLE_DEVICES|\w+_NUM_THREADS|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|NLTK_DATA|HF_(?:HOME|HUB_CACHE|DATASETS_CACHE|ENDPOINT)"
    r"|(?:HF_HUB|HF_DATASETS|TRANSFORMERS)_OFFLINE"
)
logger = logging.getLogger(__name__)


# --- a run's servers -----------------------------------------------------------------------------


class GymServers:
    """The Gym servers of a run. Call `start`, then `wait_ready`, and always `close`.

    servers: those of gym.servers, by name.
    policy: {base_url, api_key, model} of the endpoint that agents use.
    other_specs: complete specs of processes that the servers use, such as model servers.

    A server that dies is restarted on its port, and `on_restart(name)` is called from a thread. For
    the other processes of an agent, the name is policy_model or {name}_{agent}.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        log_dir: Path,
        policy: Mapping[str, str] | None = None,
        other_specs: Iterable[ProcessSpec] = (),
        on_restart: Callable[[str], None] = lambda _: None,
    ):
        self.servers = servers
        self.log_dir = log_dir
        self.policy = policy
        self.urls: dict[str, str] = {}  # by server
        self.other_specs = {spec.name: spec for spec in other_specs}
        self.specs = dict(self.other_specs)  # by process
        self.processes: dict[str, Popen[bytes]] = {}
        self.on_restart = on_restart
        self._is_closed = Event()
        self._restarts = Thread(target=self.restart_loop, daemon=True)

    def start(self) -> None:
        """Check all servers, then start the processes without waiting. Raises GymStartError."""
        for name, server in self.servers.items():
            if server.start:
                self._plan(name, server.start)
            else:
                self.urls[name] = str(server.url).rstrip("/")
                network.wait_ready(name, self.urls[name], kind=server.kind)
        for name, spec in self.specs.items():
            self.processes[name] = start_server(spec, self.specs.values())

    def _plan(self, name: str, start: ServerStart) -> None:
        """Add the specs of the processes of one server, and its URL."""
        for spec in plan_processes(name, start, self.policy):
            is_shared = spec.name == POLICY_MODEL and POLICY_MODEL not in self.other_specs
            if spec.name in self.specs and not is_shared:
                raise GymStartError(
                    f"gym.servers: two processes have the name {spec.name}. Rename {name}."
                )
            spec.log = str(self.log_dir / f"gym_{spec.name}.log")
            self.specs.setdefault(spec.name, spec)
            self.urls[name] = f"http://{spec.host}:{spec.port}"

    def wait_ready(self) -> dict[str, str]:
        """Wait until all servers answer, then return their URLs and restart those that die.

        Raises GymStartError.
        """
        for name, spec in self.specs.items():
            url = f"http://{spec.host}:{spec.port}"
            # only of the process that answers for the name, not of one behind an agent
            kind = self.servers[name].kind if url == self.urls.get(name) else ""
            network.wait_ready(
                name, url, self.processes[name], Path(spec.log), spec.start_timeout_s, kind
            )
        self._restarts.start()
        return self.urls

    def restart_loop(self) -> None:
        """Restart the processes that have ended, once a second, until `close`. Runs in a thread.

        When this thread ends, the kernel ends the processes that it restarted (PR_SET_PDEATHSIG).
        So no error may end the thread.
        """
        earliest = dict.fromkeys(self.processes, 0.0)  # next restart, of time.monotonic()
        while not self._is_closed.wait(1.0):
            for name in self.processes:
                has_ended = self.processes[name].poll() is not None
                if has_ended and time.monotonic() >= earliest[name]:
                    earliest[name] = time.monotonic() + RESTART_INTERVAL_S
                    self._restart(name)

    def _restart(self, name: str) -> None:
        """Restart a process that has ended."""
        spec = self.specs[name]
        status = self.processes[name].poll()
        try:
            stop_servers([self.processes[name]])  # its children may still listen on its port
            self.processes[name] = start_server(spec, self.specs.values(), "ab")
            message = "gym server %s exited with status %s and is restarted; log %s"
            logger.warning(message, name, status, spec.log)
            self.on_restart(name)
        except Exception:
            message = "cannot restart gym server %s, which exited with status %s; log %s"
            logger.exception(message, name, status, spec.log)

    def close(self) -> None:
        """Stop all processes."""
        self._is_closed.set()
        try:
            if self._restarts.is_alive():  # it may be starting a process now
                self._restarts.join()
        finally:
            stop_servers(self.processes.values())


@contextlib.contextmanager
def running_servers(
    servers: Mapping[str, Json],
    log_dir: Path,
    **options: Any,  # as for GymServers
) -> Iterator[dict[str, str]]:
    """Start servers, yield {name: URL} once all answer, and stop them at exit.

    servers: as in a recipe, but a server without a `kind` may have any. Raises GymStartError.
    """
    parsed = {}
    for name, values in servers.items():
        server = Server.model_validate(values)
        parsed[name] = server.model_copy(update={"kind": values.get("kind") or ""})
    with contextlib.closing(GymServers(parsed, log_dir, **options)) as group:
        group.start()
        yield group.wait_ready()


# --- processes -----------------------------------------------------------------------------------


def start_server(
    spec: ProcessSpec, specs: Iterable[ProcessSpec], log_mode: str = "wb"
) -> Popen[bytes]:
    """Start the process of `spec`, which may use those of `specs` by their names. Does not wait."""
    visible = [spec]
    for other in specs:
        if other.name != spec.name and not (other.command or spec.command):
            visible.append(redact_spec(other, spec))
    task = {"parent_pid": os.getpid(), "specs": [dataclasses.asdict(each) for each in visible]}
    Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
    # -P: modules next to this one must not hide those of the server.
    command = [spec.python or sys.executable, "-P", str(Path(server_process.__file__).absolute())]
    # The task goes through standard input. Other processes of this user can read arguments and
    # the environment.
    with (
        os.fdopen(os.memfd_create("gym_server_task"), "w+b") as memory,
        open(spec.log, log_mode) as log,
    ):
        memory.write(json.dumps(task).encode())
        memory.seek(0)
        # A new session: Ctrl-C must reach the run only, which then stops servers in order.
        return Popen(
            command,
            stdin=memory,
            stdout=log,
            stderr=log,
            env=build_environment(spec),
            start_new_session=True,
        )


def redact_spec(spec: ProcessSpec, reader: ProcessSpec) -> ProcessSpec:
    """Return the part of `spec` that the server of `reader` may see."""
    if READS_SETTINGS.get(reader.folder) == spec.folder:
        return spec
    return ProcessSpec(spec.name, spec.kind, spec.folder, host=spec.host, port=spec.port)


def build_environment(spec: ProcessSpec) -> dict[str, str]:
    """Return the environment variables for a process. Some servers run code of the policy."""
    environment = list_public_variables(spec.visible_variables)
    environment["WANDB_MODE"] = "disabled"  # no tracker may contact its server
    environment["PYTHONUNBUFFERED"] = "1"
    return environment | spec.env


def list_public_variables(visible: Collection[str]) -> dict[str, str]:
    """Return the variables of this process in PUBLIC_VARIABLES, and the `visible` ones."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in visible or PUBLIC_VARIABLES.fullmatch(name)
    }


def stop_servers(processes: Collection[Popen[bytes]]) -> None:
    """Send SIGTERM to all servers and their children, and SIGKILL to those left after 5 s."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        with contextlib.suppress(TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # a child may outlive the server
            process.wait(STOP_TIMEOUT_S)


# --- command line --------------------------------------------------------------------------------


def main() -> None:
    """Serve one resources server until Ctrl-C or SIGTERM, or make its environment."""
    parser = argparse.ArgumentParser(
        description="Start one resources server of the installed nemo-gym package."
    )
    parser.add_argument(
        "name",
        nargs="+",
        help="folder under resources_servers, for example reasoning_gym; "
        "`install NAME` makes an environment for it and does not start it",
    )
    parser.add_argument(
        "--path", help="folder with app.py of a server that is not part of nemo-gym"
    )
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--python", help=f"interpreter that has nemo-gym ({PYTHON})")
    options = vars(parser.parse_args())
    start = {key: value for key, value in options.items() if value is not None}
    *words, name = start.pop("name")
    if words not in ([], ["install"]):
        parser.error(f"give one server or `install NAME`, not {' '.join([*words, name])}")
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, lambda *_: sys.exit(0))  # so that the servers are stopped
    try:
        if words:
            python = resolve_python(name, ServerStart(**start, install=True))
            print(f"{name}: {python}; `start: {{}}` now uses it", flush=True)
            return
        with running_servers({name: {"start": start}}, Path("runs/gym")) as urls:
            print(f"{name} serves on {urls[name]}; Ctrl-C stops it", flush=True)
            signal.pause()
    except GymStartError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
