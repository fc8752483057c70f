"""Score programs of the policy, and run verifiers in a sandbox.

For some data sources, verl's scorer (`env.verifier=verl`) runs the response as a program, or
evaluates it as Python. Here it does so in a forked process (isolation.py), or in SandboxFusion if
the verifier has the setting sandbox_fusion_url, with corrected rewards (program_scores.py). With
env.verifier_pool.sandbox=bwrap, each process of a Python verifier runs in bubblewrap (sandbox.py).

The functions are hooks of kit/extras/__init__.py.
"""

from kit.extras.policy_programs.program_scores import score_code
from kit.extras.policy_programs.sandbox import check_recipe, sandbox_command

__all__ = ["check_recipe", "sandbox_command", "score_code"]
