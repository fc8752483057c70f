"""Verify rows with Python functions or environment classes, without a Gym server.

docs/guides/verifier.md describes a function, and docs/environments.md a class. Both may be async,
and run in separate processes. Each verifier has env.verifier_pool.processes, and each process runs
one call at a time, for timeout_s at most. An environment is pickled after each call, so its next
step may run in another process. If a process is lost, only the episode of that call fails, and the
next call starts a new process.

settings.py reads the recipe, pool.py starts the processes, and process.py and calls.py run in them.

Protects: the run from the code of verifiers, which may crash, hang or leak.
"""
