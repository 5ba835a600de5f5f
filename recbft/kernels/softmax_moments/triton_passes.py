"""The passes of softmax moments over tiles of tokens: one kernel forward, two backward.

Forward goes over the tiles that a tile of tokens reads. With y_tj the logits times sqrt(K), scale y in base 2, and u =
v - mu, mu the value of the first token of the history, what runs along j,

    M' = max(M, max_j y)    f = 2^scale(M - M')    p_j = 2^scale(y_j - M')
    Z <- f Z + sum p    C <- f^2 C + sum p^2    E1 <- f E1 + p u    E2 <- f E2 + p u^2

ends in

    o = E1 / Z    e = o + mu (2.4)    S = max(E2 / Z - o^2, 0) (2.6)    n = Z^2 / C (2.5)    lse = scale M + log2 Z
    r = min((n + nu) / (S + c), cap)    the REML precision (2.8), where it is asked for in the place of S

Products are summed up in float32. p, u and u^2 enter them as float16 where the inputs are in half precision (bfloat16
has too few digits for the difference in S; u has to stay below 255), as float32 otherwise. Z and C take the p that is
not rounded.

Source: FlashAttention (arXiv 2205.14135), section 3, for the running maximum.

Backward makes two passes, each sum in one program, so that two runs are bitwise equal. With o = e - mu, G = g_e - 2 g_S
o, and the logits formed again,

    a = 2^(scale y - lse)    dA = G u' + g_S (u^2)' - 2 g_n n^2 a                                        (a)
    D = G . o + g_S . (S + o^2) - 2 g_n n    (which is sum_j a dA)        dl = a * (dA - D)              (b)
    dq = dl k / sqrt(K)                                                       by readers    (c)
    dk = dl' q / sqrt(K)    dv = a' G + 2 u * (a' g_S)                        by columns    (d)
    d log_precision_j = sum_t dl    d log_decay = sum_tj dl |t - j|           by columns    (e)

A bias per pair gets dl itself, zeros where the kernel does not come by: the rows and heads that share it are summed up
outside. The products take their operands in the type of the inputs, and sum up in float32.

Shapes: B rows, H heads, T tokens of a row, K head width, W the power of two that holds it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from recbft.kernels.softmax_moments.triton_tiles import (
    LN2,
    LOG2E,
    beside,
    distance,
    load_rows,
    logits,
    ones,
    reach,
    store_rows,
)


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
    """(2.4) to (2.6), or (2.4) and (2.8), for a tile of tokens of one head."""
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


@triton.jit
def logit_gradients(x, products, push):
    """a and dl of (a) and (b), from log2 a and dA - D without the last term of dA; ``push`` is -2 g_n n^2."""
    a = tl.exp2(x)
    if push is not None:
        products += push * a
    return a, a * products


@triton.jit
def through_reml(g_r, r, n, nu, c, cap):
    """g_S and g_n of r = min((n + nu) / (S + c), cap), and S itself where g_S is not 0."""
    m = tl.where(n > 0, n + nu, 1.0)[:, None]
    flow = tl.where(r < cap, g_r * r, 0.0) / m
    return -flow * r, tl.sum(flow, 1), m / tl.where(r > 0, r, 1.0) - c


# fmt: off
@triton.jit(do_not_specialize=["B", "T"])
def query_kernel(
    q, k, centred, squares, terms, wide, log_decay, bias, home, place, read,
    grad_mean, grad_size, grad_residual, grad_precision, offset, lse, size, residual, precision,  # may be None
    d_q, pulled, spread, delta, push, d_bias,  # written: G and g_S of (a), D and its last term; may be None
    q_b, q_h, q_t, q_k, k_b, k_h, k_t, k_k, d_b, x_b, x_h, x_t, x_j,
    e_b, e_h, e_t, e_k, n_b, n_h, n_t, s_b, s_h, s_t, s_k, r_b, r_h, r_t, r_k,
    B, H, T, scale, nu, c, cap, K: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):
    # fmt: on
    """Equations (a) to (c) for a tile of tokens of one head."""
    tiles = tl.cdiv(T, OWN)
    b, h = (tl.program_id(0) // tiles // H).to(tl.int64), (tl.program_id(0) // tiles % H).to(tl.int64)
    rows = (tiles - 1 - tl.program_id(0) % tiles) * OWN + tl.arange(0, OWN)  # when causal, the longest first
    kept = rows < T
    q, k = q + b * q_b + h * q_h, k + b * k_b + h * k_h
    home, place = home + b * T, place + b * T
    if log_decay is not None:
        log_decay += b * d_b
    if terms is not None:
        terms += b * T
    root = LOG2E / scale
    if bias is not None:
        bias += b * x_b + h * x_h
    OPERAND: tl.constexpr = q.dtype.element_ty
    queries = load_rows(q, rows, kept, q_t, q_k, K, W)
    to, row, at = (b * T * H + h) * K, H * K, (b * H + h) * T + rows
    row_lse = tl.load(lse + at, mask=kept, other=float("inf"))
    o = load_rows(offset + to, rows, kept, row, 1, K, W).to(tl.float32)
    G = tl.zeros([OWN, W], tl.float32)
    if grad_mean is not None:
        G += load_rows(grad_mean + b * e_b + h * e_h, rows, kept, e_t, e_k, K, W).to(tl.float32)
    if push is not None:
        n = tl.load(size + at, mask=kept, other=0.0)
        g_n = tl.zeros([OWN], tl.float32)
    if grad_size is not None:
        g_n += tl.load(grad_size + b * n_b + h * n_h + rows * n_t, mask=kept, other=0.0).to(tl.float32)
    if grad_residual is not None:
        g_S = load_rows(grad_residual + b * s_b + h * s_h, rows, kept, s_t, s_k, K, W).to(tl.float32)
        S = load_rows(residual + to, rows, kept, row, 1, K, W)
    if grad_precision is not None:
        g_r = load_rows(grad_precision + b * r_b + h * r_h, rows, kept, r_t, r_k, K, W).to(tl.float32)
        g_S, g_n, S = through_reml(g_r, load_rows(precision + to, rows, kept, row, 1, K, W), n, nu, c, cap)
    row_push = None
    row_delta = tl.zeros([OWN], tl.float32)
    if push is not None:
        row_delta += -2 * g_n * n
        pushed = row_delta * n
        if delta.dtype.element_ty == tl.float32:
            tl.store(push + at, pushed, mask=kept)
        row_push = pushed[:, None]
    # The operands as they are rounded, so that dl still sums to zero along j.
    if spread is not None:
        spread_rows = g_S.to(OPERAND)
        g_S = spread_rows.to(tl.float32)
        G -= 2 * g_S * o
        row_delta += tl.sum(g_S * (S + o * o), 1)
        store_rows(spread + to, rows, spread_rows, kept, row, K, W)
    pull = G.to(OPERAND)
    row_delta += tl.sum(pull.to(tl.float32) * o, 1)
    if delta.dtype.element_ty == tl.float32:
        tl.store(delta + at, row_delta, mask=kept)
    else:
        across = tl.arange(0, 16)
        shared = beside(across, tl.where(row_lse < float("inf"), row_lse / -scale, 0.0), 0)
        shared += beside(across, -row_delta, 3)
        if push is not None:
            shared += beside(across, pushed, 6)
        tl.store(delta + at[:, None] * 16 + across[None, :], shared.to(delta.dtype.element_ty), mask=kept[:, None])
    if wide is not None:
        wide += b * T * 16
        one = ones(OWN, 0, wide.dtype.element_ty)
    store_rows(pulled + to, rows, pull, kept, row, K, W)
    gradient = tl.zeros([OWN, W], tl.float32)
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
        products = tl.dot(pull, tl.trans(u), input_precision=PRECISION)
        if spread is not None:
            u2 = load_rows(squares + to, columns, there, row, 1, K, W)
            products = tl.dot(spread_rows, tl.trans(u2), acc=products, input_precision=PRECISION)
        _, dl = logit_gradients(y * scale - row_lse[:, None], products - row_delta[:, None], row_push)
        gradient = tl.dot(dl.to(OPERAND), keys, acc=gradient, input_precision=PRECISION)
        if d_bias is not None:
            pairs = at[:, None] * T + columns[None, :]
            tl.store(d_bias + pairs, dl.to(d_bias.dtype.element_ty), mask=kept[:, None] & there[None, :])
    store_rows(d_q + to, rows, gradient * (scale * LN2), kept, row, K, W)


# fmt: off
@triton.jit(do_not_specialize=["B", "T"])
def key_kernel(
    q, k, centred, squares, terms, wide, log_decay, bias, home, place, readers,
    lse, pulled, spread, delta, push,  # as query_kernel left them
    d_k, d_v, d_terms, d_decay,  # written; the last two may be None
    q_b, q_h, q_t, q_k, k_b, k_h, k_t, k_k, d_b, x_b, x_h, x_t, x_j,
    B, H, T, scale, K: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr,
):
    # fmt: on
    """Equations (d) and (e) for a tile of columns of one head; the tiles of pairs are (columns, rows) here."""
    tiles = tl.cdiv(T, OWN)
    b, h = (tl.program_id(0) // tiles // H).to(tl.int64), (tl.program_id(0) // tiles % H).to(tl.int64)
    columns = tl.program_id(0) % tiles * OWN + tl.arange(0, OWN)
    kept = columns < T
    q, k = q + b * q_b + h * q_h, k + b * k_b + h * k_h
    home, place = home + b * T, place + b * T
    if log_decay is not None:
        log_decay += b * d_b
    if terms is not None:
        terms += b * T
    root = LOG2E / scale
    if bias is not None:
        bias += b * x_b + h * x_h
    to, row, at = (b * T * H + h) * K, H * K, (b * H + h) * T
    keys = load_rows(k, columns, kept, k_t, k_k, K, W)
    u = load_rows(centred + to, columns, kept, row, 1, K, W)
    SHARED: tl.constexpr = delta.dtype.element_ty != tl.float32
    if SHARED:
        delta += at * 16
        of_lse, of_delta = ones(OWN, 0, delta.dtype.element_ty), ones(OWN, 3, delta.dtype.element_ty)
        of_push, own = ones(OWN, 6, delta.dtype.element_ty), tl.zeros([OWN], tl.float32)
        if terms is not None:
            own += tl.load(terms + columns, mask=kept, other=0.0) * scale
    since = tl.load(place + tl.program_id(0) % tiles * OWN)  # lags are counted from here, which loses few digits
    key_gradient, value_gradient = tl.zeros([OWN, W], tl.float32), tl.zeros([OWN, W], tl.float32)
    square_gradient = tl.zeros([OWN, W], tl.float32)
    total, lagged = tl.zeros([OWN], tl.float32), tl.zeros([OWN], tl.float32)
    first, last, within, end = reach(readers + b * T, columns, tl.cast(B, tl.int64) * T, T)
    for begin in range(first, last, OTHER):
        rows = begin + tl.arange(0, OTHER)
        there = rows < T
        queries = load_rows(q, rows, there, q_t, q_k, K, W)
        pull = load_rows(pulled + to, rows, there, row, 1, K, W)
        y = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        if SHARED:
            both = tl.trans(load_rows(delta, rows, there, 16, 1, 16, 16))
            y = tl.dot(of_lse, both, acc=y, input_precision=PRECISION)
        y = logits(
            y, terms if not SHARED else None, root,
            rows[None, :], columns[:, None], home, place, log_decay, bias, x_t, x_j, T,
            (begin < within) | (begin + OTHER > end), CAUSAL,
        )
        products = tl.dot(u, tl.trans(pull), input_precision=PRECISION)
        if spread is not None:
            spread_rows = load_rows(spread + to, rows, there, row, 1, K, W)
            products = tl.dot(u * u, tl.trans(spread_rows), acc=products, input_precision=PRECISION)
        if SHARED:
            products = tl.dot(of_delta, both, acc=products, input_precision=PRECISION)
            x = y * scale + own[:, None]
        else:
            x = y * scale - tl.load(lse + at + rows, mask=there, other=float("inf"))[None, :]
            products -= tl.load(delta + at + rows, mask=there, other=0.0)[None, :]
        row_push = None
        if push is not None:
            if SHARED:
                row_push = tl.dot(of_push, both, input_precision=PRECISION)
            else:
                row_push = tl.load(push + at + rows, mask=there, other=0.0)[None, :]
        a, dl = logit_gradients(x, products, row_push)
        total += tl.sum(dl, 1)
        if d_decay is not None:
            if CAUSAL:
                row_place = tl.load(place + rows, mask=there, other=0) - since
                lagged += tl.sum(dl * row_place.to(tl.float32)[None, :], 1)
            else:
                lagged += tl.sum(dl * distance(place, rows[None, :], columns[:, None], T), 1)
        weights = a.to(pull.dtype)
        value_gradient = tl.dot(weights, pull, acc=value_gradient, input_precision=PRECISION)
        if spread is not None:
            square_gradient = tl.dot(weights, spread_rows, acc=square_gradient, input_precision=PRECISION)
        key_gradient = tl.dot(dl.to(queries.dtype), queries, acc=key_gradient, input_precision=PRECISION)
    store_rows(d_k + to, columns, key_gradient * (scale * LN2), kept, row, K, W)
    u = load_rows(centred + to, columns, kept, row, 1, K, W).to(tl.float32)  # again: there is no room to keep it
    store_rows(d_v + to, columns, value_gradient + 2 * u * square_gradient, kept, row, K, W)
    if d_terms is not None:
        tl.store(d_terms + at + columns, total, mask=kept)
    if d_decay is not None:
        if CAUSAL:
            column_place = tl.load(place + columns, mask=kept, other=0) - since
            lagged -= column_place.to(tl.float32) * total
        tl.store(d_decay + tl.program_id(0), tl.sum(tl.where(kept, lagged, 0.0), 0))
