"""What the Triton kernels of softmax moments share: rows of a matrix, logits, and which tokens may read which.

Nothing assumes that the histories of a row stand together or in order. ``spans_kernel`` looks at every pair of tokens
once and finds for each token t, as one that reads and as one that is read,

    home_t              the column of the earliest token of t's history, -1 for padding
    start_t, stop_t     the columns from the first to the last that t may read, or that may read t
    gaps_t              how many of these columns may not

so that tiles outside the spans of all tokens are skipped, and tiles within spans without gaps need no mask.
Logits y are those of the softmax times sqrt(K), as products of queries and keys come, and -inf where a token may not
read: exp(y / sqrt(K)) is 2^(scale y) with scale = log2(e) / sqrt(K).

A number that a whole row or column of a tile has in common takes an instruction to be read for each pair, while tensor
cores wait: so it can lie in memory as three bfloat16, which hold its 24 bits, and enter as 16 columns more of a product
whose other side is 1 in three of them (``parts``, ``ones``).

What every tile of readers wants of its columns is worked out once, by ``columns_kernel``. For a column j, with mu the
value of the first token of its history,

    u_j = v_j - mu    u_j^2    c_j = sqrt(K) (log_precision_j - [causal] log_decay position_j)

so that the passes read operands of their products as they lie in memory. u and u^2 are rounded to the type of the
products, u before it is squared. c is given as it is, and as a row of 16 columns for a product (``parts``).

Shapes: B rows of the batch, H heads, T tokens of a row, K head width, W the power of two that holds it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def load_rows(base, rows, kept, row_stride, stride, K: tl.constexpr, W: tl.constexpr):
    """Rows of a (T, K) matrix, (rows, W): zeros in rows that are not kept and past the last column."""
    across = tl.arange(0, W)
    mask = kept[:, None]
    if K < W:
        mask = mask & (across < K)[None, :]
    return tl.load(base + rows[:, None] * row_stride + across[None, :] * stride, mask=mask, other=0.0)


@triton.jit
def store_rows(base, rows, values, kept, row_stride, K: tl.constexpr, W: tl.constexpr):
    """Write (rows, W) into the rows of a (T, K) matrix that are kept."""
    across = tl.arange(0, W)
    mask = kept[:, None]
    if K < W:
        mask = mask & (across < K)[None, :]
    tl.store(base + rows[:, None] * row_stride + across[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def reach(spans, rows, field, T):
    """The columns (first, last) that some tokens of a tile reach, and (first, last) of those that all of them do."""
    kept = rows < T
    start, stop = tl.load(spans + rows, mask=kept, other=T), tl.load(spans + field + rows, mask=kept, other=0)
    gaps = tl.load(spans + 2 * field + rows, mask=kept, other=0)
    within = tl.max(tl.where(kept, start, 0), 0)
    end = tl.min(tl.where(kept & (gaps == 0), stop, tl.where(kept, 0, T)), 0)
    return tl.min(start, 0), tl.max(stop, 0), within, end


@triton.jit
def parts(x):
    """Three bfloat16 (as float32) that sum up to x, but for what is below its 24 bits."""
    high = x.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(tl.abs(high) == float("inf"), 0.0, x - high)  # nothing, of a log precision of -inf or next to it
    middle = rest.to(tl.bfloat16).to(tl.float32)
    return high, middle, (rest - middle).to(tl.bfloat16).to(tl.float32)


@triton.jit
def beside(across, x, first: tl.constexpr):
    """(rows, 16) with the parts of x in three columns from ``first``, 0 in others."""
    high, middle, low = parts(x)
    rest = tl.where((across == first + 2)[None, :], low[:, None], 0.0)
    rest = tl.where((across == first + 1)[None, :], middle[:, None], rest)
    return tl.where((across == first)[None, :], high[:, None], rest)


@triton.jit
def ones(SIZE: tl.constexpr, first: tl.constexpr, TYPE: tl.constexpr):
    """(SIZE, 16) with 1 in three columns from ``first``."""
    across = tl.arange(0, 16)[None, :] + tl.zeros([SIZE, 1], tl.int32)
    return tl.where((across >= first) & (across < first + 3), 1.0, 0.0).to(TYPE)


# fmt: off
@triton.jit
def logits(
    y, terms, root, readers, columns, home, place, log_decay, bias, x_t, x_j, T, masked, CAUSAL: tl.constexpr,
):
    # fmt: on
    """Logits of a tile of pairs from their products and what is added; ``root`` is sqrt(K).

    Readers come as (rows, 1) and columns as (1, columns), or the other way round.
    """
    if terms is not None:
        y += tl.load(terms + columns, mask=columns < T, other=0.0)
    if log_decay is not None and not CAUSAL:  # a causal softmax has it in the terms of its columns
        y += distance(place, readers, columns, T) * (tl.load(log_decay).to(tl.float32) * root)
    if bias is not None:
        there = (readers < T) & (columns < T)
        y += tl.load(bias + readers * x_t + columns * x_j, mask=there, other=0.0).to(tl.float32) * root
    if masked:
        column_home = tl.load(home + columns, mask=columns < T, other=-1)
        allowed = (tl.load(home + readers, mask=readers < T, other=-1) == column_home) & (column_home >= 0)
        if CAUSAL:
            column_place = tl.load(place + columns, mask=columns < T, other=0)
            allowed = allowed & (column_place <= tl.load(place + readers, mask=readers < T, other=0))
        y = tl.where(allowed, y, float("-inf"))
    return y


@triton.jit
def distance(place, readers, columns, T):
    """How many positions lie between the tokens of each pair, float32."""
    reader_place = tl.load(place + readers, mask=readers < T, other=0)
    return tl.abs(reader_place - tl.load(place + columns, mask=columns < T, other=0)).to(tl.float32)


# fmt: off
@triton.jit
def spans_kernel(
    segment, position,  # read
    home, place, read, readers,  # written; the last two hold start, stop and gaps, (3, B, T)
    s_b, s_t, p_b, p_t, B, T, CAUSAL: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    """Home, position and spans of the tokens of a tile."""
    tiles = tl.cdiv(T, TILE)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    rows = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    own = tl.load(segment + b * s_b + rows * s_t, mask=rows < T, other=-1)
    own_place = tl.load(position + b * p_b + rows * p_t, mask=rows < T, other=0).to(tl.int32)
    earliest = tl.full([TILE], FAR, tl.int32)
    found = tl.full([TILE], -1, tl.int32)
    start = tl.full([TILE], FAR, tl.int32)
    stop = tl.zeros([TILE], tl.int32)
    count = tl.zeros([TILE], tl.int32)
    start_of, stop_of, count_of = start, stop, count
    for first in range(0, T, TILE):
        columns = first + tl.arange(0, TILE)
        other = tl.load(segment + b * s_b + columns * s_t, mask=columns < T, other=-1)[None, :]
        other_place = tl.load(position + b * p_b + columns * p_t, mask=columns < T, other=0).to(tl.int32)[None, :]
        same = (own[:, None] == other) & (other >= 0)
        least = tl.min(tl.where(same, other_place, FAR), 1)
        at_least = tl.min(tl.where(same & (other_place == least[:, None]), columns[None, :], FAR), 1)
        found = tl.where(least < earliest, at_least, found)
        earliest = tl.minimum(earliest, least)
        reads, is_read = same, same
        if CAUSAL:
            reads = same & (other_place <= own_place[:, None])
            is_read = same & (other_place >= own_place[:, None])
        start, stop, count = stretch(start, stop, count, reads, columns)
        start_of, stop_of, count_of = stretch(start_of, stop_of, count_of, is_read, columns)
    to, field = b * T + rows, tl.cast(B, tl.int64) * T
    tl.store(home + to, found, mask=rows < T)
    tl.store(place + to, own_place, mask=rows < T)
    store_spans(read + to, field, start, stop, count, rows < T)
    store_spans(readers + to, field, start_of, stop_of, count_of, rows < T)


@triton.jit
def stretch(start, stop, count, met, columns):
    """Spans that take in the columns that are met."""
    start = tl.minimum(start, tl.min(tl.where(met, columns[None, :], FAR), 1))
    stop = tl.maximum(stop, tl.max(tl.where(met, columns[None, :] + 1, 0), 1))
    return start, stop, count + tl.sum(met.to(tl.int32), 1)


@triton.jit
def store_spans(base, field, start, stop, count, kept):
    """Write start, stop and gaps."""
    tl.store(base, start, mask=kept)
    tl.store(base + field, stop, mask=kept)
    tl.store(base + 2 * field, tl.where(stop > 0, stop - start - count, 0), mask=kept)


# fmt: off
@triton.jit(do_not_specialize=["B", "T", "p_b"])
def columns_kernel(
    v, log_precision, log_decay, home, place,
    centred, squares, terms, wide,  # written; squares None for the mean alone, terms where no column adds any
    v_b, v_h, v_t, v_k, p_b, p_t, d_b, root, H, T, K: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
):
    # fmt: on
    """u, u^2 and c for a tile of columns of one head; c, which heads share, from the first."""
    tiles = tl.cdiv(T, TILE)
    b, h = (tl.program_id(0) // tiles // H).to(tl.int64), (tl.program_id(0) // tiles % H).to(tl.int64)
    columns = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    kept = columns < T
    column_home = tl.load(home + b * T + columns, mask=kept, other=-1)
    there = column_home >= 0
    v += b * v_b + h * v_h
    values = load_rows(v, columns, there, v_t, v_k, K, W).to(tl.float32)
    u = (values - load_rows(v, column_home, there, v_t, v_k, K, W).to(tl.float32)).to(centred.dtype.element_ty)
    to, row = (b * T * H + h) * K, H * K
    store_rows(centred + to, columns, u, kept, row, K, W)
    if squares is not None:
        store_rows(squares + to, columns, u * u, kept, row, K, W)
    if terms is not None:
        first = columns + h * T < T  # what is kept, in the first head alone
        c = tl.zeros([TILE], tl.float32)
        if log_precision is not None:
            # Not of padding, where it may be no number: in a product nothing masks it.
            trusted = tl.load(log_precision + b * p_b + columns * p_t, mask=first & there, other=0.0).to(tl.float32)
            c += trusted * root
        if log_decay is not None:
            column_place = tl.load(place + b * T + columns, mask=first, other=0).to(tl.float32)
            c -= column_place * (tl.load(log_decay + b * d_b).to(tl.float32) * root)
        tl.store(terms + b * T + columns, c, mask=first)
        if wide is not None:
            across = tl.arange(0, 16)
            rows = beside(across, c, 0).to(wide.dtype.element_ty)
            tl.store(wide + (b * T + columns)[:, None] * 16 + across[None, :], rows, mask=first[:, None])
