"""Score programs with verl's scorers, so that a program which ends early earns nothing.

verl 0.9.1 calls a function in a sandbox and ignores its exception: where "" or no output is
expected, that test passes (https://github.com/verl-project/verl/pull/7853). So does a program that
calls sys.exit before its assertions. If a function fails on this machine, verl runs the program
once more without calling it, and compares what it prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import secrets
from collections.abc import Callable

from extras.policy_programs.isolation import run_isolated
from kit.data.ground_truths import Json
from kit.verify.python_verifiers.calls import score
from kit.verify.python_verifiers.verl_scorer import (
    PROGRAM_SOURCES,
    VerlScore,
    call_verl,
    runs_response,
)

MAX_SCORED_TESTS = 10  # as in verl
TEST_LISTS = ("inputs", "outputs", "assert_case")  # an entry for each test
TEST_TIMEOUT_S = 5  # for all tests on this machine, as in verl
# Results of a test that verl 0.9.1 reports. Any other result is a failure of the sandbox.
PROGRAM_RESULTS = (
    "success",
    "wrong_answer",
    "runtime_error",
    "timeout",
    "compile_error",
    "compile_timeout",
    "compile_error_skipped",
    "Invalid completion (missing code block)",
)
# verl adds this to the program, and calls it instead of the row's function.
MARKED_CALL = """
def {name}_with_mark(*arguments):
    function = globals().get("{name}") or getattr(Solution(), "{name}")
    result = function(*arguments)
    {write_mark}
    return result
"""


def score_code(
    verifier: functools.partial[object],
    runner: asyncio.Runner,
    arguments: Json,
    memory: int,
) -> Json:
    """Score a response that is code, in the process of a verifier. Raises VerifierError.

    verifier: verl's scorer with its settings. arguments: of its call. memory: bytes.
    """
    data_source = arguments["data_source"]
    settings = verifier.keywords
    name = "prime_math"
    scorer: Callable[..., object] = verifier
    if data_source in PROGRAM_SOURCES:
        name = "prime_code"
        scorer = functools.partial(score_program, **settings)
    call = functools.partial(score, scorer, runner, arguments)
    if not runs_response(data_source, settings):
        return call()
    # Otherwise the forked process of each call would import it. sympy alone takes seconds.
    importlib.import_module(f"verl.utils.reward_score.{name}")
    return run_isolated(call, memory)


def score_program(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int = 1024,
) -> VerlScore:
    """Score a program as verl does, except that a program which raises earns nothing.

    The parameters are those of verl_scorer.compute_score. Without a URL, the program runs on this
    machine. Raises RuntimeError if the sandbox has no result for a test, ValueError if a row has
    no tests.
    """
    tests = read_tests(ground_truth)
    if sandbox_fusion_url:
        return score_in_sandbox(sandbox_fusion_url, memory_limit_mb, solution_str, tests)
    if "inputs" not in tests:
        raise ValueError(
            "the tests of the row are assertions, which verl runs only in SandboxFusion. Set "
            "sandbox_fusion_url next to `function: verl`"
        )
    if calls_function(tests):
        return score_function(solution_str, tests)
    return call_verl(data_source, solution_str, tests, None)


# --- in a sandbox --------------------------------------------------------------------------------


def score_in_sandbox(url: str, memory_limit_mb: int, completion: str, tests: Json) -> float:
    """Return the fraction of tests that a program passes in a sandbox.

    Raises RuntimeError if the sandbox has no result for a test.
    """
    sandbox = importlib.import_module("verl.utils.reward_score.sandbox_fusion")
    has_end = calls_function(tests) or "assert_case" in tests
    mark = secrets.token_hex(16) if has_end else ""
    marked = mark_ends(tests, mark) if mark else tests
    score, results = sandbox.compute_score(
        url, None, memory_limit_mb, completion, marked, continuous=True
    )
    check_results(results, url)
    if not mark or not results:
        return float(score)
    scored = results[:MAX_SCORED_TESTS]
    return sum(is_passed(result, mark) for result in scored) / len(scored)


def read_tests(ground_truth: object) -> Json:
    """Return the tests of a row, which may be JSON. Raises ValueError if there are none.

    verl gives a program the reward 0 or 1 if a row has no tests, or tests that it cannot read.
    """
    tests = ground_truth
    if isinstance(tests, str):
        with contextlib.suppress(ValueError):
            tests = json.loads(tests)
    if not isinstance(tests, dict):
        raise ValueError(f"the tests of the row must be a JSON object, not {tests!r:.80}")
    tests = {name: value for name, value in tests.items() if value is not None}
    required = ("assert_case",) if "assert_case" in tests else ("inputs", "outputs")
    for name in required:
        values = tests.get(name)
        if not isinstance(values, list) or not values:
            raise ValueError(
                f"the tests of the row have {name}={values!r:.80}. Set a list of texts"
            )
    lengths = {name: len(tests[name]) for name in TEST_LISTS if name in tests}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists of the row's tests differ in length: {lengths}. Change them")
    return tests


def calls_function(tests: Json) -> bool:
    """Return whether tests call a function of the program. Others run the program."""
    return bool(tests.get("fn_name") and tests.get("inputs"))


def mark_ends(tests: Json, mark: str) -> Json:
    """Return tests that write `mark` to stderr if the function returns, or the assertion holds."""
    write_mark = f"__import__('os').write(2, b'{mark}')"
    name = tests.get("fn_name")
    endings = []
    for assertion in tests.get("assert_case") or [""] * len(tests["inputs"]):
        if assertion or not name:
            endings.append(f"{assertion}\n{write_mark}")
        else:
            endings.append(MARKED_CALL.format(name=name, write_mark=write_mark))
    marked = {**tests, "assert_case": endings}
    if name:
        marked["fn_name"] = f"{name}_with_mark"
    return marked


def is_passed(result: Json, mark: str) -> bool:
    """Return whether a program passed a test, and reached its end."""
    return result.get("status") == "success" and mark in (result["stderr"] or "")


def check_results(results: list[Json], url: str) -> None:
    """Raise RuntimeError if the sandbox did not run a test: verl counts that test as failed."""
    for number, result in enumerate(results):
        if result.get("status", result.get("error")) not in PROGRAM_RESULTS:
            reason = result.get("api_request_error") or result.get("error") or result["status"]
            raise RuntimeError(f"the sandbox at {url} has no result for test {number}: {reason}")


# --- on this machine -----------------------------------------------------------------------------


def score_function(completion: str, tests: Json) -> float:
    """Return 1 if the function of a program passes all tests, otherwise 0.

    verl scores functions in the same way, if the program prints nothing.
    """
    utils = importlib.import_module("verl.utils.reward_score.prime_code.utils")
    program = completion.split("```python")[-1].split("```")[0]  # as verl finds it
    results, _ = utils.check_correctness(
        in_outs=tests, generation=program, timeout=TEST_TIMEOUT_S, debug=False
    )
    return float(bool(results) and all(result is True for result in results))
