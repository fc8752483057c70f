"""Fork worker processes from one process that has imported their modules (PRELOAD_MODULES).

A run starts an actor, vLLM's server and its engine one after the other. Each imports torch, verl
and vLLM, which takes 10 to 20 s of a core. A fork of a process that has imported them has its first
response 10 to 20 s sooner on two cores (docs/performance.md), and shares its memory with the
others. On GPUs, the server must not start CUDA, which no fork could use. So torch counts the GPUs
by NVML meanwhile, and a module that starts CUDA when it is imported ends the run.

    server    `fork_server.py serve FD WRAPPER MODULE...`: imports the modules, then forks a child
              for each request. It ends when the run closes its stdin
    client    FOLDER/python, a wrapper that is started instead of Python. It sends its arguments,
              environment, folder, signal mask and file descriptors to the server, and waits for
              the child. It passes SIGTERM on and ends as the child ends
    child     the fork. It runs as `python ARGUMENTS` would, and dies with its client or the server

Ray starts its workers with the wrapper (py_executable in runtime_env.py). The workers start vLLM's
engine with it, too (multiprocessing.set_executable). For any other command, the wrapper runs Python
itself. It also does so if the server has ended.

Convenience: a run starts in half of the time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from kit.recipe.settings import Settings
    from kit.run.launch import Launch

NUMBER_BYTES = 16  # of a number that is sent over the socket
MAX_DESCRIPTORS = 253  # in one message over a Unix socket (Linux: SCM_MAX_FD)
PR_SET_PDEATHSIG = 1  # prctl: the signal that a process gets when its parent dies
STDIN = 0
# A command is forked if one of its arguments contains one of these: Ray's workers, vLLM's engine.
FORKED_COMMANDS = ("default_worker.py", "from multiprocessing.spawn import spawn_main")
SECRETS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")  # Ray sets them after the server was started
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch.cuda.is_available then starts no CUDA
CUDA_DEVICE = "/dev/nvidia-uvm"  # CUDA opens it when it starts. NVML does not
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"  # verl imports them when it is imported
KEY = "ray_kwargs.ray_init.runtime_env.env_vars.PRELOAD_MODULES"


# --- the driver ----------------------------------------------------------------------------------


class ForkServer(NamedTuple):
    """A server that was started."""

    folder: str  # temporary: the wrapper, the socket and the log
    process: subprocess.Popen[bytes]

    @property
    def python(self) -> str:
        """Return the path of the wrapper. If it is run while the server imports, it waits."""
        return os.path.join(self.folder, "python")

    def set_env(self, **environment: str) -> None:
        """Send variables that all of Ray's workers share."""
        import json

        assert self.process.stdin
        # If the server has ended, its log has the reason. Each wrapper then runs Python itself.
        with contextlib.suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), json.dumps(environment).encode() + b"\n")

    def find_failure(self) -> str:
        """Return why the server has ended; "" if it runs."""
        if self.process.poll() is None:
            return ""
        with open(os.path.join(self.folder, "log")) as log:
            return ([*log] or ["it was killed"])[-1].strip()

    def stop(self) -> None:
        """End the server and remove its folder. A second call, when Python exits, does nothing."""
        import shutil

        self.process.terminate()  # if only stdin ended, the server would finish its imports first
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(modules: list[str]) -> ForkServer:
    """Start a server that imports `modules`."""
    import atexit
    import shlex
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="kit-fork-")
    path = os.path.abspath(__file__)
    client = shlex.join([sys.executable, "-I", "-S", path, "request", folder])
    wrapper = os.path.join(folder, "python")
    with open(wrapper, "w") as script:
        script.write(f'#!/bin/sh\nexec {client} "$@"\n')
    os.chmod(wrapper, 0o700)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        open(os.path.join(folder, "log"), "w") as log,
    ):
        listener.bind(os.path.join(folder, "socket"))
        listener.listen(64)
        parameters = ["serve", str(listener.fileno()), wrapper, *modules]
        process = subprocess.Popen(
            [sys.executable, "-P", path, *parameters],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the driver
            pass_fds=[listener.fileno()],
            # OpenMP reads its number of threads when torch is imported. Ray's workers have 1.
            env={"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": folder, NVML_CHECK: "1"},
        )
    server = ForkServer(folder, process)
    atexit.register(server.stop)
    return server


# --- the client ----------------------------------------------------------------------------------
# Every process starts with it. So it imports only light modules of the standard library.


class Request(NamedTuple):
    """A command to run in a fork. It is sent as a line of JSON, after the descriptors."""

    arguments: list[str]  # of Python
    environment: dict[str, str]
    folder: str
    signal_mask: list[int]
    descriptors: list[int]  # the numbers that the received descriptors have in the client


def request_fork(folder: str, arguments: list[str]) -> int:
    """Run `python ARGUMENTS` in a fork and return its exit status.

    folder: the server's. If the command is not one to fork, or if no server answers, Python
    replaces this process and runs it. If a signal ended the fork, this process ends by the same
    signal.
    """
    server = socket.socket(socket.AF_UNIX)
    descriptors = list_descriptors(server)
    command = "\n".join(arguments)
    pid = None
    if any(name in command for name in FORKED_COMMANDS):
        # no server, or it ended before it forked
        with contextlib.suppress(OSError, ValueError):
            pid = send_request(server, folder, arguments, descriptors)
    if pid is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    return wait_for_child(server, pid, descriptors)


def list_descriptors(server: socket.socket) -> list[int]:
    """Return the numbers of this process's open descriptors, without the server's socket."""
    folder = "/proc/self/fd"
    names = os.listdir(folder)  # it also lists the descriptor that it used, which is closed by now
    opened = [int(name) for name in names if os.path.lexists(f"{folder}/{name}")]
    return [number for number in opened if number != server.fileno()]


def send_request(
    server: socket.socket, folder: str, arguments: list[str], descriptors: list[int]
) -> int:
    """Send a request and return the child's process id. Raises OSError and ValueError."""
    import json

    signal_mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    request = Request(arguments, dict(os.environ), os.getcwd(), signal_mask, descriptors)
    server.connect(os.path.join(folder, "socket"))
    socket.send_fds(server, [b"."], descriptors)
    server.sendall(json.dumps(request).encode() + b"\n")
    return int(server.recv(NUMBER_BYTES, socket.MSG_WAITALL))


def wait_for_child(server: socket.socket, pid: int, descriptors: list[int]) -> int:
    """Wait until the child ends, and return its exit status or end by its signal."""
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for fd in descriptors:
        os.close(fd)  # else a pipe would stay open after the child closes it
    # If the server was killed, it sends no status, and the child was killed too.
    status = int(server.recv(NUMBER_BYTES, socket.MSG_WAITALL) or -signal.SIGKILL)
    if status < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


# --- the server ----------------------------------------------------------------------------------


class Child(NamedTuple):
    """A fork that runs. Both descriptors are readable when it has to be reaped."""

    pid: int
    pid_fd: int  # readable when the child has ended
    client: socket.socket  # readable when the client has ended: it sends nothing more


def serve(listener: socket.socket, wrapper: str, modules: list[str]) -> None:
    """Import the modules, then fork for each client until stdin ends.

    wrapper: path of the script that is started instead of Python.
    """
    import atexit
    import gc
    import select

    variables = import_modules(modules)
    # Ray tells a fork its GPUs later. CUDA must not start before, since it reads them only then.
    variables[NVML_CHECK] = "1"
    # Without this, the first garbage collection of each fork would write to every page. That would
    # copy the page.
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report objects that were not collected
    children: list[Child] = []
    while True:
        watched: list[Any] = [STDIN, listener]
        for child in children:
            watched += [child.pid_fd, child.client]
        ready, _, _ = select.select(watched, [], [])
        if STDIN in ready:
            return
        for child in list(children):
            if child.pid_fd in ready or child.client in ready:
                children.remove(child)
                reap(child, kill=child.pid_fd not in ready)
        if listener in ready:
            children.append(spawn(listener, wrapper, variables))


def import_modules(modules: list[str]) -> dict[str, str]:
    """Import the modules, and return the environment variables that they set.

    Before `ray`, wait for the environment that `set_env` sends. When ray is imported, it reads from
    the environment which raylet the process has. Exits with an error if a module starts CUDA.
    """
    import importlib
    import json

    before = dict(os.environ)
    for module in modules:
        if module == "ray":
            line = sys.stdin.readline()
            if not line:
                sys.exit()
            shared = json.loads(line)
            os.environ.update(shared)
            before |= shared
        importlib.import_module(module)
        if module == "ray":
            monkey_patch_actor_class_ids()
        if CUDA_DEVICE in map(read_link, os.scandir("/proc/self/fd")):
            sys.exit(f"The import of {module} started CUDA, which no fork could use then.")
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def read_link(entry: os.DirEntry[str]) -> str:
    """Return the file of a descriptor; "" if it is closed by now."""
    try:
        return os.readlink(entry)
    except FileNotFoundError:
        return ""


def monkey_patch_actor_class_ids() -> None:
    """Have ray draw the ids of actor classes from the operating system.

    Ray draws all ids from a generator in C++ that is seeded at the first draw. A module with a
    `ray.remote` class draws one when it is imported. If that happened before the forks, every fork
    would draw the same ids. Calls of two actors to a third one would then have the same ids, and
    Ray would abort.
    """
    import ray.actor

    class_id: Any = ray.ActorClassID

    class RandomActorClassID:
        @staticmethod
        def from_random() -> ray.ActorClassID:
            return class_id(os.urandom(class_id.size()))

    ray.actor.ActorClassID = RandomActorClassID  # type: ignore[misc,assignment]


def spawn(listener: socket.socket, wrapper: str, variables: dict[str, str]) -> Child:
    """Accept a client, fork a child that runs its request, and send its process id to the client.

    Only the server returns from this function. The child runs its command and exits. variables:
    those that the imports have set, and would set in the child.
    """
    import ctypes
    import json

    client, _ = listener.accept()
    _, descriptors, _, _ = socket.recv_fds(client, 1, MAX_DESCRIPTORS)
    request = client.makefile().readline()
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:  # it ended before the call
            sys.exit()
        listener.close()
        client.close()
        received = Request(*json.loads(request))
        environment = variables | received.environment
        exec_as(received._replace(environment=environment), descriptors, wrapper)
        sys.exit()
    for fd in descriptors:
        os.close(fd)
    with contextlib.suppress(OSError):  # the client has ended: `serve` then kills the child
        client.sendall(f"{pid:{NUMBER_BYTES}}".encode())
    return Child(pid, os.pidfd_open(pid), client)


def reap(child: Child, kill: bool) -> None:
    """Wait for the end of a child, send its exit status to the client, and close both.

    kill: kill the child first, since its client has ended.
    """
    if kill:
        os.kill(child.pid, signal.SIGKILL)
    _, wait_status = os.waitpid(child.pid, 0)
    status = os.waitstatus_to_exitcode(wait_status)
    with contextlib.suppress(OSError):  # the client has ended
        child.client.sendall(f"{status:{NUMBER_BYTES}}".encode())
    os.close(child.pid_fd)
    child.client.close()


# --- the child -----------------------------------------------------------------------------------


def exec_as(request: Request, received: list[int], wrapper: str) -> None:
    """Run what `python ARGUMENTS` would run, in the state of the client.

    received: the client's descriptors, in the order of request.descriptors.
    """
    os.setpgid(0, 0)  # Ray's raylet kills the whole process group of a worker
    renumber(received, request.descriptors)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    reset_libraries(wrapper)
    run_main(request.arguments)


def renumber(received: list[int], numbers: list[int]) -> None:
    """Give the received descriptors the numbers that they have in the client."""
    import fcntl

    # First copy to numbers above all in use, so that no descriptor is overwritten too early.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(copies, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def reset_libraries(wrapper: str) -> None:
    """Set the state of libraries that a new process would have."""
    import importlib
    import multiprocessing
    import tempfile

    import numpy
    import setproctitle

    # The run sets these variables when it has checked the recipe, which is after the imports.
    hub = sys.modules.get("huggingface_hub.constants")
    if hub:
        hub.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"  # type: ignore[attr-defined]
    if "verl" in sys.modules:
        for module in filter(None, os.environ.get(EXTERNAL_MODULES, "").split(",")):
            importlib.import_module(module)
    raylet = sys.modules.get("ray._raylet")
    if raylet:  # setproctitle's own function needs the original environment
        setproctitle.setproctitle = raylet.setproctitle
    numpy.random.seed()  # Python's random seeds itself again after a fork
    tempfile.tempdir = None  # it was read from the server's environment
    multiprocessing.set_executable(wrapper)


def run_main(arguments: list[str]) -> None:
    """Run Python's arguments: options, `-c CODE` or a script, and its arguments."""
    import runpy
    import types

    first = 0
    while arguments[first].startswith("-") and arguments[first] != "-c":
        first += 1
    sys.argv = arguments[first:]
    if arguments[first] == "-c":
        code = sys.argv.pop(1)
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(code, vars(main))
    else:
        runpy.run_path(arguments[first], run_name="__main__")


if __name__ == "__main__":
    role, *parameters = sys.argv[1:]
    if role == "serve":
        serve(socket.socket(fileno=int(parameters[0])), parameters[1], parameters[2:])
    else:
        sys.exit(request_fork(parameters[0], parameters[1:]))
else:
    from kit.errors import RunError
    from kit.run import isolation
    from kit.run.features import RecipeCheck, RunPart

    class Preload(RecipeCheck, RunPart):
        """Workers that are forks of one process."""

        # of the class: features are pickled
        _server: ForkServer | None = None  # for the next run
        _running: ForkServer | None = None

        def begin_imports(self, settings: Settings) -> None:
            """Start the server, so that it imports the modules while the recipe is checked."""
            modules = os.environ["PRELOAD_MODULES"].split()
            if not settings.has_episodes or settings.rollout.name != "vllm":
                modules = [module for module in modules if "vllm" not in module]
            with isolation.show_logical_gpus(settings.trainer.device):
                Preload._server = start(modules)

        def before_ray(self, launch: Launch) -> None:
            """Make Ray start its workers through the server."""
            import shutil

            if not Preload._server:
                self.begin_imports(launch.recipe)
            server = Preload._server
            assert server
            Preload._server = None
            Preload._running = server
            launch.stack.callback(server.stop)
            log = os.path.join(server.folder, "log")
            launch.stack.callback(shutil.copy, log, launch.logs / "fork.log")
            if launch.run.stages.monitor:
                launch.run.stages.monitor.register_folder(server.folder)
            launch.python = server.python

            def set_variables(raylet_pid: int | None) -> None:
                """Give the server the variables that Ray gives to its workers."""
                import ray

                job = ray.get_runtime_context().get_job_id()
                secrets = {name: os.environ[name] for name in SECRETS}
                server.set_env(RAY_JOB_ID=job, RAY_RAYLET_PID=str(raylet_pid), **secrets)

            launch.on_ray.append(set_variables)

        def after_start(self, launch: Launch, addresses: Sequence[str]) -> None:
            """Raise RunError if the server has failed, and the workers imported the modules."""
            assert Preload._running
            reason = Preload._running.find_failure()
            if reason:
                raise RunError(
                    f"The process that imports the workers' modules has ended: {reason} To let "
                    f"each worker import them itself, which takes longer, add {KEY}=''."
                )
