"""One chunk of C tokens of the Bayesian layer, exact: the filter inside a chunk is one Cholesky factorisation.

Keys k_i, queries and the noise s_j gathered since the entry are in the coordinates of the chunk's entry
(``transport``), where the memory stands still. With P and M the belief there,

    R = K P + s         covariance of those coordinates with what token j observes              (C, K)     (a)
    G = tril(K R') + diag(r2)     covariance of the observations                                (C, C)     (b)
    G = L L'     F = L^-1 R     E = L^-1 (K M - V)      F_j = u_j sqrt(beta_j) at the entry                (c)
    B = tril(Q F')      y = Q M - B E      q' P q = rowsum(Q P * Q) - rowsum(B^2) + q' S q                 (d)
    exit: Y = F A      P <- A P A - Y' Y + S      M <- A M - Y' E      gain_i = 1 - r2_i / L_ii^2          (e)

A = diag(e^c) from entry to exit and S the noise gathered there; q' S q is added by the caller. Where several histories
share a row, B and G are masked to pairs of one history (then L is too), only tokens whose history began before the
chunk (``entry``) see P and M, only those whose history goes on (``last``) write to the exit, and what was at the entry
is kept there where that is the same history (``stays``). A history that begins in the chunk has its prior among the
noise gathered.

Backward, with g_ before a gradient, f and e those of F and E, and half() the lower triangle with its diagonal halved:

    g_B = -mask(g_y E' + 2 B g_rho)     f = g_B' Q - (2 Y g_P + E g_M') A     e = -B' g_y - Y g_M          (f)
    Z = diag(g_gain r2 / L_ii^2) - half(f F' + e E')     W = L^-T Z L^-1     g_G = half(W + W')            (g)
    g_R = L^-T f + g_G' K      g_V = -L^-T e      g_K = g_G R + g_R P - g_V M'                             (h)

A token that does not see the entry or write to the exit has no part in the terms with P and M, or with Y.

Source: Dowling et al., Memory by Design, appendix D, for the filter; the Cholesky factor of the covariance of the
observations is the prediction error decomposition of a Kalman filter, and (g) the usual adjoint of that factor.
Shapes: N rows times heads, C tokens, K key width, M value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.transforms import once_differentiable
from recbft.kernels.memory.reference import report_loss


class ChunkMasks(NamedTuple):
    """Which tokens of a chunk belong to which history; 0 or 1, None where there is but one history."""

    same: Tensor  # (N or 1, C, C), token j (second) is of the history of token i (first) and not later
    entry: Tensor | None = None  # (N, C, 1), the history began before the chunk
    last: Tensor | None = None  # (N, C, 1), the history is that of the chunk's last token
    stays: Tensor | None = None  # (N, 1, 1), the chunk's last token is of the history at its entry


class _Filtered(NamedTuple):
    """A chunk by (a) to (d)."""

    R: Tensor  # (N, C, K)
    Li: Tensor  # (N, C, C), L^-1
    pivot: Tensor  # (N, C), L_ii^2
    F: Tensor  # (N, C, K)
    E: Tensor  # (N, C, M)
    B: Tensor  # (N, C, C)


class FilterChunk(torch.autograd.Function):
    """(P, M, q, k, s, v, r2, c, S, skew; *masks, kept, mended) -> (y, q' P q - q' S q, gain, P, M at the exit, info).

    S is the diagonal (N, K or 1) and ``skew`` what stands between the two rows of a pair (N, K / 2); c (N, K or 1).
    ``kept`` saves what the backward would else make again. P and M are None before the first chunk. ``info`` (N,) is
    not 0 where the factor was not found; ``mended``, it is looked for at once and pivots are raised.
    """

    @staticmethod
    def forward(
        ctx: Any,
        P: Tensor | None,
        M: Tensor | None,
        q: Tensor,
        k: Tensor,
        s: Tensor,
        v: Tensor,
        r2: Tensor,
        log_decay: Tensor | None,
        noise: Tensor,
        skew: Tensor | None,
        same: Tensor,
        entry: Tensor | None,
        last: Tensor | None,
        stays: Tensor | None,
        kept: bool,
        mended: bool,
    ) -> tuple[Tensor, ...]:
        masks = ChunkMasks(same, entry, last, stays)
        row, info = _filter(P, M, q, k, s, v, r2, masks, mended=mended)
        F, E, B = row.F, row.E, row.B
        spread = torch.linalg.vector_norm(B, dim=-1).square_().neg_()
        if P is None or M is None:
            readout = torch.bmm(B, E).neg_()
        else:
            seen = _masked(q, masks.entry)
            readout = torch.bmm(seen, M).baddbmm_(B, E, alpha=-1)
            spread += torch.linalg.vecdot(torch.bmm(seen, P), q)
        Y, left, carried = _leave(P, M, F, log_decay, masks)
        if carried is None:
            P_out, M_out = torch.bmm(left.mT, Y).neg_(), torch.bmm(left.mT, E).neg_()
        else:
            P_out = torch.baddbmm(carried[0], left.mT, Y, alpha=-1)
            M_out = torch.baddbmm(carried[1], left.mT, E, alpha=-1)
        P_out = torch.add(P_out, P_out.mT).mul_(0.5)
        P_out.diagonal(dim1=-2, dim2=-1).add_(noise)
        if skew is not None:
            P_out.diagonal(1, dim1=-2, dim2=-1)[..., ::2] += skew
            P_out.diagonal(-1, dim1=-2, dim2=-1)[..., ::2] += skew
        ctx.save_for_backward(P, M, q, k, s, v, r2, log_decay, *masks, *(row if kept else ()))
        ctx.mended, ctx.noise_shape, ctx.with_skew = mended, noise.shape, skew is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(info)
        return readout, spread, 1 - r2 / row.pivot, P_out, M_out, info

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_y: Tensor | None, g_rho: Tensor | None, g_gain: Tensor | None, g_P: Any, g_M: Any, _: None
    ) -> Any:
        P, M, q, k, s, v, r2, log_decay, *others = ctx.saved_tensors
        masks, kept = ChunkMasks(*others[:4]), others[4:]
        row = _Filtered(*kept) if kept else _filter(P, M, q, k, s, v, r2, masks, mended=ctx.mended)[0]
        f, e, g_P, g_M, g_decay, g_noise, g_skew = _exit_gradients(ctx, P, M, row, log_decay, masks, g_P, g_M)
        g_q = None
        if g_y is not None or g_rho is not None:
            g_B = torch.zeros_like(row.B) if g_y is None else torch.bmm(g_y, row.E.mT)
            if g_rho is not None:
                g_B.addcmul_(row.B, g_rho[..., None], value=2)
            g_B.mul_(masks.same).neg_()
            if g_y is not None:
                e = _plus_product(e, row.B.mT, g_y, alpha=-1)
            f = _plus_product(f, g_B.mT, q)
            g_q = torch.bmm(g_B, row.F)
            if P is not None:  # what (d) reads of the entry
                seen = _masked(q, masks.entry)
                if g_rho is not None:
                    weighted = seen * g_rho[..., None]
                    g_q.baddbmm_(weighted, P, alpha=2)
                    g_P = _plus_product(g_P, weighted.mT, seen)
                if g_y is not None:
                    g_q += _masked(torch.bmm(g_y, M.mT), masks.entry)
                    g_M = _plus_product(g_M, seen.mT, g_y)
        g_k, g_R, g_v, g_r2 = _factor_gradients(f, e, g_gain, k, r2, row, masks)
        if P is not None:
            seen = _masked(k, masks.entry)
            from_entry = torch.bmm(g_R, P).baddbmm_(g_v, M.mT, alpha=-1)
            g_k += _masked(from_entry, masks.entry)
            g_P = _plus_product(g_P, seen.mT, g_R)
            g_M = _plus_product(g_M, seen.mT, g_v, alpha=-1)
        return g_P, g_M, g_q, g_k, g_R, g_v, g_r2, g_decay, g_noise, g_skew, None, None, None, None, None, None


def _filter(
    P: Tensor | None,
    M: Tensor | None,
    q: Tensor,
    k: Tensor,
    s: Tensor,
    v: Tensor,
    r2: Tensor,
    masks: ChunkMasks,
    *,
    mended: bool,
) -> tuple[_Filtered, Tensor]:
    """A chunk by (a) to (d), and where its factor was not found."""
    if P is None or M is None:
        R, Y = s, v.neg()
    else:
        seen = _masked(k, masks.entry)
        R, Y = torch.baddbmm(s, seen, P), torch.baddbmm(v, seen, M, beta=-1)
    G = torch.bmm(k, R.mT).mul_(masks.same)
    G.diagonal(dim1=-2, dim2=-1).add_(r2)
    L, info = torch.linalg.cholesky_ex(G)
    if mended and bool(info.any()):
        L[info > 0] = _raised_cholesky(G[info > 0], r2[info > 0], total=r2.numel())
    identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    Li = torch.linalg.solve_triangular(L, identity.expand_as(G), upper=False)
    F = torch.bmm(Li, R)
    found = _Filtered(
        R=R,
        Li=Li,
        pivot=L.diagonal(dim1=-2, dim2=-1).square(),
        F=F,
        E=torch.bmm(Li, Y),
        B=torch.bmm(q, F.mT).mul_(masks.same),
    )
    return found, info


def _leave(
    P: Tensor | None, M: Tensor | None, F: Tensor, log_decay: Tensor | None, masks: ChunkMasks
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Y of (e), the same of the tokens that write to the exit, and what is carried there of P and M."""
    Y, carried = F, None if P is None or M is None else (P, M)
    if log_decay is not None:
        decay = log_decay.exp()[:, None]  # (N, 1, K or 1)
        Y = F * decay
        if carried is not None:
            carried = carried[0] * decay * decay.mT, carried[1] * decay.mT
    if carried is not None and masks.stays is not None:
        carried = carried[0] * masks.stays, carried[1] * masks.stays
    return Y, _masked(Y, masks.last), carried


def _exit_gradients(
    ctx: Any,
    P: Tensor | None,
    M: Tensor | None,
    row: _Filtered,
    log_decay: Tensor | None,
    masks: ChunkMasks,
    g_P: Any,
    g_M: Any,
) -> tuple[Tensor | None, ...]:
    """What (e) sends back: f and e of (f), and the gradients of P, M, c, S and skew; None where nothing comes back."""
    if g_P is None and g_M is None:
        return (None,) * 7
    Y, left, carried = _leave(P, M, row.F, log_decay, masks)
    g_P = Y.new_zeros(len(Y), Y.shape[-1], Y.shape[-1]) if g_P is None else (g_P + g_P.mT).mul_(0.5)
    g_M = row.E.new_zeros(len(Y), Y.shape[-1], row.E.shape[-1]) if g_M is None else g_M
    g_noise = g_P.diagonal(dim1=-2, dim2=-1).sum_to_size(ctx.noise_shape)
    g_skew = 2 * g_P.diagonal(1, dim1=-2, dim2=-1)[..., ::2] if ctx.with_skew else None
    f = torch.bmm(left, g_P).mul_(-2)
    f -= _masked(torch.bmm(row.E, g_M.mT), masks.last)
    e = torch.bmm(left, g_M).neg_()
    g_decay = None
    if log_decay is not None:
        decay = log_decay.exp()[:, None]
        g_decay = (f * Y).sum(1)
        f *= decay
        if carried is not None:
            # P is symmetric, and so is its gradient: rows and columns decay alike.
            g_decay += 2 * torch.linalg.vecdot(g_P, carried[0]) + torch.linalg.vecdot(g_M, carried[1])
            g_P, g_M = g_P * decay * decay.mT, g_M * decay.mT
        g_decay = g_decay.sum_to_size(log_decay.shape)
    if P is None:
        return f, e, None, None, g_decay, g_noise, g_skew
    return f, e, _masked(g_P, masks.stays), _masked(g_M, masks.stays), g_decay, g_noise, g_skew


def _factor_gradients(
    f: Tensor | None,
    e: Tensor | None,
    g_gain: Tensor | None,
    k: Tensor,
    r2: Tensor,
    row: _Filtered,
    masks: ChunkMasks,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(g) and (h) without the entry's terms: gradients of K, R, V and r2."""
    f = torch.zeros_like(row.F) if f is None else f
    e = torch.zeros_like(row.E) if e is None else e
    Z = torch.bmm(f, row.F.mT).baddbmm_(e, row.E.mT).tril_().neg_()
    diagonal = Z.diagonal(dim1=-2, dim2=-1)
    diagonal *= 0.5
    if g_gain is not None:
        diagonal += g_gain * r2 / row.pivot
    W = torch.bmm(row.Li.mT, torch.bmm(Z, row.Li))
    g_r2 = W.diagonal(dim1=-2, dim2=-1).clone()
    if g_gain is not None:
        g_r2 -= g_gain / row.pivot
    g_G = torch.add(W, W.mT).mul_(masks.same)
    g_G.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    g_R = torch.bmm(row.Li.mT, f).baddbmm_(g_G.mT, k)
    return torch.bmm(g_G, row.R), g_R, torch.bmm(row.Li.mT, e).neg_(), g_r2


def _raised_cholesky(G: Tensor, r2: Tensor, *, total: int) -> Tensor:
    """L of (c) where rounding left no positive pivot: pivots are raised to r2, their least value, and reported."""
    L, count, worst = torch.zeros_like(G), 0, 0.0
    for j in range(G.shape[-1]):
        column = G[:, j:, j] - torch.einsum("nil,nl->ni", L[:, j:, :j], L[:, j, :j])
        pivot = torch.maximum(column[:, 0], r2[:, j])
        count += int((column[:, 0] < r2[:, j]).sum())
        worst = min(worst, (column[:, 0] / r2[:, j] - 1).min().item())
        L[:, j:, j] = column / pivot.sqrt()[:, None]
        L[:, j, j] = pivot.sqrt()
    if count:
        report_loss(count, total, worst)
    return L


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _plus_product(x: Tensor | None, a: Tensor, b: Tensor, *, alpha: int = 1) -> Tensor:
    """x + alpha a b; ``x`` is not kept."""
    if x is not None:
        return torch.baddbmm(x, a, b, alpha=alpha)
    product = torch.bmm(a, b)
    return product if alpha == 1 else product.neg_()
