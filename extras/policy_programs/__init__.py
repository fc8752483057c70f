"""Score programs of the policy, and run verifiers in a sandbox.

For some data sources, verl's scorer (`env.verifier=verl`) runs the response as a program, or
evaluates it as Python. Here it does so in a forked process (isolation.py), or in SandboxFusion if
the verifier has the setting sandbox_fusion_url, with corrected rewards (program_scores.py). With
env.verifier_pool.sandbox=bwrap, each process of a Python verifier runs in bubblewrap (sandbox.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck


class PolicyPrograms(RecipeCheck):
    """Verifiers in a sandbox."""

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Check env.verifier_pool.sandbox: it is known, and works on this machine."""
        from extras.policy_programs import sandbox

        name = settings.env.verifier_pool.sandbox
        setting = f"env.verifier_pool.sandbox={name}"
        problem = sandbox.find_problem()
        if name not in sandbox.NAMES:
            yield f"{setting} is not supported. Choose null or bwrap."
        elif problem:
            yield f"{setting}: {problem}, or set it to null."
