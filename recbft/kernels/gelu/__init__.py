"""GELU and a product with its slope in one pass, because a precision layer needs both.

    y = phi(a) = a Phi(a)  (4.1)      z = phi'(a) M  (4.2, 4.5)      phi'(a) = Phi(a) + a N(a)
    d_a = phi'(a) * g_y + phi''(a) * (g_z M'),        phi''(a) = N(a) (2 - a^2)                  (a)

M is a constant with few columns: the factor of a low-rank Jacobian, or the whole of it. Where several seeds train
together each has an M, and an equal share of the tokens.

Shapes: N tokens, F feed-forward width, r columns, S seeds.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, autograd, contiguous_format, empty_like, float32, no_grad

from recbft.autograd.boundaries import eagerly, in_full_precision
from recbft.autograd.transforms import applied, once_differentiable
from recbft.core import gelu_slope
from recbft.kernels import c_library
from recbft.kernels.dispatch import Path, choose, late, triton_of
from recbft.kernels.gelu import c
from recbft.kernels.gelu import torch as by_torch


@eagerly
@in_full_precision
def gelu_with_slope(a: Tensor, factor: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """``(gelu(a), gelu'(a) @ factor)``, both differentiable once with respect to a.

    Args:
        a: (..., F).
        factor: M, (F, r), or (S, F, r) for tokens in S equal parts, one after another; a constant for gradients.
        impl: ``auto``, or one of ``triton``, ``c``, ``torch`` and ``reference``.

    Returns:
        (..., F) and (..., r).
    """
    flat, factor = a.reshape(-1, a.shape[-1]), factor.detach()
    y, z = choose(impl, BOTH, flat, factor=factor)(flat, factor)
    return y.view_as(a), z.view(*a.shape[:-1], factor.shape[-1])


@eagerly
@in_full_precision
@no_grad()
def slope_product(a: Tensor, factor: Tensor, *, impl: str = "auto") -> Tensor:
    """phi'(a) M without gradients; (..., F) -> (..., r), M as in ``gelu_with_slope``."""
    flat = a.reshape(-1, a.shape[-1])
    z: Tensor = choose(impl, SLOPE, flat, factor=factor)(flat, factor)
    return z.view(*a.shape[:-1], factor.shape[-1])


def gelu_with_slope_ref(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The plain form of ``gelu_with_slope``."""
    return F.gelu(a), _slope_product_ref(a, factor)


def _slope_product_ref(a: Tensor, factor: Tensor) -> Tensor:
    slope = gelu_slope(a)
    if factor.dim() == 2:
        return slope @ factor
    each = slope.view(factor.shape[0], -1, a.shape[-1]) @ factor
    return each.view(*a.shape[:-1], factor.shape[-1])


class _GeluWithSlope(autograd.Function):
    """By the ``slope_product`` and ``backward`` of a module."""

    @staticmethod
    def forward(ctx: Any, passes: ModuleType, a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, factor)
        ctx.passes = passes
        y = empty_like(a, memory_format=contiguous_format)
        return y, passes.slope_product(a, factor, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_y: Tensor, g_z: Tensor) -> Any:
        return None, ctx.passes.backward(*ctx.saved_tensors, g_y, g_z), None


def _decline_triton(a: Tensor, *, factor: Tensor) -> str | None:
    return None if a.dtype == factor.dtype == float32 else f"needs float32, got {a.dtype} and {factor.dtype}"


def _decline_c(a: Tensor, *, factor: Tensor) -> str | None:
    if a.numel() == 0:
        return "needs at least one token"
    return _decline_triton(a, factor=factor) or c_library.missing()


BOTH = {
    "triton": Path(lambda: partial(applied, _GeluWithSlope, triton_of("gelu")), "cuda", _decline_triton, opened=True),
    "c": Path(lambda: partial(applied, _GeluWithSlope, c), "cpu", _decline_c, opened=True),
    "torch": Path(lambda: partial(applied, _GeluWithSlope, by_torch), opened=True),
    "reference": Path(lambda: gelu_with_slope_ref),
}
SLOPE = {
    "triton": Path(late("gelu", "slope_product"), "cuda", _decline_triton),
    "c": Path(lambda: c.slope_product, "cpu", _decline_c),
    "torch": Path(lambda: by_torch.slope_product),
    "reference": Path(lambda: _slope_product_ref),
}
