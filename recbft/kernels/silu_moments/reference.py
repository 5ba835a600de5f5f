"""SiLU moments as the equations of ``recbft.core.silu`` read: the plain form every fast path must equal.

Scores are in the widest type of what is added up; the sums are in that of the values.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.core.statistics import SiluMoments


def silu_weights(q: Tensor, k: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None) -> Tensor:
    """Equations (1) and (2); (B, H, T, T), 0 where a token may not read; ``bias`` as below."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    return F.silu(scores) / length * context.allowed[:, None].to(q.dtype)


def silu_mean(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None) -> Tensor:
    """The first of (3)."""
    return silu_weights(q, k, context, length=length, bias=bias).to(v.dtype) @ v


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None
) -> SiluMoments:
    """Equations (1) to (3); ``bias`` (B or 1, H or 1, T, T) is the sum of all biases on the scores."""
    weights = silu_weights(q, k, context, length=length, bias=bias).to(v.dtype)
    squares = weights.square()
    return SiluMoments(weights @ v, weights.sum(dim=-1), squares.sum(dim=-1), squares @ v, squares @ v.square())
