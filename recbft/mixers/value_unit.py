"""Values in units of their own spread, so that precision does not depend on the scale of a value map.

    u_j = v_j / d,  d^2 = running mean of S                                                       (2.15)

With u in the place of v an estimator sees a residual variance of about 1, and its prior variance is 1: precision is
told in units of 1 / d^2, and values ten times as large change no gain. The innovation is told in the units of v again.
The mean is over the real training positions, heads and coordinates of earlier batches (momentum 0.99), 1 before the
first; S is what the estimator reads: (2.6), U of (2.12), or the variance under squared weights for (2.10).

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recbft.autograd.boundaries import in_full_precision
from recbft.autograd.transforms import transformed
from recbft.core import SequenceContext, mean_over_tokens, remember

LEAST = 1e-12  # of d^2, where no token reads two values that differ


class ValueUnit(nn.Module):
    """d of one layer, and what it is learned from."""

    variance: Tensor
    updates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, v: Tensor) -> Tensor:
        """d as it stood before this batch, in the type of the values."""
        return unit_of(self.variance).to(v.dtype)

    @property
    def learns(self) -> bool:
        """Whether this pass moves the mean; under torch.func none does."""
        return self.training and not transformed()

    @in_full_precision
    def learn(self, spread: Tensor, unit: Tensor, context: SequenceContext) -> None:
        """Move the mean by a batch, of which ``spread`` is S of u, (B, H, T, K)."""
        if self.learns:
            value = mean_over_tokens(mean_of_each(spread, unit)[..., None], context.valid)[0]
            remember(self.variance, value.to(self.variance.dtype), self.updates)
            self.updates += 1


def unit_of(variance: Tensor) -> Tensor:
    """d from d^2."""
    return variance.clamp(min=LEAST).sqrt()


def mean_of_each(spread: Tensor, unit: Tensor) -> Tensor:
    """S of v over the heads and coordinates of each token, (B, T), from that of u."""
    wide = torch.promote_types(spread.dtype, torch.float32)
    return (spread.detach().to(wide).mean(dim=-1, keepdim=True) * unit.to(wide).square())[..., 0].mean(dim=1)
