"""The Bayesian layer on a GPU: a launch in each direction, the belief kept on the chip from chunk to chunk.

For the backward pass the beliefs at the entries of chunks are stored, and the factors of their covariances; the rest of
a chunk is made again.

A program carries the belief, backwards its gradient, from chunk to chunk without leaving the chip. What one chunk does
is equations (a) to (e) of ``chunk`` forwards and (f) to (h) backwards. Its keys, queries and noise are taken to the
chunk's entry as in ``transport``, with sums over tokens as products with ``same``, the 0 and 1 of which tokens are of
the same history and not later:

    c = same log a     U = same (e^-2c ell2) + p0 where the history began in the chunk     S = e^2c U      (i)
    K = e^c k          Q = e^c q          s = e^c U k         read = rowsum(S q^2)                         (j)

and backwards, with g_K, g_Q, g_s from the chunk, g_read, and what the exit sends to c and S of the last token,

    g_S = g_read q^2    g_U = g_s e^c k + g_S e^2c    g_N = same' g_U    g_ell2 = rowsum(g_N e^-2c)        (k)
    g_c = g_K K + g_Q Q + g_s s + 2 g_S S - 2 g_N e^-2c ell2     g_log a = same' g_c     g_p0 = sum g_U    (l)
    g_k = (g_K + g_s U) e^c    g_q = g_Q e^c + 2 g_read S q                                                (m)

c stays within what the host allows, so that e^-2c is far from the bounds of float32. Where rounding leaves no positive
pivot, it is raised to r2, its least value, and counted.

Shapes: C tokens of a chunk, K key width, M value width, n chunks; blocks are padded to powers of 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable, transformed
from recbft.kernels.dispatch import interpreted
from recbft.kernels.memory.chunked import chunk_length, decay_refusal
from recbft.kernels.memory.reference import MemoryEvent, MemoryTrace, report_loss

CHUNK = 16  # the factor takes as many steps whatever the length, and shorter chunks leave registers to the belief
MAX_WIDTH = 64  # what a belief and its gradient may take of the chip
MAX_LOG_DECAY = 24.0  # within a chunk: e^-48 times a gradient is still a float32, and so is e^48 times a noise
# Else a kernel is compiled again for a length that 16 divides, or for one chunk.
VARYING = ["H", "T", "step", "n"]


def decline(v: Tensor, *, key_width: int, transition: Tensor | None) -> str | None:
    """Why this path cannot serve a call, or None where it can."""
    if v.dtype != torch.float32:
        return f"needs float32, got {v.dtype}"
    if max(key_width, v.shape[-1]) > MAX_WIDTH:
        return f"serves widths up to {MAX_WIDTH}, got keys of {key_width} and values of {v.shape[-1]}"
    if transition is not None and transition.is_complex():
        return "does not turn pairs of rows (a complex transition)"
    return None if transition is None else decay_refusal(transition, MAX_LOG_DECAY)


def filter_memory(
    events: MemoryEvent, prior_variance: Tensor, first: Tensor | None, *, chunk: int | None = None
) -> MemoryTrace:
    """The same as the reference."""
    longest = CHUNK if chunk is None else min(chunk, CHUNK)
    step = chunk_length(events.key.shape[2], longest, events.transition, MAX_LOG_DECAY)
    inputs = (*events, prior_variance)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    *trace, raised, least = applied(_Filter, *inputs, first, step, learns or transformed())
    if not transformed() and bool(raised.any()):
        report_loss(int(raised.sum()), events.observation_noise.numel(), least.min().item() - 1)
    return MemoryTrace(*trace)


class _Filter(torch.autograd.Function):
    """The trace, then by program how many pivots were raised, and the least pivot in units of its noise."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Tensor | None,
        process_noise: Tensor,
        observation_noise: Tensor,
        prior_variance: Tensor,
        first: Tensor | None,
        step: int,
        kept: bool,
    ) -> tuple[Tensor, ...]:
        given = (q, k, v, transition, process_noise, observation_noise, prior_variance, first)
        inputs = [None if x is None else x.contiguous() for x in given]
        (B, H, T, K), M, n = k.shape, v.shape[-1], -(-k.shape[2] // step)
        settings = _settings(k, v, transition, step)
        C = settings["C"]
        states = [v.new_empty(shape if kept else 0) for shape in ((B, H, n, K, M), (B, H, n, K, K), (B, H, n, C, C))]
        readout, spread, gain, mean, covariance = (
            v.new_empty(B, H, *shape) for shape in ((T, M), (T,), (T,), (K, M), (K, K))
        )
        raised, least = v.new_zeros(B, H, dtype=torch.int32), v.new_empty(B, H)
        outputs = (readout, spread, gain, mean, covariance)
        if B * H:
            forwards[(B * H,)](*inputs, *outputs, *states, raised, least, **settings, KEPT=kept)
        ctx.save_for_backward(*inputs, *states)
        ctx.step = step
        ctx.mark_non_differentiable(raised, least)
        return *outputs, raised, least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        q, k, v, transition, process_noise, observation_noise, prior_variance, _ = saved[:8]
        g_readout, g_spread, g_gain, g_mean, g_covariance = (g.contiguous() for g in gradients[:5])
        inputs = (q, k, v, transition, process_noise, observation_noise, prior_variance)
        found = [None if x is None else torch.empty_like(x) for x in inputs]
        if len(q) and q.shape[1]:
            settings = _settings(k, v, transition, ctx.step)
            backwards[(q.shape[0] * q.shape[1],)](
                *saved, g_readout, g_spread, g_gain, g_mean, g_covariance, *found, **settings
            )
        return *found, None, None, None


def _settings(k: Tensor, v: Tensor, transition: Tensor | None, step: int) -> dict[str, Any]:
    """What both kernels are told, by name."""
    _, H, T, K = k.shape
    M = v.shape[-1]
    widths = [max(16, triton.next_power_of_2(size)) for size in (step, K, M)]
    return {
        "H": H,
        "T": T,
        "K": K,
        "M": M,
        "step": step,
        "n": -(-T // step),
        "DECAYS": transition is not None,
        "PER_ROW": transition is not None and transition.shape[-1] > 1,
        "PRECISION": "ieee" if interpreted() else "tf32x3",
        **dict(zip(("C", "WK", "WM"), widths, strict=True)),
        "num_warps": 4 if max(widths) <= 32 else 8,
        "num_stages": 1,  # a chunk waits for the one before it: nothing to load ahead
    }


@triton.jit
def _load(x, rows, width, columns, inside):
    """A matrix (rows, columns), 0 outside."""
    at = x + rows[:, None] * width + columns[None, :]
    return tl.load(at, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _store(x, rows, width, columns, inside, value):
    at = x + rows[:, None] * width + columns[None, :]
    tl.store(at, value, mask=inside[:, None] & (columns < width)[None, :])


@triton.jit
def _histories(first, tokens, inside):
    """Which tokens are of one history and not later; which began before the chunk; which go on; whether it goes on."""
    begins = tokens == 0
    if first is not None:
        begins = begins | (tl.load(first + tokens, mask=inside, other=0) != 0)
    history = tl.cumsum(begins.to(tl.int32), axis=0)  # 0 for the one at the entry
    rows = tl.arange(0, tokens.shape[0])
    same = (history[:, None] == history[None, :]) & (rows[None, :] <= rows[:, None])
    last = tl.max(history, axis=0)
    entry, goes_on = (history == 0).to(tl.float32), (history == last).to(tl.float32)
    return same, entry[:, None], goes_on[:, None], (last == 0).to(tl.float32)


@triton.jit
def _transport(
    a, tokens, inside, columns, ell2, p0, same, entry, K,
    DECAYS: tl.constexpr, PER_ROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a, e^c, e^-2c and U of (i), (C, K) each."""
    kept = tl.zeros([tokens.shape[0], columns.shape[0]], tl.float32) + 1.0
    out, back, sums = kept, kept, same.to(tl.float32)
    if DECAYS:
        if PER_ROW:
            at, real = a + tokens[:, None] * K + columns[None, :], inside[:, None] & (columns < K)[None, :]
        else:
            at, real = a + tokens[:, None] + 0 * columns[None, :], inside[:, None] & (columns >= 0)[None, :]
        kept = tl.load(at, mask=real, other=1.0)
        c = tl.dot(sums, tl.log(kept), input_precision=PRECISION)
        out, back = tl.exp(c), tl.exp(-2 * c)
    began = tl.zeros_like(kept) + (1 - entry) * p0
    return kept, out, back, tl.dot(sums, back * ell2[:, None], began, input_precision=PRECISION)


@triton.jit
def _last_row(x):
    """(K,)"""
    rows = tl.arange(0, x.shape[0])
    return tl.sum(tl.where((rows == x.shape[0] - 1)[:, None], x, 0.0), axis=0)


@triton.jit
def _diagonal(x):
    rows = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(rows[:, None] == rows[None, :], x, 0.0), axis=1)


@triton.jit
def _on_diagonal(x):
    rows = tl.arange(0, x.shape[0])
    return tl.where(rows[:, None] == rows[None, :], x[None, :], 0.0)


@triton.jit
def _half(x):
    """The lower half, with half the diagonal."""
    rows = tl.arange(0, x.shape[0])
    below = tl.where(rows[:, None] > rows[None, :], x, 0.0)
    return tl.where(rows[:, None] == rows[None, :], 0.5 * x, below)


@triton.jit
def _inverse_factor(G, r2):
    """L^-1 and the pivots L_ii^2 of the lower half of G = L L', how many were raised to r2, and the least over r2.

    Rows and columns of what is left of G are both summed up from it: Triton 3.6 makes wrong code, at a width of 32, of
    a column that is laid down as a row.
    """
    size: tl.constexpr = G.shape[0]
    rows = tl.arange(0, size)
    G += tl.trans(tl.where(rows[:, None] > rows[None, :], G, 0.0))
    inverse, pivots = _on_diagonal(tl.zeros_like(r2) + 1.0), r2
    raised = 0
    least = float("inf")
    for j in range(size):
        column = tl.sum(tl.where((rows == j)[None, :], G, 0.0), axis=1)
        pivot = tl.sum(tl.where(rows == j, column, 0.0), axis=0)
        floor = tl.sum(tl.where(rows == j, r2, 0.0), axis=0)
        least = tl.minimum(least, pivot / floor)
        raised += tl.where(pivot > 0, 0, 1)
        pivot = tl.where(pivot > 0, pivot, floor)
        pivots = tl.where(rows == j, pivot, pivots)
        below = tl.where(rows > j, column / pivot, 0.0)[:, None]
        G -= below * tl.sum(tl.where((rows == j)[:, None], G, 0.0), axis=0)[None, :]
        inverse -= below * tl.sum(tl.where((rows == j)[:, None], inverse, 0.0), axis=0)[None, :]
    return inverse / tl.sqrt(pivots)[:, None], pivots, raised, least


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def forwards(
    q, k, v, a, ell2, r2, prior, first, readout, spread, gain, mean, covariance, means, covariances, factors, raised,
    least, H, T, K, M, step, n,
    DECAYS: tl.constexpr, PER_ROW: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, WK: tl.constexpr, WM: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    base = program * T
    rows, keys, values = tl.arange(0, C), tl.arange(0, WK), tl.arange(0, WM)
    q, k, v, ell2, r2 = q + base * K, k + base * K, v + base * M, ell2 + base, r2 + base
    a = a + base * (K if PER_ROW else 1) if DECAYS else a
    first = first + program // H * T if first is not None else first
    p0 = tl.load(prior + program)
    P, X = tl.zeros([WK, WK], tl.float32), tl.zeros([WK, WM], tl.float32)
    num_raised = 0
    lowest = float("inf")
    for i in range(n):
        chunk = program * n + i
        if KEPT:
            _store(covariances + chunk * K * K, keys, K, keys, keys < K, P)
            _store(means + chunk * K * M, keys, M, values, keys < K, X)
        tokens = i * step + rows
        inside = (rows < step) & (tokens < T)
        same, entry, goes_on, stays = _histories(first, tokens, inside)
        noise_in = tl.load(ell2 + tokens, mask=inside, other=0.0)
        _, out, _, U = _transport(
            a, tokens, inside, keys, noise_in, p0, same, entry, K, DECAYS, PER_ROW, PRECISION
        )
        raw_q = _load(q, tokens, K, keys, inside)
        Q, kt = raw_q * out, _load(k, tokens, K, keys, inside) * out
        noise, S = tl.load(r2 + tokens, mask=inside, other=1.0), out * out * U
        R = tl.dot(kt * entry, P, kt * U, input_precision=PRECISION)
        Y = tl.dot(kt * entry, X, -_load(v, tokens, M, values, inside), input_precision=PRECISION)
        G = tl.where(same, tl.dot(kt, tl.trans(R), input_precision=PRECISION), 0.0) + _on_diagonal(noise)
        Li, pivots, more, margin = _inverse_factor(G, noise)
        num_raised, lowest = num_raised + more, tl.minimum(lowest, margin)
        F = tl.dot(Li, R, input_precision=PRECISION)
        E = tl.dot(Li, Y, input_precision=PRECISION)
        B = tl.where(same, tl.dot(Q, tl.trans(F), input_precision=PRECISION), 0.0)
        seen = Q * entry
        y = tl.dot(seen, X, -tl.dot(B, E, input_precision=PRECISION), input_precision=PRECISION)
        at_entry = tl.sum(tl.dot(seen, P, input_precision=PRECISION) * Q, axis=1)
        rho = at_entry + tl.sum(S * raw_q * raw_q, axis=1) - tl.sum(B * B, axis=1)
        _store(readout + base * M, tokens, M, values, inside, y)
        tl.store(spread + base + tokens, rho, mask=inside)
        tl.store(gain + base + tokens, 1 - noise / pivots, mask=inside)
        if KEPT:
            _store(factors + chunk * C * C, rows, C, rows, rows < C, Li)
        decay = _last_row(out)
        left = F * decay[None, :] * goes_on
        P = P * decay[:, None] * decay[None, :] * stays - tl.dot(tl.trans(left), left, input_precision=PRECISION)
        X = X * decay[:, None] * stays - tl.dot(tl.trans(left), E, input_precision=PRECISION)
        P = 0.5 * (P + tl.trans(P)) + _on_diagonal(_last_row(S))
    _store(covariance + program * K * K, keys, K, keys, keys < K, P)
    _store(mean + program * K * M, keys, M, values, keys < K, X)
    tl.store(raised + program, num_raised)
    tl.store(least + program, lowest)


@triton.jit(do_not_specialize=VARYING)
def backwards(
    q, k, v, a, ell2, r2, prior, first, means, covariances, factors, g_readout, g_spread, g_gain, g_mean, g_covariance,
    g_q, g_k, g_v, g_a, g_ell2, g_r2, g_prior, H, T, K, M, step, n,
    DECAYS: tl.constexpr, PER_ROW: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, WK: tl.constexpr, WM: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    base = program * T
    rows, keys, values = tl.arange(0, C), tl.arange(0, WK), tl.arange(0, WM)
    q, k, v, ell2, r2 = q + base * K, k + base * K, v + base * M, ell2 + base, r2 + base
    g_q, g_k, g_v, g_ell2, g_r2 = g_q + base * K, g_k + base * K, g_v + base * M, g_ell2 + base, g_r2 + base
    g_readout, g_spread, g_gain = g_readout + base * M, g_spread + base, g_gain + base
    shift = base * (K if PER_ROW else 1)
    a, g_a = a + shift if DECAYS else a, g_a + shift if DECAYS else g_a
    first = first + program // H * T if first is not None else first
    p0 = tl.load(prior + program)
    g_P = _load(g_covariance + program * K * K, keys, K, keys, keys < K)
    g_X = _load(g_mean + program * K * M, keys, M, values, keys < K)
    g_p0 = tl.zeros([WK], tl.float32)
    for back in range(n):
        i = n - 1 - back
        chunk = program * n + i
        tokens = i * step + rows
        inside = (rows < step) & (tokens < T)
        same, entry, goes_on, stays = _histories(first, tokens, inside)
        noise_in = tl.load(ell2 + tokens, mask=inside, other=0.0)
        kept, out, back_to_entry, U = _transport(
            a, tokens, inside, keys, noise_in, p0, same, entry, K, DECAYS, PER_ROW, PRECISION
        )
        raw_q, raw_k = _load(q, tokens, K, keys, inside), _load(k, tokens, K, keys, inside)
        P = _load(covariances + chunk * K * K, keys, K, keys, keys < K)
        X = _load(means + chunk * K * M, keys, M, values, keys < K)
        Li = _load(factors + chunk * C * C, rows, C, rows, rows < C)
        noise = tl.load(r2 + tokens, mask=inside, other=1.0)
        Q, kt, S = raw_q * out, raw_k * out, out * out * U
        R = tl.dot(kt * entry, P, kt * U, input_precision=PRECISION)
        Y = tl.dot(kt * entry, X, -_load(v, tokens, M, values, inside), input_precision=PRECISION)
        F = tl.dot(Li, R, input_precision=PRECISION)
        E = tl.dot(Li, Y, input_precision=PRECISION)
        B = tl.where(same, tl.dot(Q, tl.trans(F), input_precision=PRECISION), 0.0)
        # The exit: (e) of the chunk.
        decay = _last_row(out)
        g_P = 0.5 * (g_P + tl.trans(g_P))
        g_noise, left = _diagonal(g_P), F * decay[None, :] * goes_on
        f = -2 * tl.dot(left, g_P, input_precision=PRECISION)
        f -= tl.dot(E, tl.trans(g_X), input_precision=PRECISION) * goes_on
        e = -tl.dot(left, g_X, input_precision=PRECISION)
        both = decay[:, None] * decay[None, :] * stays
        g_exit = tl.sum(f * F, axis=0) * decay + 2 * tl.sum(g_P * P * both, axis=1)
        g_exit += tl.sum(g_X * X, axis=1) * decay * stays
        f, g_P, g_X = f * decay[None, :], g_P * both, g_X * decay[:, None] * stays
        # Readings: (d) and (f).
        gy = _load(g_readout, tokens, M, values, inside)
        g_rho = tl.load(g_spread + tokens, mask=inside, other=0.0)
        g_B = -tl.dot(gy, tl.trans(E), input_precision=PRECISION) - 2 * B * g_rho[:, None]
        g_B = tl.where(same, g_B, 0.0)
        e -= tl.dot(tl.trans(B), gy, input_precision=PRECISION)
        f = tl.dot(tl.trans(g_B), Q, f, input_precision=PRECISION)
        seen = Q * entry
        weighted = seen * g_rho[:, None]
        g_Q = tl.dot(g_B, F, 2 * tl.dot(weighted, P, input_precision=PRECISION), input_precision=PRECISION)
        g_Q += tl.dot(gy, tl.trans(X), input_precision=PRECISION) * entry
        g_P = tl.dot(tl.trans(weighted), seen, g_P, input_precision=PRECISION)
        g_X = tl.dot(tl.trans(seen), gy, g_X, input_precision=PRECISION)
        # The factor: (g) and (h).
        g_g, pivots = tl.load(g_gain + tokens, mask=inside, other=0.0), _diagonal(Li)
        pivots = 1 / (pivots * pivots)
        Z = tl.dot(e, tl.trans(E), input_precision=PRECISION)
        Z = tl.dot(f, tl.trans(F), Z, input_precision=PRECISION)
        Z = _on_diagonal(g_g * noise / pivots) - _half(Z)
        W = tl.dot(tl.trans(Li), tl.dot(Z, Li, input_precision=PRECISION), input_precision=PRECISION)
        tl.store(g_r2 + tokens, _diagonal(W) - g_g / pivots, mask=inside)
        g_G = tl.where(same, _half(W + tl.trans(W)), 0.0)
        g_R = tl.dot(tl.trans(Li), f, input_precision=PRECISION)
        g_R = tl.dot(tl.trans(g_G), kt, g_R, input_precision=PRECISION)
        g_V = -tl.dot(tl.trans(Li), e, input_precision=PRECISION)
        _store(g_v, tokens, M, values, inside, g_V)
        from_entry = tl.dot(g_R, P, input_precision=PRECISION)
        from_entry -= tl.dot(g_V, tl.trans(X), input_precision=PRECISION)
        g_K = tl.dot(g_G, R, from_entry * entry, input_precision=PRECISION)
        write = tl.trans(kt * entry)
        g_P = tl.dot(write, g_R, g_P, input_precision=PRECISION)
        g_X -= tl.dot(write, g_V, input_precision=PRECISION)
        # Transport: (k) to (m).
        end = (rows == C - 1)[:, None]
        g_S = g_rho[:, None] * raw_q * raw_q + tl.where(end, g_noise[None, :], 0.0)
        g_U = g_R * kt + g_S * out * out
        _store(g_k, tokens, K, keys, inside, (g_K + g_R * U) * out)
        _store(g_q, tokens, K, keys, inside, g_Q * out + 2 * g_rho[:, None] * S * raw_q)
        g_p0 += tl.sum(g_U * (1 - entry), axis=0)
        later = tl.trans(same.to(tl.float32))
        g_N = tl.dot(later, g_U, input_precision=PRECISION)
        tl.store(g_ell2 + tokens, tl.sum(g_N * back_to_entry, axis=1), mask=inside)
        if DECAYS:
            g_c = g_K * kt + g_Q * Q + g_R * kt * U + 2 * g_S * S - 2 * g_N * back_to_entry * noise_in[:, None]
            g_log = tl.dot(later, g_c + tl.where(end, g_exit[None, :], 0.0), input_precision=PRECISION)
            if PER_ROW:
                _store(g_a, tokens, K, keys, inside, g_log / kept)
            else:
                tl.store(g_a + tokens, tl.sum(g_log / kept, axis=1), mask=inside)
    tl.store(g_prior + program, tl.sum(g_p0, axis=0))
# fmt: on
