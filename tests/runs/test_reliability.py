"""What docs/reliability.md promises, with whole runs: the real stack, stopped, killed and starved
at every place.

The tests marked `soak` take longer than they teach on every change: `make soak` runs them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed.tensor
from conftest import GIVEN, command, metrics_of, survivors, tiny

from kit.extras.supervisor import process_monitor
from kit.runs import checkpoints

DETERMINISTIC = ["--config", "deterministic"]
SECRET = "sk-planted-" + uuid.uuid4().hex
UNEQUAL = ("time", "timing", "perf/", "verify/", "actor/perf", "critic/perf")  # in no two runs


def leftovers() -> set[Path]:
    """What a run could leave on the machine beside its processes and its temporary folder."""
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("rl-colocate-zmq-*")}


class Living:
    """A run that a test may watch and hurt. `with Living(...) as run`: what is left of it is killed
    at the end.
    """

    def __init__(
        self, workspace: Path, name: str, *changes: str, files: tuple[str, ...] = (), arguments=None
    ):
        self.mark, self.folder = uuid.uuid4().hex, workspace / "runs" / name
        self.before, self.temporary = (
            leftovers(),
            Path(tempfile.mkdtemp(prefix="t")),
        )  # short: sockets' names have a limit
        self.told = workspace / f"{name}-{self.mark}.out"
        words = arguments or tiny(workspace, f"trainer.experiment_name={name}", *changes)
        own = {"KIT_MARK": self.mark, "PYTHONPATH": str(workspace), "TMPDIR": str(self.temporary)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(
            workspace / "inductor"
        )  # torch's, in the temporary folder; made to last
        own |= {
            "JUDGE_API_KEY": SECRET,
            "POLICY_API_KEY": SECRET + "-policy",
            "WANDB_MODE": "offline",
        }
        with self.told.open("w") as out:
            self.process = subprocess.Popen(
                [*command(workspace), *files, *words],
                cwd=workspace,
                env=GIVEN | own,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.SIG_DFL
                ),  # the tests may run in the background
            )

    def __enter__(self) -> Living:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes():
            process.kill()

    @property
    def output(self) -> str:
        return self.told.read_text(errors="replace")

    def processes(self, title: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("KIT_MARK") == self.mark
                if mine and re.search(title, " ".join(process.cmdline())):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        return (
            [m["step"] for m in metrics_of(self.folder) if "rollout/failed_frac" in m]
            if path.is_file()
            else []
        )

    def until(
        self, there: Callable[[], bool], patience: float = 240.0, ended: bool = False
    ) -> None:
        deadline = time.monotonic() + patience
        while not there():
            assert ended or self.process.poll() is None, self.output[-3000:]
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: step in self.steps())

    def signal(self, title: str, signum: int) -> float:
        """Send a signal to the processes of that title; when that was."""
        found = self.processes(title)
        assert found, title
        for process in found:
            process.send_signal(signum)
        return time.monotonic()

    def ports(self) -> set[tuple[str, tuple[str, int]]]:
        """Which of the run's processes listen where."""
        mine = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # one that was just killed
                mine[process.pid] = (process.cmdline() or [""])[0].partition(".")[0]
        found = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.pid in mine
        ]
        return {(mine[c.pid], tuple(c.laddr)) for c in found}

    def end(self, status: int, patience: float = 120.0) -> float:
        """Wait for the end, with that exit status and nothing left; how many seconds it took."""
        begin, ports = time.monotonic(), self.ports()
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still there after {patience:g} s: {self.output[-3000:]}"
            ) from None
        seconds = time.monotonic() - begin
        assert self.process.returncode == status, self.output[-4000:]
        assert survivors(self.mark, patience=10.0) == []
        used = process_monitor.list_used_inodes()  # by another run on this machine
        left = [
            path
            for path in leftovers() - self.before
            if path.exists() and path.lstat().st_ino not in used
        ]
        assert left == []
        assert list(self.temporary.iterdir()) == []
        for _, (host, port) in ports:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                assert probe.connect_ex((host, port)) != 0, (
                    f"somebody still listens on {host} {port}"
                )
        return seconds


def same(one, two, where: str = "") -> None:
    """Assert that two nests of tensors and plain values are equal, bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            same(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for i, pair in enumerate(zip(one, two, strict=True)):
            same(*pair, f"{where}.{i}")
    elif torch.is_tensor(one):
        one, two = (t.to_local() if hasattr(t, "to_local") else t for t in (one, two))
        assert torch.equal(one, two), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, two), where
    else:
        assert one == two, where


def same_weights(one: Path, two: Path) -> int:
    """Assert that two checkpoints hold the same weights, optimisers, schedulers, RNGs and driver;
    how many files.
    """
    files = sorted(one.rglob("*.pt"))
    for path in files:
        same(checkpoints.read(path), checkpoints.read(two / path.relative_to(one)), str(path))
    return len(files)


def same_steps(one: Path, two: Path, steps: range) -> None:
    """Assert that two runs sampled the same ids, were paid the same and say the same of each step."""
    for step in steps:
        told = [
            [json.loads(x) for x in (run / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
            for run in (one, two)
        ]
        for name in ("row_id", "group_id"):
            assert [e["_episode"][name] for e in told[0]] == [
                e["_episode"][name] for e in told[1]
            ], (step, name)
        for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            ids = [
                [[item.get(key) for item in e["response"]["output"]] for e in lines]
                for lines in told
            ]
            assert ids[0] == ids[1], (step, key)
        assert [e["reward"] for e in told[0]] == [e["reward"] for e in told[1]], step
    numbers = []
    for run in (one, two):
        lines = [m for m in metrics_of(run) if "rollout/failed_frac" in m]
        assert [m["step"] for m in lines] == list(steps)
        numbers.append([{k: v for k, v in m.items() if not k.startswith(UNEQUAL)} for m in lines])
    assert numbers[0] == numbers[1]


MADE = """
import random

def rows(batch, size, seed, pass_rates):
    solved = sum(100 * rate for rates in pass_rates.values() for rate in rates.values())
    words = random.Random(f"{seed} {batch}").sample(["say", "tell me", "write"], size)
    fields = {"question": "", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    return [{"responses_create_params": {"input": f"{word} 7 {solved:.0f}"}, **fields} for word in words]
"""


def test_a_run_in_two_parts_and_its_replay_are_the_same_run(workspace):
    """PPO with refilled batches, across epochs, a third of the rows made on the fly: five steps,
    and the same five with a SIGTERM between; then step 4 from its rollouts file. Beside it: what a
    stop leaves, what is written of keys, and which keys may change.
    """
    changes = ["trainer.total_training_steps=5", "trainer.save_freq=1", "data.train_batch_size=3"]
    changes += [
        "actor_rollout_ref.rollout.n=4",
        "algorithm.filter_groups.enable=true",
        "trainer.logger=[wandb]",
    ]
    changes += ["trainer.log_val_generations=2"]
    changes += ["algorithm.filter_groups.max_num_gen_batches=3", "trainer.max_actor_ckpt_to_keep=4"]
    changes += ["gym.servers.reasoning_gym.start.config.judge_key='${oc.env:JUDGE_API_KEY}'"]
    (workspace / "made.py").write_text(MADE)
    of_file = f"{{path: {workspace / 'train.jsonl'}, weight: 2}}"
    changes += [f"env.train_files=[{of_file}, {{function: made.py:rows, weight: 1}}]"]
    files = ("--config", "ppo", *DETERMINISTIC)
    with Living(workspace, "whole", *changes, files=files) as run:
        run.until_step(1)
        outside = {
            name
            for name, (host, _) in run.ports()
            if host not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
        }
        run.process.wait(timeout=300)
        run.end(0)
    whole = run.folder
    assert not outside, "these listen beyond this machine"
    assert (whole / "checkpoints" / "global_step_2").is_dir() and not (
        whole / "checkpoints" / "global_step_1"
    ).exists()

    with Living(workspace, "parts", *changes, files=files) as run:
        run.until_step(2)
        run.process.send_signal(signal.SIGTERM)
        seconds = run.end(143, patience=60.0)
    print(f"stopped, saved and gone {seconds:.1f} s after SIGTERM")
    saved = re.search(r"Last checkpoint: .*global_step_(\d)", run.output)
    assert saved and "SIGTERM: saving and exiting." in run.output
    assert list(
        (whole / "wandb").glob("offline-run-*/files/media/table/val/generations_*.table.json")
    )
    first = tuple((run.folder / "wandb").glob("offline-run-*"))
    with Living(workspace, "parts", *changes, "trainer.print_samples_every=7", files=files) as run:
        run.process.wait(timeout=300)
        run.end(0)
    assert (
        f"resume      from {run.folder.relative_to(workspace)}/checkpoints/global_step_{saved[1]}"
        in run.output
    )
    assert "and allowed: trainer.print_samples_every 10 -> 7" in run.output
    parts = run.folder
    same_steps(whole, parts, range(1, 6))
    assert (
        same_weights(
            whole / "checkpoints" / "global_step_5", parts / "checkpoints" / "global_step_5"
        )
        == 7
    )
    ids = [path.name.rpartition("-")[2] for path in (parts / "wandb").glob("offline-run-*")]
    assert len(first) == 1 and len(ids) == 2 and len(set(ids)) == 1

    replay = ["--replay", str(whole / "rollouts" / "step_4.jsonl")]
    again = tiny(
        workspace, "trainer.experiment_name=again", *[c for c in changes if "logger" not in c]
    )
    with Living(workspace, "again_replay_4", files=files, arguments=[*again, *replay]) as run:
        run.process.wait(timeout=300)
        run.end(0)
    assert (
        same_weights(
            whole / "checkpoints" / "global_step_4", run.folder / "checkpoints" / "global_step_4"
        )
        == 7
    )
    live, made = (
        {
            k: v
            for m in metrics_of(f)
            if m["step"] == 4
            for k, v in m.items()
            if not k.startswith((*UNEQUAL, "val-"))
        }
        for f in (whole, run.folder)
    )
    assert live == made and "actor/pg_loss" in made
    for folder in (whole, parts, run.folder):
        for path in folder.rglob("*"):
            real = path.resolve()  # Ray's logs are linked
            for file in real.rglob("*") if path.is_symlink() and real.is_dir() else [path]:
                assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_a_gym_server_may_die_but_a_stopped_engine_ends_the_run(workspace):
    with Living(
        workspace, "lost", "trainer.total_training_steps=500", "trainer.save_freq=1"
    ) as run:
        run.until_step(2)
        run.signal(r"server_process\.py", signal.SIGKILL)
        last = max(run.steps())
        run.until_step(last + 3)
        assert "gym server reasoning_gym exited with status -9 and is restarted; log" in run.output
        assert (
            max(
                m["rollout/failed_frac"]
                for m in metrics_of(run.folder)
                if "rollout/failed_frac" in m
            )
            == 0
        )
        run.signal("^VLLM::EngineCore", signal.SIGSTOP)
        seconds = run.end(1)
    print(f"gone {seconds:.1f} s after SIGSTOP of vLLM's engine")
    told = run.output.splitlines()[-1]
    assert re.match(
        r"error: stage \w+: vLLM's EngineCore \(pid \d+\) is stopped \(SIGSTOP\?\)\. ", told
    ), told
    assert "Rerun the same command to resume from the last checkpoint" in told
    assert (run.folder / "checkpoints" / f"global_step_{last + 2}").is_dir()


LOST = {  # title of the process, signal -> what the last line says
    "engine killed": (
        "^VLLM::EngineCore",
        signal.SIGKILL,
        r"EngineCore|vLLM's engine died and logged no cause",
    ),
    "actor killed": ("^ray::ActorRolloutRefWorker", signal.SIGKILL, "ActorRolloutRefWorker"),
    "actor stopped": (
        "^ray::ActorRolloutRefWorker",
        signal.SIGSTOP,
        r"ActorRolloutRefWorker \(pid \d+\) is stopped",
    ),
    "server stopped": (
        "^ray::vLLMHttpServer",
        signal.SIGSTOP,
        r"vLLMHttpServer \(pid \d+\) is stopped",
    ),
    "GCS killed": ("gcs_server ", signal.SIGKILL, r"gcs_server \(pid \d+\) died"),
    "raylet killed": (
        "raylet/raylet ",
        signal.SIGKILL,
        r"Ray's raylet \(pid \d+\) died, so the run ended\. Last",
    ),
    "driver killed": (
        r"algorithm\.py ",
        signal.SIGKILL,
        r"the driver \(pid \d+\) died, so the run ended\. Last",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", LOST)
def test_a_lost_process_ends_the_run_with_its_name(workspace, case):
    """The actor has two ranks, one of which goes: the other would wait for it. Without the GCS what
    was learned is saved; where the driver itself goes, the checkpoint before it stands.
    """
    title, signum, told = LOST[case]
    two = ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=500", "trainer.save_freq=2"]
    with Living(workspace, case.replace(" ", "_").replace("'", ""), *two) as run:
        run.until_step(3)
        run.processes(title)[0].send_signal(signum)
        seconds = run.end(-signum if case == "driver killed" else 1)
        run.until(lambda: "error: " in run.output, 20.0, ended=True)  # the reaper's line
    last = run.output.splitlines()[-1]
    saved = max(
        int(path.name.removeprefix("global_step_"))
        for path in (run.folder / "checkpoints").glob("global_*")
    )
    assert saved >= 3 if case == "GCS killed" else saved >= 2
    print(f"{case}: gone after {seconds:.1f} s: {last[:300]}")
    assert last.startswith("error: ") and re.search(told, last), run.output[-2000:]


@pytest.mark.soak
def test_two_runs_at_once_do_not_meet(workspace):
    """Started at the same moment, with weights of their own: each learns, each sampler agrees with
    its own trainer, and when one is killed the other does not notice.
    """
    changes = ["trainer.total_training_steps=60", "env.val_files=[]"]
    with (
        Living(workspace, "one", *changes) as one,
        Living(workspace, "two", *changes, "data.seed=2") as two,
    ):
        one.until_step(40)
        two.until_step(10)
        one.process.kill()
        one.end(-signal.SIGKILL)
        two.process.wait(timeout=300)
        two.end(0)
    for run in (one, two):
        steps = [m for m in metrics_of(run.folder) if "rollout/reward/mean" in m]
        assert all(m["training/rollout_probs_diff_max"] < 1e-3 for m in steps)
        rewards = [m["rollout/reward/mean"] for m in steps]
        assert sum(rewards[:3]) / 3 + 0.1 < sum(rewards[-3:]) / 3, rewards


@pytest.mark.soak
def test_an_engine_that_dies_in_the_weight_sync_does_not_hang_the_run(workspace):
    """The sender waits for a receiver that is gone, for ever; so does the driver for the sender."""
    with Living(workspace, "sync", "trainer.total_training_steps=500") as run:
        run.until_step(1)
        actor, receiver = (
            run.processes("^ray::ActorRolloutRefWorker")[0],
            run.processes("^VLLM::EngineCore")[0],
        )
        run.until(lambda: "update_actor" in actor.cmdline()[0])
        receiver.suspend()  # else the sync is over before it is hit
        run.until(lambda: "update_weights" in actor.cmdline()[0])
        receiver.kill()
        seconds = run.end(1)
    last = run.output.splitlines()[-1]
    print(f"gone after {seconds:.1f} s: {last[:300]}")
    assert re.search(r"error: stage update_weights: .*vLLM's (engine|EngineCore)", last), last


class Hanging(BaseHTTPRequestHandler):
    """A Gym server whose verifier accepts and never answers."""

    def reply(self, body: dict) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if getattr(self.server, "hanging", False):
            time.sleep(3600)
        self.reply({"paths": {"/verify": {"post": {}}}})

    def do_POST(self):
        if self.path == "/verify":
            self.server.hanging = True
            time.sleep(3600)
        self.reply({})

    def log_message(self, *_):
        pass


@pytest.mark.soak
def test_a_verifier_that_never_answers_ends_the_run(workspace):
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Hanging)
    listener.daemon_threads = True
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    changes = [
        "gym.servers.reasoning_gym.start=null",
        "trainer.val_before_train=false",
        "gym.timeout_s=20",
    ]
    changes += [
        f"gym.servers.reasoning_gym.url=http://127.0.0.1:{listener.server_port}",
        "gym.outage_budget_s=30",
    ]
    with Living(workspace, "unpaid", *changes) as run:
        run.until(lambda: "LLMServerManager" in run.output)
        seconds = run.end(1)
    listener.shutdown()
    print(f"gone {seconds:.1f} s after the engine stood: {run.output.splitlines()[-1][:300]}")
    assert re.search("error: .*Gym server reasoning_gym .* unreachable for", run.output), (
        run.output[-2000:]
    )


@pytest.mark.soak
def test_a_gym_server_that_is_stopped_is_waited_for_and_then_ends_the_run(workspace):
    with Living(workspace, "asleep", "gym.timeout_s=20", "gym.outage_budget_s=30") as run:
        run.until_step(2)
        run.signal(r"server_process\.py", signal.SIGSTOP)
        time.sleep(10)
        run.signal(r"server_process\.py", signal.SIGCONT)
        run.until_step(max(run.steps()) + 3)
        assert (
            max(
                m["rollout/failed_frac"]
                for m in metrics_of(run.folder)
                if "rollout/failed_frac" in m
            )
            == 0
        )
        run.signal(r"server_process\.py", signal.SIGSTOP)
        seconds = run.end(1)
    print(
        f"gone {seconds:.1f} s after SIGSTOP of the Gym server: {run.output.splitlines()[-1][:300]}"
    )
    assert "unreachable for" in run.output


@pytest.mark.soak
def test_a_stage_that_gets_nowhere_ends_the_run(workspace):
    """A loss that sleeps: nothing is stopped and nothing dead, and the deadline finds it."""
    (workspace / "sleepy.py").write_text(
        "import time\n\nimport ray\n\n"
        "def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):\n"
        "    if not ray.is_initialized():  # tried out, before the workers are there\n"
        "        return -(advantages * log_prob).sum(), {}\n"
        "    print('asleep', flush=True)\n    time.sleep(600)\n"
    )
    changes = [
        "actor_rollout_ref.actor.policy_loss.loss_mode=sleepy.py:loss",
        "trainer.stage_timeout_s=100",
    ]
    with Living(workspace, "nowhere", *changes) as run:
        run.until(lambda: "update_actor" in run.output or bool(run.processes("update_actor")))
        seconds = run.end(1)
    print(f"gone after {seconds:.1f} s")
    assert re.search(
        r"error: Stage 'update_actor' made no progress for 100 s \(trainer.stage_timeout_s\)\. .*asleep",
        run.output,
    )


def test_ctrl_c_while_starting_leaves_nothing(workspace):
    with Living(workspace, "early") as run:
        run.until(lambda: "starting the workers" in run.output)
        time.sleep(3)  # Ray is up, the workers and vLLM are on their way
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        run.end(130, patience=60.0)


@pytest.mark.soak
def test_a_second_ctrl_c_is_immediate(workspace):
    with Living(workspace, "twice") as run:
        run.until(lambda: bool(run.processes("raylet")))
        run.signal(r"server_process\.py", signal.SIGSTOP)  # for which the end in order waits
        run.process.send_signal(signal.SIGINT)
        time.sleep(
            2.0
        )  # at once, and a busy driver hears the first one late, it would be taken for the same one
        run.process.send_signal(signal.SIGINT)
        seconds = run.end(130, patience=10.0)
    print(f"gone {seconds:.1f} s after the second Ctrl-C")
    assert seconds < 5.0


@pytest.mark.soak
def test_killed_while_it_saves_it_goes_on_from_a_whole_checkpoint(workspace):
    """SIGKILL to every process at once, at three moments of a real save; then the run goes on, and
    ends.
    """
    changes = ["trainer.save_freq=1", "trainer.total_training_steps=9"]
    for moment in (r"saving_2$", r"saving_4/actor$", r"saving_6/actor/optim.*"):
        with Living(workspace, "killed", *changes) as run:
            pattern = re.compile(moment)
            run.until(
                lambda p=pattern: any(
                    p.search(str(f)) for f in (run.folder / "checkpoints").rglob("*")
                )
            )
            for process in run.processes():
                with contextlib.suppress(psutil.NoSuchProcess):  # with those before it
                    process.kill()
            run.process.wait()
    with Living(workspace, "killed", *changes) as run:
        run.process.wait(timeout=300)
        run.end(0)
    assert re.search(r"saving_6 is not whole, and left alone: it has no manifest.json", run.output)
    assert run.steps() == list(range(1, 10))


@pytest.mark.soak
def test_no_memory_for_the_kv_cache_is_one_clear_line(workspace):
    change = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=10000000000000"
    with Living(workspace, "kv", change) as run:
        run.end(1, patience=240.0)
    assert re.match(
        r"error: stage start: vLLM did not start: ValueError: .*kv",
        run.output.strip().splitlines()[-1],
    )


@pytest.mark.soak
def test_a_lora_adapter_reaches_the_sampler_alone_and_the_export(workspace):
    from transformers import AutoModelForCausalLM

    changes = ["actor_rollout_ref.model.lora.merge=false", "actor_rollout_ref.actor.optim.lr=0.03"]
    changes += ["actor_rollout_ref.model.lora_rank=8", "trainer.total_training_steps=3"]
    with Living(workspace, "lora", *changes, files=("--config", "lora")) as run:
        run.process.wait(timeout=300)
        run.end(0)
    steps = [m for m in metrics_of(run.folder) if "critic/rewards/mean" in m]
    assert all(
        m["actor/grad_norm"] > 0 and m["training/rollout_probs_diff_max"] < 1e-3 for m in steps
    )
    base, tuned = (
        AutoModelForCausalLM.from_pretrained(f) for f in (workspace / "tied", run.folder / "export")
    )
    assert (run.folder / "export" / "lora_adapter" / "adapter_model.safetensors").is_file()
    weight = "model.layers.0.mlp.up_proj.weight"
    change = tuned.state_dict()[weight] - base.state_dict()[weight]
    singular = torch.linalg.svdvals(change.float())
    assert (
        singular[7] > 0.05 * singular[0] and singular[8] < 0.02 * singular[0]
    )  # of rank 8, and bf16's rounding
    untouched = base.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(untouched.to(tuned.dtype), tuned.state_dict()["model.embed_tokens.weight"])
