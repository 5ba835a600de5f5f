"""The biases on the scores of SiLU attention, added up pair by pair.

Shapes: B rows, H heads, T tokens, L lags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recbft.autograd.eager import eagerly
from recbft.autograd.transforms import applied, beyond_first_gradients, once_differentiable
from recbft.core.belief import SequenceContext


def total_bias(
    q: Tensor,
    context: SequenceContext,
    *,
    bias: Tensor | None = None,
    lag_bias: Tensor | None = None,
    log_precision: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor | None:
    """The sum of the biases on the scores, (B or 1, H or 1, T or 1, T); arguments as in ``core.silu_moments``."""
    parts = [] if bias is None else [bias]
    if lag_bias is not None:
        parts.append(look_up(lag_bias, context.lag)[:, None])
    if log_precision is not None:
        parts.append(log_precision[:, None, None, :])
    if log_decay is not None:
        parts.append((context.lag.to(q.dtype) * log_decay)[:, None])
    if not parts:
        return None
    total = sum(parts[1:], start=parts[0])
    # Two or three dimensions stand for all rows, or for all rows and heads.
    return total.reshape((1,) * (4 - total.dim()) + total.shape)


@eagerly
def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Elements of a table, (N,), at an index of any shape; an index out of range gives element N - 1 or 0."""
    index = index.clamp(0, table.shape[0] - 1)
    if beyond_first_gradients():
        return table[index]
    looked_up: Tensor = applied(_LookUp, table, index)
    return looked_up


class _LookUp(torch.autograd.Function):
    """Indexing whose gradient is one sum per element: autograd's own sorts or locks over every pair of tokens."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = table.shape[0]
        return table.take(index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size).index_add_(0, index.flatten(), grad.flatten()), None
