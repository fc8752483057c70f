"""Chat templates of public packages, each with a tokenizer that has its control tokens.

`make test` installs the packages of requirements-templates.txt to .venv-templates. vLLM's wheel has
templates, too. The templates are read when the tests run.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from tests.helpers.recipes import ROOT
from tests.helpers.rollouts import bytes_tokenizer

PACKAGES = ROOT / ".venv-templates"
FOLDERS = {
    "trl": PACKAGES / "trl/chat_templates",
    "axolotl": PACKAGES / "axolotl/utils/chat_templates/templates",
}
CONTROL_TOKEN = re.compile(
    r"<\|[^<>|'\"{}\s]+\|>"  # <|im_start|>
    r"|<\|[a-z_\"]+>|<[a-z_\"]+\|>"  # <|turn>, <turn|>
    r"|<｜[^<>｜]+｜>"  # noqa: RUF001  DeepSeek's
    r"|</?s>|<end_of_utterance>|<(?:start|end)_of_turn>|<(?:bos|eos)>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
    r"|\[\|[a-z]+\|\]"  # [|user|]
    r"|</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>"
)
STOPS = (  # the first one in a template is the tokenizer's EOS
    "<|im_end|>",
    "<|eot_id|>",
    "<|return|>",
    "<turn|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "[|endofturn|]",
    "<|eot|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|endoftext|>",
    "<|eom|>",
    "<end_of_utterance>",
    "<eos>",
)
MODEL_TOKENS = (  # of models whose templates do not have them
    *("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>", "/nothink"),
)
MORE_STOPS = ("<|call|>", "<|observation|>", "<|user|>", "<|tool_response>")  # of these models


class PublicTemplate(NamedTuple):
    """A chat template and a tokenizer for it."""

    name: str  # package/file
    tokenizer: Any
    stop_ids: set[int]


def list_template_files() -> dict[str, Path]:
    """List {package/name: file} of all templates."""
    vllm = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    folders = {**FOLDERS, "vllm": vllm / "transformers_utils/chat_templates"}
    files = {}
    for package, folder in folders.items():
        for file in sorted(folder.glob("*.jinja")):
            files[f"{package}/{file.stem}"] = file
    return files


@functools.cache
def load(name: str) -> PublicTemplate:
    """Load a template, and make its tokenizer: one token for each byte and each control token."""
    template = list_template_files()[name].read_text(encoding="utf-8")
    stop = next((stop for stop in STOPS if stop in template), "</s>")
    if "glm" in name:
        stop = "<|endoftext|>"
    tokens = [*dict.fromkeys(CONTROL_TOKEN.findall(template))]
    if "llama" in name:
        tokens.append("<|python_tag|>")
    tokenizer = make_tokenizer(template, stop, tokens)
    vocabulary = tokenizer.get_added_vocab()
    stop_ids = {tokenizer.eos_token_id}
    if stop in ("<|return|>", "<|endoftext|>", "<turn|>"):
        stop_ids |= {vocabulary[token] for token in MORE_STOPS if token in vocabulary}
    return PublicTemplate(name, tokenizer, stop_ids)


def make_tokenizer(template: str, stop: str, tokens: list[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes with these control tokens."""
    marks = [token for token in tokens if token != "<s>"]
    return bytes_tokenizer(template, stop, marks, bos_token="<s>")
