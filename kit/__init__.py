"""The plumbing, which nobody has to read to change an algorithm. A file imports only from files before it in this list:

errors, text, files, fork, private, stores, places, gym_install, gym_servers, verdicts, models, episodes,
function_worker, plugins, config, engines, sandbox, functions, memory, checks, node, rows, images, convert, recipe,
checkpoints, watch, lookout, keeper, guard, reference, frames, diagnosis, report, show, run, monitor, chat, damage; then
training and inference, at the root; openai_server, client, players, ahead, hf, start, sft, collect, commands; then
algorithm, at the root; weight_sync, gloo, cpu_engine and cpu, which verl alone imports, and vllm_routes, which vLLM
alone imports.
env and gym_client, at the root, know none of them.
"""

import importlib
from typing import Any


class later:  # noqa: N801  (used as a function)
    """The module `name`, imported when something in it is first asked for: verl and vLLM take 10 s, for which nobody
    should wait to hear that a key is misspelt."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
