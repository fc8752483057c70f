"""Score programs of the policy, and run verifiers in a sandbox.

For some data sources, verl's scorer (`env.verifier=verl`) runs the response as a program, or
evaluates it as Python. Here it does so in a forked process (isolation.py), or in SandboxFusion if
the verifier has the setting sandbox_fusion_url, with corrected rewards (program_scores.py). With
env.verifier_pool.sandbox=bwrap, each process of a Python verifier runs in bubblewrap (sandbox.py).

The functions below are hooks of kit/extras/__init__.py. They import modules in their bodies,
because the processes of verifiers need a part of them only, and must stay small.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.gym.python_verifiers.calls import CallResult


def check_recipe(config: Any, command: str) -> Iterator[str]:
    """Check env.verifier_pool.sandbox: it is known, and works on this machine."""
    from kit.extras.policy_programs import sandbox

    name = config.env.verifier_pool.sandbox
    if name not in sandbox.NAMES:
        yield f"env.verifier_pool.sandbox={name} is not supported. Choose null or bwrap."
        return
    problem = sandbox.find_problem()
    if problem:
        yield f"env.verifier_pool.sandbox={name}: {problem}, or set it to null."


def sandbox_command(command: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return the command line that runs a verifier in the sandbox. folders: that it reads."""
    from kit.extras.policy_programs import sandbox

    return sandbox.wrap_command(command, folders)


def score_code(
    verifier: functools.partial[Any],
    runner: asyncio.Runner,
    arguments: dict[str, Any],
    memory: int,
) -> CallResult:
    """Score a response that is code, in the process of a verifier. Raises VerifierError.

    verifier: verl's scorer with its settings. arguments: of its call. memory: bytes.
    """
    from kit.extras.policy_programs import program_scores

    return program_scores.score_code(verifier, runner, arguments, memory)
