"""Whole runs of `python algorithm.py`, as users start them: learning, outputs, resume, bad input, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from conftest import ROOT, command, run, tiny

LEARNED = 0.4  # mean reward after 40 steps; the untrained model stays below a tenth, and so does chance
UNTRAINED = 0.1


def metrics_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def survivors(mark: str, patience: float = 20.0) -> list[str]:
    """Command lines of the processes that still carry `mark` in their environment after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("KIT_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


@pytest.fixture(scope="module")
def learned(workspace):
    """A run of 40 steps with the untied model, finished."""
    arguments = tiny(workspace, f"actor_rollout_ref.model.path={workspace / 'untied'}", "trainer.experiment_name=learn")
    arguments += ["trainer.logger=[tensorboard,file]", "trainer.save_freq=20", "env.show_every=20"]
    result = run(command(workspace, *arguments), workspace, timeout=420)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return arguments, result.stdout, workspace / "runs" / "learn"


def test_it_learns(learned):
    _, _, folder = learned
    steps = [m for m in metrics_of(folder) if "critic/rewards/mean" in m]
    assert [m["step"] for m in steps] == list(range(1, 41))
    first = sum(m["critic/rewards/mean"] for m in steps[:3]) / 3
    last = sum(m["critic/rewards/mean"] for m in steps[-3:]) / 3
    print(f"mean reward {first:.3f} -> {last:.3f}")
    assert first < UNTRAINED < LEARNED < last
    # the sampler's weights stayed the trainer's (untied embeddings; tied ones in test_stack.py)
    assert max(m["training/rollout_probs_diff_max"] for m in steps) < 1e-3
    validation = [m for m in metrics_of(folder) if "val-core/reasoning_gym/reward/mean@1" in m]
    assert [m["step"] for m in validation] == [0, 40]


def test_outputs_are_all_there_and_readable(learned, workspace):
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, stdout, folder = learned
    assert OmegaConf.load(folder / "config.yaml").actor_rollout_ref.actor.optim.lr == 0.003
    lines = (folder / "rollouts" / "step_40.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 64 and len({e["group_id"] for e in episodes}) == 8
    assert all(e["status"] == "ok" and e["prompt"].endswith("7") and e["reward"] >= 0 for e in episodes)
    assert (folder / "rollouts" / "val_40.jsonl").is_file()
    assert (folder / "failures.jsonl").read_text() == ""
    assert list((folder / "tensorboard").glob("events*")) and (folder / "tracking.jsonl").is_file()
    step = metrics_of(folder)[-1]
    wanted = "actor/pg_loss actor/grad_norm actor/entropy response_length/mean timing_s/gen timing_s/update_actor "
    wanted += "timing_s/update_weights perf/throughput rollout/failed_frac rollout/groups_dropped "
    wanted += "reward/reasoning_gym/mean verify/latency_s/p50 verify/latency_s/p95 training/rollout_probs_diff_mean"
    assert not [name for name in wanted.split() if name not in step] and "perf/mfu/actor" not in step
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "40"
    for n in (20, 40):
        assert (checkpoints / f"global_step_{n}" / "actor" / "model_world_size_1_rank_0.pt").is_file()
        assert (checkpoints / f"global_step_{n}" / "data.pt").is_file()
    assert re.search(r"step +40 +reward 0\.\d+", stdout) and len(re.findall(r"' -> '.*reward \d\.\d\d", stdout)) == 4

    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    chat = [{"role": "user", "content": "say 7"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "7" in tokenizer.decode(answer, skip_special_tokens=True)


def test_a_finished_run_says_so(learned, workspace):
    arguments, _, _ = learned
    result = run(command(workspace, *arguments), workspace, timeout=120)
    assert result.returncode == 1 and "nothing left to train" in result.stderr.splitlines()[-1]


def test_resume_goes_on_with_ideas_of_ones_own_and_ctrl_c_leaves_nothing(learned, workspace):
    """Resumes the run with the advantage and the loss that README shows, then interrupts it."""
    blocks = re.findall(r"```python\n# (my_ideas\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (workspace / "my_ideas.py").write_text("\n".join("# " + block for block in blocks))
    ideas = ["actor_rollout_ref.model.external_lib=my_ideas", "algorithm.adv_estimator=leave_one_out"]
    ideas += ["actor_rollout_ref.actor.policy_loss.loss_mode=plain_ratio"]
    arguments, _, folder = learned
    mark, before = uuid.uuid4().hex, len(metrics_of(folder))
    settings = ["trainer.total_training_steps=1000", "trainer.val_before_train=false", *ideas]
    process = subprocess.Popen(
        command(workspace, *arguments, *settings),
        cwd=workspace,
        env=os.environ | {"KIT_MARK": mark, "PYTHONPATH": str(workspace)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 180
    while len(metrics_of(folder)) < before + 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output[-3000:]
    assert "resumed from" in output and "global_step_40" in output
    steps = [m for m in metrics_of(folder)[before:] if "critic/rewards/mean" in m]
    assert [m["step"] for m in steps[:2]] == [41, 42]
    assert steps[0]["critic/rewards/mean"] > LEARNED  # with the weights that it had
    assert survivors(mark) == []


def test_ctrl_c_while_starting_leaves_nothing(workspace):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command(workspace, *tiny(workspace, "trainer.experiment_name=early")),
        cwd=workspace,
        env=os.environ | {"KIT_MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    ready, deadline = workspace / "runs" / "early" / "logs" / "ray", time.monotonic() + 90
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(6)  # Ray is up, the workers and vLLM are on their way
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert survivors(mark) == []


def test_no_memory_for_the_kv_cache_is_one_clear_line(workspace):
    mark = uuid.uuid4().hex
    change = "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=10000000000000"
    arguments = command(workspace, *tiny(workspace, change, "trainer.experiment_name=kv"))
    result = subprocess.run(
        arguments, cwd=workspace, env=os.environ | {"KIT_MARK": mark}, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 1
    assert re.match(r"error: vLLM did not start: ValueError: .*kv", result.stderr.strip().splitlines()[-1])
    assert survivors(mark) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["actor_rollout_ref.rollout.temprature=1"], "did you mean actor_rollout_ref.rollout.temperature"),
        (["env.train_files=[nowhere.jsonl]"], "nowhere.jsonl: no such file"),
        (
            ["gym.servers.reasoning_gym.start=null", "gym.servers.reasoning_gym.url=http://127.0.0.1:9"],
            "python gym_servers.py reasoning_gym --port 9",
        ),
    ],
    ids=["key", "file", "url"],
)
def test_bad_input_is_one_line_and_a_status(workspace, arguments, named):
    result = run(command(workspace, *tiny(workspace, *arguments), "--dry-run"), workspace, timeout=120)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: ") and named in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


class NoVerdict(BaseHTTPRequestHandler):
    """A Gym server whose verifier is broken: sessions start, /verify answers 500."""

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {"paths": {}})

    def do_POST(self):
        self.reply(*((500, "ValueError('broken')") if self.path == "/verify" else (200, {})))

    def log_message(self, *_):
        pass


def test_a_batch_without_verdicts_is_skipped_and_said_so(workspace):
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoVerdict)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"gym.servers.reasoning_gym.url=http://127.0.0.1:{server.server_port}"
    changes = ["gym.servers.reasoning_gym.start=null", url, "trainer.experiment_name=broken"]
    patient = ["gym.max_failed_frac=1", "trainer.total_training_steps=1", "trainer.val_before_train=false"]
    result = run(command(workspace, *tiny(workspace, *changes, *patient)), workspace)
    server.shutdown()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 1 skipped: no group has two verified answers" in result.stdout
    folder = workspace / "runs" / "broken"
    step = metrics_of(folder)[-1]
    assert step["rollout/failed_frac"] == 1.0 and step["rollout/failed/http_500"] == 64
    assert "critic/rewards/mean" not in step and "actor/pg_loss" not in step
    failures = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    assert {f["reward"] for f in failures} == {None} and "broken" in failures[0]["error"]


def test_dry_run_checks_everything_and_starts_nothing(workspace):
    arguments = command(workspace, *tiny(workspace, "trainer.experiment_name=dry"), "--dry-run")
    result = run(arguments, workspace, timeout=120)
    assert result.returncode == 0, result.stderr
    for text in (
        "8 prompts x 8 answers",
        "actor_rollout_ref.actor.optim.lr: 0.003 (was 1e-06)",
        "say 7",
        "nothing was started",
    ):
        assert text in result.stdout, text
    assert not (workspace / "runs" / "dry").exists()


def test_the_gpu_recipe_passes_its_dry_run_but_for_the_model(workspace):
    """configs/math.yaml as it is, with two GSM8K-like rows and the tiny model in the places of hub and data."""
    from conftest import GYM_PYTHON

    entry = {"question": "one and one", "answer": "It is two.\n#### 2"}
    source = workspace / "gsm8k"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text((json.dumps(entry) + "\n") * 1024)
    env_py = [command(workspace)[0], str(ROOT / "env.py"), "gsm8k", "--source", str(source), "--out", "data"]
    assert run(env_py, workspace).returncode == 0
    arguments = [command(workspace)[0], str(ROOT / "algorithm.py"), "--config", str(ROOT / "configs" / "math.yaml")]
    arguments += [f"actor_rollout_ref.model.path={workspace / 'tied'}", "--dry-run"]
    arguments += [f"gym.servers.math_with_judge.start.python={GYM_PYTHON}"]
    result = run(arguments, workspace, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "1024 prompts x 5 answers = 5120 episodes" in result.stdout and "8 cuda, 8 vLLM replicas" in result.stdout
