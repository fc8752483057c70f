"""Verifiers that are functions of one's own, or environments that are classes: no server, the same rules.

    env:
      verifier: my_reward.py:compute_score     # of all rows, whatever server they name; no other server is started
      train_files:
        - data/sums.jsonl
        - {path: data/games.jsonl, verifier: my_game.py:Game}                    # of this file's rows
        - {path: data/mcqa.jsonl, server: mcqa}                                  # these go to a Gym server
        - {path: data/gsm8k.jsonl, verifier: {function: my_reward.py:compute_score, strict: true}}  # with settings

A function is called as verl calls it, by these names, and returns a finite number, or a dict with `score`, one:
    data_source     the row's, else the name of the function
    solution_str    what the policy wrote, decoded without special tokens, its thoughts included
    ground_truth    the row's reward_model.ground_truth, else the first that it has of TRUTHS, else None
    extra_info      the row's, with num_turns and rollout_reward_scores as verl's, and all of the row as `row`
The other numbers of the dict are parts of the reward, in the metrics; the rest is kept in the rollouts. `verl` is
verl's own default_compute_score; with the setting sandbox_fusion_url it runs programs there. A class is made once for
each episode: reset(row) -> the first observation, or None, and step(text) -> (observation, reward, done), where text is
what the policy wrote in this turn. All may be async.

They run in processes of their own (verifier_process.py): env.verifier_pool.processes for each, one call at a time in
each of them, of timeout_s seconds at most. An environment travels: each call brings its instance, pickled, and takes it
back, so that what kills a process costs one episode. What a call does wrong is a GymError, so a failed episode:
    raised       an exception, sys.exit too; memory: MemoryError, for want of memory_gb
    bad_answer   it returned no finite number (None, text, a bool, NaN, a dict without score, ...)
    timeout      no answer in time: its process is killed
    died         its process ended: a crash of C code, os._exit, the system short of memory
    too_large    an environment of over 64 MiB, pickled
A process that was lost is started again for the next call. Each function is called once before a run starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import secrets
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import gym_client
from env import Task
from gym_client import GymError, Json
from kit.config import user_functions
from kit.config.load import to_plain
from kit.errors import ConfigError, PluginError
from kit.extras.python_verifiers import sandbox
from kit.extras.python_verifiers.verifier_process import ANSWER, MOST, REQUEST, runs_policy_code
from kit.gym import servers as gym_servers

LOAD_S = 300.0  # seconds to start a process and import what the function does
KILLED_S = 5.0  # seconds for a process to be gone that was killed
MAX_LOG = 16 * 2**20  # bytes of a process's log, after which it begins anew
SANDBOXES = (None, "bwrap")  # env.verifier_pool.sandbox
TRUTHS = ("ground_truth", "expected_answer", "answer")  # where rows of Gym have it
VERL = "verl"  # the name of verl's own
MADE_UP = "So the answer is 7."
KEY, FILES = "env.verifier", ("env.train_files", "env.val_files")


@dataclass(frozen=True)
class Function:
    """A verifier that the recipe names."""

    name: str  # in metrics and rollouts, where others have that of their Gym server
    spec: str  # in the recipe
    key: str  # of the recipe
    path: str = ""  # of its file; empty: verl's own
    settings: Json = field(default_factory=dict)


# --- what a recipe names -------------------------------------------------------------------------


def read(spec: Any, key: str) -> Function:
    """path.py:function, {function: path.py:function, its settings} or `verl`. Raises PluginError."""
    settings = dict(spec) if isinstance(spec, Mapping) else {"function": spec}
    name = str(settings.pop("function", ""))
    if name == VERL:
        return Function(VERL, VERL, key, "", settings)
    attribute = name.rpartition(":")[2]
    if not (user_functions.is_own(name) and attribute.isidentifier()):
        wanted = (
            f"path.py:function, path.py:Class, {VERL}, or {{function: one of these, its settings}}"
        )
        raise PluginError(f"{key}={spec}: wants {wanted}")
    return Function(attribute, name, key, str(user_functions.find(name, key).resolve()), settings)


def of_files(config: DictConfig, key: str) -> list[tuple[Any, Function | None]]:
    """The files of env.train_files or env.val_files, as env.load_tasks takes them, each with the function that verifies
    its rows, if one does: the file's own, or env.verifier where it names no server. Raises PluginError, ConfigError."""
    default = read(spec, KEY) if (spec := to_plain(config.env.verifier)) else None
    found: list[tuple[Any, Function | None]] = []
    files = config.env[key.removeprefix("env.")] or []
    for entry in to_plain(files) if not isinstance(files, str) else ():
        given = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        own = given.pop("verifier", None)
        if own and given.get("server"):
            raise ConfigError(
                f"{key}: {given.get('path')} has a server and a verifier; give it one of them"
            )
        function = (
            read(own, f"{key}: verifier") if own else None if given.get("server") else default
        )
        found.append((given | {"server": function.name} if function else entry, function))
    return found


def of_recipe(config: DictConfig) -> dict[str, Function]:
    """The functions that verify rows of a recipe, by name. Raises PluginError, ConfigError."""
    functions = [read(spec, KEY)] if (spec := to_plain(config.env.verifier)) else []
    functions += [function for key in FILES for _, function in of_files(config, key) if function]
    named: dict[str, Function] = {}
    for function in functions:
        other = named.setdefault(function.name, function)
        if (other.path, other.settings) != (function.path, function.settings):
            both = (
                f"{other.spec} {other.settings or ''} and {function.spec} {function.settings or ''}"
            )
            raise ConfigError(
                f"two verifiers are called {function.name} in the metrics: {both}; rename one"
            )
        if function.name in config.gym.servers:
            raise ConfigError(
                f"{function.key}={function.spec}: gym.servers has a {function.name} too; rename one"
            )
    return named


def leave_out_servers(config: DictConfig) -> None:
    """With env.verifier no Gym server is asked but those that a file names: take the others out of the recipe."""
    entries = [entry for key in FILES for entry in config.env[key.removeprefix("env.")] or ()]
    asked = {entry.get("server") for entry in entries if isinstance(entry, Mapping)}
    for name in [name for name in config.gym.servers if config.env.verifier and name not in asked]:
        del config.gym.servers[name]
    if config.env.verifier and not config.gym.servers:
        config.gym.judges = {}  # whom nobody asks then


def check(config: DictConfig) -> Iterator[Exception]:
    """What is wrong with the verifiers of a recipe, as far as the recipe and the files' names say."""
    try:
        of_recipe(config)
    except (PluginError, ConfigError) as error:
        yield error
    pool = config.env.verifier_pool
    for key, least in (("processes", 1), ("timeout_s", 0), ("memory_gb", 0)):
        value, whole = pool[key], key == "processes"
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (whole and value is None) and not (
            number and (value >= least if whole else value > least)
        ):
            yield ConfigError(
                f"env.verifier_pool.{key}={value}: wants {'1 or more' if whole else 'more than 0'}"
            )
    if pool.get("sandbox") not in SANDBOXES:
        yield ConfigError(f"env.verifier_pool.sandbox={pool.sandbox}: choose null or bwrap")
    elif pool.get("sandbox") and (why := sandbox.why_unavailable()):
        yield ConfigError(f"env.verifier_pool.sandbox={pool.sandbox}: {why}, or set it to null")


def runs_code(function: Function, data_sources: Iterable[Any]) -> bool:
    """Whether it has verl run what the policy wrote on this machine."""
    return not function.path and any(
        runs_policy_code(source, function.settings) for source in data_sources
    )


def told(config: DictConfig, functions: Sequence[Function]) -> str:
    """Which functions verify, and in what, for the summary of a recipe."""
    names = ", ".join(f"{f.spec} {f.settings or ''}".strip() for f in functions)
    pool = config.env.verifier_pool
    return f"{names}: {processes(config)} processes, {pool.timeout_s:g} s a call, {pool.memory_gb:g} GiB each"


def processes(config: DictConfig) -> int:
    """env.verifier_pool.processes: where it is not set, as many as there are cores."""
    return config.env.verifier_pool.processes or len(os.sched_getaffinity(0))


# --- processes -----------------------------------------------------------------------------------


class Worker:
    """One process of a pool, started when it is first called, and again after it was lost."""

    def __init__(self, function: Function, config: DictConfig, log: Path):
        self.function, self.log, self.pool = function, log, config.env.verifier_pool
        self.process: Process | None = None
        self.last: Process | None = None  # that was started
        self.kind = ""  # `verify` or `step`, once the function is loaded

    async def call(self, what: str, *arguments: Any) -> tuple[Json, bytes]:
        """What the function says, and an environment's instance. Raises GymError."""
        if self.process is None or self.process.returncode is not None:
            await self.start()
        return await self.ask(self.pool.timeout_s, what, *arguments)

    async def start(self) -> None:
        """A process that has loaded the function. Raises GymError."""
        function = self.function
        code = f"import sys; sys.path.insert(0, {str(user_functions.ROOT)!r}); "
        code += "from kit.extras.python_verifiers.verifier_process import serve; "
        command = [
            sys.executable,
            "-u",
            "-P",
            "-c",
            code + f"serve({int(self.pool.memory_gb * 2**30)})",
        ]
        variables = environment(self.pool)
        if self.pool.get("sandbox"):
            folders = [Path.cwd(), Path(function.path).parent] if function.path else [Path.cwd()]
            command, variables = sandbox.wrap(command, folders), variables | {"KIT_SANDBOX": "1"}
        with self.log.open("ab") as log:
            try:
                self.process = self.last = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=log,
                    limit=MOST,
                    env=variables,
                    start_new_session=True,
                )
            except OSError as error:
                raise GymError(
                    "died", f"{function.spec}: no process could be started for it: {error}"
                ) from None
        answer, _ = await self.ask(LOAD_S, "load", function.path, function.name, function.settings)
        self.kind = answer["kind"]

    async def ask(self, seconds: float, what: str, *arguments: Any) -> tuple[Json, bytes]:
        """One request. A process that does not answer in `seconds`, or that nobody waits for, is killed. Raises
        GymError."""
        process, begin, name = self.process, self.shorten_log(), self.function.spec
        assert process and process.stdin and process.stdout
        whole = False  # whether there was an answer
        number = secrets.randbits(64)
        try:
            async with asyncio.timeout(seconds):
                request = pickle.dumps([seconds, what, *arguments])
                process.stdin.write(REQUEST.pack(number, len(request)) + request)
                await process.stdin.drain()
                answered, *sizes = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
                if answered != number or sum(sizes) > MOST:
                    why = "it wrote an answer to no request, or one that is too long"
                    raise GymError("bad_answer", f"{name}: {why}; its log is {self.log}")
                text, world = [await process.stdout.readexactly(size) for size in sizes]
            answer, whole = gym_client._sound(json.loads(text)), True
        except TimeoutError:
            todo = "mend that" + ", or raise env.verifier_pool.timeout_s" * (what != "load")
            did = "was not imported" if what == "load" else "gave no answer"
            raise GymError(
                "timeout", f"{name} {did} within {seconds:g} s{self.where(begin)}; {todo}"
            ) from None
        except (
            asyncio.IncompleteReadError,
            OSError,
            ValueError,
        ):  # the last: no JSON, so not of the worker's own
            self.kill()
            how = f"{status(await gone(process))}{self.where(begin)}"
            raise GymError(
                "died", f"{name}: its process ended with {how}; its log is {self.log}"
            ) from None
        finally:
            if not whole:
                self.kill()
        if why := answer.get("failed"):
            self.kill() if why == "memory" or what == "load" else None
            lack = f"; a process has {self.pool.memory_gb:g} GiB (env.verifier_pool.memory_gb)" * (
                why == "memory"
            )
            raise GymError(why, f"{name}{':' * (what == 'load')} {answer['why']}{lack}")
        return answer, world

    def where(self, begin: int) -> str:
        """The line that was under way, as faulthandler wrote into the log after its first `begin` bytes."""
        with self.log.open("rb") as log:
            log.seek(max(begin, self.log.stat().st_size - 2**16))
            frames = re.findall(r'File "(.+?)", line (\d+) in', log.read().decode(errors="replace"))
        own = [frame for frame in frames if frame[0] == self.function.path] or frames
        return f" at {own[0][0]}:{own[0][1]}" if own else ""

    def shorten_log(self) -> int:
        """The size of the log in bytes, which begins anew if it is over MAX_LOG."""
        size = self.log.stat().st_size
        if size <= MAX_LOG:
            return size
        os.truncate(self.log, 0)  # the process appends to it
        return 0

    def kill(self) -> None:
        """Kill the process and all that it has started, also what has left its process group."""
        if self.process and self.process.returncode is None:
            sandbox.kill_tree(self.process.pid)
        elif self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None

    async def close(self) -> None:
        """No process is left."""
        self.kill()
        if self.last:
            await gone(self.last)


def environment(pool: DictConfig) -> dict[str, str]:
    """The environment of a process: without variables named like a secret, unless env.verifier_pool.env names them."""
    variables = gym_servers.without_secrets(pool.get("env") or ())
    return variables | {"OMP_NUM_THREADS": "1"}  # there is a process for each core


async def gone(process: Process) -> int:
    """The exit status of a process that was killed. Its pipes are waited for too, but not for ever: somebody else may
    hold them."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILLED_S):
            return await process.wait()
    return process.returncode or 0


def status(code: int) -> str:
    """How a process ended."""
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


class Pool:
    """The processes of one function, of which the one used last is used next: no more are started than are needed."""

    def __init__(self, function: Function, config: DictConfig, logs: Path):
        count = processes(config)
        self.function, self.places = function, asyncio.Semaphore(count)
        self.may_run_code = bool(
            config.env.verifier_pool.get("sandbox") or config.env.get("allow_unsandboxed_code")
        )
        self.workers = [
            Worker(function, config, logs / f"verifier_{function.name}_{k}.log")
            for k in range(count)
        ]
        self.idle, self.known = self.workers[::-1], ""

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """One that has nothing to do, in its turn."""
        async with self.places:
            worker = self.idle.pop()
            try:
                yield worker
            finally:
                self.idle.append(worker)

    async def kind(self) -> str:
        """`verify` of a function, `step` of a class. Raises GymError."""
        while not self.known:
            async with self.worker() as worker:
                if not self.known:
                    await worker.start()
                    self.known = worker.kind
        return self.known

    async def call(self, what: str, *arguments: Any) -> tuple[Json, bytes]:
        """`Worker.call`; the time in which all are busy does not count. Raises GymError."""
        async with self.worker() as worker:
            return await worker.call(what, *arguments)

    async def close(self) -> None:
        """No process is left."""
        await asyncio.gather(*(worker.close() for worker in self.workers))


# --- as Gym servers ------------------------------------------------------------------------------


class Session:
    """An episode's conversation with a function: what inference.py asks of a gym_client.Session."""

    executable: frozenset[str] = frozenset()  # tools: none, so that a call is an answer

    def __init__(self, pool: Pool, kind: str, row: Json, tokenizer: Any):
        self.pool, self.kind, self.row, self.tokenizer = pool, kind, row, tokenizer
        self.observation: str | None = None
        self.last_ids: list[int] = []  # of the policy's last answer
        self.world = b""  # the environment's instance, pickled

    async def open(self) -> None:
        """A new environment, where there is one. Raises GymError."""
        if self.kind == "step":
            said, self.world = await self.pool.call("reset", self.row)
            self.observation = said["observation"]

    @property
    def text(self) -> str:
        """What the policy wrote last, as verl reads it."""
        return str(self.tokenizer.decode(self.last_ids, skip_special_tokens=True))

    async def verify(self, _: Json) -> gym_client.Verdict:
        """The function's reward of the last answer. Raises GymError."""
        function = self.pool.function
        called_with = arguments(self.row, self.text, function.name)
        is_code = runs_code(function, [called_with["data_source"]])
        if (
            is_code and not self.pool.may_run_code
        ):  # rows that a function makes are not all known before the run
            why = (
                f"data_source={called_with['data_source']} runs code of the policy on this machine"
            )
            fix = "set env.verifier_pool.sandbox=bwrap, or env.allow_unsandboxed_code=true"
            raise GymError(
                "raised", f"{function.spec}: {why}, which the recipe does not allow; {fix}"
            )
        said, _world = await self.pool.call("score", called_with)
        verdict = gym_client.parse_verdict(said, said["_seconds"], self.row)
        if is_code and not 0 <= verdict.reward <= 1:
            why = f"a reward of {verdict.reward:g}, though this scorer of verl's pays from 0 to 1"
            raise GymError("bad_answer", f"{function.spec}: {why}")
        return verdict

    async def step(self, _: Json) -> gym_client.Turn:
        """What the environment makes of the last answer. Raises GymError."""
        said, self.world = await self.pool.call("step", self.world, self.text)
        return gym_client.Turn(said["observation"], said["reward"], said["done"], False)


def arguments(row: Json, text: str, name: str) -> Json:
    """What a function is called with, as by verl 0.9.1 (experimental/reward_loop/reward_manager/naive.py)."""
    model, extra = row.get("reward_model"), row.get("extra_info")
    truth = next((row[key] for key in TRUTHS if key in row), None)
    extra = (
        {"row": row}
        | (extra if isinstance(extra, dict) else {})
        | {"num_turns": 2, "rollout_reward_scores": {}}
    )
    return {
        "data_source": row.get("data_source") or name,
        "solution_str": text,
        "ground_truth": model["ground_truth"]
        if isinstance(model, dict) and "ground_truth" in model
        else truth,
        "extra_info": extra,
    }


class Verifiers:
    """All that verifies the rows of a run, by name: a function of `functions`, else a server of `gym`, which this is to
    the rest of the kit. Use as `async with Verifiers(...)`."""

    def __init__(
        self,
        gym: gym_client.Gym,
        functions: Sequence[Function],
        config: DictConfig,
        tokenizer: Any,
        logs: Path,
    ):
        self.gym, self.tokenizer = gym, tokenizer
        self.pools = {function.name: Pool(function, config, logs) for function in functions}
        self.run = gym.run

    async def __aenter__(self) -> Verifiers:
        await self.gym.__aenter__()
        return self

    async def __aexit__(self, *_: Any) -> None:
        for pool in self.pools.values():
            await pool.close()
        await self.gym.__aexit__()

    async def kind(self, server: str) -> str:
        """`verify`, `step` or `agent`. Raises GymError."""
        return (
            await self.pools[server].kind() if server in self.pools else await self.gym.kind(server)
        )

    @contextlib.asynccontextmanager
    async def session(self, server: str, row: Json) -> AsyncIterator[Session | gym_client.Session]:
        """An open session for one episode of `row`. Raises GymError."""
        if server in self.pools:
            session = Session(self.pools[server], await self.kind(server), row, self.tokenizer)
            await session.open()
            yield session
        else:
            async with self.gym.session(server, row) as theirs:
                yield theirs

    async def aggregate(self, server: str, records: Sequence[Json]) -> Json | None:
        """As gym_client.Gym has it; a function has no metrics of its own."""
        return None if server in self.pools else await self.gym.aggregate(server, records)


# --- tried out -----------------------------------------------------------------------------------


def try_out(
    functions: Mapping[str, Function], tasks: Sequence[Task], config: DictConfig, tokenizer: Any
) -> None:
    """Have each function verify a made-up answer to its first row (and to that of each other data_source): a mistake
    should not wait for the workers. Raises PluginError."""
    with (
        tempfile.TemporaryDirectory() as logs,
        asyncio.Runner(loop_factory=asyncio.new_event_loop) as loop,
    ):
        loop.run(_try_all(functions, tasks, config, tokenizer, Path(logs)))


async def _try_all(
    functions: Mapping[str, Function],
    tasks: Sequence[Task],
    config: DictConfig,
    tokenizer: Any,
    logs: Path,
) -> None:
    ids = tokenizer.encode(MADE_UP, add_special_tokens=False)
    rows = {(task.server, str(task.row.get("data_source"))): task for task in reversed(tasks)}
    async with Verifiers(
        gym_client.Gym({}), list(functions.values()), config, tokenizer, logs
    ) as verifiers:
        for name, function in functions.items():
            where = ""
            try:
                await verifiers.kind(name)
                for task in [task for (server, _), task in rows.items() if server == name]:
                    where = (
                        f" (tried on {task.row_id} and the answer {MADE_UP!r}; nothing was started)"
                    )
                    async with verifiers.session(name, task.row) as session:
                        session.last_ids = ids
                        await (session.verify({}) if session.kind == "verify" else session.step({}))
            except GymError as error:
                if error.reason != "masked":  # it may disown its verdict
                    raise PluginError(f"{function.key}={error}{where}") from None
