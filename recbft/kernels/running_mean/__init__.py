"""The mean over a batch's real tokens, and the running mean that it moves.

    v = sum_n x_n / max(N, 1)  over the N real tokens                                            (1)
    m <- m + w (v - m),  w = 1 in the first update, 1 - momentum after it                        (2)

A GPU launches ten small kernels for it; Triton does with two.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from recbft.core.belief import SequenceContext
from recbft.kernels import dispatch
from recbft.kernels.running_mean.reference import MOMENTUM, mean_over_tokens, remember


def remember_tokens(
    mean: Tensor, values: Tensor, context: SequenceContext, updates: Tensor, *, every: int = 1
) -> Tensor:
    """Move a running mean, in place, by what a batch's real tokens have; not under torch.func, which sees no memory.

    Args:
        mean: m, (D,).
        values: x, (B, T, D), without gradient; of every so many rows of the context alone where ``every`` is not 1.
        context: which tokens are real.
        updates: how many updates there were before, an integer.
        every: rows of the context for one row of the values.

    Returns:
        The mean as it stood before.
    """
    segment = context.segment
    alike = mean.dtype == torch.float32 and mean.device == segment.device == values.device
    if alike and mean.is_contiguous() and dispatch.fuses_steps(values):
        before: Tensor = import_module("recbft.kernels.running_mean.triton").remember_tokens(
            mean, values, segment[::every], updates, 1 - MOMENTUM
        )
        return before
    before = mean.clone()
    remember(mean, mean_over_tokens(values, context.valid[::every]), updates)
    return before


__all__ = ["mean_over_tokens", "remember", "remember_tokens"]
