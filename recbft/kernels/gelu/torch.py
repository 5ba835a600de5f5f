"""GELU and a product with its slope in blocks of tokens that stay in the cache.

phi'(a), as wide as the widest array of a layer, is never written to memory. Equations are those of ``gelu``.

Shapes: N tokens, F feed-forward width, r columns, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 524_288


def slope_product(a: Tensor, factor: Tensor, values: Tensor | None = None) -> Tensor:
    """``gelu'(a) @ factor``; a (N, F), factor (F, r) or (S, F, r). ``values``, (N, F), is filled with gelu(a)."""
    if values is not None:
        torch.ops.aten.gelu.out(a, out=values)
    z = a.new_empty(a.shape[0], factor.shape[-1])
    rows = _rows(a)
    slope, one = torch.empty_like(a[:rows]), torch.ones_like(a[:rows])
    for right, points, out in _blocks(factor, rows, a, z):
        part = slope[: points.shape[0]]
        torch.ops.aten.gelu_backward(one[: points.shape[0]], points, grad_input=part)
        torch.mm(part, right, out=out)
    return z


def backward(a: Tensor, factor: Tensor, g_y: Tensor, g_z: Tensor) -> Tensor:
    """The gradient of a, (a) of ``gelu``."""
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
    return d_a


def _rows(a: Tensor) -> int:
    """Tokens per block; all of them where there is no cache to stay in."""
    return max(1, a.shape[0] if a.device.type != "cpu" else min(a.shape[0], BLOCK_ELEMENTS // a.shape[1]))


def _blocks(factor: Tensor, rows: int, *tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of at most ``rows`` tokens of each tensor, after the M that is theirs."""
    factors = factor[None] if factor.dim() == 2 else factor
    parts = (x.reshape(len(factors), -1, x.shape[-1]) for x in tokens)
    for right, *own in zip(factors, *parts, strict=True):
        yield from ((right, *block) for block in zip(*(x.split(rows) for x in own), strict=True))
