"""Fuzzy regimes: how far a token belongs to each, where in a history each lives, and the attention bias that follows.

    mu_r   = softmax_r(-|z - c_r|^2 / (2 sigma_r^2))                       memberships, on the simplex           (9.29)
    mu_r   = mean of (9.29) at sigma_r (1 + u) and at sigma_r / (1 + u)       interval type-2, u in [0, 1]       (9.30)
    phi_jk = (1 + cos(pi min(|j - m_k| / w, 1))) / 2, rows divided by their sum;
             m = linspace(0, T - 1, R),  w = max(1, 1.5 T / R)             soft blocks that tile a length T      (9.31)
    P      = sweeps of: divide rows, then columns, of exp(S / tau) by their sums                                 (9.32)
    bias   = clip((sum_k s_k b_k - m) / d, +-limit) * scale                standardised by constants m and d     (9.34)

(9.29) leaves the clamps of the paper's listing out: a softmax is not moved by what is added to all its logits, and at
large widths they make all memberships equal. (9.32) works in logarithms, so that no score overflows.

Source: Fuzzy-Gated Training for Transformers, section 2 and listings 1, 2 and 5; (9.30): Nie and Tan (2008); (9.32):
Cuturi, Sinkhorn Distances (2013).
Shapes: B rows, T tokens, Z width of z, R regimes (and blocks), N terms of a bias.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recbft.autograd.boundaries import eagerly
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable, untransformed

HALF_WIDTH = 1.5  # of a block of (9.31), in T / R


def memberships(z: Tensor, centres: Tensor, log_width: Tensor, uncertainty: Tensor | None = None) -> Tensor:
    """Equation (9.29), or (9.30) with an uncertainty.

    Args:
        z: (..., Z).
        centres: c, (R, Z).
        log_width: log sigma, (R,).
        uncertainty: u, (..., 1), in [0, 1].

    Returns:
        (..., R), >= 0, sums of 1 over the regimes.
    """
    sharpness = 0.5 * torch.exp(-2 * log_width)  # 1 / (2 sigma^2)
    pull = torch.nn.functional.linear(z, 2 * sharpness[:, None] * centres, -sharpness * centres.square().sum(dim=-1))
    logits = pull - z.square().sum(dim=-1, keepdim=True) * sharpness
    if uncertainty is None:
        return _softmax(logits)
    widening = (1 + uncertainty).square()
    return (_softmax(logits / widening) + _softmax(logits * widening)) / 2


def _softmax(logits: Tensor) -> Tensor:
    """Over the last axis, (..., R), laid out so that the few regimes of a token are not a row each."""
    return torch.softmax(logits.movedim(-1, 0).contiguous(), dim=0).movedim(0, -1)


def soft_blocks(length: int, num_blocks: int) -> Tensor:
    """Equation (9.31): (T, R) in float64, rows sum to 1."""
    place = torch.arange(length, dtype=torch.float64)
    middle = torch.linspace(0, length - 1, num_blocks, dtype=torch.float64)
    width = max(1.0, HALF_WIDTH * length / num_blocks)
    distance = (place[:, None] - middle).abs() / width
    window = 0.5 * (1 + torch.cos(math.pi * distance.clamp(max=1)))
    return window / window.sum(dim=1, keepdim=True)


@lru_cache(maxsize=4)
@untransformed
def block_table(longest: int, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(9.31) for every length: (R + 1, longest, longest), entry [k, T - 1, j] is phi_jk at length T, 0 where j >= T.

    The last of the R + 1 is the distance from the end, (T - 1 - j) / (T - 1).
    """
    with torch.inference_mode(False):  # it is kept for training too, wherever it is asked for first
        table = torch.zeros(num_blocks + 1, longest, longest, dtype=dtype)
        for length in range(1, longest + 1):
            table[:-1, length - 1, :length] = soft_blocks(length, num_blocks).T
            table[-1, length - 1, :length] = torch.arange(length - 1, -1, -1, dtype=dtype) / max(1, length - 1)
        return table.to(device)


def sinkhorn(scores: Tensor, *, sweeps: int) -> Tensor:
    """Equation (9.32) of S / tau: (R, R), columns sum to 1, rows the nearer to it the more sweeps."""
    log = scores
    for _ in range(sweeps):
        log = log - log.logsumexp(dim=1, keepdim=True)
        log = log - log.logsumexp(dim=0, keepdim=True)
    return log.exp()


class BiasTerms(NamedTuple):
    """A bias by (9.34) that is not written out: its terms are read from a table, and the last may be the distance."""

    shares: Tensor  # s, (B, T, N)
    table: Tensor  # ``block_table``: the term of a token of some reach and a key of some place
    reach: Tensor  # (B, T) int32, one less than how many places a token may read
    mean: Tensor  # m, a scalar
    deviation: Tensor  # d > 0, a scalar
    scale: Tensor  # a scalar
    limit: float


@eagerly
def standardised_bias(
    shares: Tensor, terms: Tensor, *, mean: Tensor, deviation: Tensor, limit: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The clipped term of (9.34), and the sum in it.

    Args:
        shares: s, (N, B, T), what each attending token takes of each term.
        terms: b, (N, B, T, T), constants for gradients.
        mean, deviation: m and d > 0, scalars, constants for gradients.
        limit: the clip.
        scale: a scalar.

    Returns:
        The bias, (B, T, T), and sum_k s_k b_k without gradients.
    """
    if beyond_first_gradients():
        raw = (shares[..., None] * terms).sum(dim=0)
        return ((raw - mean) / deviation).clamp(-limit, limit) * scale, raw.detach()
    bias, raw = applied(_StandardisedBias, shares, terms, mean, deviation, limit, scale)
    return bias, raw


class _StandardisedBias(torch.autograd.Function):
    """Term by term: nothing of shape (N, B, T, T) is made beside the terms."""

    @staticmethod
    def forward(
        ctx: Any, shares: Tensor, terms: Tensor, mean: Tensor, deviation: Tensor, limit: float, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        raw = shares[0, ..., None] * terms[0]
        for share, term in zip(shares[1:], terms[1:], strict=True):
            raw.addcmul_(share[..., None], term)
        clipped = ((raw - mean) / deviation).clamp_(-limit, limit)
        ctx.save_for_backward(terms, clipped, deviation, scale)
        ctx.limit = limit
        ctx.mark_non_differentiable(raw)
        return clipped * scale, raw

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        terms, clipped, deviation, scale = ctx.saved_tensors
        d_scale = torch.dot(grad.flatten(), clipped.flatten())
        d_raw = torch.ops.aten.hardtanh_backward(grad, clipped, -ctx.limit, ctx.limit).mul_(scale / deviation)
        d_shares = torch.stack([(d_raw * term).sum(dim=-1) for term in terms])
        return d_shares, None, None, None, None, d_scale.view_as(scale)
