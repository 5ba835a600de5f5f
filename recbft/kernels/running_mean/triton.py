"""The running mean on a GPU: sums of parts of the tokens, then one launch that adds them up and moves the mean.

Shapes: B rows, T tokens, N = B T, D width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.kernels.dispatch import launched_beside
from recbft.kernels.triton_parts import added, cut, own_columns

ELEMENTS = 4096  # of a tile of a program
COLUMNS = 64  # of a program, at most
MOST_PARTS = 128  # about as many as there are multiprocessors; the last launch reads them all


def remember_tokens(mean: Tensor, values: Tensor, segment: Tensor, updates: Tensor, least: float) -> Tensor:
    """As the mechanism says; ``least``: w after the first update."""
    B, T, D = values.shape
    before = torch.empty_like(mean)
    columns = min(COLUMNS, triton.next_power_of_2(D))
    tokens = ELEMENTS // columns
    tiles = triton.cdiv(B * T, tokens)
    of_part = max(1, triton.cdiv(tiles, MOST_PARTS))  # tiles
    num_parts = triton.cdiv(tiles, of_part)
    sums = values.new_empty(num_parts, D)
    counts = values.new_empty(num_parts)
    if num_parts:
        launched_beside(values, _sums[num_parts, triton.cdiv(D, columns)])(
            values.contiguous(), segment, *segment.stride(), sums, counts, B * T, T, D, of_part,
            TOKENS=tokens, COLUMNS=columns,
        )  # fmt: skip
    grid, constants = cut(num_parts, D)
    launched_beside(values, _move[grid])(mean, before, sums, counts, updates, least, num_parts, D, **constants)
    return before


# fmt: off
@triton.jit
def _sums(
    values, segments, of_row, of_column,  # read; the segments' strides
    sums, counts,  # written, by program
    num_tokens, length, width, tiles, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """Of each column the sum over the real tokens of a part, and their number."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total, count = tl.zeros((TOKENS, COLUMNS), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for tile in range(0, tiles):
        tokens = (tl.program_id(0).to(tl.int64) * tiles + tile) * TOKENS + tl.arange(0, TOKENS)
        known = tokens < num_tokens
        at = (tokens // length) * of_row + (tokens % length) * of_column
        keep = (tl.load(segments + at, mask=known, other=-1) >= 0).to(tl.float32)
        at = tokens[:, None] * width + columns[None, :]
        total += keep[:, None] * tl.load(values + at, mask=known[:, None] & inside[None, :], other=0.0)
        count += keep
    at = tl.program_id(0).to(tl.int64)
    tl.store(sums + at * width + columns, tl.sum(total, 0), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(counts + at, tl.sum(count, 0))


# fmt: off
@triton.jit
def _move(
    means, before,  # moved; written: what they were
    sums, counts, updates,  # read
    least, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """(2), as ``Tensor.lerp_`` computes it."""
    columns = own_columns(COLUMNS)
    inside = columns < width
    count = tl.sum(added(counts, num_parts, tl.arange(0, 1), 1, ROWS, 1), 0)
    value = added(sums, num_parts, columns, width, ROWS, COLUMNS) / tl.maximum(count, 1.0)
    mean = tl.load(means + columns, mask=inside, other=0.0)
    weight = tl.where(tl.load(updates) == 0, 1.0, least)
    towards, back = mean + weight * (value - mean), value - (value - mean) * (1 - weight)
    tl.store(before + columns, mean, mask=inside)
    tl.store(means + columns, tl.where(weight < 0.5, towards, back), mask=inside)
