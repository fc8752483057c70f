"""The files of a run in runs/<trainer.experiment_name>, and the locks of its folders.

docs/reference.md explains every file.

Protects: the files of a run, from a full disk, a killed process and a second run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError

from env import Task
from kit.data import json_lines
from kit.data.episode import Episode
from kit.data.fingerprint import Fingerprint
from kit.data.rollout_files import to_record, write_record
from kit.errors import RunError
from kit.recipe.recipe import Recipe
from kit.recipe.redaction import write_yaml
from kit.run import checkpoints, files, identity, isolation
from kit.run.console import say
from kit.run.features import RunOutput
from kit.run.stages import Stages

if TYPE_CHECKING:  # verl takes 7 s to import
    from tensordict import TensorDict
    from verl import DataProto

    from training import Workers

MAX_NONFINITE_STEPS = 3  # in a row; then the run ends
REPORT_SHARE = 20  # report.html takes at most 1/20 of the time


class RunFiles:
    """Writes what a run leaves: checkpoints, rollouts, advantages, the export and report.html.

    checkpoint: the last one; at first the one that the run resumes from.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        stages: Stages,
        checkpoint: Path | None,
        outputs: Sequence[RunOutput] = (),
    ):
        self.recipe = recipe
        self.folder = folder
        self.stages = stages
        self.checkpoint = checkpoint
        self.outputs = outputs
        self.fingerprint = Fingerprint()
        self.report_written_at = 0.0
        self.report_seconds = 0.0  # to write the last report.html
        self.findings: list[str] = []  # lines of the last report: its first problem
        self.nonfinite_steps = 0  # in a row
        self.exits = contextlib.ExitStack()  # undoes what the run changed in this process

    @property
    def functions(self) -> str:
        """Return the digest of the functions that generate training rows, "" without one."""
        return self.fingerprint.contents.get("env.train_files", "")

    # --- folders and the environment ---

    @property
    def saved_step(self) -> int:
        """Return the step of the last checkpoint, 0 if there is none."""
        return checkpoints.step_of(self.checkpoint) if self.checkpoint else 0

    def open(self) -> None:
        """Lock the folder and prepare it for this run. Raises RunError."""
        recipe = self.recipe
        with files.explain_write_errors(self.folder):
            for name in ("rollouts", "logs"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.exits.callback(files.lock_folder(self.folder).release)
        checkpoint_folder = Path(recipe.trainer.default_local_dir)
        is_inside = checkpoint_folder.absolute().is_relative_to(self.folder.absolute())
        if recipe.trains and not is_inside:
            with files.explain_write_errors(checkpoint_folder):
                checkpoint_folder.mkdir(parents=True, exist_ok=True)
            self.exits.callback(files.lock_folder(checkpoint_folder).release)
        with files.explain_write_errors(self.folder):
            for path in sorted(self.folder.glob("*.jsonl")):
                if json_lines.drop_incomplete_line(path):
                    say(f"Removed the incomplete last line of {path}. All other lines stay.")
        name = "config" if recipe.trains else recipe.command
        if recipe.trains and self.checkpoint:
            self.note_changes()
        with files.replace_atomically(self.folder / f"{name}.yaml") as partial:
            partial.write_text(write_yaml(recipe.redacted()))
        path = self.folder / f"{name}.fingerprint.json"
        identity.write_fingerprint(path, self.fingerprint)
        if recipe.trains:
            for note in checkpoints.set_aside(checkpoint_folder, self.saved_step):
                say(note)

    def note_changes(self) -> None:
        """Write to changes.jsonl what this run changes in the one that it resumes, if anything."""
        before = identity.read_run(self.folder)
        changes = checkpoints.list_changes(before, self.fingerprint)
        texts = [*changes.values(), *self.fingerprint.list_row_changes(before)]
        if texts and before.values and self.fingerprint.values:
            with files.append_or_restore(self.folder / "changes.jsonl") as out:
                line = {"after_step": self.saved_step, "changes": texts}
                out.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Undo what the run changed in this process, and unlock its folders."""
        self.exits.close()

    def set_env(self, **variables: str | Path) -> None:
        """Set environment variables that are not set, until the run ends."""
        new = {name: str(value) for name, value in variables.items() if name not in os.environ}
        self.exits.enter_context(isolation.change_environment(new))

    # --- checkpoints and the export ---

    def save(self, workers: Workers, state: checkpoints.LoopState) -> Path | None:
        """Save the weights unless they are saved or not finite. Return the last checkpoint."""
        if state.step <= self.saved_step:
            return self.checkpoint
        from kit.run import finite_check  # imports torch, for which a refused recipe need not wait

        with self.stages.stage("save_checkpoint"):
            nonfinite = finite_check.find_nonfinite_weights(workers)
            if nonfinite:
                names = ", ".join(nonfinite[:3])
                say(
                    f"Not saved: NaN or infinity in {names} ({len(nonfinite)} tensors). "
                    'See docs/troubleshooting.md, "Learning".'
                )
            else:
                folder = Path(self.recipe.trainer.default_local_dir)
                self.checkpoint = checkpoints.save(workers, folder, state, self.recipe)
        return self.checkpoint

    def export(self) -> None:
        """Write the last checkpoint's policy to export/, as a Hugging Face folder.

        verl's output goes to logs/export.log. Raises RunError if nothing was ever saved.
        """
        if self.checkpoint is None:
            raise RunError(
                "No step was completed, so there is nothing to export. See "
                f"{self.folder}/rollouts and {self.folder}/nonfinite for the reason."
            )
        from kit.run.export import export

        self.stages.end_shutdown()
        target = self.folder / "export"
        log = self.folder / "logs" / "export.log"
        with (
            self.stages.stage("export"),
            files.explain_write_errors(target),
            log.open("w") as out,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            try:
                export(self.checkpoint, target)
            except SafetensorError as error:  # also for a full disk
                raise RunError(
                    f"{target} cannot be written: {error}. Free space there, then rerun the same "
                    "command"
                ) from error
        with self.explain_failure("The export is complete, but has no card", log):
            for output in self.outputs:
                output.write_export(self.recipe, self.folder)

    @contextlib.contextmanager
    def explain_failure(self, message: str, log: Path) -> Iterator[None]:
        """Print an error of the block, which does not end the run. Its traceback is in the log."""
        try:
            yield
        except Exception as error:
            say(f"{message} ({error!r:.200}). See {log}")
            with contextlib.suppress(OSError), log.open("a") as out:  # the disk may be full
                out.write(traceback.format_exc())

    # --- episodes and batches ---

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
        with (
            self.open_rollouts(name, appends=bool(before)) as out,
            files.append_or_restore(self.folder / "failures.jsonl") as failures,
        ):
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

    def write_advantages(self, step: int, episodes: Sequence[Episode], batch: TensorDict) -> None:
        """Write advantages/step_N.npz: the advantages of the sampled tokens of each episode.

        If all tokens of an episode have the same advantage, it is written once. batch: has
        advantages and turn, each [B, R]. Of an episode of several rows, the main row is written.
        """
        main = np.cumsum([len(episode.rows) for episode in episodes]) - 1
        rows = []
        for advantages, turn in zip(batch["advantages"][main], batch["turn"][main], strict=True):
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

    def keep_nonfinite(self, step: int, reason: str, batch: DataProto) -> str:
        """Save the batch of a non-finite step to nonfinite/, and return a message.

        Raises RunError at the last of MAX_NONFINITE_STEPS such steps in a row. If the optimizer has
        applied the step, the first one raises it.
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
        limit = MAX_NONFINITE_STEPS if self.recipe.engine.is_fsdp else 1
        if self.nonfinite_steps == limit:
            raise RunError(
                f"{self.nonfinite_steps} non-finite steps in a row, the last: {reason}. Their "
                f"batches are in {path.parent}. Resume from the last checkpoint with a lower "
                "actor_rollout_ref.actor.optim.lr and "
                "actor_rollout_ref.actor.checkpoint.load_contents=[model]. "
                'See docs/guides/diagnosis.md, "8. Gradient norm and clipping".'
            )
        return f"{reason}; the batch is in {path}"

    # --- report.html ---

    def report_if_due(self) -> None:
        """Write report.html, unless it would take more than 1/REPORT_SHARE of the time."""
        if time.monotonic() > self.report_written_at + REPORT_SHARE * self.report_seconds:
            with self.stages.stage("report"):
                self.write_report()

    def write_report(self) -> None:
        """Write report.html about the run so far. An error is printed and does not end the run."""
        has_metrics = (self.folder / "metrics.jsonl").is_file()
        if not has_metrics and not any((self.folder / "rollouts").iterdir()):
            return
        begin = time.monotonic()
        log = self.folder / "logs" / "report.log"
        with self.explain_failure("report.html was not written", log):
            reports = [output.write_report(self.folder) for output in self.outputs]
            self.findings = list(itertools.chain.from_iterable(reports))
            self.report_written_at = time.monotonic()
            self.report_seconds = time.monotonic() - begin
