"""The classes of optional features: the kit calls their methods, other processes get copies."""

from __future__ import annotations

import importlib
import pickle

import pytest

from kit.config.load import load_config
from kit.features import ENTRIES, Entry, Feature, first

CLASSES = [entry for entry in ENTRIES if entry.class_name]
ids = [entry.class_name for entry in CLASSES]


def get_class(entry: Entry) -> type[Feature]:
    return getattr(importlib.import_module(entry.module), entry.class_name)


@pytest.mark.parametrize("entry", CLASSES, ids=ids)
def test_a_feature_has_only_methods_that_the_kit_calls(entry):
    """A method with a misspelled name would never be called."""
    feature = get_class(entry)
    assert issubclass(feature, Feature)
    assert {name for name in vars(feature) if not name.startswith("_")} <= vars(Feature).keys()


@pytest.mark.parametrize("entry", CLASSES, ids=ids)
def test_other_processes_get_a_copy_of_a_feature(entry, monkeypatch):
    monkeypatch.setenv("PRELOAD_MODULES", "json")
    recipes = ["math", "megatron"] if entry.class_name == "Megatron" else ["math"]
    config, _ = load_config(recipes, ["gym.judges={j: policy}"])
    feature = get_class(entry)(config, "train")
    copy = pickle.loads(pickle.dumps(feature))
    assert type(copy) is type(feature) and vars(copy) == vars(feature)


def test_the_first_result_may_be_empty():
    assert first([None, "", "b"]) == "" and first([None]) is None
