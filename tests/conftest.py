"""Shared fixtures: a trivial Gym task for the tiny model, the stack, and hooks of pytest.

The model is random (tiny_models.py). The task asks for the digit 7. Gym's reasoning_gym server
gives the reward 1 for exactly this digit. If a longer response contains it, the reward is
len("7") / len(response). So a random model gets a low reward, and a trained one gets a high reward.

The stack is Gym servers, Ray, an FSDP actor and vLLM, started on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from omegaconf import DictConfig
from tiny_models import make_model, make_vision_model

# verl reads these when it is first imported. A run of algorithm.py takes them from
# configs/machines/cpu.yaml.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.rollout.verl_patches",
}

from kit.config.load import load_config
from kit.extras.report.metric_docs import find_metric
from kit.rollout.sampler import make_sampler_context
from kit.runs import prepare

# A test may take any time on a machine that is busy.
hypothesis.settings.register_profile("quintet", deadline=None)
hypothesis.settings.load_profile("quintet")

# If a shell starts the tests in the background, they ignore SIGINT, and so does every process that
# they start. Undo that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Environment variables of commands that tests start, without the variables set above.
CLEAN_ENV = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "tests" / "tiny.yaml"
CPU = ROOT / "configs" / "machines" / "cpu.yaml"
GYM_PYTHON = ROOT / ".venv-gym" / "bin" / "python"
# Settings of `algorithm` for training.compute_advantages. Each value affects the result.
ALGORITHM = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "gamma": 0.9, "lam": 0.5}
WORDS = ["say", "tell me", "i want", "give", "now", "please", "write", "print"]


def row(question: str = "say 7", answer: str = "7", **extra) -> dict:
    """A row of the trivial task."""
    params = {"input": [{"role": "user", "content": question}]}
    return {
        "responses_create_params": params,
        "question": question,
        "answer": answer,
        "metadata": {"source_dataset": "chain_sum"},
        **extra,
    }


def make_counter_row(question: str = "count", steps: int = 1) -> dict:
    """A row whose task is to call a real tool `steps` times.

    Gym's server example_session_state_mgmt gives a reward of 1 for that.
    """
    tool = {
        "type": "function",
        "name": "increment_counter",
        "description": "",
        "parameters": {"type": "object"},
        "strict": True,  # Gym answers 422 without it
    }
    params = {"input": question, "tools": [tool]}
    return {"responses_create_params": params, "initial_count": 3, "expected_count": 3 + steps}


def gym_examples() -> list[Path]:
    """List the files with example rows in the installed nemo-gym."""
    arguments = [GYM_PYTHON, "-c", "import nemo_gym; print(nemo_gym.__file__)"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip()).parent.parent / "resources_servers"
    paths = sorted(p for p in folder.glob("*/data/*example*.jsonl") if "rollouts" not in p.name)
    assert len(paths) > 50, f"{folder} has {len(paths)} files of examples"
    return paths


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write a JSONL file -> its path."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_task(folder: Path) -> None:
    """Write train.jsonl and val.jsonl for the tiny recipe, and tools.jsonl for a tool task."""
    write_rows(folder / "train.jsonl", [row(f"{word} 7") for word in WORDS])
    write_rows(folder / "val.jsonl", [row(f"{word} me 7") for word in WORDS])
    write_rows(folder / "tools.jsonl", [make_counter_row(f"{word} one") for word in WORDS])


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """A folder with rows and the models tied/, untied/ and scored/ (with a scalar head)."""
    folder = tmp_path_factory.mktemp("kit")
    make_model(folder / "tied", tied=True)
    make_model(folder / "untied", tied=False)
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    reward_model = AutoModelForTokenClassification.from_pretrained(
        folder / "tied", num_labels=1, dtype=torch.float32
    )
    reward_model.save_pretrained(folder / "scored")
    AutoTokenizer.from_pretrained(folder / "tied").save_pretrained(folder / "scored")
    write_task(folder)
    return folder


@pytest.fixture(scope="session")
def vision_model(workspace) -> Path:
    """The folder of a tiny model that reads images."""
    return make_vision_model(workspace / "vision", workspace / "untied")


def tiny(workspace: Path, *changes: str) -> list[str]:
    """The key=value arguments of the tiny recipe, and further changes."""
    return [
        f"actor_rollout_ref.model.path={workspace / 'tied'}",
        f"env.train_files=[{workspace / 'train.jsonl'}]",
        f"env.val_files=[{workspace / 'val.jsonl'}]",
        f"gym.servers.reasoning_gym.start.python={GYM_PYTHON}",
        *changes,
    ]


def load(workspace: Path, *changes: str, overlays: Sequence[str] = ()):
    """Load and check the tiny recipe with overlays of configs/ -> (config, inputs)."""
    config, _ = load_config([str(CPU), str(RECIPE), *overlays], tiny(workspace, *changes))
    return config, prepare.prepare(config)


def command(workspace: Path, *arguments: str) -> list[str]:
    """Return the command line of a run of the tiny recipe."""
    return [
        sys.executable,
        str(ROOT / "algorithm.py"),
        "--config",
        str(CPU),
        "--config",
        str(RECIPE),
        *arguments,
    ]


def run(
    arguments: list[str], cwd: Path, timeout: int = 300, **variables: str
) -> subprocess.CompletedProcess:
    """Run a command to its end -> its exit status and output."""
    env = CLEAN_ENV | variables
    return subprocess.run(
        arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP from a thread of this process, and yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def metrics_of(folder) -> list[dict]:
    """Read the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for_marked_processes(mark: str, patience: float = 20.0) -> list[str]:
    """Wait until all processes with KIT_MARK=mark have ended, for at most `patience` seconds.

    Returns the command lines of those that still run.
    """
    deadline = time.monotonic() + patience
    while True:
        running = list_marked_processes(mark)
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.5)


def list_marked_processes(mark: str) -> list[str]:
    """List the command lines of the processes that have KIT_MARK=mark in their environment."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_marked = process.environ().get("KIT_MARK") == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                running.append(" ".join(process.cmdline())[:120])
    return running


# --- hooks of pytest ------------------------------------------------------------------------------

# Files whose tests start whole runs of algorithm.py, or replace signal handlers. They run in the
# same pytest process as the tests that use the stack.
STARTS_RUNS = (
    "test_cli",
    "test_lost_processes",
    "test_notebook",
    "test_reliability",
    "test_signals",
)
# Other files whose tests start runs of algorithm.py or Gym servers, or install packages. They have
# a longer timeout.
STARTS_COMMANDS = (
    "test_backends",
    "test_conftest",
    "test_docs",
    "test_draft_tokens",
    "test_extras_deleted",
    "test_gpu_acceptance",
    "test_guides",
    "test_gym_environments",
    "test_hf_rollout",
    "test_image_training",
    "test_isolation",
    "test_judge_servers",
    "test_prometheus",
    "test_readme",
    "test_scale",
    "test_server_checks",
    "test_server_ports",
    "test_servers",
    "test_trackers",
)
# In CI, a test may be skipped only if its reason begins with one of these texts.
SKIPS_IN_CI = ("needs root: ", "needs bubblewrap")


def timeout_s(item: pytest.Item) -> float:
    """Return how many seconds a test may take, with its fixtures.

    pyproject.toml sets pytest-timeout's method `thread`. The method `signal` would use SIGALRM,
    which kit/runs/signals.py needs. After a timeout, pytest's process ends. Then
    kit/extras/supervisor/reaper.py kills the processes that a run started.
    """
    if item.get_closest_marker("soak"):
        return 3600.0
    is_slow = item.get_closest_marker("xdist_group") or item.path.stem in STARTS_COMMANDS
    return 600.0 if is_slow else 120.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """In CI, report a skipped test as failed, unless its reason is one of SKIPS_IN_CI."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(SKIPS_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {reason}"
    return report


@pytest.hookimpl(wrapper=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Put all tests that use the stack into one process, sort the tests, and set their timeouts.

    Tests of whole runs come first. Otherwise the stack would stay idle in memory while they run.
    """
    for item in items:
        if "stack" in item.fixturenames or item.path.stem in STARTS_RUNS:
            item.add_marker(pytest.mark.xdist_group("stack"))
        elif "chromium" in item.fixturenames:  # two processes must not unpack it concurrently
            item.add_marker(pytest.mark.xdist_group("chromium"))
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(timeout_s(item)))
    items.sort(key=rank)
    return (yield)


def rank(item: pytest.Item) -> int:
    """Return the sort key of a test: whole runs first, then tests with the stack, then others."""
    if not item.get_closest_marker("xdist_group"):
        return 3
    return 2 if "stack" in item.fixturenames else 1


@pytest.fixture
def caplog(caplog, monkeypatch):
    """Pytest's caplog, also for the kit's loggers after cli.silence_libraries has run."""
    for name in ("gym_client", "kit"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return caplog


# --- doubles of the training loop ----------------------------------------------------------------


@pytest.fixture
def loop_doubles(workspace, tmp_path, monkeypatch):
    """Test doubles of everything that the training loop calls (trainer_doubles.LoopDoubles)."""
    from trainer_doubles import make_loop_doubles

    monkeypatch.chdir(tmp_path)
    return make_loop_doubles(monkeypatch)


@pytest.fixture
def recorder(loop_doubles, monkeypatch):
    """Records the calls of the training loop with their arguments (trainer_doubles.Recorder)."""
    from trainer_doubles import make_recorder

    return make_recorder(loop_doubles.calls, monkeypatch)


# --- the stack -----------------------------------------------------------------------------------

SHOP = f"{{path: {ROOT / 'templates' / 'verifier'}, python: {GYM_PYTHON}}}"
OFFICE = f"{{server: workplace_assistant, agent: simple_agent, python: {GYM_PYTHON}}}"
JUDGED = f"{{server: abstention, python: {GYM_PYTHON}, config: {{judge_prompt_template: grade}}}}"
# The settings of the stack: the untied model (runs/test_cli.py uses the tied one), logical GPUs for
# further workers, and a context that is long enough for conversations.
SESSION = [
    "actor_rollout_ref.model.path=untied",
    "ray_kwargs.ray_init.num_gpus=16",
    "ray_kwargs.ray_init.num_cpus=96",
    "actor_rollout_ref.actor.optim.lr=0.005",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.rollout.disable_log_stats=false",
    "gym.servers.counter.start.server=example_session_state_mgmt",
    f"gym.servers.counter.start.python={GYM_PYTHON}",
    f"gym.servers.blackjack.start.python={GYM_PYTHON}",
    f"gym.servers.shop.start={SHOP}",
    f"gym.servers.office.start={OFFICE}",
    f"gym.servers.judged.start={JUDGED}",
    "gym.judges.genrm_model=policy",
    "env.train_files=[{path: train.jsonl, server: reasoning_gym}]",
    "env.val_files=[{path: val.jsonl, server: reasoning_gym}]",
]


@dataclass
class Stack:
    """The processes that tests share: Gym servers, Ray, an FSDP actor and vLLM."""

    config: DictConfig
    inputs: prepare.RunInputs
    workspace: Path
    workers: Any  # training.Workers
    servers: Any  # inference.Servers
    fresh: Path  # a checkpoint of the actor's initial weights

    @contextlib.contextmanager
    def trainer(
        self,
        name: str,
        *changes: str,
        overlays: Sequence[str] = (),
        workers: Any = None,
        gym: Any = None,
    ):
        """Yield a Trainer for the tiny recipe with overlays and changes, in runs/<name>.

        It uses the stack's vLLM. workers: used instead of the stack's workers, which otherwise get
        their initial weights and the recipe's loss. gym: used instead of the stack's Gym servers.
        """
        import inference
        import training
        from algorithm import Trainer
        from kit.config import user_functions
        from kit.runs.run_dir import Run

        config, inputs = load(
            self.workspace, f"trainer.experiment_name={name}", *SESSION, *changes, overlays=overlays
        )
        user_functions.register_in_verl(
            config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
        )
        if workers is None:
            workers = self.workers
            workers.actor.load_checkpoint(str(self.fresh))
        training.set_policy_loss(workers.actor, config)
        running = self.servers
        context = make_sampler_context(config, running.context.client, inputs, 60.0)
        servers = inference.Servers(
            config, running.manager, workers.actor, context, gym or running.gym, running.loop
        )
        state = {"command": "train", "step": 0, "batches": 0, "pass_rates": {}, "kl_coef": 0.0}
        shutil.rmtree(self.workspace / "runs" / name, ignore_errors=True)
        with Run(config) as run:
            trainer = Trainer(config, inputs, run, workers, servers, state)
            trainer.update_weights()
            with run.save_on_stop(trainer.save):
                yield trainer
        lines = metrics_of(run.folder) if (run.folder / "metrics.jsonl").is_file() else []
        logged = set().union(*lines) - {"step", "time"}
        unknown = sorted(metric for metric in logged if not find_metric(metric))
        assert not unknown, f"kit/extras/report/metric_docs.yaml does not describe {unknown}"


@contextlib.contextmanager
def with_verifiers(stack: Stack, *changes: str):
    """Yield a router of a recipe's Python verifiers and the stack's Gym servers."""
    from kit.extras.python_verifiers import verifier_pool
    from kit.gym.verifiers import VerifierRouter

    config, inputs = load(stack.workspace, *SESSION, *changes)
    pools = verifier_pool.make_pools(config, stack.workspace)
    gym = VerifierRouter(stack.servers.gym.gym, pools, inputs.tokenizer)
    try:
        yield gym
    finally:
        for pool in gym.pools.values():
            stack.servers.loop.run(pool.close())


@contextlib.contextmanager
def session(workspace: Path, *changes: str) -> Iterator[Stack]:
    """Start a Stack with the models and rows of a folder, and change to that folder."""
    import algorithm  # noqa: F401  (imported first, as in a run)
    from kit.runs import launch
    from kit.runs.run_dir import Run

    os.chdir(workspace)
    # With this, the actor also holds a reference. Recipes with a KL term need one.
    reference = "actor_rollout_ref.actor.use_kl_loss=true"
    name = "trainer.experiment_name=session"
    config, inputs = load(workspace, *SESSION, *changes, reference, name)
    with Run(config) as run, contextlib.ExitStack() as exits:
        workers, servers = launch.start(run, inputs, exits)
        fresh = workspace / "fresh"
        workers.actor.save_checkpoint(str(fresh), None, 0, None)
        servers.sleep()
        servers.update_weights(0)
        yield Stack(config, inputs, workspace, workers, servers, fresh)


@pytest.fixture(scope="session")
def stack(workspace) -> Iterator[Stack]:
    """The stack, started once for all tests of a process."""
    with session(workspace) as running:
        yield running


@pytest.fixture(scope="session")
def values(stack):
    """Workers of a critic and a reward model. fresh_critic/ has the critic's initial weights."""
    from kit.runs.workers import optional_roles, start_roles

    changes = [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=0.001",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={stack.workspace / 'scored'}",
        "env.val_files=[]",
    ]
    config, _ = load(stack.workspace, *SESSION, *changes)
    groups = start_roles(config, optional_roles(config))
    groups.critic.save_checkpoint(str(stack.workspace / "fresh_critic"), None, 0, None)
    yield groups
    kill_workers(groups)


def with_values(stack, values, critic=True, reward_model=False):
    """Reset the stack's actor and the groups of `values` to their initial weights -> Workers."""
    import training

    stack.workers.actor.load_checkpoint(str(stack.fresh))
    values.critic.load_checkpoint(str(stack.workspace / "fresh_critic"))
    return training.Workers(
        stack.workers.actor,
        values.critic if critic else None,
        values.reward_model if reward_model else None,
    )


def kill_workers(workers) -> None:
    """Kill worker groups that a test started, and release their logical CPUs and GPUs."""
    import ray

    for group in filter(None, workers):
        for worker in group.workers:
            ray.kill(worker)
        pool = getattr(group, "resource_pool", None)  # groups that share processes have none
        for placement in pool.pgs if pool else ():
            ray.util.remove_placement_group(placement)
