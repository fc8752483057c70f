"""Pack a micro-batch so that each distinct prompt is computed once for all its responses.

Attention is causal, so a prompt's keys and values do not depend on the response behind it. verl
packs each response behind its own copy of the prompt; cpu_engine.py reorders that row:

    verl's row    [T]  [p1 a1 | p1 a2 | p2 a3 | p2 a4]
    packed row    [U]  [p1 p2 | a1 a2 a3 a4]

Attention needs the tokens as rectangles. A grid holds rows of similar length next to each other, so
that two matmuls compute them together. If each sequence had its own call, oneDNN would compile
kernels for each length, in each layer. The next batch would have other lengths, and so need more.

Dimensions: B rows of the micro-batch, T tokens in verl's row, U tokens in the packed row, A tokens
of all responses, n rows of a grid, L queries and P prompt keys of a grid's row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

MAX_GRID_KEYS = 512  # a longer row has its own grid, for torch's flash attention
MAX_GRID_SCORES = 2**24  # elements of a grid's attention scores
ASSUMED_HEADS = 16  # of the model, to compute that limit
MIN_LENGTH_BITS = 6  # rows below 64 tokens share a grid: smaller kernels do not pay off


class Span(NamedTuple):
    """Tokens that follow each other in a row."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.length

    def positions(self) -> torch.Tensor:
        """The tokens' positions [length]."""
        return torch.arange(self.start, self.end)


class UniquePrompts(NamedTuple):
    """The distinct prompts of a micro-batch, and the responses to them, as spans of verl's row."""

    prompts: list[Span]  # each where it comes first
    prompt_rows: list[int]  # of each prompt: the row of B where it comes first
    responses: list[Span]  # [B], in the order of the packed row
    prompt_indices: list[int]  # [B] of each response: the index of its prompt


class GridRow(NamedTuple):
    """A row of a grid, as spans of the packed row."""

    queries: Span  # a prompt or a response
    prompt: Span  # the response's prompt; empty if the queries are a prompt


class Grid(NamedTuple):
    """n rows of L queries. A query sees the P keys of its prompt, and those of L up to itself."""

    query_index: torch.Tensor  # [n, L] positions in U; padding has the position of the last token
    is_query: torch.Tensor  # [n, L] False for padding
    key_index: torch.Tensor  # [n, P+L] positions in U of the prompts' tokens, then of the queries
    key_positions: torch.Tensor  # [n, P+L] positions of the same tokens in their sequence
    # [n, 1, 1, L, P+L] True where a query must not see a key (as in torch.nn.MultiheadAttention)
    attn_mask: torch.Tensor


class Layout(NamedTuple):
    """How verl's row [T] and the packed row [U] correspond. Responses are sorted by token ids."""

    gather_index: torch.Tensor  # [U] of each position in U: the token of T
    packed_positions: torch.Tensor  # [T] of each token of T: its position in U
    response_positions: torch.Tensor  # [A] tokens of T whose logits predict a response's token
    response_lengths: torch.Tensor  # [B] their sum is A
    grids: list[Grid]
    inverse_index: torch.Tensor  # [U] of each position in U: its row in the grids' joined queries
    prompt_rows: list[int]  # of each distinct prompt: the row of B where it comes first


def lay_out(
    ids: torch.Tensor, prompt_lengths: torch.Tensor, images: torch.Tensor | None = None
) -> Layout:
    """Return the layout of a micro-batch.

    ids: nested [B, t], each prompt with its response. prompt_lengths: [B], at least 1 each.
    images: [B], rows with the same number have the same images.
    """
    unique = find_unique_prompts(ids, prompt_lengths, images)
    sources = [*unique.prompts, *unique.responses]  # spans of T, in the order of U
    starts = itertools.accumulate((span.length for span in sources), initial=0)
    # the same tokens as spans of U
    packed = [Span(start, span.length) for start, span in zip(starts, sources, strict=False)]
    prompts = packed[: len(unique.prompts)]
    rows = [
        GridRow(response, prompts[index])
        for response, index in zip(packed[len(prompts) :], unique.prompt_indices, strict=True)
    ]
    grids = make_grids([GridRow(prompt, Span(0, 0)) for prompt in prompts])
    grids += make_grids([row for row in rows if row.queries.length])
    gather_index = torch.cat([span.positions() for span in sources])
    response_positions = [span.positions() - 1 for span in unique.responses]
    return Layout(
        gather_index=gather_index,
        packed_positions=find_packed_positions(ids.values().numel(), unique.responses, rows),
        response_positions=torch.cat(response_positions),
        response_lengths=torch.tensor([span.length for span in unique.responses]),
        grids=grids,
        inverse_index=invert_grids(grids, len(gather_index)),
        prompt_rows=unique.prompt_rows,
    )


def find_unique_prompts(
    ids: torch.Tensor, prompt_lengths: torch.Tensor, images: torch.Tensor | None
) -> UniquePrompts:
    """Find the distinct prompts. Two prompts are the same if their ids and images are."""
    offsets = ids.offsets().tolist()  # type: ignore[attr-defined]
    tokens = ids.values().tolist()
    lengths = prompt_lengths.tolist()
    image_numbers = [0] * len(lengths) if images is None else images.tolist()

    def ids_and_images(row: int) -> tuple[list[int], int]:
        return tokens[offsets[row] : offsets[row + 1]], image_numbers[row]

    unique = UniquePrompts([], [], [], [])
    index_of: dict[tuple[int, ...], int] = {}  # image number and ids -> index of the prompt
    # Sorted, so that the same rows in another order have the same layout and rounding.
    for row in sorted(range(len(lengths)), key=ids_and_images):
        prompt = Span(offsets[row], lengths[row])
        key = (image_numbers[row], *tokens[prompt.start : prompt.end])
        if key not in index_of:
            index_of[key] = len(unique.prompts)
            unique.prompts.append(prompt)
            unique.prompt_rows.append(row)
        unique.prompt_indices.append(index_of[key])
        unique.responses.append(Span(prompt.end, offsets[row + 1] - prompt.end))
    return unique


def find_packed_positions(
    size: int, responses: Sequence[Span], rows: Sequence[GridRow]
) -> torch.Tensor:
    """Return the position in the packed row of each token of verl's row [T].

    size: T. responses: spans of T. rows: the same responses with their prompts, as spans of U.
    """
    positions = torch.empty(size, dtype=torch.long)
    for response, row in zip(responses, rows, strict=True):
        positions[response.start - row.prompt.length : response.start] = row.prompt.positions()
        positions[response.start : response.end] = row.queries.positions()
    return positions


def make_grids(rows: Sequence[GridRow]) -> list[Grid]:
    """Return grids of rows with similar lengths, which are between the same powers of two."""
    similar: dict[tuple[int, int], list[GridRow]] = {}
    for row in rows:
        key = (length_class(row.queries.length), length_class(row.prompt.length))
        similar.setdefault(key, []).append(row)
    grids = []
    for members in similar.values():
        size = max_rows(members)
        for start in range(0, len(members), size):
            grids.append(make_grid(members[start : start + size]))
    return grids


def length_class(length: int) -> int:
    """Return the number of bits of a length; short lengths are one class."""
    return max(MIN_LENGTH_BITS, length.bit_length())


def max_rows(rows: Sequence[GridRow]) -> int:
    """Return how many of these rows a grid may hold."""
    queries = max(row.queries.length for row in rows)
    keys = queries + max(row.prompt.length for row in rows)
    if keys > MAX_GRID_KEYS:
        return 1
    return max(1, MAX_GRID_SCORES // (ASSUMED_HEADS * queries * keys))


def make_grid(rows: Sequence[GridRow]) -> Grid:
    """Return the grid of some rows."""
    start = column(row.queries.start for row in rows)
    length = column(row.queries.length for row in rows)
    prompt_start = column(row.prompt.start for row in rows)
    prompt_length = column(row.prompt.length for row in rows)
    offset = torch.arange(int(length.max()))  # [L]
    prompt_offset = torch.arange(int(prompt_length.max()))  # [P]
    query_index = start + offset.minimum(length - 1)  # [n, L]
    prompt_index = prompt_start + prompt_offset.minimum(prompt_length - 1)  # [n, P]
    is_beyond_prompt = (prompt_offset >= prompt_length)[:, None]  # [n, 1, P]
    is_later = offset > offset[:, None]  # [L, L]
    attn_mask = torch.cat(
        [is_beyond_prompt.expand(-1, len(offset), -1), is_later.expand(len(rows), -1, -1)], dim=2
    )  # [n, L, P+L]
    return Grid(
        query_index=query_index,
        is_query=offset < length,
        key_index=torch.cat([prompt_index, query_index], dim=1),
        key_positions=torch.cat(
            [prompt_offset.expand(len(rows), -1), prompt_length + offset], dim=1
        ),
        attn_mask=attn_mask[:, None, None],
    )


def column(values: Iterable[int]) -> torch.Tensor:
    """Return numbers as a tensor [n, 1]."""
    return torch.tensor(list(values)).unsqueeze(-1)


def invert_grids(grids: Sequence[Grid], size: int) -> torch.Tensor:
    """Return where each token of the packed row is in the joined queries of all grids [U].

    size: U.
    """
    is_query = torch.cat([grid.is_query.flatten() for grid in grids])
    query_index = torch.cat([grid.query_index.flatten() for grid in grids])
    inverse = torch.empty(size, dtype=torch.long)
    inverse[query_index[is_query]] = is_query.nonzero().flatten()
    return inverse
