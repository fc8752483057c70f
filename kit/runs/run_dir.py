"""A run's folder, runs/<trainer.experiment_name>: what it writes there, and its stages.

docs/reference.md explains every file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from omegaconf import OmegaConf
from safetensors import SafetensorError

from env import Task
from kit.config import trackers
from kit.config.recipe import Recipe
from kit.config.redaction import redacted
from kit.data import json_lines
from kit.data.episode import Episode
from kit.data.rollout_files import to_record, write_record
from kit.errors import RunError
from kit.runs import checkpoints, files
from kit.runs.console import Display, print_examples, say, step_values
from kit.runs.drift import DriftWatch
from kit.runs.signals import Guard, StopReason

MAX_NONFINITE_STEPS = 3  # in a row; then the run ends
REPORT_SHARE = 20  # report.html takes at most 1/20 of the time


class Run:
    """A run's folder, its stages and its console. Use as `with Run(recipe) as run`.

    resume_from: the checkpoint to resume from. The
    attribute `last` is the number of the last step.
    """

    def __init__(self, recipe: Recipe, resume_from: Path | None = None):
        self.recipe = recipe
        self.command = recipe.command
        self.folder = Path("runs") / recipe.trainer.experiment_name
        self.checkpoint = resume_from  # the last one
        self.last: int = recipe.trainer.total_training_steps
        self.trains = recipe.trains
        self.started_at = time.monotonic()
        self.first_episode_s = 0.0  # seconds from the start; 0: there was none yet
        self.report_written_at = 0.0
        self.report_seconds = 0.0  # to write the last report.html
        self.nonfinite_steps = 0  # in a row
        self.open_episodes = 0  # of the current batch
        self.changed_variables: list[str] = []  # environment variables that this run has set
        self.locks: list[files.FolderLock] = []  # of the folders that no other run may use
        self.on_restart: Callable[[str], None] | None = None  # gets the name of a restarted server
        # functions that measure something for every line of metrics.jsonl
        self.gauges: list[Callable[[], dict[str, float]]] = []
        # functions that get every line of metrics.jsonl
        self.log_readers: list[Callable[[int, dict[str, float]], None]] = []
        completed = checkpoints.step_of(resume_from) if resume_from else 0
        self.display = Display(recipe.command, self.last if self.trains else 1, completed)
        self.guard = Guard(recipe, self.folder / "logs", say, self.display.show_stage)
        self.stage = self.guard.stage
        self.save_on_stop = self.guard.save_on_stop
        self.timing = self.guard.timing  # seconds by stage, of the current step
        self.say = say
        if recipe.command == "train":
            self.log_readers.append(DriftWatch(recipe, self.folder, say).record)

    def __enter__(self) -> Run:
        try:
            self.take_folder()
            self.open_trackers()
        except BaseException:
            self.release()
            raise
        self.guard.install_handlers()
        self.display.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.guard.restore_handlers()
        self.display.stop()
        try:
            self.close_trackers(0 if kind is None else 1)
            self.write_report()
        finally:
            self.release()

    # --- the folder ---

    def take_folder(self) -> None:
        """Lock the folder and prepare it for this run. Raises RunError."""
        with files.explain_write_errors(self.folder):
            for name in ("rollouts", "logs"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.lock(self.folder)
        checkpoint_folder = Path(self.recipe.trainer.default_local_dir)
        is_inside = checkpoint_folder.absolute().is_relative_to(self.folder.absolute())
        if self.trains and not is_inside:
            with files.explain_write_errors(checkpoint_folder):
                checkpoint_folder.mkdir(parents=True, exist_ok=True)
            self.lock(checkpoint_folder)
        with files.explain_write_errors(self.folder):
            for path in sorted(self.folder.glob("*.jsonl")):
                if json_lines.drop_incomplete_line(path):
                    self.say(f"Removed the incomplete last line of {path}. All other lines stay.")
        name = "config" if self.trains else self.command
        with files.replace_atomically(self.folder / f"{name}.yaml") as partial:
            OmegaConf.save(redacted(self.recipe.verl), partial)
        if self.trains:
            first = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
            for note in checkpoints.set_aside(checkpoint_folder, first):
                self.say(note)

    def lock(self, folder: Path) -> None:
        """Keep other runs out of a folder until this one ends. Raises RunError."""
        lock = files.FolderLock(folder)
        lock.acquire()
        self.locks.append(lock)

    def release(self) -> None:
        """Undo what the run changed in this process, and unlock its folders."""
        for name in self.changed_variables:
            os.environ.pop(name, None)
        for lock in self.locks:
            lock.release()

    def set_env(self, **variables: Any) -> None:
        """Set environment variables that are not set, until the run ends."""
        for name, value in variables.items():
            if name not in os.environ:
                os.environ[name] = str(value)
                self.changed_variables.append(name)

    # --- trackers ---

    def open_trackers(self) -> None:
        """Open the recipe's trackers (trainer.logger), if there are any."""
        self.set_env(TENSORBOARD_DIR=self.folder / "tensorboard", WANDB_DIR=self.folder)
        self.set_env(VERL_FILE_LOGGER_PATH=self.folder / "tracking.jsonl")
        self.trackers = trackers.list_names(self.recipe.verl)
        self.tracking = self.make_tracking() if self.trackers else None

    def make_tracking(self) -> Any:
        """Make verl's trackers, with an id that a resumed run uses again. Raises RunError."""
        path = self.folder / "tracker_id"
        if self.checkpoint is None or not path.is_file():
            with files.replace_atomically(path) as partial:
                partial.write_text(uuid.uuid4().hex[:12])
        self.set_env(WANDB_RUN_ID=path.read_text(), WANDB_RESUME="allow")
        self.set_env(SWANLAB_RUN_ID=path.read_text(), SWANLAB_RESUME="allow")
        # takes 10 s, so only runs with a tracker import it
        from verl.utils.tracking import Tracking, ValidationGenerationsLogger

        settings = self.recipe.trainer
        self.tables = ValidationGenerationsLogger(settings.project_name, settings.experiment_name)
        recipe = OmegaConf.to_container(redacted(self.recipe.verl), resolve=False)
        try:
            return Tracking(settings.project_name, settings.experiment_name, self.trackers, recipe)
        except Exception as error:  # each tracker has its own classes, for example for a wrong key
            reason = " ".join(str(error).split()) or repr(error)
            raise RunError(
                f"trainer.logger={self.trackers}: a tracker did not start: {reason} Correct its "
                "settings or its network, choose its offline mode, or remove it."
            ) from error

    def close_trackers(self, status: int) -> None:
        """Close the trackers. If one cannot write, print that and continue.

        metrics.jsonl has the numbers, too.
        """
        if not self.tracking:
            return
        try:
            self.tracking.finish(exit_code=status)
            writer = getattr(self.tables, "writer", None)  # TensorBoard's, which verl leaves open
            if writer:
                writer.close()
        except OSError as error:
            self.say(files.describe_write_error(f"a tracker of {self.folder}", error))

    # --- a step ---

    def begin_step(self, step: int) -> None:
        """Clear the timings for a new step. Raises Stop if a stop signal has arrived."""
        if self.guard.stop_signal:
            self.guard.stop(StopReason.SIGNAL)
        self.timing.clear()
        self.display.set_progress(step - 1)

    def timings(self) -> dict[str, float]:
        """Seconds of the step's stages, as metrics."""
        return {f"timing_s/{stage}": seconds for stage, seconds in self.timing.items()}

    def is_due(self, step: int, freq: int) -> bool:
        """Whether `step` is the last step, or a multiple of a positive `freq`."""
        return step == self.last or (freq > 0 and step % freq == 0)

    def count_episodes(self, total: int) -> Callable[[int, Any], None]:
        """Return a callback for ended episodes. It shows how many of `total` have ended."""
        ended = itertools.count(1)
        self.open_episodes = total

        def on_done(_index: int, _episode: Any) -> None:
            done = next(ended)
            self.open_episodes = total - done
            self.guard.record_progress()
            if not self.first_episode_s:
                self.first_episode_s = time.monotonic() - self.started_at
                self.timing["first_episode"] = self.first_episode_s
            self.display.show_stage(f"{done}/{total} episodes")
            if not self.trains:
                self.display.set_progress(done, total)

        return on_done

    def report_restart(self, server: str) -> None:
        """Report a restarted Gym server to its clients, so that they may repeat earlier calls."""
        if self.on_restart:
            self.on_restart(server)

    def save(self, workers: Any, state: checkpoints.LoopState) -> Path | None:
        """Save the workers' weights, unless they are saved or not finite -> the last checkpoint."""
        saved_step = checkpoints.step_of(self.checkpoint) if self.checkpoint else 0
        if state.step <= saved_step:
            return self.checkpoint
        from kit.runs import finite_check  # imports torch, for which a refused recipe need not wait

        with self.stage("save_checkpoint"):
            nonfinite = finite_check.find_nonfinite_weights(workers)
            if nonfinite:
                names = ", ".join(nonfinite[:3])
                self.say(
                    f"Not saved: NaN or infinity in {names} ({len(nonfinite)} tensors). "
                    'See docs/troubleshooting.md, "Learning".'
                )
            else:
                folder = Path(self.recipe.trainer.default_local_dir)
                self.checkpoint = checkpoints.save(workers, folder, state, self.recipe)
        return self.checkpoint

    # --- files ---

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append to metrics.jsonl and pass the line to the trackers.

        It replaces verl's file logger, which would overwrite the file when a run resumes.
        """
        if not metrics:
            return
        values = {name: float(value) for name, value in metrics.items()}
        for gauge in self.gauges:
            values |= {name: float(value) for name, value in gauge().items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line: dict[str, Any] = {"step": step, "time": time.time()}
        if not self.trains:
            line["command"] = self.command  # another run may train in the same folder
        with files.append_or_restore(self.folder / "metrics.jsonl") as out:
            out.write(json.dumps(line | finite).encode() + b"\n")
        for reader in self.log_readers:
            reader(step, values)
        if self.tracking:
            with files.explain_write_errors(self.folder):
                self.tracking.log(data=values, step=step)

    def log_evaluation(
        self, step: int, scores: Mapping[str, float], episodes: Sequence[Episode]
    ) -> None:
        """Print the scores of an evaluation. Log its first responses to trackers with tables.

        The number of these responses is trainer.log_val_generations.
        """
        text = ", ".join(f"{name} {score:.3f}" for name, score in select_scores(scores).items())
        result = text or "no score, because every episode failed"
        self.say(f"held-out rows, step {step}/{self.last}: {result}")
        count = self.recipe.trainer.log_val_generations
        if self.tracking and count > 0:
            rows = [[e.question, e.transcript, e.reward] for e in episodes[:count]]
            self.tables.log(self.trackers, rows, step)

    def write_episodes(
        self,
        name: str,
        episodes: Sequence[Episode],
        tasks: Sequence[Task],
        before: Sequence[Episode] = (),
    ) -> None:
        """Write rollouts/<name>.jsonl, and a line in failures.jsonl for each failed episode.

        tasks: of the row files. before: episodes that the file already holds. Only the last
        env.keep_rollouts files of steps stay.
        """
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self.open_rollouts(name, appends=bool(before)))
            failures = stack.enter_context(files.append_or_restore(self.folder / "failures.jsonl"))
            for episode in episodes:
                record = to_record(episode, *episode.record_index)
                if episode.record_index.task >= len(tasks):
                    # a replay needs the row, and no row file has it
                    record["_episode"]["row"] = episode.row
                write_record(out, record)
                if episode.status != "ok":
                    write_record(failures, {"rollout": name, **record["_episode"]})
        if self.recipe.env.keep_rollouts:
            self.delete_rollouts(self.recipe.env.keep_rollouts)

    @contextlib.contextmanager
    def open_rollouts(self, name: str, appends: bool) -> Iterator[IO[bytes]]:
        """Open rollouts/<name>.jsonl as a new file, or at its end."""
        path = self.folder / "rollouts" / f"{name}.jsonl"
        if appends:
            with files.append_or_restore(path) as out:
                yield out
        else:
            with files.replace_atomically(path) as partial, partial.open("wb") as out:
                yield out

    def delete_rollouts(self, keep: int) -> None:
        """Delete the rollouts and advantages of all steps but the last `keep`."""
        folder = self.folder / "rollouts"
        with files.explain_write_errors(folder):
            paths = sorted(folder.glob("step_*.jsonl"), key=os.path.getmtime)
            for path in paths[:-keep]:
                path.unlink()
                (self.folder / "advantages" / f"{path.stem}.npz").unlink(missing_ok=True)

    def write_advantages(self, step: int, episodes: Sequence[Episode], batch: Any) -> None:
        """Write advantages/step_N.npz: the advantages of the sampled tokens of each episode.

        If all tokens of an episode have the same advantage, it is written once. batch: has
        advantages and turn, each [B, R].
        """
        rows = []
        for advantages, turn in zip(batch["advantages"], batch["turn"], strict=True):
            row = advantages[turn >= 0].float().numpy()
            is_constant = (row == row[:1]).all()
            rows.append(row[:1] if is_constant else row)
        path = self.folder / "advantages" / f"step_{step}.npz"
        with files.explain_write_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
        with files.replace_atomically(path) as partial, partial.open("wb") as out:
            np.savez_compressed(
                out,
                record_index=[episode.record_index for episode in episodes],
                lengths=np.array([len(row) for row in rows]),
                values=np.concatenate(rows),
            )

    def keep_nonfinite(self, step: int, reason: str, batch: Any) -> str:
        """Save the batch of a non-finite step to nonfinite/, and return a message.

        Raises RunError at the last of MAX_NONFINITE_STEPS such steps in a row, and at the first one
        if the optimizer applies it. verl's other engines skip it.
        """
        import torch  # takes a second, which a refused recipe need not wait for

        self.nonfinite_steps += 1
        path = self.folder / "nonfinite" / f"step_{step}.pt"
        tensors = {name: tensor.clone() for name, tensor in batch.batch.items()}
        group_ids = list(batch.non_tensor_batch["uid"])
        with files.explain_write_errors(path.parent):
            path.parent.mkdir(exist_ok=True)
        with files.replace_atomically(path) as partial, partial.open("wb") as out:
            torch.save({"reason": reason, "uid": group_ids, **tensors}, out)
        are_skipped = all(feature.skips_nonfinite_steps for feature in self.recipe.features)
        limit = MAX_NONFINITE_STEPS if are_skipped else 1
        if self.nonfinite_steps == limit:
            raise RunError(
                f"{self.nonfinite_steps} non-finite steps in a row, the last: {reason}. Inspect "
                f"{path.parent} with torch.load. Then resume from the last checkpoint with another "
                "precision, or with a lower actor_rollout_ref.actor.optim.lr and "
                "actor_rollout_ref.actor.checkpoint.load_contents=[model]. "
                'See docs/guides/diagnosis.md, "8. Gradient norm and clipping".'
            )
        return f"{reason}; the batch is in {path}"

    def export(self) -> None:
        """Write the last checkpoint's policy to export/, as a Hugging Face folder.

        verl's output goes to logs/export.log. Raises RunError if nothing was ever saved.
        """
        if self.checkpoint is None:
            raise RunError(
                f"No step up to {self.last} was completed, so there is nothing to export. See "
                f"{self.folder}/rollouts and {self.folder}/nonfinite for the reason."
            )
        from kit.runs.export import export

        self.guard.end_shutdown()
        target = self.folder / "export"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.stage("export"))
            stack.enter_context(files.explain_write_errors(target))
            log = stack.enter_context((self.folder / "logs" / "export.log").open("w"))
            stack.enter_context(contextlib.redirect_stdout(log))
            stack.enter_context(contextlib.redirect_stderr(log))
            try:
                export(self.checkpoint, target)
            except SafetensorError as error:  # also for a full disk
                raise RunError(
                    f"{target} cannot be written: {error}. Free space there, then rerun the same "
                    "command"
                ) from error

    # --- report.html ---

    def report_if_due(self) -> None:
        """Write report.html, unless it would take more than 1/REPORT_SHARE of the time."""
        if time.monotonic() > self.report_written_at + REPORT_SHARE * self.report_seconds:
            with self.stage("report"):
                self.write_report()

    def write_report(self) -> None:
        """Write report.html about the run so far. An error is printed and does not end the run."""
        has_metrics = (self.folder / "metrics.jsonl").is_file()
        if not has_metrics and not any((self.folder / "rollouts").iterdir()):
            return
        begin = time.monotonic()
        try:
            for feature in self.recipe.features:
                feature.write_report(self.folder)
        except Exception as error:
            log = self.folder / "logs" / "report.log"
            self.say(f"report.html was not written ({error!r:.200}). See {log}")
            with contextlib.suppress(OSError):  # the disk may be full
                log.write_text(traceback.format_exc())
        else:
            self.report_written_at = time.monotonic()
            self.report_seconds = time.monotonic() - begin

    # --- console ---

    def print_step(self, step: int, metrics: dict[str, Any], episodes: Sequence[Episode]) -> None:
        """Print a step's line, and its best and worst episode every print_samples_every steps."""
        is_shaped = bool(self.recipe.env.reward or self.recipe.algorithm.use_kl_in_reward)
        self.display.print_step(step, step_values(metrics, is_shaped), self.timing)
        interval = self.recipe.kit.print_samples_every
        if episodes and interval > 0 and step % interval == 0:
            print_examples(episodes, 1)

    def print_result(self, scores: dict[str, float]) -> None:
        """Print the scores of the first and the last evaluation, and what to do next."""
        minutes = (time.monotonic() - self.started_at) / 60
        self.say(f"\nFinished in {minutes:.1f} min. The run is in {self.folder}/")
        first = self.read_first_scores()
        for name, score in select_scores(scores).items():
            before = first.get(name)
            first_score = "not measured" if before is None else f"{before:.3f}"
            steps = f"(step {first['step']} -> {self.last})"
            self.say(f"    {name}: {first_score} -> {score:.3f} {steps}")
        self.say(f"    checkpoint {self.checkpoint}, Hugging Face folder {self.folder}/export")
        self.say(f"Next: open {self.folder}/report.html, or train longer:")
        self.say(f"    {repeat_command(f'trainer.total_training_steps={2 * self.last}')}")

    def read_first_scores(self) -> dict[str, Any]:
        """The metrics of the first evaluation, of this run or of one that it resumes."""
        for metrics in json_lines.read_metrics(self.folder / "metrics.jsonl"):
            if any(name.startswith("val-core/") for name in metrics):
                return metrics
        return {"step": 0}


def select_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores to print. pass@1 is left out, because it is the same as mean@n of acc."""
    return {
        name: score
        for name, score in scores.items()
        if name.startswith("val-core/") and not name.endswith("pass@1")
    }


def repeat_command(argument: str) -> str:
    """The command line of this process with another value of one key. argument: key=value."""
    python = os.path.relpath(sys.executable)
    if python.startswith(".."):
        python = sys.executable
    if Path(sys.argv[0]).name != "algorithm.py":  # a notebook, for example
        return f"the same code with {argument}"
    key = argument.partition("=")[0]
    words = [word for word in sys.argv if not word.startswith(f"{key}=")]
    return shlex.join([python, *words, argument])
