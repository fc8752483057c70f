"""A model is tried when it is loaded: its rows are packed, computed one by one, or refused.

Tiny random models of some architectures have large weights, so that a mixture of rows shows. The
log-probs of a batch, as a step computes them, must be those of the model row by row.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import training
from kit.errors import RunError
from tests.helpers.architectures import (
    VARIABLES,
    join_process_group,
    load_actor,
    make_architecture,
)
from tests.helpers.plain_torch import compute_log_probs
from tests.helpers.recipes import load
from tests.helpers.workers import make_episode

NEIGHBORS = "Packed, log-probs depend on the neighbors of a row"
# {architecture: part of the note; "" if rows are packed}
FAMILIES = {
    "llama": "",
    "gemma3_text": "",  # with a sliding window that is shorter than the rows
    "mixtral": "",  # experts
    "gpt_neox": "",  # no num_key_value_heads, which verl reads
    "granitemoehybrid": NEIGHBORS,  # Mamba, attention and experts
    "lfm2": NEIGHBORS,  # short convolutions
    "mamba2": NEIGHBORS,
    "qwen3_next": NEIGHBORS,  # gated delta nets
    "gpt_oss": "(eager attention). Packed, NotImplementedError",  # sinks
}
ROUNDING = 1e-5


def make_groups():
    """Two prompts with three responses each. The longest rows have more tokens than the window."""
    rng = random.Random(0)
    episodes = []
    for group in range(2):
        prompt = [rng.randrange(2, 40) for _ in range(5 + 4 * group)]
        for length in (12, 3, 7):
            response = [rng.randrange(2, 40) for _ in range(length)]
            episodes.append(make_episode(prompt, response, group=f"g{group}"))
    return episodes


def measure_difference(actor, folder, recipe):
    """The largest difference between log-probs of a step and those of the model row by row."""
    episodes = make_groups()
    batch = training.build_batch(episodes, 1, 1.0)
    log_probs = training.compute_log_probs(actor, batch, recipe)["log_probs"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        rows = [compute_log_probs(model, episode) for episode in episodes]
    return max(float((a[: len(b)] - b).abs().max()) for a, b in zip(log_probs, rows, strict=True))


def try_families(_: int, workspace: Path) -> None:
    """Compare the families. Runs in its own process."""
    join_process_group()
    recipe = load(workspace).recipe
    for model_type, note in FAMILIES.items():
        folder = make_architecture(model_type, workspace / "families" / model_type)
        actor = load_actor(recipe, folder)
        engine = actor.actor.engine
        print(model_type, engine.packing_note, flush=True)
        assert note in engine.packing_note and bool(note) == bool(engine.packing_note), model_type
        difference = measure_difference(actor, folder, recipe)
        assert difference < ROUNDING, (model_type, difference)
        if note == NEIGHBORS:  # packed, they would be wrong
            engine.engine_config.use_dynamic_bsz = True
            assert measure_difference(actor, folder, recipe) > 100 * ROUNDING, model_type
    folder = make_architecture("mamba", workspace / "families" / "mamba")
    with pytest.raises(RunError, match="the model type mamba: RuntimeError"):
        load_actor(recipe, folder)  # FSDP2 does not gather weights that its layers read directly


@pytest.mark.timeout(600)  # a new process imports verl, and makes ten workers
def test_each_model_is_packed_or_not_by_what_it_computes(workspace, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    torch.multiprocessing.spawn(try_families, (workspace,))
