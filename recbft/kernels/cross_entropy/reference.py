"""Cross-entropy over the whole item vocabulary, as its definition reads.

    loss = mean_n( log sum_v exp(x_n . w_v) - x_n . w_target(n) )                                (1)

Shapes: N positions, V items, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Equation (1); states (N, D), weight (V, D), target (N,) row numbers of weight."""
    return F.cross_entropy(states @ weight.T, target)
