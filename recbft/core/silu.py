"""Pointwise SiLU attention (HSTU): the innovation, and the sums that a sandwich variance needs.

    s_tj = q_t . k_j / sqrt(K) + bias_tj + b[lag_tj] + log_precision_j + lag_tj * log_decay      (8.2)
    a_tj = SiLU(s_tj) / N over the keys j that t may read, N a constant length                   (8.3)
    e = sum a v                                                                                  (8.3)
    s1 = sum a    s2 = sum a^2    w1 = sum a^2 v    w2 = sum a^2 v^2                             (8.6)

The weights are not normalised and may be negative. Scores are in the widest type of what is added up; the sums are in
that of the values. The functions whose names end in ``_ref`` are the plain form of ``kernels.silu_moments``.

Source: Zhai et al., Actions Speak Louder than Words (arXiv 2402.17152); Precision Tracked Transformer
(arXiv 2605.18832), section 5.1 and appendix D.
Shapes: B rows, H heads, T tokens, K head width, L lags.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.boundaries import eagerly
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable
from recbft.core.belief import SequenceContext, SiluMoments


def silu_weights(q: Tensor, k: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None) -> Tensor:
    """Equations (8.2) and (8.3): (B, H, T, T), 0 where a token may not read.

    Args:
        q, k: queries and keys, (B, H, T, K).
        context: which token may read which.
        length: N of (8.3), > 0.
        biases: as ``total_bias`` takes them.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    bias = total_bias(q, context, **biases)
    if bias is not None:
        scores = scores + bias
    return F.silu(scores) / length * context.allowed[:, None].to(q.dtype)


def silu_mean_ref(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> Tensor:
    """e of (8.3)."""
    return silu_weights(q, k, context, length=length, **biases).to(v.dtype) @ v


def silu_moments_ref(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> SiluMoments:
    """Equations (8.2), (8.3) and (8.6)."""
    weights = silu_weights(q, k, context, length=length, **biases).to(v.dtype)
    squares = weights.square()
    return SiluMoments(weights @ v, weights.sum(dim=-1), squares.sum(dim=-1), squares @ v, squares @ v.square())


def total_bias(
    q: Tensor,
    context: SequenceContext,
    *,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor | None:
    """The sum of the biases on the scores, (B or 1, H or 1, T or 1, T).

    Args:
        bias: of each pair, broadcastable to (B, H, T, T).
        lag_bias: b, (L,), the bias of each lag in positions; the last is that of all longer ones.
        log_precision: log of each key's scalar precision, (B, T).
        log_decay: log of the recency decay, a scalar, <= 0, multiplied by the lag in positions.
    """
    parts = [] if bias is None else [bias]
    if lag_bias is not None:
        parts.append(look_up(lag_bias, context.lag)[:, None])
    if log_precision is not None:
        parts.append(log_precision[:, None, None, :])
    if log_decay is not None:
        parts.append((context.lag.to(q.dtype) * log_decay)[:, None])
    if not parts:
        return None
    total = sum(parts[1:], start=parts[0])
    # Two or three dimensions stand for all rows, or for all rows and heads.
    return total.reshape((1,) * (4 - total.dim()) + total.shape)


@eagerly
def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Elements of a table, (N,), at an index of any shape; an index out of range gives element N - 1 or 0."""
    index = index.clamp(0, table.shape[0] - 1)
    if beyond_first_gradients():
        return table[index]
    looked_up: Tensor = applied(_LookUp, table, index)
    return looked_up


class _LookUp(torch.autograd.Function):
    """Indexing whose gradient is one sum per element: autograd's own sorts or locks over every pair of tokens."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = table.shape[0]
        return table.take(index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size).index_add_(0, index.flatten(), grad.flatten()), None
