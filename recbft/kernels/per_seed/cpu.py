"""Linear map and layer norm seed by seed: each seed's part stays in the cache, and no weight is spread over tokens.

    y = x W' + b        dx = g W        dW = g' x        db = sum_n g_n                          (1)

Of dW and its transpose the one with fewer rows is made, which takes less time.

Shapes: S seeds, N tokens of each, I inputs, O outputs, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recbft.autograd.transforms import once_differentiable
from recbft.kernels.product import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as the reference."""
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same as the reference."""
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        biases = [None] * len(x) if bias is None else list(bias)
        return torch.stack([product(*one) for one in zip(x, weight, biases, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        d_x = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = torch.stack([product(g, w.T) for g, w in zip(grad, weight, strict=True)])
        d_weight = torch.stack([_outer(g, points) for g, points in zip(grad, x, strict=True)])
        if ctx.needs_input_grad[2]:
            d_bias = grad.sum(dim=1)
        return d_x, d_weight, d_bias


def _outer(g: Tensor, x: Tensor) -> Tensor:
    """dW of one seed, (O, I)."""
    return product(g.T, x.T) if g.shape[1] <= x.shape[1] else product(x.T, g.T).T


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        normed = [
            torch.native_layer_norm(part, part.shape[-1:], w, b, eps)
            for part, w, b in zip(x, weight, bias, strict=True)
        ]
        y, mean, scale = (torch.stack(parts) for parts in zip(*normed, strict=True))
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        parts = [
            torch.ops.aten.native_layer_norm_backward(g, one, one.shape[-1:], m, s, w, b, [True, True, True])
            for g, one, m, s, w, b in zip(grad, x, mean, scale, weight, bias, strict=True)
        ]
        d_x, d_weight, d_bias = (torch.stack(found) for found in zip(*parts, strict=True))
        return d_x, d_weight, d_bias, None
