"""The plumbing, which nobody has to read to change an algorithm. A file imports only from files before it in this list:

errors, runs.text, runs.files, cpu.fork_server, runs.private, rollout.stores, gym.concurrency,
extras.gym_environments, gym.servers, extras.judges.judge_parsing, extras.judges.judge_proxy, data.episodes,
extras.python_verifiers.verifier_process, config.user_functions, config.load, extras.parallelism,
extras.python_verifiers.sandbox, extras.python_verifiers.verifier_pool, extras.preflight.memory, config.checks,
extras.preflight.node, data.verl_rows, extras.images, extras.convert, runs.preparation, runs.checkpoints,
extras.supervisor.process_monitor, extras.supervisor.node_monitor, extras.supervisor.reaper, runs.signals,
extras.report.metric_docs, extras.report.run_data, extras.report.diagnosis, extras.report.report_page,
extras.report.show, runs.run_dir, extras.monitor, rollout.chat, runs.finite_check; then training and inference, at the
root; rollout.openai_server, rollout.client, extras.rollout_workers, extras.one_step_off, extras.hf_rollout,
runs.launch, extras.sft, runs.collect, runs.cli; then algorithm, at the root; rollout.weight_sync, extras.gloo,
cpu.cpu_engine and cpu.platform, which verl alone imports, and rollout.vllm_routes, which vLLM alone imports.
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
