"""Tests that other users and runs cannot use a run's temporary folder, Ray or torch store."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import ray

from kit.engine import stores
from kit.errors import RunError
from kit.run import isolation
from tests.helpers.recipes import CLEAN_ENV, ROOT
from tests.helpers.stack import Stack

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: it acts as another user")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Make a folder with a short path that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def run_as_nobody(*command: str | Path) -> str:
    """Run a command as another user, and return its error output."""
    done = subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, cwd="/"
    )
    return done.stderr


@needs_root
def test_another_user_cannot_use_the_folder_of_ray(short_folder: Path) -> None:
    ray_folder = Path(isolation.make_ray_folder(str(short_folder / "mine")))
    open_folder = short_folder / "open"
    for folder in (ray_folder, open_folder):
        folder.mkdir()
        folder.chmod(0o777)  # as Ray does with its folder
    assert run_as_nobody("ls", open_folder) == run_as_nobody("touch", open_folder / "x") == ""
    assert "Permission denied" in run_as_nobody("ls", ray_folder)
    assert "Permission denied" in run_as_nobody("touch", ray_folder / "x")
    assert isolation.make_ray_folder(str(short_folder / "mine")) == str(ray_folder)


@pytest.mark.parametrize(("device", "value"), [("cpu", "0,1"), ("cuda", "0")], ids=str)
def test_a_cpu_recipe_does_not_show_ray_which_gpus_are_visible(
    value: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does not start if the variable lists fewer GPUs than the recipe has logical ones."""
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(name, value)
    with isolation.show_logical_gpus(device):
        assert os.environ.get(name) == (None if device == "cpu" else value)
    assert os.environ.get(name) == value


def test_a_run_has_a_temporary_folder_that_is_deleted_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    with pytest.raises(ValueError), isolation.use_own_tmpdir() as folder:
        assert os.environ["TMPDIR"] == folder and os.stat(folder).st_mode & 0o777 == 0o700
        (Path(folder) / "lock").touch()
        raise ValueError
    assert os.environ["TMPDIR"] == "/tmp" and not Path(folder).exists()


def test_a_folder_that_others_may_enter_or_replace_is_an_error(short_folder: Path) -> None:
    folder = short_folder / "mine"
    isolation.make_ray_folder(str(folder))
    (short_folder / "link").symlink_to(folder)
    (short_folder / "file").touch()

    def assert_refused(name: str) -> None:
        with pytest.raises(RunError, match=f"in {short_folder / name}: it is not yours"):
            isolation.make_ray_folder(str(short_folder / name))

    assert_refused("link")
    assert_refused("file")
    folder.chmod(0o711)
    assert_refused("mine")
    folder.chmod(0o700)
    short_folder.chmod(0o777)
    assert_refused("mine")
    short_folder.chmod(0o1777)
    isolation.make_ray_folder(str(folder))
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        assert_refused("mine")


def test_a_path_that_is_too_long_for_a_socket_is_an_error(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_path = str(short_folder / ("x" * 40))
    longest = long_path[: isolation.SOCKET_PATH_LIMIT - len(isolation.RAY_SOCKET)]
    assert isolation.make_ray_folder(longest) == longest + "/ray"
    with pytest.raises(RunError, match="has 40 bytes, over 39"):
        isolation.make_ray_folder(longest + "x")
    longest = long_path[: isolation.SOCKET_PATH_LIMIT - len(isolation.RUN_SOCKET)]
    monkeypatch.setattr(tempfile, "tempdir", longest)
    isolation.check_limits()
    monkeypatch.setattr(tempfile, "tempdir", longest + "x")
    with pytest.raises(RunError, match="Set TMPDIR to a shorter path"):
        isolation.check_limits()


RAISE_LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
from kit.run import isolation
isolation.check_limits()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_limit_of_open_files_is_raised() -> None:
    environment = CLEAN_ENV | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RAISE_LIMIT]
    assert subprocess.check_output(command, env=environment, text=True) == "1024\n"


# --- the Ray of a run ----------------------------------------------------------------------------

# Connects to a Ray and runs a task.
DRIVER_SCRIPT = """
import ray, sys
ray.init(address=sys.argv[1], logging_level="error")
print("joined", ray.get(ray.remote(num_cpus=0)(lambda: 7).remote()))
"""


def run_driver(address: str, home: Path, **variables: str) -> str:
    """Let another driver run a task on a Ray, and return its output."""
    environment = {name: value for name, value in CLEAN_ENV.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **variables}
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER_SCRIPT, address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return driver.stdout + driver.stderr


@pytest.mark.soak
def test_only_a_driver_with_the_token_can_use_the_ray_of_a_run(
    stack: Stack, tmp_path: Path
) -> None:
    address = ray.get_runtime_context().gcs_address
    token = os.environ["RAY_AUTH_TOKEN"]
    right_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    assert "joined 7" in run_driver(address, tmp_path, **right_token)
    for variables in ({**right_token, "RAY_AUTH_TOKEN": "0" * 64}, {}):
        output = run_driver(address, tmp_path, **variables)
        assert "joined" not in output and "AuthenticationError" in output, variables
    assert not (tmp_path / ".ray" / "auth_token").exists()
    logs = (stack.workspace / "runs" / "session" / "logs" / "ray").resolve()
    if os.getuid() == 0:
        assert "Permission denied" in run_as_nobody("ls", logs)
    for path in logs.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes(), path
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            assert token not in " ".join(process.cmdline())


# --- torch's stores ------------------------------------------------------------------------------


def list_listening_addresses(port: int) -> list[str]:
    """Return the addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("inet")
    return [
        c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]


def test_the_store_for_weights_over_gloo_listens_on_one_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from extras.gloo.engine import GlooCheckpointEngine

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    engine = GlooCheckpointEngine(bucket_size=1, is_master=True)
    address, port = engine.prepare()["master"]
    assert (address, list_listening_addresses(port)) == ("127.0.0.1", ["127.0.0.1"])


def test_the_rendezvous_of_torch_on_one_machine_listens_on_loopback() -> None:
    from torch.distributed import rendezvous

    importlib.import_module("kit.engine.verl_patches")  # as verl does in every worker
    torch_stores = []
    for _ in range(2):  # a second group of the same process shares the store
        with stores.socket.create_server(("127.0.0.1", 0)) as free:
            port = torch_stores[0].port if torch_stores else free.getsockname()[1]
        url = f"tcp://127.0.0.1:{port}?rank=0&world_size=1"
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=20)))
        torch_stores.append(store)
    torch_stores[0].set("key", "value")
    assert list_listening_addresses(torch_stores[0].port) == ["127.0.0.1"]
    assert torch_stores[1].get("key") == b"value"
