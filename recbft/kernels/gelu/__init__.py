"""GELU and a product with its slope in one pass, because a precision layer needs both.

    y = phi(a) = a Phi(a)        z = phi'(a) M        phi'(a) = Phi(a) + a N(a)                  (1)
    d_a = phi'(a) * g_y + phi''(a) * (g_z M'),        phi''(a) = N(a) (2 - a^2)                  (2)

M is a constant with few columns: the factor of a low-rank Jacobian, or the whole of it. Tokens are taken in blocks that
stay in the cache, so that phi'(a), as wide as the widest array of a layer, is never written to memory. Where several
seeds train together each has an M, and an equal share of the tokens.

Shapes: N tokens, F feed-forward width, r columns, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.autograd.full_precision import in_full_precision
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable, transformed
from recbft.core.process import gelu_slope
from recbft.kernels import dispatch
from recbft.kernels.gelu import compiled

BLOCK_ELEMENTS = 524_288


def gelu_with_slope_reference(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Equation (1) by autograd."""
    slope = gelu_slope(a)
    if factor.dim() == 2:
        return F.gelu(a), slope @ factor
    each = slope.view(factor.shape[0], -1, a.shape[-1]) @ factor
    return F.gelu(a), each.view(*a.shape[:-1], factor.shape[-1])


@eagerly
@in_full_precision
def gelu_with_slope(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """``(gelu(a), gelu'(a) @ factor)``, both differentiable once with respect to a.

    Args:
        a: (..., F).
        factor: M, (F, r), or (S, F, r) for tokens in S equal parts, one after another; a constant for gradients.

    Returns:
        (..., F) and (..., r).
    """
    if beyond_first_gradients():
        return gelu_with_slope_reference(a, factor.detach())
    flat = a.reshape(-1, a.shape[-1])
    y, z = applied(_GeluWithSlope, flat, factor.detach())
    return y.view_as(a), z.view(*a.shape[:-1], factor.shape[-1])


@eagerly
@in_full_precision
@torch.no_grad()
def slope_product(a: Tensor, factor: Tensor) -> Tensor:
    """phi'(a) M without gradients; (..., F) -> (..., r), M as in ``gelu_with_slope``."""
    if transformed():
        return gelu_with_slope_reference(a, factor)[1]
    flat = a.reshape(-1, a.shape[-1])
    fused = _fused(flat, factor)
    if fused is not None:
        product: Tensor = fused.slope_product(flat, factor)
        return product.view(*a.shape[:-1], factor.shape[-1])
    z = a.new_empty(flat.shape[0], factor.shape[-1])
    rows = _rows(flat)
    slope, one = torch.empty_like(flat[:rows]), torch.ones_like(flat[:rows])
    for right, points, out in _blocks(factor, rows, flat, z):
        part = slope[: points.shape[0]]
        torch.ops.aten.gelu_backward(one[: points.shape[0]], points, grad_input=part)
        torch.mm(part, right, out=out)
    return z.view(*a.shape[:-1], factor.shape[-1])


class _GeluWithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, factor)
        ctx.fused = _fused(a, factor)
        return (F.gelu(a), slope_product(a, factor)) if ctx.fused is None else ctx.fused.forward(a, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_y: Tensor, g_z: Tensor) -> Any:
        a, factor = ctx.saved_tensors
        if ctx.fused is not None:
            return ctx.fused.backward(a, factor, g_y, g_z), None
        d_a = torch.empty_like(a)
        rows = _rows(a)
        square, curvature, pull = (torch.empty_like(a[:rows]) for _ in range(3))
        for right, points, out, gy, gz in _blocks(factor, rows, a, d_a, g_y, g_z):
            n = points.shape[0]
            sq, curve, back = square[:n], curvature[:n], pull[:n]
            torch.mul(points, points, out=sq)
            torch.mul(sq, -0.5, out=curve).exp_()
            curve.mul_(sq.neg_().add_(2)).mul_(1 / math.sqrt(2 * math.pi))  # phi''
            torch.mm(gz, right.T, out=back)
            torch.ops.aten.gelu_backward(gy.contiguous(), points, grad_input=out)
            out.addcmul_(back, curve)
        return d_a, None


def _fused(a: Tensor, factor: Tensor) -> Any:
    """The module in C or Triton that serves a call, or None."""
    if compiled.serves(a, factor):
        return compiled
    if factor.dtype == a.dtype and dispatch.serves_steps(a):
        return import_module("recbft.kernels.gelu.triton")
    return None


def _rows(a: Tensor) -> int:
    """Tokens per block; all of them where there is no cache to stay in."""
    return max(1, a.shape[0] if a.device.type != "cpu" else min(a.shape[0], BLOCK_ELEMENTS // a.shape[1]))


def _blocks(factor: Tensor, rows: int, *tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of at most ``rows`` tokens of each tensor, after the M that is theirs."""
    factors = factor[None] if factor.dim() == 2 else factor
    parts = (x.reshape(len(factors), -1, x.shape[-1]) for x in tokens)
    for right, *own in zip(factors, *parts, strict=True):
        yield from ((right, *block) for block in zip(*(x.split(rows) for x in own), strict=True))
