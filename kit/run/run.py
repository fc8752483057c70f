"""A run of a command: its stages, its files and its log.

Protects: the folder of a run, which is locked and closed in order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from kit.data.fingerprint import Fingerprint
from kit.recipe.recipe import Recipe
from kit.run import checkpoints
from kit.run.console import Display
from kit.run.features import Features
from kit.run.run_files import RunFiles
from kit.run.run_log import RunLog
from kit.run.stages import Stages


class Run:
    """A run of a command. Use as `with Run(recipe) as run`.

    resume_from: the checkpoint to resume from. fingerprint: of the recipe and its rows.
    features: those that are on.
    """

    def __init__(
        self,
        recipe: Recipe,
        resume_from: Path | None = None,
        fingerprint: Fingerprint | None = None,
        features: Features = Features(),  # noqa: B008  (it never changes)
    ):
        self.recipe = recipe
        self.folder = Path("runs") / recipe.trainer.experiment_name
        self.features = features
        self.last = recipe.last_step
        done = checkpoints.step_of(resume_from) if resume_from else 0
        self.display = Display(recipe.command, self.last if recipe.trains else 0, done)
        self.stages = Stages(recipe.trainer.stage_timeout_s, self.folder / "logs", self.display)
        self.files = RunFiles(recipe, self.folder, self.stages, resume_from, features.outputs)
        self.files.fingerprint = fingerprint or Fingerprint()
        self.log = RunLog(self.files)

    def __enter__(self) -> Run:
        try:
            self.files.open()
            self.log.open()
            self.stages.install_handlers()
        except BaseException:
            self.files.close()
            raise
        self.display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stages.restore_handlers()
        self.display.stop()
        try:
            self.log.close(0 if kind is None else 1)
            self.files.write_report()
        finally:
            self.files.close()
        if kind is None and self.recipe.trains:
            self.log.print_findings()

    def end_at(self, step: int) -> None:
        """Set the number of the last step, which the learning-rate schedule does not follow."""
        self.last = step
        self.display.total = step
        self.display.set_progress(self.files.saved_step, step)

    def mark_complete(self) -> None:
        """Note that the last step is done: the model is exported after the processes have ended."""
        self.stages.is_complete = True

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time a stage, show it, and raise Stop if it hangs or the run must stop."""
        return self.stages.stage(name)

    def is_due(self, step: int, freq: int) -> bool:
        """Return whether `step` is the last step, or a multiple of a positive `freq`."""
        return step == self.last or (freq > 0 and step % freq == 0)
