"""GRPO on NeMo Gym tasks: the loop, and the command.

    python algorithm.py --config configs/math.yaml [--config more.yaml] [key=value ...] [--dry-run]
    python algorithm.py --config configs/math.yaml rollout      # collect episodes, as Gym's own collector does
    python algorithm.py --config configs/math.yaml evaluate     # mean@k and pass@k on the held-out rows

One step, in the order of the code below (Shao et al. 2024, arXiv:2402.03300, section 4.1):

 1. take the next `data.train_batch_size` prompts (env.py);
 2. sample `rollout.n` answers to each from vLLM, with the log-prob of every token (inference.py): in one
    turn, or in many with the tools and observations of the row's Gym server;
 3. as each answer ends, its Gym server says the reward (gym_client.py);
 4. drop failed episodes and groups of fewer than two: a failure is never a reward;
 5. recompute the log-probs with the trainer (`old_log_probs`), and the reference's if a KL term is on;
 6. advantage of an answer = its reward - the mean of its group, over the group's standard deviation;
 7. PPO's clipped loss on the answer's tokens, `ppo_epochs` over mini-batches, AdamW (training.py);
 8. the new weights go to vLLM; metrics, rollouts and checkpoints are written.

Departures from the paper: no KL term unless configured (`actor.use_kl_loss`); the loss is averaged over
all tokens of a mini-batch (verl's `loss_agg_mode: token-mean`, DAPO's choice), not per answer first.
Advantages and losses are verl's (verl.trainer.ppo.core_algos), picked by verl's own keys.

Where to edit: tasks and their order, env.py; the reward, `reward` below; the advantage and the loss,
register a function of your own with verl (README). The rest is plumbing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import env
import gym_client
import gym_servers
from config import ALONE, ConfigError, Data, RunError, dry_run, load_config, prepare, resume_point, summary, to_plain

STAGE_DEADLINE_S = 3600  # a stage (of episodes: an episode) that takes this long hangs, and ends the run
GENERATE_DEADLINE_S = 1800.0  # for one answer of vLLM
COMMANDS = ("train", "rollout", "evaluate")
console = Console()


# --- the loop ------------------------------------------------------------------------------------


def reward(episode: Any) -> float:
    """EDIT HERE: what an episode is worth. The verifier's word, unless you shape it (length, format, ...)."""
    return float(episode.reward)


def train(config: DictConfig, run: Run, data: Data, resume_from: Path | None) -> None:
    """Run the recipe from a checkpoint, or the start, to `trainer.total_training_steps`."""
    checkpoints, total = Path(config.trainer.default_local_dir), config.trainer.total_training_steps
    with contextlib.ExitStack() as stack:
        loop, gym, policy, servers, actor, critic = run.start(stack, data)

        # not at the top: these take 10 s, which a bad recipe should not
        from verl.trainer.ppo.core_algos import get_kl_controller
        from verl.trainer.ppo.metric_utils import (
            compute_data_metrics,
            compute_throughout_metrics,
            compute_timing_metrics,
        )
        from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
        from verl.utils.debug.metrics import calculate_debug_metrics

        import evaluation
        import inference
        import training

        sync = inference.weight_sync(config, actor, servers)
        kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        members = 1 if config.algorithm.adv_estimator in ALONE else 2  # that a group needs
        val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
        sampling = {validate: inference.sampling_params(config, validate) for validate in (False, True)}

        step = 0
        if resume_from:
            step = training.load(actor, critic, resume_from)["step"]
            run.say(f"resumed from {resume_from}")
        with run.stage("update_weights"):
            sync.sleep_replicas()  # vLLM gives back its GPU memory (free_cache_engine); the sync wakes it
            sync.update_weights(step)

        def rollout(tasks: Sequence[env.Task], n: int, validate: bool = False) -> list[inference.Episode]:
            """n episodes for each task at the servers' present weights, also written to rollouts/."""
            policy.sampling = sampling[validate]
            requests = inference.in_groups(tasks, n)
            episodes = loop.run(inference.rollout(requests, policy, gym, run.counter(len(requests))))
            run.write_episodes(f"{'val' if validate else 'step'}_{step}", episodes, tasks)
            evaluation.check_failures(episodes, config.gym.max_failed_frac)
            return episodes

        def evaluate() -> dict[str, float]:
            """The held-out rows, greedily unless rollout.val_kwargs says otherwise."""
            if not data.validation:
                return {}
            with run.stage("testing"):
                return evaluation.validation_metrics(rollout(data.validation, val_kwargs.n, validate=True))

        before = after = evaluate() if config.trainer.val_before_train else {}
        run.log(step, before | {f"timing_s/{stage}": seconds for stage, seconds in run.timing.items()})

        while step < total:
            step += 1
            run.begin(step)
            with run.stage("step"):
                tasks = env.batch(data.train, config.data.train_batch_size, step, config.data.seed, config.data.shuffle)
                with run.stage("gen"):
                    episodes = rollout(tasks, config.actor_rollout_ref.rollout.n)
                kept = inference.keep(episodes, members)
                metrics = evaluation.rollout_metrics(episodes, kept)
                for episode in kept:
                    episode.reward = reward(episode)
                if kept:
                    sync.sleep_replicas()
                    batch = training.to_batch(kept, data.tokenizer.pad_token_id, sampling[False]["temperature"])
                    with run.stage("old_log_prob"):
                        batch.batch["old_log_probs"], entropy = training.log_probs(actor, batch, config)  # [B, R]
                    mask = batch.batch["response_mask"]  # [B, R]
                    metrics["actor/entropy"] = float((entropy * mask).sum() / mask.sum())
                    metrics |= calculate_debug_metrics(batch)  # the sampler's probabilities against the trainer's
                    if training.needs_reference(config):
                        with run.stage("ref"):
                            batch.batch["ref_log_prob"] = training.ref_log_probs(actor, batch, config)  # [B, R]

                    if critic:
                        with run.stage("values"):
                            batch.batch["values"] = training.values(critic, batch, config)  # [B, R]

                    with run.stage("adv"):
                        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]  # [B, R]
                        if config.algorithm.use_kl_in_reward:
                            batch, kl_metrics = apply_kl_penalty(batch, kl_ctrl, config.algorithm.kl_penalty)
                            metrics |= kl_metrics
                        batch = compute_advantage(  # adds advantages and returns, [B, R]
                            batch,
                            adv_estimator=config.algorithm.adv_estimator,
                            gamma=config.algorithm.gamma,
                            lam=config.algorithm.lam,
                            norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
                            config=config.algorithm,
                        )
                    if critic:
                        with run.stage("update_critic"):
                            metrics |= training.update_critic(critic, batch, config)
                    if step > config.trainer.critic_warmup:  # before, only the critic learns
                        with run.stage("update_actor"):
                            metrics |= training.update_actor(actor, batch, config)
                    with run.stage("update_weights"):
                        sync.update_weights(step)
                else:
                    run.say(f"step {step} skipped: no group has two verified answers; see {run.folder}/failures.jsonl")

            if step == total or (config.trainer.save_freq > 0 and step % config.trainer.save_freq == 0):
                with run.stage("save_checkpoint"):
                    checkpoint = training.save(actor, critic, checkpoints, step, {"step": step})
            if step == total or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0):
                metrics |= (after := evaluate())
            if kept:
                metrics |= compute_data_metrics(batch, use_critic=critic is not None)
                metrics |= compute_timing_metrics(batch, run.timing)
                metrics |= compute_throughout_metrics(batch, run.timing, n_gpus=training.world_size(config))
            epoch = step * config.data.train_batch_size / len(data.train)
            run.log(step, metrics | {"training/global_step": step, "training/epoch": epoch})
            run.report(step, metrics, kept, tasks)

        with run.stage("export"), (run.folder / "logs" / "export.log").open("w") as log:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                training.export(checkpoint, run.folder / "export")
    run.finish(before, after, checkpoint)


# --- a run: its folder, its stages, what it tells ------------------------------------------------


class Run:
    """A run's folder, its clock and its voice. Use as `with Run(config) as run`."""

    def __init__(self, config: DictConfig, command: str = "train"):
        self.config, self.folder = config, Path("runs") / config.trainer.experiment_name
        self.timing: dict[str, float] = {}  # seconds by stage, of the step under way
        self.started, self.first_episode = time.time(), 0.0  # seconds since the epoch; seconds since `started`
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
        )
        steps = config.trainer.total_training_steps if command == "train" else 1
        self.task = self.bar.add_task(command, total=steps, stage="starting")

    def __enter__(self) -> Run:
        for name in ("rollouts", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, self.folder / "config.yaml", resolve=True)
        os.environ.setdefault("TENSORBOARD_DIR", str(self.folder / "tensorboard"))
        os.environ.setdefault("VERL_FILE_LOGGER_PATH", str(self.folder / "tracking.jsonl"))
        os.environ.setdefault("WANDB_DIR", str(self.folder))
        self.tracking = None
        if self.config.trainer.logger:
            from verl.utils.tracking import Tracking

            names, backends = self.config.trainer, to_plain(self.config.trainer.logger)
            self.tracking = Tracking(names.project_name, names.experiment_name, backends, to_plain(self.config))
        self.bar.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.bar.stop()
        if self.tracking:
            self.tracking.finish(exit_code=0 if kind is None else 1)

    def start(self, stack: contextlib.ExitStack, data: Data, train: bool = True) -> tuple[Any, ...]:
        """Start Gym servers, Ray, vLLM and, to train, the actor's workers; `stack` stops them all.

        Returns (asyncio.Runner, gym_client.Gym, inference.Policy, verl's LLMServerManager, actor, critic), the
        last two None where they are not needed.
        """
        import ray

        config, logs, door = self.config, self.folder / "logs", self.config.gym.door
        port = door.port or gym_servers.free_port(door.host)
        key = os.environ.get("POLICY_API_KEY") or secrets.token_hex(16)
        agents = any((spec.get("start") or {}).get("agent") for spec in config.gym.servers.values())

        def start_ray() -> None:
            threading.Thread(target=importlib.import_module, args=("inference",)).start()  # 10 s, beside Ray's 6
            session = ray.init(**to_plain(config.ray_kwargs.ray_init)).address_info["session_dir"]  # type: ignore[attr-defined]
            (logs / "ray").unlink(missing_ok=True)
            (logs / "ray").symlink_to(Path(session) / "logs")

        with self.stage("start"):
            stack.callback(ray.shutdown)
            address = {"base_url": f"http://{door.host}:{port}/v1", "api_key": key, "model": "policy"}
            servers = gym_servers.running_servers(to_plain(config.gym.servers), logs, start_ray, address)
            urls = stack.enter_context(servers)
            import door as openai_door
            import inference
            import training

            loop = stack.enter_context(asyncio.Runner())

            def enter(context: Any) -> Any:
                """Open an asynchronous context now, and close it with the run."""
                entered = loop.run(context.__aenter__())
                stack.callback(lambda: loop.run(context.__aexit__(None, None, None)))
                return entered

            gym = gym_client.Gym(urls, config.gym.timeout_s, to_plain(config.gym.concurrency), config.gym.attempts)
            enter(gym)
            actor, critic = training.start_workers(config) if train else (None, None)
            vllm = loop.run(inference.start_servers(config, actor) if train else inference.start_sampler(config))
            client = vllm.get_client()
            policy = inference.make_policy(config, client, data.tokenizer, data.stop_ids, GENERATE_DEADLINE_S)
            if agents or door.port:
                enter(openai_door.serve(policy, door.host, port, key))
            if critic:
                training.start_critic(critic, config)
            return loop, gym, policy, vllm, actor, critic

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage into `timing` (seconds), show it, and end the run if it hangs."""

        def hung(*_: Any) -> None:
            raise RunError(
                f"stage {name} got nowhere in {STAGE_DEADLINE_S} s; see the workers' logs in {self.folder}/logs"
            )

        begin, inner = time.perf_counter(), name != "step"
        if inner:
            self.bar.update(self.task, stage=name)
            signal.signal(signal.SIGALRM, hung)
            signal.alarm(STAGE_DEADLINE_S)
        try:
            yield
        finally:
            if inner:
                signal.alarm(0)
        self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begin

    def begin(self, step: int) -> None:
        """Start the clock of a step."""
        self.timing = {}
        self.bar.update(self.task, completed=step - 1)

    def counter(self, total: int) -> Callable[[int, Any], None]:
        """A callback that shows how many of `total` episodes have ended."""
        done = 0

        def one_more(*_: Any) -> None:
            nonlocal done
            done += 1
            signal.alarm(STAGE_DEADLINE_S)  # a stage that gets on does not hang
            if not self.first_episode:
                self.first_episode = self.timing["first_episode"] = time.time() - self.started
            self.bar.update(self.task, stage=f"{done}/{total} episodes")

        return one_more

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append to metrics.jsonl (verl's own file logger would overwrite it on resume) and tell the trackers."""
        if not metrics:
            return
        plain = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        with (self.folder / "metrics.jsonl").open("a") as out:
            out.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        if self.tracking:
            self.tracking.log(data=plain, step=step)

    def write_episodes(self, name: str, episodes: Sequence[Any], tasks: Sequence[env.Task]) -> None:
        """rollouts/<name>.jsonl with every episode, and a line in failures.jsonl for each that failed."""
        import inference

        prompts = {task.row_id: question(task) for task in tasks}
        records = [inference.as_record(e, prompts[e.row_id]) for e in episodes]
        path = self.folder / "rollouts" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
        with (self.folder / "failures.jsonl").open("a", encoding="utf-8") as out:
            failed = [{"rollout": name, **r} for r in records if r["status"] != "ok"]
            out.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in failed)

    def report(self, step: int, metrics: dict[str, Any], kept: Sequence[Any], tasks: Sequence[env.Task]) -> None:
        """One line a step, and every env.show_every steps the best and the worst answer of the batch."""
        self.bar.update(self.task, completed=step)
        stages = " ".join(
            f"{k} {v:.1f}" for k, v in self.timing.items() if k not in ("step", "first_episode") and v >= 0.05
        )
        numbers = [("reward", "critic/rewards/mean"), ("length", "response_length/mean"), ("loss", "actor/pg_loss")]
        values = " ".join(f"{label} {metrics[key]:.3g}" for label, key in numbers if key in metrics)
        self.say(f"step {step:4d}  {values}  failed {metrics['rollout/failed_frac']:.0%}  | seconds: {stages}")
        if kept and self.config.env.show_every > 0 and step % self.config.env.show_every == 0:
            prompts = {task.row_id: question(task) for task in tasks}
            for episode in (max(kept, key=lambda e: e.reward), min(kept, key=lambda e: e.reward)):
                asked = " ".join(prompts[episode.row_id].split())[-100:]
                self.say(f"    {asked!r} -> {episode.transcript[:200]!r}  reward {episode.reward:.2f}")

    def finish(self, before: dict[str, float], after: dict[str, float], checkpoint: Path) -> None:
        """The result of the run and what to do next."""
        minutes = (time.time() - self.started) / 60
        self.say(f"\nfinished in {minutes:.1f} min; the run is in {self.folder}/")
        for name in (n for n in after if n.startswith("val-core/")):
            self.say(f"    {name}: {before.get(name, float('nan')):.3f} before, {after[name]:.3f} after")
        self.say(f"    checkpoint {checkpoint}, Hugging Face folder {self.folder}/export")
        again = f"trainer.total_training_steps={2 * self.config.trainer.total_training_steps}"
        self.say(f"next: look into {self.folder}/rollouts/, or train on with the same command and {again}")


def question(task: env.Task) -> str:
    """The last thing that the row says to the model; empty where the environment says it."""
    return str(task.messages[-1]["content"]) if task.messages else ""


OUR_ERRORS = (ConfigError, RunError, env.DataError, gym_client.GymError, gym_servers.GymStartError)  # one line each


# --- the command ---------------------------------------------------------------------------------


def root_cause(error: BaseException, logs: Path) -> str:
    """One line for an error of a worker: vLLM's engine writes its cause to its log and says only 'see above'."""
    kinds = r"(?:\w+\.)*\w*(?:Error|Exception|OutOfMemory\w*)"
    if "Engine core initialization failed" in str(error):
        for path in sorted(logs.glob("ray/worker-*"), key=lambda file: file.stat().st_mtime, reverse=True):
            causes = re.findall(rf"({kinds}: .+)", path.read_text(errors="replace"))
            causes = [c for c in causes if not re.search("Engine ?[Cc]ore|WorkerProc|stack trace", c)]
            if causes:
                return f"vLLM did not start: {causes[0]}"
    found = re.findall(rf"^\W*({kinds}: .+)$", str(error), re.MULTILINE)
    return found[-1] if found else " ".join(str(error).split()) or repr(error)


def quiet() -> None:
    """Keep libraries' notices about what is not installed or not used off the console; errors still show."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"verl\.")
    for name in ("ray", "torch.fx", "torch.distributed", "verl.plugin.platform.platform_manager"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Parse the command line, check the recipe, run it. Exit status: 0, 1 error, 130 Ctrl-C, 143 SIGTERM."""
    parser = argparse.ArgumentParser(description="GRPO on NeMo Gym tasks with verl and vLLM.")
    parser.add_argument("--config", action="append", required=True, help="recipe; later ones override earlier ones")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument("words", nargs="*", metavar="[train|rollout|evaluate] key=value", help="default: train")
    args = parser.parse_intermixed_args()
    commands = [word for word in args.words if word in COMMANDS] or ["train"]
    overrides = [word for word in args.words if word not in COMMANDS]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    quiet()
    logs = Path()
    try:
        if len(commands) > 1:
            raise ConfigError(f"one command at a time, not {' and '.join(commands)}")
        config, defaults = load_config(args.config, overrides)
        data = prepare(config, commands[0])
        resume_from = resume_point(config) if commands == ["train"] else None
        console.print(summary(config, data, commands[0]), markup=False, highlight=False, soft_wrap=True)
        if args.dry_run:
            return dry_run(config, defaults, data, console)
        logs = Path("runs") / config.trainer.experiment_name / "logs"
        with Run(config, commands[0]) as run:
            if commands == ["train"]:
                train(config, run, data, resume_from)
            else:
                import evaluation

                evaluation.run_command(commands[0], config, run, data)
    except (*OUR_ERRORS, OmegaConfBaseException) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        console.print("interrupted", highlight=False)
        sys.exit(130)
    except Exception as error:
        if type(error).__module__.split(".")[0] != "ray":
            raise
        sys.exit(f"error: {root_cause(error, logs)}; the workers' logs are in {logs}")


if __name__ == "__main__":
    main()
