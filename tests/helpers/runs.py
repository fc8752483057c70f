"""Whole runs of algorithm.py in new processes, and folders of runs that never ran."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import gym_client
from kit.data.episode import Episode, append_tokens
from kit.data.json_lines import read_metrics
from kit.data.rollout_files import to_record, write_record
from kit.recipe.load import read_source
from kit.recipe.recipe import build
from kit.recipe.redaction import write_yaml
from kit.run import checkpoints
from tests.helpers.recipes import CLEAN_ENV, command, row, tiny

SECRET = "sk-planted-" + uuid.uuid4().hex
# Prefixes of metrics that differ between equal runs.
UNEQUAL = ("time", "timing", "perf/", "verify/", "actor/perf", "critic/perf")


def list_leftovers() -> set[Path]:
    """List files that a run could leave on the machine outside of its folders."""
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("rl-colocate-zmq-*")}


def restore_sigint() -> None:
    """Let a process receive SIGINT, even if the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class LiveRun:
    """A run that a test can watch and stop. `with LiveRun(...) as run` kills it at the end."""

    def __init__(
        self, workspace: Path, name: str, *changes: str, files: tuple[str, ...] = (), arguments=None
    ):
        self.mark = uuid.uuid4().hex
        self.folder = workspace / "runs" / name
        self.before = list_leftovers()
        # the path must be short, because names of sockets have a limit
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))
        self.log = workspace / f"{name}-{self.mark}.out"
        words = arguments or tiny(workspace, f"trainer.experiment_name={name}", *changes)
        variables = {
            "KIT_MARK": self.mark,
            "PYTHONPATH": str(workspace),
            "TMPDIR": str(self.temporary),
            # torch's cache is kept after the temporary folder is deleted
            "TORCHINDUCTOR_CACHE_DIR": str(workspace / "inductor"),
            "JUDGE_API_KEY": SECRET,
            "POLICY_API_KEY": SECRET + "-policy",
            "WANDB_MODE": "offline",
        }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*command(workspace), *files, *words],
                cwd=workspace,
                env=CLEAN_ENV | variables,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=restore_sigint,
            )

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes():
            process.kill()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the processes of the run whose command line matches `title`."""
        return find_processes(self.mark, title)

    def steps(self) -> list[int]:
        """Return the training steps in metrics.jsonl."""
        lines = read_metrics(self.folder / "metrics.jsonl")
        return [line["step"] for line in lines if "rollout/failed_frac" in line]

    def until(
        self, is_true: Callable[[], bool], patience: float = 240.0, ended: bool = False
    ) -> None:
        """Wait until a condition is true. ended: whether the run may end before that."""
        deadline = time.monotonic() + patience
        while not is_true():
            assert ended or self.process.poll() is None, self.output[-3000:]
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: step in self.steps())

    def signal(self, title: str, signum: int) -> None:
        """Send a signal to the processes with that title."""
        processes = self.processes(title)
        assert processes, title
        for process in processes:
            process.send_signal(signum)

    def ports(self) -> set[tuple[str, tuple[Any, ...]]]:
        """Return (process, address) of all ports on which the run listens."""
        names: dict[int | None, str] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it was just killed
                names[process.pid] = (process.cmdline() or [""])[0].partition(".")[0]
        listening = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid in names
        ]
        return {(names[c.pid], tuple(c.laddr)) for c in listening}

    def end(self, status: int, patience: float = 120.0) -> float:
        """Wait for the end, and return the seconds. Assert the status, and that nothing is left."""
        from extras.supervisor import process_monitor

        begin = time.monotonic()
        ports = self.ports()
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {patience:g} s: {self.output[-3000:]}"
            ) from None
        seconds = time.monotonic() - begin
        assert self.process.returncode == status, self.output[-4000:]
        assert wait_for_marked_processes(self.mark, patience=10.0) == []
        used = process_monitor.list_used_inodes()  # also by other runs on this machine
        left = [
            path
            for path in list_leftovers() - self.before
            if path.exists() and path.lstat().st_ino not in used
        ]
        assert left == []
        assert list(self.temporary.iterdir()) == []
        for _, (host, port) in ports:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                is_open = probe.connect_ex((host, port)) == 0
                assert not is_open, f"a process still listens on {host} {port}"
        return seconds


def assert_same(one, two, where: str = "") -> None:
    """Assert that two nested values are equal, their tensors bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_same(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for i, pair in enumerate(zip(one, two, strict=True)):
            assert_same(*pair, f"{where}.{i}")
    elif torch.is_tensor(one):
        one, two = (t.to_local() if hasattr(t, "to_local") else t for t in (one, two))
        assert torch.equal(one, two), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, two), where
    else:
        assert one == two, where


def assert_same_checkpoints(one: Path, two: Path) -> int:
    """Assert that two checkpoints have the same values. Return the number of files."""
    files = sorted(one.rglob("*.pt"))
    for path in files:
        assert_same(
            checkpoints.read(path), checkpoints.read(two / path.relative_to(one)), str(path)
        )
    return len(files)


def assert_same_steps(one: Path, two: Path, steps: range) -> None:
    """Assert that two runs have the same sampled ids, rewards and metrics of each step."""
    for step in steps:
        first = read_rollouts(one, step)
        second = read_rollouts(two, step)
        for name in ("row_id", "group_id"):
            ids = [[episode["_episode"][name] for episode in e] for e in (first, second)]
            assert ids[0] == ids[1], (step, name)
        for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            assert list_values(first, key) == list_values(second, key), (step, key)
        assert [e["reward"] for e in first] == [e["reward"] for e in second], step
    assert list_metrics(one, steps) == list_metrics(two, steps)


def read_rollouts(run: Path, step: int) -> list[dict]:
    """Return the records of a step's episodes."""
    lines = (run / f"rollouts/step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def list_values(records: list[dict], key: str) -> list[list]:
    """Return the values of a key in the output items of each episode."""
    return [[item.get(key) for item in record["response"]["output"]] for record in records]


def list_metrics(run: Path, steps: range) -> list[dict]:
    """Return the metrics of the training steps, without those that differ in every run."""
    lines = [m for m in read_metrics(run / "metrics.jsonl") if "rollout/failed_frac" in m]
    assert [m["step"] for m in lines] == list(steps)
    return [{k: v for k, v in m.items() if not k.startswith(UNEQUAL)} for m in lines]


def wait_for_marked_processes(mark: str, patience: float = 20.0) -> list[psutil.Process]:
    """Wait until all processes with KIT_MARK=mark have ended, for at most `patience` seconds.

    Returns those that still run.
    """
    deadline = time.monotonic() + patience
    while True:
        running = find_processes(mark)
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.5)


def find_processes(mark: str, title: str = "") -> list[psutil.Process]:
    """Find the processes that have KIT_MARK=mark, and a command line that matches `title`."""
    matching = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_marked = process.environ().get("KIT_MARK") == mark
            if is_marked and re.search(title, " ".join(process.cmdline())):
                matching.append(process)
    return matching


SCRIPT = " & <img src=x onerror='document.title = 1'>"  # a policy may write this in a response


def write_synthetic_run(
    folder: Path, steps: int, episodes: int, model: Path, tokens: int = 12
) -> Path:
    """Write a run directory with the kit's own functions, and return it.

    The episodes have two turns and a tool call. Some of them failed.
    """
    (folder / "rollouts").mkdir(parents=True)
    (folder / "advantages").mkdir()
    source = read_source(["math_cpu", "cpu"], [f"actor_rollout_ref.model.path={model}"])
    (folder / "config.yaml").write_text(write_yaml(build(source).redacted()))
    lines = [json.dumps(make_metrics(step, steps, episodes)) for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    generator = np.random.default_rng(0)
    for name in ["val_0", *(f"step_{i + 1}" for i in range(steps)), f"val_{steps}"]:
        with (folder / "rollouts" / f"{name}.jsonl").open("wb") as out:
            for i in range(episodes):
                episode = make_episode(name, i, episodes, tokens, generator)
                write_record(out, to_record(episode, i % 50, i // 50))
        if name.startswith("step"):
            np.savez_compressed(
                folder / "advantages" / f"{name}.npz",
                record_index=[(i % 50, i // 50) for i in range(episodes)],
                lengths=np.ones(episodes, int),
                values=np.array([i / episodes - 0.5 for i in range(episodes)], np.float32),
            )
    return folder


def make_metrics(step: int, steps: int, episodes: int) -> dict[str, float]:
    """Make the metrics of one step. Step 0 has only an evaluation."""
    metrics = {
        "step": step,
        "time": 1.0e9 + step,
        "val-core/s/reward/mean@1": 0.1 + step / steps / 2,
    }
    if step:
        metrics |= {
            "rollout/reward/mean": step / steps * 0.8,
            "rollout/episodes": episodes,
            "rollout/failed_frac": 0.0,
            "rollout/zero_variance_groups": 0,
            "actor/entropy": 1.0,
            "actor/loss": 0.1,
            "response_length/mean": 9.0,
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 3.0,
            "timing_s/step": 5.0,
        }
    return metrics


def make_episode(
    file: str, number: int, count: int, tokens: int, generator: np.random.Generator
) -> Episode:
    """Make the episode `number` of `count` in a rollout file, with `tokens` tokens in each turn."""

    def append_turn() -> None:
        ids = generator.integers(2, 38, tokens).tolist()
        log_probs = (-generator.exponential(0.7, tokens)).tolist()
        append_tokens(episode, ids, log_probs)

    question = f"what is {number % 50} plus {number} in {file}?"
    row_id = f"rows.jsonl:{number % 50}"
    episode = Episode(row_id, f"{file}/{number % 8}", "s", [5, 6, 7], row=row(question))
    call = gym_client.function_call(f"call_{number}", "look", json.dumps({"at": number}))
    episode.output.append(call)
    append_turn()
    append_tokens(episode, [9, 9])
    result = gym_client.function_call_output(f"call_{number}", f"seen <b>{number}</b>")
    episode.output.append(result)
    text = f"the answer to {number} is {'seven ' * 20}"
    if number < 40:
        text += SCRIPT
    episode.output.append(gym_client.make_message(text))
    append_turn()
    episode.ended = "stop"
    episode.reward = round(number / count, 4)
    episode.reward_components = {"form": 0.5}
    if number % 97 == 5:
        episode.status = "timeout"
        episode.reward = None
        episode.error = "no answer within 60 s"
    return episode
