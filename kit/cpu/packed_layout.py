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

Convenience: training on a CPU without computing each prompt n times.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_GRID_KEYS = 512  # a longer row has its own grid, for torch's flash attention
MAX_GRID_SCORES = 2**24  # elements of a grid's attention scores
ASSUMED_HEADS = 16  # of the model, to compute that limit
MIN_LENGTH_BITS = 6  # rows below 64 tokens share a grid: smaller kernels do not pay off


class UniquePrompts(NamedTuple):
    """The rows of a micro-batch, sorted by their token ids, and their distinct prompts."""

    order: list[int]  # [B] the rows, in the order of their responses in the packed row
    prompt_indices: list[int]  # [B] of each of them: the index of its prompt
    prompt_rows: list[int]  # of each distinct prompt: the row of B where it comes first


class GridRows(NamedTuple):
    """Rows of grids, as spans of the packed row: the queries, and the prompt of a response."""

    query_starts: torch.Tensor  # [n]
    query_lengths: torch.Tensor  # [n]
    prompt_starts: torch.Tensor  # [n]
    prompt_lengths: torch.Tensor  # [n] 0 if the queries are a prompt

    def select(self, index: list[int]) -> GridRows:
        """Return some of the rows."""
        return GridRows(*(values[index] for values in self))


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
    offsets = ids.offsets()  # type: ignore[attr-defined]
    lengths = prompt_lengths[unique.prompt_rows]  # of each distinct prompt
    response_starts = (offsets[:-1] + prompt_lengths)[unique.order]  # in T
    response_lengths = (offsets.diff() - prompt_lengths)[unique.order]
    source_starts = torch.cat([offsets[unique.prompt_rows], response_starts])  # in T
    source_lengths = torch.cat([lengths, response_lengths])
    packed_starts = source_lengths.cumsum(0) - source_lengths  # of the same spans in U
    prompts = GridRows(packed_starts[: len(lengths)], lengths, 0 * lengths, 0 * lengths)
    responses = GridRows(
        query_starts=packed_starts[len(lengths) :],
        query_lengths=response_lengths,
        prompt_starts=prompts.query_starts[unique.prompt_indices],
        prompt_lengths=lengths[unique.prompt_indices],
    )
    grids = make_grids(prompts)
    grids += make_grids(responses.select(response_lengths.nonzero().flatten().tolist()))
    gather_index = list_positions(source_starts, source_lengths)
    return Layout(
        gather_index=gather_index,
        packed_positions=find_packed_positions(response_starts, responses),
        response_positions=list_positions(response_starts - 1, response_lengths),
        response_lengths=response_lengths,
        grids=grids,
        inverse_index=invert_grids(grids, len(gather_index)),
        prompt_rows=unique.prompt_rows,
    )


def list_positions(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the positions of all tokens of spans: starts [n], lengths [n] -> [their sum]."""
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


def find_unique_prompts(
    ids: torch.Tensor, prompt_lengths: torch.Tensor, images: torch.Tensor | None
) -> UniquePrompts:
    """Find the distinct prompts. Two prompts are the same if their ids and images are."""
    tokens = ids.values().tolist()
    offsets = ids.offsets().tolist()  # type: ignore[attr-defined]
    rows = [tokens[start:end] for start, end in itertools.pairwise(offsets)]
    lengths = prompt_lengths.tolist()
    image_numbers = [0] * len(rows) if images is None else images.tolist()
    # Sorted, so that the same rows in another order have the same layout and rounding.
    order = sorted(range(len(rows)), key=lambda row: (rows[row], image_numbers[row]))
    unique = UniquePrompts(order, [], [])
    index_of: dict[tuple[int, ...], int] = {}  # image number and ids -> index of the prompt
    for row in order:
        key = (image_numbers[row], *rows[row][: lengths[row]])
        if key not in index_of:
            index_of[key] = len(index_of)
            unique.prompt_rows.append(row)
        unique.prompt_indices.append(index_of[key])
    return unique


def find_packed_positions(response_starts: torch.Tensor, responses: GridRows) -> torch.Tensor:
    """Return the position in the packed row of each token of verl's row [T].

    response_starts: [B] where these responses start in T, each behind its prompt.
    """
    _, lengths, _, prompt_lengths = responses
    positions = torch.empty(int(lengths.sum() + prompt_lengths.sum()), dtype=torch.long)
    in_prompts = list_positions(response_starts - prompt_lengths, prompt_lengths)
    positions[in_prompts] = list_positions(responses.prompt_starts, prompt_lengths)
    in_responses = list_positions(response_starts, lengths)
    positions[in_responses] = list_positions(responses.query_starts, lengths)
    return positions


def make_grids(rows: GridRows) -> list[Grid]:
    """Return grids of rows with similar lengths, which are between the same powers of two."""
    similar: dict[tuple[int, int], list[int]] = {}
    lengths = zip(rows.query_lengths.tolist(), rows.prompt_lengths.tolist(), strict=True)
    for row, (queries, prompt) in enumerate(lengths):
        similar.setdefault((length_class(queries), length_class(prompt)), []).append(row)
    grids = []
    for members in similar.values():
        size = max_rows(rows.select(members))
        for start in range(0, len(members), size):
            grids.append(make_grid(rows.select(members[start : start + size])))
    return grids


def length_class(length: int) -> int:
    """Return the number of bits of a length; short lengths are one class."""
    return max(MIN_LENGTH_BITS, length.bit_length())


def max_rows(rows: GridRows) -> int:
    """Return how many of these rows a grid may hold."""
    queries = int(rows.query_lengths.max())
    keys = queries + int(rows.prompt_lengths.max())
    if keys > MAX_GRID_KEYS:
        return 1
    return max(1, MAX_GRID_SCORES // (ASSUMED_HEADS * queries * keys))


def make_grid(rows: GridRows) -> Grid:
    """Return the grid of some rows."""
    start, length, prompt_start, prompt_length = (values[:, None] for values in rows)  # [n, 1]
    offset = torch.arange(int(length.max()))  # [L]
    prompt_offset = torch.arange(int(prompt_length.max()))  # [P]
    query_index = start + offset.minimum(length - 1)  # [n, L]
    prompt_index = prompt_start + prompt_offset.minimum(prompt_length - 1)  # [n, P]
    is_beyond_prompt = (prompt_offset >= prompt_length)[:, None]  # [n, 1, P]
    is_later = offset > offset[:, None]  # [L, L]
    attn_mask = torch.cat(
        [is_beyond_prompt.expand(-1, len(offset), -1), is_later.expand(len(start), -1, -1)], dim=2
    )  # [n, L, P+L]
    return Grid(
        query_index=query_index,
        is_query=offset < length,
        key_index=torch.cat([prompt_index, query_index], dim=1),
        key_positions=torch.cat(
            [prompt_offset.expand(len(start), -1), prompt_length + offset], dim=1
        ),
        attn_mask=attn_mask[:, None, None],
    )


def invert_grids(grids: Sequence[Grid], size: int) -> torch.Tensor:
    """Return where each token of the packed row is in the joined queries of all grids [U].

    size: U.
    """
    is_query = torch.cat([grid.is_query.flatten() for grid in grids])
    query_index = torch.cat([grid.query_index.flatten() for grid in grids])
    inverse = torch.empty(size, dtype=torch.long)
    inverse[query_index[is_query]] = is_query.nonzero().flatten()
    return inverse
