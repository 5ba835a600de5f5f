"""The passes of SiLU moments over tiles of readers (tokens that read) and keys, for ``triton.py``.

    s = q . k scale + bias      w = SiLU(s) where t may read j, else 0                         (8.2, 8.3)
    forward     sum w v    sum w    sum w^2    sum w^2 v    sum w^2 v^2,  times share or share^2       (8.3, 8.6)
    da = g v' + g1 + 2 w share (g2 + h1 v' + h2 (v^2)')         ds = silu'(s) da share                 (a)
    readers     dq = ds k scale     dbias = ds                                                        (b)
    keys        dk = ds' q scale    dv = (w' g + (w^2)' h1 share + 2 v * ((w^2)' h2) share) share      (c)

scale is 1 / sqrt(K) and share 1 / N. Nothing assumes that the histories of a row stand together or in order: from the
segments and positions of its tile a program finds the first and the last column that it can have to do with, and masks
what lies between pair by pair.

Shapes: T tokens of a row, K head width, W the power of two that holds it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LOOKED_UP = tl.constexpr(128)  # tokens at a time
FAR = tl.constexpr(2**31 - 1)


# fmt: off
@triton.jit
def forward_pass(
    q, k, v, bias, segment, position,  # read
    mean, weight_sum, square_sum, square_mean, square_second,  # written
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, bias_b, bias_h, bias_t, bias_j, out_b, out_h, out_t,
    H, T, scale, share,
    CAUSAL: tl.constexpr, K: tl.constexpr, W: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """(8.3, 8.6) for a tile of readers."""
    tile, row, head = _place(H, T, OWN)
    readers = tile * OWN + tl.arange(0, OWN)
    own_segment, own_place = _history(segment, position, row, readers, T)
    first, end = _reach(segment, position, row, own_segment, own_place, T, CAUSAL, False, OTHER)
    x = _tokens(q + row * q_b + head * q_h, readers, q_t, T, K, W).to(OPERAND)
    if bias is not None:
        bias += row * bias_b + head * bias_h
    total, squares = tl.zeros([OWN], tl.float32), tl.zeros([OWN], tl.float32)
    of_values, of_squares = tl.zeros([OWN, W], tl.float32), tl.zeros([OWN, W], tl.float32)
    of_seconds = tl.zeros([OWN, W], tl.float32)
    for start in range(first, end, OTHER):
        keys = start + tl.arange(0, OTHER)
        key_segment, key_place = _history(segment, position, row, keys, T)
        y = _tokens(k + row * k_b + head * k_h, keys, k_t, T, K, W).to(OPERAND)
        values = _tokens(v + row * v_b + head * v_h, keys, v_t, T, K, W).to(tl.float32)
        allowed = _allowed(own_segment[:, None], own_place[:, None], key_segment[None, :], key_place[None, :], CAUSAL)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        w, _ = _weights(scores, bias, readers[:, None], keys[None, :], bias_t, bias_j, T, allowed)
        total += tl.sum(w, 1)
        squares += tl.sum(w * w, 1)
        square = (w * w).to(OPERAND)
        of_values = tl.dot(w.to(OPERAND), values.to(OPERAND), of_values, input_precision=PRECISION)
        of_squares = tl.dot(square, values.to(OPERAND), of_squares, input_precision=PRECISION)
        of_seconds = tl.dot(square, (values * values).to(OPERAND), of_seconds, input_precision=PRECISION)
    at = (row * H + head) * T + readers
    tl.store(weight_sum + at, total * share, mask=readers < T)
    tl.store(square_sum + at, squares * (share * share), mask=readers < T)
    out = row * out_b + head * out_h
    _store(mean + out, readers, of_values * share, out_t, T, K, W)
    _store(square_mean + out, readers, of_squares * (share * share), out_t, T, K, W)
    _store(square_second + out, readers, of_seconds * (share * share), out_t, T, K, W)


# fmt: off
@triton.jit
def readers_pass(
    q, k, v, bias, segment, position, g, g1, g2, h1, h2,  # read; but for g they are None unless ALL
    d_q, d_bias,  # written, the latter (B, H, T, T) without strides, or None
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, h1_b, h1_h, h1_t, h2_b, h2_h, h2_t,
    bias_b, bias_h, bias_t, bias_j, out_b, out_h, out_t,
    H, T, scale, share,
    ALL: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr, W: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """(b) for a tile of readers; where it can read nothing, dbias stays as it was."""
    tile, row, head = _place(H, T, OWN)
    readers = tile * OWN + tl.arange(0, OWN)
    own_segment, own_place = _history(segment, position, row, readers, T)
    first, end = _reach(segment, position, row, own_segment, own_place, T, CAUSAL, False, OTHER)
    x = _tokens(q + row * q_b + head * q_h, readers, q_t, T, K, W).to(OPERAND)
    mean_gradient = _tokens(g + row * g_b + head * g_h, readers, g_t, T, K, W).to(OPERAND)
    if ALL:
        at = (row * H + head) * T + readers
        sum_gradient = tl.load(g1 + at, mask=readers < T, other=0.0)[:, None]
        square_gradient = tl.load(g2 + at, mask=readers < T, other=0.0)[:, None]
        first_gradient = _tokens(h1 + row * h1_b + head * h1_h, readers, h1_t, T, K, W).to(OPERAND)
        second_gradient = _tokens(h2 + row * h2_b + head * h2_h, readers, h2_t, T, K, W).to(OPERAND)
    if bias is not None:
        bias += row * bias_b + head * bias_h
    gradient = tl.zeros([OWN, W], tl.float32)
    for start in range(first, end, OTHER):
        keys = start + tl.arange(0, OTHER)
        key_segment, key_place = _history(segment, position, row, keys, T)
        y = _tokens(k + row * k_b + head * k_h, keys, k_t, T, K, W).to(OPERAND)
        values = _tokens(v + row * v_b + head * v_h, keys, v_t, T, K, W).to(tl.float32)
        allowed = _allowed(own_segment[:, None], own_place[:, None], key_segment[None, :], key_place[None, :], CAUSAL)
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
        w, slope = _weights(scores, bias, readers[:, None], keys[None, :], bias_t, bias_j, T, allowed)
        da = tl.dot(mean_gradient, tl.trans(values.to(OPERAND)), input_precision=PRECISION)
        if ALL:
            of_squares = tl.dot(first_gradient, tl.trans(values.to(OPERAND)), input_precision=PRECISION)
            seconds = (values * values).to(OPERAND)
            of_squares = tl.dot(second_gradient, tl.trans(seconds), of_squares, input_precision=PRECISION)
            da += sum_gradient + 2 * share * w * (square_gradient + of_squares)
        ds = slope * da
        gradient = tl.dot(ds.to(OPERAND), y, gradient, input_precision=PRECISION)
        if d_bias is not None:
            pairs = ((row * H + head) * T + readers[:, None]) * T + keys[None, :]
            tl.store(d_bias + pairs, ds * share, mask=(readers < T)[:, None] & (keys < T)[None, :])
    _store(d_q + row * out_b + head * out_h, readers, gradient * (scale * share), out_t, T, K, W)


# fmt: off
@triton.jit
def keys_pass(
    q, k, v, bias, segment, position, g, g1, g2, h1, h2,  # read; but for g they are None unless ALL
    d_k, d_v,  # written
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, h1_b, h1_h, h1_t, h2_b, h2_h, h2_t,
    bias_b, bias_h, bias_t, bias_j, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    H, T, scale, share,
    ALL: tl.constexpr, CAUSAL: tl.constexpr, K: tl.constexpr, W: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """(c) for a tile of keys; tiles of pairs are (keys, readers)."""
    tile, row, head = _place(H, T, OWN)
    keys = tile * OWN + tl.arange(0, OWN)
    own_segment, own_place = _history(segment, position, row, keys, T)
    first, end = _reach(segment, position, row, own_segment, own_place, T, CAUSAL, True, OTHER)
    y = _tokens(k + row * k_b + head * k_h, keys, k_t, T, K, W).to(OPERAND)
    values = _tokens(v + row * v_b + head * v_h, keys, v_t, T, K, W).to(tl.float32)
    if bias is not None:
        bias += row * bias_b + head * bias_h
    of_scores, of_values = tl.zeros([OWN, W], tl.float32), tl.zeros([OWN, W], tl.float32)
    of_seconds = tl.zeros([OWN, W], tl.float32)
    for start in range(first, end, OTHER):
        readers = start + tl.arange(0, OTHER)
        reader_segment, reader_place = _history(segment, position, row, readers, T)
        x = _tokens(q + row * q_b + head * q_h, readers, q_t, T, K, W).to(OPERAND)
        mean_gradient = _tokens(g + row * g_b + head * g_h, readers, g_t, T, K, W).to(OPERAND)
        allowed = _allowed(
            reader_segment[None, :], reader_place[None, :], own_segment[:, None], own_place[:, None], CAUSAL
        )
        scores = tl.dot(y, tl.trans(x), input_precision=PRECISION) * scale
        w, slope = _weights(scores, bias, readers[None, :], keys[:, None], bias_t, bias_j, T, allowed)
        da = tl.dot(values.to(OPERAND), tl.trans(mean_gradient), input_precision=PRECISION)
        of_values = tl.dot(w.to(OPERAND), mean_gradient, of_values, input_precision=PRECISION)
        if ALL:
            at = (row * H + head) * T + readers
            sum_gradient = tl.load(g1 + at, mask=readers < T, other=0.0)[None, :]
            square_gradient = tl.load(g2 + at, mask=readers < T, other=0.0)[None, :]
            first_gradient = _tokens(h1 + row * h1_b + head * h1_h, readers, h1_t, T, K, W).to(OPERAND)
            second_gradient = _tokens(h2 + row * h2_b + head * h2_h, readers, h2_t, T, K, W).to(OPERAND)
            of_squares = tl.dot(values.to(OPERAND), tl.trans(first_gradient), input_precision=PRECISION)
            seconds = (values * values).to(OPERAND)
            of_squares = tl.dot(seconds, tl.trans(second_gradient), of_squares, input_precision=PRECISION)
            da += sum_gradient + 2 * share * w * (square_gradient + of_squares)
            square = (w * w * share).to(OPERAND)
            of_values = tl.dot(square, first_gradient, of_values, input_precision=PRECISION)
            of_seconds = tl.dot(square, second_gradient, of_seconds, input_precision=PRECISION)
        of_scores = tl.dot((slope * da).to(OPERAND), x, of_scores, input_precision=PRECISION)
    _store(d_k + row * dk_b + head * dk_h, keys, of_scores * (scale * share), dk_t, T, K, W)
    values = _tokens(v + row * v_b + head * v_h, keys, v_t, T, K, W).to(tl.float32)  # again: it was not kept
    _store(d_v + row * dv_b + head * dv_h, keys, (of_values + 2 * values * of_seconds) * share, dv_t, T, K, W)


@triton.jit
def _place(H, T, OWN: tl.constexpr):
    """A program's tile of tokens, row and head."""
    tiles = tl.cdiv(T, OWN)
    both = tl.program_id(0) // tiles
    return tl.program_id(0) % tiles, (both // H).to(tl.int64), (both % H).to(tl.int64)


@triton.jit
def _history(segment, position, row, columns, T):
    """Segment and position of tokens; beyond the last column there is padding."""
    at = row * T + columns
    own = tl.load(segment + at, mask=columns < T, other=-1).to(tl.int32)
    return own, tl.load(position + at, mask=columns < T, other=0).to(tl.int32)


@triton.jit
def _allowed(reader_segment, reader_place, key_segment, key_place, CAUSAL: tl.constexpr):
    """Whether a reader may read a key; what belongs to one comes as a column, what belongs to the other as a row."""
    allowed = (reader_segment == key_segment) & (key_segment >= 0)
    if CAUSAL:
        allowed = allowed & (key_place <= reader_place)
    return allowed


# fmt: off
@triton.jit
def _reach(
    segment, position, row, own_segment, own_place, T,
    CAUSAL: tl.constexpr, KEYS: tl.constexpr, OTHER: tl.constexpr,
):
    # fmt: on
    """The columns, from the first of a tile to the end, that the tokens of a tile can read; with KEYS, be read by.

    They are those within the range of its segments, and not later than its latest token or before its earliest.
    """
    least = tl.min(tl.where(own_segment >= 0, own_segment, FAR), 0)
    most = tl.max(own_segment, 0)
    if KEYS:
        limit = tl.min(tl.where(own_segment >= 0, own_place, FAR), 0)
    else:
        limit = tl.max(tl.where(own_segment >= 0, own_place, -1), 0)
    first, end = tl.zeros([LOOKED_UP], tl.int32) + T, tl.zeros([LOOKED_UP], tl.int32)
    for start in range(0, T, LOOKED_UP):
        columns = start + tl.arange(0, LOOKED_UP)
        other_segment, other_place = _history(segment, position, row, columns, T)
        met = (other_segment >= least) & (other_segment <= most)
        if CAUSAL:
            met = met & ((other_place >= limit) if KEYS else (other_place <= limit))
        first = tl.where(met, tl.minimum(first, columns), first)
        end = tl.where(met, tl.maximum(end, columns + 1), end)
    return tl.min(first, 0) // OTHER * OTHER, tl.max(end, 0)


@triton.jit
def _tokens(pointer, columns, stride, T, K: tl.constexpr, W: tl.constexpr):
    """Vectors of tokens, (columns, W), zero beyond T and K."""
    across = tl.arange(0, W)
    inside = (columns < T)[:, None] & (across < K)[None, :]
    return tl.load(pointer + columns[:, None] * stride + across[None, :], mask=inside, other=0.0)


@triton.jit
def _store(pointer, columns, found, stride, T, K: tl.constexpr, W: tl.constexpr):
    """Write (columns, W)."""
    across = tl.arange(0, W)
    inside = (columns < T)[:, None] & (across < K)[None, :]
    tl.store(pointer + columns[:, None] * stride + across[None, :], found.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _weights(scores, bias, readers, keys, bias_t, bias_j, T, allowed):
    """w of (8.2, 8.3), and its slope silu'(s), zero where a token may not read."""
    if bias is not None:
        inside = (readers < T) & (keys < T)
        scores += tl.load(bias + readers * bias_t + keys * bias_j, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(scores)
    return tl.where(allowed, scores * gate, 0.0), tl.where(allowed, gate * (1 + scores * (1 - gate)), 0.0)
