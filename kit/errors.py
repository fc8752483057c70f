"""The kit's exceptions. Each message says what failed, where, and how to fix it.

These end a run:

- ConfigError: the recipe cannot work. Raised before anything starts.
- UserFunctionError: a custom function cannot be loaded, or it failed. Raised before anything
  starts, except if the function fails later, at work.
- RunError: a running run cannot continue.
- Stop: a signal, a timeout or a lost process.

These end a step:

- SkippedStep: there is nothing to train on.
- NonFiniteStep: the numbers of the step cannot be used.

An episode ends with a GymError (gym_client.py): a status, never a reward.

Protects: a failure is never silent, and a terminal from control characters of others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl import DataProto


# C0 without tab and newline, DEL, C1: a terminal executes them as commands (ECMA-48)
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def remove_control_characters(text: str) -> str:
    """Return a text without control characters, which is safe to print on a terminal.

    >>> remove_control_characters("red: \\x1b[31m, bell: \\x07")
    'red: [31m, bell: '
    """
    return CONTROL_CHARACTERS.sub("", text)


def find_first_difference(some: Sequence[object], others: Sequence[object]) -> int:
    """Find the first index at which two lists of ids, or two texts, differ."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))


class QuotingError(Exception):
    """An error whose message may quote a server. It has no control characters for a terminal."""

    def __init__(self, message: object = ""):
        super().__init__(remove_control_characters(str(message)))


class ConfigError(QuotingError, ValueError):
    """A recipe that cannot run. The message names the key and the fix."""


class UserFunctionError(QuotingError, ValueError):
    """A custom function that cannot be used. The message names the key, the file and the reason."""


class RunError(QuotingError, RuntimeError):
    """A run that must end. The message says what failed, where, and what to do."""


class SkippedStep(Exception):  # noqa: N818  (not an error: the run continues)
    """A step without anything to train on. The message is the reason."""

    outcome = "skipped"  # for the console


class NonFiniteStep(SkippedStep):
    """A step with NaN or infinite numbers.

    batch: the step's batch, which the run saves for inspection. is_updated: whether the workers
    have already trained on it. Old log-probs that the update computes are known only then.
    """

    def __init__(self, reason: str, batch: DataProto, is_updated: bool = False):
        super().__init__(reason)
        self.batch = batch
        if is_updated:
            self.outcome = (
                "was trained on NaN or infinity (verl leaves out mini-batches whose gradient is "
                "not finite, and the others changed the weights)"
            )


class Stop(KeyboardInterrupt):
    """The run must end now. Not an Exception, so no event loop, library or retry can catch it.

    status: the exit status: 130 or 143 for a signal, 1 for a loss or a timeout.
    save: whether the workers hold complete weights, so that the run can save them.
    """

    def __init__(self, message: str, status: int = 1, save: bool = False):
        super().__init__(message)
        self.status = status
        self.save = save
