"""`Trainer.step` over the real stack: it learns, every recipe works, what is dropped, damaged, saved."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
from collections import Counter
from pathlib import Path

import pandas
import pytest
import torch
from conftest import (
    GYM_PYTHON,
    ROOT,
    WORDS,
    drop,
    make_pretrained,
    metrics_of,
    with_values,
    with_verifiers,
    write_rows,
)
from judge_doubles import JUDGE_CONFIG, StubJudge, completion

import gym_client
import training
from kit.config import user_functions
from kit.errors import NonFiniteStep, RunError, SkippedStep
from kit.extras.judges import judge_proxy, judge_settings
from kit.gym import servers as gym_servers
from kit.runs import checkpoints
from kit.runs.workers import optional_roles, start_roles, start_workers

AGREE = 1e-3  # bound on any one probability of the sampler against the trainer's, in float32
UNTRAINED = 0.1  # mean reward; chance is below
PATIENCE = 100  # steps; most learn within 40
COUNTING = "env.train_files=[{path: tools.jsonl, server: counter}]"
QUIET = "env.val_files=[]"


def learn(trainer, bound, over=3):
    """Rewards of the steps until the mean of the last `over` is above `bound`."""
    rewards = []
    while len(rewards) < PATIENCE and (len(rewards) < over or sum(rewards[-over:]) / over < bound):
        metrics = trainer.step_or_skip()
        assert (
            metrics["training/rollout_probs_diff_max"] < AGREE
            and metrics["rollout/failed_frac"] == 0
        )
        rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(r, 2) for r in rewards])
    return rewards


def test_it_learns_from_three_kinds_of_verifiers_at_once(stack):
    """A server of Gym, the server of templates/verifier, and templates/reward.py over verl's parquet. Each goes up."""
    words = ["say", "give", "write", "print"]
    chats = [[{"role": "user", "content": f"{word} 7"}] for word in words]
    verls = [
        {"prompt": chat, "data_source": "mine", "reward_model": {"ground_truth": "7"}}
        for chat in chats
    ]
    pandas.DataFrame(verls).to_parquet(stack.workspace / "verl.parquet")
    asked = {"responses_create_params": {"input": "tea"}, "prices": {"tea": 7}, "answer": 7}
    write_rows(stack.workspace / "shop.jsonl", [asked])
    files = [
        "{path: train.jsonl, server: reasoning_gym, weight: 2}",
        "{path: shop.jsonl, server: shop, weight: 1}",
    ]
    files += ["{path: verl.parquet, verifier: templates/reward.py:compute_score, weight: 1}"]
    changes = [f"env.train_files=[{', '.join(files)}]", "actor_rollout_ref.rollout.n=16", QUIET]
    # of longer answers, as of 77, some of these pay well what others do not, and for a while it may stay with that
    changes += ["data.max_response_length=6"]
    with (
        with_verifiers(stack, *changes) as gym,
        stack.trainer("learn", *changes, gym=gym) as trainer,
    ):
        rewards = learn(trainer, 0.4)
        steps = metrics_of(trainer.run.folder)
    assert rewards[0] < UNTRAINED < 0.4 <= sum(rewards[-3:]) / 3
    for name in ("reasoning_gym", "shop", "compute_score"):
        own = [m[f"reward/{name}/mean"] for m in steps]
        assert sum(own[:3]) / 3 + 0.1 < sum(own[-3:]) / 3, (name, own)


def test_it_learns_a_game_from_rows_made_on_the_fly(stack):
    """templates/task.py: two guesses at a number from 1 to 3, the second after a word on the first."""
    files = "env.train_files=[{function: templates/task.py:rows, highest: 3, verifier: templates/task.py:Guess}]"
    changes = [files, "data.max_response_length=24", "actor_rollout_ref.rollout.n=16", QUIET]
    with (
        with_verifiers(stack, *changes) as gym,
        stack.trainer("guess", *changes, gym=gym) as trainer,
    ):
        rewards = learn(trainer, 0.3, over=5)
    assert sum(rewards[:5]) / 5 < 0.2 and sum(rewards[-5:]) / 5 >= 0.3


def test_it_learns_from_what_a_judge_says(stack, tmp_path):
    """Gym's equivalence_llm_judge asks it about each answer, by an address; it is pleased by a 7 anywhere."""
    judge = StubJudge((200, lambda asked: completion("[[A=B]]" if "7" in str(asked) else "[[A!=B]]")))
    name = "equivalence_llm_judge"
    asked = [[{"role": "user", "content": f"{word} it"}] for word in WORDS]
    made = [
        {"responses_create_params": {"input": messages}, "expected_answer": "seven"}
        for messages in asked
    ]
    write_rows(stack.workspace / "judged.jsonl", made)
    start = {
        "start": {
            "python": str(GYM_PYTHON),
            "config": JUDGE_CONFIG,
        }
    }
    changes = [f"env.train_files=[{{path: judged.jsonl, server: {name}}}]", QUIET]
    with judge_proxy.JudgeProxy(
        {"judge_model": judge_settings.Judge("judge_model", judge.url, "stub", timeout_s=10.0)}
    ) as proxy:
        with gym_servers.running_servers({name: start}, tmp_path, judge_specs=proxy.process_specs()) as urls:
            gym = stack.servers.loop.run(gym_client.Gym(urls).__aenter__())
            with stack.trainer(
                "judged", *changes, f"gym.servers.{name}.url={urls[name]}", gym=gym
            ) as trainer:
                rewards = learn(trainer, 0.9)
            stack.servers.loop.run(gym.__aexit__())
        assert proxy.metrics()["judge/judge_model/completion_tokens"] == 2 * 64 * len(rewards)
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 >= 0.9


def test_it_learns_to_use_a_real_tool(stack):
    """The tool counts in a session of its own; exactly one call, between two turns of the policy, earns 1."""
    with stack.trainer("tools", COUNTING, QUIET, "data.max_response_length=32") as trainer:
        rewards = learn(trainer, 0.6, over=5)
        assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-5:]) / 5 >= 0.6
        assert (
            trainer.metrics["rollout/turns/mean"] > 1
        )  # a word after the call, where there is room for one


PLAIN = [
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "gspo",
    "opo",
    "gpg",
    "cispo",
    "gdpo",
    "online_dpo",
]
PLAIN += ["turn_grpo", "curriculum", "rollout_correction", "remax", "sppo", "spin"]
BESIDE = {"dapo", "ppo", "turn_gae", "reward_model", "lora", "sft", "distill"}  # tests of their own


def test_no_recipe_is_forgotten():
    assert {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")} == {
        *PLAIN,
        *BESIDE,
    }


@pytest.mark.parametrize("name", PLAIN)
def test_a_step_of_every_recipe(stack, name):
    """An update makes likelier what earned a positive advantage, to first order, and the new weights reach the sampler:
    it agrees with the trainer in the step after."""
    once = (
        ["actor_rollout_ref.actor.ppo_epochs=1"] if name == "sppo" else []
    )  # its second epoch turns back
    with stack.trainer(
        name, QUIET, "trainer.total_training_steps=2", *once, overlays=[name]
    ) as trainer:
        learn_from, batches = trainer.learn, []

        def learn(batch):
            batches.append(batch)
            learn_from(batch)
            batch.batch["after"] = training.compute_log_probs(trainer.workers.actor, batch, trainer.config)[
                "log_probs"
            ]

        trainer.learn = learn
        for _ in range(2):
            metrics = trainer.step_or_skip()
            assert math.isfinite(metrics["actor/pg_loss"]) and metrics["actor/grad_norm"] > 0
            assert metrics["training/rollout_probs_diff_max"] < AGREE
            assert "training/skipped_nonfinite_steps" not in metrics
    first = batches[0].batch  # of a new optimiser; later ones move on by the gradients before, too
    gain = (
        first["advantages"] * (first["after"] - first["old_log_probs"]) * first["response_mask"]
    ).sum()
    print(name, "gain", gain.item())
    assert gain > 0


@pytest.mark.parametrize("name", ["ppo", "turn_gae"])
def test_a_critic_warms_up_alone_saves_and_loads(stack, values, name):
    changes = ["trainer.critic_warmup=1", "critic.optim.lr=0.001", "actor_rollout_ref.rollout.n=2"]
    workers = with_values(stack, values)
    with stack.trainer(name, QUIET, *changes, overlays=[name], workers=workers) as trainer:
        steps = [trainer.step_or_skip() for _ in range(3)]
        folder = trainer.save()
        assert (folder / "critic" / "model_world_size_1_rank_0.pt").is_file() and (
            folder / "actor"
        ).is_dir()
        assert checkpoints.load(workers, folder)["step"] == 3
    assert [("actor/pg_loss" in m, "critic/vf_loss" in m) for m in steps] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    assert all(m["critic/grad_norm"] > 0 and "critic/vf_explained_var" in m for m in steps)
    assert all(m["training/rollout_probs_diff_max"] < AGREE for m in steps)


def test_a_greedy_baseline_a_learned_reward_kl_and_correction_at_once(stack, values):
    """ReMax, a reward model, an adaptive KL term in the reward, importance weights and rejection: all metrics there."""
    changes = [
        f"reward.reward_model.model_path={stack.workspace / 'scored'}",
        "trainer.total_training_steps=2",
    ]
    changes += [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
    ]
    changes += ["algorithm.rollout_correction.rollout_rs=token_k1", "data.train_batch_size=4"]
    changes += [
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        "actor_rollout_ref.rollout.n=1",
        QUIET,
    ]
    overlays = ["remax", "reward_model", "rollout_correction"]
    workers = with_values(stack, values, critic=False, reward_model=True)
    with stack.trainer("all", *changes, overlays=overlays, workers=workers) as trainer:
        steps = [dict(trainer.step_or_skip()) for _ in range(2)]
        state = torch.load(trainer.run.checkpoint / "data.pt", weights_only=True)
        lines = (trainer.run.folder / "rollouts" / "step_2.jsonl").read_text().splitlines()
    for m in steps:
        assert m["rollout_corr/rollout_is_mean"] == pytest.approx(
            1.0, abs=1e-3
        )  # sampler and trainer agree
        assert (
            m["critic/rewards/mean"] != m["reward/reasoning_gym/mean"]
        )  # KL and the learned reward are in it
        assert m["actor/grad_norm"] > 0 and math.isfinite(
            m["reward/reasoning_gym/reward_model/mean"]
        )
    # nothing learned yet, but the reference computes in bf16, which rounds log-probs from 2 to 4 by at most 2**-7
    assert abs(steps[0]["actor/reward_kl_penalty"]) < 2**-7
    assert math.isfinite(steps[1]["actor/reward_kl_penalty"])
    assert steps[1]["actor/reward_kl_penalty_coeff"] != steps[0]["actor/reward_kl_penalty_coeff"]
    # where the controller stands after its last update, which moves it by at most a fifth of batch over horizon
    moved = state["kl_coef"] / steps[1]["actor/reward_kl_penalty_coeff"] - 1
    assert 0 < abs(moved) <= 0.2 * 4 / 100 + 1e-6
    episodes = [json.loads(line)["_episode"] for line in lines]
    assert len(episodes) == 4 and all(e["baseline"] is not None for e in episodes)


def test_dapo_refills_the_batch_and_says_what_it_spent(stack, capsys):
    """Dynamic sampling, filters, shaping and a curriculum."""
    changes = [
        "data.train_batch_size=4",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.n=4",
        QUIET,
    ]
    changes.append("env.sampler=templates/samplers.py:by_pass_rate")
    with stack.trainer("dapo", *changes, overlays=["dapo"]) as trainer:
        steps = [dict(trainer.step_or_skip()) for _ in range(3)]
        files = [
            (trainer.run.folder / "rollouts" / f"step_{n}.jsonl").read_text().splitlines()
            for n in (1, 2, 3)
        ]
        state = torch.load(trainer.run.checkpoint / "data.pt", weights_only=True)
    spent = [m["rollout/prompt_batches"] for m in steps]
    assert set(spent) <= {1.0, 2.0, 3.0} and max(spent) > 1
    assert [len(lines) for lines in files] == [
        16 * batches for batches in spent
    ]  # every round is on file
    for lines in files:  # Gym's tools know an episode by these two
        places = [(r["_ng_task_index"], r["_ng_rollout_index"]) for r in map(json.loads, lines)]
        assert len(set(places)) == len(places)
    groups = [16 * b / 4 - m["rollout/groups_dropped"] for b, m in zip(spent, steps, strict=True)]
    assert all(g <= 4 for g in groups) and all(
        b == 3 for b, g in zip(spent, groups, strict=True) if g < 4
    )
    assert all(
        {"rollout/filtered/drop_uniform", "rollout/filtered/mask_ended"} <= m.keys() for m in steps
    )
    assert (
        state["step"] == 3 and state["batches"] == sum(spent) and 4 <= len(state["pass_rates"]) <= 8
    )
    assert steps[-1]["training/epoch"] == pytest.approx(sum(spent) * 4 / 8)
    told = re.findall(
        r"step +\d  verifier \S+ shaped \S+ length .* kept (\d+)/(\d+)", capsys.readouterr().out
    )
    less = [
        m["rollout/kept"] < m["rollout/episodes"] for m in steps
    ]  # all that was sampled may be kept
    assert [int(total) for _, total in told] == [
        16 * b for b, told_so in zip(spent, less, strict=True) if told_so
    ]


def test_a_batch_of_two_servers_by_weight(stack):
    files = "env.train_files=[{path: tools.jsonl, server: counter, weight: 1},"
    files += "{path: train.jsonl, server: reasoning_gym, weight: 1}]"
    with stack.trainer("mix", files, QUIET, "data.max_response_length=32") as trainer:
        metrics = trainer.step_or_skip()
        lines = (trainer.run.folder / "rollouts" / "step_1.jsonl").read_text().splitlines()
    told = Counter(json.loads(line)["_episode"]["server"] for line in lines)
    assert told == {"counter": 32, "reasoning_gym": 32}
    assert {
        "reward/counter/mean",
        "reward/reasoning_gym/mean",
        "rollout/counter/failed_frac",
    } <= set(metrics)


def test_lora_reaches_the_sampler_merged(stack):
    """Workers of their own, whose adapter is merged for the sampler: after an update the two still agree."""
    changes = [
        "actor_rollout_ref.actor.optim.lr=0.03",
        "actor_rollout_ref.model.lora_rank=8",
        QUIET,
    ]
    with stack.trainer("lora", *changes, overlays=["lora"]) as trainer:
        workers = start_workers(trainer.config)
        workers.actor.init_model()
    try:
        with stack.trainer("lora", *changes, overlays=["lora"], workers=workers) as trainer:
            for _ in range(2):
                metrics = trainer.step_or_skip()
                assert (
                    metrics["actor/grad_norm"] > 0
                    and metrics["training/rollout_probs_diff_max"] < AGREE
                )
    finally:
        drop(workers)


def test_weights_reach_the_sampler_over_a_socket_of_the_runs_own(stack):
    """verl's own name is the same in every run of a machine, and what goes over it is unpickled."""
    seen, ended = set(), threading.Event()

    def look():
        while not ended.is_set():
            seen.update(re.findall(r"\S*rl-colocate-zmq\S*", Path("/proc/net/unix").read_text()))

    looker = threading.Thread(target=look)
    with stack.trainer("sockets", QUIET) as trainer:
        looker.start()
        for _ in range(5):
            trainer.update_weights()
        ended.set()
        looker.join()
    folders = {Path(name).parent for name in seen}
    assert folders == {Path(os.environ["TMPDIR"])} and {
        folder.stat().st_mode & 0o777 for folder in folders
    } == {0o700}


def test_a_teacher_is_learned_from_by_its_log_probs_alone(stack):
    """The session's model, fitted to say 7, scores what the policy says. Nothing else is learned from, and the estimate
    of the reverse KL falls."""
    make_pretrained(
        stack.workspace / "teacher",
        stack.workspace / "untied",
        ["say", "give", "write", "print"],
        "7",
    )
    teacher = f"{user_functions.TEACHER}=teacher"
    with stack.trainer("distill", QUIET, teacher, overlays=["distill"]) as trainer:
        alone = start_roles(trainer.config, optional_roles(trainer.config))
        trainer.workers = trainer.workers._replace(ref=alone.ref)
        try:
            steps = [dict(trainer.step_or_skip()) for _ in range(10)]
        finally:
            drop([trainer.workers.ref])
    kl = [-m["critic/advantages/mean"] for m in steps]  # nats a token
    print(
        "reverse KL",
        [round(k, 2) for k in kl],
        "rewards",
        [round(m["rollout/reward/mean"], 2) for m in steps],
    )
    assert (
        kl[0] > 2 and kl[-1] < 0.75 * kl[0]
    )  # of itself the policy is 0 away, and unlearned it stays where it is
    assert all(
        m["actor/grad_norm"] > 0 and m["training/rollout_probs_diff_max"] < AGREE for m in steps
    )


def test_critic_and_reference_on_gpus_of_their_own(stack):
    """Two for each, the actor on one: the reference says what the actor's says; the critic learns, and saves shards."""
    pools = [
        "trainer.resource_pools={critic: 2, ref: 2}",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    with stack.trainer(
        "pools", *pools, "critic.optim.lr=0.001", QUIET, overlays=["ppo"]
    ) as trainer:
        alone = start_roles(trainer.config, optional_roles(trainer.config))
        shared, trainer.workers = (
            trainer.workers,
            trainer.workers._replace(critic=alone.critic, ref=alone.ref),
        )
        try:
            first = trainer.step_or_skip()
            batch = training.build_batch(
                trainer.collect()[:37], trainer.inputs.tokenizer.pad_token_id, 1.0
            )
            ours, theirs = (
                training.compute_ref_log_probs(workers, batch, trainer.config)
                for workers in (alone, shared)
            )
            assert torch.equal(ours != 0, theirs != 0) and torch.allclose(ours, theirs, atol=1e-4)
            second, folder = trainer.step_or_skip(), trainer.save()
        finally:
            drop([alone.critic, alone.ref])
    assert (alone.critic.world_size, alone.ref.world_size) == (2, 2)
    for metrics in (first, second):
        assert (
            metrics["critic/grad_norm"] > 0 and metrics["training/rollout_probs_diff_max"] < AGREE
        )
    assert second["actor/kl_loss"] > first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert len(list((folder / "critic").glob("model_world_size_2_rank_*.pt"))) == 2


def test_ideas_of_ones_own_from_the_readme(stack):
    blocks = re.findall(
        r"```python\n# (my_ideas\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    (stack.workspace / "my_ideas.py").write_text("\n".join("# " + block for block in blocks))
    ideas = [
        "algorithm.adv_estimator=my_ideas.py:leave_one_out",
        "env.reward=my_ideas.py:shorter",
        QUIET,
    ]
    ideas += ["actor_rollout_ref.actor.policy_loss.loss_mode=my_ideas.py:plain_ratio"]
    ideas += ["env.filters=[my_ideas.py:finished]", "env.sampler=my_ideas.py:hardest"]
    with stack.trainer("ideas", *ideas) as trainer:
        metrics = trainer.step_or_skip()
        told = (trainer.run.folder / "rollouts" / "step_1.jsonl").read_text().splitlines()
    ended = [r for r in map(json.loads, told) if r["_episode"]["ended"] == "stop"]
    assert metrics["actor/grad_norm"] > 0 and metrics["rollout/filtered/finished"] == 64 - len(
        ended
    )
    groups = [
        r["_episode"]["group_id"] for r in ended
    ]  # who is alone in a group is compared with nobody
    ended = [r for r in ended if groups.count(r["_episode"]["group_id"]) > 1]
    shorter = [
        r["reward"] - 0.001 * len(r["response"]["output"][0]["generation_token_ids"]) for r in ended
    ]
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(shorter) / len(shorter))


# --- what is not trained on, and what is not saved -----------------------------------------------


def test_a_batch_without_verdicts_is_skipped_and_said_so(stack, capsys):
    with stack.trainer("nobody", QUIET, "gym.max_failed_frac=1", gym=gym_client.Gym({})) as trainer:
        trainer.step_or_skip()
        failures = (trainer.run.folder / "failures.jsonl").read_text().splitlines()
    assert "step 1 skipped: no group left to train on" in capsys.readouterr().out.replace("\n", " ")
    step = next(m for m in metrics_of(trainer.run.folder) if "rollout/failed_frac" in m)
    assert step["rollout/failed_frac"] == 1.0 and step["rollout/failed/no_server"] == 64
    assert "critic/rewards/mean" not in step and "actor/pg_loss" not in step
    assert {json.loads(line)["reward"] for line in failures} == {None} and len(failures) == 64
    with pytest.raises(
        RunError, match=r"64 of 64 episodes failed \(64 no_server\), over gym.max_failed_frac=0.5"
    ):
        with stack.trainer("nobody", QUIET, gym=gym_client.Gym({})) as trainer:
            trainer.step()


def test_rejecting_every_token_skips_the_step(stack):
    changes = ["algorithm.rollout_correction.rollout_rs=token_k1", QUIET]
    changes += ["algorithm.rollout_correction.rollout_rs_threshold=5.0_6.0"]
    with stack.trainer("rejected", *changes) as trainer:
        with pytest.raises(SkippedStep, match="rollout_rs rejected every token"):
            trainer.step()


DAMAGE = """
import torch
from verl.trainer.ppo.core_algos import agg_loss

calls = 0

def estimator(token_level_rewards, response_mask):
    global calls
    calls += 1
    advantages = token_level_rewards * response_mask
    if calls == 2:
        advantages = advantages * float('nan')
    return advantages * (1e6 if calls >= 4 else 1), advantages

def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    wrong = float('nan') if advantages.abs().max() > 1e3 else 1.0
    losses = -advantages * torch.exp(log_prob - old_log_prob) * wrong
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}

def reward(episode):  # every answer is worth something, so that no advantage is 0
    return 1.0
"""


def test_damaged_steps_are_skipped_and_kept_and_three_in_a_row_end_the_run(stack, capsys):
    """Step 2 has a NaN advantage; from step 4 on the loss is NaN, so that verl leaves the mini-batch out."""
    (stack.workspace / "damage.py").write_text(DAMAGE)
    changes = ["trainer.total_training_steps=9", "trainer.save_freq=1", QUIET]
    changes += ["algorithm.adv_estimator=damage.py:estimator", "env.reward=damage.py:reward"]
    changes += ["actor_rollout_ref.actor.policy_loss.loss_mode=damage.py:loss"]
    with pytest.raises(RunError, match="3 damaged steps in a row, the last: actor/"):
        with stack.trainer("damaged", *changes) as trainer:
            while True:
                trainer.step_or_skip()
    folder = trainer.run.folder
    told = capsys.readouterr().out.replace("\n", " ")
    assert re.search(
        r"step 2 skipped: \d+ of \d+ advantages, \d+ of \d+ returns are NaN or infinite; .*batch",
        told,
    )
    names = {path.name for path in (folder / "damaged").iterdir()}
    assert names == {"step_2.pt", "step_4.pt", "step_5.pt", "step_6.pt"}
    batch = torch.load(folder / "damaged" / "step_2.pt", weights_only=True)
    assert batch["advantages"].isnan().any() and batch["responses"].shape[0] == len(batch["uid"])
    saved = {path.name for path in (folder / "checkpoints").glob("global_step_*")}
    assert saved == {
        f"global_step_{n}" for n in range(1, 7)
    }  # the weights are whole, whatever the batch was
    steps = {
        m["step"]: m.get("training/skipped_nonfinite_steps", 0)
        for m in metrics_of(folder)
        if "rollout/failed_frac" in m
    }
    assert steps == {1: 0, 2: 1, 3: 0, 4: 1, 5: 2}


@pytest.mark.parametrize("bypass", [False, True])
def test_weights_that_are_not_finite_are_never_saved(stack, capsys, bypass):
    """Whatever tensor shows it first: in bypass mode no log-prob of the trainer is ever looked at."""
    import ray

    def poison(worker):  # in its process, to which this travels by value
        import torch

        weight = next(iter(worker.actor.engine.module.parameters()))
        with torch.no_grad():
            (weight.to_local() if hasattr(weight, "to_local") else weight).view(-1)[0] = float(
                "nan"
            )

    changes = [
        "trainer.save_freq=1",
        QUIET,
        f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}",
    ]
    try:
        with stack.trainer(f"poisoned_{bypass}", *changes) as trainer:
            ray.get(
                [worker.__ray_call__.remote(poison) for worker in trainer.workers.actor.workers]
            )
            trainer.update_weights()
            with pytest.raises((NonFiniteStep, SkippedStep)):
                trainer.step()
            trainer.saved_state["step"] = trainer.state["step"]
            assert trainer.save() is None
            assert "not saved: NaN or infinite in " in capsys.readouterr().out.replace("\n", " ")
            assert not list((trainer.run.folder / "checkpoints").glob("*"))
    finally:
        stack.workers.actor.load_checkpoint(str(stack.fresh))
        shutil.rmtree(stack.workspace / "runs" / f"poisoned_{bypass}")
    assert checkpoints.find_nonfinite(stack.workers) == []
