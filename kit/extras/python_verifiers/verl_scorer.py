"""verl's scorer, `default_compute_score`, as a verifier.

For some data sources verl runs the response as a program, or evaluates it as Python.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kit.config.python_files import skip_package_init
from kit.data.ground_truths import is_empty
from kit.extras.python_verifiers import program_scores
from kit.extras.python_verifiers.ground_truths import make_error, read_expected_answers

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

# verl compares the answer with a text.
TEXT_SOURCES = (
    "openai/gsm8k",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "math",
    "math_dapo_reasoning",
    "hiyouga/geometry3k",
    *EVALUATED_SOURCES,
)
AIME_PREFIX = "aime"  # of further sources of this kind
SEARCH_PREFIX = "searchR1_"  # of sources whose ground truth is an object with `target`


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
    If the ground truth has several expected answers, the best score counts. Raises RuntimeError if
    the sandbox has no result for a test, ValueError if a row has no tests or no expected answer.
    """
    if data_source in PROGRAM_SOURCES:
        return score_program(
            data_source, solution_str, ground_truth, sandbox_fusion_url, memory_limit_mb
        )
    truths = [ground_truth]
    if data_source in TEXT_SOURCES or data_source.startswith(AIME_PREFIX):
        truths = read_expected_answers(ground_truth)
    elif data_source.startswith(SEARCH_PREFIX):
        check_targets(ground_truth)
    results = [call_verl(data_source, solution_str, truth, extra_info) for truth in truths]
    return max(results, key=read_score)


def score_program(
    data_source: str, completion: str, ground_truth: Any, url: str | None, memory_limit_mb: int
) -> Any:
    """Score a program in the sandbox at `url`, or on this machine if it is None."""
    tests = program_scores.read_tests(ground_truth)
    if url:
        return program_scores.score_in_sandbox(url, memory_limit_mb, completion, tests)
    if "inputs" not in tests:
        raise ValueError(
            "the tests of the row are assertions, which verl runs only in SandboxFusion. Set "
            "sandbox_fusion_url next to `function: verl`"
        )
    if program_scores.calls_function(tests):
        return program_scores.score_function(completion, tests)
    return call_verl(data_source, completion, tests, None)


def call_verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    """Call verl's default_compute_score. Raises NotImplementedError for an unknown data source."""
    reward_score = importlib.import_module("verl.utils.reward_score")
    try:
        return reward_score.default_compute_score(
            data_source, solution_str, ground_truth, extra_info
        )
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{error}. Name another verifier for these rows, such as "
            "templates/reward.py:compute_score"
        ) from None


def check_targets(ground_truth: Any) -> None:
    """Check the ground truth of Search-R1: an object with the answers `target`. Raises ValueError.

    verl reads it only after it has found an answer in the response.
    """
    targets = ground_truth.get("target") if isinstance(ground_truth, dict) else None
    members = targets if isinstance(targets, list) else [targets]
    are_texts = all(isinstance(member, str) and not is_empty(member) for member in members)
    if not members or not are_texts:
        raise make_error(ground_truth, "it is not an object whose `target` is a text, or several")


def read_score(result: Any) -> float:
    """Return the score in a result of verl: a number, or a dict with `score`."""
    return float(result["score"] if isinstance(result, dict) else result)
