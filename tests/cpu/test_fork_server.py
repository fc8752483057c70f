"""A process that the fork server starts does what Python would do, and ends with its client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from kit.cpu import fork_server

# kit/cpu/fork_server.py forks commands that begin like this one, as those of vLLM's engine do
SPAWN = "from multiprocessing.spawn import spawn_main\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the wrapper of a server that has imported ray and a few modules."""
    log = tmp_path_factory.mktemp("fork") / "fork.log"
    # the last one contains a class that is ray.remote
    fork_server.start("json wave ray ray.util.collective.util")
    with fork_server.running("nothing", log) as server:
        server.set_env(SHARED="by all")
        yield server.python
    assert not log.read_text() and not Path(server.python).exists()


def run_code(python: str | Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-c", code], capture_output=True, text=True)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fork_does_what_python_would(python: str, tmp_path: Path) -> None:
    """Arguments, folder, environment, descriptors, streams and exit status are the client's."""
    code = SPAWN + (
        "import os, setproctitle, sys\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['MINE'], 'SHARED' in os.environ)\n"
        "print(sys.stdin.read(), 'wave' in sys.modules, os.read(int(sys.argv[2]), 9))\n"
        "setproctitle.setproctitle('VLLM::Mine')\n"
        "print(open('/proc/self/cmdline').read().rstrip('\\0'))\n"
        "print('bad', file=sys.stderr); sys.exit(7)"
    )
    pipe, end = os.pipe()
    os.write(end, b"by a pipe")
    done = subprocess.run(
        [python, "-B", "-c", code, "--multiprocessing-fork", str(pipe)],
        input="read",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MINE": "set", "TMPDIR": str(Path(python).parent), "PATH": os.environ["PATH"]},
        pass_fds=[pipe],
    )
    assert done.stdout.splitlines() == [
        f"['--multiprocessing-fork', '{pipe}'] {tmp_path} set False",
        "read True b'by a pipe'",
        "VLLM::Mine",
    ]
    assert (done.stderr, done.returncode) == ("bad\n", 7)


def test_forks_have_their_own_ids_and_random_numbers(python: str) -> None:
    code = SPAWN + (
        "import numpy, os, random, ray\n"
        "print(os.getpid(), numpy.random.rand(), random.random(), end=' ')\n"
        "print(ray.NodeID.from_random().hex())"
    )
    results = [run_code(python, code) for _ in range(2)]
    assert all(result.returncode == 0 for result in results)
    first, second = (result.stdout.split() for result in results)
    assert all(a != b for a, b in zip(first, second, strict=True))


def start_sleeping(python: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Return a client and its fork, which sleeps."""
    code = SPAWN + "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    client = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout
    pid = int(client.stdout.readline())
    assert pid != client.pid
    return client, psutil.Process(pid)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_client_ends_by_the_signal_that_ended_its_fork(python: str, name: str) -> None:
    client, fork = start_sleeping(python)
    fork.send_signal(signal.Signals[name])
    assert client.wait(20) == -signal.Signals[name]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_fork_ends_with_its_client(python: str, name: str) -> None:
    client, fork = start_sleeping(python)
    client.send_signal(signal.Signals[name])
    wait_for(lambda: has_ended(fork))
    assert client.wait(20) == -signal.Signals[name]


def test_a_client_that_dies_during_its_request_does_not_end_the_server(python: str) -> None:
    folder = Path(python).parent
    request = fork_server.Request(["-c", f"{SPAWN}pass"], dict(os.environ), os.getcwd(), [], [2])
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "socket"))
            socket.send_fds(client, [b"."], [2])
            client.sendall(json.dumps(request).encode() + b"\n")
    assert run_code(python, f"{SPAWN}import wave; print(7)").stdout == "7\n"


def test_python_itself_runs_other_commands(python: str, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), sys.executable, 'wave' in sys.modules)"
    expected = f"{os.getpid()} {sys.executable} False\n"
    assert run_code(python, code).stdout == expected
    no_server = tmp_path / "python"  # the wrapper of a folder without a server
    no_server.write_text(Path(python).read_text().replace(str(Path(python).parent), str(tmp_path)))
    no_server.chmod(0o700)
    assert run_code(no_server, SPAWN + code).stdout == expected


def test_no_part_of_a_path_runs_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The paths of Python, the repository and TMPDIR may contain characters of a shell."""
    odd = Path(tempfile.mkdtemp(prefix="t")) / "a b$(touch x);touch y"
    odd.mkdir()
    request.addfinalizer(lambda: shutil.rmtree(odd.parent))
    (odd / "venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(odd / "venv" / "bin" / "python"))
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with fork_server.running("json", tmp_path / "fork.log") as server:
        assert server.python.startswith(str(odd))
        done = run_code(server.python, SPAWN + "print(1)")
        assert (done.stdout, done.stderr) == ("1\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fork.log"]


def test_python_itself_runs_all_commands_if_the_imports_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "late.py").write_text(
        "import time; time.sleep(0.5); raise ImportError('no such library')"
    )
    with fork_server.running("json late", tmp_path / "fork.log") as server:
        for _ in range(2):  # while the server imports, and after it has ended
            assert run_code(server.python, SPAWN + "print(1)").stdout == "1\n"
        server.set_env(SHARED="by nobody")
    assert "no such library" in (tmp_path / "fork.log").read_text()


@pytest.mark.parametrize(
    ("code", "status"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("sys.exit(1)", 1)],
)
def test_the_server_ends_with_the_process_that_started_it(
    tmp_path: Path, code: str, status: int
) -> None:
    """Also if that process finds a mistake in the recipe, and exits before it uses the server."""
    code = (
        "from kit.cpu import fork_server; import os, signal, sys\n"
        f"fork_server.start('json ray'); {code}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path)
    assert process.wait(20) == status
    assert bool(list(tmp_path.iterdir())) == (status < 0)  # a killed process leaves the folder
    servers = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)]
    wait_for(lambda: all(has_ended(server) for server in servers))


def test_forks_and_clients_end_with_the_server(tmp_path: Path) -> None:
    """Clients end with the run as well. A fork that outlived the server would then never end."""
    with fork_server.running("json", tmp_path / "fork.log") as server:
        client, fork = start_sleeping(server.python)
        os.kill(fork.ppid(), signal.SIGKILL)
        wait_for(lambda: has_ended(fork))
        assert client.wait(20) == -signal.SIGKILL
