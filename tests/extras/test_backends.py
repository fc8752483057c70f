"""Sampling by another backend than vLLM (docs/backends.md), beside the session's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import ray
from conftest import (
    GIVEN,
    GYM_PYTHON,
    ROOT,
    SESSION,
    command,
    drop,
    load,
    make_mixture,
    metrics_of,
    run,
    tiny,
)
from test_steps import AGREE, UNTRAINED, learn
from test_turns import CHATML, STOPS, bytes_tokenizer, call, policy_of

import inference
import training
from kit.config import checks
from kit.config.load import load_config
from kit.errors import ConfigError
from kit.extras import monitor
from kit.gym.servers import free_port
from kit.rollout import chat
from kit.rollout.client import Client
from kit.runs import preparation


@contextlib.contextmanager
def trainer_over(stack, name, workers, manager, *changes):
    """A Trainer over workers and servers that are not the session's, with the weights of its beginning."""
    workers.actor.load_checkpoint(str(stack.fresh))
    with stack.trainer(name, *changes, overlays=[name], workers=workers) as trainer:
        addresses = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        policy = inference.make_policy(
            trainer.config, Client(trainer.config, addresses), trainer.data, 60.0
        )
        was = trainer.servers
        trainer.servers = inference.Servers(
            trainer.config, manager, workers.actor, policy, was.gym, was.loop
        )
        trainer.publish()
        yield trainer


@pytest.fixture(scope="module")
def hf(stack):
    """An actor of its own, and transformers beside it: (workers, manager)."""
    importlib.import_module("kit.extras.hf_rollout")
    config, _ = load(stack.workspace, *SESSION, overlays=["hf"])
    workers = training.start_workers(config)
    manager = stack.servers.loop.run(inference.start_servers(config, workers.actor))
    yield workers, manager
    for handle in manager.server_handles:
        ray.kill(handle)
    drop(workers)


@contextlib.contextmanager
def another_sampler(stack, *changes, overlays=()):
    """A second vLLM in the session, with the weights of the recipe's model: its manager."""
    config, _ = load(stack.workspace, *SESSION, *changes, overlays=overlays)
    manager = stack.servers.loop.run(inference.start_sampler(config, first=1))
    try:
        yield manager
    finally:
        for handle in manager.server_handles:
            ray.kill(handle)


def test_greedy_answers_of_transformers_are_those_of_vllm(stack, hf):
    with stack.trainer("greedy") as trainer:
        theirs = trainer.rollout(trainer.data.train, "greedy", validate=True)
    with trainer_over(stack, "hf", *hf) as trainer:
        ours = trainer.rollout(trainer.data.train, "greedy", validate=True)
    assert len(ours) == len(theirs) > 7
    for one, two in zip(ours, theirs, strict=True):
        assert (one.status, one.response_ids, one.reward) == (
            two.status,
            two.response_ids,
            two.reward,
        )
        assert one.log_probs == pytest.approx(two.log_probs, abs=AGREE)


@pytest.mark.soak
def test_it_learns_from_what_transformers_sample(stack, hf):
    changes = ["actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.rollout.n=16"]
    with trainer_over(stack, "hf", *hf, *changes) as trainer:
        rewards = learn(trainer, 0.5)
    assert sum(rewards[:3]) / 3 < UNTRAINED and sum(rewards[-3:]) / 3 >= 0.5


def test_transformers_sample_from_weights_that_were_learned_and_by_seeds(stack, hf):
    """With top_k, top_p and a seed for each request."""
    with trainer_over(stack, "hf", *hf, "actor_rollout_ref.actor.optim.lr=0.01") as trainer:
        steps = [dict(trainer.advance()) for _ in range(3)]
    assert all(
        m["training/rollout_probs_diff_max"] < AGREE and m["actor/grad_norm"] > 0 for m in steps
    )
    ways = ["actor_rollout_ref.rollout.full_determinism=true", "actor_rollout_ref.rollout.top_k=3"]
    with trainer_over(stack, "hf", *hf, *ways, "actor_rollout_ref.rollout.top_p=0.9") as trainer:
        tasks = trainer.data.train
        same = [trainer.servers.rollout(*trainer.asked(tasks, "1")[:2]) for _ in range(2)]
        assert [e.response_ids for e in same[0]] == [e.response_ids for e in same[1]]
        assert len({tuple(e.response_ids) for e in same[0]}) > 5


def test_transformers_end_answers_for_new_weights(stack, hf):
    """A step ahead: what is under way ends as it is, and goes on."""
    server = hf[1].server_handles[0]
    asked = {"max_tokens": 500, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}

    async def unequal():
        """Answers of other lengths in one batch."""
        limits = [2, 9, 4, 9, 3]
        free = {**asked, "ignore_eos": False}
        both = [
            server.generate.remote(prompt_ids=[5], sampling_params=free | {"max_tokens": n})
            for n in limits * 40
        ]
        return [(n, await answer) for n, answer in zip(limits * 40, both, strict=True)]

    with trainer_over(stack, "hf", *hf):  # weights that say any token, a stop token too
        found = stack.servers.loop.run(unequal())
    assert all(
        0 < len(a.token_ids) == len(a.log_probs) <= n and a.stop_reason == "completed"
        for n, a in found
    )
    assert any(len(a.token_ids) < n for n, a in found)  # by a stop token

    async def cut():
        under_way = [
            server.generate.remote(prompt_ids=[5, 6], sampling_params=asked, request_id="x")
            for _ in range(2)
        ]
        await asyncio.sleep(0.3)
        await server.abort_all_requests.remote()
        answers = [await each for each in under_way]
        await server.resume_generation.remote()
        return answers, await server.generate.remote(
            prompt_ids=[5, 6], sampling_params=asked | {"max_tokens": 3}
        )

    answers, after = stack.servers.loop.run(cut())
    assert {a.stop_reason for a in answers} == {"aborted"} and all(
        0 < len(a.token_ids) < 500 for a in answers
    )
    assert len(after.token_ids) == len(after.log_probs) == 3


def test_draft_tokens_change_no_answer(stack):
    """Greedy answers with them are those without; of sampled ones the log-probs are the trainer's."""
    # sampled so cold that what was said before comes again: of answers at 1 it may be that no draft is accepted
    longer = ["data.max_response_length=200", "actor_rollout_ref.rollout.temperature=0.1"]
    with another_sampler(stack, *longer, overlays=["drafts"]) as manager:
        with stack.trainer("undrafted", *longer, "trainer.total_training_steps=1") as trainer:
            without = trainer.rollout(trainer.data.validation, "val", validate=True)
        accepted = monitor.acceptance(manager.server_addresses)
        with stack.trainer("drafted", *longer, overlays=["drafts"]) as trainer:
            addresses = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
            policy = inference.make_policy(
                trainer.config, Client(trainer.config, addresses), trainer.data, 60.0
            )
            was = trainer.servers
            trainer.servers = inference.Servers(
                trainer.config, manager, None, policy, was.gym, was.loop
            )
            drafted = trainer.rollout(trainer.data.validation, "val", validate=True)
            of_greedy = accepted()["rollout/drafts_accepted_frac"]
            metrics = trainer.advance()
            of_sampled, none_since = accepted()["rollout/drafts_accepted_frac"], accepted()
    assert [e.response_ids for e in drafted] == [e.response_ids for e in without]
    assert max(len(e.response_ids) for e in drafted) > 20 and of_greedy > 0.1
    assert (
        metrics["training/rollout_probs_diff_max"] < AGREE and metrics["rollout/failed_frac"] == 0
    )
    told = [
        json.loads(line)
        for line in (trainer.run.folder / "rollouts/step_1.jsonl").read_text().splitlines()
    ]
    log_probs = np.concatenate(
        [item["generation_log_probs"] for e in told for item in e["response"]["output"]]
    )
    # in the mean a token tells as much as the distribution that it is drawn from, within four standard errors
    error = log_probs.std() / len(log_probs) ** 0.5
    assert error < 0.05 and -log_probs.mean() == pytest.approx(
        metrics["actor/entropy"], abs=4 * error
    )
    assert 0 < of_sampled < 1 and none_since == {}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Path:
    """Debian's, installed or not."""
    if found := shutil.which("prometheus"):
        return Path(found)
    folder = tmp_path_factory.mktemp("prometheus")
    fetch = "apt-get download -q prometheus && dpkg -x prometheus_*.deb ."
    done = subprocess.run(fetch, shell=True, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no prometheus here, and none to be had: {done.stderr.strip()[-200:]}")
    return folder / "usr" / "bin" / "prometheus"


def test_prometheus_reads_the_run_and_its_servers(stack, prometheus, tmp_path):
    """Whatever the dashboard and the alerts ask for is there; the alerts tell what is wrong."""
    port, file = free_port("127.0.0.1"), tmp_path / "prometheus.yml"
    key = "actor_rollout_ref.rollout.prometheus"
    changes = [f"{key}.port={port}", f"{key}.file={file}", "gym.max_failed_frac=1"]
    file.write_text("")
    arguments = [
        f"--config.file={file}",
        "--web.enable-lifecycle",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    arguments += [f"--storage.tsdb.path={tmp_path}"]  # Debian's would be of the whole machine
    with contextlib.ExitStack() as exits:
        running = exits.enter_context(
            subprocess.Popen([prometheus, *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL)
        )
        exits.callback(running.terminate)
        http = exits.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))

        def asked(query: str) -> list[dict]:
            return (
                http.get("/api/v1/query", params={"query": query})
                .raise_for_status()
                .json()["data"]["result"]
            )

        def until(query: str, count: int = 1) -> list[dict]:
            deadline = time.monotonic() + 40
            while len(found := asked(query)) < count:
                assert time.monotonic() < deadline, f"{query}: {found}"
                time.sleep(0.5)
            return found

        wait_for(http)
        trainer = exits.enter_context(stack.trainer("monitored", *changes, overlays=["monitoring"]))
        monitor.serve(trainer.run, "127.0.0.1", stack.servers.manager.server_addresses, exits)
        lost = trainer.servers.play
        trainer.servers.play = partial(fail_some, lost)
        trainer.run.gauges = lambda: {
            "verify/concurrency/reasoning_gym": 64.0
        }  # which `start` takes of Gym's client
        metrics = trainer.advance()
        assert trainer.scores == {} and metrics["rollout/failed/http_500"] == 16
        trainer.evaluate()
        with trainer.run.stage("gen"):
            [reward] = until("kit_rollout_reward_mean")
            until("up == 1", 2)
        assert reward["metric"] == {
            "__name__": "kit_rollout_reward_mean",
            "job": "kit",
            "run": "monitored",
        } | {"instance": reward["metric"]["instance"]}
        assert float(reward["value"][1]) == pytest.approx(metrics["rollout/reward/mean"])
        [failed] = asked('kit_failures_total{reason="http_500"}')
        assert failed["value"][1] == "16" and asked('kit_stage_running_seconds{stage="gen"}')
        panels = json.loads((ROOT / "docs/monitoring/grafana.json").read_text())["panels"]
        shown = [
            target["expr"].replace("$run", "monitored")
            for panel in panels
            for target in panel["targets"]
        ]
        silent = [
            query
            for query in shown
            if not asked(query) and "increase(" not in query and "rate(" not in query
        ]
        alerts = http.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        asks = {
            name
            for rule in alerts
            for name in re.findall(r"\b(?:kit_|vllm:|up\b)\w*", rule["query"])
        }
        silent += [name for name in asks if not asked(name)]
        assert not silent and len(shown) > 20 and len(alerts) > 10
        until('ALERTS{alertname="EpisodesFail",alertstate="pending"}')
    file.unlink()


def wait_for(http: httpx.Client) -> None:
    """Until it is ready."""
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if http.get("/-/ready").status_code == 200:
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


async def fail_some(play, requests, *settings):
    """The episodes of two groups are lost, as by a server that answers 500."""
    episodes = await play(requests, *settings)
    for e in episodes[:16] if len(episodes) == 64 else ():
        e.status, e.reward, e.error = "http_500", None, "for the test"
    return episodes


@pytest.mark.soak
def test_a_mixture_of_experts_learns(workspace):
    """And vLLM samples from the experts that it learned, which it packs anew after each sync."""
    path = make_mixture(workspace / "mixture", workspace / "untied")
    changes = [
        f"actor_rollout_ref.model.path={path}",
        "trainer.experiment_name=mixture",
        "trainer.save_freq=-1",
    ]
    done = run(
        command(workspace, *tiny(workspace, *changes, "trainer.total_training_steps=30")), workspace
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [m for m in metrics_of(workspace / "runs" / "mixture") if "actor/grad_norm" in m]
    print("rewards", [round(m["rollout/reward/mean"], 2) for m in steps])
    assert len(steps) == 30 and all(m["training/rollout_probs_diff_max"] < 1e-4 for m in steps)
    assert steps[-1]["rollout/reward/mean"] > steps[0]["rollout/reward/mean"] + 0.04


# offline: the package of each tracker, what it is told by its own environment variables, what it leaves
TRACKERS = {
    "mlflow": (
        "mlflow-skinny",
        {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
        "mlruns/**/loss",
    ),
    "swanlab": (
        "swanlab",
        {"SWANLAB_MODE": "offline", "SWANLAB_SAVE_DIR": "swanlog"},
        "swanlog/run-*",
    ),
    "trackio": ("trackio", {"TRACKIO_DIR": "trackio"}, "trackio/*.db"),
}
TRACKED = """
import sys
sys.path.append("packages")
from kit.config.load import load_config
from kit.runs.run_dir import Run
from kit.data.episodes import Episode
config, _ = load_config([], ["trainer.logger=[%s]", "trainer.experiment_name=tracked", "trainer.log_val_generations=1"])
with Run(config) as run:
    run.log(1, {"loss": 0.5})
    answer = Episode("x:1", "1/0", "s", [1], reward=1.0, row={"responses_create_params": {"input": "2 + 2?"}})
    run.log_answers(1, [answer])
"""


@pytest.mark.soak
@pytest.mark.parametrize("name", TRACKERS)
def test_trackers_start_offline(name, tmp_path):
    """Each installed beside the environment."""
    package, variables, left = TRACKERS[name]
    uv = [
        Path(sys.executable).with_name("uv"),
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
    ]
    subprocess.run([*uv, "--target", tmp_path / "packages", package], check=True)
    told = [sys.executable, "-c", TRACKED % name]
    environment = {**GIVEN, **variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        told, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [*tmp_path.glob(left)], [
        str(path) for path in tmp_path.rglob("*") if "packages" not in path.parts
    ]


# --- what does not run here ----------------------------------------------------------------------

PROMISED = {  # by recipe of configs/: what the summary says of it
    "megatron": "8 cuda of megatron (tensor_model_parallel_size 2), 8 vLLM replicas",
    "veomni": "8 cuda of veomni (each with the whole model), 8 vLLM replicas",
    "sglang": "8 cuda, 8 SGLang replicas",
    "fp8": "8 cuda, 8 vLLM replicas",
    "drafts": "8 cuda, 8 vLLM replicas",
}
SMALL = [
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.max_prompt_length=32",
]


@pytest.fixture(scope="module")
def wide(workspace) -> Path:
    """The tiny model's files, with a config of 128 in each way."""
    folder = shutil.copytree(workspace / "tied", workspace / "wide")
    config = json.loads((folder / "config.json").read_text()) | {
        "hidden_size": 256,
        "num_key_value_heads": 2,
    }
    config |= {"intermediate_size": 512, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dry(workspace, *overlays: str, changes: Sequence[str] = ()) -> str:
    """What `--dry-run` sums up of configs/math.yaml with overlays of configs/, on the tiny rows."""
    model = f"actor_rollout_ref.model.path={workspace / 'wide'}"
    gym = f"gym.servers.math_with_judge.start.python={GYM_PYTHON}"
    rows = [
        f"env.{kind}_files=[{{path: {workspace / kind}.jsonl, server: reasoning_gym}}]"
        for kind in ("train", "val")
    ]
    given = [*tiny(workspace, model, *SMALL), *rows, gym, "data.max_response_length=1024", *changes]
    config, defaults = load_config(["math", *overlays], given)
    data = preparation.prepare(config)
    assert preparation.changed(config, defaults)
    return preparation.summary(config, data, "train")


@pytest.mark.parametrize("name", PROMISED)
def test_recipes_for_gpus_are_taken_by_verl(workspace, wide, name):
    assert f"devices     {PROMISED[name]}" in dry(workspace, name)
    lines = (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 15


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overlays", "changes", "why"),
    [
        ([], ["model_engine=torchtitan"], "torchtitan has no critic"),
        ([], ["model_engine=mindspeed"], "wants one of dp, megatron, veomni"),
        (["megatron", "cpu"], [], "model_engine=megatron needs GPUs"),
        (["megatron"], [f"{ACTOR}.fsdp_config.param_offload=true"], "it is of model_engine=dp"),
        (
            [],
            [f"{ACTOR}.megatron.param_offload=true"],
            "it is of model_engine=megatron, and this recipe has dp",
        ),
        (["megatron"], [f"{ACTOR}.strategy=fsdp2"], "wants one of megatron"),
        (["megatron"], ["actor_rollout_ref.model.lora_rank=8"], "verl reads it with FSDP alone"),
        (
            ["megatron", "ppo"],
            ["critic.megatron.tensor_model_parallel_size=4"],
            "set them the same",
        ),
        (["megatron"], [f"{ACTOR}.megatron.context_parallel_size=8"], "8 GPUs do not divide by"),
        (["megatron"], [f"{ACTOR}.megatron.router_replay.mode=R2"], "hold no router's choices"),
        (["megatron"], [f"{ACTOR}.megatron.dtype=float32"], "verl does not take it: "),
        ([], [f"{ROLLOUT}.enable_rollout_routing_replay=true"], "replays routers with Megatron"),
        ([], [f"{ROLLOUT}.name=trtllm"], "must share the trainer's placement group"),
        (["sglang", "cpu"], [], "sglang needs GPUs"),
        (["sglang"], [f"{ROLLOUT}.enable_prefix_caching=false"], "is not read with"),
        (["sglang"], [f"{ROLLOUT}.full_determinism=true"], "no seed of their own"),
        (["sglang", "separate"], [], "set it to false"),
        ([], [f"{ROLLOUT}.engine_kwargs.sglang.x=1"], "is read with"),
        (["fp8", "cpu"], [], "quantization=fp8 on a CPU"),
        (["fp8"], ["actor_rollout_ref.model.path=tied"], "the model has hidden_size 64"),
        ([], [f"{ROLLOUT}.quantization=torchao"], "there is fp8 alone"),
        (
            [],
            ["actor_rollout_ref.model.override_config.quantization_config.load_in_4bit=true"],
            "QLoRA",
        ),
        (["drafts", "hf"], [], "takes no draft tokens"),
        (
            ["drafts"],
            [f"{ROLLOUT}.engine_kwargs.vllm.speculative_config.method=eagle"],
            "no sync reaches",
        ),
        (["drafts"], [f"{ROLLOUT}.full_determinism=true"], "by other numbers"),
        (["monitoring"], [f"{ROLLOUT}.disable_log_stats=true"], "disable_log_stats=false"),
    ],
)
def test_what_does_not_go_together_is_refused(workspace, wide, overlays, changes, why, monkeypatch):
    monkeypatch.chdir(workspace)
    with pytest.raises(ConfigError, match=re.escape(why)):
        print(dry(workspace, *overlays, changes=changes))


def test_without_vllm_calls_are_read_by_verl(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    tokenizer = bytes_tokenizer(CHATML, STOPS["chatml"])
    odd = {"properties": {"a": {"$ref": "b"}, "b": True}}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": odd}}]

    def understood(said: str):
        ids = tokenizer.encode(said, add_special_tokens=False)
        return asyncio.run(chat.understand(policy_of(None, tokenizer), ids, tools))

    assert understood("<tool_call>{broken</tool_call>") == (
        "",
        "<tool_call>{broken</tool_call>",
        [],
    )
    assert [c["name"] for c in understood("<think>so</think>" + call())[2]] == ["look_up"]
    checks.check_tool_format("qwen3_coder")
    with pytest.raises(ConfigError, match="verl has no such tool parser"):
        checks.check_tool_format("mistral")
