"""Linear maps with weights of their own for every seed.

    y = x W' + b        dx = g W        dW = g' x        db = sum_n g_n                                      (a)

On a CPU each seed's products are taken by themselves, by the fastest library at hand (``product``). Of dW and its
transpose the one with fewer rows is made, which takes less time. The norms of several seeds are in ``layer_norm``.

Shapes: S seeds, N tokens of each, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.autograd.transforms import once_differentiable
from recbft.kernels.dispatch import Path, choose
from recbft.kernels.product import product


@eagerly
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, impl: str = "auto") -> Tensor:
    """``x[s] @ weight[s].T + bias[s]`` for every seed s.

    Args:
        x: (S, N, I).
        weight, bias: (S, O, I), and (S, O) or None.
        impl: ``auto`` takes ``torch`` on a CPU and ``reference`` elsewhere; either can be forced.

    Returns:
        (S, N, O).
    """
    y: Tensor = choose(impl, LINEAR, x)(x, weight, bias)
    return y


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The plain form of ``linear``, one batched product."""
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias[:, None], x, weight.mT)


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


LINEAR = {"torch": Path(lambda: _Linear.apply, "cpu"), "reference": Path(lambda: linear_ref)}
