"""Linear map and layer norm seed by seed: each seed's part stays in the cache, and no weight is spread over tokens.

    y = x W' + b        dx = g W        dW = g' x        db = sum_n g_n                          (1)

Products go to oneDNN where PyTorch has it: on AMD processors, where MKL keeps to AVX2, it is twice as fast, elsewhere
as fast. Of dW and its transpose it makes the one with fewer rows, which it does in less time.

Shapes: S seeds, N tokens of each, I inputs, O outputs, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as the reference."""
    y: Tensor = _Linear.apply(x, weight, bias)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The same as the reference."""
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return y


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` without gradients; x (N, I), weight (O, I), of any strides."""
    if _ONEDNN is not None and x.dtype == torch.float32 and x.device.type == "cpu":
        y: Tensor = _ONEDNN(x, weight, bias, "none", [], "")
        return y
    return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)


def _find_onednn() -> Any:
    """PyTorch's entry to oneDNN's linear map; None in builds without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        found = torch.ops.mkldnn._linear_pointwise.default
        one = torch.ones(1, 1)
        return found if float(found(one, one, None, "none", [], "")) == 1.0 else None
    except (AttributeError, RuntimeError):
        return None


_ONEDNN = _find_onednn()


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
