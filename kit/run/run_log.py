"""The log of a run: metrics.jsonl, the trackers of the recipe, and lines on the console.

Convenience: what a run measures, in a file, in trackers and on the console.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from env import Json
from kit.data import json_lines
from kit.data.episode import Episode
from kit.data.metrics import describe_score
from kit.errors import RunError
from kit.run import files
from kit.run.console import print_examples, say, step_values
from kit.run.run_files import RunFiles

if TYPE_CHECKING:  # verl takes 7 s to import
    from verl.utils.tracking import Tracking, ValidationGenerationsLogger


FILE = "file"  # verl's tracker that writes a file


class Trackers(NamedTuple):
    """The trackers of a run, which verl opens."""

    names: list[str]
    metrics: Tracking
    responses: ValidationGenerationsLogger


class RunLog:
    """Writes the metrics of a run to metrics.jsonl, to its trackers and to the console."""

    def __init__(self, run_files: RunFiles):
        self.recipe = run_files.recipe
        self.folder = run_files.folder
        self.files = run_files
        self.stages = run_files.stages
        self.last: int = self.recipe.last_step  # the number of the last step
        self.trackers: Trackers | None = None
        self.tracking: Path | None = None  # the file of the tracker `file`
        # functions that measure something for every line of metrics.jsonl
        self.gauges: list[Callable[[], Mapping[str, float]]] = []
        # functions that get every line of metrics.jsonl
        self.readers: list[Callable[[int, Mapping[str, float]], None]] = []

    # --- trackers ---

    def open(self) -> None:
        """Open the recipe's trackers (trainer.logger), if there are any. Raises RunError."""
        tensorboard = self.folder / f"tensorboard{self.suffix}"
        self.files.set_env(TENSORBOARD_DIR=tensorboard, WANDB_DIR=self.folder)
        names = self.recipe.get("trainer.logger") or []
        if FILE in names:  # verl's own would empty the file of a run that resumes
            path = self.folder / f"tracking{self.suffix}.jsonl"
            self.tracking = Path(os.environ.get("VERL_FILE_LOGGER_PATH", path))
        names = [name for name in names if name != FILE]
        if names:
            self.trackers = self.open_trackers(names)

    @property
    def suffix(self) -> str:
        """Return the end of the names of a command's own files: others share the folder."""
        return "" if self.recipe.trains else f"_{self.recipe.command}"

    def open_trackers(self, names: list[str]) -> Trackers:
        """Open verl's trackers, with an id that a resumed run uses again. Raises RunError."""
        path = self.folder / f"tracker_id{self.suffix}"
        if self.files.checkpoint is None or not path.is_file():
            with files.replace_atomically(path) as partial:
                partial.write_text(uuid.uuid4().hex[:12])
        self.files.set_env(WANDB_RUN_ID=path.read_text(), WANDB_RESUME="allow")
        self.files.set_env(SWANLAB_RUN_ID=path.read_text(), SWANLAB_RESUME="allow")
        # takes 10 s, so only runs with a tracker import it
        from verl.utils.tracking import Tracking, ValidationGenerationsLogger

        project = self.recipe.trainer.project_name
        name = self.recipe.trainer.experiment_name
        responses = ValidationGenerationsLogger(project, name)
        recipe = self.recipe.redacted()
        try:
            return Trackers(names, Tracking(project, name, names, recipe), responses)
        except Exception as error:  # each tracker has its own classes, for example for a wrong key
            reason = " ".join(str(error).split()) or repr(error)
            raise RunError(
                f"trainer.logger={names}: a tracker did not start: {reason} Correct its "
                "settings or its network, choose its offline mode, or remove it."
            ) from error

    def close(self, status: int) -> None:
        """Close the trackers. If one cannot write, print that and continue.

        metrics.jsonl has the numbers, too.
        """
        if not self.trackers:
            return
        try:
            self.trackers.metrics.finish(exit_code=status)
            # TensorBoard's, which verl leaves open
            writer = getattr(self.trackers.responses, "writer", None)
            if writer:
                writer.close()
        except OSError as error:
            say(files.describe_write_error(f"a tracker of {self.folder}", error))

    # --- metrics ---

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append to metrics.jsonl and pass the line to the trackers.

        Another file gets it, too, if trainer.logger has `file`.
        """
        if not metrics:
            return
        values = {name: float(value) for name, value in metrics.items()}
        for gauge in self.gauges:
            values |= {name: float(value) for name, value in gauge().items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line: Json = {"step": step, "time": time.time()}
        if not self.recipe.trains:
            line["command"] = self.recipe.command  # another run may train in the same folder
        with files.append_or_restore(self.folder / "metrics.jsonl") as out:
            out.write(json.dumps(line | finite).encode() + b"\n")
        if self.tracking:  # in the form of verl's tracker
            with files.append_or_restore(self.tracking) as out:
                out.write(json.dumps({"step": step, "data": finite}).encode() + b"\n")
        for reader in self.readers:
            reader(step, values)
        if self.trackers:
            with files.explain_write_errors(self.folder):
                self.trackers.metrics.log(data=values, step=step)

    def write_evaluation(
        self, step: int, scores: Mapping[str, float], episodes: Sequence[Episode]
    ) -> None:
        """Print the scores of an evaluation. Log its first responses to trackers with tables.

        The number of these responses is trainer.log_val_generations.
        """
        text = ", ".join(f"{name} {describe_score(name, scores)}" for name in select_scores(scores))
        result = text or "no score, because every episode failed"
        say(f"held-out rows, step {step}/{self.last}: {result}")
        count = self.recipe.trainer.log_val_generations
        if self.trackers and count > 0:
            rows = [[e.question, e.transcript, e.reward] for e in episodes[:count]]
            self.trackers.responses.log(self.trackers.names, rows, step)

    # --- console ---

    def print_step(
        self, step: int, metrics: Mapping[str, float], episodes: Sequence[Episode]
    ) -> None:
        """Print a step's line, and its best and worst episode every print_samples_every steps."""
        has_kl = self.recipe.algorithm.use_kl_in_reward
        is_shaped = bool(self.recipe.env.reward or has_kl or self.recipe.has_reward_model)
        self.stages.display.print_step(step, step_values(metrics, is_shaped), self.stages.timing)
        interval = self.recipe.trainer.print_samples_every
        if episodes and interval > 0 and step % interval == 0:
            print_examples(episodes, 1)

    def print_result(self, scores: Mapping[str, float]) -> None:
        """Print the scores of the first and the last evaluation."""
        minutes = (time.monotonic() - self.stages.started_at) / 60
        say(f"\nFinished in {minutes:.1f} min. The run is in {self.folder}/")
        first = self.read_first_scores()
        names = select_scores(scores)
        for name in names:
            before = describe_score(name, first) if name in first else "not measured"
            steps = f"(step {first['step']} -> {self.last})"
            say(f"    {name}: {before} -> {describe_score(name, scores)} {steps}")
        if names:
            say("    In brackets: 95% intervals over other rows. Another seed can differ by more.")
        say(f"    checkpoint {self.files.checkpoint}, Hugging Face folder {self.folder}/export")

    def print_findings(self) -> None:
        """Print the first problem that the report of the run found, and where the report is."""
        for line in self.files.findings:
            say(line)
        if (self.folder / "report.html").is_file():
            say(f"Report: {self.folder}/report.html")

    def read_first_scores(self) -> Json:
        """Return the metrics of the first evaluation, of this run or of one that it resumes."""
        for metrics in json_lines.read_metrics(self.folder / "metrics.jsonl"):
            if any(name.startswith("val-core/") for name in metrics):
                return metrics
        return {"step": 0}


def select_scores(scores: Mapping[str, float]) -> list[str]:
    """List the scores to print. pass@1 is left out, because it is the same as mean@n of acc."""
    names = [name for name in scores if name.startswith("val-core/")]
    return [name for name in names if not name.endswith("pass@1")]
