"""Layer normalisation, for one model or for several seeds with weights of their own.

    y = (x - m) s * w + b        m = sum_d x_d / D    s = 1 / sqrt(sum_d (x_d - m)^2 / D + eps)             (a)

On a GPU it is one launch forward and two backward: PyTorch sums the gradients of w and b over tokens in a kernel of its
own, which at a width of 64 takes three times as long as it takes to read them.

Shapes: S seeds, N tokens of each, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, compiler, float32, nn

from recbft.autograd.boundaries import eagerly
from recbft.kernels.dispatch import Path, choose, late

MOST_COLUMNS = 4096  # that a program holds


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last axis, with weight and bias."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if x.device.type == "cpu" or compiler.is_compiling():  # PyTorch's own serves both
            return super().forward(x)
        one = self.weight[None], self.bias[None]
        norm = choose("auto", ONE, x, weight=one[0], bias=one[1])
        y: Tensor = norm(x.reshape(1, -1, x.shape[-1]), *one, self.eps)
        return y.view(x.shape)


@eagerly
def layer_norms(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, impl: str = "auto") -> Tensor:
    """Layer norm with weights of each seed: x (S, N, D), weight and bias (S, D)."""
    y: Tensor = choose(impl, SEVERAL, x, weight=weight, bias=bias)(x, weight, bias, eps)
    return y


def layer_norms_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The plain form of ``layer_norms``."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * weight[:, None] + bias[:, None]


def _of_one(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight[0], bias[0], eps)


def _decline(x: Tensor, *, weight: Tensor, bias: Tensor) -> str | None:
    if {x.dtype, weight.dtype, bias.dtype} != {float32}:
        return f"needs float32, got {x.dtype}"
    if x.shape[-1] > MOST_COLUMNS or x.numel() == 0:
        return f"needs 1 to {MOST_COLUMNS} columns and at least one row, got {tuple(x.shape)}"
    return None


_TRITON = Path(late("layer_norm", "layer_norm"), "cuda", _decline)
ONE = {"triton": _TRITON, "reference": Path(lambda: _of_one, takes_halves=True)}
SEVERAL = {"triton": _TRITON, "reference": Path(lambda: layer_norms_ref)}
