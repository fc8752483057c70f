"""verl's scorer, `default_compute_score`, as a verifier.

For some data sources verl runs the response as a program, or evaluates it as Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kit.config.python_files import skip_package_init
from kit.extras.python_verifiers import program_scores

PROGRAM_SOURCES = ("codecontests", "apps", "codeforces", "taco")  # verl runs the response
# verl evaluates the response: math_equal in verl/utils/reward_score/prime_math/grader.py calls eval
# and sympy's parse_expr.
EVALUATED_SOURCES = (
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)


def runs_response(data_source: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether verl's scorer runs code of the policy in this process or a child of it.

    settings: of the verifier. With `sandbox_fusion_url`, programs run in that sandbox instead.
    """
    if data_source in EVALUATED_SOURCES:
        return True
    return data_source in PROGRAM_SOURCES and not settings.get("sandbox_fusion_url")


def load_verl_scorer() -> Callable[..., Any]:
    """Import verl's scorers and return `compute_score`.

    Does not run `import verl`, which imports torch and Ray: 10 s and 0.5 GB for each process.
    """
    skip_package_init("verl")
    skip_package_init("verl.utils")
    importlib.import_module("verl.utils.reward_score")
    return compute_score


def import_scorer(data_source: str) -> None:
    """Import the scorer of a data source that runs code. Call it before processes are forked.

    Otherwise the forked process of each call would import it. sympy alone takes seconds.
    """
    name = "prime_math" if data_source in EVALUATED_SOURCES else "prime_code"
    importlib.import_module(f"verl.utils.reward_score.{name}")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int = 1024,  # of each program, the default of verl's reward.sandbox_fusion
) -> Any:
    """Score a response as verl does, except that a program which raises earns nothing.

    The parameters have verl's names, and there are no others: a misspelled setting is an error.
    Raises RuntimeError if the sandbox has no result for a test, ValueError if a row has no tests.
    """
    if data_source in PROGRAM_SOURCES:
        if sandbox_fusion_url:
            return program_scores.score_in_sandbox(
                sandbox_fusion_url, memory_limit_mb, solution_str, ground_truth
            )
        tests = program_scores.read_tests(ground_truth)
        if program_scores.calls_function(tests):
            return program_scores.score_function(solution_str, tests)
    reward_score = importlib.import_module("verl.utils.reward_score")
    return reward_score.default_compute_score(data_source, solution_str, ground_truth, extra_info)
