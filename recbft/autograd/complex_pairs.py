"""Complex numbers as pairs of real ones and back, as views in both directions.

PyTorch's own ``view_as_real`` and ``view_as_complex`` copy their gradients into one order of the elements first, and so
turned heads around for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import transformed


def real(x: Tensor) -> Tensor:
    """(..., K) complex as (..., 2K) real, real and imaginary parts in turn."""
    x = x.resolve_conj()
    paired: Tensor = _pairs(x) if transformed() else _Pairs.apply(x)
    return paired


def as_complex(x: Tensor) -> Tensor:
    """The inverse of ``real``; half precision, which has no complex numbers here, is widened."""
    x = x.float() if x.dtype.itemsize < 4 else x
    joined: Tensor = _joined(x) if transformed() else _Joined.apply(x)
    return joined


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _pairs(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return as_complex(grad)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _joined(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return real(grad)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)


def _joined(x: Tensor) -> Tensor:
    adjacent = x.stride(-1) == 1 and all(stride % 2 == 0 for stride in x.stride()[:-1]) and x.storage_offset() % 2 == 0
    return torch.view_as_complex((x if adjacent else x.contiguous()).unflatten(-1, (-1, 2)))
