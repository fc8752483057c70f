"""A run: its folder, what it writes down and what it tells.

What is in runs/<trainer.experiment_name>/, file by file: docs/reference.md. At a terminal the last steps are a table
that moves, with the time left; elsewhere, or with --quiet, a line each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from safetensors import SafetensorError

from env import Task
from kit.config.load import public, to_plain
from kit.data.episodes import Episode, as_record, open_records, write
from kit.errors import RunError
from kit.runs import checkpoints, files
from kit.runs.signals import Guard
from kit.runs.text import printable

DAMAGED = 3  # steps in a row that end the run
RECENT = 8  # steps in the table at a terminal
console = Console(emoji=False)


class Run:
    """A run's folder, its clock and its voice. Use as `with Run(config) as run`.

    resume_from: the checkpoint that it goes on from. last: the step that it ends at.
    """

    def __init__(self, config: DictConfig, command: str = "train", resume_from: Path | None = None):
        self.config, self.command, self.folder = (
            config,
            command,
            Path("runs") / config.trainer.experiment_name,
        )
        self.checkpoint = resume_from  # the last one
        self.last: int = config.trainer.total_training_steps
        self.started, self.first_episode = time.monotonic(), 0.0  # seconds; seconds since `started`
        self.reported = 0.0, 0.0  # when report.html was written; how long that took, in seconds
        self.damaged = 0  # steps in a row
        self.lent: list[str] = []  # environment variables
        self.locks: list[files.Lock] = []  # of the folders that no other run may use
        self.on_restart: Callable[[str], None] = lambda name: (
            None
        )  # what else is to know of a restarted server
        self.gauges: Callable[[], dict[str, float]] = (
            dict  # what stands now, for every line of metrics.jsonl
        )
        self.on_log: Callable[[int, dict[str, float]], None] = lambda *_: (
            None
        )  # who else reads these lines
        self.open = 0  # episodes of the batch under way that have not ended
        self.trains = command in ("train", "sft")
        columns = (
            "{task.description}",
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            "{task.fields[stage]}",
        )
        times = (TimeElapsedColumn(), "left", TimeRemainingColumn(elapsed_when_finished=True))
        self.bar = Progress(
            *columns, *times, speed_estimate_period=math.inf
        )  # steps are long: the mean of all
        self.recent: deque[dict[str, str]] = deque(
            maxlen=RECENT
        )  # steps, by what the table's columns are called
        self.live = Live(self, console=console) if console.is_interactive else None
        done = checkpoints.step_of(resume_from) if resume_from else 0
        self.task = self.bar.add_task(
            command, total=self.last if self.trains else 1, completed=done, stage="starting"
        )
        self.guard = Guard(config, self.folder / "logs", self.say, self.show)
        self.stage, self.saving = self.guard.stage, self.guard.saving
        self.timing = self.guard.timing  # seconds by stage, of the step under way

    def __enter__(self) -> Run:
        try:
            self.take_folder()
            self.open_trackers()
        except BaseException:
            self.give_folder_back()
            raise
        self.guard.listen()
        if self.live:
            self.live.start()
        return self

    def take_folder(self) -> None:
        """Lock the folder, and make it ready for what this run adds to it. Raises RunError."""
        with files.writing(self.folder):
            for name in ("rollouts", "logs"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.lock(self.folder)
        saves_to = Path(self.config.trainer.default_local_dir)
        if self.trains and not saves_to.absolute().is_relative_to(self.folder.absolute()):
            with files.writing(saves_to):
                saves_to.mkdir(parents=True, exist_ok=True)
            self.lock(saves_to)
        for path in sorted(self.folder.glob("*.jsonl")):
            if line := files.set_cut_line_aside(path):
                self.say(line)
        name = "config" if self.trains else self.command
        with files.replacing(self.folder / f"{name}.yaml") as partial:
            OmegaConf.save(public(self.config), partial)
        if self.trains:
            self.forget_after(checkpoints.step_of(self.checkpoint) if self.checkpoint else -1)

    def lock(self, folder: Path) -> None:
        """Keep other runs out of a folder until this one ends. Raises RunError."""
        lock = files.Lock(folder)
        lock.take()
        self.locks.append(lock)

    def give_folder_back(self) -> None:
        """Undo what the run changed in this process, and let other runs into its folders."""
        for name in self.lent:
            os.environ.pop(name, None)
        for lock in self.locks:
            lock.release()

    def open_trackers(self) -> None:
        """Open the recipe's trackers, if there are any."""
        self.lend(TENSORBOARD_DIR=self.folder / "tensorboard", WANDB_DIR=self.folder)
        self.lend(VERL_FILE_LOGGER_PATH=self.folder / "tracking.jsonl")
        self.tracking = self.track() if self.config.trainer.logger else None

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.guard.give_back()
        if self.live:
            self.live.stop()
        try:
            self.close_trackers(0 if kind is None else 1)
            self.write_report()
        finally:
            self.give_folder_back()

    def close_trackers(self, status: int) -> None:
        """End the trackers. If one cannot write, the run says so: its numbers are in metrics.jsonl."""
        if not self.tracking:
            return
        try:
            self.tracking.finish(exit_code=status)
            if writer := getattr(
                self.tables, "writer", None
            ):  # of tensorboard, which nothing else closes
                writer.close()
        except OSError as error:
            self.say(files.describe_failure(f"a tracker of {self.folder}", error))

    def lend(self, **variables: Any) -> None:
        """Set environment variables that are not set, until the run ends: the next one has another folder."""
        new = {name: str(value) for name, value in variables.items() if name not in os.environ}
        os.environ.update(new)
        self.lent += new

    def forget_after(self, step: int) -> None:
        """What an earlier run left of the steps that are now trained again gets another name: lines of metrics.jsonl go
        to metrics.abandoned.jsonl, as does one that a kill cut short; checkpoints are renamed."""
        for line in checkpoints.set_aside(
            Path(self.config.trainer.default_local_dir), max(step, 0)
        ):
            self.say(line)
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        kept, gone, cut = list[bytes](), list[bytes](), list[bytes]()
        for raw in files.read_lines(path):
            found = files.parse_line(raw)
            if found is None or not isinstance(found.get("step"), int):
                cut.append(raw + b"\n")
            else:
                (kept if found["step"] <= step else gone).append(raw + b"\n")
        if cut:
            with files.appending(path.with_name(f"{path.name}.cut")) as out:
                out.writelines(cut)
            self.say(f"{len(cut)} lines of {path} cannot be read; they are now in {path.name}.cut")
        if gone:
            with files.appending(self.folder / "metrics.abandoned.jsonl") as out:
                out.writelines(gone)
        if gone or cut:
            with files.replacing(path) as partial:
                partial.write_bytes(b"".join(kept))

    def track(self) -> Any:
        """verl's trackers, with an id that a resumed run finds again, by their own environment variables."""
        path = self.folder / "tracker_id"
        if self.checkpoint is None or not path.is_file():
            with files.replacing(path) as partial:
                partial.write_text(uuid.uuid4().hex[:12])
        self.lend(WANDB_RUN_ID=path.read_text(), WANDB_RESUME="allow")
        self.lend(SWANLAB_RUN_ID=path.read_text(), SWANLAB_RESUME="allow")
        from verl.utils.tracking import (
            Tracking,
            ValidationGenerationsLogger,
        )  # 10 s, which only those pay who track

        names, told = (
            self.config.trainer,
            OmegaConf.to_container(public(self.config), resolve=False),
        )
        self.tables = ValidationGenerationsLogger(names.project_name, names.experiment_name)
        return Tracking(names.project_name, names.experiment_name, to_plain(names.logger), told)

    # --- a step ---

    def begin(self, step: int) -> None:
        """Start the clock of a step."""
        if self.guard.asked:
            self.guard.stop_asked()
        self.timing.clear()
        self.bar.update(self.task, completed=step - 1)

    def timings(self) -> dict[str, float]:
        """Seconds of the step's stages, as metrics."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.timing.items()}

    def due(self, step: int, freq: int) -> bool:
        """Whether what is done every `freq` steps (trainer.save_freq, test_freq), and after the last, is due."""
        return step == self.last or (freq > 0 and step % freq == 0)

    def counter(self, total: int) -> Callable[[int, Any], None]:
        """A callback that shows how many of `total` episodes have ended."""
        ended, self.open = itertools.count(1), total

        def one_more(*_: Any) -> None:
            done = next(ended)
            self.open = total - done
            self.guard.progress()
            if not self.first_episode:
                self.first_episode = self.timing["first_episode"] = time.monotonic() - self.started
            self.show(f"{done}/{total} episodes")
            if not self.trains:
                self.bar.update(self.task, total=total, completed=done)

        return one_more

    def save(self, workers: Any, state: dict[str, Any]) -> Path | None:
        """A checkpoint of the weights that the workers hold, unless there is one, or they are not finite. The last."""
        if state["step"] > (checkpoints.step_of(self.checkpoint) if self.checkpoint else 0):
            with self.stage("save_checkpoint"):
                folder = Path(self.config.trainer.default_local_dir)
                if bad := checkpoints.not_finite(workers):
                    self.say(
                        f"not saved: NaN or infinite in {', '.join(bad[:3])} ({len(bad)} tensors)"
                    )
                else:
                    self.checkpoint = checkpoints.save(workers, folder, state, self.config)
        return self.checkpoint

    # --- what it writes down ---

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append to metrics.jsonl (verl's own file logger would overwrite it on resume) and tell the trackers."""
        if not metrics:
            return
        plain = {name: float(value) for name, value in (metrics | self.gauges()).items()}
        finite = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        of = (
            {} if self.trains else {"command": self.command}
        )  # of a folder in which another may have trained
        line = json.dumps({"step": step, "time": time.time(), **of, **finite}) + "\n"
        with files.appending(self.folder / "metrics.jsonl") as out:
            out.write(line.encode())
        self.on_log(step, plain)
        if self.tracking:
            with files.writing(self.folder):
                self.tracking.log(data=plain, step=step)

    def log_answers(self, step: int, episodes: Sequence[Episode]) -> None:
        """The first trainer.log_val_generations of an evaluation, in the trackers that have tables."""
        if self.tracking and (count := self.config.trainer.log_val_generations) > 0:
            rows = [[e.question, e.transcript, e.reward] for e in episodes[:count]]
            self.tables.log(to_plain(self.config.trainer.logger), rows, step)

    def write_episodes(
        self,
        name: str,
        episodes: Sequence[Episode],
        tasks: Sequence[Task],
        before: Sequence[Episode] = (),
    ) -> None:
        """rollouts/<name>.jsonl with every episode, and a line in failures.jsonl for each that failed. Of the files of
        steps the last env.keep_rollouts stay.

        tasks: of the files, since a row is known by its place there. before: those that the file holds already.
        """
        places = {task.row_id: i for i, task in enumerate(tasks)}
        for i, e in enumerate(
            [*before, *episodes]
        ):  # rows made on the fly come after those of the files
            places.setdefault(e.row_id, len(tasks) + i)
        counts = Counter(e.row_id for e in before)
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self.open_rollouts(name, bool(before)))
            failures = stack.enter_context(files.appending(self.folder / "failures.jsonl"))
            for e in episodes:
                e.place = places[e.row_id], counts[e.row_id]
                record = as_record(e, *e.place)
                counts[e.row_id] += 1
                if places[e.row_id] >= len(tasks):  # no file has it, and a replay wants it
                    record["_episode"]["row"] = e.row
                write(out, record)
                if e.status != "ok":
                    write(failures, {"rollout": name, **record["_episode"]})
        if keep := self.config.env.keep_rollouts:
            self.delete_rollouts(keep)

    @contextlib.contextmanager
    def open_rollouts(self, name: str, more: bool) -> Iterator[IO[bytes]]:
        """Yield rollouts/<name>.jsonl: a new file, or its end if `more` is to come after what it holds."""
        path = self.folder / "rollouts" / f"{name}.jsonl"
        if more:
            with files.appending(path) as out:
                yield out
            return
        with files.replacing(path) as partial, open_records(partial, "w") as out:
            yield out

    def delete_rollouts(self, keep: int) -> None:
        """Delete the rollouts files of all steps but the last `keep`, and their advantages."""
        folder = self.folder / "rollouts"
        with files.writing(folder):
            for path in sorted(folder.glob("step_*.jsonl"), key=os.path.getmtime)[:-keep]:
                path.unlink()
                (self.folder / "advantages" / f"{path.stem}.npz").unlink(missing_ok=True)

    def write_advantages(self, step: int, kept: Sequence[Episode], batch: Any) -> None:
        """advantages/step_N.npz: of the batch's [B, R] those of sampled tokens; one where all of an answer have it."""
        rows = [
            row[turn >= 0].float().numpy()
            for row, turn in zip(batch["advantages"], batch["turn"], strict=True)
        ]
        rows = [row[:1] if (row == row[:1]).all() else row for row in rows]
        path = self.folder / "advantages" / f"step_{step}.npz"
        lengths = np.array([len(row) for row in rows])
        places, values = [e.place for e in kept], np.concatenate(rows)
        with files.writing(path.parent):
            path.parent.mkdir(exist_ok=True)
        with files.replacing(path) as partial, partial.open("wb") as out:
            np.savez_compressed(out, places=places, lengths=lengths, values=values)

    def report_if_due(self) -> None:
        """report.html, unless it was just written: of large batches it takes seconds, a twentieth of all at most."""
        written, took = self.reported
        if time.monotonic() > written + 20 * took:
            with self.stage("report"):
                self.write_report()

    def write_report(self) -> None:
        """report.html, of all that the run has so far (report_page.py). What it cannot show ends no run: it is told."""
        if not (self.folder / "metrics.jsonl").is_file() and not any(
            (self.folder / "rollouts").iterdir()
        ):
            return
        begun = time.monotonic()
        try:
            from kit.extras.report import (
                report_page,
            )  # a second, which a recipe that does not start need not wait

            report_page.write([self.folder], self.folder / "report.html")
            self.reported = time.monotonic(), time.monotonic() - begun
        except Exception as error:
            self.say(
                f"report.html was not written ({error!r:.200}); {self.folder}/logs/report.log says where"
            )
            with contextlib.suppress(OSError):  # the disk may be full
                (self.folder / "logs" / "report.log").write_text(traceback.format_exc())

    def keep_damaged(self, step: int, damage: str, batch: Any) -> str:
        """Keep the batch of a damaged step in damaged/. Raises RunError at the third in a row; returns what to tell."""
        import torch  # a second, which a recipe that is refused need not wait

        self.damaged += 1
        path = self.folder / "damaged" / f"step_{step}.pt"
        tensors = {name: tensor.clone() for name, tensor in batch.batch.items()}
        with files.writing(path.parent):
            path.parent.mkdir(exist_ok=True)
        with files.replacing(path) as partial, partial.open("wb") as out:
            torch.save(
                {"damage": damage, "uid": list(batch.non_tensor_batch["uid"]), **tensors}, out
            )
        # Megatron's optimiser takes the step all the same, which verl's others leave out
        if self.damaged == (DAMAGED if self.config.model_engine != "megatron" else 1):
            raise RunError(
                f"{self.damaged} damaged steps in a row, the last: {damage}. See {path.parent} (torch.load), then go "
                "on from the last checkpoint with another precision, or a lower actor_rollout_ref.actor.optim.lr and "
                "actor_rollout_ref.actor.checkpoint.load_contents=[model]"
            )
        return f"{damage}; the batch is in {path}"

    def export(self) -> None:
        """The last checkpoint's policy as a Hugging Face folder, export/; what verl prints goes to logs/export.log.
        Raises RunError where nothing was ever saved."""
        if self.checkpoint is None:
            raise RunError(
                f"every step up to {self.last} was damaged or skipped, so there is nothing to save; look into "
                f"{self.folder}/rollouts and {self.folder}/damaged for why"
            )
        self.guard.ends, self.guard.owed, self.guard.watch = (
            False,
            "",
            None,
        )  # a deadline is the export's now
        with (
            self.stage("export"),
            files.writing(self.folder / "export"),
            contextlib.ExitStack() as stack,
        ):
            log = stack.enter_context((self.folder / "logs" / "export.log").open("w"))
            stack.enter_context(contextlib.redirect_stdout(log))
            stack.enter_context(contextlib.redirect_stderr(log))
            try:
                checkpoints.export(self.checkpoint, self.folder / "export")
            except SafetensorError as error:  # of a full disk, too, which is no OSError there
                target = self.folder / "export"
                raise RunError(
                    f"{target} cannot be written: {error}; free space there, then run the same command again"
                ) from error

    # --- what it tells ---

    def show(self, stage: str) -> None:
        """What is under way, beside the bar."""
        self.bar.update(self.task, stage=stage)

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def say_line(self, step: int, values: dict[str, str]) -> None:
        """The step's line on the console, or in its table: its numbers and the seconds of its stages."""
        self.bar.update(self.task, completed=step)
        told = {
            k: v for k, v in self.timing.items() if k not in ("step", "first_episode") and v >= 0.05
        }
        seconds = " ".join(f"{k} {v:.1f}" for k, v in told.items())
        self.recent.append({"step": str(step), **values, "seconds": seconds})
        if not self.live:
            line = " ".join(f"{name} {value}" for name, value in values.items())
            self.say(f"step {step:4d}  {line}  | seconds: {seconds}")

    def __rich__(self) -> Group:
        """What moves at a terminal: the last steps, and the bar."""
        rows = list(self.recent)  # as it is now: another thread draws
        table = Table(
            *dict.fromkeys(name for row in rows for name in row), box=None, header_style="bold"
        )
        for row in rows:
            table.add_row(*(row.get(str(column.header), "") for column in table.columns))
        return Group(*([table] if rows else []), self.bar)

    def report(self, step: int, metrics: dict[str, Any], kept: Sequence[Episode]) -> None:
        """One line a step, and every trainer.print_samples_every steps the best and the worst answer of the batch.

        `reward` is the verifier's, over all that it has verified; `shaped` what env.reward and a KL term make of it.
        """
        changed = (
            self.config.env.reward or self.config.algorithm.use_kl_in_reward
        )  # from the verifier's
        names = {"reward": "rollout/reward/mean"}
        if changed and "critic/rewards/mean" in metrics:
            names = {"verifier": "rollout/reward/mean", "shaped": "critic/rewards/mean"}
        names |= {"length": "response_length/mean", "loss": "actor/pg_loss"}
        values = {label: f"{metrics[name]:.3g}" for label, name in names.items() if name in metrics}
        if metrics["rollout/kept"] < metrics["rollout/episodes"]:
            values["kept"] = f"{metrics['rollout/kept']:.0f}/{metrics['rollout/episodes']:.0f}"
        if uniform := metrics["rollout/zero_variance_groups"]:
            values["equal"] = f"{uniform:.0f} groups"
        self.say_line(step, values | {"failed": f"{metrics['rollout/failed_frac']:.0%}"})
        if (
            kept
            and self.config.trainer.print_samples_every > 0
            and step % self.config.trainer.print_samples_every == 0
        ):
            self.say_examples(kept, 1)

    def say_examples(self, episodes: Sequence[Episode], count: int) -> None:
        """The `count` best and worst answers."""
        ranked = sorted(episodes, key=lambda e: -(e.reward or 0.0))
        for e in [*ranked[:count], *ranked[max(count, len(ranked) - count) :]]:
            asked = " ".join(e.question.split())[-100:]
            self.say(f"    {asked!r} -> {e.transcript[:200]!r}  reward {e.reward:.2f}")

    def finish(self, after: dict[str, float]) -> None:
        """The result of the run and what to do next."""
        minutes, path = (time.monotonic() - self.started) / 60, self.folder / "metrics.jsonl"
        lines = [files.parse_line(line) for line in files.read_lines(path) if b'"val-core/' in line]
        # of the first evaluation, in whichever part of the run it was
        before = next((line for line in lines if line), {"step": 0})
        self.say(f"\nfinished in {minutes:.1f} min; the run is in {self.folder}/")
        for name in (n for n in after if n.startswith("val-core/") and not n.endswith("pass@1")):
            told = "not measured" if before.get(name) is None else f"{before[name]:.3f}"
            self.say(f"    {name}: {told} before (step {before['step']}), {after[name]:.3f} after")
        self.say(f"    checkpoint {self.checkpoint}, Hugging Face folder {self.folder}/export")
        again = f"trainer.total_training_steps={2 * self.last}"
        self.say(
            f"next: look at {self.folder}/report.html, or train on with the same command and {again}"
        )
