"""Verify rows with Python functions or environment classes, without a Gym server.

docs/guides/verifier.md describes a function, and docs/environments.md a class. Both may be async,
and run in separate processes. Each verifier has env.verifier_pool.processes, and each process runs
one call at a time, for timeout_s at most. A function is called in any of them. An environment stays
in the process that made it, next to those of other episodes, and may hold sockets, browsers and
processes. If a call fails because its process hangs or dies, its episode fails. The other episodes
in that process start again (`session_lost`), and the next call starts a new process.

settings.py reads the recipe, pool.py starts the processes, and process.py and calls.py run in them.

Protects: the run from the code of verifiers, which may crash, hang or leak.
"""
