"""Prediction (``kernel.c``) and the sandwich precision (``sandwich.c``) in C: one pass over memory in each direction.

Shapes: N tokens, D model width; the tokens' axes come first. B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64
from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import SiluMoments
from recbft.core.filter_step import FLOOR
from recbft.kernels import by_tokens, c_library, readable
from recbft.kernels.c_library import pointer, pointers
from recbft.kernels.c_library.heads import HeadView

PER_COORDINATE = ("mean", "square_mean", "square_second")


def decline_sandwich(mean: Tensor, *, moments: SiluMoments) -> str | None:
    """Why this path cannot serve an estimate, or None where it can."""
    for name, x in moments._asdict().items():
        if x.dtype != torch.float32 or x.device != mean.device:
            return f"needs float32 sums on one device, got a {name} of {x.dtype} on {x.device}"
        if x.shape != (mean.shape if name in PER_COORDINATE else mean.shape[:-1]):
            return "needs sums that do not broadcast"
    return c_library.missing()


def sandwich_precision(moments: SiluMoments, *, cap: float, centre: str) -> Tensor:
    """The same as ``core.sandwich_precision_ref``."""
    precision: Tensor = applied(_Sandwich, *moments, cap, {"root": True, "innovation": False}[centre])
    return precision


def predict(lam: Tensor, J: Tensor, Q: Tensor, predicted: Tensor, low: float, cap: float) -> None:
    """Fill ``predicted``; J of each token, or (D,)."""
    c_library.library().predict_forward(*_sizes(lam, J), *_bounds(low, cap), *pointers(lam, J, Q, predicted))


def predict_gradients(given: tuple[Tensor, ...], d_lam: Tensor, d_J: Tensor | None, low: float, cap: float) -> Tensor:
    """From lam, J, Q, lam'' and its gradient; returned is the gradient of Q, (D,)."""
    lam, J, Q = given[:3]
    num_tokens, *sizes = _sizes(lam, J)
    sums = Q.new_empty(c_library.library().predict_sums(num_tokens), len(Q))
    c_library.library().predict_backward(num_tokens, *sizes, *_bounds(low, cap), *pointers(*given, d_lam, d_J, sums))
    return sums.sum(dim=0)


def _sizes(lam: Tensor, J: Tensor) -> list[c_int64]:
    """N, D, and whether each token has a Jacobian of its own."""
    D = lam.shape[-1]
    return [c_int64(lam.numel() // D), c_int64(D), c_int64(J.shape == lam.shape)]


def _bounds(low: float, cap: float) -> list[c_float]:
    return [c_float(FLOOR), c_float(low), c_float(cap)]


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "T", "K", "root")),
        ("cap", ctypes.c_float),
        *((name, HeadView) for name in ("mean", "square_mean", "square_second", "precision")),
        *((name, ctypes.c_void_p) for name in ("weight_sum", "square_sum")),
        *((name, HeadView) for name in ("grad_precision", "d_mean", "d_square_mean", "d_square_second")),
        *((name, ctypes.c_void_p) for name in ("d_weight_sum", "d_square_sum")),
    )

    @classmethod
    def of(cls, moments: SiluMoments, cap: float, root: bool) -> _Call:
        """On moments that the caller keeps."""
        call = cls(*moments.mean.shape, root, cap)
        for name in PER_COORDINATE:
            setattr(call, name, HeadView.of(getattr(moments, name)))
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
        call.precision = HeadView.of(precision)
        c_library.library().sandwich_forward(ctypes.byref(call))
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
        call.grad_precision = HeadView.of(grad)
        for name in PER_COORDINATE:
            setattr(call, f"d_{name}", HeadView.of(getattr(found, name)))
        call.d_weight_sum, call.d_square_sum = pointer(found.weight_sum), pointer(found.square_sum)
        c_library.library().sandwich_backward(ctypes.byref(call))
        return *found, None, None
