"""The classes of optional features: the kit calls their methods, other processes get copies."""

from __future__ import annotations

import importlib
import pickle

import pytest

from kit.run.features import ENTRIES, Feature

CLASSES = [entry for entry in ENTRIES if entry.class_name]


@pytest.mark.parametrize("entry", CLASSES, ids=[entry.class_name for entry in CLASSES])
def test_the_kit_calls_each_method_of_a_feature_and_can_copy_it(entry, monkeypatch):
    """A method with a misspelled name would never be called."""
    feature = getattr(importlib.import_module(entry.module), entry.class_name)
    assert {name for name in vars(feature) if not name.startswith("_")} <= vars(Feature).keys()
    monkeypatch.setenv("PRELOAD_MODULES", "json")
    recipes = ["math", "megatron"] if entry.class_name == "Megatron" else ["math"]
    config, _ = load_config(recipes, ["gym.judges={j: policy}"])
    parsed = feature(config, "train")
    copy = pickle.loads(pickle.dumps(parsed))
    assert vars(copy) == vars(parsed)
