"""Write the tables of docs/hardware.md: which model fits which GPU, by the dry run's estimate.

    python -m scripts.hardware_page      # a test compares the page with this

A row has the first recipe, from the one that changes least, that leaves a tenth of the GPU free.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from extras.preflight import fit, memory
from extras.preflight.memory import GIB
from kit.recipe.load import ROOT, read_source
from kit.recipe.recipe import Recipe, build

PAGE = ROOT / "docs" / "hardware.md"
BEGIN = "<!-- begin: python -m scripts.hardware_page -->\n"
END = "<!-- end -->\n"


class Card(NamedTuple):
    """A kind of GPU. mib: the least that nvidia-smi shows for one of the names."""

    title: str
    names: str
    mib: int
    gpus: int = 1


CARDS = (
    Card("16 GB", "RTX 4080, RTX 5080, A4000", 16303),
    Card("24 GB", "RTX 3090, RTX 4090, A10, L4", 23028),
    Card("40 GB", "A100", 40960),
    Card("80 GB", "A100, H100", 81559),
    Card("141 GB", "H200", 143771),
    Card("8 x 80 GB", "A100, H100", 81559, 8),
)
# Sizes in the config.json of public models: {name: (class, values of SIZES)}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
MODELS = {
    "SmolLM2-135M": (LlamaConfig, (576, 1536, 30, 9, 3, 64, 49152, True)),
    "Qwen2.5-0.5B": (Qwen2Config, (896, 4864, 24, 14, 2, 64, 151936, True)),
    "Qwen2.5-1.5B": (Qwen2Config, (1536, 8960, 28, 12, 2, 128, 151936, True)),
    "Qwen3-4B": (Qwen3Config, (2560, 9728, 36, 32, 8, 128, 151936, True)),
    "Qwen3-8B": (Qwen3Config, (4096, 12288, 36, 32, 8, 128, 151936, False)),
}
# What ran, with other sizes than those of the row (docs/gpu_results.md): {(card, model, LoRA)}
RAN = {
    ("141 GB", "SmolLM2-135M", False): "sums",
    ("141 GB", "SmolLM2-135M", True): "sums",
    ("80 GB", "Qwen2.5-0.5B", False): "random weights",
    ("141 GB", "Qwen2.5-0.5B", False): "random weights",
}
HEADER = """
| model | trained | fits | add to `--config math` | micro-batch | `generate` | `update` | has run |
| --- | --- | --- | --- | ---: | ---: | ---: | --- |
"""


def make_config(name: str) -> PretrainedConfig:
    """Return the configuration of a model of MODELS."""
    kind, values = MODELS[name]
    sizes: dict[str, Any] = dict(zip(SIZES, values, strict=True))
    return kind(**sizes)


@functools.cache
def make_recipe(files: tuple[str, ...], count: int) -> Recipe:
    """Make the recipe of GSM8K with further files, for a number of GPUs."""
    return build(read_source(["math", *files], [f"trainer.n_gpus_per_node={count}"]))


class Fit(NamedTuple):
    """A recipe on a GPU."""

    files: tuple[str, ...]
    recipe: Recipe
    stages: dict[str, float]  # GiB
    share: float  # of the GPU's memory, in the larger stage
    is_possible: bool  # maybe without room


def find_fit(card: Card, model: PretrainedConfig, trained: str) -> Fit:
    """Return the first recipe that leaves room, else the last that fits, else the last."""
    before = ("lora",) if trained == "LoRA" else ()
    machines = [(), ("gpu_24gb",)] if card.gpus > 1 else [("one_gpu",), ("gpu_24gb",)]
    tried = []
    for machine in (*machines, ("gpu_16gb",)):
        files = (*before, *machine)
        recipe = make_recipe(files, card.gpus)
        size = card.mib * 2**20
        stages = memory.estimate_stages(recipe, model, size)
        sums = {stage: sum(parts.values()) / GIB for stage, parts in stages.items()}
        share = max(sums.values()) * GIB / size
        is_possible = share <= 1 and fit.has_cache(recipe, model, size)
        tried.append(Fit(files, recipe, sums, share, is_possible))
        if is_possible and share <= fit.ROOM:
            break
    return next((each for each in reversed(tried) if each.is_possible), tried[-1])


def render_row(card: Card, name: str, trained: str) -> str:
    """Return a row of a card's table."""
    found = find_fit(card, make_config(name), trained)
    fits = "no"
    options = "-"
    if found.is_possible:
        fits = "yes" if found.share <= fit.ROOM else "tight"
        options = " ".join(f"--config {file}" for file in found.files) or "(nothing)"
        options = f"`{options}`" if found.files else options
    tokens = f"{found.recipe.actor.ppo_max_token_len_per_gpu:,}"
    ran = RAN.get((card.title, name, trained == "LoRA"), "no")
    sizes = " | ".join(f"{found.stages[stage]:.1f}" for stage in ("generate", "update"))
    return f"| {name} | {trained} | {fits} | {options} | {tokens} | {sizes} | {ran} |\n"


def render_tables() -> str:
    """Return a table for each kind of GPU."""
    text = ""
    for card in CARDS:
        text += f"\n### {card.title}\n\n{card.names}: {card.mib / 1024:.1f} GiB"
        text += " each\n" if card.gpus > 1 else "\n"
        text += HEADER
        for name in MODELS:
            text += "".join(render_row(card, name, trained) for trained in ("all", "LoRA"))
    return text


def replace_tables(page: str) -> str:
    """Return the page with new tables."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{render_tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_tables(PAGE.read_text()))
