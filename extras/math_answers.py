r"""Verify mathematical answers with math-verify, with the rewards of Gym's math_with_judge server.

    env:
      verifier: extras/math_answers.py:verify_math

The expected answer is in the row's ground truth (kit/data/ground_truths.py). The answer is an
expression in the response, whose last `\boxed{}` must not be empty. The reward is 1 if both are
equal, otherwise 0, as from Gym's server (0.7.0) with `should_use_judge: false`. That server reads
`expected_answer` only, as text: a row without it is an error there, too, but an empty text or a
worked solution is an answer that no response has. It forks a process for each answer, which takes
70 to 80 ms of a core. Here one process verifies many answers, and takes 6 to 8 ms each
(tests/helpers/math_samples.py, whose answers are partly adversarial).

A response cannot run code: math-verify evaluates only its digits and operators as Python, and reads
the rest with a grammar. math-verify interrupts itself by signals after 2 or 5 s, at any point of
sympy. A process in which that may have happened is replaced. So is one that gives no answer within
TIME_LIMIT_S. The reward is 0 then, as in Gym, because only an unusual response takes that long.
"""

from __future__ import annotations

import logging
import multiprocessing
import re
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

from math_verify.errors import TimeoutException
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

from kit.data.ground_truths import find_last_box, make_error, read_expected_answers

TIME_LIMIT_S = 20.0  # below env.verifier_pool.timeout_s, after which the episode fails
SLOW_S = 1.9  # math-verify may have interrupted itself: its shortest limit is 2 s
DELIMITERS = (("\\(", "\\)"), ("$", "$"))  # that Gym's server removes from an expected answer
WORD = r"(?<!\\)\b[^\W\d_]{2,}\b"  # not a command of LaTeX
TEXT_COMMAND = r"\\(?:text|textbf|mbox|mathrm)\{[^{}]*\}"
MAX_WORDS = 10  # of an expected answer. More of them are sentences, which no boxed answer equals.

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
FORK = multiprocessing.get_context("fork")
GOLD = (LatexExtractionConfig(),)
compare = math_metric(
    gold_extraction_target=GOLD,
    pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
)
compare(["\\boxed{1}"], ["\\boxed{1}"])  # fills caches, which each forked process inherits


class Verdict(NamedTuple):
    """The result of one comparison."""

    reward: float | None  # None: an expected answer cannot be read
    is_reliable: bool  # False: replace the process


class MathProcess:
    """A forked process that compares answers. It is started when it is needed."""

    def __init__(self) -> None:
        self.process: ForkProcess | None = None
        self.connection: Connection | None = None

    def compare(self, golds: Sequence[str], response: str) -> Verdict:
        """Compare a response with expected answers. Raises RuntimeError if the process ends."""
        if self.process is None:
            self.start()
        assert self.process and self.connection
        verdict = Verdict(0.0, is_reliable=False)
        try:
            self.connection.send((golds, response))
            if self.connection.poll(TIME_LIMIT_S):
                verdict = Verdict(*self.connection.recv())
        except (EOFError, OSError):
            self.process.join()
            status = self.process.exitcode
            raise RuntimeError(f"math-verify's process ended with status {status}") from None
        finally:
            if not verdict.is_reliable:
                self.close()
        return verdict

    def start(self) -> None:
        """Fork the process."""
        self.connection, other_end = FORK.Pipe()
        arguments = (other_end, self.connection)
        self.process = FORK.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        other_end.close()

    def close(self) -> None:
        """Kill the process."""
        assert self.process and self.connection
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process = None


def serve(connection: Connection, other_end: Connection) -> None:
    """Compare answers until the other end is closed. Runs in the forked process."""
    other_end.close()
    while True:
        try:
            golds, response = connection.recv()
        except EOFError:
            return
        connection.send(tuple(compare_once(golds, response)))


def compare_once(golds: Sequence[str], response: str) -> Verdict:
    """Compare a response with expected answers. The reward of an error is 0, as in Gym."""
    begin = time.monotonic()
    try:
        reward = float(compare(golds, [response])[0])
    except (Exception, TimeoutException):  # TimeoutException is no Exception
        is_readable = all(parse(gold, GOLD) for gold in golds)
        return Verdict(0.0 if is_readable else None, is_reliable=False)
    return Verdict(reward, is_reliable=time.monotonic() - begin < SLOW_S)


def verify_math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> dict[str, float]:
    """Return the score 1 for a response with an expected answer, otherwise 0.

    Raises ValueError if an expected answer cannot be read, RuntimeError if the process ends.
    """
    golds = [make_gold(answer) for answer in read_expected_answers(ground_truth)]
    # Without a boxed answer, the empty response is compared: the expected answers must be readable.
    response = solution_str if has_boxed_answer(solution_str) else ""
    verdict = math_process.compare(golds, response)
    # If the comparison was interrupted: was it the response, or the expected answer?
    gold_verdict = verdict if verdict.is_reliable else math_process.compare(golds, "")
    if verdict.reward is None or not gold_verdict.is_reliable:
        raise make_error(ground_truth, "math-verify does not find an expression in it in time")
    return {"score": verdict.reward, "interrupted": float(not verdict.is_reliable)}


def make_gold(answer: str) -> str:
    """Return an expected answer in the form that math-verify reads. Raises ValueError."""
    words = re.findall(WORD, re.sub(TEXT_COMMAND, "", answer))
    if len(words) > MAX_WORDS:
        reason = f"it has {len(words)} words, but no answer in \\boxed{{}} or after ####"
        raise make_error(answer, reason)
    return "\\boxed{" + strip_delimiters(answer) + "}"


def has_boxed_answer(response: str) -> bool:
    r"""Return whether the last `\boxed{` of a response is closed, and has content."""
    return bool(find_last_box(response).strip())


def strip_delimiters(answer: str) -> str:
    r"""Remove `\(...\)` and `$...$` around an expected answer, as Gym's server does."""
    answer = answer.strip()
    for begin, end in DELIMITERS:
        if answer.startswith(begin) and answer.endswith(end) and len(answer) > 1:
            answer = answer[len(begin) : -len(end)].strip()
    return answer


math_process = MathProcess()
