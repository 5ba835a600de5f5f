"""GELU and its slope together, because a precision layer needs both.

    y = a Phi(a)        s = phi'(a) = Phi(a) + a N(a)        s' = N(a) (2 - a^2)                 (1)

The backward of y is a product with the s already at hand. On the CPU both directions go through the tokens in blocks
that stay in the cache: the arrays are the widest of a layer, and fetching them costs more than the arithmetic.

Shapes: N tokens, F feed-forward width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.process import gelu_slope

BLOCK_ELEMENTS = 131_072


def gelu_with_slope_reference(a: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (1) by autograd."""
    return F.gelu(a), gelu_slope(a)


def gelu_with_slope(a: Tensor) -> tuple[Tensor, Tensor]:
    """``(gelu(a), gelu'(a))``, both differentiable once; (..., F)."""
    return _GeluWithSlope.apply(a.contiguous())  # type: ignore[no-any-return]


class _GeluWithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.empty_like(a)
        one = a.new_ones(_block(a))
        for points, out in zip(_blocks(a), _blocks(slope), strict=True):
            torch.ops.aten.gelu_backward(one[: points.numel()], points, grad_input=out)
        ctx.save_for_backward(a, slope)
        return F.gelu(a), slope

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_slope: Tensor) -> Tensor:
        a, slope = ctx.saved_tensors
        d_a = torch.empty_like(a)
        parts = (_blocks(x.contiguous()) for x in (d_a, grad, grad_slope, a, slope))
        square, density = a.new_empty(2, _block(a))
        for out, g, g_slope, points, s in zip(*parts, strict=True):
            sq, curvature = square[: points.numel()], density[: points.numel()]
            torch.mul(points, points, out=sq)
            torch.mul(sq, -0.5, out=curvature).exp_().mul_(1 / math.sqrt(2 * math.pi))  # N(a)
            curvature.mul_(sq.neg_().add_(2))
            torch.mul(g, s, out=out).addcmul_(g_slope, curvature)
        return d_a


def _block(a: Tensor) -> int:
    return a.numel() if a.device.type != "cpu" else min(a.numel(), BLOCK_ELEMENTS)


def _blocks(a: Tensor) -> tuple[Tensor, ...]:
    blocks: tuple[Tensor, ...] = a.view(-1).split(max(1, _block(a)))
    return blocks
