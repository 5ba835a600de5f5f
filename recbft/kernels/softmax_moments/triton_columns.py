"""What every tile of readers wants of its columns, worked out once before the passes of softmax moments.

For a column j, with mu the value of the first token of its history,

    u_j = v_j - mu    u_j^2    c_j = sqrt(K) (log_precision_j - [causal] log_decay position_j)

so that the passes read operands of their products as they lie in memory. u and u^2 are rounded to the type of the
products, u before it is squared. c is given as it is, and as a row of 16 columns for a product (``triton_tiles``).

Shapes: B rows of the batch, H heads, T tokens of a row, K head width, W the power of two that holds it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from recbft.kernels.softmax_moments.triton_tiles import beside, load_rows, store_rows


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
        first = kept & (h == 0)
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
