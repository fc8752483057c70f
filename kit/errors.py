"""What the kit raises, and what becomes of it. The message of each names what failed, where, and the way out.

Some errors end a run: a recipe that cannot work (ConfigError, PluginError; before anything starts, but for a function
of one's own that fails at work), what a running one cannot go on without (RunError), a lost process, a signal or a
deadline (Stop). Some end a step: there is nothing to learn from it (SkippedStep), or its numbers are worthless
(DamagedStep). One that ends an episode is a GymError (gym_client.py): a status, and never a reward.
"""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A recipe that cannot run; the message names the key and the way out."""


class PluginError(ValueError):
    """A function of one's own that cannot be used, or failed; the message names its key, its file and what is wrong."""


class RunError(RuntimeError):
    """A run that must end; the message says what failed, where, and what to do."""


class SkippedStep(Exception):  # noqa: N818  (no error: the run goes on)
    """A step without anything to train on. The message is the reason."""


class DamagedStep(SkippedStep):
    """A step whose numbers are not finite, or whose sampler is far from the trainer. batch: of it, to be kept."""

    def __init__(self, reason: str, batch: Any):
        super().__init__(reason)
        self.batch = batch


class Stop(KeyboardInterrupt):
    """The run must end now. No Exception, so that no event loop, library or retry keeps it to itself.

    status: of the process; 130 or 143 where a signal asked for it, 1 where something is lost. save: whether the workers
    hold whole weights.
    """

    def __init__(self, message: str, status: int = 1, save: bool = False):
        super().__init__(message)
        self.status, self.save = status, save
