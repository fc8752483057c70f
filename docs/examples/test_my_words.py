# test_my_words.py
import random

from my_words import brief_description


def score(text):
    return brief_description("words", text, "cat", {})["score"]


def test_right_and_wrong_responses():
    assert score("A cat is a small animal.") == 1.0
    assert score("cat " * 20) == 0.25  # names the thing, but has 20 words
    assert score("A small animal.") == 0.0


def test_any_text_has_a_score():
    for length in range(99):
        text = "".join(map(chr, random.sample(range(0x3000), length)))
        assert 0.0 <= score(text) <= 1.0
