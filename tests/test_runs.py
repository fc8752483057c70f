"""Whole runs of `python algorithm.py`, as users start them: learning, outputs, resume, bad input, Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import GYM_PYTHON, ROOT, command, metrics_of, run, survivors, tiny

LEARNED = 0.7  # mean reward after 50 steps; the untrained model stays below a tenth, and so does chance
UNTRAINED = 0.1


@pytest.fixture(scope="module")
def learned(workspace):
    """A run of 50 steps with the untied model, finished."""
    arguments = tiny(workspace, f"actor_rollout_ref.model.path={workspace / 'untied'}", "trainer.experiment_name=learn")
    arguments += ["trainer.logger=[tensorboard,file]", "trainer.save_freq=25", "env.show_every=25"]
    arguments += ["trainer.total_training_steps=50", "actor_rollout_ref.rollout.n=16"]
    result = run(command(workspace, *arguments), workspace, timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return arguments, result.stdout, workspace / "runs" / "learn"


def test_it_learns(learned):
    _, _, folder = learned
    steps = [m for m in metrics_of(folder) if "critic/rewards/mean" in m]
    assert [m["step"] for m in steps] == list(range(1, 51))
    first = sum(m["critic/rewards/mean"] for m in steps[:3]) / 3
    last = sum(m["critic/rewards/mean"] for m in steps[-3:]) / 3
    print(f"mean reward {first:.3f} -> {last:.3f}")
    assert first < UNTRAINED < LEARNED < last
    # the sampler's weights stayed the trainer's (untied embeddings; tied ones in test_stack.py)
    assert max(m["training/rollout_probs_diff_max"] for m in steps) < 1e-3
    validation = [m for m in metrics_of(folder) if "val-core/reasoning_gym/reward/mean@1" in m]
    assert [m["step"] for m in validation] == [0, 50]


def test_outputs_are_all_there_and_readable(learned, workspace):
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, stdout, folder = learned
    assert OmegaConf.load(folder / "config.yaml").actor_rollout_ref.actor.optim.lr == 0.003
    lines = (folder / "rollouts" / "step_50.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 128 and len({e["group_id"] for e in episodes}) == 8
    assert all(e["status"] == "ok" and e["prompt"].endswith("7") and e["reward"] >= 0 for e in episodes)
    assert (folder / "rollouts" / "val_50.jsonl").is_file()
    assert (folder / "failures.jsonl").read_text() == ""
    assert list((folder / "tensorboard").glob("events*")) and (folder / "tracking.jsonl").is_file()
    step = [m for m in metrics_of(folder) if "rollout/failed_frac" in m][-1]
    wanted = "actor/pg_loss actor/grad_norm actor/entropy response_length/mean timing_s/gen timing_s/update_actor "
    wanted += "timing_s/update_weights perf/throughput rollout/failed_frac rollout/groups_dropped "
    wanted += "reward/reasoning_gym/mean verify/latency_s/p50 verify/latency_s/p95 training/rollout_probs_diff_mean"
    assert not [name for name in wanted.split() if name not in step] and "perf/mfu/actor" not in step
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "50"
    for n in (25, 50):
        assert (checkpoints / f"global_step_{n}" / "actor" / "model_world_size_1_rank_0.pt").is_file()
        assert (checkpoints / f"global_step_{n}" / "data.pt").is_file()
    assert re.search(r"step +50 +reward [01]", stdout) and len(re.findall(r"' -> '.*reward \d\.\d\d", stdout)) == 4

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
    ideas = ["algorithm.adv_estimator=my_ideas.py:leave_one_out", "env.reward=my_ideas.py:shorter"]
    ideas += ["actor_rollout_ref.actor.policy_loss.loss_mode=my_ideas.py:plain_ratio"]
    ideas += ["env.filters=[my_ideas.py:finished]", "env.sampler=my_ideas.py:hardest"]
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
    assert "resumed from" in output and "global_step_50" in output
    steps = [m for m in metrics_of(folder)[before:] if "critic/rewards/mean" in m]
    assert [m["step"] for m in steps[:2]] == [51, 52]
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
    assert re.match(r"error: stage start: vLLM did not start: ValueError: .*kv", result.stderr.strip().splitlines()[-1])
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


def test_ppo_with_a_critic_warms_up_saves_and_resumes(workspace):
    """GAE: one step in which only the critic learns, two with the policy; then the same run goes on."""
    changes = ["algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "critic.optim.lr=0.001", "env.val_files=[]"]
    changes += [f"actor_rollout_ref.model.path={workspace / 'untied'}", "actor_rollout_ref.rollout.n=2"]
    arguments = tiny(workspace, *changes, "trainer.experiment_name=ppo", "trainer.total_training_steps=3")
    result = run(command(workspace, *arguments), workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = workspace / "runs" / "ppo"
    steps = [m for m in metrics_of(folder) if "critic/rewards/mean" in m]
    assert [("actor/pg_loss" in m, "critic/vf_loss" in m) for m in steps] == [(False, True), (True, True), (True, True)]
    assert all(m["critic/grad_norm"] > 0 and "critic/vf_explained_var" in m for m in steps)
    assert all(m["training/rollout_probs_diff_max"] < 1e-3 for m in steps)
    checkpoint = folder / "checkpoints" / "global_step_3"
    assert (checkpoint / "critic" / "model_world_size_1_rank_0.pt").is_file() and (checkpoint / "actor").is_dir()
    result = run(command(workspace, *arguments, "trainer.total_training_steps=4"), workspace)
    assert result.returncode == 0 and "resumed from" in result.stdout, result.stdout[-3000:] + result.stderr[-3000:]


def recipe_run(workspace, name, overlays, changes, *words, timeout=300):
    """A finished run of the untied model with overlays of configs/: (metrics of its steps, folder, output)."""
    arguments = command(workspace)
    for overlay in overlays:
        arguments += ["--config", str(ROOT / "configs" / f"{overlay}.yaml")]
    arguments += [
        *tiny(workspace, f"actor_rollout_ref.model.path={workspace / 'untied'}", "env.val_files=[]"),
        *changes,
    ]
    result = run([*arguments, f"trainer.experiment_name={name}", *words], workspace, timeout=timeout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = workspace / "runs" / name
    steps = [m for m in metrics_of(folder) if "timing_s/step" in m or "actor/loss" in m]
    return steps, folder, result.stdout


def test_dapo_refills_the_batch_and_says_what_it_spent(workspace):
    """Dynamic sampling, filters, shaping and a curriculum; resumed, it reads on where it stopped."""
    changes = ["data.train_batch_size=4", "trainer.total_training_steps=3", "actor_rollout_ref.rollout.n=4"]
    changes.append("env.sampler=pieces.py:by_pass_rate")
    steps, folder, _ = recipe_run(workspace, "dapo", ["dapo"], changes)
    spent = [m["rollout/prompt_batches"] for m in steps]
    assert len(spent) == 3 and set(spent) <= {1.0, 2.0, 3.0} and max(spent) > 1
    for step, batches in enumerate(spent, 1):
        lines = (folder / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        assert len(lines) == 16 * batches  # every round is on file
    groups = [16 * b / 4 - m["rollout/groups_dropped"] for b, m in zip(spent, steps, strict=True)]
    assert all(g <= 4 for g in groups) and all(b == 3 for b, g in zip(spent, groups, strict=True) if g < 4)
    import torch

    state = torch.load(folder / "checkpoints" / "global_step_3" / "data.pt", weights_only=True)
    assert state["step"] == 3 and state["batches"] == sum(spent) and 4 <= len(state["pass_rates"]) <= 8
    more, _, said = recipe_run(workspace, "dapo", ["dapo"], [*changes, "trainer.total_training_steps=4"])
    assert "resumed from" in said and more[-1]["step"] == 4
    total = sum(spent) + more[-1]["rollout/prompt_batches"]
    assert more[-1]["training/epoch"] == pytest.approx(total * 4 / 8)


def test_a_greedy_baseline_a_learned_reward_kl_and_correction_at_once(workspace):
    """ReMax, a reward model, an adaptive KL term in the reward, importance weights and rejection: all metrics there."""
    changes = [f"reward.reward_model.model_path={workspace / 'scored'}", "trainer.total_training_steps=2"]
    changes += ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]
    changes += ["algorithm.rollout_correction.rollout_rs=token_k1", "data.train_batch_size=4"]
    changes += ["algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0", "actor_rollout_ref.rollout.n=1"]
    steps, folder, _ = recipe_run(workspace, "all", ["remax", "reward_model", "rollout_correction"], changes)
    for m in steps:
        assert m["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)  # sampler and trainer agree
        assert m["critic/rewards/mean"] != m["reward/reasoning_gym/mean"]  # KL and the learned reward are in it
        assert m["actor/grad_norm"] > 0 and math.isfinite(m["reward/reasoning_gym/reward_model/mean"])
    # nothing learned yet, but the reference computes in bf16, which rounds log-probs from 2 to 4 by at most 2**-7
    assert abs(steps[0]["actor/reward_kl_penalty"]) < 2**-7
    assert math.isfinite(steps[1]["actor/reward_kl_penalty"])
    assert steps[1]["actor/reward_kl_penalty_coeff"] != steps[0]["actor/reward_kl_penalty_coeff"]
    import torch

    state = torch.load(folder / "checkpoints" / "global_step_2" / "data.pt", weights_only=True)
    assert state["kl_coef"] != 0.001  # where the controller stands, for a resume
    episodes = [json.loads(line) for line in (folder / "rollouts" / "step_2.jsonl").read_text().splitlines()]
    assert len(episodes) == 4 and all(e["baseline"] is not None for e in episodes)


def test_a_lora_adapter_reaches_the_sampler_and_the_export(workspace):
    import torch
    from transformers import AutoModelForCausalLM

    changes = ["actor_rollout_ref.model.lora.merge=false", "actor_rollout_ref.actor.optim.lr=0.03"]
    changes += ["actor_rollout_ref.model.lora_rank=8", "trainer.total_training_steps=3"]
    steps, folder, _ = recipe_run(workspace, "lora", ["lora"], changes)
    assert all(m["actor/grad_norm"] > 0 and m["training/rollout_probs_diff_max"] < 1e-3 for m in steps)
    base, tuned = (AutoModelForCausalLM.from_pretrained(f) for f in (workspace / "untied", folder / "export"))
    assert (folder / "export" / "lora_adapter" / "adapter_model.safetensors").is_file()
    weight = "model.layers.0.mlp.up_proj.weight"
    change = tuned.state_dict()[weight] - base.state_dict()[weight]
    singular = torch.linalg.svdvals(change.float())
    assert singular[7] > 0.05 * singular[0] and singular[8] < 0.02 * singular[0]  # of rank 8, and bf16's rounding
    untouched = base.state_dict()["lm_head.weight"]
    assert torch.equal(untouched.to(tuned.dtype), tuned.state_dict()["lm_head.weight"])


def test_supervised_warm_up_learns_saves_and_resumes(workspace):
    chats = [
        [{"role": "user", "content": f"{w} 7"}, {"role": "assistant", "content": "7"}] for w in ("say", "give") * 4
    ]
    (workspace / "chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in chats))
    files = [f"env.{name}=[{workspace / 'chats.jsonl'}]" for name in ("train_files", "val_files")]
    changes = [*files, "data.train_batch_size=8", "actor_rollout_ref.actor.optim.lr=0.003", "trainer.save_freq=10"]
    steps, folder, said = recipe_run(workspace, "sft", ["sft"], [*changes, "trainer.total_training_steps=20"], "sft")
    losses = [m["actor/loss"] for m in steps if "actor/loss" in m]
    assert len(losses) == 20 and losses[0] > 3 and losses[-1] < 0.3, losses
    held = [m["val/loss"] for m in metrics_of(folder) if "val/loss" in m]
    assert held[0] == pytest.approx(losses[0], rel=1e-4)  # the same rows, before the first step: one definition
    assert (folder / "export" / "model.safetensors").is_file() and "path=runs/sft/export" in said
    more = [*changes, "trainer.total_training_steps=21"]
    steps, _, _ = recipe_run(workspace, "sft", ["sft"], more, "sft")
    assert steps[-1]["step"] == 21 and steps[-1]["actor/loss"] < 0.3


def with_counter(workspace, *changes) -> list[str]:
    """Arguments of the tiny recipe with a second server, whose tool counts; changes later win."""
    start = "gym.servers.counter.start"
    server = [f"{start}.server=example_session_state_mgmt", f"{start}.python={GYM_PYTHON}"]
    return tiny(workspace, "env.val_files=[]", "data.max_response_length=32", *server, *changes)


def mix(workspace) -> str:
    """Both servers' rows, half and half."""
    counting = f"{{path: {workspace / 'tools.jsonl'}, server: counter, weight: 1}}"
    return f"env.train_files=[{counting},{{path: {workspace / 'train.jsonl'}, server: reasoning_gym, weight: 1}}]"


def test_it_learns_to_use_a_real_tool(workspace):
    """The tool counts in a session of its own; exactly one call, between two turns of the policy, earns 1."""
    files = f"env.train_files=[{{path: {workspace / 'tools.jsonl'}, server: counter}}]"
    arguments = with_counter(workspace, files, f"actor_rollout_ref.model.path={workspace / 'untied'}")
    arguments += ["actor_rollout_ref.actor.optim.lr=0.005", "trainer.total_training_steps=50"]
    result = run(command(workspace, *arguments, "trainer.experiment_name=tools"), workspace, timeout=1200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    steps = [m for m in metrics_of(workspace / "runs" / "tools") if "critic/rewards/mean" in m]
    rewards = [m["reward/counter/mean"] for m in steps]
    print("rewards", [round(r, 2) for r in rewards])
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-5:]) / 5 > 0.6
    assert max(m["training/rollout_probs_diff_max"] for m in steps) < 1e-3  # around what was observed, too
    assert steps[-1]["rollout/turns/mean"] > 1.5 and {m["rollout/failed_frac"] for m in steps} == {0.0}


def test_a_batch_of_two_servers_by_weight(workspace):
    arguments = with_counter(workspace, mix(workspace), "trainer.total_training_steps=2")
    result = run(command(workspace, *arguments, "trainer.experiment_name=mix"), workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "servers     counter (8 rows), reasoning_gym (8 rows)" in result.stdout
    lines = (workspace / "runs" / "mix" / "rollouts" / "step_2.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["server"] for line in lines) == {"counter": 32, "reasoning_gym": 32}
    step = metrics_of(workspace / "runs" / "mix")[-1]
    assert {"reward/counter/mean", "reward/reasoning_gym/mean", "rollout/counter/failed_frac"} <= set(step)


def test_rollouts_without_training_go_on_where_they_stopped(workspace):
    changes = ["actor_rollout_ref.rollout.n=2", "trainer.experiment_name=collect"]
    arguments = with_counter(workspace, mix(workspace), *changes)
    result = run(command(workspace, "rollout", *arguments), workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    path = workspace / "runs" / "collect" / "rollouts.jsonl"
    lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    keys = {(r["_ng_task_index"], r["_ng_rollout_index"]) for r in records}
    assert keys == {(i, k) for i in range(16) for k in range(2)} and len(records) == 32
    for record in records:
        assert isinstance(record["reward"], float) and record["response"]["object"] == "response"
        assert ("expected_count" in record) != ("question" in record)  # the row, verbatim, is all there
        seen: list[int] = []
        for item in record["response"]["output"]:
            if "generation_token_ids" in item:
                assert item["prompt_token_ids"][: len(seen)] == seen
                assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
                seen = item["prompt_token_ids"] + item["generation_token_ids"]
        assert seen

    path.write_text("\n".join(lines[:20]) + "\n" + lines[20][:50])  # killed in the middle of a line
    result = run(command(workspace, "rollout", *arguments), workspace)
    assert result.returncode == 0 and "20 of 32 episodes are in" in result.stdout, result.stdout + result.stderr
    again = path.read_text().splitlines()
    assert again[:20] == lines[:20] and len(again) == 32
    assert {(r["_ng_task_index"], r["_ng_rollout_index"]) for r in map(json.loads, again)} == keys

    other = f"env.train_files=[{{path: {workspace / 'val.jsonl'}, server: reasoning_gym}}]"
    result = run(command(workspace, "rollout", *with_counter(workspace, other, *changes)), workspace)
    assert result.returncode == 1 and "holds episodes of other rows" in result.stderr


def test_evaluation_says_mean_and_pass_at_k_and_what_the_server_says(workspace):
    changes = ["trainer.experiment_name=evaluated", "actor_rollout_ref.rollout.val_kwargs.n=4"]
    changes += ["actor_rollout_ref.rollout.val_kwargs.do_sample=true", "env.train_files=[]"]
    result = run(command(workspace, "evaluate", *tiny(workspace, *changes)), workspace)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = workspace / "runs" / "evaluated"
    records = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    assert len(records) == 32
    metrics = {name: value for m in metrics_of(folder) for name, value in m.items()}
    mean = sum(r["reward"] for r in records) / 32
    assert metrics["val-core/reasoning_gym/reward/mean@4"] == pytest.approx(mean)
    assert metrics["val-gym/reasoning_gym/mean/reward"] == pytest.approx(mean)  # /aggregate_metrics agrees
    rates = [metrics[f"val-core/reasoning_gym/acc/pass@{k}"] for k in (1, 2, 4)]
    assert rates == sorted(rates) and f"pass@4: {rates[2]:.4g}" in result.stdout


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
    assert "step 1 skipped: no group left to train on" in result.stdout
    folder = workspace / "runs" / "broken"
    step = next(m for m in metrics_of(folder) if "rollout/failed_frac" in m)
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
