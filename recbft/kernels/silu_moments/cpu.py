"""SiLU moments with an analytic backward: scores are kept, weights are made again from them.

With g the gradient of e, and g1, g2, h1, h2 those of sum a, sum a^2, sum a^2 v and sum a^2 v^2:

    dA = g v' + g1 + 2 a * (g2 + h1 v' + h2 (v^2)')        ds = silu'(s) * dA / N                     (1)
    dq = ds k / sqrt(K)    dk = ds' q / sqrt(K)    dv = a' g + (a^2)' h1 + 2 v * ((a^2)' h2)          (2)

Shapes: B rows, H heads, T tokens, K head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from recbft.core.belief import SequenceContext
from recbft.core.statistics import SiluMoments


def silu_moments(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, length: int, bias: Tensor | None
) -> SiluMoments:
    """The same as the reference."""
    keep = context.allowed[:, None].to(q.dtype)
    return SiluMoments(*_SiluMoments.apply(q, k, v, bias, keep, length))


class _SiluMoments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keep: Tensor, length: int
    ) -> tuple[Tensor, ...]:
        scores = torch.matmul(q * (1 / math.sqrt(q.shape[-1])), k.transpose(-2, -1))
        if bias is not None:
            scores += bias
        weights = F.silu(scores).mul_(keep).mul_(1 / length)
        squares = weights.square()
        ctx.save_for_backward(q, k, v, scores, weights, keep)
        ctx.length, ctx.bias_shape = length, None if bias is None else bias.shape
        return (
            torch.matmul(weights, v),
            weights.sum(dim=-1),
            squares.sum(dim=-1),
            torch.matmul(squares, v),
            torch.matmul(squares, v.square()),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g1: Tensor, g2: Tensor, h1: Tensor, h2: Tensor) -> Any:
        q, k, v, scores, weights, keep = ctx.saved_tensors
        second = v.square()
        d_weights = torch.matmul(h1, v.transpose(-2, -1))
        d_weights += torch.matmul(h2, second.transpose(-2, -1))
        d_weights.add_(g2[..., None]).mul_(weights).mul_(2).add_(g1[..., None])
        d_weights += torch.matmul(g, v.transpose(-2, -1))
        d_scores = torch.ops.aten.silu_backward(d_weights, scores).mul_(keep).mul_(1 / ctx.length)  # (1)
        squares = weights.square().transpose(-2, -1)
        d_v = torch.matmul(squares, h2).mul_(v).mul_(2)
        d_v += torch.matmul(squares, h1)
        d_v += torch.matmul(weights.transpose(-2, -1), g)
        scale = 1 / math.sqrt(q.shape[-1])
        d_q = torch.matmul(d_scores, k).mul_(scale)
        d_k = torch.matmul(d_scores.transpose(-2, -1), q).mul_(scale)
        d_bias = d_scores.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[3] else None
        return d_q, d_k, d_v, d_bias, None, None
