"""GELU and its slope on a GPU: one launch in each direction beside the product with the factor.

Shapes: N tokens, F feed-forward width, r columns, S seeds.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.kernels.dispatch import launched_beside

ELEMENTS = 1024  # of a program

ROOT_HALF = tl.constexpr(0.7071067811865476)
PEAK = tl.constexpr(0.3989422804014327)  # of the normal density


def forward(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """``(gelu(a), gelu'(a) @ factor)``; a (N, F), factor (F, r) or (S, F, r)."""
    y = torch.empty_like(a, memory_format=torch.contiguous_format)
    return y, _product(_slope_of(a, y), factor)


def slope_product(a: Tensor, factor: Tensor) -> Tensor:
    """``gelu'(a) @ factor`` alone."""
    return _product(_slope_of(a, None), factor)


def backward(a: Tensor, factor: Tensor, g_y: Tensor, g_z: Tensor) -> Tensor:
    """The gradient of a."""
    a, g_y, pull = a.contiguous(), g_y.contiguous(), _product(g_z, factor.mT).contiguous()
    d_a = torch.empty_like(a)
    _launch(_gelu_gradient, a, a, g_y, pull, d_a)
    return d_a


def _slope_of(a: Tensor, y: Tensor | None) -> Tensor:
    """gelu'(a), with gelu(a) left in ``y``."""
    a = a.contiguous()
    slope = torch.empty_like(a)
    _launch(_gelu, a, a, y, slope)
    return slope


def _product(rows: Tensor, factor: Tensor) -> Tensor:
    """Rows times the factor of their seed."""
    if factor.dim() == 2:
        return rows @ factor
    return (rows.view(len(factor), -1, rows.shape[-1]) @ factor).flatten(0, 1)


def _launch(kernel: Any, like: Tensor, *tensors: Tensor | None) -> None:
    if like.numel():
        grid = (triton.cdiv(like.numel(), ELEMENTS),)
        launched_beside(like, kernel[grid])(*tensors, like.numel(), ELEMENTS=ELEMENTS)


@triton.jit
def _gelu(points, values, slopes, size, ELEMENTS: tl.constexpr):
    """phi and phi' of (1); the first may be None."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    a = tl.load(points + at, mask=real, other=0.0)
    share = 0.5 + 0.5 * tl.erf(a * ROOT_HALF)
    if values is not None:
        tl.store(values + at, a * share, mask=real)
    tl.store(slopes + at, share + a * PEAK * tl.exp(-0.5 * a * a), mask=real)


@triton.jit
def _gelu_gradient(points, of_values, of_slopes, d_points, size, ELEMENTS: tl.constexpr):
    """(2)."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    a = tl.load(points + at, mask=real, other=0.0)
    bell = PEAK * tl.exp(-0.5 * a * a)
    slope = 0.5 + 0.5 * tl.erf(a * ROOT_HALF) + a * bell
    g = tl.load(of_values + at, mask=real, other=0.0) * slope
    g += tl.load(of_slopes + at, mask=real, other=0.0) * bell * (2 - a * a)
    tl.store(d_points + at, g, mask=real)
