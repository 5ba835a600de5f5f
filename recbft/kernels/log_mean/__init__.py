"""The log of a mean over coordinates: two operations, and three in their backward, or one launch in each on a GPU.

    y = log(sum_d x_d / D)        d_x_d = d_y / sum_d x_d                                        (1)

Shapes: N tokens, D width; the tokens' axes come first.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from recbft import core
from recbft.kernels import dispatch


def scalar_log_precision(precision: Tensor) -> Tensor:
    """``core.scalar_log_precision``, which is equation (1): (..., D) -> (...)."""
    if dispatch.fuses_steps(precision) and precision.dim() > 1 and precision.numel():
        found: Tensor = import_module("recbft.kernels.log_mean.triton").log_mean(precision)
        return found
    return core.scalar_log_precision(precision)
