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
    """The numbers whose ``positive`` is ``value``, > 1e-6, in the default dtype."""
    above = value.double() - SMALLEST
    raw = above + torch.log(-torch.expm1(-above))  # log(exp(x) - 1), without its overflow
    return raw.to(torch.get_default_dtype())
