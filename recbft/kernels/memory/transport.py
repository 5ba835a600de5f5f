"""Keys, queries and noise of chunks taken back to the chunk's entry, where the memory stands still.

    c_i = sum_l log a_l               k_i <- e^{c_i} k_i        q_i <- e^{c_i} q_i                       (a)
    S_i = a_i^2 S_{i-1} + ell2_i      s_i = e^{-c_i} S_i k_i    read_i = q_i' S_i q_i                    (b)

with k and q on the right of (b) those before (a), and S_{i-1} = 0 at the entry and p0 where a history begins. Sums are
over the chunk's tokens up to i of the same history, so that nothing of one history is in the numbers of another.

Rotations of pairs of rows commute, so they are undone for good, from a history's first token on: with Theta_i the sum
of angles, keys and queries are turned by -Theta_i and only moduli are left in (a). The noise on the first row of a pair
then no longer has the same variance in all directions; as complex numbers, pair by pair,

    S_i k = sigma_i k + zeta_i conj(k)        both by the recursion of (b)                               (c)

sigma from ell2 / 2 and p0, zeta from e^{-2i Theta} ell2 / 2 and 0.

Shapes: N rows times heads, n chunks of C tokens, K key width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.complex_pairs import as_complex, real
from recbft.autograd.transforms import applied, once_differentiable


class Transported(NamedTuple):
    """Chunks of a sequence by (a) to (c)."""

    query: Tensor  # (N, n, C, K)
    key: Tensor  # (N, n, C, K)
    noisy_key: Tensor  # (N, n, C, K), s
    read_noise: Tensor  # (N, n, C)
    log_decay: Tensor | None  # (N, n, K or 1), c at the exit; None where nothing decays
    noise: Tensor  # (N, n, K or 1), diagonal of S at the exit
    skew: Tensor | None  # (N, n, K / 2), S between the rows of a pair at the exit; None without pairs
    turn: Tensor | None  # (N, K / 2), e^{i Theta} after the last token; None without pairs


def transport(q: Tensor, k: Tensor, a: Tensor | None, ell2: Tensor, prior: Tensor, first: Tensor | None) -> Transported:
    """Take chunks back to their entries.

    Args:
        q, k: (N, n, C, K).
        a: transitions, (N, n, C, K or 1), complex (N, n, C, K / 2), or None where nothing decays.
        ell2: process noise, (N, n, C).
        prior: p0, (N,).
        first: (N, n, C) bool, True where a history begins; None for the first token alone.
    """
    if a is None:
        S = _gather(ell2[..., None], None, prior, first)
        return Transported(q, k, S * k, S[..., 0] * q.square().sum(-1), None, S[:, :, -1], None, None)
    if a.is_complex():
        return _turned(q, k, a, ell2, prior, first)
    moved_q, moved_k, s, read, decay, noise = applied(_Decay, q, k, a.log(), ell2, prior, first)
    return Transported(moved_q, moved_k, s, read, decay, noise, None, None)


def turn_back(mean: Tensor, covariance: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """The belief (N, K, M) and (N, K, K) in its own coordinates, after rotations were undone from the start."""

    def turned(x: Tensor) -> Tensor:  # (N, K, m)
        return real(as_complex(x.mT) * turn[:, None]).mT

    return turned(mean), turned(turned(covariance).mT)


class _Decay(torch.autograd.Function):
    """(a) and (b) for real transitions. Backward, with G_i the gradient of S_i as an input of (b) alone:

    adj_i = G_i + a_{i+1}^2 adj_{i+1}      g_ell2 = adj_i      g_p0 = a_i^2 adj_i at starts
    g_log a_i = sum_{l >= i} g_c_l + 2 (S_i - ell2_i) adj_i
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, log_a: Tensor, ell2: Tensor, prior: Tensor, first: Tensor | None
    ) -> tuple[Tensor, ...]:
        c = restarted_sum(log_a, first)
        decay = (2 * log_a).exp()
        S = _gather(ell2[..., None], decay, prior, first)
        out = c.exp()
        share = S / out
        read = torch.linalg.vecdot(S * q, q) if S.shape[-1] > 1 else S[..., 0] * torch.linalg.vecdot(q, q)
        ctx.save_for_backward(q, k, ell2, first, decay, S, out, share)
        ctx.set_materialize_grads(False)
        return q * out, k * out, share * k, read, c[:, :, -1].clone(), S[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, ell2, first, decay, S, out, share = ctx.saved_tensors
        shapes = (q, k, share * k, S[..., 0], S[:, :, -1], S[:, :, -1])
        g_q, g_k, g_s, g_read, g_exit, g_noise = (
            torch.zeros_like(like) if g is None else g for g, like in zip(grads, shapes, strict=True)
        )
        alike = S.shape[-1] == 1

        def summed(x: Tensor) -> Tensor:
            return x.sum(-1, keepdim=True) if alike else x

        moved_q, moved_k, from_s = g_q * out, g_k * out, g_s * k
        g_c = summed(torch.addcmul(moved_q * q, moved_k, k).addcmul_(from_s, share, value=-1))
        g_c[:, :, -1] += g_exit
        g_S = summed(torch.addcmul(from_s / out, g_read[..., None], q.square()))
        g_S[:, :, -1] += g_noise
        g_prior = _scatter(g_S, decay, first)  # g_S is the adjoint from here on
        g_log_a = _sum_backwards(g_c, first)
        g_log_a.addcmul_(S - ell2[..., None], g_S, value=2)
        moved_q.addcmul_(g_read[..., None], S * q, value=2)
        return moved_q, moved_k.addcmul_(g_s, share), g_log_a, g_S.sum(-1), g_prior, None


def _turned(q: Tensor, k: Tensor, a: Tensor, ell2: Tensor, prior: Tensor, first: Tensor | None) -> Transported:
    # In double precision, because the angles of a whole history are summed.
    angle = _sum_over_chunks(torch.angle(a).double(), first)
    back = torch.polar(torch.ones_like(angle), -angle).to(a.dtype)
    q, k = as_complex(q) * back, as_complex(k) * back
    log_a = a.abs().log()
    decay, half = (2 * log_a).exp(), ell2[..., None] / 2
    sigma = _gather(half, decay, prior, first)
    zeta = _gather(half * back.square(), decay, torch.zeros_like(prior, dtype=a.dtype), first)
    c = restarted_sum(log_a, first)
    out = c.exp()
    # (c); not divided by e^c, whose gradient would have e^-2c
    s = (sigma * k + zeta * k.conj()) * (-c).exp()
    read = (sigma * q.abs().square() + (zeta * q.conj().square()).real).sum(-1)
    at_exit, skewed = sigma[:, :, -1], zeta[:, :, -1]
    return Transported(
        real(q * out),
        real(k * out),
        real(s),
        read,
        c[:, :, -1].repeat_interleave(2, dim=-1),
        torch.stack((at_exit + skewed.real, at_exit - skewed.real), dim=-1).flatten(-2),
        skewed.imag,
        back[:, -1, -1].conj(),
    )


def _gather(noise: Tensor, decay: Tensor | None, prior: Tensor, first: Tensor | None) -> Tensor:
    """S of (b) for all chunks at once: noise (N, n, C, 1 or K) and decay a^2 alike, or None -> (N, n, C, K or 1)."""
    start = prior[:, None, None]  # (N, 1, 1)
    S = torch.cat((start, start.new_zeros(len(noise), noise.shape[1] - 1, 1)), dim=1)
    steps = []
    for j, added in enumerate(noise.unbind(2)):
        if first is not None:
            S = torch.where(first[:, :, j, None], start, S)
        if decay is not None:
            S = S * decay[:, :, j]
        S = S + added
        steps.append(S)
    return torch.stack(steps, dim=2)


def _scatter(g: Tensor, decay: Tensor, first: Tensor | None) -> Tensor:
    """The adjoint of ``_gather`` in place of ``g``; returns the gradient of the prior, (N,)."""
    g_prior = g.new_zeros(len(g))
    for j in reversed(range(g.shape[2])):
        flow = g[:, :, j] * decay[:, :, j]  # (N, n, K or 1), what the noise before token j gets
        if first is not None:
            begins = first[:, :, j, None]
            g_prior += (flow * begins).sum((1, 2))
            flow = flow * ~begins
        if j:
            g[:, :, j - 1] += flow
        else:
            g_prior += flow[:, 0].sum(-1)
    return g_prior


def restarted_sum(x: Tensor, first: Tensor | None) -> Tensor:
    """Sums from the chunk's entry, or the history's first token in it, up to each token; x (N, n, C, K)."""
    if first is None:
        if _sums_are_refused(x):
            return x.new_ones(x.shape[2], x.shape[2]).tril_() @ x
        return x.cumsum(dim=2)
    total, steps = torch.zeros_like(x[:, :, 0]), []
    for j, added in enumerate(x.unbind(2)):
        total = torch.where(first[:, :, j, None], 0.0, total) + added
        steps.append(total)
    return torch.stack(steps, dim=2)


def _sums_are_refused(x: Tensor) -> bool:
    """Whether PyTorch would refuse ``cumsum``, which is not deterministic on a GPU."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


def _sum_backwards(g: Tensor, first: Tensor | None) -> Tensor:
    """The adjoint of ``restarted_sum``."""
    if first is None:
        if _sums_are_refused(g):
            return g.new_ones(g.shape[2], g.shape[2]).triu_() @ g
        return g.flip(2).cumsum(dim=2).flip(2)
    g = g.clone()
    for j in reversed(range(1, g.shape[2])):
        g[:, :, j - 1] += torch.where(first[:, :, j, None], 0.0, g[:, :, j])
    return g


def _sum_over_chunks(x: Tensor, first: Tensor | None) -> Tensor:
    """Sums from the first token of each history up to each token."""
    within = restarted_sum(x, first)
    before, entries = torch.zeros_like(x[:, 0, 0]), []
    begun = None if first is None else first.cumsum(dim=2)[..., None] > 0  # a history has begun in the chunk
    for n, last in enumerate(within[:, :, -1].unbind(1)):
        entries.append(before)
        before = last + (before if begun is None else torch.where(begun[:, n, -1], 0.0, before))
    entry = torch.stack(entries, dim=1)[:, :, None]
    return within + (entry if begun is None else torch.where(begun, 0.0, entry))
