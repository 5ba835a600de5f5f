"""SiLU moments as the equations of ``recbft.core.silu`` read: the plain form every fast path must equal.

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.core.statistics import SiluMoments


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None
) -> SiluMoments:
    """Equations (1) to (3); ``bias`` (B or 1, H or 1, T, T) is the sum of all biases on the scores."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    weights = F.silu(scores) / length * context.allowed[:, None].to(q.dtype)
    squares = weights.square()
    return SiluMoments(weights @ v, weights.sum(dim=-1), squares.sum(dim=-1), squares @ v, squares @ v.square())
