"""Layer normalisation: PyTorch's, or one launch forward and two backward on a GPU.

    y = (x - m) s * w + b        m = sum_d x_d / D    s = 1 / sqrt(sum_d (x_d - m)^2 / D + eps)             (1)

PyTorch's backward on a GPU sums the gradients of w and b over tokens in a kernel of its own, which at a width of 64
takes three times as long as it takes to read them.

Shapes: S seeds, N tokens, D width; the tokens' axes come first.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor, nn

from recbft.kernels import dispatch

MOST_COLUMNS = 4096  # that a program holds


def fused(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor | None:
    """Equation (1) in one launch, where these are served: x (S, N, D), weight and bias (S, D)."""
    served = x.numel() > 0 and weight.dtype == bias.dtype == x.dtype and x.shape[-1] <= MOST_COLUMNS
    if not (served and dispatch.fuses_steps(x)):
        return None
    found: Tensor = import_module("recbft.kernels.layer_norm.triton").layer_norm(x, weight, bias, eps)
    return found


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last axis, with weight and bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if not dispatch.fuses_steps(x):
            return super().forward(x)
        found = fused(x.reshape(1, -1, x.shape[-1]), self.weight[None], self.bias[None], self.eps)
        return super().forward(x) if found is None else found.view(x.shape)
