r"""Compare the rewards and the speed of two math verifiers: the kit's, and Gym's math_with_judge.

    python benchmarks/math_verifier.py [--answers 1000] [--seed 0] [--step 5120] [--processes N]

Both verify the same synthetic responses to questions like those of GSM8K: right, wrong and
adversarial ones. Gym's server runs without a judge. The script lists each difference between the
rewards. If there is one, the exit status is 1.

Then the kit's verifier gets the responses of a step (--step). The time on a machine of 16 cores is
an estimate: the driver uses one core and the verifier's processes use 15. The estimate is the
larger one of the driver's CPU time and of a fifteenth of the processes' CPU time.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gym_client import Gym, message_response  # noqa: E402
from kit.config.load import load_config  # noqa: E402
from kit.config.recipe import freeze  # noqa: E402
from kit.data.episode import ParsedResponse  # noqa: E402
from kit.gym.python_verifiers.pool import make_pools  # noqa: E402
from kit.gym.python_verifiers.settings import read_verifiers  # noqa: E402
from kit.gym.servers import running_servers  # noqa: E402
from kit.gym.verifiers import VerifierRouter  # noqa: E402

VERIFIER = "extras/math_answers.py:verify_math"
GYM_CONFIG = {"should_use_judge": False, "library_verifier_timeout_seconds": 30}
CORES = 16  # of the machine in the estimate
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
SLOW = (  # answers that math-verify cannot evaluate in time: it stops after 5 s
    "\\boxed{9^{9^{9}}}",
    "The answer is 9^9^9^9.",
    "\\boxed{3^{100000000}}",
    "\\boxed{(10^7)!}",
    "\\boxed{\\sum_{i=1}^{10^9} \\sin(i)}",
)


class Sample(NamedTuple):
    """A response of the policy, and the expected answer."""

    expected: str
    response: str


def make_samples(
    count: int, seed: int = 0, slow: int = 0, kinds: Sequence[str] = (*FORMS, *OTHERS)
) -> list[Sample]:
    """Make `count` samples with answers of each kind in turn. The last `slow` ones are of SLOW."""
    rng = random.Random(seed)
    samples = []
    for number in range(count - slow):
        value, wrong = rng.sample(range(1, 5000), 2)
        expected = rng.choice([f"{value}"] * 6 + [f"{value}.5", f"-{value}", f"${value}$"])
        answer = kinds[number % len(kinds)]
        if answer in FORMS:
            is_right = rng.random() < 0.6
            shown = expected.strip("$") if is_right else str(rng.choice([wrong, -value]))
            answer = answer.format(v=shown, w=wrong)
        reasoning = rng.choices(SENTENCES, k=rng.randrange(6))
        samples.append(Sample(expected, " ".join([*reasoning, answer])))
    for number in range(slow):
        samples.append(Sample("18", SLOW[number % len(SLOW)]))
    return samples


def make_row(sample: Sample) -> dict[str, Any]:
    """Make the row of a sample."""
    question = "How many?"
    params = {"input": [{"role": "user", "content": question}]}
    return {
        "responses_create_params": params,
        "question": question,
        "expected_answer": sample.expected,
    }


def make_router(folder: Path, processes: int) -> VerifierRouter:
    """Make a router with the kit's verifier. folder: for its logs."""
    changes = [f"env.verifier={VERIFIER}", f"env.verifier_pool.processes={processes}"]
    recipe = freeze(*load_config([], changes))
    pools = make_pools(recipe, read_verifiers(recipe.verl).specs, folder)
    return VerifierRouter(Gym({}), pools)


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


def list_differences(
    samples: Sequence[Sample], kit_rewards: Sequence[float], gym_rewards: Sequence[float]
) -> list[str]:
    """Return a line for each sample whose rewards differ."""
    lines = []
    for sample, kit, gym in zip(samples, kit_rewards, gym_rewards, strict=True):
        if kit != gym:
            lines.append(f"kit {kit:g}, Gym {gym:g}: {sample!r:.300}")
    return lines


def cpu_seconds(router: VerifierRouter) -> float:
    """Return the CPU time that the verifier's processes have used so far."""
    (pool,) = router.pools.values()
    total = 0.0
    for worker in pool.workers:
        if worker.process:
            process = psutil.Process(worker.process.pid)
            for member in (process, *process.children(recursive=True)):
                total += sum(member.cpu_times()[:2])
    return total


async def measure_step(router: VerifierRouter, count: int) -> dict[str, float]:
    """Verify `count` responses of FORMS in processes that have started. Returns seconds."""
    await verify_with_kit(router, make_samples(256, seed=1, kinds=FORMS))
    samples = make_samples(count, seed=2, kinds=FORMS)
    before = resource.getrusage(resource.RUSAGE_SELF)
    cpu_before = cpu_seconds(router)
    begin = time.perf_counter()
    await verify_with_kit(router, samples)
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
    folder: Path, samples: Sequence[Sample], args: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """Return the rewards of the kit's verifier, and the times of a step."""
    async with make_router(folder, args.processes) as router:
        rewards = await verify_with_kit(router, samples)
        return rewards, await measure_step(router, args.step)


def run_gym(folder: Path, samples: Sequence[Sample], concurrency: int) -> tuple[list[float], float]:
    """Start Gym's server. Return its rewards, and the seconds for all samples."""
    python = str(ROOT / ".venv-gym" / "bin" / "python")
    servers = {"math_with_judge": {"start": {"python": python, "config": GYM_CONFIG}}}
    with running_servers(servers, folder) as urls:
        begin = time.perf_counter()
        rewards = asyncio.run(verify_with_gym(urls["math_with_judge"], samples, concurrency))
        return rewards, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=1000, help="responses to compare")
    parser.add_argument("--seed", type=int, default=0, help="of these responses")
    parser.add_argument("--step", type=int, default=5120, help="responses of the measured step")
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of the kit's verifier, by default one per core",
    )
    args = parser.parse_args()
    os.chdir(ROOT)
    load = os.getloadavg()[0]
    samples = make_samples(args.answers, args.seed, slow=args.answers // 100)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kit_rewards, times = asyncio.run(run_kit(folder, samples, args))
        print(times, flush=True)
        gym_rewards, gym_wall = run_gym(folder, samples, concurrency=2 * args.processes)
    differences = list_differences(samples, kit_rewards, gym_rewards)
    print("\n".join(differences))
    result = {
        "benchmark": "math_verifier",
        "date": time.strftime("%Y-%m-%d"),
        "answers": len(samples),
        "seed": args.seed,
        "right": int(sum(kit_rewards)),
        "differences": len(differences),
        "gym_answers_per_s": round(len(samples) / gym_wall, 1),
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
