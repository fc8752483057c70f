"""Control tokens: text that spells one is encoded as text.

The text of an environment or a row may contain the text of a control token, for example
`<|im_start|>`. If that were encoded as a control token, it would open a turn of another role. So
`mark_tokens` splits such text with a random mark before the template is rendered.
`encode_marked_text` then encodes the pieces between the marks separately.

Protects: the roles of a conversation, from text that others write.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gym_client import GymError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return {text: id} of the special tokens, and of all added tokens in the chat template.

    The token for unknown text is not included, since any text may become it.
    """
    template = str(tokenizer.chat_template or "")
    special = set(tokenizer.all_special_tokens)
    added: dict[str, int] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(token.content)
        if token.content.strip():
            added[token.content] = token_id
    special.discard(tokenizer.unk_token)
    return {text: i for text, i in added.items() if text in special or text in template}


def mark_tokens(value: object, tokens: Iterable[str], mark: str) -> Any:  # as the value
    """Insert `mark` into each occurrence of a token's text, in messages or in one text.

    The mark is after the first character of each occurrence, also where two of them overlap. The
    values of `role` and `type` stay. tokens: their texts. Raises GymError('template') for a token
    of one character, which cannot be split.
    """
    if isinstance(value, dict):
        return {
            key: item if key in ("role", "type") else mark_tokens(item, tokens, mark)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [mark_tokens(item, tokens, mark) for item in value]
    if not isinstance(value, str):
        return value
    positions: set[int] = set()
    for token in tokens:
        if token not in value:  # skip the slower search for overlaps, which few texts need
            continue
        if len(token) == 1:
            problem = f"the environment's text contains the control token {token!r}"
            raise GymError("template", f"{problem}. Remove it from the server's answer.")
        overlapping = re.finditer(f"(?={re.escape(token)})", value)
        positions.update(match.start() + 1 for match in overlapping)
    borders = [0, *sorted(positions), len(value)]
    return mark.join(value[start:end] for start, end in itertools.pairwise(borders))


def encode_marked_text(
    text: str, tokens: dict[str, int], mark: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Encode a rendered conversation in pieces, so that tokens split by `mark` stay text.

    Raises GymError('template') if the ids have more control tokens than the pieces.
    """
    pieces = text.split(mark)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(piece, add_special_tokens=False)
    control_ids = set(tokens.values())
    count = sum(i in control_ids for i in ids)
    surplus = count - count_tokens(pieces, tokens)
    if surplus > 0:
        problem = f"the environment's text becomes {surplus} control tokens of the tokenizer"
        raise GymError("template", f"{problem}. Remove their text from the server's answer.")
    return ids


def count_tokens(pieces: Sequence[str], tokens: Collection[str]) -> int:
    """Count the occurrences of `tokens` in all pieces, without overlaps."""
    if not tokens:
        return 0
    pattern = compile_tokens(tuple(tokens))
    return sum(len(pattern.findall(piece)) for piece in pieces)


@functools.cache
def compile_tokens(tokens: Sequence[str]) -> re.Pattern[str]:
    """Compile the pattern of any of these tokens, the longest ones first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
