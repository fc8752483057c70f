"""Score programs of the policy, and run verifiers in a sandbox.

For some data sources, verl's scorer (`env.verifier=verl`) runs the response as a program, or
evaluates it as Python. Here it does so in a forked process (isolation.py), or in SandboxFusion if
the verifier has the setting sandbox_fusion_url, with corrected rewards (program_scores.py). With
env.verifier_pool.sandbox=bwrap, each process of a Python verifier runs in bubblewrap (sandbox.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kit.features import Feature

if TYPE_CHECKING:
    from omegaconf import DictConfig


class PolicyPrograms(Feature):
    """Verifiers in a sandbox."""

    def __init__(self, config: DictConfig, command: str):
        super().__init__(config, command)
        self.sandbox = str(config.env.verifier_pool.sandbox)

    def check_recipe(self, config: DictConfig) -> Iterator[str]:
        """Check env.verifier_pool.sandbox: it is known, and works on this machine."""
        from extras.policy_programs import sandbox

        setting = f"env.verifier_pool.sandbox={self.sandbox}"
        problem = sandbox.find_problem()
        if self.sandbox not in sandbox.NAMES:
            yield f"{setting} is not supported. Choose null or bwrap."
        elif problem:
            yield f"{setting}: {problem}, or set it to null."

    def sandbox_command(self, command: Sequence[str], readable: Sequence[Path]) -> list[str]:
        """Return the command line that runs a verifier process in bubblewrap."""
        from extras.policy_programs import sandbox

        return sandbox.sandbox_command(command, readable)
