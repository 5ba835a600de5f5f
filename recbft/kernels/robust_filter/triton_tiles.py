"""What one tile of readers (queries) has to do with one tile of keys: parts that the Triton kernels share.

    lag = t_r - t_j                   e = scale |lag| + horizon                                            (1)
    E = exp(-mu e)     S = 1 - E^2, or e where mu = 0     V = s2 S + eta2 E^2 + gamma2                     (2)
    x = R2 / (nu V), or R2 / nu       y = log(1 + x) or x         L = -log V - kappa y                     (3)

Times are sums of two float32 numbers, the second what the first leaves: the difference of two times long after the
start keeps its digits. ``scale`` is 1; its gradient is that of the unit of time.

Shapes: r readers, j keys, k coordinates, real and imaginary parts apart.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LEAST_VARIANCE = tl.constexpr(1e-8)  # as of the plain form in float32


@triton.jit
def place(H, T, SIZE: tl.constexpr):
    """A program's tile, row and head, and row and head as one number."""
    program, tiles = tl.program_id(0), tl.cdiv(T, SIZE)
    both = program // tiles
    return program % tiles, (both // H).to(tl.int64), (both % H).to(tl.int64), both


@triton.jit
def load_scalars(scalars, head):
    """mu, s2, eta2, gamma2, nu, kappa, tau and scale of a head."""
    at = scalars + 8 * head
    mu, s2, eta2, gamma2 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return mu, s2, eta2, gamma2, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)


@triton.jit
def load_turned(x, token_stride, turn, rows, columns, T, K, TURN: tl.constexpr):
    """Real and imaginary parts (r, k) of tokens, turned back to where their history began."""
    inside = (rows < T)[:, None] & (columns < K)[None, :]
    at = x + rows[:, None] * token_stride + 2 * columns[None, :]
    real, imag = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
    if TURN:
        at = turn + 2 * (rows[:, None] * K + columns[None, :])
        cos, sin = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
        real, imag = real * cos - imag * sin, real * sin + imag * cos
    return real, imag


@triton.jit
def store_turned(x, token_stride, turn, rows, columns, T, K, real, imag, TURN: tl.constexpr):
    """The inverse: turned on to the tokens' own times."""
    inside = (rows < T)[:, None] & (columns < K)[None, :]
    if TURN:
        at = turn + 2 * (rows[:, None] * K + columns[None, :])
        cos, sin = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
        real, imag = real * cos + imag * sin, imag * cos - real * sin
    at = x + rows[:, None] * token_stride + 2 * columns[None, :]
    tl.store(at, real, mask=inside)
    tl.store(at + 1, imag, mask=inside)


@triton.jit
def product(a_real, a_imag, b_real, b_imag, PRECISION: tl.constexpr):
    """Re(conj(a) . b) of every row of a with every row of b."""
    real = tl.dot(a_real, tl.trans(b_real), input_precision=PRECISION)
    return tl.dot(a_imag, tl.trans(b_imag), real, input_precision=PRECISION)


@triton.jit
def squared(real, imag):
    """|x|^2 of every row."""
    return tl.sum(real * real + imag * imag, axis=1)


@triton.jit
def load_times(times, rows, T):
    """Both parts of the times of tokens."""
    at = times + 2 * rows
    return tl.load(at, mask=rows < T, other=0.0), tl.load(at + 1, mask=rows < T, other=0.0)


@triton.jit
def load_places(segment, position, rows, T):
    """Segment and position of tokens; beyond the last column there is padding."""
    return tl.load(segment + rows, mask=rows < T, other=-1), tl.load(position + rows, mask=rows < T, other=0)


@triton.jit
def load_bias(bias, row, keys, T):
    """What is added to the scores of keys."""
    added = tl.zeros_like(keys).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + row * T + keys, mask=keys < T, other=0.0)
    return added


@triton.jit
def may_read(reader_segment, reader_position, key_segment, key_position, CAUSAL: tl.constexpr):
    """(r, j), whether a reader may read a key."""
    allowed = (reader_segment[:, None] == key_segment[None, :]) & (key_segment[None, :] >= 0)
    if CAUSAL:
        allowed = allowed & (key_position[None, :] <= reader_position[:, None])
    return allowed


@triton.jit
def reach(segment, position, own, T, KEYS: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the tiles of STEP columns begin and end that a tile reads, or that read it where it has KEYS."""
    own_segment, own_position = load_places(segment, position, own, T)
    first, end = T, 0
    for start in range(0, T, STEP):
        other_segment, other_position = load_places(segment, position, start + tl.arange(0, STEP), T)
        if KEYS:
            allowed = may_read(other_segment, other_position, own_segment, own_position, CAUSAL)
        else:
            allowed = may_read(own_segment, own_position, other_segment, other_position, CAUSAL)
        met = tl.max(tl.max(allowed.to(tl.int32), axis=1), axis=0) > 0
        first = tl.where(met, tl.minimum(first, start), first)
        end = tl.where(met, start + STEP, end)
    return first, end


@triton.jit
def distances(late, late_rest, early, early_rest):
    """|lag|, (r, j)."""
    return tl.abs((late[:, None] - early[None, :]) + (late_rest[:, None] - early_rest[None, :]))


@triton.jit
def spread(elapsed, mu, s2, eta2, gamma2):
    """E, S and V of (2)."""
    E = tl.exp(-mu * elapsed)
    span = 2 * mu * elapsed
    # With a small decay 1 - E^2 would be rounding, times a large s2.
    few = tl.minimum(span, 0.25)
    series = few * (1 - few / 2 * (1 - few / 3 * (1 - few / 4 * (1 - few / 5 * (1 - few / 6)))))
    S = tl.where(mu > 0, tl.where(span < 0.25, series, 1 - E * E), elapsed)
    V = s2 * S + eta2 * E * E + gamma2
    return E, S, tl.maximum(V, LEAST_VARIANCE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def likelihood(cross, reader_square, key_square, E, V, nu, kappa, STUDENT: tl.constexpr, MULTIPLICATIVE: tl.constexpr):
    """x, y and L of (3)."""
    # A difference of near numbers can round below 0; what is no number stays so, and is no perfect match.
    x = reader_square[:, None] + E * (E * key_square[None, :] - 2 * cross)
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) / nu
    if MULTIPLICATIVE:
        x = x / V
    y = x
    if STUDENT:
        small = tl.minimum(x, 0.0625)
        series = small * (1 - small * (1 / 2 - small * (1 / 3 - small * (1 / 4 - small * (1 / 5 - small / 6)))))
        y = tl.where(x < 0.0625, series, tl.log(1 + x))
    return x, y, -tl.log(V) - kappa * y


@triton.jit
def misfit_gradients(dL, x, V, nu, kappa, STUDENT: tl.constexpr, MULTIPLICATIVE: tl.constexpr):
    """From the gradient of L those of x, of R2 and of V."""
    dx = -kappa * dL
    if STUDENT:
        dx = dx / (1 + x)
    d_residual, d_variance = dx / nu, dL
    if MULTIPLICATIVE:
        d_residual, d_variance = d_residual / V, dL + dx * x
    return dx, d_residual, tl.where(V > LEAST_VARIANCE, -d_variance / V, 0.0)


@triton.jit
def kept(weights, rows, columns, head, seed, p, DROPOUT: tl.constexpr):
    """Weights (r, j) after dropout; the same draw for the same seed, head, reader and key."""
    if DROPOUT:
        rows, columns = tl.broadcast(rows[:, None], columns[None, :])
        nothing = tl.zeros_like(rows)
        drawn, _, _, _ = tl.philox(seed, rows, columns, nothing + head, nothing)
        # 24 bits, which float32 holds exactly.
        weights = tl.where((drawn >> 8).to(tl.float32) >= p * 16777216.0, weights / (1 - p), 0.0)
    return weights
