"""Tests of messages about installed packages that cannot be used together."""

from __future__ import annotations

import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers import monkey_patch
from verl.utils.import_utils import is_trl_available

from kit.engine.worker_patches import monkey_patch_trl
from kit.recipe.packages import describe_import_error


@pytest.fixture
def neighbor(tmp_path, monkeypatch):
    """A package `trl` next to the others, whose code a test may write."""
    package = tmp_path / "trl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    metadata = tmp_path / "trl-1.16.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\n")
    (metadata / "top_level.txt").write_text("trl\n")
    monkeypatch.syspath_prepend(tmp_path)
    is_trl_available.cache_clear()
    yield package
    is_trl_available.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]


def test_verl_loads_a_model_where_a_trl_without_its_class_is_installed(neighbor, monkeypatch):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    monkeypatch.setattr(monkey_patch, "is_trl_available", is_trl_available)  # verl's own
    with pytest.raises(ImportError, match=r"cannot import name .* from 'trl'") as caught:
        monkey_patch.apply_monkey_patch(model, use_remove_padding=False)
    text = describe_import_error(caught.value)
    assert text.startswith("a package cannot be imported: cannot import name")
    assert "(trl 1.16.0). Install the packages again in a new environment" in text
    monkey_patch_trl()
    monkey_patch.apply_monkey_patch(model, use_remove_padding=False)
