"""RL on NeMo Gym tasks with verl and vLLM: the loop, and the command.

    python algorithm.py --config configs/math.yaml [--config more.yaml] [key=value ...] [--dry-run]
    python algorithm.py --config configs/math.yaml rollout      # collect episodes, as Gym's own collector does
    python algorithm.py --config configs/math.yaml evaluate     # mean@k and pass@k on the held-out rows
    python algorithm.py --config configs/math.yaml --config configs/sft.yaml sft 'env.train_files=[chats.jsonl]'
    python algorithm.py --config configs/math.yaml --replay runs/math/rollouts/step_12.jsonl    # that update again

One step of GRPO, in the order of the code below (Shao et al. 2024, arXiv:2402.03300, section 4.1):

 1. take the next `data.train_batch_size` prompts (env.py);
 2. sample `rollout.n` answers to each from vLLM, with the log-prob of every token (inference.py): in one
    turn, or in many with the tools and observations of the row's Gym server;
 3. as each answer ends, its Gym server says the reward (gym_client.py);
 4. drop failed episodes and groups of fewer than two: a failure is never a reward; then what `env.filters` drop;
    with `algorithm.filter_groups`, sample more prompts until the batch is full again (DAPO);
 5. recompute the log-probs with the trainer (`old_log_probs`), and the reference's if a KL term is on;
    weigh or reject tokens on which it and the sampler differ, if `algorithm.rollout_correction` says so;
 6. advantage of an answer = its reward - the mean of its group, over the group's standard deviation;
 7. PPO's clipped loss on the answer's tokens, `ppo_epochs` over mini-batches, AdamW (training.py);
 8. the new weights go to vLLM; metrics, rollouts and checkpoints are written.

A step whose numbers are damaged is skipped, and three in a row end the run; a run that was stopped goes on where it
was with the same command (docs/reliability.md).

Departures from the paper: no KL term unless configured (`actor.use_kl_loss`); the loss is averaged over
all tokens of a mini-batch (verl's `loss_agg_mode: token-mean`, DAPO's choice), not per answer first.
Other algorithms differ in 4 to 7 and are overlays of a few lines over any recipe (docs/algorithms.md):
advantages and losses are verl's (verl.trainer.ppo.core_algos), picked by verl's own keys.

Where to edit: tasks, env.py; the reward, filters, the sampler, the advantage and the loss need no edit,
since a recipe can name functions of your own (own.py). The rest is plumbing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import checkpoints
import env
import gym_client
import gym_servers
from checkpoints import before_replay, check, resume_point
from config import ConfigError, Data, RunError, load_config, prepare
from episodes import load_replay
from own import OwnError
from run import Run, Stop, console
from summary import dry_run, summary

Replayed = Sequence[list[Any]]  # episodes by batch of prompts
COMMANDS = ("train", "rollout", "evaluate", "sft")


# --- the loop ------------------------------------------------------------------------------------


def train(config: DictConfig, run: Run, data: Data, resume_from: Path | None, replayed: Replayed = ()) -> None:
    """Run the recipe from a checkpoint, or the start, to `trainer.total_training_steps`.

    replayed: episodes of one step by batch of prompts; then they take the place of sampling, and nothing is served.
    """
    total = config.trainer.total_training_steps
    with contextlib.ExitStack() as stack:
        loop, gym, policy, servers, workers = run.start(stack, data, serve=not replayed)

        # not at the top: these take 10 s, which a bad recipe should not
        from verl.trainer.ppo.core_algos import get_kl_controller
        from verl.trainer.ppo.metric_utils import (
            compute_data_metrics,
            compute_throughout_metrics,
            compute_timing_metrics,
        )
        from verl.trainer.ppo.ray_trainer import apply_kl_penalty
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
        from verl.utils.debug.metrics import calculate_debug_metrics

        import evaluation
        import inference
        import pieces
        import training

        sync = inference.weight_sync(config, workers.actor, servers) if servers else None
        kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        correction, val_kwargs = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout.val_kwargs
        sampling = {validate: inference.sampling_params(config, validate) for validate in (False, True)}
        members = 2 if training.asks_for(config, "index") else 1  # that a group needs
        prompts, refill = config.data.train_batch_size, config.algorithm.filter_groups
        again = list(replayed)
        rounds = len(again) or (refill.max_num_gen_batches if refill.enable else 1)  # batches of prompts for a step

        # all that the driver has to remember; batches: of prompts, so far; pass_rates: of rows, by id
        state: dict[str, Any] = {"command": "train", "step": 0, "batches": 0, "pass_rates": {}, "kl_coef": 0.0}
        if resume_from:
            with run.stage("load_checkpoint"):
                state = checkpoints.load(workers, resume_from)
            if config.algorithm.kl_ctrl.type == "adaptive":
                kl_ctrl.value = state["kl_coef"] or kl_ctrl.value
            run.say(f"resumed from {resume_from}")
        if replayed:  # that step alone; the schedule keeps the run's length
            total = state["step"] + 1
        trained = dict(state)  # what the weights in the workers are of
        whole = True  # what the trainer computes with them is finite

        def sleep() -> None:
            """vLLM gives back its GPU memory (free_cache_engine); the next sync wakes it."""
            if sync:
                with run.stage("sleep"):
                    sync.sleep_replicas()

        def sample_from(step: int) -> None:
            """From now on vLLM samples from the weights after `step`."""
            if sync:
                with run.stage("update_weights"):
                    sync.update_weights(step)
                    policy.version = step

        sleep()
        sample_from(state["step"])

        def rollout(
            tasks: Sequence[env.Task], n: int, name: str, validate: bool = False, more: bool = False
        ) -> list[Any]:
            """n episodes for each task at the servers' present weights, also written to rollouts/<name>.jsonl."""
            policy.sampling = sampling[validate]
            greedy = not validate and training.asks_for(config, "reward_baselines")  # one more answer per prompt
            sample = inference.rollout_with_baselines if greedy else inference.rollout
            count = run.counter(len(tasks) * (n + greedy))
            batch = name if validate else str(state["batches"])
            episodes = loop.run(sample(inference.in_groups(tasks, n, batch), policy, gym, count))
            run.write_episodes(name, episodes, tasks, "a" if more else "w")
            evaluation.check_failures(episodes, config.gym.max_failed_frac)
            return episodes

        def evaluate() -> dict[str, float]:
            """The held-out rows, greedily unless rollout.val_kwargs says otherwise."""
            if not data.validation or replayed:
                return {}
            with run.stage("testing"):
                episodes = rollout(data.validation, val_kwargs.n, f"val_{state['step']}", validate=True)
                return evaluation.validation_metrics(episodes)

        def save() -> None:
            """A checkpoint of the weights, unless what the trainer computes with them is not finite."""
            if whole:
                run.save(workers, trained)
            else:
                run.say("not saved: the weights may be what is damaged")

        rows = {task.row_id: task for task in data.train}

        def collect(step: int) -> tuple[list[env.Task], list[Any], list[Any]]:
            """(tasks, episodes, those to train on): a batch of prompts, or as many as fill one after the filters."""
            tasks: list[env.Task] = []
            episodes: list[Any] = []
            kept: list[Any] = []
            for more in range(rounds):
                state["batches"] += 1
                if again:
                    fresh = again.pop(0)
                    new = [rows[row_id] for row_id in {e.group_id: e.row_id for e in fresh}.values()]
                else:
                    new = data.sampler(data.train, prompts, state["batches"], config.data.seed, state["pass_rates"])
                    if len(new) != prompts:
                        raise RunError(
                            f"env.sampler picked {len(new)} tasks, not data.train_batch_size={prompts}; return as many "
                            "as its argument `size`"
                        )
                    if rounds > 1:  # what is over is cut off the end, whatever file it came from
                        random.Random(f"{config.data.seed} {state['batches']}").shuffle(new)
                    fresh = rollout(new, config.actor_rollout_ref.rollout.n, f"step_{step}", more=more > 0)
                state["pass_rates"] = state["pass_rates"] | evaluation.pass_rates(fresh, state["pass_rates"])
                tasks, episodes = tasks + new, episodes + fresh
                kept = pieces.first_groups(kept + pieces.keep(fresh, members, data.filters), prompts)
                if len({e.group_id for e in kept}) == prompts:
                    break
            return tasks, episodes, kept

        def one_step(step: int) -> None:
            """Steps 1 to 8 of the header."""
            nonlocal trained, whole
            with run.stage("step"):
                with run.stage("gen"):
                    tasks, episodes, kept = collect(step)
                skipped = "" if kept else f"no group left to train on; see {run.folder}/rollouts/step_{step}.jsonl"
                damage = ""
                if kept:
                    sleep()
                    if workers.reward_model:
                        with run.stage("reward_model"):
                            training.add_reward_model(workers.reward_model, kept, data.tokenizer.pad_token_id, config)
                metrics = evaluation.rollout_metrics(episodes, kept)
                metrics["rollout/prompt_batches"] = len(tasks) / prompts
                if kept:
                    for episode in kept:
                        episode.reward = data.reward(episode)
                    batch = training.to_batch(kept, data.tokenizer.pad_token_id, sampling[False]["temperature"])
                    mask = batch.batch["response_mask"]  # [B, R]

                    if correction.bypass_mode:  # the sampler is the old policy; the loss corrects as it goes
                        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
                    else:
                        with run.stage("old_log_prob"):
                            found = training.log_probs(workers.actor, batch, config)  # {name: [B, R]}
                        batch.batch["old_log_probs"] = found.pop("log_probs")
                        metrics["actor/entropy"] = float((found.pop("entropy") * mask).sum() / mask.sum())
                        batch.batch.update(found)  # sum_pi_squared, if the advantage asks for it
                        metrics |= calculate_debug_metrics(batch)  # the sampler's probabilities against the trainer's
                    if training.needs_reference(config):
                        with run.stage("ref"):
                            batch.batch["ref_log_prob"] = training.ref_log_probs(workers.actor, batch, config)  # [B, R]
                    if workers.critic:
                        with run.stage("values"):
                            batch.batch["values"] = training.values(workers.critic, batch, config)  # [B, R]

                    damage = training.damage(batch, metrics, config)
                    whole = not any(name in damage for name in ("old_log_probs", " values"))
                    with run.stage("adv"):
                        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]  # [B, R]
                        if config.algorithm.use_kl_in_reward and not damage:
                            batch, kl_metrics = apply_kl_penalty(batch, kl_ctrl, config.algorithm.kl_penalty)
                            metrics |= kl_metrics
                            state["kl_coef"] = float(kl_ctrl.value)
                        if not correction.bypass_mode:  # importance weights and rejection, if asked for; metrics always
                            batch, spread = compute_rollout_correction_and_add_to_batch(batch, correction)
                            metrics |= spread
                        if not batch.batch["response_mask"].any():
                            skipped = "algorithm.rollout_correction.rollout_rs rejected every token"
                        elif not damage:
                            batch = training.advantages(batch, config)  # adds advantages and returns, [B, R]
                            damage = training.damage(batch, metrics, config)
                    if not skipped and not damage:
                        if workers.critic:
                            with run.stage("update_critic"):
                                metrics |= training.update_critic(workers.critic, batch, config)
                        if step > config.trainer.critic_warmup:  # before, only the critic learns
                            with run.stage("update_actor"):
                                metrics |= training.update_actor(workers.actor, batch, config)
                        # verl leaves out a mini-batch whose gradient is not finite, and says so only in its metrics
                        damage = training.damage(batch, metrics, config)
                trained = dict(state)
                if damage:
                    skipped = run.save_damaged(step, damage, batch)
                else:
                    run.damaged = 0
                if skipped:
                    run.say(f"step {step} skipped: {skipped}")
                    metrics["training/damaged_steps"] = run.damaged
                if kept:
                    sample_from(step)

            if step == total or run.due(step, config.trainer.save_freq):
                save()
            metrics |= {f"timing_s/{stage}": seconds for stage, seconds in run.timing.items()}
            if kept and not skipped:
                metrics |= compute_data_metrics(batch, use_critic=workers.critic is not None)
                metrics |= compute_timing_metrics(batch, run.timing)
                metrics |= compute_throughout_metrics(batch, run.timing, n_gpus=training.world_size(config))
            epoch = state["batches"] * prompts / len(data.train)
            run.log(step, metrics | {"training/global_step": step, "training/epoch": epoch})
            run.report(step, metrics, [] if skipped else kept, tasks)

        with run.saving(save):
            before = after = evaluate() if config.trainer.val_before_train else {}
            run.log(state["step"], before | {f"timing_s/{stage}": seconds for stage, seconds in run.timing.items()})
            while state["step"] < total:
                step = state["step"] = state["step"] + 1
                run.begin(step)
                one_step(step)
                if run.due(step, config.trainer.test_freq):
                    after = evaluate()
                    run.log(step, after | {"timing_s/testing": run.timing["testing"]} if after else {})

        if run.checkpoint is None:
            raise RunError(
                f"every step up to {total} was damaged or skipped, so there is nothing to save; look into "
                f"{run.folder}/rollouts and {run.folder}/damaged for why"
            )
        if replayed:
            return run.say(f"the same update again: its weights are in {run.checkpoint}")
        run.export(run.checkpoint)
    run.finish(before, after)


GYM_ERRORS = (env.DataError, gym_client.GymError, gym_servers.GymStartError)
OUR_ERRORS = (ConfigError, RunError, OwnError, *GYM_ERRORS)  # one line each


# --- the command ---------------------------------------------------------------------------------


def quiet() -> None:
    """Keep libraries' notices about what is not installed or not used off the console; errors and our warnings show."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"verl\.")
    for name in ("ray", "torch.fx", "torch.distributed", "verl.plugin.platform.platform_manager"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # ours show although model_hosting_container_standards, which vLLM imports, sets the root logger to ERROR
    for name in ("gym_client", "gym_servers", "watch"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        logger.addHandler(logging.lastResort or logging.StreamHandler())  # prints above the progress bar
        logger.propagate = False


def main() -> None:
    """Parse the command line, check the recipe, run it. Exit status: 0, 1 error, 130 Ctrl-C, 143 SIGTERM."""
    parser = argparse.ArgumentParser(description="RL on NeMo Gym tasks with verl and vLLM.")
    parser.add_argument("--config", action="append", required=True, help="recipe; later ones override earlier ones")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument("--replay", metavar="STEP.jsonl", help="a rollouts file: its update again, without servers")
    parser.add_argument("words", nargs="*", metavar="[train|rollout|evaluate|sft] key=value", help="default: train")
    args = parser.parse_intermixed_args()
    commands = [word for word in args.words if word in COMMANDS] or ["train"]
    overrides = [word for word in args.words if word not in COMMANDS]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    quiet()
    try:
        if args.replay and commands != ["train"]:
            raise ConfigError(f"--replay makes an update of `train` again, not of `{commands[0]}`; leave that word out")
        if len(commands) > 1:
            raise ConfigError(f"one command at a time, not {' and '.join(commands)}; choose one")
        config, defaults = load_config(args.config, overrides)
        replay = Path(args.replay) if args.replay else None
        resume_from: Path | None = None
        told: list[str] = []
        if replay:
            resume_from = before_replay(config, replay)
        elif commands[0] in ("train", "sft"):
            resume_from, told = resume_point(config)
        data = prepare(config, commands[0])
        replayed = load_replay(replay, data.train) if replay else []
        if resume_from:
            told += [*check(resume_from, config, commands[0]), f"resume      from {resume_from}"]
        text = "\n".join([summary(config, data, commands[0]), *told])
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if args.dry_run:
            return dry_run(config, defaults, data)
        with Run(config, commands[0], resume_from) as run:
            if commands == ["train"]:
                train(config, run, data, resume_from, replayed)
            elif commands == ["sft"]:
                import sft

                sft.run_command(config, run, data, resume_from)
            else:
                import evaluation

                evaluation.run_command(commands[0], config, run, data)
    except (*OUR_ERRORS, OmegaConfBaseException) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except Stop as stop:
        print(f"error: {stop}" if stop.status == 1 else stop, file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
        console.print("interrupted", highlight=False)
        sys.exit(130)


if __name__ == "__main__":
    main()
