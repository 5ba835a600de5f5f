"""GELU and a product with its slope in one pass, because a precision layer needs both.

    y = phi(a) = a Phi(a)        z = phi'(a) M        phi'(a) = Phi(a) + a N(a)                  (1)
    d_a = phi'(a) * g_y + phi''(a) * (g_z M'),        phi''(a) = N(a) (2 - a^2)                  (2)

M is a constant with few columns: the factor of a low-rank Jacobian, or the whole of it. Tokens are taken in blocks that
stay in the cache, so that phi'(a), as wide as the widest array of a layer, is never written to memory.

Shapes: N tokens, F feed-forward width, r columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.process import gelu_slope

BLOCK_ELEMENTS = 524_288


def gelu_with_slope_reference(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (1) by autograd."""
    return F.gelu(a), gelu_slope(a) @ factor


def gelu_with_slope(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """``(gelu(a), gelu'(a) @ factor)``, both differentiable once with respect to a.

    Args:
        a: (..., F).
        factor: M, (F, r), a constant for gradients.

    Returns:
        (..., F) and (..., r).
    """
    flat = a.reshape(-1, a.shape[-1])
    y, z = _GeluWithSlope.apply(flat, factor.detach())
    return y.view_as(a), z.view(*a.shape[:-1], factor.shape[1])


@torch.no_grad()
def slope_product(a: Tensor, factor: Tensor) -> Tensor:
    """phi'(a) M without gradients; (..., F) -> (..., r)."""
    flat = a.reshape(-1, a.shape[-1])
    z = a.new_empty(flat.shape[0], factor.shape[1])
    rows = _rows(flat)
    slope, one = torch.empty_like(flat[:rows]), torch.ones_like(flat[:rows])
    for points, out in zip(flat.split(rows), z.split(rows), strict=True):
        part = slope[: points.shape[0]]
        torch.ops.aten.gelu_backward(one[: points.shape[0]], points, grad_input=part)
        torch.mm(part, factor, out=out)
    return z.view(*a.shape[:-1], factor.shape[1])


class _GeluWithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, factor)
        return F.gelu(a), slope_product(a, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_y: Tensor, g_z: Tensor) -> Any:
        a, factor = ctx.saved_tensors
        d_a = torch.empty_like(a)
        rows = _rows(a)
        square, curvature, pull = (torch.empty_like(a[:rows]) for _ in range(3))
        for points, out, gy, gz in zip(*(x.split(rows) for x in (a, d_a, g_y, g_z)), strict=True):
            n = points.shape[0]
            sq, curve, back = square[:n], curvature[:n], pull[:n]
            torch.mul(points, points, out=sq)
            torch.mul(sq, -0.5, out=curve).exp_()
            curve.mul_(sq.neg_().add_(2)).mul_(1 / math.sqrt(2 * math.pi))  # phi''
            torch.mm(gz, factor.T, out=back)
            torch.ops.aten.gelu_backward(gy.contiguous(), points, grad_input=out)
            out.addcmul_(back, curve)
        return d_a, None


def _rows(a: Tensor) -> int:
    """Tokens per block; all of them where there is no cache to stay in."""
    return max(1, a.shape[0] if a.device.type != "cpu" else min(a.shape[0], BLOCK_ELEMENTS // a.shape[1]))
