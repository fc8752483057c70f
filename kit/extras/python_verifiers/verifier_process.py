"""The process that a verifier which is a function runs in, apart from the driver; verifier_pool.py starts and asks it.

A request is a pickled list on stdin: load, score, reset or step, and its arguments. An answer is JSON on stdout (the
result, or `failed`, a reason as in gym_client, and `why`) and the bytes of an environment's instance. It carries the
random number of its request, so that nobody can answer a later one in advance. The function prints to stderr.

Only this process can write answers: in a child that it forks, the two pipes are /dev/null. If verl's scorer runs or
evaluates code of the policy, a forked process makes the call, and all that the code started is killed after it
(`isolated`). That code can still cheat the scorer, which verl runs in the same process. It can give its own
episode at most 1, the reward of a right answer. It cannot change the reward of another episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import pickle
import reprlib
import resource
import signal
import struct
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

MOST = 64 * 2**20  # bytes of an answer
REQUEST = struct.Struct("!QQ")  # number of a request, and its bytes
ANSWER = struct.Struct(
    "!QQQ"
)  # number of the request, bytes of the answer's JSON, of the instance after it
MAX_RESULT, MAX_FILE = (
    2**16,
    64 * 2**20,
)  # bytes: of an isolated call's result; of a file that such a call writes
SANDBOX_PROCESSES = (
    256  # of a call's program, in a sandbox, which counts them apart from the user's others
)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36  # of prctl(2)
SCORE = (
    "data_source",
    "solution_str",
    "ground_truth",
    "extra_info",
)  # verl's names; by these a function is called
SCORED = "a finite number, or a dict with `score`, which is one"
STEPPED = "(observation, reward, done): text or None, a finite number, True or False"
# Data sources whose answers verl's own scorer runs as programs, and those whose answers it evaluates as Python:
# math_equal in verl/utils/reward_score/prime_math/grader.py calls eval and sympy's parse_expr.
PROGRAMS = ("codecontests", "apps", "codeforces", "taco")
EVALUATED = tuple(
    f"numina_{name}"
    for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
)
SANDBOX_SAID = (  # of a program; all else that verl 0.9.1 notes of a test is no verdict
    *("success", "wrong_answer", "runtime_error", "timeout", "compile_error", "compile_timeout"),
    *("compile_error_skipped", "Invalid completion (missing code block)"),
)
Json = dict[str, Any]


class Unusable(Exception):  # noqa: N818  a verdict on the function; the message says what is wrong
    """A function that cannot be called as a verifier."""


@functools.cache
def module_at(path: Path) -> ModuleType:
    """The module of a file, whatever other module has its name. Raises whatever the file does."""
    name = f"{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def verls_own() -> Callable[..., Any]:
    """verl's default_compute_score, without what `import verl` brings: torch and Ray, 10 s and 0.5 GB a process."""
    for name in ("verl", "verl.utils"):  # packages whose __init__ is not run
        sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))  # type: ignore[arg-type]
    verls = importlib.import_module("verl.utils.reward_score")

    def compute_score(  # verl's arguments, of which each that is misspelt is to be told
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Any = None,
        sandbox_fusion_url: str | None = None,
        memory_limit_mb: int = 1024,  # of each program, as verl's reward.sandbox_fusion
    ) -> Any:
        if not sandbox_fusion_url or data_source not in PROGRAMS:
            return verls.default_compute_score(data_source, solution_str, ground_truth, extra_info)
        sandbox = importlib.import_module("verl.utils.reward_score.sandbox_fusion")
        value, cases = sandbox.compute_score(
            sandbox_fusion_url, None, memory_limit_mb, solution_str, ground_truth, continuous=True
        )
        for number, case in enumerate(cases):  # verl's makes 0 of a sandbox that is down
            if case.get("status", case.get("error")) not in SANDBOX_SAID:
                why = case.get("api_request_error") or case.get("error") or case["status"]
                raise RuntimeError(
                    f"the sandbox at {sandbox_fusion_url} has no verdict on test {number}: {why}"
                )
        return value

    return compute_score


def load(path: str, attribute: str, settings: Mapping[str, Any]) -> Any:
    """What is called: a function, or a class with reset and step, with its settings. path: empty for verl's own.

    Raises Unusable."""
    if not path:
        module: Any = None
        found: Any = verls_own()
    else:
        try:
            module = module_at(Path(path))
        except Exception as error:
            why = f"{failure(error, path)['why']}; run `python {path}` to see where"
            raise Unusable(f"{path} cannot be imported: {why}") from error
        found = getattr(module, attribute, None)
    if not callable(found):
        own = [
            n
            for n, f in vars(module).items()
            if getattr(f, "__module__", "") == module.__name__ and callable(f)
        ]
        raise Unusable(
            f"{path} has no function or class {attribute}; it has {', '.join(own) or 'none'}"
        )
    try:
        if not inspect.isclass(found):
            inspect.signature(found).bind(**dict.fromkeys(SCORE), **settings)
            return functools.partial(found, **settings)
        for method in ("reset", "step"):
            if not callable(getattr(found, method, None)):
                wanted = f"reset(row) -> text or None, and step(text) -> {STEPPED}"
                raise Unusable(
                    f"the class {attribute} of {path} has no {method}; an environment has {wanted}"
                )
            inspect.signature(getattr(found, method)).bind(
                None, None
            )  # itself, and the row or the text
        inspect.signature(found).bind(**settings)
    except TypeError as error:
        how = (
            "reset(row) and step(text)"
            if inspect.isclass(found)
            else f"{', '.join(SCORE)}, by these names,"
        )
        where = f" of {path}" if path else ""
        raise Unusable(
            f"{attribute}{where} cannot be called with {how} and its settings: {error}"
        ) from None
    return functools.partial(found, **settings)


# --- a call, and what comes back -----------------------------------------------------------------


def score(
    function: Callable[..., Any], runner: asyncio.Runner, arguments: Json
) -> tuple[Json, bytes]:
    """What compute_score says, as the JSON of a verdict: the other numbers of its dict (a bool is 0 or 1) are parts of
    the reward, the rest is told as it is, or as its repr. Raises Unusable for what is no score."""
    value = awaited(function(**arguments), runner)
    parts = dict(value) if isinstance(value, Mapping) else {"score": value}
    reward = number(parts.pop("score", None))
    numeric = {
        str(n): float(p) if isinstance(p, bool) else number(p)
        for n, p in parts.items()
        if is_number(p)
    }
    if reward is None or None in numeric.values():
        raise Unusable(f"returned {reprlib.repr(value)}; it must return {SCORED}")
    told = {str(name): plain(part) for name, part in parts.items() if not is_number(part)}
    return {**told, "reward": reward, "reward_components": numeric}, b""


def reset(make: Callable[[], Any], runner: asyncio.Runner, row: Json) -> tuple[Json, bytes]:
    """A new environment's first observation, and the environment. Raises Unusable."""
    world = make()
    observation = awaited(world.reset(row), runner)
    if not isinstance(observation, str | None):
        raise Unusable(f"reset returned {reprlib.repr(observation)}; it must return text or None")
    return {"observation": observation}, pickled(world)


def step(_: Any, runner: asyncio.Runner, world: bytes, text: str) -> tuple[Json, bytes]:
    """What an environment makes of the policy's words, and the environment as it is then. Raises Unusable."""
    alive = pickle.loads(world)
    value = awaited(alive.step(text), runner)
    observation, reward, done = (
        value if isinstance(value, tuple) and len(value) == 3 else (0, None, None)
    )
    done = (
        bool(done) if isinstance(done, bool) or str(getattr(done, "dtype", "")) == "bool" else None
    )
    if (
        not isinstance(observation, str | None)
        or (reward := number(reward)) is None
        or done is None
    ):
        raise Unusable(f"step returned {reprlib.repr(value)}; it must return {STEPPED}")
    return {"observation": observation, "reward": reward, "done": done}, b"" if done else pickled(
        alive
    )


def awaited(value: Any, runner: asyncio.Runner) -> Any:
    """A value, or what an async function comes to."""

    async def wait(result: Awaitable[Any]) -> Any:
        return await result

    return runner.run(wait(value)) if inspect.isawaitable(value) else value


def pickled(world: Any) -> bytes:
    """An environment for the next step, which any process may take. Raises Unusable."""
    try:
        return pickle.dumps(world)
    except Exception as error:  # of its own __reduce__, too
        why = f"{type(error).__name__}: {error}"
        way_out = "keep numbers, text, lists and arrays in it, since its next step may run in another process"
        raise Unusable(
            f"an instance of {type(world).__name__} cannot be pickled ({why}); {way_out}"
        ) from error


def is_number(value: Any) -> bool:
    """A bool is one here; so are NumPy's."""
    return isinstance(value, numbers.Real)


def number(value: Any) -> float | None:
    """A finite number that is no bool, else None; as large as gym_client takes them."""
    fine = is_number(value) and not isinstance(value, bool) and abs(value) < 1e308
    return float(value) if fine else None


def plain(value: Any) -> Any:
    """A value that JSON takes, else its repr."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return reprlib.repr(value)
    return value


def failure(error: BaseException, path: str) -> Json:
    """Why there is no answer, with the line of the function's own file."""
    if isinstance(error, Unusable):
        return {"failed": "bad_answer", "why": str(error)}
    lines = [
        line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == path
    ]
    try:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # of its own __str__
        said = type(error).__name__
    where = f"failed at {path}:{lines[-1]}" if lines else "failed"
    return {
        "failed": "memory" if isinstance(error, MemoryError) else "raised",
        "why": f"{where}: {said:.500}",
    }


# --- programs of the policy ----------------------------------------------------------------------


def runs_policy_code(data_source: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether verl's own scorer, with these settings, runs code of the policy in this process or a child."""
    if data_source in EVALUATED:
        return True
    return data_source in PROGRAMS and not settings.get("sandbox_fusion_url")


def is_isolated(path: str, what: str, function: Any, arguments: list[Any]) -> bool:
    """Return whether a call may run code of the policy, and gets a process for itself."""
    if path or what != "score":
        return False
    return runs_policy_code(arguments[0].get("data_source"), function.keywords)


def import_scorer(data_source: str) -> None:
    """Import verl's scorer, so that not each forked process imports it: sympy takes seconds."""
    name = "prime_math" if data_source in EVALUATED else "prime_code"
    importlib.import_module(f"verl.utils.reward_score.{name}")


def isolated(call: Callable[[], tuple[Json, bytes]], memory: int) -> Json:
    """Return the result of `call`, made by a forked process; then kill all that it has started.

    The result is read as JSON of at most MAX_RESULT bytes, and never unpickled. memory: bytes. Raises Unusable.
    """
    result, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(result)
        _answer_and_exit(call, write, memory)
    os.close(write)
    with os.fdopen(result, "rb") as file:
        line = file.readline(MAX_RESULT)
    kill_descendants(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    try:
        answer = json.loads(line)
    except ValueError:
        raise Unusable("the program ended its scorer, or its result is too long") from None
    if isinstance(answer, dict) and answer.get("failed") in ("raised", "memory", "bad_answer"):
        return {"failed": answer["failed"], "why": str(answer.get("why"))}
    reward = number(answer.get("reward")) if isinstance(answer, dict) else None
    if reward is None or not 0 <= reward <= 1:
        raise Unusable(
            f"the scorer of a program returned {reprlib.repr(answer)}; its score is between 0 and 1"
        )
    return {"reward": reward, "reward_components": {}}


def _answer_and_exit(call: Callable[[], tuple[Json, bytes]], write: int, memory: int) -> None:
    """In the forked process: write the result of `call` to the pipe `write`, which its own children do not get."""
    os.register_at_fork(after_in_child=functools.partial(_disconnect, write))
    bound_program(memory)
    try:
        answer, _ = call()
    except BaseException as error:
        answer = failure(error, "")
    os.write(write, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def bound_program(memory: int) -> None:
    """Limit memory to `memory` bytes more than now, mapped memory included; limit file sizes and processes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    addresses = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    if os.environ.get("KIT_SANDBOX"):
        resource.setrlimit(resource.RLIMIT_NPROC, (SANDBOX_PROCESSES, SANDBOX_PROCESSES))


def kill_descendants(pid: int, deadline_s: float = math.inf) -> None:
    """Kill all descendants of a process, until none is left or the deadline is over.

    The process must be a subreaper (PR_SET_CHILD_SUBREAPER): then the children of its dead children are still its
    descendants. Raises psutil.NoSuchProcess.
    """
    import psutil  # not needed by most functions

    root, begun = psutil.Process(pid), time.monotonic()
    while True:
        killed = 0
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
                if child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    killed += 1
        if not killed or time.monotonic() - begun > deadline_s:
            return
        time.sleep(0.005)


def _disconnect(*descriptors: int) -> None:
    """In a forked child: replace these pipes by /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


# --- requests ------------------------------------------------------------------------------------


def protect_process(memory: int) -> None:
    """End with the driver; bound memory (bytes); adopt orphans; keep others of the user out of this process."""
    Path("/proc/self/oom_score_adj").write_text(
        "1000"
    )  # before the driver, if the machine runs out of memory
    resource.setrlimit(
        resource.RLIMIT_DATA, (memory, memory)
    )  # not of addresses: libraries reserve many
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)  # nobody but root may open its memory or its pipes by /proc


def serve(memory: int) -> None:
    """Answer requests until there are no more. memory: bytes."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a function may print; that is no answer
    os.register_at_fork(
        after_in_child=functools.partial(_disconnect, asked.fileno(), answers.fileno())
    )
    protect_process(memory)
    faulthandler.enable()
    calls: dict[str, Callable[..., tuple[Json, bytes]]] = {
        "score": score,
        "reset": reset,
        "step": step,
    }
    function, path = None, ""
    with asyncio.Runner() as runner:
        while head := asked.read(REQUEST.size):
            began, world = time.perf_counter(), b""
            request, size = REQUEST.unpack(head)
            try:
                seconds, what, *arguments = pickle.loads(asked.read(size))
                faulthandler.dump_traceback_later(0.9 * seconds)  # where it is, for whoever ends it
                if what == "load":
                    path = arguments[0]
                    function = load(*arguments)
                    answer = {"kind": "step" if inspect.isclass(function.func) else "verify"}
                elif is_isolated(path, what, function, arguments):
                    import_scorer(arguments[0]["data_source"])
                    call = functools.partial(calls[what], function, runner, *arguments)
                    answer = isolated(call, memory)
                else:
                    answer, world = calls[what](function, runner, *arguments)
            except BaseException as error:  # sys.exit, too: none of them is an answer
                answer, world = failure(error, path), b""
            faulthandler.cancel_dump_traceback_later()
            text = json.dumps({**answer, "_seconds": time.perf_counter() - began}).encode()
            if len(text) + len(world) > MOST:
                why = f"leaves {len(text) + len(world)} bytes after {what} (a verdict, an instance pickled), over {MOST}"
                text, world = json.dumps({"failed": "too_large", "why": why}).encode(), b""
            answers.write(ANSWER.pack(request, len(text), len(world)) + text + world)
            answers.flush()
