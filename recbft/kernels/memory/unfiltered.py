"""Memories without a covariance (delta and additive rules), chunk by chunk and exact.

With keys and queries at the chunk's entry (``transport``: k_j <- e^{c_j} k_j), b_j = e^{-c_j} k_j for writing and w_j
what is written,

    reset     w_i = eta_i * (v_i - M' k_i - sum_{j < i} (k_i' b_j) w_j)      additive  w_i = omega_i * v_i      (1)
    y_t = M' q_t + sum_{j <= t} (q_t' b_j) w_j       exit  M <- e^{c_C} (M + sum_j b_j w_j')                    (2)

The sum of (1) is a forward substitution, which an eta per column does not make longer. Its backward goes from the last
token to the first; with z the gradient of w, g that of v and h that of eta,

    t_i = z_i - sum_{l > i} (k_l' b_i) g_l       g_i = eta_i * t_i       h_i = t_i * w_i / eta_i            (3)

Shapes: B rows, H heads, T tokens, N = B H, n chunks of C tokens, K key width, M value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.kernels.memory.chunked import CHUNK, MAX_LOG_DECAY, chunk_length, cut, cut_scalar, history_masks, join
from recbft.kernels.memory.reference import Rule
from recbft.kernels.memory.transport import restarted_sum


def unfiltered_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transition: Tensor | None,
    share: Tensor,
    rule: Rule,
    first: Tensor | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as the reference; ``chunk`` is the longest chunk."""
    B, H, T, K = k.shape
    C = chunk_length(T, CHUNK if chunk is None else chunk, transition, MAX_LOG_DECAY[v.dtype])
    starts = None if first is None else cut_scalar(first[:, None].expand(B, H, T), C, fill=False)
    q, k, v, share = (cut(x, C) for x in (q, k, v, share))
    write, out = k, None
    if transition is not None:
        c = restarted_sum(cut(transition, C, fill=1.0).log(), starts)  # (N, n, C, K or 1)
        out = c.exp()
        # Not k / e^c, whose gradient has e^-2c.
        q, k, write = q * out, k * out, k * (-c).exp()
    ends = [None] * k.shape[1] if out is None else out[:, :, -1, :, None].unbind(1)
    state = k.new_zeros(len(k), K, v.shape[-1])
    readouts = []
    per_chunk = (x.unbind(1) for x in (q, k, write, v, share))
    for qs, ks, bs, vs, shares, end, masks in zip(*per_chunk, ends, history_masks(starts, C, like=v), strict=True):
        entry = 1.0 if masks.entry is None else masks.entry
        if rule == "reset":
            overlap = torch.bmm(ks, bs.mT) * masks.same
            written = applied(_Substitute, overlap, shares, vs - torch.bmm(ks, state) * entry)
        else:
            written = shares * vs
        readouts.append(torch.bmm(qs, state) * entry + torch.bmm(torch.bmm(qs, bs.mT) * masks.same, written))
        if masks.last is not None:
            state, written = state * masks.stays, written * masks.last
        # Brought to the exit before they are summed: e^-c alone may be large.
        state = state + torch.bmm(bs.mT, written) if end is None else state * end + torch.bmm((bs * end.mT).mT, written)
    return join(torch.stack(readouts, dim=1), B, H, T), state.unflatten(0, (B, H))


class _Substitute(torch.autograd.Function):
    """w of (1) from k_i' b_j (N, C, C), of which the part below the diagonal counts, eta and v_i - M' k_i (N, C, M)."""

    @staticmethod
    def forward(ctx: Any, overlap: Tensor, share: Tensor, innovation: Tensor) -> Tensor:
        left = innovation.clone()  # of which what was written before is taken off
        written = torch.empty_like(left)
        for i in range(left.shape[1]):
            if i:
                left[:, i : i + 1].baddbmm_(overlap[:, i : i + 1, :i], written[:, :i], alpha=-1)
            torch.mul(share[:, i], left[:, i], out=written[:, i])
        ctx.save_for_backward(overlap, share, left, written)
        return written

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, z: Tensor) -> Any:
        overlap, share, left, written = ctx.saved_tensors
        t, g = z.clone(), torch.empty_like(z)
        for i in reversed(range(z.shape[1])):
            if i + 1 < z.shape[1]:
                t[:, i : i + 1].baddbmm_(overlap[:, i + 1 :, i : i + 1].mT, g[:, i + 1 :], alpha=-1)
            torch.mul(share[:, i], t[:, i], out=g[:, i])
        g_overlap = torch.bmm(g, written.mT).tril_(-1).neg_()
        return g_overlap, (t * left).sum_to_size(share.shape), g
