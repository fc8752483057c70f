"""Tests how the ids that end a response are read from the files of a model."""

from __future__ import annotations

from types import SimpleNamespace

from kit.config.model_files import stop_token_ids


def test_stop_ids_come_from_tokenizer_and_generation_config():
    tokenizer = SimpleNamespace(eos_token_id=1)
    assert stop_token_ids(tokenizer, None) == {1}
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=[2, 3])) == {1, 2, 3}
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=4)) == {1, 4}
