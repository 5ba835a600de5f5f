"""The sandwich precision in C (``compiled/sandwich.c``).

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.statistics import SiluMoments
from recbft.kernels import compiled
from recbft.kernels.compiled import pointer
from recbft.kernels.compiled.heads import View
from recbft.kernels.layout import by_tokens, readable

PER_COORDINATE = ("mean", "square_mean", "square_second")


def serves(moments: SiluMoments) -> bool:
    """Whether an estimate is for this path."""
    wide, narrow = moments.mean.shape, moments.mean.shape[:-1]
    return all(
        compiled.serves(x) and x.shape == (wide if name in PER_COORDINATE else narrow)
        for name, x in moments._asdict().items()
    )


def sandwich_precision(moments: SiluMoments, *, cap: float, centre: str) -> Tensor:
    """The same as ``core.sandwich_precision``."""
    precision: Tensor = applied(_Sandwich, *moments, cap, centre == "root")
    return precision


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "T", "K", "root")),
        ("cap", ctypes.c_float),
        *((name, View) for name in ("mean", "square_mean", "square_second", "precision")),
        *((name, ctypes.c_void_p) for name in ("weight_sum", "square_sum")),
        *((name, View) for name in ("grad_precision", "d_mean", "d_square_mean", "d_square_second")),
        *((name, ctypes.c_void_p) for name in ("d_weight_sum", "d_square_sum")),
    )

    @classmethod
    def of(cls, moments: SiluMoments, cap: float, root: bool) -> _Call:
        """On moments that the caller keeps."""
        call = cls(*moments.mean.shape, root, cap)
        for name in PER_COORDINATE:
            setattr(call, name, View.of(getattr(moments, name)))
        call.weight_sum, call.square_sum = pointer(moments.weight_sum), pointer(moments.square_sum)
        return call


class _Sandwich(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, s1: Tensor, s2: Tensor, square_mean: Tensor, square_second: Tensor, *how: Any
    ) -> Tensor:
        wide = map(readable, (mean, square_mean, square_second))
        moments = SiluMoments(next(wide), s1.contiguous(), s2.contiguous(), *wide)
        precision = by_tokens(mean)
        call = _Call.of(moments, *how)
        call.precision = View.of(precision)
        compiled.library().sandwich_forward(ctypes.byref(call))
        ctx.save_for_backward(*moments)
        ctx.how = how
        return precision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        moments = SiluMoments(*ctx.saved_tensors)
        grad = readable(grad)
        found = SiluMoments(
            by_tokens(grad),
            torch.empty_like(moments.weight_sum),
            torch.empty_like(moments.square_sum),
            by_tokens(grad),
            by_tokens(grad),
        )
        call = _Call.of(moments, *ctx.how)
        call.grad_precision = View.of(grad)
        for name in PER_COORDINATE:
            setattr(call, f"d_{name}", View.of(getattr(found, name)))
        call.d_weight_sum, call.d_square_sum = pointer(found.weight_sum), pointer(found.square_sum)
        compiled.library().sandwich_backward(ctypes.byref(call))
        return *found, None, None
