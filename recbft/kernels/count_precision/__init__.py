"""Precision of an item by its count alone: four operations and seven in their backward, or one and two on a GPU.

    tau_n = clamp(range * base_i + ln 2, low, cap),  i the item of token n                       (1)
    d_range = sum_n d_tau_n base_i  over the tokens that nothing clamps; a bound itself is free  (2)

Shapes: N tokens, of any axes; V items.
"""

from __future__ import annotations

import math
from importlib import import_module

import torch
from torch import Tensor

from recbft.kernels import dispatch


def count_precision(scale: Tensor, base: Tensor, items: Tensor, *, low: float, cap: float) -> Tensor:
    """Equation (1).

    Args:
        scale: range, a number, or whatever broadcasts with the items.
        base: of every item, (V,); a constant.
        items: (...), integers.
        low, cap: bounds.

    Returns:
        (..., 1).
    """
    alike = scale.dtype == torch.float32 and scale.device == base.device == items.device
    if alike and scale.dim() == 0 and dispatch.fuses_steps(base):
        found: Tensor = import_module("recbft.kernels.count_precision.triton").count_precision(
            scale, base, items, low, cap
        )
        return found
    return ((scale * base[items])[..., None] + math.log(2)).clamp(low, cap)
