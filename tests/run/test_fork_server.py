"""A fork of the fork server behaves like a Python process, and ends with its client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from kit.run import fork_server
from tests.helpers import engine_process
from tests.helpers.recipes import ROOT

# The fork server forks only for code that begins with this line, as that of vLLM's engine does.
SPAWN = "from multiprocessing.spawn import spawn_main\n"


@contextlib.contextmanager
def running(modules: str) -> Iterator[fork_server.ForkServer]:
    """Start a server that imports these modules."""
    server = fork_server.start(modules.split())
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """Yield the path of the `python` of a fork server that has imported ray and other modules."""
    # ray.util.collective.util defines a class with ray.remote
    with running("json wave ray ray.util.collective.util") as server:
        server.set_env(SHARED="by all")
        yield server.python
        assert not Path(server.folder, "log").read_text()
    assert not Path(server.python).exists()


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


def test_a_fork_behaves_like_a_python_process(python: str, tmp_path: Path) -> None:
    """A fork has the arguments, folder, environment, descriptors and streams of its client.

    The client exits with the status of the fork.
    """
    code = SPAWN + (
        "import os, setproctitle, sys\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['MINE'], 'SHARED' in os.environ)\n"
        "print(sys.stdin.read(), 'wave' in sys.modules, os.read(int(sys.argv[2]), 9))\n"
        "setproctitle.setproctitle('VLLM::Mine')\n"
        "print(open('/proc/self/cmdline').read().rstrip('\\0'))\n"
        "print('bad', file=sys.stderr); sys.exit(7)"
    )
    read_end, write_end = os.pipe()
    os.write(write_end, b"by a pipe")
    done = subprocess.run(
        [python, "-B", "-c", code, "--multiprocessing-fork", str(read_end)],
        input="read",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MINE": "set", "TMPDIR": str(Path(python).parent), "PATH": os.environ["PATH"]},
        pass_fds=[read_end],
    )
    assert done.stdout.splitlines() == [
        f"['--multiprocessing-fork', '{read_end}'] {tmp_path} set False",
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


def start_sleeping_fork(python: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a client and its fork, which sleeps. Return both processes."""
    code = SPAWN + "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    client = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout
    pid = int(client.stdout.readline())
    assert pid != client.pid
    return client, psutil.Process(pid)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_client_ends_with_the_signal_that_ended_its_fork(python: str, name: str) -> None:
    client, fork = start_sleeping_fork(python)
    fork.send_signal(signal.Signals[name])
    assert client.wait(20) == -signal.Signals[name]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_fork_ends_with_its_client(python: str, name: str) -> None:
    client, fork = start_sleeping_fork(python)
    client.send_signal(signal.Signals[name])
    wait_for(lambda: has_ended(fork))
    assert client.wait(20) == -signal.Signals[name]


def test_commands_of_another_form_run_in_a_new_python_process(python: str, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), sys.executable, 'wave' in sys.modules)"
    expected = f"{os.getpid()} {sys.executable} False\n"
    assert run_code(python, code).stdout == expected
    # a wrapper whose folder has no server
    wrapper = tmp_path / "python"
    wrapper.write_text(Path(python).read_text().replace(str(Path(python).parent), str(tmp_path)))
    wrapper.chmod(0o700)
    assert run_code(wrapper, SPAWN + code).stdout == expected


def test_a_server_that_ends_says_why() -> None:
    with running("json no_such_module") as server:
        assert server.find_failure() == ""
        server.process.wait(20)
        assert server.find_failure() == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_module_that_starts_cuda_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands for the device that CUDA opens."""
    device = tmp_path / "device"
    (tmp_path / "starts_cuda.py").write_text(f"device = open({str(device)!r}, 'w')")
    monkeypatch.setattr(fork_server, "CUDA_DEVICE", str(device))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="The import of starts_cuda started CUDA"):
        fork_server.import_modules(["json", "starts_cuda"])
    sys.modules.pop("starts_cuda").device.close()


# This torch has no CUDA. So it is changed to count one GPU by NVML, and to record other calls.
PRETEND_CUDA = """
import os, sys, threading, torch
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
calls = []
torch._C._cuda_getCurrentRawStream = None
torch._C._cuda_getDeviceCount = lambda: calls.append("count") or 1
torch.cuda._device_count_nvml = lambda: 1
torch.cuda._lazy_init = lambda: calls.append("init")
from kit.run.fork_server import import_modules
import_modules([module for module in sys.argv[1:] if module != "ray"])
assert torch.cuda.is_available() and not torch.cuda.is_initialized()
print(calls, threading.active_count())
"""


def test_the_modules_of_a_gpu_run_start_no_cuda() -> None:
    base = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())
    variables = base["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    modules = variables["PRELOAD_MODULES"].split()
    done = subprocess.run(
        [sys.executable, "-c", PRETEND_CUDA, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | engine_process.VARIABLES,
    )
    assert done.stdout.splitlines()[-1:] == ["[] 1"], done.stdout + done.stderr[-3000:]


RAY = """
import os, sys, ray
from kit.run import fork_server, isolation

class Worker:
    def look(self):
        return os.environ["CUDA_VISIBLE_DEVICES"], "wave" in sys.modules

server = fork_server.start(["wave", "ray", "ray._private.workers.default_worker"])
with isolation.set_ray_token():
    environment = {"py_executable": server.python}
    ray.init("local", num_cpus=2, num_gpus=2, include_dashboard=False, runtime_env=environment)
    processes = ray._private.worker._global_node.all_processes
    secrets = {name: os.environ[name] for name in fork_server.SECRETS}
    job = ray.get_runtime_context().get_job_id()
    pid = str(processes["raylet"][0].process.pid)
    server.set_env(RAY_JOB_ID=job, RAY_RAYLET_PID=pid, **secrets)
    workers = [ray.remote(Worker).options(num_gpus=1).remote() for _ in range(2)]
    print(sorted(ray.get([worker.look.remote() for worker in workers])))
    ray.shutdown()
"""


def test_each_worker_of_ray_has_its_own_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", RAY], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["[('0', True), ('1', True)]"], done.stderr[-3000:]


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The process exits before it uses the server, as after an error in a recipe."""
    code = (
        "from kit.run import fork_server; import sys\n"
        "print(fork_server.start(['json', 'ray']).process.pid, flush=True)\n"
        "sys.exit(1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, stdout=subprocess.PIPE
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and not list(tmp_path.iterdir())
    wait_for(lambda: not psutil.pid_exists(int(output)))


def test_forks_and_clients_end_with_the_server() -> None:
    """Otherwise a fork could run forever: the client that would end it has ended with the run."""
    with running("json") as server:
        client, fork = start_sleeping_fork(server.python)
        os.kill(fork.ppid(), signal.SIGKILL)
        wait_for(lambda: has_ended(fork))
        assert client.wait(20) == -signal.SIGKILL
