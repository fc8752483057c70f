"""A run: its folder, its stages and deadlines, the processes that it starts, how it is stopped, what it tells.

runs/<trainer.experiment_name>/ holds config.yaml, metrics.jsonl, rollouts/, failures.jsonl, checkpoints/, export/
and logs/.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import checkpoints
import env
import gym_client
import gym_servers
import own
import watch
from config import Data, RunError, public, to_plain
from episodes import as_record, question

GENERATE_DEADLINE_S = 1800.0  # for one answer of vLLM
STOP_S = 30  # seconds that an update has to end in, once the run was asked to stop
END_S = 60  # seconds for the processes to end in, before they are killed
WHOLE = ("update_critic", "update_actor", "update_weights", "save_checkpoint")  # stages that are not left half done
DAMAGED = 3  # steps in a row that end the run
CLOCK_S = 5.0  # seconds; a clock that is set by more has jumped, by less was corrected
console = Console()


class Stop(KeyboardInterrupt):
    """The run must end now. No Exception, so that no event loop, library or retry keeps it to itself.

    status: of the process; 130 or 143 where a signal asked for it, 1 where something is lost. save: whether the workers
    hold whole weights.
    """

    def __init__(self, message: str, status: int = 1, save: bool = False):
        super().__init__(message)
        self.status, self.save = status, save


class Started(NamedTuple):
    """What a run works with. Workers are None where nothing is trained."""

    loop: asyncio.Runner
    gym: gym_client.Gym
    policy: Any  # inference.Policy
    servers: Any  # verl's LLMServerManager
    workers: Any  # training.Workers


class Run:
    """A run's folder, its clock and its voice. Use as `with Run(config) as run`."""

    def __init__(self, config: DictConfig, command: str = "train", resume_from: Path | None = None):
        self.config, self.command, self.folder = config, command, Path("runs") / config.trainer.experiment_name
        self.checkpoint = resume_from  # the last one
        self.timing: dict[str, float] = {}  # seconds by stage, of the step under way
        self.started, self.first_episode = time.monotonic(), 0.0  # seconds; seconds since `started`
        self.clock, self.clock_jumps = time.time() - self.started, 0  # of the machine, against one that never jumps
        self.current, self.failed, self.ends = "", "", False  # the stage; that in which an error was; all is closing
        self.asked, self.asked_at, self.lost = 0, 0.0, ""  # the signal that asked to stop, when; what was lost
        self.ending: Stop | None = None
        self.watch: watch.Watch | None = None
        self.gym: gym_client.Gym | None = None
        self.loop: asyncio.Runner | None = None
        self.damaged = 0  # steps in a row
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
        )
        steps = config.trainer.total_training_steps if command in ("train", "sft") else 1
        self.task = self.bar.add_task(command, total=steps, stage="starting")

    def __enter__(self) -> Run:
        for name in ("rollouts", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        written = public(self.config)
        OmegaConf.save(written, self.folder / "config.yaml")
        if self.command in ("train", "sft"):
            self.forget_after(checkpoints.step_of(self.checkpoint) if self.checkpoint else -1)
        os.environ.setdefault("TENSORBOARD_DIR", str(self.folder / "tensorboard"))
        os.environ.setdefault("VERL_FILE_LOGGER_PATH", str(self.folder / "tracking.jsonl"))
        os.environ.setdefault("WANDB_DIR", str(self.folder))
        self.tracking = None
        if self.config.trainer.logger:
            self.name_tracked_run()
            from verl.utils.tracking import Tracking

            names, backends = self.config.trainer, to_plain(self.config.trainer.logger)
            told = OmegaConf.to_container(written, resolve=False)
            self.tracking = Tracking(names.project_name, names.experiment_name, backends, told)
        self.listen()
        self.bar.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        signal.alarm(0)
        self.bar.stop()
        if self.tracking:
            self.tracking.finish(exit_code=0 if kind is None else 1)

    def forget_after(self, step: int) -> None:
        """What an earlier run left of the steps that are now trained again gets another name: lines of metrics.jsonl go
        to metrics.abandoned.jsonl, as does one that a kill cut short; checkpoints are renamed."""
        for line in checkpoints.set_aside(Path(self.config.trainer.default_local_dir), max(step, 0)):
            self.say(line)
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        kept: list[str] = []
        gone: list[str] = []
        for line in path.read_text().splitlines():
            whole = line.startswith('{"step": ') and line.endswith("}")
            (kept if whole and json.loads(line)["step"] <= step else gone).append(line + "\n")
        if gone:
            with (self.folder / "metrics.abandoned.jsonl").open("a") as out:
                out.writelines(gone)
            path.with_suffix(".tmp").write_text("".join(kept))
            os.replace(path.with_suffix(".tmp"), path)

    def name_tracked_run(self) -> None:
        """Give trackers an id that a resumed run finds again, by their own environment variables."""
        path = self.folder / "tracker_id"
        if self.checkpoint is None or not path.is_file():
            path.write_text(uuid.uuid4().hex[:12])
        for tracker in ("WANDB", "SWANLAB"):
            os.environ.setdefault(f"{tracker}_RUN_ID", path.read_text())
            os.environ.setdefault(f"{tracker}_RESUME", "allow")

    # --- how it ends ---

    def listen(self) -> None:
        """Take the signals by which a run is stopped; again after ray.init, which takes SIGTERM for a crash."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            # a shell gives a command in the background (&) an ignored SIGINT, which must stay so
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self.asked_to_stop)
        signal.signal(signal.SIGALRM, self.alarmed)

    def asked_to_stop(self, signum: int, _frame: Any) -> None:
        """Ctrl-C or SIGTERM: once, to save what is done and end in order; twice, to end at once."""
        if self.asked and time.monotonic() < self.asked_at + 1.0:
            return  # once, from a wrapper that passes it on and a terminal that sends it to the whole group
        if self.asked:
            watch.end_now(128 + signum, self.watch)
        self.asked, self.asked_at = signum, time.monotonic()
        self.say(f"{signal.Signals(signum).name}: the run saves what is done and ends; once more ends it at once")
        if self.current == "save_checkpoint":
            return  # that is what is wanted
        if self.current in WHOLE:
            signal.alarm(STOP_S)
        elif self.current:
            self.stop_asked()

    def stop(self, why: str, status: int = 1, save: bool = False) -> NoReturn:
        """Raise what ends the run, and keep it: Ray's waiting makes a plain KeyboardInterrupt of it (see `stage`)."""
        self.ending = Stop(why, status, save)
        raise self.ending

    def stop_asked(self) -> NoReturn:
        """Raise what ends a run that was asked to stop, between two updates."""
        self.stop("interrupted", 128 + self.asked, save=True)

    def stop_lost(self, stage: str) -> NoReturn:
        """Raise what ends a run that has lost a process."""
        self.stop(f"stage {stage}: {self.lost}. The same command goes on from the last checkpoint")

    def alarmed(self, *_: Any) -> None:
        """A deadline has passed, or the watch has lost a process."""
        if self.ends:  # and does not come to it: what ended the run is told here, since it will not be told again
            error = sys.exc_info()[1]
            print(f"error: {error or 'the processes of the run'} (they did not end in {END_S} s)", file=sys.stderr)
            watch.end_now(error.status if isinstance(error, Stop) else int(error is not None), self.watch)
        if not self.current:
            return  # between two stages; the next one sees what is lost
        where = f"stage {self.current}"
        if self.lost:
            self.stop_lost(self.current)
        if self.asked:
            why = f"{where} did not end within {STOP_S} s and was given up, not saved"
            self.stop(f"{why}. The same command goes on from the last checkpoint", 128 + self.asked)
        seconds = self.config.env.stage_deadline_s
        last = watch.latest_words(self.folder / "logs")
        self.stop(f"{where} got nowhere in {seconds:g} s (env.stage_deadline_s); raise it if that is only slow; {last}")

    def deadline(self) -> int:
        """env.stage_deadline_s in whole seconds, as alarms count."""
        return max(1, round(self.config.env.stage_deadline_s))

    def lose(self, what: str) -> None:
        """Called by the watch, in its thread: wake the loop, whatever it waits for."""
        self.lost = what
        if self.current:
            os.kill(os.getpid(), signal.SIGALRM)

    def server_restarted(self, name: str) -> None:
        """Called by gym_servers, in its thread, when it has started a server again."""
        if self.gym:
            self.gym.restarted(name)

    def end(self) -> None:
        """The processes are about to be stopped, and have END_S for it."""
        self.current, self.ends = "", True
        signal.alarm(END_S)
        if self.watch:
            self.watch.rest()
        if self.loop:
            self.loop.run(drop_tasks())
            self.loop = None

    def start(self, stack: contextlib.ExitStack, data: Data, serve: bool = True) -> Started:
        """Start what the command needs of Gym servers, Ray, vLLM and training workers; `stack` stops it all.

        serve: False for training without sampling: neither Gym servers nor vLLM.
        """
        import ray

        config, logs, door = self.config, self.folder / "logs", self.config.gym.door
        port = door.port or gym_servers.free_port(door.host)
        key = os.environ.get("POLICY_API_KEY") or secrets.token_hex(16)
        agents = any((spec.get("start") or {}).get("agent") for spec in config.gym.servers.values())

        def start_ray() -> None:
            threading.Thread(target=importlib.import_module, args=("inference",)).start()  # 10 s, beside Ray's 6
            asked = to_plain(config.ray_kwargs.ray_init)
            if not asked.get("address"):
                asked = {"_temp_dir": "/tmp/ray", **asked}  # its logs are to outlast the run's temporary folder
            session = ray.init(**asked).address_info["session_dir"]  # type: ignore[attr-defined]
            self.listen()
            (logs / "ray").unlink(missing_ok=True)
            (logs / "ray").symlink_to(Path(session) / "logs")
            found = ray.cluster_resources().get("GPU", 0)
            wanted = config.trainer.n_gpus_per_node * config.trainer.nnodes
            if found < wanted:  # else the workers would be waited for, for ever
                raise RunError(
                    f"Ray has {found:g} GPUs, trainer.n_gpus_per_node * nnodes = {wanted}: set these, join the other "
                    "nodes to a Ray cluster (`ray start`, ray_kwargs.ray_init.address=auto), or without a GPU add "
                    "--config configs/cpu.yaml"
                )

        with self.stage("start"):
            self.watch = stack.enter_context(watch.Watch(logs, self.lose))
            stack.callback(ray.shutdown)
            stack.callback(self.end)
            address = {"base_url": f"http://{door.host}:{port}/v1", "api_key": key, "model": "policy"}
            wanted = to_plain(config.gym.servers) if serve else {}
            servers = gym_servers.running_servers(wanted, logs, start_ray, address, self.server_restarted)
            urls = stack.enter_context(servers)
            import door as openai_door
            import inference
            import training

            loop = self.loop = stack.enter_context(asyncio.Runner())
            stack.callback(self.end)  # before the loop is closed

            def enter(context: Any) -> Any:
                """Open an asynchronous context now, and close it with the run."""
                entered = loop.run(context.__aenter__())
                stack.callback(lambda: loop.run(context.__aexit__(None, None, None)))
                return entered

            limits = config.gym
            self.gym = gym = gym_client.Gym(
                urls, limits.timeout_s, to_plain(limits.concurrency), limits.attempts, limits.outage_budget_s
            )
            enter(gym)
            own.register([config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode])
            sft = self.command == "sft"
            workers = training.start_workers(config, sft) if self.command in ("train", "sft") else None
            if workers:
                training.load_value_models(workers, config)
            if workers and not serve:
                workers.actor.init_model()
                training.set_policy_loss(workers.actor, config)
                return Started(loop, gym, None, None, workers)
            vllm = loop.run(
                inference.start_servers(config, workers.actor) if workers else inference.start_sampler(config)
            )
            client = vllm.get_client()
            policy = inference.make_policy(config, client, data.tokenizer, data.stop_ids, GENERATE_DEADLINE_S)
            if agents or door.port:
                enter(openai_door.serve(policy, door.host, port, key))
            if workers:
                training.set_policy_loss(workers.actor, config)
            stack.callback(self.end)  # and before all that was opened since
            return Started(loop, gym, policy, vllm, workers)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage into `timing` (seconds), show it, and end the run if it hangs or was asked to stop."""
        begin, inner, outer = time.perf_counter(), name != "step", self.current
        if inner:
            if self.lost:
                self.stop_lost(name)
            if self.asked and name not in WHOLE:
                self.stop_asked()
            self.bar.update(self.task, stage=name)
            self.current = name
            signal.alarm(STOP_S if self.asked and name != "save_checkpoint" else self.deadline())
        try:
            yield
        except KeyboardInterrupt as error:
            if self.ending and error is not self.ending:
                raise self.ending from None
            raise
        except Exception as error:
            self.failed = name
            if type(error).__module__.split(".")[0] != "ray":
                raise
            cause = watch.root_cause(error, self.folder / "logs")
            more = "Once that is mended, the same command goes on from the last checkpoint"
            raise RunError(f"stage {name}: {cause}. {more}") from error
        finally:
            if inner:
                signal.alarm(0)
                self.current = outer
        self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begin

    def due(self, step: int, freq: int) -> bool:
        """Whether what is done every `freq` steps (trainer.save_freq, test_freq), and after the last, is due."""
        return step == self.config.trainer.total_training_steps or (freq > 0 and step % freq == 0)

    def save(self, workers: Any, state: dict[str, Any]) -> None:
        """A checkpoint of the weights that the workers hold, unless there is one."""
        if state["step"] > (checkpoints.step_of(self.checkpoint) if self.checkpoint else 0):
            with self.stage("save_checkpoint"):
                folder = Path(self.config.trainer.default_local_dir)
                self.checkpoint = checkpoints.save(workers, folder, state, self.config)

    @contextlib.contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Around the loop: a run that was asked to stop, or fails while the weights are whole, saves before it ends."""
        try:
            yield
            if self.asked:
                self.stop_asked()
        except (Stop, Exception) as error:
            if isinstance(error, Stop):
                wanted = error.save
            else:  # a Gym server that is gone, a reward that raises; no half update, and no worker that is lost
                wanted = self.failed not in WHOLE and type(error.__cause__).__module__.split(".")[0] != "ray"
            if wanted:
                save()
                self.say(f"the last checkpoint is {self.checkpoint or 'none: no step was done'}")
            raise

    def begin(self, step: int) -> None:
        """Start the clock of a step."""
        if self.asked:
            self.stop_asked()
        self.timing = {}
        self.bar.update(self.task, completed=step - 1)

    def counter(self, total: int) -> Callable[[int, Any], None]:
        """A callback that shows how many of `total` episodes have ended."""
        done = 0

        def one_more(*_: Any) -> None:
            nonlocal done
            done += 1
            if self.current:
                signal.alarm(self.deadline())  # a stage that gets on does not hang
            if not self.first_episode:
                self.first_episode = self.timing["first_episode"] = time.monotonic() - self.started
            self.bar.update(self.task, stage=f"{done}/{total} episodes")

        return one_more

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append to metrics.jsonl (verl's own file logger would overwrite it on resume) and tell the trackers."""
        if not metrics:
            return
        if abs(jump := time.time() - time.monotonic() - self.clock) > CLOCK_S:
            self.clock += jump
            self.clock_jumps += 1
            self.say(f"step {step}: the machine's clock jumped by {jump:.0f} s; `time` in metrics.jsonl jumps too")
        metrics = metrics | ({"training/clock_jumps": self.clock_jumps} if self.clock_jumps else {})
        plain = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        with (self.folder / "metrics.jsonl").open("a") as out:
            out.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        if self.tracking:
            self.tracking.log(data=plain, step=step)

    def write_episodes(self, name: str, episodes: Sequence[Any], tasks: Sequence[env.Task], mode: str = "w") -> None:
        """rollouts/<name>.jsonl with every episode, and a line in failures.jsonl for each that failed."""
        prompts = {task.row_id: question(task) for task in tasks}
        records = [as_record(e, prompts[e.row_id]) for e in episodes]
        path = self.folder / "rollouts" / f"{name}.jsonl"
        with path.open(mode, encoding="utf-8") as out:
            out.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
        with (self.folder / "failures.jsonl").open("a", encoding="utf-8") as out:
            failed = [{"rollout": name, **r} for r in records if r["status"] != "ok"]
            out.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in failed)

    def save_damaged(self, step: int, damage: str, batch: Any) -> str:
        """Keep the batch of a damaged step in damaged/. Raises RunError at the third in a row; returns what to tell."""
        import torch  # a second, which a recipe that is refused need not wait

        self.damaged += 1
        path = self.folder / "damaged" / f"step_{step}.pt"
        path.parent.mkdir(exist_ok=True)
        tensors = {name: tensor.clone() for name, tensor in batch.batch.items()}
        torch.save({"damage": damage, "uid": list(batch.non_tensor_batch["uid"]), **tensors}, path)
        if self.damaged == DAMAGED:
            raise RunError(
                f"{DAMAGED} damaged steps in a row, the last: {damage}. Look into {path.parent} (torch.load), then go "
                "on from the last checkpoint with another precision, or a lower actor_rollout_ref.actor.optim.lr and "
                "actor_rollout_ref.actor.checkpoint.load_contents=[model]"
            )
        return f"{damage}; the batch is in {path}"

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

    def export(self, checkpoint: Path) -> None:
        """The checkpoint's policy as a Hugging Face folder, export/; what verl prints of it goes to logs/export.log."""
        with self.stage("export"), (self.folder / "logs" / "export.log").open("w") as log:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                checkpoints.export(checkpoint, self.folder / "export")

    def finish(self, before: dict[str, float], after: dict[str, float]) -> None:
        """The result of the run and what to do next."""
        minutes = (time.monotonic() - self.started) / 60
        self.say(f"\nfinished in {minutes:.1f} min; the run is in {self.folder}/")
        for name in (n for n in after if n.startswith("val-core/")):
            self.say(f"    {name}: {before.get(name, float('nan')):.3f} before, {after[name]:.3f} after")
        self.say(f"    checkpoint {self.checkpoint}, Hugging Face folder {self.folder}/export")
        again = f"trainer.total_training_steps={2 * self.config.trainer.total_training_steps}"
        self.say(f"next: look into {self.folder}/rollouts/, or train on with the same command and {again}")


async def drop_tasks() -> None:
    """Cancel the episodes that a stop left half done, else they would wake up while all is closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
