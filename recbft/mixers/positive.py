"""Learned numbers that stay positive: softplus of a free number, kept a little off 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-6


def positive(raw: Tensor) -> Tensor:
    """softplus(raw) + 1e-6."""
    return F.softplus(raw) + SMALLEST


def raw_of(value: Tensor) -> Tensor:
    """The float32 numbers whose ``positive`` is ``value``, > 1e-6."""
    above = value.double() - SMALLEST
    return (above + torch.log(-torch.expm1(-above))).float()  # log(exp(x) - 1), without its overflow
