"""Cross-entropy over the whole item vocabulary, as its definition reads.

    loss = mean_n( log sum_v exp(x_n . w_v) - x_n . w_target(n) )                                (1)

Shapes: N positions, V items, D width, S seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def full_cross_entropy(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Equation (1); states (N, D), weight (V, D), target (N,) row numbers of weight."""
    return F.cross_entropy(states @ weight.T, target)


def full_cross_entropies(states: Tensor, weight: Tensor, target: Tensor, counts: Sequence[int]) -> Tensor:
    """Equation (1) for each seed; weight (S, V, D), ``counts`` positions of states and target for each: (S,)."""
    parts = zip(states.split(list(counts)), weight, target.split(list(counts)), strict=True)
    return torch.stack([full_cross_entropy(*own) for own in parts])
