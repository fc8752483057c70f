"""Measure raw vLLM on the prompts of a finished run: the shortest possible time of sampling.

    python benchmarks/raw_vllm.py RUN [--rounds 3]     RUN: a run folder

benchmarks/step.py runs this command. The responses have the lengths of those in the run. The
command also measures how long vLLM takes to load new weights that are already in memory.

The last line is JSON. `gen` is {step: [seconds of each round]}. `reload` is a list of seconds.
"""

from __future__ import annotations

import json
import os
from typing import Any

from measure import Row, finished_run, timed

# All cores, as in a run of Quintet: by default vLLM leaves one free.
# VLLM_ALLOW_INSECURE_SERIALIZATION: collective_rpc may send a function to the worker.
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
from vllm import LLM, SamplingParams, TokensPrompt

ROLLOUT_KEYS = (  # settings of the run that vLLM gets, too
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "seed",
    "logprobs_mode",
)


def generate(llm: LLM, rows: list[Row], temperature: float) -> None:
    """Sample a response to each prompt, as long as the response in `rows`.

    The length is set with ignore_eos and max_tokens. With min_tokens, vLLM would also mask logits.
    """
    options: dict[str, Any] = {
        "temperature": temperature,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in rows]
    lengths = [len(response) for _, response in rows]
    sampling = [SamplingParams(max_tokens=length, **options) for length in lengths]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    sampled = [len(output.outputs[0].token_ids) for output in outputs]
    assert sampled == lengths, f"{sampled} tokens instead of {lengths}"


def reload(worker: Any) -> float:
    """In vLLM's worker: load new weights from memory. Return the seconds.

    The function is sent to the worker, so it has its imports inside.
    """
    import time
    from pathlib import Path

    from huggingface_hub import snapshot_download
    from safetensors.torch import load_file

    config = worker.model_runner.model_config
    folder = Path(config.model)
    if not folder.is_dir():  # the name of a model on the hub
        folder = Path(snapshot_download(config.model, local_files_only=True))
    weights = {}
    for path in folder.glob("*.safetensors"):
        for name, weight in load_file(path).items():
            weights[name] = weight.to(config.dtype, copy=True)
    begin = time.perf_counter()
    worker.model_runner.reload_weights(weights_iterator=iter(weights.items()))
    return time.perf_counter() - begin


def main() -> None:
    config, steps, rounds = finished_run(__doc__)
    rollout = config["actor_rollout_ref"]["rollout"]
    engine_settings = rollout["engine_kwargs"]["vllm"]
    settings = {name: rollout[name] for name in ROLLOUT_KEYS}
    for name in ("block_size", "kv_cache_memory_bytes"):
        if name in engine_settings:
            settings[name] = engine_settings[name]
    llm = LLM(config["actor_rollout_ref"]["model"]["path"], skip_tokenizer_init=True, **settings)
    generate(llm, next(iter(steps.values())), rollout["temperature"])  # a warm-up
    seconds: dict[str, list[float]] = {step: [] for step in steps}
    for _ in range(rounds):
        for step, rows in steps.items():
            llm.reset_prefix_cache()  # new weights clear it, too
            seconds[step].append(timed(generate, llm, rows, rollout["temperature"]))
    reloads = [llm.collective_rpc(reload)[0] for _ in range(rounds + 1)]
    print(json.dumps({"gen": seconds, "reload": reloads[1:]}))


if __name__ == "__main__":
    main()
