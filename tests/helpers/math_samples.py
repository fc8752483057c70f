r"""Synthetic responses to questions like those of GSM8K: right, wrong and adversarial ones.

The kit's math verifier must give them the rewards of Gym's math_with_judge.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from gym_client import Gym, message_response
from kit.chat.parsed_response import ParsedResponse
from kit.verify.verifiers import VerifierRouter

SENTENCES = (  # of the reasoning before an answer
    "She sells $16 - 3 - 4 = 9$ eggs every day.",
    "He pays \\$2.50 for each of the 12 boxes, so 12 * 2.5 = 30.",
    "The total is \\(3 \\times 14 = 42\\) meters.",
    "Half of 24 is 12, and 12 + 24 = 36.",
    "That is \\[\\frac{150}{3} = 50\\] percent of the price.",
    "First, find the number of hours: 7 days * 8 hours = 56 hours.",
)
# Answers. {v} is the expected value or a wrong one, {w} a wrong one.
FORMS = (
    "\\boxed{{{v}}}",
    "The final answer is \\boxed{{{v}}}.",
    "$\\boxed{{{v}}}$",
    "\\[ \\boxed{{{v}}} \\]",
    "\\boxed{{\\${v}}}",
    "\\boxed{{{v} \\text{{ dollars}}}}",
    "\\boxed{{{v}\\%}}",
    "\\boxed{{x = {v}}}",
    "\\boxed{{{v}.00}}",
    "\\boxed{{\\frac{{{v}}}{{1}}}}",
    "\\boxed{{{v} + 0}}",
    "\\boxed{{{v},000}}",
    "\\boxed{{{v}e0}}",
    "\\boxed{{0{v}}}",
    "\\boxed{{-{v}}}",
    "\\boxed{{{{{v}}}}}",
    "\\boxed{{({v})}}",
    "\\boxed{{\\text{{{v}}}}}",
    "\\boxed{{{v}, {w}}}",
    "\\boxed{{{v} \\text{{ or }} {w}}}",
    "\\boxed{{\\{{{v}, {w}\\}}}}",
    "\\boxed{{[{w}, {v}]}}",
    "\\boxed{{{w}}} and not \\boxed{{{v}}}",
    "\\boxed{{{v}}} or else \\boxed{{{w}}}",
    "\\boxed{{{v}",
    "\\boxed {{{v}}}",
    "\\fbox{{{v}}}",
    "#### {v}",
    "The answer is {v}.",
    "The answer is {v} dollars, not {w}.",
    "Answer: **{v}**",
    "Therefore, {v}",
    "it is $ {v} $ in total",
    "So she has \\${v} left.",
    "{w} = {v}",
    "{v}",
)
OTHERS = (  # adversarial answers, and responses without an answer
    "",
    " ",
    "I do not know.",
    "\\boxed{}",
    "\\boxed{\\text{none}}",
    "\\boxed{eighteen}",
    "\\boxed{\\infty}",
    "\\boxed{\\frac{1}{0}}",
    "\\boxed{x}",
    "\\boxed{\\emptyset}",
    "\\boxed{\\boxed{\\boxed{",
    "\\boxed{__import__('os').getpid()}",
    "\\boxed{exec(bytes((49,)))}",
    "The answer is ().__class__.__mro__",
    "\\boxed{\\mathbb{R}}",
    "\\boxed{(-\\infty, \\infty)}",
    "\\boxed{\\pm 18}",
    "\\boxed{\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}}",
    "\\boxed{\\lim_{x \\to 0} \\frac{1}{x}}",
    "\\boxed{" + "9" * 3000 + "}",
    "\\boxed{" + "(" * 80 + "1" + ")" * 80 + "}",
    "$" * 1000,
    "\\boxed{" * 200,
    "\u0661\u0668 \u2212 \uff11\uff18 \x00 \ud7ff",
    "<|im_end|>\\boxed{1}<|im_start|>",
    "\\boxed{1} " * 100,
)
SLOW = "\\boxed{9^{9^{9}}}"  # math-verify interrupts itself after 5 s


class Sample(NamedTuple):
    """A response of the policy, and the expected answer."""

    expected: str
    response: str


def make_samples() -> list[Sample]:
    """Make a sample for each kind of answer, and one that math-verify interrupts."""
    rng = random.Random(0)
    samples = []
    for answer in (*FORMS, *OTHERS):
        value, wrong = rng.sample(range(1, 5000), 2)
        expected = rng.choice([f"{value}"] * 6 + [f"{value}.5", f"-{value}", f"${value}$"])
        if answer in FORMS:
            is_right = rng.random() < 0.6
            shown = expected.strip("$") if is_right else str(rng.choice([wrong, -value]))
            answer = answer.format(v=shown, w=wrong)
        reasoning = rng.choices(SENTENCES, k=rng.randrange(6))
        samples.append(Sample(expected, " ".join([*reasoning, answer])))
    return [*samples, Sample("18", SLOW)]


def make_row(sample: Sample) -> dict[str, Any]:
    """Make the row of a sample."""
    params = {"input": [{"role": "user", "content": "How many?"}]}
    return {
        "responses_create_params": params,
        "question": "How many?",
        "expected_answer": sample.expected,
    }


async def verify_with_kit(router: VerifierRouter, samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of the kit's verifier. Raises GymError."""

    async def verify(sample: Sample) -> float:
        async with router.session("verify_math", make_row(sample)) as session:
            return (await session.verify({}, ParsedResponse.of_text(sample.response))).reward

    return await asyncio.gather(*map(verify, samples))


async def verify_with_gym(url: str, samples: Sequence[Sample], concurrency: int) -> list[float]:
    """Return the rewards of Gym's server. Raises GymError."""

    async def verify(gym: Gym, sample: Sample) -> float:
        async with gym.session("math_with_judge", make_row(sample)) as session:
            return (await session.verify(message_response(sample.response))).reward

    async with Gym({"math_with_judge": url}, concurrency=concurrency, timeout_s=120) as gym:
        return await asyncio.gather(*(verify(gym, sample) for sample in samples))
