"""The three passes of robust filter attention over tiles of readers (queries) and keys.

One tile of readers and one of keys have in common

    lag = t_r - t_j                   e = scale |lag| + horizon                                            (a)
    E = exp(-mu e)     S = 1 - E^2, or e where mu = 0     V = s2 S + eta2 E^2 + gamma2                     (b)
    x = R2 / (nu V), or R2 / nu       y = log(1 + x) or x         L = -log V - kappa y                     (c)

Times are sums of two float32 numbers, the second what the first leaves: the difference of two times long after the
start keeps its digits. ``scale`` is 1; its gradient is that of the unit of time.

Forward, for a tile of readers and each tile of keys that they can reach, with an online softmax: its sums are scaled by
exp(m - m') when the largest score m grows to m'. Kept are the mean and the log of the softmax's denominator.

Backward, with g the gradient of the mean turned as values are, g_e that of the evidence, D = Re(conj(g) . mean) and
the letters above:

    w = (g v') drop      dl = a (w E - D)      dL = tau dl + g_e exp(L)      dx = -kappa dL / (1 + x) or -kappa dL  (d)
    dR2 = dx / (nu V)    dV = -(dL + dx x) / V; without multiplying dR2 = dx / nu, dV = -dL / V                     (e)
    dq = 2 (q sum_j dR2 - (dR2 E) k)     dk = 2 (k sum_t dR2 E^2 - (dR2 E)' q)     dv = (a E drop)' g               (f)
    d log E = E (a w + 2 dR2 (E |k|^2 - q k'))     d span = -E^2 dV (eta2 - s2), without s2 where mu = 0            (g)
    d mu = sum e (2 d span - d log E)    d scale = sum |lag| (mu (2 d span - d log E) + s2 dV where mu = 0)         (h)
    d s2 = sum dV S    d eta2 = sum dV E^2    d gamma2 = sum dV    d tau = sum dl L    d b_j = sum dl_tj            (i)
    d kappa = -sum dL y                  d nu = -sum dx x / nu beside what comes through kappa = (nu + K) / K       (j)

One kernel goes over keys for each tile of readers, one over readers for each tile of keys, so that every number is
written once and nothing is added up in an order of chance. span is 2 mu e, and g v' a product of real parts.

Shapes: r readers, j keys, k coordinates, real and imaginary parts apart; T tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

LEAST_VARIANCE = tl.constexpr(1e-8)  # as of the plain form in float32
# Else a kernel is compiled again for a length or a seed that 16 divides.
VARYING = ["times_row", "turns_row", "H", "T", "horizon", "p", "seed"]


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def forward(
    q, k, v, mean, evidence, log_sum, scalars, bias, segment, position, asked, read, asks, reads,
    in_row, in_head, in_token, out_row, out_head, out_token, times_row, turns_row, H, T, K, horizon, p, seed,
    CAUSAL: tl.constexpr, STUDENT: tl.constexpr, MULTIPLICATIVE: tl.constexpr, TURN: tl.constexpr,
    TURN_VALUES: tl.constexpr, WITH_EVIDENCE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):
    tile, row, head, both = place(H, T, OWN)
    readers, columns = tile * OWN + tl.arange(0, OWN), tl.arange(0, WIDTH)
    mu, s2, eta2, gamma2, nu, kappa, tau, scale = load_scalars(scalars, head)
    own, turning = row * in_row + head * in_head, row * turns_row + head * T * K * 2
    asks, reads, segment, position = asks + turning, reads + turning, segment + row * T, position + row * T
    asked, read = asked + row * times_row, read + row * times_row
    q_real, q_imag = load_turned(q + own, in_token, asks, readers, columns, T, K, TURN)
    q_square = squared(q_real, q_imag)
    r_segment, r_position = load_places(segment, position, readers, T)
    late, late_rest = load_times(asked, readers, T)
    best, total = tl.full([OWN], float("-inf"), tl.float32), tl.zeros([OWN], tl.float32)
    seen = tl.zeros([OWN], tl.float32)
    m_real, m_imag = tl.zeros([OWN, WIDTH], tl.float32), tl.zeros([OWN, WIDTH], tl.float32)
    first, end = reach(segment, position, readers, T, False, STEP, CAUSAL)
    for start in range(first, end, STEP):
        keys = start + tl.arange(0, STEP)
        k_real, k_imag = load_turned(k + own, in_token, reads, keys, columns, T, K, TURN)
        early, early_rest = load_times(read, keys, T)
        E, _, V = spread(scale * distances(late, late_rest, early, early_rest) + horizon, mu, s2, eta2, gamma2)
        cross, k_square = product(q_real, q_imag, k_real, k_imag, PRECISION), squared(k_real, k_imag)
        _, _, L = likelihood(cross, q_square, k_square, E, V, nu, kappa, STUDENT, MULTIPLICATIVE)
        j_segment, j_position = load_places(segment, position, keys, T)
        allowed = may_read(r_segment, r_position, j_segment, j_position, CAUSAL)
        if WITH_EVIDENCE:
            seen += tl.sum(tl.where(allowed, tl.exp(L), 0.0), axis=1)
        score = tl.where(allowed, tau * L + load_bias(bias, row, keys, T)[None, :], float("-inf"))
        grown = tl.maximum(best, tl.max(score, axis=1))
        level = tl.where(grown == float("-inf"), 0.0, grown)  # nothing to read so far
        a, shrink = tl.exp(score - level[:, None]), tl.exp(best - level)
        best, total = grown, total * shrink + tl.sum(a, axis=1)
        a = kept(a * E, readers, keys, both, seed, p, DROPOUT)
        v_real, v_imag = load_turned(v + own, in_token, reads, keys, columns, T, K, TURN_VALUES)
        m_real = tl.dot(a, v_real, m_real * shrink[:, None], input_precision=PRECISION)
        m_imag = tl.dot(a, v_imag, m_imag * shrink[:, None], input_precision=PRECISION)
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    mean += row * out_row + head * out_head
    m_real, m_imag = m_real / total[:, None], m_imag / total[:, None]
    store_turned(mean, out_token, asks, readers, columns, T, K, m_real, m_imag, TURN_VALUES)
    at, inside = both.to(tl.int64) * T + readers, readers < T
    tl.store(log_sum + at, tl.where(blind, 0.0, best + tl.log(total)), mask=inside)
    tl.store(evidence + at, seen, mask=inside)


@triton.jit
def _weights_and_gradients(
    q_real, q_imag, k_real, k_imag, g_real, g_imag, v_real, v_imag, log_sum, spent, grad_evidence, bias, allowed, E, V,
    nu, kappa, tau, readers, keys, both, seed, p,
    STUDENT: tl.constexpr, MULTIPLICATIVE: tl.constexpr, WITH_EVIDENCE: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What (d) and (e) need of a tile, and give."""
    cross, k_square = product(q_real, q_imag, k_real, k_imag, PRECISION), squared(k_real, k_imag)
    x, y, L = likelihood(
        cross, squared(q_real, q_imag), k_square, E, V, nu, kappa, STUDENT, MULTIPLICATIVE
    )
    a = tl.where(allowed, tl.exp(tau * L + bias[None, :] - log_sum[:, None]), 0.0)
    w = product(g_real, g_imag, v_real, v_imag, PRECISION)
    aw = a * kept(w, readers, keys, both, seed, p, DROPOUT)
    dl = aw * E - a * spent[:, None]
    dL = tau * dl
    if WITH_EVIDENCE:
        dL += tl.where(allowed, grad_evidence[:, None] * tl.exp(L), 0.0)
    dx, d_residual, d_variance = misfit_gradients(dL, x, V, nu, kappa, STUDENT, MULTIPLICATIVE)
    d_log_decay = E * (aw + 2 * d_residual * (E * k_square[None, :] - cross))
    return a, dl, dL, L, y, dx * x, d_residual, d_variance, d_log_decay


@triton.jit(do_not_specialize=VARYING)
def readers_backward(
    q, k, v, g, mean, dq, grad_evidence, log_sum, spent, parts, scalars, bias, segment, position, asked, read, asks,
    reads, g_row, g_head, g_token,
    in_row, in_head, in_token, out_row, out_head, out_token, times_row, turns_row, H, T, K, horizon, p, seed,
    CAUSAL: tl.constexpr, STUDENT: tl.constexpr, MULTIPLICATIVE: tl.constexpr, TURN: tl.constexpr,
    TURN_VALUES: tl.constexpr, WITH_EVIDENCE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):
    tile, row, head, both = place(H, T, OWN)
    readers, columns = tile * OWN + tl.arange(0, OWN), tl.arange(0, WIDTH)
    mu, s2, eta2, gamma2, nu, kappa, tau, scale = load_scalars(scalars, head)
    own, turning = row * in_row + head * in_head, row * turns_row + head * T * K * 2
    asks, reads, segment, position = asks + turning, reads + turning, segment + row * T, position + row * T
    asked, read = asked + row * times_row, read + row * times_row
    at, inside = both.to(tl.int64) * T + readers, readers < T
    g += row * g_row + head * g_head
    g_real, g_imag = load_turned(g, g_token, asks, readers, columns, T, K, False)
    m_at = mean + row * out_row + head * out_head
    m_real, m_imag = load_turned(m_at, out_token, asks, readers, columns, T, K, False)
    D = tl.sum(g_real * m_real + g_imag * m_imag, axis=1)
    tl.store(spent + at, D, mask=inside)
    g_real, g_imag = load_turned(g, g_token, asks, readers, columns, T, K, TURN_VALUES)
    q_real, q_imag = load_turned(q + own, in_token, asks, readers, columns, T, K, TURN)
    logs = tl.load(log_sum + at, mask=inside, other=0.0)
    ge = tl.load(grad_evidence + at, mask=inside, other=0.0)
    r_segment, r_position = load_places(segment, position, readers, T)
    late, late_rest = load_times(asked, readers, T)
    pulled_real, pulled_imag = tl.zeros([OWN, WIDTH], tl.float32), tl.zeros([OWN, WIDTH], tl.float32)
    zeros = tl.zeros([OWN], tl.float32)
    d_square, d_mu, d_s2, d_eta2, d_gamma2 = zeros, zeros, zeros, zeros, zeros
    d_nu, d_kappa, d_tau, d_scale = zeros, zeros, zeros, zeros
    first, end = reach(segment, position, readers, T, False, STEP, CAUSAL)
    for start in range(first, end, STEP):
        keys = start + tl.arange(0, STEP)
        k_real, k_imag = load_turned(k + own, in_token, reads, keys, columns, T, K, TURN)
        v_real, v_imag = load_turned(v + own, in_token, reads, keys, columns, T, K, TURN_VALUES)
        early, early_rest = load_times(read, keys, T)
        lag = distances(late, late_rest, early, early_rest)
        elapsed = scale * lag + horizon
        E, S, V = spread(elapsed, mu, s2, eta2, gamma2)
        j_segment, j_position = load_places(segment, position, keys, T)
        _, dl, dL, L, y, dxx, d_residual, d_variance, d_log_decay = _weights_and_gradients(
            q_real, q_imag, k_real, k_imag, g_real, g_imag, v_real, v_imag, logs, D, ge,
            load_bias(bias, row, keys, T), may_read(r_segment, r_position, j_segment, j_position, CAUSAL), E, V,
            nu, kappa, tau, readers, keys, both, seed, p, STUDENT, MULTIPLICATIVE, WITH_EVIDENCE, DROPOUT, PRECISION,
        )
        d_square += tl.sum(d_residual, axis=1)
        pulled_real = tl.dot(d_residual * E, k_real, pulled_real, input_precision=PRECISION)
        pulled_imag = tl.dot(d_residual * E, k_imag, pulled_imag, input_precision=PRECISION)
        settled = mu > 0
        d_span = -E * E * d_variance * tl.where(settled, eta2 - s2, eta2)
        inward = 2 * d_span - d_log_decay
        d_mu += tl.sum(elapsed * inward, axis=1)
        d_scale += tl.sum(lag * (mu * inward + tl.where(settled, 0.0, s2 * d_variance)), axis=1)
        d_s2 += tl.sum(d_variance * S, axis=1)
        d_eta2 += tl.sum(d_variance * E * E, axis=1)
        d_gamma2 += tl.sum(d_variance, axis=1)
        d_nu -= tl.sum(dxx, axis=1) / nu
        d_kappa -= tl.sum(dL * y, axis=1)
        d_tau += tl.sum(dl * L, axis=1)
    dq_real = 2 * (q_real * d_square[:, None] - pulled_real)
    dq_imag = 2 * (q_imag * d_square[:, None] - pulled_imag)
    dq += row * out_row + head * out_head
    store_turned(dq, out_token, asks, readers, columns, T, K, dq_real, dq_imag, TURN)
    parts += ((row * tl.cdiv(T, OWN) + tile) * H + head) * 8
    tl.store(parts, tl.sum(d_mu, axis=0))
    tl.store(parts + 1, tl.sum(d_s2, axis=0))
    tl.store(parts + 2, tl.sum(d_eta2, axis=0))
    tl.store(parts + 3, tl.sum(d_gamma2, axis=0))
    tl.store(parts + 4, tl.sum(d_nu, axis=0))
    tl.store(parts + 5, tl.sum(d_kappa, axis=0))
    tl.store(parts + 6, tl.sum(d_tau, axis=0))
    tl.store(parts + 7, tl.sum(d_scale, axis=0))


@triton.jit(do_not_specialize=VARYING)
def keys_backward(
    q, k, v, g, dk, dv, grad_evidence, log_sum, spent, d_bias, scalars, bias, segment, position, asked, read, asks,
    reads, g_row, g_head, g_token,
    in_row, in_head, in_token, out_row, out_head, out_token, times_row, turns_row, H, T, K, horizon, p, seed,
    CAUSAL: tl.constexpr, STUDENT: tl.constexpr, MULTIPLICATIVE: tl.constexpr, TURN: tl.constexpr,
    TURN_VALUES: tl.constexpr, WITH_EVIDENCE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    OWN: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):
    tile, row, head, both = place(H, T, OWN)
    keys, columns = tile * OWN + tl.arange(0, OWN), tl.arange(0, WIDTH)
    mu, s2, eta2, gamma2, nu, kappa, tau, scale = load_scalars(scalars, head)
    own, turning = row * in_row + head * in_head, row * turns_row + head * T * K * 2
    asks, reads, segment, position = asks + turning, reads + turning, segment + row * T, position + row * T
    asked, read = asked + row * times_row, read + row * times_row
    g += row * g_row + head * g_head
    k_real, k_imag = load_turned(k + own, in_token, reads, keys, columns, T, K, TURN)
    v_real, v_imag = load_turned(v + own, in_token, reads, keys, columns, T, K, TURN_VALUES)
    j_segment, j_position = load_places(segment, position, keys, T)
    early, early_rest = load_times(read, keys, T)
    key_bias = load_bias(bias, row, keys, T)
    dk_real, dk_imag = tl.zeros([OWN, WIDTH], tl.float32), tl.zeros([OWN, WIDTH], tl.float32)
    dv_real, dv_imag = tl.zeros([OWN, WIDTH], tl.float32), tl.zeros([OWN, WIDTH], tl.float32)
    d_square, d_logits = tl.zeros([OWN], tl.float32), tl.zeros([OWN], tl.float32)
    first, end = reach(segment, position, keys, T, True, STEP, CAUSAL)
    for start in range(first, end, STEP):
        readers = start + tl.arange(0, STEP)
        at, inside = both.to(tl.int64) * T + readers, readers < T
        q_real, q_imag = load_turned(q + own, in_token, asks, readers, columns, T, K, TURN)
        g_real, g_imag = load_turned(g, g_token, asks, readers, columns, T, K, TURN_VALUES)
        logs = tl.load(log_sum + at, mask=inside, other=0.0)
        D = tl.load(spent + at, mask=inside, other=0.0)
        ge = tl.load(grad_evidence + at, mask=inside, other=0.0)
        late, late_rest = load_times(asked, readers, T)
        E, _, V = spread(scale * distances(late, late_rest, early, early_rest) + horizon, mu, s2, eta2, gamma2)
        r_segment, r_position = load_places(segment, position, readers, T)
        a, dl, _, _, _, _, d_residual, _, _ = _weights_and_gradients(
            q_real, q_imag, k_real, k_imag, g_real, g_imag, v_real, v_imag, logs, D, ge, key_bias,
            may_read(r_segment, r_position, j_segment, j_position, CAUSAL), E, V,
            nu, kappa, tau, readers, keys, both, seed, p, STUDENT, MULTIPLICATIVE, WITH_EVIDENCE, DROPOUT, PRECISION,
        )
        d_logits += tl.sum(dl, axis=0)
        pull = d_residual * E
        d_square += tl.sum(pull * E, axis=0)
        pull, a = tl.trans(pull), tl.trans(kept(a * E, readers, keys, both, seed, p, DROPOUT))
        dk_real = tl.dot(pull, q_real, dk_real, input_precision=PRECISION)
        dk_imag = tl.dot(pull, q_imag, dk_imag, input_precision=PRECISION)
        dv_real = tl.dot(a, g_real, dv_real, input_precision=PRECISION)
        dv_imag = tl.dot(a, g_imag, dv_imag, input_precision=PRECISION)
    dk_real = 2 * (k_real * d_square[:, None] - dk_real)
    dk_imag = 2 * (k_imag * d_square[:, None] - dk_imag)
    dk, dv = dk + row * out_row + head * out_head, dv + row * out_row + head * out_head
    store_turned(dk, out_token, reads, keys, columns, T, K, dk_real, dk_imag, TURN)
    store_turned(dv, out_token, reads, keys, columns, T, K, dv_real, dv_imag, TURN_VALUES)
    tl.store(d_bias + both.to(tl.int64) * T + keys, d_logits, mask=keys < T)
# fmt: on


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
    """E, S and V of (b)."""
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
    """x, y and L of (c)."""
    # A difference of near numbers can round below 0; NaN stays NaN and is no perfect match.
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
