"""The tokenizer of gemma-3-270m, read from a GGUF file as the package has it."""

import gguf
import pytest
from gguf import TokenType

from scripts.unpack_gemma3 import read_tokenizer

# Longer pieces have lower scores, so a unigram model, such as transformers reads, splits them.
NAMES = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
PIECES = [*"What▁is17", "▁is", "Wh", "at", "What", "is"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


@pytest.fixture
def file(tmp_path):
    tokens = [*NAMES, "\n\n", *BYTES, *dict.fromkeys(PIECES)]
    types = [TokenType.CONTROL] * len(NAMES) + [TokenType.USER_DEFINED]
    types += [TokenType.BYTE] * len(BYTES)
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(types)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_pieces_are_merged_in_the_order_of_their_scores(file):
    tokenizer = read_tokenizer(file)
    text = "What is 17\n\nWhat<end_of_turn>"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
    expected = ["<bos>", "What", "▁is", "▁", "1", "7", "\n\n", "What", "<end_of_turn>"]
    assert tokens == expected
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text


def test_other_characters_are_bytes(file):
    tokenizer = read_tokenizer(file)
    ids = tokenizer("é").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids[1:]) == "é"


def test_a_text_ends_with_the_token_that_the_base_model_has_learned(file):
    tokenizer = read_tokenizer(file)
    assert tokenizer.eos_token == "<eos>"
    ids = tokenizer("is<eos>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "is"
