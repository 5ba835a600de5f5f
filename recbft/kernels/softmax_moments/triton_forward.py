"""The forward kernel of softmax moments: one pass over the tiles that a tile of tokens reads.

With y_tj the logits times sqrt(K), scale y in base 2, and u = v - mu, mu the value of the first token of the history,
what runs along j,

    M' = max(M, max_j y)    f = 2^scale(M - M')    p_j = 2^scale(y_j - M')
    Z <- f Z + sum p    C <- f^2 C + sum p^2    E1 <- f E1 + p u    E2 <- f E2 + p u^2                   (1)

ends in

    o = E1 / Z    e = o + mu    S = max(E2 / Z - o^2, 0)    n = Z^2 / C    lse = scale M + log2 Z            (2)
    r = min((n + nu) / (S + c), cap)    the REML precision, where it is asked for in the place of S      (3)

Products are summed up in float32. p, u and u^2 enter them as float16 where the inputs are in half precision (bfloat16
has too few digits for the difference in S; u has to stay below 255), as float32 otherwise. Z and C take the p that is
not rounded.

Source: FlashAttention (arXiv 2205.14135), section 3, for the running maximum.
Shapes: H heads, T tokens of a row, K head width, W the power of two that holds it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from recbft.kernels.softmax_moments.triton_tiles import LOG2E, load_rows, logits, ones, reach, store_rows


# fmt: off
@triton.jit(do_not_specialize=["B", "T"])
def forward_kernel(
    q, k, centred, squares, terms, wide, log_decay, bias, home, place, read, v,
    mean, offset, lse, size, residual, precision,  # written; size None for the mean alone, the last two as asked for
    q_b, q_h, q_t, q_k, k_b, k_h, k_t, k_k, v_b, v_h, v_t, v_k, d_b, x_b, x_h, x_t, x_j,
    B, H, T, scale, nu, c, cap, K: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):
    # fmt: on
    """Equations (1) to (3) for a tile of tokens of one head."""
    tiles = tl.cdiv(T, OWN)
    b, h = (tl.program_id(0) // tiles // H).to(tl.int64), (tl.program_id(0) // tiles % H).to(tl.int64)
    rows = (tiles - 1 - tl.program_id(0) % tiles) * OWN + tl.arange(0, OWN)  # when causal, the longest first
    kept = rows < T
    q, k, v = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h
    home, place = home + b * T, place + b * T
    if log_decay is not None:
        log_decay += b * d_b
    if terms is not None:
        terms += b * T
        if wide is not None:
            wide += b * T * 16
            one = ones(OWN, 0, wide.dtype.element_ty)
    root = LOG2E / scale
    if bias is not None:
        bias += b * x_b + h * x_h
    to, row, at = (b * T * H + h) * K, H * K, (b * H + h) * T + rows
    queries = load_rows(q, rows, kept, q_t, q_k, K, W)
    M = tl.full([OWN], float("-inf"), tl.float32)
    Z, C = tl.zeros([OWN], tl.float32), tl.zeros([OWN], tl.float32)
    E1, E2 = tl.zeros([OWN, W], tl.float32), tl.zeros([OWN, W], tl.float32)
    first, last, within, end = reach(read + b * T, rows, tl.cast(B, tl.int64) * T, T)
    for begin in range(first, last, OTHER):
        columns = begin + tl.arange(0, OTHER)
        there = columns < T
        keys = load_rows(k, columns, there, k_t, k_k, K, W)
        u = load_rows(centred + to, columns, there, row, 1, K, W)
        y = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if wide is not None:
            y = tl.dot(one, tl.trans(load_rows(wide, columns, there, 16, 1, 16, 16)), acc=y, input_precision=PRECISION)
        y = logits(
            y, terms if wide is None else None, root,
            rows[:, None], columns[None, :], home, place, log_decay, bias, x_t, x_j, T,
            (begin < within) | (begin + OTHER > end), CAUSAL,
        )
        top = tl.maximum(M, tl.max(y, 1))
        floor = tl.where(top == float("-inf"), 0.0, top)
        # Of the difference, which is 0 where M stays; the machine makes one instruction of M scale - floor scale, whose
        # rounding is left over, and the sums would fade a little with every tile.
        f = tl.exp2((M - floor) * scale)
        p = tl.exp2(y * scale - (floor * scale)[:, None])
        Z = Z * f + tl.sum(p, 1)
        weights = p.to(u.dtype)
        E1 = tl.dot(weights, u, acc=E1 * f[:, None], input_precision=PRECISION)
        if size is not None:
            C = C * (f * f) + tl.sum(p * p, 1)
            u2 = load_rows(squares + to, columns, there, row, 1, K, W)
            E2 = tl.dot(weights, u2, acc=E2 * f[:, None], input_precision=PRECISION)
        M = top
    found = Z > 0
    Z = tl.where(found, Z, 1.0)
    o = E1 * (1.0 / Z)[:, None]
    row_home = tl.load(home + rows, mask=kept, other=-1)
    store_rows(mean + to, rows, o + load_rows(v, row_home, row_home >= 0, v_t, v_k, K, W), kept, row, K, W)
    store_rows(offset + to, rows, o, kept, row, K, W)
    tl.store(lse + at, tl.where(found, M * scale + tl.log2(Z), float("inf")), mask=kept)
    if size is not None:
        n = tl.where(found, Z * Z / tl.where(found, C, 1.0), 0.0)
        tl.store(size + at, n, mask=kept)
        # What is no number stays so, as where u^2 overflows float16: else it would be a variance of 0.
        S = tl.maximum(E2 * (1.0 / Z)[:, None] - o * o, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if residual is not None:
            store_rows(residual + to, rows, S, kept, row, K, W)
        if precision is not None:
            r = tl.where(found, n + nu, 0.0)[:, None] / (S + c)
            r = tl.minimum(r, cap, propagate_nan=tl.PropagateNan.ALL)
            store_rows(precision + to, rows, r, kept, row, K, W)
