"""Linear map and layer norm per seed, as one batched product and one norm.

Shapes: S seeds, N tokens of each, I inputs, O outputs, D model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (S, N, I), weight (S, O, I), bias (S, O) or None -> (S, N, O)."""
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias[:, None], x, weight.mT)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (S, N, D), weight and bias (S, D)."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * weight[:, None] + bias[:, None]
