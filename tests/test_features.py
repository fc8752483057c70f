"""The classes of optional features: the kit calls their methods, other processes get copies."""

from __future__ import annotations

import importlib
import pickle

import pytest

from kit.recipe.load import read_source
from kit.recipe.settings import make_settings
from kit.run.features import ENTRIES, RecipeCheck, RunOutput, RunPart


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.class_name for entry in ENTRIES])
def test_the_kit_calls_each_method_of_a_feature_and_can_copy_it(entry, monkeypatch):
    """A method with a misspelled name would never be called."""
    feature = getattr(importlib.import_module(entry.module), entry.class_name)
    bases = [base for base in (RecipeCheck, RunPart, RunOutput) if issubclass(feature, base)]
    called = {name for base in bases for name in vars(base)}
    assert {name for name in vars(feature) if not name.startswith("_")} <= called
    monkeypatch.setenv("PRELOAD_MODULES", "json")
    recipes = ["math", "megatron"] if entry.class_name == "Megatron" else ["math"]
    settings = make_settings(read_source(recipes, ["gym.judges={j: policy}"]), "train")
    parsed = feature(settings)
    copy = pickle.loads(pickle.dumps(parsed))
    assert vars(copy) == vars(parsed)
