r"""Compare the kit's math verifier with Gym's math_with_judge server: rewards, and answers/s.

    python benchmarks/math_verifier.py [--answers 1000] [--seed 0] [--step 5120] [--processes N]

Both verify the same synthetic answers to GSM8K-like questions: right, wrong and adversarial. Any
difference of a reward is listed and makes the exit status 1. Then the kit's verifier gets a step of
5,120 answers. The time on 16 cores is an estimate. The CPU time of the verifier's processes is
divided among 15 cores, and the driver's own CPU time is on one core. The larger of both counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, which has a gym_client too

from gym_client import Gym, message_response  # noqa: E402
from kit.extras.python_verifiers import verifier_pool  # noqa: E402
from kit.gym.servers import running_servers  # noqa: E402
from kit.gym.verifiers import VerifierRouter  # noqa: E402

VERIFIER = "kit/extras/python_verifiers/math_answers.py:verify_math"
GYM_CONFIG = {"should_use_judge": False, "library_verifier_timeout_seconds": 30}
CORES = 16  # of the machine that the estimate is for
SENTENCES = (
    "She sells $16 - 3 - 4 = 9$ eggs every day.",
    "He pays \\$2.50 for each of the 12 boxes, so 12 * 2.5 = 30.",
    "The total is \\(3 \\times 14 = 42\\) meters.",
    "Half of 24 is 12, and 12 + 24 = 36.",
    "That is \\[\\frac{150}{3} = 50\\] percent of the price.",
    "First, find the number of hours: 7 days * 8 hours = 56 hours.",
)
# {v}: the value, right or wrong. {w}: a wrong one.
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
OTHERS = (
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
SLOW = (  # math-verify interrupts itself after 5 s
    "\\boxed{9^{9^{9}}}",
    "The answer is 9^9^9^9.",
    "\\boxed{3^{100000000}}",
    "\\boxed{(10^7)!}",
    "\\boxed{\\sum_{i=1}^{10^9} \\sin(i)}",
)


class Answer(NamedTuple):
    """A response of the policy, and the expected answer."""

    expected: str
    response: str


def make_answers(
    count: int, seed: int = 0, slow: int = 0, kinds: Sequence[str] = (*FORMS, *OTHERS)
) -> list[Answer]:
    """Make answers of each kind in turn, of which the last `slow` are slow to verify."""
    rng = random.Random(seed)
    answers = []
    for number in range(count - slow):
        value, wrong = rng.sample(range(1, 5000), 2)
        expected = rng.choice([f"{value}"] * 6 + [f"{value}.5", f"-{value}", f"${value}$"])
        kind = kinds[number % len(kinds)]
        if kind in FORMS:
            shown = expected.strip("$") if rng.random() < 0.6 else str(rng.choice([wrong, -value]))
            kind = kind.format(v=shown, w=wrong)
        reasoning = rng.choices(SENTENCES, k=rng.randrange(6))
        answers.append(Answer(expected, " ".join([*reasoning, kind])))
    for number in range(slow):
        answers.append(Answer("18", SLOW[number % len(SLOW)]))
    return answers


def make_row(answer: Answer) -> dict[str, Any]:
    """Make the row of an answer."""
    question = "How many?"
    params = {"input": [{"role": "user", "content": question}]}
    return {
        "responses_create_params": params,
        "question": question,
        "expected_answer": answer.expected,
    }


class TextTokenizer:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def make_router(folder: Path, processes: int) -> VerifierRouter:
    """Make a router with the kit's verifier. folder: of its logs."""
    base = OmegaConf.load(ROOT / "configs" / "base.yaml")
    base.env.verifier = VERIFIER
    base.env.verifier_pool.processes = processes
    return VerifierRouter(Gym({}), verifier_pool.make_pools(base, folder), TextTokenizer())


async def verify_with_kit(router: VerifierRouter, answers: Sequence[Answer]) -> list[float]:
    """Return the rewards of the kit's verifier. Raises GymError."""

    async def verify(answer: Answer) -> float:
        async with router.session("verify_math", make_row(answer)) as session:
            return (await session.verify({}, list(map(ord, answer.response)))).reward

    return await asyncio.gather(*map(verify, answers))


async def verify_with_gym(url: str, answers: Sequence[Answer], concurrency: int) -> list[float]:
    """Return the rewards of Gym's server. Raises GymError."""

    async def verify(gym: Gym, answer: Answer) -> float:
        async with gym.session("math_with_judge", make_row(answer)) as session:
            return (await session.verify(message_response(answer.response))).reward

    async with Gym({"math_with_judge": url}, concurrency=concurrency, timeout_s=120) as gym:
        return await asyncio.gather(*(verify(gym, answer) for answer in answers))


def list_differences(
    answers: Sequence[Answer], ours: Sequence[float], gyms: Sequence[float]
) -> list[str]:
    """Return a line for each answer whose rewards differ."""
    lines = []
    for answer, mine, other in zip(answers, ours, gyms, strict=True):
        if mine != other:
            lines.append(f"kit {mine:g}, Gym {other:g}: {answer!r:.300}")
    return lines


def cpu_seconds(router: VerifierRouter) -> float:
    """Return the CPU time of the verifier's processes so far."""
    (pool,) = router.pools.values()
    total = 0.0
    for worker in pool.workers:
        if worker.process:
            process = psutil.Process(worker.process.pid)
            for member in (process, *process.children(recursive=True)):
                total += sum(member.cpu_times()[:2])
    return total


async def measure_step(router: VerifierRouter, count: int) -> dict[str, float]:
    """Verify a step of ordinary answers with warm processes. The values are seconds."""
    await verify_with_kit(router, make_answers(256, seed=1, kinds=FORMS))
    answers = make_answers(count, seed=2, kinds=FORMS)
    before = resource.getrusage(resource.RUSAGE_SELF)
    cpu_before = cpu_seconds(router)
    begin = time.perf_counter()
    await verify_with_kit(router, answers)
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    driver = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    verifier = cpu_seconds(router) - cpu_before
    return {
        "step_wall_s": round(wall, 2),
        "step_driver_cpu_s": round(driver, 2),
        "step_verifier_cpu_s": round(verifier, 2),
        f"estimate_{CORES}_cores_s": round(max(driver, verifier / (CORES - 1)), 2),
    }


async def run_kit(
    folder: Path, answers: Sequence[Answer], args: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """Return the rewards of the kit's verifier, and the times of a step."""
    async with make_router(folder, args.processes) as router:
        return await verify_with_kit(router, answers), await measure_step(router, args.step)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, default=5120)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.chdir(ROOT)
    load = os.getloadavg()[0]
    answers = make_answers(args.answers, args.seed, slow=args.answers // 100)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, times = asyncio.run(run_kit(folder, answers, args))
        print(times, flush=True)
        python = str(ROOT / ".venv-gym" / "bin" / "python")
        servers = {"math_with_judge": {"start": {"python": python, "config": GYM_CONFIG}}}
        with running_servers(servers, folder) as urls:
            begin = time.perf_counter()
            url = urls["math_with_judge"]
            gyms = asyncio.run(verify_with_gym(url, answers, 2 * args.processes))
            gym_wall = time.perf_counter() - begin
    differences = list_differences(answers, ours, gyms)
    print("\n".join(differences))
    result = {
        "benchmark": "math_verifier",
        "date": time.strftime("%Y-%m-%d"),
        "answers": len(answers),
        "seed": args.seed,
        "right": int(sum(ours)),
        "differences": len(differences),
        "gym_answers_per_s": round(len(answers) / gym_wall, 1),
        "step": args.step,
        **times,
        "processes": args.processes,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps(result))
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
