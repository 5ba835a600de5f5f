"""Precision by counts on a GPU. Its gradient is a sum of parts that are added up in one order.

Shapes: N tokens, of any axes; V items.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from recbft.autograd.transforms import once_differentiable
from recbft.kernels.dispatch import launched_beside

ELEMENTS = 1024  # of a program

LEAST = tl.constexpr(0.6931471805599453)  # ln 2, of an item never seen


def count_precision(scale: Tensor, base: Tensor, items: Tensor, low: float, cap: float) -> Tensor:
    """As the mechanism says, with a number for a scale."""
    found: Tensor = _CountPrecision.apply(scale, base, items, low, cap)
    return found


class _CountPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: Tensor, base: Tensor, items: Tensor, low: float, cap: float) -> Tensor:
        base, items = base.contiguous(), items.contiguous()
        tau = base.new_empty(*items.shape, 1)
        if items.numel():
            launched_beside(base, _forward[_grid(items)])(
                scale, base, items, tau, low, cap, items.numel(), ELEMENTS=ELEMENTS
            )
        ctx.save_for_backward(scale, base, items)
        ctx.bounds = low, cap
        return tau

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        scale, base, items = ctx.saved_tensors
        parts = base.new_empty(_grid(items))
        if items.numel():
            launched_beside(base, _parts[_grid(items)])(
                scale, base, items, g.contiguous(), parts, *ctx.bounds, items.numel(), ELEMENTS=ELEMENTS
            )
        return parts.sum(), None, None, None, None


def _grid(items: Tensor) -> tuple[int]:
    return (triton.cdiv(items.numel(), ELEMENTS),)


@triton.jit
def _forward(scale, base, items, precisions, low, cap, size, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    tau = tl.load(scale) * tl.load(base + tl.load(items + at, mask=real, other=0), mask=real, other=0.0) + LEAST
    tau = tl.where(tau < low, low, tau)  # not maximum, which drops what is not a number
    tl.store(precisions + at, tl.where(tau > cap, cap, tau), mask=real)


@triton.jit
def _parts(scale, base, items, of_precisions, parts, low, cap, size, ELEMENTS: tl.constexpr):
    """(2), by program."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    real = at < size
    own = tl.load(base + tl.load(items + at, mask=real, other=0), mask=real, other=0.0)
    tau = tl.load(scale) * own + LEAST
    g = tl.load(of_precisions + at, mask=real, other=0.0)
    tl.store(parts + tl.program_id(0), tl.sum(tl.where((tau >= low) & (tau <= cap), g, 0.0) * own, 0))
