"""verl's scorer, `default_compute_score`, as a verifier.

For some data sources verl runs the response as a program, or evaluates it as Python. An optional
feature scores these (extras/policy_programs/program_scores.py).

Protects: this machine from programs of the policy, and rewards of rows without a ground truth.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kit.data.ground_truths import is_empty, make_error, read_expected_answers

if TYPE_CHECKING:  # its packages would take each process a second to import
    from gym_client import Json

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
CODE_SOURCES = (*PROGRAM_SOURCES, *EVALUATED_SOURCES)
VerlScore: TypeAlias = "float | Json"  # a result of verl: a number, or an object with `score`

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


def runs_response(data_source: object, settings: Mapping[str, object]) -> bool:
    """Return whether verl's scorer runs code of the policy on this machine.

    settings: of the verifier. With `sandbox_fusion_url`, programs run in that sandbox instead.
    """
    if data_source in EVALUATED_SOURCES:
        return True
    return data_source in PROGRAM_SOURCES and not settings.get("sandbox_fusion_url")


def load_verl_scorer() -> Callable[..., object]:
    """Import verl's scorers and return `compute_score`.

    Does not run `import verl`, which imports torch and Ray: 10 s and 0.5 GB for each process. Both
    packages stay empty in this process.
    """
    for name in ("verl", "verl.utils"):
        spec = importlib.util.find_spec(name)
        sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    importlib.import_module("verl.utils.reward_score")
    return compute_score


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    sandbox_fusion_url: str | None = None,  # of programs, for score_code
    memory_limit_mb: int = 1024,  # of each program there, the default of verl's sandbox_fusion
) -> VerlScore:
    """Score a response, which is no program, as verl does.

    The parameters have verl's names, and there are no others: a misspelled setting is an error.
    If the ground truth has several expected answers, the best score counts. Raises ValueError if
    a row has no data source or no expected answer.
    """
    if not isinstance(data_source, str):
        raise ValueError(f"the row has data_source={data_source!r:.80}, by which verl scores it")
    truths: Sequence[object] = [ground_truth]
    if data_source in TEXT_SOURCES or data_source.startswith(AIME_PREFIX):
        truths = read_expected_answers(ground_truth)
    elif data_source.startswith(SEARCH_PREFIX):
        check_targets(ground_truth)
    results = [call_verl(data_source, solution_str, truth, extra_info) for truth in truths]
    return max(results, key=read_score)


def call_verl(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object
) -> VerlScore:
    """Call verl's default_compute_score. Raises NotImplementedError for an unknown data source."""
    reward_score = importlib.import_module("verl.utils.reward_score")
    return reward_score.default_compute_score(data_source, solution_str, ground_truth, extra_info)


def check_targets(ground_truth: object) -> None:
    """Check the ground truth of Search-R1: an object with the answers `target`. Raises ValueError.

    verl reads it only after it has found an answer in the response.
    """
    targets = ground_truth.get("target") if isinstance(ground_truth, dict) else None
    members = targets if isinstance(targets, list) else [targets]
    are_texts = all(isinstance(member, str) and not is_empty(member) for member in members)
    if not members or not are_texts:
        raise make_error(ground_truth, "it is not an object whose `target` is a text, or several")


def read_score(result: VerlScore) -> float:
    """Return the score in a result of verl: a number, or a dict with `score`."""
    return float(result["score"] if isinstance(result, dict) else result)
