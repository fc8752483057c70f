"""Tiny random models with a character tokenizer: a Llama, a mixture of experts and a LLaVA.

Each tool call and game move in ACTIONS is a single token. So even a random model calls tools and
plays games, and it can learn to do so. Rows with small images are for the LLaVA.
"""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.helpers.recipes import row

ACTIONS = {
    "increment": '<tool_call>{"name": "increment_counter", "arguments": {"count": 1}}</tool_call>',
    "directory": '<tool_call>{"name": "company_directory_find_email_address", '
    '"arguments": {"name": "x"}}</tool_call>',
    "unknown": '<tool_call>{"name": "verify", "arguments": {}}</tool_call>',
    "hit": "<action>hit</action>",
    "stand": "<action>stand</action>",
}
END = 1  # the id of <end>
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?"
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | length }} {% endif %}"
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<end>{% endif %} {% endfor %}"
)
# A chat template for content parts. For an image, it writes only <image>, as LLaVA's does.
IMAGE_CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | length }} {% endif %}"
    "{% for m in messages %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% if m['role'] == 'assistant' %}<end>{% endif %} {% endfor %}"
)


def make_tokenizer():
    """Make a tokenizer with one token for each character and each action."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<unk>", "<end>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token="<end>",
        pad_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(ACTIONS.values()))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(folder: Path, tied: bool, seed: int = 0) -> Path:
    """Write a random Llama with two layers and a hidden size of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,  # of size 32: vLLM has no CPU kernel for smaller heads
            num_key_value_heads=1,
            max_position_embeddings=2048,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=END,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_mixture(folder: Path, source: Path) -> Path:
    """Write a random mixture of four experts with the tokenizer and sizes of `source`."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = AutoConfig.from_pretrained(source)
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "eos_token_id",
        "pad_token_id",
    )
    sizes = {name: getattr(dense, name) for name in names}
    config = Qwen3MoeConfig(
        **sizes,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def make_vision_model(folder: Path, source: Path) -> Path:
    """Write a random LLaVA with the tokenizer and the sizes of `source`. An image is 16 tokens.

    The projector's weights are large, so that different colors give different outputs.
    """
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.chat_template = IMAGE_CHAT_TEMPLATE
    text = AutoConfig.from_pretrained(source)
    text.vocab_size = len(tokenizer)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        projection_dim=64,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=tokenizer.get_added_vocab()["<image>"],
            image_seq_length=16,
            vision_feature_layer=-1,
            tie_word_embeddings=text.tie_word_embeddings,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "projector" in name and "weight" in name:
                weight.mul_(10)
    model.save_pretrained(folder)
    square = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size=square, crop_size=square),
        tokenizer,
        chat_template=IMAGE_CHAT_TEMPLATE,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    return folder


def make_pretrained(
    folder: Path, source: Path, prompts: list[str], digits: str = "0123456789"
) -> None:
    """Write the model of `source`, trained to respond with one of `digits`, chosen at random.

    LoRA needs such a model, because it does not change the output head. With a random head, no
    token can become likely: its rows have a norm of 0.16, and a normed hidden state has a norm of
    8. So logits stay between -1.3 and 1.3.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chats = [[{"role": "user", "content": f"{prompt} 7"}] for prompt in prompts]
    texts: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    for _ in range(100):
        rows = [tokenizer.encode(text + rng.choice(digits)) + [END] for text in texts]
        width = max(map(len, rows))
        padding = [width - len(row) for row in rows]
        ids = [row + [END] * count for row, count in zip(rows, padding, strict=True)]
        labels = [  # the digit and <end>
            [-100] * (len(row) - 2) + row[-2:] + [-100] * count
            for row, count in zip(rows, padding, strict=True)
        ]
        loss = model(torch.tensor(ids), labels=torch.tensor(labels)).loss  # of [prompts, width]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"pretrained model: loss {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


COLORS = {"r": (250, 20, 20), "b": (20, 20, 250)}


def png(color: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> bytes:
    """The bytes of an image in one color."""
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def data_url(raw: bytes) -> str:
    """A data URL of an image."""
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"


def image_row(source: str, text: str = "which", answer: str = "r") -> dict:
    """A row that asks for the color of an image."""
    parts = [
        {"type": "input_image", "image_url": source, "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    result = row(text, answer)
    result["responses_create_params"]["input"] = [{"role": "user", "content": parts}]
    return result
