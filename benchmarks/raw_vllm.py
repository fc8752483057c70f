"""The lowest time of sampling here: a finished run's prompts, its answers' lengths, and nothing
around vLLM.

    python benchmarks/raw_vllm.py RUN [--rounds 3]     RUN: a run's folder; benchmarks/step.py asks

Also how long vLLM takes to take new weights that are in memory already. Prints one JSON line last:
seconds, of each step a list, one for each round.
"""

from __future__ import annotations

import json
import os
from typing import Any

from measure import Row, finished_run, timed

# all cores, as the kit has it: vLLM would keep one free; and a function, `reload`, may be sent to
# the worker
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
from vllm import LLM, SamplingParams

SAME = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "seed",
    "logprobs_mode",
)


def generate(llm: LLM, rows: list[Row], temperature: float) -> None:
    """Every answer as long as it was. ignore_eos does that; min_tokens would have vLLM mask its
    logits as well.
    """
    asked = {"temperature": temperature, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    sampling = [SamplingParams(max_tokens=len(answer), **asked) for _, answer in rows]
    done = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in rows], sampling, use_tqdm=False
    )
    assert [len(d.outputs[0].token_ids) for d in done] == [len(answer) for _, answer in rows]


def reload(worker: Any) -> float:
    """Seconds that vLLM's worker takes to take new weights. It is sent there, and brings its
    imports with it.
    """
    import time
    from pathlib import Path

    from huggingface_hub import snapshot_download
    from safetensors.torch import load_file

    config = worker.model_runner.model_config
    folder = Path(config.model)
    if not folder.is_dir():  # a name of the hub
        folder = Path(snapshot_download(config.model, local_files_only=True))
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    weights = [(name, w.to(config.dtype, copy=True)) for file in files for name, w in file.items()]
    begin = time.perf_counter()
    worker.model_runner.reload_weights(weights_iterator=iter(weights))
    return time.perf_counter() - begin


def main() -> None:
    config, steps, rounds = finished_run(__doc__)
    rollout = config["actor_rollout_ref"]["rollout"]
    given = rollout["engine_kwargs"]["vllm"]
    settings = {name: rollout[name] for name in SAME}
    settings |= {
        name: given[name] for name in ("block_size", "kv_cache_memory_bytes") if name in given
    }
    llm = LLM(config["actor_rollout_ref"]["model"]["path"], skip_tokenizer_init=True, **settings)
    generate(llm, next(iter(steps.values())), rollout["temperature"])  # warms it up
    seconds: dict[str, list[float]] = {step: [] for step in steps}
    for _ in range(rounds):
        for step, rows in steps.items():
            llm.reset_prefix_cache()  # as new weights do
            seconds[step].append(timed(generate, llm, rows, rollout["temperature"]))
    reloads = [llm.collective_rpc(reload)[0] for _ in range(rounds + 1)]
    print(json.dumps({"gen": seconds, "reload": reloads[1:]}))


if __name__ == "__main__":
    main()
