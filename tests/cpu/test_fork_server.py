"""kit/cpu/fork_server.py: what stands in for Python does what Python would, and ends as it ends."""

from __future__ import annotations

import os
import shutil
import signal
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

SPAWN = "from multiprocessing.spawn import spawn_main\n"  # what kit/cpu/fork_server.py takes for vLLM's engine


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("fork") / "fork.log"
    fork_server.begin(
        "json wave ray ray.util.collective.util"
    )  # which has a class that is ray.remote
    with fork_server.serving("nothing", log) as (python, tell):
        tell(GIVEN="of all")
        yield python
    assert not log.read_text() and not Path(python).exists()


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fork_is_what_python_would_be(python: str, tmp_path: Path) -> None:
    code = SPAWN + (
        "import os, setproctitle, sys; print(sys.argv[1:], os.getcwd(), os.environ['MINE'], 'GIVEN' in os.environ)\n"
        "print(sys.stdin.read(), 'wave' in sys.modules, os.read(int(sys.argv[2]), 9))\n"
        "setproctitle.setproctitle('VLLM::Mine'); print(open('/proc/self/cmdline').read().rstrip('\\0'))\n"
        "print('bad', file=sys.stderr); sys.exit(7)"
    )
    pipe, end = os.pipe()
    os.write(end, b"by a pipe")
    command = [python, "-B", "-c", code, "--multiprocessing-fork", str(pipe)]
    environment = {"MINE": "set", "TMPDIR": str(Path(python).parent), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        command,
        input="read",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        pass_fds=[pipe],
    )
    assert done.stdout.splitlines() == [
        f"['--multiprocessing-fork', '{pipe}'] {tmp_path} set False",
        "read True b'by a pipe'",
        "VLLM::Mine",
    ]
    assert (done.stderr, done.returncode) == ("bad\n", 7)


def test_forks_are_told_apart_and_draw_their_own_numbers(python: str) -> None:
    code = (
        SPAWN
        + "import numpy, os, random, ray; print(os.getpid(), numpy.random.rand(), random.random(), end=' ')\n"
    )
    code += "print(ray.NodeID.from_random().hex())"
    said = [
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert all(a != b for a, b in zip(*(text.split() for text in said), strict=True))


def asleep(python: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    code = SPAWN + "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pid = int(process.stdout.readline())
    assert pid != process.pid
    return process, psutil.Process(pid)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_who_asked_ends_as_the_fork_ends(python: str, name: str) -> None:
    process, forked = asleep(python)
    forked.send_signal(signal.Signals[name])
    assert process.wait(20) == -signal.Signals[name]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_fork_ends_with_who_asked(python: str, name: str) -> None:
    process, forked = asleep(python)
    process.send_signal(signal.Signals[name])
    wait_for(lambda: ended(forked))
    assert process.wait(20) == -signal.Signals[name]


def test_all_else_becomes_python_itself(python: str, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), sys.executable, 'wave' in sys.modules)"
    itself = f"{os.getpid()} {sys.executable} False\n"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True).stdout == itself
    elsewhere = tmp_path / "python"  # where nobody serves
    elsewhere.write_text(Path(python).read_text().replace(str(Path(python).parent), str(tmp_path)))
    elsewhere.chmod(0o700)
    assert (
        subprocess.run([elsewhere, "-c", SPAWN + code], capture_output=True, text=True).stdout
        == itself
    )


def test_no_part_of_its_path_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Python, the repository and TMPDIR may lie where a shell sees a space or more."""
    odd = Path(tempfile.mkdtemp(prefix="t")) / "a b$(touch x);touch y"
    odd.mkdir()
    request.addfinalizer(lambda: shutil.rmtree(odd.parent))
    (odd / "venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(odd / "venv" / "bin" / "python"))
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with fork_server.serving("json", tmp_path / "fork.log") as (python, _):
        assert python.startswith(str(odd))
        done = subprocess.run([python, "-c", SPAWN + "print(1)"], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("1\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fork.log"]


def test_where_it_cannot_import_python_itself_does_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "late.py").write_text(
        "import time; time.sleep(0.5); raise ImportError('no such library')"
    )
    with fork_server.serving("json late", tmp_path / "fork.log") as (python, tell):
        for _ in range(2):  # while it imports, and when it has ended
            done = subprocess.run(
                [python, "-c", SPAWN + "print(1)"], capture_output=True, text=True
            )
            assert done.stdout == "1\n"
        tell(GIVEN="to nobody")
    assert "no such library" in (tmp_path / "fork.log").read_text()


@pytest.mark.parametrize(
    "code, status", [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("sys.exit(1)", 1)]
)
def test_it_ends_with_the_process_that_started_it(tmp_path: Path, code: str, status: int) -> None:
    """Also when the recipe, checked meanwhile, is wrong."""
    code = f"from kit import fork; import os, signal, sys; fork.begin('json ray'); {code}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path)
    assert process.wait(20) == status
    assert bool(list(tmp_path.iterdir())) == (status < 0)  # of a killed one a folder is left
    servers = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == str(tmp_path)]
    wait_for(lambda: all(ended(server) for server in servers))


def test_forks_end_with_what_they_fork_from(tmp_path: Path) -> None:
    """Who asked ends with the run as well, and then nobody is left who would end the fork."""
    with fork_server.serving("json", tmp_path / "fork.log") as (python, _):
        process, forked = asleep(python)
        os.kill(forked.ppid(), signal.SIGKILL)
        wait_for(lambda: ended(forked))
        assert process.wait(20) == -signal.SIGKILL
