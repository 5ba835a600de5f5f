"""SiLU moments with an analytic backward: scores are kept, weights are made again from them.

With g the gradient of e, and g1, g2, h1, h2 those of sum a, sum a^2, sum a^2 v and sum a^2 v^2:

    dA = g v' + g1 + 2 a * (g2 + h1 v' + h2 (v^2)')        ds = silu'(s) * dA / N                     (a)
    dq = ds k / sqrt(K)    dk = ds' q / sqrt(K)    dv = a' g + (a^2)' h1 + 2 v * ((a^2)' h2)          (b)

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recbft.autograd.transforms import applied, once_differentiable
from recbft.core.belief import SequenceContext, SiluMoments
from recbft.core.silu import total_bias


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> SiluMoments:
    """The same as the reference."""
    return SiluMoments(*applied(_Silu, q, k, v, total_bias(q, context, **biases), _shares(context, q, length), False))


def silu_mean(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, **biases: Tensor | None
) -> Tensor:
    """The mean alone, by the same arithmetic."""
    mean: Tensor = applied(_Silu, q, k, v, total_bias(q, context, **biases), _shares(context, q, length), True)
    return mean


def _shares(context: SequenceContext, q: Tensor, length: int) -> Tensor:
    """1 / N where a token may read and 0 elsewhere, (B, 1, T, T)."""
    return context.allowed[:, None].to(q.dtype).mul_(1 / length)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, shares: Tensor, mean_alone: bool
    ) -> Any:
        scores = torch.matmul(q * (1 / math.sqrt(q.shape[-1])), k.mT)
        if bias is not None:
            scores.add_(bias)
        weights = F.silu(scores).mul_(shares)
        ctx.save_for_backward(q, k, v, scores, weights, shares)
        ctx.bias_shape = None if bias is None else bias.shape
        mean = torch.matmul(weights, v)
        if mean_alone:
            return mean
        squares = weights.square()
        sums = weights.sum(dim=-1), squares.sum(dim=-1)
        return mean, *sums, torch.matmul(squares, v), torch.matmul(squares, v.square())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *others: Tensor) -> Any:
        q, k, v, scores, weights, shares = ctx.saved_tensors
        d_weights, d_v = torch.matmul(g, v.mT), torch.matmul(weights.mT, g)
        if others:
            g1, g2, h1, h2 = others
            more = torch.matmul(h1, v.mT)
            more += torch.matmul(h2, v.square().mT)
            d_weights += more.add_(g2[..., None]).mul_(weights).mul_(2).add_(g1[..., None])
            squares = weights.square().mT
            more = torch.matmul(squares, h2).mul_(v).mul_(2)
            more += torch.matmul(squares, h1)
            d_v += more
        d_scores = torch.ops.aten.silu_backward(d_weights, scores).mul_(shares)
        scale = 1 / math.sqrt(q.shape[-1])
        d_q = torch.matmul(d_scores, k).mul_(scale)
        d_k = torch.matmul(d_scores.mT, q).mul_(scale)
        d_bias = d_scores.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[3] else None
        return d_q, d_k, d_v, d_bias, None, None
